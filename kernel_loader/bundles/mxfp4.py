"""MXFP4 experts: products of gathered rows with weights of four bits, scattered back; routing, and the activation.

One layer of GPT-OSS, T rows of K, E experts of which a row takes k:

    w, config = mxfp4.weight(codes, scales)                          # (E, 2 * I, K / 2) and (E, 2 * I, K / 32) uint8
    w2, config2 = mxfp4.weight(codes2, scales2)                      # (E, K, I / 2) and (E, K, I / 32)
    routing_data, gather, scatter = mxfp4.routing(logits, k)         # logits (T, E)
    h = mxfp4.matmul(x, w, bias, routing_data, gather_indx=gather, precision_config=config,
                     fused_activation=mxfp4.fused_swiglu(1.702, 7.0))
    y = mxfp4.matmul(h, w2, bias2, routing_data, scatter_indx=scatter, precision_config=config2,
                     gammas=routing_data.gate_scal)                  # (T, K)

A *route* is one of the k experts of a row: route row * k + choice. A *place* is where a route comes in the order of
experts; there are R = T * k of both. Routes whose expert is on another device have no place: -1 stands for it, and the
places from sum(expt_hist) on belong to no expert. Such places are never read and come out as zeros, whatever stands in
them or in their weights.

Weights are e2m1 codes, two a byte along K, the one with the lower k in the low four bits, times 2 ** (e - 127) for each
32 along K, 255 being NaN. Products are exact, of x and the codes with their scales, summed in float32, rounded to the
dtype of the output; sums over the routes of a row are of what was so rounded, in float32. Nothing is differentiable.

Sources: OCP Microscaling Formats (MX) v1.0 for the format; the model card of GPT-OSS (arXiv:2508.10925) for routing and
activation. Names, and the order of arguments, are those of kernels-community/gpt-oss-triton-kernels.

The reference build does all of this. The published builds (version 1) refuse what is not bfloat16, a k that is no power
of two, K that is no multiple of 64 and N that is none of 16. Code that must also run on them keeps to fewer than 32768
experts, and to no NaN where an activation clamps; torch.compile is not for them.
`kernel_loader.quantization.quantize_mxfp4` makes codes and scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "MXFP4",
    "ConvertLayout",
    "DefaultLayout",
    "ExpertData",
    "GatherIndex",
    "Matmul",
    "Plain",
    "Routing",
    "RoutingData",
    "ScatterIndex",
    "SwiGLU",
    "WrapTensor",
]


class GatherIndex(Protocol):
    """`GatherIndx`: the route at each place, and the place of each route; both (R,) int32, -1 for none."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


class ScatterIndex(Protocol):
    """`ScatterIndx`: the place of each route, and the route at each place; both (R,) int32, -1 for none."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


class RoutingData(Protocol):
    """What the product and the activation are told of the experts.

    Attributes:
        gate_scal: (R,) float, the weight of the route at each place.
        expt_hist: (E,) int32, places of each expert.
        n_expts_tot: E.
        n_expts_act: k.
        expt_data: of `compute_expt_data`; what is in it is the build's own.
    """

    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: Any


class Matmul(Protocol):
    """`matmul_ogs.matmul_ogs`: gather, multiply, scatter."""

    def __call__(
        self,
        x: torch.Tensor,
        w: Any,  # noqa: ANN401 - the build's own class
        bias: torch.Tensor | None,
        routing_data: RoutingData,
        gather_indx: GatherIndex | None = None,
        scatter_indx: ScatterIndex | None = None,
        precision_config: Any = None,  # noqa: ANN401 - the build's own class
        *,
        gammas: torch.Tensor | None = None,
        fused_activation: Any = None,  # noqa: ANN401 - the build's own class
    ) -> torch.Tensor:
        """The products x[row of place] @ w[expert of place] + bias[expert], or their sums over the routes of rows.

        Args:
            x: (T, K) bfloat16, float16 or float32, one row for k places; without `gather_indx` (R, K), one for each.
            w: (E, K, N), of `weight`; K a multiple of 32.
            bias: (E, N) float32, or None.
            routing_data: n_expts_act and expt_hist are looked at, and expt_data as the build likes.
            gather_indx: the row at a place is src_indx // n_expts_act.
            scatter_indx: adds up the places of each row.
            precision_config: a `PrecisionConfig`, with the scales of `w` and, if it is not that of x, the out_dtype.
            gammas: (R,) float, what the product at each place is multiplied by, bias included. Not with
                `fused_activation`.
            fused_activation: a `FusedActivation`, made of the float32 product. Not with `scatter_indx`.

        Returns:
            (R, N / reduction_n), zeros at places of no expert; with `scatter_indx` (R / n_expts_act, N), zeros in rows
            none of whose routes has a place.

        Raises:
            TypeError: a dtype, or a `w` that is not of `weight`.
            ValueError: a shape, a device, or what does not go together. (Published builds assert, or do not look.)
        """
        ...


class Routing(Protocol):
    """`routing.routing`: which rows go to which experts."""

    def __call__(
        self,
        logits: torch.Tensor,
        n_expts_act: int,
        sm_first: bool = False,  # noqa: FBT001, FBT002 - as published
    ) -> tuple[RoutingData, GatherIndex, ScatterIndex]:
        """Send each row to the experts of its largest logits; of equal ones, to those that come first.

        The weights of a row are the softmax of its chosen logits, in float32; with `sm_first`, what the softmax over
        all logits gives the chosen. Routes of a row are in the order of their experts; places of an expert in that of
        rows.

        Args:
            logits: (T, E) bfloat16, float16 or float32, no NaN.
            n_expts_act: k, at most E.
            sm_first: see above.

        Returns:
            Routing data, with weights in the dtype of `logits`, and the two indices. Every route has a place.

        Raises:
            TypeError: the dtype of `logits`.
            ValueError: the shape of `logits`, or `n_expts_act`.
        """
        ...


class SwiGLU(Protocol):
    """`swiglu.swiglu`: the activation alone."""

    def __call__(
        self,
        a: torch.Tensor,
        alpha: float,
        precision_config: Any,  # noqa: ANN401 - the build's own class
        routing_data: RoutingData | None = None,
    ) -> torch.Tensor:
        """The activation gate * sigmoid(alpha * gate) * (linear + 1), in float32, cast to the dtype of `a`.

        Gates are the even columns, clamped to at most the limit; the odd ones are linear, clamped to within -limit and
        limit.

        Args:
            a: (..., 2 * N) bfloat16, float16 or float32, last stride 1; (R, 2 * N) with `routing_data`.
            alpha: see above.
            precision_config: a `SwiGLUConfig`: of a limit, or of None for none.
            routing_data: of the rows of `a`; those at places of no expert come out as zeros.

        Returns:
            (..., N) in the dtype of `a`.

        Raises:
            TypeError: the dtype of `a`.
            ValueError: the shape of `a`.
        """
        ...


class ExpertData(Protocol):
    """`routing.compute_expt_data`: what `RoutingData` holds for a build, for a routing of one's own."""

    def __call__(self, hist: torch.Tensor, n_expts_tot: int, n_gates: int) -> Any:  # noqa: ANN401 - the build's own
        """For (E,) int32 places of each expert, E, and R."""
        ...


class WrapTensor(Protocol):
    """`tensor.wrap_torch_tensor`: a tensor of packed codes, or of scales."""

    def __call__(self, torch_tensor: torch.Tensor, dtype: Any = None) -> Any:  # noqa: ANN401 - the build's own
        """Codes, packed along the dimension whose stride is 1, with dtype `FP4`; or anything, as it is."""
        ...


class ConvertLayout(Protocol):
    """`tensor.convert_layout`: the same numbers, as a build wants them to lie in memory."""

    def __call__(self, tensor: Any, layout_cls: type, **layout_kwargs: Any) -> Any:  # noqa: ANN401 - the build's own
        """For a tensor of `wrap_torch_tensor`, a class of layouts, and its arguments."""
        ...


class DefaultLayout(Protocol):
    """`tensor_details.layout.make_default_matmul_mxfp4_w_layout`: the layout for codes of weights on this device."""

    def __call__(self, mx_axis: int) -> tuple[type, dict[str, Any]]:
        """The class and its arguments, for the dimension along which scales are shared, which is 1."""
        ...


class Plain(NamedTuple):
    """The product and the activation for plain tensors: for tests and measurements, since it wraps them.

    Attributes:
        kernel: the build.
    """

    kernel: MXFP4

    def prepared(
        self,
        x: torch.Tensor,
        weight: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        expt_hist: torch.Tensor,
        route_at: torch.Tensor,
        place_of: torch.Tensor,
        k: int,
        *,
        gather: bool = False,
        scatter: bool = False,
        gammas: torch.Tensor | None = None,
        swiglu: tuple[float, float | None] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Callable[[], torch.Tensor]:
        """`MXFP4.matmul` as a call without arguments, for which the tensors are wrapped once.

        Args:
            x: (T, K) with `gather`, and (R, K) without.
            weight: codes (E, N, K / 2) and scales (E, N, K / 32), uint8.
            bias: (E, N) float32.
            expt_hist: (E,) int32, places of each expert.
            route_at: (R,) int32, the route at each place, -1 for none.
            place_of: (R,) int32, the place of each route, -1 for none.
            k: routes of a row.
            gather: whether x has one row for its k routes.
            scatter: whether the places of a row are added up.
            gammas: (R,) float32.
            swiglu: alpha and the limit, for the activation.
            out_dtype: that of x if None.
        """
        kernel = self.kernel
        w, config = kernel.weight(*weight)
        config.out_dtype = out_dtype
        return functools.partial(
            kernel.matmul,
            x,
            w,
            bias,
            self._routing_data(expt_hist, route_at, k),
            kernel.GatherIndx(src_indx=route_at, dst_indx=place_of) if gather else None,
            kernel.ScatterIndx(src_indx=place_of, dst_indx=route_at) if scatter else None,
            config,
            gammas=gammas,
            fused_activation=kernel.fused_swiglu(*swiglu) if swiglu is not None else None,
        )

    def matmul(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - those of `prepared`
        """`MXFP4.matmul`, with the arguments of `prepared`."""
        return self.prepared(*args, **kwargs)()

    def swiglu(
        self, a: torch.Tensor, alpha: float, limit: float | None, expt_hist: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`MXFP4.swiglu`, with the places of each expert where rows are routed."""
        kernel = self.kernel
        data = None if expt_hist is None else self._routing_data(expt_hist, a, 1)
        return kernel.swiglu(a, alpha, kernel.SwiGLUConfig(limit), data)

    def _routing_data(self, expt_hist: torch.Tensor, places: torch.Tensor, k: int) -> RoutingData:
        experts, count = expt_hist.shape[0], places.shape[0]
        data = self.kernel.compute_expt_data(expt_hist, experts, count)
        # No entrypoint reads the weights of routes from here: they are passed as gammas.
        made: RoutingData = self.kernel.RoutingData(None, expt_hist, experts, k, data)
        return made


@dataclass(frozen=True, kw_only=True)
class MXFP4:
    """The entrypoints of `mxfp4`.

    Attributes:
        matmul: gather, multiply, scatter.
        routing: which rows go to which experts.
        swiglu: the activation alone; `swiglu_fn` is what `FusedActivation` takes, and `SwiGLUConfig(limit)` its limit.
        compute_expt_data: for a routing of one's own.
        RoutingData: (gate_scal, expt_hist, n_expts_tot, n_expts_act, expt_data).
        GatherIndx: (src_indx, dst_indx).
        ScatterIndx: (src_indx, dst_indx).
        PrecisionConfig: (weight_scale=, out_dtype=, flex_ctx=).
        FlexCtx: (rhs_data=InFlexData()), for nothing but defaults here.
        InFlexData: ().
        FnSpecs: (name, fn, names of its arguments).
        FusedActivation: (specs, arguments, columns that become one).
        FP4: the dtype of codes.
        wrap_torch_tensor: a tensor of packed codes, or of scales.
        convert_layout: the same numbers, as the build wants them to lie in memory.
        default_layout: the layout for codes of weights.
        StridedLayout: the layout of scales.
    """

    __kernel__: ClassVar = "mxfp4"

    matmul: Matmul
    routing: Routing
    swiglu: SwiGLU
    compute_expt_data: ExpertData

    RoutingData: Any
    GatherIndx: Any
    ScatterIndx: Any
    PrecisionConfig: Any
    FlexCtx: Any
    InFlexData: Any
    FnSpecs: Any
    FusedActivation: Any
    SwiGLUConfig: Any
    swiglu_fn: Any

    FP4: Any
    wrap_torch_tensor: WrapTensor
    convert_layout: ConvertLayout
    default_layout: DefaultLayout
    StridedLayout: type

    def weight(self, codes: torch.Tensor, scales: torch.Tensor) -> tuple[Any, Any]:
        """A weight as `matmul` takes it, and its `PrecisionConfig`.

        Args:
            codes: (E, N, K / 2) uint8, contiguous, two e2m1 codes a byte. Checkpoints have them as (E, N, K / 32, 16).
            scales: (E, N, K / 32) uint8, contiguous.
        """
        layout, options = self.default_layout(mx_axis=1)
        # Of shape (E, K / 2, N), with stride 1 along K, which is what is packed.
        w = self.convert_layout(self.wrap_torch_tensor(codes.flatten(2).mT, dtype=self.FP4), layout, **options)
        exponents = self.convert_layout(self.wrap_torch_tensor(scales.mT), self.StridedLayout)
        return w, self.PrecisionConfig(weight_scale=exponents)

    @property
    def plain(self) -> Plain:
        """The product and the activation for plain tensors."""
        return Plain(self)

    def fused_swiglu(self, alpha: float, limit: float | None) -> Any:  # noqa: ANN401 - the build's own class
        """`swiglu` for the end of `matmul`."""
        return self.FusedActivation(self.FnSpecs("swiglu", self.swiglu_fn, ("alpha", "limit")), (alpha, limit), 2)
