"""The product of gathered rows with the weights of their experts, scattered back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .numerics import InFlexData, OutFlexData
from .product import experts_product
from .routing import GatherIndx, RoutingData, ScatterIndx
from .tensor import FP4, Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class FlexCtx:
    """Scales of whole tensors; only the defaults are taken."""

    lhs_data: InFlexData = field(default_factory=InFlexData)
    rhs_data: InFlexData = field(default_factory=InFlexData)
    out_data: OutFlexData = field(default_factory=OutFlexData)

    @property
    def is_default(self) -> bool:
        """Whether nothing is scaled."""
        return self.lhs_data.is_default and self.rhs_data.is_default and self.out_data.is_default


@dataclass
class PrecisionConfig:
    """What the numbers of a product are.

    weight_scale: exponents of the scales of w, (E, K / 32, N), of `wrap_torch_tensor` or as they are.
    out_dtype: of the product; that of x if None.
    """

    flex_ctx: FlexCtx = field(default_factory=FlexCtx)
    weight_scale: Tensor | torch.Tensor | None = None
    out_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class FnSpecs:
    """A function for the end of the product: (rows, N) float32 and its arguments -> (rows, N / reduction_n)."""

    name: str
    fn: Callable[..., torch.Tensor] | None
    fn_arg_names: tuple[str, ...]

    @staticmethod
    def default() -> FnSpecs:
        """No function."""
        return FnSpecs("dflt", None, ())


@dataclass(frozen=True)
class FusedActivation:
    """A function with its arguments, and how many columns it makes one of."""

    specs: FnSpecs = field(default_factory=FnSpecs.default)
    fn_args: tuple[object, ...] = ()
    reduction_n: int = 1


def matmul_ogs(
    x: torch.Tensor,
    w: Tensor,
    bias: torch.Tensor | None,
    routing_data: RoutingData,
    gather_indx: GatherIndx | None = None,
    scatter_indx: ScatterIndx | None = None,
    precision_config: PrecisionConfig | None = None,
    *,
    gammas: torch.Tensor | None = None,
    fused_activation: FusedActivation | None = None,
) -> torch.Tensor:
    """The products x[row of place] @ w[expert of place] + bias[expert], or their sums over the routes of rows.

    Args:
        x: (T, K) bfloat16, float16 or float32; (R, K), in the order of experts, without `gather_indx`.
        w: (E, K, N) FP4 of `wrap_torch_tensor`, packed along K.
        bias: (E, N) float32.
        routing_data: how many places each expert has.
        gather_indx: the route at each place; the row is route // n_expts_act.
        scatter_indx: the place of each route; rows of y are then those of x, sums over the places of their routes.
        precision_config: with the scales of w.
        gammas: (R,) float, what the row at each place is multiplied by. Not with `fused_activation`.
        fused_activation: at the end of the product. Not with `scatter_indx`.

    Returns:
        (R, N / reduction_n), zeros past the places of experts; with `scatter_indx` (R / n_expts_act, N), zeros where no
        route goes anywhere.

    Raises:
        TypeError: a dtype, or a `w` that is not of `wrap_torch_tensor`.
        ValueError: a shape, a device, or what does not go together.
    """
    _check_x(x)
    if precision_config is None or precision_config.weight_scale is None:
        raise ValueError("precision_config: expected one with weight_scale, got None")
    codes, scale = _weight(w, precision_config.weight_scale)
    if not precision_config.flex_ctx.is_default:
        raise ValueError("precision_config: expected no scales in flex_ctx")
    k = routing_data.n_expts_act
    rows = None if gather_indx is None else gather_indx.src_indx
    product = experts_product(x.detach(), codes, scale, bias, routing_data.expt_hist, rows, k)
    if fused_activation is not None and fused_activation.specs.fn is not None:
        if scatter_indx is not None or gammas is not None:
            raise ValueError("fused_activation: expected None with scatter_indx or gammas")
        product = fused_activation.specs.fn(product, *fused_activation.fn_args)
    if gammas is not None:
        _check_gammas(gammas, product)
        product = product * gammas.to(torch.float32).unsqueeze(1)
    # Neither a function of zero need be zero, nor anything times a weight that may be NaN.
    places = torch.arange(product.shape[0], device=x.device)
    product = product.masked_fill((places >= routing_data.expt_hist.sum()).unsqueeze(1), 0.0)
    out = product.to(precision_config.out_dtype or x.dtype)
    return out if scatter_indx is None else _summed(out, scatter_indx.src_indx, k)


def _summed(places: torch.Tensor, src_indx: torch.Tensor, k: int) -> torch.Tensor:
    """For each row the sum, in float32, of the places of its routes; -1 is none. (R, N) -> (R / k, N)."""
    if tuple(src_indx.shape) != (places.shape[0],):
        raise ValueError(f"scatter_indx: expected shape ({places.shape[0]},), got {tuple(src_indx.shape)}")
    routes = src_indx.reshape(-1, k).long()
    total = torch.zeros((routes.shape[0], places.shape[1]), dtype=torch.float32, device=places.device)
    for choice in routes.unbind(1):
        total += places[choice.clamp(min=0)].masked_fill((choice < 0).unsqueeze(1), 0.0)
    return total.to(places.dtype)


def _check_x(x: torch.Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x: expected shape (T, K), got {tuple(x.shape)}")


def _check_gammas(gammas: torch.Tensor, product: torch.Tensor) -> None:
    if gammas.dtype not in _FLOATS:
        raise TypeError(f"gammas: expected bfloat16, float16 or float32, got {gammas.dtype}")
    if tuple(gammas.shape) != (product.shape[0],):
        raise ValueError(f"gammas: expected shape ({product.shape[0]},), got {tuple(gammas.shape)}")


def _weight(w: Tensor, scale: Tensor | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (E, N, K / 2) and exponents (E, N, K / 32) of a weight, uint8."""
    if not isinstance(w, Tensor) or w.dtype != FP4:
        raise TypeError(f"w: expected FP4 of wrap_torch_tensor, got {getattr(w, 'dtype', type(w).__name__)}")
    if isinstance(scale, Tensor):
        scale = scale.storage.layout.unswizzle_data(scale.storage.data)
    if scale.element_size() != 1:
        raise TypeError(f"precision_config: expected weight_scale in uint8, got {scale.dtype}")
    codes = w.storage.layout.unswizzle_data(w.storage.data)
    if codes.ndim != 3:
        raise ValueError(f"w: expected shape (E, K, N), got {tuple(w.shape)}")
    experts, packed, n = codes.shape
    if codes.stride(1) != 1:
        raise ValueError(f"w: expected codes packed along K, with stride 1, got strides {codes.stride()}")
    if packed % 16:
        raise ValueError(f"w: expected K to be a multiple of 32, got {2 * packed}")
    if tuple(scale.shape) != (experts, packed // 16, n):
        raise ValueError(
            f"precision_config: expected weight_scale of shape {(experts, packed // 16, n)} for w "
            f"{(experts, 2 * packed, n)}, got {tuple(scale.shape)}"
        )
    return codes.mT, scale.view(torch.uint8).mT
