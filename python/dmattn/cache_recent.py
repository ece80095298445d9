"""The rows of hidden states that a cache keeps for a layer that convolves them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dmattn import checks
from dmattn.unsupported import scripting_refused


class RecentRows(nn.Module):
    """The latest rows of hidden states of each sequence of a cache: what a convolution of ``size`` rows adds to the next tokens, also after
    ``most_back`` tokens were taken back.

    Args:
        batch_size, embed_dim: number of sequences B, and size E of a row.
        size: rows that the convolution adds up.
        most_back: tokens that can be taken back at most.
        counts: whether this counts how many tokens can be taken back: for a cache that keeps all keys, which does not count them.

    Attributes:
        rows: [B, N, E] with N = most_back + size - 1; the row of the token at position p lies in place p % N.
        kept: int32 [B], how many tokens can be taken back; None without ``counts``.
    """

    rows: Tensor
    kept: Tensor | None

    def __init__(
        self,
        batch_size: int,
        size: int,
        embed_dim: int,
        most_back: int,
        *,
        counts: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("rows", torch.zeros(batch_size, most_back + size - 1, embed_dim, device=device, dtype=dtype))
        self.register_buffer("kept", torch.zeros(batch_size, dtype=torch.int32, device=device) if counts else None)

    @property
    def most_back(self) -> int:
        """How many tokens can be taken back at most."""
        return self.rows.shape[1] - self.size + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(given.numel() * given.element_size() for given in self.buffers())

    def before(self, length: Tensor) -> Tensor:
        """[B, size - 1, E]: the last rows of sequences that have ``length`` [B] tokens; zeros in front of the first token."""
        position = length[:, None].long() + torch.arange(1 - self.size, 0, device=length.device)
        place = (position % self.rows.shape[1])[..., None].expand(-1, -1, self.rows.shape[2])
        return torch.where(position[..., None] >= 0, self.rows.gather(1, place), 0.0)

    @torch.no_grad()
    def take(self, hidden_states: Tensor, before: Tensor, after: Tensor) -> None:
        """Takes in the rows of tokens [B, T, E], real ones first, by which sequences grew from ``before`` [B] to ``after`` [B] tokens."""
        new, (_, places, size) = hidden_states.to(self.rows.dtype), self.rows.shape
        if new.shape[1] == 1:
            place = (before.long() % places)[:, None, None].expand(-1, 1, size)
            self.rows.scatter_(1, place, torch.where((after > before)[:, None, None], new, self.rows.gather(1, place)))
        else:
            last = after[:, None].long() - 1
            position = last - (last - torch.arange(places, device=last.device)) % places  # the latest of each place
            index = (position - before[:, None])[..., None]
            new = new.gather(1, index.clamp(0, new.shape[1] - 1).expand_as(self.rows))
            self.rows.copy_(torch.where(index >= 0, new, self.rows))
        if self.kept is not None:
            self.kept.add_(after - before).clamp_(max=self.most_back)

    def reorder(self, index: Tensor) -> None:
        """Sequence b gets what sequence ``index[b]`` has, int32 or int64 [B]."""
        for buffer in self.buffers():
            buffer.copy_(buffer.index_select(0, index))

    def reset(self, chosen: Tensor) -> None:
        """Makes the sequences empty for which ``chosen`` [B] is True."""
        for buffer in self.buffers():
            buffer.masked_fill_(chosen.view(-1, *[1] * (buffer.dim() - 1)), 0)

    def __getitem__(self, sequences: slice) -> RecentRows:
        """Those of some sequences, on the same memory."""
        checks.instance("sequences", sequences, slice, "a slice")
        return self._with({name: None if buffer is None else buffer[sequences] for name, buffer in self._buffers.items()})

    def empty(self, batch_size: int) -> RecentRows:
        """Those of so many new sequences, which have no tokens."""
        checks.positive_int("batch_size", batch_size)
        buffers = self._buffers.items()
        return self._with(
            {name: None if buffer is None else buffer.new_zeros(batch_size, *buffer.shape[1:]) for name, buffer in buffers}
        )

    def copy_(self, other: RecentRows) -> None:
        """Takes over those of as many other sequences: ``cache.recent[3:4].copy_(prompt.recent)``."""
        check_alike(self, other, self.rows)
        for mine, theirs in zip(self.buffers(), other.buffers(), strict=True):
            mine.copy_(theirs)

    def _with(self, buffers: dict[str, Tensor | None]) -> RecentRows:
        other = copy.copy(self)
        other._buffers = buffers
        return other

    def extra_repr(self) -> str:
        (batch, _, embed_dim), counts = self.rows.shape, self.kept is not None
        return f"batch_size={batch}, size={self.size}, embed_dim={embed_dim}, most_back={self.most_back}, counts={counts}"

    __prepare_scriptable__ = scripting_refused  # torch.jit.script calls it first

    def check_loaded(self, prefix: str, state_dict: Mapping[str, object], length: object) -> None:
        """Refuses a number of tokens to take back that sequences of ``length`` [B] tokens cannot have."""
        kept = state_dict.get(f"{prefix}kept")
        if not isinstance(kept, Tensor) or not isinstance(length, Tensor) or kept.shape != length.shape:
            return  # torch refuses it
        checks.dtype(f"{prefix}kept", kept, (torch.int32,))
        if checks.values_are_known(kept) and bool(((kept < 0) | (kept > length.clamp(max=self.most_back))).any()):
            raise ValueError(f"{prefix}kept: expected numbers of tokens that can be taken back, got {kept.tolist()}")


def check_alike(recent: RecentRows | None, given: object, like: Tensor) -> None:
    """Refuses rows that are not of the kind of ``recent``, or not of as many sequences as ``like`` [B, ..] has, or on another device."""
    checks.instance("recent", given, type(recent), "None" if recent is None else "rows such as cache.recent.empty(1)")
    if recent is None or not isinstance(given, RecentRows):
        return
    sizes = {"B": like.shape[0], "N": recent.rows.shape[1], "E": recent.rows.shape[2]}
    checks.shaped("recent.rows", given.rows, "[B, N, E]", (recent.rows.dtype,), like, "the cache", **sizes)
    if (given.size, given.kept is None) != (recent.size, recent.kept is None):
        raise ValueError(f"recent: expected rows of a cache like this one, {recent}, got {given}")


def check_recent(recent: RecentRows | None, conv: int, embed_dim: int) -> None:
    """Refuses the rows of a cache that was not made for a layer of these sizes."""
    wanted = (conv, embed_dim) if conv > 1 else None
    given = None if recent is None else (recent.size, recent.rows.shape[2])
    if given != wanted:
        wanted_words, given_words = (f"(conv, embed_dim) = {of}" if of else "no convolution" for of in (wanted, given))
        raise ValueError(f"cache: expected one of a layer with {wanted_words}, got {given_words}; take layer.new_cache()")
