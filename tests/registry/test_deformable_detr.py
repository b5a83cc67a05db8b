"""The deformable_detr reference against loops over points, and against torch's own sampling of a grid."""

import inspect
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.registry.references import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FLAGS,
    assert_near,
    compiled,
    is_shipped_reference,
    layers_of,
    load_reference,
    members_of,
    random,
)

MAPS = ((3, 5), (2, 2), (1, 1))
STARTS = (0, 15, 19)
SHAPES, LEVELS = torch.tensor(MAPS), torch.tensor(STARTS)


def pixel(value: Tensor, b: int, m: int, level: int, i: int, j: int) -> Tensor:
    """A pixel of a map, (D,); zeros outside of it."""
    height, width = MAPS[level]
    inside = 0 <= i < height and 0 <= j < width
    return value[b, STARTS[level] + i * width + j, m] if inside else torch.zeros_like(value[b, 0, m])


def attended(value: Tensor, loc: Tensor, weight: Tensor) -> Tensor:
    """Point by point, in float64."""
    value, loc, weight = (x.to(F64) for x in (value, loc, weight))
    batch, queries, heads, levels, points = weight.shape
    out = torch.zeros(batch, queries, heads, value.shape[3], dtype=F64)
    for b, q, m, level, p in torch.cartesian_prod(*map(torch.arange, (batch, queries, heads, levels, points))).tolist():
        height, width = MAPS[level]
        x, y = (loc[b, q, m, level, p] * torch.tensor([width, height]) - 0.5).tolist()
        i, j = math.floor(y), math.floor(x)
        upper, lower = (
            pixel(value, b, m, level, row, j) * (j + 1 - x) + pixel(value, b, m, level, row, j + 1) * (x - j)
            for row in (i, i + 1)
        )
        out[b, q, m] += weight[b, q, m, level, p] * (upper * (i + 1 - y) + lower * (y - i))
    return out.flatten(2)


def arguments(*, batch=2, queries=3, heads=2, channels=4, points=2, dtype=F64) -> tuple[Tensor, Tensor, Tensor]:
    """A value, points within and around the maps, and weights."""
    value = random(batch, 20, heads, channels, dtype=dtype)
    loc = (0.5 + 0.4 * random(batch, queries, heads, 3, points, 2, seed=1)).to(dtype)
    return value, loc, random(batch, queries, heads, 3, points, dtype=dtype, seed=2)


@pytest.fixture
def kernel(cpu_machine, monkeypatch):
    return load_reference("deformable_detr", monkeypatch)


def forward(kernel, value, loc, weight, step=64):
    return kernel.ms_deform_attn_forward(value, SHAPES, LEVELS, loc, weight, step)


def layer(kernel, value, loc, weight):
    module = kernel.layers.MultiScaleDeformableAttention()
    return module(value, SHAPES, list(MAPS), LEVELS, loc, weight, 64)


def test_the_kernel_loads_as_its_reference(kernel):
    assert is_shipped_reference(kernel, "deformable-detr")


def test_the_published_signatures_are_kept(kernel):
    names = ["value", "spatial_shapes", "level_start_index", "sampling_loc", "attn_weight", "im2col_step"]
    assert list(inspect.signature(kernel.ms_deform_attn_forward).parameters) == names
    assert list(inspect.signature(kernel.ms_deform_attn_backward).parameters) == [*names[:5], "grad_output", names[5]]
    forward_of_layer = inspect.signature(kernel.layers.MultiScaleDeformableAttention.forward).parameters
    assert list(forward_of_layer) == [
        "self", "value", "value_spatial_shapes", "value_spatial_shapes_list", "level_start_index",
        "sampling_locations", "attention_weights", "im2col_step",
    ]  # fmt: skip


def test_the_layer_is_a_forward_without_a_state(kernel):
    cls = kernel.layers.MultiScaleDeformableAttention
    assert layers_of(kernel.layers) == {"MultiScaleDeformableAttention": cls}
    assert members_of(cls) == FLAGS


@pytest.mark.parametrize("dtype", DTYPES)
def test_function_and_layer_read_points_between_pixels(kernel, dtype):
    value, loc, weight = arguments(dtype=dtype)
    expected = attended(value, loc, weight)
    for result in (forward(kernel, value, loc, weight), layer(kernel, value, loc, weight)):
        assert result.dtype == dtype
        assert_near(result, expected, ulps=1, atol=64 * torch.finfo(F64 if dtype == F64 else F32).eps)


def test_points_are_those_of_torch_for_one_map(kernel):
    value, loc = random(2, 15, 1, 4), random(2, 6, 1, 1, 1, 2, seed=1).sigmoid()
    weight = torch.ones(2, 6, 1, 1, 1, dtype=F64)
    result = kernel.ms_deform_attn_forward(value, SHAPES[:1], LEVELS[:1], loc, weight, 64)
    image = value[:, :, 0].transpose(1, 2).unflatten(2, (3, 5))
    points = 2 * loc[:, :, 0, 0] - 1
    expected = functional.grid_sample(image, points, align_corners=False)[..., 0].transpose(1, 2)
    assert_near(result, expected, atol=1e-14)


def test_the_centre_of_a_pixel_is_the_pixel(kernel):
    value, _, weight = arguments(batch=1, queries=1, heads=1, points=1)
    centre = torch.tensor([[2.5 / 5, 1.5 / 3], [0.5 / 2, 1.5 / 2], [0.5, 0.5]], dtype=F64).view(1, 1, 1, 3, 1, 2)
    expected = sum(weight[0, 0, 0, level, 0] * value[0, row, 0] for level, row in enumerate((7, 17, 19)))
    assert_near(forward(kernel, value, centre, weight).flatten(), expected, atol=1e-14)


def test_what_lies_outside_is_zero_whatever_value_holds(kernel):
    value, loc, weight = arguments()
    value = torch.full_like(value, torch.nan)
    assert not forward(kernel, value, loc + 9, weight).any()
    _, to_loc, to_weight = kernel.ms_deform_attn_backward(
        value, SHAPES, LEVELS, loc + 9, weight, random(2, 3, 8, seed=3), 64
    )
    assert not to_loc.any()
    assert not to_weight.any()


def test_a_pixel_that_no_point_is_near_may_be_nan(kernel):
    value, _, weight = arguments(batch=1, queries=1, heads=1, points=1)
    centre = torch.full((1, 1, 1, 3, 1, 2), 0.5, dtype=F64)
    expected = forward(kernel, value, centre, weight)
    value[0, 0] = torch.nan
    assert torch.equal(forward(kernel, value, centre, weight), expected)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"points": 0}, {"channels": 0}], ids=str)
def test_sizes_may_be_zero(kernel, sizes):
    value, loc, weight = arguments(**sizes)
    assert torch.equal(forward(kernel, value, loc, weight), attended(value, loc, weight))
    gradients = kernel.ms_deform_attn_backward(
        value, SHAPES, LEVELS, loc, weight, torch.ones_like(forward(kernel, value, loc, weight)), 64
    )
    assert [g.shape for g in gradients] == [value.shape, loc.shape, weight.shape]


def test_no_maps_give_zeros(kernel):
    value, loc, weight = arguments()
    none = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    result = kernel.ms_deform_attn_forward(value[:, :0], *none, loc[:, :, :, :0], weight[:, :, :, :0], 64)
    assert torch.equal(result, torch.zeros(2, 3, 8, dtype=F64))


def test_any_strides_are_read(kernel):
    value, loc, weight = arguments()
    value, loc, weight = (x.transpose(0, 2).contiguous().transpose(0, 2) for x in (value, loc, weight))
    assert not value.is_contiguous()
    assert_near(forward(kernel, value, loc, weight), attended(value, loc, weight), atol=1e-13)


def test_the_step_changes_nothing(kernel):
    value, loc, weight = arguments(batch=4)
    expected = forward(kernel, value, loc, weight)
    for step in (1, 2, 4):
        assert torch.equal(forward(kernel, value, loc, weight, step), expected)


def test_the_layer_has_a_gradient(kernel):
    inputs = [x.requires_grad_() for x in arguments(batch=1, queries=2)]
    assert torch.autograd.gradcheck(lambda *args: layer(kernel, *args), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_gives_the_gradients_of_the_layer(kernel, dtype):
    inputs = [x.requires_grad_() for x in arguments(dtype=dtype)]
    wide = [x.detach().to(F64).requires_grad_() for x in inputs]
    upstream = random(2, 3, 8, dtype=dtype, seed=3)
    expected = torch.autograd.grad(layer(kernel, *wide), wide, upstream.to(F64))
    value, loc, weight = (x.detach() for x in inputs)
    actual = kernel.ms_deform_attn_backward(value, SHAPES, LEVELS, loc, weight, upstream, 64)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == dtype
        assert_near(got, want, ulps=1, atol=512 * torch.finfo(F64 if dtype == F64 else F32).eps)


def test_a_point_on_a_column_of_pixels_has_the_slope_to_the_right(kernel):
    value = torch.tensor([1.0, 3.0, 9.0], dtype=F64).view(1, 3, 1, 1)
    one = torch.ones(1, 1, 1, 1, 1, dtype=F64)
    shapes, starts = torch.tensor([[1, 3]]), torch.tensor([0])
    loc = torch.full((1, 1, 1, 1, 1, 2), 0.5, dtype=F64)
    _, to_loc, _ = kernel.ms_deform_attn_backward(value, shapes, starts, loc, one, one[0, :, :, :, 0], 64)
    assert to_loc.flatten()[0].item() == (9.0 - 3.0) * 3


def test_functions_and_layer_compile_to_one_graph(kernel):
    value, loc, weight = (x.requires_grad_() for x in arguments(dtype=F32))
    module = kernel.layers.MultiScaleDeformableAttention()
    made = compiled(module)(value, SHAPES, list(MAPS), LEVELS, loc, weight, 64)
    assert_near(made, attended(value.detach(), loc.detach(), weight.detach()), atol=1e-5)
    upstream = random(2, 3, 8, dtype=F32, seed=3)
    from_layer = torch.autograd.grad(made, (value, loc, weight), upstream)
    value, loc, weight = (x.detach() for x in (value, loc, weight))
    backward = compiled(kernel.ms_deform_attn_backward)(value, SHAPES, LEVELS, loc, weight, upstream, 64)
    for got, want in zip(backward, from_layer, strict=True):
        torch.testing.assert_close(got, want)


def test_dtypes_are_refused_that_do_not_belong_together(kernel):
    value, loc, weight = arguments(dtype=F32)
    with pytest.raises(TypeError, match=r"value: expected a float dtype, got torch\.int64"):
        forward(kernel, value.long(), loc, weight)
    with pytest.raises(TypeError, match=r"sampling_loc: expected torch\.float32, got torch\.bfloat16"):
        forward(kernel, value, loc.to(BF16), weight)
    with pytest.raises(TypeError, match=r"attn_weight: expected torch\.float32, got torch\.float16"):
        forward(kernel, value, loc, weight.to(F16))
    with pytest.raises(TypeError, match=r"level_start_index: expected torch\.int64, got torch\.int32"):
        kernel.ms_deform_attn_forward(value, SHAPES, LEVELS.int(), loc, weight, 64)
    with pytest.raises(TypeError, match=r"grad_output: expected torch\.float32, got torch\.float64"):
        kernel.ms_deform_attn_backward(value, SHAPES, LEVELS, loc, weight, torch.ones(2, 3, 8, dtype=F64), 64)


def test_shapes_and_devices_are_refused_that_do_not_belong_together(kernel):
    value, loc, weight = arguments()
    with pytest.raises(ValueError, match=r"value: expected shape \(B, S, M, D\), got \(2, 20, 8\)"):
        forward(kernel, value.flatten(2), loc, weight)
    with pytest.raises(ValueError, match=r"spatial_shapes: expected shape \(L, 2\), got \(3,\)"):
        kernel.ms_deform_attn_forward(value, SHAPES[:, 0], LEVELS, loc, weight, 64)
    with pytest.raises(
        ValueError, match=r"sampling_loc: expected shape \(2, 3, 2, 3, 2, 2\), got \(2, 3, 1, 3, 2, 2\)"
    ):
        forward(kernel, value, loc[:, :, :1], weight)
    with pytest.raises(ValueError, match=r"attn_weight: expected shape \(2, 3, 2, 3, 2\), got \(2, 3, 2, 3, 1\)"):
        forward(kernel, value, loc, weight[..., :1])
    with pytest.raises(ValueError, match="attn_weight: expected on cpu, where value is, got meta"):
        forward(kernel, value, loc, weight.to("meta"))
    with pytest.raises(ValueError, match=r"grad_output: expected shape \(2, 3, 8\), got \(2, 3, 2, 4\)"):
        kernel.ms_deform_attn_backward(value, SHAPES, LEVELS, loc, weight, random(2, 3, 2, 4), 64)


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_does_not_divide_the_batches_is_refused(kernel, step):
    message = f"im2col_step: expected at least 1, and to divide B = 3 or pass it, got {step}"
    with pytest.raises(ValueError, match=message):
        forward(kernel, *arguments(batch=3), step)
