"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``: its signature and its meaning, on dmattn's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks, plain
from dmattn.call import NO_MASK, attend, autocast, mask_tensors, options_of
from dmattn.masks.interval import FOREVER
from dmattn.sizes import padded, sizes_of

# The function itself, not its name in torch.nn.functional, to which users assign ours.
_torch_attention = torch._C._nn.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, signature and meaning, on dmattn's kernels.

    So ``is_causal`` is aligned at the top left, as torch has it, a bool mask hides where it is False, a float mask is added, leading
    dimensions broadcast, and any head size works (it is padded to a multiple of 8). What no kernel here covers (head sizes beyond 256,
    lengths beyond 2^20, a dtype, device or layout without kernels, nested tensors among them, key and value with different head counts,
    dropout_p = 1) is passed on to torch's own function. So it can take the place of torch's:
    ``torch.nn.functional.scaled_dot_product_attention = dmattn.scaled_dot_product_attention``.

    Args:
        query: [..., H, L, E] (or [..., L, E]).
        key: [..., H|Hkv, S, E].
        value: [..., H|Hkv, S, Ev].
        attn_mask: bool or float, broadcastable to [..., H, L, S].
        dropout_p: probability of dropping a weight; applied whenever > 0.
        is_causal: query i sees keys j <= i; not together with attn_mask.
        scale: default E ** -0.5.
        enable_gqa: key and value have fewer heads, which divide H.

    Returns:
        [..., H, L, Ev] in query's dtype.

    Raises:
        ValueError, TypeError: as :func:`attention`; or both attn_mask and is_causal are given.
    """
    checks.flag("is_causal", is_causal), checks.flag("enable_gqa", enable_gqa)
    if type(dropout_p) is not float:
        dropout_p = checks.number("dropout_p", dropout_p, low=0.0, high=1.0)
    for name, given in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(given, Tensor) and (given is not None or name != "attn_mask"):
            raise TypeError(f"{name}: expected a torch.Tensor, got {checks.type_of(given)}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask, is_causal: expected at most one of them, got both")
    if not _is_covered(query, key, value, attn_mask, dropout_p, enable_gqa):
        passed_on: Tensor = _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return passed_on
    fits = query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    fits = fits and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
    if fits and attn_mask is None and not (is_causal and query.shape[2] != key.shape[2]):
        result = plain.attention(query, key, value, None, is_causal, scale, 0.0, dropout_p)
        if result is not None:
            return result[0]
    size, value_size = query.shape[-1], value.shape[-1]
    if key.shape[-1] != size:
        raise ValueError(f"key: expected a last dimension E={size} like query, got {key.shape[-1]}")
    if scale is None and size % 8:  # before padding changes the size
        scale = size**-0.5
    lead = _broadcast("", query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3:-2]
    if not enable_gqa:
        heads = _broadcast("head ", heads, key.shape[-3:-2], value.shape[-3:-2])

    def four_dims(given: Tensor) -> Tensor:
        own = given.shape[-3:-2] if enable_gqa and given is not query else heads
        if given.dim() == 4 and given.shape[-1] % 8 == 0 and given.shape[:2] == (*lead, *own):
            return given
        given = given.expand(*lead, *own, *given.shape[-2:])
        given = given[(None,) * (4 - given.dim())] if given.dim() < 4 else given.flatten(0, -4)
        return padded(given)

    q, k, v = autocast(four_dims(query), four_dims(key), four_dims(value))
    sizes = sizes_of(q, k, v)
    masks, bias = NO_MASK, None
    if is_causal and (checks.is_traced() or sizes.query_length != sizes.key_length):
        first = torch.arange(sizes.key_length, dtype=torch.int32, device=q.device) + (sizes.key_length - sizes.query_length)
        masks, is_causal = (first[None, None], torch.full_like(first, FOREVER)[None, None], *NO_MASK[2:]), False
    elif attn_mask is not None:
        attn_mask = _attn_mask(attn_mask, query, (*lead, *heads, query.shape[-2], key.shape[-2]))
        if attn_mask.dim() > 3 and len(lead) > 1:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
        if attn_mask.dtype == torch.bool:
            masks = mask_tensors(attn_mask, sizes)
        else:
            bias = attn_mask
    options = options_of(sizes, None, is_causal, scale, dropout_p=dropout_p)
    out, _ = attend(q, k, v, sizes, masks, None, bias, options)
    if out.shape[3] != value_size:
        out = out[..., :value_size]
    return out if query.dim() == 4 and len(lead) == 1 else out.reshape(*lead, *heads, query.shape[-2], value_size)


def _is_covered(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool) -> bool:
    """Whether there are kernels here for torch's call; the rest is torch's own."""
    for given in (query, key, value) if attn_mask is None else (query, key, value, attn_mask):
        if given.layout is not torch.strided or given.is_nested:
            return False
    for name, given in (("query", query), ("key", key), ("value", value)):
        if given.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions [..., L, E], got shape {checks.shape_of(given)}")
    if query.dtype not in checks.DTYPES.get(query.device.type, ()) or dropout_p == 1:
        return False
    if max(query.shape[-2], key.shape[-2]) > checks.MAX_LENGTH or (enable_gqa and key.shape[-3:-2] != value.shape[-3:-2]):
        return False
    size, value_size = query.shape[-1], value.shape[-1]
    return max(size, value_size) <= checks.MAX_HEAD_DIM and min(size, value_size) > 0


def _broadcast(kind: str, query: torch.Size, key: torch.Size, value: torch.Size) -> torch.Size:
    if query == key == value:
        return query
    try:
        return torch.Size(torch.broadcast_shapes(query, key, value))
    except RuntimeError:
        raise ValueError(
            f"query, key, value: expected {kind}dimensions that broadcast, got {list(query)}, {list(key)} and {list(value)}"
        ) from None


def _attn_mask(given: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask of torch's function that broadcasts to [..., H, L, S], with at least one dimension."""
    checks.dtype("attn_mask", given, (torch.bool, *checks.DTYPES["cpu"]))
    checks.same_device("attn_mask", given, query)
    fits = given.dim() <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(given.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {list(shape)}, got {checks.shape_of(given)}")
    return given if given.dim() > 0 else given[None]
