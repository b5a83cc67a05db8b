"""A checkpoint on disk in another layout: streamed, resumable, and published whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.files import replace_file, sync
from kernel_loader.fusion.converter import Converters, compose
from kernel_loader.fusion.operation import TensorSpec
from kernel_loader.fusion.place import CHANGE, Place, alone, nearest, reading, space, unwritten, writing
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


def plan_checkpoint(
    source: Path | str,
    converters: Converters,
    out: Path | str | None = None,
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Plan:
    """What a conversion would do, from the headers of the files. Nothing is written.

    Args:
        source: as for `convert_checkpoint`.
        converters: likewise.
        out: likewise; None to leave open where it would go.
        max_shard_size: likewise.

    Raises:
        FusionError: `convert_checkpoint` would refuse the same before it reads a tensor.
    """
    task = _Task.read(source, converters, max_shard_size)
    if out is not None:
        task.expect_place(Place.of(out))
    return task.steps


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
            another process is converting into it, there is too little space, or a file cannot be written (then an
            OSError is the cause). What is finished is kept for the next call.
    """
    task, place = _Task.read(source, converters, max_shard_size), Place.of(out)
    task.expect_place(place)
    checkpoint, parts = task.checkpoint, task.parts
    with alone(place):
        place.expect_free()  # another process may have been here before the lock was had
        reused = task.reused(place)
        _begin(place, task, reused)
        _write_shards(task, place, reused, _Maker(checkpoint, task.steps, watch))
        if text := task.index_text:
            with writing(place.content / INDEX, place, len(text)):
                replace_file(place.content / INDEX, text)
        _copy_others(task, place)
        if _identity(checkpoint, _files(checkpoint), converters, max_shard_size) != task.identity:
            problem = f"the files of {checkpoint.root} changed while they were converted"
            raise FusionError((problem,), "Convert it again.")
        with writing(place.out, place):
            sync(place.content)
            place.content.replace(place.out)
        try:
            sync(place.out.parent)
        except OSError as error:
            problem = f"{place.out} is whole, and the disk does not take its name for good ({error.strerror})"
            raise FusionError((problem,), f"Check that disk, and remove {place.private}.") from error
        shutil.rmtree(place.private, ignore_errors=True)
    return Converted(place.out, task.steps, tuple(part.file for part in parts), len(reused))


class _Task(NamedTuple):
    """What is going to be written, known before anything is.

    Attributes:
        checkpoint: the source.
        steps: what is done to its tensors.
        parts: the files that they go to.
        index_text: of the index; empty where there is one file.
        others: files that are copied, with their sizes.
        identity: what a half-done conversion must have in common with the one that goes on with it.
    """

    checkpoint: Checkpoint
    steps: Plan
    parts: tuple[Shard, ...]
    index_text: bytes
    others: Mapping[Path, int]
    identity: str

    @classmethod
    def read(cls, source: Path | str, converters: Converters, max_shard_size: int) -> _Task:
        source = Path(source).resolve()
        if type(max_shard_size) is not int or max_shard_size < 1:
            problem = f"max_shard_size: expected a positive number of bytes, got {max_shard_size!r}"
            raise FusionError((problem,), "Give one, such as 5 * 10**9.")
        with reading(source):
            checkpoint = Checkpoint.read(source)
        steps = plan(checkpoint.specs, converters)
        specs = _specs(steps)
        parts = shards(specs, max_shard_size, checkpoint.metadata)
        index = index_of(parts, specs, checkpoint.index) if len(parts) > 1 else b""
        files = _files(checkpoint)
        weights = {Path(file) for file in (*checkpoint.files, INDEX)}
        others = {file: status.st_size for file, status in files.items() if file not in weights}
        return cls(checkpoint, steps, parts, index, others, _identity(checkpoint, files, converters, max_shard_size))

    def expect_place(self, place: Place) -> None:
        """Refuse what cannot be written, before anything is."""
        root = self.checkpoint.root
        if place.out == root or root in place.out.parents:
            raise FusionError((f"{place.out} lies in {root}, which is converted",), CHANGE)
        place.expect_free()
        place.expect_writable()
        reused = self.reused(place)
        needed = sum(part.size for part in self.parts if part not in reused) + len(self.index_text)
        needed += sum(self.others.values()) - space(place.private, {place.content / part.file for part in reused})
        disk = shutil.disk_usage(nearest(place.private))
        if disk.total and needed > disk.free:  # a file system that has no size does not say
            problem = f"{place.out} cannot be written: {needed:,} bytes more are wanted, {disk.free:,} are free there"
            advice = "Make room there, or give a directory on another disk."
            raise FusionError((problem,), advice + (place.goes_on() if reused else ""))

    def reused(self, place: Place) -> list[Shard]:
        """The files that an earlier, equal conversion finished."""
        try:
            journal = json.loads(place.journal.read_bytes())
        except (OSError, ValueError):
            return []
        if not isinstance(journal, dict) or journal.get("conversion") != self.identity:
            return []
        finished = set(journal.get("shards", ()))
        return [p for p in self.parts if p.file in finished and _has_size(place.content / p.file, p.size)]


class _Maker:
    """The tensors of the result, one after the other: of a group, what is not yet asked for is kept.

    Attributes:
        stopped: what `watch` raised, where that could be taken for an error of a file.
    """

    def __init__(self, checkpoint: Checkpoint, steps: Plan, watch: Callable[[int, int], None]) -> None:
        self._root, self._reader, self._steps, self._watch = checkpoint.root, Reader(checkpoint), steps, watch
        self.stopped: OSError | None = None
        self._made: dict[str, Tensor] = {}
        self._done, self._total = 0, sum(spec.nbytes for spec in _specs(steps).values())

    def make(self, name: str) -> Tensor:
        """A tensor, which its next caller may drop."""
        group = self._steps.group_of.get(name)
        if group is None:
            return self._read((name,))[name]
        if name not in self._made:
            self._made = {}  # what a shard that was there already had of the last group
            self._made = group.run(self._read(group.sources))
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
        try:
            self._watch(self._done, self._total)
        except OSError as error:
            self.stopped = error
            raise

    def _read(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        with reading(self._root):
            return self._reader.tensors(names)


def _write_shards(task: _Task, place: Place, reused: list[Shard], maker: _Maker) -> None:
    finished = [part.file for part in reused]
    for part in task.parts:
        if part in reused:
            maker.passed(part)
            continue
        unfinished = place.private / part.file
        try:
            part.write(unfinished, maker.make, maker.wrote)
            unfinished.replace(place.content / part.file)
        except BaseException as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if isinstance(error, OSError) and error is not maker.stopped:
                raise unwritten(unfinished, place, error, part.size) from error
            raise
        finished.append(part.file)
        # After the shard is durable: a journal never promises what a loss of power could take.
        _write_journal(place, task.identity, finished)


def _specs(steps: Plan) -> dict[str, TensorSpec]:
    """What is written, the targets of each group together, so that a group is made once."""
    order: dict[str, None] = {}
    for name in steps.targets:
        group = steps.group_of.get(name)
        order |= dict.fromkeys(group.targets if group else (name,))
    return {name: spec for name in order if (spec := steps.targets[name]) is not None}


def _identity(
    checkpoint: Checkpoint, files: Mapping[Path, os.stat_result], converters: Converters, max_shard_size: int
) -> str:
    looks = [[str(file), status.st_size, status.st_mtime_ns] for file, status in files.items()]
    document = [_SCHEMA, str(checkpoint.root), looks, repr(compose(converters)), max_shard_size]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _begin(place: Place, task: _Task, reused: list[Shard]) -> None:
    """Leave what is reused, and nothing else of an earlier conversion."""
    with writing(place.private, place):
        if reused:
            _clear(place.private, {place.lock.name, place.journal.name, place.content.name})
            _clear(place.content, {part.file for part in reused})
            return
        _clear(place.private, {place.lock.name})
        place.content.mkdir()
    _write_journal(place, task.identity, [])


def _clear(directory: Path, keep: Collection[str]) -> None:
    for old in directory.iterdir():
        if old.name in keep:
            continue
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def _write_journal(place: Place, identity: str, finished: list[str]) -> None:
    text = (json.dumps({"conversion": identity, "shards": finished}, indent=2) + "\n").encode()
    with writing(place.journal, place, len(text)):
        sync(place.content)
        replace_file(place.journal, text)


def _files(checkpoint: Checkpoint) -> dict[Path, os.stat_result]:
    """The files of the source and how they look: those with tensors, and all others that are not hidden."""
    root = checkpoint.root
    files = dict.fromkeys(map(Path, checkpoint.files))
    with reading(root):
        for directory, subdirectories, names in os.walk(root, onerror=_raise):
            subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
            at = Path(directory).relative_to(root)
            files |= dict.fromkeys(at / name for name in sorted(names) if not name.startswith("."))
    found = {}
    for file in files:
        with reading(root / file):
            found[file] = (root / file).stat()
            if not stat.S_ISREG(found[file].st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            if not os.access(root / file, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return found


def _copy_others(task: _Task, place: Place) -> None:
    for file, size in task.others.items():
        target = place.content / file
        with writing(target, place, size):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(task.checkpoint.root / file, target)  # a cache of the Hub has links, which are followed
            sync(target)


def _raise(error: OSError) -> None:
    raise error


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False
