"""From a machine with a network to one without: what is exported here decides and loads there as it does here."""

import dataclasses
import json
import os
import subprocess
import sys
import zipfile

import pytest

import kernel_loader
from kernel_loader.carry.contents import Bundle
from kernel_loader.errors import (
    BundleError,
    IntegrityError,
    LockMismatch,
    LockMissing,
    NoCompatibleBuild,
    NotCached,
    RequestError,
    TrustError,
)
from kernel_loader.host import HostDevice
from kernel_loader.loader import KernelLoader
from kernel_loader.lock import Lock
from kernel_loader.sources import LocalDirectories
from kernel_loader.testing import Fault
from tests.builds import CPU_HOST, H200, write_build, write_manifest
from tests.published.conftest import REPO, files
from tests.published.test_prefetch import NO_TORCH, depends

SECOND = "else/second"
MI300 = dataclasses.replace(
    H200, torch="2.11.0+rocm7.0", cuda=None, rocm="7.0", driver=None, devices=(HostDevice("gfx942"),)
)


@pytest.fixture
def carry(site):
    """Exports from a laptop, and imports on the sealed machine."""

    def carry(kernels, *, hosts=CPU_HOST, **more):
        laptop, file = site.loader(cache=site.root / "laptop"), site.root / "kernels.klb"
        bundle = laptop.export(kernels, file, hosts=hosts, **more)
        site.loader(cache=site.root / "sealed", offline=True).import_bundle(file)
        return bundle

    return carry


@pytest.fixture
def decides_alike(site, sealed):
    """Holds a host there against the same host here; gives what is chosen there."""

    def decides_alike(kernel, host=CPU_HOST):
        here = site.loader(host, cache=site.root / "laptop").resolve(kernel).to_json()
        there = sealed(host).resolve(kernel)
        assert there.to_json() == here
        assert len(site.hub.requests) == 0
        return there

    return decides_alike


def carried(bundle):
    return {(one.repo, one.revision): set(one.builds) for one in bundle.repositories}


# --- what is carried ----------------------------------------------------------------------------------------------


def test_what_was_exported_loads_without_a_request(site, sealed, carry):
    bundle = carry("kernel")
    assert carried(bundle) == {(REPO, "v1"): {"torch-universal"}}
    loaded = sealed().load("kernel")
    assert loaded.double(21) == 42
    assert kernel_loader.origin(loaded).path.is_relative_to(site.root / "sealed")
    assert len(site.hub.requests) == 0


def test_a_machine_that_is_not_offline_asks_nobody_either_on_the_first_day(site, sealed, carry):
    carry("kernel")
    assert sealed(offline=False).load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


def test_metadata_with_line_ends_of_windows_is_carried_as_it_is(site, sealed, carry):
    build = files()
    build["build/torch-universal/metadata.json"] = b'{\r\n"version": 1\r\n}\r\n'
    site.publish(build)
    carry("kernel")
    assert sealed().load("kernel").double(21) == 42


def test_a_build_without_metadata_is_carried(site, sealed, carry):
    build = files()
    del build["build/torch-universal/metadata.json"]
    site.publish(build)
    carry("kernel")
    assert sealed().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


def test_what_a_kernel_depends_on_is_carried_with_it(site, sealed, carry):
    site.publish(depends(("org/second", 2)))
    site.hub.kernel("org/second").commit(depends(("org/third", 1)), branch="v2")
    site.hub.kernel("org/third").commit(files(4), branch="v1")
    site.hub.publisher("org", trusted=True)
    bundle = carry("kernel")
    assert carried(bundle).keys() == {(REPO, "v1"), ("org/second", "v2"), ("org/third", "v1")}
    assert bundle.publishers == ("org",)
    assert sealed().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


def second(site, **of_first):
    """A second repository of the kernel; the builds of the first are rejected there, by name or by metadata."""
    first = files(3, variant="torch-cpu") | files(3, variant="torch-cuda", value=5)
    first["build/torch-cpu/metadata.json"] = json.dumps({"version": 1} | of_first).encode()
    site.publish(first)
    site.hub.kernel(SECOND).commit(files(), branch="v3")
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(f'{manifest.read_text()}[[alternatives]]\nrepo = "{SECOND}"\nversion = 3\n')


def test_a_repository_that_is_passed_over_is_passed_over_there(site, sealed, carry, decides_alike):
    second(site, **{"python-depends": ["surely-not-here>=3"]})
    bundle = carry("kernel", hosts=[dataclasses.replace(CPU_HOST, packages={})])
    assert carried(bundle) == {(REPO, "v1"): set(), (SECOND, "v3"): {"torch-universal"}}
    assert bundle.repositories[1].metadata.keys() == {"torch-cpu"}
    host = dataclasses.replace(CPU_HOST, packages={})
    found = decides_alike("kernel", host)
    assert found.chosen is None
    assert found.alternatives[0].chosen.name == "torch-universal"
    assert kernel_loader.origin(sealed(host).load("kernel")).repo == SECOND
    # A host that the first would have served does not get what was chosen for another.
    able = dataclasses.replace(CPU_HOST, packages={"surely-not-here": "3.1"})
    with pytest.raises(NotCached, match=REPO):
        sealed(able).load("kernel")


def test_each_host_has_its_build(site, sealed, carry, decides_alike):
    site.publish(
        files(variant="torch-cuda", value=3) | files(variant="torch-cpu") | files(variant="torch-rocm", value=7)
    )
    bundle = carry(["kernel"], hosts=[H200, CPU_HOST, H200])
    assert carried(bundle) == {(REPO, "v1"): {"torch-cuda", "torch-cpu"}}
    for host, value in ((H200, 3), (CPU_HOST, 1)):
        decides_alike("kernel", host)
        assert sealed(host).load("kernel").value == value
    with pytest.raises(NotCached):
        sealed(MI300).load("kernel")


def test_all_variants_serve_every_host(site, sealed, carry, decides_alike):
    site.publish(
        files(variant="torch-cuda", value=3) | files(variant="torch-cpu") | files(variant="torch-rocm", value=7)
    )
    assert carried(carry("kernel", all_variants=True)) == {(REPO, "v1"): {"torch-cuda", "torch-cpu", "torch-rocm"}}
    for host, value in ((H200, 3), (CPU_HOST, 1), (MI300, 7)):
        decides_alike("kernel", host)
        assert sealed(host).load("kernel").value == value


def with_reference(site, name="kernel", **keys):
    """Register a kernel that has a reference beside its manifest."""
    write_manifest(site.manifests, name, reference=name, entrypoints={"double": "double"}, **keys)
    write_build(site.manifests / "registry" / name, "torch-universal")


@pytest.mark.parametrize("of_build", [{"variant": "torch-cuda"}, {"variant": "torch-cpu", "needs": "surely-not-here"}])
def test_where_nothing_fits_the_reference_is_chosen_there_too(site, sealed, carry, decides_alike, of_build):
    build = files(3, variant=of_build["variant"])
    if "needs" in of_build:
        build["build/torch-cpu/metadata.json"] = json.dumps({"python-depends": [of_build["needs"]]}).encode()
    site.publish(build)
    with_reference(site)
    host = dataclasses.replace(CPU_HOST, packages={})
    bundle = carry("kernel", hosts=host)
    assert (carried(bundle), bundle.files) == ({(REPO, "v1"): set()}, {})
    assert decides_alike("kernel", host).is_reference
    assert kernel_loader.origin(sealed(host).load("kernel")).reference
    with pytest.raises(NoCompatibleBuild):
        sealed(host).load("kernel", fallback="error")
    assert len(site.hub.requests) == 0


def test_a_kernel_whose_backends_exclude_the_host_asks_nobody_and_carries_nothing(site, sealed, carry):
    with_reference(site, backends=["cuda"])
    site.hub.requests.clear()
    assert carry("kernel") == Bundle((), {})
    assert sealed().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


# --- capabilities -------------------------------------------------------------------------------------------------


@pytest.fixture
def shop(site):
    """Kernels that offer to double, in an order."""

    def offering(name, variant, features=(), *, reference=False):
        if reference:
            with_reference(site, name, capabilities={"doubling": list(features)})
        else:
            write_manifest(
                site.manifests, name, entrypoints={"double": "double"}, capabilities={"doubling": list(features)}
            )
        site.hub.kernel(f"org/{name}").commit(files(3, variant=variant), branch="v1")

    listed = '[doubling]\nsummary = "Doubles"\nentrypoints = ["double"]\norder = ["first", "second", "third"]\n'
    (site.manifests / "capabilities.toml").write_text(f'{listed}[doubling.features]\nodd = "odd numbers too"\n')
    return offering


def test_a_capability_is_served_there_by_the_kernel_that_serves_it_here(site, sealed, carry, decides_alike, shop):
    shop("first", "torch-cuda", ["odd"])
    shop("second", "torch-universal")
    shop("third", "torch-universal", ["odd"])
    bundle = carry(["doubling", "doubling[odd]"])
    assert carried(bundle) == {
        ("org/first", "v1"): set(), ("org/second", "v1"): {"torch-universal"}, ("org/third", "v1"): {"torch-universal"},
    }  # fmt: skip
    for asked, kernel in (("doubling", "second"), ("doubling[odd]", "third")):
        assert decides_alike(asked).kernel == kernel
        assert kernel_loader.origin(sealed().load(asked)).kernel == kernel
    assert len(site.hub.requests) == 0


def test_a_capability_that_only_references_serve_is_served_there(site, sealed, carry, decides_alike, shop):
    shop("first", "torch-cuda", reference=True)
    shop("second", "torch-rocm", reference=True)
    shop("third", "torch-cuda")
    assert carried(carry("doubling")) == {(f"org/{name}", "v1"): set() for name in ("first", "second", "third")}
    assert decides_alike("doubling").kernel == "first"
    assert kernel_loader.origin(sealed().load("doubling")).reference


# --- whose code may run -------------------------------------------------------------------------------------------


def test_that_a_publisher_is_trusted_travels(site, sealed, carry):
    site.hub.publisher("org", trusted=True)
    assert carry(f"{REPO}@1").publishers == ("org",)
    assert sealed().load_module(REPO, version=1).double(21) == 42
    assert len(site.hub.requests) == 0


def test_a_strangers_repository_is_refused_here_and_needs_the_users_word_there_too(site, sealed, carry):
    with pytest.raises(TrustError):
        carry(f"{REPO}@1")
    assert not (site.root / "kernels.klb").exists()
    assert carry(f"{REPO}@1", trust_remote_code=True).publishers == ()
    with pytest.raises(TrustError):
        sealed().load_module(REPO, version=1)
    assert sealed().load_module(REPO, version=1, trust_remote_code=True).double(21) == 42


def test_a_named_kernel_makes_nobody_trusted(site, sealed, carry):
    site.hub.publisher("org", trusted=True)
    site.loader(cache=site.root / "laptop").load_module(REPO, version=1)
    assert carry("kernel").publishers == ()
    with pytest.raises(TrustError):
        sealed().load_module(REPO, version=1)


# --- what is not exported -----------------------------------------------------------------------------------------


def test_a_directory_of_this_machine_is_not_exported(site):
    write_build(site.root / "mine", "torch-universal")
    loader = site.loader(local={REPO: site.root / "mine"})
    with pytest.raises(RequestError, match=f"{REPO} is from a directory of this machine") as raised:
        loader.export("kernel", site.root / "kernels.klb")
    assert "KERNEL_LOADER_LOCAL" in raised.value.remedy
    assert not (site.root / "kernels.klb").exists()


def test_nor_is_a_choice_that_a_directory_of_this_machine_took_part_in(site):
    second(site)
    write_build(site.root / "mine", "torch-cuda")
    with pytest.raises(RequestError, match=f"{REPO} is from a directory of this machine"):
        site.loader(local={REPO: site.root / "mine"}).export("kernel", site.root / "kernels.klb")


def test_nor_what_comes_from_a_source_of_the_callers_own(site):
    class Mine(LocalDirectories):
        is_local = False

    write_build(site.root / "mine", "torch-universal")
    settings = site.loader().settings
    loader = KernelLoader(settings, CPU_HOST, sources=[Mine({REPO: site.root / "mine"}, "mine")])
    with pytest.raises(RequestError, match=f"{REPO} is from the source 'mine'"):
        loader.export("kernel", site.root / "kernels.klb")


def test_a_build_that_has_changed_on_disk_is_not_exported_though_its_receipt_holds(site):
    file = site.root / "kernels.klb"
    site.loader().export("kernel", file)
    before = file.read_bytes()
    part = site.build() / "part3.py"
    status = part.stat()
    part.write_bytes(part.read_bytes().replace(b"3", b"4"))
    os.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(IntegrityError) as raised:
        site.loader().export("kernel", file)
    assert "kernel-loader verify" in raised.value.remedy
    assert file.read_bytes() == before


def test_a_repository_that_moves_meanwhile_is_told(site):
    site.publish(files(variant="torch-cuda") | files(variant="torch-cpu"))
    moved = files(variant="torch-cuda", value=3) | files(variant="torch-cpu", value=3)
    site.hub.fault(Fault(route="info", after=1, first=1, run=lambda _: site.publish(moved)))
    with pytest.raises(RequestError, match="has moved from") as raised:
        site.loader(refresh_after=0).export("kernel", site.root / "kernels.klb", hosts=[H200, CPU_HOST])
    assert "Export again" in raised.value.remedy
    assert not (site.root / "kernels.klb").exists()
    site.loader(refresh_after=0).export("kernel", site.root / "kernels.klb", hosts=[H200, CPU_HOST])


# --- equal bytes --------------------------------------------------------------------------------------------------


def test_equal_builds_give_equal_bytes_whatever_came_before(site):
    site.publish(files(variant="torch-cuda", value=3) | files(variant="torch-cpu"))
    site.hub.kernel("org/other").commit(files(5), branch="v2")
    site.hub.publisher("org", trusted=True)
    one, other = site.root / "one.klb", site.root / "other.klb"
    site.loader(cache=site.root / "a").export(["kernel", "org/other@2"], one, hosts=[H200, CPU_HOST])
    # Another store has seen more, in another order.
    busy = site.loader(cache=site.root / "b")
    busy.prefetch(["org/other@2", "kernel"], hosts=[CPU_HOST, H200], all_variants=True)
    busy.load_module("org/other", version=2)
    busy.export(["org/other@2", "kernel", "kernel"], other, hosts=[CPU_HOST, H200, CPU_HOST])
    assert one.read_bytes() == other.read_bytes()
    twice = site.loader(cache=site.root / "a").export(["kernel", "org/other@2"], other, hosts=[H200, CPU_HOST])
    assert one.read_bytes() == other.read_bytes()
    with zipfile.ZipFile(other) as archive:
        assert archive.read("bundle.json").decode() == twice.to_json()


@pytest.mark.parametrize("how", ["by word", "by a lock"])
def test_what_the_hub_once_said_of_a_publisher_is_no_part_of_what_the_users_word_lets_pass(site, how):
    site.hub.publisher("org", trusted=True)
    asked = f"{REPO}@1"
    lock = site.loader(cache=site.root / "locker").make_lock([asked]) if how == "by a lock" else None
    site.loader(cache=site.root / "b").load_module(REPO, version=1)  # the Hub is asked, and remembered
    written = set()
    for store in ("a", "b"):
        file = site.root / f"{store}.klb"
        loader = KernelLoader(site.loader(cache=site.root / store).settings, CPU_HOST, lock=lock)
        assert loader.export(asked, file, trust_remote_code=lock is None).publishers == ()
        written.add(file.read_bytes())
    assert len(written) == 1


EXPORT = """
import os, sys
os.umask(int(sys.argv[1], 8))
sys.argv = ["kernel-loader", "export", *sys.argv[2:]]
from kernel_loader.cli import main
main()
"""


def test_equal_builds_give_equal_bytes_wherever_they_are_exported(site):
    site.publish(files(variant="torch-cuda", value=3) | files(variant="torch-cpu"))
    (site.root / "h200.json").write_text(H200.to_json())
    (site.root / "cpu.json").write_text(CPU_HOST.to_json())
    hosts = [str(site.root / "h200.json"), str(site.root / "cpu.json")]
    written = set()
    for number, (umask, zone, seed) in enumerate(
        [("022", "UTC", "0"), ("077", "Asia/Tokyo", "1"), ("000", "XYZ-5", "2")]
    ):
        site.store = site.root / f"store{number}"
        environ = site.environ(TZ=zone, PYTHONHASHSEED=seed)
        contents = []
        for name in ("kernels.klb", "kernels-1.0-py3-none-any.whl"):
            file = site.root / str(number) / name
            file.parent.mkdir(exist_ok=True)
            more = ["--wheel"] if name.endswith(".whl") else []
            more += [f"--host={host}" for host in (hosts if number else hosts[::-1])]
            command = [sys.executable, "-c", EXPORT, umask, "kernel", "-o", str(file), *more]
            done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert file.stat().st_mode & 0o777 == 0o644
            contents.append(file.read_bytes())
        written.add(tuple(contents))
    assert len(written) == 1


# --- under a lock -------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(site):
    """A lock of the kernel; the Hub has moved on since."""
    lock = site.loader(cache=site.root / "locker").make_lock(["kernel"])
    (site.root / "kernel-loader.lock").write_text(lock.to_toml())
    site.publish(files(value=7))
    return lock


def under(site, lock, **settings):
    return KernelLoader(site.loader(**settings).settings, CPU_HOST, lock=lock)


def test_what_is_locked_is_exported_and_imported(site, locked, sealed):
    file = site.root / "kernels.klb"
    bundle = under(site, locked).export("kernel", file)
    assert bundle.repositories[0].commit == locked.repositories[0].commit
    under(site, locked, cache=site.root / "sealed", offline=True).import_bundle(file)
    site.hub.requests.clear()
    assert under(site, locked, cache=site.root / "sealed", offline=True).load("kernel").value == 1
    assert sealed().load("kernel").value == 1  # without the lock, too
    assert len(site.hub.requests) == 0


def test_other_bytes_than_those_that_are_locked_are_refused(site, locked):
    file = site.root / "kernels.klb"
    site.loader(cache=site.root / "laptop").export("kernel", file)  # what the Hub has now
    there = under(site, locked, cache=site.root / "sealed", offline=True)
    with pytest.raises(LockMismatch):
        there.import_bundle(file)
    assert not (site.root / "sealed" / "builds").exists()
    site.hub.kernel("org/other").commit(files(5), branch="v2")
    site.loader(cache=site.root / "laptop").export("org/other@2", file, trust_remote_code=True)
    with pytest.raises(LockMissing, match="org/other"):
        there.import_bundle(file)


def test_a_lock_that_names_commits_alone_is_exported_for_who_is_under_it(site, sealed):
    commit = site.hub.kernel(REPO).branches["v1"]
    text = json.dumps([{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": commit}}])
    lock = Lock.parse(text)
    site.publish(files(value=7))
    under(site, lock).export("kernel", site.root / "kernels.klb")
    there = under(site, lock, cache=site.root / "sealed", offline=True)
    there.import_bundle(site.root / "kernels.klb")
    site.hub.requests.clear()
    assert under(site, lock, cache=site.root / "sealed", offline=True).load("kernel").value == 1
    assert len(site.hub.requests) == 0


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(site):
    """The command in a process of its own: exit status, output, errors."""

    def run(*arguments, **environ):
        process = site.start(
            f"from kernel_loader.cli import main; main({list(map(str, arguments))!r}, prog_name='kernel-loader')",
            **environ,
        )
        return *process.communicate(timeout=120), process.returncode

    return run


def test_the_commands(site, command):
    file, sealed = site.root / "kernels.klb", {"KERNEL_LOADER_CACHE": str(site.root / "sealed"), "HF_HUB_OFFLINE": "1"}
    out, err, status = command("export", "-o", file, "kernel")
    size = sum(map(len, files().values()))
    assert (status, err) == (0, "")
    assert f"{REPO}@v1  torch-universal" in out
    assert out.endswith(f"{file}: 1 build, {size:,} B\n")
    (row,) = json.loads(command("export", "-o", file, "kernel", "--json")[0])["builds"]
    assert (row["repo"], row["size"], len(row["digest"])) == (REPO, size, 64)
    for state in ("imported", "here already"):
        out, err, status = command("import", file, **sealed)
        assert (status, err) == (0, "")
        assert out.startswith(f"{state:12}  {row['digest'][:12]}  {REPO}@v1  torch-universal")
    (again,) = json.loads(command("import", file, "--json", **sealed)[0])
    assert again == {
        "repo": REPO,
        "revision": "v1",
        "variant": "torch-universal",
        "digest": row["digest"],
        "new": False,
    }
    assert command("load", "kernel", **sealed)[2] == 0


def test_under_a_lock_all_that_it_names_is_exported(site, locked, command):
    file, lock = site.root / "kernels.klb", site.root / "kernel-loader.lock"
    out, err, status = command("export", "-o", file, "--lock", lock)
    assert (status, err) == (0, "")
    assert locked.repositories[0].builds["torch-universal"].digest[:12] in out
    assert command("import", file, "--lock", lock, KERNEL_LOADER_CACHE=str(site.root / "sealed"))[2] == 0
    out, err, status = command("export", "-o", file)
    assert (status, out) == (2, "")
    assert "Name kernels, or a lock file that does" in err


def test_a_bundle_that_cannot_be_used_is_one_paragraph_and_status_1(site, command):
    file = site.root / "kernels.klb"
    site.loader(cache=site.root / "laptop").export("kernel", file)
    file.write_bytes(file.read_bytes()[:-100])
    out, err, status = command("import", file)
    assert (status, out) == (1, "")
    assert str(file) in err
    assert "Make it again" in err
    assert "Traceback" not in err
    assert not (site.store / "builds").exists()
    assert command("import", site.root / "nowhere.klb")[2] == 1
    assert command("export", "--wheel", "-o", site.root / "kernels.klb", "kernel")[2] in (1, 2)


def test_exporting_needs_no_torch_and_takes_presets(site):
    site.publish(files(variant="torch-cuda"))
    file = site.root / "kernels.klb"
    arguments = ["export", "kernel", "-o", str(file), "--host", "preset:h200-cu130-torch2.11"]
    assert "torch-cuda" in site.run(NO_TORCH.format(arguments=arguments))
    assert "imported" in site.run(
        NO_TORCH.format(arguments=["import", str(file)]), KERNEL_LOADER_CACHE=str(site.root / "sealed")
    )


def test_half_a_bundle_is_not_imported_by_the_api_either(site, sealed):
    file = site.root / "kernels.klb"
    site.loader(cache=site.root / "laptop").export("kernel", file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(BundleError):
        sealed().import_bundle(file)
    with pytest.raises(NotCached):
        sealed().load("kernel")
