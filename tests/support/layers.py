"""Layers whose options are written flat: fields of a recipe beside those of the Doge model, arguments of the layer, its attributes."""

from __future__ import annotations

import dataclasses

from dmattn.nn import DynamicMaskAttention, ScoreRecipe

FIELDS = {field.name for field in dataclasses.fields(ScoreRecipe)}


def layer_with(*sizes, **options):
    fields = {name: options.pop(name) for name in FIELDS & options.keys()}
    attributes = {name: options.pop(name) for name in {"softcap", "partial_rotary_factor"} & options.keys()}
    layer = DynamicMaskAttention(*sizes, recipe=ScoreRecipe.doge(**fields), **options)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer
