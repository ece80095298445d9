"""flash-dmattn's helpers that select keys as boolean masks: for small cases and old code. They take memory for every pair that the bias has;
:meth:`dmattn.IntervalMask.top_k` says the same selection in two integers a key."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.compat import layouts
from dmattn.masks.heads import repeat_heads

LAYOUT = "[B|1, H|Hkv|1, Sq|1, Sk]"


def topk_indices(attention_bias: Tensor, window_size: int) -> Tensor:
    """The ``window_size`` largest of each row, in rising order. Equal values: the later key wins.

    Args:
        attention_bias: floating point [..., Sk], as [B, Hkv, Sk].
        window_size: > 0; more than Sk means all.

    Returns:
        int64 [..., min(window_size, Sk)]. NaN and -inf come in only where a row has fewer other values.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    bias = _bias(attention_bias)
    checks.positive_int("window_size", window_size)
    return _best(bias, window_size).sort(dim=-1).values


def topk_mask(
    attention_bias: Tensor, attention_mask: Tensor | None, window_size: int, min_dtype: float, block_size: int | None = None
) -> Tensor:
    """Which keys are among the ``window_size`` largest of their row. Equal values: the later key wins. No gradient.

    Args:
        attention_bias: floating point [B|1, H|Hkv|1, Sq|1, Sk].
        attention_mask: bool, broadcastable to it, True = may be chosen; None for all.
        window_size: > 0; more than Sk means all.
        min_dtype: a value that is never chosen, nor is anything below it; nor are NaN and -inf.
        block_size: None, or :func:`block_smooth` the mask.

    Returns:
        bool, the shape that bias and mask broadcast to.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    bias = _bias(attention_bias)
    checks.positive_int("window_size", window_size)
    least = checks.number("min_dtype", min_dtype)
    eligible = (bias > least) & (bias > -torch.inf)
    if attention_mask is not None:
        eligible = eligible & _mask(attention_mask, bias)
    bias = torch.where(eligible, bias, -torch.inf)
    chosen = torch.zeros_like(bias, dtype=torch.bool).scatter(-1, _best(bias, window_size), True) & eligible
    return chosen if block_size is None else block_smooth(chosen, chosen.shape[-1], block_size)


def relu_mask(
    attention_bias: Tensor, attention_mask: Tensor | None, min_dtype: float = 0.0, block_size: int | None = None
) -> Tensor:
    """Which keys have a bias above 0. No gradient.

    Args:
        attention_bias, attention_mask, block_size: as in :func:`topk_mask`.
        min_dtype: what hidden keys counted as; has no effect.

    Returns:
        bool, the shape that bias and mask broadcast to.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    bias = _bias(attention_bias)
    checks.number("min_dtype", min_dtype)
    chosen = bias > 0
    if attention_mask is not None:
        chosen = chosen & _mask(attention_mask, bias)
    return chosen if block_size is None else block_smooth(chosen, chosen.shape[-1], block_size)


def block_smooth(attention_mask: Tensor, key_len: int, block_size: int) -> Tensor:
    """Each block of keys as most of its keys are: visible if more than half of them are. The argument stays as it is.

    Args:
        attention_mask: bool [..., key_len].
        key_len: its last size.
        block_size: > 0; the last block may be shorter.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    mask = checks.tensor("attention_mask", attention_mask, (torch.bool,))
    checks.positive_int("block_size", block_size)
    checks.length("key_len", key_len)
    if mask.dim() < 1 or mask.shape[-1] != key_len:
        raise ValueError(f"attention_mask: expected a last dimension of key_len={key_len}, got shape {checks.shape_of(mask)}")
    block = torch.arange(key_len, device=mask.device) // block_size
    counts = torch.zeros((*mask.shape[:-1], -(-key_len // block_size)), dtype=torch.int64, device=mask.device)
    counts = counts.index_add(-1, block, mask.long())
    sizes = torch.bincount(block, minlength=counts.shape[-1])
    return (2 * counts > sizes)[..., block]


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
    type: str = "topk",
) -> Tensor:
    """:func:`topk_mask` or :func:`relu_mask`, with a mask of padding as [B, S], too.

    Args:
        attention_bias: floating point [B|1, H|Hkv|1, Sq|1, Sk].
        attention_mask: None; bool [B, Sk]; bool [B, Sq], before which keys are visible; or as in :func:`topk_mask`. Selection sees no
            more than bias and mask say: a causal selection needs a causal mask.
        batch_size, query_len, key_len: B, Sq and Sk.
        window_size, min_dtype, block_size: as in :func:`topk_mask`.
        type: "topk" or "relu".

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got.
    """
    checks.each(checks.natural_int, batch_size=batch_size, query_len=query_len, key_len=key_len)
    checks.shaped("attention_bias", attention_bias, LAYOUT, B=batch_size, Sq=query_len, Sk=key_len)
    checks.one_of("type", type, "topk", "relu")
    if attention_mask is not None and checks.tensor("attention_mask", attention_mask).dim() == 2:
        attention_mask = of_padding(attention_mask, batch_size, query_len, key_len)[:, None, None]
    if type == "relu":
        return relu_mask(attention_bias, attention_mask, min_dtype, block_size)
    return topk_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)


def of_padding(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """bool [B, Sk] from [B, Sk], or from [B, Sq] with visible keys before the first query's."""
    checks.dtype("attention_mask", mask, (torch.bool, torch.uint8, torch.int32, torch.int64))
    if mask.shape[0] != batch or mask.shape[1] not in (keys, queries) or mask.shape[1] > keys:
        expected = f"[B, Sk] = {[batch, keys]} or [B, Sq] = {[batch, queries]}"
        raise ValueError(f"attention_mask: expected {expected}, got {checks.shape_of(mask)}")
    return torch.nn.functional.pad(mask != 0, (keys - mask.shape[1], 0), value=True)


def keep_of(name: str, given: object, query: Tensor, pairs: int) -> Tensor:
    """A mask as bool, True = keep. It may have the query's dtype, as flash-dmattn had it in 1.0.0 to 1.0.6: 1.0 = keep, 0.0 = hide.

    An additive mask (0 and -inf) says the opposite. It is refused where values are known, on the CPU; on a GPU all but 1.0 hides.
    pairs: how many values a mask may have, B * H * Sq * Sk.
    """
    mask = checks.tensor(name, given, (torch.bool, query.dtype))
    if mask.dtype == torch.bool:
        return mask
    if mask.numel() > pairs:
        raise ValueError(f"{name}: expected one value for each head, query and key at most, {pairs}, got {checks.shape_of(mask)}")
    keep = mask == 1
    if checks.values_are_known(mask) and not bool((keep | (mask == 0)).all()):
        raise ValueError(
            f"{name}: expected 1.0 (keep) and 0.0 (hide), or bool, got other values; what is added to logits is a bias"
        )
    return keep


def packed_bias(
    mask: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor, ends_q: Tensor, ends_k: Tensor, longest: int
) -> Tensor:
    """[H|Hkv|1, Tq, Tk] of mask and bias [Tq, H|Hkv|1, longest], whose last dimension counts the keys of the query's own sequence."""
    for name, given in (("attn_mask", mask), ("attn_bias", bias)):
        if given is None:
            continue
        sizes = {"Tq": query.shape[0], "H": query.shape[1], "Hkv": key.shape[1], "max_seqlen_k": longest}
        checks.shaped(name, given, "[Tq, H|Hkv|1, max_seqlen_k]", (), query, **sizes)
    layouts.check_longest("max_seqlen_k", ends_k, longest)
    if bias is None:
        bias = query.new_zeros((1, 1, 1))
    checks.dtype("attn_bias", bias, checks.DTYPES["cpu"])
    if mask is not None:
        more = max(mask.shape[1], bias.shape[1])
        keep, bias = (
            repeat_heads(x.transpose(0, 1)[None], more)[0] for x in (keep_of("attn_mask", mask, query, mask.numel()), bias)
        )
        bias = torch.where(keep, bias, -torch.inf)
    else:
        bias = bias.transpose(0, 1)
    if longest == 0:
        return bias.new_zeros((1, query.shape[0], key.shape[0]))
    first = ends_k[layouts.document_of(ends_q, query.shape[0])]
    number = torch.arange(key.shape[0], device=query.device) - first[:, None]  # of each key within the query's sequence
    return bias.gather(2, number.clamp(0, longest - 1).long().expand(bias.shape[0], -1, -1))


def _best(bias: Tensor, window_size: int) -> Tensor:
    """Indices of the largest of each row, later ones first among equals; NaN last."""
    flipped = torch.where(bias.isnan(), -torch.inf, bias).flip(-1)
    order = flipped.sort(dim=-1, descending=True, stable=True).indices[..., :window_size]
    return bias.shape[-1] - 1 - order


def _bias(given: object) -> Tensor:
    bias = checks.tensor("attention_bias", given).detach()
    checks.dtype("attention_bias", bias, checks.DTYPES["cpu"])
    if bias.dim() < 1 or bias.shape[-1] > checks.MAX_LENGTH:
        raise ValueError(f"attention_bias: expected {LAYOUT}, got shape {checks.shape_of(bias)}")
    return bias


def _mask(given: object, bias: Tensor) -> Tensor:
    mask = checks.tensor("attention_mask", given, (torch.bool,), bias, "attention_bias")
    sizes = zip(reversed(mask.shape), reversed(bias.shape), strict=False)
    if not all(m == n or 1 in (m, n) for m, n in sizes):
        raise ValueError(
            f"attention_mask: expected a shape that broadcasts with attention_bias {checks.shape_of(bias)}, got {checks.shape_of(mask)}"
        )
    return mask
