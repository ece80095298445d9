"""What dmattn is compared with: torch's attention kernels, FlexAttention, eager torch, dmattn's own dense kernel, other libraries if installed.

A peer computes the case's own mask where it can; else it is dense (causal where the case is), which is what one would run without a mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import dmattn
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

BLOCK = 128
SDPA = "F.scaled_dot_product_attention"
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
MOST_BYTES = {"cuda": 24 << 30, "cpu": 2 << 30}  # of the N x N tensors that a peer may make
PEERS = {
    "torch": "torch's scaled_dot_product_attention, its own choice of kernel, dense",
    "cudnn": "cuDNN through torch, dense",
    "flash": "FlashAttention-2 through torch, dense",
    "efficient": "torch's memory-efficient kernel, with the case's mask as a tensor",
    "flex": "FlexAttention, compiled, with the case's mask",
    "eager": "products and softmax in torch, with the case's mask as a tensor",
    "dmattn": "dmattn's own dense kernel",
    "fa3": "FlashAttention-3 (flash_attn_interface), dense or a sliding window",
    "fa4": "FlashAttention-4 (flash_attn.cute), dense or a sliding window",
    "flashinfer": "FlashInfer, dense, forward alone",
}
NEEDS_GPU = ("cudnn", "flash", "efficient", "flex", "fa3", "fa4", "flashinfer")
PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute", "flashinfer": "flashinfer"}


class PeerError(Exception):
    """A peer cannot do this; says why."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One contestant.

    Args:
        name: what the JSON and the tables call it.
        run: makes out [B, H, S, D].
        inputs: the tensors whose gradients its backward pass computes; none for one that has no backward pass.
        masked: whether it computes the case's own mask; else it is dense.
        build: what makes its mask, alone, if it has one.
        rounding: what its way to take a bias adds to its logits, at most.
    """

    name: str
    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    masked: bool = False
    build: Callable[[], object] | None = None
    rounding: float = 0.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a peer is asked for.

    Args:
        query: [B, H, S, D]; key, value: [B, Hkv, S, D].
        is_causal: of the dense peers.
        mask: the case's own, None for dense.
        key_bias: fp32 [B, Hkv, S], added to the logits, or None. No peer computes its gradient.
        table: bool [1, H, S / block, S / block] of a block mask.
        window: of a sliding window.
        visible_at: for a mask that is a function of indices.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    mask: dmattn.IntervalMask | dmattn.BlockMask | None = None
    key_bias: Tensor | None = None
    table: Tensor | None = None
    block: int = BLOCK
    window: int | None = None
    visible_at: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def visible(self) -> Tensor | None:
        """bool [B|1, H|Hkv|1, S, S], None for all."""
        length = self.query.shape[2]
        if isinstance(self.mask, dmattn.IntervalMask):
            return self.mask.to_bool(length, length)
        if self.mask is not None:
            return self.mask.to_bool()[..., :length, :length]
        if not self.is_causal:
            return None
        return torch.ones(length, length, dtype=torch.bool, device=self.query.device).tril()[None, None]

    def check_size(self, name: str, bytes_of_a_pair: int, heads: int) -> None:
        """Raises PeerError where N x N tensors of so many heads take too much memory."""
        needed = self.query.shape[0] * heads * self.query.shape[2] ** 2 * bytes_of_a_pair
        most = MOST_BYTES[self.query.device.type]
        if needed > most:
            raise PeerError(f"{name}: its N x N tensors would take {needed / 2**30:.0f} GiB, more than {most / 2**30:.0f}")

    def check_rows(self, name: str) -> None:
        """Raises PeerError where a query sees nothing, for which a softmax gives NaN. Of other masks than tables of blocks no query does."""
        if self.table is not None and not bool(self.table.any(-1).all()):
            raise PeerError(f"{name}: some queries see nothing, for which it gives NaN")


def missing(name: str, device: str) -> str | None:
    """Why this peer is not here, None if it is."""
    if name in NEEDS_GPU and device == "cpu":
        return f"{name}: needs a GPU"
    package = PACKAGES.get(name)
    if package is not None and not _is_installed(package):
        return f"{name}: the package {package} is not installed"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def peer_call(name: str, problem: Problem) -> Call:
    """The peer of a short name of ``PEERS``.

    Raises:
        PeerError: it is not here, or cannot do this.
    """
    if reason := missing(name, problem.query.device.type):
        raise PeerError(reason)
    if name == "dmattn":

        def dense() -> Tensor:
            out: Tensor = dmattn.attention(*problem.inputs, is_causal=problem.is_causal)
            return out

        return Call("dmattn.attention, dense", dense, problem.inputs)
    makers = {
        "flex": _flex, "eager": _eager, "efficient": _efficient, "fa3": _flash_attn, "fa4": _flash_attn, "flashinfer": _flashinfer
    }  # fmt: skip
    return makers[name](name, problem) if name in makers else _sdpa(BACKENDS.get(name), problem)


# torch's kernels -------------------------------------------------------------------------------------------------------------------


def _sdpa(backend: str | None, problem: Problem) -> Call:
    title = SDPA + (f" by {backend}" if backend else "")
    query, key, value = problem.inputs
    is_causal, grouped = problem.is_causal, problem.group > 1

    def attend(k: Tensor, v: Tensor, grouped: bool) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(query, k, v, is_causal=is_causal, enable_gqa=grouped)

    if grouped and not _takes_grouped_heads(backend, query.device, query.dtype):
        k, v = _repeated(problem)
        return Call(f"{title}, key heads repeated beforehand", lambda: attend(k, v, False), (query, k, v))
    return Call(title, lambda: attend(key, value, grouped), (query, key, value))


def _repeated(problem: Problem) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each query head."""
    if problem.group == 1:
        return problem.key, problem.value
    k, v = (t.detach().repeat_interleave(problem.group, dim=1).requires_grad_() for t in (problem.key, problem.value))
    return k, v


@cache
def _takes_grouped_heads(backend: str | None, device: torch.device, dtype: torch.dtype) -> bool:
    query, key = (torch.zeros(1, heads, 256, 128, device=device, dtype=dtype) for heads in (4, 2))
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
            F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    except RuntimeError:
        return False
    return True


def _efficient(name: str, problem: Problem) -> Call:
    """A bool mask, or where there is a bias, one tensor of the query's dtype that holds both."""
    query, dtype = problem.query, problem.query.dtype
    heads = problem.query.shape[1] if problem.key_bias is not None or problem.table is not None else 1
    problem.check_size(name, 4, heads)
    k, v = _repeated(problem)

    def build() -> Tensor | None:
        visible = problem.visible()
        if visible is None or problem.key_bias is None:
            return visible
        bias = problem.key_bias.detach().to(dtype)[:, :, None].expand(-1, -1, query.shape[2], -1)
        return bias.masked_fill(~visible, -torch.inf).repeat_interleave(problem.group, 1)

    mask = build()
    problem.check_rows(name)
    biggest = 0.0 if problem.key_bias is None else problem.key_bias.detach().abs().max().item()

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(query, k, v, mask)

    title = f"{SDPA} by EFFICIENT_ATTENTION, with a mask"
    return Call(title, attend, (query, k, v), masked=True, build=build, rounding=torch.finfo(dtype).eps * biggest)


def _eager(name: str, problem: Problem) -> Call:
    problem.check_size(name, 16, problem.query.shape[1])
    query, scale = problem.query, problem.query.shape[3] ** -0.5
    k, v = _repeated(problem)

    def build() -> Tensor | None:
        visible = problem.visible()
        return visible if visible is None or visible.shape[1] == 1 else _per_head(visible, query.shape[1])

    visible = build()
    problem.check_rows(name)
    bias = None if problem.key_bias is None else problem.key_bias.detach().repeat_interleave(problem.group, 1)[:, :, None]

    def attend() -> Tensor:
        logits = (query @ k.transpose(-1, -2)).float() * scale
        logits = logits if bias is None else logits + bias
        logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
        out: Tensor = logits.softmax(-1).to(v.dtype) @ v
        return out

    return Call("eager torch, with a mask", attend, (query, k, v), masked=True, build=build)


def _per_head(visible: Tensor, heads: int) -> Tensor:
    return visible.repeat_interleave(heads // visible.shape[1], 1)


# FlexAttention --------------------------------------------------------------------------------------------------------------------


def _flex(name: str, problem: Problem) -> Call:
    """Compiled. The mask's building is compiled, too, but for a table of blocks, which needs no function."""
    if problem.table is not None and problem.block == BLOCK:
        return _flex_blocks(problem, problem.table)
    if problem.table is not None:
        raise PeerError(f"{name}: takes tables of blocks of {BLOCK} here, got {problem.block}")
    torch.compiler.reset()  # so that no case runs what the many cases before it left to be recompiled
    query, key, value = problem.inputs
    length, inside = query.shape[2], _inside(problem)
    bias = None if problem.key_bias is None else problem.key_bias.detach()
    group = problem.group

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[b, h // group, k]

    create = torch.compile(flex_attention.create_block_mask)
    batch, heads, _ = problem.mask.shape if isinstance(problem.mask, dmattn.IntervalMask) else (1, 1, 1)
    sizes = (batch if batch > 1 else None, query.shape[1] if heads > 1 else None)

    def build() -> Any:
        return None if inside is None else create(inside, *sizes, length, length, device=query.device.type)

    mask = build()
    compiled = _compiled(flex_attention.flex_attention)
    options = {"score_mod": score} if bias is not None else {}

    def attend() -> Tensor:
        out: Tensor = compiled(query, key, value, block_mask=mask, enable_gqa=group > 1, **options)
        return out

    return Call("flex_attention, compiled", attend, problem.inputs, masked=True, build=build)


def _inside(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """The mask as FlexAttention's function of indices."""
    if problem.visible_at is not None:
        see = problem.visible_at
        return lambda b, h, q, k: see(q, k)
    if not isinstance(problem.mask, dmattn.IntervalMask):
        return (lambda b, h, q, k: k <= q) if problem.is_causal else None
    length, heads = problem.key.shape[2], problem.query.shape[1]
    start, end = (bound.expand(-1, -1, length) for bound in (problem.mask.start, problem.mask.end))

    def at(bound: Tensor, b: Tensor, h: Tensor, k: Tensor) -> Tensor:
        """Indexed by tensors alone, because torch 2.10 takes no numbers among them."""
        batches, rows = bound.shape[:2]
        if batches == rows == 1:
            return bound[0, 0][k]
        row = h // (heads // rows)
        return bound[b, row, k] if batches > 1 else bound[0][row, k]

    return lambda b, h, q, k: (at(start, b, h, k) <= q) & (q < at(end, b, h, k))


def _flex_blocks(problem: Problem, table: Tensor) -> Call:
    """All its blocks are full ones, so it evaluates no mask inside them: the fastest way it has for a table of blocks."""
    query, key, value = problem.inputs
    compiled, inside, current = _compiled_flex(tuple(table.shape), table.device)
    current.copy_(table)

    def build() -> object:
        counts = table.sum(-1, dtype=torch.int32)
        indices = table.int().argsort(dim=-1, descending=True, stable=True).int()
        partial = torch.zeros_like(counts), torch.zeros_like(indices)
        return flex_attention.BlockMask.from_kv_blocks(
            *partial, counts, indices, BLOCK_SIZE=BLOCK, mask_mod=inside, seq_lengths=(query.shape[2], key.shape[2])
        )

    mask = build()

    def attend() -> Tensor:
        out: Tensor = compiled(query, key, value, block_mask=mask)
        return out

    return Call("flex_attention, compiled", attend, (query, key, value), masked=True, build=build)


@cache
def _compiled_flex(shape: tuple[int, ...], device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Tensor]:
    """One compiled function and one mask function for each shape of table: another density must not compile again."""
    current = torch.zeros(shape, dtype=torch.bool, device=device)

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return current[0, h, q // BLOCK, k // BLOCK]

    return _compiled(flex_attention.flex_attention), inside, current


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for a call whose backward is timed many times over: compiled with the defaults it may run once, because it gives the
    memory of what forward saved away."""
    functorch_config.donated_buffer = False
    compiled: Callable[..., Any] = torch.compile(call, dynamic=False)
    return compiled


# Other libraries ------------------------------------------------------------------------------------------------------------------


def _flash_attn(name: str, problem: Problem) -> Call:
    """FlashAttention-3 or -4: [B, S, H, D], grouped heads as they are."""
    function = importlib.import_module(PACKAGES[name]).flash_attn_func
    options: dict[str, Any] = {"causal": problem.is_causal}
    if problem.window is not None:
        options["window_size"] = (problem.window - 1, 0)

    def attend() -> Tensor:
        results = function(*(given.transpose(1, 2) for given in problem.inputs), **options)
        out: Tensor = results[0] if isinstance(results, tuple) else results
        return out.transpose(1, 2)

    title = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}[name]
    return Call(title, attend, problem.inputs, masked=problem.window is not None or problem.mask is None)


def _flashinfer(name: str, problem: Problem) -> Call:
    """One sequence [S, H, D]; it has no backward pass."""
    if problem.query.shape[0] > 1:
        raise PeerError(f"{name}: takes one sequence, got {problem.query.shape[0]}")
    function = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    query, key, value = (given.detach()[0].transpose(0, 1) for given in problem.inputs)

    def attend() -> Tensor:
        out: Tensor = function(query, key, value, causal=problem.is_causal)
        return out.transpose(0, 1)[None]

    return Call("FlashInfer", attend, (), masked=problem.mask is None)
