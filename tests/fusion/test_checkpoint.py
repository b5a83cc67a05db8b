"""Checkpoints on disk, converted tensor by tensor: whole or not there, resumed, and within bounds of memory."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kernel_loader.errors import FusionError
from kernel_loader.fusion.checkpoint import convert_checkpoint, plan_checkpoint
from kernel_loader.fusion.converter import WeightConverter, compose
from kernel_loader.fusion.operations import Concatenate, QuantizeBlockFP8, Stack, Transpose
from kernel_loader.fusion.state_dict import convert_state_dict

INDEX = "model.safetensors.index.json"
EXPERTS = [
    WeightConverter(
        ["layers.*.experts.*.w1.weight", "layers.*.experts.*.w3.weight"],
        "layers.*.experts.gate_up",
        [Concatenate(0), Stack(0)],
    ),
    WeightConverter("layers.*.experts.*.w2.weight", "layers.*.experts.down", [Stack(0), Transpose(1, 2)]),
]


def weights(layers=3, experts=4, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    state_dict = {"embed.weight": torch.randn(7, 3, generator=generator)}
    for i in range(layers):
        for j in range(experts):
            for name, shape in (("w1", (6, 4)), ("w2", (4, 6)), ("w3", (6, 4))):
                state_dict[f"layers.{i}.experts.{j}.{name}.weight"] = torch.randn(shape, generator=generator).to(dtype)
        # One byte an element and an odd number of them: what follows would begin at an odd place.
        state_dict[f"layers.{i}.codes"] = torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn)
        state_dict[f"layers.{i}.step"] = torch.tensor(i)
    return state_dict


def save(root: Path, state_dict, files=1):
    """A checkpoint as transformers lays it out; tensors of one group are spread over all files."""
    root.mkdir(parents=True)
    parts = [{} for _ in range(files)]
    for number, (name, tensor) in enumerate(state_dict.items()):
        parts[number % files][name] = tensor
    names = (
        [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)] if files > 1 else ["model.safetensors"]
    )
    for name, part in zip(names, parts, strict=True):
        save_file(part, root / name, {"format": "pt"})
    if files > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (root / INDEX).write_text(json.dumps({"metadata": {"total_size": 1, "by": "me"}, "weight_map": weight_map}))
    (root / "config.json").write_text("{}")
    return root


def load(root: Path):
    """All tensors, read by the package, as a loader of models reads them."""
    if not (root / INDEX).exists():
        return load_file(root / "model.safetensors")
    weight_map = json.loads((root / INDEX).read_text())["weight_map"]
    state_dict = {}
    for file in set(weight_map.values()):
        part = load_file(root / file)
        assert {name for name in weight_map if weight_map[name] == file} == set(part)
        state_dict |= part
    return state_dict


def bits(state_dict):
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in state_dict.items()
    }


def listing(root: Path):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_tensors_that_the_index_does_not_name_are_refused(tmp_path):
    save(tmp_path / "in", weights(layers=1), files=2)
    index = json.loads((tmp_path / "in" / INDEX).read_text())
    file = index["weight_map"].pop("embed.weight")
    (tmp_path / "in" / INDEX).write_text(json.dumps(index))
    with pytest.raises(FusionError, match=f"embed.weight is in {file}, and {INDEX} does not name it"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", EXPERTS)


@pytest.mark.parametrize("stray", ["model.safetensors", "model-00002-of-00007.safetensors", "old.safetensors"])
def test_tensors_beside_a_checkpoint_are_refused_and_never_copied_over_what_is_written(tmp_path, stray):
    save(tmp_path / "in", weights(layers=1), files=3)
    save_file({"embed.weight": torch.zeros(1)}, tmp_path / "in" / stray)
    with pytest.raises(FusionError, match=f"{stray} holds tensors, and is no part of the checkpoint"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", EXPERTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files", [1, 5])
@pytest.mark.parametrize("size", [1, 100, 600, 10**9])
def test_a_checkpoint_is_converted_and_reverted_bit_for_bit(tmp_path, files, size):
    state_dict = weights()
    source = save(tmp_path / "in", state_dict, files)
    done = convert_checkpoint(source, tmp_path / "out", EXPERTS, max_shard_size=size)
    converted = load(tmp_path / "out")
    assert bits(converted) == bits(convert_state_dict(state_dict, EXPERTS))
    assert done.plan.targets.keys() == converted.keys()
    assert done.reused == 0
    back = compose(EXPERTS).inverse()
    convert_checkpoint(tmp_path / "out", tmp_path / "back", back, max_shard_size=size)
    assert bits(load(tmp_path / "back")) == bits(state_dict)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "in", "out"]


def test_shards_are_no_larger_than_asked_for(tmp_path):
    source = save(tmp_path / "in", weights(), 2)
    done = convert_checkpoint(source, tmp_path / "out", EXPERTS, max_shard_size=500)
    assert len(done.shards) > 3
    for name in done.shards:
        assert re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}
        assert sum(sizes) <= 500 or len(sizes) == 1
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in load(tmp_path / "out").values()), "by": "me"}


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path):
    # Readers that map files make views of them, which cannot begin elsewhere.
    state_dict = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    convert_checkpoint(save(tmp_path / "in", state_dict), tmp_path / "out", WeightConverter("a", "d"))
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begins = {name: 8 + length + header[name]["data_offsets"][0] for name in "bcd"}
    assert begins["b"] % 8 == begins["c"] % 4 == 0
    assert sorted(begins, key=begins.get) == ["b", "c", "d"]


def test_other_files_are_copied_and_nothing_hidden(tmp_path):
    source = save(tmp_path / "in", weights(), 3)
    for name in ("tokenizer.json", "assets/a/b.txt", ".git/config", ".gitattributes"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    blob = tmp_path / "blob"
    blob.write_text("linked")
    (source / "chat_template.jinja").symlink_to(blob)
    convert_checkpoint(source, tmp_path / "out", EXPERTS)
    assert listing(tmp_path / "out") == [
        "assets/a/b.txt", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out/assets/a/b.txt").read_text() == "assets/a/b.txt"
    assert not (tmp_path / "out/chat_template.jinja").is_symlink()


def test_links_of_a_cache_are_followed(tmp_path):
    blobs = save(tmp_path / "blobs", weights())
    source = tmp_path / "in"
    source.mkdir()
    (source / "model.safetensors").symlink_to(blobs / "model.safetensors")
    convert_checkpoint(source, tmp_path / "out", EXPERTS)
    assert bits(load(tmp_path / "out")) == bits(convert_state_dict(weights(), EXPERTS))


def test_a_lossy_conversion_is_written_too(tmp_path):
    source = save(tmp_path / "in", {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16)})
    quantize = WeightConverter("*.weight", ["*.weight", "*.weight_scale_inv"], [QuantizeBlockFP8((2, 2))])
    assert not convert_checkpoint(source, tmp_path / "out", quantize).plan.exact
    assert load(tmp_path / "out")["a.weight_scale_inv"].tolist() == [[torch.tensor(1 / 448).item()] * 2] * 2


def test_tensors_without_elements_and_an_empty_checkpoint_are_written(tmp_path):
    source = save(tmp_path / "in", {"a": torch.zeros(0, 3), "b": torch.zeros(0)})
    convert_checkpoint(source, tmp_path / "out", WeightConverter("a", "c"))
    assert bits(load(tmp_path / "out")) == bits({"c": torch.zeros(0, 3), "b": torch.zeros(0)})
    convert_checkpoint(save(tmp_path / "none", {}), tmp_path / "nothing", [])
    assert load(tmp_path / "nothing") == {}


def test_progress_is_told_in_bytes(tmp_path):
    told = []
    convert_checkpoint(
        save(tmp_path / "in", weights()), tmp_path / "out", EXPERTS, watch=lambda *numbers: told.append(numbers)
    )
    total = sum(tensor.nbytes for tensor in weights().values())
    assert told[-1] == (total, total)
    assert told == sorted(told)


# --- interrupted ----------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from kernel_loader.fusion.checkpoint import convert_checkpoint
from tests.fusion.test_checkpoint import EXPERTS

count, source, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
told = 0

def watch(done, total):
    global told
    told += 1
    if told == count:
        os.kill(os.getpid(), signal.SIGKILL)

print(convert_checkpoint(source, out, EXPERTS, max_shard_size=400, watch=watch).reused)
"""


def killed_after(count, source, out):
    """Convert in a process that is killed when so many tensors are written."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CHILD, str(count), str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_killed_conversion_goes_on_where_it_was(tmp_path):
    source, out, private = save(tmp_path / "in", weights(), 3), tmp_path / "out", tmp_path / ".out.partial"
    total = len(convert_state_dict(weights(), EXPERTS))
    moments = sorted(random.Random(0).sample(range(2, total), 2))
    for moment in moments:
        done = killed_after(moment, source, out)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not out.exists()
        assert private.is_dir()
    finished = set((private / "content").iterdir())
    inodes = {path.name: path.stat().st_ino for path in finished}
    assert finished
    done = convert_checkpoint(source, out, EXPERTS, max_shard_size=400)
    assert done.reused == len(finished)
    assert {name: (out / name).stat().st_ino for name in inodes} == inodes
    assert bits(load(out)) == bits(convert_state_dict(weights(), EXPERTS))
    assert not private.exists()


class StoppedError(Exception):
    pass


def stop_after(source, out, count, converters=EXPERTS, size=400):
    """Convert until so many tensors are written."""

    def watch(done, total):
        nonlocal count
        count -= 1
        if not count:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert_checkpoint(source, out, converters, max_shard_size=size, watch=watch)


def test_the_right_shards_are_reused_wherever_it_stopped(tmp_path):
    source, expected = save(tmp_path / "in", weights(), 3), bits(convert_state_dict(weights(), EXPERTS))
    for count in range(1, len(expected) + 1):
        out = tmp_path / f"out{count}"
        stop_after(source, out, count)
        convert_checkpoint(source, out, EXPERTS, max_shard_size=400)
        assert bits(load(out)) == expected


@pytest.mark.parametrize("change", ["source", "other file", "index", "converters", "size", "journal", "shard"])
def test_nothing_is_reused_after_a_change(tmp_path, change):
    source, out = save(tmp_path / "in", weights(), 3), tmp_path / "out"
    stop_after(source, out, 9)
    private, converters, size = tmp_path / ".out.partial", EXPERTS, 400
    shards = sorted((private / "content").iterdir())
    assert shards
    if change == "source":
        (tmp_path / "in").rename(tmp_path / "before")
        other = {name: tensor.clone() for name, tensor in weights().items()}
        other["embed.weight"].zero_()
        source = save(tmp_path / "in", other, 3)
    elif change == "other file":
        (source / "config.json").write_text('{"a": 1}')
    elif change == "index":  # the same files, and their tensors in another order
        index = json.loads((source / INDEX).read_text())
        index["weight_map"] = dict(sorted(index["weight_map"].items(), key=lambda item: item[1]))
        (source / INDEX).write_text(json.dumps(index))
    elif change == "converters":
        converters = EXPERTS[:1]
    elif change == "size":
        size = 401
    elif change == "journal":
        (private / "journal.json").write_text("{")
    else:
        shards[0].write_bytes(shards[0].read_bytes()[:-1])
    done = convert_checkpoint(source, out, converters, max_shard_size=size)
    assert done.reused == (len(shards) - 1 if change == "shard" else 0)
    assert bits(load(out)) == bits(convert_state_dict(load(source), converters))
    assert set(listing(out)) == {*done.shards, INDEX, "config.json"}


def test_a_source_that_changes_meanwhile_is_not_published(tmp_path):
    source, out = save(tmp_path / "in", weights(), 3), tmp_path / "out"
    with pytest.raises(FusionError, match="changed while they were converted"):
        convert_checkpoint(source, out, EXPERTS, watch=lambda *_: (source / "config.json").write_text("{ }"))
    assert not out.exists()


# --- files that cannot be written -----------------------------------------------------------------------------------

FLOATS = {"a": torch.zeros(10_000), "b": torch.ones(50_000), "c": torch.ones(50_000)}
RENAME = WeightConverter("*", "m.*")
RENAMED = {f"m.{name}": tensor for name, tensor in FLOATS.items()}


def mounted(place: Path, options: str):
    """A file system in memory; gone at the end of the test."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if not sys.platform.startswith("linux") or subprocess.run(command, check=False, timeout=30).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    return place


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    yield mounted(tmp_path / "small", "size=1m")
    subprocess.run(["umount", "--lazy", str(tmp_path / "small")], check=True, timeout=30)


def fill(disk: Path, but: int):
    """Leave so many bytes free, to a page."""
    (disk / "filler").unlink(missing_ok=True)
    (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - but))


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, small_disk):
    source = save(tmp_path / "in", FLOATS)
    convert_checkpoint(source, tmp_path / "elsewhere", RENAME, max_shard_size=1)
    size = sum(file.stat().st_size for file in (tmp_path / "elsewhere").iterdir())
    fill(small_disk, 409_600)
    out = small_disk / "out"
    refused(
        f"{out} cannot be written: {size:,} bytes more are wanted, 409,600 are free there. "
        "Make room there, or give a directory on another disk.",
        source, out, RENAME, max_shard_size=1,
    )  # fmt: skip
    assert [file.name for file in small_disk.iterdir()] == ["filler"]
    fill(small_disk, 491_520)
    convert_checkpoint(source, out, RENAME, max_shard_size=1)


@pytest.mark.parametrize("leftover", ["model-00003-of-00003.safetensors", "content/model-00003-of-00003.safetensors"])
def test_what_is_there_of_an_earlier_attempt_needs_no_room_again(tmp_path, small_disk, leftover):
    source, out, private = save(tmp_path / "in", FLOATS), small_disk / "out", small_disk / ".out.partial"
    stop_after(source, out, 2, RENAME, 1)  # in the second shard, with the first one finished
    (private / leftover).write_bytes(b"x" * 300_000)
    fill(small_disk, 131_072)
    plan_checkpoint(source, RENAME, out, max_shard_size=1)
    assert (private / leftover).stat().st_size == 300_000
    assert convert_checkpoint(source, out, RENAME, max_shard_size=1).reused == 1
    assert bits(load(out)) == bits(RENAMED)
    assert sorted(file.name for file in small_disk.iterdir()) == ["filler", "out"]


def test_a_disk_that_becomes_full_is_told_with_the_file_and_what_is_missing(tmp_path, small_disk):
    source, out, private = save(tmp_path / "in", FLOATS), small_disk / "out", small_disk / ".out.partial"
    size = len((source / "model.safetensors").read_bytes())

    def watch(done, total):
        if not (small_disk / "filler").exists():
            fill(small_disk, 90_112)

    with pytest.raises(FusionError) as caught:
        convert_checkpoint(source, out, RENAME, max_shard_size=1, watch=watch)
    assert isinstance(caught.value.__cause__, OSError)
    found = re.fullmatch(
        rf"{re.escape(str(private))}/model-00002-of-00003.safetensors cannot be written "
        r"\(No space left on device: (\S+) bytes wanted, (\S+) free\). Make room there. Then the same command goes on "
        rf"where it stopped: what is finished is kept in {re.escape(str(private))}.",
        str(caught.value),
    )
    wanted, free = (int(number.replace(",", "")) for number in found.groups())
    assert 20_000 < free < 4 * 50_000 < wanted < size
    assert free == shutil.disk_usage(small_disk).free  # nothing unfinished takes any of it
    assert not out.exists()
    (small_disk / "filler").unlink()
    assert convert_checkpoint(source, out, RENAME, max_shard_size=1).reused == 1
    assert bits(load(out)) == bits(RENAMED)


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of files")
def test_a_limit_of_files_is_told_and_keeps_what_is_finished(tmp_path):
    import resource

    source, out = save(tmp_path / "in", FLOATS), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        error = refused("model-00002-of-00003.safetensors cannot be written", source, out, RENAME, max_shard_size=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.__cause__.errno == errno.EFBIG
    assert "bytes wanted" in error.problem
    assert "--max-shard-size" in error.remedy
    assert "ulimit -f" in error.remedy
    assert not out.exists()
    assert convert_checkpoint(source, out, RENAME, max_shard_size=1).reused == 1


CODES = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.EFBIG, errno.EPERM]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_whatever_fails_is_told_with_its_file_and_the_next_call_goes_on(tmp_path, monkeypatch, code, call):
    source, calls = save(tmp_path / "in", FLOATS), 0
    original = getattr(os, call)

    def failing(*arguments, **options):
        nonlocal left, calls
        calls += 1
        left -= 1
        if left == 0:
            raise OSError(code, os.strerror(code))
        return original(*arguments, **options)

    monkeypatch.setattr(os, call, failing)
    left = 0
    convert_checkpoint(source, tmp_path / "whole", RENAME, max_shard_size=1)
    count = calls
    assert count > 5
    for moment in range(1, count + 1):
        out, left = tmp_path / f"out{moment}", moment
        error = refused(f"({os.strerror(code)}", source, out, RENAME, max_shard_size=1)
        assert error.__cause__.errno == code
        assert re.match(rf"{re.escape(str(tmp_path))}/\.?out{moment}\b", error.problem)
        if moment < count or call == "replace":
            assert "cannot be written" in error.problem
            assert f"same command goes on where it stopped: what is finished is kept in {tmp_path}/." in error.remedy
            convert_checkpoint(source, out, RENAME, max_shard_size=1)
        else:
            assert "is whole, and the disk does not take its name for good" in error.problem
        assert bits(load(out)) == bits(RENAMED)


def test_what_the_watcher_raises_is_not_taken_for_an_error_of_a_file(tmp_path):
    def watch(*_):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        convert_checkpoint(save(tmp_path / "in", FLOATS), tmp_path / "out", RENAME, watch=watch)


def test_two_processes_do_not_convert_into_one_directory(tmp_path):
    source, out = save(tmp_path / "in", weights(), 3), tmp_path / "out"

    def watch(*_):
        for convert in (convert_checkpoint, lambda source, out, by: plan_checkpoint(source, by, out)):
            with pytest.raises(FusionError, match=f"another process is converting into {re.escape(str(out))}"):
                convert(source, out, EXPERTS)

    convert_checkpoint(source, out, EXPERTS, watch=watch)
    assert bits(load(out)) == bits(convert_state_dict(weights(), EXPERTS))


# --- memory ---------------------------------------------------------------------------------------------------------

BOUNDED = """
import resource, sys
from pathlib import Path
import filelock, safetensors, torch
from kernel_loader.fusion.checkpoint import convert_checkpoint
from kernel_loader.fusion.converter import WeightConverter
from kernel_loader.fusion.operations import Concatenate, Stack

source, out, group = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
converter = WeightConverter(["layers.*.*.a", "layers.*.*.b"], "layers.*.ab", [Concatenate(0), Stack(0)])
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
# The file that a group is in is mapped, which counts as data. Then there is what the group is made into on the way, and
# what it becomes; the margin is less than half of either.
limit = int(line.split()[1]) * 1024 + 3 * group + group // 3
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
convert_checkpoint(source, out, converter, max_shard_size=100 * group)
try:
    torch.zeros(4 * group, dtype=torch.uint8)
except RuntimeError:
    print("done, and bound")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts on Linux alone")
def test_memory_is_bounded_by_one_group(tmp_path):
    layers, members, shape = 8, 4, (2048, 512)
    group = members * 2 * 4 * shape[0] * shape[1]
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    weight_map = {}
    for layer in range(layers):
        names = [f"layers.{layer}.{member}.{kind}" for member in range(members) for kind in "ab"]
        save_file({name: torch.full(shape, float(layer)) for name in names}, source / f"{layer}.safetensors")
        weight_map |= dict.fromkeys(names, f"{layer}.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, "-c", BOUNDED, str(source), str(out), str(group)]
    # Memory goes back when it is freed: otherwise glibc keeps what it may need again.
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert done.stdout == "done, and bound\n", done.stderr
    # All of it is in one file: neither that nor the model was ever in memory.
    assert (out / "model.safetensors").stat().st_size > layers * group
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.get_tensor(f"layers.{layers - 1}.ab").eq(layers - 1).all()


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(message, source, out, converters=EXPERTS, **options):
    with pytest.raises(FusionError, match=re.escape(message)) as caught:
        convert_checkpoint(source, out, converters, **options)
    return caught.value


def test_an_empty_directory_is_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    convert_checkpoint(save(tmp_path / "in", weights()), tmp_path / "out", EXPERTS)
    assert bits(load(tmp_path / "out")) == bits(convert_state_dict(weights(), EXPERTS))


# What is done before, with the source and the place; arguments; what is said.
REFUSED = {
    "a directory": (lambda _, out: (out / "a").mkdir(parents=True), {}, "{out} is there already. Give another"),
    "a file": (lambda _, out: out.touch(), {}, "{out} is there already"),
    "a link": (lambda _, out: out.symlink_to(out.parent), {}, "{out} is there already"),
    "a link to nowhere": (lambda _, out: out.symlink_to(out), {}, "{out} is there already"),
    "the source": (None, {"out": "in"}, "in lies in"),
    "within the source": (None, {"out": "in/out"}, "in/out lies in"),
    "below a file": (lambda _, out: out.parent.touch(), {"out": "f/out"}, "cannot be written (Not a directory)"),
    "a file in the way": (
        lambda _, out: out.with_name(".out.partial").touch(), {}, ".out.partial cannot be written (Not a directory)"
    ),
    "a long name": (None, {"out": "o" * 250}, "cannot be written (File name too long). Give another directory."),
    "no size": (None, {"max_shard_size": 0}, "max_shard_size: expected a positive number of bytes, got 0"),
    "a size in words": (None, {"max_shard_size": "5GB"}, "expected a positive number of bytes, got '5GB'"),
    "true": (None, {"max_shard_size": True}, "max_shard_size: expected a positive number of bytes, got True"),
    "no checkpoint": (
        lambda source, _: [file.unlink() for file in source.iterdir()], {}, f"in has neither {INDEX} nor model.saf"
    ),
    "a plan with a problem": (None, {"converters": RENAME.below("x")}, "x.*: matches none of"),
    "a link to nothing": (
        lambda source, _: (source / "a").symlink_to(source / "b"), {}, "in/a cannot be read (No such file or directory)"
    ),
    "a pipe": (lambda source, _: os.mkfifo(source / "a"), {}, "in/a cannot be read (it is no file)"),
}  # fmt: skip


def both_refuse(message, source, out, converters=EXPERTS, **options):
    """The conversion and its plan say the same, and nothing is written."""
    before = sorted(source.parent.rglob("*"))
    error = refused(message, source, out, converters, **options)
    with pytest.raises(FusionError) as caught:
        plan_checkpoint(source, converters, out, **options)
    assert str(caught.value) == str(error)
    assert sorted(source.parent.rglob("*")) == before
    return error


@pytest.mark.skipif(sys.platform == "win32", reason="has other links, pipes and messages")
@pytest.mark.parametrize(("before", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(tmp_path, before, options, message):
    source, options = save(tmp_path / "in", weights(), 3), dict(options)
    out = tmp_path / options.pop("out", "out")
    if before:
        before(source, out)
    both_refuse(message.format(out=out), source, out, **options)


def test_a_plan_refuses_what_the_machine_does_not_allow(tmp_path, small_disk):
    source = save(tmp_path / "in", weights() | {"large": torch.zeros(300_000)}, 3)
    both_refuse(f"{small_disk} is where a disk is mounted", source, small_disk)
    both_refuse("bytes more are wanted", source, small_disk / "out")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=30)
    both_refuse(f"nothing can be written in {small_disk}", source, small_disk / "out")


INDICES = {
    "{": "is no JSON (Expecting property name",
    "": "is no JSON (Expecting value",
    "[" * 100_000: "is no JSON (",
    "[]": "expected an object with a weight_map, got []",
    "null": "expected an object with a weight_map, got null",
    "{}": "expected a weight_map from tensors to files, got none",
    '{"weight_map": 3}': "expected a weight_map from tensors to files, got 3",
    '{"weight_map": {}}': "expected a weight_map from tensors to files, got {}",
    '{"weight_map": ["a"]}': 'expected a weight_map from tensors to files, got ["a"]',
    **{
        json.dumps({"weight_map": {"a.b": file}}): "expected for a.b the name of a file beside the index, got " + shown
        for file, shown in {
            1: "1", None: "null", "../b": '"../b"', "c/../../b": '"c/../../b"', "/b": '"/b"', "": '""', ".": '"."',
            "..": '".."', "b\0": '"b\\u0000"', "\ud800": '"\\ud800"', "b" * 70 + "\n": '"' + "b" * 59 + "...",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), INDICES.items(), ids=range(len(INDICES)))
def test_an_index_that_is_none_is_refused(tmp_path, text, message):
    source = save(tmp_path / "in", weights(), 3)
    (source / INDEX).write_text(text)
    error = both_refuse(message, source, tmp_path / "out")
    assert error.problem.startswith(f"{source / INDEX}")
    assert error.remedy == "Bring the index here again; where model.safetensors holds all tensors, remove it."


def test_damaged_and_missing_shards_are_refused(tmp_path):
    source = save(tmp_path / "in", weights(), 3)
    first = source / "model-00001-of-00003.safetensors"
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    refused(f"{first} cannot be read", source, tmp_path / "out")
    first.unlink()
    refused(f"{first} cannot be read", source, tmp_path / "out")
    save_file({"embed.weight": torch.zeros(1)}, first)
    error = refused("is not in model-00001-of-00003.safetensors, where", source, tmp_path / "out")
    assert len(error.problems) > 5


def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"12")
    refused("a in model.safetensors has dtype F4, which is not known here", root, tmp_path / "out", [])


def test_problems_of_the_plan_are_told_before_anything_is_written(tmp_path):
    state_dict = weights()
    del state_dict["layers.1.experts.2.w3.weight"]
    source = save(tmp_path / "in", state_dict, 3)
    refused("layers.1.experts.2.w3.weight is not there", source, tmp_path / "out")
    with pytest.raises(FusionError, match=re.escape("layers.1.experts.2.w3.weight is not there")):
        plan_checkpoint(source, EXPERTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_without_safetensors_the_error_says_what_to_install(tmp_path):
    source = save(tmp_path / "in", weights())
    script = f"""
import sys
sys.modules["safetensors"] = None
from pathlib import Path
from kernel_loader.fusion.checkpoint import plan_checkpoint
try:
    plan_checkpoint(Path({str(source)!r}), [])
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (
        "FusionError checkpoints are read with the package safetensors, which is not installed. "
        "Install it: pip install safetensors\n"
    )
