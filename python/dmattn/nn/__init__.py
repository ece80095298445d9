"""Layers: self-attention whose keys are chosen by a learned score, with what trains it (a loss, a schedule), and a home for a mask."""

from dmattn.masks.buffer import MaskBuffer
from dmattn.nn.attention import DynamicMaskAttention
from dmattn.nn.indexed import IndexedAttention
from dmattn.nn.indexed_cache import IndexedCache
from dmattn.nn.indexer import Indexer, IndexProjections
from dmattn.nn.mixed_cache import MixedCache
from dmattn.nn.multihead import MultiheadAttention
from dmattn.nn.recipe import IndexRecipe, ScoreRecipe
from dmattn.nn.rotation import rotate
from dmattn.nn.schedule import WindowSchedule
from dmattn.nn.scores import score_loss

__all__ = [
    "DynamicMaskAttention",
    "IndexProjections",
    "IndexRecipe",
    "IndexedAttention",
    "IndexedCache",
    "Indexer",
    "MaskBuffer",
    "MixedCache",
    "MultiheadAttention",
    "ScoreRecipe",
    "WindowSchedule",
    "rotate",
    "score_loss",
]
