"""Layers on packed weights: `forward`, to be put into a module that has the weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .gemm import FEW_ROWS, check_activations, gemm
from .pack import PackedWeight
from .product import product


class NVFP4Linear(nn.Module):
    """A linear layer without bias, (..., in_features) -> (..., out_features) bfloat16, by `gemm`.

    The module which this is put into has `weight`, `weight_sf` and `weight_global_scale`, which are qweight, sf and
    global_scale of a packed weight, `in_features`, `out_features`, and maybe `weight_sf_rowmajor`.
    """

    can_torch_compile: bool = True
    has_backward: bool = False

    weight: Any
    weight_sf: Any
    weight_global_scale: Any
    in_features: Any
    out_features: Any

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        weight = PackedWeight(
            qweight=self.weight,
            sf=self.weight_sf,
            global_scale=self.weight_global_scale,
            n=self.out_features,
            k=self.in_features,
            sf_rowmajor=getattr(self, "weight_sf_rowmajor", None),
        )
        return gemm(weight, x)


class NVFP4FusedSwiGLUMLP(nn.Module):
    """A gated MLP: down_proj(act_fn(gate_proj(x)) * up_proj(x)), the projections being layers of the module.

    Where the module has gates and what they open as one weight, and x is of two rows or fewer, these are multiplied
    at once, without quantising x and with silu for the gates: `nvfp4_fused_qweight` (2 * N, K / 2) and
    `nvfp4_fused_sf` (2 * N, K / 16) as `qweight` and `sf_rowmajor` of a packed weight, and `nvfp4_fused_alpha` (2 * N,)
    float32, 1 / global_scale of each row.
    """

    can_torch_compile: bool = True
    has_backward: bool = False

    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        codes = getattr(self, "nvfp4_fused_qweight", None)
        if codes is None or x.numel() // x.shape[-1] > FEW_ROWS:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
        check_activations(x, 2 * codes.shape[1])
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.bfloat16)
        both = product(rows, codes, self.nvfp4_fused_sf, None) * self.nvfp4_fused_alpha  # type: ignore[arg-type,operator]
        gates, up = both.chunk(2, dim=-1)
        opened = (functional.silu(gates) * up).to(torch.bfloat16)
        return self.down_proj(opened.reshape(*x.shape[:-1], -1))  # type: ignore[no-any-return]
