# ruff: noqa: E501  (one case a line, however long)
"""nn.MultiheadAttention beside torch's: parameters, results, weights, masks of both kinds, torch's own layers around it, tracing."""

from __future__ import annotations

import copy
import inspect
import io
import itertools

import dmattn
import pytest
import torch
from dmattn import BlockMask, IntervalMask
from dmattn.nn import MultiheadAttention
from dmattn.testing import strategies
from programs import assert_compiles_once

# torch warns that mask dtypes differ, that its encoder takes no nested tensors, and of parts of itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask and attn_mask is deprecated:UserWarning",
    "ignore:enable_nested_tensor is True, but self.use_nested_tensor is False:UserWarning",
)

tensor = strategies.random_tensor
B, L, S, E, H = 3, 5, 7, 20, 4  # heads of 5: padded to 8 for the kernels
WIDE = torch.float64


def pair_of(**arguments):
    """torch's module and ours with the same parameters, float64."""
    arguments = {"dtype": WIDE, **arguments}
    theirs, ours = torch.nn.MultiheadAttention(E, H, **arguments), MultiheadAttention(E, H, **arguments)
    if theirs.in_proj_bias is not None:
        torch.nn.init.normal_(theirs.in_proj_bias), torch.nn.init.normal_(theirs.out_proj.bias)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def given_tensors(batch_first=False, batched=True, sizes=(E, E, E), lengths=(L, S, S)):
    made = [tensor((B, length, size), i, WIDE) for i, (length, size) in enumerate(zip(lengths, sizes, strict=True))]
    return [(x if batch_first else x.transpose(0, 1)) if batched else x[0] for x in made]


def padding(kind, batched=True):
    noise = tensor((B, S) if batched else (S,), 11, WIDE)
    if kind != "bool":
        return None if kind is None else noise
    hidden = noise > 0.3
    hidden[..., 0] = False
    return hidden


def pairs(kind, batched=True):
    if kind is None:
        return None
    noise = tensor((L, S) if kind.endswith("2-D") else ((B if batched else 1) * H, L, S), 12, WIDE)
    if not kind.startswith("bool"):
        return noise
    hidden = noise > 0.3
    hidden[..., 0] = False
    return hidden


def assert_same(theirs, ours, *tensors, **options):
    """Results, weights and all gradients."""
    results = []
    for module in (theirs, ours):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, weights = module(*leaves, **options)
        total = out.square().sum() + (0 if weights is None else weights.square().sum())
        parameters = [p for p in module.parameters() if p.requires_grad]
        results.append((out, weights, *torch.autograd.grad(total, [*leaves, *parameters])))
    for expected, got in zip(*results, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


CONSTRUCTORS = {
    "plain": {},
    "no biases": {"bias": False},
    "other sizes of keys and values": {"kdim": 10, "vdim": 14},
    "a key and a value for all": {"add_bias_kv": True},
    "zeros": {"add_zero_attn": True},
    "everything": {"kdim": 10, "vdim": 14, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
}


@pytest.mark.parametrize("arguments", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_equals_torchs(arguments, need_weights):
    theirs, ours = pair_of(**arguments)
    tensors = given_tensors(sizes=(E, arguments.get("kdim", E), arguments.get("vdim", E)))
    for of_keys, of_pairs in itertools.product((None, "bool", "float"), (None, "bool 2-D", "float 2-D", "bool 3-D", "float 3-D")):
        masks = {"key_padding_mask": padding(of_keys), "attn_mask": pairs(of_pairs)}
        assert_same(theirs, ours, *tensors, **masks, need_weights=need_weights)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_layouts(batched, batch_first, averaged, need_weights):
    theirs, ours = pair_of(batch_first=batch_first)
    options = {
        "key_padding_mask": padding("bool", batched),
        "attn_mask": pairs("bool 3-D", batched),
        "average_attn_weights": averaged,
    }
    given = given_tensors(batch_first, batched)
    assert_same(theirs, ours, *given, **options, need_weights=need_weights)
    for result in ours(*given, **options, need_weights=need_weights):
        assert result is None or result.is_contiguous()  # for code that calls view on it


@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_projects_once(need_weights):
    """Three names of one tensor."""
    theirs, ours = pair_of(batch_first=True)
    x = given_tensors(batch_first=True)[0]
    expected, got = (module(x, x, x, need_weights=need_weights) for module in (theirs, ours))
    torch.testing.assert_close(got, expected)
    memory = tensor((B, S, E), 5, WIDE)
    torch.testing.assert_close(ours(x, memory, memory), theirs(x, memory, memory))


@pytest.mark.parametrize("arguments", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_parameters_are_torchs(arguments):
    """Names, shapes, and numbers, which are drawn in the same order; and back."""
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(E, H, **arguments)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, **arguments)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(4)
    theirs._reset_parameters()
    torch.manual_seed(4)
    ours._reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_signatures_are_torchs():
    for name, more in (("__init__", ["sliding_window"]), ("forward", ["mask"])):
        theirs, ours = (
            inspect.signature(getattr(module, name)).parameters for module in (torch.nn.MultiheadAttention, MultiheadAttention)
        )
        assert list(ours) == [*theirs, *more]
        assert [p.default for p in list(ours.values())[: len(theirs)]] == [p.default for p in theirs.values()]


def test_copies_and_files():
    ours = MultiheadAttention(E, H, sliding_window=3, dtype=WIDE)
    memory = io.BytesIO()
    torch.save(ours, memory)
    memory.seek(0)
    x = given_tensors()[0]
    for other in (copy.deepcopy(ours), torch.load(memory, weights_only=False)):
        torch.testing.assert_close(other(x, x, x), ours(x, x, x))
        assert "sliding_window=(2, 0)" in repr(other)


# Window and masks ---------------------------------------------------------------------------------------------------------------------


def positions(length, keys):
    return torch.arange(length)[:, None] + keys - length, torch.arange(keys)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("lengths", [(L, S, S), (S, S, S), (S, L, L)])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_window_causality_and_masks(need_weights, lengths, more):
    """Each alone and together, also with keys that all queries see."""
    p, j = positions(*lengths[:2])
    Sk = lengths[1]
    interval = IntervalMask(j.int() - 1, j.int() + 2 + torch.arange(B)[:, None, None].int())
    cases = {
        "3 latest": ({"sliding_window": 3}, {}, (j <= p) & (p - j < 3)),
        "two sides": ({"sliding_window": (1, 2)}, {}, (p - j <= 1) & (j - p <= 2)),
        "causal": ({}, {"is_causal": True}, j <= torch.arange(lengths[0])[:, None]),
        "causal, window": ({"sliding_window": (2, 2)}, {"is_causal": True}, (j <= torch.arange(lengths[0])[:, None]) & (p - j <= 2) & (j - p <= 2)),
        "mask": ({}, {"mask": interval}, interval.to_bool(*lengths[:2]).expand(B, H, -1, -1).flatten(0, 1)),
        "mask, window": ({"sliding_window": (1, 9)}, {"mask": interval}, (interval.to_bool(*lengths[:2]) & (p - j <= 1)).expand(B, H, -1, -1).flatten(0, 1)),
    }  # fmt: skip
    theirs, _ = pair_of(**more)
    for name, (made, options, visible) in cases.items():
        ours = MultiheadAttention(E, H, dtype=WIDE, **more, **made)
        ours.load_state_dict(theirs.state_dict())
        tensors = given_tensors(lengths=lengths)
        sees = visible.any(-1) if visible.dim() == 2 else visible.unflatten(0, (B, H)).any(-1).all(1)
        expected = theirs(*tensors, attn_mask=~visible, need_weights=need_weights)
        got = ours(*tensors, **options, need_weights=need_weights)
        rows = torch.ones(B, lengths[0], dtype=torch.bool) if more else sees.expand(B, -1)
        torch.testing.assert_close(
            got[0].transpose(0, 1)[rows], expected[0].transpose(0, 1)[rows], msg=lambda m, n=name: f"{n}: {m}"
        )
        if need_weights:
            torch.testing.assert_close(got[1][rows], expected[1][rows])
        blocks = BlockMask.from_bool(visible if visible.dim() == 2 else visible.unflatten(0, (B, H)))
        if not more:
            by_blocks = pair_of()[1]
            by_blocks.load_state_dict(theirs.state_dict())
            torch.testing.assert_close(by_blocks(*tensors, mask=blocks, need_weights=need_weights)[0], got[0])
            both = by_blocks(*tensors, mask=IntervalMask.padding(Sk, Sk) & blocks, attn_mask=~visible, need_weights=need_weights)
            torch.testing.assert_close(both[0], got[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_hint_of_causality_takes_the_place_of_the_mask(need_weights):
    theirs, ours = pair_of(batch_first=True)
    x = given_tensors(batch_first=True)[0]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L, dtype=WIDE)
    options = {"need_weights": need_weights, "key_padding_mask": torch.arange(L).expand(B, -1) >= torch.tensor([[5], [3], [1]])}
    expected = theirs(x, x, x, attn_mask=causal, is_causal=True, **options)
    torch.testing.assert_close(ours(x, x, x, attn_mask=causal, is_causal=True, **options), expected)
    torch.testing.assert_close(ours(x, x, x, is_causal=True, **options), expected)


LATER = torch.ones(L, L, dtype=torch.bool).triu(1)
NEVER = -torch.inf
CAUSAL = {
    "bools": LATER,
    "bools of each head": LATER.expand(B * H, L, L),
    "floats": torch.zeros(L, L, dtype=WIDE).masked_fill(LATER, NEVER),
    "the lowest float": torch.zeros(L, L).masked_fill(LATER, torch.finfo(torch.float32).min),
    "a large number": torch.zeros(B * H, L, L, dtype=torch.float16).masked_fill(LATER, -1e4),
}
NOT_CAUSAL = {
    "nothing hidden": torch.zeros(L, L, dtype=torch.bool),
    "True for visible": ~LATER,
    "a window, too": LATER | LATER.T.roll(-1, 1),
    "one head": torch.stack([*LATER.expand(B * H - 1, L, L), LATER.clone().fill_diagonal_(True)]),
    "another length": torch.ones(L, S, dtype=torch.bool).triu(1),
    "small numbers": torch.zeros(L, L, dtype=WIDE).masked_fill(LATER, -5.0),
    "a bias": torch.full((L, L), 0.5, dtype=WIDE).masked_fill(LATER, NEVER),
    "NaN": torch.zeros(L, L, dtype=WIDE).masked_fill(LATER, NEVER).fill_diagonal_(torch.nan),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_every_form_of_the_causal_mask_may_be_given_with_the_hint(mask, need_weights):
    _, ours = pair_of(batch_first=True)
    x = given_tensors(batch_first=True)[0]
    expected, got = (ours(x, x, x, attn_mask=m, is_causal=True, need_weights=need_weights) for m in (None, mask))
    assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize("mask", NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_a_wrong_hint_is_refused_where_the_mask_can_be_read(mask):
    _, ours = pair_of(batch_first=True)
    x = given_tensors(batch_first=True)[0]
    sentence = r"attn_mask: expected the causal mask \[5, 5\] with is_causal=True, .* got another \[.*\]: leave is_causal out"
    for need_weights in (True, False):
        with pytest.raises(ValueError, match=sentence):
            ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)


def test_a_hint_is_believed_where_the_mask_cannot_be_read():
    """Compiled, exported, and on tensors without values: nothing reads it."""
    _, ours = pair_of(batch_first=True)
    x, mask = given_tensors(batch_first=True)[0], torch.zeros(L, L, dtype=torch.bool)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ours

        def forward(self, x, mask):
            return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    step = Step().eval()
    expected = ours(x, x, x, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="eager")(x, mask), expected)
    torch.testing.assert_close(torch.export.export(step, (x, mask)).module()(x, mask), expected)
    assert step.to("meta")(x.to("meta"), mask.to("meta")).is_meta


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, WIDE])
def test_queries_that_see_nothing_give_the_bias_and_hidden_keys_hold_anything(need_weights, dtype):
    """Floats hide with -inf."""
    _, ours = pair_of(batch_first=True)
    query, key, value = given_tensors(batch_first=True)
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0], hidden[1, 3:] = True, True
    mask = hidden if dtype == torch.bool else torch.zeros(B, S, dtype=dtype).masked_fill(hidden, -torch.inf)
    clean = ours(query, key, value, key_padding_mask=mask, need_weights=need_weights)
    assert torch.equal(clean[0][0], ours.out_proj.bias.expand(L, E))
    key, value = (x.masked_fill(hidden[..., None], torch.nan).requires_grad_() for x in (key, value))
    query.requires_grad_()
    poisoned = ours(query, key, value, key_padding_mask=mask, need_weights=need_weights)
    assert torch.equal(clean[0], poisoned[0])
    grad_query, grad_key, _ = torch.autograd.grad(poisoned[0].square().sum(), (query, key, value))
    assert grad_query.isfinite().all()
    assert grad_key[1, :3].isfinite().all()
    if need_weights:
        assert torch.equal(clean[1], poisoned[1])
        assert not poisoned[1][0].any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_of_floats_learn(need_weights):
    theirs, ours = pair_of()
    tensors = given_tensors()
    results = []
    for module in (theirs, ours):
        of_pairs, of_keys = pairs("float 3-D").requires_grad_(), padding("float").requires_grad_()
        out, _ = module(*tensors, attn_mask=of_pairs, key_padding_mask=of_keys, need_weights=need_weights)
        results.append(torch.autograd.grad(out.square().sum(), (of_pairs, of_keys)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_drops_in_training_alone(need_weights):
    ours = MultiheadAttention(E, H, dropout=0.5, dtype=WIDE)
    x = given_tensors()[0]
    first, second = (ours(x, x, x, need_weights=need_weights) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    ours.eval()
    assert torch.equal(ours(x, x, x, need_weights=need_weights)[0], ours(x, x, x, need_weights=need_weights)[0])
    if need_weights:
        dropped = first[1] == 0
        assert not dropped.all()
        per_head = ours.train()(x, x, x, average_attn_weights=False)[1]
        assert (per_head == 0).any()


def test_dtypes(device):
    """Also those that no kernel takes there."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for size in (E, 300 * H):  # heads of 5, and of 300
            ours = MultiheadAttention(size, H, device=device, dtype=dtype)
            x = tensor((L, B, size), 3, dtype, device)
            for need_weights in (True, False):
                out, _ = ours(x, x, x, need_weights=need_weights)
                assert (out.shape, out.dtype) == ((L, B, size), dtype)
    with torch.autocast(device, torch.bfloat16):
        module = MultiheadAttention(E, H, add_bias_kv=True, device=device)
        x = tensor((L, B, E), 3, torch.float32, device)
        assert module(x, x, x, need_weights=False)[0].dtype == torch.bfloat16


# torch's own layers around it ---------------------------------------------------------------------------------------------------------


def encoders(window=None):
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, dtype=WIDE)
    theirs = torch.nn.TransformerEncoder(layer, 2).eval()
    ours = copy.deepcopy(theirs)
    for module in ours.layers:
        attention = MultiheadAttention(E, H, batch_first=True, dtype=WIDE, sliding_window=window).eval()
        attention.load_state_dict(module.self_attn.state_dict())
        module.self_attn = attention
    return theirs, ours


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("trains", [True, False])
def test_torchs_encoder_calls_it(trains):
    """In eval mode without gradients torch's layers would take kernels of their own."""
    theirs, ours = encoders()
    _, windowed = encoders(window=1)
    x = given_tensors(batch_first=True)[0]
    hidden = torch.arange(L).expand(B, -1) >= torch.tensor([[5], [3], [1]])
    with torch.set_grad_enabled(trains):
        if not trains:
            with pytest.raises(TypeError, match=r"TransformerEncoder makes none with encoder\.use_nested_tensor = False"):
                ours(x, src_key_padding_mask=hidden)
            ours.use_nested_tensor = False
        expected, got = (module(x, src_key_padding_mask=hidden) for module in (theirs, ours))
        torch.testing.assert_close(got[~hidden], expected[~hidden])
        causal = torch.nn.Transformer.generate_square_subsequent_mask(L, dtype=WIDE)
        torch.testing.assert_close(ours(x, mask=causal, is_causal=True), theirs(x, mask=causal, is_causal=True))
        alone = windowed(x)  # each token sees itself alone
        torch.testing.assert_close(alone[:, 2:3], windowed(x[:, 2:3]))
        assert not torch.equal(alone, ours(x))


def test_an_encoder_made_of_it(monkeypatch):
    monkeypatch.setattr(torch.nn.modules.transformer, "MultiheadAttention", MultiheadAttention)
    model = torch.nn.Transformer(E, H, 1, 1, 32, dropout=0.0, batch_first=True, dtype=WIDE).eval()
    assert sum(isinstance(module, MultiheadAttention) for module in model.modules()) == 3
    source, target, _ = given_tensors(batch_first=True)
    with torch.no_grad():
        got = model(
            source, target, tgt_is_causal=True, tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=WIDE)
        )
    for module in model.modules():
        if isinstance(module, MultiheadAttention):
            module.__class__ = torch.nn.MultiheadAttention
            module._qkv_same_embed_dim = True
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=WIDE)
    torch.testing.assert_close(got, model(source, target, tgt_is_causal=True, tgt_mask=mask))


TORCHS_INPUTS = """
import warnings
warnings.simplefilter("ignore")
import torch, dmattn
try:
    from torch.testing._internal.common_modules import module_db
except ImportError as reason:
    print("skipped:", reason), exit()
count = 0
for info in module_db:
    if info.module_cls is not torch.nn.MultiheadAttention:
        continue
    for training in (True, False):
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
        for given in inputs:
            results = []
            for module_cls in (torch.nn.MultiheadAttention, dmattn.nn.MultiheadAttention):
                torch.manual_seed(0)
                made = given.constructor_input
                module = module_cls(*made.args, **{**made.kwargs, "dtype": torch.float64}).train(training)
                results.append(module(*given.forward_input.args, **given.forward_input.kwargs))
            torch.testing.assert_close(*results)
            count += 1
print("inputs:", count)
"""


@pytest.mark.slow
def test_inputs_of_torchs_own_tests(run_python):
    """In a process of its own: importing torch's test code changes global flags."""
    finished = run_python("-c", TORCHS_INPUTS)
    assert finished.returncode == 0, finished.stderr
    if finished.stdout.startswith("skipped"):
        pytest.skip(finished.stdout)
    assert int(finished.stdout.split()[-1]) > 50


@pytest.mark.long
def test_compile_and_export(device):
    """One graph for all lengths, with and without masks."""
    module = MultiheadAttention(E, H, batch_first=True, sliding_window=(3, 1), device=device)
    if device == "cuda":
        module = module.bfloat16()
    dtype = next(module.parameters()).dtype

    def step(x, hidden):
        return module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    def given_of(length):
        hidden = torch.arange(length, device=device).expand(2, -1) >= torch.tensor([[7], [length]], device=device)
        return tensor((2, length, E), 3, dtype, device), hidden

    assert_compiles_once(step, map(given_of, (9, 12, 40)), backend="eager")
    x, hidden = given_of(40)
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(
        module, (x, x, x, hidden, False), dynamic_shapes=({1: length}, {1: length}, {1: length}, {1: length}, None)
    )
    x, hidden = x[:, :11], hidden[:, :11]
    torch.testing.assert_close(program.module()(x, x, x, hidden, False)[0], step(x, hidden))


# Bad input ----------------------------------------------------------------------------------------------------------------------------

MODULE = MultiheadAttention(E, H, batch_first=True, dtype=WIDE)
X, M = tensor((B, L, E), 0, WIDE), tensor((B, S, E), 1, WIDE)
FEW = IntervalMask.causal(L)


def call(query=X, key=M, value=M, **options):
    return MODULE(query, key, value, **options)


BAD = {
    "query of four dimensions": (lambda: call(X[None]), AssertionError, "query should be unbatched 2D or batched 3D tensor but received 4-D query tensor"),
    "key of two dimensions": (lambda: call(key=M[0]), AssertionError, "expected `key` and `value` to be 3-D but found 2-D and 3-D tensors respectively"),
    "padding of one dimension": (lambda: call(key_padding_mask=padding("bool")[0]), AssertionError, "expected `key_padding_mask` to be `None` or 2-D but found 1-D tensor instead"),
    "a mask of one dimension": (lambda: call(attn_mask=pairs("bool 2-D")[0]), AssertionError, "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead"),
    "an unbatched mask of another shape": (lambda: call(X[0], M[0], M[0], attn_mask=pairs("bool 3-D")), AssertionError, r"Expected `attn_mask` shape to be \(4, 5, 7\)"),
    "a list": (lambda: call(X.tolist()), TypeError, "query: expected a torch.Tensor, got list"),
    "nested": (lambda: call(torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)), TypeError, "query: expected a dense tensor, got a nested one; dmattn.varlen_attention takes packed sequences"),
    "query of another size": (lambda: call(X[..., :8]), ValueError, r"query: expected a last dimension of 20, got \[3, 5, 8\]"),
    "value of another size": (lambda: call(value=M[..., :8]), ValueError, r"value: expected a last dimension of 20, got \[3, 7, 8\]"),
    "value of another length": (lambda: call(value=M[:, :4]), ValueError, r"key, value: expected equal lengths, and B=3 like query, got \[3, 7, 20\] and \[3, 4, 20\]"),
    "another batch": (lambda: call(X[:2]), ValueError, "key, value: expected equal lengths, and B=2 like query"),
    "padding of another length": (lambda: call(key_padding_mask=padding("bool")[:, :4]), ValueError, r"key_padding_mask: expected \[B, S\] = \[3, 7\], got \[3, 4\]"),
    "a mask of another shape": (lambda: call(attn_mask=pairs("bool 2-D").T), ValueError, r"attn_mask: expected \[L, S\] or \[B \* H, L, S\] = \[5, 7\] or \[12, 5, 7\], got \[7, 5\]"),
    "a mask of other heads": (lambda: call(attn_mask=pairs("bool 3-D")[:5]), ValueError, r"attn_mask: expected .* got \[5, 5, 7\]"),
    "an integer mask": (lambda: call(attn_mask=pairs("bool 2-D").int()), TypeError, "attn_mask: expected dtype bool, float64, .* got int32"),
    "a tensor for a mask": (lambda: call(mask=pairs("bool 2-D")), TypeError, "mask: expected an IntervalMask, a BlockMask or both joined, got Tensor"),
    "an interval mask of another length": (lambda: call(mask=FEW), ValueError, "mask: expected an IntervalMask for S=7 keys, got one for 5"),
    "a block mask of another length": (lambda: call(mask=BlockMask.from_bool(pairs("bool 2-D").T)), ValueError, "mask: expected a BlockMask for L=5, S=7, got one for 7, 5"),
    "a mask of other sequences, weights": (lambda: MODULE(X[:1], M[:1], M[:1], mask=IntervalMask.padding(7, torch.tensor([3, 4]))), ValueError, r"mask: expected one for \[B\|1, H\|1\] with B=1, H=4, got one for \[2, 1\]"),
    "a block mask of other heads": (lambda: call(mask=BlockMask.from_bool(torch.ones(1, 3, 5, 7).bool())), ValueError, r"mask: expected one for \[B\|1, H\|1\] with B=3, H=4, got one for \[1, 3\]"),
    "blocks and more keys": (lambda: MultiheadAttention(E, H, add_zero_attn=True, batch_first=True, dtype=WIDE)(X, M, M, mask=BlockMask.from_bool(pairs("bool 2-D"))), ValueError, "mask: expected an IntervalMask with add_bias_kv or add_zero_attn"),
    "a mask of integers with the hint": (lambda: call(is_causal=True, attn_mask=torch.zeros(L, S, dtype=torch.int32)), TypeError, "attn_mask: expected dtype .*, got int32"),
    "is_causal as a number": (lambda: call(is_causal=1), TypeError, "is_causal: expected a bool, got int"),
    "a window of 0": (lambda: MultiheadAttention(E, H, sliding_window=0), ValueError, "sliding_window: expected a positive int, got 0"),
    "a window of one side": (lambda: MultiheadAttention(E, H, sliding_window=(1,)), ValueError, r"sliding_window: expected an int or \(left, right\), got \(1,\)"),
    "a negative side": (lambda: MultiheadAttention(E, H, sliding_window=(1, -1)), ValueError, "sliding_window: expected 0 <= sliding_window <= 1048576, got -1"),
    "a window of text": (lambda: MultiheadAttention(E, H, sliding_window="3"), TypeError, "sliding_window: expected a positive int, got str"),
    "heads that do not divide": (lambda: MultiheadAttention(E, 3), ValueError, "embed_dim: expected a multiple of num_heads=3, got 20"),
    "scripted": (lambda: torch.jit.script(MODULE), NotImplementedError, "torch.jit.script is not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("act", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(act, error, message):
    with pytest.raises(error, match=message):
        act()
    assert dmattn.nn.MultiheadAttention is MultiheadAttention


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_that_is_no_tensor_is_refused(name):
    x = torch.zeros(4, 1, 16)
    with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor, got str"):
        dmattn.nn.MultiheadAttention(16, 2)(x, x, x, **{name: "causal"})
