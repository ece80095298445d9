"""torch's flash attention ops on dmattn's kernels: what ``torch.nn.attention.activate_flash_attention_impl("dmattn")`` puts in place.

torch 2.11 and newer have a registry of implementations of these ops. Importing dmattn adds itself there and activates nothing. Once activated,
``F.scaled_dot_product_attention`` (its flash backend, which then comes first) and ``torch.nn.attention.varlen.varlen_attn`` run on dmattn's CUDA
kernels, forward and backward. A call that dmattn does not take runs on the kernel that was there before, and the reason goes to the log
``dmattn.torch_flash``, once. ``torch.nn.attention.restore_flash_attention_impl()`` undoes all of it.

| argument | here |
|---|---|
| float16 and bfloat16, head sizes that are multiples of 8 up to 256, grouped heads | taken |
| causality (bottom-right), ``window_size_left`` and ``_right``, scale | taken, forward and backward |
| ``dropout_p`` | taken: the seed goes into ``rng_state[0]``, the weights that are dropped differ from torch's |
| packed sequences (``cum_seq_q``, ``cum_seq_k``), ``seqused_k`` | taken |
| ``block_table`` | taken; up to 16 causal queries a sequence read the pages where they lie, other calls copy them |
| ``num_splits`` | has no effect. Where pages are read in place, results never depend on other sequences; elsewhere the last bits can |
| ``return_debug_mask`` | with dropout, 1 where a weight is kept and -1 where it is dropped: memory for all pairs |
| ``alibi_slopes``, more than 2^20 packed tokens, other dtypes and head sizes | the kernel before |

Queries that see no key give zeros and lse = -inf. Activate and restore between steps, not between a forward pass with dropout and its backward.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn import checks
from dmattn._library import build_info
from dmattn.autograd import below_autograd
from dmattn.call import NO_MASK, MaskTensors, Options, attend, mask_tensors, options_of
from dmattn.compat import flash_attn, layouts
from dmattn.composed import dropout_factors
from dmattn.decode import MAX_QUERIES, PAGE_UNIT, decode_attention
from dmattn.sizes import Sizes, sizes_of
from dmattn.varlen import Packed, Rules, packed_call

NAME = "dmattn"
log = logging.getLogger(__name__)


def register() -> None:
    """Adds dmattn to torch's registry of flash attention implementations, where this torch has one. Activates nothing."""
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is not None:
        add(NAME, register_fn=activate)


def activate() -> Activated:
    """What the registry calls.

    Raises:
        RuntimeError: this build has no CUDA kernels.
    """
    if not build_info()["cuda"]:
        raise RuntimeError("dmattn: expected a build with CUDA kernels to activate as torch's flash attention, got one without")
    return Activated("CUDA")


class Activated:
    """dmattn's kernels in the place of torch's for one dispatch key, until :meth:`remove`."""

    def __init__(self, key: str) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        self.reasons: set[str] = set()
        self.order: list[int] | None = None
        there = {name: ours for name, ours in OPS.items() if hasattr(torch.ops.aten, name)}  # some are newer than others
        kernels = {name: self._kernel(name, ours, _kernel_of(name, key)) for name, ours in there.items()}
        with warnings.catch_warnings():  # to override is what was asked for
            warnings.filterwarnings("ignore", message=r"[^$]*Overriding a previously registered kernel")
            for name, kernel in kernels.items():
                self.library.impl(name, kernel, key, with_keyset=True)
        if key == "CUDA" and torch.cuda.is_available():
            self._put_flash_first()

    def remove(self) -> None:
        """Puts everything back as it was."""
        if self.library is not None:
            self.library._destroy()
            self.library = None
        if self.order is not None and torch._C._get_sdp_priority_order() == _flash_first(self.order):
            torch._C._set_sdp_priority_order(self.order)
        self.order = None

    def _kernel(self, name: str, ours: Callable[..., Any], before: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **options: Any) -> Any:
            try:
                with torch.no_grad():
                    return ours(*args, **options)
            except NotTakenError as declined:
                reason = f"{name}: {declined}"
            if before is None:
                raise NotImplementedError(f"dmattn: {reason}; and there was no kernel before")
            if reason not in self.reasons:
                self.reasons.add(reason)
                log.warning("%s; such calls run on the kernel that was there before", reason)
            return before.call_boxed(keys, *args, **options)

        return kernel

    def _put_flash_first(self) -> None:
        """torch prefers cuDNN on newer GPUs; what is activated should run. What flash does not take still goes to cuDNN."""
        one = torch.zeros((1, 1, 8, 8), dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(one, one, one)  # torch sets its own order at the first choice
        self.order = torch._C._get_sdp_priority_order()
        torch._C._set_sdp_priority_order(_flash_first(self.order))


def _flash_first(order: list[int]) -> list[int]:
    flash: int = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    return [flash, *(backend for backend in order if backend != flash)]


def _kernel_of(name: str, key: str) -> Any:
    """The kernel of an aten op, or None where there is none, or this torch cannot hand it out."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except (AttributeError, RuntimeError):
        return None


# One call ----------------------------------------------------------------------------------------------------------------------------


class NotTakenError(Exception):
    """A call that is left to the kernel before."""


@contextmanager
def _refusals() -> Iterator[None]:
    """What the checks of public functions refuse is not taken."""
    try:
        yield
    except (TypeError, ValueError) as refused:
        raise NotTakenError(str(refused)) from None


class Call(NamedTuple):
    """A call of attention in the form of the op ``forward``; heads stand before the sequence."""

    query: Tensor  # [B, H, Sq, D]
    key: Tensor  # [B, Hkv, Sk, D]
    value: Tensor  # [B, Hkv, Sk, Dv]
    sizes: Sizes
    masks: MaskTensors
    options: Options

    def forward(self) -> tuple[Tensor, Tensor]:
        """out [B, H, Sq, Dv] and lse [B, H, Sq]."""
        return attend(self.query, self.key, self.value, self.sizes, self.masks, None, None, self.options)

    def backward(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""
        seed, *options = self.options[:6]
        given = (grad_out, None, self.query, self.key, self.value, out, lse, *self.masks, None, None, seed, *options)
        gradients = below_autograd(torch.ops.dmattn.backward, (*given, False, False, None, *self.options[6:]))
        return gradients[0], gradients[1], gradients[2]


class Extras(NamedTuple):
    """What aten's ops are told in addition to the tensors and the sequences."""

    is_causal: bool
    scale: float | None
    left: int | None  # None: without end
    right: int | None
    dropout_p: float
    seed: Tensor | None  # int64 [1]


def _extras(
    is_causal: bool, scale: float | None, left: int | None, right: int | None, dropout_p: float, rng: Tensor | None
) -> Extras:
    """Windows without negative numbers, and a seed from rng_state."""
    left, right = (None if side is None or side < 0 else min(side, checks.MAX_LENGTH) for side in (left, right))
    seed = rng[:1].view(torch.int64) if dropout_p > 0 and rng is not None else None
    return Extras(is_causal, scale, left, 0 if is_causal else right, dropout_p, seed)


def _dense_call(query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Call:
    """Of [B, heads, S, D]."""
    with _refusals():
        sizes = sizes_of(query, key, value)
        options = options_of(sizes, extras.seed, False, extras.scale, dropout_p=extras.dropout_p)
        masks = NO_MASK
        if extras.left is None and extras.right in (None, 0):
            options = options._replace(is_causal=extras.right == 0)
        else:
            window = layouts.window_mask(extras.left, extras.right, key.shape[2], key.device)
            masks = mask_tensors(window, sizes)
            options = options._replace(is_in_order=window.is_in_order, most_keys=window.most_keys)
        query, key, value = _dense_rows(query, key, value)
        return Call(query, key, value, sizes, masks, options)


def _packed_call(query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, extras: Extras) -> Call:
    """Of sequences [T, heads, D] one after the other."""
    with _refusals():
        if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
            raise ValueError(f"query, key, value: expected [T, heads, D] with cum_seq_q, got {checks.shape_of(query)}")
        window = None
        if extras.left is not None or extras.right not in (None, 0):
            window = layouts.window_mask(extras.left, extras.right, key.shape[0], key.device)
        same = ends_k is ends_q and key.shape[0] == query.shape[0]
        query, key, value = _dense_rows(query, key, value)
        packed = Packed(query, key, value, ends_q, None if same else ends_k, None, None)
        rules = Rules(
            extras.right == 0, window, None, None, 0, 0, None, None, extras.scale, 0.0, extras.dropout_p, extras.seed, False
        )
        query, key, value, sizes, masks, _, options = packed_call(packed, rules)
        return Call(query, key, value, sizes, masks, options)


def _dense_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a dense last dimension, which the kernels ask for."""
    query, key, value = (given if given.stride(-1) == 1 else given.contiguous() for given in (query, key, value))
    return query, key, value


def _check_left_out(left_out: dict[str, Any]) -> None:
    for name, given in left_out.items():
        if given is not None:
            raise NotTakenError(f"{name} is left to torch")


def _debug_mask(
    query: Tensor,
    key: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    rng: Tensor,
) -> Tensor:
    """[B, H, max_q, max_k] in the query's dtype: 1 where dropout keeps a weight, -1 where it drops it. Of sequences in rows or packed."""
    heads, (batch, lengths) = query.shape[-2], (query.shape[0], (max_q, max_k))
    if ends_q is not None:
        batch, lengths = 1, (query.shape[0], key.shape[0])
    factors = dropout_factors(rng[:1].view(torch.int64), dropout_p, batch, heads, ((0, lengths[0]), (0, lengths[1])))
    if ends_q is not None and ends_k is not None:
        rows, columns = (
            (ends[:-1, None] + torch.arange(most, device=ends.device)).clamp(max=length - 1).long()
            for ends, most, length in ((ends_q, max_q, lengths[0]), (ends_k, max_k, lengths[1]))
        )
        factors = factors[0][:, rows[:, :, None], columns[:, None]].transpose(0, 1)
    return torch.where(factors > 0, 1, -1).to(query.dtype)


# aten's ops --------------------------------------------------------------------------------------------------------------------------


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **left_out: Any,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention`` of [B, heads, S, D]."""
    lengths = query.shape[2], key.shape[2]
    query, key, value = (x.transpose(-3, -2) for x in (query, key, value))
    options = (*lengths, dropout_p, is_causal, return_debug_mask)
    out, lse, *rest = forward(query, key, value, None, None, *options, scale=scale, **left_out)
    return out.transpose(1, 2), lse, None, None, *lengths, *rest


def scaled_dot_product_backward(*inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_backward``: :func:`backward` of [B, heads, S, D]."""
    grad_out, query, key, value, out, lse, _, _, *rest = inputs
    grad_out, query, key, value, out = (x.transpose(-3, -2) for x in (grad_out, query, key, value, out))
    gradients = backward(grad_out, query, key, value, out, lse, None, None, *rest, **options)
    return tuple(x.transpose(1, 2) for x in gradients)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **left_out: Any,
) -> tuple[Any, ...]:
    """``aten::_flash_attention_forward`` of [B, S, heads, D], or with cum_seq_q of [T, heads, D] and, with block_table, pages of keys."""
    _check_left_out(left_out)
    rng = torch.zeros((2,), dtype=torch.int64, device=query.device)  # as torch has it; the seed is the first
    rng = (rng.random_(2**63 - 1) if dropout_p > 0 else rng).view(torch.uint64)
    extras = _extras(is_causal, scale, window_size_left, window_size_right, dropout_p, rng)
    if seqused_k is not None or block_table is not None:
        out, lse = _of_cache(query, key, value, cum_seq_q, cum_seq_k, max_q, seqused_k, block_table, extras)
    elif cum_seq_q is None:
        out, lse = _dense_call(query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2), extras).forward()
        out = out.transpose(1, 2)
    elif cum_seq_k is None:
        raise NotTakenError("cum_seq_k: expected a tensor with cum_seq_q, got None")
    else:
        out, lse = _packed_call(query, key, value, cum_seq_q, cum_seq_k, extras).forward()
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    debug = query.new_empty(0)
    if return_debug_mask and dropout_p > 0:
        debug = _debug_mask(query, key, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, rng)
    return out, lse, rng, rng.new_zeros(()), debug


def forward_into(out: Tensor, *args: Any, **options: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: writes ``out`` and returns lse."""
    result, lse, *_ = forward(*args, **options)
    out.copy_(result)
    return lse  # type: ignore[no-any-return]


def backward(
    *inputs: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **left_out: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``."""
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, _, _, dropout_p, is_causal, rng_state, _ = inputs
    _check_left_out(left_out)
    extras = _extras(is_causal, scale, window_size_left, window_size_right, dropout_p, rng_state)
    if cum_seq_q is None or cum_seq_k is None:
        call = _dense_call(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), extras)
        gradients = call.backward(grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp)
        return gradients[0].transpose(1, 2), gradients[1].transpose(1, 2), gradients[2].transpose(1, 2)
    call = _packed_call(query, key, value, cum_seq_q, cum_seq_k, extras)
    gradients = call.backward(grad_out.transpose(0, 1)[None], out.transpose(0, 1)[None], logsumexp[None])
    of_query, of_key, of_value = (each.squeeze(0).transpose(0, 1) for each in gradients)
    return of_query, of_key, of_value


def _of_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: int,
    lengths: Tensor | None,
    table: Tensor | None,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """Packed queries of sequences of which the first ``lengths`` keys are there, in packed rows or in pages. Inference only."""
    if ends_q is None or lengths is None or (table is None and ends_k is None) or extras.dropout_p > 0:
        raise NotTakenError(
            "seqused_k, block_table: expected both, or seqused_k and cum_seq_k, with cum_seq_q and without dropout"
        )
    batch = ends_q.shape[0] - 1
    with _refusals():
        layouts.checked(("query", "key", "value"), query, key, value, layouts.PACKED if table is None else layouts.PAGED)
        lengths = layouts.per_sequence("seqused_k", lengths, ends_q[1:], below=checks.MAX_LENGTH + 1).int()
        if table is not None:
            layouts.check_table("block_table", table, batch, query)
    if table is None:
        assert ends_k is not None
        sequences, number, _ = layouts.packed(ends_q, ends_k, query.shape[0], key.shape[0])
        mask = sequences._replace(keys=lengths[number].view(1, 1, -1)).window(extras.left, extras.right)
        of_query, of_key, of_value = (given.transpose(0, 1)[None] for given in (query, key, value))
        call = _dense_call(of_query, of_key, of_value, extras._replace(is_causal=False, left=None, right=None))
        out, lse = call._replace(masks=mask_tensors(mask, call.sizes)).forward()
        return out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    # Every sequence has max_q queries if all of them together do, since none has more.
    is_even = query.shape[0] == batch * max_q and 1 <= max_q <= MAX_QUERIES
    reads_pages = extras.left is None and (extras.right == 0 or (max_q == 1 and extras.right is None))
    if is_even and reads_pages and key.shape[1] % PAGE_UNIT == 0 and query.shape[2] % 8 == 0 == value.shape[3] % 8:
        rows = query.unflatten(0, (batch, max_q)).transpose(1, 2)
        out, lse = decode_attention(
            rows.detach(), key.detach(), value.detach(), lengths, page_table=table.int(), scale=extras.scale, return_lse=True
        )
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    ends_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    window = (-1 if extras.left is None else extras.left, -1 if extras.right is None else extras.right)
    results = flash_attn.flash_attn_varlen_func(
        query, key, value, ends_q, ends_k, max_q, 0, softmax_scale=extras.scale, causal=extras.right == 0, window_size=window,
        return_attn_probs=True, block_table=table,
    )  # fmt: skip
    return results[0], results[1]


OPS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": scaled_dot_product,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_backward,
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_into,
    "_flash_attention_backward": backward,
}
