"""dmattn in Hugging Face transformers: ``import dmattn.integrations.transformers``, then ``attn_implementation="dmattn"`` for any model.

Importing registers; :func:`register` does it under another name. Doge models select their keys before the attention function is called:
:func:`enable_dynamic_mask_attention` gives them dmattn's selection, and :func:`convert` gives it to models of the Llama family. Both can
generate with a cache of fixed size. Needs ``transformers`` 5.17 or newer.
"""

from __future__ import annotations

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from dmattn import checks
from dmattn.integrations.transformers.attention import attention_forward
from dmattn.integrations.transformers.cache import REWIND, BoundedLayer
from dmattn.integrations.transformers.convert import convert, convert_indexed, load_converted, score_loss_of, set_window
from dmattn.integrations.transformers.doge import enable_dynamic_mask_attention
from dmattn.integrations.transformers.indexed import set_dense
from dmattn.integrations.transformers.layers import selecting_layers
from dmattn.integrations.transformers.masks import make_mask
from dmattn.integrations.transformers.sparse import enable_index_top_k

# transformers does more than look up a name that contains one of these.
TAKEN = ("flash", "sdpa", "flex_attention", "eager", "|", "/")


def register(name: str = "dmattn") -> str:
    """Makes dmattn an attention implementation of transformers: its attention function, and the function that makes its masks.

    Args:
        name: what ``attn_implementation=`` and ``model.set_attn_implementation()`` will take.

    Returns:
        name.

    Raises:
        TypeError, ValueError: name is no string, or contains what transformers takes for another implementation.
    """
    checks.instance("name", name, str, "a str")
    if not name or any(taken in name for taken in TAKEN):
        raise ValueError(
            f"name: expected a name without {', '.join(TAKEN)}, which transformers takes for other implementations, got {name!r}"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    return name


def bounded_cache(model: nn.Module, *, rewind: int = REWIND) -> Cache:
    """An empty bounded cache for a model with dmattn's selection, to be passed to its calls and to ``generate()`` as ``cache=``, which is
    ``past_key_values=`` before transformers 5.24.

    Args:
        model: what :func:`enable_dynamic_mask_attention` or :func:`convert` returned, or what ``torch.compile`` or peft made of it.
        rewind: how many of the latest tokens ``crop`` can take back, for assisted and prompt-lookup generation.

    Returns:
        A transformers ``Cache`` of :class:`BoundedLayer`.

    Raises:
        TypeError: model is no transformers model, or rewind no int.
        ValueError: no layer selects, or rewind < 0.
    """
    return Cache(layers=[layer.bounded_layer(rewind) for layer in selecting_layers(model)])


register()

__all__ = [
    "BoundedLayer",
    "attention_forward",
    "bounded_cache",
    "convert",
    "convert_indexed",
    "enable_dynamic_mask_attention",
    "enable_index_top_k",
    "load_converted",
    "make_mask",
    "register",
    "score_loss_of",
    "set_dense",
    "set_window",
]
