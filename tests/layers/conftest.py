"""Models with named layers, and kernels for them in directories."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from kernel_loader import LocalLayerRepository, use_kernel_forward_from_hub
from tests.builds import write_build

LAYERS = """
import torch
from torch import nn

class Scale(nn.Module):
    can_torch_compile = True
    def forward(self, x):
        return x * self.weight * {factor}

class NoBackward(nn.Module):
    can_torch_compile = True
    has_backward = False
    def forward(self, x):
        return x * self.weight * {factor}

class NoCompile(nn.Module):
    def forward(self, x):
        return x * self.weight * {factor}

def double(x, by=2):
    return x * by * {factor}
double.can_torch_compile = True
"""


@use_kernel_forward_from_hub("Scale")
class Scale(nn.Module):
    """x * weight, unless a kernel says otherwise."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, size + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Model(nn.Module):
    """Two named layers and one that has no name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.last = Scale(), nn.Linear(4, 4), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(self.first(x)))


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[..., LocalLayerRepository]:
    """Make a kernel whose layers multiply by a factor, or whose `layers` is what is given; gives one of its layers."""
    made: list[Path] = []

    def make(layer: str = "Scale", factor: int = 10, layers: str | None = None, init: str = "") -> LocalLayerRepository:
        repository = tmp_path / f"kernel{len(made)}"
        made.append(repository)
        source = textwrap.dedent(layers) if layers is not None else LAYERS.format(factor=factor)
        write_build(
            repository, "torch-universal", {"__init__.py": f"from . import layers\n{init}", "layers.py": source}
        )
        return LocalLayerRepository(repository, layer_name=layer)

    return make


@pytest.fixture
def x() -> torch.Tensor:
    """Something to multiply."""
    return torch.ones(2, 4)
