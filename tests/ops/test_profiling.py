"""DMATTN_LOG and DMATTN_NVTX: what they print and mark, that they do not change compiled programs, and that unset they change nothing."""

from __future__ import annotations

import warnings

import dmattn
import pytest
import torch
from dmattn import autograd, call, ops, plain, profiling
from dmattn.testing import strategies

tensor = strategies.random_tensor
FUNCTIONS = [(ops, name) for name in profiling.MARKED] + [(autograd, "_gradients"), (plain, "is_enabled")]


@pytest.fixture
def switched(monkeypatch):
    """Installs for an environment; all is put back after the test."""

    def install(**environment):
        for module, name in FUNCTIONS:
            monkeypatch.setattr(module, name, getattr(module, name))
        profiling.install(environment)

    return install


def inputs(device="cpu", dtype=torch.float32):
    return [tensor((1, heads, 40, 16), heads, dtype, device).requires_grad_() for heads in (4, 2, 2)]


@pytest.fixture
def ranges(monkeypatch):
    """The NVTX ranges that are begun and ended."""
    happened = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: happened.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: happened.append("end"))
    return happened


@pytest.mark.parametrize(
    "environment", [{}, *({"DMATTN_LOG": off, "DMATTN_NVTX": off} for off in ("", "0", "false", "No", "OFF"))]
)
def test_nothing_is_replaced_without_the_variables(switched, environment):
    before = [getattr(module, name) for module, name in FUNCTIONS]
    switched(**environment)
    assert [getattr(module, name) for module, name in FUNCTIONS] == before
    assert all(not hasattr(function, "__wrapped__") for function in before)


@pytest.mark.parametrize("name", profiling.VARIABLES)
def test_another_word_is_said_and_switches_nothing_on(switched, name):
    before = [getattr(module, name) for module, name in FUNCTIONS]
    with pytest.warns(UserWarning, match=f"{name}: expected 1, true, yes, on, 0, false, no or off, got 'banana'; it stays off"):
        switched(**{name: "banana"})
    assert [getattr(module, name) for module, name in FUNCTIONS] == before


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON"])
def test_every_word_that_switches_on(switched, word):
    switched(DMATTN_LOG=word)
    assert hasattr(ops.forward, "__wrapped__")


def test_a_line_is_printed_for_each_call(switched, capsys, device, dtype):
    query, key, value = inputs(device, dtype)
    scores = torch.rand(1, 2, 40, device=device)
    expected = dmattn.dynamic_mask_attention(query, key, value, scores, 8)
    switched(DMATTN_LOG="1")
    out = dmattn.dynamic_mask_attention(query, key, value, scores, 8)
    dmattn.attention(query, key, value, torch.ones(40, 40, dtype=torch.bool, device=device)).sum().backward()
    first, second = capsys.readouterr().err.splitlines()
    assert torch.equal(out, expected)
    counted = dmattn.stats(query.shape, dmattn.IntervalMask.top_k(scores, 8), key.shape, is_causal=True, dtype=dtype)
    assert first == f"dmattn: {counted.line}, on {out.device}"
    assert "mask block: 100.00% of pairs visible" in second


def test_steps_that_decode_are_printed_and_marked_as_well(switched, monkeypatch, capsys, ranges, device, dtype):
    """Few queries beside many keys are served by the op ``decode``, here on a CPU, too."""
    monkeypatch.setattr(call, "DECODE_DEVICES", {device})
    query, key, value = (tensor((1, heads, length, 16), heads, dtype, device) for heads, length in ((4, 1), (2, 5000), (2, 5000)))
    switched(DMATTN_LOG="1", DMATTN_NVTX="1")
    dmattn.attention(query, key, value, is_causal=True)
    counted = dmattn.stats(query.shape, None, key.shape, is_causal=True, dtype=dtype)
    assert capsys.readouterr().err == f"dmattn: {counted.line}, on {query.device}\n"
    assert ranges == ["dmattn.decode", "end"]


def test_compiled_programs_print_and_mark_nothing(switched, capsys, ranges):
    switched(DMATTN_LOG="1", DMATTN_NVTX="1")
    compiled = torch.compile(dmattn.attention, fullgraph=True, backend="eager", dynamic=True)
    query, key, value = inputs()
    out = compiled(query, key, value, is_causal=True)
    assert out.requires_grad
    assert capsys.readouterr().err == ""
    assert ranges == []


def test_transforms_print_nothing(switched, capsys):
    switched(DMATTN_LOG="1")
    query, key, value = (x.detach() for x in inputs())
    expected = torch.stack([dmattn.attention(query, key, value)] * 2)
    capsys.readouterr()
    assert torch.equal(torch.func.vmap(lambda q: dmattn.attention(q, key, value))(torch.stack([query] * 2)), expected)
    assert dmattn.attention(*(x.to("meta") for x in (query, key, value))).is_meta
    assert capsys.readouterr().err == ""


def test_each_op_has_a_range(switched, ranges):
    query, key, value = inputs()
    switched(DMATTN_NVTX="1")
    dmattn.dynamic_mask_attention(query, key, value, torch.rand(1, 2, 40), 8).sum().backward()
    assert ranges == ["dmattn.select", "end", "dmattn.forward", "end", "dmattn.backward", "end"]


def test_a_range_ends_with_an_error(switched, ranges):
    switched(DMATTN_NVTX="1")
    with pytest.raises(RuntimeError):
        ops.select(torch.zeros(1, 1, 4), None, -1, True)
    assert ranges == ["dmattn.select", "end"]


def test_every_function_of_the_short_way_is_marked():
    functions = {
        name for name, value in vars(ops).items() if callable(value) and getattr(value, "__module__", "") == ops.__name__
    }
    assert {name for name in functions if not name.startswith("_")} == set(profiling.MARKED)


def test_a_torch_without_nvtx_is_said(switched, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(UserWarning, match="DMATTN_NVTX: this torch was built without CUDA and has no NVTX"):
        switched(DMATTN_NVTX="1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmattn.attention(*inputs())


def test_the_environment_is_read_at_import(run_python):
    program = "import torch, dmattn; q = torch.ones(1, 1, 5, 8); dmattn.attention(q, q, q, is_causal=True)"
    finished = run_python("-c", program, DMATTN_LOG="1")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == (
        "dmattn: query [1, 1, 5, 8] key [1, 1, 5, 8] float32, mask none: 60.00% of pairs visible, 100.00% computed, 5 live keys a tile, "
        "0.0% of tiles skipped, predicted 1.0x of dense causal, on cpu\n"
    )
