"""Models with DeepSeek's sparse attention: their indexers choose keys without scores of all pairs any more."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dmattn.indexer import index_top_k
from dmattn.integrations.transformers.layers import check_model
from dmattn.integrations.transformers.masks import interval_of, select_keys
from dmattn.sizes import padded

M = TypeVar("M", bound=PreTrainedModel)


class TopKIndexer(nn.Module):
    """The forward pass of a DSA indexer, by :func:`dmattn.index_top_k`: a base in addition to the indexer's own class."""

    config: Any
    layer_idx: int
    n_heads: int
    head_dim: int
    qk_rope_head_dim: int
    index_topk: int
    softmax_scale: float
    wq_b: nn.Module
    wk: nn.Module
    k_norm: nn.Module
    weights_proj: nn.Linear
    rotate: Callable[..., tuple[Tensor, Tensor]]  # as the model rotates queries and keys

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> Tensor:
        """int32 [B, S, topk], -1 where there are fewer keys than that; attention_mask [B|1, 2, T] is what dmattn's mask function made."""
        if self.config._attn_implementation != "dmattn":
            raise ValueError(
                "attn_implementation: expected 'dmattn' after enable_index_top_k(), got "
                f"{self.config._attn_implementation!r}; load the model anew for another one"
            )
        batch, length = hidden_states.shape[:2]
        query = self.wq_b(q_resid).view(batch, length, self.n_heads, self.head_dim)
        key = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        sizes = [self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim]
        (query_rot, query_pass), (key_rot, key_pass) = (x.split(sizes, dim=-1) for x in (query, key))
        query_rot, key_rot = self.rotate(query_rot, key_rot, *position_embeddings, unsqueeze_dim=2)
        query, key = torch.cat((query_rot, query_pass), 3), torch.cat((key_rot, key_pass), 3).squeeze(2)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key = cache.update_indexer(key, self.layer_idx)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
        keys = key.shape[1]
        lists = index_top_k(
            padded(query)[:, None], padded(key)[:, None].to(query.dtype), weights[:, None], min(self.index_topk, keys), is_causal=False,
            base=interval_of(attention_mask[:, None], length, keys), scale=self.softmax_scale,
        )  # fmt: skip
        return lists.indices[:, 0]

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copies and pickles, whose configs are copies, too
        super().__setstate__(state)
        select_keys(self.config)


# Modules of transformers, what they call their indexers, and what rotates.
MODELS = (
    ("deepseek_v32", "DeepseekV32Indexer", "apply_rotary_pos_emb"),
    ("axk2", "AXK2Indexer", "apply_rotary_pos_emb"),
    ("glm_moe_dsa", "GlmMoeDsaIndexer", "apply_rotary_pos_emb_interleave"),
)
CLASSES: dict[type[nn.Module], type[TopKIndexer]] = {}
"""What each indexer becomes, of the models that the installed transformers has."""

for _name, _indexer, _rotate in MODELS:
    with contextlib.suppress(ImportError):  # an earlier transformers
        _module = importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
        _own = getattr(_module, _indexer)
        _parts = {"rotate": staticmethod(getattr(_module, _rotate)), "__module__": __name__, "__doc__": f"A ``{_indexer}``."}
        CLASSES[_own] = globals()[f"TopK{_indexer}"] = type(f"TopK{_indexer}", (TopKIndexer, _own), _parts)


def enable_index_top_k(model: M) -> M:
    """Gives all indexers of a DeepSeek-V3.2, A.X-K2 or GLM-MoE-DSA model :func:`dmattn.index_top_k`, in place: no scores or masks of all pairs.

    Loss, logits, gradients and tokens are those of eager attention wherever the scores at the edge of a list are distinct. Where they are
    equal, ``torch.topk`` takes any; here the later key wins.

    Args:
        model: a transformers model of one of these types.

    Returns:
        model.

    Raises:
        TypeError: model is no transformers model.
        ValueError: it has no such indexer.
    """
    check_model(model)
    indexers: list[Any] = [module for module in model.modules() if type(module) in CLASSES]
    if not indexers:
        known = ", ".join(cls.__name__ for cls in CLASSES) or "none in this release of transformers"
        raise ValueError(f"model: expected indexers of type {known}, got none in {type(model).__name__}")
    model.set_attn_implementation("dmattn")
    for indexer in indexers:
        indexer.__class__ = CLASSES[type(indexer)]
        select_keys(indexer.config)
    return model
