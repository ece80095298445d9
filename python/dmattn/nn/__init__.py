"""Layers: self-attention whose keys are chosen by a learned score, with what trains it (a loss, a schedule), and a home for a mask."""

from dmattn.masks.buffer import MaskBuffer as MaskBuffer
from dmattn.nn.attention import DynamicMaskAttention as DynamicMaskAttention
from dmattn.nn.indexed import IndexedAttention as IndexedAttention
from dmattn.nn.indexed_cache import IndexedCache as IndexedCache
from dmattn.nn.indexer import Indexer as Indexer
from dmattn.nn.indexer import IndexProjections as IndexProjections
from dmattn.nn.mixed_cache import MixedCache as MixedCache
from dmattn.nn.multihead import MultiheadAttention as MultiheadAttention
from dmattn.nn.recipe import IndexRecipe as IndexRecipe
from dmattn.nn.recipe import ScoreRecipe as ScoreRecipe
from dmattn.nn.rotation import rotate as rotate
from dmattn.nn.schedule import WindowSchedule as WindowSchedule
from dmattn.nn.scores import score_loss as score_loss
