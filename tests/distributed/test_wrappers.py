"""torch's ways to shard a model: under each of them the layer gives what one process gives, out and gradients."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_data_parallelism(device_ranks):
    device_ranks.run("rank_wrappers:replicated", [()] * 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fully_sharded_data_parallelism_and_activation_checkpointing(device_ranks, compiled):
    device_ranks.run("rank_wrappers:fully_sharded", [(compiled,)] * 2)


def test_tensor_and_context_parallelism(device_ranks):
    device_ranks.run("rank_wrappers:in_chunks_with_tensor_parallelism", [((device_ranks.size // 2, 2),)] * device_ranks.size)


def test_fully_sharded_data_and_context_parallelism(device_ranks):
    device_ranks.run("rank_wrappers:in_chunks_fully_sharded", [((device_ranks.size // 2, 2),)] * device_ranks.size)


def test_distributed_checkpoints(device_ranks, tmp_path):
    device_ranks.run("rank_wrappers:saved_and_loaded", [(str(tmp_path),)] * 2)


def test_pipeline(device_ranks):
    device_ranks.run("rank_wrappers:in_stages", [()] * 2)
