"""vLLM's engine with dmattn's attention gives the tokens of its own backend: over HTTP, with aborts, and for other kinds of attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
import vllm_server
from dmattn import attention, eviction
from dmattn.integrations import vllm as plugin
from dmattn.integrations.vllm.backend import PagedBackend
from dmattn.integrations.vllm.evicting import policy_of
from transformers import AttentionInterface, AutoModelForCausalLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum

# An engine of its own, since a process chooses once. Prints the tokens of a few prompts.
ENGINE = """
import json, sys
import vllm_server
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_batched_tokens=128, enable_prefix_caching=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in vllm_server.prompts_of(6)] * 2
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    print("TOKENS", json.dumps([answer.outputs[0].token_ids for answer in answers]))
"""


def test_the_plugin_registers(monkeypatch):
    monkeypatch.delenv("DMATTN_VLLM_CPU", raising=False)
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is PagedBackend
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    monkeypatch.setenv("DMATTN_VLLM_CPU", "1")
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is PagedBackend
    AttentionBackendEnum.CPU_ATTN.clear_override()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_server_gives_the_same_tokens_with_aborts_in_the_middle(tmp_path):
    found = vllm_server.compare(tmp_path, rounds=1)
    assert found["dmattn_attended"] == {"vllm": False, "dmattn": True}
    assert found["same_tokens"] == found["requests"] == 32
    assert found["same_tokens_every_round"]
    for name in ("vllm", "dmattn"):
        assert min(found["ways"][name]["pieces_before_abort"]) == 5
        assert not any(found["ways"][name]["left_behind"].values())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sliding window", "softcap", "sinks"])
def test_engines_give_the_same_tokens(kind, tmp_path):
    vllm_server.save_model(tmp_path / "model", kind)
    script, tokens = tmp_path / "engine.py", []
    script.write_text(ENGINE)
    for ours in "01":
        path = str(Path(vllm_server.__file__).parent)
        more = {"DMATTN_VLLM_CPU": ours, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        finished = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "model")], env={**os.environ, **more}, capture_output=True, text=True
        )
        assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
        log = finished.stdout + finished.stderr
        assert ("dmattn attends in" in log) == (ours == "1")
        tokens.append(next(line for line in finished.stdout.splitlines() if line.startswith("TOKENS")))
    assert tokens[0] == tokens[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_server_evicts_as_lifetimes_say(tmp_path, monkeypatch):
    """Each token of 32 requests at once, some beside them aborted, is what the model says under the policy's masks."""
    monkeypatch.setenv("DMATTN_VLLM_EVICT", '{"policy": "H2O", "budget": 80, "every": 16, "local": 16, "floor": 0.5}')
    policy = policy_of()
    vllm_server.save_model(tmp_path / "model")
    with vllm_server.server(tmp_path / "model", True, tmp_path / "log") as (port, _):
        answers, pieces, _ = vllm_server.send_all(port, with_aborts=True)
        assert min(pieces) == 5
        assert not any(vllm_server.what_is_left(port).values())
        assert vllm_server.send_all(port, with_aborts=False)[0] == answers
    assert "dmattn evicts by H2O" in (tmp_path / "log").read_text()

    def evicted(module, query, key, value, attention_mask, scaling=None, **options):
        mask = None if is_dense else eviction.lifetimes(policy, query, key, value, scale=scaling)
        return attention(query, key, value, mask, is_causal=True, scale=scaling).transpose(1, 2), None

    AttentionInterface.register("evicted", evicted)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="evicted", dtype=torch.float32)
    same = {False: 0, True: 0}
    for prompt, answer in zip(vllm_server.prompts_of(len(answers)), answers, strict=True):
        for is_dense in same:
            with torch.no_grad():
                best = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].argmax(1)[len(prompt) - 1 : -1]
            same[is_dense] += int((best == torch.tensor(answer)).sum())
    total = sum(map(len, answers))
    assert same[False] == total > 2 * same[True]
