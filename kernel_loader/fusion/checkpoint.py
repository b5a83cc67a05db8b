"""A checkpoint on disk in another layout: streamed, resumable, and published whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.files import replace_file, sync
from kernel_loader.fusion.converter import Converters, compose
from kernel_loader.fusion.operation import TensorSpec
from kernel_loader.fusion.plan import Plan, plan
from kernel_loader.fusion.shard import INDEX, Checkpoint, Reader, Shard, index_of, shards

MAX_SHARD_SIZE: Final = 5 * 10**9

# Part of what a half-done conversion is known by: raised when files are laid out in another way.
_SCHEMA: Final = 1


class Converted(NamedTuple):
    """What a conversion has written.

    Attributes:
        out: the directory.
        plan: what was done to every tensor.
        shards: names of the files with tensors.
        reused: how many of them an earlier, interrupted conversion had written.
    """

    out: Path
    plan: Plan
    shards: tuple[str, ...]
    reused: int


def plan_checkpoint(source: Path | str, converters: Converters) -> Plan:
    """What a conversion would do, from the headers of the files.

    Raises:
        FusionError: there is no checkpoint, it is damaged, or the plan has problems.
    """
    return plan(Checkpoint.read(Path(source)).specs, converters)


def convert_checkpoint(
    source: Path | str,
    out: Path | str,
    converters: Converters,
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    watch: Callable[[int, int], None] = lambda _done, _total: None,
) -> Converted:
    """Write a checkpoint in the layout that converters lead to; `compose(converters).inverse()` leads back.

    The directory `out` appears whole, by one rename, or not at all. Until then all is in `.<out>.partial` beside it:
    where a conversion was interrupted, the same call goes on from the last shard that was finished. With another source
    (by names, sizes and times of its files) or other converters, it begins anew.

    Sources are mapped, not read. In memory is at most what one group of tensors is made of and what it becomes; an
    operation that computes (`QuantizeBlockFP8`) needs float32 copies of its source besides.

    Other files of the source are copied as they are, hidden ones excepted. What they say of the weights, as config.json
    does, is yours to change.

    Args:
        source: directory with `model.safetensors`, or with shards and `model.safetensors.index.json`.
        out: directory to be made.
        converters: one, several, a composition, or what has a `conversion_mapping`.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
        watch: is told after each tensor how many bytes of tensors are done, and of how many.

    Raises:
        FusionError: there is no checkpoint, it is damaged or changes meanwhile, the plan has problems, `out` is there,
            another process is converting into it.
        OSError: something cannot be written. What is finished is kept for the next call.
    """
    source, out = Path(source).resolve(), Path(out).absolute()
    if out == source or source in out.parents:
        raise FusionError((f"{out} lies in {source}, which is converted",), "Give another directory.")
    if max_shard_size < 1:
        raise FusionError((f"max_shard_size: expected a positive number of bytes, got {max_shard_size}",), "Give one.")
    _expect_free(out)
    checkpoint = Checkpoint.read(source)
    steps = plan(checkpoint.specs, converters)
    identity = _identity(checkpoint, converters, max_shard_size)
    parts = shards(_specs(steps), max_shard_size, checkpoint.metadata)
    private = out.with_name(f".{out.name}.partial")
    content = private / "content"
    with _alone(private, out):
        _expect_free(out)  # another process may have been here before the lock was had
        finished = _resumed(private, identity)
        reused = [part for part in parts if part.file in finished and _has_size(content / part.file, part.size)]
        _write_shards(parts, reused, private, identity, _Maker(checkpoint, steps, watch))
        if len(parts) > 1:
            replace_file(content / INDEX, index_of(parts, _specs(steps), checkpoint.index))
        _copy_others(checkpoint, content)
        if _identity(checkpoint, converters, max_shard_size) != identity:
            raise FusionError((f"the files of {source} changed while they were converted",), "Convert it again.")
        sync(content)
        content.replace(out)
        sync(out.parent)
        shutil.rmtree(private, ignore_errors=True)
    return Converted(out, steps, tuple(part.file for part in parts), len(reused))


class _Maker:
    """The tensors of the result, one after the other: of a group, what is not yet asked for is kept."""

    def __init__(self, checkpoint: Checkpoint, steps: Plan, watch: Callable[[int, int], None]) -> None:
        self._reader, self._steps, self._watch = Reader(checkpoint), steps, watch
        self._made: dict[str, Tensor] = {}
        self._done, self._total = 0, sum(spec.nbytes for spec in _specs(steps).values())

    def make(self, name: str) -> Tensor:
        """A tensor, which its next caller may drop."""
        group = self._steps.group_of.get(name)
        if group is None:
            return self._reader.tensors([name])[name]
        if name not in self._made:
            self._made = {}  # what a shard that was there already had of the last group
            self._made = group.run(self._reader.tensors(group.sources))
        tensor = self._made.pop(name)
        assert TensorSpec.of(tensor) == self._steps.targets[name], name
        return tensor

    def passed(self, shard: Shard) -> None:
        """Count the tensors of a shard that is there already."""
        for name in shard.names:
            self.wrote(name)

    def wrote(self, name: str) -> None:
        """Tell how far it is."""
        spec = self._steps.targets[name]
        self._done += spec.nbytes if spec else 0
        self._watch(self._done, self._total)


def _write_shards(
    parts: tuple[Shard, ...], reused: list[Shard], private: Path, identity: Mapping[str, str], maker: _Maker
) -> None:
    finished: list[str] = [part.file for part in reused]
    for part in parts:
        if part in reused:
            maker.passed(part)
            continue
        unfinished = private / part.file
        part.write(unfinished, maker.make, maker.wrote)
        unfinished.replace(private / "content" / part.file)
        finished.append(part.file)
        # After the shard is durable: a journal never promises what a loss of power could take.
        _write_journal(private, identity, finished)


def _specs(steps: Plan) -> dict[str, TensorSpec]:
    """What is written, the targets of each group together, so that a group is made once."""
    order: dict[str, None] = {}
    for name in steps.targets:
        group = steps.group_of.get(name)
        order |= dict.fromkeys(group.targets if group else (name,))
    return {name: spec for name in order if (spec := steps.targets[name]) is not None}


def _identity(checkpoint: Checkpoint, converters: Converters, max_shard_size: int) -> dict[str, str]:
    """What a half-done conversion must have in common with the one that goes on with it."""
    files = []
    for file in (*map(Path, checkpoint.files), *_others(checkpoint)):
        status = (checkpoint.root / file).stat()
        files.append([str(file), status.st_size, status.st_mtime_ns])
    document = [_SCHEMA, str(checkpoint.root), files, repr(compose(converters)), max_shard_size]
    return {"conversion": hashlib.sha256(json.dumps(document).encode()).hexdigest()}


def _resumed(private: Path, identity: Mapping[str, str]) -> set[str]:
    """The shards that an earlier, equal conversion finished; after any other, an empty place to begin in."""
    content = private / "content"
    try:
        journal = json.loads((private / "journal.json").read_bytes())
    except (OSError, ValueError):
        journal = {}
    if isinstance(journal, dict) and journal.get("conversion") == identity["conversion"] and content.is_dir():
        return set(journal.get("shards", ()))
    for old in private.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name != "lock":
            old.unlink()
    content.mkdir()
    _write_journal(private, identity, [])
    return set()


def _write_journal(private: Path, identity: Mapping[str, str], finished: list[str]) -> None:
    sync(private / "content")
    document = {**identity, "shards": finished}
    replace_file(private / "journal.json", (json.dumps(document, indent=2) + "\n").encode())


def _others(checkpoint: Checkpoint) -> list[Path]:
    """Files beside the tensors and the index, such as those of the tokenizer; nothing hidden."""
    found = []
    for directory, subdirectories, files in os.walk(checkpoint.root):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        at = Path(directory).relative_to(checkpoint.root)
        found += [at / name for name in sorted(files) if not name.startswith(".")]
    weights = {Path(file) for file in (*checkpoint.files, INDEX)}
    return [file for file in found if file not in weights]


def _copy_others(checkpoint: Checkpoint, content: Path) -> None:
    for file in _others(checkpoint):
        (content / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkpoint.root / file, content / file)  # a cache of the Hub has links, which are followed
        sync(content / file)


def _expect_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FusionError((f"{out} is there already",), "Give another directory, or remove that one.")


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


@contextlib.contextmanager
def _alone(private: Path, out: Path) -> Iterator[None]:
    """Nobody else converts into `out`, as long as the lock lives with its process."""
    from filelock import FileLock, Timeout

    private.mkdir(parents=True, exist_ok=True)
    lock = FileLock(private / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FusionError(
            (f"another process is converting into {out}",), "Let it finish, or give another directory."
        ) from error
    try:
        yield
    finally:
        lock.release()
