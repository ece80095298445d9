"""What only a GPU can show: graph capture, side streams, repeated gradients, memory bounds, and the errors of the CUDA ops."""

from __future__ import annotations

import dmattn
import pytest
import torch
from dmattn.testing.case import AttentionCase
from dmattn.testing.tolerance import assert_close_to_reference

pytestmark = pytest.mark.gpu


def inputs(length=777, heads=4, kv_heads=2, size=64, seed=0, batch=2):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(batch, *shape, generator=generator, device="cuda")  # noqa: E731
    q, k, v = (draw(h, length, size).bfloat16() for h in (heads, kv_heads, kv_heads))
    return q, k, v, draw(kv_heads, length), draw(heads, length, size).bfloat16()


def step(q, k, v, scores, grad_out, deterministic=True):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    out = dmattn.dynamic_mask_attention(*leaves, 100, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def test_capture_new_inputs_replay():
    static = inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    for seed in (1, 2):
        fresh = inputs(seed=seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        for got, expected in zip(captured, step(*fresh), strict=True):
            assert torch.equal(got, expected)


def test_packing_is_captured_too():
    mask = torch.rand(1, 2, 300, 300, device="cuda") > 0.5
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block = dmattn.BlockMask.from_bool(mask)
    mask.copy_(torch.rand(1, 2, 300, 300, device="cuda") > 0.9)
    graph.replay()
    assert torch.equal(block.to_bool(), mask)


def arrive_late(given, device):
    """Copies that hold NaN until a while after the current stream of the device reaches them: another stream would read the NaN."""
    copies = [torch.full_like(x, torch.nan, device=device) for x in given]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(100_000_000)  # cycles
    for copy, x in zip(copies, given, strict=True):
        copy.copy_(x)
    return copies


def test_side_stream():
    given = inputs()
    expected = step(*given)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = step(*arrive_late(given, "cuda"))
        torch.cuda.current_stream().synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("side", [False, True], ids=["its own stream", "a side stream"])
def test_a_second_device_while_the_first_is_current(side):
    given = inputs()
    window, visible = 100, torch.rand(1, 4, 777, 777, device="cuda:0") > 0.5

    def everything(q, k, v, scores, grad_out, visible):
        end = dmattn.IntervalMask.top_k(scores, window).end
        block = dmattn.BlockMask.from_bool(visible)
        return [*step(q, k, v, scores, grad_out), end, dmattn.attention(q, k, v, block), block.bits]

    expected = everything(*given, visible)
    torch.cuda.synchronize()
    there = torch.device("cuda:1")
    moved = visible.to(there)
    stream = torch.cuda.Stream(there) if side else torch.cuda.default_stream(there)
    with torch.cuda.stream(stream):
        late = arrive_late([x.to(there) for x in given], there)
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream(there) == stream
            got = everything(*late, moved)
            assert torch.cuda.current_device() == 0
        stream.synchronize()
    assert all(x.device == there for x in got)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, expected, strict=True))


def long_spans(kind, heads, queries, keys):
    """Starts and ends that make the lists of live keys short, long, many, or not worth it."""

    def draw(low, high):
        return torch.randint(low, high, (2, heads, keys), device="cuda", dtype=torch.int32)

    always = torch.zeros(2, heads, keys, device="cuda", dtype=torch.int32)  # what is causal begins with its key
    if kind == "window":
        return always, (torch.arange(keys, device="cuda", dtype=torch.int32) + keys // 8).expand(2, heads, keys).contiguous()
    if kind == "top_k":
        return always, torch.ops.dmattn.select(torch.randn(2, heads, keys, device="cuda"), None, keys // 16, True)
    if kind == "any":
        return tuple(torch.stack([draw(-100, keys), draw(-100, keys)]).sort(0).values)
    if kind == "short":
        start = draw(-100, keys)
        return start, start + draw(0, 900)
    return always, torch.where(torch.rand(2, heads, keys, device="cuda") < 0.9, 2**31 - 1, 0).int()  # most


LONG = [
    (769, 900),
    (4097, 4097),
    (9000, 9000),
    (5000, 12001),
    (12001, 5000),
    (40000, 40000),
    (9000, 70001),
    (66000, 3000),
    (1, 66000),
]
LONG_KINDS = [(kind, n) for kind in ("window", "top_k", "any", "short", "most") for n in LONG if kind != "top_k" or n[0] == n[1]]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("kind", "lengths"), LONG_KINDS, ids=str)
def test_lists_of_long_problems(kind, lengths, size):
    queries, keys = lengths
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, size, device="cuda").bfloat16() for h, n in ((6, queries), (3, keys), (3, keys)))
    start, end = long_spans(kind, 3, queries, keys)
    causal = kind in ("window", "top_k", "most")
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), is_causal=causal, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, causal)


@pytest.mark.parametrize("kind", ["window", "top_k", "any", "short"])
@pytest.mark.parametrize("queries", [9000, 500])
def test_lists_of_many_heads(kind, queries):
    """Several parts of a head's keys by one block, two lists by one block; starts that all heads share."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, n, 64, device="cuda").bfloat16() for n in (queries, 9000, 9000))
    start, end = long_spans(kind, 70, queries, 9000)
    start, causal = start[:1, :1], kind in ("window", "top_k")
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), is_causal=causal, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, causal)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "any", "short"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 1), (64, 1), (128, 1)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("queries", [1, 191, 192, 193, 385, 767, 768, 769, 1537])
def test_edges_of_tiles_and_segments(queries, size, heads, kind):
    """Tiles are 128 or 192 rows, of up to 64 or 128 heads each; segments 768 queries and more."""
    torch.manual_seed(0)
    keys = queries + queries % 3 * 50
    q, k, v = (
        torch.randn(2, h, n, size, device="cuda").half() for h, n in zip((*heads, heads[1]), (queries, keys, keys), strict=True)
    )
    causal, mask, key_bias = kind in ("causal", "window"), None, None
    start, end = torch.full((2, heads[1], keys), -(2**31), dtype=torch.int32, device="cuda"), None
    if kind in ("full", "causal"):
        end = torch.full_like(start, 2**31 - 1)
    else:
        start, end = long_spans(kind, heads[1], queries, keys)
        mask, key_bias = dmattn.IntervalMask(start, end), torch.randn(2, heads[1], keys, device="cuda")
    out, lse = dmattn.attention(q, k, v, mask, key_bias=key_bias, is_causal=causal, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, causal, key_bias)


def test_more_than_a_thousand_lists():
    torch.manual_seed(0)
    length = 900_000
    q, k, v = (torch.randn(1, 1, length, 64, device="cuda").bfloat16() for _ in range(3))
    start = torch.arange(length, device="cuda", dtype=torch.int32)[None, None]
    end = start + torch.randint(-100, 900, (1, 1, length), device="cuda", dtype=torch.int32)
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), is_causal=True, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, True)


def check_some_rows(out, lse, q, k, v, start, end, causal, key_bias=None):
    """Some of the queries, in float64; start, end and key_bias for each head of the keys, or of the queries."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    rows = torch.randint(0, queries, (200,), device="cuda")
    rows[100:] = torch.randint(max(0, queries - keys), queries, (100,), device="cuda")  # those in front may see nothing
    rows[0], rows[1] = 0, queries - 1
    positions = (rows + keys - queries)[:, None]

    def of_heads(x):
        return x.repeat_interleave(heads // x.shape[1], 1)

    visible = torch.ones(q.shape[0], heads, 200, keys, dtype=torch.bool, device="cuda")
    visible &= of_heads(start)[:, :, None] <= positions
    visible &= of_heads(end)[:, :, None] > positions
    if causal:
        visible &= torch.arange(keys, device="cuda") <= positions
    k, v = (of_heads(x.double()) for x in (k, v))
    logits = q[:, :, rows].double() @ k.mT * q.shape[3] ** -0.5
    if key_bias is not None:
        logits = logits + of_heads(key_bias)[:, :, None]
    logits = logits.masked_fill(~visible, -torch.inf)
    assert torch.equal(torch.isfinite(lse[:, :, rows]), visible.any(-1))
    torch.testing.assert_close(lse[:, :, rows].double(), logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
    expected = logits.softmax(-1).nan_to_num(0.0) @ v
    torch.testing.assert_close(out[:, :, rows].double(), expected, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(
    "kind", ["all queries see them", "some leave", "some come late", "more than are copied", "none in one head"]
)
@pytest.mark.parametrize(
    ("heads", "mask_heads", "bias_heads"), [(2, 2, 2), (2, 1, None), (6, 2, 2), (6, 6, 6), (6, 2, 6), (32, 2, 2)]
)
@pytest.mark.parametrize(
    ("size", "lengths"), [(64, (9000, 3001)), (128, (8192, 5000)), (256, (8200, 2000)), (72, (3000, 9000)), (64, (512, 4096))]
)
def test_one_list_of_keys_for_all_queries(kind, heads, mask_heads, bias_heads, size, lengths):
    """Without causality: long enough for compact keys where the live keys are the same for all queries."""
    queries, keys = lengths
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, n, size, device="cuda").bfloat16() for h, n in ((heads, queries), (2, keys), (2, keys)))
    key_bias = None if bias_heads is None else torch.randn(2, bias_heads, keys, device="cuda")
    window = keys // 2 if kind == "more than are copied" else keys // 5
    end = torch.ops.dmattn.select(torch.randn(2, mask_heads, keys, device="cuda"), None, window, False)
    if kind == "some leave":
        inside = torch.randint(keys - queries, keys, end.shape, device="cuda", dtype=torch.int32)
        end = torch.where((end > 0) & (torch.rand(end.shape, device="cuda") < 0.1), inside, end)
    if kind == "none in one head":
        end[1, 0] = -(2**31)
    start = torch.full_like(end, -(2**31))
    if kind == "some come late":  # within the first segment
        start[:, :, ::5] = keys - queries + 200
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end), key_bias=key_bias, return_lse=True)
    check_some_rows(out, lse, q, k, v, start, end, False, key_bias)


def relative_distance(a, b):
    return (torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double())).item()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("kind", "lengths"), [(k, n) for k, n in LONG_KINDS if n[0] > 1 and sum(n) > 4096 and n[0] * n[1] < 2e8], ids=str
)
def test_gradients_of_long_problems(kind, lengths, size):
    """The kernels that add beside those with a fixed order of sums: they share neither walk nor sums."""
    queries, keys = lengths
    torch.manual_seed(0)
    shapes = (4, queries, size), (2, keys, size), (2, keys, size), (2, keys)
    q, k, v, key_bias = (torch.randn(2, *shape, device="cuda") for shape in shapes)
    leaves = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), key_bias)]
    grad_out = torch.randn_like(leaves[0])
    start, end = long_spans(kind, 2, queries, keys)
    if queries > keys:
        start = start - 100000  # far below the first position, too

    def gradients(deterministic):
        out = dmattn.attention(
            *leaves[:3], dmattn.IntervalMask(start, end), key_bias=leaves[3], is_causal=kind in ("window", "top_k", "most"),
            deterministic=deterministic,
        )  # fmt: skip
        return torch.autograd.grad(out, leaves, grad_out)

    for got, expected in zip(gradients(False), gradients(True), strict=True):
        assert relative_distance(got, expected) < 6e-3


@pytest.mark.parametrize(("batches", "kv_heads", "length"), [(1, 5, 130000), (3, 2, 90000)])
def test_gradients_of_heads_in_parts(batches, kv_heads, length):
    """So many floats of sums that backward takes some heads, or batches, after the others."""
    q, k, v, scores, grad_out = inputs(length, 2 * kv_heads, kv_heads, 128, batch=batches)
    together = step_of_heads(q, k, v, scores, grad_out)
    for batch, head in ((0, 0), (0, 1), (batches - 1, kv_heads - 1)):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        at, heads = slice(batch, batch + 1), (pair, one, one, one)
        alone = step_of_heads(*(x[at, h] for x, h in zip((q, k, v, scores), heads, strict=True)), grad_out[at, pair])
        for got, expected, h in zip(together, alone, heads, strict=True):
            assert relative_distance(got[at, h], expected) < 1e-3


def step_of_heads(q, k, v, scores, grad_out):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, scores)]
    return torch.autograd.grad(dmattn.dynamic_mask_attention(*leaves, 512), leaves, grad_out)


def test_block_mask_gradients_of_heads_in_parts():
    q, k, v, _, grad_out = inputs(20000, 120, 60, 128, batch=1)
    table = torch.rand(1, 60, 157, 157, device="cuda") < 0.02

    def gradients(heads, kv_heads):
        leaves = [x[:, h].detach().requires_grad_() for x, h in ((q, heads), (k, kv_heads), (v, kv_heads))]
        out = dmattn.attention(*leaves, dmattn.BlockMask.from_blocks(table[:, kv_heads], 128))
        return torch.autograd.grad(out, leaves, grad_out[:, heads])

    together = gradients(slice(None), slice(None))
    for head in (0, 31, 59):
        one, pair = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        for got, expected, h in zip(together, gradients(pair, one), (pair, one, one), strict=True):
            assert relative_distance(got[:, h], expected) < 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("density", ["uneven", "even"])
@pytest.mark.parametrize("tiles", ["one more", "three times", "32 for each thread", "too many to order"])
def test_block_masks_with_more_tiles_than_blocks(tiles, density, is_causal):
    """Whatever tile comes first, and however uneven they are: what a head gets when it is alone, bit for bit."""
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    heads, rows = {
        "one more": (blocks + 1, 1),
        "three times": (blocks // 11 * 2, 17),
        "32 for each thread": ((blocks + 4096) // 120, 120),
        "too many to order": (40, 118),
    }[tiles]
    q, k, v, _, _ = inputs(rows * 128 - 40, heads, heads, 64, batch=1)
    share = torch.rand(1, heads, rows, 1, device="cuda") ** 3 if density == "uneven" else 1.0
    table = torch.rand(1, heads, rows, rows, device="cuda") < share
    table[:, 1, :3] = False
    out = dmattn.attention(q, k, v, dmattn.BlockMask.from_blocks(table, 128), is_causal=is_causal)
    for head in range(0, heads, max(1, heads // 40)):
        one = slice(head, head + 1)
        alone = dmattn.BlockMask.from_blocks(table[:, one], 128)
        assert torch.equal(out[:, one], dmattn.attention(q[:, one], k[:, one], v[:, one], alone, is_causal=is_causal))


def test_block_masks_with_rows_of_many_entries():
    """More of them than a walk of the keys reads at once; captured in a graph as well."""
    q, k, v = (torch.randn(1, 70, n, 64, device="cuda").bfloat16() for n in (300, 20000, 20000))
    table = torch.rand(1, 70, 3, 157, device="cuda") < 0.95
    mask = dmattn.BlockMask.from_blocks(table, 128)
    visible = table.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :300, :20000]
    out = dmattn.attention(q, k, v, mask)
    for head in (0, 33, 69):
        scores = (q[0, head].float() @ k[0, head].float().mT / 8).masked_fill(~visible[0, head], -torch.inf)
        assert relative_distance(out[0, head], scores.softmax(-1) @ v[0, head].float()) < 5e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dmattn.attention(q, k, v, mask)
    graph.replay()
    assert torch.equal(captured, out)


def test_keys_that_the_last_query_of_a_segment_sees():
    """And the first of the next: 768 neighbouring keys each, so that whole groups of live keys begin there."""
    length, generator = 9216, torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, length, 64, generator=generator).bfloat16() for _ in range(3)]
    start = (torch.arange(length, dtype=torch.int32) // 768 + 1) * 768 - 1

    def results(device):
        given = [x.to(device).requires_grad_() for x in leaves]
        mask = dmattn.IntervalMask(start.to(device), (start + 2).to(device))
        out, lse = dmattn.attention(*given, mask, return_lse=True)
        lse = torch.where(torch.isinf(lse), 0.0, lse)
        return [
            x.cpu()
            for x in (
                out.detach(),
                lse.detach(),
                *torch.autograd.grad((out, lse), given, (torch.ones_like(out), torch.ones_like(lse))),
            )
        ]

    for got, expected in zip(results("cuda"), results("cpu"), strict=True):
        assert relative_distance(got, expected) < 1e-2


@pytest.mark.parametrize("kind", ["full", "causal", "gathered"])
def test_more_tiles_than_blocks(kind):
    """Every block computes several tiles, one after the other; each head gets, bit for bit, what it gets alone."""
    heads, length = 200, 700
    q, k, v, scores, _ = inputs(length, heads, heads, 64, batch=1)
    mask = dmattn.IntervalMask.top_k(scores, 60) if kind == "gathered" else None
    out = dmattn.attention(q, k, v, mask, is_causal=kind != "full")
    for head in range(0, heads, 7):
        one = slice(head, head + 1)
        alone = None if mask is None else dmattn.IntervalMask(mask.start, mask.end[:, one])
        assert torch.equal(out[:, one], dmattn.attention(q[:, one], k[:, one], v[:, one], alone, is_causal=kind != "full"))


def test_slots_of_many_rows_of_tiles():
    """More rows than are counted at once."""
    visible = torch.rand(1, 600, 1000, 200, device="cuda") < 0.5
    visible[:, ::3] = True
    arguments = (1000, 200, 1, 1, 128, 128)
    tiles = torch.ops.dmattn.pack_tiles(visible, *arguments)[0]
    assert torch.equal(tiles.cpu(), torch.ops.dmattn.pack_tiles(visible.cpu(), *arguments)[0])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_infinite_value_of_a_key_that_all_see(place):
    """Where the keys do not fill a chunk, what stands for those missing must not turn it into NaN."""
    q, k, v, _, _ = inputs(200, 2, 2, 64, batch=1)
    v[:, :, place, :5] = torch.inf
    j = torch.arange(200, device="cuda")
    end = torch.where(j < 3, 2**31 - 1, -(2**31)).int()[None, None]
    out = dmattn.attention(q, k, v, dmattn.IntervalMask(torch.full_like(end, -(2**31)), end))
    assert (out[..., :5] == torch.inf).all()
    assert torch.isfinite(out[..., 5:]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["interval", "causal", "few keys"])
def test_queries_that_see_nothing_beside_bad_keys(kind, deterministic, bad):
    """The first 250 of 600, in tiles with queries that see bad keys; some of them are bad themselves."""
    keys = {"interval": 600, "causal": 350, "few keys": 20}[kind]
    q, k, v, scores, grad_out = inputs(600, 2, 2, 128, batch=1)
    k, v = k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous()
    k[:, :, 3], v[:, :, 5] = bad, bad
    q[:, :, 200] = bad
    key_bias = scores[:, :, :keys].float().contiguous() if kind == "few keys" else None
    start = torch.full((1, 1, keys), 250, dtype=torch.int32, device="cuda")
    mask = None if kind == "causal" else dmattn.IntervalMask(start, start + 1000)
    leaf = q.requires_grad_()
    out, lse = dmattn.attention(
        leaf, k, v, mask, key_bias=key_bias, is_causal=kind == "causal", return_lse=True, deterministic=deterministic
    )
    (grad,) = torch.autograd.grad(out, leaf, grad_out)
    assert torch.isneginf(lse[:, :, :250]).all()
    assert not out[:, :, :250].any()
    assert not grad[:, :, :250].any()


def test_a_bad_value_stays_among_queries_near_those_that_see_it():
    """Keys that all queries see beside one that only the last ones see."""
    q, k, v, scores, _ = inputs(9000, 2, 2, 64, batch=1)
    end = torch.ops.dmattn.select(scores.float(), None, 500, False)
    start = torch.full_like(end, -(2**31))
    end[:, :, 7], start[:, :, 7] = 2**31 - 1, 8800
    v[:, :, 7] = torch.nan
    out = dmattn.attention(q, k, v, dmattn.IntervalMask(start, end))
    assert torch.isfinite(out[:, :, :8576]).all()  # two tiles of 128 before the first that sees it
    assert torch.isnan(out[:, :, 8800:]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_a_block_mask_hides_from_all(bad):
    """In a tile that comes in one piece otherwise."""
    q, k, v, _, grad_out = inputs(500, 2, 2, 128, batch=1)
    visible = torch.rand(1, 2, 500, 500, device="cuda") < 0.5
    visible[:, :, :, 3::7] = visible[:, :, 200:, 128:256] = False
    hidden = ~visible.any(-2)

    def gradients(fill):
        leaves = [x.masked_fill(hidden[..., None], fill).requires_grad_() for x in (k, v)]
        out = dmattn.attention(q, *leaves, dmattn.BlockMask.from_bool(visible))
        return torch.autograd.grad(out, leaves, grad_out)

    for got, expected in zip(gradients(bad), gradients(0.0), strict=True):
        assert relative_distance(got, expected) < 1e-3
        assert not got[hidden].any()


@pytest.mark.parametrize("sparse", [True, False])
def test_deterministic_gradients_are_equal_over_twenty_runs(sparse):
    q, k, v, scores, grad_out = inputs(length=1500)

    def run():
        if sparse:
            return step(q, k, v, scores, grad_out)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(dmattn.attention(*leaves, is_causal=True, deterministic=True), leaves, grad_out)

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_extra_memory_at_131072():
    q, k, v, scores, grad_out = inputs(131072, 16, 16, 128, batch=1)
    end = dmattn.IntervalMask.top_k(scores, 2048).end
    mask = dmattn.IntervalMask(torch.arange(131072, dtype=torch.int32, device="cuda"), end)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def peak(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - sum(r.nbytes for r in results)) / 1e9, results

    forward, (out,) = peak(lambda: (dmattn.attention(*leaves, mask),))
    backward, _ = peak(lambda: torch.autograd.grad(out, leaves, grad_out))
    assert forward < 0.3
    assert backward < 2.7


def test_more_than_two_to_the_31_elements():
    """The last queries of the last head, far beyond what 32 bits count, are a small problem of their own: their window, and no gradient
    enters anywhere else."""
    if torch.cuda.mem_get_info()[0] < 45e9:
        pytest.skip("needs 45 GB of free GPU memory")
    length, heads, kv_heads, size, left, tail = 65536, 264, 33, 128, 64, 200
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, h, length, size, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    assert q.numel() > 2**31
    out, lse = dmattn.attention(q, k, v, dmattn.IntervalMask.sliding_window(length, left, device="cuda"), return_lse=True)

    keys = tail + left
    small = dmattn.IntervalMask.sliding_window(keys, left, device="cuda")
    case = AttentionCase(
        *(x.detach()[:, -1:, -n:] for x, n in ((q, tail), (k, keys), (v, keys))),
        visible=small.to_bool(tail, keys),
        grad_through_lse=False,
    )
    grad_out = torch.zeros_like(q)
    grad_out[:, -1:, -tail:] = case.incoming_gradients()[0]
    gradients = torch.autograd.grad(out, (q, k, v), grad_out)
    results = {"out": out.detach()[:, -1:, -tail:], "lse": lse.detach()[:, -1:, -tail:]}
    for name, gradient, rows in zip(("query", "key", "value"), gradients, (tail, keys, keys), strict=True):
        results[f"grad_{name}"] = gradient[:, -1:, -rows:]
    assert_close_to_reference(case, results)
    for gradient, rows in zip(gradients, (tail, keys, keys), strict=True):
        assert not gradient[:, :-1].any()
        assert not gradient[:, -1, :-rows].any()


def test_float32_says_what_is_supported():
    q = torch.randn(1, 1, 8, 8, device="cuda")
    with pytest.raises(TypeError, match="query: expected dtype bfloat16, float16, got float32"):
        dmattn.attention(q, q, q)
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.ops.dmattn.forward(q, q, q, *(None,) * 9, False, 1.0, 0.0, 0.0, False)


def test_impossible_family_is_an_error(run_python):
    program = "import torch, dmattn; q = torch.randn(1, 1, 8, 8, device='cuda').half(); dmattn.attention(q, q, q)"
    assert run_python("-c", program, DMATTN_FAMILY="sm80").returncode == 0
    done = run_python("-c", program, DMATTN_FAMILY="sm70")
    assert done.returncode != 0
    assert "DMATTN_FAMILY: expected" in done.stderr
    done = run_python("-c", program, DMATTN_FAMILY="sm90")
    if torch.cuda.get_device_capability()[0] == 9:
        assert done.returncode == 0, done.stderr
    else:
        assert "DMATTN_FAMILY: sm90 needs" in done.stderr or "DMATTN_FAMILY: expected auto or sm80" in done.stderr
