"""Models with DeepSeek's or Qwen's sparse attention: their indexers choose keys without scores of all pairs any more."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dmattn import ops
from dmattn.fake import accumulate_dtype
from dmattn.indexer import index_top_k
from dmattn.integrations.transformers.attention import attention_forward
from dmattn.integrations.transformers.layers import check_model
from dmattn.integrations.transformers.masks import FAR, interval_of, select_keys
from dmattn.sizes import padded

M = TypeVar("M", bound=PreTrainedModel)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def _check_implementation(config: Any) -> None:
    if config._attn_implementation != "dmattn":
        raise ValueError(
            "attn_implementation: expected 'dmattn' after enable_index_top_k(), got "
            f"{config._attn_implementation!r}; load the model again for another one"
        )


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
        _check_implementation(self.config)
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


class TopKBlocks(nn.Module):
    """The forward pass of Qwen's attention whose indexer scores mean keys of blocks, likewise: a base in addition to the layer's own class.

    Blocks are counted from a sequence's first token, behind its padding. A query sees the blocks that it chooses, and its own until
    that is whole.
    """

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    indexer: Any
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    rotate: Callable[..., Any]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What the layer returns; attention_mask [B|1, 1, 2, T] is what dmattn's mask function made, position_embeddings are those of T keys."""
        _check_implementation(self.config)
        cache = options.pop("past_key_values", None) if cache is None else cache
        length = hidden_states.shape[1]
        lists = self.listed(hidden_states, position_embeddings, attention_mask, cache)
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        query, gate = self.q_proj(hidden_states).view(*heads[:3], 2 * self.head_dim).chunk(2, dim=3)
        query, key, value = self.q_norm(query), self.k_norm(self.k_proj(hidden_states).view(heads)), self.v_proj(hidden_states)
        cos, sin = (given[:, -length:] for given in position_embeddings)
        query, key = self.rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        value = value.view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=options)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attention_forward(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, indices=lists, **options
        )
        return self.o_proj(out.flatten(2) * gate.flatten(2).sigmoid()), weights

    @torch.no_grad()
    def listed(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, cache: Any
    ) -> Tensor:
        """int32 [B, S, n], the keys that each query chooses, and those of its own block until that is whole (then
        of the next, which it cannot see); -1 for none."""
        own, (batch, length), device = self.indexer, hidden_states.shape[:2], hidden_states.device
        size, dim = own.compress_ratio, own.index_head_dim
        widths = [own.index_n_heads * dim, own.index_kv_heads * dim]
        query, key = own.index_qk_proj(hidden_states).split(widths, dim=2)
        cos, sin = position_embeddings
        query = own.q_layernorm(query.unflatten(2, (-1, dim)))
        query = self.rotate(query, cos=cos[:, -length:], sin=sin[:, -length:], unsqueeze_dim=2)
        key = key if cache is None else cache.update_indexer(key, self.layer_idx)
        keys = cos.shape[1]  # so far; a static cache has room for more
        start, end = attention_mask[:, 0].unbind(1)
        is_real = (end > start).expand(batch, -1)
        if device.type == "cpu" and not torch.compiler.is_compiling() and bool((is_real & (end < FAR)).any()):
            raise ValueError(
                "position_ids: expected one sequence in each row for Qwen4's indexer, got packed ones, or a sliding window"
            )
        first = is_real.int().argmax(dim=1, keepdim=True)  # of the sequence: [B, 1]
        offset = keys - length - first  # where the first query stands
        blocks = torch.arange(keys // size * size, device=device) + first
        places = blocks.clamp(max=keys - 1)
        means = key.gather(1, places[..., None].expand(-1, -1, dim)).float().unflatten(1, (-1, size)).mean(2)
        means = own.k_layernorm(means.to(key.dtype))
        starts = places[:, ::size, None].expand(-1, -1, cos.shape[2])
        cos, sin = (given.expand(batch, -1, -1).gather(1, starts) for given in (cos, sin))
        means = self.rotate(means[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2).squeeze(2)
        weights = query.new_ones((batch, 1, length, own.index_n_heads), dtype=accumulate_dtype(query.dtype))
        chosen, _ = ops.index_top_k(
            padded(query)[:, None], padded(means)[:, None].to(query.dtype), weights, None, None, None, offset[:, 0].int(),
            (keys - first[:, 0]).int(), keys, own.block_topk, size, True, True, 0, 0, dim**-0.5, False,
        )  # fmt: skip
        position = offset + torch.arange(length, device=device)
        chosen = torch.cat((chosen[:, 0], ((position + 1) // size)[..., None].int()), dim=2)
        listed = chosen[..., None] * size + torch.arange(size, dtype=torch.int32, device=device) + first[:, :, None, None].int()
        return torch.where(chosen[..., None] < 0, -1, listed).flatten(2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        select_keys(self.config)


# Modules of transformers, what they call their indexers, and what rotates.
MODELS: tuple[tuple[str, str, str, type[nn.Module]], ...] = (
    ("deepseek_v32", "DeepseekV32Indexer", "apply_rotary_pos_emb", TopKIndexer),
    ("axk2", "AXK2Indexer", "apply_rotary_pos_emb", TopKIndexer),
    ("glm_moe_dsa", "GlmMoeDsaIndexer", "apply_rotary_pos_emb_interleave", TopKIndexer),
    ("qwen4_exp", "Qwen4ExpTextAttention", "apply_rotary_pos_emb", TopKBlocks),
)
CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""What each of them becomes, of the models that the installed transformers has."""

for _name, _indexer, _rotate, _base in MODELS:
    with contextlib.suppress(ImportError):  # an earlier transformers
        _module = importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
        _own = getattr(_module, _indexer)
        _parts = {"rotate": staticmethod(getattr(_module, _rotate)), "__module__": __name__, "__doc__": f"A ``{_indexer}``."}
        CLASSES[_own] = globals()[f"TopK{_indexer}"] = type(f"TopK{_indexer}", (_base, _own), _parts)


def enable_index_top_k(model: M) -> M:
    """Gives all indexers of a DeepSeek-V3.2, A.X-K2, GLM-MoE-DSA or Qwen4 model :func:`dmattn.index_top_k`, in place: nothing for all pairs.

    Loss, logits, gradients and tokens are those of eager attention wherever the scores at the edge of a list are distinct. Where they are
    equal, ``torch.topk`` takes any; here the later key wins. Qwen4's blocks are counted from a sequence's first token, so it takes padding, but
    no packed sequences.

    Args:
        model: a transformers model of one of these types.

    Returns:
        model.

    Raises:
        TypeError: model is no transformers model.
        ValueError: it has no such indexer, or one with blocks whose size is no power of two up to 128.
    """
    check_model(model)
    indexers: list[Any] = [module for module in model.modules() if type(module) in CLASSES]
    if not indexers:
        known = ", ".join(cls.__name__ for cls in CLASSES) or "none in this release of transformers"
        raise ValueError(f"model: expected indexers of type {known}, got none in {type(model).__name__}")
    for size in {module.indexer.compress_ratio for module in indexers if issubclass(CLASSES[type(module)], TopKBlocks)}:
        if size not in BLOCK_SIZES:
            raise ValueError(f"indexer_compress_ratio: expected a power of two up to {BLOCK_SIZES[-1]}, got {size}")
    model.set_attn_implementation("dmattn")
    for indexer in indexers:
        indexer.__class__ = CLASSES[type(indexer)]
        select_keys(indexer.config)
    return model
