"""Compiles one step of generation ahead of time, caches and all, into step.pt2, and writes prompts with the answers expected of it.

The caches are state of the compiled program: each run takes one byte of every sequence in and writes them in place, so the program that runs
it keeps nothing but the text. See examples/aot_inductor/generate.cpp for one in C++.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from model import ByteModel
from torch import Tensor, nn

PROMPTS = (b"The statement ", b"If the object ")  # of one length


class Step(nn.Module):
    """tokens int64 [B, 1], fresh bool [B] -> logits [B, 256] of the byte that follows; a sequence that is fresh begins anew with this byte."""

    def __init__(self, model: ByteModel, batch: int) -> None:
        super().__init__()
        self.model, self.caches = model, model.new_caches(batch)

    def forward(self, tokens: Tensor, fresh: Tensor) -> Tensor:
        for cache in self.caches:
            cache.reset(fresh)
        return self.model.generate(tokens, self.caches)[:, -1]


@torch.no_grad()
def export(model: ByteModel, folder: Path, answered: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prompts = torch.tensor([list(prompt) for prompt in PROMPTS])
    step = Step(model, len(prompts))
    tokens = prompts[:, :1].contiguous()  # a compiled program takes inputs with the strides of its examples
    program = torch.export.export(step, (tokens, torch.ones(len(prompts), dtype=torch.bool)))
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "step.pt2"))
    # What is expected is computed with all tokens at once, without a cache.
    text = prompts
    for _ in range(answered):
        logits = model(text)[:, -1]
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
    torch.save([prompts, text[:, prompts.shape[1] :], logits], folder / "prompts.pt")
    print(f"{folder}: step.pt2, prompts.pt")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own, about torch's own code
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--weights", type=Path, help="weights.pt of the demo; default: an untrained model")
    parser.add_argument("--bytes", type=int, default=100, help="bytes of an expected answer (default 100)")
    parser.add_argument("--quick", dest="bytes", action="store_const", const=8, help="--bytes 8: does it run")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = ByteModel(1, 64, 4, 2, 48, 16) if options.weights is None else ByteModel.load(options.weights)
    export(model.eval(), options.folder, options.bytes)
