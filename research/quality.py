"""Trains small language models that differ in their attention mask alone, and says which of them learn.

    python research/quality.py run text dynamic+local+sink --seed 1 --set visible=512 --set steps=3000 --output results.jsonl
    python research/quality.py jobs jobs.jsonl --limit 570 --output results.jsonl
    python research/quality.py table results.jsonl
    python research/quality.py keep a.jsonl b.jsonl --output benchmarks/results/nvidia-h200/quality.jsonl

A job is one line of JSON: {"task": "mqar", "variant": "taught+local", "seeds": [1, 2, 3], "visible": 256}; any setting may stand in it.
Settings, variants and their parts are in quality_model.py, tasks in quality_tasks.py. Equal seeds see equal batches, whatever the mask.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # where dmattn_bench is, if it is not installed
from dmattn_bench.quality_report import kept
from dmattn_bench.records import provenance
from quality_model import Model, Settings, variant
from quality_tasks import TASKS, Batch, Task, task_of

GRACE = 20  # seconds a run has to stop by itself
SYNC_EVERY = 10  # steps between two looks at the clock
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def settings_of(job: dict[str, Any]) -> Settings:
    """The defaults, then those of the task, then those of the variant, then the job's own.

    Raises:
        ValueError: an unknown task, variant or setting, or a value of another type or out of range.
    """
    types = {field.name: type(field.default) for field in dataclasses.fields(Settings)}
    for name, value in job.items():
        if name not in types:
            raise ValueError(f"settings: expected names among {', '.join(types)}, got {name!r}")
        if type(value) is int and types[name] is float:
            job = {**job, name: float(value)}
        elif type(value) is not types[name]:
            raise ValueError(f"{name}: expected {types[name].__name__}, got {value!r}")
    if job["task"] not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {job['task']!r}")
    chosen = {**TASKS[job["task"]], **job}
    heads = chosen.get("kv_heads") or chosen.get("heads", Settings.heads)
    of_variant = variant(chosen["variant"], chosen.get("visible", Settings.visible), heads)
    return Settings(**{**TASKS[job["task"]], **of_variant, **job})


# One run ---------------------------------------------------------------------------------------------------------------------------


class Run:
    """A model in training: its clock counts training alone, neither compilation nor evaluation."""

    def __init__(self, settings: Settings, device: str) -> None:
        self.settings, self.device = settings, device
        self.task: Task = task_of(settings, device)
        torch.manual_seed(settings.seed)
        self.model = Model(settings, self.task.vocabulary).to(device)
        self.optimizer = optimizer_of(self.model, settings)
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        splits = ("held", "near") if self.task.has_answers else ("held",)
        held = torch.Generator(device).manual_seed(1 << 20)  # the same for all seeds
        self.held = {split: [self.task.draw(held, split) for _ in range(settings.eval_batches)] for split in splits}
        self.teacher: Model | None = None
        self.replayed: dict[int | None, ReplayedStep] = {}  # by window
        self.untaught = settings.index_warm_up > 0  # whether the indexers learn only after the dense part
        self.step = 0
        self.spent = 0.0
        self.curve: list[dict[str, Any]] = []

    def train(self, stop_at: float) -> bool:
        """To the end, or to the moment `stop_at` of the clock; whether it came to the end."""
        s = self.settings
        self.warm_up()
        due = [(number + 1) / s.evaluations for number in range(s.evaluations)]
        losses: list[Tensor] = []
        began = self.now()
        while due:
            progress = self.progress(began)
            losses.append(self.one_step(progress))
            self.step += 1
            if self.step % SYNC_EVERY == 0 or (not s.seconds and self.step / s.steps >= due[0]):
                now = self.now()
                self.spent, began = self.spent + now - began, now
                reached = self.progress(began)
                if reached >= due[0]:
                    due = [part for part in due if part > reached]
                    self.curve.append(self.evaluated(torch.stack(losses).mean().item(), s.window_at(progress)))
                    losses = []
                    began = self.now()
            if time.time() > stop_at:
                return False
        return True

    def progress(self, began: float) -> float:
        s = self.settings
        return (self.spent + time.perf_counter() - began) / s.seconds if s.seconds else self.step / s.steps

    def now(self) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def one_step(self, progress: float) -> Tensor:
        s = self.settings
        warm = min(1.0, (self.step + 1) / s.warm_up)
        rate = warm * (s.lr_end + (1 - s.lr_end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["full_rate"]
        noise = s.noise * max(0.0, 1 - progress / s.noise_until) if s.noise else 0.0
        window = s.window_at(progress)
        if s.distill and window is not None and self.teacher is None:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        if self.untaught and window is not None:
            self.teach_indexers()
        batch = self.task.draw(self.generator, "train")
        loss = self.replayed[window](batch) if self.replayed else self.gradients(batch, window, noise)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.optimizer.step()
        if not self.replayed:  # a graph writes gradients, it does not add to them
            self.optimizer.zero_grad()
        return loss

    def gradients(self, batch: Batch, window: int | None, noise: float) -> Tensor:
        """The loss of a batch, whose gradients are added to those of the parameters."""
        loss, taught = self.loss(batch, window, noise)
        if self.untaught and window is None:
            loss.backward()
        else:
            (loss + self.settings.teach * taught).backward()
        return loss.detach()

    def teach_indexers(self) -> None:
        """Steps in which the indexers alone learn, while queries see all keys: the optimizer leaves alone what has no gradient."""
        for _ in range(self.settings.index_warm_up):
            self.loss(self.task.draw(self.generator, "train"), None, 0.0)[1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.untaught = False

    def loss(self, batch: Batch, window: int | None, noise: float) -> tuple[Tensor, Tensor]:
        """Mean loss of the targets the task asks for, plus that of the others times `text_weight`; and the scores' own loss."""
        losses, _, taught = self.forward(batch, window, noise, self.teacher)
        weights = torch.where(batch.asked, 1 / batch.asked.sum(), self.settings.text_weight / (~batch.asked).sum().clamp(min=1))
        return (losses * weights).sum(), taught

    def forward(
        self, batch: Batch, window: int | None, noise: float = 0.0, teacher: Model | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        level = torch.full((), noise, device=self.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device != "cpu"), sdpa_kernel(FASTEST, set_priority=True):
            result: tuple[Tensor, Tensor, Tensor] = self.model(batch.tokens, batch.targets, window, level, teacher)
        return result

    def warm_up(self) -> None:
        """Compiles everything that the run will need: dense steps, steps with windows, evaluation. Two windows make them dynamic."""
        s = self.settings
        windows: list[int | None] = [] if s.mask not in ("dynamic", "query", "gated") or not s.dense_until else [None]
        windows += [s.window] if not s.anneal_until else [s.window_at((s.dense_until + s.anneal_until) / 2), s.window]
        batch = self.task.draw(torch.Generator(self.device).manual_seed(0), "train")
        for window in windows:
            self.gradients(batch, window, s.noise)
            self.optimizer.zero_grad()
        self.evaluate("held", self.held["held"][:1])
        if s.replayed and self.device != "cpu":
            self.replayed = {window: ReplayedStep(self, batch, window) for window in windows}
        torch.manual_seed(s.seed)

    # Evaluation --------------------------------------------------------------------------------------------------------------------

    def evaluated(self, train_loss: float, window: int | None) -> dict[str, Any]:
        s = self.settings
        point = {"step": self.step, "seconds": round(self.spent, 3), "window": window, "train_bits": train_loss / math.log(2)}
        for split, batches in self.held.items():
            point |= self.evaluate(split, batches)
        if s.mask not in ("dense", "query"):
            point["coverage"] = self.coverage()
        return point

    @torch.no_grad()
    def evaluate(self, split: str, batches: list[Batch]) -> dict[str, float]:
        """Of the targets asked for: bits a token, those of the last half of the positions, the share that is guessed right, the share of
        answers that are right in all their symbols."""
        self.model.eval()
        bits, late, right, whole = [], [], [], []
        for batch in batches:
            losses, hits, _ = self.forward(batch, self.settings.window)
            bits.append(losses[batch.asked].mean())
            if self.task.has_answers:
                answers = hits[batch.asked].view(-1, self.task.group)
                right.append(answers.float().mean())
                if self.task.group > 1:
                    whole.append(answers.all(1).float().mean())
            else:
                late.append(losses[:, losses.shape[1] // 2 :].mean())
        self.model.train()
        lists = {"bits": bits, "bits_late": late, "accuracy": right, "answers": whole}
        found = {f"{split}_{name}": torch.stack(values).mean().item() for name, values in lists.items() if values}
        return {name: value / math.log(2) if "bits" in name else value for name, value in found.items()}

    @torch.no_grad()
    def coverage(self) -> list[list[float]]:
        """Per layer and head: the share of what late queries would attend to, if they saw all, that the mask shows."""
        attentions = [block.attention for block in self.model.blocks if block.attention.settings.mask != "dense"]
        self.model.eval()
        for attention in attentions:
            attention.watched = True
        with torch.compiler.set_stance("force_eager"):
            self.forward(self.held["held"][0], self.settings.window)
        for attention in attentions:
            attention.watched = False
        self.model.train()
        return [[round(share, 3) for share in attention.covered.tolist()] for attention in attentions]


class ReplayedStep:
    """A CUDA graph of the loss and gradients of a step. Gradients stay where they are, those of a step replace those before."""

    def __init__(self, run: Run, batch: Batch, window: int | None) -> None:
        self.batch = batch
        others = torch.cuda.Stream()
        others.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(others):  # what is allocated once, such as workspaces of matrix products
            for _ in range(2):
                run.gradients(batch, window, 0.0)
                run.optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(others)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = run.gradients(batch, window, 0.0)
        self.gradients = [(parameter, parameter.grad) for parameter in run.model.parameters()]
        run.optimizer.zero_grad()

    def __call__(self, batch: Batch) -> Tensor:
        for field in dataclasses.fields(batch):
            getattr(self.batch, field.name).copy_(getattr(batch, field.name))
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.loss.clone()


def optimizer_of(model: Model, s: Settings) -> torch.optim.AdamW:
    gates = [p for name, p in model.named_parameters() if name.endswith(("attention.scale", "log_slope"))]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2 and all(p is not gate for gate in gates)]
    groups = [
        {"params": matrices, "weight_decay": s.weight_decay, "full_rate": s.lr},
        {"params": others, "weight_decay": 0.0, "full_rate": s.lr},
        {"params": gates, "weight_decay": 0.0, "full_rate": s.lr * s.gate_lr},
    ]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=s.lr, betas=(0.9, s.beta2), fused=True)


def result_of(job: dict[str, Any], stop_at: float = math.inf) -> dict[str, Any]:
    """Trains as a job says; the result as it is written to the file."""
    settings = settings_of(job)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    trained = Run(settings, device)
    complete = trained.train(stop_at)
    tokens = trained.step * settings.batch * settings.length
    return {
        "name": settings.name or settings.variant,
        "complete": complete,
        "settings": dataclasses.asdict(settings),
        "about": trained.task.about,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "steps": trained.step,
        "seconds": trained.spent,
        "wall_seconds": time.perf_counter() - began,
        "tokens_per_second": tokens / max(trained.spent, 1e-9),
        "slopes": [block.attention.log_slope.exp().tolist() for block in trained.model.blocks] if settings.recency else None,
        "memory_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None,
        "curve": trained.curve,
        **provenance(device),
    }


def line_of(result: dict[str, Any]) -> str:
    last = result["curve"][-1] if result["curve"] else {}
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in last.items() if isinstance(value, float) and name != "seconds")
    clock = f"{result['steps']} steps in {result['seconds']:.1f} s ({result['wall_seconds']:.0f} s in all)"
    speed = f"{result['tokens_per_second'] / 1e3:.0f}k tokens/s" + ("" if result["complete"] else ", STOPPED")
    return f"{result['settings']['task']} {result['name']} seed {result['settings']['seed']}: {numbers}; {clock}, {speed}"


# Many runs -------------------------------------------------------------------------------------------------------------------------


def visible_gpus(count: int, visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES has to be for a run on each of this process's GPUs; one empty string where there is none."""
    return (visible.split(",") if visible else [str(gpu) for gpu in range(count)])[:count] or [""]


def jobs(options: argparse.Namespace) -> None:
    """Every job in a process of its own, on the GPU that is free next; what the time limit leaves is written to LEFT beside the output."""
    stop_at = time.time() + options.limit
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for line in options.file.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            job = json.loads(line)
            if not isinstance(job, dict) or not {"task", "variant"} <= job.keys() or not isinstance(job.get("seeds", []), list):
                raise ValueError(f"job: expected an object with task, variant and a list of seeds, got {line:.200}")
            for seed in job.pop("seeds", [job.get("seed", 1)]):
                settings_of({**job, "seed": seed})  # complains now, not after minutes
                waiting.put({**job, "seed": seed})
    longest: dict[str, float] = {}  # wall seconds of a job of a task
    left: list[dict[str, Any]] = []

    def work(gpu: str) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.time()
            if began + longest.get(job["task"], 0.0) > stop_at:
                left.append(job)
                continue
            command = [sys.executable, __file__, "run", job["task"], job["variant"], "--job", json.dumps(job), "--output",
                       str(options.output), "--stop-at", str(stop_at)]  # fmt: skip
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else None
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                said, _ = child.communicate(timeout=stop_at - began + GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
                said, _ = child.communicate()
                left.append(job)
            took = time.time() - began
            longest[job["task"]] = max(took, longest.get(job["task"], 0.0))
            shown = said.strip() if child.returncode else (said.strip().splitlines() or [""])[-1]
            print(f"[gpu {gpu or 'none'}, {took:.0f} s] {shown}", flush=True)

    gpus = visible_gpus(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus for _ in range(options.per_gpu)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not options.output.exists():
        print(f"no job has finished: {options.output} was not written")
    if left:
        path = options.output.with_name("left.jsonl")
        path.write_text("".join(json.dumps(job) + "\n" for job in left))
        print(f"{len(left)} jobs were not run for want of time: {path}")
    if options.output.exists():
        table(options.output)


# Tables ----------------------------------------------------------------------------------------------------------------------------


def table(path: Path) -> None:
    """Prints what finished runs came to: means over seeds, and the largest distance from the mean."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        s = result["settings"]
        budget = f"{s['seconds']:.0f} s" if s["seconds"] else f"{s['steps']} st"
        if result["complete"]:
            groups.setdefault((s["task"], s["length"], s["visible"], budget), []).append(result)
    for (task, length, visible, budget), found in groups.items():
        columns = [name for name in found[0]["curve"][-1] if name.startswith(("held", "near")) or name == "train_bits"]
        print(f"\n{task}, {length} tokens, {visible} visible, {budget}")
        print(f"{'':34}{'runs':>5}" + "".join(f"{name:>18}" for name in columns) + f"{'covered':>9}{'ktok/s':>8}{'seconds':>9}")
        by_name: dict[str, list[dict[str, Any]]] = {}
        for result in found:
            by_name.setdefault(result["name"], []).append(result)
        for name, runs in by_name.items():
            cells = ""
            for column in columns:
                values = [run["curve"][-1].get(column, math.nan) for run in runs]
                mean = statistics.fmean(values)
                cells += f"{mean:11.4f} ±{max(abs(value - mean) for value in values):.3f}"
            shares = [share for run in runs for layer in run["curve"][-1].get("coverage", [[1.0]]) for share in layer]
            speed = statistics.fmean(run["tokens_per_second"] for run in runs) / 1e3
            seconds = statistics.fmean(run["seconds"] for run in runs)
            print(f"{name:34}{len(runs):5}{cells}{statistics.fmean(shares):9.3f}{speed:8.0f}{seconds:9.1f}")


# Command line ----------------------------------------------------------------------------------------------------------------------


def assignment(given: str) -> tuple[str, Any]:
    name, _, value = given.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run", help="one run")
    one.add_argument("task", choices=list(TASKS))
    one.add_argument("variant", help='parts joined by "+", such as dynamic+local+recency; see quality_model.py')
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--set", type=assignment, action="append", default=[], metavar="NAME=VALUE", help="any setting")
    one.add_argument("--job", type=json.loads, default={}, help="settings as JSON")
    one.add_argument("--stop-at", type=float, default=math.inf, help="seconds since 1970 at which to stop, finished or not")
    many = verbs.add_parser("jobs", help="the runs of a file, spread over the visible GPUs")
    many.add_argument("file", type=Path)
    many.add_argument("--limit", type=float, default=1e6, help="seconds for all of them")
    many.add_argument("--per-gpu", type=int, default=1, help="runs at a time on one GPU; for small models")
    trimmed = verbs.add_parser("keep", help="finished runs in the form in which they are committed; replaces OUTPUT")
    trimmed.add_argument("files", type=Path, nargs="+")
    shown = verbs.add_parser("table", help="what finished runs came to")
    shown.add_argument("output", type=Path)
    for verb in (one, many, trimmed):
        verb.add_argument("--output", type=Path, default=Path("quality.jsonl"), help="file of JSON lines to add results to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.verb == "jobs":
        jobs(options)
    elif options.verb == "table":
        table(options.output)
    elif options.verb == "keep":
        runs = [json.loads(line) for path in options.files for line in path.read_text().splitlines()]
        options.output.write_text("".join(json.dumps(kept(run)) + "\n" for run in runs if run["complete"]))
    else:
        job = {"task": options.task, "variant": options.variant, "seed": options.seed, **options.job, **dict(options.set)}
        result = result_of(job, options.stop_at)
        with options.output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(line_of(result), flush=True)


if __name__ == "__main__":
    main()
