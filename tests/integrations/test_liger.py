"""Liger's fused layers beside dmattn's attention in one model. They are Triton kernels: Triton's interpreter runs two of them on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("liger_kernel")
pytest.importorskip("transformers")

# Prints the losses of three steps with each attention, without Liger's layers and with them.
PROGRAM = """
import json, torch
import dmattn.integrations.transformers
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def losses(attention):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 64, (2, 24))
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


plain = losses("dmattn")
apply_liger_kernel_to_llama(rope=True, swiglu=False, rms_norm=False, cross_entropy=False, fused_linear_cross_entropy=True)
print("LOSSES", json.dumps([plain, losses("dmattn"), losses("sdpa")]))
"""


@pytest.mark.long
def test_fused_layers_and_our_attention_do_not_meet(run_python):
    finished = run_python("-W", "ignore", "-c", PROGRAM, TRITON_INTERPRET="1")
    line = next((line for line in finished.stdout.splitlines() if line.startswith("LOSSES ")), None)
    assert line is not None, finished.stderr[-2000:]
    plain, ours, theirs = (torch.tensor(each) for each in json.loads(line.removeprefix("LOSSES ")))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(ours, theirs)
    assert ours[-1] < ours[0]
