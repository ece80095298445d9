"""Decoding with index masks from caches that lie in memory in every way, also in programs that are recorded: the same as from plain ones."""

from __future__ import annotations

import dmattn
import pytest
import torch
from dmattn import IndexMask
from dmattn.testing.strategies import random_tensor as tensor

B, H, HKV, N, D = 2, 4, 2, 40, 16
LAYOUTS = {
    "plain": lambda x: x.clone(),
    "keys first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "part of more keys": lambda x: torch.cat((x, torch.full_like(x, float("nan"))), 2)[:, :, :N],
    "part of more heads": lambda x: torch.cat((torch.full_like(x, float("nan")), x), 1)[:, HKV:],
}


def given_for(device, queries, heads=HKV):
    query = tensor((B, H, queries, D), 1, torch.float32, device)
    key, value = (tensor((B, HKV, N, D), seed, torch.float32, device) for seed in (2, 3))
    lengths = torch.tensor([N, 23], dtype=torch.int32, device=device)
    indices = (tensor((B, heads, queries, 7), 4, torch.float32, device).abs() * 20).int() % N
    return query, key, value, lengths, indices


def decode(query, key, value, lengths, indices):
    return dmattn.decode_attention(query, key, value, lengths, mask=IndexMask(indices, local=3, sink_keys=1))


class Decode(torch.nn.Module):
    def forward(self, *given):
        return decode(*given)


def decode_projected(query, both, lengths, indices):
    """Keys and values are made in the program, in an order that a compiler may choose."""
    key, value = (both * 2).view(B, N, 2, HKV, D).transpose(1, 3).unbind(2)
    return decode(query, key, value, lengths, indices)


@pytest.mark.parametrize("of_value", LAYOUTS)
@pytest.mark.parametrize("of_key", LAYOUTS)
def test_any_layout_of_a_cache(of_key, of_value):
    query, key, value, lengths, indices = given_for("cpu", 2)
    found = decode(query, LAYOUTS[of_key](key), LAYOUTS[of_value](value), lengths, indices)
    torch.testing.assert_close(found, decode(query, key, value, lengths, indices))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_programs_read_what_they_made(backend, queries):
    query, _, _, lengths, indices = given_for("cpu", queries)
    both = tensor((B, N, 2 * HKV * D), 5)
    expected = decode_projected(query, both, lengths, indices)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(decode_projected, fullgraph=True, backend=backend, dynamic=dynamic)
        torch.testing.assert_close(compiled(query, both, lengths, indices), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_programs_take_any_layout(layout):
    query, key, value, lengths, indices = given_for("cpu", 1)
    expected = decode(query, key, value, lengths, indices)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, LAYOUTS[layout](key), LAYOUTS[layout](value), lengths, indices), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recorded", LAYOUTS)
def test_an_exported_program_takes_any_layout(recorded, layout):
    query, key, value, lengths, indices = given_for("cpu", 1)
    expected = decode(query, key, value, lengths, indices)
    program = torch.export.export(Decode(), (query, LAYOUTS[recorded](key), LAYOUTS[recorded](value), lengths, indices)).module()
    found = program(query, LAYOUTS[layout](key), LAYOUTS[layout](value), lengths, indices)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_traced_program_takes_any_layout(layout):
    query, key, value, lengths, indices = given_for("cpu", 1)
    traced = torch.jit.trace(decode, (query, key, value, lengths, indices))
    found = traced(query, LAYOUTS[layout](key), LAYOUTS[layout](value), lengths, indices)
    torch.testing.assert_close(found, decode(query, key, value, lengths, indices))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("mapped", [(1, 2), (4,), (0,), (0, 1, 2, 3, 4)], ids=str)
def test_vmap_over_a_part_of_the_arguments(mapped, queries):
    given = given_for("cpu", queries)
    stacked = [torch.stack((x, x.flip(1) if x.dim() > 1 else x, x)) if i in mapped else x for i, x in enumerate(given)]
    dims = tuple(0 if i in mapped else None for i in range(5))
    expected = torch.stack([decode(*(x[n] if i in mapped else x for i, x in enumerate(stacked))) for n in range(3)])
    torch.testing.assert_close(torch.vmap(decode, in_dims=dims)(*stacked), expected)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)], ids=str)
def test_the_output_lies_in_memory_as_the_query_does(order, queries, sinks):
    query, key, value, lengths, indices = given_for("cpu", queries)
    inverse = [order.index(axis) for axis in range(3)]
    query = query.permute(*order, 3).contiguous().permute(*inverse, 3)
    options = {"sinks": torch.randn(H)} if sinks else {}
    found = dmattn.decode_attention(query, key, value, lengths, mask=IndexMask(indices), **options)
    assert [found.stride(axis) for axis in range(4) if found.shape[axis] > 1] == [
        query.stride(axis) for axis in range(4) if query.shape[axis] > 1
    ]
