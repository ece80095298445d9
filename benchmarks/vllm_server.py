"""Serves a tiny random model over HTTP by vLLM, with its own attention and with dmattn's, and compares tokens and speed.

    python benchmarks/vllm_server.py --output benchmarks/results

Runs in an environment that has vLLM and dmattn. 32 requests come at once, and 8 more that are aborted in the middle. Prompts are read in chunks.
On a CPU, where vLLM takes no backend by name, dmattn's takes the place of its own (DMATTN_VLLM_CPU=1).
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from dmattn_bench.records import provenance
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCABULARY, LONGEST, NEW_TOKENS, REQUESTS, ABORTED = 512, 1024, 48, 32, 8
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": LONGEST, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "sliding window": (MistralConfig, {"sliding_window": 50}),
    "softcap": (Gemma2Config, {"sliding_window": 64, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}),
    "sinks": (GptOssConfig, {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def save_model(folder: Path, kind: str = "llama") -> None:
    """Writes a model with random weights, and a tokenizer of the words w0, w1, ..."""
    make, more = CONFIGS[kind]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make(**SIZES, **more), dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(folder)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 5 to 700 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(5, 700))] for _ in range(count)]


@contextmanager
def server(folder: Path, ours: bool, log: Path) -> Iterator[tuple[int, psutil.Process]]:
    """A server's port and process. ours: with dmattn's backend."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny", "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(LONGEST), "--enforce-eager", "--max-num-seqs", "32",
        "--max-num-batched-tokens", "256", "--no-enable-prefix-caching",
    ]  # fmt: skip
    if ours and torch.cuda.is_available():
        command += ["--attention-backend", "CUSTOM"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DMATTN_VLLM_CPU": str(int(ours)),
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-3000:]}")
            try:
                if ask(port, "GET", "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.5)
        else:
            raise TimeoutError(f"the server did not answer: {log.read_text()[-3000:]}")
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def ask(port: int, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def complete(port: int, prompt: list[int]) -> list[int]:
    """The tokens that follow a prompt, the most likely one each time."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = json.loads(ask(port, "POST", "/v1/completions", {**body, "return_token_ids": True})[1])
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def abort(port: int, prompt: list[int]) -> int:
    """Begins to read an answer and hangs up. Returns how many pieces came before that."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            pieces = 0
            while pieces < 5 and (line := response.readline()):
                pieces += line.startswith(b"data: ")
    return pieces


def metric(port: int, name: str) -> float:
    """A gauge of the server."""
    text = ask(port, "GET", "/metrics")[1].decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M))


def send_all(port: int, with_aborts: bool) -> tuple[list[list[int]], list[int], float]:
    """All requests at once: their tokens, the pieces before each abort, and seconds."""
    with ThreadPoolExecutor(REQUESTS + ABORTED) as pool:
        begin = time.perf_counter()
        asked = [pool.submit(complete, port, prompt) for prompt in prompts_of(REQUESTS)]
        hung_up = [pool.submit(abort, port, prompt) for prompt in prompts_of(ABORTED, 1)] if with_aborts else []
        tokens = [each.result() for each in asked]
        seconds = time.perf_counter() - begin
        return tokens, [each.result() for each in hung_up], seconds


def cpu_seconds(process: psutil.Process) -> float:
    """What a server and its processes have used of the processors: other programs on the machine change it less than the time on the clock."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def what_is_left(port: int) -> dict[str, float]:
    """The server's gauges when all is quiet: an abort is noticed a little later."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    left = dict.fromkeys(names, 1.0)
    for _ in range(100):
        left = {name: metric(port, name) for name in names}
        if not any(left.values()):
            break
        time.sleep(0.1)
    return left


def compare(folder: Path, rounds: int, kind: str = "llama") -> dict[str, Any]:
    """Both backends on one model: the same tokens?, and how fast, in turns. The first round has aborts and is not timed."""
    save_model(folder / "model", kind)
    names = {"vllm": False, "dmattn": True}
    tokens, ways = {}, {}
    repeated = True
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(server(folder / "model", ours, folder / f"{name}.log")) for name, ours in names.items()
        }
        for name, (port, _) in servers.items():
            tokens[name], pieces, _ = send_all(port, with_aborts=True)
            ways[name] = {"pieces_before_abort": pieces, "left_behind": what_is_left(port), "seconds": [], "cpu_seconds": []}
        for _ in range(rounds):
            for name, (port, process) in servers.items():
                before = cpu_seconds(process)
                again, _, seconds = send_all(port, with_aborts=False)
                ways[name]["seconds"].append(round(seconds, 3))
                ways[name]["cpu_seconds"].append(round(cpu_seconds(process) - before, 3))
                repeated = repeated and again == tokens[name]
    for way in ways.values():
        way["generated_tokens_per_second"] = round(REQUESTS * NEW_TOKENS / statistics.median(way["seconds"]), 1)
    return {
        "model": kind, "requests": REQUESTS, "aborted": ABORTED, "rounds": rounds,
        "read_tokens": sum(map(len, prompts_of(REQUESTS))), "generated_tokens": REQUESTS * NEW_TOKENS,
        "same_tokens": sum(a == b for a, b in zip(tokens["vllm"], tokens["dmattn"], strict=True)), "same_tokens_every_round": repeated,
        "dmattn_attended": {name: "dmattn attends in" in (folder / f"{name}.log").read_text() for name in names},
        "ways": ways,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, help="folder for MACHINE/vllm.json; default: print only")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), given.rounds)
    result["load_average"] = os.getloadavg()  # both servers, and whoever else is on the machine
    installed = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    about = provenance("cuda" if torch.cuda.is_available() else "cpu")
    about["versions"] = {
        name: importlib.metadata.version(name) for name in ("vllm", "vllm-cpu", "transformers") if name in installed
    }
    text = json.dumps({**about, **result}, indent=1)
    print(text)
    if given.output is not None:
        given.output.joinpath(about["machine"]["name"]).mkdir(parents=True, exist_ok=True)
        given.output.joinpath(about["machine"]["name"], "vllm.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
