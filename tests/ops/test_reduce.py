"""The ops reduce_sum and reduce_max: values, the order of additions, derivatives, and what they refuse."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch
from cases import threads
from dmattn_bench.two_ways import assert_sum_close
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch.autograd import forward_ad

ops = torch.ops.dmattn
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATING, *INTEGERS, torch.bool)
CHUNK, LANES, PARTIAL_LANES = 4096, 256, 4096  # cpp/reduce_params.h
# lengths around a vector, the lanes, a chunk, and several chunks
LENGTHS = (1, 2, 7, 8, 9, 255, 256, 257, 4095, 4096, 4097, 9000, 33000)
LAYOUTS = ("plain", "transposed", "strided", "offset", "expanded", "sliced")


def make(shape, dtype, seed=0, device="cpu"):
    """Numbers of both signs; integers over the whole range of their dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return (torch.rand(shape, generator=generator) > 0.6).to(device)
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        high = min(info.max, 2**62)
        return torch.randint(max(info.min, -(2**62)), high, shape, generator=generator, dtype=torch.int64).to(device, dtype)
    return torch.randn(shape, generator=generator).to(device, dtype)


def laid_out(x, layout):
    """The same numbers in memory of another layout; "expanded" has the numbers of its first row in all of them."""
    if layout == "transposed":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "strided":
        wide = x.new_zeros((*x.shape[:-1], 3 * x.shape[-1]))
        wide[..., ::3] = x
        return wide[..., ::3]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "sliced":
        wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 2))
        wide[..., :-2] = x
        return wide[..., :-2]
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x


def bits_of(x):
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(bits_of(a), bits_of(b))


def assert_right(x, dim, keepdim=False):
    """Both ops beside torch's; integers and maxima have to be equal."""
    dims = list(range(x.dim())) if dim is None else [dim]
    total, largest = ops.reduce_sum(x, dim, keepdim), ops.reduce_max(x, dim, keepdim)
    if x.is_floating_point():
        assert_sum_close(x, dim, keepdim, total)
    else:
        expected = x.sum(dims, keepdim=keepdim)
        assert total.dtype == torch.int64
        assert torch.equal(total, expected)
    expected = torch.amax(x, dims, keepdim=keepdim)
    assert largest.dtype == x.dtype
    assert largest.shape == expected.shape
    assert torch.equal(largest, expected)


# Values -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_tensors(dtype, device):
    for length in LENGTHS:
        x = make((length,), dtype, length, device)
        for dim in (None, 0, -1):
            assert_right(x, dim)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*itertools.product(LAYOUTS[:1], DTYPES), *itertools.product(LAYOUTS[1:], (torch.float64, torch.bfloat16, torch.int8))],
    ids=str,
)
def test_dimensions_and_layouts(layout, dtype, device):
    for shape in ((3, 5, 7), (2, 300, 9), (9, 4, 300), (1, 5000, 8), (3, 1, 4500), (70, 8, 33)):
        x = laid_out(make(shape, dtype, 1, device), layout)
        for dim in (None, 0, 1, 2, -1, -2, -3):
            assert_right(x, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_many_neighbouring_sequences(dtype, device):
    """More than kernels walk at once, of lengths around what they hold in registers, a chunk and more."""
    for length, columns in itertools.product((2, 9, 17, 65, 256, 300, 4097), (8, 31, 32, 129, 1025)):
        if length * columns <= 1 << 20:
            assert_right(make((length, columns), dtype, length, device), 0)
    assert_right(make((3, 40, 50), dtype, 2, device), 1)


@drawn(st.data())
def test_any_shape(device, data):
    shape = data.draw(st.lists(st.integers(1, 12), max_size=5))
    dtype = data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(len(shape))))
    x = make(shape, dtype, data.draw(st.integers(0, 99)), device).permute(order)
    if shape and data.draw(st.booleans()):
        x = x[..., :: data.draw(st.integers(1, 3))]
    dim = data.draw(st.none() | st.integers(-max(1, x.dim()), max(1, x.dim()) - 1))
    assert_right(x, dim, data.draw(st.booleans()))


def test_sums_are_accurate_where_a_running_sum_is_not(device):
    """2^24 ones: a running float32 sum of them would be right, of 2^25 not any more; halves and small integers overflow earlier."""
    ones = torch.ones(1, device=device).expand(1 << 25)
    assert float(ops.reduce_sum(ones)) == 1 << 25
    many = torch.full((98_304,), 0.5, dtype=torch.float16, device=device)
    assert float(ops.reduce_sum(many)) == 49_152
    for dtype in (torch.int8, torch.int16):
        lowest = torch.iinfo(dtype).min
        assert int(ops.reduce_sum(torch.full((100_000,), lowest, dtype=dtype, device=device))) == 100_000 * lowest
    big = torch.full((3,), 2**31 - 1, dtype=torch.int32, device=device)
    assert int(ops.reduce_sum(big)) == 3 * (2**31 - 1)
    assert int(ops.reduce_sum(torch.full((4,), 2**62, device=device))) == 0  # modulo 2^64


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_nan_and_infinities_propagate(dtype, device):
    for length, place in ((1, 0), (300, 7), (300, 290), (9000, 8999), (9000, 4100)):
        x = make((length,), dtype, 0, device)
        x[place] = torch.nan
        assert ops.reduce_sum(x).isnan()
        assert ops.reduce_max(x).isnan()
        assert ops.reduce_max(x[:, None].expand(length, 9).contiguous(), 0).isnan().all()
        x[place] = torch.inf
        assert ops.reduce_sum(x) == ops.reduce_max(x) == torch.inf
        x[...] = -torch.inf
        assert ops.reduce_sum(x) == ops.reduce_max(x) == -torch.inf
    assert ops.reduce_sum(torch.tensor([torch.inf, -torch.inf], dtype=dtype, device=device)).isnan()


def test_bytes_of_a_bool_are_true_where_they_are_not_zero(device):
    x = torch.tensor([0, 2, 255, 0, 1], dtype=torch.uint8, device=device).view(torch.bool)
    assert int(ops.reduce_sum(x)) == 3
    assert bool(ops.reduce_max(x)) is True
    assert int(ops.reduce_sum(x.repeat(3000))) == 9000


def test_nothing_sums_to_zero_and_has_no_maximum(device):
    for shape, dim in (((0,), None), ((0,), 0), ((3, 0), 1), ((3, 0), None), ((0, 0), 0)):
        x = torch.empty(shape, device=device)
        assert torch.equal(ops.reduce_sum(x, dim), x.sum() if dim is None else x.sum(dim))
        with pytest.raises(RuntimeError, match="reduce_max: expected at least one element"):
            ops.reduce_max(x, dim)
        with pytest.raises(RuntimeError, match="reduce_max: expected at least one element"):
            ops.reduce_max(x.to("meta"), dim)
    assert ops.reduce_max(torch.empty((3, 0), device=device), 0).shape == (0,)
    assert ops.reduce_sum(torch.empty((0, 3), dtype=torch.int8, device=device), 0).dtype == torch.int64


# The order of additions ---------------------------------------------------------------------------------------------------------------


def by_the_rule(x, partial_lanes=PARTIAL_LANES):
    """The sum of a float32 or float64 sequence, in the order that cpp/reduce_params.h states, one addition after the other."""

    def in_lanes(row, count):
        lanes = x.new_zeros(count)
        for first in range(0, len(row), count):
            part = row[first : first + count]
            lanes[: len(part)] += part
        while len(lanes) > 1:
            lanes = lanes[::2] + lanes[1::2]
        return lanes[0]

    chunks = [in_lanes(x[first : first + CHUNK], LANES) for first in range(0, len(x), CHUNK)]
    return in_lanes(torch.stack(chunks), partial_lanes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_order_is_the_one_that_is_documented(dtype, device):
    for length in LENGTHS:
        x = make((length,), dtype, length)
        assert_same_bits(ops.reduce_sum(x.to(device)).cpu(), by_the_rule(x))


@pytest.mark.parametrize("seed", [3, 4])
def test_the_order_of_more_chunks_than_lanes(device, seed):
    x = make((CHUNK * (PARTIAL_LANES + 3) + 5,), torch.float32, seed)
    x[-1] = -x[:-1].sum(dtype=torch.float64)  # what is left is what rounding left, and that depends on the order
    expected = by_the_rule(x)
    assert expected != by_the_rule(x, LANES)
    assert_same_bits(ops.reduce_sum(x.to(device)).cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_bits_depend_on_no_stride_and_no_neighbour(dtype, device):
    for length in (5, 250, 4000, 9001):
        x = make((length, 40), dtype, length, device)
        expected = ops.reduce_sum(x, 0)
        for layout in ("transposed", "strided", "offset"):
            assert_same_bits(ops.reduce_sum(laid_out(x, layout), 0), expected)
        for column in (0, 31, 39):
            assert_same_bits(ops.reduce_sum(x[:, column]), expected[column])
            assert_same_bits(ops.reduce_sum(x[:, column].contiguous()), expected[column])
        assert_same_bits(ops.reduce_sum(x[:, :3], 0), expected[:3])
        whole = ops.reduce_sum(x)
        assert_same_bits(ops.reduce_sum(laid_out(x, "transposed")), whole)
        assert_same_bits(ops.reduce_sum(x.flatten()), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_no_alignment(dtype, device):
    x = make((9020,), dtype, 0, device)
    for begin, length in itertools.product(range(9), (3, 101, 300, 4099, 9003)):
        part = x[begin : begin + length]
        for op in (ops.reduce_sum, ops.reduce_max):
            assert_same_bits(op(part), op(part.clone()))
    rows = make((9, 4103), dtype, 1, device)  # each begins elsewhere within a vector
    for op in (ops.reduce_sum, ops.reduce_max):
        assert_same_bits(op(rows, 1), torch.stack([op(row.clone()) for row in rows]))


@pytest.mark.parametrize("shape", [(300_000,), (40, 9000), (9000, 200), (20_000, 3)], ids=str)
def test_bits_depend_on_no_number_of_threads(shape):
    x = make(shape, torch.float32)
    with threads(1):
        expected = [ops.reduce_sum(x, dim) for dim in (None, 0)]
    for count in (2, 3, 8):
        with threads(count):
            for _ in range(3):
                for dim, alone in zip((None, 0), expected, strict=True):
                    assert_same_bits(ops.reduce_sum(x, dim), alone)


DIGEST = """
import dmattn, torch
digest = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = torch.randn(9000, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    for op in (torch.ops.dmattn.reduce_sum, torch.ops.dmattn.reduce_max):
        digest += [value.hex() for value in [*op(x, 0).tolist(), *op(x, 1)[:9].tolist(), op(x).item()]]
"""


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_bits_depend_on_no_instruction_set(level, run_python):
    finished = run_python("-c", DIGEST + "print(digest)", DMATTN_CPU_LEVEL=level)
    if "does not support it" in finished.stderr:
        pytest.skip(f"no {level} here")
    assert finished.returncode == 0, finished.stderr
    here: dict[str, list[str]] = {}
    exec(DIGEST, here)
    assert finished.stdout.strip() == str(here["digest"])


@pytest.mark.gpu
def test_both_devices_give_the_same_bits(device):
    for dtype in DTYPES:
        for shape, dim in (((300_000,), None), ((40, 9001), 1), ((9001, 40), 0), ((5, 300, 33), 1), ((1 << 24,), None)):
            x = make(shape, dtype)
            for op in (ops.reduce_sum, ops.reduce_max):
                assert_same_bits(op(x.to(device), dim).cpu(), op(x, dim))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [256, 4096])  # of short sequences a warp reduces several
def test_a_reduction_waits_for_the_kernel_before(count):
    """Blocks may start while a selection is still finding what they read: the GPU sleeps until both are launched."""
    scores = make((100, 1, 4096), torch.float32, device="cuda")
    for _ in range(2):  # the first time kernels are loaded, which may wait for the GPU
        torch.full((100, 1, 4096), -7, dtype=torch.int32, device="cuda")  # in the memory that the selection is written to
        torch.cuda._sleep(20_000_000)  # cycles
        end = ops.select(scores, None, 400, True).view(-1, count)
        assert torch.equal(ops.reduce_max(end, 1), end.amax(1))
        del end


@pytest.mark.gpu
def test_in_a_graph(device):
    x = make((9000, 40), torch.bfloat16, 0, device)
    expected = [ops.reduce_sum(x, dim) for dim in (None, 0, 1)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [ops.reduce_sum(x, dim) for dim in (None, 0, 1)]
    for _ in range(3):
        graph.replay()
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


# Derivatives --------------------------------------------------------------------------------------------------------------------------

CALLS = list(itertools.product([(5,), (3, 4), (2, 3, 4), ()], [None, 0, -1], [False, True]))


@pytest.mark.parametrize(("shape", "dim", "keepdim"), CALLS, ids=str)
def test_gradients(shape, dim, keepdim):
    x = make(shape, torch.float64).requires_grad_()
    for op in (ops.reduce_sum, ops.reduce_max):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, dim, keepdim), x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda x, op=op: op(x, dim, keepdim), x)


def test_a_maximum_shares_its_gradient_as_torch_does(device):
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, 0.5]], device=device)
    for dim in (None, 0, 1):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        ops.reduce_max(ours, dim).sum().backward()
        (theirs.amax() if dim is None else theirs.amax(dim)).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)


def test_transforms(device):
    x = make((3, 4, 5), torch.float32, 0, device)
    for op, theirs in ((ops.reduce_sum, torch.sum), (ops.reduce_max, torch.amax)):
        for dim, keepdim in itertools.product((None, 0, -1), (False, True)):
            torch_dim = [0, 1] if dim is None else dim

            def run(x, op=op, dim=dim, keepdim=keepdim):
                return op(x, dim, keepdim)

            for in_dim in (0, 1, 2):
                loop = torch.stack([run(sample) for sample in x.unbind(in_dim)])
                assert_same_bits(torch.vmap(run, in_dim)(x), loop)
            gradient = torch.func.grad(lambda x, run=run: run(x).square().sum())(x[0])
            expected = torch.func.grad(
                lambda x, d=torch_dim, k=keepdim, f=theirs: f(x, d, keepdim=k).square().sum()
            )(x[0])  # fmt: skip
            torch.testing.assert_close(gradient, expected)
            _, tangent = torch.func.jvp(run, (x[0],), (x[1],))
            _, wanted = torch.func.jvp(lambda x, d=torch_dim, k=keepdim, f=theirs: f(x, d, keepdim=k), (x[0],), (x[1],))
            torch.testing.assert_close(tangent, wanted)
        assert torch.vmap(op)(x[0, 0]).shape == (5,)
        hessian = torch.func.hessian(lambda x, op=op: op(x.square()))(x[0, 0])
        assert hessian.shape == (5, 5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert_same_bits(forward_ad.unpack_dual(ops.reduce_sum(dual, 1)).tangent, ops.reduce_sum(x, 1))


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_max"])
def test_nested_vmap(name, device):
    op, x = getattr(ops, name), make((3, 4, 5, 6), torch.float32, 0, device)
    for dim, keepdim in itertools.product((None, 0, -1), (False, True)):

        def run(sample, dim=dim, keepdim=keepdim):
            return op(sample, dim, keepdim)

        def squared(sample, run=run):
            return run(sample).square().sum()

        for function in (run, torch.func.grad(squared), torch.func.hessian(squared)):
            nested = torch.vmap(torch.vmap(function), (1,))(x)
            loop = torch.stack([torch.stack([function(sample) for sample in part]) for part in x.unbind(1)])
            torch.testing.assert_close(nested, loop)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, run=run: torch.vmap(torch.vmap(run))(x), backend="eager", fullgraph=True)
        assert_same_bits(compiled(x), torch.vmap(torch.vmap(run))(x))


@pytest.mark.long
def test_compiled_without_recompiles(device):

    def both(x):
        return ops.reduce_sum(x, -1) + ops.reduce_max(x, -1, False), ops.reduce_sum(x), ops.reduce_max(x, 0, True)

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for shape in ((3, 50), (7, 5000), (40, 40)):
        ours, theirs = (make(shape, torch.float32, 1, device).requires_grad_() for _ in range(2))
        with torch._dynamo.config.patch(error_on_recompile=shape != (3, 50)):
            results = compiled(ours)
            sum(result.sum() for result in results).backward()
        for result, expected in zip(results, both(theirs), strict=True):
            assert_same_bits(result.detach(), expected.detach())
        sum(result.sum() for result in both(theirs)).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


# What is refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["device", "meta"])
def test_bad_inputs(where, device):
    device = device if where == "device" else where
    x = torch.zeros(2, 3, device=device)
    for op in (ops.reduce_sum, ops.reduce_max):
        for dim in (2, -3):
            with pytest.raises(RuntimeError, match=rf"dim: expected a dimension from -2 to 1.*got {dim}"):
                op(x, dim)
        with pytest.raises(RuntimeError, match="dim: expected a dimension from -1 to 0"):
            op(torch.zeros((), device=device), 1)
        for dtype in ("complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn"):
            with pytest.raises(RuntimeError, match=rf"(?i)input: expected dtype .*float64.*bool, got (torch\.)?{dtype}"):
                op(x.to(getattr(torch, dtype)))


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_max"])
def test_vmap_refuses_what_a_sample_has_not(name, device):
    """The vmapped dimension is no dimension of a sample, in a compiled program neither."""
    op, x = getattr(ops, name), torch.zeros(3, 4, 5, device=device)
    for rank, dims in ((2, (2, -3)), (1, (1, -2)), (0, (1, -2))):
        given = x if rank == 2 else x[0] if rank == 1 else x[0, 0]
        shape = str(list(given.shape[1:]))
        for dim in dims:
            message = (
                rf"dim: expected a dimension from {min(-rank, -1)} to {max(rank - 1, 0)} of input {re.escape(shape)}, got {dim}"
            )
            with pytest.raises(RuntimeError, match=message):
                torch.vmap(lambda sample, dim=dim: op(sample, dim))(given)
            with pytest.raises(RuntimeError, match=message):
                op(given[0], dim)
    for dim in (0, -1):
        assert torch.equal(torch.vmap(lambda sample, dim=dim: op(sample, dim))(x[0, 0]), x[0, 0])
    with pytest.raises(RuntimeError, match=r"dim: expected a dimension from -2 to 1 of input .*, got 2"):
        torch.compile(lambda x: torch.vmap(lambda sample: op(sample, 2))(x), backend="eager")(x)


def test_layouts_without_kernels():
    dense = torch.zeros(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of nested and quantised tensors
        unusual = (
            (None, "a call without a tensor"),
            (dense.to_sparse(), "a torch.sparse_coo tensor on cpu"),
            (torch.nested.nested_tensor([dense, dense[:1]]), "a nested tensor on cpu"),
            (torch.nested.nested_tensor([dense, dense[:1]], layout=torch.jagged), "a nested tensor on cpu"),
            (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "a quantised tensor on cpu"),
        )
    for (given, words), name in itertools.product(unusual, ("reduce_sum", "reduce_max")):
        with pytest.raises(
            NotImplementedError, match=f"dmattn::{name}: no kernel for {words}; this build has kernels for strided"
        ):
            getattr(ops, name)(given)
