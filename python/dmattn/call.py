"""One call of the op ``dmattn::forward``: checks a public function's options, mask and biases and brings them into the op's form."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dmattn import checks, ops
from dmattn.composed import LISTS
from dmattn.masks import BlockMask, CombinedMask, IndexMask, IntervalMask, Mask, bounds
from dmattn.masks.heads import same_heads
from dmattn.masks.interval import ALWAYS, FOREVER
from dmattn.sizes import Sizes, bias_rows, fitting_block, fitting_lists, four_dims, interval_rows, key_bias_rows

# A mask as the op takes it: start and end of an interval mask; tiles, rows, columns and bits of a block mask; indices of an index mask and
# index_offset, the position of the first query that its local window counts from.
MaskTensors: TypeAlias = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]
NO_MASK: MaskTensors = (None, None, None, None, None, None, None, None)

# A few queries of many keys, without a gradient, take the decoding kernels: those of forward do not divide the keys of a query tile.
DECODE_DEVICES = frozenset({"cuda"})
DECODE_QUERIES, DECODE_LEAST_KEYS = 16, 512


class Options(NamedTuple):
    """The last arguments of the op ``forward``, in its order: checked, defaults filled in, and a seed wherever dropout has an effect."""

    dropout_seed: Tensor | None
    is_causal: bool
    scale: float
    softcap: float
    dropout_p: float
    deterministic: bool
    # Hints, which change speed, never results.
    is_in_order: bool = False  # the keys that a query sees are neighbours
    most_keys: int = 0  # how many keys a query sees at most, 0 where that is not known
    # Of an index mask.
    index_block: int = 1
    index_local: int = 0
    index_sinks: int = 0

    def lists(self) -> tuple[int, int, int]:
        """How an index mask's lists are read."""
        return self.index_block, self.index_local, self.index_sinks


def options_of(
    sizes: Sizes,
    dropout_seed: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    *,
    is_in_order: bool = False,
    most_keys: int = 0,
) -> Options:
    """Checks the options of a public function, and adds hints. A seed is checked even where it has no effect, and then left
    out."""
    scale = sizes.head_dim**-0.5 if scale is None else checks.scale(scale)
    if type(softcap) is not float or softcap != 0.0:
        softcap = checks.softcap(softcap)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = checks.number("dropout_p", dropout_p, low=0.0, high=1.0, open_high=True)
    if dropout_seed is not None:
        checks.tensor("dropout_seed", dropout_seed, (torch.int64,))
        if dropout_seed.numel() != 1:
            raise ValueError(f"dropout_seed: expected one element, got shape {checks.shape_of(dropout_seed)}")
        if dropout_seed.device != sizes.device:
            raise ValueError(f"dropout_seed: expected device {sizes.device} like query, got {dropout_seed.device}")
    if dropout_p == 0:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = new_seed(sizes.device)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return Options(dropout_seed, is_causal, scale, softcap, dropout_p, deterministic, is_in_order, most_keys)


def with_mask(options: Options, mask: object) -> Options:
    """Options with what an index mask, or one in an intersection, says in addition to its tensors."""
    index = mask.index if isinstance(mask, CombinedMask) else mask
    if not isinstance(index, IndexMask):
        return options
    return options._replace(
        is_causal=options.is_causal or index.is_causal, index_block=index.block_size, index_local=index.local,
        index_sinks=index.sink_keys,
    )  # fmt: skip


def new_seed(device: torch.device) -> Tensor:
    """A seed for dropout, int64 [1], from torch's generator."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast, query, key and value take its dtype; masks and biases stay as they are."""
    if not torch._C._is_any_autocast_enabled():
        return query, key, value
    if not isinstance(query, Tensor) or query.device.type == "meta":  # meta has no autocast, and asking raises
        return query, key, value
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)

        def cast(given: Tensor) -> Tensor:
            eligible = isinstance(given, Tensor) and given.is_floating_point() and given.dtype != torch.float64
            return given.to(dtype) if eligible else given

        return cast(query), cast(key), cast(value)
    return query, key, value


def mask_tensors(mask: Mask | Tensor, sizes: Sizes) -> MaskTensors:
    """Checks a mask and brings it into the form the op takes."""
    if isinstance(mask, IntervalMask):
        return *_interval_tensors(mask, sizes), *NO_MASK[2:]
    if isinstance(mask, BlockMask):
        return None, None, *_block_tensors(mask, sizes), None, None
    if isinstance(mask, IndexMask):
        return *NO_MASK[:6], fitting_lists(mask, sizes), None
    if isinstance(mask, CombinedMask):
        interval = NO_MASK[:2] if mask.interval is None else _interval_tensors(mask.interval, sizes)
        block = NO_MASK[2:6] if mask.block is None else _block_tensors(mask.block, sizes)
        return *interval, *block, None if mask.index is None else fitting_lists(mask.index, sizes), None
    checks.instance("mask", mask, Tensor, "an IntervalMask, a BlockMask, an IndexMask, an intersection of such or a bool tensor")
    if checks.tensor("mask", mask).dtype != torch.bool:
        instead = "bias= takes what is added to logits" if mask.is_floating_point() else "lists of keys are an IndexMask(lists)"
        raise TypeError(f"mask: expected dtype bool, got {str(mask.dtype).removeprefix('torch.')}; {instead}")
    mask = four_dims("mask", mask, sizes)
    if mask.shape[2] == 1 and sizes.query_length != 1:  # a mask of keys alone is an interval: O(N)
        visible = mask[:, :, 0]
        end = torch.where(visible, FOREVER, ALWAYS).int()
        return torch.full_like(visible, ALWAYS, dtype=torch.int32), end, *NO_MASK[2:]
    return None, None, *_block_tensors(BlockMask.from_bool(mask), sizes), None, None


def at_offset(query_offset: object, masks: MaskTensors, options: Options, sizes: Sizes) -> tuple[MaskTensors, Options]:
    """The mask and options under which queries stand at ``query_offset + i``: intervals move, and causality becomes one.

    Block masks and lists count queries, not positions, and stay; the local window of an index mask moves.
    """
    offset = bounds.position("query_offset", query_offset, sizes.device, sizes.batch)
    usual = sizes.key_length - sizes.query_length
    if not isinstance(offset, Tensor) and not torch.compiler.is_compiling() and offset == usual:
        return masks, options
    start, end = masks[:2]
    if options.is_causal:
        keys = torch.arange(sizes.key_length, dtype=torch.int32, device=sizes.device).view(1, 1, -1)
        start = keys if start is None else torch.maximum(start, keys)
        options = options._replace(is_causal=False)
    by = usual - offset
    start, end = (None if bound is None else bounds.moved(bound, by) for bound in (start, end))
    index_offset = masks[7]
    if options.index_local:
        first = offset if isinstance(offset, Tensor) else torch.full((1,), offset, device=sizes.device)
        index_offset = first.reshape(-1).to(sizes.device, torch.int32)
    return (start, end, *masks[2:7], index_offset), options


def _interval_tensors(interval: IntervalMask, sizes: Sizes) -> tuple[Tensor, Tensor]:
    if not interval.serves(sizes.key_length):
        raise ValueError(f"mask: expected an IntervalMask for Sk={sizes.key_length} keys, got one for {interval.key_length}")
    return interval_rows("mask.start", interval.start, sizes), interval_rows("mask.end", interval.end, sizes)


def _block_tensors(block: BlockMask, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    block = fitting_block(block, sizes)
    return block.tiles, block.rows, block.columns, block.bits


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Sizes,
    masks: MaskTensors,
    key_bias: Tensor | None,
    bias: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Checks biases, brings them into the op's form, and calls the op: (out, lse) from arguments that are otherwise checked."""
    if key_bias is not None:
        key_bias = key_bias_rows(key_bias, sizes)
    if bias is not None:
        from_bias, bias = bias_rows(bias, sizes)
        if from_bias is not None:
            key_bias = from_bias if key_bias is None else torch.add(*same_heads(key_bias, from_bias, "bias", "key_bias"))
    if sizes.device.type in DECODE_DEVICES and not torch.compiler.is_compiling() and _may_decode(sizes, masks, bias, options):
        result = ops.decode_if_plain(
            query, key, value, None, None, key_bias, None, None, options.is_causal, options.scale, options.softcap, *LISTS
        )
        if result is not None:
            return result
    return ops.forward(query, key, value, *masks, key_bias, bias, *options)


def _may_decode(sizes: Sizes, masks: MaskTensors, bias: Tensor | None, options: Options) -> bool:
    """Whether the op ``decode`` can say the call: its queries are the last positions, as here, and it knows neither masks nor dropout."""
    return (
        sizes.query_length <= DECODE_QUERIES
        and sizes.key_length >= DECODE_LEAST_KEYS
        and bias is None
        and options.dropout_p == 0
        and all(tensor is None for tensor in masks)
    )
