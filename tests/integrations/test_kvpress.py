"""Presses of kvpress on dmattn's eviction caches: what their own cache gives, and prompts in memory that does not grow."""

from __future__ import annotations

import itertools
import types
import warnings

import pytest
import torch
from dmattn_bench import two_ways

# Of kvpress, which says what it has not been tested with.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
transformers = pytest.importorskip("transformers")
from dmattn.integrations.kvpress import pressed  # noqa: E402
from tiny_models import SIZES  # noqa: E402

PROMPT, ANSWER = 150, 6
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what kvpress imports
    try:
        import kvpress
    except ImportError:  # the adapter itself is tested without
        kvpress = None


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, head_dim=8)
    return transformers.LlamaForCausalLM(config).double().eval()


def name_of_cache():
    """What a model's forward calls its cache."""
    major, minor = (int(x) for x in transformers.__version__.split(".")[:2])
    return "cache" if (major, minor) >= (5, 24) else "past_key_values"


def tokens(batch=2, length=PROMPT + ANSWER):
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, cache, cuts):
    """Logits of all tokens, which come in parts that end at these places."""
    positions = torch.arange(ids.shape[1])[None]
    parts = [
        model(ids[:, a:b], position_ids=positions[:, a:b], **{name_of_cache(): cache}).logits
        for a, b in itertools.pairwise((0, *cuts))
    ]
    return torch.cat(parts, 1)


ONCE = (PROMPT, *range(PROMPT + 1, PROMPT + ANSWER + 1))


# With kvpress -----------------------------------------------------------------------------------------------------------------------------

PRESSES = {
    "Knorm": lambda: kvpress.KnormPress(0.6),
    "StreamingLLM": lambda: kvpress.StreamingLLMPress(0.6, n_sink=3),
    "TOVA": lambda: kvpress.TOVAPress(0.6),
    "SnapKV": lambda: kvpress.SnapKVPress(0.6, window_size=16, kernel_size=3),
    "PyramidKV": lambda: kvpress.PyramidKVPress(0.6, window_size=8, beta=5),
    "ExpectedAttention": lambda: kvpress.ExpectedAttentionPress(0.6),
    "KeyDiff": lambda: kvpress.KeyDiffPress(0.6),
    "LagKV": lambda: kvpress.LagKVPress(0.6, lag_size=16),
    "CUR": lambda: kvpress.CURPress(0.6),
    "Random": lambda: kvpress.RandomPress(0.6, seed=3),
    "NonCausal": lambda: kvpress.NonCausalAttnPress(0.6, chunk_size=32),
    "CriticalKV": lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(0.6, window_size=16)),
    "Chunk": lambda: kvpress.ChunkPress(kvpress.KnormPress(0.6), chunk_length=40),
    "ChunkKV": lambda: kvpress.ChunkKVPress(kvpress.KnormPress(0.6), chunk_length=10),
    "Block": lambda: kvpress.BlockPress(kvpress.KeyDiffPress(0.6), block_size=20),
    "AdaKV": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(0.6)),
    "CriticalAdaKV": lambda: kvpress.CriticalAdaKVPress(kvpress.ExpectedAttentionPress(0.6, use_vnorm=False)),
}


@pytest.mark.skipif(kvpress is None, reason="kvpress is not installed")
@pytest.mark.parametrize("name", PRESSES)
def test_presses_give_what_they_give_in_kvpress(model, name):
    ids = tokens(batch=1)
    model.set_attn_implementation("sdpa")
    cache = transformers.DynamicCache()
    try:
        with PRESSES[name]()(model):
            expected = logits(model, ids, cache, ONCE)
    except KeyError as error:
        pytest.skip(f"kvpress does not run with transformers {transformers.__version__}: {error}")
    assert not torch.equal(expected, logits(model, ids, transformers.DynamicCache(), ONCE))  # the press matters
    with pressed(model, PRESSES[name](), tokens=PROMPT + ANSWER) as own:
        found = logits(model, ids, own, ONCE)
        held = [int(layer.cache.held.sum()) for layer in own.layers]
    two_ways.assert_same_in_another_order(found, expected, torch.float64)
    if "Ada" not in name:  # AdaKV's keys all stay in kvpress's cache
        assert held == [layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(kvpress is None, reason="kvpress is not installed")
@pytest.mark.parametrize(
    "name", ["Knorm", "StreamingLLM", "TOVA", "SnapKV", "KeyDiff", "CUR", "ExpectedAttention", "Random", "LagKV"]
)
def test_prompts_of_any_parts_in_bounded_memory(model, name):
    ids, press, results = tokens(), PRESSES[name](), []
    for cuts in ((PROMPT + ANSWER,), (40, 77, 78, PROMPT + ANSWER), range(1, PROMPT + ANSWER + 1)):
        with pressed(model, press, budget=40, every=24) as cache:
            results.append(logits(model, ids, cache, cuts))
            assert all(layer.cache.cache.key.shape[2] == 64 for layer in cache.layers)
    for result in results[1:]:
        two_ways.assert_same_in_another_order(result, results[0], torch.float64)
    assert press.compression_ratio == 0.6


@pytest.mark.skipif(kvpress is None, reason="kvpress is not installed")
@pytest.mark.parametrize("name", ["Knorm", "KeyDiff", "TOVA"])
def test_parts_give_what_a_decoding_press_gives(model, name):
    """Which compresses behind every call but the first. kvpress leaves keys in the order of their ranks, so presses that look at the order
    rank other keys than here, where keys stay in the order of their positions."""
    ids, cuts = tokens(batch=1), range(24, PROMPT, 24)
    ids = ids[:, : cuts[-1]]
    model.set_attn_implementation("sdpa")
    base = PRESSES[name]()
    base.compression_ratio = 0.0
    cache = transformers.DynamicCache()
    try:
        with kvpress.DecodingPress(base, compression_interval=1, target_size=40, hidden_states_buffer_size=0)(model):
            expected = logits(model, ids, cache, cuts)
    except KeyError as error:
        pytest.skip(f"kvpress does not run with transformers {transformers.__version__}: {error}")
    assert cache.layers[0].keys.shape[2] == 40
    with pressed(model, PRESSES[name](), budget=40, every=24) as own:
        found = logits(model, ids, own, cuts)
    two_ways.assert_same_in_another_order(found, expected, torch.float64)


@pytest.mark.skipif(kvpress is None, reason="kvpress is not installed")
def test_presses_that_change_keys_are_refused(model):
    press = kvpress.KeyRerotationPress(kvpress.KnormPress(0.5))
    with (
        pytest.raises(
            ValueError, match="press: expected one that picks keys and leaves them as they are, got KeyRerotationPress"
        ),
        pressed(model, press, tokens=PROMPT) as cache,
    ):
        logits(model, tokens(), cache, (PROMPT,))


# Without ----------------------------------------------------------------------------------------------------------------------------------


class SmallestFirst:
    """A press with kvpress's interface: it keeps the keys of smallest norm."""

    def __init__(self, ratio=0.6):
        self.compression_ratio = ratio

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        kept = int(keys.shape[2] * (1 - self.compression_ratio))
        assert kwargs["hidden_states"] is hidden_states
        assert hidden_states.shape[1] == kwargs["position_embeddings"][0].shape[1] <= keys.shape[2]
        index = (-keys.norm(dim=-1)).topk(kept).indices[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, index), values.gather(2, index)


class Hides:
    """A press that says which keys are hidden, other ones in each head."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        b, h, n = torch.meshgrid(*(torch.arange(size) for size in keys.shape[:3]), indexing="ij")
        hidden = n % (h + 2) != 0
        module.masked_key_indices = (b[hidden], h[hidden], n[hidden])
        return keys, values


def test_a_press_picks_once_behind_the_prompt(model):
    ids = tokens()
    with pressed(model, SmallestFirst(), tokens=PROMPT + ANSWER) as cache:
        out = logits(model, ids, cache, ONCE)
        assert cache.get_seq_length() == PROMPT + ANSWER
        for layer in cache.layers:
            assert layer.cache.held.tolist() == [[int(PROMPT * 0.4) + ANSWER] * 2] * 2
    dense = model(ids[:, :PROMPT]).logits
    two_ways.assert_same_in_another_order(out[:, :PROMPT], dense.detach(), torch.float64)


def test_heads_hold_what_is_not_hidden(model):
    with pressed(model, Hides(), tokens=PROMPT + ANSWER) as cache:
        logits(model, tokens(), cache, (PROMPT,))
        for layer in cache.layers:
            assert layer.cache.held.tolist() == [[PROMPT // 2, PROMPT // 3]] * 2
            assert layer.cache.cache.position[0, 1, :4].tolist() == [0, 3, 6, 9]


def test_cuts_change_nothing(model):
    ids, results = tokens(), []
    for cuts in ((PROMPT + ANSWER,), (40, 77, 78, PROMPT + ANSWER), range(1, PROMPT + ANSWER + 1)):
        with pressed(model, SmallestFirst(), budget=40, every=24) as cache:
            results.append(logits(model, ids, cache, cuts))
            assert sum(layer.nbytes for layer in cache.layers) == 2 * 2 * 2 * 64 * (2 * 8 * 8 + 8 + 4 + 4) + 2 * 2 * 2 * 4 * 2
    for result in results[1:]:
        two_ways.assert_same_in_another_order(result, results[0], torch.float64)


def test_generate_counts_positions_on(model):
    ids = tokens(length=60)
    options = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
    with pressed(model, SmallestFirst(), tokens=60 + ANSWER) as cache:
        found = model.generate(ids, **{name_of_cache(): cache}, **options)
    with pressed(model, SmallestFirst(), tokens=60 + ANSWER) as cache:
        out, answer = logits(model, ids, cache, (60,)), []
        for step in range(ANSWER):
            answer.append(out[:, -1:].argmax(-1))
            out = model(answer[-1], position_ids=torch.tensor([[60 + step]]), **{name_of_cache(): cache}).logits
    assert torch.equal(found[:, 60:], torch.cat(answer, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "tokens: expected an int with every=0, got None"),
        ({"every": 8}, "budget: expected an int with every=8, got None"),
        ({"every": 8, "budget": 8, "tokens": 9}, "tokens: expected None with every=8, got 9"),
        ({"tokens": 0}, "tokens: expected a positive int, got 0"),
    ],
)
def test_sizes_that_do_not_belong_together(model, options, message):
    with pytest.raises(ValueError, match=message), pressed(model, SmallestFirst(), **options):
        pass


def test_padding_missing_caches_and_uneven_heads_are_refused(model):
    ids, mask = tokens(length=30), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :3] = 0
    with pressed(model, SmallestFirst(), tokens=99) as cache:
        with pytest.raises(ValueError, match="attention_mask: expected None or no padding"):
            model(ids, attention_mask=mask, **{name_of_cache(): cache})
        with pytest.raises(ValueError, match=r"cache: expected the cache of dmattn.integrations.kvpress.pressed in every call"):
            model(ids, use_cache=False)
    with pressed(model, Hides(), tokens=99) as cache:
        logits(model, ids, cache, (30,))
        with pytest.raises(ValueError, match="press: expected heads that hold equally many keys"):
            cache.layers[0].cache.evict()
    both = types.SimpleNamespace(compress=lambda module, hidden, keys, values, attentions, kwargs: (keys + 1, values))
    with pressed(model, both, tokens=99) as cache, pytest.raises(ValueError, match="press: expected one that picks keys"):
        logits(model, ids, cache, (30,))
