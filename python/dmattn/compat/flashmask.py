"""FlashMask's ``startend_row_indices`` (arXiv 2410.01359), by PaddlePaddle's name: the rows in which each key is hidden.

Where the rows in which a key is seen are one run, the mask is an :class:`~dmattn.IntervalMask`. Where they are two or three, there is a pass for
each, and the passes are merged by lse, exactly and with gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.call import new_seed
from dmattn.compat import layouts
from dmattn.compat.merging import Pass, run
from dmattn.masks import BlockMask, IntervalMask

BLOCK = 128
NAMES = ("query", "key", "value")
LAYOUT = "[B|1, H|Hkv|1, Sk, 1|2|4]"
MIX = 0x5851F42D4C957F2D  # an odd number, so that different seeds stay different


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention under a mask by columns, by PaddlePaddle's name.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D] with H % Hkv == 0.
        value: [B, Sk, Hkv, Dv].
        startend_row_indices: int32, see :func:`interval_masks`; None: no mask.
        dropout: probability of dropping a weight; 0 if training is False.
        causal: bottom-right aligned.
        window_size: w or (left, right), only without startend_row_indices: the query at position p = i + Sk - Sq sees the keys from p - left
            to p + right, with causal up to p. Negative is without end.
        return_softmax_lse: also return lse [B, H, Sq].
        return_seed_offset: also return the seed and offset of dropout, int64 [2].
        fixed_seed_offset: such a pair, which drops the same weights again.
        rng_name: "": torch's generator.
        name: has no effect.
        softmax_scale: default D ** -0.5.
        block_mask: integers [B, 1|Hkv|H, ceil(Sq / 128), ceil(Sk / 128)]: 0 hides a block.

    Returns:
        out [B, Sq, H, Dv], or a tuple of it and what was asked for, in the order of the arguments.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    query, key, value = layouts.checked(NAMES, query, key, value, layouts.HEADS_LAST)
    checks.each(
        checks.flag,
        causal=causal,
        training=training,
        return_softmax_lse=return_softmax_lse,
        return_seed_offset=return_seed_offset,
    )
    if not isinstance(rng_name, str) or rng_name:
        raise ValueError(f'rng_name: expected "", torch has no generators by name, got {rng_name!r:.80}')
    batch, queries, heads, size = query.shape
    keys, kv_heads = key.shape[1:3]
    dropout_p = layouts.of_dropout("dropout", dropout) * training
    scale = layouts.of_scale(softmax_scale, size)

    # Say which rows see each key.
    if startend_row_indices is None:
        left, right = _window(window_size, causal)
        passes = layouts.passes_of_batch(queries, keys, left, right, None, query.device)
    else:
        if window_size is not None:
            raise ValueError("window_size: expected None with startend_row_indices, got a window")
        sizes = {"B": batch, "H": heads, "Hkv": kv_heads, "Sk": keys}
        indices = checks.shaped("startend_row_indices", startend_row_indices, LAYOUT, (), query, **sizes)
        passes = [Pass(mask) for mask in interval_masks(indices, queries, causal)]
    if block_mask is not None:
        blocks = _blocks(block_mask, query, key)
        passes = [Pass(blocks if each.mask is None else each.mask & blocks, each.is_causal) for each in passes]

    pair = _seed_offset(fixed_seed_offset, query.device) if dropout_p > 0 or return_seed_offset else None
    seed = None if pair is None or dropout_p == 0 else (pair[:1] * MIX + pair[1:])
    out, lse = run(*layouts.heads_first(query, key, value), passes, scale=scale, dropout_p=dropout_p, dropout_seed=seed)
    out = out.transpose(1, 2)[..., : value.shape[-1]]
    further = ((lse,) if return_softmax_lse else ()) + ((pair,) if return_seed_offset and pair is not None else ())
    return (out, *further) if further else out


def interval_masks(startend_row_indices: Tensor, query_length: int, causal: bool = False) -> tuple[IntervalMask, ...]:
    """FlashMask's columns as interval masks that have no pair in common: together they show what is not hidden.

    A key's numbers are rows, that is queries counted from 0. One column and causal: hidden from row r1 on. Two and causal: hidden in rows r1 to
    r2 - 1. Two and not causal: hidden from row r1 on and before row r2. Four and not causal: hidden in rows r1 to r2 - 1 and r3 to r4 - 1.
    With causal also where the key is later than the query, bottom-right aligned.

    Args:
        startend_row_indices: int32 [B|1, H|Hkv|1, Sk, 1|2|4].
        query_length: Sq.
        causal: whether causality hides keys, too; not with four columns.

    Returns:
        One mask for one column, and for two columns without causality; two masks for two columns with causality; three for four columns.
        Where values lie on the CPU, masks that show nothing are left out, but for one if all show nothing.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    given = checks.tensor("startend_row_indices", startend_row_indices, (torch.int32,))
    checks.length("query_length", query_length)
    checks.flag("causal", causal)
    if given.dim() != 4 or given.shape[3] not in ((1, 2) if causal else (2, 4)):
        columns = "1 or 2 columns with causal" if causal else "2 or 4 columns without causal"
        raise ValueError(
            f"startend_row_indices: expected [B|1, H|Hkv|1, Sk, columns] with {columns}, got {checks.shape_of(given)}"
        )
    rows = [column.clamp(0, query_length) for column in given.unbind(3)]
    keys = given.shape[2]
    offset = keys - query_length  # the position of row 0
    zero, last = torch.zeros_like(rows[0]), torch.full_like(rows[0], query_length)
    if causal:
        first = (torch.arange(keys, dtype=torch.int32, device=given.device) - offset).clamp(0, query_length).expand_as(zero)
        seen = [(first, rows[0])]
        if len(rows) == 2:
            seen.append((torch.maximum(first, torch.maximum(rows[0], rows[1])), last))
    elif len(rows) == 2:
        seen = [(rows[1], rows[0])]
    else:
        # Put the two hidden runs of rows in order; a run that ends before it begins is empty.
        swap = rows[0] > rows[2]
        begin, end = torch.where(swap, rows[2], rows[0]), torch.where(swap, rows[3], rows[1])
        later, final = torch.where(swap, rows[0], rows[2]), torch.where(swap, rows[1], rows[3])
        end, final = torch.maximum(begin, end), torch.maximum(later, final)
        seen = [(zero, begin), (end, later), (torch.maximum(end, final), last)]
    if len(seen) > 1 and checks.values_are_known(given):
        seen = [each for each in seen if bool((each[0] < each[1]).any())] or seen[:1]
    return tuple(IntervalMask(start + offset, end + offset) for start, end in seen)


def _window(given: object, causal: bool) -> tuple[int | None, int | None]:
    if given is None:
        return None, 0 if causal else None
    return layouts.of_window((given, given) if isinstance(given, int) else given, causal)


def _blocks(given: object, query: Tensor, key: Tensor) -> BlockMask:
    (batch, queries, heads, _), (_, keys, kv_heads, _) = query.shape, key.shape
    sizes = {"B": batch, "H": heads, "Hkv": kv_heads, "blocks_q": -(-queries // BLOCK), "blocks_k": -(-keys // BLOCK)}
    dtypes = (torch.int32, torch.int64, torch.uint8, torch.bool)
    table = checks.shaped("block_mask", given, "[B|1, H|Hkv|1, blocks_q, blocks_k]", dtypes, query, **sizes)
    return BlockMask.from_blocks(table != 0, BLOCK)


def _seed_offset(given: object, device: torch.device) -> Tensor:
    if given is None:
        return torch.cat((new_seed(device), torch.zeros(1, dtype=torch.int64, device=device)))
    pair = checks.tensor("fixed_seed_offset", given, (torch.int64,))
    if pair.shape != (2,) or pair.device != device:
        raise ValueError(f"fixed_seed_offset: expected [2] on {device}, got {checks.shape_of(pair)} on {pair.device}")
    return pair


__all__ = ["flashmask_attention", "interval_masks"]
