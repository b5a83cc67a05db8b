"""The road from a name to a bundle, the fallback rules of design 3, and what a load says about itself."""

import dataclasses
import json
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import kernel_loader
from kernel_loader.errors import (
    HostError,
    IntegrityError,
    KernelImportError,
    KernelLoaderError,
    MetadataError,
    NoCompatibleBuild,
    NotCached,
    RequestError,
    SourceError,
    UnknownKernel,
)
from kernel_loader.loader import KernelLoader
from kernel_loader.planning import spelt
from kernel_loader.settings import Settings
from tests.builds import CPU_HOST, H200, counts_runs, write_build

# A GPU host on which a no-arch build can really be imported here.
GPU_HOST = H200


@dataclasses.dataclass(frozen=True)
class Doubler:
    """A bundle of a user's own, which carries its manifest."""

    __kernel__ = {"name": "doubler", "repo": "org/doubler", "version": 1}

    double: object


# --- names and arguments ------------------------------------------------------------------------------------------


def test_a_named_kernel_is_loaded_as_a_bundle(workshop):
    workshop.simple("my_kernel")
    assert workshop.loader().load("my_kernel").double(21) == 42


def test_dashes_underscores_and_the_bundle_class_are_one_kernel(workshop, cpu_machine):
    workshop.simple("doubler")
    loader = workshop.loader()
    assert loader.load("doubler") is loader.load("Doubler")
    assert isinstance(loader.load(Doubler), Doubler)
    assert loader.load(Doubler) is loader.load(Doubler)
    assert kernel_loader.load_kernel("finegrained-fp8") is kernel_loader.load_kernel("finegrained_fp8")


def test_a_class_and_its_registered_name_give_the_same_object(cpu_machine):
    from kernel_loader.bundles.fp8 import FineGrainedFP8

    assert kernel_loader.load_kernel(FineGrainedFP8) is kernel_loader.load_kernel("finegrained_fp8")


def test_an_unknown_name_is_answered_with_the_ones_that_are_near(workshop):
    workshop.simple("my_kernel")
    with pytest.raises(UnknownKernel, match="Did you mean my_kernel") as caught:
        workshop.loader().load("my_kernal")
    assert caught.value.matches == ("my_kernel",)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a/b", "layers", "x\0y", "finegrained_fp8.toml"])
def test_whatever_is_no_name_is_an_unknown_kernel(name):
    with pytest.raises(UnknownKernel):
        KernelLoader(Settings(), CPU_HOST).load(name)


def test_version_and_revision_exclude_each_other(workshop):
    workshop.simple("my_kernel")
    with pytest.raises(RequestError, match="both given"):
        workshop.loader().load("my_kernel", version=1, revision="main")


def test_a_fallback_that_does_not_exist_is_refused(workshop):
    workshop.simple("my_kernel")
    with pytest.raises(RequestError, match="'slow'"):
        workshop.loader().load("my_kernel", fallback="slow")


def test_a_backend_that_this_host_lacks_is_refused(workshop):
    workshop.simple("my_kernel")
    with pytest.raises(HostError, match="this host has cpu"):
        workshop.loader().load("my_kernel", backend="cuda")


def test_the_cpu_can_be_asked_for_on_a_gpu_host(workshop):
    repository = workshop.kernel("my_kernel")
    for variant in ("torch-cpu", "torch-cuda"):
        write_build(repository, variant, {"__init__.py": f"def double(x): return {variant!r}"})
    loader = workshop.loader(GPU_HOST)
    assert loader.load("my_kernel").double(1) == "torch-cuda"
    assert loader.load("my_kernel", backend="cpu").double(1) == "torch-cpu"
    assert loader.load("my_kernel", backend="cuda") is not loader.load("my_kernel", backend="cpu")


# --- once ---------------------------------------------------------------------------------------------------------


def test_thirty_two_threads_get_one_object_from_one_execution(workshop, tmp_path):
    source = (
        f"{counts_runs(tmp_path / 'runs')}\nimport time\nfor _ in range(1000): time.sleep(0)\ndef double(x): return x"
    )
    workshop.simple("my_kernel", source)
    loader, start, bundles = workshop.loader(), threading.Barrier(32), []

    def work(name):
        start.wait(10)
        bundles.append(loader.load(name))

    names = ["my_kernel", "my-kernel"] * 16
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(bundles) == 32
    assert len({id(bundle) for bundle in bundles}) == 1
    assert (tmp_path / "runs").read_text() == "x"


def test_a_failure_is_not_kept_and_a_success_is(workshop, tmp_path):
    flag = tmp_path / "ready"
    check = f"import pathlib\nif not pathlib.Path({str(flag)!r}).exists(): raise RuntimeError('not yet')"
    workshop.simple("my_kernel", f"{check}\ndef double(x): return x")
    loader = workshop.loader()
    for _ in range(2):
        with pytest.raises(KernelImportError, match="not yet"):
            loader.load("my_kernel")
    flag.touch()
    bundle = loader.load("my_kernel")
    flag.unlink()
    assert loader.load("my_kernel") is bundle


def test_a_second_call_touches_neither_manifest_nor_build(workshop, monkeypatch, cpu_machine):
    build = workshop.simple("my_kernel")
    monkeypatch.setenv("KERNEL_LOADER_LOCAL", f"org/my-kernel={build}")
    monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(workshop.manifests))
    bundle = kernel_loader.load_kernel("my_kernel")
    shutil.rmtree(build)
    shutil.rmtree(workshop.manifests)
    assert kernel_loader.load_kernel("my_kernel") is bundle


# --- nothing fits: the reference is the best build there is -------------------------------------------------------


def refers(workshop, **keys):
    """A kernel whose reference is the embedded FP8 one."""
    return workshop.kernel("my_kernel", entrypoints={"double": "fp8_act_quant"}, reference="finegrained-fp8", **keys)


def test_where_the_manifest_excludes_the_host_the_reference_is_taken_with_one_warning(workshop, caplog):
    refers(workshop, backends=["cuda"])
    workshop.local.clear()
    loader = workshop.loader()
    bundle = loader.load("my_kernel")
    loader.load("my_kernel", version=7)
    origin = kernel_loader.origin(bundle)
    assert origin.reference
    assert origin.source == "embedded"
    assert "this host computes on cpu" in origin.why
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.name == "kernel_loader"
    assert "uses the slow reference" in record.getMessage()
    assert "it is for cuda, and this host computes on cpu" in record.getMessage()


def test_where_no_build_fits_the_reference_is_taken(workshop):
    write_build(refers(workshop), "torch-cuda")
    assert kernel_loader.origin(workshop.loader().load("my_kernel")).reference


def test_fallback_error_refuses_the_reference_where_nothing_fits(workshop):
    write_build(refers(workshop), "torch-cuda")
    with pytest.raises(NoCompatibleBuild, match="built for cuda, this host computes on cpu") as caught:
        workshop.loader().load("my_kernel", fallback="error")
    assert caught.value.nearest.name == "torch-cuda"
    with pytest.raises(NoCompatibleBuild):
        workshop.loader(fallback="error").load("my_kernel")


def test_without_a_reference_it_is_an_error_that_nothing_fits(workshop):
    write_build(workshop.kernel("my_kernel"), "torch-cuda")
    with pytest.raises(FileNotFoundError, match="Nearest|nearest"):
        workshop.loader().load("my_kernel", fallback="reference")


def test_a_directory_of_the_users_is_looked_at_even_where_the_manifest_excludes_the_host(workshop):
    write_build(refers(workshop, backends=["cuda"]), "torch-cpu", {"__init__.py": "fp8_act_quant = 1"})
    assert kernel_loader.origin(workshop.loader().load("my_kernel")).variant == "torch-cpu"


def test_a_disabled_kernel_is_its_reference(workshop):
    write_build(refers(workshop), "torch-universal", {"__init__.py": "raise SystemExit"})
    bundle = workshop.loader(disable=frozenset({"my-kernel"})).load("my_kernel")
    assert "it is disabled here, by KERNEL_LOADER_DISABLE" in kernel_loader.origin(bundle).why


# --- embedded builds that are no references -------------------------------------------------------------------------


def embeds(workshop, variants=("torch-cuda", "torch-universal"), published=("torch-rocm",), **keys):
    """A kernel with builds in a registry beside its manifest, each of which tells its name; and published ones."""
    repository = workshop.kernel("my_kernel", reference="mine", **keys)
    for variant in published:
        write_build(repository, variant, {"__init__.py": f"def double(x): return 'published {variant}'"})
    for variant in variants:
        source = f"def double(x): return 'embedded {variant}'"
        write_build(workshop.manifests / "registry" / "mine", variant, {"__init__.py": source})
    return workshop.manifests / "registry" / "mine"


ALONE = {"repo": None, "version": None, "published": ()}


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("keys", [{}, ALONE], ids=["published too", "embedded alone"])
def test_an_embedded_build_for_a_backend_is_a_kernel_like_any_other(workshop, caplog, keys):
    embeds(workshop, **keys)
    loader = workshop.loader(GPU_HOST)
    for fallback in (None, "error", "reference"):
        bundle = loader.load("my_kernel", fallback=fallback)
        origin = kernel_loader.origin(bundle)
        assert bundle.double(1) == "embedded torch-cuda"
        assert (origin.variant, origin.reference) == ("torch-cuda", False)
    assert warned(caplog) == []
    assert loader.can_load("my_kernel", fallback="error")
    assert loader.load_module("my_kernel").double(1) == "embedded torch-cuda"
    (ready,) = loader.prefetch(["my_kernel"], all_variants=True)
    assert (ready.variant, ready.reference) == ("torch-cuda", False)
    resolution = loader.resolve("my_kernel")
    assert resolution.chosen is None
    assert resolution.taken is resolution.reference
    assert resolution.explain().endswith("Chosen: torch-cuda, embedded")


def test_why_an_embedded_build_is_taken_where_there_is_a_repository(workshop):
    embeds(workshop)
    origin = kernel_loader.origin(workshop.loader(GPU_HOST).load("my_kernel"))
    assert "The nearest is torch-rocm: built for rocm, this host computes on cuda" in origin.why


def test_why_an_embedded_build_is_taken_where_there_is_none(workshop):
    embeds(workshop, **ALONE)
    assert kernel_loader.origin(workshop.loader(GPU_HOST).load("my_kernel")).why == "the best of 2 builds that fit"


def test_a_published_build_that_fits_comes_before_the_embedded_ones(workshop):
    embeds(workshop, published=("torch-cuda",))
    assert workshop.loader(GPU_HOST).load("my_kernel").double(1) == "published torch-cuda"


def test_the_reference_of_a_kernel_that_is_embedded_alone_is_taken_with_a_warning(workshop, caplog):
    embeds(workshop, **ALONE)
    loader = workshop.loader()
    origin = kernel_loader.origin(loader.load("my_kernel"))
    assert (origin.variant, origin.reference) == ("torch-universal", True)
    (warning,) = warned(caplog)
    assert "uses the slow reference. No build of registry/mine runs on this host (1 looked at)" in warning
    assert "The nearest is torch-cuda: built for cuda, this host computes on cpu" in warning
    assert "built for cuda" in origin.why
    (ready,) = loader.prefetch(["my_kernel"])
    assert ready.reference
    assert loader.resolve("my_kernel").explain().endswith("Chosen: torch-universal, the reference")


def test_a_kernel_that_is_its_reference_is_taken_without_a_word(workshop, caplog):
    embeds(workshop, variants=("torch-universal",), **ALONE)
    origin = kernel_loader.origin(workshop.loader().load("my_kernel"))
    assert (origin.reference, origin.why) == (True, "the only build that fits")
    assert warned(caplog) == []


@pytest.mark.parametrize(
    ("variants", "told"),
    [(("torch-cuda", "torch-universal"), "built for cuda"), (("torch-universal",), "it has the slow reference alone")],
)
def test_fallback_error_refuses_the_reference_of_a_kernel_that_is_embedded_alone(workshop, variants, told):
    embeds(workshop, variants, **ALONE)
    with pytest.raises(NoCompatibleBuild, match=told):
        workshop.loader().load("my_kernel", fallback="error")
    assert not workshop.loader().can_load("my_kernel", fallback="error")


def test_a_kernel_without_a_reference_for_this_machine_does_not_load(workshop):
    embeds(workshop, variants=("torch-cuda",), **ALONE)
    with pytest.raises(NoCompatibleBuild, match="built for cuda, this host computes on cpu"):
        workshop.loader().load("my_kernel")
    embeds(workshop, variants=("torch-cuda",))
    with pytest.raises(NoCompatibleBuild, match="torch-rocm: built for rocm, this host computes on cpu"):
        workshop.loader().load("my_kernel")


@pytest.mark.parametrize("keys", [{}, {"published": ("torch-cuda",)}, ALONE])
def test_a_disabled_kernel_is_its_reference_whatever_else_is_embedded(workshop, caplog, keys):
    embeds(workshop, **keys)
    loader = workshop.loader(GPU_HOST, disable=frozenset({"my-kernel"}))
    origin = kernel_loader.origin(loader.load("my_kernel"))
    assert (origin.variant, origin.reference) == ("torch-universal", True)
    assert "it is disabled here, by KERNEL_LOADER_DISABLE" in warned(caplog)[0]
    assert [verdict.name for verdict in loader.resolve("my_kernel").reference.verdicts] == ["torch-universal"]
    assert not loader.can_load("my_kernel", fallback="error")


@pytest.mark.parametrize("keys", [{"published": ("torch-cuda",)}, {}, ALONE])
def test_where_a_build_fails_the_reference_can_be_accepted_and_nothing_between(workshop, caplog, keys):
    registry = embeds(workshop, **keys)
    failing = [registry / "build" / "torch-cuda"]
    if keys.get("published"):
        failing = [workshop.local["org/my-kernel"] / "build" / "torch-cuda"]
    for build in failing:
        damage_import(build)
    with pytest.raises(KernelImportError, match="broken"):
        workshop.loader(GPU_HOST).load("my_kernel")
    origin = kernel_loader.origin(workshop.loader(GPU_HOST).load("my_kernel", fallback="reference"))
    assert (origin.variant, origin.reference) == ("torch-universal", True)
    assert "failed, and the slow reference is used instead" in warned(caplog)[-1]


def test_what_fails_is_told_where_there_is_no_reference_to_take_instead(workshop):
    damage_import(embeds(workshop, variants=("torch-cuda",), **ALONE) / "build" / "torch-cuda")
    loader = workshop.loader(GPU_HOST)
    with pytest.raises(KernelImportError, match="broken"):
        loader.load("my_kernel", fallback="reference")
    assert loader.can_load("my_kernel")
    assert not workshop.loader().can_load("my_kernel", fallback="reference")


def test_strict_counts_for_embedded_builds_too(workshop):
    registry = embeds(workshop, **ALONE)
    write_build(registry, "torch-cuda", backend={"type": "cuda", "archs": ["sm_90"]})
    assert kernel_loader.origin(workshop.loader(GPU_HOST).load("my_kernel")).variant == "torch-universal"


# --- other repositories of a kernel ---------------------------------------------------------------------------------

OTHER = {"repo": "org/other", "version": 7}


def another(workshop, name="other", variant="torch-cpu", source="def double(x): return 'other'"):
    """A second repository, with a build of its own."""
    repository = workshop.root / "repositories" / name
    workshop.local[f"org/{name}"] = repository
    return write_build(repository, variant, {"__init__.py": source}, version=7)


def test_the_first_repository_with_a_build_that_fits_is_taken(workshop):
    repository = workshop.kernel("my_kernel", alternatives=[OTHER, {"repo": "org/third", "revision": "main"}])
    write_build(repository, "torch-cuda", {"__init__.py": "def double(x): return 'first'"})
    another(workshop, variant="torch-rocm")
    another(workshop, "third", "torch-universal", "def double(x): return 'third'")
    loader = workshop.loader()
    bundle = loader.load("my_kernel")
    origin = kernel_loader.origin(bundle)
    assert bundle.double(1) == "third"
    assert (origin.kernel, origin.repo, origin.reference) == ("my_kernel", "org/third", False)
    resolution = loader.resolve("my_kernel")
    assert [other.repo for other in resolution.alternatives] == ["org/other@v7", "org/third@main"]
    assert resolution.taken.repo == "org/third@main"
    (ready,) = loader.prefetch(["my_kernel"])
    assert (ready.kernel, ready.path) == ("my_kernel", origin.path)
    assert loader.can_load("my_kernel", fallback="error")
    gpu = workshop.loader(GPU_HOST)
    assert gpu.load("my_kernel").double(1) == "first"
    notes = [other.note for other in gpu.resolve("my_kernel").alternatives]
    assert notes == ["it is not asked, since a build above fits"] * 2


def test_an_alternative_binds_its_own_entrypoints_or_those_of_the_kernel(workshop):
    entrypoints = {"double": "old.double"}
    workshop.kernel("my_kernel", backends=["cuda"], alternatives=[OTHER], entrypoints=entrypoints)
    workshop.local.clear()
    another(workshop, source="class old:\n    double = 'as in the first'\ntwice = 'its own'")
    assert workshop.loader().load("my_kernel").double == "as in the first"
    own = OTHER | {"entrypoints": {"double": "twice"}}
    workshop.kernel("my_kernel", backends=["cuda"], alternatives=[own], entrypoints=entrypoints)
    del workshop.local["org/my-kernel"]
    assert workshop.loader().load("my_kernel").double == "its own"


def test_an_alternative_that_its_backends_exclude_is_not_asked(workshop):
    workshop.kernel("my_kernel", backends=["rocm"], alternatives=[OTHER | {"backends": ["cuda"]}], reference="mine")
    workshop.local.clear()
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    bundle = KernelLoader(Settings(manifests=(workshop.manifests,)), CPU_HOST, sources=[]).load("my_kernel")
    why = kernel_loader.origin(bundle).why
    assert "nor one of org/other@v7: it is for rocm" in why
    assert "it is for cuda" in why


def test_a_repository_that_cannot_be_asked_is_an_error_and_no_alternative_is_taken(workshop):
    workshop.kernel("my_kernel", alternatives=[OTHER], reference="mine")
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    workshop.local.clear()
    another(workshop)
    with pytest.raises(NotCached, match="org/my-kernel@v1"):
        workshop.loader().load("my_kernel")
    origin = kernel_loader.origin(workshop.loader().load("my_kernel", fallback="reference"))
    assert origin.reference


def test_an_alternative_that_cannot_be_asked_is_an_error_once_it_is_its_turn(workshop):
    repository = workshop.kernel("my_kernel", alternatives=[OTHER])
    write_build(repository, "torch-cuda")
    assert workshop.loader(GPU_HOST).load("my_kernel").double(1) == 2
    with pytest.raises(NotCached, match="org/other@v7"):
        workshop.loader().load("my_kernel")


@pytest.mark.parametrize("asked", [{"version": 2}, {"revision": "main"}])
def test_a_version_is_one_of_the_first_repository(workshop, asked):
    write_build(workshop.kernel("my_kernel", alternatives=[OTHER]), "torch-cuda")
    another(workshop)
    loader = workshop.loader()
    assert loader.load("my_kernel").double(1) == "other"
    with pytest.raises(NoCompatibleBuild):
        loader.load("my_kernel", **asked)
    assert loader.resolve("my_kernel", **asked).alternatives == ()


def test_where_no_repository_has_a_build_the_embedded_ones_are_next(workshop, caplog):
    embeds(workshop, alternatives=[OTHER])
    another(workshop, variant="torch-rocm")
    assert workshop.loader(GPU_HOST).load("my_kernel").double(1) == "embedded torch-cuda"
    assert kernel_loader.origin(workshop.loader().load("my_kernel")).reference
    assert "nor one of org/other@v7 (2 looked at)" in warned(caplog)[0]
    with pytest.raises(NoCompatibleBuild, match="nor one of org/other@v7"):
        workshop.loader().load("my_kernel", fallback="error")


def test_what_a_kernel_demands_is_of_one_repository(workshop):
    keys = {"requires": {"torch": ">=99"}, "alternatives": [OTHER]}
    write_build(workshop.kernel("my_kernel", **keys), "torch-cpu")
    another(workshop)
    assert workshop.loader().load("my_kernel").double(1) == "other"
    demanding = [OTHER | {"requires": {"torch": ">=99"}}]
    workshop.kernel("my_kernel", **(keys | {"alternatives": demanding}))
    with pytest.raises(NoCompatibleBuild):
        workshop.loader().load("my_kernel")


def test_a_directory_of_another_version_of_an_alternative_is_told(workshop, caplog):
    write_build(workshop.kernel("my_kernel", alternatives=[OTHER | {"version": 8}]), "torch-cuda")
    another(workshop)
    workshop.loader().load("my_kernel")
    assert warned(caplog) == ["my_kernel uses version 7 from local org/other, and version 8 was asked for."]


# --- a build fits and fails: the user must know -------------------------------------------------------------------


def damage_import(build: Path) -> None:
    (build / "__init__.py").write_text("raise RuntimeError('broken')")


def damage_symbols(build: Path) -> None:
    (build / "__init__.py").write_text("other = 1")


def damage_bytes(build: Path) -> None:
    document = json.loads((build / "metadata.json").read_text())
    digest = {"algorithm": "sha256", "files": {"__init__.py": "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="}}
    (build / "metadata.json").write_text(json.dumps(document | {"digest": digest}))


def damage_metadata(build: Path) -> None:
    (build / "metadata.json").write_text("{")


def damage_directory(build: Path) -> None:
    shutil.rmtree(build.parent.parent)


DAMAGES = {
    damage_import: KernelImportError,
    damage_symbols: KernelImportError,
    damage_bytes: IntegrityError,
    damage_metadata: MetadataError,
    damage_directory: SourceError,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_build_that_fits_and_fails_raises(workshop, damage):
    damage(write_build(refers(workshop), "torch-universal"))
    with pytest.raises(DAMAGES[damage]):
        workshop.loader().load("my_kernel")
    with pytest.raises(DAMAGES[damage]):
        workshop.loader().load("my_kernel", fallback="error")


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_reference_can_be_accepted_instead_with_a_warning(workshop, damage, caplog):
    damage(write_build(refers(workshop), "torch-universal"))
    bundle = workshop.loader().load("my_kernel", fallback="reference")
    assert kernel_loader.origin(bundle).reference
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "failed, and the slow reference is used instead" in record.getMessage()
    assert workshop.loader(fallback="reference").load("my_kernel") == bundle


def test_a_repository_that_no_source_has_raises_and_says_how_to_name_one(workshop):
    refers(workshop)
    workshop.local.clear()
    with pytest.raises(NotCached, match="KERNEL_LOADER_LOCAL=repository=DIRECTORY"):
        workshop.loader().load("my_kernel")
    with pytest.raises(SourceError, match="KERNEL_LOADER_LOCAL=org/my-kernel=DIRECTORY"):
        KernelLoader(Settings(manifests=(workshop.manifests,)), CPU_HOST, sources=[]).load("my_kernel")


def test_bytes_that_were_not_published_never_run(workshop, tmp_path):
    build = write_build(workshop.kernel("my_kernel"), "torch-universal")
    kernel_loader.digest.seal(build)
    (build / "__init__.py").write_text(f"{counts_runs(tmp_path / 'runs')}\ndef double(x): return x")
    with pytest.raises(IntegrityError, match=r"__init__.py has other content"):
        workshop.loader().load("my_kernel")
    (build / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    (build / "extra.py").write_text("")
    with pytest.raises(IntegrityError, match="extra.py is not listed"):
        workshop.loader().load("my_kernel")
    assert not (tmp_path / "runs").exists()


def test_a_reference_that_fails_is_not_hidden_by_another(workshop):
    workshop.kernel("my_kernel", repo=None, version=None, reference="no-such-kernel")
    with pytest.raises(SourceError, match="neither beside its manifest nor in this package"):
        workshop.loader().load("my_kernel")


# --- doubtful builds ----------------------------------------------------------------------------------------------


def test_a_build_of_unknown_compatibility_is_used_with_a_warning(workshop, caplog):
    write_build(workshop.kernel("my_kernel"), "torch-cuda", backend={"type": "cuda", "archs": ["sm_90"]})
    bundle = workshop.loader(GPU_HOST).load("my_kernel")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "torch-cuda, which may not run on this host: compiled for sm_90" in record.getMessage()
    assert "whether that runs on 9.0 is not known" in kernel_loader.origin(bundle).why


def test_strict_refuses_a_build_of_unknown_compatibility(workshop):
    write_build(workshop.kernel("my_kernel"), "torch-cuda", backend={"type": "cuda", "archs": ["sm_90"]})
    with pytest.raises(NoCompatibleBuild):
        workshop.loader(GPU_HOST, strict=True).load("my_kernel")


# --- questions ----------------------------------------------------------------------------------------------------


def test_resolve_answers_for_a_machine_that_is_not_here(workshop):
    repository = workshop.kernel("my_kernel")
    for variant in ("torch-cuda", "torch-rocm", "torch211-cxx11-cu130-x86_64-linux"):
        write_build(repository, variant, {"__init__.py": "raise SystemExit('imported')"})
    loader = workshop.loader()
    assert loader.resolve("my_kernel", host=H200).chosen.name == "torch211-cxx11-cu130-x86_64-linux"
    assert loader.resolve("my_kernel", host=replace(H200, torch="2.12.0")).chosen.name == "torch-cuda"
    assert loader.resolve("org/my-kernel", version=1, host=H200).repo == "org/my-kernel@v1"
    assert loader.resolve("my_kernel").chosen is None


def test_resolve_shows_the_reference_where_nothing_fits(workshop):
    write_build(refers(workshop), "torch-cuda")
    resolution = workshop.loader().resolve("my_kernel")
    assert resolution.chosen is None
    assert resolution.reference.chosen.name == "torch-universal"
    assert "Chosen: torch-universal, the reference" in resolution.explain()
    assert json.loads(resolution.to_json())["reference"]["chosen"] == "torch-universal"


def test_can_load_says_no_without_raising_importing_or_warning(workshop, caplog):
    repository = refers(workshop)
    write_build(repository, "torch-cuda", {"__init__.py": "raise SystemExit('imported')"})
    loader = workshop.loader()
    assert loader.can_load("my_kernel")
    assert not loader.can_load("my_kernel", fallback="error")
    assert not loader.can_load("org/my-kernel", version=1)
    assert not loader.can_load("no_such_kernel")
    assert not loader.can_load("org/no-such-repository")
    assert not loader.can_load("my_kernel", backend="cuda")
    assert workshop.loader(GPU_HOST).can_load("org/my-kernel", version=1)
    damage_metadata(repository / "build" / "torch-cuda")
    assert not workshop.loader(GPU_HOST).can_load("my_kernel")
    assert not caplog.records


def test_origin_tells_where_a_bundle_and_its_module_are_from(workshop):
    import sys

    build = workshop.simple("my_kernel")
    bundle = workshop.loader().load("my_kernel")
    origin = kernel_loader.origin(bundle)
    assert (origin.kernel, origin.source, origin.repo, origin.variant, origin.reference, origin.path) == (
        "my_kernel",
        "local",
        "org/my-kernel",
        "torch-universal",
        False,
        build,
    )
    assert origin.why == "the only build that fits"
    assert len(origin.digest) == 64
    assert kernel_loader.origin(sys.modules[bundle.double.__module__]) == origin
    assert origin in kernel_loader.loaded_kernels()


def test_origin_of_anything_else_is_a_wrong_request():
    with pytest.raises(RequestError):
        kernel_loader.origin(object())


def test_every_error_of_a_load_is_of_one_tree(workshop):
    for damage in DAMAGES:
        damage(write_build(refers(workshop), "torch-universal"))
        with pytest.raises(KernelLoaderError):
            workshop.loader().load("my_kernel")


def test_the_host_is_looked_at_once_and_only_when_it_is_needed(monkeypatch):
    monkeypatch.setenv("KERNEL_LOADER_OVERRIDE_NOTHING", "1")
    loader = KernelLoader()
    with pytest.raises(kernel_loader.SettingsError):
        loader.resolve("finegrained_fp8")
    assert KernelLoader(host=CPU_HOST).resolve("finegrained_fp8").reference.chosen


# --- a source of the user's own -----------------------------------------------------------------------------------


def test_a_source_that_costs_network_is_not_asked_where_the_manifest_excludes_the_host(workshop):
    from kernel_loader.sources import LocalDirectories

    class Remote(LocalDirectories):
        is_local = False

        def listing(self, request):
            raise AssertionError("asked")

    refers(workshop, backends=["cuda"])
    settings = Settings(manifests=(workshop.manifests,))
    remote = Remote({}, "remote")
    loader = KernelLoader(settings, CPU_HOST, sources=[remote])
    assert kernel_loader.origin(loader.load("my_kernel")).reference
    with pytest.raises(AssertionError, match="asked"):
        KernelLoader(settings, GPU_HOST, sources=[remote]).load("my_kernel")


# --- calls that need each other ------------------------------------------------------------------------------------


def test_a_module_that_loads_a_kernel_may_define_its_bundle(workshop, tmp_path, monkeypatch):
    # One thread imports the module, another asks for the kernel: neither waits for the other forever.
    workshop.simple("doubler", bundle="own_bundle:Own")
    (tmp_path / "own_bundle.py").write_text(
        "import dataclasses, meeting_place\n"
        "@dataclasses.dataclass(frozen=True)\nclass Own:\n    double: object\n"
        "meeting_place.imported.set()\n"
        "meeting_place.asked.wait(10)\n"
        "KERNEL = meeting_place.loader.load('doubler')\n"
    )
    (tmp_path / "meeting_place.py").write_text(
        "import threading\nimported, asked = threading.Event(), threading.Event()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import meeting_place

    meeting_place.loader = workshop.loader()
    results = []

    def imports():
        import own_bundle

        results.append(own_bundle.KERNEL)

    def asks():
        meeting_place.imported.wait(10)
        meeting_place.asked.set()
        results.append(meeting_place.loader.load("doubler"))

    threads = [threading.Thread(target=work, daemon=True) for work in (imports, asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == 2
    assert results[0] is results[1]


def loads_another(other):
    return f"import kernel_loader\nkernel_loader.load_kernel({other!r})\ndef double(x): return x"


@pytest.fixture
def shared(workshop, monkeypatch, cpu_machine):
    """The default loader sees the workshop."""

    def apply():
        import os

        local = os.pathsep.join(f"{repo}={path}" for repo, path in workshop.local.items())
        monkeypatch.setenv("KERNEL_LOADER_LOCAL", local)
        monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(workshop.manifests))

    return apply


def test_a_kernel_that_loads_itself_is_refused(workshop, shared):
    workshop.simple("one", loads_another("one"))
    shared()
    with pytest.raises(KernelImportError, match="in a circle: org/one@v1 -> org/one@v1"):
        kernel_loader.load_kernel("one")


def test_kernels_that_load_each_other_are_refused(workshop, shared):
    workshop.simple("one", loads_another("two"))
    workshop.simple("two", loads_another("one"))
    shared()
    with pytest.raises(KernelImportError, match="org/one@v1 -> org/two@v1 -> org/one@v1"):
        kernel_loader.load_kernel("one")


def test_two_threads_whose_kernels_load_each_other_do_not_wait_forever(workshop, shared):
    meet = "import kernel_loader.once as o\no.MEETING.wait(10)\n"
    workshop.simple("one", meet + loads_another("two"))
    workshop.simple("two", meet + loads_another("one"))
    shared()
    from kernel_loader import once

    once.MEETING = threading.Barrier(2)
    outcomes = []

    def work(name):
        try:
            kernel_loader.load_kernel(name)
            outcomes.append("loaded")
        except KernelLoaderError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    del once.MEETING
    assert len(outcomes) == 2
    assert any("in a circle" in outcome for outcome in outcomes)


# --- bundle classes -------------------------------------------------------------------------------------------------


def test_a_class_of_ones_own_is_what_comes_back(cpu_machine):
    @dataclasses.dataclass(frozen=True)
    class Half:
        __kernel__ = "finegrained_fp8"

        fp8_matmul: object
        comment: str = "mine"

    half = kernel_loader.load_kernel(Half)
    assert type(half) is Half
    assert half.comment == "mine"
    assert half.fp8_matmul is kernel_loader.load_kernel("finegrained_fp8").fp8_matmul


def test_a_class_that_is_defined_again_under_its_name_is_another_class(workshop):
    workshop.simple("doubler")
    loader = workshop.loader()
    again = dataclasses.make_dataclass("Doubler", ["double"], frozen=True, namespace={"__kernel__": Doubler.__kernel__})
    assert type(loader.load(Doubler)) is Doubler
    assert type(loader.load(again)) is again


# --- arguments that mean nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"version": "1"},
        {"version": -1},
        {"version": True},
        {"version": 1.0},
        {"revision": ""},
        {"revision": "a b"},
        {"backend": 3},
    ],
)
def test_an_argument_of_another_kind_is_a_wrong_request(workshop, arguments):
    workshop.simple("my_kernel")
    with pytest.raises(RequestError):
        workshop.loader().load("my_kernel", **arguments)


@pytest.mark.parametrize("arguments", [(["x"],), ({},)])
def test_what_cannot_be_a_name_is_a_wrong_request(arguments):
    with pytest.raises(RequestError, match="Pass a name or a bundle class"):
        kernel_loader.load_kernel(*arguments)


def test_a_host_must_be_a_host(cpu_machine):
    with pytest.raises(RequestError, match="Pass a Host"):
        kernel_loader.resolve("finegrained_fp8", host="h200.json")


def test_a_directory_of_another_version_is_used_with_a_warning(workshop, caplog):
    workshop.simple("my_kernel")
    assert workshop.loader().load("my_kernel", version=2).double(1) == 2
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "uses version 1 from local org/my-kernel, and version 2 was asked for" in record.getMessage()


def test_can_load_follows_the_fallback_rule_of_load(workshop):
    damage_metadata(write_build(refers(workshop), "torch-universal"))
    assert not workshop.loader().can_load("my_kernel")
    assert workshop.loader().can_load("my_kernel", fallback="reference")


def test_each_kind_of_warning_is_given(workshop, caplog):
    build = write_build(refers(workshop), "torch-cuda", backend={"type": "cuda", "archs": ["sm_90"]})
    damage_import(build)
    workshop.loader(GPU_HOST).load("my_kernel", fallback="reference")
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [("may not run" in t, "used instead" in t) for t in texts] == [(True, False), (False, True)]


def test_a_reference_may_lie_beside_the_users_manifest(workshop):
    workshop.kernel("my_kernel", reference="mine", backends=["cuda"])
    workshop.local.clear()
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    bundle = workshop.loader().load("my_kernel")
    assert bundle.double(21) == 42
    assert kernel_loader.origin(bundle).reference


def test_an_embedded_kernel_without_digests_is_refused(tmp_path):
    from kernel_loader.sources import LocalDirectories, Request
    from kernel_loader.sources.directory import EMBEDDED

    write_build(tmp_path / "k", "torch-universal")
    source = LocalDirectories({"k": tmp_path / "k"}, EMBEDDED)
    with pytest.raises(IntegrityError, match="lists no digests"):
        source.fetch(source.listing(Request(repo="k")), "torch-universal")


def test_compiled_code_in_a_directory_of_another_name_is_refused(workshop):
    repository = workshop.kernel("my_kernel")
    build = write_build(repository, "torch-universal")
    (build / "ext.so").write_bytes(b"")
    build.rename(repository.parent / "renamed")
    workshop.local["org/my-kernel"] = repository.parent / "renamed"
    with pytest.raises(SourceError, match="it holds compiled code"):
        workshop.loader().load("my_kernel")


def test_a_relative_directory_stays_where_it_was(workshop, monkeypatch, tmp_path):
    build = write_build(workshop.kernel("my_kernel"), "torch-universal", {"late.py": "value = 1"})
    (build / "__init__.py").write_text("def double(x):\n    from .late import value\n    return value\n")
    monkeypatch.chdir(build.parent)
    workshop.local["org/my-kernel"] = Path("torch-universal")
    bundle = workshop.loader().load("my_kernel")
    monkeypatch.chdir(tmp_path)
    assert bundle.double(1) == 1
    assert kernel_loader.origin(bundle).path == build


def test_a_bundle_that_was_pickled_still_knows_its_origin(workshop):
    import pickle

    workshop.simple("my_kernel")
    bundle = workshop.loader().load("my_kernel")
    assert kernel_loader.origin(pickle.loads(pickle.dumps(bundle))) == kernel_loader.origin(bundle)


@pytest.mark.parametrize(
    ("written", "name", "version", "revision"),
    [
        ("kernel", "kernel", None, None),
        ("org/kernel@3", "org/kernel", 3, None),
        ("org/kernel@v3", "org/kernel", None, "v3"),
        ("org/kernel@feature/x@2", "org/kernel", None, "feature/x@2"),
        ("org/kernel@\u0663", "org/kernel", None, "\u0663"),  # a digit, and none of a version
        ("org/kernel@", "org/kernel@", None, None),
    ],
)
def test_a_kernel_may_be_written_with_its_version_or_revision(written, name, version, revision):
    assert spelt(written) == (name, version, revision)


def test_the_reference_can_be_asked_for_whatever_builds_there_are(workshop, caplog):
    workshop.simple("my_kernel", "def double(x):\n    return 3 * x\n", reference="my-reference")
    write_build(workshop.manifests / "registry" / "my-reference", "torch-universal")
    loader = workshop.loader()
    build, reference = loader.load("my_kernel"), loader.load_reference("my_kernel")
    assert (build.double(1), reference.double(1)) == (3, 2)
    assert kernel_loader.origin(reference).reference
    assert not kernel_loader.origin(build).reference
    assert caplog.records == []
    workshop.simple("other")
    with pytest.raises(NoCompatibleBuild, match="it has no reference"):
        workshop.loader().load_reference("other")


@pytest.mark.parametrize("given", [None, 3, b"x", object()])
def test_what_is_no_name_is_refused(workshop, given):
    for call in (workshop.loader().load, workshop.loader().resolve, kernel_loader.load_kernel):
        with pytest.raises(RequestError, match="object was given as the kernel"):
            call(given)


def test_a_bundle_is_no_name(workshop):
    workshop.simple("my_kernel")
    with pytest.raises(RequestError, match="MyKernel object was given as the kernel"):
        workshop.loader().load(workshop.loader().load("my_kernel"))


@pytest.mark.parametrize("given", [{"settings": {}}, {"host": "h200.json"}, {"sources": 3}, {"sources": [3]}])
def test_a_loader_is_made_of_what_it_says(given):
    with pytest.raises(RequestError, match=f"{next(iter(given))}=.* was given"):
        KernelLoader(**given)


def test_one_kernel_and_one_host_may_stand_for_lists(workshop):
    workshop.simple("my_kernel")
    loader = workshop.loader()
    assert loader.prefetch("my_kernel") == loader.prefetch(["my_kernel"])
    assert loader.prefetch("my_kernel", hosts=CPU_HOST) == loader.prefetch(["my_kernel"], hosts=[CPU_HOST])
    for wrong in ({"kernels": None}, {"kernels": "my_kernel", "hosts": [3]}):
        with pytest.raises(RequestError, match="was given"):
            loader.prefetch(**wrong)


def test_a_directory_whose_name_is_misspelt_is_named(workshop):
    write_build(workshop.kernel("my_kernel"), "torch-univresal")
    with pytest.raises(SourceError, match=r"there are no builds in it .*; torch-univresal is no build variant: "):
        workshop.loader().load("my_kernel")
