"""``python -m dmattn shape``: what it measures, how it keeps to its time, what it says, and one sentence for each argument that does not fit."""

from __future__ import annotations

import signal
import time

import dmattn
import pytest
import torch
from dmattn import __main__ as command
from dmattn import shape as shape_command
from dmattn.shape import measure, text, times
from dmattn.shape.times import Row, Shape
from dmattn.testing import tolerance
from torch.nn.attention import SDPBackend, flex_attention

SMALL = Shape(2, 4, 2, 16, 200, 32, 8, 4, torch.float32, "cpu")
ARGUMENTS = {"batch": 2, "heads": 4, "kv-heads": 2, "head-dim": 16, "length": 200, "window": 32, "local": 8, "sink-keys": 4}
OURS = Row("dmattn", 1e-3, 2e-3, 1e-4, 1 << 20, 1000)
DENSE = Row("SDPA (cuDNN)", 8e-3, 14e-3, 4e-4, 1 << 20, 8000)


def run(**changed: object) -> int:
    given = {**ARGUMENTS, "device": "cpu", "seconds": 1, **{name.replace("_", "-"): value for name, value in changed.items()}}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    parsed = command.parser().parse_args(["shape", *words])
    status: int = parsed.run(parsed)
    return status


@pytest.fixture
def at_once(monkeypatch):
    """Every shape fits, however busy this machine is."""
    monkeypatch.setattr(measure, "predicted", lambda asked: lambda shape: (0.0, 0.0))


# Arguments -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch": 0}, "--batch: expected a positive int, got 0"),
        ({"kv_heads": 0}, "--kv-heads: expected a positive int, got 0"),
        ({"heads": 4, "kv_heads": 3}, "--heads: expected a multiple of --kv-heads = 3, got 4"),
        ({"head_dim": 7}, "--head-dim: expected a multiple of 8 up to 256, got 7"),
        ({"head_dim": 264}, "--head-dim: expected a multiple of 8 up to 256, got 264"),
        ({"length": 2**20 + 1}, "--length: expected at most 1048576, got 1048577"),
        ({"local": -1}, "--local: expected an int >= 0, got -1"),
        (
            {"window": 201, "local": 0, "sink_keys": 0},
            "--window: expected --window + --local + --sink-keys from 1 to --length = 200, got 201 + 0 + 0",
        ),
        (
            {"window": 0, "local": 0, "sink_keys": 0},
            "--window: expected --window + --local + --sink-keys from 1 to --length = 200, got 0 + 0 + 0",
        ),
        ({"seconds": "nan"}, "--seconds: expected a positive number, got nan"),
    ],
)
def test_a_bad_argument_gets_one_sentence(capsys, changed, sentence):
    assert run(**changed) == 2
    assert capsys.readouterr() == ("", f"python -m dmattn shape: {sentence}\n")


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


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_device_is_the_gpu_if_there_is_one(monkeypatch, has_gpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(shape_command, "build_info", lambda: {"cuda": "13.0"})
    words = ["shape", "--heads", "4", "--head-dim", "64", "--length", "100", "--window", "10"]
    shape = shape_command.checked(command.parser().parse_args(words))
    dtype = torch.bfloat16 if has_gpu else torch.float32
    assert shape == Shape(1, 4, 4, 64, 100, 10, 0, 0, dtype, device)


@pytest.mark.usefixtures("at_once")
def test_too_little_memory_is_found_before_it_is_taken(capsys, monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1000)
    assert run() == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "python -m dmattn shape: --batch, --length: out of memory: expected a shape whose step fits 0.977 KiB, got"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "out of memory: expected a smaller --batch or --length, got: CUDA out of memory."),
        (RuntimeError("no kernel\nmore"), "cannot run this shape: no kernel"),
        (ValueError("T: too long"), "cannot run this shape: T: too long"),
    ],
)  # fmt: skip
def test_errors_of_torch_get_one_sentence(capsys, monkeypatch, error, sentence):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(shape_command, "measured", fails)
    assert run() == 2
    assert capsys.readouterr() == ("", f"python -m dmattn shape: {sentence}\n")


def test_required_arguments_are_named(run_python):
    finished = run_python("-m", "dmattn", "shape", "--heads", "4")
    assert finished.returncode == 2
    assert "the following arguments are required: --head-dim, --length, --window" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_benchmark_package_is_not_imported(run_python):
    finished = run_python(
        "-c", "import sys, dmattn.shape; print([name for name in sys.modules if name.startswith('dmattn.bench')])"
    )
    assert finished.stdout == "[]\n", finished.stderr


# What is measured ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_the_table_has_every_column_of_dmattn_and_of_torch(capsys):
    """In one second there is no time to compile FlexAttention."""
    assert run() == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("batch 2, 4 heads on 2, head size 16, 200 tokens, window 32 + 8 local + 4 sink keys, float32, ")
    assert lines[2].split() == ["forward", "backward", "decode", "memory", "cache"]
    rows = {name: next(line for line in lines if line.startswith(name + "  ")) for name in ("dmattn", "SDPA (flash)")}
    for name, line in rows.items():
        cells = line.removeprefix(name).split()
        assert len(cells) == 10, line
        assert all(float(number) > 0 for number in cells[::2])
        assert set(cells[1:6:2]) <= {"us", "ms", "s"}
    assert rows["dmattn"].split()[-2:] == [f"{dmattn.BoundedCache(2, 2, 32, 16, local=8, sink_keys=4).nbytes / 1024:.3g}", "KiB"]
    assert rows["SDPA (flash)"].split()[-2:] == [f"{2 * 2 * 2 * 200 * 16 * 4 / 1024:.3g}", "KiB"]
    assert "FlexAttention was skipped: no time was left to compile it." in lines
    assert "compared with SDPA (flash)" in lines[-1]


@pytest.mark.usefixtures("at_once")
@pytest.mark.filterwarnings("ignore")  # torch's reasons for each backend that it does not take
def test_dmattn_and_torch_have_every_number_on_this_device(device, dtype):
    result = measure.measured(Shape(1, 4, 2, 64, 512, 64, 8, 4, dtype, device), 1.0)
    assert result.rounds > 0
    assert result.dense is not None
    for row in (result.ours, result.dense):
        assert all(number is not None and number > 0 for number in row[1:]), row
    assert result.sliding is None


def test_candidates_compute_what_their_names_say():
    torch.manual_seed(1)
    inputs = times.Inputs(SMALL)
    ours, dense = inputs.dynamic_mask(), inputs.dense("flash", SDPBackend.FLASH_ATTENTION)
    mask = dmattn.IntervalMask.top_k(inputs.scores, 32, local=8, sink_keys=4)
    expected = dmattn.attention(inputs.query, inputs.key, inputs.value, mask, key_bias=inputs.scores, is_causal=True)
    tolerance.assert_same_in_another_order(ours.attend(), expected, torch.float32)
    expected = dmattn.attention(inputs.query, inputs.key, inputs.value, is_causal=True)
    with dense.chosen():
        tolerance.assert_same_in_another_order(dense.attend(), expected, torch.float32)
    assert ours.inputs == (*dense.inputs, inputs.scores)
    with torch.no_grad():
        assert ours.decode().shape == dense.decode().shape == (2, 4, 1, 16)


def test_the_cache_is_full_before_a_step_is_timed(monkeypatch):
    made = []
    monkeypatch.setattr(
        times, "BoundedCache", lambda *sizes, **named: made.append(dmattn.BoundedCache(*sizes, **named)) or made[0]
    )
    times.Inputs(SMALL).dynamic_mask()
    assert made[0].position.shape[2] == SMALL.keys
    assert bool((made[0].position >= 0).all())


def test_memory_of_dense_attention_is_its_output_its_sums_and_its_gradients():
    inputs = times.Inputs(SMALL)
    memory = times.warm_up(inputs.dense("flash", SDPBackend.FLASH_ATTENTION), inputs.grad_out)
    gradients = inputs.query.nbytes + 2 * inputs.key.nbytes
    assert memory == inputs.query.nbytes + 2 * 4 * 200 * 4 + gradients


@pytest.mark.parametrize(("length", "keys"), [(1000, 300), (1000, 100), (512, 512), (700, 1), (640, 128), (100, 7)])
def test_the_sliding_mask_is_what_flex_attention_makes(length, keys):
    shape = Shape(1, 1, 1, 16, length, keys, 0, 0, torch.float32, "cpu")
    ours = times.sliding_mask(shape)
    theirs = flex_attention.create_block_mask(ours.mask_mod, None, None, length, length, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.slow
def test_flex_attention_is_compiled_and_timed_forward():
    """On a CPU it has no backward."""
    inputs, notes = times.Inputs(SMALL), []
    found = measure.sliding_candidate(inputs, 300.0, notes)
    assert notes == []
    (row,), count = times.rounds(found, inputs.grad_out, 0.0)
    assert count == 1
    assert row.forward > 0
    assert (row.backward, row.decode, row.memory, row.step()) == (None, None, None, None)
    at = torch.arange(200)
    visible = (at <= at[:, None]) & (at[:, None] - at < SMALL.keys)
    expected = dmattn.attention(inputs.query, inputs.key, inputs.value, visible)
    tolerance.assert_same_in_another_order(found[0][0].attend(), expected, torch.float32)


def test_a_backend_that_refuses_leaves_a_note(monkeypatch):
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    notes: list[str] = []
    monkeypatch.setitem(measure.BACKENDS, "cpu", backends)
    found = measure.dense_candidates(times.Inputs(SMALL), notes)
    assert [candidate.name for candidate, _ in found] == ["flash"]
    assert len(notes) == 1
    assert notes[0].startswith("SDPA's cuDNN backend was skipped: No")


def test_a_backend_that_refuses_one_query_has_no_decode_time():
    def refuses() -> torch.Tensor:
        raise RuntimeError("no kernel")

    inputs = times.Inputs(SMALL)
    candidate = times.Candidate("flash", lambda: inputs.query * 2, (inputs.query,), refuses)
    ready, _ = times.ready(candidate, inputs.grad_out)
    assert ready.decode is None


@pytest.mark.slow
def test_the_whole_command_takes_about_the_seconds_that_it_is_given(run_python):
    words = "--heads 4 --kv-heads 2 --head-dim 64 --length 4096 --window 256 --dtype bf16 --device cpu --seconds 15"
    begin = time.perf_counter()
    finished = run_python("-m", "dmattn", "shape", *words.split())
    assert finished.returncode == 0, finished.stderr
    assert time.perf_counter() - begin < 60
    lines = finished.stdout.splitlines()
    assert lines[0].startswith("batch 1, ")
    assert [line.split("  ")[0] for line in lines[3:4]] == ["dmattn"]
    assert lines[-1].endswith(".")


# Time ----------------------------------------------------------------------------------------------------------------------------


def test_what_takes_too_long_is_interrupted():
    before = signal.getsignal(signal.SIGALRM)
    begin = time.perf_counter()
    with pytest.raises(times.OutOfTimeError), times.at_most(0.05):
        time.sleep(60)
    assert time.perf_counter() - begin < 30
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_compiler_that_takes_too_long_is_skipped(monkeypatch):
    monkeypatch.setattr(times.Inputs, "sliding", lambda self: time.sleep(60))
    monkeypatch.setattr(measure, "LEAST_COMPILE_SECONDS", 0.01)
    notes: list[str] = []
    assert measure.sliding_candidate(times.Inputs(SMALL), 0.05, notes) == []
    assert notes == ["FlexAttention was skipped: it did not compile in the 0 s that were left."]


def test_rounds_end_when_the_next_would_pass_the_time(monkeypatch):
    clock = iter(range(1000))  # each look at the clock is a second later
    monkeypatch.setattr(times.time, "perf_counter", lambda: next(clock))
    candidate = times.Candidate("one", lambda: torch.ones(1), ())
    (row,), count = times.rounds([(candidate, None)], torch.ones(1), 16.0)
    assert row.forward == 1
    assert count == 3  # a round takes 3 seconds and a fourth would begin at 14


def test_predictions_are_in_proportion_to_pairs(monkeypatch):
    rows = [Row("dmattn", 1.0, 2.0), Row("SDPA", 2.0, 4.0), Row("SDPA", 1.0, 4.0)]
    monkeypatch.setattr(measure, "rounds", lambda *_: (rows, 1))
    shape = Shape(8, 8, 2, 16, 2048, 512, 0, 0, torch.float32, "cpu")
    probe = measure.probe_of(shape)
    assert (probe.batch, probe.heads, probe.kv_heads, probe.length, probe.keys) == (1, 4, 1, 1024, 512)
    ours, dense = measure.predicted(shape)(shape)
    assert ours == 3 * (16 * (2048 * 512 - 512 * 511 // 2) / (1024 * 512 - 512 * 511 // 2))
    assert dense == 5 * 16 * (2048 * 2049) / (1024 * 1025)


def test_a_shape_that_takes_too_long_is_cut_to_fewer_sequences_and_then_heads():
    shape = Shape(8, 32, 8, 64, 100, 10, 0, 0, torch.float32, "cpu")

    def sizes(most: float) -> tuple[int, int, int]:
        found = measure.fitted(shape, lambda other: other.batch * other.kv_heads, most)
        return found.batch, found.heads, found.kv_heads

    assert [sizes(most) for most in (64, 32, 8, 4, 0)] == [(8, 32, 8), (4, 32, 8), (1, 32, 8), (1, 16, 4), (1, 4, 1)]


def test_what_was_cut_and_skipped_is_said(capsys, monkeypatch):
    monkeypatch.setattr(measure, "predicted", lambda asked: lambda shape: (0.1 * shape.batch * shape.kv_heads, 100.0))
    assert run() == 0
    out = capsys.readouterr().out
    assert (
        "Measured with batch 1 of 2 and 2 of 4 heads, because the whole would not fit into 1 s; compare rows, not times." in out
    )
    assert "SDPA was skipped: a training step would take about 100 s; --seconds 400 leaves time for it." in out
    assert out.endswith("Dense attention was not measured, so these numbers do not say which is faster for this shape.\n")


def test_a_shape_that_never_fits_gets_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(measure, "predicted", lambda asked: lambda shape: (100.0, 1000.0))
    assert run() == 2
    sentence = "--length: expected a step of dmattn that fits --seconds 1 several times, got about 100 s"
    assert capsys.readouterr() == ("", f"python -m dmattn shape: {sentence}\n")


def test_a_busy_machine_is_named():
    assert measure.busy(1.5, 2) == []
    assert measure.busy(12.4, 2) == ["Other programs keep this machine busy (load 12 on 2 cores), so times vary."]


# Words ---------------------------------------------------------------------------------------------------------------------------


def test_the_best_backend_has_the_fastest_step_and_the_fastest_decode():
    notes: list[str] = []
    rows = [Row("cuDNN", 1.0, 2.0, None), Row("flash", 0.5, 3.0, 0.25), Row("efficient", 2.0, None, 0.5)]
    assert measure.best(rows, notes) == Row("SDPA (cuDNN)", 1.0, 2.0, 0.25)
    assert notes == ["SDPA decodes fastest by its flash backend, which is the time shown."]
    assert measure.best([], notes) is None


def test_units_and_columns():
    assert [text.duration(value) for value in (None, 9.97e-6, 0.0123, 1.5, 343.0)] == [
        "-",
        "9.97 us",
        "12.3 ms",
        "1.5 s",
        "343 s",
    ]
    assert [text.size(value) for value in (None, 12, 2048, 3 << 20, 5 << 30)] == ["-", "12 B", "2 KiB", "3 MiB", "5 GiB"]
    lines = text.table([OURS, DENSE, Row("FlexAttention", 2e-3)]).splitlines()
    assert lines == [
        "               forward  backward  decode  memory      cache",
        "dmattn            1 ms      2 ms  100 us   1 MiB  0.977 KiB",
        "SDPA (cuDNN)      8 ms     14 ms  400 us   1 MiB   7.81 KiB",
        "FlexAttention     2 ms         -       -       -          -",
    ]


def test_advice_for_a_shape_where_dynamic_masks_are_faster():
    assert text.advice(OURS, DENSE, None) == (
        "Dynamic masks are faster for this shape: dmattn is 8x faster forward, 7x faster backward and 4x faster in decoding, "
        "compared with SDPA (cuDNN), and its cache takes 12 % of the bytes."
    )


@pytest.mark.parametrize(
    ("dense", "begins"),
    [
        (DENSE._replace(forward=5e-4, backward=1e-3, decode=5e-5), "Dense attention is faster for this shape: dmattn is 2x slower forward"),
        (DENSE._replace(decode=5e-5), "Dynamic masks are faster in training and slower in decoding for this shape: dmattn is 8x"),
        (DENSE._replace(forward=5e-4, backward=1e-3), "Dynamic masks are slower in training and faster in decoding for this shape"),
        (
            DENSE._replace(forward=1e-3, backward=2e-3, decode=1e-4),
            "Neither is clearly faster for this shape: dmattn is as fast forward, as fast backward and as fast in decoding",
        ),
        (DENSE._replace(decode=None), "Dynamic masks are faster for this shape: dmattn is 8x faster forward and 7x faster backward, "),
        (DENSE._replace(forward=None, backward=None, decode=5e-5), "Dense attention is faster for this shape: dmattn is 2x slower in dec"),
    ],
)  # fmt: skip
def test_advice_says_what_was_measured(dense, begins):
    said = text.advice(OURS, dense, None)
    assert said.startswith(begins)
    assert said.endswith(".")
    assert ". " not in said


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.04, "as fast"),
        (0.97, "as fast"),
        (1.06, "1.1x faster"),
        (0.5, "2x slower"),
        (119.3, "119x faster"),
        (1 / 12, "12x slower"),
    ],
)
def test_ratios_in_words(factor, words):
    assert text.compared(factor) == words


def test_advice_names_a_faster_sliding_window():
    said = text.advice(OURS, DENSE, Row("FlexAttention", 5e-4, 1e-3))
    assert said.endswith("; FlexAttention's sliding window is 2x faster in a training step, compared with dmattn.")
    said = text.advice(OURS, DENSE, Row("FlexAttention", 2e-3))
    assert said.endswith("; FlexAttention's sliding window is 2x slower forward, compared with dmattn.")


def test_no_advice_without_dense_attention():
    expected = "Dense attention was not measured, so these numbers do not say which is faster for this shape."
    assert text.advice(OURS, None, None) == text.advice(OURS, Row("SDPA (flash)"), None) == expected
