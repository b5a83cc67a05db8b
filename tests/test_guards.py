"""Guards: what each makes true, and that a build with the faults of a published one keeps its bundle's promises."""

import dataclasses
import inspect
import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_loader
from kernel_loader.catalog import Catalog
from kernel_loader.conformance.grids.fp8 import FINEGRAINED_FP8_GRID
from kernel_loader.conformance.probes import PROBES
from kernel_loader.conformance.subject import Subject
from kernel_loader.errors import ManifestError
from kernel_loader.guards import GUARDS, Guarded
from kernel_loader.loader import KernelLoader
from kernel_loader.quantization import dequantize_mxfp4, quantize_block_fp8, quantize_mxfp4, quantize_mxfp8
from kernel_loader.settings import Settings
from tests.builds import write_build

NAN = float("nan")
REPO = "kernels-community/finegrained-fp8"
ONE_EXPERT_EACH = torch.tensor([0, 1, 2])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small take longer among threads, the more so where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sample(x, y=1, *, z=2):
    """Doubles."""
    return 2 * x * y * z


def returns(value):
    """A function that returns what it is given, whatever it is called with."""
    return lambda *args, **kwargs: value


def recorded(result=None):
    """A function that keeps what it is called with."""
    calls = []

    def function(*args, **kwargs):
        calls.append((args, kwargs))
        return torch.ones(args[0].shape[0], args[1].shape[-2]) if result is None else result

    function.calls = calls
    return function


def weights(*shape: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks of 32 x 32."""
    torch.manual_seed(0)
    return quantize_block_fp8(torch.randn(shape), (32, 32))


# --- what is around a function --------------------------------------------------------------------------------------


def test_a_guarded_function_is_known_as_the_function():
    guarded = Guarded(sample, ["contiguous"])
    assert guarded(3, y=2) == 24
    assert guarded.__name__ == "sample"
    assert guarded.__doc__ == "Doubles."
    assert guarded.__module__ == __name__
    assert guarded.__wrapped__ is sample
    assert inspect.signature(guarded) == inspect.signature(sample)
    assert "contiguous" in repr(guarded)


def test_a_guarded_function_pickles_and_is_equal_to_its_copy():
    guarded = Guarded(sample, ["contiguous", "no-gradient"])
    copy = pickle.loads(pickle.dumps(guarded))
    assert copy == guarded
    assert hash(copy) == hash(guarded)
    assert copy(3) == 12
    assert copy != Guarded(sample, ["contiguous"])
    assert copy != sample


def test_guards_stand_in_one_order_whatever_that_of_the_manifest():
    assert Guarded(sample, ["no-gradient", "contiguous"]).guards == ("contiguous", "no-gradient")


@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_is_a_documented_function(name):
    (guarded,) = [Guarded(sample, [name])]
    rule = guarded._call.func
    assert rule.__name__ == name.replace("-", "_")
    assert rule.__doc__[-1] in ".\n "


def test_the_table_of_guards_in_the_documentation_is_complete():
    text = (Path(__file__).parents[1] / "docs" / "manifests.md").read_text()
    rows = [line.split("`")[1] for line in text.split("| guard | ")[1].split("\n\n")[0].splitlines()[2:]]
    assert rows == list(GUARDS)


# --- each of them ---------------------------------------------------------------------------------------------------


def test_tensors_reach_the_function_contiguous_and_others_are_left_alone():
    function = recorded(result=0)
    strided, packed = torch.arange(6).view(2, 3).T, torch.arange(3)
    Guarded(function, ["contiguous"])(strided, [1, 2], b=strided, c=packed)
    ((a, block), kwargs) = function.calls[0]
    assert a.is_contiguous()
    assert kwargs["b"].is_contiguous()
    assert torch.equal(a, strided)
    assert block == [1, 2]
    assert kwargs["c"] is packed


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("ends", [[1, 3], [0, 0], [4, 4]])
def test_rows_after_the_last_expert_are_zeros(keyword, ends):
    offsets, out = torch.tensor(ends, dtype=torch.int32), torch.full((4, 2), NAN)
    out[: ends[-1]] = 1.0
    guarded = Guarded(returns(out), ["zero-tail"])
    got = guarded(1, 2, 3, offsets=offsets) if keyword else guarded(1, 2, 3, offsets)
    assert got is out
    assert got.sum(1).tolist() == [2.0] * ends[-1] + [0.0] * (4 - ends[-1])


@pytest.mark.parametrize("keyword", [False, True])
def test_rows_of_sentinels_are_zeros(keyword):
    ids, out = torch.tensor([0, 2, 1, 7]), torch.full((4, 2), NAN)
    out[[0, 2]] = 1.0
    guarded = Guarded(returns(out), ["zero-sentinels"])
    b = torch.zeros(2, 2, 2)
    got = guarded(A=1, B=b, Bs=3, expert_ids=ids) if keyword else guarded(1, b, 3, ids)
    assert got is out
    assert got.sum(1).tolist() == [2.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("keyword", [False, True])
def test_rows_of_negative_groups_are_zeros_in_what_was_written(keyword):
    d, groups = torch.full((3, 2), NAN), torch.tensor([0, -1, 1], dtype=torch.int32)
    d[[0, 2]] = 1.0
    guarded = Guarded(returns(None), ["zero-negative-groups"])
    assert (guarded(1, 2, d=d, grouped_layout=groups) if keyword else guarded(1, 2, d, groups)) is None
    assert d.sum(1).tolist() == [2.0, 0.0, 2.0]


class Routed:
    """What is looked at of a routing."""

    expt_hist = torch.tensor([2, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize("keyword", [False, True])
def test_places_of_no_expert_are_zeros_unless_something_is_scattered(keyword):
    rows = [[1.0], [1.0], [1.0], [NAN], [NAN]]
    guarded = Guarded(lambda *args, **kwargs: torch.tensor(rows), ["zero-places"])
    got = guarded("x", "w", None, routing_data=Routed) if keyword else guarded("x", "w", None, Routed, None, None)
    assert torch.equal(got, torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0]]))
    scattered = guarded("x", "w", None, Routed, None, "scatter")
    alone = guarded("x", "w", None, None)
    assert scattered[3:].isnan().all()
    assert alone[3:].isnan().all()


@pytest.mark.parametrize(("k", "n"), [(32, 128), (96, 128), (128, 17), (128, 1)])
def test_weights_that_a_build_would_compute_wrongly_are_refused(k, n):
    function = recorded()
    with pytest.raises(ValueError, match=f"K = {k} and N = {n}; pad both"):
        Guarded(function, ["whole-weights"])(torch.ones(3, k), torch.empty(2, k, n, device="meta"), None, Routed)
    assert not function.calls


def test_a_routed_product_without_rows_is_empty_without_a_call():
    function, w = recorded(), torch.empty(2, 64, 32, device="meta")
    guarded = Guarded(function, ["whole-weights"])
    x = torch.ones(0, 64, dtype=torch.bfloat16)
    config = type("Config", (), {"out_dtype": torch.float32})
    activation = type("Activation", (), {"reduction_n": 2})
    plain = guarded(x, w, None, Routed)
    half = guarded(x, w, None, Routed, precision_config=config, fused_activation=activation)
    assert (plain.shape, plain.dtype) == ((0, 32), torch.bfloat16)
    assert (half.shape, half.dtype) == ((0, 16), torch.float32)
    assert not function.calls
    guarded(torch.ones(3, 64), w, None, Routed, "gather", None, config, gammas=1)
    assert function.calls[0][0][4:] == ("gather", None, config)
    assert function.calls[0][1] == {"gammas": 1}


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ((0, 8), (4, 8), (0, 4)),
        ((3, 8), (0, 8), (3, 0)),
        ((3, 0), (4, 0), (3, 4)),
        ((2, 0, 8), (4, 8), (2, 0, 4)),
        ((3, 8), (0, 4, 8), (3, 4)),
        ((8,), (0, 8), (0,)),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_an_empty_product_is_zeros_without_a_call(a, b, shape, keyword):
    function = recorded()
    guarded, left, right = Guarded(function, ["empty"]), torch.ones(a, dtype=torch.float16), torch.ones(b)
    got = guarded(A=left, B=right) if keyword else guarded(left, right, None)
    assert got.dtype == torch.float16
    assert torch.equal(got, torch.zeros(shape, dtype=torch.float16))
    assert guarded(left, right, output_dtype=torch.float32).dtype == torch.float32
    assert not function.calls
    guarded(torch.ones(3, 8), torch.ones(4, 8))
    assert len(function.calls) == 1


def test_what_has_no_gradient_says_so():
    x = torch.ones(2, requires_grad=True)
    assert not Guarded(sample, ["no-gradient"])(x).requires_grad
    assert sample(x).requires_grad


def test_without_a_cuda_tensor_the_current_device_is_left_alone():
    assert Guarded(sample, ["current-device"])(torch.ones(1)).item() == 4


@pytest.mark.needs_cuda
def test_the_device_of_the_tensors_is_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    with torch.cuda.device(0):
        seen = Guarded(lambda *args: torch.cuda.current_device(), ["current-device"])(1, torch.ones(1, device="cuda:1"))
        assert (seen, torch.cuda.current_device()) == (1, 0)


# --- those for FP8 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [False, True])
def test_weights_of_experts_are_padded_to_whole_tiles(keyword):
    function, a = recorded(), torch.ones(5, 80)
    b, scale = weights(2, 48, 80)
    guarded = Guarded(function, ["whole-tiles"])
    rest = {"expert_ids": 0, "block_size": [32, 32]} if keyword else {}
    got = guarded(a, b, scale, **rest) if keyword else guarded(a, b, scale, 0, [32, 32])
    ((padded_a, padded_b, same, *_), _) = function.calls[0]
    assert padded_a.shape == (5, 96)
    assert padded_b.shape == (2, 64, 96)
    assert padded_b.dtype == torch.float8_e4m3fn
    assert torch.equal(padded_b[:, :48, :80].float(), b.float())
    assert not padded_a[:, 80:].any()
    assert not padded_b[:, 48:].float().any()
    assert not padded_b[:, :, 80:].float().any()
    assert same is scale
    assert got.shape == (5, 48)
    assert got.is_contiguous()


def test_weights_of_whole_tiles_are_left_alone():
    function, a = recorded(), torch.ones(5, 64)
    b, scale = weights(2, 32, 64)
    Guarded(function, ["whole-tiles"])(a, b, scale, 0, [32, 32])
    assert all(given is mine for given, mine in zip(function.calls[0][0], (a, b, scale), strict=False))


@pytest.mark.parametrize("block_size", [None, [48, 80]])
def test_a_weight_with_one_scale_still_has_one_when_it_is_padded(block_size):
    function = recorded()
    b, _ = weights(2, 48, 80)
    Guarded(function, ["whole-tiles"])(torch.ones(5, 80), b, torch.ones(2), 0, block_size)
    ((a, padded, _, _, block), _) = function.calls[0]
    assert (a.shape, padded.shape, block) == ((5, 256), (2, 256, 256), None)


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_mxfp4])
def test_scales_of_mx_weights_are_padded_with_them(quantize):
    function = recorded()
    b, scale = quantize(torch.randn(2, 48, 96))
    b = b.view(torch.int8) if quantize is quantize_mxfp4 else b
    Guarded(function, ["whole-tiles"])(torch.ones(5, 96), b, scale, 0, None)
    ((a, padded, scales, *_), _) = function.calls[0]
    assert a.shape == (5, 256)
    assert padded.shape == (2, 256, 128 if quantize is quantize_mxfp4 else 256)
    assert padded.dtype == b.dtype
    assert scales.shape == (2, 256, 8)
    assert torch.equal(scales[:, :48, :3], scale)


@pytest.mark.parametrize(("n", "k"), [(256, 384), (100, 60), (128, 128)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_static_scale_counts_for_a_weight_with_one_scale(n, k, whole):
    function = recorded()
    b, static = torch.zeros(n, k).to(torch.float8_e4m3fn), torch.tensor(0.5)
    guarded = Guarded(function, ["static-scale"])
    guarded(torch.ones(3, k), b, torch.tensor(0.25), [n, k] if whole else None, activation_scale=static)
    ((_, _, scale, block, _, given), _) = function.calls[0]
    assert given is static
    assert block != [n, k]
    assert scale.shape == (-(-n // block[0]), -(-k // block[1]))
    assert set(scale.flatten().tolist()) == {0.25}


def test_without_a_static_scale_or_in_other_formats_nothing_is_changed():
    function = recorded()
    guarded, b = Guarded(function, ["static-scale"]), torch.zeros(32, 32).to(torch.float8_e4m3fn)
    one, mx = torch.ones(1), torch.full((32, 1), 127, dtype=torch.uint8)
    for scale, block, static in ((one, None, None), (torch.ones(2, 2), [16, 16], one), (mx, None, one)):
        guarded(torch.ones(3, 32), b, scale, block, None, static)
        assert function.calls[-1][0][2] is scale
        assert function.calls[-1][0][3] == block


@pytest.mark.parametrize("dtype", [torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)])
@pytest.mark.parametrize(("b", "scale"), [((4, 64), (1,)), ((4, 64), ()), ((2, 4, 64), (2,)), ((2, 4, 64), (2, 1, 1))])
def test_one_scale_a_matrix_is_decoded(dtype, b, scale):
    function = recorded()
    codes = torch.full(scale, 124, dtype=torch.uint8).view(dtype)
    Guarded(function, ["float-scale"])(torch.ones(3, 64), torch.zeros(b).to(torch.float8_e4m3fn), codes, None)
    given = function.calls[0][0][2]
    assert given.dtype == torch.float32
    assert torch.equal(given, torch.full(scale, 0.125))


@pytest.mark.parametrize("shape", [(4, 2), (1, 2)])
def test_scales_of_blocks_and_groups_are_left_alone(shape):
    function, codes = recorded(), torch.full(shape, 124, dtype=torch.uint8)
    Guarded(function, ["float-scale"])(torch.ones(3, 64), torch.zeros(4, 64).to(torch.float8_e4m3fn), codes, None)
    assert function.calls[0][0][2] is codes


def test_indices_of_every_dtype_become_int64_and_those_that_are_wide_stay():
    function, wide = recorded(), torch.tensor([3], dtype=torch.int32)
    guarded = Guarded(function, ["wide-indices"])
    scale = torch.ones(1, dtype=torch.uint8)
    b = torch.zeros(1, 1, 1, dtype=torch.int8)
    guarded(torch.ones(1, 1), b, scale, wide, tokens_per_expert=torch.tensor([200], dtype=torch.uint8))
    ((_, same_b, same_scale, ids), named) = function.calls[0]
    assert ids is wide
    assert same_b is b
    assert same_scale is scale
    assert named["tokens_per_expert"].dtype == torch.int64
    assert named["tokens_per_expert"].tolist() == [200]
    guarded(torch.ones(1, 1), b, scale, torch.tensor([2**64 - 1, 5], dtype=torch.uint64))
    assert function.calls[1][0][3].tolist() == [2**63 - 1, 5]


def test_nan_makes_its_run_nan_and_no_other():
    x = torch.ones(2, 8)
    x[0, 1] = NAN
    codes = torch.ones(2, 8).to(torch.float8_e4m3fn)
    got, scales = Guarded(returns((codes, torch.ones(2, 2))), ["nan-scale"])(x, 4)
    assert scales.isnan().tolist() == [[True, False], [False, False]]
    assert got.float().isnan().tolist() == [[True] * 4 + [False] * 4, [False] * 8]
    empty = (torch.ones(2, 0), torch.ones(2, 0))
    assert Guarded(returns(empty), ["nan-scale"])(torch.ones(2, 0), 4)[1].shape == (2, 0)


def test_a_vector_is_a_row():
    function = recorded()
    guarded = Guarded(function, ["vector"])
    assert guarded(torch.ones(8), torch.ones(4, 8)).shape == (4,)
    assert function.calls[0][0][0].shape == (1, 8)
    assert guarded(torch.ones(3, 8), torch.ones(4, 8)).shape == (3, 4)


# --- the gradient ---------------------------------------------------------------------------------------------------


def straight_through(a, b, *_, **__):
    """A product that is not differentiable."""
    return a.new_ones(*a.shape[:-1], b.shape[-2])


def gradient(guarded, a, *rest, upstream, **named):
    a = a.detach().requires_grad_()
    (found,) = torch.autograd.grad(guarded(a, *rest, **named), a, upstream)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_the_upstream_one_times_the_weight(dtype):
    b, scale = weights(40, 70)
    real = b.double() * scale.double().repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)[:, :70]
    upstream = torch.randn(2, 3, 40).to(dtype)
    a = torch.randn(2, 3, 70).to(dtype)
    guarded = Guarded(lambda *args: straight_through(*args).to(dtype), ["input-gradient"])
    found = gradient(guarded, a, b, scale, [32, 32], upstream=upstream)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), upstream.double() @ real, rtol=0.01 if dtype != torch.float32 else 1e-5, atol=1e-3
    )


def test_the_gradient_of_a_weight_of_several_parts(monkeypatch):
    monkeypatch.setattr("kernel_loader.guards.gradient._AT_A_TIME", 40 * 33)
    guarded, upstream = Guarded(straight_through, ["input-gradient"]), torch.randn(3, 40)
    b, scale = weights(40, 70)
    real = b.double() * scale.double().repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)[:, :70]
    found = gradient(guarded, torch.randn(3, 70), b, scale, [32, 32], upstream=upstream)
    torch.testing.assert_close(found.double(), upstream.double() @ real, rtol=1e-5, atol=1e-3)
    one = torch.tensor([0.5])
    for block in (None, [40, 70]):
        found = gradient(guarded, torch.randn(3, 70), b, one, block, upstream=upstream)
        torch.testing.assert_close(found.double(), upstream.double() @ b.double() / 2, rtol=1e-5, atol=1e-3)
    packed, mx = quantize_mxfp4(torch.randn(40, 96))
    found = gradient(guarded, torch.randn(3, 96), packed.view(torch.int8), mx, None, upstream=upstream)
    torch.testing.assert_close(
        found.double(), upstream.double() @ dequantize_mxfp4(packed, mx).double(), rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_gradient_of_experts_is_zero_for_sentinels_whatever_comes_from_above(grouped, keyword):
    b, scale = weights(3, 32, 64)
    real = b.double() * scale.double().repeat_interleave(32, 1).repeat_interleave(32, 2)
    ids = torch.tensor([0, 0, 2, 3, 3]) if grouped else torch.tensor([2, 3, 0, 9, 0])
    sentinel = ids >= 3
    upstream = torch.randn(5, 32).masked_fill(sentinel[:, None], NAN)
    tokens = torch.tensor([2, 0, 1], dtype=torch.int32)
    names = {"offsets": tokens.cumsum(0), "tokens_per_expert": tokens} if grouped else {"expert_ids": ids}
    guarded, a = Guarded(straight_through, ["input-gradient"]), torch.randn(5, 64)
    if keyword:
        found = gradient(guarded, a, B=b, Bs=scale, block_size=[32, 32], upstream=upstream, **names)
    else:
        found = gradient(guarded, a, b, scale, *names.values(), [32, 32], upstream=upstream)
    for row, expert in enumerate(ids.tolist()):
        want = upstream[row].double() @ real[expert] if expert < 3 else torch.zeros(64, dtype=torch.float64)
        torch.testing.assert_close(found[row].double(), want, rtol=1e-5, atol=1e-3)
    assert not found[sentinel].any()


def test_weights_and_scales_get_no_gradient_and_no_graph_is_made_for_them():
    b, scale = weights(32, 64)
    scale.requires_grad_()
    guarded = Guarded(lambda a, b, s, *_: straight_through(a, b) * s.sum(), ["input-gradient"])
    assert not guarded(torch.ones(3, 64), b, scale, [32, 32]).requires_grad
    a = torch.ones(3, 64, requires_grad=True)
    guarded(a, b, scale, [32, 32]).sum().backward()
    assert scale.grad is None
    assert a.grad.abs().sum() > 0
    with torch.no_grad():
        assert not guarded(a, b, scale, [32, 32]).requires_grad
    with torch.inference_mode():
        assert not guarded(a, b, scale, [32, 32]).requires_grad


# --- a build with the faults of version 4 ---------------------------------------------------------------------------


def version_4(root: Path, **metadata: object) -> dict[str, Path]:
    """A directory with that build, and what stands for the repository then."""
    source = (Path(__file__).parent / "fp8_of_version_4.py").read_text()
    write_build(root, "torch-cpu", {"__init__.py": source}, **({"name": "finegrained-fp8", "version": 4} | metadata))
    return {REPO: root}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """`finegrained_fp8`, bound to it."""
    root = tmp_path_factory.mktemp("finegrained") / "finegrained-fp8"
    settings = Settings(local=version_4(root), offline=True, cache=root / "store")
    return KernelLoader(settings).load("finegrained_fp8")


def failures(function, entry, mode, probes):
    """What goes wrong, by case and probe."""
    found = {}
    for case in entry.cases:
        subject = Subject(entry, case, function, None, torch.device("cpu"))
        for name in probes:
            try:
                found[case.name, name] = PROBES[mode][name](subject).detail
            except Exception as error:  # noqa: BLE001 - whatever a build raises
                found[case.name, name] = repr(error)
    return {key: detail for key, detail in found.items() if detail}


@pytest.mark.parametrize("mode", ["eager", "backward"])
@pytest.mark.parametrize("entry", FINEGRAINED_FP8_GRID, ids=lambda entry: entry.entrypoint)
def test_all_that_the_bundle_promises_holds_behind_the_guards(faulty, entry, mode):
    if mode in entry.skip:
        pytest.skip(entry.skip[mode])
    guarded = getattr(faulty, entry.entrypoint)
    assert failures(guarded, entry, mode, ["value", "memory"]) == {}
    assert failures(guarded.__wrapped__, entry, mode, ["value"])


def cases_to_compile():
    """Those where a guard does something: pairs of an entry and a case."""
    named = {
        "fp8_matmul": ["per tensor, UE8M0", "a vector", "K = 0", "A strided", "activation_scale, per tensor"],
        "fp8_act_quant": ["NaN in a row", "x strided", "no columns"],
        "batched_fp8_matmul": ["MXFP4, K no multiple of 128", "block, with sentinels", "no rows", "A strided"],
        "grouped_fp8_matmul": ["N, K one above the block", "MXFP8, with sentinels", "no rows", "A strided"],
    }
    return [
        pytest.param(entry, case, id=f"{entry.entrypoint}, {case.name}")
        for entry in FINEGRAINED_FP8_GRID
        for case in entry.cases
        if case.name in named[entry.entrypoint]
    ]


@pytest.mark.parametrize(("entry", "case"), cases_to_compile())
def test_guards_break_no_graph(faulty, entry, case):
    subject = Subject(entry, case, getattr(faulty, entry.entrypoint), None, torch.device("cpu"))
    assert PROBES["compile"]["value"](subject).detail == ""


@torch.library.custom_op("kernel_loader_tests::bytes_of", mutates_args=())
def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    """A kernel, as Inductor sees one: its argument must lie in memory."""
    return codes.view(torch.uint8).flatten(1).sum(1, dtype=torch.int64)[None]


@bytes_of.register_fake
def _(codes):
    return codes.new_empty((1, codes.shape[0]), dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("seen_as", [None, torch.uint8])
def test_a_compiled_kernel_gets_padded_weights_in_memory(dtype, seen_as):
    def function(A, B, Bs, ids, block_size):
        return bytes_of(B if seen_as is None else B.view(seen_as))

    guarded = Guarded(function, ["whole-tiles"])
    codes = torch.randint(1, 100, (48, 48, 80), dtype=torch.uint8).view(dtype)
    arguments = (torch.ones(1, 80), codes, torch.ones(48, 2, 3), 0, [32, 32])
    torch.compiler.reset()
    assert torch.equal(torch.compile(guarded, fullgraph=True)(*arguments), guarded(*arguments))


@pytest.mark.parametrize("field", ["fp8_matmul", "batched_fp8_matmul", "grouped_fp8_matmul"])
def test_the_gradient_goes_through_a_compiled_graph(faulty, field):
    a, (b, scale) = torch.randn(3, 64), weights(*((32, 64) if field == "fp8_matmul" else (3, 32, 64)))
    index = {
        "fp8_matmul": (),
        "batched_fp8_matmul": (ONE_EXPERT_EACH,),
        "grouped_fp8_matmul": (ONE_EXPERT_EACH + 1, torch.ones_like(ONE_EXPERT_EACH)),
    }[field]

    def loss(a):
        return (getattr(faulty, field)(a, b, scale, *index, [32, 32]) ** 2).sum()

    torch.compiler.reset()
    got, want = a.clone().requires_grad_(), a.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(got).backward()
    loss(want).backward()
    torch.testing.assert_close(got.grad, want.grad)


def test_every_integer_dtype_is_taken(faulty):
    a, (b, scale) = torch.randn(3, 64), weights(3, 32, 64)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64):
        ids = torch.tensor([0, 1, 5]).to(dtype)
        got = faulty.batched_fp8_matmul(a, b, scale, ids, [32, 32])
        assert torch.equal(got, faulty.batched_fp8_matmul(a, b, scale, ids.long(), [32, 32]))
        assert not got[2].any()
        counts = torch.tensor([1, 0, 1]).to(dtype)
        ends = torch.tensor([1, 1, 2]).to(dtype)
        got = faulty.grouped_fp8_matmul(a, b, scale, ends, counts, [32, 32])
        assert torch.equal(got, faulty.grouped_fp8_matmul(a, b, scale, ends.long(), counts.long(), [32, 32]))
        assert not got[2].any()
    rows = torch.randn(200, 64)
    counts = torch.tensor([200, 0, 0], dtype=torch.uint8)
    got = faulty.grouped_fp8_matmul(rows, b, scale, counts.cumsum(0, dtype=torch.uint8), counts, [32, 32])
    assert got.isfinite().all()


def test_the_guards_of_the_shipped_manifests_are_of_fields_that_there_are():
    for name in Catalog(Settings()).names():
        manifest = Catalog(Settings()).get(name)
        if manifest.guards:
            kernel_loader.binder.bundle_class(manifest)


# --- at load --------------------------------------------------------------------------------------------------------


def test_what_is_guarded_is_told(tmp_path, caplog):
    settings = Settings(local=version_4(tmp_path / "finegrained-fp8"), offline=True, cache=tmp_path / "store")
    loader = KernelLoader(settings)
    bundle = loader.load("finegrained_fp8")
    origin = kernel_loader.origin(bundle)
    assert "fp8_act_quant: contiguous, nan-scale, no-gradient" in origin.guards
    resolution = loader.resolve("finegrained_fp8")
    assert resolution.guards == origin.guards
    assert "Guarded: fp8_act_quant: contiguous, nan-scale, no-gradient" in resolution.explain()
    assert json.loads(resolution.to_json())["guards"] == list(origin.guards)
    # An advisory that a guard mends is no reason to warn.
    assert "mended by the guard whole-tiles" in resolution.explain()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_bundle_with_guards_pickles_and_knows_its_origin(tmp_path):
    settings = Settings(local=version_4(tmp_path / "finegrained-fp8"), offline=True, cache=tmp_path / "store")
    bundle = KernelLoader(settings).load("finegrained_fp8")
    copy = pickle.loads(pickle.dumps(bundle))
    assert copy == bundle
    assert kernel_loader.origin(copy) == kernel_loader.origin(bundle)


def test_guards_are_for_versions_that_need_them(tmp_path):
    for version, guarded in ((4, True), (5, False), (None, True)):
        root = tmp_path / f"v{version}" / "finegrained-fp8"
        settings = Settings(local=version_4(root, version=version), offline=True, cache=tmp_path / "store")
        loader = KernelLoader(settings)
        bundle = loader.load("finegrained_fp8", revision="main")
        assert isinstance(bundle.fp8_matmul, Guarded) == guarded
        assert bool(kernel_loader.origin(bundle).guards) == guarded
        assert bool(loader.resolve("finegrained_fp8", revision="main").guards) == guarded


def test_embedded_builds_are_not_guarded(cpu_machine):
    loader = KernelLoader(Settings(offline=True))
    bundle = loader.load("finegrained_fp8")
    assert not isinstance(bundle.fp8_matmul, Guarded)
    assert kernel_loader.origin(bundle).guards == ()
    assert loader.resolve("finegrained_fp8").reference.guards == ()


def test_a_module_has_no_guards_and_its_advisories_are_told(tmp_path, caplog):
    settings = Settings(local=version_4(tmp_path / "finegrained-fp8"), offline=True, cache=tmp_path / "store")
    module = KernelLoader(settings).load_module("finegrained_fp8")
    assert not isinstance(module.matmul_2d, Guarded)
    assert kernel_loader.origin(module).guards == ()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "known fault finegrained-fp8-short-blocks" in record.getMessage()


GUARDED = {"guards": {"double": ["contiguous", {"guard": ["no-gradient", "vector"], "versions": "<3"}]}}


def test_a_class_with_some_of_the_fields_has_their_guards(workshop):
    @dataclasses.dataclass(frozen=True)
    class Half:
        __kernel__ = "my_kernel"

        other: object

    source = "def double(x): return x\ndef other(x): return x"
    workshop.simple("my_kernel", source, entrypoints={"double": "double", "other": "other"}, **GUARDED)
    bundle = workshop.loader().load(Half)
    assert not isinstance(bundle.other, Guarded)
    assert kernel_loader.origin(bundle).guards == ()
    assert workshop.loader().load("my_kernel").double.guards == ("contiguous", "vector", "no-gradient")


def test_what_is_no_function_cannot_be_guarded(workshop):
    workshop.simple("my_kernel", "double = 2", **GUARDED)
    with pytest.raises(ManifestError, match="it is a int, and no function") as caught:
        workshop.loader().load("my_kernel")
    assert caught.value.path == "guards.double"


def test_guards_of_a_field_that_there_is_not_are_refused(workshop):
    workshop.simple("my_kernel", guards={"triple": ["contiguous"]})
    with pytest.raises(ManifestError, match="no such field; it has double") as caught:
        workshop.loader().load("my_kernel")
    assert caught.value.path == "guards.triple"


def test_a_kernel_without_guards_imports_none(workshop, run_python):
    repository = workshop.kernel("my_kernel")
    write_build(repository, "torch-universal")
    code = """
import sys, kernel_loader
bundle = kernel_loader.load_kernel("my_kernel")
print(bundle.double(21), [name for name in sys.modules if name.startswith(("kernel_loader.guards", "torch"))])
print("kernel_loader.advisories" in sys.modules)
"""
    environ = {
        "KERNEL_LOADER_MANIFESTS": str(workshop.manifests),
        "KERNEL_LOADER_LOCAL": f"org/my-kernel={repository}",
        "KERNEL_LOADER_OVERRIDE_CUDA": "",
    }
    assert run_python(code, env=environ) == "42 []\nFalse\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def double(x):\n    return x\n", "sink-gradient is for functions of q, k, v, and this one takes x"),
        ("def double(*, x):\n    return x\n", "sink-gradient is for functions of q, k, v, and this one takes none"),
        ("def double(q, k, v):\n    return q\n", None),
        ("def double(*args):\n    return args\n", None),
        ("double = max\n", None),
    ],
)
def test_a_guard_that_does_not_fit_its_function_is_refused_at_load(workshop, source, said):
    workshop.simple("my_kernel", source, guards={"double": ["sink-gradient"]})
    if said is None:
        assert workshop.loader().load("my_kernel").double.guards == ("sink-gradient",)
        return
    with pytest.raises(ManifestError, match=f"guards.double: {said}"):
        workshop.loader().load("my_kernel")


def test_a_guard_of_a_field_that_is_not_there_is_promised_by_nobody(workshop):
    workshop.simple("my_kernel", guards={"triple": ["contiguous"]})
    for call in (workshop.loader().load, workshop.loader().resolve):
        with pytest.raises(ManifestError, match="guards.triple: the bundle MyKernel has no such field"):
            call("my_kernel")
