"""The catalog: names to manifests, from the user's directories, the package, and installed packages."""

import dataclasses
import sys
from pathlib import Path

import pytest

from kernel_loader.catalog import Catalog
from kernel_loader.errors import ManifestError, RequestError, SettingsError, UnknownKernel
from kernel_loader.resources import data_directory
from kernel_loader.settings import Settings

SHIPPED = "finegrained_fp8"


def write(directory: Path, stem: str, name: str | None = None, summary: str = "") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{stem}.toml"
    file.write_text(f'name = "{name or stem}"\nsummary = "{summary}"\nreference = "a"\n', encoding="utf-8")
    return file


def catalog(*directories: Path) -> Catalog:
    return Catalog(Settings(manifests=directories))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a made-up distribution with one entry point, as pip leaves it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write_distribution(name: str, target: str, code: str = "") -> Path:
        package = site.joinpath(*target.split("."))
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kernel_loader.manifests]\n{name} = {target}\n")
        if code:
            package.mkdir(parents=True)
            for directory in (package, *package.parents):
                if directory == site:
                    break
                (directory / "__init__.py").write_text(code)
        return package

    return write_distribution


# ---------------------------------------------------------------------------------------------------------------- names


def test_shipped_kernels_are_named_after_their_files() -> None:
    stems = {file.stem for file in data_directory("manifests").glob("*.toml")} - {
        "layers",
        "advisories",
        "capabilities",
    }
    assert set(catalog().names()) == stems
    assert all(catalog().get(name).name == name for name in stems)


def test_names_are_sorted_and_listed_once(tmp_path) -> None:
    for stem in ("b", "a", SHIPPED):
        write(tmp_path, stem)
    names = catalog(tmp_path).names()
    assert list(names) == sorted(set(names))
    assert {"a", "b", SHIPPED} <= set(names)


@pytest.mark.parametrize("spelling", ["my_kernel", "my-kernel", "My-Kernel"])
@pytest.mark.parametrize("stem", ["my_kernel", "my-kernel"])
def test_dashes_and_underscores_are_one(tmp_path, spelling: str, stem: str) -> None:
    write(tmp_path, stem, "my_kernel")
    assert catalog(tmp_path).get(spelling).name == "my_kernel"
    assert "my_kernel" in catalog(tmp_path).names()


def test_every_listed_name_can_be_had(tmp_path) -> None:
    for stem in ("plain", "with-dash", "Upper"):
        write(tmp_path, stem, stem.lower().replace("-", "_"))
    for odd in ("two.parts", "1st", ".hidden", "layers", "advisories", "capabilities"):
        write(tmp_path, odd)
    (tmp_path / "directory.toml").mkdir()
    (tmp_path / "notes.md").write_text("x")
    found = catalog(tmp_path)
    assert set(found.names()) == {*catalog().names(), "plain", "with_dash", "upper"}
    assert [found.get(name).name for name in found.names()] == list(found.names())


@pytest.mark.parametrize(
    "name", ["layers", "advisories", "capabilities", "../manifests/finegrained_fp8", "", ".", "finegrained_fp8.toml"]
)
def test_what_is_no_name_of_a_kernel_is_not_looked_up_as_a_file(name: str) -> None:
    with pytest.raises(UnknownKernel):
        catalog().get(name)


@pytest.mark.parametrize("name", ["finegraned_fp8", "finegrained-fp", "finegrainedfp8", "Finegrained-FP9"])
def test_a_misspelt_name_is_told_the_right_one(name: str) -> None:
    with pytest.raises(UnknownKernel) as caught:
        catalog().get(name)
    assert caught.value.name == name
    assert SHIPPED in caught.value.matches


def test_close_matches_look_at_the_users_kernels_too(tmp_path) -> None:
    write(tmp_path, "my_spinner")
    with pytest.raises(UnknownKernel) as caught:
        catalog(tmp_path).get("my-spiner")
    assert caught.value.matches == ("my_spinner",)


def test_a_name_like_no_other_has_no_matches() -> None:
    with pytest.raises(UnknownKernel) as caught:
        catalog().get("zzzzzz")
    assert caught.value.matches == ()


@pytest.mark.parametrize("kernel", [1, None, b"finegrained_fp8"])
def test_what_is_neither_name_nor_class_is_no_kernel(kernel: object) -> None:
    with pytest.raises(RequestError, match="object was given as the kernel"):
        catalog().get(kernel)


# ---------------------------------------------------------------------------------------------- directories of the user


def test_a_directory_of_the_users_comes_before_what_ships(tmp_path) -> None:
    write(tmp_path / "first", SHIPPED, summary="mine")
    write(tmp_path / "second", SHIPPED, summary="also mine")
    assert catalog(tmp_path / "first", tmp_path / "second").get(SHIPPED).summary == "mine"
    assert catalog(tmp_path / "second", tmp_path / "first").get(SHIPPED).summary == "also mine"


def test_a_directory_that_is_not_there_is_a_wrong_setting(tmp_path) -> None:
    with pytest.raises(SettingsError, match="KERNEL_LOADER_MANIFESTS"):
        catalog(tmp_path / "nowhere")


def test_a_manifest_under_another_name_than_its_files_is_refused(tmp_path) -> None:
    file = write(tmp_path, "one", "two")
    with pytest.raises(ManifestError, match="'two'") as caught:
        catalog(tmp_path).get("one")
    assert (caught.value.file, caught.value.path) == (str(file), "name")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name ="])
def test_a_broken_manifest_names_its_file_and_leaves_the_others_alone(tmp_path, content: bytes) -> None:
    write(tmp_path, "whole")
    (tmp_path / "broken.toml").write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        catalog(tmp_path).get("broken")
    assert caught.value.file == str(tmp_path / "broken.toml")
    assert catalog(tmp_path).get("whole").name == "whole"
    assert catalog(tmp_path).get(SHIPPED).name == SHIPPED
    assert "broken" in catalog(tmp_path).names()


def test_a_manifest_that_may_not_be_read_is_an_error_of_that_manifest(open_path, unprivileged) -> None:
    file = write(open_path, "secret")
    file.chmod(0)
    with unprivileged(), pytest.raises(ManifestError, match="cannot be read") as caught:
        catalog(open_path).get("secret")
    assert caught.value.file == str(file)


# --------------------------------------------------------------------------------------------------- installed packages


def test_an_installed_package_adds_its_manifests(install) -> None:
    write(install("more_kernels", "more_kernels", code="x = 1\n"), "spinner")
    assert "spinner" in catalog().names()
    assert catalog().get("spinner").name == "spinner"


def test_asking_an_installed_package_runs_none_of_its_code(install) -> None:
    write(install("noisy", "noisy_parent.kernels", code="raise SystemExit('it was run')\n"), "spinner")
    assert catalog().get("spinner").name == "spinner"
    assert "noisy_parent" not in sys.modules


def test_a_directory_without_init_is_a_package_too(install) -> None:
    write(install("spaced", "spaced_kernels"), "spinner")
    assert catalog().get("spinner").name == "spinner"


def test_an_installed_package_cannot_take_over_a_name(install, tmp_path) -> None:
    package = install("thief", "thief_kernels", code="x = 1\n")
    write(package, SHIPPED, summary="stolen")
    write(package, "mine", summary="stolen")
    write(tmp_path / "own", "mine", summary="mine")
    assert catalog().get(SHIPPED).summary != "stolen"
    assert catalog(tmp_path / "own").get("mine").summary == "mine"


def test_two_packages_with_one_name_are_taken_in_the_order_of_their_entry_points(install) -> None:
    write(install("zeta", "zeta_kernels", code="x = 1\n"), "spinner", summary="zeta")
    write(install("alpha", "alpha_kernels", code="x = 1\n"), "spinner", summary="alpha")
    assert catalog().get("spinner").summary == "alpha"


@pytest.mark.parametrize(
    "target",
    ["no_such_package", "no_such_parent.kernels", "json.no_such_child", "os:path", ".relative", "kernel_loader:x"],
)
def test_an_entry_point_that_leads_nowhere_leaves_the_other_names_alone(install, target: str) -> None:
    install("broken", target)
    write(install("whole", "whole_kernels", code="x = 1\n"), "spinner")
    assert {"spinner", SHIPPED} <= set(catalog().names())
    assert catalog().get("spinner").name == "spinner"
    with pytest.raises(UnknownKernel):
        catalog().get("zzz")


def test_an_entry_point_at_a_module_that_cannot_say_where_it_is_leaves_the_other_names_alone(
    install, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "hollow_kernels", type(sys)("hollow_kernels"))  # its __spec__ is None
    install("hollow", "hollow_kernels")
    assert SHIPPED in catalog().names()


# ------------------------------------------------------------------------------------------------------- bundle classes


@dataclasses.dataclass(frozen=True)
class Named:
    __kernel__ = "finegrained-fp8"


@dataclasses.dataclass(frozen=True)
class Described:
    __kernel__ = {"name": "described", "reference": "a", "entrypoints": {"f": "g"}}


def test_a_bundle_class_may_name_its_kernel() -> None:
    assert catalog().get(Named) == catalog().get(SHIPPED)


def test_a_bundle_class_may_carry_its_manifest() -> None:
    manifest = catalog().get(Described)
    assert manifest.name == "described"
    assert manifest.file == f"{__name__}:Described"
    assert str(manifest.entrypoints["f"]) == "g"
    assert "bundle" not in Described.__kernel__


def test_a_class_that_names_an_unknown_kernel_says_so() -> None:
    with pytest.raises(UnknownKernel, match="'nothing'"):
        catalog().get(type("Bundle", (), {"__kernel__": "nothing"}))


@pytest.mark.parametrize("members", [{}, {"__kernel__": None}, {"__kernel__": ["a"]}, {"__kernel__": 4}])
def test_a_class_that_is_no_bundle_is_told_what_is_missing(members: dict[str, object]) -> None:
    cls = type("Bundle", (), members)
    with pytest.raises(ManifestError, match="a bundle class says which kernel it is for") as caught:
        catalog().get(cls)
    assert caught.value.path == "__kernel__"
    assert "Bundle" in caught.value.file


@pytest.mark.parametrize(
    ("about", "path"), [({"name": "x"}, ""), ({"name": "x", "reference": 1}, "reference"), ({1: 2}, "1")]
)
def test_a_class_whose_manifest_is_wrong_is_refused_as_a_file_would_be(about: dict[object, object], path: str) -> None:
    with pytest.raises(ManifestError) as caught:
        catalog().get(type("Bundle", (), {"__kernel__": about}))
    assert caught.value.path == path
