"""Swaps the attention of a Llama-like model of transformers for dmattn's: the same logits and tokens, and its time vs. SDPA's. Half a minute.

The model is a Mistral with random weights and a sliding window. SDPA computes all pairs of tokens and hides most of them; dmattn computes
those in the window alone.

pip install . transformers        # in a checkout of dmattn
python examples/swap_attention.py
"""

from __future__ import annotations

import torch
from dmattn.integrations.transformers import register
from tiny_transformers import SEED, arguments, in_turns, sizes, text
from transformers import MistralConfig, MistralForCausalLM


def main(given: list[str] | None = None) -> float:
    """Returns the largest difference of logits."""
    options = arguments(__doc__, given, length=2048, window=256)
    length, window = (256, 32) if options.quick else (options.length, options.window)
    name = register("dmattn")  # importing has done it already
    torch.manual_seed(SEED)
    model = MistralForCausalLM(MistralConfig(**sizes(options.quick), sliding_window=window)).eval()
    _, data = text()
    tokens = data[None, :length].long()
    padding = torch.ones_like(tokens)
    padding[:, : length // 8] = 0  # on the left

    def logits(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return model(input_ids=tokens, attention_mask=padding).logits[padding.bool()]

    difference = (logits(name) - logits("sdpa")).abs().max().item()
    print(f"{length:,} tokens, an eighth of them padding, window {window}: logits differ by at most {difference:.1e}")

    def made(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        return model.generate(
            input_ids=tokens[:, :100], attention_mask=padding.new_ones(1, 100), max_new_tokens=20, do_sample=False
        )

    same = torch.equal(made(name), made("sdpa"))
    print(f"generated tokens are {'the same' if same else 'not the same: two of them were equally likely up to rounding'}")

    def step(attention: str) -> None:
        model.set_attn_implementation(attention)
        model(input_ids=tokens, labels=tokens, attention_mask=padding, use_cache=False).loss.backward()
        model.zero_grad()

    ours, theirs = in_turns(lambda: step(name), lambda: step("sdpa"), repeats=1 if options.quick else 3)
    print(f"forward and backward of the whole model: dmattn {ours * 1e3:.0f} ms, SDPA {theirs * 1e3:.0f} ms")
    return difference


if __name__ == "__main__":
    main()
