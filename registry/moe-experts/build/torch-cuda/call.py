"""The arguments of the ops."""

from typing import Final, NamedTuple

from torch import Tensor

from .arguments import Activation
from .product import Matrices, matrices

SCHEMA: Final = (
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, Tensor down_proj,"
    " Tensor? gate_up_proj_bias, Tensor? down_proj_bias, Tensor? gate_up_proj_scale, Tensor? down_proj_scale,"
    " int[]? block_size, str name, float alpha, float? limit, bool gated, bool interleaved, bool is_transposed"
)


class Call(NamedTuple):
    """As SCHEMA has them; tensors first."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None
    gate_up_proj_scale: Tensor | None
    down_proj_scale: Tensor | None
    block_size: list[int] | None
    name: str
    alpha: float
    limit: float | None
    gated: bool
    interleaved: bool
    is_transposed: bool

    @property
    def between(self) -> Activation:
        """What stands between the two products."""
        return Activation(self.name, self.alpha, self.limit, self.gated, self.interleaved)

    @property
    def experts(self) -> int:
        """How many there are here."""
        return self.gate_up_proj.shape[0]

    @property
    def slots(self) -> int:
        """Of each token."""
        return self.top_k_index.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether no row can be real."""
        return not self.experts or not self.top_k_index.numel()

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What may get a gradient."""
        return (
            self.hidden_states,
            self.top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
        )

    def first(self) -> Matrices:
        """What hidden rows are multiplied by."""
        return matrices(
            self.gate_up_proj, is_transposed=self.is_transposed, gated=self.gated, interleaved=self.interleaved
        )

    def second(self) -> Matrices:
        """What activated rows are multiplied by."""
        return matrices(self.down_proj, is_transposed=self.is_transposed)
