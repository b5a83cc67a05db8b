"""The entrypoint, and the ops behind it."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ._ops import NAMESPACE, ops, qualified
from .arguments import Activation, check
from .backward import backward, like_gradients
from .call import SCHEMA, Call
from .forward import forward, like_z


def experts_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    block_size: Sequence[int] | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    has_gate: bool = True,
    is_concatenated: bool = True,
    is_transposed: bool = False,
) -> Tensor:
    """out[t] = sum over slots j of top_k_weights[t, j] * down(activation(gate_up(hidden_states[t]))), by expert.

    Args:
        hidden_states: (T, H) bfloat16, float16 or float32.
        top_k_index: (T, k) integers; an id that is not within 0 .. E - 1 is a sentinel, which leaves no trace.
        top_k_weights: (T, k) bfloat16, float16 or float32.
        gate_up_proj: (E, 2I, H), (E, H, 2I) if transposed, I for 2I without a gate; float8_e4m3fn or as hidden_states.
        down_proj: (E, H, I), (E, I, H) if transposed.
        gate_up_proj_bias: (E, 2I) or None.
        down_proj_bias: (E, H) or None.
        gate_up_proj_scale: of FP8 weights, (E, ceil(2I / bn), ceil(H / bk)) float32 or UE8M0.
        down_proj_scale: of FP8 weights, (E, ceil(H / bn), ceil(I / bk)).
        block_size: [bn, bk] of FP8 weights.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swiglu_oai".
        alpha: of "swiglu_oai".
        limit: clamps the gate from above and the up on both sides.
        has_gate: gate_up_proj holds gate and up.
        is_concatenated: the gate precedes the up; otherwise they alternate.
        is_transposed: the last two dimensions of both weights are exchanged.

    Returns:
        (T, H) in the dtype of hidden_states, contiguous.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, an unknown activation, or options that exclude each other.
    """
    between = Activation(activation, alpha, limit, has_gate, has_gate and not is_concatenated)
    problem = check(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_proj_bias,
        down_proj_bias,
        gate_up_proj_scale,
        down_proj_scale,
        block_size,
        between,
        is_transposed=is_transposed,
    )
    call = Call(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_proj_bias,
        down_proj_bias,
        gate_up_proj_scale,
        down_proj_scale,
        problem.block_size,
        *between,
        is_transposed,
    )
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.learned)
    result: Tensor = ops.experts_and_sums.default(*call)[0] if learns else ops.experts.default(*call)
    return result


# --- without gradients --------------------------------------------------------------------------------------------

# Not a `custom_op`: the wrappers of one cost as much as a kernel's launch at each call, and there is nothing to derive.
_LIBRARY: Final = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(f"experts({SCHEMA}) -> Tensor")


def _experts(*arguments: Any) -> Tensor:  # noqa: ANN401 - as SCHEMA has them
    return forward(Call(*arguments), keep=False).out


def _like_experts(*arguments: Any) -> Tensor:  # noqa: ANN401
    return torch.empty_like(Call(*arguments).hidden_states, memory_format=torch.contiguous_format)


_LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake(qualified("experts"), _like_experts, lib=_LIBRARY)


# --- with gradients -----------------------------------------------------------------------------------------------


@torch.library.custom_op(qualified("experts_and_sums"), mutates_args=(), schema=f"({SCHEMA}) -> (Tensor out, Tensor z)")
def _experts_and_sums(*arguments: Any) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
    return forward(Call(*arguments), keep=True)


@_experts_and_sums.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return _like_experts(*arguments), like_z(Call(*arguments))


@torch.library.custom_op(
    qualified("experts_backward"),
    mutates_args=(),
    schema=f"(Tensor grad, Tensor z, bool[] wanted, {SCHEMA}) -> Tensor[]",
)
def _experts_backward(grad: Tensor, z: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:  # noqa: ANN401
    return backward(grad, z, Call(*arguments), wanted)


@_experts_backward.register_fake
def _(grad: Tensor, z: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:  # noqa: ANN401, ARG001
    return like_gradients(Call(*arguments), wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 - torch's
    call = Call(*inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *call[:9])
    ctx.options = call[9:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    z, *tensors = ctx.saved_tensors
    needs = Call(*ctx.needs_input_grad)
    frozen = ctx.options[0] is not None  # FP8
    wanted = [bool(need) for need in needs.learned]
    wanted[2:4] = [want and not frozen for want in wanted[2:4]]
    found = ops.experts_backward.default(grad, z, wanted, *tensors, *ctx.options)
    hidden, weights, gate_up, down, gate_up_bias, down_bias = (
        gradient if want else None for gradient, want in zip(found, wanted, strict=True)
    )
    return hidden, None, weights, gate_up, down, gate_up_bias, down_bias, *((None,) * (2 + len(ctx.options)))


_experts_and_sums.register_autograd(_gradients, setup_context=_setup_context)
