"""The one rule for combining tensors [B|1, H|Hkv|1, ...]: query heads of a group share their key head's row."""

from __future__ import annotations

from torch import Tensor

from dmattn import checks


def same_heads(a: Tensor, b: Tensor, name: str, like: str = "the other mask") -> tuple[Tensor, Tensor]:
    """Repeats the tensor with fewer heads (H and Hkv, where neither is 1), so that the two broadcast.

    Raises:
        ValueError: batches, heads or the other sizes do not go together, or the devices differ; names b by ``name`` and a by ``like``.
    """
    checks.same_device(name, b, a, like)
    more, fewer = max(a.shape[1], b.shape[1]), min(a.shape[1], b.shape[1])
    broadcast = fewer == more or 1 in (fewer, more)
    fits = a.dim() == b.dim() and (broadcast or (fewer > 0 and more % fewer == 0))
    others = zip((a.shape[0], *a.shape[2:]), (b.shape[0], *b.shape[2:]), strict=False)
    if not fits or not all(m == n or m == 1 or n == 1 for m, n in others):
        raise ValueError(f"{name}: expected a shape that broadcasts with {like} {checks.shape_of(a)}, got {checks.shape_of(b)}")
    return (a, b) if broadcast else (repeat_heads(a, more), repeat_heads(b, more))


def with_rank(given: Tensor, rank: int) -> Tensor:
    """A tensor with leading dimensions of 1, as many as are missing."""
    return given[(None,) * (rank - given.dim())] if given.dim() < rank else given


def repeat_heads(given: Tensor, heads: int) -> Tensor:
    """[B|1, Hkv, ...] as [B|1, heads, ...]; one head stays one, to be broadcast."""
    return given if given.shape[1] in (1, heads) else given.repeat_interleave(heads // given.shape[1], dim=1)
