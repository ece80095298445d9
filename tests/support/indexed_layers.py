"""Layers whose queries choose, with an indexer that tells keys apart; options are fields of a recipe beside arguments of the layer."""

from __future__ import annotations

import dataclasses

import torch
from dmattn.nn import IndexedAttention, IndexRecipe

RECIPES = [
    {},
    {"groups": 1, "block_size": 4},
    {"block_size": 4, "block_score": "mean_key", "sink_keys": 2},
    {"local_heads": 0, "recency": None, "sink_keys": 1, "conv": 5},
    {"local": 0, "rope_theta": None, "conv": 1},
    {"window": 0, "sink_keys": 2, "softcap": 3.0},
]
FIELDS = {field.name for field in dataclasses.fields(IndexRecipe)}


def layer_of(dtype=torch.float64, **options):
    """A layer whose indexer tells keys apart."""
    torch.manual_seed(0)
    fields = {name: options.pop(name) for name in FIELDS & options.keys()}
    softcap = options.pop("softcap", 0.0)
    sizes = {"window": 8, "num_kv_heads": 4, "head_dim": 8, "local": 3, "dtype": dtype, **options}
    layer = IndexedAttention(
        32, 8, recipe=IndexRecipe(**{"index_heads": 2, "index_dim": 8, "local_heads": "half", **fields}), **sizes
    )
    layer.softcap = softcap
    return layer
