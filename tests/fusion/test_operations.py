"""Operations on weights: what they do, that they come back bit for bit, and what they refuse."""

import itertools
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.operation import Operation, TensorSpec, holds
from kernel_loader.fusion.operations import (
    Cast,
    Chunk,
    Concatenate,
    Deinterleave,
    DequantizeBlockFP8,
    Interleave,
    Pad,
    Permute,
    QuantizeBlockFP8,
    Rename,
    Stack,
    Transpose,
    Unpad,
    Unstack,
)
from kernel_loader.quantization import dequantize_block_fp8, quantize_block_fp8

F8, E5M2, BF16, F16, F32, F64 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
I8, U8, I16, I32, I64, BOOL = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool
DTYPES = [F32, F16, BF16, I8, U8, F8, E5M2, torch.uint16, BOOL]


def random_bits(shape, dtype, seed=0):
    """A tensor of any bits whatever, NaNs with a payload included."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == BOOL else 256
    return torch.randint(0, high, (count,), generator=generator, dtype=U8).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(U8).tolist()


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return [bits(tensor) for tensor in got] == [bits(tensor) for tensor in want]


def counted(*shape):
    return torch.arange(math.prod(shape), dtype=F32).reshape(shape)


# --- what each one does ---------------------------------------------------------------------------------------------


def test_gate_and_up_are_concatenated():
    gate, up = counted(3, 4), -counted(3, 4)
    (both,) = Concatenate(0).apply([gate, up])
    assert both[:3].equal(gate)
    assert both[3:].equal(up)


def test_grouped_query_attention_is_concatenated_and_cut_with_sizes():
    q, k, v = counted(8, 4), counted(2, 4) + 100, counted(2, 4) + 200
    (qkv,) = Concatenate(0, sizes=(8, 2, 2)).apply([q, k, v])
    assert qkv.equal(torch.cat([q, k, v]))
    assert same(Chunk(0, sizes=(8, 2, 2)).apply([qkv]), [q, k, v])


def test_interleaved_gate_and_up_are_those_of_gpt_oss():
    gate, up = counted(2, 3, 5), -counted(2, 3, 5)
    (both,) = Interleave(-1).apply([gate, up])
    assert both[..., ::2].equal(gate)
    assert both[..., 1::2].equal(up)
    assert same(Deinterleave(-1).apply([both]), [gate, up])


def test_experts_are_stacked():
    experts = [counted(2, 3) + 10 * i for i in range(5)]
    (all_of_them,) = Stack().apply(experts)
    assert all_of_them.equal(torch.stack(experts))
    assert Stack(2).apply(experts)[0].equal(torch.stack(experts, 2))
    assert same(Unstack(-1).apply(Stack(-1).apply(experts)), experts)


def test_transposed_and_permuted_tensors_are_laid_out_anew():
    x = counted(2, 3, 4)
    assert Transpose().apply([x])[0].equal(x.mT)
    assert Transpose(0, 2).apply([x])[0].equal(x.transpose(0, 2))
    assert Permute((2, 0, 1)).apply([x])[0].equal(x.permute(2, 0, 1))
    assert Permute((2, 0, 1)).apply([x])[0].is_contiguous()


def test_padding_is_zeros_at_the_end():
    x = counted(3, 5) + 1
    assert Pad(1, 5, multiple=4) == Pad(1, original=5, size=8)
    (padded,) = Pad(1, 5, 8).apply([x])
    assert padded[:, :5].equal(x)
    assert not padded[:, 5:].any()
    assert Pad(0, 3, multiple=3).apply([x])[0].equal(x)


def test_padding_that_holds_something_is_not_thrown_away():
    for value in (1.0, -0.0, float("nan")):
        with pytest.raises(FusionError, match="expected padding of zeros, got other values in it. Set the padding"):
            Unpad(0, 1, 2).apply([torch.tensor([1.0, value])])


def test_quantized_weights_are_those_of_the_quantizer():
    w = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(BF16)
    codes, scales = QuantizeBlockFP8((2, 4)).apply([w])
    assert same([codes, scales], list(quantize_block_fp8(w, (2, 4))))
    assert same(DequantizeBlockFP8((2, 4)).apply([codes, scales]), [dequantize_block_fp8(codes, scales, (2, 4), BF16)])
    (powers,) = QuantizeBlockFP8((2, 4), ue8m0=True).apply([w])[1:]
    assert powers.log2().frac().eq(0).all()


# --- and back -------------------------------------------------------------------------------------------------------

SIDES = st.integers(1, 6)
SHAPES = st.lists(SIDES, min_size=2, max_size=3).map(tuple)


@st.composite
def cases(draw):
    """An exact operation, and tensors that it takes."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    count = draw(st.integers(1, 4))
    resized = lambda size: tuple(size if i == dim % len(shape) else side for i, side in enumerate(shape))  # noqa: E731
    sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    several = [shape] * count
    more = draw(st.integers(0, 4))
    operation, shapes = draw(
        st.sampled_from(
            [
                (Rename(), several),
                (Concatenate(dim, parts=count), several),
                (Concatenate(dim, sizes=sizes), [resized(size) for size in sizes]),
                (Chunk(dim, parts=count), [resized(count * shape[dim])]),
                (Chunk(dim, sizes=sizes), [resized(sum(sizes))]),
                (Stack(dim), several),
                (Unstack(dim), [shape]),
                (Interleave(dim, parts=count), several),
                (Deinterleave(dim, parts=count), [resized(count * shape[dim])]),
                (Transpose(dim, 0), several),
                (Permute(tuple(draw(st.permutations(range(len(shape)))))), several),
                (Pad(dim, shape[dim], shape[dim] + more), several),
            ]
        )
    )
    seed = draw(st.integers(0, 2**32))
    return operation, [random_bits(s, dtype, seed + i) for i, s in enumerate(shapes)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_operation_comes_back_bit_for_bit(case):
    operation, tensors = case
    before = [bits(tensor) for tensor in tensors]
    made = operation.apply(tensors)
    assert operation.exact
    assert operation.inverse().inverse() == operation
    assert [TensorSpec.of(tensor) for tensor in made] == operation.shapes([TensorSpec.of(tensor) for tensor in tensors])
    assert operation.targets(len(tensors)) in {len(made), None}
    assert same(operation.inverse().apply(made), tensors)
    assert [bits(tensor) for tensor in tensors] == before
    assert pickle.loads(pickle.dumps(operation)) == operation


@st.composite
def compositions(draw):
    """Operations in a row, and tensors for the first."""
    dtype, shape, count = draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.integers(1, 3))
    tensors = [random_bits(shape, dtype, draw(st.integers(0, 2**32))) for _ in range(count)]
    specs, operations = [TensorSpec.of(tensor) for tensor in tensors], []
    for _ in range(draw(st.integers(1, 6))):
        ndim = len(specs[0].shape)
        dim = draw(st.integers(0, ndim - 1))
        size = specs[0].shape[dim]
        possible: list[Operation] = [Rename(), Transpose(0, dim), Pad(dim, size, multiple=4)]
        possible += [Concatenate(dim, parts=len(specs)), Interleave(dim, parts=len(specs))]
        possible += [Stack(dim)] * (ndim < 4)
        if len(specs) == 1:
            possible += [Deinterleave(dim, parts=size), Chunk(dim, parts=size)] * (size > 1)
            possible += [Unstack(dim)] * (ndim > 1)
        operation = draw(st.sampled_from(possible))
        operations.append(operation)
        specs = operation.shapes(specs)
    return operations, tensors


@settings(max_examples=200, deadline=None)
@given(compositions())
def test_compositions_come_back_bit_for_bit(case):
    operations, tensors = case
    made = tensors
    for operation in operations:
        made = operation.apply(made)
    for operation in reversed(operations):
        made = operation.inverse().apply(made)
    assert same(made, tensors)


def test_results_share_no_memory_with_sources():
    x = counted(2, 4)
    for operation in (
        Concatenate(0, parts=1), Chunk(0, parts=1), Stack(), Unstack(), Interleave(0, 1), Deinterleave(0, 1),
        Transpose(0, 0), Permute((0, 1)), Pad(0, 2, 2), Unpad(0, 2, 2), Cast(F32, F32),
    ):  # fmt: skip
        for made in operation.apply([x]):
            assert made.is_contiguous()
            made.fill_(-1)
        assert x.equal(counted(2, 4)), operation
    assert Rename().apply([x])[0] is x


def test_parts_do_not_keep_the_whole_alive():
    for operation in (Chunk(0, parts=2), Unstack(), Deinterleave(0), Unpad(0, 2, 4)):
        for made in operation.apply([torch.zeros(4, 4)]):
            assert made.untyped_storage().nbytes() == made.numel() * 4


def test_results_need_no_gradient():
    weight = nn.Parameter(counted(2, 4))
    assert not Concatenate(0).apply([weight, weight])[0].requires_grad
    assert not Chunk(0, parts=2).apply([weight])[0].requires_grad
    assert not Cast(F64, F32).apply([weight])[0].requires_grad


def test_tensors_without_elements_and_meta_tensors_are_taken():
    empty = torch.empty(0, 4)
    assert Concatenate(0).apply([empty, empty])[0].shape == (0, 4)
    assert Pad(0, 0, 2).apply([empty])[0].equal(torch.zeros(2, 4))
    assert Unpad(0, 0, 2).apply(Pad(0, 0, 2).apply([empty]))[0].shape == (0, 4)
    meta = torch.empty(4, 6, device="meta")
    for operation in (Transpose(), Pad(0, 4, 8), Unpad(0, 2, 4), Chunk(0, parts=2), Deinterleave(1), Unstack()):
        assert all(made.is_meta for made in operation.apply([meta]))


def test_strided_sources_are_taken():
    x = counted(4, 6).mT
    assert same(Pad(0, 6, 8).inverse().apply(Pad(0, 6, 8).apply([x])), [x])
    codes = random_bits((4, 6), F8).mT
    assert same(Unstack(0).inverse().apply(Unstack(0).apply([codes])), [codes])


# --- casts ----------------------------------------------------------------------------------------------------------

NUMBERS = [F8, E5M2, BF16, F16, F32, F64, I8, U8, I16, I32, I64, BOOL]


def every_value(dtype):
    """All values of a dtype of at most 16 bits, or those of a wide one where rounding shows."""
    if dtype == BOOL:
        return torch.tensor([False, True])
    if dtype.itemsize <= 2:
        wide = torch.arange(2 ** (8 * dtype.itemsize), dtype=I64)
        return wide.to(U8 if dtype.itemsize == 1 else torch.int32).to(I16 if dtype.itemsize == 2 else U8).view(dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        around = [1 + info.eps, info.max, info.tiny, info.tiny * info.eps, math.inf, -0.0]
        return torch.tensor(around, dtype=F64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, info.min + 1, info.max, info.max - 1, -1], dtype=dtype)


@pytest.mark.parametrize(("dtype", "back"), [*itertools.product(NUMBERS, NUMBERS)])
def test_a_cast_is_exact_where_every_value_comes_back(dtype, back):
    values = every_value(back)
    cast = Cast(dtype, back)
    there = cast.apply([values])
    assert there[0].dtype == dtype
    assert cast.inverse().inverse() == cast
    (again,) = cast.inverse().apply(there)
    if back.is_floating_point:
        assert again.to(F64).isnan().equal(values.to(F64).isnan()) or not cast.exact
        kept = ~values.to(F64).isnan()
        values, again = values[kept], again[kept]
    came_back = bits(values) == bits(again)
    if back.is_floating_point and dtype.is_floating_point:
        assert cast.exact == came_back
    elif not back.is_floating_point and not dtype.is_floating_point:
        # Integers wrap around, so that those of the same width come back although their values were lost.
        assert cast.exact == values.to(I64).equal(there[0].to(I64))
    else:
        # What a cast gives for values that its dtype cannot hold is not defined, and comes back by chance.
        assert came_back or not cast.exact
    assert cast.exact == holds(dtype, back)


def test_integers_are_exact_in_floats_of_enough_digits():
    exact = {*itertools.product([F16, BF16, F32, F64], [I8, U8])} | {(F32, I16), (F64, I16), (F64, I32)}
    for dtype, back in itertools.product([F8, E5M2, F16, BF16, F32, F64], [I8, U8, I16, I32, I64]):
        assert Cast(dtype, back).exact == ((dtype, back) in exact), (dtype, back)
        assert not Cast(back, dtype).exact
    assert not Cast(F32, torch.complex64).exact


def test_a_cast_takes_the_dtype_that_it_leads_back_to():
    with pytest.raises(FusionError, match=re.escape("expected dtype torch.float16, got bfloat16[2]")):
        Cast(F32, F16).apply([torch.zeros(2, dtype=BF16)])


def test_quantizing_says_that_it_is_lossy_and_comes_near():
    operation = QuantizeBlockFP8((4, 4), dtype=F32)
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert not operation.exact
    assert not operation.inverse().exact
    assert operation.inverse().inverse() == operation
    (back,) = operation.inverse().apply(operation.apply([w]))
    assert back.dtype == F32
    assert (back - w).abs().max() < 2**-4 * w.abs().max()
    assert [TensorSpec.of(made) for made in operation.apply([w])] == operation.shapes([TensorSpec.of(w)])


# --- what is refused ------------------------------------------------------------------------------------------------

S = torch.zeros(2, 3)
REFUSED = {
    "too few": (Concatenate(0, parts=3), [S, S], "expected 3 tensors, got 2"),
    "none": (Stack(), [], "expected at least 1 tensors, got 0"),
    "too many": (Chunk(0, parts=2), [S, S], "expected 1 tensor, got 2"),
    "no such dimension": (Concatenate(2), [S, S], "expected a tensor that has dimension dim=2, got one of 2 dim"),
    "negative dimension": (Transpose(-3, 0), [S], "expected a tensor that has dimension dim0=-3, got one of 2"),
    "shapes": (Stack(), [S, S.T], "expected tensors of one dtype and shape, got float32[2, 3], float32[3, 2]"),
    "dimensions": (Concatenate(0), [S, S[0]], "of one dtype and shape but for dimension 0, got"),
    "dtypes": (Concatenate(0), [S, S.half()], "but for dimension 0, got float32[2, 3], float16[2, 3]"),
    "unequal": (Concatenate(0), [S, S[:1]], "expected equal sizes along dimension 0, got (2, 1). Give the sizes: "),
    "other sizes": (Concatenate(0, sizes=(1, 2)), [S, S], "expected sizes (1, 2) along dimension 0, got (2, 2)"),
    "uneven": (Chunk(1, parts=2), [S], "expected a size along dimension 1 that divides into 2 parts, got 3"),
    "sum": (Chunk(1, sizes=(1, 1)), [S], "expected size 2 along dimension 1, got 3"),
    "no parts": (Chunk(0), [S], "expected sizes, or the number of parts, got neither. Give sizes= or parts=."),
    "nothing to unstack": (Unstack(), [S[:0]], "expected at least one tensor along dimension 0, got float32[0, 3]"),
    "odd rows": (Deinterleave(1), [S], "expected a size along dimension 1 that divides by 2, got 3"),
    "permutation": (Permute((0, 2, 1)), [S], "expected a tensor of 3 dimensions, got float32[2, 3]"),
    "padded already": (Pad(0, 1, 4), [S], "expected size 1 along dimension 0, got float32[2, 3]"),
    "quantize dtype": (QuantizeBlockFP8(), [S], "expected a floating-point weight, dtype torch.bfloat16, got"),
    "quantize shape": (QuantizeBlockFP8(dtype=F32), [S[0]], "expected shape (..., N, K), got (3,)"),
    "codes": (DequantizeBlockFP8(), [S, S], "expected codes float8_e4m3fn"),
    "scales": (DequantizeBlockFP8(), [S.to(F8), S], "got float8_e4m3fn[2, 3] and float32[2, 3]"),
    "devices": (Stack(), [S, S.to("meta")], "expected tensors on one device, got cpu, meta. Bring them to one device."),
}


@pytest.mark.parametrize(("operation", "tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_what_was_expected(operation, tensors, message):
    with pytest.raises(FusionError, match=re.escape(message)) as caught:
        operation.apply(tensors)
    assert str(caught.value).startswith(f"{operation}: expected")
    if "device" not in message:
        with pytest.raises(FusionError) as of_shapes:
            operation.shapes([TensorSpec.of(tensor) for tensor in tensors])
        assert str(of_shapes.value) == str(caught.value)


UNMADE = {
    "sizes": (lambda: Concatenate(0, sizes=(1, -1)), "sizes that are not negative"),
    "parts": (lambda: Chunk(0, sizes=(1, 1), parts=3), "as many as parts"),
    "no part": (lambda: Chunk(0, parts=0), "at least one part"),
    "nothing in turn": (lambda: Interleave(0, 0), "at least one part, got 0"),
    "nothing apart": (lambda: Deinterleave(0, 0), "at least one part, got 0"),
    "dims": (lambda: Permute((0, 0)), "every dimension from 0 on once, got (0, 0)"),
    "no size": (lambda: Pad(0, 4), "a padded size (size= or multiple=)"),
    "two sizes": (lambda: Pad(0, 4, 8, multiple=8), "a size, or a positive multiple to round up to"),
    "multiple": (lambda: Pad(0, 4, multiple=0), "a positive multiple"),
    "smaller": (lambda: Unpad(0, 4, 3), "that is not below the original one, got 3"),
    "blocks": (lambda: QuantizeBlockFP8((0, 1)), "two positive numbers as block_size, got (0, 1)"),
    "one block": (lambda: QuantizeBlockFP8((1,)), "two positive numbers as block_size, got (1,)"),
}


@pytest.mark.parametrize(("make", "message"), UNMADE.values(), ids=UNMADE)
def test_an_operation_that_means_nothing_cannot_be_made(make, message):
    with pytest.raises(FusionError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Concatenate("0"), "Concatenate: expected dim of the kind int, got '0'"),
        (lambda: Concatenate(0, 3), "expected sizes of the kind tuple[int, ...] | None, got 3"),
        (lambda: Stack(None), "expected dim of the kind int, got None"),
        (lambda: Permute(3), "expected dims of the kind tuple[int, ...], got 3"),
        (lambda: Cast("bf16", torch.float32), "expected dtype of the kind torch.dtype, got 'bf16'"),
        (lambda: Pad(0, 3, multiple="4"), "expected a whole number as multiple, got 4"),
        (lambda: QuantizeBlockFP8(128), "expected block_size of the kind tuple[int, int], got 128"),
        (lambda: QuantizeBlockFP8(ue8m0=1), "expected ue8m0 of the kind bool, got 1"),
    ],
)
def test_arguments_of_another_kind_are_refused(make, said):
    with pytest.raises(FusionError) as caught:
        make()
    assert said in str(caught.value)


def test_a_list_stands_for_a_tuple():
    assert Permute([1, 0]) == Permute((1, 0))
    assert hash(Concatenate(0, [1, 2])) == hash(Concatenate(0, (1, 2)))
