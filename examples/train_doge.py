"""Trains a tiny Doge of transformers with dmattn's selection on the text of Python's help, and compares it with eager attention. One minute.

pip install . transformers        # in a checkout of dmattn
python examples/train_doge.py
"""

from __future__ import annotations

import copy

import torch
from dmattn.integrations.transformers import enable_dynamic_mask_attention
from tiny_transformers import SEED, arguments, bits_per_byte, in_turns, sizes, text, train, written
from transformers import DogeConfig, DogeForCausalLM


def main(given: list[str] | None = None) -> tuple[float, float, float]:
    """Returns bits per byte before and after training, and those of eager attention with the trained weights."""
    options = arguments(__doc__, given, steps=150, window=64)
    length, steps = (64, 4) if options.quick else (256, options.steps)
    window = 16 if options.quick else options.window
    train_data, held_data = text()
    torch.manual_seed(SEED)
    eager = DogeForCausalLM(DogeConfig(**sizes(options.quick), keep_window_size=window, attn_implementation="eager"))
    model = enable_dynamic_mask_attention(copy.deepcopy(eager), bounded_cache=True)

    print(f"{model.num_parameters():,} parameters; every query sees {window} of up to {length} keys")
    before = bits_per_byte(model, held_data, length)
    train(model, train_data, steps, length)
    after = bits_per_byte(model, held_data, length)
    print(f"bits per byte of held-out text: {before:.2f} before, {after:.2f} after")

    # The parameters are those of the model without dmattn, so the trained weights fit both.
    eager.load_state_dict(model.state_dict())
    by_eager = bits_per_byte(eager.eval(), held_data, length)
    print(f"with eager attention, which takes other keys where scores tie: {by_eager:.2f}")
    longer = 256 if options.quick else 2048
    tokens = held_data[None, :longer].long()

    def step_of(one: DogeForCausalLM) -> None:
        one.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    ours, theirs = in_turns(lambda: step_of(model), lambda: step_of(eager), repeats=1 if options.quick else 2)
    print(f"forward and backward of the whole model at {longer:,} tokens: {ours * 1e3:.0f} ms, eager {theirs * 1e3:.0f} ms")
    print(written(model.eval(), b"The statement ", 20 if options.quick else 120))
    return before, after, by_eager


if __name__ == "__main__":
    main()
