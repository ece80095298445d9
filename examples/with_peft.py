"""Fine-tunes a Doge model by LoRA with peft: attention and the projection that scores keys learn through adapters. Seconds on a CPU.

pip install peft "transformers>=5.17"
python examples/with_peft.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from dmattn.integrations.transformers import enable_dynamic_mask_attention
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM

VOCABULARY, LENGTH = 64, 48


def base_model() -> DogeForCausalLM:
    """A tiny Doge model with random weights, the same in every call; yours comes from ``from_pretrained``. Its attention is dmattn's."""
    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        keep_window_size=16,
    )
    model = DogeForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.A.data.normal_()  # as in a trained model: while A is 0, all scores are equal and dt_proj learns nothing
    return enable_dynamic_mask_attention(model)


def batch(step: int) -> Tensor:
    """Sequences that count upwards, [4, LENGTH]."""
    start = torch.randint(0, VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(LENGTH)) % VOCABULARY


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Fine-tunes, saves the adapter, loads it into a new base model and merges it. Returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", dest="steps", action="store_const", const=5, help="--steps 5: does it run")
    given = parser.parse_args(arguments)

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "dt_proj"]  # dt_proj scores the keys
    model = get_peft_model(base_model(), LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for step in range(given.steps):
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for name, parameter in model.named_parameters():
        assert "dt_proj.lora_B" not in name or bool(parameter.any()), f"{name} did not learn"
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {given.steps} steps")

    model.eval()
    tokens = batch(0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base_model(), folder).eval()
        expected = model(input_ids=tokens).logits
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
        merged = loaded.merge_and_unload()
        made = merged.generate(tokens[:, :16], max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"adapter saved, loaded and merged; after {int(tokens[0, 15])} the model writes {made[0, 16:].tolist()}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
