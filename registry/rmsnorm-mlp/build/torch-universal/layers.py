"""The layer and its layout."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernel_loader.fusion import Concatenate, WeightConverter

PARTS = ("gate_proj", "up_proj", "down_proj")


class RMSNormMLP(nn.Module):
    """down(act(gate(n)) * up(n)) with n = weight * x / sqrt(mean(x ** 2) + eps), for x (..., H) of a float dtype.

    The norm is in float32 and rounded to the dtype of x before it is weighted, as in Llama (Zhang and Sennrich,
    "Root Mean Square Layer Normalization", 2019; Shazeer, "GLU Variants Improve Transformer", 2020).
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    weight: Tensor
    variance_epsilon: float
    gate_up_proj: nn.Module
    down_proj: nn.Module
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) in the dtype of hidden_states."""
        normed = _normed(hidden_states, self.weight, self.variance_epsilon)
        gate, up = self.gate_up_proj(normed).chunk(2, dim=-1)
        result: Tensor = self.down_proj(self.act_fn(gate) * up)
        return result


class RMSNormMLPLayout(RMSNormMLP):
    """A norm with `weight` (H,) and an MLP with gate_proj, up_proj (I, H) and down_proj (H, I), with biases or without.

    Its gate_up_proj has the rows of the gate first, (2I, H). Where norm and MLP have memory, they are called with a row
    of numbers, and refused if they give something else than the layer would.
    """

    conversion_mapping: ClassVar = [
        WeightConverter("RMSNorm.weight", "weight"),
        WeightConverter(["MLP.gate_proj.weight", "MLP.up_proj.weight"], "gate_up_proj.weight", [Concatenate(0)]),
        WeightConverter(
            ["MLP.gate_proj.bias", "MLP.up_proj.bias"], "gate_up_proj.bias", [Concatenate(0)], optional=True
        ),
        WeightConverter("MLP.down_proj.*", "down_proj.*"),
    ]

    def __init__(self, norm: Any, mlp: Any) -> None:  # noqa: ANN401 - modules with those attributes
        super().__init__()
        gate, up, down = parts = [getattr(mlp, name) for name in PARTS]
        if not all(getattr(type(part), "forward", None) is nn.Linear.forward for part in parts):
            raise TypeError(f"expected {', '.join(PARTS)} to be nn.Linear, got {_kinds(parts)}")
        if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
            raise ValueError(f"expected gate_proj and up_proj of one shape, got {gate} and {up}")
        if more := [name for name, _ in mlp.named_children() if name not in (*PARTS, "act_fn")]:
            raise ValueError(f"expected an MLP of {', '.join(PARTS)} and act_fn, got {', '.join(more)} too")
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        if not isinstance(self.variance_epsilon, float) or isinstance(norm, nn.LayerNorm):
            raise TypeError(f"expected an RMSNorm with an epsilon, got {norm}")
        self.gate_up_proj = nn.Linear(
            gate.in_features,
            2 * gate.out_features,
            bias=gate.bias is not None,
            device="meta",
            dtype=gate.weight.dtype,
        )
        self.down_proj = down
        self.act_fn = mlp.act_fn
        if not self.weight.is_meta and not gate.weight.is_meta:
            self._compare(norm, mlp)

    def _compare(self, norm: Any, mlp: Any) -> None:  # noqa: ANN401 - as above
        count = torch.arange(1, self.weight.numel() + 1, dtype=torch.float32, device=self.weight.device)
        x = torch.sin(count).to(self.weight.dtype)[None]
        with torch.no_grad():
            normed = _normed(x, self.weight, self.variance_epsilon)
            if not _near(norm.forward(x), normed):
                raise ValueError(
                    f"expected weight * x / sqrt(mean(x ** 2) + eps) of the norm, got otherwise from {norm}"
                )
            product = self.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
            if not _near(mlp.forward(normed), self.down_proj(product)):
                raise ValueError(f"expected down(act(gate(x)) * up(x)) of the MLP, got otherwise from {mlp}")


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _near(given: Any, expected: Tensor) -> bool:  # noqa: ANN401 - whatever a module returns
    """Within roundings of the dtype; where memory was never written, it tells nothing."""
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        return False
    gap, scale = (given - expected).abs().max(), expected.abs().max()
    eps = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    return not bool(scale.isfinite()) or bool(gap <= 32 * eps * scale)


def _kinds(parts: list[Any]) -> str:
    return ", ".join(type(part).__qualname__ for part in parts)
