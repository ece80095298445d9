"""Trains a small byte-level language model that learns which keys to keep, beside dense and sliding ones, and exports it: ``make demo``."""

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

from comparison import compare, readable  # noqa: E402
from model import ByteModel, generate, loss_of  # noqa: E402
from plots import plot_lifetimes, plot_loss  # noqa: E402
from text import HELD_OUT, PIECES, read_text, sample, split, tiled  # noqa: E402


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    window: int  # best keys that half of the heads see beside the last ones
    local: int  # last keys that all heads see
    length: int  # bytes in a training stretch
    batch: int
    steps: int
    generated: int  # bytes written after each prompt
    compared: tuple[int, int]
    repeats: int


FULL = Size(4, 192, 4, 2, 192, 32, 512, 8, 240, 160, (2048, 8192), 5)
SHORT = Size(2, 128, 4, 2, 96, 16, 256, 8, 40, 40, (1024, 2048), 5)
PROMPTS = (b"The statement ", b"If the object is ", b"A function can ")
TEMPERATURE = 0.6
PEAK_RATE = 3e-3
SEED = 0
COMPILED = torch.compile(loss_of, fullgraph=True)  # three models of one shape share its graphs


def main() -> None:
    options = parse()
    size = SHORT if options.short else FULL
    if options.steps is not None:
        size = size._replace(steps=options.steps)
    began = time.perf_counter()
    torch.manual_seed(SEED)
    device = usable_device()

    heading(1, "The text")
    name, text = read_text(options.text, smallest=HELD_OUT * (size.length + 1) + PIECES)
    train_data, held_data = split(text)
    print(f"{name}: {len(train_data):,} bytes to train on, {len(held_data):,} held out (every {HELD_OUT}th piece)")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output {options.output}: cannot be made a folder ({error.strerror or error})") from None

    heading(2, "The model")

    def fresh() -> ByteModel:
        torch.manual_seed(SEED)
        return ByteModel(size.layers, size.width, size.heads, size.kv_heads, size.window, size.local).to(device)

    model = fresh()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{size.layers} layers, width {size.width}, {size.heads} heads on {size.kv_heads} key heads, {parameters / 1e6:.1f} M parameters"
    )
    print(
        f"stretches of {size.length} bytes; every query sees the last {size.local} keys, half of the heads also the {size.window} best before;"
    )
    print(f"{size.local + size.window // 2} keys a head on average; device {device}")

    heading(3, "Training")
    trained = train(model, size, train_data, held_data, device, teach=True)
    model.eval()
    peers = {}
    for name, window in (("dense: every key before", size.length), ("sliding: as many last keys", size.window)):
        print(f"\nThe same model for the same time, {name}")
        peers[name] = train(fresh(), size, train_data, held_data, device, window=window, seconds=trained.seconds)
    print(f"\nAfter {trained.seconds:.0f} s of computing each, held out bits per byte:")
    for name, one in {"the keys that scores keep": trained, **peers}.items():
        print(f"  {name:28}{one.held_out[-1][1]:6.3f}   {len(one.losses):4d} steps")
    plot_loss(options.output / "loss.png", trained.losses, trained.held_out, {name: one.held_out for name, one in peers.items()})

    heading(4, "What it writes")
    generator = torch.Generator().manual_seed(SEED)
    for prompt in PROMPTS:
        written = generate(model, prompt, size.generated, size.length, TEMPERATURE, generator)
        print("\n".join("  | " + line for line in written.decode(errors="replace").splitlines() if line.strip()))

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


class Trained(NamedTuple):
    losses: list[float]  # bits per byte of every step
    held_out: list[tuple[int, float]]  # after some steps
    seconds: float  # of training alone; on a CPU those that the process computes, which other processes do not lengthen


def train(
    model: ByteModel,
    size: Size,
    train_data: Tensor,
    held_data: Tensor,
    device: torch.device,
    *,
    window: int | None = None,
    teach: bool = False,
    seconds: float | None = None,
) -> Trained:
    """For the size's steps, or for some seconds.

    With ``window`` as long as the stretches every query sees all keys. Scores that are never taught stay equal, so recency alone ranks keys
    and the window slides: the two peers differ from the model in the keys they see, and in nothing else.
    """
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    warm_up = max(1, min(30, size.steps // 5))

    def rate(step: int, progress: float) -> float:
        return min(1.0, (step + 1) / warm_up) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))

    def losses_on(data: Tensor) -> tuple[Tensor, Tensor]:
        tokens = sample(data, size.batch, size.length + 1, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses: tuple[Tensor, Tensor] = COMPILED(model, tokens, window, teach)
        return losses

    held_batches = [sample(held_data, size.batch, size.length + 1, torch.Generator().manual_seed(i)).to(device) for i in range(4)]

    def held_out() -> float:
        with torch.no_grad():
            return sum(loss_of(model, tokens, window)[0].item() for tokens in held_batches) / len(held_batches) / math.log(2)

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = time.perf_counter()
    print("torch.compile(fullgraph=True): one graph forward, one backward ...", end=" ", flush=True)
    sum(losses_on(train_data)).backward()
    optimizer.zero_grad()
    print(f"ready in {time.perf_counter() - began:.0f} s")

    losses: list[float] = []
    held_losses = [(0, held_out())]
    tqdm.write(f"  step    0: held out {held_losses[0][1]:.2f} bits per byte")
    spent, reported = 0.0, 0
    bar = tqdm(total=100, unit="%", disable=None, leave=False)
    while reported < 5:
        began = clock()
        progress = spent / seconds if seconds else len(losses) / size.steps
        for group, full in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = full * rate(len(losses), progress)
        loss, score_loss = losses_on(train_data)
        (loss + score_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / math.log(2))
        spent += clock() - began
        reached = spent / seconds if seconds else len(losses) / size.steps
        bar.update(min(100, int(100 * reached)) - bar.n)
        if reached >= (reported + 1) / 5:
            recent = losses[held_losses[-1][0] :]
            held_losses.append((len(losses), held_out()))
            tqdm.write(
                f"  step {len(losses):4d}: train {sum(recent) / len(recent):.2f}, held out {held_losses[-1][1]:.2f} bits per byte"
            )
            reported = int(5 * reached + 1e-9)
    bar.close()
    print(f"{len(losses)} steps of {size.batch * size.length} bytes in {spent:.0f} s of computing")
    return Trained(losses, held_losses, spent)


def parameter_groups(model: ByteModel) -> list[dict[str, object]]:
    """Slopes of recency are few and have far to go, so they learn faster; vectors do not decay."""
    slopes = [p for name, p in model.named_parameters() if name.endswith("log_slope")]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 and not name.endswith("log_slope")]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": PEAK_RATE},
        {"params": others, "weight_decay": 0.0, "lr": PEAK_RATE},
        {"params": slopes, "weight_decay": 0.0, "lr": 3 * PEAK_RATE},
    ]


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
    windows, threads = f"window {size.window} + {size.local}", torch.get_num_threads()
    print(f"Attention of layer {layer + 1} on real text, {windows}, forward + backward, {threads} threads.")
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
        _, _, value = attention.projected(hidden)
        ends = attention.mask(attention.ranked(hidden, value)[0]).end[0].cpu()
        for head, end in enumerate(ends[attention.local_heads :], attention.local_heads):
            life = end.clamp(max=len(data)) - torch.arange(len(data))
            spread = life[: len(data) - size.window].float().std().item()
            if best is None or spread > best[0]:
                best = (spread, layer, head, end)
    assert best is not None
    _, layer, head, end = best
    life = end.clamp(max=len(data)) - torch.arange(len(data))
    plot_lifetimes(picture, end, bytes(data.tolist()), size.window, size.local, f"layer {layer + 1}, key head {head + 1}")
    kept = (end > len(data)).sum().item()
    print(
        f"Layer {layer + 1}, key head {head + 1}: of {len(data)} bytes {(life == size.local).sum().item()} are kept no longer ",
        end="",
    )
    print(f"than the last {size.local} always are, and {kept} are still alive at the end.")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torch.*")
    main()
