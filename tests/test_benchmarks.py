"""The benchmarks measure what they say: every kind of case passes the gate, a wrong mask does not, and results become tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import dmattn
import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KINDS = ("dense", "dma", "sliding", "streaming", "documents", "blocks")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cases
    import measure
    import run

    return cases, measure, run


def small_cases(cases, kind):
    """One case of each sort of a kind, for the CPU; the GPU's peers are not there."""
    sorts = {}
    for case in cases.TABLES["cuda"].cases:
        if case.kind == kind:
            small = dataclasses.replace(case.resized(200), peers=(), dtype="float32", head_dim=16)
            sorts.setdefault((case.scores, case.heads, case.is_causal, case.density), small)
    return list(sorts.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_sort_of_case_passes_the_gate(modules, kind):
    cases, measure, _ = modules
    chosen = small_cases(cases, kind)
    assert chosen
    for case in chosen:
        measure.gate(case, "cpu")
        load = cases.workload(case, "cpu")
        visible = load.visible()
        if visible is not None and kind != "blocks":  # whose pairs are those of whole blocks
            seen = visible.expand(case.batch, -1, -1, -1)
            assert load.pairs == int(seen.sum()) * (case.heads // seen.shape[1])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_gate_refuses_another_mask(modules, kind, monkeypatch):
    cases, measure, _ = modules
    case = small_cases(cases, kind)[-1]
    definition = cases._visible
    monkeypatch.setattr(cases, "_visible", lambda *given: definition(*given).roll(1, -1))
    with pytest.raises(measure.WrongResultError, match="differs from the reference"):
        measure.gate(case, "cpu")


def test_a_peer_that_skips_nothing_is_named(modules):
    _, _, run = modules

    def row(density, seconds):
        return {"kind": "blocks", "density": density, "peer_names": ["flex"], "medians": {"peer_forward": seconds}}

    (line,) = run.scaling([row(1.0, 1.0), row(0.1, 0.99)])
    assert "IT DOES NOT SKIP BLOCKS" in line
    (line,) = run.scaling([row(1.0, 1.0), row(0.1, 0.2)])
    assert "SKIP" not in line


def test_a_quick_run_becomes_json_and_a_table(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--no-memory", "--only", "dma", "--repeats", "1"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/cpu-dma-quick.json")
    result = json.loads(path.read_text())
    assert result["family"] == "auto"
    assert {row["group"] for row in result["rows"]} == {"dma"}
    assert all(row["tflops"]["forward"] > 0 for row in result["rows"])

    path.rename(path.with_name("mine.json"))
    marked = tmp_path / "README.md"
    marked.write_text("<!-- bench:mine -->\n<!-- /bench:mine -->")
    program = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import report; "
        "print(report.rewritten(pathlib.Path(sys.argv[2]).read_text(), pathlib.Path(sys.argv[3])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(BENCHMARKS), str(marked), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for row in result["rows"]:
        assert f"| {row['case']} |" in done.stdout


def test_an_unknown_group_is_an_error():
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--table", "cpu", "--only", "blocks"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected groups of the table cpu, dma, dense, got blocks" in done.stderr


@pytest.mark.gpu
def test_kernel_times_come_from_a_captured_graph(modules):
    cases, measure, _ = modules
    case = dataclasses.replace(cases.TABLES["cuda"].cases[0].resized(300), peers=("dmattn",))
    taken = measure.times(case, cases.workload(case, "cuda"), "cuda", 2)
    assert not taken.not_captured
    assert {name: len(samples) for name, samples in taken.kernels.items()} == dict.fromkeys(taken.calls, 2)


def test_settled_times_come_after_runs_of_the_same_call(modules, monkeypatch):
    _, measure, _ = modules
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = measure.by_turns(runs, "cpu", repeats=2, settle=1e-3)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 2, "b": 2}
    turns = [len(list(same)) for _, same in itertools.groupby(calls)]
    assert turns[:2] == [1, 1]  # the warm-up
    assert len(turns) == 6
    assert min(turns[2:]) >= 2


def test_short_tables_say_what_the_results_say(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    times = {
        "forward": 0.002,
        "backward": 0.5,
        "peer_forward": 0.0172,
        "peer_backward": 0.47,
        "peer2_forward": 9.0,
        "peer2_backward": 9.0,
    }
    row = {
        "case": "a case", "kind": "streaming", "length": 65536, "window": 1024, "sink": 64, "heads": 16, "head_dim": 128, "is_causal": True,
        "dtype": "bfloat16", "medians": times, "kernel_medians": {**times, "forward": 0.001}, "peer_names": ["flex_attention, compiled", "x"],
    }  # fmt: skip
    result = {"machine": {"gpu": "A GPU"}, "torch": "2.11", "date": "2026-11-21T15:13:06", "rows": [row]}
    (tmp_path / "all.json").write_text(json.dumps(result))
    monkeypatch.setattr(report, "SHORT_TABLES", {"mine": {"all.json": ("a case",)}})
    lines = report.rewritten("<!-- bench:mine -->\n<!-- /bench:mine -->", tmp_path).splitlines()
    assert (
        lines[3]
        == "| 65,536 tokens, 64 sinks and 1,024 local keys | FlexAttention | 8.6x, 2.00 ms | 17x | 0.94x, 500 ms | 0.94x |"
    )
    assert lines[5] == "A GPU, bfloat16, 16 heads of 128, torch 2.11, 2026-11-21."


def test_a_quick_run_of_serving_becomes_json_and_a_table(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "serve.py"),
        "--device",
        "cpu",
        "--quick",
        "--repeats",
        "1",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/serve-quick.json")
    result = json.loads(path.read_text())
    assert [row["kind"] for row in result["rows"]] == ["step", "step", "full", "prefill"]
    assert all(row["us"] > 0 for row in result["rows"])
    assert 0 <= result["others"] <= 1

    path.rename(path.with_name("serve.json"))
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:serve -->\n<!-- /bench:serve -->")
    program = "import sys; sys.path.insert(0, sys.argv[1]); import report; from pathlib import Path; "
    program += "print(report.rewritten(Path(sys.argv[2]).read_text(), Path(sys.argv[3])))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(BENCHMARKS), str(page), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "contexts 4,096 and 8,192, all keys 8,192" in done.stdout
    assert "512 tokens in chunks of 256 take" in done.stdout
    assert done.stdout.count("CPU threads | 1 |") == 1


def test_packs_are_timed_and_a_wrong_one_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import varlen

    rates = varlen.dense_rate("cpu", torch.float32, 64, 1)
    for case in (varlen.Case(4, 2), varlen.Case(4, 2, queries=0.5), varlen.Case(4, 2, window=5)):
        row = varlen.row_of(case, 20, "cpu", 1, rates)
        assert row["forward_over_proportional"] > 0
        assert row["backward_ms"] > 0
    assert varlen.visible_pairs(torch.tensor([2, 3]), torch.tensor([4, 3]), 0) == 3 + 4 + 1 + 2 + 3
    assert varlen.visible_pairs(torch.tensor([2, 3]), torch.tensor([4, 3]), 2) == 2 + 2 + 1 + 2 + 2
    ours = dmattn.varlen_attention
    monkeypatch.setattr(dmattn, "varlen_attention", lambda *given, **options: ours(*given, **{**options, "is_causal": False}))
    with pytest.raises(AssertionError):
        varlen.row_of(varlen.Case(4, 2), 20, "cpu", 1, rates)


def test_doge_models_are_timed_and_wrong_logits_are_refused(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import doge

    sizes = [
        "--width",
        "256",
        "--vocabulary",
        "512",
        "--window",
        "32",
        "--lengths",
        "64",
        "128",
        "--layers",
        "1",
        "--repeats",
        "1",
    ]
    path = tmp_path / "doge.json"
    monkeypatch.setattr(sys, "argv", ["doge.py", "--device", "cpu", *sizes, "--output", str(path)])
    doge.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["length"]) for row in rows] == [("dmattn", 64), ("dmattn", 128), ("eager", 64), ("eager", 128)]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows)

    right = doge.doge
    monkeypatch.setattr(
        doge, "doge", lambda name, layers, window, *given: right(name, layers, window >> (name == "dmattn"), *given)
    )
    with pytest.raises(SystemExit, match="refused: dmattn's logits"):
        doge.main()
