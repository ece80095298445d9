"""Gives a model of x-transformers dmattn's attention: the same logits where the mask is causal, then a sliding window. Seconds on a CPU.

pip install x-transformers
python examples/with_x_transformers.py
"""

from __future__ import annotations

import argparse

import dmattn
import torch
from dmattn import FOREVER, IntervalMask
from torch import Tensor, nn
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
from x_transformers.attend import Attend, Intermediates

VOCABULARY, LENGTH = 32, 96
# What an Attend may be asked for that this one leaves to x-transformers.
OTHER_KINDS = ("sparse_topk", "head_learned_sink", "selective", "cope", "l2_distance", "add_zero_kv", "inverted_attention")


class SparseAttend(nn.Module):
    """In the place of an x-transformers ``Attend``: the last ``window`` keys of each query, all that are allowed by default."""

    def __init__(self, theirs: Attend, window: int | None = None) -> None:
        super().__init__()
        asked = [kind for kind in OTHER_KINDS if getattr(theirs, kind, None)]
        if asked:
            raise ValueError(f"theirs: expected plain softmax attention, got {', '.join(asked)}")
        self.causal, self.scale, self.window = theirs.causal, theirs.scale, window
        self.dropout = theirs.dropout if isinstance(theirs.dropout, float) else 0.0
        self.softcap = theirs.logit_softclamp_value if theirs.softclamp_logits else 0.0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None,
        causal: bool | None = None, **others: object,
    ) -> tuple[Tensor, Intermediates]:  # fmt: skip
        """q [B, H, Sq, D], k and v [B, Hkv, Sk, D], mask bool [B, 1, 1, Sk] or [B, Sk], True = may be seen."""
        asked = [name for name in ("prev_attn", "attn_delta", "flash_pack_seq_kwargs") if others.get(name) is not None]
        if asked:
            raise ValueError(f"{asked[0]}: expected None, got {type(others[asked[0]]).__name__}")
        if k.shape[1] not in (1, q.shape[1]):
            # Head h of x-transformers reads key head h % Hkv; dmattn's reads h // (H / Hkv).
            k, v = (each.repeat(1, q.shape[1] // k.shape[1], 1, 1) for each in (k, v))
        seen = None if self.window is None else IntervalMask.sliding_window(k.shape[2], self.window - 1, device=k.device)
        if mask is not None:
            keys = mask.reshape(mask.shape[0], 1, k.shape[2])
            real = IntervalMask(torch.zeros_like(keys, dtype=torch.int32), keys.to(torch.int32) * FOREVER)
            seen = real if seen is None else seen & real
        out = dmattn.attention(
            q, k, v, seen, bias=attn_bias, is_causal=self.causal if causal is None else causal, scale=self.scale,
            softcap=self.softcap, dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return out, Intermediates()


def use_dmattn(model: nn.Module, window: int | None = None) -> nn.Module:
    """Puts a ``SparseAttend`` in the place of every ``Attend``. The parameters stay as they are."""
    for parent in list(model.modules()):
        attend = getattr(parent, "attend", None)
        if isinstance(attend, Attend):
            parent.attend = SparseAttend(attend, window)
    return model


def make_model() -> AutoregressiveWrapper:
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, attn_kv_heads=2, rotary_pos_emb=True)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers))


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Compares, then trains with a window. Returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--quick", dest="steps", action="store_const", const=5, help="--steps 5: does it run")
    given = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    tokens = (start + 3 * torch.arange(LENGTH)) % VOCABULARY
    real = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (8, 1), generator=generator)
    theirs, ours = make_model().eval(), use_dmattn(make_model()).eval()
    with torch.no_grad():
        logits = [model.net(tokens, mask=real)[real] for model in (theirs, ours)]
    torch.testing.assert_close(logits[1], logits[0])
    print(f"causal and padded: the same logits, to {float((logits[0] - logits[1]).abs().max()):.1e}")

    model = use_dmattn(make_model(), given.window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(given.steps):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(f"window of {given.window}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {given.steps} steps")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
