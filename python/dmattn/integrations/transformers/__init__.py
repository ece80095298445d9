"""dmattn in Hugging Face transformers: ``import dmattn.integrations.transformers``, then ``attn_implementation="dmattn"`` for any model.

Importing registers; :func:`register` does it under another name. Doge models select their keys before the attention function is called:
:func:`enable_dynamic_mask_attention` gives them dmattn's selection. Needs ``transformers`` 5.17 or newer.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from dmattn.integrations.transformers.attention import attention_forward
from dmattn.integrations.transformers.doge import enable_dynamic_mask_attention
from dmattn.integrations.transformers.masks import make_mask

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
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    if not name or any(taken in name for taken in TAKEN):
        raise ValueError(
            f"name: expected a name without {', '.join(TAKEN)}, which transformers takes for other implementations, got {name!r}"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    return name


register()

__all__ = ["attention_forward", "enable_dynamic_mask_attention", "make_mask", "register"]
