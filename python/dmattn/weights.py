"""Attention weights of chosen heads and queries, computed from query, key and lse in torch operations: for looking at, and slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn import checks
from dmattn.call import NO_MASK, at_offset, autocast, mask_tensors, options_of, with_mask
from dmattn.composed import Masks, pairs_seen, without_autocast
from dmattn.fake import accumulate_dtype
from dmattn.masks import Mask
from dmattn.sharding import beside
from dmattn.sinks import share_of_keys, sinks_of_heads
from dmattn.sizes import bias_rows, key_bias_rows, sizes_of


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    lse: Tensor | None = None,
    *,
    heads: int | Sequence[int] | Tensor | None = None,
    rows: int | Sequence[int] | Tensor | None = None,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    query_offset: int | Tensor | None = None,
) -> Tensor:
    """The softmax weights behind the output of :func:`attention`, before dropout, for some heads and queries.

    :func:`attention` never holds these weights. This function computes them again, in plain torch operations and with memory for every pair of
    a chosen query and a key: choose few. It is differentiable.

    Args:
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        mask, key_bias, bias, is_causal, scale, softcap, sinks, query_offset: as in the call of :func:`attention`.
        lse: [B, H, Sq], what ``attention(..., return_lse=True)`` returned; None: computed here, from the chosen queries alone.
        heads: numbers of query heads, 0 <= h < H; None for all.
        rows: numbers of queries, 0 <= i < Sq; None for all.

    Returns:
        [B, heads, rows, Sk] float32 (float64 for float64 inputs). Rows sum to 1, less what the sink takes; rows that see nothing are zero.

    Raises:
        TypeError, ValueError: as :func:`attention`; or heads or rows are no such numbers.
    """
    checks.flag("is_causal", is_causal)
    query, key, _ = autocast(query, key, key)
    sizes = sizes_of(query, key, key)
    options = with_mask(options_of(sizes, None, is_causal, scale, softcap), mask)
    masks = NO_MASK if mask is None else mask_tensors(mask, sizes)
    if query_offset is not None:
        masks, options = at_offset(query_offset, masks, options, sizes)
    start, end, tiles, _, _, bits, indices, index_offset = masks
    head, row = _numbers("heads", heads, sizes.heads, query.device), _numbers("rows", rows, sizes.query_length, query.device)

    def of_heads(given: Tensor) -> Tensor:
        """[B|1, H|Hkv|1, ...] to [B|1, chosen heads|1, ...]."""
        return given if given.shape[1] == 1 else given[:, head // (sizes.heads // max(given.shape[1], 1))]

    # Say which keys the chosen queries see.
    start, end, tiles, indices = (None if given is None else of_heads(given) for given in (start, end, tiles, indices))
    seen = Masks(start, end, tiles, bits, indices, index_offset)
    shift = sizes.key_length - sizes.query_length
    shown = pairs_seen(seen, options.is_causal, options.lists(), row, (0, sizes.key_length), shift, len(head))
    visible = torch.ones((1, 1, len(row), sizes.key_length), dtype=torch.bool, device=query.device)
    visible = visible if shown is None else visible & shown

    # Compute their logits. A key that none of them sees may hold anything.
    dtype = accumulate_dtype(query.dtype)
    shown = query[:, head][:, :, row].to(dtype)
    read = torch.where(visible.any(2)[..., None], of_heads(key) if sizes.kv_heads > 1 else key, 0.0).to(dtype)
    with without_autocast(query):
        logits = (shown @ read.transpose(-1, -2)) * options.scale
    if options.softcap > 0:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if key_bias is not None:
        logits = logits + of_heads(key_bias_rows(key_bias, sizes))[:, :, None]
    if bias is not None:
        of_keys, of_pairs = bias_rows(bias, sizes)
        logits = logits if of_keys is None else logits + of_heads(of_keys)[:, :, None]
        logits = logits if of_pairs is None else logits + of_heads(of_pairs)[:, :, row].to(dtype)
    logits = logits.masked_fill(~visible | (logits == -torch.inf), -torch.inf)

    # Divide by the sum that the output was divided by. Beside a large bias lse is rounded, so it only says what part of that sum these keys are.
    own = torch.logsumexp(logits, dim=-1)
    if lse is None:
        chosen = own
    else:
        checks.shaped("lse", lse, "[B, H, Sq]", (dtype,), query, B=sizes.batch, H=sizes.heads, Sq=sizes.query_length)
        chosen = lse[:, head][:, :, row]
    weights = torch.exp(logits - torch.where(own == -torch.inf, 0.0, own.detach())[..., None])
    total = torch.where(own == -torch.inf, 1.0, weights.sum(-1))
    part = torch.exp(torch.where((own == -torch.inf) | (chosen == -torch.inf), 0.0, own - chosen))
    if sinks is not None:
        column = sinks_of_heads(sinks, sizes.heads, query.device, dtype)[head][:, None]
        part = part * share_of_keys(chosen, beside(chosen, column))
    return weights * (part / total)[..., None]


def _numbers(name: str, given: object, size: int, device: torch.device) -> Tensor:
    """The chosen heads or rows as int64 [n]."""
    if given is None:
        return torch.arange(size, device=device)
    if isinstance(given, Tensor):
        chosen = checks.tensor(name, given)
        if chosen.dtype not in (torch.int32, torch.int64) or chosen.dim() > 1:
            raise TypeError(f"{name}: expected integers without dimensions or [n], got {chosen.dtype} {checks.shape_of(chosen)}")
        chosen = chosen.reshape(-1).long()
    else:
        listed: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        for n in listed:
            if not isinstance(n, int) or isinstance(n, bool):
                raise TypeError(f"{name}: expected ints, got {type(n).__name__}")
        if not all(-checks.MAX_INT <= n <= checks.MAX_INT for n in listed):
            raise ValueError(f"{name}: expected numbers from 0 to {size - 1}, got {given}")
        chosen = torch.tensor(listed, dtype=torch.int64)
    checks.numbers_below(name, chosen, size)
    return chosen.to(device)
