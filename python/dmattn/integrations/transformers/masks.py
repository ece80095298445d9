"""The masks of transformers' models as intervals: what a model says in closures over indices, in two integers a key.

transformers describes a mask by a function of (batch, head, query, key) indices, made of closures. Those it makes itself are recognised by
their names and turned into intervals in O(N). All others, and all while Dynamo traces (which cannot look into closures), are evaluated for
some queries at a time and reduced to intervals. A mask that is none of intervals stays a bool tensor.

The result travels through the model as a tensor, int32 [B|1, 1, 2, Sk], because caches and layers call tensor methods on masks: key j is
visible to the queries i with ``tensor[b, 0, 0, j] <= i < tensor[b, 0, 1, j]``. It counts queries, not positions, so that it stays right where
a layer cuts off keys.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from dmattn.masks import ALWAYS, FOREVER, IntervalMask, detect

FAR = 1 << 29
"""Beyond every query's number, and small enough that a shift by a length cannot wrap."""

READERS = (
    "axk2", "bigbird_pegasus", "deepseek_v32", "deepseek_v4", "doge", "dots3_note_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text",
    "mistral_large4_text", "nllb-moe", "qwen4_exp_text",
)  # fmt: skip
"""Types of models whose own code reads or extends the masks. They get what eager attention gets, which takes memory for all pairs."""

_selecting: dict[int, None] = {}
"""The ids of the living configs of models whose layers select keys themselves. Dynamo can ask whether a dict has one of them, and compiles
nothing anew when it gets others."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys a mask is about: their absolute indices int64 [1, 1, Sk], and what a function of theirs says of the queries at absolute indices.

    Each bound is int64 [B|1, 1, Sk]; None for a start or an end that hides nothing.
    """

    index: Tensor
    start: Tensor | None = None
    end: Tensor | None = None

    def between(self, start: Tensor | None, end: Tensor | None) -> Keys:
        """These bounds as well."""
        starts = [bound for bound in (self.start, start) if bound is not None]
        ends = [bound for bound in (self.end, end) if bound is not None]
        return Keys(
            self.index,
            torch.maximum(*starts) if len(starts) == 2 else starts[0] if starts else None,
            torch.minimum(*ends) if len(ends) == 2 else ends[0] if ends else None,
        )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor | None:
    """transformers' mask function for dmattn; it has the arguments of ``transformers.masking_utils.sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: absolute indices of the first query and the first key; tensors are not read.
        mask_function: whether a query sees a key, by absolute indices.
        attention_mask: bool [B, up to kv_offset + kv_length], False for padding.
        local_size: of sliding or chunked layers; the mask function says which.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may stand for a causal mask, or for one that hides nothing.
        use_vmap: the mask function takes single indices only.
        device: of the mask.
        config: of the model, which tells models whose own code reads masks.
        dtype: of the masks that such models get.
        options: of other implementations, without a meaning here.

    Returns:
        None; intervals int32 [B|1, 1, 2, Sk]; where the mask is none of intervals, bool [B, 1, Sq, Sk]; or, for a model whose own code reads
        masks, floats [B, 1, Sq, Sk] to add.

    Raises:
        ValueError: the model's layers call no attention function; or attention_mask has a wrong shape.
    """
    device = torch.device(device)
    if config is not None and not torch.compiler.is_compiling():
        _check_layers(config.__class__)
    given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if _reads_masks(config):
        whole_mask: Tensor = eager_mask(*given, dtype, use_vmap=use_vmap, device=device)
        return whole_mask
    # The layers of some decoders beside an encoder do not say that they are causal; the mask has to.
    allow_is_causal_skip = allow_is_causal_skip and not getattr(config, "is_encoder_decoder", False)
    keys = Keys((torch.arange(kv_length, device=device) + kv_offset).view(1, 1, -1))
    found = None
    if not torch.compiler.is_compiling() and not use_vmap:
        found = recognised(mask_function, keys, kv_length + kv_offset)
    padding = _padding_of_keys(attention_mask, kv_length, kv_offset, device)
    if found is not None:
        skipped = _is_skipped(found, q_length, kv_length, q_offset, kv_offset, allow_is_causal_skip, allow_is_bidirectional_skip)
        if skipped and (padding is None or bool(padding.all())):
            return None
        start, end = (None if bound is None else (bound - q_offset).clamp(-FAR, FAR) for bound in (found.start, found.end))
    else:
        sizes = (batch_size, 1, q_length, kv_length)
        whole: Tensor | None = None
        if use_vmap:  # a user's function: what it says is taken as it is
            skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            whole = sdpa_mask(*given, **skips, use_vmap=True, device=device)
            if torch.compiler.is_compiling():
                return whole

        def rows(first: int, last: int) -> Tensor:
            if whole is not None:
                return whole[:, :, first:last]
            query = torch.arange(first, last, device=device) + q_offset
            batch = torch.arange(batch_size, device=device)[:, None, None, None]
            head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
            seen: Tensor = mask_function(batch, head, query[:, None], keys.index[:, :, None])
            return seen.expand(batch_size, 1, last - first, kv_length)

        try:
            first, last = detect.interval_of("mask_function", sizes, rows, device)
        except ValueError:
            seen = rows(0, q_length)
            return seen if padding is None else seen & padding[:, :, None]
        by = q_length - kv_length  # from positions to the numbers of queries
        start, end = ((bound.long() + by).clamp(-FAR, FAR) for bound in (first, last))
    start = keys.index.new_full((1, 1, 1), -FAR) if start is None else start
    end = keys.index.new_full((1, 1, 1), FAR) if end is None else end
    if padding is not None:
        end = torch.where(padding, end, -FAR)
    start, end = torch.broadcast_tensors(start, end)
    if start.shape[2] != kv_length:
        start, end = (bound.expand(-1, -1, kv_length) for bound in (start, end))
    return torch.stack((start, end), dim=2).to(torch.int32)


def select_keys(config: Any) -> None:
    """Notes that the layers of the model with this config select keys themselves, and take intervals whatever the type of the model."""
    if id(config) not in _selecting:
        _selecting[id(config)] = None
        weakref.finalize(config, _selecting.pop, id(config)).atexit = False


def _reads_masks(config: Any) -> bool:
    return getattr(config, "model_type", None) in READERS and id(config) not in _selecting


@functools.cache
def _check_layers(config: type) -> None:
    """Raises where transformers knows of a model of its own that the layers call no attention function; masks would be garbage to them."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    if not name.startswith("transformers.models."):
        return
    for model in vars(sys.modules.get(name, torch)).values():
        if isinstance(model, type) and issubclass(model, PreTrainedModel) and model.__module__ == name:
            can_set: Any = getattr(model, "_can_set_attn_implementation", None)
            if can_set is not None and not can_set():
                raise ValueError(
                    "attn_implementation: expected one that the model has, since its layers call no attention function, got dmattn for a model "
                    f"with {config.__name__}; use attn_implementation='eager'"
                )
            return


def interval_of(mask: Tensor, query_length: int, key_length: int) -> IntervalMask:
    """What :func:`make_mask` gave, or its first keys, as the mask of an attention with these lengths.

    Raises:
        ValueError: the tensor is about fewer keys than there are.
    """
    if mask.dim() != 4 or mask.shape[2] != 2 or mask.shape[3] < key_length:
        raise ValueError(
            f"attention_mask: expected int32 [B, 1, 2, Sk] of dmattn's mask function with Sk={key_length}, got {list(mask.shape)}; "
            "models that change masks between the mask function and the attention need attn_implementation='sdpa'"
        )
    mask = mask[..., :key_length]
    if query_length != key_length:
        mask = mask + (key_length - query_length)
    return IntervalMask.from_tensor(mask)


def _padding_of_keys(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor, device: torch.device
) -> Tensor | None:
    """bool [B, 1, Sk], True for tokens; the mask may end early, before keys that are still empty."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [B, Sk] or [B, 1, Sq, Sk], got shape {list(attention_mask.shape)}")
    given = attention_mask.to(device=device, dtype=torch.bool)
    if isinstance(kv_offset, Tensor):  # on a device, which is not asked
        index = torch.arange(kv_length, device=device) + kv_offset.to(device)
        given = given[:, index.clamp(max=given.shape[1] - 1)] & (index < given.shape[1])
        return given[:, None]
    missing = kv_length + kv_offset - given.shape[1]
    if missing > 0:
        given = torch.nn.functional.pad(given, (0, missing))
    return given[:, None, kv_offset : kv_offset + kv_length]


def _is_skipped(
    found: Keys, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor, causal: bool, bidirectional: bool
) -> bool:
    """Whether None says as much as the mask: the attention function takes None for causal from the first key on, or for everything."""
    if found.start is None and found.end is None:
        return bidirectional
    if not causal or found.end is not None or found.start is not found.index:
        return False
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor) or kv_offset != 0:
        return False
    return (q_length == 1 and kv_length == q_offset + 1) or (q_offset == 0 and kv_length >= q_length > 1)


# Recognition ------------------------------------------------------------------------------------------------------------------------


def recognised(function: Callable[..., Any], keys: Keys, total: int | Tensor) -> Keys | None:
    """What a mask function made by transformers says, or None for a function of unknown origin.

    Args:
        function: of (batch, head, query, key) indices.
        keys: the keys it is asked about.
        total: number of the queries' and keys' indices; a tensor is not read.
    """
    if function is causal_mask_function:
        return keys.between(keys.index, None)
    if function is bidirectional_mask_function:
        return keys
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    index, is_known = keys.index, not isinstance(total, Tensor)
    if maker == "and_masks":
        parts: Keys | None = keys
        for part in held["mask_functions"]:
            parts = None if parts is None else recognised(part, parts, total)
        return parts
    if maker == "sliding_window_overlay":  # k > q - window
        window = held["sliding_window"]
        return keys if is_known and window >= total else keys.between(None, index + window)
    if maker == "sliding_window_bidirectional_overlay":  # |q - k| <= window
        window = held["sliding_window"]
        return keys if is_known and window >= total else keys.between(index - window, index + (window + 1))
    if maker == "chunked_overlay":
        size, offset = held["chunk_size"], held["left_padding"].to(index.device).view(-1, 1, 1)
        first = torch.div(index - offset, size, rounding_mode="floor") * size + offset
        return keys.between(first, first + size)
    if maker == "padding_mask_function":
        real = held["padding_mask"].to(index.device)[:, index[0, 0]][:, None]
        return keys.between(None, torch.where(real, FOREVER, ALWAYS))
    if maker == "packed_sequence_mask_function":
        sequence = held["packed_sequence_mask"].to(index.device)  # grows from 0 in steps of 1
        bounds = (
            torch.searchsorted(sequence.contiguous(), sequence.contiguous(), right=right)[:, None] for right in (False, True)
        )
        return keys.between(*bounds) if is_known and sequence.shape[1] == index.shape[2] == total else None
    if maker == "remap_positions_for_packed_sequence" and _depends_on_distance_only(held["mask_function"]):
        return recognised(held["mask_function"], keys, total)  # inside of a sequence positions count as indices do
    return None


def _depends_on_distance_only(function: Callable[..., Any]) -> bool:
    """Whether a recognised function says the same of all pairs of indices that lie equally far apart."""
    if function in (causal_mask_function, bidirectional_mask_function):
        return True
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    if maker == "and_masks" and function.__closure__:
        return all(_depends_on_distance_only(part) for part in function.__closure__[0].cell_contents)
    return maker in ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
