"""Presses of kvpress on dmattn's eviction: the press chooses keys, and an EvictionCache of fixed size holds them, also while a prompt is read.

Needs ``transformers``; a press is any object with kvpress's interface.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from dmattn import checks
from dmattn.eviction import EvictionCache, Policy, Seen

NAME = "dmattn_press"


@contextlib.contextmanager
def pressed(model: Any, press: Any, *, tokens: int | None = None, budget: int | None = None, every: int = 0) -> Iterator[Cache]:
    """While this context lasts, a model's attention layers hold what a press keeps, each in an :class:`dmattn.eviction.EvictionCache`.

    With ``every=0`` this is what ``with press(model)`` of kvpress does: the first call is a whole prompt, which attends densely; then the press
    drops keys once, by its own compression ratio. With ``every > 0`` the press drops keys behind every ``every`` tokens, of prompts as of
    answers, and keeps ``budget`` of those that are held. So a prompt that comes in parts never needs more than ``budget + every`` slots. Calls
    count positions on by themselves, dropped keys included.

    A press serves if it picks keys by gathering them, or says which to hide as ``masked_key_indices``: scorer presses and what wraps them
    (chunks, blocks, AdaKV). Presses that change keys or read whole matrices of attention weights do not.

    Args:
        model: a transformers model of the Llama family.
        press: a press of kvpress.
        tokens: with ``every=0``: the most tokens a sequence will have, prompt and answer.
        budget: with ``every > 0``: keys that each head keeps. It takes the place of the press's compression ratio.
        every: tokens between two decisions.

    Yields:
        a transformers ``Cache`` for the model's calls and for ``generate()``: ``cache=``, or ``past_key_values=`` before transformers 5.24.

    Raises:
        TypeError, ValueError: sizes that do not belong together, padding, or a press that changes keys.
    """
    checks.natural_int("every", every)
    for name, given, expected in (("budget", budget, every > 0), ("tokens", tokens, every == 0)):
        if (given is not None) != expected:
            raise ValueError(f"{name}: expected {'an int' if expected else 'None'} with every={every}, got {given}")
    checks.positive_int("budget" if every else "tokens", budget if every else tokens)
    if hasattr(press, "post_init_from_model"):
        press.post_init_from_model(model)
    body: Any = model.model
    body = getattr(body, "language_model", body)
    layers, hooks = [], []
    before = model.config._attn_implementation
    try:
        for decoder in body.layers:
            attention = decoder.self_attn
            attention.rotary_emb, attention.masked_key_indices = body.rotary_emb, None
            policy = PressPolicy(
                budget or tokens or 0, every=every, press=press, module=attention, keeps_all_but_budget=every > 0
            )
            layers.append(PressLayer(policy))
            _LAYERS[attention] = layers[-1]
            hooks.append(attention.register_forward_pre_hook(layers[-1].before_call, with_kwargs=True))
            hooks.append(attention.register_forward_hook(layers[-1].after_call))
        model.set_attn_implementation(NAME)
        yield Cache(layers=layers)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
        for decoder in body.layers:
            _LAYERS.pop(decoder.self_attn, None)


# Which keys a press picks -----------------------------------------------------------------------------------------------------------------


class _Gathers(TorchFunctionMode):
    """Remembers the index of the last ``keys.gather(2, index)``."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.index: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.gather and args[0] is self.keys and args[1] == 2:
            self.index = args[2]
        return func(*args, **(kwargs or {}))


def kept_by(press: Any, module: nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """bool [B, Hkv, n]: which of n keys a press keeps.

    Args:
        press, module: the press, and the attention layer that it is asked about.
        key, value: [B, Hkv, n, D or Dv].
        kwargs: what the layer was called with, ``hidden_states`` included.

    Raises:
        ValueError: the press changes keys, or picks them in no way that is known here.
    """
    attention: Any = module
    attention.masked_key_indices = None
    with _Gathers(key) as gathers:
        new_key, _ = press.compress(module, kwargs["hidden_states"], key, value, None, kwargs)
    hidden, attention.masked_key_indices = attention.masked_key_indices, None
    kept = torch.ones(key.shape[:3], dtype=torch.bool, device=key.device)
    if hidden is not None:
        kept[tuple(hidden)] = False
    elif new_key is not key:
        if gathers.index is None or not torch.equal(new_key, key.gather(2, gathers.index)):
            raise ValueError(f"press: expected one that picks keys and leaves them as they are, got {type(press).__name__}")
        kept = torch.zeros_like(kept).scatter(2, gathers.index[..., 0], True)
    return kept


@dataclasses.dataclass(frozen=True)
class PressPolicy(Policy):
    """A press of kvpress as an eviction policy of one layer; see :func:`pressed`.

    Args:
        press: the press.
        module: the attention layer.
        keeps_all_but_budget: whether the budget takes the place of the press's own compression ratio.
        calls: what the layer was called with, by :class:`PressLayer`.
    """

    _: dataclasses.KW_ONLY
    press: Any = None
    module: Any = None
    keeps_all_but_budget: bool = False
    calls: _Calls = dataclasses.field(default_factory=lambda: _Calls(), compare=False)

    def keeps(self, seen: Seen) -> Tensor:
        """The press's decision about the keys that are held."""
        held = seen.is_key.sum(2)
        count = int(held.max())
        kept = seen.is_key.clone()
        if bool((held != count).any()):
            raise ValueError(
                "press: expected heads that hold equally many keys, got budgets of their own; drop keys once, with every=0"
            )
        if self.keeps_all_but_budget and count <= self.budget:
            return kept
        kwargs = self.calls.until(int(seen.length), self.every)
        with self._ratio(count):
            kept[..., :count] = kept_by(self.press, self.module, seen.key[:, :, :count], seen.value[:, :, :count], kwargs)
        return kept

    @contextlib.contextmanager
    def _ratio(self, count: int) -> Iterator[None]:
        """The compression ratio under which a press keeps ``budget`` of so many keys."""
        if not self.keeps_all_but_budget:
            yield
            return
        before = self.press.compression_ratio
        self.press.compression_ratio = 1 - (self.budget + 0.5) / count  # presses round down
        try:
            yield
        finally:
            self.press.compression_ratio = before


class _Calls:
    """The latest inputs of an attention layer, whatever calls they came in."""

    def __init__(self) -> None:
        self.kwargs: dict[str, Any] = {}
        self.states: list[Tensor] = []  # hidden states [B, n, E], cosines and sines [B|1, n, D]
        self.length = 0  # tokens up to their end

    def add(self, kwargs: dict[str, Any], kept: int) -> None:
        """Takes a call in; of earlier ones the last ``kept`` tokens stay."""
        new = [kwargs["hidden_states"], *kwargs["position_embeddings"]]
        self.length += new[0].shape[1]
        if self.states and kept:
            new = [torch.cat((old[:, -kept:], x), 1) for old, x in zip(self.states, new, strict=True)]
        self.states, self.kwargs = new, kwargs

    def until(self, length: int, count: int) -> dict[str, Any]:
        """The call's arguments with the last ``count`` tokens up to this length, all with 0."""
        end = self.states[0].shape[1] - (self.length - length)
        states = [x[:, max(end - count, 0) if count else 0 : end] for x in self.states]
        return {**self.kwargs, "hidden_states": states[0], "position_embeddings": (states[1], states[2])}


# In a model -------------------------------------------------------------------------------------------------------------------------------


class PressLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache of :func:`pressed`.

    Attributes:
        policy: its :class:`PressPolicy`.
        cache: the :class:`dmattn.eviction.EvictionCache`; None before the first tokens.
    """

    is_sliding = False

    def __init__(self, policy: PressPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.cache: EvictionCache | None = None
        self.is_updated = False
        self.has_chosen = False  # once, behind the prompt

    def before_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Keeps what the press will be shown."""
        self.policy.calls.add(kwargs, self.policy.every)

    def after_call(self, *_: Any) -> None:
        """Lets the press choose once, behind the prompt."""
        if self.cache is not None and not self.policy.every and not self.has_chosen:
            self.cache.evict()
            self.has_chosen = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values; the attention function gives them to the cache."""
        self.is_updated = True
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[B, H, T, D] and new keys and values -> [B, H, T, Dv]."""
        if not self.is_updated:
            raise ValueError(
                "cache: expected the cache of dmattn.integrations.kvpress.pressed in every call, got none or another"
            )
        self.is_updated = False
        if self.cache is None:
            batch, heads, _, size = query.shape
            self.cache = EvictionCache(
                self.policy, batch, heads, key.shape[1], size, value.shape[3],
                slots=self.policy.budget + self.policy.every, dtype=key.dtype, device=key.device,
            )  # fmt: skip
        with torch.no_grad():
            return self.cache.attend(query, key, value, scale=scale)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first tokens make the cache."""

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Masks are not made: every new token sees what is held, and the new ones up to itself."""
        return query_length if isinstance(query_length, int) else query_length.shape[0], 0

    def get_seq_length(self, *_: Any) -> int:
        """Tokens taken in, those included whose keys are gone."""
        return 0 if self.cache is None else self.cache.length

    def get_max_length(self) -> int:
        """-1: there is no longest sequence."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def nbytes(self) -> int:
        """Bytes of the cache; the same at every length."""
        return 0 if self.cache is None else self.cache.nbytes


_LAYERS: weakref.WeakKeyDictionary[nn.Module, PressLayer] = weakref.WeakKeyDictionary()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function for models inside :func:`pressed`."""
    return _LAYERS[module].attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> None:
    """transformers' mask function: there is no mask, so padding is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask: expected None or no padding inside dmattn.integrations.kvpress.pressed, got padding")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
