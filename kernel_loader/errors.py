"""Everything that can go wrong, as one tree.

::

    KernelLoaderError
      SettingsError(ValueError)           a KERNEL_LOADER_* variable cannot be read
      HostError(ValueError)               a description of a machine cannot be read
      VariantError(ValueError)            a name is not a build variant
      ManifestError(ValueError)           a kernel's TOML is wrong
      MetadataError(ValueError)           a build's metadata.json is wrong
      RequestError(ValueError)            a call asks for two things that exclude each other
      UnknownKernel(LookupError)          no manifest has that name
      NoCompatibleBuild(FileNotFoundError)  builds were found, none runs here
      UnknownVersion(ValueError)          the repository has no such version or revision
      SourceError(OSError)                a place where builds come from failed
        NotCached                         ... the Hub must not be asked, and the build is not here
        HubUnavailable                    ... the Hub does not answer
        RepositoryMissing                 ... the Hub has no such repository, or does not show it
      TrustError(PermissionError)         code of that repository may not run here
      StoreError(OSError)                 the store cannot be read or written
      IntegrityError(OSError)             the bytes are not those that were published
      KernelImportError(ImportError)      a build was chosen and its import failed
        AbiMismatch                       ... its shared library does not fit this machine
        MissingDependency                 ... it needs a Python package that is not here
        OpNamespaceTaken                  ... its ops would overwrite those of a build that is loaded
        MissingEntrypoints                ... it lacks symbols that the bundle promises
      CyclicDependency(ValueError)        kernels need each other in a circle
      LockError(ValueError)               a lock file cannot be used
        LockMissing                       ... it is not there, or does not name the kernel
        LockStale                         ... it has another version of the kernel than is asked for
        LockMismatch                      ... the bytes at hand are not those that it names
      BundleError(ValueError)             a bundle of builds cannot be used
      KernelizeError(ValueError)          a layer cannot be replaced by its kernel
      FusionError(ValueError)             modules cannot be fused, or their weights not be converted

Every error is also the builtin that a caller would expect, holds its parts as fields, survives pickling, and its text
ends with what to do next. Text is made when it is asked for, from the fields.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from kernel_loader.provenance import Origin
    from kernel_loader.resolver import Resolution, Verdict

_REFERENCE = 'accept the slow reference with fallback="reference", where the kernel has one'

_WITHOUT_LOCK = "load without the lock (KERNEL_LOADER_LOCK, --lock, or lock= in Python)"

_Error = TypeVar("_Error", bound="KernelLoaderError")


def _restore(cls: type[_Error], fields: dict[str, Any]) -> _Error:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error


@dataclass_transform(eq_default=False)
class KernelLoaderError(Exception):
    """Base of all errors of this package. Subclasses annotate their fields, and give `problem` and `remedy`.

    Fields are given by position or by name, as to a dataclass. The dataclass itself would cost half a millisecond for
    each class of this tree, in every process that loads a kernel.
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(dict.fromkeys((*cls._fields, *inspect.get_annotations(cls))))

    def __init__(self, *args: object, **named: object) -> None:
        given = dict(zip(self._fields, args, strict=False)) | named
        missing = [name for name in self._fields if name not in given and not hasattr(type(self), name)]
        if missing or len(args) + len(named) != len(given) or given.keys() - set(self._fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self._fields)}")
        self.__dict__.update({name: given.get(name, getattr(type(self), name, None)) for name in self._fields})

    @property
    def problem(self) -> str:
        """What was looked for and what is there."""
        raise NotImplementedError

    @property
    def remedy(self) -> str:
        """What to do next."""
        raise NotImplementedError

    def __str__(self) -> str:
        # One paragraph, whatever line breaks a compiler or linker put into its message.
        text = " ".join(f"{self.problem} {self.remedy}".split())
        # What a field ends with ends the sentence. An ellipsis, and the directory above, stay.
        return re.sub(r"(?<=[\w)\]}'\"`])([.?!])\.(?=\s|$)", r"\1", text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which dataclass fields do not fill.
        return _restore, (type(self), self.__dict__.copy())


class SettingsError(KernelLoaderError, ValueError):
    """An environment variable holds something that cannot be read."""

    variable: str
    value: str
    expected: str

    @property
    def problem(self) -> str:
        return f"{self.variable}={self.value!r} cannot be read."

    @property
    def remedy(self) -> str:
        return f"Set it to {self.expected}."


class HostError(KernelLoaderError, ValueError):
    """A description of a machine, or a choice of backend on it, that makes no sense."""

    path: str
    detail: str
    advice: str = "`kernel-loader host --json` prints a complete description of the machine it runs on."

    @property
    def problem(self) -> str:
        return f"Host, {self.path}: {self.detail}."

    @property
    def remedy(self) -> str:
        return self.advice


class VariantError(KernelLoaderError, ValueError):
    """A name that is not of the grammar of build variants."""

    name: str
    detail: str

    @property
    def problem(self) -> str:
        return f"{self.name!r} is not a build variant: {self.detail}."

    @property
    def remedy(self) -> str:
        return "Variants look like torch210-cxx11-cu128-x86_64-linux or torch-universal."


class ManifestError(KernelLoaderError, ValueError):
    """A kernel's manifest that cannot be used; `path` leads to the key."""

    file: str
    path: str
    detail: str

    @property
    def problem(self) -> str:
        where = f"{self.file}, {self.path}" if self.path else self.file
        return f"Manifest {where}: {self.detail}."

    @property
    def remedy(self) -> str:
        return "Correct that entry; docs/manifests.md lists every key and its form."


class MetadataError(KernelLoaderError, ValueError):
    """A build's metadata.json that cannot be used; `path` leads to the key."""

    file: str
    path: str
    detail: str

    @property
    def problem(self) -> str:
        where = f"{self.file}, {self.path}" if self.path else self.file
        return f"Build metadata {where}: {self.detail}."

    @property
    def remedy(self) -> str:
        return "The build is damaged or was published wrong: correct the file, or report it to the kernel's author."


class RequestError(KernelLoaderError, ValueError):
    """Arguments of a call exclude each other, or mean nothing."""

    detail: str
    advice: str

    @property
    def problem(self) -> str:
        return f"{self.detail}."

    @property
    def remedy(self) -> str:
        return self.advice


class UnknownKernel(KernelLoaderError, LookupError):
    """No manifest has that name."""

    name: str
    matches: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        return f"No kernel or capability is registered under the name {self.name!r}."

    @property
    def remedy(self) -> str:
        if "/" in self.name:
            return (
                "A repository has no bundle: take its module with load_module(repository), or give it a name with a "
                "manifest (docs/manifests.md)."
            )
        meant = f"Did you mean {' or '.join(self.matches)}? " if self.matches else ""
        return f"{meant}`kernel-loader list` shows all names; KERNEL_LOADER_MANIFESTS adds a directory of your own."


class NoCompatibleBuild(KernelLoaderError, FileNotFoundError):
    """A kernel has builds, and none of them runs on the host. `version` is another that has a build for it."""

    kernel: str
    resolution: Resolution
    version: int | None = None

    @property
    def nearest(self) -> Verdict | None:
        """The rejected build that needs the least change, of the first repository that has any."""
        return next((found.nearest for found in self._looked_at if found.nearest is not None), None)

    @property
    def _looked_at(self) -> tuple[Resolution, ...]:
        return (self.resolution, *self.resolution.alternatives)

    @property
    def problem(self) -> str:
        others = "".join(f", nor one of {other.repo}" for other in self.resolution.alternatives)
        head = f"No build of {self.kernel} runs on this host{others}"
        if self.nearest is None:
            notes = dict.fromkeys(found.note or "it has none" for found in self._looked_at)
            return f"{head}: {'; '.join(notes)}."
        count = sum(len(found.verdicts) for found in self._looked_at)
        reasons = "; ".join(reason.message for reason in self.nearest.reasons)
        return f"{head} ({count} looked at). The nearest is {self.nearest.name}: {reasons}."

    @property
    def remedy(self) -> str:
        remedies = [reason.remedy for reason in self.nearest.reasons] if self.nearest else []
        if self.version is not None:
            remedies.insert(0, f"Version {self.version} has a build for this host: pass version={self.version}.")
        return " ".join([*dict.fromkeys(remedies), "`kernel-loader explain` shows every build with its reasons."])


class SourceError(KernelLoaderError, OSError):
    """A place where builds come from does not answer as it should."""

    source: str
    detail: str
    advice: str

    @property
    def problem(self) -> str:
        return f"{self.source}: {self.detail}."

    @property
    def remedy(self) -> str:
        return self.advice


class NotCached(SourceError):
    """The Hub must not be asked (offline mode), and what is needed is not here."""

    detail: str = "it is not on this machine, and the Hub must not be asked (offline mode)"
    advice: str = (
        "Run `kernel-loader prefetch` where the Hub can be asked, or `export` there and `import` here; use builds on "
        "this machine with KERNEL_LOADER_LOCAL=repository=DIRECTORY; or accept the slow reference with "
        'fallback="reference" (KERNEL_LOADER_FALLBACK), where the kernel has one. KERNEL_LOADER_OFFLINE and '
        "HF_HUB_OFFLINE set the mode."
    )


class HubUnavailable(SourceError):
    """The Hub does not answer, and nothing that is here can serve instead."""


class RepositoryMissing(SourceError):
    """The Hub has no such kernel repository, or does not show it to this user."""


class UnknownVersion(KernelLoaderError, ValueError):
    """A repository has no such version or revision; `available` are the versions that it has."""

    repo: str
    wanted: str
    available: tuple[int, ...]

    @property
    def problem(self) -> str:
        return f"{self.repo} has no version or revision {self.wanted!r}."

    @property
    def remedy(self) -> str:
        if not self.available:
            return "It has no versions (branches v1, v2, ...); pass revision= with a branch or a commit."
        return f"Its versions are {', '.join(map(str, self.available))}."


class TrustError(KernelLoaderError, PermissionError):
    """Code of a repository may not run here."""

    repo: str
    detail: str

    @property
    def problem(self) -> str:
        return f"Code of {self.repo} may not run here: {self.detail}."

    @property
    def remedy(self) -> str:
        repo = self.repo.partition("@")[0]
        return (
            f'If you trust it, pass trust_remote_code=True or trust_remote_code=["{repo}"] (--trust-remote-code), or '
            "give it a name with a manifest of your own (docs/manifests.md)."
        )


class StoreError(KernelLoaderError, OSError):
    """The store of builds cannot be read or written."""

    path: str
    detail: str
    advice: str

    @property
    def problem(self) -> str:
        return f"The store at {self.path}: {self.detail}."

    @property
    def remedy(self) -> str:
        return self.advice


class IntegrityError(KernelLoaderError, OSError):
    """A build whose files are not those that its metadata.json lists.

    `violations` holds one line for each file that is missing, unknown, or of other content.
    """

    build: str
    violations: tuple[str, ...]
    advice: str = "Fetch the build again. If you changed it on purpose, `kernel-loader seal DIR` writes new digests."

    @property
    def problem(self) -> str:
        shown = "; ".join(self.violations[:5])
        more = f"; and {len(self.violations) - 5} more" if len(self.violations) > 5 else ""
        return f"The files of {self.build} are not those that were published: {shown}{more}."

    @property
    def remedy(self) -> str:
        return self.advice


class KernelImportError(KernelLoaderError, ImportError):
    """A build was chosen, and importing it failed. The original exception is the `__cause__`; `cause` is its text."""

    kernel: str
    origin: Origin
    cause: str

    @property
    def problem(self) -> str:
        return f"{self.kernel} ({self.origin.variant}, from {self.origin.where}) failed to import: {self.cause}."

    @property
    def remedy(self) -> str:
        return f"Choose another version or backend, or {_REFERENCE}."


class AbiMismatch(KernelImportError):
    """The shared library of a build does not fit this CPU, libc or torch."""

    @property
    def remedy(self) -> str:
        return (
            "The library is damaged, or was built for another CPU, libc or torch than its name says: report it to the "
            f"kernel's author, or {_REFERENCE}."
        )


class MissingDependency(KernelImportError):
    """A build imports a Python package that is not installed."""

    requirements: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        return f"Install what it needs: pip install {' '.join(self.requirements)}"


class OpNamespaceTaken(KernelImportError):
    """A build defines ops of torch under a namespace that another build has in this process; nothing of it ran."""

    namespaces: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        return (
            "Load one of the two in a process: take the same version everywhere in it, or start another process for "
            f"this one. Or {_REFERENCE}."
        )


class MissingEntrypoints(KernelImportError):
    """A build lacks symbols that the bundle needs; `names` are all of them, as `field = symbol`."""

    names: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        return (
            f"{self.kernel} ({self.origin.variant}, from {self.origin.where}) lacks "
            f"{len(self.names)} of its entrypoints: {', '.join(self.names)}. {self.cause}"
        )

    @property
    def remedy(self) -> str:
        return (
            "Another version of the kernel may have them: pass version=, correct [entrypoints] in the manifest, or "
            f"{_REFERENCE}."
        )


class CyclicDependency(KernelLoaderError, ValueError):
    """Kernels name each other as dependencies in a circle; `chain` is the way round."""

    chain: tuple[str, ...]

    @property
    def problem(self) -> str:
        return f"Kernels depend on each other in a circle: {' -> '.join(self.chain)}."

    @property
    def remedy(self) -> str:
        return "Report it to their authors, or choose another version of one of them."


class LockError(KernelLoaderError, ValueError):
    """A lock file that cannot be used."""

    file: str
    detail: str

    @property
    def problem(self) -> str:
        return f"Lock file {self.file}: {self.detail}."

    @property
    def remedy(self) -> str:
        return "Bring it back from version control; or remove the file, and write it anew with `kernel-loader lock`."


class LockMissing(LockError):
    """There is no lock file, or it does not name the kernel."""

    @property
    def remedy(self) -> str:
        return f"Add what is missing with `kernel-loader lock --file {self.file} NAME...`, or {_WITHOUT_LOCK}."


class LockStale(LockError):
    """The lock file has another version of the kernel than is asked for."""

    @property
    def remedy(self) -> str:
        return "Bring it up to date with `kernel-loader lock`, where the network can be reached."


class LockMismatch(LockError):
    """The bytes of a build are not those that the lock file names."""

    @property
    def remedy(self) -> str:
        return (
            "Do not run it. If the change is wanted, `kernel-loader lock --upgrade` takes it up; for a directory of "
            f"your own, {_WITHOUT_LOCK}."
        )


class BundleError(KernelLoaderError, ValueError):
    """A bundle of builds that cannot be used. Nothing of it was kept."""

    file: str
    detail: str
    advice: str = "Make it again with `kernel-loader export`, and carry all of it; nothing of it was imported."

    @property
    def problem(self) -> str:
        return f"Bundle {self.file}: {self.detail}."

    @property
    def remedy(self) -> str:
        return self.advice


class KernelizeError(KernelLoaderError, ValueError):
    """A layer cannot be replaced by its kernel, and may not keep its own forward. `code` tells why, for programs."""

    layer: str
    code: str
    detail: str
    advice: str

    @property
    def problem(self) -> str:
        return f"Layer {self.layer}: {self.detail}."

    @property
    def remedy(self) -> str:
        return self.advice


class FusionError(KernelLoaderError, ValueError):
    """Modules cannot be fused, or weights cannot be converted. `problems` holds a line for all that is wrong."""

    problems: tuple[str, ...]
    advice: str = "Correct the converters, or give them the weights that they are for; nothing was converted."

    @property
    def problem(self) -> str:
        shown = "; ".join(self.problems[:5])
        more = f"; and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
        return f"{shown}{more}."

    @property
    def remedy(self) -> str:
        return self.advice
