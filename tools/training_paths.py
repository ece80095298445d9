"""Trains one small model by different kernels and compares how it learns.

    PYTHONPATH=benchmarks python tools/training_paths.py --output curves.json

On a Hopper GPU: its kernels, the portable ones, and the reference.

Every path trains with the same seeds of parameters and of the text, which repeats itself with errors. Models are bfloat16 and drop no
weights; their layers select keys by scores and by lists in turn. A curve has the mean loss of each 100 steps. Ends with 1 if the mean
curves of two paths are further apart than the curves of two seeds of one path.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import dmattn
import torch
from bitwise_training import SYMBOLS, WIDTH, Layer
from dmattn import reference
from dmattn_bench.records import provenance
from dmattn_bench.rows import to_json
from torch import Tensor, nn

PATHS = {"hopper": {"DMATTN_FAMILY": "auto"}, "portable": {"DMATTN_FAMILY": "sm80"}, "reference": {}, "cpu": {}}
PERIOD, ERRORS = 7, 0.1  # of the text, in symbols; the part of it that is drawn anew
Curves = dict[str, list[list[float]]]  # of each path, for each seed


def by_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: dmattn.IntervalMask | dmattn.IndexMask, **options: object
) -> Tensor:
    """What stands for ``dmattn.attention`` in the reference's runs."""
    visible = mask.to_bool(query.shape[2], key.shape[2])
    return reference.attention(query, key, value, visible, key_bias=options["key_bias"], is_causal=True)[0]


class Model(nn.Module):
    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer(("selected", "listed")[n % 2]) for n in range(layers))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.symbols(tokens) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, None, None)
        return self.head(hidden)


def text(length: int, generator: torch.Generator) -> Tensor:
    """Two sequences [2, length + 1]."""
    period = torch.randint(SYMBOLS, (2, PERIOD), generator=generator)
    tokens = period.repeat(1, length // PERIOD + 1)[:, : length + 1]
    drawn = torch.randint(SYMBOLS, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < ERRORS, drawn, tokens)


def curve(path: str, seed: int, steps: int, layers: int, length: int, every: int) -> list[float]:
    """The mean loss of every so many steps, by the kernels that this process has."""
    torch.manual_seed(seed)
    device, dtype = ("cpu", torch.float32) if path == "cpu" else ("cuda", torch.bfloat16)
    if path == "reference":
        dmattn.attention = by_reference
    model = Model(layers, length).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        tokens = text(length, generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).view(-1, every).mean(1).tolist()


def distances(curves: Curves) -> dict[str, float]:
    """The largest distance, at any time, of the mean curves of two paths, and of two seeds of one path."""
    paths = [torch.tensor(of_seeds) for of_seeds in curves.values()]
    pairs = list(itertools.combinations((path.mean(0) for path in paths), 2))
    return {
        "between_paths": max((float((one - other).abs().max()) for one, other in pairs), default=0.0),
        "between_seeds": max(float((path.amax(0) - path.amin(0)).max()) for path in paths),
    }


def side_by_side(options: argparse.Namespace) -> Curves:
    """All runs in processes of their own, spread over the GPUs."""
    runs = list(itertools.product(options.paths, range(options.seeds)))
    given = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "length", "every")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # a child imports what this process can
    gpus = (visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]) or [""]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--run", path, str(seed), *given], stdout=subprocess.PIPE, text=True,
            env={**environment, **PATHS[path], "CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]},
        )
        for number, (path, seed) in enumerate(runs)
    ]  # fmt: skip
    curves: Curves = {path: [] for path in options.paths}
    for (path, _), child in zip(runs, children, strict=True):
        said, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"{path}: expected a run that ends with 0, got {child.returncode}")
        curves[path].append(json.loads(said.splitlines()[-1]))
    return curves


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", default=["hopper", "portable", "reference"], choices=list(PATHS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        print(
            json.dumps(curve(options.run[0], int(options.run[1]), options.steps, options.layers, options.length, options.every))
        )
        return 0
    curves = side_by_side(options)
    found = distances(curves)
    print(json.dumps(found))
    if options.output:
        sizes = {name: getattr(options, name) for name in ("steps", "every", "layers", "length", "seeds")}
        rounded = {path: [[round(x, 4) for x in one] for one in of_seeds] for path, of_seeds in curves.items()}
        device = "cpu" if options.paths == ["cpu"] else "cuda"
        options.output.write_text(to_json({**provenance(device), **sizes, **found, "curves": rounded}))
    return int(found["between_paths"] > found["between_seeds"])


if __name__ == "__main__":
    sys.exit(main())
