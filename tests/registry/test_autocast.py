"""References that promise dtypes of their own give the same numbers under autocast, and the same gradients."""

import operator
from typing import Any

import pytest
import torch

import kernel_loader
from kernel_loader.conformance import Draw
from kernel_loader.conformance.grid import tensors_in
from kernel_loader.conformance.plan import grid_of
from kernel_loader.conformance.subject import as_function
from tests.conformance.test_grids import KERNELS

# What multiplies as nn.Linear does, and so in the dtype of autocast: these layers, and a router.
LINEAR = {
    "layers.CPUMegaBlocksMoeMLP",
    "layers.LigerLinear",
    "layers.MegaBlocksMoeMLP",
    "layers.MegaBlocksMoeMLPWithSharedExpert",
    "moe_TC_softmax_topk_layer",
}


def run(function: Any, entry: Any, case: Any, *, autocast: bool) -> list[torch.Tensor]:
    """What is returned and written, and gradients."""
    inputs = case.make(Draw("cpu"))
    keys = inputs.tensors(entry.gradients) if "backward" in case.modes and "backward" not in entry.skip else ()
    inputs = inputs.replace(keys, lambda x: x.detach().clone().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        returned = inputs.call(function)
    made = [*tensors_in(returned), *(x for key in entry.mutates for x in tensors_in(inputs[key]))]
    attached = [x for x in made if x.requires_grad]
    leaves = [inputs[key] for key in keys]
    if attached and leaves:
        upstream = [Draw("cpu", 1).normal(*x.shape, dtype=x.dtype) for x in attached]
        made += [x for x in torch.autograd.grad(attached, leaves, upstream, allow_unused=True) if x is not None]
    return made


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Which are equal where numbers are NaN, too."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_changes_nothing(kernel, cpu_machine, monkeypatch):
    monkeypatch.setenv("KERNEL_LOADER_DISABLE", kernel)
    bundle = kernel_loader.load_kernel(kernel)
    for entry in grid_of(kernel):
        if entry.entrypoint in LINEAR:
            continue
        function = as_function(operator.attrgetter(entry.entrypoint)(bundle))
        for case in entry.cases[:2]:
            plain, cast = (run(function, entry, case, autocast=on) for on in (False, True))
            for a, b in zip(plain, cast, strict=True):
                assert a.dtype == b.dtype, f"{entry.entrypoint}/{case.name}"
                assert a.shape == b.shape
                same = (bytes_of(x) for x in (a, b))
                assert torch.equal(*same), f"{entry.entrypoint}/{case.name}"
