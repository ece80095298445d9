"""flash-attn's decoding with a cache that grows in place: ``flash_attn_with_kvcache``."""

from __future__ import annotations

from typing import NamedTuple

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
        TypeError, ValueError: names the argument, what was expected and what it got; rotary embedding with left padding is refused.
        RuntimeError: a tensor requires a gradient, and gradients are on.
    """
    block_table = layouts.one_of("block_table", block_table, "page_table", page_table)
    paged = block_table is not None
    checks.each(checks.flag, causal=causal, return_softmax_lse=return_softmax_lse, rotary_interleaved=rotary_interleaved)
    checks.natural_int("num_splits", num_splits)
    kind = PAGES if paged else CACHE
    form = ("[B, T, H, D]", kind.format("D"), kind.format("Dv"))
    layouts.checked(("q", "k_cache", "v_cache"), q, k_cache, v_cache, form)
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
            raise ValueError("cache_batch_idx: expected None with block_table, got a tensor")
        cache_batch_idx = layouts.per_sequence("cache_batch_idx", cache_batch_idx, q, below=k_cache.shape[0])
    if block_table is not None:
        layouts.check_table("block_table", block_table, batch, q)
    cache = Cache(k_cache, v_cache, cache_batch_idx, block_table)

    # Write the new keys and values behind what is there.
    lengths = _lengths(cache_seqlens, cache.room(), k, q)
    new = None if k is None and v is None else _new(k, v, q, cache)
    until = lengths if new is None else lengths + new[0].shape[1]
    if block_table is not None:
        layouts.check_pages("block_table", block_table, until, k_cache)
    if rotary_cos is not None or rotary_sin is not None:
        if new is None:
            raise ValueError("rotary_cos: expected None without k, got a tensor: only new keys are turned")
        if cache_leftpad is not None:
            raise ValueError("rotary_cos: expected None with cache_leftpad, got a tensor: turn q and k before the call")
        local = causal or left is not None or right is not None
        q, turned = _turned(q, new[0], lengths, rotary_cos, rotary_sin, rotary_interleaved, local)
        new = (turned, new[1])
    if new is not None:
        cache.append(new, lengths)

    # Attend to the cache where it lies, if the kernel for that can say what is asked for; else to all of it, under a mask.
    simple = left is None and right in (None, 0) and slopes is None and cache_leftpad is None and (right == 0 or queries == 1)
    result = cache.attended(q, until, scale, cap) if simple and 1 <= queries <= MAX_QUERIES else None
    if result is None:
        sequences = layouts.of_batch(queries, cache.room(), until, q.device)
        if cache_leftpad is not None:
            pad = layouts.per_sequence("cache_leftpad", cache_leftpad, q, below=cache.room() + 1).int().view(-1, 1, 1)
            sequences = sequences._replace(number=torch.where(sequences.number < pad, sequences.keys, sequences.number))
        passes = layouts.passes_of(sequences, left, right, slopes, slopes)
        result = run(*layouts.heads_first(q, *cache.gathered()), passes, scale=scale, softcap=cap)
    out = result[0].transpose(1, 2)[..., : v_cache.shape[3]]
    return (out, result[1]) if return_softmax_lse else out


class Cache(NamedTuple):
    """Where the keys and values of sequences lie: rows of their own, chosen rows, or pages."""

    key: Tensor
    value: Tensor
    rows: Tensor | None  # [B]
    table: Tensor | None  # [B, max_pages]

    def room(self) -> int:
        """The most keys that a sequence may have."""
        return self.key.shape[1] * (1 if self.table is None else self.table.shape[1])

    def append(self, new: tuple[Tensor, Tensor], lengths: Tensor) -> None:
        """Writes k and v behind so many keys. On a GPU a place outside the cache is torch's error, not a wrong access."""
        batch, count = new[0].shape[:2]
        place = lengths.long()[:, None] + torch.arange(count, device=lengths.device)
        if self.table is None:
            row = torch.arange(batch, device=lengths.device) if self.rows is None else self.rows.long()
            index = (row[:, None].expand_as(place), place)
        else:
            page_size = self.key.shape[1]
            page = self.table.long().gather(1, place // page_size)
            page = torch.where(page < 0, self.key.shape[0], page)  # a negative number would count from the last page
            index = (page, place % page_size)
        with torch.no_grad():
            self.key[index], self.value[index] = new

    def attended(self, q: Tensor, lengths: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor] | None:
        """Causal attention in the kernel for decoding, (out [B, H, T, Dv], lse); None where it does not take this cache. A chosen row is a
        page to it."""
        table = self.table if self.rows is None else self.rows[:, None]
        page_size = self.key.shape[1]
        if self.key.shape[3] % 8 or self.value.shape[3] % 8 or (table is not None and (page_size % PAGE_UNIT or page_size == 0)):
            return None
        key, value = (x.transpose(1, 2) if table is None else x for x in self[:2])
        pages = None if table is None else table.int()
        return decode_attention(
            q.transpose(1, 2), key, value, lengths, page_table=pages, scale=scale, softcap=softcap, return_lse=True
        )

    def gathered(self) -> tuple[Tensor, Tensor]:
        """The caches, or a copy of their chosen rows or pages, [B, room, Hkv, D or Dv]."""
        if self.table is not None:
            batch = self.table.shape[0]
            return layouts.from_pages(self.key, self.table, batch), layouts.from_pages(self.value, self.table, batch)
        return (self.key, self.value) if self.rows is None else (self.key[self.rows], self.value[self.rows])


def _lengths(cache_seqlens: object, room: int, k: Tensor | None, q: Tensor) -> Tensor:
    """The number of keys in the cache before the new ones, int32 [B]."""
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: expected an int or a tensor with k, got None")
        cache_seqlens = room
    most = room - (k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0)
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens <= most:
            raise ValueError(f"cache_seqlens: expected 0 <= cache_seqlens <= {most}, the cache's room, got {cache_seqlens}")
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    return layouts.per_sequence("cache_seqlens", cache_seqlens, q, below=most + 1).int()


def _new(k: object, v: object, q: Tensor, caches: Cache) -> tuple[Tensor, Tensor]:
    new: list[Tensor] = []
    for name, given, cache, size in (("k", k, caches.key, "D"), ("v", v, caches.value, "Dv")):
        sizes = {"B": q.shape[0], "Hkv": cache.shape[2], size: cache.shape[3]} | ({"n": new[0].shape[1]} if new else {})
        tensor = checks.shaped(name, given, f"[B, n, Hkv, {size}]", (), q, "q", **sizes)
        if tensor.dtype != cache.dtype:
            raise TypeError(f"{name}: expected dtype {cache.dtype} like {name}_cache, got {tensor.dtype}")
        new.append(tensor)
    return new[0], new[1]


def _turned(
    q: Tensor, k: Tensor, lengths: Tensor, cos: object, sin: object, interleaved: bool, local: bool
) -> tuple[Tensor, Tensor]:
    """q and k, turned by their positions."""
    tables: list[Tensor] = []
    for name, given in (("rotary_cos", cos), ("rotary_sin", sin)):
        table = checks.tensor(name, given, checks.DTYPES["cpu"], q, "q")
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
