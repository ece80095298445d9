"""Autograd rules. The gradient of the op ``forward`` is the op ``backward``; every other derivative is composed of torch operations.

So tangents (forward mode), gradients of gradients, and what torch.func makes of both come from :mod:`dmattn.composed`; how vmapped
dimensions become batches stands in :mod:`dmattn.batching`. The rules are :class:`Attention` and :class:`AttentionGradients`, registered for
``torch.ops.dmattn.forward`` and ``torch.ops.dmattn.backward``. :class:`ShortAttention` is the first without what costs an eager call time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dmattn import batching, composed, sharding
from dmattn._library import arguments_of, rules
from dmattn.fake import accumulate_dtype

# Where arguments stand: tensors, options, and last ones (hints, and how lists are read) that may be left out.
FORWARD_ARGUMENTS, BACKWARD_ARGUMENTS = (list(arguments_of(op)) for op in ("forward", "backward"))
OPTIONS, LAST, INPUTS = FORWARD_ARGUMENTS.index("is_causal"), FORWARD_ARGUMENTS.index("is_in_order"), len(FORWARD_ARGUMENTS)
KEY_BIAS, BIAS = FORWARD_ARGUMENTS.index("key_bias"), FORWARD_ARGUMENTS.index("bias")
# backward has grad_out and grad_lse before them, out and lse after value, need_key_bias, need_bias and lse_rest before the last ones.
NEEDS = slice(BACKWARD_ARGUMENTS.index("need_key_bias"), BACKWARD_ARGUMENTS.index("lse_rest"))
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float})


def below_autograd(op: Any, inputs: tuple[Any, ...]) -> Any:
    """Calls the op's kernel (or who stands before it: fakes, dispatch modes, functionalisation)."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.default(*inputs)


def transforms_are_active() -> bool:
    """Whether torch.func or a forward-mode level may want more of a call than its results and a backward node."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:OPTIONS], *output)
    ctx.options, ctx.last = inputs[OPTIONS:LAST], inputs[LAST:]


def forward_gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    gradients: list[Any] = [None] * INPUTS
    needs = ctx.needs_input_grad
    gradients[:3], gradients[KEY_BIAS], gradients[BIAS] = _of_inputs(ctx, grad_out, grad_lse, needs[KEY_BIAS], needs[BIAS])
    return tuple(gradients)


def _of_inputs(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, need_key_bias: bool, need_bias: bool
) -> tuple[tuple[Any, Any, Any], Any, Any]:
    """The gradients of query, key and value, of key_bias and of bias."""
    query, key, value, *masks, out, lse, lse_rest = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None, None, None), None, None
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grad_query, grad_key, grad_value, grad_key_bias, grad_bias = _gradients(
        (grad_out, grad_lse, query, key, value, out, lse, *masks, *ctx.options, need_key_bias, need_bias, lse_rest, *ctx.last)
    )
    return (
        (grad_query, grad_key, grad_value),
        grad_key_bias if need_key_bias else None,
        grad_bias.to(masks[BIAS - 3].dtype) if need_bias else None,
    )


def _gradients(inputs: tuple[Any, ...]) -> Any:
    """The op ``backward``, past torch's dispatcher of autograd where nobody differentiates further."""
    if torch.compiler.is_compiling():
        return torch.ops.dmattn.backward(*inputs)
    if torch.is_grad_enabled() or transforms_are_active():
        return AttentionGradients.apply(*inputs)
    return below_autograd(torch.ops.dmattn.backward, inputs)


class ShortAttention(torch.autograd.Function):
    """:class:`Attention` for eager calls outside of torch.func and forward mode; :func:`short_attention` calls it.

    It takes the five differentiable arguments and then all of them in one tuple: every argument of a Function costs a call time.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, bias: Tensor | None, inputs: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        output: tuple[Tensor, Tensor, Tensor] = below_autograd(torch.ops.dmattn.forward, inputs)
        save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        of_inputs, of_key_bias, of_bias = _of_inputs(ctx, grad_out, grad_lse, *ctx.needs_input_grad[3:5])
        return *of_inputs, of_key_bias, of_bias, None


def wants_gradient(inputs: tuple[Any, ...]) -> bool:
    """Whether one of forward's differentiable arguments requires a gradient, in less time than torch needs to ask all 24."""
    query, key, value, key_bias, bias = *inputs[:3], inputs[KEY_BIAS], inputs[BIAS]
    biases = (key_bias is not None and key_bias.requires_grad) or (bias is not None and bias.requires_grad)
    return query.requires_grad or key.requires_grad or value.requires_grad or biases


def short_attention(inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = ShortAttention.apply(*inputs[:3], inputs[KEY_BIAS], inputs[BIAS], inputs)
    return results


class Attention(torch.autograd.Function):
    """All arguments of the op ``forward`` -> out, lse, lse_rest; reverse and forward mode, vmap, in any order and any number of times."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output: tuple[Tensor, Tensor, Tensor] = below_autograd(torch.ops.dmattn.forward, inputs)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        save_for_backward(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:OPTIONS])

    backward = staticmethod(forward_gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor, None]:
        given = [*tangents[:3], tangents[KEY_BIAS], tangents[BIAS]]
        with composed.primals(ctx) as tensors:
            return *composed.tangents((*tensors, *ctx.options, *ctx.last), given), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return batching.forward(Attention.apply, info, in_dims, *inputs)


class AttentionGradients(torch.autograd.Function):
    """All arguments of the op ``backward`` -> its five gradients; differentiable like :class:`Attention`.

    ``out``, ``lse`` and ``lse_rest`` are results of the other arguments, not variables of their own: their derivatives are in those of the
    others, and they themselves get none.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = below_autograd(torch.ops.dmattn.backward, inputs)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        tensors = (*inputs[:5], *inputs[7 : 4 + OPTIONS])  # all but out and lse
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.options, ctx.need = inputs[4 + OPTIONS : NEEDS.start], inputs[NEEDS]
        ctx.last = inputs[NEEDS.stop + 1 :]

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        key_bias, bias = 4 + KEY_BIAS, 4 + BIAS
        wanted = (ctx.needs_input_grad[key_bias], ctx.needs_input_grad[bias])
        none = (None,) * len(BACKWARD_ARGUMENTS)
        if all(x is None for x in given):
            return none
        first, second, (query, key, value, by_key_bias, by_bias) = composed.gradients_of_gradients(
            grad_out, grad_lse, (*tensors, *ctx.options, *ctx.last), ctx.need, given, wanted
        )
        results: list[Any] = list(none)
        results[:5] = first, second, query, key, value
        results[key_bias], results[bias] = by_key_bias, by_bias
        inputs = (grad_out, grad_lse, *tensors[:3], None, None, *tensors[3:])
        return tuple(
            result.to(x.dtype) if needed and x is not None and result is not None else None
            for result, needed, x in zip(results, ctx.needs_input_grad, (*inputs, *none), strict=False)
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        given = [*tangents[2:5], tangents[4 + KEY_BIAS], tangents[4 + BIAS]]
        with composed.primals(ctx) as (grad_out, grad_lse, *tensors):
            query, key, value, key_bias, bias = composed.tangents_of_gradients(
                grad_out, grad_lse, (*tensors, *ctx.options, *ctx.last), ctx.need, tangents[0], tangents[1], given
            )
        dtype = grad_out.dtype
        empty = torch.zeros((0,), dtype=accumulate_dtype(dtype), device=grad_out.device)
        return (
            *(x.to(dtype) for x in (query, key, value) if x is not None),
            empty if key_bias is None else key_bias,
            empty if bias is None else bias.to(empty.dtype),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return batching.backward(AttentionGradients.apply, info, in_dims, *inputs)


# Registration for torch.ops.dmattn.* --------------------------------------------------------------------------------------------------

# torch.library.register_autograd knows neither forward mode (tangents would be dropped without a word) nor torch.func, so the rules are
# registered for the dispatcher's keys themselves: one for autograd, one that torch.func's transforms stand behind.
_rules = rules()


def are_plain(inputs: tuple[Any, ...]) -> bool:
    """Whether nothing among them is symbolic, fake, wrapped or otherwise special."""
    return PLAIN.issuperset(map(type, inputs))


def has_tangent(inputs: tuple[Any, ...]) -> bool:
    """Asks the tensors: a forward-mode level that compiled code has opened does not show in ``forward_ad._current_level``. In the forward of
    an autograd.Function, as compiled code has one, torch looks at no tangents."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    tensors = (x for x in inputs if isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point())
    return any(_tangent_of(x) is not None for x in tensors)


def _tangent_of(x: Tensor) -> Tensor | None:
    if type(x) in PLAIN:  # forward_ad.unpack_dual in less time
        tangent: Tensor | None = torch._VF._unpack_dual(x, level=0)[1]
    else:
        tangent = forward_ad.unpack_dual(x, level=0).tangent
    return tangent


def _forward_rule(*inputs: Any) -> Any:
    if not are_plain(inputs) and sharding.any_sharded(inputs):
        return sharding.forward(inputs)
    if has_tangent(inputs):
        return Attention.apply(*inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return short_attention(inputs)
    return below_autograd(torch.ops.dmattn.forward, inputs)


def _backward_rule(*inputs: Any) -> Any:
    inputs = _with_defaults(inputs)
    if has_tangent(inputs) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        return AttentionGradients.apply(*inputs)
    return below_autograd(torch.ops.dmattn.backward, inputs)


def _transformed_backward_rule(*inputs: Any) -> Any:
    return AttentionGradients.apply(*_with_defaults(inputs))


def refuse_gradients(name: str = "decode_attention") -> None:
    instead = "without a cache" if "cache" in name.lower() else "with dmattn.attention"
    raise RuntimeError(
        f"dmattn: {name} has no gradient, got a tensor that requires one: call it under torch.no_grad() or "
        f"torch.inference_mode(), or train {instead}"
    )


def _decode_rule(*inputs: Any) -> Any:
    if not are_plain(inputs) and sharding.any_sharded(inputs):
        return sharding.decode(inputs)
    if has_tangent(inputs) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        refuse_gradients()
    return below_autograd(torch.ops.dmattn.decode, inputs)


def _refusing_rule(name: str, *inputs: Any) -> Any:
    # Inductor traces what writes its arguments twice, and expects the same nodes: ask for tangents only where there can be some.
    is_dual = forward_ad._current_level >= 0 and has_tangent(inputs)
    if is_dual or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
        refuse_gradients(name)
    return below_autograd(getattr(torch.ops.dmattn, name), inputs)


def _with_defaults(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments of ``backward``: the dispatcher leaves out last ones that have their defaults."""
    return (*inputs, *tuple(arguments_of("backward").values())[len(inputs) :])


_rules.impl("forward", _forward_rule, "Autograd")
_rules.impl("forward", Attention.apply, "FuncTorchDynamicLayerFrontMode")
_rules.impl("backward", _backward_rule, "Autograd")
_rules.impl("backward", _transformed_backward_rule, "FuncTorchDynamicLayerFrontMode")
_rules.impl("decode", _decode_rule, "Autograd")
for _name in ("forward_plain", "cache_update", "cache_step", "cache_join", "cache_extend", "cache_rewind"):
    _rules.impl(_name, partial(_refusing_rule, _name), "Autograd")
