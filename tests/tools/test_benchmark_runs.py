"""Benchmarks measure what they say: cases pass the gate, wrong results have no times, peers get the same mask, bad calls say why."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import sys
import types
from pathlib import Path

import dmattn
import pytest
import torch
import torch.nn.functional as F
from benchmark_calls import BENCHMARKS, SMALL, assert_refused
from cases import threads
from dmattn_bench import (
    __main__,
    cases,
    context_parallel,
    decode,
    measure,
    peers,
    records,
    serve,
    suite,
    training_step,
    workloads,
)
from torch.nn.attention import SDPBackend, flex_attention

pytestmark = pytest.mark.usefixtures("short_warm_ups")
KINDS = ("dense", "dma", "sliding", "streaming", "documents", "tree", "blocks", "patches", "select")


def every_case():
    named = [each.cases() for each in workloads.named().values() if each.cases and each.name != "dynamic-trained"]
    return [*workloads.pages("cuda"), *workloads.pages("cpu"), *itertools.chain.from_iterable(named)]


def small_cases(kind, chosen=()):
    """One case of each sort of a kind, for the CPU, with these peers."""
    sorts = {}
    for case in every_case():
        if case.kind == kind:
            small = dataclasses.replace(
                case.resized(200), batch=1, peers=chosen, dtype="float32", head_dim=16, heads=2, kv_heads=1
            )
            sorts.setdefault((case.scores, case.is_causal, case.density, case.block, case.documents, case.local), small)
    return list(sorts.values())


# Cases ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_sort_of_case_passes_the_gate(kind):
    chosen = small_cases(kind)
    assert chosen
    for case in chosen:
        measure.gate(case, "cpu")
        case = dataclasses.replace(case, batch=2)
        load = cases.workload(case, "cpu")
        visible = load.visible()
        if visible is not None and kind != "select":
            seen = visible.expand(case.batch, -1, -1, -1)
            assert load.pairs == int(seen.sum()) * (case.heads // seen.shape[1])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_gate_refuses_another_mask(kind, monkeypatch):
    case = next(case for case in small_cases(kind) if kind != "blocks" or case.density == 0.5)
    definition = cases._visible
    monkeypatch.setattr(cases, "_visible", lambda *given: definition(*given).roll(1, -1))
    with pytest.raises(measure.WrongResultError, match="differ"):
        measure.gate(case, "cpu")


# Peers ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_eager_torch_computes_the_same_mask(kind):
    for case in small_cases(kind, ("eager",)):
        left_out = {}
        load = cases.workload(case, "cpu", left_out=left_out)
        measure._runs(case, load)
        assert load.peers or "some queries see nothing" in left_out["eager"]


def test_a_peer_with_another_mask_is_refused(monkeypatch):
    visible = peers.Problem.visible
    monkeypatch.setattr(peers.Problem, "visible", lambda problem: visible(problem).roll(1, -1))
    (case, *_) = small_cases("sliding", ("eager",))
    with pytest.raises(measure.WrongResultError, match="eager torch, with a mask differs from dmattn"):
        measure._runs(case, cases.workload(case, "cpu"))


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("kind", ["dense", "dma", "documents", "tree", "patches"])
def test_flex_attention_is_given_the_same_mask(kind, monkeypatch):
    """Not compiled here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # that no gradient is asked for on a CPU
    monkeypatch.setattr(peers, "NEEDS_GPU", ())
    for case in small_cases(kind, ("flex",)):
        case = dataclasses.replace(case.resized(128), head_dim=16, dtype="float32")
        with torch.no_grad():
            load = cases.workload(case, "cpu")
            (peer,) = load.peers
            measure._same_result(case, peer, peer.run(), load.ours.run())


def test_a_peer_that_fails_is_left_out_with_the_reason():
    load = cases.workload(cases.Case(50, peers=("torch",)), "cpu")

    def fail():
        raise NotImplementedError("not today")

    left_out = {}
    load = suite.with_peers_that_run(dataclasses.replace(load, peers=(*load.peers, peers.Call("another", fail, ()))), left_out)
    assert len(load.peers) == 1
    assert left_out == {"another": "NotImplementedError: not today"}


# Runs -----------------------------------------------------------------------------------------------------------------------------


def test_wrong_results_have_no_times(monkeypatch, tmp_path, capsys):
    definition = cases._visible
    monkeypatch.setattr(cases, "_visible", lambda *given: definition(*given).roll(1, -1))
    assert __main__.main(["run", "sliding", *SMALL, "--output", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*/sliding.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert all("differs from the reference" in row["refused"] and "samples" not in row for row in rows)
    assert "REFUSED, no times" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(monkeypatch):
    measured = suite.case_row
    taken = []

    def once(*given):
        if taken:
            raise KeyboardInterrupt
        taken.append(measured(*given))
        return taken[0]

    monkeypatch.setattr(suite, "case_row", once)
    result = suite.run(["causal"], suite.Options(lengths=(50, 60), repeats=1, memory=False, threads=1, peers=()))
    assert not result["complete"]
    assert len(result["rows"]) == 1


def test_memory_is_measured_in_a_process_of_its_own():
    taken = measure.extra_memory(cases.Case(300, "dma", 30, head_dim=16, heads=2, kv_heads=2), "cpu", 1)
    assert taken.keys() == {"forward", "backward"}


def test_settled_times_come_after_runs_of_the_same_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = measure.by_turns(runs, "cpu", repeats=2, settle=1e-3)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 2, "b": 2}
    turns = [len(list(same)) for _, same in itertools.groupby(calls)]
    assert turns[:2] == [1, 1]  # the warm-up
    assert len(turns) == 6
    assert min(turns[2:]) >= 2


BAD_RUNS = {
    "run nothing-of-that-name": "expected a workload, one of",
    "run causal --device cuda": "torch sees no GPU here",
    "run causal --device cpu --peers cudnn": "--peers: cudnn: needs a GPU",
    "run causal --peers somebody": "--peers: expected some of torch, ",
    "run dynamic-trained --trained not-there.pt": "not-there.pt: cannot be read",
    "run causal --device cpu --settle 1": "--settle: expected seconds on a GPU",
    "run causal --heads 3 --kv-heads 2": "--heads: expected a multiple of --kv-heads 2, got 3",
    "run dynamic-trained --trained short.pt": "dynamic-trained: short.pt: expected scores of 2,048 tokens or more, got [2, 10]",
    "run dynamic-trained --trained headless.pt": "dynamic-trained: headless.pt: expected a floating tensor [heads, tokens]",
    "run causal --lengths 0": "argument --lengths: expected a positive number, got 0",
    "run causal --lengths many": "argument --lengths: expected a positive number, got many",
    "run causal --lengths 2000000": "--lengths: expected at most 1048576, got 2000000",
    "run causal --head-dim 7": "--head-dim: expected a multiple of 8 up to 256, got 7",
    "run causal --seconds nan": "argument --seconds: expected a finite number >= 0, got nan",
    "run causal --name a/b": "--name: expected the name of a file, got a/b",
    f"run causal --name {'x' * 300} --output folder": "can be written, got folder/",
    "run causal --threads 99999999999999999999": "argument --threads: expected at most 2147483647, got 99999999999999999999",
    "run causal --threads 99999": "--threads: expected at most 1024, got 99999",
    "run causal --batch 99999999999999999999": "argument --batch: expected at most 2147483647, got 99999999999999999999",
    "run causal --heads 4294967296": "argument --heads: expected at most 2147483647, got 4294967296",
    "run causal --device cpu --kv-heads 3": "--kv-heads: expected a divisor of 4, the heads of causal, got 3",
    "run dynamic-trained --trained nan.pt": "dynamic-trained: nan.pt: expected finite scores in float32, got 3000 that are not",
    "run causal --output text.txt": "--output: expected a folder, got text.txt",
    "run pages --lengths 64": "--lengths: expected none with pages, which has cases of its own",
    "run causal decode --peers eager": "--peers: expected none with decode, which has cases of its own",
    "run causal --quicker": "unrecognized arguments: --quicker",
    "--quick": "the following arguments are required: {list,run,compare,report}",
}


@pytest.mark.parametrize("call", BAD_RUNS)
def test_bad_runs_are_refused_in_one_sentence(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("text.txt").write_text("no JSON")
    torch.save(torch.zeros(2, 10), "short.pt")
    torch.save(torch.zeros(0, 3000), "headless.pt")
    torch.save(torch.stack([torch.zeros(3000), torch.full((3000,), torch.nan)]), "nan.pt")
    assert_refused(call, BAD_RUNS[call], capsys)


@pytest.mark.parametrize("name", ["case_row", "ceiling", "extra_memory"])
def test_a_case_without_memory_leaves_the_others(name, monkeypatch):
    """On a CPU torch raises RuntimeError where memory is short."""
    right, taken = getattr(suite, name), []

    def first_fails(*given):
        taken.append(given)
        if len(taken) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")
        return right(*given)

    monkeypatch.setattr(suite, name, first_fails)
    result = suite.run(["causal"], suite.Options(lengths=(50, 60), repeats=1, memory=name == "extra_memory", threads=1, peers=()))
    assert ["cannot_run" in row for row in result["rows"]] == [True, False, False, False]
    assert result["rows"][0]["cannot_run"] == "4 x 50, dense causal: cannot run: DefaultCPUAllocator: can't allocate memory"


def test_a_case_that_fails_is_refused_and_leaves_the_others(monkeypatch):
    """A kernel that fails is a defect, and not a machine that is too small."""
    right = suite.case_row

    def fails(case, *given):
        if case.length == 50:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(case, *given)

    monkeypatch.setattr(suite, "case_row", fails)
    result = suite.run(["causal"], suite.Options(lengths=(50, 60), repeats=1, memory=False, threads=1, peers=()))
    assert ["refused" in row for row in result["rows"]] == [True, False, True, False]
    assert result["rows"][0]["refused"] == "4 x 50, dense causal: failed: CUDA error: an illegal memory access was encountered"


def test_trained_scores_select(tmp_path):
    path = tmp_path / "scores.pt"
    torch.save(torch.rand(3, 3000), path)
    (named,) = (each for each in workloads.named(str(path)).values() if each.name == "dynamic-trained")
    assert [case.length for case in named.cases()] == [2048]
    case = dataclasses.replace(named.cases()[0].resized(100), dtype="float32", peers=(), head_dim=16, heads=4, kv_heads=4)
    measure.gate(case, "cpu")
    scores = cases.workload(case, "cpu").key_bias
    assert torch.equal(scores[0, 3], torch.load(path)[0, :100])
    for wrong in ("text", {"a": torch.ones(1)}, torch.ones(3)):
        torch.save(wrong, tmp_path / "wrong.pt")
        cases.trained_scores.cache_clear()
        with pytest.raises(ValueError, match="expected a floating tensor"):
            cases.trained_scores(str(tmp_path / "wrong.pt"))


def test_the_demo_saves_scores_that_select_the_same_keys(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "examples"))
    program = importlib.import_module("train_language_model")
    torch.manual_seed(0)
    model = program.ByteModel(2, 32, 2, 2, 8, 4)
    for layer in model.layers:
        torch.nn.init.normal_(layer.attention.score_proj.weight)
    data = torch.randint(0, 256, (64,), dtype=torch.uint8)
    program.save_scores(model, data, tmp_path / "scores.pt")
    scores = cases.trained_scores(str(tmp_path / "scores.pt"))
    assert scores.shape == (2, 64)  # one of two heads of each layer selects
    attention, hidden = model.layers[1].attention, model.attention_inputs(data.long()[None], 1)
    ranks = attention.ranked(hidden, attention.projected(hidden)[2])[0][:, 1:]
    assert torch.equal(dmattn.IntervalMask.top_k(ranks, 8).end, dmattn.IntervalMask.top_k(scores[None, 1:], 8).end)


# Jobs -----------------------------------------------------------------------------------------------------------------------------


def test_decoding_and_generation_are_timed():
    options = measure.JobOptions("cpu", quick=True, repeats=1)
    rows = decode.rows(options)
    assert [row["length"] for row in rows] == [512, 2048]
    paged = decode.measured(decode.Case(2, 256, heads=2, kv_heads=1, head_dim=16, page_size=16), 1, "cpu")
    biased = decode.measured(decode.Case(1, 64, heads=2, kv_heads=1, head_dim=16, queries=4, has_bias=True), 1, "cpu")
    assert all(found.samples[0] > 0 for found in records.measurements({"rows": [*rows, paged, biased]}))


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_decoding_step_with_a_wrong_bias_is_refused(page_size, monkeypatch):
    case = decode.Case(1, 64, heads=2, kv_heads=1, head_dim=16, page_size=page_size, has_bias=True)
    decode.measured(case, 1, "cpu")
    ours = dmattn.decode_attention

    def without_bias(*given, key_bias, page_table=None):
        kept = key_bias if page_size and page_table is None else None  # wrong in pages alone
        return ours(*given, key_bias=kept, page_table=page_table)

    monkeypatch.setattr(dmattn, "decode_attention", without_bias)
    with pytest.raises(measure.WrongResultError, match="differs from the "):
        decode.measured(case, 1, "cpu")


def test_a_decoding_step_that_leaves_keys_out_is_refused(monkeypatch):
    """Over many keys results are small, and a part of the keys changes them by little."""
    case = decode.Case(1, 32768, heads=2, kv_heads=1, head_dim=16)
    with threads(1):  # two add up in an order of their own
        decode.measured(case, 1, "cpu")
    ours = dmattn.decode_attention
    monkeypatch.setattr(dmattn, "decode_attention", lambda q, k, v, lengths, **rest: ours(q, k, v, lengths - 2048, **rest))
    with pytest.raises(measure.WrongResultError, match="differs from SDPA"):
        decode.measured(case, 1, "cpu")


def test_long_caches_that_give_something_else_are_refused(monkeypatch):
    monkeypatch.setattr(serve, "CUDA_BACKENDS", {"torch's": SDPBackend.MATH})
    monkeypatch.setattr(serve, "graph_samples", lambda runs, repeats: [float(len(runs))])
    query, key, value, _ = serve.tokens(1, 1, "cpu", 0)
    key, value = (torch.cat([given, given.flip(1)], 2) for given in (key, value))
    right = serve.sdpa(query, key, value, None)
    assert serve.cuda_peers(query, [(key, value)], 1, right) == {"torch's": [1.0]}
    with pytest.raises(AssertionError, match="distance"):
        serve.cuda_peers(query, [(key, value)], 1, 1.01 * right)


def test_training_steps_are_timed():
    rows = training_step.document_rows(measure.JobOptions("cpu", repeats=1))
    assert [row["name"] for row in rows] == ["dynamic", "causal"]
    (ours, theirs) = records.measurements({"rows": rows})
    assert ours.case == "training step, 512 tokens on 1 ranks, 8 documents"
    assert (ours.who, theirs.who) == ("dmattn", "causal")
    assert training_step.document_ends(10, 2, torch.device("cpu")).tolist() == [0, 5, 10]


@pytest.mark.parametrize("documents", [0, 8])
@pytest.mark.parametrize("what", ["window", "causal", "key"])
def test_training_steps_that_compute_something_else_are_refused(what, documents, monkeypatch):
    ours, theirs = dmattn.dynamic_mask_attention, F.scaled_dot_product_attention
    if what == "causal":
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, key, value, **options: theirs(query, key, value))
    else:
        monkeypatch.setattr(
            dmattn, "dynamic_mask_attention", lambda query, key, value, scores, window, base:
            ours(query, key.detach() if what == "key" else key, value, scores, window // 2 if what == "window" else window, base=base)
        )  # fmt: skip
    with pytest.raises(measure.WrongResultError, match=r"training step, .* differs from the reference by"):
        training_step.rows(measure.JobOptions("cpu", repeats=1), documents)


def test_ranks_that_fail_or_differ_are_reported(monkeypatch):
    said = types.SimpleNamespace(stderr="so refused: results differ\nmore", returncode=1)
    monkeypatch.setattr(context_parallel.subprocess, "run", lambda *given, **options: said)
    options = measure.JobOptions("cpu", repeats=1)
    with pytest.raises(measure.WrongResultError, match=r"^context-parallel: results differ$"):
        context_parallel.rows(options)
    said.stderr = "no network"
    with pytest.raises(measure.CannotRunError, match="ended with 1: no network"):
        context_parallel.rows(options)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(measure.CannotRunError, match="needs two GPUs, here is one"):
        context_parallel.rows(measure.JobOptions("cuda"))


# Scripts --------------------------------------------------------------------------------------------------------------------------


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


def test_torchs_packs_are_told_their_own_longest_documents(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import varlen

    told = []
    monkeypatch.setattr(varlen, "torchs_call", lambda query, key, value, *given: told.append(given))
    varlen.row_of(varlen.Case(4, 2, queries=0.5), 20, "cpu", 1, {"forward": 1.0, "backward": 1.0})
    ((of_queries, of_keys, longest_q, longest_k),) = told
    assert (longest_q, longest_k) == (of_queries.diff().max(), of_keys.diff().max())
    assert longest_q < longest_k


def test_sums_over_a_dimension_that_are_wrong_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import reduce

    given = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    case = reduce.Case((40, 50), dim=1)
    reduce.check(case, given, 1)
    monkeypatch.setattr(torch.ops.dmattn, "reduce_sum", lambda x, dim=None: x.sum() if dim is None else x[:, 1:].sum(dim))
    with pytest.raises(SystemExit, match=r"refused: \[40, 50\] float32, dim 1: sum"):
        reduce.check(case, given, 1)


@pytest.mark.parametrize(("backward", "status", "verdict"), [(1.0, 0, "kept"), (1.1, 1, "BROKEN")])
def test_a_sweep_that_breaks_the_promise_ends_with_1(backward, status, verdict, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sweep

    def measured(length, heads, budget):
        times = {"forward": 0.5, "backward": backward, "dense_forward": 1.0, "dense_backward": 1.0}
        return [{"length": length, "heads": heads, "window": 16, "share": 1 / 16, **times}]

    monkeypatch.setattr(sweep, "measure", measured)
    monkeypatch.setattr(sweep, "provenance", lambda device: {"machine": {"name": "here"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--lengths", "256", "--heads", "1", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == status
    assert f"at most 5 % slower than dense: {verdict};" in capsys.readouterr().out
    assert len(records.read(tmp_path / "here/sweep.json")["rows"]) == 1
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--lengths", "9000000"])
    with pytest.raises(SystemExit, match="got none"):
        sweep.main()


@pytest.mark.parametrize(("model", "peers"), [("doge", ["eager"]), ("deepseek_v32", ["sdpa", "eager"])])
def test_models_are_timed_and_wrong_logits_are_refused(monkeypatch, tmp_path, model, peers):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import models

    sizes = ["--width", "256", "--vocabulary", "512", "--window", "32", "--lengths", "64", "128", "--layers", "1", "--repeats", "1"]  # fmt: skip
    path = tmp_path / "models.json"
    monkeypatch.setattr(sys, "argv", ["models.py", "--model", model, "--device", "cpu", *sizes, "--output", str(path)])
    models.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["length"]) for row in rows] == [
        (name, length) for name in ("dmattn", *peers) for length in (64, 128)
    ]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows)

    right = models.built
    monkeypatch.setattr(
        models, "built", lambda name, layers, window, *given: right(name, layers, window >> (name == "dmattn"), *given)
    )
    with pytest.raises(SystemExit, match="refused: dmattn's logits"):
        models.main()


# On a GPU -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("trees", "sliding", "blocks"), ("decode",), ("serving",)], ids=lambda names: names[0])
def test_workloads_run_on_a_gpu(names, tmp_path):
    peers = ["--peers", "cudnn", "flash", "efficient", "dmattn"] if len(names) > 1 else []
    few = ["--repeats", "2", "--seconds", "0.01"]
    sizes = ["--lengths", "300", "--heads", "4", "--kv-heads", "2"] if peers else ["--quick"]
    assert (
        __main__.main(["run", *names, "--device", "cuda", *sizes, *few, *peers, "--output", str(tmp_path), "--name", "mine"]) == 0
    )
    (path,) = tmp_path.glob("*/mine*.json")
    result = records.read(path)
    assert result["clocks"]["after"]
    for row in result["rows"]:
        if row["workload"] == "trees":
            assert len(row["peer_names"]) == 4, row.get("left_out")
            assert row["kernel_samples"].keys() >= {"forward", "backward", "peer_forward", "peer4_backward"}
            assert row["peak_bytes"].keys() == {f"{prefix}{name}" for prefix in ("", "peer_", "peer2_", "peer3_", "peer4_") for name in
                                                ("forward", "backward")}  # fmt: skip


@pytest.mark.gpu
def test_kernel_times_come_from_a_captured_graph():
    case = dataclasses.replace(workloads.pages("cuda")[0].resized(300), peers=("dmattn",))
    taken = measure.times(case, cases.workload(case, "cuda"), "cuda", 2)
    assert not taken.not_captured
    assert {name: len(samples) for name, samples in taken.kernels.items()} == dict.fromkeys(taken.calls, 2)
