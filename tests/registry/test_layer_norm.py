"""The layer_norm reference against torch's own norms in float64."""

import inspect

import pytest
import torch
from torch import Tensor, nn
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
    put_into,
    random,
)

EPS = 1e-5
PARAMETERS = [
    "input", "gamma", "beta", "rowscale", "colscale", "x0_subset", "z_subset", "dropout_p", "epsilon",
    "rowscale_const", "z_numrows", "gen", "residual_in_fp32", "is_rms_norm",
]  # fmt: skip
PLAIN = dict.fromkeys(PARAMETERS[2:7]) | {
    "dropout_p": 0.0, "epsilon": EPS, "rowscale_const": 1.0, "z_numrows": 0, "gen": None,
    "residual_in_fp32": False, "is_rms_norm": False,
}  # fmt: skip
each_norm = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rms: bool) -> Tensor:
    """torch's norm in float64."""
    x, weight = x.to(F64), weight.to(F64)
    if rms:
        made = functional.rms_norm(x, x.shape[-1:], weight, EPS)
        return made if bias is None else made + bias.to(F64)
    return functional.layer_norm(x, x.shape[-1:], weight, None if bias is None else bias.to(F64), EPS)


class Norm(nn.Module):
    """A model's own norm, whose forward is taken away."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight), EPS


@pytest.fixture
def kernel(cpu_machine, monkeypatch):
    return load_reference("layer_norm", monkeypatch)


@pytest.fixture
def run(kernel):
    return lambda x, gamma, **given: kernel.dropout_add_ln_fwd(x, gamma, **(PLAIN | given))


def test_the_kernel_loads_as_its_reference(kernel):
    assert is_shipped_reference(kernel, "layer-norm")


def test_the_published_signatures_are_kept(kernel):
    assert list(inspect.signature(kernel.dropout_add_ln_fwd).parameters) == PARAMETERS
    for layer in layers_of(kernel.layers).values():
        assert list(inspect.signature(layer.forward).parameters) == ["self", "hidden_states"]


def test_layers_are_forwards_without_a_state(kernel):
    layers = layers_of(kernel.layers)
    assert set(layers) == {"LayerNorm", "LlamaRMSNorm"}
    assert all(members_of(layer) == FLAGS for layer in layers.values())


@each_norm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5), (2, 129)], ids=str)
def test_rows_are_normalised(run, shape, dtype, rms):
    x, gamma, beta = random(*shape, dtype=dtype, scale=3), *(random(shape[1], dtype=dtype, seed=s) for s in (1, 2))
    z, kept, mask, mu, rsigma = run(x, gamma, beta=beta, is_rms_norm=rms)
    assert z.dtype == dtype
    assert_near(z, norm(x, gamma, beta, rms=rms), ulps=4, atol=1e-14 if dtype == F64 else 1e-6)
    assert kept is None
    assert mask is None
    assert mu.dtype == rsigma.dtype == (F64 if dtype == F64 else F32)
    assert_near(mu, x.to(F64).mean(1), ulps=4, atol=1e-6)
    spread = x.to(F64).square().mean(1) if rms else (x.to(F64) - x.to(F64).mean(1, keepdim=True)).square().mean(1)
    assert_near(rsigma, 1 / (spread + EPS).sqrt(), ulps=8)


@pytest.mark.parametrize(("name", "rms"), [("LayerNorm", False), ("LlamaRMSNorm", True)])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (2, 0, 4), (3, 0)], ids=str)
def test_layers_normalise_the_last_dimension(kernel, name, rms, shape):
    x, weight = random(*shape, dtype=BF16), random(shape[-1], dtype=F32, seed=1)
    result = put_into(Norm(weight), getattr(kernel.layers, name))(x)
    assert result.dtype == BF16
    assert_near(result, norm(x, weight, rms=rms), ulps=2)


def test_a_bias_of_the_module_is_not_added(kernel):
    module, x = Norm(torch.ones(4)), random(2, 4, dtype=F32)
    without = put_into(module, kernel.layers.LayerNorm)(x)
    module.bias = nn.Parameter(torch.ones(4))
    assert torch.equal(module(x), without)


@each_norm
def test_half_precision_is_rounded_once(run, rms):
    x, gamma = random(64, 64, dtype=BF16), random(64, dtype=BF16, seed=1)
    exact = norm(x, gamma, rms=rms)
    away = (run(x, gamma, is_rms_norm=rms)[0].to(F64) - exact).abs() / exact.abs()
    assert away.max() <= torch.finfo(BF16).eps / 2 * 1.001


@each_norm
def test_scales_come_before_the_norm(run, rms):
    x, gamma, rows, columns = random(3, 5), random(5, seed=1), random(3, seed=2), random(5, seed=3)
    z, kept, *_ = run(x, gamma, rowscale=rows, colscale=columns, is_rms_norm=rms)
    scaled = torch.diag(rows) @ x @ torch.diag(columns)
    assert_near(kept, scaled, ulps=4)
    assert_near(z, norm(scaled, gamma, rms=rms), atol=1e-13)


def test_x_comes_out_in_float32_when_asked_and_not_where_it_is_the_input(run):
    x, gamma = random(3, 8, dtype=BF16), random(8, dtype=BF16)
    assert torch.equal(run(x, gamma, residual_in_fp32=True)[1], x.to(F32))
    assert run(x, gamma)[1] is None
    assert run(x.to(F32), gamma.to(F32), residual_in_fp32=True)[1] is None
    assert run(x, gamma, colscale=gamma)[1].dtype == BF16


@each_norm
def test_subsets_pick_rows_and_places(run, rms):
    x, gamma, beta = random(4, 5), random(5, seed=1), random(5, seed=2)
    given = {
        "x0_subset": torch.tensor([4, 0, 2], dtype=torch.int32),
        "z_subset": torch.tensor([3, 1, 0], dtype=torch.int32),
    }
    z, kept, mask, mu, rsigma = run(x, gamma, beta=beta, rowscale_const=2.0, z_numrows=4, is_rms_norm=rms, **given)
    expected = norm(2 * x[3], gamma, beta, rms=rms)
    assert_near(z, torch.stack([beta, torch.zeros(5, dtype=F64), expected, torch.zeros(5, dtype=F64)]), atol=1e-13)
    assert torch.equal(kept, torch.stack([2 * x[3], torch.zeros(5, dtype=F64), 2 * x[1]]))
    assert mask is None
    assert mu.shape == rsigma.shape == (3,)


def test_dropout_keeps_a_share_and_makes_up_for_the_rest(run):
    x, gamma = random(50, 40), random(40, seed=1)
    made = [run(x, gamma, dropout_p=0.25, gen=torch.Generator().manual_seed(3)) for _ in range(2)]
    z, kept, mask, *_ = made[0]
    assert torch.equal(mask, made[1][2])
    assert not torch.equal(mask, run(x, gamma, dropout_p=0.25, gen=torch.Generator().manual_seed(4))[2])
    assert mask.dtype == torch.uint8
    assert set(mask.unique().tolist()) == {0, 1}
    assert abs(mask.to(F64).mean().item() - 0.75) < 0.05  # five deviations of 2000 draws
    assert_near(kept, x * mask / 0.75, ulps=2)
    assert_near(z, norm(kept, gamma, rms=False), atol=1e-13)


@each_norm
def test_rows_weights_and_scales_have_a_gradient(run, rms):
    places = torch.tensor([2, 0, 3], dtype=torch.int32)

    def whole(x: Tensor, gamma: Tensor, beta: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return run(x, gamma, beta=beta, rowscale=rows, colscale=columns, is_rms_norm=rms)[0]

    def part(x: Tensor, gamma: Tensor) -> Tensor:
        return run(x, gamma, x0_subset=places, z_subset=places, z_numrows=3, is_rms_norm=rms)[0]

    inputs = [random(*shape, seed=s).requires_grad_() for s, shape in enumerate([(3, 4), (4,), (4,), (3,), (4,)])]
    assert torch.autograd.gradcheck(whole, inputs)
    assert torch.autograd.gradcheck(part, inputs[:2])


def test_functions_and_layers_compile_to_one_graph(kernel):
    x, weight = random(3, 8, dtype=F32), random(8, dtype=F32, seed=1)
    module = put_into(Norm(weight), kernel.layers.LlamaRMSNorm)
    assert_near(compiled(module)(x), norm(x, weight, rms=True), ulps=8, atol=1e-6)
    places = torch.tensor([2, 3, 1], dtype=torch.int32)
    given = PLAIN | {"x0_subset": places, "z_subset": places, "z_numrows": 3}
    z, *_ = compiled(kernel.dropout_add_ln_fwd)(x, weight, **given)
    assert_near(z, norm(x, weight, rms=False), ulps=8, atol=1e-6)


def test_dtypes_are_refused_that_do_not_belong_together(run):
    x, gamma = random(2, 4, dtype=BF16), random(4, dtype=BF16)
    with pytest.raises(TypeError, match=r"input: expected a float dtype, got torch\.int64"):
        run(x.long(), gamma)
    with pytest.raises(TypeError, match=r"gamma: expected torch\.bfloat16 or torch\.float32, got torch\.float16"):
        run(x, gamma.to(F16))
    with pytest.raises(TypeError, match=r"beta: expected torch\.bfloat16, got torch\.float32"):
        run(x, gamma, beta=gamma.to(F32))
    with pytest.raises(TypeError, match=r"x0_subset: expected torch\.int32, got torch\.int64"):
        run(x, gamma, x0_subset=torch.ones(2).long(), z_subset=torch.ones(2).int())


def test_shapes_devices_and_numbers_are_refused_that_do_not_fit(run):
    x, gamma = random(2, 4), random(4)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"input: expected shape \(S, H\), got \(2, 2, 2\)"):
        run(x.view(2, 2, 2), gamma)
    with pytest.raises(ValueError, match=r"gamma: expected shape \(4,\), got \(1,\)"):
        run(x, gamma[:1])
    with pytest.raises(ValueError, match=r"rowscale: expected shape \(2,\), got \(4,\)"):
        run(x, gamma, rowscale=gamma)
    with pytest.raises(ValueError, match=r"z_subset: expected shape \(1,\), got \(2,\)"):
        run(x, gamma, x0_subset=one, z_subset=one.repeat(2))
    with pytest.raises(ValueError, match="z_subset: expected exactly where there is an x0_subset"):
        run(x, gamma, x0_subset=one)
    with pytest.raises(ValueError, match="colscale: expected on cpu, where input is, got meta"):
        run(x, gamma, colscale=gamma.to("meta"))
    with pytest.raises(ValueError, match=r"dropout_p: expected a number of 0 or more, and below 1, got 1\.0"):
        run(x, gamma, dropout_p=1.0)
    with pytest.raises(ValueError, match=r"epsilon: expected a number of 0 or more, got -1\.0"):
        run(x, gamma, epsilon=-1.0)
