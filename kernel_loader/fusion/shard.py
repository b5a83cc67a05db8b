"""Checkpoints on disk: safetensors files, read tensor by tensor, and written without holding one whole.

A safetensors file is eight bytes with the length of its header (little-endian), the header in JSON with the dtype,
shape and place of every tensor, and then their elements (https://github.com/huggingface/safetensors). All of the header
is known from a plan, so that tensors can be written as they are made.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.fusion.operation import TensorSpec

if TYPE_CHECKING:
    from safetensors import safe_open

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

# Names of dtypes in the format. Those that torch has from some release on are looked up by name.
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    code: getattr(torch, name)
    for code, name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, name)
}
_CODES: Final[Mapping[torch.dtype, str]] = {dtype: code for code, dtype in _DTYPES.items()}

_HASTE: Final = "Bring the checkpoint here again, and do not change it while it is converted."


@dataclass(frozen=True)
class Checkpoint:
    """A directory with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Attributes:
        root: the directory.
        file_of: for each tensor the name of the file that it is in.
        specs: for each tensor its shape and dtype.
        metadata: what the headers of the files say besides.
        index: what the index says besides; empty where there is none.
    """

    root: Path
    file_of: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    metadata: Mapping[str, str]
    index: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path) -> Checkpoint:
        """What a directory has, as the headers of its files say.

        Raises:
            FusionError: it is no checkpoint, a shard is missing or damaged, or safetensors is not installed.
        """
        wanted, index = _weight_map(root)
        file_of: dict[str, str] = {}
        specs: dict[str, TensorSpec] = {}
        metadata: dict[str, str] = {}
        problems: list[str] = []
        names_in: dict[str, list[str]] = {} if wanted else {SINGLE: []}
        for name, file in wanted.items():
            names_in.setdefault(file, []).append(name)
        for file, names in names_in.items():
            with _opened(root / file) as opened:
                metadata = {**(opened.metadata() or {}), **metadata}
                there = set(opened.keys())
                unnamed = sorted(there.difference(names)) if names else []
                problems += [f"{name} is in {file}, and {INDEX} does not name it" for name in unnamed]
                for name in names or sorted(there):
                    if name not in there:
                        problems.append(f"{name} is not in {file}, where {INDEX} says it is")
                        continue
                    part = opened.get_slice(name)
                    if (dtype := _DTYPES.get(part.get_dtype())) is None:
                        problems.append(f"{name} in {file} has dtype {part.get_dtype()}, which is not known here")
                        continue
                    file_of[name], specs[name] = file, TensorSpec(tuple(part.get_shape()), dtype)
        # They would lie beside, or on, what is written.
        strange = sorted(file.name for file in root.glob("[!.]*.safetensors") if file.name not in names_in)
        problems += [f"{file} holds tensors, and is no part of the checkpoint" for file in strange]
        if problems:
            raise FusionError(tuple(problems), "Bring the checkpoint here again, whole, and nothing else.")
        return cls(root, file_of, {name: specs[name] for name in wanted or specs}, metadata, index)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that tensors are in."""
        return tuple(dict.fromkeys(self.file_of.values()))


_RENEW: Final = "Bring the index here again; where model.safetensors holds all tensors, remove it."


class Reader:
    """Tensors of a checkpoint, mapped into memory rather than read. It keeps only the files of the last call open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, safe_open] = {}

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors. They are not to be written to.

        Raises:
            FusionError: a file is not as it was.
        """
        needed = {self._checkpoint.file_of[name] for name in names}
        self._open = {file: opened for file, opened in self._open.items() if file in needed}
        for file in needed - self._open.keys():
            self._open[file] = _opened(self._checkpoint.root / file)
        found = {name: self._open[self._checkpoint.file_of[name]].get_tensor(name) for name in names}  # type: ignore[no-untyped-call]
        if changed := [name for name, tensor in found.items() if TensorSpec.of(tensor) != self._checkpoint.specs[name]]:
            raise FusionError((f"{', '.join(changed)}: shape or dtype is not what it was",), _HASTE)
        return found


@dataclass(frozen=True)
class Shard:
    """A file that is going to be written.

    Attributes:
        file: its name.
        names: of the tensors in it, in the order in which they are made.
        header: the bytes before the tensors.
        offsets: for each tensor, where in the file it begins.
        size: of the file, in bytes.
    """

    file: str
    names: tuple[str, ...]
    header: bytes
    offsets: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, file: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> Shard:
        """The file of these tensors."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        begin, begins = 0, {}
        # Wide elements first, as the package writes it: then each tensor begins at a multiple of its elements' size.
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            end = begin + spec.nbytes
            if spec.dtype not in _CODES:
                raise FusionError((f"{name} has dtype {spec.dtype}, which the format does not have",))
            entries[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
            begins[name], begin = begin, end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(
            file,
            tuple(specs),
            header,
            {name: len(header) + begins[name] for name in specs},
            len(header) + begin,
        )

    def write(self, path: Path, make: Callable[[str], Tensor], wrote: Callable[[str], None]) -> None:
        """Make and write one tensor after the other, telling which one is written, and make the file durable."""
        with path.open("wb") as stream:
            stream.write(self.header)
            for name in self.names:
                stream.seek(self.offsets[name])
                _write(stream.write, make(name))
                wrote(name)
            stream.flush()
            os.fsync(stream.fileno())


def shards(specs: Mapping[str, TensorSpec], max_size: int, metadata: Mapping[str, str]) -> tuple[Shard, ...]:
    """Tensors in files of at most `max_size` bytes of elements; a tensor above that has a file of its own.

    Files are named as transformers names them: model.safetensors, or model-00001-of-00003.safetensors.
    """
    parts: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if parts[-1] and size + spec.nbytes > max_size:
            parts.append({})
            size = 0
        parts[-1][name] = spec
        size += spec.nbytes
    files = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        files = [SINGLE]
    return tuple(Shard.of(file, part, metadata) for file, part in zip(files, parts, strict=True))


def index_of(parts: Iterable[Shard], specs: Mapping[str, TensorSpec], rest: Mapping[str, Any]) -> bytes:
    """The text of `model.safetensors.index.json`."""
    metadata = {**rest, "total_size": sum(spec.nbytes for spec in specs.values())}
    weight_map = {name: part.file for part in parts for name in part.names}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n").encode()


def _weight_map(root: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Which file each tensor is in (nothing where there is one file), and what else the index says."""
    if not (root / INDEX).exists():
        if not (root / SINGLE).exists():
            raise FusionError(
                (f"{root} has neither {INDEX} nor {SINGLE}",), "Give the directory of a checkpoint in safetensors."
            )
        return {}, {}
    document = _read_index(root / INDEX)
    rest = document.get("metadata")
    return dict(document["weight_map"]), rest if isinstance(rest, dict) else {}


def _read_index(file: Path) -> dict[str, Any]:
    """An index that says of each tensor which file beside it has it."""
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FusionError((f"{file} is no JSON ({error})",), _RENEW) from error
    if not isinstance(document, dict):
        problems = [f"{file}: expected an object with a weight_map, got {_shown(document)}"]
    elif not isinstance(weight_map := document.get("weight_map"), dict) or not weight_map:
        got = _shown(weight_map) if "weight_map" in document else "none"
        problems = [f"{file}: expected a weight_map from tensors to files, got {got}"]
    else:
        problems = [
            f"{file}: expected for {name} the name of a file beside the index, got {_shown(part)}"
            for name, part in weight_map.items()
            if not _is_beside(part)
        ]
    if problems:
        raise FusionError(tuple(problems), _RENEW)
    return dict(document)


def _is_beside(name: object) -> bool:
    """Whether it names a file that a directory can have, in it or below."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = Path(name)
    return bool(path.name) and not path.anchor and ".." not in path.parts


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _opened(file: Path) -> safe_open:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise FusionError(
            ("checkpoints are read with the package safetensors, which is not installed",),
            "Install it: pip install safetensors",
        ) from error
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, FileNotFoundError) as error:
        raise FusionError((f"{file} cannot be read ({error})",), "Bring the checkpoint here again, whole.") from error
    except (MemoryError, RuntimeError) as error:
        problem = f"{file} cannot be mapped into memory ({str(error) or 'there is too little'})"
        raise FusionError(
            (problem,), "Let the process have address space for it, or convert smaller shards."
        ) from error


def _write(write: Callable[[Any], int], tensor: Tensor) -> None:
    tensor = tensor.contiguous().cpu()
    if size := tensor.numel() * tensor.element_size():
        # A view of the elements themselves: torch has no buffer of its own, and numpy lacks some dtypes.
        write(memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())))
