"""The mixture of experts as layers: `forward` alone, to be put into a module that has a router and experts."""

from typing import Any

from torch import Tensor, nn

from .mixture import mixture


class MegaBlocksMoeMLP(nn.Module):
    """The MLP of GPT-OSS, (..., H) -> (..., H) and the router's scores (tokens, top_k).

    `router` and `experts` are those of the module which this is put into; `mixture` says what they have.
    """

    can_torch_compile: bool = False  # how many rows an expert has is read from the data, which breaks the graph
    has_backward: bool = True

    router: Any
    experts: Any

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102 - the class says it
        return mixture(x, self.router, self.experts)


class CPUMegaBlocksMoeMLP(nn.Module):
    """As MegaBlocksMoeMLP, under the name that published builds have for CPUs."""

    can_torch_compile: bool = False  # as above
    has_backward: bool = True

    router: Any
    experts: Any

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102 - the class says it
        return mixture(x, self.router, self.experts)
