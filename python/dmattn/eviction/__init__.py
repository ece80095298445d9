"""Eviction is an interval: policies that drop keys from a cache, the masks that they are in training, and the caches that they bound."""

from dmattn.eviction.cache import EvictionCache
from dmattn.eviction.lifetimes import decisions, interval_of, lifetimes
from dmattn.eviction.pages import OutOfPagesError, PagedCache, PagePool
from dmattn.eviction.policy import H2O, TOVA, ExpectedAttention, Gated, KeyNorm, Policy, Scored, Seen, SnapKV, Streaming

__all__ = [
    "H2O",
    "TOVA",
    "EvictionCache",
    "ExpectedAttention",
    "Gated",
    "KeyNorm",
    "OutOfPagesError",
    "PagePool",
    "PagedCache",
    "Policy",
    "Scored",
    "Seen",
    "SnapKV",
    "Streaming",
    "decisions",
    "interval_of",
    "lifetimes",
]
