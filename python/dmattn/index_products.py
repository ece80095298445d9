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
    found: Tensor = key.unflatten(1, (groups, -1))
    return found


def distinct(lists: Tensor) -> Tensor:
    """Lists [.., K] of blocks in order, each once; -1 in the place of the others."""
    blocks = lists.sort(dim=-1).values
    return torch.where(F.pad(blocks[..., 1:] == blocks[..., :-1], (1, 0)), -1, blocks)


def _finite(given: Tensor) -> Tensor:
    """NaN and infinities become 0. A row that counts has made the gradient by its products NaN already; one that nobody sees must not."""
    return given.nan_to_num(0.0, 0.0, 0.0)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[.., m, x] @ [.., x, n] in the dtype of sums."""
    dtype = accumulate_dtype(left.dtype)
    if dtype == left.dtype or not left.is_cuda:
        return left.to(dtype) @ right.to(dtype)
    found: Tensor = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=dtype).unflatten(0, left.shape[:-2])
    return found


class AllProducts:
    """The products of some queries of each group with all keys, and the gradients by the indexer's queries and keys."""

    def __init__(self, index_key: Tensor, key: Tensor) -> None:
        """index_key [B, G, N, Di], key [B, G, m, Sk, D]."""
        dtype = accumulate_dtype(index_key.dtype)
        # Gradients by products are rounded to bfloat16 for tensor cores, but not to float16, where small ones would be 0.
        self.to_bfloat16 = index_key.is_cuda and index_key.dtype == torch.bfloat16
        self.finite_key = _finite(index_key).to(index_key.dtype if self.to_bfloat16 else dtype)
        self.index_key, self.key = (given if given.is_cuda else given.to(dtype) for given in (index_key, key))

    def attention(self, query: Tensor) -> Tensor:
        """query [B, G, h, r, D], h a multiple of m: [B, G, h, r, Sk]."""
        of_key = query.unflatten(2, (self.key.shape[2], -1))  # [B, G, m, h / m, r, D]
        products: Tensor = _product(of_key.flatten(3, 4), self.key.transpose(3, 4)).unflatten(3, of_key.shape[3:5])
        return products.flatten(2, 3)

    def indexer(self, index_query: Tensor) -> Tensor:
        """index_query [B, G, r, Hi, Di]: [B, G, Hi, r, N]."""
        heads = index_query.transpose(2, 3)
        products: Tensor = _product(heads.flatten(2, 3), self.index_key.transpose(2, 3)).unflatten(2, heads.shape[2:4])
        return products

    def gradients(self, index_query: Tensor, of_products: Tensor) -> tuple[Tensor, Tensor]:
        """By index_query [B, G, r, Hi, Di] and by index_key, from those by its products."""
        rows, heads = of_products.flatten(2, 3), index_query.transpose(2, 3)
        of_query = _product(rows, self.finite_key).unflatten(2, heads.shape[2:4])
        return of_query.transpose(2, 3), _product(rows.transpose(2, 3), _finite(heads.flatten(2, 3)).to(rows.dtype))


class ListedProducts:
    """Likewise, with the keys in the lists of these queries."""

    to_bfloat16 = False

    def __init__(self, index_key: Tensor, key: Tensor, blocks: Tensor, block_size: int, is_pooled: bool) -> None:
        """blocks int32 [B|1, G|1, r, n], -1 for none."""
        self.dtype, self.count = accumulate_dtype(index_key.dtype), index_key.shape[2]
        places = (blocks.long()[..., None] * block_size + torch.arange(block_size, device=blocks.device)).flatten(-2)
        places = places.clamp(0, key.shape[3] - 1)
        self.choices = blocks.long().clamp(0, self.count - 1) if is_pooled else places
        self.index_key = rows_at(index_key, self.choices).to(self.dtype)  # [B, G, r, N, Di]
        self.key = rows_at(key, places).to(self.dtype)  # [B, G, m, r, M, D]

    def attention(self, query: Tensor) -> Tensor:
        of_key = query.to(self.dtype).unflatten(2, (self.key.shape[2], -1))
        return torch.einsum("bgmhrd,bgmrkd->bgmhrk", of_key, self.key).flatten(2, 3)

    def indexer(self, index_query: Tensor) -> Tensor:
        return torch.einsum("bgrhd,bgrkd->bghrk", index_query.to(self.dtype), self.index_key)

    def gradients(self, index_query: Tensor, of_products: Tensor) -> tuple[Tensor, Tensor]:
        of_query = torch.einsum("bghrk,bgrkd->bgrhd", of_products, _finite(self.index_key))
        of_rows = torch.einsum("bghrk,bgrhd->bgrkd", of_products, _finite(index_query.to(self.dtype))).flatten(2, 3)
        place = self.choices.expand(*of_rows.shape[:2], -1, -1).flatten(2)[..., None].expand(of_rows.shape)
        of_key = of_rows.new_zeros(*of_rows.shape[:2], self.count, of_rows.shape[3]).scatter_add_(2, place, of_rows)
        return of_query, of_key


def rows_at(given: Tensor, keys: Tensor) -> Tensor:
    """[B, G, .., Sk, x] at keys [B|1, G|1, r, M]: [B, G, .., r, M, x]."""
    between = [1] * (given.dim() - 4)
    inner = keys.view(*keys.shape[:2], *between, *keys.shape[2:]).expand(*given.shape[:-2], -1, -1).flatten(-2)
    found: Tensor = given.gather(-2, inner[..., None].expand(*inner.shape, given.shape[-1])).unflatten(-2, keys.shape[2:])
    return found
