"""What the public functions check before any op runs; each message says which argument, what was expected and what it got.

Wrong types and dtypes raise TypeError, wrong shapes and values ValueError. The ops check again in C++ (RuntimeError), because
``torch.ops.dmattn.*`` can be called directly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MAX_LENGTH = 1 << 20
MAX_LENGTH_IN_ORDER = 1 << 27  # of keys that a GPU takes in order, which need no lists
MAX_HEAD_DIM = 256
MAX_INT = (1 << 63) - 1
MAX_FACTOR = 1e30  # of scale and softcap: products with it must stay finite in float32
DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
    "meta": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
}


def shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def type_of(value: object) -> str:
    """The name of a value's type, with its module unless that is Python's, torch's or ours: ``numpy.bool`` is no ``bool``."""
    module, name = type(value).__module__, type(value).__name__
    return name if module.split(".")[0] in ("builtins", "torch", "dmattn") else f"{module}.{name}"


def instance(name: str, value: object, kinds: Any, expected: str) -> None:
    """A value of a class, or of one of several."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name}: expected {expected}, got {type_of(value)}")


def tensor(
    name: str, value: object, dtypes: Sequence[torch.dtype] = (), like: Tensor | None = None, like_name: str = "query"
) -> Tensor:
    """A dense tensor, of one of these dtypes if there are some, and on the device of ``like`` if that is given."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_of(value)}")
    if value.layout is not torch.strided or value.is_nested:
        nested = "a nested one; dmattn.varlen_attention takes packed sequences"
        raise TypeError(f"{name}: expected a dense tensor, got {nested if value.is_nested else value.layout}")
    if dtypes:
        dtype(name, value, dtypes)
    if like is not None:
        same_device(name, value, like, like_name)
    return value


def dtype(name: str, value: Tensor, expected: Sequence[torch.dtype]) -> None:
    if value.dtype not in expected:
        names = ", ".join(str(d).removeprefix("torch.") for d in expected)
        raise TypeError(f"{name}: expected dtype {names}, got {str(value.dtype).removeprefix('torch.')}")


def like_weights(name: str, value: Tensor, layer: Any) -> None:
    """The dtype of a linear layer's weights, unless autocast or a layer of another kind takes others."""
    if type(layer) is torch.nn.Linear and value.dtype != layer.weight.dtype and not torch._C._is_any_autocast_enabled():
        raise TypeError(f"{name}: expected dtype {layer.weight.dtype} like the layer, got {value.dtype}")


def same_device(name: str, value: Tensor, like: Tensor, like_name: str = "query") -> None:
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} like {like_name}, got {value.device}")


def shaped(
    name: str, value: object, layout: str, dtypes: Sequence[torch.dtype] = (), like: Tensor | None = None, like_name: str = "query",
    /, **sizes: int,
) -> Tensor:  # fmt: skip
    """A tensor, as :func:`tensor` checks it, with the dimensions of a layout like "[B|1, Hkv, S]", some of which have these ``sizes``."""
    given = tensor(name, value, dtypes, like, like_name)
    dims = layout[1:-1].split(", ")
    if given.dim() != len(dims):
        raise ValueError(f"{name}: expected {len(dims)} dimensions {layout}, got shape {shape_of(given)}")
    for size, dim in zip(given.shape, dims, strict=True):
        fits = size == sizes[dim] if dim in sizes else dim.isalpha()  # the usual names, in little time
        if not fits and not any(size == int(n) if n.isdigit() else size == sizes.get(n, size) for n in dim.split("|")):
            known = ", ".join(f"{one}={length}" for one, length in sizes.items())
            raise ValueError(f"{name}: expected {layout}{' with ' if known else ''}{known}, got {shape_of(given)}")
    return given


def numbers_below(name: str, value: Tensor, below: int) -> None:
    """Numbers from 0 to below - 1, where their values are known."""
    if values_are_known(value) and bool(((value < 0) | (value >= below)).any()):
        raise ValueError(f"{name}: expected numbers from 0 to {below - 1}, got {value.tolist()[:8]}")


def head_size(name: str, value: int, what: str = "") -> None:
    """A size of heads that the kernels take."""
    if value % 8 or not 0 < value <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected {what}a multiple of 8 up to {MAX_HEAD_DIM}, got {value}")


def one_of(name: str, value: object, *words: str) -> None:
    """Refuses what is not one of the words."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, words))}, got {value!r:.80}")


def kernels_for(name: str, given: Tensor) -> Sequence[torch.dtype]:
    """The dtypes of the kernels for a tensor's device; refuses a device without any."""
    if given.device.type not in DTYPES:
        raise ValueError(f"{name}: no dmattn kernel for device {given.device}; supported are {', '.join(DTYPES)}")
    return DTYPES[given.device.type]


def per_sequence(
    name: str, value: object, like: Tensor, like_name: str = "query", dtypes: Sequence[torch.dtype] = (torch.int32,)
) -> Tensor:
    """A tensor [B] on the device of ``like``, whose first dimension is B."""
    given = tensor(name, value, dtypes, like, like_name)
    if list(given.shape) != [like.shape[0]]:
        raise ValueError(f"{name}: expected [B] = {[like.shape[0]]}, got {shape_of(given)}")
    return given


def is_int(value: object) -> TypeGuard[int]:
    """An int, or what a tracer puts in place of a size: a SymInt, or under torch.jit.trace a tensor."""
    if isinstance(value, int | torch.SymInt):
        return not isinstance(value, bool)
    return isinstance(value, Tensor) and value.dtype == torch.int64 and is_traced_number(value)


def is_traced_number(value: object) -> TypeGuard[float]:
    """Under torch.jit.trace sizes are int64 tensors without dimensions, and what is computed of them is a tensor, too."""
    return isinstance(value, Tensor) and value.dim() == 0 and torch._C._get_tracing_state() is not None


def is_traced() -> bool:
    """Under torch.jit.trace, where a decision by sizes holds for all inputs of the traced program."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def positive_int(name: str, value: object) -> None:
    _int_from(1, "a positive int", name, value)


def natural_int(name: str, value: object) -> None:
    _int_from(0, "an int >= 0", name, value)


def _int_from(least: int, expected: str, name: str, value: object) -> None:
    if not is_int(value):
        raise TypeError(f"{name}: expected {expected}, got {type_of(value)}")
    if value < least:
        raise ValueError(f"{name}: expected {expected}, got {value}")
    if value > MAX_INT:
        raise ValueError(f"{name}: expected {expected} up to 2^63 - 1, got {value}")


def number_drawn(name: str, value: int) -> None:
    """A number of queries that are drawn and hold a row of attention weights each."""
    positive_int(name, value)
    if value > MAX_LENGTH:
        raise ValueError(f"{name}: expected at most {MAX_LENGTH}, got {value}")


def selection(window: object, local: int, sink_keys: int, is_causal: bool) -> None:
    """The sizes of a top-k selection: without a local window and sinks the dynamic window has at least one key."""
    if type(local) is not int or type(sink_keys) is not int or local != 0 or sink_keys != 0:
        natural_int("local", local)
        natural_int("sink_keys", sink_keys)
    if local == 0 and sink_keys == 0:
        positive_int("window", window)
        return
    if not is_causal:
        raise ValueError(f"local, sink_keys: expected 0 and 0 with is_causal=False, got {local} and {sink_keys}")
    natural_int("window", window)


def local_heads(value: int, heads: int, local: int) -> None:
    """The number of a layer's key heads that see local keys and sinks alone: at least one other head selects."""
    natural_int("local_heads", value)
    if value and (value >= heads or not local):
        raise ValueError(f"local_heads: expected fewer than the {heads} key heads, and local > 0, got {value} with local={local}")


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type_of(value)}")
    return value


def each(check: Callable[[str, Any], object], **given: object) -> None:
    """One check for several arguments, by their names."""
    for name, value in given.items():
        check(name, value)


def flags(is_causal: object, deterministic: object, return_lse: object) -> None:
    if not (type(is_causal) is bool and type(deterministic) is bool and type(return_lse) is bool):
        flag("is_causal", is_causal), flag("deterministic", deterministic), flag("return_lse", return_lse)


def length(name: str, value: object) -> None:
    if not is_int(value):
        raise TypeError(f"{name}: expected an int >= 0, got {type_of(value)}")
    if value < 0 or value > MAX_LENGTH:
        raise ValueError(f"{name}: expected 0 <= {name} <= {MAX_LENGTH}, got {value}")


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf, *, open_high: bool = False) -> float:
    """A finite real number in [low, high], or in [low, high) when the upper end is open."""
    if not (is_int(value) or isinstance(value, float | torch.SymFloat) or is_traced_number(value)):
        raise TypeError(f"{name}: expected a number, got {type_of(value)}")
    if isinstance(value, int | float):
        inside = (
            -sys.float_info.max <= value <= sys.float_info.max and low <= value and (value < high if open_high else value <= high)
        )
        if not inside:
            expected = "a finite number" if low == -math.inf else f"a finite number >= {low:g}"
            if high != math.inf:
                expected = f"{low:g} <= {name} {'<' if open_high else '<='} {high:g}"
            raise ValueError(f"{name}: expected {expected}, got {value}")
    return float(value)


def softcap(value: object) -> float:
    """0 or None for none, or a cap whose inverse is a normal number in float32, too."""
    cap = 0.0 if value is None else number("softcap", value, low=0.0)
    if cap > MAX_FACTOR or 0 < cap < 1 / MAX_FACTOR:
        raise ValueError(f"softcap: expected 0 or a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}, got {value}")
    return cap


def scale(value: object, name: str = "scale") -> float:
    """A factor under which products stay finite in float32."""
    factor = number(name, value)
    if abs(factor) > MAX_FACTOR:
        raise ValueError(f"{name}: expected a number of magnitude up to {MAX_FACTOR:g}, got {value}")
    return factor


def values_are_known(value: Tensor) -> bool:
    """True when reading the tensor's values costs no device sync and is possible at all (not while tracing or under torch.func).

    False for a DTensor: a process has a part of it, perhaps an empty one."""
    return value.device.type == "cpu" and values_can_be_read(value) and not hasattr(value, "device_mesh")


def values_can_be_read(value: Tensor) -> bool:
    """True when the host can get the tensor's values, if need be by waiting for its device: not while tracing, nor into a CUDA graph."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or isinstance(value, FakeTensor):
        return False
    return value.device.type == "cpu" or (value.device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


def cu_seqlens(name: str, value: object, tokens: int | None, exactly: bool = False) -> Tensor:
    """Checks the ends of documents, [documents + 1], and returns them; :func:`document_ends` checks values, where they are known.

    tokens: the most that the last end may be, or, with ``exactly``, what it has to be; None: any number.
    """
    ends = tensor(name, value, (torch.int32, torch.int64))
    if ends.dim() != 1 or ends.shape[0] < 2:
        raise ValueError(f"{name}: expected one dimension [documents + 1] with at least one document, got shape {shape_of(ends)}")
    if values_are_known(ends):
        document_ends(name, ends, tokens, exactly)
    return ends


def document_ends(name: str, ends: Tensor, tokens: int | None, exactly: bool = False) -> None:
    """Reads the ends of documents and refuses them unless they rise from 0 to at most ``tokens``; see :func:`cu_seqlens`."""
    last = int(ends[-1])
    fits = tokens is None or (last == tokens if exactly else last <= tokens)
    if int(ends[0]) != 0 or not fits or not bool((ends[1:] >= ends[:-1]).all()):
        bound = "" if tokens is None else f" = Sk = {tokens}" if exactly else f" <= {tokens} tokens"
        more = "..." if ends.shape[0] > 8 else ""
        raise ValueError(f"{name}: expected 0 = c[0] <= c[1] <= ... <= c[-1]{bound}, got {ends[:8].tolist()}{more}")
