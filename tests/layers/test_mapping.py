"""Which kernel a mapping gives: devices, capabilities, modes, blocks and threads."""

import json
import sys
import threading
from pathlib import Path

import pytest

from kernel_loader import (
    CapabilityRange,
    CUDAProperties,
    Device,
    KernelizeFallback,
    LayerRepository,
    LockedLayerRepository,
    ManifestError,
    Mode,
    RequestError,
    ROCMProperties,
    register_kernel_mapping,
    use_kernel_mapping,
)
from kernel_loader.errors import LockError, LockMissing
from kernel_loader.layers.mapping import REGISTERED, Found, KernelMapping, current_mapping, read_layers, shipped_mapping
from kernel_loader.lock import Lock

INFER, TRAIN, COMPILE, REST = Mode.INFERENCE, Mode.TRAINING, Mode.TORCH_COMPILE, Mode.FALLBACK


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(REGISTERED, "_mapping", None)


def repo(name):
    return LayerRepository("org/kernel", layer_name=name, version=1)


def chosen(mapping, mode=INFER, kind="cuda", capability=90, name="Layer"):
    found = KernelMapping().extended(mapping).select(name, kind, capability, mode)
    return found.repository.layer_name if isinstance(found, Found) else found.code


# --- modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        (INFER, [INFER, INFER | COMPILE, TRAIN, TRAIN | COMPILE, REST]),
        (TRAIN, [TRAIN, TRAIN | COMPILE, REST]),
        (INFER | COMPILE, [INFER | COMPILE, TRAIN | COMPILE, REST]),
        (TRAIN | COMPILE, [TRAIN | COMPILE, REST]),
    ],
)
def test_modes_are_tried_in_their_order(mode, order):
    assert list(mode.tried) == order
    for length in range(1, len(order) + 1):
        entries = {m: repo(str(m)) for m in order[-length:]}
        assert chosen({"Layer": {"cuda": entries}}, mode) == str(order[-length])
    others = {m: repo("no") for m in [INFER, TRAIN, INFER | COMPILE, TRAIN | COMPILE] if m not in order}
    assert not others or chosen({"Layer": {"cuda": others}}, mode) == "no-mode"


@pytest.mark.parametrize("mode", [INFER | INFER, TRAIN, COMPILE, INFER | COMPILE, TRAIN | COMPILE, REST])
def test_a_mode_is_itself(mode):
    assert mode == (mode | mode)
    assert str(mode)


def test_modes_that_exclude_each_other_are_refused():
    for combine in (
        lambda: INFER | TRAIN,
        lambda: TRAIN | INFER,
        lambda: REST | INFER,
        lambda: COMPILE | REST,
        lambda: INFER | COMPILE | TRAIN,
    ):
        with pytest.raises(RequestError):
            combine()
    for mode in (REST, COMPILE):
        with pytest.raises(RequestError, match="layers are kernelized for INFERENCE or TRAINING"):
            _ = mode.tried


def test_fallbacks_add_up():
    assert KernelizeFallback.ALL == KernelizeFallback.DEFAULT | KernelizeFallback.CANNOT_LOAD
    assert KernelizeFallback.CANNOT_LOAD not in KernelizeFallback.DEFAULT
    assert not KernelizeFallback.NONE


# --- devices ------------------------------------------------------------------------------------------------------


def test_the_smallest_range_that_holds_is_taken():
    mapping = {
        "Layer": {
            "cuda": repo("any"),
            Device("cuda", CUDAProperties(75, 90)): repo("75-90"),
            Device("cuda", CUDAProperties(80, 90)): repo("80-90"),
            Device("cuda", CUDAProperties(100, sys.maxsize)): repo("100-"),
        }
    }
    answers = {capability: chosen(mapping, capability=capability) for capability in (70, 75, 79, 80, 90, 91, 100, 121)}
    assert answers == {
        70: "any", 75: "75-90", 79: "75-90", 80: "80-90", 90: "80-90", 91: "any", 100: "100-", 121: "100-"
    }  # fmt: skip
    assert chosen(mapping, capability=None) == "any"


def test_of_ranges_of_one_width_the_lower_is_taken_whatever_the_order():
    one, two = Device("cuda", CUDAProperties(80, 90)), Device("cuda", CUDAProperties(85, 95))
    for order in ((one, two), (two, one)):
        assert chosen({"Layer": {device: repo(str(device.ends[0])) for device in order}}, capability=88) == "80"


def test_ranges_are_for_any_kind_of_device():
    assert chosen({"Layer": {Device("rocm", ROCMProperties(94, 95)): repo("a")}}, kind="rocm", capability=94) == "a"
    assert chosen({"Layer": {Device("xpu", CapabilityRange(12, 20)): repo("a")}}, kind="xpu", capability=12) == "a"
    assert chosen({"Layer": {Device("cuda", CUDAProperties(75, 80)): repo("a")}}) == "no-properties"
    assert chosen({"Layer": {"xpu": repo("a")}}) == "no-device"
    assert chosen({"Layer": {"xpu": repo("a")}}, name="Other") == "no-layer"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Device("gpu"),
        lambda: Device("cuda", ROCMProperties(90, 94)),
        lambda: Device("xpu", CUDAProperties(90, 94)),
        lambda: CUDAProperties(90, 80),
        lambda: CUDAProperties(-1, 80),
        lambda: CUDAProperties(8.0, 9.0),
        lambda: LayerRepository("org/kernel", layer_name="a"),
        lambda: LayerRepository("org/kernel", layer_name="a", version=1, revision="main"),
        lambda: LayerRepository("org/kernel", layer_name="a", version="1"),
        lambda: LayerRepository("org/kernel", layer_name="", version=1),
        lambda: LayerRepository(5, layer_name="a", version=1),
        lambda: LayerRepository("org/kernel", layer_name="a", version=1, trust_remote_code="all"),
        lambda: LayerRepository("org/kernel", layer_name="a", version=1, trust_remote_code=None),
        lambda: LockedLayerRepository("org/kernel", lockfile="x", layer_name=None),
        lambda: Device("cuda", (80, 90)),
        lambda: Device(["cuda"]),
        lambda: KernelMapping().extended({"Layer": repo("a")}),
        lambda: KernelMapping().extended(None),
        lambda: KernelMapping().extended({"Layer": {"cuda": {COMPILE: repo("a")}}}),
        lambda: KernelMapping().extended({"Layer": {"gpu": repo("a")}}),
        lambda: KernelMapping().extended({"Layer": {"cuda": "org/kernel"}}),
        lambda: KernelMapping().extended({"Layer": {"cuda": {"INFERENCE": repo("a")}}}),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(RequestError):
        make()


def test_repositories_are_values():
    assert repo("a") == repo("a") != repo("b")
    assert len({repo("a"), repo("a"), repo("b")}) == 2
    assert LayerRepository("org/k", layer_name="a", version=1, trust_remote_code=["x/y"]).trust_remote_code == ("x/y",)
    assert str(repo("a")) == "org/kernel@1:a"
    assert str(LayerRepository("activation", layer_name="Silu")) == "activation:Silu"


# --- what is in force -----------------------------------------------------------------------------------------------


def current(name="Layer", kind="cuda"):
    found = current_mapping().select(name, kind, None, INFER)
    return found.repository.layer_name if isinstance(found, Found) else found.code


def test_what_is_registered_adds_to_what_was():
    register_kernel_mapping({"Layer": {"cuda": repo("one")}})
    register_kernel_mapping({"Layer": {"rocm": repo("two")}, "Other": {"cuda": repo("three")}})
    assert (current(), current(kind="rocm"), current("Other")) == ("one", "two", "three")
    register_kernel_mapping({"Layer": {"cuda": repo("four")}})
    assert (current(), current("RMSNorm")) == ("four", "LigerRMSNorm")
    register_kernel_mapping({"Layer": {"cuda": repo("five")}}, inherit_mapping=False)
    assert (current(), current("Other"), current("RMSNorm")) == ("five", "no-layer", "no-layer")


def test_an_entry_for_the_same_range_replaces_all_its_modes():
    register_kernel_mapping({"Layer": {"cuda": {TRAIN: repo("training")}}})
    register_kernel_mapping({"Layer": {"cuda": {INFER: repo("inference")}}})
    assert not isinstance(current_mapping().select("Layer", "cuda", None, TRAIN), Found)


def test_a_block_ends_with_what_was_before():
    register_kernel_mapping({"Layer": {"cuda": repo("outside")}})
    with use_kernel_mapping({"Layer": {"cuda": repo("inside")}, "Other": {"cuda": repo("more")}}):
        assert (current(), current("Other")) == ("inside", "more")
        register_kernel_mapping({"Other": {"cuda": repo("registered inside")}})
        with use_kernel_mapping({}, inherit_mapping=False):
            assert (current(), current("Other")) == ("no-layer", "no-layer")
        assert current("Other") == "registered inside"
    assert (current(), current("Other")) == ("outside", "no-layer")


def test_a_block_that_raises_ends_all_the_same():
    with pytest.raises(ZeroDivisionError), use_kernel_mapping({"Layer": {"cuda": repo("inside")}}):
        _ = 1 / 0
    assert current() == "no-layer"


def test_blocks_that_are_made_first_and_entered_later_stack():
    blocks = [
        use_kernel_mapping({"Layer": {"cuda": repo("one")}}),
        use_kernel_mapping({"Other": {"cuda": repo("two")}}),
    ]
    with blocks[0], blocks[1]:
        assert (current(), current("Other")) == ("one", "two")


def test_threads_see_what_is_registered_and_not_the_blocks_of_others():
    register_kernel_mapping({"Layer": {"cuda": repo("registered")}})
    seen = []

    def look():
        seen.append(current())
        with use_kernel_mapping({"Layer": {"cuda": repo("own")}}):
            seen.append(current())

    with use_kernel_mapping({"Layer": {"cuda": repo("block")}}):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(30)
        assert current() == "block"
    assert seen == ["registered", "own"]


def test_threads_that_register_at_once_lose_nothing():
    start = threading.Barrier(8)

    def register(number):
        start.wait(20)
        for step in range(20):
            register_kernel_mapping({f"Layer{number}-{step}": {"cuda": repo("a")}})

    threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(name.startswith("Layer") for name in current_mapping().layers) == 160


# --- in files -----------------------------------------------------------------------------------------------------


def test_what_ships_says_what_the_facts_say():
    shared = Path(__file__).parents[3] / "shared" / "facts" / "layer-mapping.json"
    if not shared.is_file():
        pytest.skip("the facts are not here")
    facts = json.loads(shared.read_text())
    modes = {
        "INFERENCE": INFER,
        "TRAINING": TRAIN,
        "INFERENCE|TORCH_COMPILE": INFER | COMPILE,
        "TRAINING|TORCH_COMPILE": TRAIN | COMPILE,
        "FALLBACK": REST,
    }
    shipped = shipped_mapping().layers
    assert shipped.keys() == facts.keys()
    for name, devices in facts.items():
        for device, entries in devices.items():
            kind, _, ends = device.partition(" capability ")
            key = tuple(map(int, ends.split(".."))) if ends else CapabilityRange().ends
            found = shipped[name][kind][key]
            assert {mode: r.layer_name for mode, r in found.items()} == {
                modes[m]: e["layer"] for m, e in entries.items()
            }


@pytest.mark.parametrize(
    ("layer", "kind", "mode", "kernel"),
    [
        ("RMSNorm", "cuda", TRAIN, "liger"),
        ("SwiGLUMLP", "cuda", INFER | COMPILE, "liger"),
        ("ForCausalLMLoss", "cuda", TRAIN | COMPILE, "liger"),
        ("MultiScaleDeformableAttention", "cuda", TRAIN, "deformable_detr"),
        ("SiLU", "cuda", INFER | COMPILE, "activation"),
    ],
)
def test_what_ships_names_kernels_that_have_a_reference_with_the_layer(cpu_machine, layer, kind, mode, kernel):
    repository = shipped_mapping().select(layer, kind, None, mode).repository
    assert (repository.repo_id, repository.version) == (kernel, None)
    assert repository.load("cpu").origin.reference


def test_what_ships_takes_no_kernel_without_a_gradient_for_training():
    without = {"activation", "layer_norm", "relu", "rotary"}
    without |= {f"kernels-community/{name.replace('_', '-')}" for name in without}
    for name, devices in shipped_mapping().layers.items():
        for kind, ranges in devices.items():
            for low, _ in ranges:
                for mode in (TRAIN, TRAIN | COMPILE):
                    found = shipped_mapping().select(name, kind, low, mode)
                    assert not isinstance(found, Found) or found.repository.repo_id not in without


def test_a_project_adds_to_what_ships(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.kernel-loader.layers.Mine.cuda]\ninference = { repo = "org/mine", version = 2, layer = "Mine" }\n'
        '[tool.kernel-loader.layers.RMSNorm."cuda 80..90"]\nfallback = { kernel = "rmsnorm", layer = "RMSNorm" }\n'
    )
    monkeypatch.chdir(tmp_path)
    shipped_mapping.cache_clear()
    try:
        mapping = shipped_mapping()
    finally:
        shipped_mapping.cache_clear()
    assert mapping.select("Mine", "cuda", None, INFER).repository == LayerRepository(
        "org/mine", layer_name="Mine", version=2
    )
    assert mapping.select("RMSNorm", "cuda", 85, INFER).repository == LayerRepository("rmsnorm", layer_name="RMSNorm")
    assert mapping.select("RMSNorm", "cuda", 100, INFER).repository.layer_name == "LigerRMSNorm"


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ([], ""),
        ({"Layer": 1}, "Layer"),
        ({"Layer": {"gpu": {}}}, "Layer.gpu"),
        ({"Layer": {"cuda 80": {}}}, "Layer.cuda 80"),
        ({"Layer": {"cuda 90..80": {}}}, "Layer.cuda 90..80"),
        ({"Layer": {"cuda": {"eval": {}}}}, "Layer.cuda.eval"),
        ({"Layer": {"cuda": {"inference": {}}}}, "Layer.cuda.inference"),
        ({"Layer": {"cuda": {"inference": {"layer": "A"}}}}, "Layer.cuda.inference"),
        ({"Layer": {"cuda": {"inference": {"layer": "A", "repo": "org/k"}}}}, "Layer.cuda.inference"),
        (
            {"Layer": {"cuda": {"inference": {"layer": "A", "repo": "org/k", "version": "1"}}}},
            "Layer.cuda.inference.version",
        ),
        ({"Layer": {"cuda": {"inference": {"layer": "A", "kernel": "k", "url": "x"}}}}, "Layer.cuda.inference"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(table, path):
    with pytest.raises(ManifestError) as caught:
        read_layers(table, "pyproject.toml", trusted=False)
    assert caught.value.path == path


# --- lock files -----------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_lock(tmp_path, *entries):
    file = tmp_path / "kernels.lock"
    file.write_text(json.dumps(list(entries)))
    return file


def entry(repo_id="org/kernel", commit=COMMIT):
    return {"dependency": {"repo-id": repo_id, "version": 1}, "lock": {"commit": commit}}


@pytest.mark.parametrize("locked", [entry(), {"repo_id": "org/kernel", "sha": COMMIT, "variants": {}}])
def test_the_commit_is_read_from_a_lock_of_either_form(tmp_path, locked):
    text = write_lock(tmp_path, entry("org/other"), locked).read_bytes()
    assert Lock.parse(text, "kernels.lock").commit("org/kernel") == COMMIT


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([], LockMissing),
        ([entry("org/other")], LockMissing),
        ([entry(), entry()], LockError),
        ([entry(commit="main")], LockError),
        ([{"dependency": {"repo-id": "org/kernel"}}], LockError),
        ([1], LockError),
    ],
)
def test_a_lock_that_does_not_tell_the_commit_is_refused(tmp_path, entries, error):
    locked = LockedLayerRepository("org/kernel", lockfile=write_lock(tmp_path, *entries), layer_name="Layer")
    with pytest.raises(error):
        locked.load()
    for lockfile, message in ((tmp_path / "none", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(LockError, match=message):
            LockedLayerRepository("org/kernel", lockfile=lockfile, layer_name="Layer").load()
    (tmp_path / "kernels.lock").write_text("[{no JSON")
    with pytest.raises(LockError, match="not JSON"):
        locked.load()
