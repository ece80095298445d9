"""DTensors: whatever way batches and heads are distributed to ranks, results and gradients are those of whole tensors."""

from __future__ import annotations

import re

import dmattn
import pytest
import rank_sharding
import torch
from dmattn import sharding
from dmattn.testing import strategies
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

LAYOUTS = [("batch",), ("heads",), ("none",)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_compute_what_one_does(device_ranks, layout):
    device_ranks.run("rank_sharding:attend", [([layout], list(rank_sharding.CASES))] * 2)


@pytest.mark.slow
def test_a_mesh_of_two_dimensions(device_ranks):
    """Four ranks distribute batches along one dimension and heads along the other, or either along both."""
    if device_ranks.size < 4:
        pytest.skip("four ranks")
    layouts = [("batch", "heads"), ("heads", "batch"), ("none", "heads"), ("batch", "batch")]
    device_ranks.run("rank_sharding:attend", [(layouts, ["top-k", "rows of heads, key_bias", "sinks"])] * 4)


@pytest.mark.slow
def test_more_ranks_than_key_heads(device_ranks):
    device_ranks.run("rank_sharding:attend_with_few_key_heads", [()] * device_ranks.size)


@pytest.mark.slow
def test_partial_sums_decoding_packing_and_ops(device_ranks):
    device_ranks.run("rank_sharding:attend_to_sums", [()] * 2)
    device_ranks.run("rank_sharding:run_other_functions", [()] * 2)


@pytest.mark.slow
def test_reductions(device_ranks):
    device_ranks.run("rank_sharding:reduce", [()] * 2)


@pytest.mark.slow
def test_compiled_calls(device_ranks):
    device_ranks.run("rank_sharding:attend", [(LAYOUTS[:2], ["top-k", "top-k in documents"], True)] * 2)


@pytest.mark.slow
def test_dropout(device_ranks):
    device_ranks.run("rank_sharding:drop", [()] * 2)


BAD = {
    "sequence": r"ValueError: query: expected Shard\(0\) \(batch\), Shard\(1\) \(heads\) or Replicate\(\) on dimension 'tp' of its mesh, got "
    r"Shard\(dim=2\); dmattn.distributed.context_parallel_attention computes with a sequence that ranks share$",
    "sequence of keys": r"ValueError: key: expected .* got Shard\(dim=2\); dmattn.distributed.context_parallel_attention",
    "sequence of scores": r"ValueError: scores: expected .* got Shard\(dim=2\); dmattn.distributed.context_parallel_attention",
    "head size": r"ValueError: query: expected .* got Shard\(dim=3\)$",
    "groups": r"ValueError: query: expected numbers of heads that 2 ranks can share by whole groups, got H=6, Hkv=3$",
    "pages": r"ValueError: key_cache: expected Shard\(2\) \(heads\) or Replicate\(\) on dimension 'tp' of its mesh, got Shard\(dim=0\)$",
    "two meshes": "ValueError: query, key, value: expected DTensors of one mesh, got",
    "bool mask": "TypeError: mask: expected a plain tensor, the same on all ranks, got a DTensor",
    "cache": r"TypeError: BoundedCache.attend: expected plain tensors, got a DTensor: give this rank's part, tensor.to_local\(\)$",
    "queries of the loss": r"TypeError: score_loss: expected plain tensors, got a DTensor: give this rank's part, tensor.to_local\(\)$",
    "scores of the loss": r"TypeError: score_loss: expected plain tensors, got a DTensor: give this rank's part, tensor.to_local\(\)$",
}  # fmt: skip


@pytest.mark.slow
def test_what_no_rank_could_compute_alone_is_refused(device_ranks):
    for answers in device_ranks.run("rank_sharding:refused", [()] * 2):
        assert answers.keys() == BAD.keys()
        for name, message in BAD.items():
            assert re.match(message, answers[name]), f"{name}: {answers[name]}"


def test_the_first_of_two_ranks_computes_its_batch():
    """In one process, whose group sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensors = [strategies.random_tensor((2, heads, 20, 8), heads) for heads in (4, 2, 1)]
        query, key, value = tensors[0], tensors[1], tensors[1].flip(2)
        own = [DTensor.from_local(given[:1], mesh, [Shard(0)]) for given in (query, key, value, key[..., 0])]
        expected = dmattn.dynamic_mask_attention(query, key, value, key[..., 0], 4, local=3, sink_keys=1)
        out = dmattn.dynamic_mask_attention(*own, 4, local=3, sink_keys=1)
        assert torch.equal(out.to_local(), expected[:1])
        for bias in (tensors[2][..., 0], tensors[2][:1, :, :, 0]):
            out = dmattn.attention(*own[:3], key_bias=bias)
            assert torch.equal(out.to_local(), dmattn.attention(query, key, value, key_bias=bias)[:1])
    finally:
        torch.distributed.destroy_process_group()


def test_softplus_of_dtensors_is_that_of_torch():
    """The function itself takes plain tensors, too. torch's is the identity above 20."""
    x = torch.tensor([-1000.0, -20.0, -1.0, 0.0, 1.0, 19.9, 20.1, 1000.0], dtype=torch.float64, requires_grad=True)
    ours, expected = sharding.softplus(x), torch.nn.functional.softplus(x)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_dmattn_leaves_dtensors_unloaded(run_python):
    """The import of torch.distributed.tensor takes seconds, and a call with plain tensors does not need it."""
    call = "x = torch.randn(1, 1, 4, 8); dmattn.attention(x, x, x)"
    program = f"import sys, torch, dmattn; {call}; print('torch.distributed.tensor' in sys.modules)"
    finished = run_python("-c", program)
    assert finished.stdout.strip() == "False", finished.stderr
