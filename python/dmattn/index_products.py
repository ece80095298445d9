"""The products that the indexer's loss is made of, of attention and of the indexer, and the gradients by the indexer's factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn.fake import accumulate_dtype


def of_groups(key: Tensor, groups: int) -> Tensor:
    """[B, Hkv, Sk, D] as [B, G, m, Sk, D], the m key heads that the query heads of a group attend to."""
    if key.shape[1] < groups:
        return key.repeat_interleave(groups // key.shape[1], dim=1)[:, :, None]
    of_groups: Tensor = key.unflatten(1, (groups, -1))
    return of_groups


def distinct(lists: Tensor) -> Tensor:
    """Lists [.., K] of blocks in order, each once; -1 in the place of the others."""
    blocks = lists.sort(dim=-1).values
    return torch.where(F.pad(blocks[..., 1:] == blocks[..., :-1], (1, 0)), -1, blocks)


def _finite(given: Tensor) -> Tensor:
    """0 in the place of what is no number. Where it counts, the other factor of a gradient is NaN; where it does not, 0."""
    return given.nan_to_num(0.0, 0.0, 0.0)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[.., m, x] @ [.., x, n] in the dtype of sums."""
    dtype = accumulate_dtype(left.dtype)
    if dtype == left.dtype or not left.is_cuda:
        return left.to(dtype) @ right.to(dtype)
    found: Tensor = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=dtype).unflatten(0, left.shape[:-2])
    return found


class OfAll:
    """The products of r queries of each group with all keys, and the gradients by the indexer's factors."""

    def __init__(self, index_query: Tensor, index_key: Tensor, query: Tensor, key: Tensor) -> None:
        """index_query [B, G, r, Hi, Di], index_key [B, G, N, Di], query [B, G, h, r, D], key [B, G, m, Sk, D]: h is a multiple of m."""
        self.index_query = index_query.transpose(2, 3)  # [B, G, Hi, r, Di]
        self.index_key, self.query, self.key = index_key, query, key
        # In float16 small gradients would be 0.
        self.narrow = index_query.is_cuda and index_query.dtype == torch.bfloat16

    def attention(self) -> Tensor:
        """[B, G, h, r, Sk]"""
        of_key = self.query.unflatten(2, (self.key.shape[2], -1))  # [B, G, m, h / m, r, D]
        products: Tensor = _product(of_key.flatten(3, 4), self.key.transpose(3, 4)).unflatten(3, of_key.shape[3:5])
        return products.flatten(2, 3)

    def indexer(self) -> Tensor:
        """[B, G, Hi, r, N]"""
        rows = self.index_query.flatten(2, 3)
        products: Tensor = _product(rows, self.index_key.transpose(2, 3)).unflatten(2, self.index_query.shape[2:4])
        return products

    def gradients(self, of_products: Tensor) -> tuple[Tensor, Tensor]:
        """By index_query [B, G, r, Hi, Di] and by index_key."""
        rows = of_products.flatten(2, 3)
        index_query, index_key = (_finite(given).to(rows.dtype) for given in (self.index_query.flatten(2, 3), self.index_key))
        of_query = _product(rows, index_key).unflatten(2, self.index_query.shape[2:4])
        return of_query.transpose(2, 3), _product(rows.transpose(2, 3), index_query)


class OfLists(OfAll):
    """Likewise, with the keys in the lists of queries."""

    def __init__(
        self, index_query: Tensor, index_key: Tensor, query: Tensor, key: Tensor, blocks: Tensor, block_size: int, is_pooled: bool,
    ) -> None:  # fmt: skip
        """blocks int32 [B|1, G|1, r, n], -1 for none."""
        dtype = accumulate_dtype(index_query.dtype)
        super().__init__(index_query.to(dtype), index_key.to(dtype), query.to(dtype), key)
        places = (blocks.long()[..., None] * block_size + torch.arange(block_size, device=blocks.device)).flatten(-2)
        self.places = places.clamp(0, key.shape[3] - 1)
        self.choices = blocks.long().clamp(0, index_key.shape[2] - 1) if is_pooled else self.places
        self.chosen = rows_at(self.index_key, self.choices)  # [B, G, r, N, Di]
        self.narrow = False

    def attention(self) -> Tensor:
        of_key = self.query.unflatten(2, (self.key.shape[2], -1))
        keys = rows_at(self.key, self.places).to(of_key.dtype)
        return torch.einsum("bgmhrd,bgmrkd->bgmhrk", of_key, keys).flatten(2, 3)

    def indexer(self) -> Tensor:
        return torch.einsum("bghrd,bgrkd->bghrk", self.index_query, self.chosen)

    def gradients(self, of_products: Tensor) -> tuple[Tensor, Tensor]:
        of_query = torch.einsum("bghrk,bgrkd->bgrhd", of_products, _finite(self.chosen))
        of_rows = torch.einsum("bghrk,bghrd->bgrkd", of_products, _finite(self.index_query)).flatten(2, 3)
        place = self.choices.expand(*of_rows.shape[:2], -1, -1).flatten(2)[..., None].expand(of_rows.shape)
        of_key = of_rows.new_zeros(*of_rows.shape[:2], *self.index_key.shape[2:]).scatter_add_(2, place, of_rows)
        return of_query, of_key


def rows_at(given: Tensor, keys: Tensor) -> Tensor:
    """[B, G, .., Sk, x] at keys [B|1, G|1, r, M]: [B, G, .., r, M, x]."""
    between = [1] * (given.dim() - 4)
    inner = keys.view(*keys.shape[:2], *between, *keys.shape[2:]).expand(*given.shape[:-2], -1, -1).flatten(-2)
    found: Tensor = given.gather(-2, inner[..., None].expand(*inner.shape, given.shape[-1])).unflatten(-2, keys.shape[2:])
    return found
