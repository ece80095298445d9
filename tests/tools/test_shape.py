"""``python -m dmattn shape``: what it measures, how it keeps to its time, what it prints, and one sentence for each bad argument."""

from __future__ import annotations

import signal
import time

import dmattn
import pytest
import torch
from dmattn import __main__ as command
from dmattn import shape as shape_command
from dmattn import shape_times
from dmattn.shape_times import Candidate, Inputs, Shape
from dmattn_bench import two_ways
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

SMALL = Shape(2, 4, 2, 16, 200, 32, 8, 4, torch.float32, "cpu")
ARGUMENTS = {"batch": 2, "heads": 4, "kv-heads": 2, "head-dim": 16, "length": 200, "window": 32, "local": 8, "sink-keys": 4}


def run(**changed: object) -> int:
    given = {**ARGUMENTS, "device": "cpu", "seconds": 1, **{name.replace("_", "-"): value for name, value in changed.items()}}
    parsed = command.parser().parse_args(
        ["shape", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    )
    status: int = parsed.run(parsed)
    return status


def row(name: str, forward: float, backward: float, decode: float = 0.0, memory: float = 0, cache: float = 0) -> Candidate:
    times = {"forward": forward, "backward": backward, "decode": decode}
    samples = {column: [seconds] for column, seconds in times.items() if seconds}
    return Candidate(name, lambda: torch.ones(1), memory=int(memory), cache=int(cache), samples=samples)


KEYS = "--window: expected --window + --local + --sink-keys from 1 to --length = 200, got"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch": 0}, "--batch: expected an int from 1 to 1048576, got 0"),
        ({"kv_heads": 0}, "--kv-heads: expected an int from 1 to 1048576, got 0"),
        ({"kv_heads": 3}, "--heads: expected a multiple of --kv-heads = 3, got 4"),
        ({"head_dim": 7}, "--head-dim: expected a multiple of 8 up to 256, got 7"),
        ({"head_dim": 264}, "--head-dim: expected a multiple of 8 up to 256, got 264"),
        ({"length": 2**20 + 1}, "--length: expected an int from 1 to 1048576, got 1048577"),
        ({"local": -1}, "--local: expected an int from 0 to 1048576, got -1"),
        ({"window": 201, "local": 0, "sink_keys": 0}, f"{KEYS} 201 + 0 + 0"),
        ({"window": 0, "local": 0, "sink_keys": 0}, f"{KEYS} 0 + 0 + 0"),
        ({"seconds": "nan"}, "--seconds: expected a positive number, got nan"),
    ],
)
def test_a_bad_argument_gets_one_sentence(capsys, changed, sentence):
    assert run(**changed) == 2
    assert capsys.readouterr() == ("", f"python -m dmattn shape: {sentence}\n")


@pytest.mark.brief
@pytest.mark.parametrize("name", ["heads", "length", "window"])
def test_sizes_have_no_default(capsys, name):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["shape", *(f"--{given}={value}" for given, value in ARGUMENTS.items() if given != name)])
    assert f"the following arguments are required: --{name}" in capsys.readouterr().err


def test_no_round_begins_that_would_end_too_late(monkeypatch):
    """A clock that says 1, 2, 3, ...: a round takes 1, and a second one would end at 4."""
    monkeypatch.setattr(shape_times.time, "perf_counter", iter(range(1, 9)).__next__)
    assert shape_times.time_rounds([], torch.ones(1), 3.5) == 1


@pytest.mark.parametrize(
    ("has_gpu", "has_kernels", "changed", "sentence"),
    [
        (False, True, {}, "--device: expected cpu, because torch finds no GPU, got cuda"),
        (True, False, {}, "--device: expected cpu, because this build has no CUDA kernels, got cuda"),
        (True, True, {"dtype": "fp32"}, "--dtype: expected bf16 or fp16 on cuda, got fp32"),
    ],
)
def test_a_device_that_cannot_be_used_gets_one_sentence(capsys, monkeypatch, has_gpu, has_kernels, changed, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(shape_command, "build_info", lambda: {"cuda": "13.0" if has_kernels else ""})
    assert run(device="cuda", **changed) == 2
    assert capsys.readouterr() == ("", f"python -m dmattn shape: {sentence}\n")


@pytest.mark.parametrize(("has_gpu", "expected"), [(False, ("cpu", torch.float32)), (True, ("cuda", torch.bfloat16))])
def test_the_device_that_is_there_and_its_dtype_are_the_defaults(monkeypatch, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(shape_command, "build_info", lambda: {"cuda": "13.0"})
    given = command.parser().parse_args(["shape", *(f"--{name}={value}" for name, value in ARGUMENTS.items())])
    shape = shape_command.checked(given)
    assert (shape.device, shape.dtype) == expected


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory\nmore"), RuntimeError("no memory\nmore"), ValueError("no memory")]
)
def test_errors_of_torch_get_one_sentence(capsys, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(shape_command, "report", fails)
    assert run() == 2
    assert capsys.readouterr() == ("", "python -m dmattn shape: no memory\n")


def test_the_table_has_every_column_of_dmattn_and_of_torch(capsys, monkeypatch):
    """In one second there is no time to compile FlexAttention."""
    monkeypatch.setattr(shape_command, "fit", lambda asked, seconds: (asked, ""))  # however busy this machine is
    assert run() == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("batch 2, 4 heads on 2, head size 16, 200 tokens, 44 keys of each query, float32, ")
    assert lines[2].split() == ["forward", "backward", "decode", "memory", "cache"]
    cache = {"dmattn": dmattn.BoundedCache(2, 2, 32, 16, local=8, sink_keys=4).nbytes, "SDPA (flash)": 2 * 2 * 2 * 200 * 16 * 4}
    for name, line in zip(cache, lines[3:5], strict=True):
        *times, _, memory, count, unit = line.removeprefix(name).split()[:9]
        assert all(float(number) > 0 for number in line.removeprefix(name).split()[:6:2])
        assert (len(times), memory, count, unit) == (5, "-", f"{cache[name] / 1024:.3g}", "KiB")
    assert "FlexAttention was skipped: there was too little time to compile it." in lines
    assert "compared with SDPA (flash), dmattn trains " in lines[-1]


@pytest.mark.filterwarnings("ignore")  # torch's reasons for each backend that it does not take
def test_dmattn_and_torch_have_every_number_on_this_device(device, dtype):
    inputs = Inputs(Shape(1, 4, 2, 64, 512, 64, 8, 4, dtype, device))
    ours, dense = shape_times.warm_up(inputs.dynamic_mask(), inputs.grad_out), shape_command.dense_candidates(inputs)
    assert shape_times.time_rounds([ours, *dense], inputs.grad_out, 0.0) == 1
    for candidate in (ours, shape_command.best(dense)):
        assert candidate.seconds("forward", "backward", "decode") > 0
        assert candidate.cache
        assert (candidate.memory or 0) > 0 or device == "cpu"


def test_candidates_compute_what_their_names_say():
    inputs = Inputs(SMALL)
    ours, dense = inputs.dynamic_mask(), inputs.dense("flash", SDPBackend.FLASH_ATTENTION)
    mask = dmattn.IntervalMask.top_k(inputs.scores, 32, local=8, sink_keys=4)
    expected = dmattn.attention(inputs.query, inputs.key, inputs.value, mask, key_bias=inputs.scores, is_causal=True)
    two_ways.assert_same_in_another_order(ours.attend(), expected, torch.float32)
    expected = dmattn.attention(inputs.query, inputs.key, inputs.value, is_causal=True)
    with dense.context():
        two_ways.assert_same_in_another_order(dense.attend(), expected, torch.float32)
    assert ours.inputs == (*dense.inputs, inputs.scores)
    with torch.no_grad():
        assert ours.decode().shape == dense.decode().shape == (2, 4, 1, 16)


@pytest.mark.slow
def test_flex_attention_is_compiled_and_computes_a_sliding_window():
    inputs = Inputs(SMALL)
    found = shape_command.sliding_candidate(inputs, 300.0)
    assert isinstance(found, Candidate)
    at = torch.arange(200)
    visible = (at <= at[:, None]) & (at[:, None] - at < SMALL.keys)
    expected = dmattn.attention(inputs.query, inputs.key, inputs.value, visible)
    two_ways.assert_same_in_another_order(found.attend(), expected, torch.float32)


@pytest.mark.parametrize("window", [1, 200])
def test_blocks_of_a_sliding_window_are_those_of_its_function(window):
    ours = shape_times.sliding_blocks(window, 700, "cpu")
    theirs = create_block_mask(ours.mask_mod, None, None, 700, 700, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_a_compiler_that_takes_too_long_is_interrupted(monkeypatch):
    monkeypatch.setattr(shape_command, "LEAST_COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(Inputs, "sliding", lambda self: time.sleep(60))
    begin = time.perf_counter()
    expected = "FlexAttention was skipped: there was too little time to compile it."
    assert shape_command.sliding_candidate(Inputs(SMALL), 0.05) == expected
    assert time.perf_counter() - begin < 30
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_does_not_fit_is_cut_skipped_or_refused(monkeypatch):
    """A step of dmattn takes a second for the short call of one key head, and one of torch 100."""
    steps = {"dmattn": row("dmattn", 0.5, 0.5), "flash": row("flash", 50.0, 50.0)}
    monkeypatch.setattr(shape_command, "warm_up", lambda candidate, grad_out: steps[candidate.name])
    monkeypatch.setattr(shape_command, "dense_candidates", lambda inputs: [steps["flash"]])
    monkeypatch.setattr(shape_command, "time_rounds", lambda *_: 1)
    asked = Shape(8, 32, 8, 16, 100, 10, 0, 0, torch.float32, "cpu")
    sizes = []
    for seconds in (16 * 101 * 64, 16 * 101 * 8, 16 * 101 * 2, 40):
        shape, skipped = shape_command.fit(asked, seconds)
        sizes.append((shape.batch, shape.heads, shape.kv_heads))
    assert sizes == [(8, 32, 8), (1, 32, 8), (1, 8, 2), (1, 4, 1)]
    assert skipped == "SDPA was skipped: it needs about --seconds 400."
    with pytest.raises(ValueError, match="--length: expected a step that fits --seconds 3 four times, got one of about 1 s"):
        shape_command.fit(asked, 3)


@pytest.mark.brief
@pytest.mark.parametrize(
    ("dense", "begins"),
    [
        (row("SDPA", 8, 14, 4), "Choose dmattn for this shape: compared with SDPA, dmattn trains 7.3x faster and decodes 4x faster."),
        (row("SDPA", 1, 1, 0.5), "Choose dense attention for this shape: compared with SDPA, dmattn trains 1.5x slower and decodes 2x slower."),
        (row("SDPA", 1, 2.1, 1), "Choose either for this shape: compared with SDPA, dmattn trains as fast and decodes as fast."),
        (row("SDPA", 60, 0.1), "Dense attention was not measured, so these numbers do not say which is faster for this shape."),
    ],
)  # fmt: skip
def test_advice_says_what_was_measured(dense, begins):
    dense.cache = None if dense.samples.keys() == {"forward", "backward"} else 100
    assert shape_command.advice([row("dmattn", 1, 2, 1, cache=10), dense]) == begins
