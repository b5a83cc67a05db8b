"""KernelConfig: which kernels a model takes, for single layers and for modules that become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from kernel_loader.errors import FusionError, KernelLoaderError
from kernel_loader.fusion.layout import layer_of, problem_of_layout
from kernel_loader.fusion.pattern import Pattern, Site, find_sites
from kernel_loader.layers.decorator import functions_of, names_of
from kernel_loader.layers.device import BACKENDS
from kernel_loader.layers.repository import LayerRepository, LocalLayerRepository, Repository

if TYPE_CHECKING:
    from torch import nn

_FORMS: Final = (
    'Write {"RMSNorm": "org/repo:Layer"}, {"RMSNorm": ("org/repo:Layer", {"version": 1})}, {"RMSNorm": {"cuda": ...}}, '
    'or {(("RMSNorm", "model.layers.*.input_layernorm"), ("MLP", "model.layers.*.mlp")): "org/repo:RMSNormMLP"}.'
)


class Child(NamedTuple):
    """A module that is fused: what the layout calls it, and where it is."""

    name: str
    pattern: Pattern


class Fusion(NamedTuple):
    """An entry for modules that become one.

    Attributes:
        children: in the order in which the layout is constructed from them.
        repositories: kind of device -> where the kernel is from.
        layouts: kind of device -> the name of its layout class, or the class, where `layouts` of the configuration
            names one. By default that is the layer's name followed by "Layout".
    """

    children: tuple[Child, ...]
    repositories: Mapping[str, Repository]
    layouts: Mapping[str, str | type]

    def __str__(self) -> str:
        return " + ".join(child.name for child in self.children)


class KernelConfig:
    """Which kernels a model takes.

    Args:
        kernel_mapping: name of a layer, or a tuple of (name, path) for modules that become one -> a kernel. Paths are
            from the root of the model, with `*` for one component; a compiled regular expression must match all of a
            path. A kernel is "org/repo:Layer" (version 1), "name:Layer" for a kernel that is registered, a tuple of
            that and {"version": 1} or {"revision": "..."}, with "trust_remote_code" too, a `LayerRepository`, or a
            table of these by kind of device.
        use_local_kernel: kernels are "/directory:Layer", in directories of this machine.
        inherit_mapping: `use_kernel_mapping` shall go on with what was registered before.
        layouts: layer of a kernel -> its layout class, or the name of that in the kernel. By default that is the name
            of the layer followed by "Layout".

    Nothing is looked at before `sanitize`, `fuse` or `layer_mapping`.
    """

    def __init__(
        self,
        kernel_mapping: Mapping[Any, Any] | None = None,
        *,
        use_local_kernel: bool = False,
        inherit_mapping: bool = True,
        layouts: Mapping[str, str | type[nn.Module]] | None = None,
    ) -> None:
        self.kernel_mapping: Final = {} if kernel_mapping is None else kernel_mapping
        self.use_local_kernel: Final = use_local_kernel
        self.inherit_mapping: Final = inherit_mapping
        self.layouts: Final = {} if layouts is None else layouts

    @property
    def layer_mapping(self) -> dict[str, dict[str, Repository]]:
        """The entries for single layers, as `use_kernel_mapping` takes them.

        Raises:
            FusionError: an entry of any kind is malformed.
        """
        return self._read().singles

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """The entries for modules that become one.

        Raises:
            FusionError: an entry of any kind is malformed.
        """
        return tuple(self._read().fusions)

    def sanitize(self, model: nn.Module | type[nn.Module], *args: object, **kwargs: object) -> list[list[Site]]:
        """Check everything that can be without weights.

        That a kernel is there and has a layout is looked at where it is embedded or in a directory of this machine;
        the Hub is not asked.

        Args:
            model: a model, which may be on the meta device, or its class, of which one is then made there, without
                memory.
            *args: what the class is constructed with, such as a configuration.
            **kwargs: likewise.

        Returns:
            For each of `fusions`, where modules become one.

        Raises:
            FusionError: with all problems, not the first alone.
        """
        read = _Reader(self)
        problems = list(read.problems)
        sites: list[list[Site]] = []
        try:
            instance = on_meta(model, *args, **kwargs) if isinstance(model, type) else model
        except FusionError as error:
            problems += error.problems
        else:
            problems += _unregistered(read, instance)
            sites = _sites(read.fusions, instance, problems)
        problems += _without_layout(read.fusions)
        if problems:
            raise FusionError(tuple(problems), _FORMS)
        return sites

    def _read(self) -> _Reader:
        read = _Reader(self)
        if read.problems:
            raise FusionError(tuple(read.problems), _FORMS)
        return read


def on_meta(cls: type[nn.Module], *args: object, **kwargs: object) -> nn.Module:
    """A model on the meta device, where tensors have no memory.

    Raises:
        FusionError: it cannot be made there.
    """
    import torch

    try:
        with torch.device("meta"):
            return cls(*args, **kwargs)
    except Exception as error:  # whatever a constructor raises
        problem = f"{cls.__qualname__} cannot be made on the meta device ({type(error).__name__}: {error})"
        raise FusionError((problem,), "Give what its constructor takes, or a model instead of the class.") from error


def _unregistered(read: _Reader, model: nn.Module) -> list[str]:
    """The names of single layers that mappings do not know in a model."""
    modules = list(model.modules())
    modules += [function for module in modules for function in functions_of(module)]
    registered = {name.name for module in modules for name in names_of(type(module)).names}
    there = ", ".join(sorted(registered)) or "none"
    return [
        f"no layer of the model is registered as {name!r}; there is {there}"
        for name in read.singles
        if name not in registered
    ]


def _sites(fusions: list[Fusion], model: nn.Module, problems: list[str]) -> list[list[Site]]:
    """Where modules become one. A module that is in several places is found in each, and fused in the first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    sites: list[list[Site]] = []
    taken: dict[str, Fusion] = {}
    for fusion in fusions:
        found, wrong = find_sites([child.pattern for child in fusion.children], modules)
        problems += [f"{fusion}: {problem}" for problem in wrong]
        first = {(id(modules[site.parent]), site.children): site for site in reversed(found)}
        sites.append([site for site in found if first[id(modules[site.parent]), site.children] is site])
        for path in (path for site in sites[-1] for path in site.paths):
            if path in taken and taken[path] is not fusion:
                problems.append(f"{path} is taken by {taken[path]} and by {fusion}")
            taken.setdefault(path, fusion)
    for path, fusion in taken.items():
        parts = path.split(".")
        for whole in (".".join(parts[:count]) for count in range(1, len(parts))):
            if whole in taken:
                problems.append(f"{path} is taken by {fusion}, and lies in {whole}, which is taken by {taken[whole]}")
    return sites


def _without_layout(fusions: list[Fusion]) -> list[str]:
    """What is wrong with kernels that are on this machine, each looked at once."""
    wanted = {
        (id(repository), fusion.layouts.get(kind)): (fusion, repository, kind)
        for fusion in fusions
        for kind, repository in [*fusion.repositories.items()][::-1]
    }
    found = (
        (fusion, problem_of_layout(repository, given, kind))
        for (_, given), (fusion, repository, kind) in wanted.items()
    )
    return [f"{fusion}: {problem}" for fusion, problem in found if problem]


class _Reader:
    """Reads the mapping of a configuration, and notes what is wrong with it."""

    def __init__(self, config: KernelConfig) -> None:
        self.problems: Final[list[str]] = []
        self.singles: Final[dict[str, dict[str, Repository]]] = {}
        self.fusions: Final[list[Fusion]] = []
        self._local: Final = config.use_local_kernel
        mapping: object = config.kernel_mapping
        if not isinstance(mapping, Mapping):
            self.problems.append(f"the mapping is a table, and {mapping!r} was given")
            return
        layouts, fused = self._layouts(config.layouts), set[str]()
        for key, value in mapping.items():
            name, children = self._key(key)
            repositories = self._by_device(name, value)
            if not isinstance(key, tuple):
                self.singles[name] = repositories
                continue
            fused |= {layer_of(repository) for repository in repositories.values()}
            given = {kind: layouts[n] for kind, r in repositories.items() if (n := layer_of(r)) in layouts}
            if children and repositories:
                self.fusions.append(Fusion(children, repositories, given))
        for unknown in layouts.keys() - fused:
            there = ", ".join(sorted(fused)) or "none"
            problem = f"layouts has {unknown!r}, which is the layer of no entry for modules that become one"
            self.problems.append(f"{problem}; there is {there}")

    def _layouts(self, layouts: object) -> dict[str, str | type]:
        if not isinstance(layouts, Mapping):
            self.problems.append(f"layouts is a table, and {layouts!r} was given")
            return {}
        wrong = {name: value for name, value in layouts.items() if not _is_layout(value)}
        for name, value in wrong.items():
            problem = f"layouts has {value!r} for {name!r}, which is no nn.Module class and no name of one"
            self.problems.append(problem)
        return {name: value for name, value in layouts.items() if name not in wrong}

    def _key(self, key: object) -> tuple[str, tuple[Child, ...]]:
        if isinstance(key, str) and key:
            return key, ()
        if not isinstance(key, tuple) or not key:
            self.problems.append(f"{key!r} is no key: it is the name of a layer, or a tuple of (name, path)")
            return str(key), ()
        children = []
        for pair in key:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]):
                self.problems.append(f"{pair!r} in a key is no pair of a name and a path")
            elif not _is_path(pair[1]):
                self.problems.append(f"{pair[0]}: {pair[1]!r} is no path, such as model.layers.*.mlp")
            else:
                children.append(Child(*pair))
        names = [child.name for child in children]
        if len({*names}) < len(names):
            self.problems.append(f"{' + '.join(names)}: two children have one name")
        return " + ".join(names) or str(key), tuple(children) if len(children) == len(key) else ()

    def _by_device(self, name: str, value: object) -> dict[str, Repository]:
        if not isinstance(value, Mapping):
            repository = self._repository(name, value)
            return dict.fromkeys(BACKENDS, repository) if repository is not None else {}
        found = {}
        for device, one in value.items():
            if device not in BACKENDS:
                self.problems.append(f"{name}: {device!r} is no kind of device; there are {', '.join(BACKENDS)}")
            elif (repository := self._repository(name, one)) is not None:
                found[device] = repository
        if not value:
            self.problems.append(f"{name}: a table of devices with nothing in it")
        return found

    def _repository(self, name: str, value: object) -> Repository | None:
        if not isinstance(value, str | tuple | type) and callable(getattr(value, "load", None)):
            return cast("Repository", value)
        text, options = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if not isinstance(text, str):
            self.problems.append(f"{name}: {value!r} is no kernel, such as org/repo:Layer")
            return None
        where, _, layer = text.rpartition(":")
        if not where or not layer or (self._local and not _is_directory_name(where)):
            form = "/directory:Layer" if self._local else "org/repo:Layer"
            self.problems.append(f"{name}: {text!r} is no kernel of the form {form}")
            return None
        return (
            self._local_kernel(name, where, layer, options)
            if self._local
            else self._of_hub(name, where, layer, options, given=isinstance(value, tuple))
        )

    def _local_kernel(self, name: str, where: str, layer: str, options: object) -> Repository | None:
        if options:
            self.problems.append(f"{name}: a local kernel takes no {options!r}")
            return None
        return LocalLayerRepository(where, layer_name=layer)

    def _of_hub(self, name: str, where: str, layer: str, options: object, *, given: bool) -> Repository | None:
        if not isinstance(options, Mapping) or options.keys() - {"version", "revision", "trust_remote_code"}:
            self.problems.append(f"{name}: {options!r} is no table of version or revision, and trust_remote_code")
            return None
        if where.count("/") > 1 or where.startswith("/") or where.endswith("/"):
            hint = "; a directory is one with use_local_kernel=True" if where[:1] in "/.~" else ""
            self.problems.append(f"{name}: {where!r} is no repository of the form org/repo{hint}")
            return None
        named = {key: options[key] for key in ("version", "revision") if options.get(key) is not None}
        if "/" in where and given and len(named) != 1:
            self.problems.append(f"{name}: give version or revision, one of them; {dict(options)!r} was given")
            return None
        if "revision" in named and not (isinstance(named["revision"], str) and named["revision"]):
            self.problems.append(f"{name}: revision {named['revision']!r} is no branch, tag or commit")
            return None
        if "/" in where and not named:
            named = {"version": 1}
        trusted = options.get("trust_remote_code", False)
        try:
            return LayerRepository(where, layer_name=layer, trust_remote_code=trusted, **named)
        except KernelLoaderError as error:
            self.problems.append(f"{name}: {error.problem.rstrip('.')}")
            return None


def _is_layout(value: object) -> bool:
    from torch import nn

    return issubclass(value, nn.Module) if isinstance(value, type) else isinstance(value, str) and bool(value)


def _is_path(value: object) -> bool:
    return bool(value) if isinstance(value, str) else isinstance(value, re.Pattern) and isinstance(value.pattern, str)


def _is_directory_name(where: str) -> bool:
    return "/" in where or "\\" in where
