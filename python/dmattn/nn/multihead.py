"""In place of torch.nn.MultiheadAttention: its constructor, its forward and its state dict on dmattn's kernels, with a window and masks."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import attention
from dmattn.fake import accumulate_dtype
from dmattn.masks import ALWAYS, FOREVER, BlockMask, CombinedMask, IntervalMask, Mask
from dmattn.renamed import renamed
from dmattn.sizes import padded
from dmattn.unsupported import scripting_refused

Projected = tuple[Tensor, Tensor, Tensor]
MASK_DTYPES = (torch.bool, *checks.DTYPES["cpu"])
NEVER_SEEN = -1e4  # a logit that is lower by this much has weight 0 in every dtype, as with -inf


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` on dmattn's kernels: the same arguments, parameters, initialisation and state dict.

    What differs, all of it on purpose:

    - A query that sees no key gives 0, where torch gives NaN, and keys that no query sees may hold anything.
    - ``is_causal=True`` needs no ``attn_mask``. In torch's words "``is_causal`` provides a hint that ``attn_mask`` is the causal mask.
      Providing incorrect hints can result in incorrect execution"; here a mask that is given with the hint is not read. Where its
      values can be read at once, on the CPU and not while tracing, a mask that is not the causal one raises ValueError.
    - The keys of ``add_bias_kv`` and ``add_zero_attn`` are seen under ``is_causal=True``, too; torch hides them where no weights are
      asked for.
    - Wrong shapes raise what torch raises, or ValueError; the rest as in all of dmattn. Nested tensors raise TypeError.
    - torch's ``TransformerEncoderLayer`` calls this module also in eval mode, and not a kernel of its own, which would know of no window:
      ``_qkv_same_embed_dim``, which it asks, is always False. Where this module came into a ``TransformerEncoder`` after that was
      made, set ``encoder.use_nested_tensor = False``.

    ``need_weights=True``, torch's default, computes all weights in plain torch operations, in memory for every pair of a query and a key. So
    does what no kernel here takes: float32 on CUDA, head sizes beyond 256, other devices. All else runs on the kernels.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as torch's.
        sliding_window: None; an int for that many latest keys up to the query's own position, which makes the layer causal; or (left, right)
            for the keys from ``p - left`` to ``p + right``, as in :meth:`IntervalMask.sliding_window`. Query i of L stands at position
            ``p = i + S - L``. The keys of ``add_bias_kv`` and ``add_zero_attn`` stand outside of it: all queries see them.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: sliding_window is not positive, or left or right is negative; embed_dim is no multiple of num_heads.
    """

    @renamed(window="sliding_window")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sliding_window: int | tuple[int, int] | None = None,
    ) -> None:
        sides = _sides(sliding_window)
        if type(embed_dim) is int and type(num_heads) is int and num_heads > 0 and embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a multiple of num_heads={num_heads}, got {embed_dim}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device=device, dtype=dtype
        )
        self.sides = sides

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None  # torch's method asks which parameters there are
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of queries to keys.

        Args:
            query: [L, B, E], [B, L, E] with ``batch_first``, or [L, E].
            key: [S, B, kdim], [B, S, kdim] or [S, kdim].
            value: [S, B, vdim], [B, S, vdim] or [S, vdim].
            key_padding_mask: [B, S] or [S]: bool, True hides a key; or floats that are added to the logits.
            need_weights: also return the weights, in memory for all pairs.
            attn_mask: [L, S] or [B * H, L, S]: bool, True hides; or floats that are added to the logits.
            average_attn_weights: return the mean of the weights over heads, not all of them.
            is_causal: query i sees keys j <= i. It takes the place of attn_mask, which then must be that mask: True, or a number of at
                most -1e4, above the diagonal, and False or 0 elsewhere.
            mask: an :class:`IntervalMask`, :class:`BlockMask` or both joined, for S keys; True in it means visible.

        Returns:
            (out, weights): out like query, in E; weights [B, L, S] or [B, H, L, S] (without B for [L, E]), None unless asked for. Keys
            of ``add_bias_kv`` and ``add_zero_attn`` come last in S.

        Raises:
            TypeError: a wrong type or dtype, or a nested tensor.
            ValueError, AssertionError: a wrong shape; an attn_mask on the CPU that is not causal, with ``is_causal=True``.
        """
        for name, given in (("query", query), ("key", key), ("value", value)):
            if isinstance(given, Tensor) and given.is_nested:
                raise TypeError(
                    f"{name}: expected a dense tensor, got a nested one; dmattn.varlen_attention takes packed sequences, and "
                    "torch.nn.TransformerEncoder makes none with encoder.use_nested_tensor = False"
                )
            checks.tensor(name, given)
        for name, hiding in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if hiding is not None:
                checks.tensor(name, hiding)
        is_batched = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        checks.flag("is_causal", is_causal)
        has_lists = isinstance(mask, CombinedMask) and mask.index is not None
        if has_lists or (mask is not None and not isinstance(mask, IntervalMask | BlockMask | CombinedMask)):
            given_type = "one with an IndexMask" if has_lists else checks.type_of(mask)
            raise TypeError(f"mask: expected an IntervalMask, a BlockMask or both joined, got {given_type}")
        batch_dim = 0 if not is_batched or self.batch_first else 1
        projected = self._projected(query, key, value, batch_dim, is_batched)
        batch, length, keys = projected[0].shape[0], projected[0].shape[1], projected[1].shape[1]
        q, k, v = self._heads(*projected)
        extra = k.shape[2] - keys
        if extra and isinstance(mask, BlockMask | CombinedMask):
            raise ValueError("mask: expected an IntervalMask with add_bias_kv or add_zero_attn, got one with blocks")
        if mask is not None and not (mask.shape[0] in (1, batch) and mask.shape[1] in (1, self.num_heads)):
            expected = f"[B|1, H|1] with B={batch}, H={self.num_heads}"  # plain torch operations would broadcast others
            raise ValueError(f"mask: expected one for {expected}, got one for {list(mask.shape[:2])}")

        # Say what is visible, and what is added to the logits.
        hidden, key_bias = self._of_keys(key_padding_mask, is_batched, batch, keys, extra)
        if is_causal and attn_mask is not None:
            _check_hint(attn_mask, length, keys)
        attn_mask = None if is_causal else self._of_pairs(attn_mask, batch, length, keys, extra)
        block = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
        bias = attn_mask if block is None else None
        alone = is_causal and not extra and self.sides is None and mask is None and hidden is None
        alone = alone and not checks.is_traced() and length == keys
        interval = None if alone else self._interval(hidden, is_causal, mask, length, keys, extra, q.device)
        blocks = mask.block if isinstance(mask, CombinedMask) else mask if isinstance(mask, BlockMask) else None
        dropout = self.dropout if self.training else 0.0

        has_kernels = q.dtype in checks.DTYPES.get(q.device.type, ()) and self.head_dim <= checks.MAX_HEAD_DIM
        if need_weights or not has_kernels:
            visible = _seen(interval, blocks, block, alone, q, k.shape[2])
            out, weights = _with_weights(q, k, v, visible, key_bias, bias, dropout)
        else:
            if block is not None:
                packed = BlockMask.from_bool(block)
                blocks = packed if blocks is None else blocks & packed
            whole: Mask | None = interval if blocks is None else blocks if interval is None else interval & blocks
            weights = None
            options: dict[str, Any] = {"key_bias": key_bias, "bias": bias, "is_causal": alone, "dropout_p": dropout}
            out = attention(padded(q), padded(k), padded(v), whole, scale=self.head_dim**-0.5, **options)[..., : self.head_dim]
        rows = out.transpose(1, 2).flatten(2)
        result: Tensor = self.out_proj(rows.transpose(0, 1) if batch_dim else rows)  # contiguous, as torch's
        result = result if is_batched else result[0]
        if not need_weights or weights is None:
            return result, None
        weights = weights.mean(1) if average_attn_weights else weights
        return result, weights if is_batched else weights[0]

    # Projections --------------------------------------------------------------------------------------------------------------------

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, batch_dim: int, is_batched: bool) -> Projected:
        """[B, L, E], [B, S, E], [B, S, E]."""
        packed, biases = self.in_proj_weight, self.in_proj_bias

        def brought(name: str, given: Tensor, size: int | None) -> Tensor:
            if given.shape[-1] != size:
                raise ValueError(f"{name}: expected a last dimension of {size}, got {checks.shape_of(given)}")
            return given[None] if not is_batched else given.transpose(0, batch_dim)

        def linear(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """In the order in which the caller's tensor lies in memory, so that attention and its output need no copy."""
            return F.linear(given.transpose(0, batch_dim), weight, bias).transpose(0, batch_dim)

        q = brought("query", query, self.embed_dim)
        k = q if key is query else brought("key", key, self.kdim)
        v = k if value is key else brought("value", value, self.vdim)
        if k.shape[0] != q.shape[0] or v.shape[:2] != k.shape[:2]:
            raise ValueError(
                f"key, value: expected equal lengths, and B={q.shape[0]} like query, got {checks.shape_of(key)} and {checks.shape_of(value)}"
            )
        if packed is not None and k is q and v is q:
            q, k, v = linear(q, packed, biases).chunk(3, dim=-1)
            return q, k, v
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if packed is None else packed.chunk(3)
        each: Any = (None, None, None) if biases is None else biases.chunk(3)
        q, k, v = (linear(x, weight, bias) for x, weight, bias in zip((q, k, v), weights, each, strict=True))
        return q, k, v

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> Projected:
        """[B, H, L or S, D], with the keys and values that all queries see behind the others."""
        if self.bias_k is not None and self.bias_v is not None:
            shape = (key.shape[0], 1, self.embed_dim)
            key, value = (
                torch.cat((x, more.to(x.dtype).expand(shape)), 1) for x, more in ((key, self.bias_k), (value, self.bias_v))
            )
        if self.add_zero_attn:
            key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        query, key, value = (x.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for x in (query, key, value))
        return query, key, value

    # Masks --------------------------------------------------------------------------------------------------------------------------

    def _of_keys(
        self, given: Tensor | None, is_batched: bool, batch: int, keys: int, extra: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """key_padding_mask as (hidden [B, 1, S], key_bias [B, 1, S + extra])."""
        if given is None:
            return None, None
        rows = checks.tensor("key_padding_mask", given, MASK_DTYPES)
        rows = rows if is_batched else rows[None]
        if rows.shape != (batch, keys):
            raise ValueError(
                f"key_padding_mask: expected [B, S] = {[batch, keys] if is_batched else [keys]}, got {checks.shape_of(given)}"
            )
        rows = rows[:, None]
        # torch.nn.TransformerEncoderLayer passes bool masks on as floats, -inf where True.
        return (rows, None) if rows.dtype == torch.bool else (rows == -math.inf, F.pad(rows, (0, extra)))

    def _of_pairs(self, given: Tensor | None, batch: int, length: int, keys: int, extra: int) -> Tensor | None:
        """attn_mask as [1|B, 1|H, L, S + extra]: bool with True = visible, or floats to add."""
        if given is None:
            return None
        pairs = checks.tensor("attn_mask", given, MASK_DTYPES)
        if pairs.shape[-2:] != (length, keys) or (pairs.dim() == 3 and pairs.shape[0] != batch * self.num_heads):
            shapes = f"{[length, keys]} or {[batch * self.num_heads, length, keys]}"
            raise ValueError(f"attn_mask: expected [L, S] or [B * H, L, S] = {shapes}, got {checks.shape_of(given)}")
        pairs = pairs[None, None] if pairs.dim() == 2 else pairs.unflatten(0, (batch, self.num_heads))
        if pairs.dtype == torch.bool:
            return F.pad(~pairs, (0, extra), value=True)
        return F.pad(pairs, (0, extra))

    def _interval(
        self, hidden: Tensor | None, is_causal: bool, mask: Mask | None, length: int, keys: int, extra: int, device: torch.device
    ) -> IntervalMask | None:
        """All that intervals say of keys, as positions of :func:`dmattn.attention` with S + extra keys."""
        parts = []
        if is_causal:
            parts.append(IntervalMask.causal(keys, device=device).shift(keys - length))  # query i sees keys j <= i
        if self.sides is not None:
            parts.append(IntervalMask.sliding_window(keys, *self.sides, device=device))
        if hidden is not None:
            end = torch.where(hidden, ALWAYS, FOREVER).int()
            parts.append(IntervalMask(torch.full_like(end, ALWAYS), end))
        interval = mask.interval if isinstance(mask, CombinedMask) else mask
        if isinstance(interval, IntervalMask):
            if not interval.serves(keys):
                raise ValueError(f"mask: expected an IntervalMask for S={keys} keys, got one for {interval.key_length}")
            parts.append(interval)
        if not parts:
            return None
        whole = functools.reduce(operator.and_, parts)
        if not extra:
            return whole
        start, end = whole.shift(extra).to_tensor(keys).unbind(2)
        return IntervalMask(F.pad(start, (0, extra), value=ALWAYS), F.pad(end, (0, extra), value=FOREVER))  # all see the others

    __prepare_scriptable__ = scripting_refused  # torch.jit.script calls it first

    def extra_repr(self) -> str:
        window = "" if self.sides is None else f", sliding_window={self.sides}"
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{window}"


def _sides(window: object) -> tuple[int, int] | None:
    """How far a query sees to its left and right."""
    if window is None:
        return None
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise ValueError(f"sliding_window: expected an int or (left, right), got {window}")
        for side in window:
            checks.length("sliding_window", side)
        return window[0], window[1]
    checks.positive_int("sliding_window", window)
    assert isinstance(window, int)
    return min(window, checks.MAX_LENGTH + 1) - 1, 0


def _check_hint(given: object, length: int, keys: int) -> None:
    """Refuses an attn_mask that is not the causal mask which is_causal=True says it is, where its values can be read at once."""
    mask = checks.tensor("attn_mask", given, MASK_DTYPES)
    if not checks.values_are_known(mask) or torch._C._is_tracing():
        return
    hidden = mask if mask.dtype == torch.bool else mask <= NEVER_SEEN
    later = torch.ones(length, keys, dtype=torch.bool).triu(1)
    is_causal = mask.shape[-2:] == later.shape and torch.equal(hidden, later.expand_as(hidden))
    if not (is_causal and (mask.dtype == torch.bool or not mask.masked_fill(hidden, 0.0).any())):
        raise ValueError(
            f"attn_mask: expected the causal mask {[length, keys]} with is_causal=True, which hides the keys j > i of query i and no "
            f"others, got another {checks.shape_of(mask)}: leave is_causal out, and every mask is read"
        )


def _seen(
    interval: IntervalMask | None, blocks: BlockMask | None, pairs: Tensor | None, is_causal: bool, query: Tensor, keys: int
) -> Tensor | None:
    """Who sees whom as one bool tensor that broadcasts to [B, H, L, S]; None: all."""
    length = query.shape[2]
    parts = [] if pairs is None else [pairs]
    if is_causal:
        parts.append(torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()[None, None])
    if interval is not None:
        parts.append(interval.to_bool(length, keys))
    if blocks is not None:
        if not blocks.fits(length, keys):
            raise ValueError(
                f"mask: expected a BlockMask for L={length}, S={keys}, got one for {blocks.query_length}, {blocks.key_length}"
            )
        parts.append(blocks.cut(length, keys).to_bool())
    return functools.reduce(operator.and_, parts) if parts else None


def _with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] and weights [B, H, L, S] after dropout, in plain torch operations."""
    if visible is not None:  # keys that nobody sees may hold anything
        seen_by_none = ~visible.any(2)[..., None]
        key, value = key.masked_fill(seen_by_none, 0.0), value.masked_fill(seen_by_none, 0.0)
    dtype = accumulate_dtype(query.dtype)
    logits = (query.to(dtype) * query.shape[3] ** -0.5) @ key.to(dtype).transpose(2, 3)
    for given in (None if key_bias is None else key_bias[:, :, None], bias):
        logits = logits if given is None else logits + given
    hidden = logits == -math.inf
    hidden = hidden if visible is None else hidden | ~visible
    sees_nothing = hidden.all(3, keepdim=True)
    weights = logits.masked_fill(hidden, -math.inf).softmax(3).masked_fill(sees_nothing, 0.0)
    weights = F.dropout(weights, dropout).to(query.dtype)
    return weights @ value, weights
