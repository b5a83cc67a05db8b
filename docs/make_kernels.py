# ruff: noqa: INP001 - a script
"""Write docs/kernels.md, from the manifests and the bundles that ship: `python docs/make_kernels.py`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kernel_loader.manifest import Manifest
from kernel_loader.rules import Requires

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "kernels.md"

HEAD: Final = """\
# Kernels

Written by `python docs/make_kernels.py`, from the manifests and the docstrings of the bundles.

Each is loaded by its name, as `kernel_loader.load_kernel("activation")`. `kernel-loader explain activation` shows every
build of a kernel, and why a machine takes it or not. Where no build fits, the reference is taken, in plain PyTorch; a
kernel without one is then an error.

Where a class is named, its docstrings and those of its module are what every build keeps: the formulas, dtypes and
errors stand there in full. Without a class, the entrypoints are functions, classes and modules of the published
package, as its authors describe them.
"""


def document() -> str:
    """The page."""
    kernels = sorted(_manifests(), key=lambda kernel: kernel.name)
    rows = [
        "| kernel | what it is | published for | reference |",
        "|---|---|---|---|",
        *(
            f"| [{kernel.name}](#{kernel.name}) | {kernel.summary} | {_backends(kernel)} "
            f"| {'yes' if kernel.reference else ''} |"
            for kernel in kernels
        ),
    ]
    return "\n".join([HEAD, *rows, *(line for kernel in kernels for line in _section(kernel))]) + "\n"


def _manifests() -> Iterator[Manifest]:
    for file in (ROOT / "manifests").glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        if "name" in tomllib.loads(text):  # the others are no kernels
            yield Manifest.parse(text, str(file))


def _backends(kernel: Manifest) -> str:
    return ", ".join(dict.fromkeys(backend for each in (kernel, *kernel.alternatives) for backend in each.backends))


def _section(kernel: Manifest) -> Iterator[str]:
    yield from ("", f"## {kernel.name}", "", f"{kernel.summary}.", "")
    if kernel.repo is not None:
        yield f"- Published: {_published(kernel)}"
        yield from (f"- Otherwise: {_published(other)}" for other in kernel.alternatives)
    if kernel.reference is not None:
        builds = sorted(path.name for path in (ROOT / "registry" / kernel.reference / "build").iterdir())
        yield f"- Embedded: {', '.join(f'`{build}`' for build in builds)}"
    for capability, features in kernel.capabilities.items():
        having = f", with {', '.join(map(str, features))}" if features else ""
        yield f"- Offers `{capability}`{having}"
    if kernel.bundle is not None:
        yield f"- Class: `{kernel.bundle.replace(':', '.')}`"
        yield from _fields(kernel.bundle)
    else:
        yield f"- Entrypoints: {', '.join(f'`{name}`' for name in kernel.entrypoints)}"


def _published(kernel: Manifest) -> str:
    at = f"version {kernel.version}" if kernel.version is not None else f"revision `{kernel.revision}`"
    needs = "; ".join(_needs(kernel.requires))
    backends = f", for {', '.join(kernel.backends)}" if kernel.backends else ""
    return f"`{kernel.repo}`, {at}{backends}{f'; needs {needs}' if needs else ''}"


def _needs(requires: Requires) -> Iterator[str]:
    named = {
        "compute capability": requires.cuda_capability,
        "a CUDA toolkit with nvcc": requires.cuda_toolkit,
        "an NVIDIA driver": requires.driver,
        "torch": requires.torch,
    }
    for what, specifier in named.items():
        if specifier is not None:
            yield f"{what} {', '.join(sorted(map(str, specifier), reverse=True))}"
    if requires.gfx:
        yield f"one of {', '.join(requires.gfx)}"
    if requires.python:
        yield f"the Python packages {', '.join(requires.python)}"


def _fields(bundle: str) -> Iterator[str]:
    module_name, _, class_name = bundle.partition(":")
    module = importlib.import_module(module_name)
    cls = getattr(module, class_name)
    about = _items(inspect.getdoc(cls) or "", "Attributes")
    for field in dataclasses.fields(cls):
        kind = getattr(module, str(field.type).removesuffix(" | None"), None)
        protocol = kind if getattr(kind, "_is_protocol", False) else None
        call = vars(protocol).get("__call__") if protocol is not None else None
        text = inspect.getdoc(call or protocol) or "" if protocol is not None else ""
        yield from ("", f"### {field.name}", "")
        if call is not None:
            yield from (f"`{field.name}({_parameters(call)})`", "")
        yield about.get(field.name, "See the class.") if protocol is None else _first(text)
        yield from _parts(text)


def _parts(text: str) -> Iterator[str]:
    """What a docstring says of arguments or attributes, and of what is returned."""
    parts = _items(text, "Args") | _items(text, "Attributes")
    lines = [f"- `{name}`: {meaning}" for name, meaning in parts.items()]
    if returns := " ".join(_below(text, "Returns").split()):
        lines.append(f"- returns: {returns}")
    if lines:
        yield from ("", *lines)


def _parameters(function: object) -> str:
    parameters = list(inspect.signature(function).parameters.values())[1:]  # type: ignore[arg-type]
    unnamed = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(unnamed))[1:-1]


def _first(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _below(text: str, title: str) -> str:
    """The indented lines below a title of a docstring, without their indentation."""
    match = re.search(rf"^{title}:\n((?:(?: .*)?\n)*)", f"{text}\n", re.MULTILINE)
    return inspect.cleandoc(match[1]) if match else ""


def _items(text: str, title: str) -> dict[str, str]:
    """Name -> meaning, of a section that lists them."""
    parts = re.split(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*):\s", _below(text, title), flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in zip(parts[1::2], parts[2::2], strict=True)}


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
