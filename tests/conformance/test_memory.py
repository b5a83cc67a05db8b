"""Guarded memory: what a kernel allocates is poisoned, and what it writes beside is seen, whoever allocates."""

import ctypes
import subprocess
import sys

import pytest
import torch

from kernel_loader.conformance.memory import PADDING, GuardedMemory
from tests.builds import compile_library

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def poke(tensor: torch.Tensor, element: int) -> None:
    """Write an element of the memory that a tensor lies in, wherever it ends."""
    size = tensor.element_size()
    ctypes.memset(tensor.data_ptr() + element * size, 1, size)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_empty_holds_nan(dtype):
    with GuardedMemory():
        made = [
            torch.empty(3, dtype=dtype),
            torch.empty_strided((2, 3), (1, 2), dtype=dtype),
            torch.zeros(2, dtype=dtype).new_empty(4),
            torch.empty_like(torch.zeros(2, 2, dtype=dtype)),
        ]
    for tensor in made:
        assert tensor.float().isnan().all()


def test_what_is_filled_holds_what_it_should():
    with GuardedMemory() as memory:
        x = torch.full((2, 3), 7.0)
        assert torch.equal(torch.zeros_like(x), torch.tensor([[0.0] * 3] * 2))
        assert torch.equal(x.new_ones(2), torch.tensor([1.0, 1.0]))
        assert torch.equal(x.clone(), x)
        assert (torch.empty(2, dtype=torch.int32) == -1).all()
    assert memory.damage() == ""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(7),
        lambda: torch.zeros(7),
        lambda: torch.ones(7).clone(),
        lambda: torch.empty(7).new_full((7,), 2.0),
    ],
)
def test_a_store_beside_a_buffer_is_seen(make):
    with GuardedMemory() as memory:
        tensor = make()
        poke(tensor, 6)
        assert memory.damage() == ""
        poke(tensor, 7)
    assert "4 bytes written past its end, up to 4 beyond it" in memory.damage()
    with GuardedMemory() as memory:
        poke(make(), -1)
    assert "4 bytes written before its start" in memory.damage()


def test_a_store_far_beyond_the_end_is_seen_up_to_the_padding():
    with GuardedMemory() as memory:
        tensor = torch.empty(1, dtype=torch.uint8)
        poke(tensor, PADDING)
    assert f"up to {PADDING} beyond it" in memory.damage()


def test_strides_dtype_and_alignment_are_those_that_were_asked_for():
    with GuardedMemory():
        tensor = torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16)
        last = torch.empty((2, 3, 4, 5), memory_format=torch.channels_last)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert tensor.data_ptr() % 64 == 0


def test_an_input_keeps_its_strides_and_is_watched():
    memory = GuardedMemory()
    large = torch.arange(24.0).view(4, 6)
    x = memory.input(large[:, ::2], "x")
    assert torch.equal(x, large[:, ::2])
    assert x.stride() == (6, 2)
    assert memory.damage() == ""
    x[1, 1] += 1
    assert "x: " in memory.damage()
    assert memory.damage(mutated=(x,)) == ""
    poke(x, 3)  # between two elements
    assert "x: " in memory.damage(mutated=(x,))


def test_an_input_that_repeats_its_elements_stays_one():
    memory = GuardedMemory()
    x = memory.input(torch.arange(3.0).expand(4, 3), "x")
    assert (x.shape, x.stride()) == ((4, 3), (0, 1))
    assert torch.equal(x, torch.arange(3.0).expand(4, 3))
    assert memory.damage() == ""


def test_what_other_ops_make_is_guarded_and_views_stay_views():
    with GuardedMemory() as memory:
        x = torch.ones(4)
        assert x.view(2, 2).data_ptr() == x.data_ptr()
        assert x.add_(1) is x
        wide = x.to(torch.float64) + 1
        poke(wide, 4)
    assert "add (4,) torch.float64: 8 bytes written past its end" in memory.damage()


def test_autograd_that_writes_parts_of_a_buffer_stays_right():
    """Its nodes for slices allocate by new_empty_strided, and take offset 0 for the start."""
    x = torch.arange(1.0, 7.0).view(2, 3).requires_grad_()
    memory = GuardedMemory()
    with memory:
        y = torch.zeros(2, 3)
        y[:1] = x[:1] * 2
        y[1:] = x[1:] * 3
        again = torch.as_strided(torch.empty(2, 3), (3, 2), (1, 3), 0).fill_(5)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.tensor([[2.0] * 3, [3.0] * 3]))
    assert torch.equal(again, torch.full((3, 2), 5.0))
    assert memory.damage() == ""


def test_an_empty_input_is_watched():
    memory = GuardedMemory()
    x = memory.input(torch.empty(0, 3), "x")
    assert x.shape == (0, 3)
    assert memory.damage() == ""


def test_what_a_custom_op_allocates_is_poisoned_and_guarded():
    @torch.library.custom_op("_kl_test_memory::half_written", mutates_args=())
    def half_written(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[0] = 1
        return out

    with GuardedMemory():
        out = half_written(torch.zeros(2))
    assert out[0] == 1
    assert out[1].isnan()


def test_an_op_is_of_the_accelerator_where_one_of_its_arguments_is_there():
    """The meta device stands for one."""

    @torch.library.custom_op("_kl_test_memory::seeded", mutates_args=())
    def seeded(seed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    seeded.register_kernel("meta")(lambda seed, x: torch.empty_like(x))
    with GuardedMemory():
        assert seeded(torch.zeros(1), torch.zeros(2, device="meta")).shape == (2,)


def test_an_op_on_a_list_of_tensors_is_guarded():
    @torch.library.custom_op("_kl_test_memory::listed", mutates_args=())
    def listed(xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(xs[0])

    with GuardedMemory():
        assert listed([torch.zeros(2)]).isnan().all()


def test_autograd_takes_a_buffer_for_new():
    with GuardedMemory():
        out = torch.empty(3)
        assert not out._is_view()
        x = torch.ones(3, requires_grad=True)
        out.copy_(x * 2)
        out.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


SOURCE = """
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
at::Tensor past_the_end(const at::Tensor& x) {
  at::Tensor out = at::empty_like(x);
  out.data_ptr<float>()[x.numel() - 1 + 1] = 3.0f;
  return out;
}
std::vector<at::Tensor> some(const at::Tensor& x) { return {at::empty_like(x), at::Tensor()}; }
TORCH_LIBRARY(_kl_test_memory_cpp, m) {
  m.def("past_the_end(Tensor x) -> Tensor");
  m.def("some(Tensor x) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(_kl_test_memory_cpp, CPU, m) {
  m.impl("past_the_end", &past_the_end);
  m.impl("some", &some);
}
"""


@pytest.mark.needs_compiler
def test_what_compiled_code_allocates_is_poisoned_and_guarded(tmp_path):
    library = compile_library(SOURCE, tmp_path / "op.so")
    program = f"""
import torch
from kernel_loader.conformance.memory import GuardedMemory
torch.ops.load_library({str(library)!r})
with GuardedMemory() as memory:
    out = torch.ops._kl_test_memory_cpp.past_the_end(torch.zeros(4))
print(bool(out.isnan().all()), memory.damage())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("True ")
    assert "4 bytes written past its end" in done.stdout


@pytest.mark.needs_compiler
def test_compiled_code_that_leaves_out_some_of_its_results_cannot_be_looked_into(tmp_path):
    library = compile_library(SOURCE, tmp_path / "op.so")
    program = f"""
import torch
from kernel_loader.conformance.compare import Skipped
from kernel_loader.conformance.memory import GuardedMemory
torch.ops.load_library({str(library)!r})
some = torch.ops._kl_test_memory_cpp.some
print([type(result).__name__ for result in some(torch.zeros(4))])
try:
    with GuardedMemory():
        some(torch.zeros(4))
except Skipped as why:
    print(why)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("['Tensor', 'NoneType']\n")
    assert "none in some places" in done.stdout
