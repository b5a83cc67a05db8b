"""Causal depthwise convolution along time, as state-space models and linear attention have it in front.

Every channel d has a filter of W taps of its own, and sees no later position than its own:

    y[b, d, t] = act(bias[d] + sum over w < W of weight[d, w] * x[b, d, t - (W - 1) + w])

in float32 (float64 for float64), cast to the dtype of x at the end. act is silu, or nothing. Before the first position
come the inputs of a state, or zeros.

Source: Gu and Dao, Mamba (arXiv:2312.00752), 3.4, for the place of the convolution in a block; parameter names, layouts
and the circular buffer are those of kernels-community/causal-conv1d.

A row of `conv_state_indices` that is not there is a ValueError of the reference on the CPU, outside of graphs, and is
not looked at elsewhere. The reference build does the rest too. Published builds (version 1) do behind the guards of the
manifest, with these exceptions:

- W is 2, 3 or 4; weight and bias have one dtype.
- With final states there is at least one row, channel and position.
- `seq_idx`, `initial_states` and `return_final_states` want x channels-last: (B, L, D) in memory, transposed, D and all
  other strides multiples of 8. So do the states themselves, (B, W - 1, D) in memory.
- `seq_idx`, `cache_seqlens` and `conv_state_indices` are int32 and contiguous.
- Other errors tell what is wrong (RuntimeError, AssertionError, NotImplementedError).
- torch.compile makes no single graph of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["CausalConv1d", "Convolution", "StateUpdate", "VariableLengthStates"]

_Activation = Literal["silu", "swish"] | None


class Convolution(Protocol):
    """`causal_conv1d_fn`: whole sequences."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
        final_states_out: torch.Tensor | None = None,
        activation: _Activation = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(B, D, L) -> (B, D, L), by the formula at the top of this module.

        Args:
            x: (B, D, L) bfloat16, float16 or float32.
            weight: (D, W) float, of the dtype of x or another.
            bias: (D,) float, or None.
            seq_idx: (B, L) int32, the number of the sequence that a position belongs to, where a row holds several one
                after the other. A position sees only those of its own sequence, whatever the others hold.
            initial_states: (B, D, W - 1) in the dtype of x, the inputs before the first position.
            return_final_states: also return the state that the next call starts from: the last W - 1 of the inputs,
                those of `initial_states`, or zeros, in front of them.
            final_states_out: (B, D, W - 1) in the dtype of x, written and returned as that state. Not looked at without
                `return_final_states`.
            activation: None, or "silu" or its other name "swish".

        Returns:
            (B, D, L) in the dtype of x, and the state (B, D, W - 1) if asked for. Both are differentiable in x and
            initial_states; the first also in weight and bias.

        Raises:
            TypeError: a dtype.
            ValueError: a shape, a device or an activation; initial or final states together with `seq_idx`.
        """
        ...


class StateUpdate(Protocol):
    """`causal_conv1d_update`: one step or some, as in decoding."""

    def __call__(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: _Activation = None,
        cache_seqlens: torch.Tensor | None = None,
        conv_state_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The outputs of the L steps that come after the inputs in `conv_state`, into which they are put.

        Args:
            x: (B, D) bfloat16, float16 or float32 for one step, or (B, D, L).
            conv_state: (B, D, S) in the dtype of x, S >= W - 1, any strides; written. It holds the last S inputs, the
                newest last.
            weight: (D, W) float, of the dtype of x or another.
            bias: (D,) float, or None.
            activation: None, or "silu" or its other name "swish".
            cache_seqlens: (B,) int32, not negative: how many steps came before. With it, the state is a circular
                buffer: step s, counted from zero, is kept at s % S, and of more than S steps the last stay.
            conv_state_indices: (B,) int32, no two alike: rows of a `conv_state` (N, D, S) that the rows of x belong to.
                Other rows of it are left alone.

        Returns:
            (B, D) or (B, D, L), as x, in its dtype. Not differentiable.

        Raises:
            TypeError: a dtype.
            ValueError: a shape, a device or an activation.
        """
        ...


class VariableLengthStates(Protocol):
    """`causal_conv1d_varlen_states`: the states that packed sequences leave."""

    def __call__(self, x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
        """The last `state_len` inputs of each sequence.

        Args:
            x: (T, D) bfloat16, float16 or float32, one sequence after the other.
            cu_seqlens: (B + 1,) int32 or int64, ascending from 0 to T: where each starts, and the last one ends.
            state_len: inputs of a state, S.

        Returns:
            (B, D, S) in the dtype of x, the newest input last, with zeros in front where a sequence is shorter. Not
            differentiable.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CausalConv1d:
    """The entrypoints of `causal_conv1d`."""

    __kernel__: ClassVar = "causal_conv1d"

    causal_conv1d_fn: Convolution
    causal_conv1d_update: StateUpdate
    causal_conv1d_varlen_states: VariableLengthStates
