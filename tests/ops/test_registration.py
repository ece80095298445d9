"""How the ops live in torch: opcheck, compile, export, checkpointing, FLOP counts, autocast, and what other devices are told."""

from __future__ import annotations

import dmattn
import pytest
import torch
from dmattn import BlockMask, BoundedCache, IndexMask, IntervalMask
from dmattn.testing import strategies
from programs import assert_compiles_once, assert_exports
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from watched import Watched

# What torch says of itself when it loads an exported program, and opcheck of torch 2.14 of itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning",  # of torch 2.12, where it loads an exported program
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning",
)

ops = torch.ops.dmattn
CACHE_STATE = ("key", "value", "score", "position", "entered", "steps", "kept")
tensor = strategies.random_tensor


def inputs(B=2, H=4, Hkv=2, Sq=40, Sk=50, D=16, Dv=24, dtype=torch.float32, device="cpu"):
    sizes = ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    return [tensor(size, i, dtype, device) for i, size in enumerate(sizes)]


# opcheck ------------------------------------------------------------------------------------------------------------------------------


def forward_patterns():
    """Name to the arguments of ``dmattn::forward``."""
    q, k, v = inputs()
    options = (False, 0.25, 0.0, 0.0, False)
    none = (None,) * 11
    block = BlockMask.from_bool(tensor((4, 40, 50), 7) > -0.5, 32)
    interval = IntervalMask.top_k(tensor((2, 2, 50), 8), 9)
    tables = (block.tiles, block.rows, block.columns, block.bits)
    seed = torch.tensor([3])
    grad = [t.clone().requires_grad_() for t in (q, k, v)]
    key_bias, bias = tensor((2, 2, 50), 5), tensor((1, 4, 40, 50), 6)
    far = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    odd = [strategies.laid_out(t, layout) for t, layout in zip((q, k, v), ("strided", "sliced", "expanded"), strict=True)]
    permuted = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (q, k, v)]
    empty = inputs(Sq=0, Sk=0)
    return {
        "plain": (q, k, v, *none, *options),
        "no batch": (*inputs(B=0), *none, *options),
        "nothing": (*empty, *none, *options),
        "gradients": (*grad, *none, *options),
        "one gradient": (q, grad[1], v, *none, *options),
        "transposed": (*[t.requires_grad_() for t in far], *none, *options),
        "strided": (*[t.detach().requires_grad_() for t in odd], *none, *options),
        "permuted": (*[t.requires_grad_() for t in permuted], *none, *options),
        "start": (*grad, interval.start, None, *none[2:], *options),
        "interval": (*grad, interval.start, interval.end, *none[2:], *options),
        "block": (*grad, None, None, *tables, *none[6:], *options),
        "everything": (
            *grad, None, interval.end, *tables, None, None, key_bias.requires_grad_(), bias.requires_grad_(), seed, True, 0.25, 4.0, 0.3, True,
        ),
        "key_bias": (q, k, v, *none[:8], key_bias.detach().requires_grad_(), None, None, *options),
        "bias in bfloat16": (*inputs(dtype=torch.bfloat16), *none[:9], bias.detach().bfloat16().requires_grad_(), None, *options),
        "float64": (*inputs(dtype=torch.float64), *none, *options),
        "float16": (*[t.requires_grad_() for t in inputs(dtype=torch.float16)], *none, *options),
    }  # fmt: skip


FORWARD = forward_patterns()


@pytest.mark.parametrize("arguments", FORWARD.values(), ids=FORWARD)
def test_opcheck_forward(arguments):
    torch.library.opcheck(ops.forward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_opcheck_forward_plain(dtype):
    given, scores = inputs(dtype=dtype), tensor((2, 2, 50), 8, torch.promote_types(dtype, torch.float32))
    torch.library.opcheck(ops.forward_plain.default, (*given, None, None, 0, True, 0, 0, 0.25, 0.0))
    torch.library.opcheck(ops.forward_plain.default, (*given, scores, scores, 9, True, 3, 1, 0.25, 4.0))


@pytest.mark.parametrize("pattern", FORWARD)
@pytest.mark.parametrize("with_grad_lse", [True, False])
def test_opcheck_backward(pattern, with_grad_lse):
    arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in FORWARD[pattern])
    out, lse, lse_rest = ops.forward(*arguments)
    grad_lse = tensor(lse.shape, 3, lse.dtype) if with_grad_lse else None
    needs = (arguments[11] is not None, arguments[12] is not None)
    torch.library.opcheck(
        ops.backward.default,
        (tensor(out.shape, 4, out.dtype), grad_lse, *arguments[:3], out, lse, *arguments[3:], *needs, lse_rest),
    )


@pytest.mark.parametrize("length", [0, 1, 50])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_opcheck_select(length, causal, dtype):
    scores = tensor((2, 3, length), 0, dtype)
    segments = torch.full((2, 1, length), length, dtype=torch.int32)
    torch.library.opcheck(ops.select.default, (scores, None, 4, causal))
    torch.library.opcheck(ops.select.default, (scores.transpose(0, 1), segments[:1], 4, causal))
    if causal:
        torch.library.opcheck(ops.select.default, (scores, segments, 4, causal, 5, 2))
        torch.library.opcheck(ops.select.default, (scores, None, 0, causal), {"local": 5, "sink": 2})


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (9, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_opcheck_index_top_k(sizes, dtype):
    queries, keys = sizes
    wide = torch.promote_types(dtype, torch.float32)
    given = (tensor((2, 3, queries, 4, 8), 0, dtype), tensor((2, 3, keys, 8), 1, dtype), tensor((2, 3, queries, 4), 2, wide))
    bound = torch.full((1, 3, keys), keys, dtype=torch.int32)
    counts = torch.full((2,), max(keys - 1, 0), dtype=torch.int32)
    plain, full = (None,) * 5, (tensor((3,), 3, wide), bound - bound, bound, counts, counts)
    for beside, last in (
        (plain, (keys, 5, 1, False, True, 0, 0, 0.5, False)),
        (full, (keys, 2, 4, False, False, 3, 1, 0.5, True)),
    ):
        torch.library.opcheck(ops.index_top_k.default, (*given, *beside, *last))
    if keys > 4:
        pooled = given[1][:, :, : keys // 4]
        torch.library.opcheck(
            ops.index_top_k.default, (given[0], pooled, given[2], *plain, keys, 2, 4, True, True, 0, 0, 0.5, True)
        )


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (5, 22)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_index_loss(sizes, dtype):
    rows, keys = sizes
    weights, positions = tensor((2, 3, rows, 4), 0, dtype), torch.arange(rows) * 4
    bound, blocks = torch.full((1, 3, keys), keys, dtype=torch.int32), keys // 8
    lists = torch.full((2, 1, rows, blocks), 1, dtype=torch.int32)
    beside = (tensor((3,), 1, dtype), tensor((1, 3, 1, keys), 2, dtype), tensor((2, 3, 2, rows), 3, dtype), positions)
    plain = (*(None,) * 3, positions, *(None,) * 3)
    last = (True, 2, 1, 0.5, 0.0, 0.25)
    for columns, choices, given, sharp in (
        (keys, keys, (*plain, keys, 1, False, *last), False),
        (keys, keys // 4, (*beside, None, bound - bound, bound, keys, 4, True, *last), True),
        (blocks * 8, blocks * 8, (*beside, lists, bound - bound, bound, keys, 8, False, *last), True),
    ):
        logits, products = tensor((2, 3, 2, rows, columns), 4, dtype), tensor((2, 3, 4, rows, choices), 5, dtype)
        torch.library.opcheck(ops.index_loss.default, (logits, products, weights, *given, sharp, False))


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("size", [(0, 0), (1, 1), (40, 50), (64, 128)])
def test_opcheck_pack(size, block):
    mask = tensor((2, 3, *(-(-n // block) for n in size)), 0) > 0
    for given in (mask, mask.transpose(0, 1), mask[:1].expand_as(mask)):
        arguments = (given, *size, block, block, 32, 64)
        torch.library.opcheck(ops.pack_tiles.default, arguments)
        tiles = ops.pack_tiles(*arguments)[0]
        torch.library.opcheck(ops.pack_bits.default, (given, tiles, *size, block, block, 32, 64, int((tiles >= 2).sum())))


def decode_patterns():
    """Name to the arguments of ``dmattn::decode``."""
    lengths, options = torch.tensor([5, 50], dtype=torch.int32), (None, True, 0.25, 0.0, 1, 0, 0)
    q, k, v = inputs(Sq=3)
    pools = [tensor((7, 16, 2, size), i) for i, size in enumerate((16, 24))]
    table = torch.tensor([[0, 3, 1, -1], [2, 4, 6, 5]], dtype=torch.int32)
    far, sliced = q.transpose(1, 2).contiguous().transpose(1, 2), [strategies.laid_out(t, "sliced") for t in (k, v)]
    lists = torch.tensor([[5, 1, -1, 0], [2, 0, 1, 3]], dtype=torch.int32)[:, None, None].expand(2, 2, 3, 4)
    everything = (table, tensor((2, 4, 64), 5), tensor((4,), 6), None, False, 0.25, 4.0, 1, 0, 0)
    return {
        "plain": (q, k, v, lengths, None, None, None, *options),
        "no lengths": (q, k, v, None, None, None, None, *options),
        "transposed": (far, *sliced, lengths, None, None, None, *options),
        "everything": (q, *pools, lengths, *everything),
        "lists": (far, *sliced, lengths, None, None, None, lists[:1, :1], *options[1:]),
        "lists and everything": (q, *pools, lengths, *everything[:3], lists, False, 0.25, 4.0, 8, 3, 2),
        "no lists": (q, k, v, lengths, None, None, None, lists[..., :0], *options[1:]),
        "no batch": (*inputs(B=0, Sq=2), lengths[:0], None, None, None, *options),
        "no keys": (*inputs(Sq=2, Sk=0), lengths, None, None, None, *options),
        **{str(dtype): (*inputs(Sq=1, dtype=dtype), lengths, None, None, None, *options) for dtype in (torch.bfloat16, torch.float64)},
    }  # fmt: skip


DECODE = decode_patterns()


@pytest.mark.parametrize("arguments", DECODE.values(), ids=DECODE)
def test_opcheck_decode(arguments):
    torch.library.opcheck(ops.decode.default, arguments)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((4, 3, 2, 5), torch.float32), ((4, 0, 0, 0), torch.bfloat16), ((0, 3, 2, 1), torch.float64)], ids=str
)
def test_opcheck_cache(sizes, dtype):
    window, local, sink_keys, rewind = sizes
    cache = BoundedCache(2, 2, window, 8, 16, local=local, sink_keys=sink_keys, rewind=rewind, dtype=dtype)
    key, value, scores = tensor((2, 2, 12, 8), 0, dtype), tensor((2, 2, 12, 16), 1, dtype), tensor((2, 2, 12), 2)
    cache.attend(tensor((2, 4, 12, 8), 3, dtype), key, value, scores)
    state, count = tuple(getattr(cache, name) for name in CACHE_STATE), torch.tensor([1, 0], dtype=torch.int32)
    token = [x[:, :, 3:4] for x in (key, value, scores)]
    torch.library.opcheck(ops.cache_update.default, (*state, *token, None, *sizes[:3]))
    torch.library.opcheck(ops.cache_update.default, (*state, *token, count, *sizes[:3]))
    if window == 0:
        torch.library.opcheck(ops.cache_update.default, (*state, *token[:2], None, None, *sizes[:3]))
    query = tensor((2, 4, 1, 8), 4, dtype)
    torch.library.opcheck(ops.cache_step.default, (*state, query, *token, None, *sizes[:3], 0.3, 0.0))
    torch.library.opcheck(ops.cache_step.default, (*state, query, *token, count, *sizes[:3], 0.3, 2.0))
    torch.library.opcheck(ops.cache_rewind.default, (*state, count, *sizes[:3]))
    visible = sum(sizes[:3])
    torch.library.opcheck(ops.cache_join.default, (*state[:4], state[5], key, value, scores, None, visible))
    torch.library.opcheck(ops.cache_join.default, (*state[:4], state[5], key, value, None, count, visible))
    chunk = [torch.cat([old[:, :, :visible], new], 2) for old, new in zip(state[:2], (key, value), strict=True)]
    numbers = [torch.zeros(2, 2, visible + 12, dtype=dtype) for dtype in (state[2].dtype, torch.int32, torch.int32)]
    slot = torch.zeros(2, 2, visible, dtype=torch.int32)
    arguments = (*state, *chunk, *numbers[:2], slot, numbers[2])
    torch.library.opcheck(ops.cache_extend.default, (*arguments, None, *sizes[:3]))
    torch.library.opcheck(ops.cache_extend.default, (*arguments, count, *sizes[:3]))


def reduce_inputs():
    """Tensors of every kind that a reduction walks in its own way."""
    x = tensor((3, 300, 9), 0)
    return {
        "plain": x,
        "gradients": x.clone().requires_grad_(),
        "transposed": x.movedim(0, -1).detach().requires_grad_(),
        "strided": strategies.laid_out(tensor((2, 3, 20, 16), 1), "strided").requires_grad_(),
        "scalar": tensor((), 2).requires_grad_(),
        "bfloat16": tensor((2, 5000), 3, torch.bfloat16).requires_grad_(),
        "float64": tensor((2, 5), 3, torch.float64).requires_grad_(),
        "int8": torch.arange(12, dtype=torch.int8).view(3, 4),
        "bool": torch.arange(12).view(3, 4) > 4,
    }


@pytest.mark.parametrize("kind", reduce_inputs())
@pytest.mark.parametrize(("dim", "keepdim"), [(None, False), (0, True), (-1, False)])
def test_opcheck_reduce(kind, dim, keepdim):
    x = reduce_inputs()[kind]
    torch.library.opcheck(ops.reduce_sum.default, (x, dim, keepdim))
    torch.library.opcheck(ops.reduce_max.default, (x, dim, keepdim))


# compile ------------------------------------------------------------------------------------------------------------------------------


def compiled_functions(device):
    def everything(q, k, v, scores):
        mask = IntervalMask.streaming(k.shape[2], 4, 20, device=q.device)
        return dmattn.attention(q, k, v, mask, key_bias=scores, is_causal=True, softcap=5.0, return_lse=True)

    def top_k_inside(q, k, v, scores):
        return dmattn.dynamic_mask_attention(q, k, v, scores, 8, return_lse=True)

    def documents_inside(q, k, v, scores):
        ends = torch.tensor([0, 7], device=q.device)
        cu_seqlens = torch.cat([ends, torch.full((1,), k.shape[2], device=q.device)])
        base = IntervalMask.documents(k.shape[2], cu_seqlens) & IntervalMask.padding(k.shape[2], k.shape[2] - 2, device=q.device)
        return dmattn.dynamic_mask_attention(q, k, v, scores, 8, base=base, return_lse=True)

    def local_inside(q, k, v, scores):
        return dmattn.dynamic_mask_attention(q, k, v, scores, 8, local=6, sink_keys=2, return_lse=True)

    def block_inside(q, k, v, scores):
        table = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return dmattn.attention(
            q,
            k,
            v,
            IntervalMask.sliding_window(k.shape[2], 9, device=q.device) & BlockMask.from_bool(table),
            key_bias=scores,
            return_lse=True,
        )

    return [everything, top_k_inside, documents_inside, block_inside, local_inside]


@pytest.mark.long
@pytest.mark.parametrize("number", range(5), ids=["everything", "top_k", "documents", "block", "local"])
def test_compile_forward_and_backward_without_recompiling(device, dtype, number):
    fn = compiled_functions(device)[number]

    def step(call, length, seed):
        q, k, v, scores = (tensor(size, seed + i, dtype, device).requires_grad_() for i, size in enumerate(
            ((2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 16), (2, 2, length))))  # fmt: skip
        out, lse = call(q, k, v, scores)
        grads = torch.autograd.grad(
            (out, lse), (q, k, v, scores), (tensor(out.shape, 9, out.dtype, device), tensor(lse.shape, 8, device=device))
        )
        return out, lse, *grads

    assert_compiles_once(fn, [(length, length) for length in (40, 41, 64, 129, 300)], step, "inductor")


class Generates(torch.nn.Module):
    """A cache as the state of a module."""

    def __init__(self, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.cache = BoundedCache(2, 2, 6, 16, 16, local=3, sink_keys=2, rewind=4, dtype=dtype, device=device)

    def forward(self, query, key, value, scores, lengths=None):
        return self.cache.attend(query, key, value, scores, lengths=lengths)


def tokens(count, seed, dtype=torch.float32, device="cpu"):
    sizes = ((2, 4, count, 16), (2, 2, count, 16), (2, 2, count, 16))
    return [
        *(tensor(size, seed + i, dtype, device) for i, size in enumerate(sizes)),
        tensor((2, 2, count), seed + 3, device=device),
    ]


def assert_same_state(ours, theirs):
    for name in CACHE_STATE:
        assert torch.equal(ours[f"cache.{name}"], theirs[f"cache.{name}"]), name


@pytest.mark.long
def test_compile_a_cache_without_recompiling(device, dtype):
    """A chunk is compiled once for all its lengths, a step once; the cache's tensors are written where they are."""
    eager, module = Generates(dtype, device), Generates(dtype, device)
    places = [getattr(module.cache, name).data_ptr() for name in CACHE_STATE]
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (30, 1):  # each once
            compiled(*tokens(count, count, dtype, device)), eager(*tokens(count, count, dtype, device))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for count in (17, 1, 50, 1, 1):
                ours, theirs = (call(*tokens(count, 9, dtype, device)) for call in (compiled, eager))
                torch.testing.assert_close(ours, theirs)
                assert_same_state(module.state_dict(), eager.state_dict())
    assert [getattr(module.cache, name).data_ptr() for name in CACHE_STATE] == places


@pytest.mark.parametrize("kind", ["interval", "block", "combined", "bool"])
def test_compile_with_masks_as_inputs(device, dtype, kind):
    def mask_of(length):
        interval = IntervalMask.sliding_window(length, 12, device=device)
        visible = tensor((4, length, length), length, device=device) > -0.5
        return {
            "interval": interval, "block": BlockMask.from_bool(visible), "combined": interval & BlockMask.from_bool(visible), "bool": visible
        }[kind]  # fmt: skip

    def fn(q, k, v, mask):
        return dmattn.attention(q, k, v, mask, is_causal=True)

    def inputs_of(length):
        return *(tensor((1, 4, length, 16), i, dtype, device) for i in range(3)), mask_of(length)

    # Lengths other than those of other dimensions: torch would guard sizes that are equal by chance.
    assert_compiles_once(fn, map(inputs_of, (450, 230, 300)), backend="inductor")


# export -------------------------------------------------------------------------------------------------------------------------------


class Attends(torch.nn.Module):
    def forward(self, q, k, v, scores):
        return dmattn.dynamic_mask_attention(q, k, v, scores, 16)


class AttendsBeside(torch.nn.Module):
    def forward(self, q, k, v, scores):
        return dmattn.dynamic_mask_attention(q, k, v, scores, 16, local=12, sink_keys=3)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("counts", [(1, 1, 1), (30, 9, 200)], ids=["steps", "chunks"])
def test_export_with_a_cache_as_state(tmp_path, counts):
    length = Dim("length", min=9, max=4096)
    shapes = None if counts[0] == 1 else ({2: length},) * 4
    with torch.no_grad():
        program = torch.export.export(Generates(), tuple(tokens(counts[0], 0)), dynamic_shapes=shapes)
        torch.export.save(program.run_decompositions({}), tmp_path / "generates.pt2")
        loaded, eager = torch.export.load(tmp_path / "generates.pt2").module(), Generates()
        for seed, count in enumerate(counts):
            assert torch.equal(loaded(*tokens(count, seed)), eager(*tokens(count, seed)))
            assert_same_state(loaded.state_dict(), eager.state_dict())


@pytest.mark.parametrize("module", [Attends(), AttendsBeside()], ids=lambda module: type(module).__name__)
def test_export_with_a_dynamic_length_saved_and_loaded(tmp_path, module):
    length = Dim("length", min=2, max=4096)
    example, *others = ((*inputs(Sq=n, Sk=n), tensor((2, 2, n), n)) for n in (40, 2, 33, 700))
    assert_exports(module, example, others, tmp_path / "attends.pt2", dynamic_shapes=({2: length},) * 4)


# other torch features -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing_saves_the_op(device, dtype, saved):
    def policy(ctx, op, *args, **kwargs):
        keep = saved and op == ops.forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = (t.requires_grad_() for t in inputs(dtype=dtype, device=device))
    with Watched() as counter:
        out = checkpoint(
            lambda *given: dmattn.attention(*(t * 2 for t in given)).sin(), q, k, v, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        out.sum().backward()
    assert (counter.names.count("forward"), counter.names.count("backward")) == (1 if saved else 2, 1)


@pytest.mark.parametrize("kind", ["dense", "causal", "window", "block", "local", "lists", "lists and sinks"])
def test_flop_counter_counts_visible_work(device, dtype, kind):
    q, k, v = (t.requires_grad_() for t in inputs(Sq=50, Sk=50, dtype=dtype, device=device))
    block = tensor((50, 50), 0, device=device) > 0
    masks = {
        "dense": None,
        "causal": IntervalMask.causal(50, device=device),
        "window": IntervalMask.sliding_window(50, 4, device=device),
        "block": BlockMask.from_bool(block),
        "local": IntervalMask.top_k(tensor((2, 2, 50), 1, device=device), 3, local=5, sink_keys=2),
    }
    # The dispatcher leaves out last numbers that are defaults.
    entries = torch.randint(-1, 25, (1, 2, 50, 5), generator=torch.Generator().manual_seed(0)).to(device)
    masks |= {f"lists{more}": IndexMask(entries, 2, is_causal=True, sink_keys=3 * bool(more)) for more in ("", " and sinks")}
    # Beside the first 2 and the last 5 keys a query sees 3 others, as soon as there are so many: 10 in all.
    pairs = (
        {"dense": 2500, "causal": 1275, "window": 50 * 5 - 10, "block": int(block.sum()), "local": 55 + 40 * 10}.get(kind, 0)
        * 2
        * 4
    )
    pairs = pairs or int(masks[kind].to_bool(50, 50).sum()) * 2 * 2  # lists of two key heads, for batches and groups of two
    assert dmattn.visible_pairs(masks[kind], 50, 50, batch=2, heads=4) == pairs
    with FlopCounterMode(display=False) as counter:
        out = dmattn.attention(q, k, v, masks[kind])
    assert counter.get_total_flops() == 2 * pairs * (16 + 24)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * pairs * (16 + 24)


@pytest.mark.parametrize(("Sq", "Sk"), [(50, 50), (3, 50), (50, 3), (0, 4), (4, 0)])
def test_flop_counter_needs_no_numbers_for_causality(device, dtype, Sq, Sk):
    """Fake tensors have sizes alone, from which the pairs follow."""
    q, k, v = inputs(Sq=Sq, Sk=Sk, dtype=dtype, device=device)
    pairs = 2 * 4 * int(torch.ones(Sq, Sk).tril(Sk - Sq).sum())
    assert dmattn.visible_pairs(None, Sq, Sk, is_causal=True, batch=2, heads=4) == pairs
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        dmattn.attention(*(mode.from_tensor(t) for t in (q, k, v)), is_causal=True)
    assert counter.get_total_flops() == 2 * pairs * (16 + 24)


def test_autocast(device):
    q, k, v = inputs(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    bias = tensor((40, 50), 5, device=device)
    with torch.autocast(device, torch.bfloat16):
        out, lse = dmattn.attention(q, k, v, bias=bias, return_lse=True)
        dynamic = dmattn.dynamic_mask_attention(q, k, v, tensor((2, 2, 50), 6, device=device), 5)
    expected = dmattn.attention(*(t.bfloat16() for t in (q, k, v)), bias=bias)
    assert out.dtype == dynamic.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected)


def test_an_op_on_another_layout_says_what_is_supported():
    sparse = torch.zeros(1, 1, 4, 8).to_sparse()
    with pytest.raises(
        NotImplementedError, match=r"dmattn::forward: no kernel for .*; this build has kernels for strided tensors on CPU"
    ):
        ops.forward(sparse, sparse, sparse, *(None,) * 11, False, 1.0, 0.0, 0.0, False)


def test_an_unsupported_device_says_what_is_supported():
    class OnApple(torch.Tensor):
        @property
        def device(self):
            return torch.device("mps")

    given = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="query: no dmattn kernel for device mps; supported are cpu, cuda"):
        dmattn.attention(given.as_subclass(OnApple), given, given)


def test_meta_tensors_flow(dtype):
    q, k, v = (t.to("meta") for t in inputs(dtype=dtype))
    out, lse = dmattn.dynamic_mask_attention(q, k, v, torch.zeros(2, 2, 50, device="meta"), 5, return_lse=True)
    assert out.is_meta
    assert lse.shape == (2, 4, 40)
