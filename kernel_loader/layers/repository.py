"""Where the layers of a mapping are from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kernel_loader.api import default_loader, origin
from kernel_loader.arguments import trusted
from kernel_loader.errors import KernelizeError, RequestError, SourceError
from kernel_loader.loader import KernelLoader

if TYPE_CHECKING:
    from torch import nn

    from kernel_loader.provenance import Origin


class Layer(NamedTuple):
    """A layer of a kernel.

    Attributes:
        cls: a class whose forward can take the place of another's.
        origin: where it is from.
        untrained: the advisory by which its gradient is wrong or missing, whatever it says of itself; empty for none.
    """

    cls: type[nn.Module]
    origin: Origin
    untrained: str = ""


class Repository(Protocol):
    """What a mapping holds: it is hashable, and loads one layer."""

    def load(self, backend: str | None = None) -> Layer:
        """Load the layer, for a backend that the host has.

        Raises:
            KernelLoaderError: it cannot be had.
        """
        ...


@dataclass(frozen=True)
class LayerRepository:
    """A layer of a kernel repository, or of a kernel that is registered.

    Args:
        repo_id: "org/name", or a registered name such as "activation", which comes with a reference for any machine.
        layer_name: the class in the kernel's `layers`, or a function of the kernel.
        version: version of the repository; `revision` is a branch, tag or commit instead. A repository needs one of
            them, a registered kernel has its own.
        trust_remote_code: as in `load_module`.

    Raises:
        RequestError: neither or both were given.
    """

    repo_id: str
    layer_name: str
    revision: str | None = None
    version: int | None = None
    trust_remote_code: bool | tuple[str, ...] = False

    def __init__(
        self,
        repo_id: str,
        *,
        layer_name: str,
        revision: str | None = None,
        version: int | None = None,
        trust_remote_code: bool | str | list[str] | tuple[str, ...] = False,
    ) -> None:
        _refuse(repo_id, layer_name)
        if version is not None and type(version) is not int:
            raise RequestError(f"version={version!r} was given", "A version is a whole number, such as version=1.")
        if (revision is not None) == (version is not None) and ("/" in repo_id or revision is not None):
            raise RequestError(f"{repo_id} was given version={version}, revision={revision!r}", "Pass one of them.")
        trust = trusted(trust_remote_code)
        values = {"repo_id": repo_id, "layer_name": layer_name, "revision": revision, "version": version}
        for name, value in (values | {"trust_remote_code": trust}).items():
            object.__setattr__(self, name, value)

    def load(self, backend: str | None = None) -> Layer:
        """As `Repository.load`."""
        return _layer(
            default_loader().load_module(
                self.repo_id,
                version=self.version,
                revision=self.revision,
                backend=backend,
                trust_remote_code=self.trust_remote_code,
                for_layers=True,
            ),
            self.layer_name,
        )

    def __str__(self) -> str:
        at = f"@{self.revision or self.version}" if self.revision or self.version is not None else ""
        return f"{self.repo_id}{at}:{self.layer_name}"


@dataclass(frozen=True)
class LocalLayerRepository:
    """A layer of a kernel in a directory of this machine: a repository, its `build/`, or one build."""

    repo_path: Path
    layer_name: str

    def __init__(self, repo_path: Path | str, *, layer_name: str) -> None:
        _refuse(str(repo_path), layer_name)
        object.__setattr__(self, "repo_path", Path(repo_path).absolute())
        object.__setattr__(self, "layer_name", layer_name)

    def load(self, backend: str | None = None) -> Layer:
        """As `Repository.load`."""
        repo, usual = f"local/{self.repo_path.name}", default_loader()
        loader = KernelLoader(replace(usual.settings, local={repo: self.repo_path}), usual.host)
        try:
            return _layer(loader.load_module(repo, backend=backend), self.layer_name)
        except SourceError as error:
            if not error.source.startswith(str(self.repo_path)):
                raise
            advice = "Correct the directory of this LocalLayerRepository in the mapping."
            raise SourceError(error.source, error.detail, advice) from error

    def __str__(self) -> str:
        return f"{self.repo_path}:{self.layer_name}"


@dataclass(frozen=True)
class LockedLayerRepository:
    """A layer of a kernel repository at the commit that a lock file names.

    Args:
        repo_id: "org/name".
        lockfile: the file, `kernel-loader.lock` or `kernels.lock` of the project. It is read when the layer is loaded,
            which takes no other bytes than are locked.
        layer_name: as in `LayerRepository`.
        trust_remote_code: as in `load_module`.
    """

    repo_id: str
    lockfile: Path
    layer_name: str
    trust_remote_code: bool | tuple[str, ...] = False

    def __init__(
        self,
        repo_id: str,
        *,
        lockfile: Path | str,
        layer_name: str,
        trust_remote_code: bool | str | list[str] | tuple[str, ...] = False,
    ) -> None:
        _refuse(repo_id, layer_name)
        trust = trusted(trust_remote_code)
        values = {"repo_id": repo_id, "lockfile": Path(lockfile).absolute(), "layer_name": layer_name}
        for name, value in (values | {"trust_remote_code": trust}).items():
            object.__setattr__(self, name, value)

    def load(self, backend: str | None = None) -> Layer:
        """As `Repository.load`."""
        changed = self.lockfile.stat().st_mtime_ns if self.lockfile.is_file() else 0
        loader = _under(default_loader(), self.lockfile, changed)
        assert loader.lock is not None, "it was made with one"
        commit = loader.lock.commit(self.repo_id)
        request = next(one.request for one in loader.lock.repositories if one.request.repo == self.repo_id)
        module = loader.load_module(
            self.repo_id,
            version=request.version,
            revision=request.revision if request.git_revision is not None else commit,
            backend=backend,
            trust_remote_code=self.trust_remote_code,
            for_layers=True,
        )
        return _layer(module, self.layer_name)

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.layer_name}, as {self.lockfile.name} has it"


@functools.lru_cache(maxsize=32)
def _under(usual: KernelLoader, lockfile: Path, changed: int) -> KernelLoader:  # noqa: ARG001 - part of the key
    """The loader under a lock file, read once as long as it does not change."""
    return KernelLoader(usual.settings, usual.host, lock=lockfile)


def _refuse(*texts: object) -> None:
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{text!r} was given", "Pass the repository and the name of the layer, as texts.")


def _layer(module: ModuleType, name: str) -> Layer:
    where = origin(module)
    layers = getattr(module, "layers", None)
    found: Any = getattr(layers, name, getattr(module, name, None))
    untrained = next((advisory for layer, advisory in where.untrained if layer in (name, "*")), "")
    if isinstance(found, type):
        return Layer(found, where, untrained)
    if callable(found):
        return Layer(function_layer(found, name), where, untrained)
    there = sorted(n for n, value in vars(layers).items() if _is_layer(value)) if layers is not None else []
    detail = f"{where.where} has no layer {name}; it has {', '.join(there) or 'none'}"
    raise KernelizeError(name, "no-such-layer", detail, "Correct the name of the layer in the mapping.")


def _is_layer(value: object) -> bool:
    from torch import nn

    return inspect.isclass(value) and issubclass(value, nn.Module) and not value.__module__.startswith("torch.")


def function_layer(function: Callable[..., Any], name: str) -> type[nn.Module]:
    """A layer whose forward is a function: calling it costs what the function costs."""
    from torch import nn

    flags = {flag: getattr(function, flag) for flag in ("can_torch_compile", "has_backward") if hasattr(function, flag)}
    about = {"__doc__": function.__doc__, "__module__": getattr(function, "__module__", __name__)}
    return type(name, (nn.Module,), {"forward": staticmethod(function)} | flags | about)
