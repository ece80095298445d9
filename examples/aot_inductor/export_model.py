"""Compiles dynamic-mask attention ahead of time into attention.pt2, and writes inputs with the outputs that are expected of it."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import dmattn
import torch
from torch import Tensor, nn

WINDOW = 64
LENGTHS = (200, 777)  # what the C++ program runs; the package is traced at neither


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> Tensor:
        out = dmattn.dynamic_mask_attention(query, key, value, scores, WINDOW)
        assert isinstance(out, Tensor)
        return out


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [2, 4, S, 32], key and value [2, 2, S, 32], scores [2, 2, S]."""
    generator = torch.Generator().manual_seed(length)
    draw = lambda *shape: torch.randn(2, *shape, generator=generator)  # noqa: E731
    return draw(4, length, 32), draw(2, length, 32), draw(2, length, 32), draw(2, length)


def export(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = Attention().eval()
    length = torch.export.Dim("length", min=2, max=1 << 20)
    names = ("query", "key", "value", "scores")
    program = torch.export.export(model, inputs(128), dynamic_shapes={name: {2: length} for name in names})
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "attention.pt2"))
    for length_now in LENGTHS:
        given = inputs(length_now)
        torch.save([*given, model(*given)], folder / f"case_{length_now}.pt")
    print(f"{folder}: attention.pt2, " + ", ".join(f"case_{n}.pt" for n in LENGTHS))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own, about torch's own code
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files go")
    export(parser.parse_args().folder)
