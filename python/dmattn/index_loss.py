"""What teaches an indexer: the divergence of its softmax from the attention weights of a group's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dmattn import checks
from dmattn.attention import attention
from dmattn.autograd import has_tangent
from dmattn.call import autocast
from dmattn.fake import accumulate_dtype
from dmattn.index_products import AllProducts, ListedProducts, distinct, of_groups
from dmattn.indexer import (
    BlockScore,
    IndexSizes,
    checked_base,
    checked_block_score,
    checked_rows,
    index_scale,
    index_sizes,
    mean_keys,
)
from dmattn.masks import IndexMask, IntervalMask, bounds
from dmattn.masks.heads import repeat_heads
from dmattn.sharding import any_sharded, refuse
from dmattn.sizes import Sizes, key_bias_rows, sizes_of

ELEMENTS = 1 << 27  # products that are computed at once, about; with half as many a GPU took longer at 131,072 keys


def index_loss(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    rows: Tensor | None = None,
    mask: IndexMask | None = None,
    is_causal: bool = True,
    base: IntervalMask | None = None,
    local: int = 0,
    sink_keys: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    key_bias: Tensor | None = None,
    block_size: int = 1,
    block_score: BlockScore = "max",
    slope: Tensor | None = None,
    query_offset: int | None = None,
    sharp: bool = False,
) -> Tensor:
    """How far an indexer's softmax is from attention: the loss that teaches it, a scalar.

    For each query, KL(p || q) over the keys (or blocks) that compete: those that it may see and that ``local`` and ``sink_keys`` do not
    show it. p is the mean of the attention weights of a group's heads, q the softmax of the index scores, both divided by their sums over
    these keys. Only index_query, index_key, weights and slope get gradients, computed together with the loss; it cannot be differentiated
    twice. DSA's loss (arXiv 2512.02556, section 2.1) is that of ``rows`` (dense warm-up) and of ``mask`` (sparse training).

    Args:
        index_query, index_key, weights, slope: as of :func:`index_top_k`; index_query [B, G, Sq, Hi, Di].
        query: [B, H, Sq, D], as attention takes it (rotated); G divides H.
        key: [B, Hkv, Sk, D].
        rows: int64 [R], the queries that teach, which look at all keys: memory of a few times R x Sk. None without mask: all of them.
        mask: the keys that queries chose; then all queries teach, over their own lists, in O(Sq x K). Its is_causal, local and sink_keys
            are taken.
        is_causal, base, local, sink_keys, block_size, block_score, query_offset: as of :func:`index_top_k`.
        scale, softcap, key_bias: as of :func:`dmattn.attention`; index products are scaled by ``1 / sqrt(Di)``.
        sharp: if True, a query counts by its attention to competing keys times its largest attention to one of them, so that queries which
            look for one key teach most. Otherwise all count alike.

    Returns:
        [], float32 (float64 for float64 tensors): mean over batch, groups and queries, in nats. Queries without keys that compete count 0, and
        so do those that ``base`` makes padding, because their own key is hidden.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, size or device; rows with mask; a DTensor.
        RuntimeError: when it is differentiated again, or in forward mode or by torch.func.
    """
    if any_sharded((index_query, index_key, weights, query, key)):
        refuse("index_loss")
    _refuse_transforms(index_query, index_key, weights, slope)
    query, key, _ = autocast(query, key, key)
    sizes = index_sizes(index_query, index_key, weights, slope)
    of_attention = sizes_of(query, key, key)
    _check_alike(sizes, of_attention)
    is_pooled = checked_block_score(block_score, block_size)
    checks.each(checks.flag, is_causal=is_causal, sharp=sharp)
    checks.each(checks.length, local=local, sink_keys=sink_keys)
    base = checked_base(base, sizes)
    if rows is not None and mask is not None:
        raise ValueError("rows, mask: expected at most one of them, got both")
    if mask is not None:
        checks.instance("mask", mask, IndexMask, "an IndexMask")
        if not mask.fits(sizes.query_length) or mask.block_size != block_size:
            expected = f"an IndexMask for Sq={sizes.query_length} in blocks of {block_size}"
            raise ValueError(f"mask: expected {expected}, got Sq={mask.query_length} in blocks of {mask.block_size}")
        checks.shaped("mask", mask.indices, "[B|1, G|1, Sq, K]", B=sizes.batch, G=sizes.groups)
        is_causal, local, sink_keys = mask.is_causal, mask.local, mask.sink_keys
    if query_offset is not None:
        bounds.position("query_offset", query_offset, sizes.device)
        checks.instance("query_offset", query_offset, int | torch.SymInt, "an int")
    offset = sizes.key_length - sizes.query_length if query_offset is None else query_offset
    dtype = accumulate_dtype(sizes.dtype)
    row = torch.arange(sizes.query_length, device=sizes.device) if rows is None else checked_rows(rows, index_query)
    choices = sizes.key_length // block_size if is_pooled else sizes.key_length
    if 0 in (row.shape[0], sizes.batch, choices, 1 if mask is None else mask.shape[3]):
        taught = (given for given in (index_query, index_key, weights, slope) if given is not None)
        return torch.stack([given[:0].sum(dtype=dtype) for given in taught]).sum()
    lse = None
    if mask is not None:
        with torch.no_grad():
            seen: Any = mask if base is None else mask & base
            if sizes.groups not in (1, of_attention.kv_heads, of_attention.heads):
                seen = seen._map(lambda given: repeat_heads(given, of_attention.heads))
            lse = attention(
                query, key, key, seen, scale=scale, softcap=softcap, key_bias=key_bias, query_offset=query_offset, return_lse=True
            )[1]  # fmt: skip
    if rows is not None:
        index_query, weights, query = (given.index_select(2, row) for given in (index_query, weights, query))
    loss: Tensor = _index_loss(
        index_query, mean_keys(index_key, block_size) if is_pooled else index_key, weights.to(dtype),
        None if slope is None else slope.to(dtype), query.detach(), key.detach(),
        None if key_bias is None else key_bias_rows(key_bias, of_attention).detach(), row, lse, None if mask is None else mask.indices,
        *((None, None) if base is None else (base.start, base.end)), offset, is_causal, local, sink_keys,
        of_attention.head_dim**-0.5 if scale is None else checks.scale(scale), checks.softcap(softcap),
        index_scale(None, sizes.head_dim), block_size, is_pooled, sharp,
    )[0]  # fmt: skip
    return loss


def _refuse_transforms(*taught: Tensor | None) -> None:
    """Refuses what would lose the gradient without a word, or fail in torch's."""
    is_dual = forward_ad._current_level >= 0 and has_tangent(taught)
    if is_dual or (torch._C._are_functorch_transforms_active() and any(_is_tracked(given) for given in taught)):
        raise RuntimeError(
            "index_loss: expected backward() or torch.autograd.grad, which differentiate it, got torch.func or forward mode"
        )


def _is_tracked(given: object) -> bool:
    """Whether a gradient of torch.func looks at a tensor, also through vmap."""
    while isinstance(given, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(given):
        if torch._C._functorch.is_gradtrackingtensor(given):
            return True
        given = torch._C._functorch.get_unwrapped(given)
    return False


def _check_alike(sizes: IndexSizes, of_attention: Sizes) -> None:
    for name, expected, got in (
        ("B", of_attention.batch, sizes.batch),
        ("Sq", of_attention.query_length, sizes.query_length),
        ("Sk", of_attention.key_length, sizes.key_length),
    ):
        if expected != got:
            raise ValueError(f"index_query, index_key: expected {name}={expected} like query and key, got {got}")
    if (
        0 in (sizes.groups, of_attention.heads)
        or of_attention.heads % sizes.groups
        or max(sizes.groups, of_attention.kv_heads) % min(sizes.groups, of_attention.kv_heads)
    ):
        raise ValueError(
            f"index_query: expected a number of groups G that goes with H={of_attention.heads}, Hkv={of_attention.kv_heads}, got {sizes.groups}"
        )
    if of_attention.device != sizes.device:
        raise ValueError(f"query: expected device {sizes.device} like index_query, got {of_attention.device}")


@torch.library.custom_op("dmattn_nn::index_loss", mutates_args=())
def _index_loss(
    index_query: Tensor, index_key: Tensor, weights: Tensor, slope: Tensor | None, query: Tensor, key: Tensor, key_bias: Tensor | None,
    rows: Tensor, lse: Tensor | None, lists: Tensor | None, start: Tensor | None, end: Tensor | None, offset: int, is_causal: bool,
    local: int, sink_keys: int, scale: float, softcap: float, index_factor: float, block_size: int, is_pooled: bool, sharp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, and its gradients by index_query, index_key, weights and slope. index_query, weights and query are those of ``rows`` alone;
    index_key holds means of blocks where is_pooled."""
    batch, groups, count, index_heads, _ = index_query.shape
    heads, keys, dtype = query.shape[1], key.shape[2], accumulate_dtype(index_query.dtype)
    width = keys if lists is None else lists.shape[3] * block_size * max(1, key.shape[3] // 8)
    step = max(1, ELEMENTS // (width * (heads // groups + index_heads) * batch * groups))
    query, key = query.unflatten(1, (groups, -1)), of_groups(key, groups)
    if key_bias is not None:
        key_bias = key_bias[:, None] if key_bias.shape[1] == 1 else repeat_heads(key_bias, heads).unflatten(1, (groups, -1))
        key_bias = key_bias.to(dtype)
    lse = None if lse is None or lists is None else lse.to(dtype).unflatten(1, (groups, -1))
    found: list[tuple[Tensor, ...]] = []
    of_keys: Any = None
    with torch.autocast(index_query.device.type, enabled=False):
        products: Any = AllProducts(index_key, key) if lists is None else None
        for part in (slice(first, min(first + step, count)) for first in range(0, count, step)):
            taught, blocks = index_query[:, :, part], None if lists is None else distinct(lists[:, :, part])
            if blocks is not None:
                products = ListedProducts(index_key, key, blocks, block_size, is_pooled)
            losses, of_products, of_weights, of_slopes = torch.ops.dmattn.index_loss(
                products.attention(query[..., part, :]).to(dtype), products.indexer(taught), weights[:, :, part], slope, key_bias,
                None if lse is None else lse[..., part], rows[part] + offset, blocks, start, end, keys, block_size, is_pooled, is_causal,
                local, sink_keys, scale, softcap, index_factor, sharp, products.to_bfloat16,
            )  # fmt: skip
            of_query, of_key = products.gradients(taught, of_products)
            of_keys = of_key if of_keys is None else of_keys.add_(of_key)
            found.append((losses, of_query, of_weights, of_slopes))
    losses, of_query, of_weights, of_slopes = (
        found[0] if len(found) == 1 else (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    )
    mean = 1 / (batch * groups * count)
    of_slope = of_slopes.sum((0, 2)).mul_(mean) if slope is not None else weights.new_empty(0)

    def mean_of(gradient: Tensor, given: Tensor) -> Tensor:
        return torch.mul(gradient, mean, out=given.new_empty(given.shape))

    return losses.mean(), mean_of(of_query, index_query), mean_of(of_keys, index_key), of_weights.mul_(mean), of_slope


@_index_loss.register_fake
def _(
    index_query: Tensor, index_key: Tensor, weights: Tensor, slope: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_slope = weights.new_empty(weights.shape[1] if slope is not None else 0)
    like = [given.new_empty(given.shape) for given in (index_query, index_key, weights)]  # contiguous, whatever was given
    return weights.new_empty(()), like[0], like[1], like[2], of_slope


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # the gradients, which are outputs, have none
    ctx.save_for_backward(*output[1:])
    ctx.has_slope = inputs[3] is not None


def _times_gradients(ctx: Any, of_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("index_loss: its gradient cannot be differentiated again")
    *of_tensors, of_slope = (of_loss.to(gradient.dtype) * gradient for gradient in ctx.saved_tensors)
    return *of_tensors, of_slope if ctx.has_slope else None, *(None,) * 18


_index_loss.register_autograd(_times_gradients, setup_context=_save_gradients)
