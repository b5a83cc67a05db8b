"""The gated delta rule: linear attention whose state forgets, and corrects what it says of a key.

Each head has a state S of K rows and V columns, which starts from zeros. A step of key k, value v, gate g and rate beta

    S = exp(g) * S;    S = S + k @ (beta * (v - S.T @ k)).T;    o = S.T @ (scale * q)

in float32 (float64 for float64). `scale` is K ** -0.5 if it is None.

================  ======================  =============================================================================
argument          shape                   meaning
================  ======================  =============================================================================
q, k              (B, T, H, K)            of one dtype with v
v                 (B, T, HV, V)           HV is a multiple of H: head h of it has head h // (HV / H) of q and k
g                 (B, T, HV)              the logarithm of the decay, 0 or below
beta              (B, T, HV)
initial_state     (N, HV, K, V)           N is B; (N, HV, V, K) with `state_v_first`, as is the final state
cu_seqlens        (N + 1,) integers       ascending from 0 to T: where the N sequences start that B = 1 rows hold
================  ======================  =============================================================================

What can be done on the way in:

- `use_qk_l2norm_in_kernel`: q and k are divided by sqrt(sum of squares + 1e-6).
- `use_gate_in_kernel`: g is made of -exp(A_log) * softplus(g + dt_bias), A_log and dt_bias (HV,), the latter or None.
- `use_beta_sigmoid_in_kernel`: beta is made of sigmoid(beta), and of twice that with `allow_neg_eigval`.

A sequence without positions ends in the state that it starts from.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv:2412.06464), equation (10); for twice the rate, Grazzi
et al. (arXiv:2411.12537). Parameter names and layouts are those of kernels-community/fla.

The reference build does all of this. Published builds (version 1) do behind the guards of the manifest, with these
exceptions:

- There is at least one row and position; K is 256 at most for whole sequences. These are computed with numbers rounded
  to the dtype of q, or to TF32, between the products of a chunk.
- On devices of compute capability 9, backward of whole sequences raises RuntimeError with Triton 3.4 to 3.7.0, which
  compiles it wrongly, unless tilelang is installed.
- Step by step there is no gradient: backward raises NotImplementedError. K is a power of two where there is a `gk`, and
  V where there is a `gv`.
- Other errors tell what is wrong, and shapes of gates and values of `cu_seqlens` are not looked at.
- torch.compile makes no single graph of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkGatedDeltaRule", "FusedRecurrentGatedDeltaRule", "GatedDeltaRule"]


class ChunkGatedDeltaRule(Protocol):
    """`chunk_gated_delta_rule`: for whole sequences, as in prefill and training."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
        use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
        use_beta_sigmoid_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
        allow_neg_eigval: bool = False,  # noqa: FBT001, FBT002 - the published signature
        state_v_first: bool = False,  # noqa: FBT001, FBT002 - the published signature
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        cp_context: None = None,
        *,
        chunk_size: int = 64,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs of all positions, and the last states. Shapes and flags are at the top of this module.

        Args:
            q: bfloat16, float16 or float32.
            k: in the dtype of q.
            v: in the dtype of q.
            g: float.
            beta: float.
            scale: of q.
            initial_state: float, or None for zeros.
            output_final_state: also return the last states.
            use_qk_l2norm_in_kernel: see there.
            use_beta_sigmoid_in_kernel: see there.
            allow_neg_eigval: see there; only with the one before.
            state_v_first: columns of states come before rows.
            cu_seqlens: int32 or int64.
            cu_seqlens_cpu: the same in memory of the host, or None: a build may then wait for the device.
            cp_context: None; several devices are not promised.
            chunk_size: positions that a build works on at a time: 16, 32 or 64. Makes no difference.
            use_gate_in_kernel: see there.
            A_log: float; needed with the one before.
            dt_bias: float, or None.

        Returns:
            (B, T, HV, V) in the dtype of q, and the states float32 if asked for, or else None. Both are differentiable
            in all float tensors.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device, arguments that do not go together, or `cu_seqlens` that do not ascend from 0
                to T.
        """
        ...


class FusedRecurrentGatedDeltaRule(Protocol):
    """`fused_recurrent_gated_delta_rule`: for a few positions, as in decoding."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        gk: torch.Tensor | None = None,
        gv: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
        use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
        use_gate_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        use_beta_sigmoid_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
        allow_neg_eigval: bool = False,  # noqa: FBT001, FBT002 - the published signature
        state_v_first: bool = False,  # noqa: FBT001, FBT002 - the published signature
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same rule, with decays of single rows and columns and rates of single columns besides.

        Args:
            q: bfloat16, float16 or float32.
            k: in the dtype of q.
            v: in the dtype of q.
            g: float, or None for no decay.
            gk: (B, T, HV, K) float, the logarithms of decays of rows, or None.
            gv: (B, T, HV, V) float, the logarithms of decays of columns, or None.
            beta: float, also (B, T, HV, V) for one rate a column; or None for ones.
            scale: of q.
            initial_state: float, or None for zeros. It is not written.
            output_final_state: also return the last states.
            use_qk_l2norm_in_kernel: see the top of this module.
            use_gate_in_kernel: see there; of `g`, which is then given.
            A_log: float; needed with the one before.
            dt_bias: float, or None.
            use_beta_sigmoid_in_kernel: see there.
            allow_neg_eigval: see there; only with the one before.
            state_v_first: columns of states come before rows.
            cu_seqlens: int32 or int64.

        Returns:
            (B, T, HV, V) in the dtype of v, and the states float32 if asked for, or else None. That they are
            differentiable is not promised.

        Raises:
            As the other one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GatedDeltaRule:
    """The entrypoints of `gated_delta_rule`."""

    __kernel__: ClassVar = "gated_delta_rule"

    chunk_gated_delta_rule: ChunkGatedDeltaRule
    fused_recurrent_gated_delta_rule: FusedRecurrentGatedDeltaRule
