"""Trains a small byte-level language model with dynamic-mask attention, exports it, and compares with dense masks: ``make demo``."""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it announces a font cache on first use

import dmattn  # noqa: E402
from comparison import compare, readable  # noqa: E402
from model import ByteModel, generate, loss_of  # noqa: E402
from plots import plot_lifetimes, plot_loss  # noqa: E402
from text import HELD_OUT, read_text, sample, split, tiled  # noqa: E402


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    window: int  # keys a query sees
    length: int  # bytes in a training stretch, of which only `window` can be seen at once
    batch: int
    steps: int
    generated: int
    compared: tuple[int, int]
    repeats: int


FULL = Size(4, 192, 4, 2, 128, 512, 8, 300, 400, (2048, 8192), 3)
SHORT = Size(2, 128, 4, 2, 64, 256, 8, 40, 80, (1024, 2048), 3)
PEAK_RATE = 3e-3
SEED = 0


def main() -> None:
    options = parse()
    size = SHORT if options.short else FULL
    if options.steps is not None:
        size = size._replace(steps=options.steps)
    began = time.perf_counter()
    torch.manual_seed(SEED)
    device = usable_device()

    heading(1, "The text")
    name, text = read_text(options.text, smallest=math.ceil((size.length + 1) / HELD_OUT) + 1)
    train_data, held_data = split(text)
    print(f"{name}: {len(train_data):,} bytes to train on, the last {len(held_data):,} held out")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output {options.output}: cannot be made a folder ({error.strerror or error})") from None

    heading(2, "The model")
    model = ByteModel(size.layers, size.width, size.heads, size.kv_heads, size.window).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{size.layers} layers, width {size.width}, {size.heads} heads on {size.kv_heads} key heads, {parameters / 1e6:.1f} M parameters"
    )
    print(f"stretches of {size.length} bytes; each query attends to the {size.window} keys that score best; device {device}")

    heading(3, "Training")
    train_losses, held_losses = train(model, size, train_data, held_data, device)
    model.eval()
    plot_loss(options.output / "loss.png", train_losses, held_losses)

    heading(4, "What it writes")
    prompt = b"The statement "
    generator = torch.Generator().manual_seed(SEED)
    written = generate(model, prompt, size.generated, size.length, 0.7, generator)
    print("\n".join("  | " + line for line in written.decode(errors="replace").splitlines()))

    heading(5, "Export, save, load")
    package = options.output / "model.pt2"
    export_and_load(model, held_data, size.length, package)

    heading(6, "Beside a dense mask")
    print_comparison(model, train_data, size)

    heading(7, "Which keys a head keeps")
    picture = options.output / "lifetimes.png"
    draw_head(model, held_data[: size.length], size, picture)

    print(f"\nIn {options.output}/: loss.png, lifetimes.png, model.pt2. All in {time.perf_counter() - began:.0f} s.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file of your own (default: the topics of Python's help)")
    parser.add_argument("--steps", type=int, help=f"training steps (default {FULL.steps}, or {SHORT.steps} with --short)")
    parser.add_argument("--short", action="store_true", help="every step of the demo with a smaller model, in about a minute")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for pictures and the model")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps: expected at least 2, got {options.steps}")
    return options


def heading(number: int, title: str) -> None:
    print(f"\n{number}. {title}\n{'-' * (len(title) + 3)}", flush=True)


def usable_device() -> torch.device:
    """CUDA when both torch and this build of dmattn can compute attention there."""
    built = torch._C._dispatch_has_kernel_for_dispatch_key("dmattn::forward", "CUDA")
    return torch.device("cuda" if built and torch.cuda.is_available() else "cpu")


def train(
    model: ByteModel, size: Size, train_data: Tensor, held_data: Tensor, device: torch.device
) -> tuple[list[float], list[tuple[int, float]]]:
    """Bits per byte: of every step, and of the held-out text after some of them."""
    generator = torch.Generator().manual_seed(SEED)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    warm_up = max(1, min(30, size.steps // 5))

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, size.steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    compiled = torch.compile(loss_of, fullgraph=True)

    def loss_on(data: Tensor) -> Tensor:
        tokens = sample(data, size.batch, size.length + 1, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: Tensor = compiled(model, tokens)
        return loss

    held_batches = [sample(held_data, size.batch, size.length + 1, torch.Generator().manual_seed(i)).to(device) for i in range(4)]

    def held_out() -> float:
        with torch.no_grad():
            return sum(loss_of(model, tokens).item() for tokens in held_batches) / len(held_batches) / math.log(2)

    began = time.perf_counter()
    print("torch.compile(fullgraph=True): one graph forward, one backward ...", end=" ", flush=True)
    loss_on(train_data).backward()
    optimizer.zero_grad()
    print(f"compiled in {time.perf_counter() - began:.0f} s")

    losses: list[float] = []
    held_losses = [(0, held_out())]
    tqdm.write(f"  step    0: held out {held_losses[0][1]:.2f} bits per byte")
    every = max(1, size.steps // 6)
    bar = tqdm(range(1, size.steps + 1), unit="step", disable=None, leave=False)
    for step in bar:
        loss = loss_on(train_data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item() / math.log(2))
        bar.set_postfix_str(f"{losses[-1]:.2f} bits per byte")
        if step % every == 0 or step == size.steps:
            held_losses.append((step, held_out()))
            recent = losses[-every:]
            tqdm.write(
                f"  step {step:4d}: train {sum(recent) / len(recent):.2f}, held out {held_losses[-1][1]:.2f} bits per byte"
            )
    seconds = time.perf_counter() - began
    print(f"{size.steps} steps of {size.batch * size.length} bytes in {seconds:.0f} s")
    return losses, held_losses


def export_and_load(model: ByteModel, data: Tensor, length: int, package: Path) -> None:
    """Exports with a dynamic length, and fails unless the loaded program gives the model's logits at two other lengths."""
    device = model.head.weight.device
    example = tiled(data, length).to(device)
    dynamic = {"tokens": {1: torch.export.Dim("length", min=2, max=1 << 20)}}
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=dynamic), package)
    print(f"torch.export at length {length}, dynamic; saved {readable(package.stat().st_size)} to {package}")
    loaded = torch.export.load(package).module()
    for other in (length // 2 - 3, 2 * length + 5):
        tokens = tiled(data, other).to(device)
        with torch.no_grad():
            expected, got = model(tokens), loaded(tokens)
        torch.testing.assert_close(got, expected)
        print(f"loaded, at length {other:4d}: the same logits, largest difference {(got - expected).abs().max().item():.1e}")


def print_comparison(model: ByteModel, data: Tensor, size: Size) -> None:
    layer = size.layers - 1
    print(
        f"Attention of layer {layer + 1} on real text, window {size.window}, forward + backward, {torch.get_num_threads()} threads."
    )
    print("SDPA gets the same mask and score bias as a dense tensor, made beforehand.\n")
    print("  length   mask: ours    dense   time: ours      SDPA   faster   outputs differ by")
    for length in size.compared:
        tokens = tiled(data, length).to(model.head.weight.device)
        with torch.no_grad():
            hidden = model.attention_inputs(tokens, layer)
        row = compare(model.layers[layer].attention, hidden, size.repeats)
        times = f"{row.our_seconds * 1e3:8.1f} ms {row.dense_seconds * 1e3:6.0f} ms {row.dense_seconds / row.our_seconds:7.1f}x"
        print(
            f"{length:8d}{readable(row.our_bytes):>13}{readable(row.dense_bytes):>9}  {times}{row.difference:20.1e}", flush=True
        )


@torch.no_grad()
def draw_head(model: ByteModel, data: Tensor, size: Size, picture: Path) -> None:
    """Draws the head whose lifetimes differ the most, of all layers."""
    tokens = data.long()[None].to(model.head.weight.device)
    best: tuple[float, int, int, Tensor] | None = None
    for layer in range(size.layers):
        attention = model.layers[layer].attention
        hidden = model.attention_inputs(tokens, layer)
        value = attention.v_proj(hidden).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        ends = dmattn.IntervalMask.top_k(attention.scores(value), attention.window).end[0].cpu()
        for head, end in enumerate(ends):
            life = end.clamp(max=len(data)) - torch.arange(len(data))
            spread = life[: len(data) - size.window].float().std().item()
            if best is None or spread > best[0]:
                best = (spread, layer, head, end)
    assert best is not None
    _, layer, head, end = best
    life = end.clamp(max=len(data)) - torch.arange(len(data))
    plot_lifetimes(picture, end, bytes(data.tolist()), size.window, f"layer {layer + 1}, key head {head + 1}")
    kept = (end > len(data)).sum().item()
    print(
        f"Layer {layer + 1}, key head {head + 1}: of {len(data)} bytes {(life == 0).sum().item()} are never looked at, ", end=""
    )
    print(f"{kept} are still alive at the end.")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torch.*")
    main()
