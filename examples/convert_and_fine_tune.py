"""Trains a tiny Llama with dense attention, converts it to dynamic masks, fine-tunes, saves and loads it. On real text; a minute and a half.

With a real model the first step is ``from_pretrained``; the others stay as they are.

pip install . transformers        # in a checkout of dmattn
python examples/convert_and_fine_tune.py
"""

from __future__ import annotations

import copy
import tempfile

import torch
from dmattn.integrations.transformers import bounded_cache, convert, load_converted, set_window
from dmattn.nn import WindowSchedule
from tiny_transformers import SEED, arguments, bits_per_byte, sizes, text, train, written
from transformers import LlamaConfig, LlamaForCausalLM


def main(given: list[str] | None = None) -> dict[str, float]:
    """Returns bits per byte of held-out text by what was computed."""
    options = arguments(__doc__, given, steps=150, tuning=60)
    length = 64 if options.quick else 256
    steps, tuning = (4, 4) if options.quick else (options.steps, options.tuning)
    window, local, sink_keys = length // 8, length // 16, 2
    train_data, held_data = text()
    bits: dict[str, float] = {}

    def measure(name: str, model: LlamaForCausalLM) -> None:
        bits[name] = bits_per_byte(model, held_data, length)
        print(f"{name:46} {bits[name]:.3f} bits per byte")

    print(f"Dense attention, {length} keys:")
    torch.manual_seed(SEED)
    dense = LlamaForCausalLM(LlamaConfig(**sizes(options.quick)))
    train(dense, train_data, steps, length)
    measure("dense", dense.eval())

    # With a window as long as the text the converted model computes the same. Scores are taught by a loss of their own.
    settings = {"local": local, "sink_keys": sink_keys, "score": "linear", "select_only": True}
    model = convert(copy.deepcopy(dense), length, **settings)
    measure("converted, a window as long as the text", model.eval())
    measure("converted, window slides", set_window(model, window).eval())

    # First the scores learn from what attends to what, then the window falls.
    print(f"\nFine-tuning: {window} best keys with the last {local} and the first {sink_keys}:")
    schedule = WindowSchedule(window, length, dense_steps=tuning // 3, fall_steps=tuning // 3, multiple=8)
    train(model, train_data, tuning, length, 1e-3, before=lambda step: set_window(model, schedule(step)))
    measure("converted and fine-tuned", set_window(model, window).eval())

    print("\nThe same steps for the dense model, so that only attention differs:")
    train(dense, train_data, tuning, length, 1e-3)
    measure("dense, trained as long", dense.eval())

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load_converted(folder).eval()
    tokens = held_data[None, :length].long()
    with torch.no_grad():
        bits["difference after loading"] = (loaded(input_ids=tokens).logits - model(input_ids=tokens).logits).abs().max().item()
    print(f"\nsaved and loaded: logits differ by {bits['difference after loading']:.0e}")
    print(written(loaded, b"The statement ", 20 if options.quick else 120, past_key_values=bounded_cache(loaded)))
    return bits


if __name__ == "__main__":
    main()
