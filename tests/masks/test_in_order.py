"""The hint that keys lie in order: which calls give it, what keeps it and what drops it, and that right or wrong it changes no result."""

from __future__ import annotations

import dmattn
import pytest
import torch
from cuda_inputs import assert_same_results
from dmattn import BlockMask, IntervalMask, autograd
from dmattn._library import arguments_of
from dmattn.testing import AttentionCase, assert_matches_reference, strategies
from dmattn_bench.two_ways import assert_same_lse_by_another_way
from watched import Watched

tensor = strategies.random_tensor
ENDS = torch.tensor([0, 5, 5, 6, 24], dtype=torch.int32)
OPS = ("forward", "backward")
PLACES = {op: list(arguments_of(op)).index("is_in_order") for op in OPS}


def tokens(heads=2, device="cpu", dtype=torch.float32):
    return [tensor((24, heads, 16), i, dtype, device).requires_grad_() for i in range(3)]


def packed(**rules):
    return lambda q, k, v: dmattn.varlen_attention(q, k, v, ENDS, is_causal=True, **rules)


def masked(mask, **options):
    return lambda q, k, v: dmattn.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask, **options)


DOCUMENTS = IntervalMask.documents(24, ENDS)
SLIDING = IntervalMask.sliding_window(24, 4)
SCORES = tensor((24, 2), 7)
CALLS = {
    "a pack": (packed(), True),
    "a pack with a bias of each key": (packed(key_bias=SCORES), True),
    "a pack under a mask of documents": (packed(mask=DOCUMENTS), True),
    "a pack under another mask": (packed(mask=SLIDING), False),
    "a pack that selects": (packed(scores=SCORES, window=3), False),
    "a pack with local keys and sinks": (packed(local=3, sink_keys=1), False),
    "documents": (masked(DOCUMENTS), True),
    "documents, later queries": (masked(DOCUMENTS, query_offset=1), True),
    "documents and padding": (masked(DOCUMENTS & IntervalMask.padding(24, 20)), True),
    "chunks": (masked(IntervalMask.chunked(24, 6)), True),
    "documents of a batch": (masked(IntervalMask.stack([DOCUMENTS, DOCUMENTS])[1]), True),
    "documents from numbers": (masked(IntervalMask.from_tensor(DOCUMENTS.to_tensor())), False),
    "numbers that are documents": (masked(IntervalMask.from_tensor(DOCUMENTS.to_tensor()).as_base("causal")), True),
    "documents, moved": (masked(DOCUMENTS.shift(1)), False),
    "documents and a sliding window": (masked(DOCUMENTS & SLIDING), False),
    "selected in documents": (masked(IntervalMask.top_k(SCORES.T[None], 3, base=DOCUMENTS)), False),
    "documents and blocks": (masked(DOCUMENTS & BlockMask.from_bool(torch.ones(1, 1, 24, 24, dtype=torch.bool))), False),
    "no mask": (masked(None, is_causal=True), False),
}


@pytest.mark.parametrize(("call", "hint"), CALLS.values(), ids=CALLS)
def test_which_calls_give_it(monkeypatch, call, hint):
    """To forward and to backward, on the short way and on the dispatcher's."""
    given, short_attention = [], autograd.short_attention
    monkeypatch.setattr(autograd, "short_attention", lambda inputs: given.append(inputs) or short_attention(inputs))
    leaves = tokens()
    expected = torch.autograd.grad(call(*leaves).sum(), leaves)
    assert [inputs[PLACES["forward"]] for inputs in given] == [hint]
    with Watched() as hints:
        result = torch.autograd.grad(call(*leaves).sum(), leaves)
    assert [(name, given["is_in_order"]) for name, given in hints.calls if name in OPS] == [("forward", hint), ("backward", hint)]
    assert all(map(torch.equal, result, expected))


def test_backward_gets_it_on_the_short_way(monkeypatch):
    leaves, given, gradients = tokens(), [], dmattn.autograd._gradients
    out = packed()(*leaves)
    monkeypatch.setattr(dmattn.autograd, "_gradients", lambda inputs: given.append(inputs) or gradients(inputs))
    out.sum().backward()
    assert [inputs[PLACES["backward"]] for inputs in given] == [True]


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda call: torch.func.grad(lambda *given: call(*given).sum())])
def test_transforms_keep_it(transform):
    call = masked(DOCUMENTS)
    leaves = [torch.stack([given.detach()] * 2) for given in tokens()]
    with Watched() as hints:
        transform(call)(*(leaves if transform is torch.func.vmap else [given[0] for given in leaves]))
    assert {given["is_in_order"] for name, given in hints.calls if name in OPS} == {True}


@pytest.mark.parametrize(("call", "hint"), [CALLS[name] for name in ("a pack", "documents", "a pack that selects")])
def test_compiled_and_exported_programs_keep_it(call, hint):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    def hints_of(graph):
        place, nodes = PLACES["forward"], (node for node in graph.nodes if "dmattn.forward" in str(node.target))
        return [len(node.args) > place and node.args[place] for node in nodes]

    graphs, leaves = [], [given.detach() for given in tokens()]

    def backend(module, _):
        graphs.append(module.graph)
        return module

    assert torch.equal(torch.compile(Model(), fullgraph=True, backend=backend)(*leaves), call(*leaves))
    assert [hints_of(graph) for graph in graphs] == [[hint]]
    assert hints_of(torch.export.export(Model(), tuple(leaves)).graph) == [hint]


# Right or wrong, it changes no result -------------------------------------------------------------------------------------------------


def intervals(kind, heads, queries, keys, device):
    """A mask with the hint, [2, heads, keys]. Most kinds belie it."""
    generator = torch.Generator().manual_seed(3)

    def draw(low, high):
        return torch.randint(low, high, (2, heads, keys), generator=generator, dtype=torch.int32)

    if kind == "documents":
        # Of one token, of none, and such as begin and end beside and at the edges of tiles.
        ends = torch.tensor([0, 1, 1, 64, 127, 128, 129, 300, 384, 511, 576, 1025, 1500, keys], dtype=torch.int32).clamp(max=keys)
        mask = IntervalMask.documents(keys, ends, is_causal=False)
        mask = IntervalMask.stack([mask, mask & IntervalMask.padding(keys, keys * 5 // 6)])
        start, end = (bound.expand(2, heads, keys) for bound in (mask.start, mask.end))
    elif kind == "any":
        start, end = torch.stack([draw(-50, keys), draw(-50, keys)]).sort(0).values
    elif kind == "few":  # with many keys between them that nobody sees
        start, end = draw(-50, keys), torch.where(draw(0, 40) == 0, keys, 0).int()
    else:
        start = torch.arange(keys, dtype=torch.int32).flip(0).expand(2, heads, keys)  # the first keys come last
        end = start + draw(0, 700)
    return IntervalMask(start.contiguous(), end.contiguous()).as_base("whole").to(device)


KINDS = ["documents", "any", "few", "backwards"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "lengths", "size"), [((4, 2, 1), (1290, 1290), 64), ((8, 2, 2), (700, 1333), 128),
                                                        ((3, 3, 3), (1500, 1100), 72), ((4, 2, 4), (1100, 1100), 128),
                                                        ((2, 1, 1), (1100, 1100), 256)], ids=str)  # fmt: skip
def test_it_changes_no_result(device, dtype, kind, causal, heads, lengths, size):
    """Beside the specification on a GPU, where it picks kernels; keys that nobody sees hold NaN."""
    (query_heads, kv_heads, mask_heads), (queries, keys) = heads, lengths
    if device == "cpu":
        queries, keys, size = queries // 8, keys // 8, 16
    mask = intervals(kind, mask_heads, queries, keys, device)
    query, key, value = (
        tensor((2, count, length, size), i, dtype, device)
        for i, (count, length) in enumerate(((query_heads, queries), (kv_heads, keys), (kv_heads, keys)))
    )
    visible = mask.to_bool(queries, keys)
    if causal:
        visible = visible & IntervalMask.causal(keys, device=device).to_bool(queries, keys)
    seen = visible.any(2).repeat_interleave(query_heads // visible.shape[1], 1).unflatten(1, (kv_heads, -1)).any(2)
    key, value = (x.masked_fill(~seen[..., None], torch.nan) for x in (key, value))

    def hinted(query, key, value, _=None, *, is_causal=False, **options):
        return dmattn.attention(query, key, value, mask, is_causal=causal, **options)

    assert_matches_reference(AttentionCase(query, key, value, visible=visible), hinted)


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"dropout_p": 0.3}, {"key_bias": True}, {"deterministic": True}, {}], ids=str
)
@pytest.mark.parametrize(("queries", "keys"), [(20000, 20000), (6000, 20000)])
@pytest.mark.gpu
def test_long_packs_with_options(device, options, queries, keys):
    """Beside the same call without the hint, which gathers keys."""
    given = [tensor((1, heads, length, 128), i, torch.bfloat16, device).requires_grad_()
             for i, (heads, length) in enumerate(((4, queries), (2, keys), (2, keys)))]  # fmt: skip
    ends = torch.tensor([0, 1, 3000, 3000, 3001, 11000, 11064, 16384, keys], dtype=torch.int32)
    mask = IntervalMask.documents(keys, ends).to(device)
    if options.get("key_bias"):
        given.append(tensor((1, 2, keys), 4, device=device).requires_grad_())
        options = {"key_bias": given[3]}
    if "dropout_p" in options:
        options = {**options, "dropout_seed": torch.tensor([5], device=device)}
    results = []
    for hinted in (mask, IntervalMask(mask.start, mask.end)):
        out, lse = dmattn.attention(*given[:3], hinted, is_causal=True, return_lse=True, **options)
        grad = tensor(out.shape, 9, out.dtype, device), tensor(lse.shape, 10, lse.dtype, device)
        results.append([out, lse, *torch.autograd.grad((out, lse), given, grad)])
    (out, lse, *gradients), (expected, expected_lse, *expected_gradients) = results
    assert_same_results([out, *gradients], [expected, *expected_gradients])
    # In the pack every query sees itself.
    assert_same_lse_by_another_way(lse, expected_lse, torch.bfloat16)
