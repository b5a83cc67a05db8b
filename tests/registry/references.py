"""What the tests of reference builds share: how one is loaded, and what a layer may be."""

import importlib
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import kernel_loader

REGISTRY = Path(__file__).parents[2] / "registry"

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (F64, F32, BF16, F16)
FLAGS = {"can_torch_compile", "has_backward"}


def load_reference(name: str, monkeypatch: Any) -> Any:
    """The kernel bound to its reference, whatever builds this machine could get elsewhere."""
    monkeypatch.setenv("KERNEL_LOADER_DISABLE", name)
    return kernel_loader.load_kernel(name)


def is_shipped_reference(bundle: Any, name: str) -> bool:
    origin = kernel_loader.origin(bundle)
    return origin.reference and origin.path == REGISTRY / name / "build" / "torch-universal"


def module_of(bundle: Any) -> ModuleType:
    """The build itself, with what the manifest binds nothing to."""
    return importlib.import_module(bundle.layers.__package__)


def layers_of(layers: ModuleType) -> dict[str, type[nn.Module]]:
    return {name: cls for name, cls in vars(layers).items() if isinstance(cls, type) and issubclass(cls, nn.Module)}


def members_of(layer: type[nn.Module]) -> set[str]:
    """What a layer has that `nn.Module` has not. Its forward ends up in a module that has none of it."""
    own_constructor = {"__init__"} if layer.__init__ is not nn.Module.__init__ else set()
    return (set(dir(layer)) - set(dir(nn.Module))) | own_constructor


def put_into(module: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """The module with the layer's forward, as a model gets it."""
    module.forward = MethodType(layer.forward, module)  # type: ignore[method-assign]
    return module


def assert_near(actual: Tensor, expected: Tensor, *, ulps: float = 2.0, atol: float = 0.0) -> None:
    """`actual` is the float64 `expected` within `ulps` steps of its own dtype, or within `atol`."""
    assert expected.dtype == F64
    assert actual.shape == expected.shape
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual.to(F64), expected, rtol=ulps * eps, atol=max(atol, torch.finfo(actual.dtype).tiny)
    )


def random(*shape: int, dtype: torch.dtype = F64, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=F64) * scale).to(dtype)


def compiled(callable_: Any) -> Any:
    """Compiled to one graph, or an error. Needs no compiler of C++."""
    torch.compiler.reset()
    return torch.compile(callable_, fullgraph=True, backend="aot_eager")
