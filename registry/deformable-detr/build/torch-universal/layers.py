"""The attention as a layer: `forward` alone, without a state of its own."""

from torch import Tensor, nn

from .attention import ms_deform_attn_forward


class MultiScaleDeformableAttention(nn.Module):
    """`ms_deform_attn_forward`, differentiable in `value`, `sampling_locations` and `attention_weights`."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(  # noqa: D102 - the class says it
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple[int, int]],  # noqa: ARG002 - the same once more, as models pass it
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        return ms_deform_attn_forward(
            value, value_spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step
        )
