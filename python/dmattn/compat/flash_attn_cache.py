"""flash-attn's decoding with a cache that grows in place: ``flash_attn_with_kvcache``."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn import checks
from dmattn.compat import layouts
from dmattn.compat.merging import run
from dmattn.decode import MAX_QUERIES, PAGE_UNIT, decode_attention

CACHE = "[B, S, Hkv, {}]"
PAGES = "[pages, page_size, Hkv, {}]"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache, to which new keys and values are written first, by flash-attn's name. No gradient.

    Up to 16 causal queries (or one) without window, ALiBi and left padding run in :func:`dmattn.decode_attention`, over the cache where it lies,
    if D and Dv are multiples of 8 and, with block_table or cache_batch_idx, page_size or S is a multiple of 16. Other calls run in
    :func:`dmattn.attention` over the whole cache, of which pages, chosen rows and head sizes that are no multiples of 8 are copied.

    Args:
        q: [B, T, H, D].
        k_cache: [B, S, Hkv, D], with cache_batch_idx any number of rows; with block_table [pages, page_size, Hkv, D], any page size.
        v_cache: as k_cache, with Dv.
        k, v: [B, n, Hkv, D] and [B, n, Hkv, Dv], written to the caches behind cache_seqlens, in place.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]: k is turned by its positions from cache_seqlens on, and q by the same (by
            cache_seqlens alone without causality and window). Only with k.
        cache_seqlens: an int or integers [B], the number of keys before k; None: the cache is full, only without k. Values are checked
            where they lie on the CPU.
        cache_batch_idx: integers [B], each sequence's row of the cache.
        cache_leftpad: integers [B], the number of keys at the beginning of each sequence that are padding.
        block_table: integers [B, max_pages]; page_table is flash-attn 3's name for it. Values are checked where they lie on the CPU.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in :func:`flash_attn_func`; the last query stands at the last key.
        rotary_interleaved: pairs are neighbours; if False, halves.
        num_splits: taken and not needed.
        return_softmax_lse: also return lse.

    Returns:
        out [B, T, H, Dv], or (out, lse [B, H, T]).

    Raises:
        TypeError, ValueError: names the argument, what was expected and what it got; rotary embedding beside left padding is refused.
        RuntimeError: a tensor requires a gradient, and gradients are on.
    """
    block_table = layouts.one_of("block_table", block_table, "page_table", page_table)
    paged = block_table is not None
    checks.flag("causal", causal), checks.flag("return_softmax_lse", return_softmax_lse)
    checks.flag("rotary_interleaved", rotary_interleaved)
    checks.natural_int("num_splits", num_splits)
    names, kinds = ("q", "k_cache", "v_cache"), (PAGES if paged else CACHE)
    form = ("[B, T, H, D]", kinds.format("D"), kinds.format("Dv"))
    layouts.checked(names, q, k_cache, v_cache, form)
    if not paged and cache_batch_idx is None and k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"k_cache: expected {form[1]} with B={q.shape[0]}, got {checks.shape_of(k_cache)}")
    others = (x for x in (k, v, alibi_slopes) if isinstance(x, Tensor))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache, *others)):
        raise RuntimeError("flash_attn_with_kvcache has no gradient: call it under torch.no_grad(), or detach what requires one")
    batch, queries, heads, size = q.shape
    scale, cap = layouts.of_scale(softmax_scale, size), layouts.of_softcap(softcap)
    left, right = layouts.of_window(window_size, causal)
    slopes = layouts.slopes_of(alibi_slopes, batch, heads, q)
    if cache_batch_idx is not None:
        if paged:
            raise ValueError("cache_batch_idx: expected None beside block_table, got a tensor")
        cache_batch_idx = layouts.per_sequence("cache_batch_idx", cache_batch_idx, q, below=k_cache.shape[0])
    if paged:
        layouts.check_table("block_table", block_table, batch, q)
    room = block_table.shape[1] * k_cache.shape[1] if block_table is not None else k_cache.shape[1]

    # Write the new keys and values behind what is there.
    lengths = _lengths(cache_seqlens, batch, room, k, q)
    if k is not None or v is not None:
        new = _new(k, v, q, k_cache, v_cache)
        if block_table is not None:
            layouts.check_pages("block_table", block_table, lengths + new[0].shape[1], k_cache)
        if rotary_cos is not None or rotary_sin is not None:
            if cache_leftpad is not None:
                raise ValueError("rotary_cos: expected None beside cache_leftpad, got a tensor: turn q and k before the call")
            local = causal or left is not None or right is not None
            q, turned = _turned(q, new[0], lengths, rotary_cos, rotary_sin, rotary_interleaved, local)
            new = (turned, new[1])
        _append(new, k_cache, v_cache, lengths, room, cache_batch_idx, block_table)
        lengths = lengths + new[0].shape[1]
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos: expected None without k, got a tensor: only new keys are turned")
    elif block_table is not None:
        layouts.check_pages("block_table", block_table, lengths, k_cache)

    # Attend to the cache where it lies, if the kernel for that can say what is asked for. A chosen row of the cache is a page.
    simple = left is None and right in (None, 0) and slopes is None and cache_leftpad is None and (right == 0 or queries == 1)
    aligned = size % 8 == 0 and v_cache.shape[3] % 8 == 0 and 1 <= queries <= MAX_QUERIES
    table = block_table if cache_batch_idx is None else cache_batch_idx[:, None]
    page_size = k_cache.shape[1]
    if simple and aligned and (table is None or (page_size % PAGE_UNIT == 0 and page_size > 0)):
        caches = (k_cache, v_cache) if table is not None else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        pages = None if table is None else table.int()
        out, lse = decode_attention(
            q.transpose(1, 2), *caches, lengths, page_table=pages, scale=scale, softcap=cap, return_lse=True
        )
        return (out.transpose(1, 2), lse) if return_softmax_lse else out.transpose(1, 2)

    # Else attend to all of its rows, or a copy of them, under a mask.
    keys, values = k_cache, v_cache
    if block_table is not None:
        keys, values = (layouts.from_pages(x, block_table, batch) for x in (k_cache, v_cache))
    elif cache_batch_idx is not None:
        keys, values = k_cache[cache_batch_idx], v_cache[cache_batch_idx]
    sequences = layouts.of_batch(queries, room, lengths, q.device)
    if cache_leftpad is not None:
        pad = layouts.per_sequence("cache_leftpad", cache_leftpad, q, below=room + 1).int().view(-1, 1, 1)
        sequences = sequences._replace(number=torch.where(sequences.number < pad, sequences.keys, sequences.number))
    passes = layouts.passes_of(sequences, left, right, slopes, slopes)
    out, lse = run(*layouts.heads_first(q, keys, values), passes, scale=scale, softcap=cap)
    out = out.transpose(1, 2)[..., : v_cache.shape[3]]
    return (out, lse) if return_softmax_lse else out


def _lengths(cache_seqlens: object, batch: int, room: int, k: Tensor | None, q: Tensor) -> Tensor:
    """The number of keys in the cache before the new ones, int32 [B]."""
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: expected an int or a tensor beside k, got None")
        cache_seqlens = room
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        most = room - (k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0)
        if not 0 <= cache_seqlens <= most:
            raise ValueError(f"cache_seqlens: expected 0 <= cache_seqlens <= {most}, the cache's room, got {cache_seqlens}")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    most = room - (k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0)
    return layouts.per_sequence("cache_seqlens", cache_seqlens, q, below=most + 1).int()


def _new(k: object, v: object, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    new: list[Tensor] = []
    for name, given, cache, size in (("k", k, k_cache, "D"), ("v", v, v_cache, "Dv")):
        tensor = checks.tensor(name, given)
        fits = tensor.dim() == 4 and tensor.shape[0] == q.shape[0] and tensor.shape[2:] == cache.shape[2:]
        if not fits or (new and tensor.shape[1] != new[0].shape[1]):
            expected = [q.shape[0], new[0].shape[1] if new else "n", *cache.shape[2:]]
            raise ValueError(f"{name}: expected [B, n, Hkv, {size}] = {expected}, got {checks.shape_of(tensor)}")
        checks.same_device(name, tensor, q, "q")
        if tensor.dtype != cache.dtype:
            raise TypeError(f"{name}: expected dtype {cache.dtype} like {name}_cache, got {tensor.dtype}")
        new.append(tensor)
    return new[0], new[1]


def _append(
    new: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    room: int,
    rows: Tensor | None,
    table: Tensor | None,
) -> None:
    """Writes k and v to their places. On a GPU a place outside the cache is torch's error, not a wrong access."""
    batch, count = new[0].shape[:2]
    place = lengths.long()[:, None] + torch.arange(count, device=lengths.device)
    if table is None:
        row = torch.arange(batch, device=lengths.device) if rows is None else rows.long()
        index = (row[:, None].expand_as(place), place)
    else:
        page_size = k_cache.shape[1]
        page = table.long().gather(1, place // page_size)
        page = torch.where(page < 0, k_cache.shape[0], page)  # a negative number would count from the last page
        index = (page, place % page_size)
    with torch.no_grad():
        k_cache[index], v_cache[index] = new


def _turned(
    q: Tensor, k: Tensor, lengths: Tensor, cos: object, sin: object, interleaved: bool, local: bool
) -> tuple[Tensor, Tensor]:
    """q and k, turned by their positions."""
    tables: list[Tensor] = []
    for name, given in (("rotary_cos", cos), ("rotary_sin", sin)):
        table = checks.tensor(name, given)
        checks.dtype(name, table, checks.DTYPES["cpu"])
        checks.same_device(name, table, q, "q")
        if table.dim() != 2 or 2 * table.shape[1] > q.shape[3] or (tables and table.shape != tables[0].shape):
            expected = f"[positions, rotary_dim / 2] with rotary_dim up to {q.shape[3]}"
            raise ValueError(f"{name}: expected {expected}, got shape {checks.shape_of(table)}")
        tables.append(table)
    count = max(k.shape[1], q.shape[1])
    if checks.values_are_known(lengths) and lengths.numel() and int(lengths.max()) + count > tables[0].shape[0]:
        raise ValueError(f"rotary_cos: expected at least {int(lengths.max()) + count} positions, got {tables[0].shape[0]}")

    def turn(x: Tensor, steps: Tensor) -> Tensor:
        angles = lengths.long()[:, None] + steps
        c, s = (table[angles][:, :, None].to(x.dtype) for table in tables)
        size = 2 * c.shape[-1]
        pairs = x[..., :size].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        turned = torch.stack((first * c - second * s, first * s + second * c), dim=-1 if interleaved else -2)
        return torch.cat((turned.flatten(-2), x[..., size:]), dim=-1)

    steps = torch.arange(q.shape[1], device=q.device)
    return turn(q, steps if local else steps * 0), turn(k, torch.arange(k.shape[1], device=k.device))
