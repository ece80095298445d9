"""A serving engine's batch over pages against attention request by request."""

from __future__ import annotations

import pytest
import torch
from dmattn import attention
from dmattn.integrations.paged import Paged, store
from dmattn_bench import two_ways

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16


def batch_of(new, before, dtype, device, page_size=PAGE):
    """A pool with the keys of requests at random pages, and each request's keys and values [1, Hkv, S, D]."""
    lengths = [n + b for n, b in zip(new, before, strict=True)]
    most = max(-(-length // page_size) for length in lengths) + 1
    pages = torch.randperm(most * len(new) + 3)[: most * len(new)].view(len(new), most)
    pool = torch.full((2, most * len(new) + 3, page_size, KV_HEADS, SIZE), torch.nan, dtype=dtype)
    rows = []
    for own, length in zip(pages, lengths, strict=True):
        each = torch.randn(2, length, KV_HEADS, SIZE, dtype=dtype)
        slots = torch.arange(length)
        slots = own[slots // page_size] * page_size + slots % page_size
        store(pool[0], pool[1], *each, slots, spare=0)
        rows.append(each.transpose(1, 2)[:, None].to(device))
    ends = torch.tensor([0, *new]).cumsum(0).int()
    return ends.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), pages.int().to(device), pool.to(device), rows


@pytest.mark.parametrize(
    "more", [{}, {"window": 20}, {"window": 1}, {"softcap": 3.0, "scale": 0.3}, {"sinks": True, "window": 40}]
)
@pytest.mark.parametrize(
    ("new", "before"),
    [([1, 1, 1], [40, 0, 17]), ([1, 1, 5, 30], [3, 63, 20, 0]), ([12, 40], [0, 0]), ([7], [90])],
    ids=["decode", "mixed", "prompts", "chunk"],
)
def test_a_batch(new, before, more, dtype, device):
    ends, lengths, table, pool, rows = batch_of(new, before, dtype, device)
    query = torch.randn(sum(new), HEADS, SIZE, dtype=dtype, device=device)
    more = dict(more)
    if more.pop("sinks", False):
        more["sinks"] = torch.randn(HEADS, device=device)
    decodes = sum(n == 1 for n in new)
    paged = Paged(ends, lengths, table, PAGE, decodes, int(lengths[decodes:].sum()), not any(before[decodes:]))
    fresh = (torch.cat([key[0].transpose(0, 1)[-n:] for (key, _), n in zip(rows, new, strict=True)]),
             torch.cat([value[0].transpose(0, 1)[-n:] for (_, value), n in zip(rows, new, strict=True)]))  # fmt: skip
    expected = []
    for own, (key, value) in zip(query.split(new), rows, strict=True):
        behind = torch.arange(key.shape[2])[-own.shape[0] :, None] - torch.arange(key.shape[2])
        visible = (behind >= 0) & (behind < more.get("window", 10**6))
        options = {name: given for name, given in more.items() if name != "window"}
        expected.append(attention(own.transpose(0, 1)[None], key, value, visible.to(device), **options)[0].transpose(0, 1))
    for given in (None, fresh):
        out = paged.attend(query, *pool, new=given, **more)
        two_ways.assert_same_by_another_way(out, torch.cat(expected), dtype)


def test_pages_of_any_size_without_decodes(dtype, device):
    ends, lengths, table, pool, rows = batch_of([1, 4], [30, 9], dtype, device, page_size=1)
    query = torch.randn(5, HEADS, SIZE, dtype=dtype, device=device)
    out = Paged(ends, lengths, table, 1, 0, int(lengths.sum()) + 7).attend(query, *pool)
    parts = [
        attention(own.transpose(0, 1)[None], *row, is_causal=True)[0] for own, row in zip(query.split([1, 4]), rows, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat([part.transpose(0, 1) for part in parts]))
    with pytest.raises(ValueError, match="decodes: expected 0 for pages of 1"):
        Paged(ends, lengths, table, 1, 1, 40)


def test_a_negative_slot_goes_to_the_spare_one():
    keys, values = torch.zeros(3, 16, 1, 8), torch.zeros(3, 16, 1, 8)
    new = torch.ones(3, 1, 8)
    store(keys, values, new, 2 * new, torch.tensor([5, -1, 47]), spare=17)
    assert (keys.sum(), values.sum()) == (24, 48)
    for page, place in ((0, 5), (1, 1), (2, 15)):
        assert keys[page, place].all()
