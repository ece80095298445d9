"""Doge models with dmattn's selection: their layers build no [B, Hkv, Sq, Sk] mask any more."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.models.doge.modeling_doge import DogeAttention

from dmattn import checks
from dmattn.integrations.transformers.cache import REWIND
from dmattn.integrations.transformers.layers import SelectingAttention, check_layer, check_model
from dmattn.integrations.transformers.masks import select_keys

M = TypeVar("M", bound=PreTrainedModel)


class DynamicMaskDogeAttention(SelectingAttention, DogeAttention):  # type: ignore[misc]
    """transformers' ``DogeAttention``, parameters and all, whose keys are selected and attended to by ``dynamic_mask_attention``."""

    keep_window_size: int

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.keep_window_size

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copies and pickles, whose configs are copies, too
        super().__setstate__(state)
        select_keys(self.config)


def enable_dynamic_mask_attention(model: M, bounded_cache: bool = False, *, rewind: int = REWIND) -> M:
    """Gives all ``DogeAttention`` layers of a model dmattn's selection, in place. Parameters and state dict stay as they are.

    Loss, logits, gradients and tokens are those of eager attention wherever the scores of a layer are distinct. Where they are equal, as
    they all are while A = 0, ``torch.topk`` takes any; here the later key wins, with and without a cache.

    Args:
        model: any transformers model with ``DogeAttention`` layers.
        bounded_cache: whether ``generate()`` and other calls without gradients keep the keys that can still be seen alone, see
            :class:`dmattn.BoundedCache`. A cache that is passed in and made for something else (static, quantised, offloaded, or filled
            already) stays what it is.
        rewind: how many tokens such a cache can take back, for assisted and prompt-lookup generation.

    Returns:
        model.

    Raises:
        TypeError: model is no transformers model, bounded_cache no bool, or rewind no int.
        ValueError: no such layer, a sliding window as well as the selection, or rewind < 0.
    """
    check_model(model)
    checks.flag("bounded_cache", bounded_cache)
    checks.natural_int("rewind", rewind)
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(f"model: expected layers of type DogeAttention, got none in {type(model).__name__}")
    for layer in layers:
        check_layer(layer)
    model.set_attn_implementation("dmattn")
    for layer in layers:
        layer.__class__ = DynamicMaskDogeAttention
        select_keys(layer.config)
        layer.register_parameter("log_slope", None)
        layer.cache_rewind = rewind if bounded_cache else None
    return model
