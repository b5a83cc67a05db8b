"""Rotary position embedding as a layer: `forward` alone, to be put in the place of a model's own function."""

from torch import Tensor, nn

from . import rotate


class apply_rotary_transformers(nn.Module):  # noqa: N801 - the published name
    """Queries and keys turned, as the function of this name does it."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(  # noqa: D102 - the function says it
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return rotate.apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim)
