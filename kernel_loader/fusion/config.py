"""KernelConfig: which kernels a model takes, for single layers and for modules that become one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from kernel_loader.errors import FusionError, KernelLoaderError
from kernel_loader.fusion.layout import layer_of, problem_of_layout
from kernel_loader.fusion.pattern import Pattern, Site, find_sites, shown
from kernel_loader.layers.decorator import functions_of, names_of
from kernel_loader.layers.device import BACKENDS
from kernel_loader.layers.repository import LayerRepository, LocalLayerRepository, Repository

if TYPE_CHECKING:
    from torch import nn

# What to do about what is wrong.
_MAPPING: Final = 'Write {"RMSNorm": "org/repo:Layer"}, or {(("MLP", "model.layers.*.mlp"),): "org/repo:Layer"}.'
_KEY: Final = 'Write "RMSNorm" for a layer, and a tuple of pairs for modules, (("MLP", "model.layers.*.mlp"),) for one.'
_PATH: Final = r'Write "model.layers.*.mlp", or re.compile(r"model\.layers\.[0-3]\.mlp"), from the root of the model.'
_NAMES: Final = "Give each child the name by which the layout knows it."
_UNREGISTERED: Final = "Correct the name; modules that have none are named by a path, as pairs in a tuple."
_DEVICE: Final = 'Write one of them, such as {"cuda": "org/repo:Layer"}.'
_NO_DEVICE: Final = 'Write a kernel for a kind of device, such as {"cuda": "org/repo:Layer"}, or leave the entry out.'
_KERNEL: Final = 'Write "org/repo:Layer", ("org/repo:Layer", {"version": 2}), or "name:Layer" for what has a name here.'
_REPOSITORY: Final = 'Write "org/repo:Layer", or pass use_local_kernel=True for a directory.'
_DIRECTORY: Final = 'Write "/directory:Layer" or "./directory:Layer"; without use_local_kernel, "org/repo:Layer".'
_LOCAL: Final = "Leave that out: what is in the directory is taken as it is."
_OPTIONS: Final = 'Write {"version": 2} or {"revision": "main"}, and "trust_remote_code" where that is wanted.'
_REVISION: Final = 'Write {"version": 2}, or {"revision": "main"}.'
_LAYOUTS: Final = 'Write layouts={"Layer": "LayerLayout"}, or a class of modules for the name of it.'
_FLAG: Final = "Pass True or False."
_TAKEN: Final = "Leave it to one of the entries, by other paths for the rest."


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

    Nothing is looked at before `sanitize`, `fuse`, `fusions` or `layer_mapping`. The first of them that finds all
    entries well formed has read them for good: later changes of the mapping are not seen.
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
        self._last: _Reader | None = None

    @property
    def layer_mapping(self) -> dict[str, dict[str, Repository]]:
        """The entries for single layers, as `use_kernel_mapping` takes them.

        Raises:
            FusionError: an entry of any kind is malformed.
        """
        return {name: dict(repositories) for name, repositories in self._right().singles.items()}

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """The entries for modules that become one.

        Raises:
            FusionError: an entry of any kind is malformed.
        """
        return tuple(self._right().fusions)

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
        need_model(model, args or kwargs)
        read = self._read()
        problems = dict(read.problems)
        sites: list[list[Site]] = []
        try:
            instance = on_meta(model, *args, **kwargs) if isinstance(model, type) else model
        except FusionError as error:
            problems |= dict.fromkeys(error.problems, error.advice)
        else:
            problems |= _unregistered(read, instance)
            sites = _sites(read.fusions, instance, problems)
        problems |= _without_layout(read.fusions)
        if problems:
            raise refusal(problems)
        return sites

    def _read(self) -> _Reader:
        """What the mapping says: read once, and anew as long as something is wrong with it."""
        if self._last is None or self._last.problems:
            self._last = _Reader(self)
        return self._last

    def _right(self) -> _Reader:
        read = self._read()
        if read.problems:
            raise refusal(read.problems)
        return read


def refusal(problems: Mapping[str, str], first: str = "", *last: str) -> FusionError:
    """The error for all problems, which says once what to do about each.

    Args:
        problems: each with what to do about it.
        first: what is said before all of that.
        *last: what is said after it.
    """
    return FusionError(tuple(problems), " ".join(dict.fromkeys((first, *problems.values(), *last))).strip())


def need_model(model: object, arguments: object = ()) -> None:
    """Refuse what is neither a model nor a class of them, and a model with arguments for its class.

    Raises:
        FusionError: it is that.
    """
    from torch import nn

    if isinstance(model, nn.Module):
        if arguments:
            raise FusionError(("a model was given with what a class is constructed with",), "Leave that out.")
    elif not (isinstance(model, type) and issubclass(model, nn.Module)):
        problem = f"the model is an nn.Module or a class of them, and {shown(model)} was given"
        raise FusionError((problem,), "Pass the model first, and its configuration of kernels to fuse.")


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


def _unregistered(read: _Reader, model: nn.Module) -> dict[str, str]:
    """The names of single layers that mappings do not know in a model."""
    modules = list(model.modules())
    modules += [function for module in modules for function in functions_of(module)]
    registered = {name.name for module in modules for name in names_of(type(module)).names}
    unknown = " or ".join(repr(name) for name in read.singles if name not in registered)
    there = ", ".join(sorted(registered)) or "none"
    return {f"no layer of the model is registered as {unknown}; it has {there}": _UNREGISTERED} if unknown else {}


def _sites(fusions: list[Fusion], model: nn.Module, problems: dict[str, str]) -> list[list[Site]]:
    """Where modules become one. A module that is in several places is found in each, and fused in the first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    sites: list[list[Site]] = []
    taken: dict[str, Fusion] = {}
    for fusion in fusions:
        found, wrong = find_sites([child.pattern for child in fusion.children], modules)
        problems |= {f"{fusion}: {problem}": advice for problem, advice in wrong.items()}
        first = {(id(modules[site.parent]), site.children): site for site in reversed(found)}
        sites.append([site for site in found if first[id(modules[site.parent]), site.children] is site])
        for path in (path for site in sites[-1] for path in site.paths):
            if path in taken and taken[path] is not fusion:
                problems[f"{path} is taken by {taken[path]} and by {fusion}"] = _TAKEN
            taken.setdefault(path, fusion)
    for path, fusion in taken.items():
        parts = path.split(".")
        for whole in (".".join(parts[:count]) for count in range(1, len(parts))):
            if whole in taken:
                lies = f"{path} is taken by {fusion}, and lies in {whole}, which is taken by {taken[whole]}"
                problems[lies] = _TAKEN
    return sites


def _without_layout(fusions: list[Fusion]) -> dict[str, str]:
    """What is wrong with kernels that are on this machine, each looked at once."""
    wanted = {
        (id(repository), fusion.layouts.get(kind)): (fusion, repository, kind)
        for fusion in fusions
        for kind, repository in [*fusion.repositories.items()][::-1]
    }
    return {
        f"{fusion}: {problem}": advice
        for (_, given), (fusion, repository, kind) in wanted.items()
        for problem, advice in problem_of_layout(repository, given, kind).items()
    }


class _Reader:
    """Reads the mapping of a configuration, and notes what is wrong with it."""

    def __init__(self, config: KernelConfig) -> None:
        self.problems: Final[dict[str, str]] = {}  # with what to do about them
        self.singles: Final[dict[str, dict[str, Repository]]] = {}
        self.fusions: Final[list[Fusion]] = []
        self._local: Final = config.use_local_kernel is True
        for flag in ("use_local_kernel", "inherit_mapping"):
            if type(given := getattr(config, flag)) is not bool:
                self.problems[f"{flag} is True or False, and {shown(given)} was given"] = _FLAG
        mapping: object = config.kernel_mapping
        if not isinstance(mapping, Mapping):
            self.problems[f"the mapping is a table, and {shown(mapping)} was given"] = _MAPPING
            return
        layouts, fused = self._layouts(config.layouts), set[str]()
        for key, value in mapping.items():
            name, children = self._key(key)
            repositories = self._by_device(name, value)
            if isinstance(key, str) and key:
                self.singles[name] = repositories
            if not isinstance(key, tuple):
                continue
            fused |= {layer_of(repository) for repository in repositories.values()}
            of_kind = {kind: layouts[n] for kind, r in repositories.items() if (n := layer_of(r)) in layouts}
            if children and repositories:
                self.fusions.append(Fusion(children, repositories, of_kind))
        for unknown in layouts.keys() - fused:
            there = ", ".join(sorted(fused)) or "none"
            problem = f"layouts has {unknown!r}, which is the layer of no entry for modules that become one"
            self.problems[f"{problem}; there is {there}"] = "Name the layer of a kernel, as it is after the colon."

    def _layouts(self, layouts: object) -> dict[str, str | type]:
        if not isinstance(layouts, Mapping):
            self.problems[f"layouts is a table, and {shown(layouts)} was given"] = _LAYOUTS
            return {}
        wrong = {name: value for name, value in layouts.items() if not _is_layout(value)}
        for name, value in wrong.items():
            problem = f"layouts has {shown(value)} for {name!r}, which is no nn.Module class and no name of one"
            self.problems[problem] = _LAYOUTS
        return {name: value for name, value in layouts.items() if name not in wrong}

    def _key(self, key: object) -> tuple[str, tuple[Child, ...]]:
        if isinstance(key, str) and key:
            return key, ()
        if not isinstance(key, tuple) or not key:
            self.problems[f"{shown(key)} is no key: it is the name of a layer, or a tuple of (name, path)"] = _KEY
            return str(key), ()
        children = []
        for pair in key:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]):
                self.problems[f"{shown(pair)} in a key is no pair of a name and a path"] = _KEY
            elif not _is_path(pair[1]):
                self.problems[f"{pair[0]}: {shown(pair[1])} is no path, such as model.layers.*.mlp"] = _PATH
            else:
                children.append(Child(*pair))
        names = [child.name for child in children]
        if len({*names}) < len(names):
            self.problems[f"{' + '.join(names)}: two children have one name"] = _NAMES
        return " + ".join(names) or str(key), tuple(children) if len(children) == len(key) else ()

    def _by_device(self, name: str, value: object) -> dict[str, Repository]:
        if not isinstance(value, Mapping):
            repository = self._repository(name, value)
            return dict.fromkeys(BACKENDS, repository) if repository is not None else {}
        found = {}
        for device, one in value.items():
            if device not in BACKENDS:
                self.problems[f"{name}: {device!r} is no kind of device; there are {', '.join(BACKENDS)}"] = _DEVICE
            elif (repository := self._repository(name, one)) is not None:
                found[device] = repository
        if not value:
            self.problems[f"{name}: a table of devices with nothing in it"] = _NO_DEVICE
        return found

    def _repository(self, name: str, value: object) -> Repository | None:
        if not isinstance(value, str | tuple | type) and callable(getattr(value, "load", None)):
            return cast("Repository", value)
        text, options = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if not isinstance(text, str):
            problem = f"{name}: {shown(value)} is no kernel, such as {self._form}"
            self.problems[problem] = _DIRECTORY if self._local else _KERNEL
            return None
        where, _, layer = text.rpartition(":")
        where = os.path.expanduser(where) if self._local else where  # noqa: PTH111 - as it is, where there is no such user
        if not where or not layer or (self._local and not _is_directory_name(where)):
            problem = f"{name}: {text!r} is no kernel of the form {self._form}"
            self.problems[problem] = _DIRECTORY if self._local else _KERNEL
            return None
        return (
            self._local_kernel(name, where, layer, options)
            if self._local
            else self._of_hub(name, where, layer, options, given=isinstance(value, tuple))
        )

    @property
    def _form(self) -> str:
        return "/directory:Layer" if self._local else "org/repo:Layer"

    def _local_kernel(self, name: str, where: str, layer: str, options: object) -> Repository | None:
        if options:
            self.problems[f"{name}: a local kernel takes no {shown(options)}"] = _LOCAL
            return None
        return LocalLayerRepository(where, layer_name=layer)

    def _of_hub(self, name: str, where: str, layer: str, options: object, *, given: bool) -> Repository | None:
        if not isinstance(options, Mapping) or options.keys() - {"version", "revision", "trust_remote_code"}:
            self.problems[f"{name}: {shown(options)} is no table of version or revision, and trust_remote_code"] = (
                _OPTIONS
            )
            return None
        if where.count("/") > 1 or where.startswith("/") or where.endswith("/"):
            self.problems[f"{name}: {where!r} is no repository of the form org/repo"] = _REPOSITORY
            return None
        named = {key: options[key] for key in ("version", "revision") if options.get(key) is not None}
        if "/" in where and given and len(named) != 1:
            self.problems[f"{name}: give version or revision, one of them; {dict(options)!r} was given"] = _REVISION
            return None
        if "revision" in named and not (isinstance(named["revision"], str) and named["revision"]):
            self.problems[f"{name}: revision {named['revision']!r} is no branch, tag or commit"] = _REVISION
            return None
        if "/" in where and not named:
            named = {"version": 1}
        trusted = options.get("trust_remote_code", False)
        try:
            return LayerRepository(where, layer_name=layer, trust_remote_code=trusted, **named)
        except KernelLoaderError as error:
            self.problems[f"{name}: {error.problem.rstrip('.')}"] = error.remedy
            return None


def _is_layout(value: object) -> bool:
    from torch import nn

    return issubclass(value, nn.Module) if isinstance(value, type) else isinstance(value, str) and bool(value)


def _is_path(value: object) -> bool:
    return bool(value) if isinstance(value, str) else isinstance(value, re.Pattern) and isinstance(value.pattern, str)


def _is_directory_name(where: str) -> bool:
    return "/" in where or "\\" in where
