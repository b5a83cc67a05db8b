"""Selective state-space models: the scans of Mamba and Mamba-2, and one step of either.

Every channel has a state of n numbers, which starts from zeros and decays as its input says:

    h[t] = exp(dt[t] * A) * h[t - 1] + dt[t] * x[t] * B[t]
    y[t] = sum over the state of C[t] * h[t], plus D * x[t]                     all of it times silu(z[t])

in float32 (float64 for float64), cast to the dtype of x at the end. B and C are shared by the channels of a group: with
g groups, channel or head c has those of group c // (their number / g). A step size is `dt` plus its bias, and softplus
of that where asked for; softplus(v) = log(1 + exp(v)), and v itself above 20.

Sources: Gu and Dao, Mamba (arXiv:2312.00752), algorithm 2 and equation (2); Dao and Gu, Transformers are SSMs
(arXiv:2405.21060), 2 and 6, for heads. Parameter names and layouts are those of kernels-community/mamba-ssm.

The reference build does all of this. Published builds (version 2) do behind the guards of the manifest, with these
exceptions:

- There is at least one row, channel and position; n is 256 at most.
- The scan of Mamba wants A, D, `delta_bias` and what does not change of B and C in float32. Its gradients to z come of
  outputs that were rounded to the dtype of u. A may be complex there, and here not.
- The softplus of a step is 0 below some -17, where exp(v) is lost in 1.
- `seq_idx` is int32.
- Other errors tell what is wrong (RuntimeError, AssertionError), and in a step they may be of the machine.
- torch.compile makes no single graph of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkScan", "MambaSSM", "SelectiveScan", "SelectiveStateUpdate"]


class SelectiveScan(Protocol):
    """`selective_scan_fn`: Mamba, whole sequences."""

    def __call__(
        self,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
        return_last_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(b, d, l) -> (b, d, l), by the formula at the top of this module, with u for x and delta for dt.

        Args:
            u: (b, d, l) bfloat16, float16 or float32.
            delta: (b, d, l) in the dtype of u.
            A: (d, n) float32.
            B: (b, n, l) or (b, g, n, l) in the dtype of u, g dividing d; (d, n) float32 if it does not change.
            C: one of the three, as B, whichever B is.
            D: (d,) float32, or None for zeros.
            z: (b, d, l) in the dtype of u, or None for no factor.
            delta_bias: (d,) float32, or None.
            delta_softplus: whether softplus is taken of delta with its bias.
            return_last_state: also return the last state.

        Returns:
            (b, d, l) in the dtype of u, and the state (b, d, n) float32 if asked for. The first is differentiable in
            all tensors; no gradient passes through the second.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device.
        """
        ...


class SelectiveStateUpdate(Protocol):
    """`selective_state_update`: one step of Mamba or Mamba-2, as in decoding."""

    def __call__(
        self,
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
        state_batch_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of the step that comes after `state`, which is written.

        Without heads, as in Mamba, the dimension h is left out of every tensor, p is the number of channels, and B and
        C are (b, n). Tensors may have any strides, those of expanded ones included: what a head shares is expanded.

        Args:
            state: (b, h, p, n) float of any dtype, rounded to it after the step.
            x: (b, h, p) bfloat16, float16 or float32.
            dt: (b, h, p) float.
            A: (h, p, n) float.
            B: (b, g, n) float, g dividing h.
            C: (b, g, n) float.
            D: (h, p) float, or None for zeros.
            z: (b, h, p) float, or None for no factor.
            dt_bias: (h, p) float, or None.
            dt_softplus: whether softplus is taken of dt with its bias.
            state_batch_indices: (b,) int32 or int64, no two alike: rows of a `state` (N, h, p, n) that the rows of x
                belong to. Other rows of it are left alone. A negative one is padding: whatever stands in its row of x
                and the rest, it comes out as zeros.

        Returns:
            (b, h, p) in the dtype of x. Not differentiable.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device.
        """
        ...


class ChunkScan(Protocol):
    """`mamba_chunk_scan_combined`: Mamba-2, whole sequences."""

    def __call__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        dt_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
        dt_limit: tuple[float, float] = ...,
        return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
        return_varlen_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(b, l, h, p) -> (b, l, h, p), by the formula at the top of this module; a head shares dt, A and its bias.

        Args:
            x: (b, l, h, p) bfloat16, float16 or float32.
            dt: (b, l, h) float.
            A: (h,) float32.
            B: (b, l, g, n) in the dtype of x, g dividing h.
            C: (b, l, g, n) in the dtype of x.
            chunk_size: positions that a build works on at a time, a power of two from 16 to 256. Makes no difference.
            D: (h,) or (h, p) float, or None for zeros.
            z: (b, l, h, p) in the dtype of x, or None for no factor.
            dt_bias: (h,) float, or None.
            initial_states: (b, h, p, n) float, the states before the first step.
            seq_idx: (b, l) int32, the number of the sequence that a position belongs to, where a row holds several one
                after the other: the state is forgotten where it changes. None comes again, and the first is 0 if there
                are `initial_states`.
            cu_seqlens: None.
            dt_softplus: whether softplus is taken of dt with its bias.
            dt_limit: what the step size is held within after that; (0, infinity) is no limit.
            return_final_states: also return the states after the last step.
            return_varlen_states: False.

        Returns:
            (b, l, h, p) in the dtype of x, and the states (b, h, p, n) float32 if asked for. Both are differentiable in
            all float tensors.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device, a `chunk_size` below 1, or `return_varlen_states`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class MambaSSM:
    """The entrypoints of `mamba_ssm`."""

    __kernel__: ClassVar = "mamba_ssm"

    selective_scan_fn: SelectiveScan
    selective_state_update: SelectiveStateUpdate
    mamba_chunk_scan_combined: ChunkScan
