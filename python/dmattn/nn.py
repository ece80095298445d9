"""Layers: multi-head self-attention whose keys are chosen by a learned score (the Doge model's attention), and a home for a mask."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.attention import dynamic_mask_attention, key_scores
from dmattn.masks import IntervalMask
from dmattn.masks.buffer import MaskBuffer as MaskBuffer
from dmattn.unsupported import scripting_refused


class DynamicMaskAttention(nn.Module):
    """Self-attention in which every query sees the ``window`` best-scored keys, beside the latest and the first ones if wanted; the scores are
    learned.

    Scores are ``exp(A * softplus(dt_proj(v)))``, one per key and key head. A starts at zero, as in the Doge model: at first all scores are
    equal, so the window slides; training lets it pick.

    Args:
        embed_dim: size E of the hidden states.
        num_heads: query heads H.
        window: keys each query selects at most; 0 is allowed with local or sink.
        num_kv_heads: key heads Hkv, a divisor of H; default H.
        head_dim: size D of a head, a multiple of 8 up to 256; default E / H.
        bias: whether the projections have biases.
        rope_theta: base of the rotary position embedding (Su et al., arXiv 2104.09864), None for none.
        is_causal: whether queries select among the keys up to their own position.
        local: latest keys that every query sees whatever their scores; only with is_causal.
        sink: first keys of each document that every query sees whatever their scores; only with is_causal.
        dropout: probability of dropping an attention weight while training.
        softcap: as in :func:`dmattn.attention`.
        device, dtype: of the parameters.

    Shape:
        hidden_states [B, S, E] -> [B, S, E].

    Raises:
        ValueError: sizes that do not divide, a window <= 0 without local and sink, or one of these without is_causal.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: int = 2048,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope_theta: float | None = 10000.0,
        is_causal: bool = True,
        local: int = 0,
        sink: int = 0,
        dropout: float = 0.0,
        softcap: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in sizes.items() if head_dim is None else (*sizes.items(), ("head_dim", head_dim)):
            checks.positive_int(name, size)
        checks.flag("bias", bias)
        checks.flag("is_causal", is_causal)
        checks.selection(window, local, sink, is_causal, "is_causal")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads={num_heads} when head_dim is not given, got {embed_dim}"
            )
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if head_dim % 8 or head_dim > checks.MAX_HEAD_DIM:
            raise ValueError(f"head_dim: expected a multiple of 8 up to {checks.MAX_HEAD_DIM}, got {head_dim}")
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.window, self.local, self.sink, self.is_causal, self.rope_theta = window, local, sink, is_causal, rope_theta
        if rope_theta is not None and checks.number("rope_theta", rope_theta, low=0.0) == 0:
            raise ValueError(f"rope_theta: expected None or a number > 0, got {rope_theta}")
        self.dropout = checks.number("dropout", dropout, low=0.0, high=1.0, open_high=True)
        self.softcap = checks.softcap(softcap)
        linear = partial(nn.Linear, bias=bias, device=device, dtype=dtype)
        kv_dim = num_kv_heads * head_dim
        self.q_proj = linear(embed_dim, num_heads * head_dim)
        self.k_proj = linear(embed_dim, kv_dim)
        self.v_proj = linear(embed_dim, kv_dim)
        self.dt_proj = linear(kv_dim, num_kv_heads)
        self.A = nn.Parameter(torch.zeros(num_kv_heads, device=device, dtype=dtype))
        self.o_proj = linear(num_heads * head_dim, embed_dim)

    def scores(self, value: Tensor) -> Tensor:
        """[B, Hkv, S, D] values to the scores [B, Hkv, S] of their keys."""
        return key_scores(value, self.dt_proj, self.A)

    def forward(self, hidden_states: Tensor, base: IntervalMask | None = None) -> Tensor:
        """hidden_states [B, S, E]; base: documents and/or padding, see :meth:`IntervalMask.top_k`."""
        checks.tensor("hidden_states", hidden_states)
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.embed_dim:
            raise ValueError(f"hidden_states: expected [B, S, E] with E={self.embed_dim}, got {checks.shape_of(hidden_states)}")
        query, key, value = (
            proj(hidden_states).unflatten(2, (heads, self.head_dim)).transpose(1, 2)
            for proj, heads in ((self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads))
        )
        if self.rope_theta is not None:
            query, key = (rotate(x, self.rope_theta) for x in (query, key))
        out = dynamic_mask_attention(
            query, key, value, self.scores(value), self.window, is_causal=self.is_causal, base=base, local=self.local, sink=self.sink,
            softcap=self.softcap, dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    __prepare_scriptable__ = scripting_refused  # torch.jit.script calls it first

    def extra_repr(self) -> str:
        beside = "".join(f", {name}={size}" for name, size in (("local", self.local), ("sink", self.sink)) if size)
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, window={self.window}{beside}"


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [B, H, S, D], D even: pairs (d, d + D/2) turn by ``position * theta ** (-2d / D)``."""
    half = x.shape[3] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
