"""MegaBlocks: the mixture-of-experts MLP of GPT-OSS as layers, and the ops on bins that such layers are made of.

The layers route each token x (H,) to the `router.top_k` experts with the largest logits, and add up what they make of
it, weighted by the softmax over those logits:

    logits = router.weight @ x + router.bias
    gate, up = x @ gate_up_proj[e] + gate_up_proj_bias[e]          in alternate columns
    made[e] = ((clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)) @ down_proj[e] + down_proj_bias[e]
                                                                   with g = clamp(gate, max=limit)

`router` has `weight` (E, H), `bias` (E,) and `top_k`; `experts` has `gate_up_proj` (E, H, 2I), `gate_up_proj_bias`
(E, 2I), `down_proj` (E, I, H), `down_proj_bias` (E, H), `alpha`, `limit`, `num_experts` and `hidden_size`. All tensors
have the dtype of x, which every product and sum is rounded to.

The ops work on bins: consecutive runs of a row, given by `bins` (E,) int32, where each of them ends. Numbers are int16,
int32 or int64 unless said otherwise, and an output that is passed in has the dtype of the input.

Sources: Gale et al., MegaBlocks (arXiv:2211.15841); the GPT-OSS model card for the clamped SwiGLU. Names of parameters
are those of kernels-community/megablocks, version 1.

The reference build does all of this. Code that must also run on published builds (version 1) keeps to what those do:
ops on CUDA and ROCm alone, contiguous, cumulative sums along dimension 1 of a matrix or along a vector, replication of
float16, int16 and int32; 7.0 for `limit`; and no call of `indices`, `replicate_forward` or `replicate_backward`, which
look for ops where there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "ArgSort",
    "CumSum",
    "CumSumInto",
    "Histogram",
    "Indices",
    "Layers",
    "MegaBlocks",
    "Replicate",
    "SharedExpertMlp",
    "Sort",
    "SumReplicas",
]


class SharedExpertMlp(Protocol):
    """`MegaBlocksMoeMLPWithSharedExpert`: a module; `router` and `experts` are set on it."""

    def set_shared_expert_weights(
        self,
        up_proj_weight: torch.Tensor,
        down_proj_weight: torch.Tensor,
        up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
        weighted_sum: bool = False,  # noqa: FBT001, FBT002 - the published signature
        activation_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Add shared(x) = down(activation_fn(up(x))) to the result, an expert that every token goes through.

        Args:
            up_proj_weight: (S, H).
            down_proj_weight: (H, S).
            up_proj_bias: (S,), or None.
            down_proj_bias: (H,), or None.
            weighted_sum: (shared + top_k * experts) / (top_k + 1), rather than shared + experts.
            activation_fn: gelu by erf if None.
        """
        ...

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., H) -> (..., H), and the scores (tokens, top_k). Without shared weights, as `MegaBlocksMoeMLP`."""
        ...


class Layers(Protocol):
    """`layers`: classes whose `forward` computes the formula at the top of this module.

    `forward(x)` takes x (..., H) and returns (..., H), of the shape and dtype of x, and the scores (tokens, top_k), the
    largest first. Differentiable in x, and in every tensor of `router` and `experts`; an expert without a token changes
    nothing, NaN in its weights included, and gets a gradient of zero.

    Attributes:
        MegaBlocksMoeMLP: a forward for a module that has `router` and `experts`.
        CPUMegaBlocksMoeMLP: the same, for CPUs. Published builds repack the experts' weights in place at the first
            call, and compute float32 in bfloat16.
        MegaBlocksMoeMLPWithSharedExpert: a module, with an expert beside those that are routed to.
    """

    MegaBlocksMoeMLP: type[nn.Module]
    CPUMegaBlocksMoeMLP: type[nn.Module]
    MegaBlocksMoeMLPWithSharedExpert: Callable[[], SharedExpertMlp]


class CumSumInto(Protocol):
    """`exclusive_cumsum` and `inclusive_cumsum`."""

    def __call__(self, x: torch.Tensor, dim: int, out: torch.Tensor) -> torch.Tensor:
        """Set `out` to the sum of what comes before each element along `dim`; inclusive: and of the element.

        Args:
            x: any shape. Sums wrap around in its dtype.
            dim: a dimension of x.
            out: of the shape and dtype of x.

        Returns:
            `out`.

        Raises:
            TypeError: a dtype.
            ValueError: the shape or device of `out`.
        """
        ...


class CumSum(Protocol):
    """`cumsum`."""

    def __call__(
        self,
        x: torch.Tensor,
        dim: int = -1,
        exclusive: bool = False,  # noqa: FBT001, FBT002 - the published signature
    ) -> torch.Tensor:
        """As `inclusive_cumsum`, or `exclusive_cumsum`, into a new tensor."""
        ...


class Histogram(Protocol):
    """`histogram`."""

    def __call__(self, x: torch.Tensor, num_bins: int) -> torch.Tensor:
        """How often 0 .. num_bins - 1 occur in each row; other numbers are not counted.

        Args:
            x: (N,) or (B, N).
            num_bins: how many numbers are counted.

        Returns:
            (num_bins,) or (B, num_bins), int32.

        Raises:
            TypeError: the dtype of x.
            ValueError: its shape, or `num_bins` below 0.
        """
        ...


class Indices(Protocol):
    """`indices`: the columns of a block-sparse matrix in which a bin has the same blocks in each of its rows."""

    def __call__(
        self, padded_bins: torch.Tensor, block_size: int, output_block_rows: int, output_block_columns: int
    ) -> torch.Tensor:
        """Number the blocks of each row of blocks: b * columns .. (b + 1) * columns - 1 for the rows of bin b.

        Args:
            padded_bins: (E,) int32, where each bin ends, in elements: multiples of `block_size`.
            block_size: elements along the side of a block.
            output_block_rows: rows of blocks.
            output_block_columns: blocks of a row.

        Returns:
            (output_block_rows * output_block_columns,) int16, row by row. Rows past the last bin are zeros.

        Raises:
            TypeError: the dtype of `padded_bins`.
            ValueError: its shape, or a `block_size` below 1.
        """
        ...


class Replicate(Protocol):
    """`replicate_forward`."""

    def __call__(self, x: torch.Tensor, bins: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Set out[:, j] = x[:, b] for each j of bin b. What lies past the last bin stays as it is.

        Args:
            x: (B, E), any dtype.
            bins: (E,) int32, where each bin ends.
            out: (B, N) of the dtype of x.

        Returns:
            `out`.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device.
        """
        ...


class SumReplicas(Protocol):
    """`replicate_backward`: the transpose of `replicate_forward`."""

    def __call__(self, grad: torch.Tensor, bins: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Set out[:, b] to the sum of grad[:, j] over bin b. What lies past the last bin is not read.

        Args:
            grad: (B, N) float.
            bins: (E,) int32, where each bin ends.
            out: (B, E) of the dtype of grad.

        Returns:
            `out`.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device.
        """
        ...


class Sort(Protocol):
    """`sort`: a radix sort."""

    def __call__(self, x: torch.Tensor, end_bit: int, x_out: torch.Tensor, iota_out: torch.Tensor) -> torch.Tensor:
        """Order the numbers by their lowest `end_bit` bits; those that agree in them stay in order.

        Args:
            x: (N,).
            end_bit: how many bits count. With all of the dtype, negative numbers come first; with fewer, x >= 0.
            x_out: (N,) of the dtype of x, gets the numbers.
            iota_out: (N,) of the dtype of x, gets where each of them was.

        Returns:
            `x_out`.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or device, or `end_bit` below 0.
        """
        ...


class ArgSort(Protocol):
    """`argsort`."""

    def __call__(self, x: torch.Tensor, end_bit: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers in order and where they were, as `sort`, in new tensors."""
        ...


@dataclass(frozen=True, kw_only=True)
class MegaBlocks:
    """The entrypoints of `megablocks`."""

    __kernel__: ClassVar = "megablocks"

    layers: Layers
    exclusive_cumsum: CumSumInto
    inclusive_cumsum: CumSumInto
    cumsum: CumSum
    histogram: Histogram
    indices: Indices
    replicate_forward: Replicate
    replicate_backward: SumReplicas
    sort: Sort
    argsort: ArgSort
