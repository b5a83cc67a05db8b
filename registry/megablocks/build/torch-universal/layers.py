"""The mixture of experts as layers: `forward`, to be put into a module that has a router and experts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .mixture import mixture, shared


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


class MegaBlocksMoeMLPWithSharedExpert(MegaBlocksMoeMLP):
    """As MegaBlocksMoeMLP, plus what an expert without a router makes of every token.

    A module of its own, unlike the others: the weights of the shared expert are set on it, and `router` and `experts`
    too. Without them it computes what MegaBlocksMoeMLP does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_shared_expert_weights(None, None)

    def set_shared_expert_weights(
        self,
        up_proj_weight: Tensor | None,
        down_proj_weight: Tensor | None,
        up_proj_bias: Tensor | None = None,
        down_proj_bias: Tensor | None = None,
        weighted_sum: bool = False,  # noqa: FBT001, FBT002 - the published signature
        activation_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Set what the shared expert computes: down(activation_fn(up(x))).

        Args:
            up_proj_weight: (S, H).
            down_proj_weight: (H, S).
            up_proj_bias: (S,), or None.
            down_proj_bias: (H,), or None.
            weighted_sum: result = (shared + top_k * experts) / (top_k + 1), rather than shared + experts.
            activation_fn: gelu by erf if None.
        """
        self.shared_up_proj_weight = up_proj_weight
        self.shared_down_proj_weight = down_proj_weight
        self.shared_up_proj_bias = up_proj_bias
        self.shared_down_proj_bias = down_proj_bias
        self.shared_expert_weighted_sum = weighted_sum
        self.shared_activation_fn = activation_fn

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102 - the class says it
        output, scores = mixture(x, self.router, self.experts)
        if self.shared_up_proj_weight is None or self.shared_down_proj_weight is None:
            return output, scores
        beside = shared(
            x,
            (self.shared_up_proj_weight, self.shared_up_proj_bias),
            (self.shared_down_proj_weight, self.shared_down_proj_bias),
            self.shared_activation_fn,
        )
        if self.shared_expert_weighted_sum:
            count = self.router.top_k + 1
            return beside * (1 / count) + output * (self.router.top_k / count), scores
        return beside + output, scores
