"""Results of benchmarks become files, comparisons, tables and plots; files that are no results are refused."""

from __future__ import annotations

import copy
import csv
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from benchmark_calls import BENCHMARKS, SMALL, assert_refused, script
from dmattn_bench import (
    __main__,
    cited,
    compare,
    earlier_report,
    measure,
    page_tables,
    plots,
    records,
    report,
    serve,
    suite,
    tables,
)

# Of benchmarks/sweep.py.
SWEEP = [
    {"length": length, "heads": heads, "window": int(length * share), "share": share, "forward": 2.0, "backward": 2.0,
     "dense_forward": 4.0 * share, "dense_backward": 3.0 * (1 if share < 1 else 4)}
    for length, heads, share in ((256, 1, 0.25), (256, 1, 1.0), (1024, 16, 0.25))
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("short_warm_ups")

# Files ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of a few workloads: its folder, JSON and what it printed."""
    folder = tmp_path_factory.mktemp("results")
    names = ["dynamic-random", "selection", "vision-1024"]
    assert __main__.main(["run", *names, *SMALL, "--output", str(folder), "--name", "mine"]) == 0
    (path,) = folder.glob("*/mine.json")
    return path


def test_statistics_are_those_of_torch():
    samples = [3.0, 1.0, 2.0, 10.0, 4.5]
    given = torch.tensor(samples, dtype=torch.float64)
    found = records.summary(samples)
    expected = [given.mean(), given.std(), *(given.quantile(part) for part in (0.5, 0.95, 0.99))]
    torch.testing.assert_close([found[name] for name in ("mean", "std", "p50", "p95", "p99")], [float(x) for x in expected])
    assert records.summary([2.0])["std"] == 0


def test_a_run_becomes_json_and_csv(ran):
    result = json.loads(ran.read_text())
    assert result["complete"]
    assert result["ceiling"]["float32"]["tflops"] > 0
    assert {row["workload"] for row in result["rows"]} == {"dynamic-random", "selection", "vision-1024"}
    row = next(row for row in result["rows"] if row["workload"] == "dynamic-random")
    assert row["peer_names"] == ["eager torch, with a mask", "F.scaled_dot_product_attention"]
    assert row["percent_of_ceiling"]["forward"] == 100 * row["tflops"]["forward"] / result["ceiling"]["float32"]["tflops"]
    assert row["tokens_per_second"]["forward"] == 96 / row["medians"]["forward"]
    with ran.with_suffix(".csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(records.measurements(result))
    assert {"dmattn", "torch.sort of the scores", "eager torch, with a mask"} <= {line["who"] for line in lines}
    assert all(float(line["p50"]) <= float(line["p99"]) for line in lines)


def test_rows_of_scripts_are_measurements_too():
    sweep = {
        "length": 256,
        "heads": 4,
        "window": 16,
        "forward": 1.0,
        "backward": 2.0,
        "dense_forward": 3.0,
        "dense_backward": 4.0,
    }
    pack = {"case": "4 documents", "forward_ms": 5.0, "backward_ms": 6.0, "torch_forward_ms": 7.0}
    ranks = {"length": 64, "ranks": 2, "ours": {"forward_ms": 8.0}, "torch_context_parallel_cudnn": {"error": "none here"}}
    found = {each.key[2:]: each.samples[0] for each in records.measurements({"rows": [sweep, pack, ranks]})}
    assert found == {
        ("256 tokens, 4 heads, window 16", "", "dmattn", "forward kernels"): 1.0,
        ("256 tokens, 4 heads, window 16", "", "dmattn", "backward kernels"): 2.0,
        ("256 tokens, 4 heads, window 16", "", "dmattn, dense", "forward kernels"): 3.0,
        ("256 tokens, 4 heads, window 16", "", "dmattn, dense", "backward kernels"): 4.0,
        ("4 documents", "", "dmattn", "forward"): 0.005,
        ("4 documents", "", "dmattn", "backward"): 0.006,
        ("4 documents", "", "torch", "forward"): 0.007,
        ("context parallel, 64 tokens on 2 ranks", "", "dmattn", "forward"): 0.008,
    }


ONE = '{"rows": [{"case": "c", "samples": {"forward": [%s]}}]}'
BAD_FILES = {
    "compare one.json one.json --least nan": "argument --least: expected a finite number >= 0, got nan",
    "compare one.json nan.json": "nan.json: c: expected samples of forward, all numbers > 0, got [nan]",
    "compare no-samples.json one.json": "no-samples.json: c: expected samples of forward, all numbers > 0, got []",
    "compare machine.json one.json": "machine.json: expected an object as machine, got 'x'",
    "compare one.json one.json one.json": "compare: expected one result or two, got 3",
    "compare one.json": "compare: expected benchmarks/results/one.json, the committed result that one.json is compared with, got none",
    "report zero.json": "zero.json: expected a result of",
    "report one.json --output text.txt": "--output: expected a folder, got text.txt",
    "report one.json --check": "--check: expected no results beside it",
    "report --output somewhere": "--output: expected results beside it",
    "compare not-there.json not-there.json": "not-there.json: cannot be read",
    "compare text.txt text.txt": "text.txt: expected JSON",
    "compare list.json list.json": "list.json: expected a result with rows",
    "compare rows.json rows.json": "rows.json: expected a result",
    "compare empty.json empty.json": "no measurement in common",
    "report runs.jsonl": "runs.jsonl: expected training runs",
    "report text.txt": "text.txt: expected JSON",
    "report nested.json": "nested.json: expected JSON",
    "report empty.json": "empty.json: expected a result with times, got none that a report could show",
    "report null.jsonl": "null.jsonl: expected training runs: in run 1 an object, got None",
    "report none.jsonl": "none.jsonl: cannot be read (No such file or directory)",
}


@pytest.mark.parametrize("call", BAD_FILES)
def test_bad_files_are_refused_in_one_sentence(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("text.txt", "no JSON"), ("list.json", "[1]"), ("rows.json", '{"rows": [{"samples": {"forward": [1]}}]}'),
                       ("empty.json", '{"rows": []}'), ("nested.json", "[" * 10**5), ("null.jsonl", "null"), ("runs.jsonl", '{"a": 1}'),
                       ("zero.json", '{"rows": [{"case": "c", "us": 0, "batch": 1}]}'),
                       ("one.json", ONE % "1"), ("nan.json", ONE % "NaN"), ("no-samples.json", ONE % ""),
                       ("machine.json", (ONE % "1").replace('{"rows"', '{"machine": "x", "rows"'))):  # fmt: skip
        Path(name).write_text(text)
    assert_refused(call, BAD_FILES[call], capsys)


MISSING = object()
BAD_ROWS = {  # changes of a row that was measured, and what is said
    "kind-missing": ({"kind": None}, "in row 1 a word as kind, got None"),
    "length": ({"length": "long"}, "an integer > 0 as length, got 'long'"),
    "batch": ({"batch": 0}, "an integer > 0 as batch, got 0"),
    "heads": ({"heads": True}, "an integer > 0 as heads, got True"),
    "head_dim": ({"head_dim": [8]}, "an integer > 0 as head_dim, got [8]"),
    "dtype": ({"dtype": 3}, "a word as dtype, got 3"),
    "tflops": ({"tflops": {"forward": "fast"}}, "an object of numbers as tflops, got {'forward': 'fast'}"),
    "kernel_tflops": ({"kernel_tflops": None}, "an object of numbers as kernel_tflops, got None"),
    "kernel_medians": ({"kernel_medians": []}, "an object of numbers > 0 as kernel_medians, got []"),
    "pairs": ({"pairs": "all"}, "an integer >= 0 as pairs, got 'all'"),
    "peak_bytes": ({"peak_bytes": {"forward": None}}, "an object of numbers as peak_bytes, got {'forward': None}"),
    "true": ({"samples": {"forward": [True]}}, "expected samples of forward, all numbers > 0, got [True]"),
    **{
        f"no-{each}": ({each: MISSING}, f" as {each}, got none")
        for each in ("length", "dtype", "kernel_medians", "pairs", "is_causal")
    },
    "huge": ({"samples": {"forward": [10**400]}}, "expected samples of forward, all numbers > 0, got [1000"),
}
BAD_HEADERS = {
    "ceiling": ({"float32": 3}, "as ceiling, got {'float32': 3}"),
    "machine": ({"gpu": ["x"]}, "a line of text as machine.gpu, got ['x']"),
    "clocks": ({"after": "x"}, "an object of texts as clocks.after, got 'x'"),
}


@pytest.mark.parametrize("name", [*BAD_ROWS, *BAD_HEADERS])
def test_results_of_a_wrong_form_are_refused_in_one_sentence(name, ran, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = json.loads(ran.read_text())
    if name in BAD_ROWS:
        row = result["rows"][0] | BAD_ROWS[name][0]
        result["rows"][0] = {key: value for key, value in row.items() if value is not MISSING}
    else:
        result[name] = BAD_HEADERS[name][0]
    Path("bad.json").write_text(json.dumps(result))
    for call in ("report bad.json --output page", "compare bad.json bad.json"):
        assert_refused(call, "bad.json: ", capsys)
        __main__.main(call.split())
        assert (BAD_ROWS | BAD_HEADERS)[name][1] in capsys.readouterr().err


BAD_TRAINING = {
    "settings": (None, "an object as settings, got None"),
    "curve": ("x", "held_accuracy as curve, got 'x'"),
    "tokens_per_second": (None, "a number > 0 as tokens_per_second, got None"),
    "settings.task": (None, "a word as settings.task, got none"),
    "complete": (False, "expected training runs that are complete, got none"),
}


@pytest.mark.parametrize("name", BAD_TRAINING)
def test_training_runs_of_a_wrong_form_are_refused_in_one_sentence(name, tmp_path, monkeypatch, capsys):
    run = json.loads((BENCHMARKS / "results" / report.LEARNED[0]).read_text().splitlines()[0])
    value, sentence = BAD_TRAINING[name]
    if "." in name:
        del run["settings"]["task"]
    else:
        run[name] = value
    monkeypatch.chdir(tmp_path)
    Path("runs.jsonl").write_text(json.dumps(run))
    assert_refused("report runs.jsonl --output page", sentence, capsys)


def test_committed_results_are_read_or_refused_with_a_sentence():
    other = {"bitwise_training", "builds", "deepseek", "doge", "fuzz", "fuzz_cpu", "suite", "training_paths", "vllm"}
    for path in sorted((BENCHMARKS / "results").glob("*/*.json")):
        if path.stem in other:
            with pytest.raises(records.BadResultError, match=r"expected a result") as refused:
                records.read(path)
            assert "Error" not in str(refused.value)
        else:
            records.read(path)


# Comparisons ----------------------------------------------------------------------------------------------------------------------


def test_what_became_slower_is_found(ran, tmp_path, capsys):
    old = json.loads(ran.read_text())
    for row in old["rows"]:
        for name, samples in row["samples"].items():
            row["samples"][name] = [1.0, 1.01, 0.99, 1.0] if len(samples) > 0 else samples
    new = copy.deepcopy(old)
    (tmp_path / "old.json").write_text(json.dumps(old))
    (tmp_path / "new.json").write_text(json.dumps(new))
    both = [str(tmp_path / name) for name in ("old.json", "new.json")]
    assert __main__.main(["compare", *both]) == 0
    row = new["rows"][0]
    row["samples"]["forward"] = [1.2, 1.21, 1.19, 1.2]
    row["samples"]["backward"] = [1.2, 0.2, 2.2, 1.2]  # noise
    row["samples"]["peer_forward"] = [2.0, 2.0, 2.0]
    new["rows"][1]["samples"]["forward"] = [0.5, 0.5, 0.5]
    (tmp_path / "new.json").write_text(json.dumps(new))
    capsys.readouterr()
    assert __main__.main(["compare", *both]) == 1
    said = capsys.readouterr().out
    assert "1 slower beyond noise:\n" in said
    assert f"  {row['case']}: dmattn, forward: 1000 ms -> 1200 ms (+20.0%" in said
    assert "1 faster beyond noise:\n" in said
    assert __main__.main(["compare", *both, "--least", "0.5"]) == 0
    with pytest.raises(records.BadResultError, match="no measurement in common"):
        compare.compared(old, {"rows": [{**row, "heads": 3} for row in old["rows"]]}, 0.05)
    assert "2 slower" in compare.text(old, new, 0.05, with_peers=True)[0]


def test_one_result_alone_is_compared_with_the_committed_one(tmp_path, monkeypatch, capsys):
    """That of the same machine and name, in the checkout; elsewhere there is nothing to compare with."""
    for folder in ("benchmarks/results/a-machine", "python/dmattn", "times"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "python/dmattn/_version.py").touch()
    monkeypatch.chdir(tmp_path)

    def written(place, seconds, machine="a-machine"):
        row = {"case": "c", "samples": {"forward": [seconds, seconds, seconds]}}
        Path(place).write_text(json.dumps({"machine": {"name": machine}, "rows": [row]}))
        return place

    written("benchmarks/results/a-machine/cuda.json", 1.0)
    assert __main__.main(["compare", written("times/cuda.json", 1.04)]) == 0
    assert __main__.main(["compare", written("times/cuda.json", 1.2)]) == 1
    assert "c: dmattn, forward: 1000 ms -> 1200 ms (+20.0%" in capsys.readouterr().out
    assert __main__.main(["compare", "times/cuda.json", "--least", "0.3"]) == 0
    expected = "compare: expected benchmarks/results/{}/{}, the committed result that {} is compared with, got none"
    assert_refused(f"compare {written('times/cpu.json', 1.0)}", expected.format("a-machine", "cpu.json", "cpu.json"), capsys)
    assert_refused(f"compare {written('times/cuda.json', 1.0, 'b')}", expected.format("b", "cuda.json", "cuda.json"), capsys)
    monkeypatch.setattr(__main__, "checkout", lambda: None)
    assert_refused("compare times/cuda.json", "one alone is compared with a committed one, which needs a checkout", capsys)


def test_too_few_samples_give_no_verdict():
    def result(*samples):
        return {"rows": [{"case": "c", "samples": {"forward": list(samples)}}]}

    words, has_failed = compare.text(result(1.0, 1.0), result(2.0, 2.0, 2.0), 0.05)
    assert not has_failed
    assert words.startswith("0 slower beyond noise.\n0 faster beyond noise.\n1 with too few samples")
    assert "at least 3 in each result" in words
    assert compare.text(result(1.0, 1.0, 1.0), result(2.0, 2.0, 2.0), 0.05)[1]


def test_two_results_of_one_build_differ_once_in_a_hundred_times():
    quantiles = [compare.t_quantile(*given) for given in ((0.005, 4), (1e-4, 4), (1e-4, 2), (0.025, 500))]
    assert [round(each, 1) for each in quantiles] == [4.6, 13.0, 70.7, 2.0]
    generator = random.Random(0)

    def result(count, cases=10):
        rows = [{"case": str(n), "samples": {"forward": [generator.gauss(1, 0.02) for _ in range(count)]}} for n in range(cases)]
        return {"rows": rows}

    for counts in ((3, 3), (5, 5), (3, 20)):
        alarms = sum(bool(compare.compared(*map(result, counts), least=0.0)[0]) for _ in range(500))
        assert alarms <= 10, counts  # twice what is promised


def test_what_is_missing_is_named_and_fails_unless_it_is_allowed(ran, tmp_path, capsys):
    new = json.loads(ran.read_text())
    gone = new["rows"].pop()
    refused = new["rows"][0]
    for name in ("samples", "medians"):
        del refused[name]
    (tmp_path / "new.json").write_text(json.dumps(new))
    both = [str(ran), str(tmp_path / "new.json"), "--least", "9"]
    assert __main__.main(["compare", *both]) == 1
    said = capsys.readouterr().out
    count = sum(
        each.who == records.OURS for each in records.measurements({"rows": [gone, json.loads(ran.read_text())["rows"][0]]})
    )
    listed = said.split(f"{count} missing in the second result:\n")[1].splitlines()
    assert len(listed) == count
    assert all(any(row["case"] in line for line in listed) for row in (gone, refused))
    assert "0 slower" in said
    assert __main__.main(["compare", *both, "--allow-missing"]) == 0
    assert capsys.readouterr().out == said
    assert __main__.main(["compare", both[1], both[0], *both[2:]]) == 0  # what is new is not missing


# Reports --------------------------------------------------------------------------------------------------------------------------


def test_a_report_has_tables_and_plots(ran, tmp_path):
    pytest.importorskip("matplotlib")
    committed = [BENCHMARKS / "results/nvidia-h200" / name for name in ("cuda.json", "quality.jsonl")]
    steps = [
        {"case": str(n), "kind": "decode", "length": n, "batch": 1, "queries": 1, "page_size": 0, "has_bias": False, "heads": 8,
         "kv_heads": 2, "us": 2.0, "peer_us": {"SDPA": 3.0}} for n in (128, 512, 2048)
    ]  # fmt: skip
    (tmp_path / "decode.json").write_text(json.dumps({"rows": steps}))
    (tmp_path / "sweep.json").write_text(json.dumps({"rows": SWEEP}))
    given = map(str, (ran, *committed, tmp_path / "decode.json", tmp_path / "sweep.json"))
    assert __main__.main(["report", *given, "--output", str(tmp_path / "page")]) == 0
    text = (tmp_path / "page/report.md").read_text()
    expected = {*plots.PLOTS, "models"}
    assert {path.stem for path in (tmp_path / "page").glob("*.svg")} == expected
    assert all(f"![{name}]({name}.svg)" in text for name in expected)
    assert "| 32768, window 1024, D=128 | cuDNN | forward |" in text
    assert [tables.number(value) for value in (None, 12345.6, 12.345, 0.0123456)] == ["-", "12,346", "12.3", "0.0123"]


def test_generation_becomes_a_table(tmp_path):
    rows = serve.rows(measure.JobOptions("cpu", quick=True, repeats=1))
    assert [row["kind"] for row in rows] == ["step", "step", "full", "prefill"]
    result = {**records.provenance("cpu"), "rows": rows}
    records.write(result, tmp_path / "machine/serve.json")
    text = report.rewritten("<!-- bench:serve -->\n<!-- /bench:serve -->", tmp_path)
    assert "contexts 4,096 and 8,192, all keys 8,192" in text
    assert "512 tokens in chunks of 256 take" in text
    assert text.count("CPU threads | 1 |") == 1


def test_seeds_meet_at_the_same_moments():
    curves = [[(10, 1.0), (20, 3.0), (40, 5.0)], [(15, 2.0), (30, 4.0)]]
    runs = [{"curve": [{"step": x, "held_bits": y} for x, y in curve]} for curve in curves]
    moments, values = plots.over_seeds(runs, "step", "held_bits")
    assert moments == [15, 20, 30]
    assert values == [[2.0, 2.0], [3.0, 2.0 + 2 / 3], [4.0, 4.0]]


def test_a_peer_that_skips_nothing_is_named():
    def row(density, seconds):
        return {"kind": "blocks", "density": density, "peer_names": ["flex_attention"], "medians": {"peer_forward": seconds}}

    (line,) = suite.scaling([row(1.0, 1.0), row(0.1, 0.99)])
    assert "IT DOES NOT SKIP BLOCKS" in line
    (line,) = suite.scaling([row(1.0, 1.0), row(0.1, 0.2)])
    assert "SKIP" not in line


def test_the_share_where_dense_is_as_fast_is_named():
    def row(window, ours, theirs):
        times = {"forward": ours, "backward": 2.0, "peer_forward": theirs, "peer_backward": 1.0}
        return {"workload": "ablation-threshold", "length": 100, "window": window, "peer_names": ["dmattn.attention, dense"],
                "medians": {}, "kernel_medians": times}  # fmt: skip

    (line,) = suite.crossings([row(75, 2.0, 1.0), row(50, 0.9, 1.0), row(25, 0.5, 1.0)])
    assert line.startswith("100 tokens, kept shares 0.75, 0.50, 0.25: ")
    assert line.endswith("forward up to 0.50, backward at none of them")


def test_short_tables_say_what_the_results_say(tmp_path, monkeypatch):
    times = {
        "forward": 0.002,
        "backward": 0.5,
        "peer_forward": 0.0172,
        "peer_backward": 0.47,
        "peer2_forward": 9.0,
        "peer2_backward": 9.0,
    }
    row = {
        "group": "a group",
        "case": "a case", "kind": "streaming", "length": 65536, "window": 1024, "sink": 64, "heads": 16, "head_dim": 128, "is_causal": True,
        "dtype": "bfloat16", "medians": times, "kernel_medians": {**times, "forward": 0.001}, "peer_names": ["flex_attention, compiled", "x"],
    }  # fmt: skip
    other = row | {"group": "another group", "medians": dict.fromkeys(times, 1.0)}
    result = {"machine": {"gpu": "A GPU"}, "torch": "2.11", "date": "2026-11-21T15:13:06", "rows": [row, other]}
    (tmp_path / "all.json").write_text(json.dumps(result))
    table = {"all.json": (("a group", "a case"),)}
    monkeypatch.setattr(report, "SHORT_TABLES", {"mine": table, "kernels": table})
    assert "| 17.2x, 1.00 ms | 0.94x, 500 ms |" in report.short_table("kernels", tmp_path)
    lines = report.rewritten("<!-- bench:mine -->\n<!-- /bench:mine -->", tmp_path).splitlines()
    assert lines[3] == "| 65,536 tokens, 64 sinks and 1,024 local keys | FlexAttention | 8.60x, 2.00 ms | 0.94x, 500 ms |"
    assert lines[5] == "A GPU, bfloat16, 16 heads of 128, torch 2.11, 2026-11-21."
    (tmp_path / "all.json").write_text(json.dumps(result | {"rows": [row, other, row]}))
    with pytest.raises(
        records.BadResultError,
        match=r"all\.json: expected one row for each group and case, got two of group 'a group', case 'a case'",
    ):
        report.short_table("mine", tmp_path)


def test_a_comparison_refuses_two_measurements_of_one_name():
    row = {"group": "a", "case": "c", "samples": {"forward": [1.0, 1.0, 1.0]}}
    unlike = {"rows": [row, row | {"group": "b", "samples": {"forward": [2.0, 2.0, 2.0]}}]}
    slower, faster, missing, few = compare.compared(unlike, unlike, 0.05)
    assert [slower, faster, missing, few] == [[], [], [], []]
    with pytest.raises(
        records.BadResultError, match="expected one measurement of each name in a result, got two of a, c, dmattn, forward"
    ):
        compare.compared({"rows": [row, row]}, unlike, 0.05)


STAMP = {
    "machine": {"gpu": "A GPU"},
    "torch": "2.11",
    "commit": "abc",
    "uncommitted_changes": False,
    "date": "2026-11-21T15:13:06",
}
# Every headline of benchmarks/earlier_systems.py: whole calls take 2 s and those of the peers 10 and 5 s, kernels 1, 9 and 4 s.
EARLIER = STAMP | {
    "rows": [
        {"workload": headline.system, "case": headline.name, **headline.facts,
         "peer_names": [f"F.scaled_dot_product_attention by {peer}_ATTENTION" for peer in ("FLASH", "CUDNN")],
         **{times: {f"{peer}{part}": value for part in ("forward", "backward") for peer, value in zip(("", "peer_", "peer2_"), of, strict=True)}
            for times, of in (("medians", (2, 10, 5)), ("kernel_medians", (1, 9, 4)))}}
        for headline in script("earlier_systems").headlines()
    ]
}  # fmt: skip
PAGE_TABLES = {  # results, and a line of the table
    "projected": (
        EARLIER,
        "| Flash-DMA: 65,536 @ 0.025, causal, forward | FlashAttention-2 | 8.0x to 13x | 5.0x | 9.0x | kernels alone | cuDNN | 2.5x | 4.0x |",
    ),
    "sweep-of-attention": (EARLIER, "| 4,096 |" + " 2.50, 4.00 |" * 9),
    "sweep-of-reductions": (
        EARLIER,
        "| reduce_max, 100,000,000 elements | 2,000,000.0 | 10,000,000.0 | 1,000,000.0 | 9,000,000.0 | 0 | 0 |",
    ),
    "ranks": (
        {"rows": [STAMP | {"length": 5000, "ours": {"forward_ms": 3.21, "forward_in_a_row_ms": 0.5, "forward_backward_ms": 10},
                           "one_chunk_alone": {"forward_ms": 2.0, "forward_in_a_row_ms": 1.0, "forward_backward_ms": 8.0}}]},
        "| 5,000 | 3.21 ms | 500 us | 2.00, 1.00 ms | - | 10.0 ms | 8.00 ms | - |",
    ),
    "packs": (
        STAMP | {"rows": [{"case": "2 documents", "tokens": 1_510_000, "forward_ms": 2.0, "forward_over_proportional": 1.234,
                           "backward_ms": 3.0, "backward_over_proportional": 2.0, "torch_forward_ms": 9.0, "torch_backward_ms": 8.0}]},
        "| 2 documents: 1.5 million tokens | 2.00 ms | 1.23x | 9.00 ms | 3.00 ms | 2.00x | 8.00 ms |",
    ),
    "predictions": (
        STAMP | {"rows": [{"group": group, "case": case, "length": length, "window": window, "head_dim": 128,
                           "medians": {"forward": 2, "peer_forward": 1}, "kernel_medians": {"forward": 1, "peer_forward": 25}}
                          for (group, case), length, window in zip(page_tables.PREDICTED, (1024, 256), (1024, 256), strict=True)]},
        "| 1,024 tokens, window 1,024 | 1.00x | 25.0x | 0.50x |",
    ),
    "training-steps": (
        {"rows": [STAMP | {"name": name, "length": 4096, "ranks": 2, "window": 64, "samples": [1.0], "tokens_per_second": rate,
                           "compiled": rate > 2500, "documents": documents}
                  for name, rate, documents in (("dynamic", 3000.4, 0), ("causal", 2000.0, 0), ("dynamic", 1.0, 7))]},
        "| 4,096, 64, 2 (one step each; the baseline is not compiled) | 3,000 | 2,000 | 1.5x |",
    ),
    "doge": (
        STAMP | {"rows": [{"name": "dmattn", "length": 4096, "forward_ms": 1.4, "backward_ms": 2.6, "peak_gib": 3.14},
                          {"name": "eager", "length": 4096, "out_of_memory": True}]},
        "| 4,096 | 1 + 3 ms | 3.1 GiB | out of memory | - |",
    ),
    "deepseek": (
        STAMP | {"rows": [{"name": "dmattn", "length": 8192, "forward_ms": 1.4, "backward_ms": 2.6, "peak_gib": 3.14},
                          {"name": "sdpa", "length": 4096, "out_of_memory": True},
                          {"name": "dmattn", "length": 4096, "forward_ms": 1.4, "backward_ms": 2.6, "peak_gib": 3.14}]},
        "| 4,096 | 1 + 3 ms | 3.1 GiB | out of memory | - |",
    ),
    "index-masks": (
        STAMP | {"rows": [{"lists": "skewed", "length": 4096, "heads": 8, "kv_heads": 2, "head_dim": 192, "value_dim": 128, "block": 16,
                           "keys": 1024, "deterministic": True, "forward_speedup": 2.5, "forward_ms": 1.5, "backward_speedup": 0.5,
                           "backward_ms": 12.0}]},
        "| 4,096 tokens, 8 heads of 192 / 128 on 2, 1,024 keys in blocks of 16, skewed, deterministic | 2.50x, 1.50 ms | 0.50x, 12.0 ms |",
    ),
    "index-peers": (
        STAMP | {"rows": [{"lists": "skewed", "length": 4096, "heads": 8, "kv_heads": 2, "head_dim": 192, "value_dim": 128, "block": 16,
                           "keys": 1024, "deterministic": False, "forward_speedup": 2.5, "forward_ms": 1.5, "backward_speedup": 0.5,
                           "backward_ms": 12.0, "flex_forward_ms": 15.0, "flex_backward_ms": 24.0, "dense_forward_ms": 3.0,
                           "dense_backward_ms": 6.0}]},
        "| 4,096 tokens, 8 heads of 192 / 128 on 2, 1,024 keys in blocks of 16, skewed | 2.0x | 0.20x | - | 0.50x | 0.25x | - |",
    ),
    "sweep": (STAMP | {"rows": SWEEP}, "| 256, 1 | 0.50 | 2.00 | 1.50 | 6.00 |"),
    "builds": (
        STAMP | {"rows": [{"case": "length=4096 batch=4 window=410", "us": {"forward": 2e3, "backward": 4e3, "cudnn forward": 1e3}}]},
        "| 4 x 4,096, window 410 | 2.00 | 0.50 | - | - | 4.00 | - | - | - |",
    ),
    "reductions": (
        STAMP | {"rows": [{"case": "[9] int8, dim 0", "reduce_sum": 1234.5, "torch_sum": 1, "copy": 2}]},
        "| [9] int8, dim 0 | 1,234 | 1 | - | - | 2 |",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", page_tables.TABLES)
def test_tables_of_pages_say_what_the_results_say(name, tmp_path):
    place = f"<!-- bench:{name} -->\n<!-- /bench:{name} -->"
    with pytest.raises(records.BadResultError, match=f"no results for bench:{name}: expected"):
        report.rewritten(place, tmp_path)
    result, line = PAGE_TABLES[name]
    path = page_tables.path_of(name, tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    lines = report.rewritten(place, tmp_path).splitlines()
    assert line in lines
    assert lines[-2] == "A GPU, torch 2.11, commit abc, 2026-11-21."
    assert report.rewritten("\n".join(lines), tmp_path).splitlines() == lines


def test_misses_stand_in_the_table_of_projections():
    lines = earlier_report.projected(EARLIER).splitlines()
    assert lines[2].startswith(
        "| Flash-DMA: 1,024 @ 0.2, causal, forward | FlashAttention-2 | 3.3x to 4.0x | 5.0x | 9.0x | yes |"
    )
    (p,) = (line for line in lines if "p = 0.05, forward" in line)
    assert "| 20x | 5.0x | 9.0x | **no**, 45% |" in p
    (of_memory,) = (line for line in lines if "reduce_sum, 100,000,000" in line)
    assert of_memory.endswith("| 87% | 0% | 0% | **no**, 0% | - | - | - |")
    (causal,) = (line for line in lines if "N = 512, D = 64, causal" in line)
    assert causal.endswith("| not causal | 2.0x | - | 1.0x | **no**, 50% | - | - | - |")


def test_headlines_of_earlier_systems_are_measured(tmp_path, monkeypatch):
    """Systems with one case of each kind, on a CPU: a row a line, and the same times as CSV."""
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    module, path = script("earlier_systems"), tmp_path / "machine/earlier.json"
    kept = {}
    for headline in module.headlines():
        kept.setdefault((headline.system, headline.build), headline)
    monkeypatch.setattr(module, "headlines", lambda: iter(kept.values()))
    arguments = f"x --tiny --device cpu --repeats 1 --seconds 0.001 --output {path}".split()
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["case"]) for row in rows] == [(each.system, each.name) for each in kept.values()]
    assert all(row["medians"]["forward"] > 0 and row["medians"]["peer_forward"] > 0 for row in rows)
    assert sum(line.lstrip().startswith('{"workload"') for line in path.read_text().splitlines()) == len(rows)
    with path.with_suffix(".csv").open() as file:
        assert {line["case"] for line in csv.DictReader(file)} == {row["case"] for row in rows}


def test_a_wrong_headline_has_no_times(tmp_path, monkeypatch):
    module = script("earlier_systems")
    right = module.dmattn.attention
    monkeypatch.setattr(module.dmattn, "attention", lambda *given, **options: right(*given, **options) * 1.5)
    (headline,) = (each for each in module.headlines() if each.name.startswith("197"))
    with pytest.raises(measure.WrongResultError, match="197 tokens, half of the blocks: differs from the reference by"):
        module.check(module.shrunk(headline), "cpu")


def test_a_result_without_chosen_rows_gives_all_that_were_measured(tmp_path):
    """The workloads beside pages choose none; a case that was refused has no times."""
    row = {
        "case": "a case", "kind": "dma", "batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "in_readme": False,
        "medians": dict.fromkeys(("forward", "backward", "peer_forward", "peer_backward"), 0.5), "kernel_medians": {},
        "samples": {"forward": [0.5]}, "peer_names": ["x"],
    }  # fmt: skip
    hardware = {"gpu": "A GPU", "driver": "1"}
    result = STAMP | {
        "machine": hardware,
        "cuda": "13",
        "rows": [row, row | {"case": "other"}, {"case": "refused", "refused": "wrong"}],
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine.json").write_text(json.dumps(result))
    made = report.rewritten("<!-- bench:mine -->\n<!-- /bench:mine -->", tmp_path)
    assert [line.split(" |")[0] for line in made.splitlines()[3:5]] == ["| a case", "| other"]
    assert "refused" not in made


def test_pages_are_rewritten_or_only_checked(tmp_path, monkeypatch):
    (tmp_path / "docs/kernels").mkdir(parents=True)
    (tmp_path / "docs/kernels/some.md").write_text("nothing")
    (tmp_path / "README.md").write_text("<!-- bench:mine -->\n<!-- /bench:mine -->")
    monkeypatch.setattr(report, "short_table", lambda name, results: "a table")
    monkeypatch.setitem(report.SHORT_TABLES, "mine", {})
    assert report.pages(tmp_path, check=True) == ["README.md"]
    assert "a table" not in (tmp_path / "README.md").read_text()
    assert report.pages(tmp_path, check=False) == ["README.md"]
    assert "a table" in (tmp_path / "README.md").read_text()
    assert report.pages(tmp_path, check=True) == []


def test_numbers_in_sentences_are_what_the_results_say(tmp_path):
    rows = [{"case": "a, D=64", "ms": 1.5, "dense": 6.0}, {"case": "b", "ms": 4.0, "complete": True}]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    page = "It took <!-- n: a.json rows[case=a, D=64].ms | ms -->?<!-- /n -->, <!-- n: a.json rows[0].dense / rows[0].ms | x -->?<!-- /n --> of"
    page += " <!-- n: a.json rows.# | int -->9<!-- /n --> rows, <!-- n: a.json rows.sum(ms) / rows.max(ms) | two -->9<!-- /n -->"
    made = cited.rewritten(page, tmp_path)
    assert cited.without_marks(made) == "It took 1.50 ms, 4.00x of 2 rows, 1.38"
    assert cited.rewritten(made, tmp_path) == made
    for wrong in ("b.json rows.# | int", "a.json rows[case=c].ms | ms", "a.json rows[2].ms | ms", "a.json rows[1].complete | int",
                  "a.json rows[1].case | int", "a.json rows[0].ms | furlongs"):  # fmt: skip
        with pytest.raises(records.BadResultError, match="expected"):
            cited.rewritten(f"It took <!-- n: {wrong} -->1<!-- /n -->", tmp_path)
    with pytest.raises(records.BadResultError, match="head of a line"):
        cited.rewritten("It took\n<!-- n: a.json rows.# | int -->2<!-- /n -->", tmp_path)
