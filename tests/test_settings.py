"""Settings: every variable, and what it may hold."""

import os
from pathlib import Path

import pytest

from kernel_loader.errors import SettingsError
from kernel_loader.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert settings.fallback is None
    assert settings.local == {}
    assert settings.manifests == ()
    assert settings.disable == frozenset()
    assert settings.strict is False
    assert settings.overrides == {}


def test_variables_set_to_nothing_give_the_defaults() -> None:
    names = ("FALLBACK", "LOCAL", "MANIFESTS", "DISABLE", "STRICT")
    environ = {f"KERNEL_LOADER_{name}": "" for name in names} | {"LOCAL_KERNELS": ""}
    assert Settings.from_env(environ) == Settings()


def test_the_environment_is_read_when_asked_and_not_before(monkeypatch) -> None:
    monkeypatch.setenv("KERNEL_LOADER_STRICT", "1")
    assert Settings.from_env().strict
    monkeypatch.setenv("KERNEL_LOADER_STRICT", "0")
    assert not Settings.from_env().strict


def test_importing_the_package_reads_no_setting(run_python) -> None:
    bad = {"KERNEL_LOADER_FALLBACK": "nonsense", "KERNEL_LOADER_STRICT": "nonsense", "KERNEL_LOADER_LOCAL": "nonsense"}
    code = (
        "import kernel_loader, kernel_loader.loader, kernel_loader.cli, os\n"
        "for key in [k for k in os.environ if k.startswith('KERNEL_LOADER_')]: del os.environ[key]\n"
        "print(kernel_loader.Settings.from_env() == kernel_loader.Settings())"
    )
    assert run_python(code, env=bad).strip() == "True"


@pytest.mark.parametrize("value", ["reference", "error"])
def test_fallback_takes_its_two_words(value: str) -> None:
    assert Settings.from_env({"KERNEL_LOADER_FALLBACK": value}).fallback == value


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "on", "On"])
def test_strict_is_switched_on(value: str) -> None:
    assert Settings.from_env({"KERNEL_LOADER_STRICT": value}).strict is True


@pytest.mark.parametrize("value", ["0", "false", "No", "off", ""])
def test_strict_is_switched_off(value: str) -> None:
    assert Settings.from_env({"KERNEL_LOADER_STRICT": value}).strict is False


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KERNEL_LOADER_FALLBACK", "1"),
        ("KERNEL_LOADER_STRICT", "2"),
        ("KERNEL_LOADER_STRICT", "maybe"),
        ("KERNEL_LOADER_LOCAL", "/just/a/path"),
        ("KERNEL_LOADER_LOCAL", "name=/path"),
        ("KERNEL_LOADER_LOCAL", "org/name="),
        ("KERNEL_LOADER_LOCAL", "org/name"),
        ("LOCAL_KERNELS", "org/name"),
        ("LOCAL_KERNELS", "/path:org/name=/path"),
    ],
)
def test_a_value_that_cannot_be_read_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({variable: value})
    assert caught.value.variable == variable
    assert caught.value.value == value
    assert variable in str(caught.value)


def test_disable_takes_names_with_commas_or_spaces_between() -> None:
    environ = {"KERNEL_LOADER_DISABLE": " activation, finegrained-fp8  rotary,,"}
    assert Settings.from_env(environ).disable == {"activation", "finegrained-fp8", "rotary"}


def test_advisories_to_ignore_are_ids_with_commas_or_spaces_between() -> None:
    environ = {"KERNEL_LOADER_IGNORE_ADVISORIES": "deep-gemm-devices, all,"}
    assert Settings.from_env(environ).ignore_advisories == {"deep-gemm-devices", "all"}
    assert Settings(ignore_advisories=["all"]).ignore_advisories == frozenset({"all"})
    with pytest.raises(SettingsError, match="a collection of texts"):
        Settings(ignore_advisories="all")


def test_preferred_kernels_are_lists_for_capabilities() -> None:
    environ = {"KERNEL_LOADER_PREFER": " attention = my_attention, flash-attn2 ;rms_norm=liger_kernels;"}
    preferred = {"attention": ("my_attention", "flash-attn2"), "rms_norm": ("liger_kernels",)}
    assert Settings.from_env(environ).prefer == preferred
    assert Settings(prefer={"moe": ["mine"]}).prefer == {"moe": ("mine",)}
    with pytest.raises(SettingsError, match="for each key of prefer"):
        Settings(prefer={"moe": "mine"})


@pytest.mark.parametrize("value", ["attention", "attention=", "=a", "attention=a=b", "a=b;a=c", "attention:flash"])
def test_preferences_of_another_form_are_refused(value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"KERNEL_LOADER_PREFER": value})
    assert (caught.value.variable, caught.value.value) == ("KERNEL_LOADER_PREFER", value)


def test_manifests_are_directories_in_their_order() -> None:
    environ = {"KERNEL_LOADER_MANIFESTS": os.pathsep.join(["/b", "", "/a"])}
    assert Settings.from_env(environ).manifests == (Path("/b"), Path("/a"))


def test_overrides_keep_empty_values_which_mean_absent() -> None:
    environ = {"KERNEL_LOADER_OVERRIDE_CUDA": "12.8", "KERNEL_LOADER_OVERRIDE_ROCM": "", "OVERRIDE_ARCH": "9.0"}
    assert Settings.from_env(environ).overrides == {"CUDA": "12.8", "ROCM": ""}


def local(**environ: str) -> dict[str, str]:
    return {repo: str(path) for repo, path in Settings.from_env(environ).local.items()}


def test_local_takes_several_entries() -> None:
    value = os.pathsep.join(["org/a=/x/y", "other.org/b-c_d=relative/path"])
    assert local(KERNEL_LOADER_LOCAL=value) == {"org/a": "/x/y", "other.org/b-c_d": "relative/path"}


def test_our_local_wins_over_that_of_other_loaders_entry_by_entry() -> None:
    both = local(LOCAL_KERNELS="org/a=/theirs:org/b=/theirs", KERNEL_LOADER_LOCAL="org/a=/ours")
    assert both == {"org/a": "/ours", "org/b": "/theirs"}


def test_two_directories_for_one_repository_are_refused() -> None:
    with pytest.raises(SettingsError, match="org/a has two"):
        local(LOCAL_KERNELS="org/a=/x:org/a=/y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("org/a=C:\\x", {"org/a": "C:\\x"}),
        ("org/a=C:\\x;org/b=D:\\y z", {"org/a": "C:\\x", "org/b": "D:\\y z"}),
        ("org/a=C:\\x:org/b=D:/y", {"org/a": "C:\\x", "org/b": "D:/y"}),
        ("org/a=/x;org/b=/y:org/c=/z", {"org/a": "/x", "org/b": "/y", "org/c": "/z"}),
        ("org/a=/x=1/y=2:org/b=/z=", {"org/a": "/x=1/y=2", "org/b": "/z="}),
        ("org/a=/x:y", {"org/a": "/x:y"}),
        (":org/a=/x::org/b=/y:", {"org/a": "/x", "org/b": "/y"}),
    ],
)
def test_separators_and_equals_signs_inside_a_path_belong_to_it(value: str, expected: dict[str, str]) -> None:
    assert local(LOCAL_KERNELS=value) == expected


@pytest.mark.skipif(os.pathsep != ":", reason="a semicolon separates entries here")
def test_a_semicolon_is_a_character_of_a_path_where_it_is_no_path_separator() -> None:
    assert local(KERNEL_LOADER_LOCAL="org/a=/x;org/b=/y") == {"org/a": "/x;org/b=/y"}


def test_settings_made_in_python_are_checked() -> None:
    with pytest.raises(SettingsError, match="fallback"):
        Settings(fallback="slow")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="a collection"):
        Settings(disable="finegrained_fp8")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="a collection"):
        Settings(manifests="directory")  # type: ignore[arg-type]
    assert Settings(local={"org/a": "x"}, cache="y").local == {"org/a": Path("x")}  # type: ignore[dict-item, arg-type]


def test_a_misspelt_variable_is_told(caplog) -> None:
    Settings.from_env({"KERNEL_LOADER_OVERIDE_CUDA": "12.8", "KERNEL_LOADER_FALBACK": "error"})
    assert [r.getMessage() for r in caplog.records] == [
        "KERNEL_LOADER_OVERIDE_CUDA is no setting",
        "KERNEL_LOADER_FALBACK is no setting; did you mean KERNEL_LOADER_FALLBACK?",
    ]


@pytest.mark.parametrize(
    ("value", "seconds"), [("", 86400), ("90", 90), ("1.5h", 5400), ("2d", 172800), ("0", 0), ("30s", 30), ("5m", 300)]
)
def test_the_time_until_a_version_is_asked_about_again(value: str, seconds: float) -> None:
    assert Settings.from_env({"KERNEL_LOADER_REFRESH_AFTER": value}).refresh_after == seconds


@pytest.mark.parametrize("value", ["soon", "-1", "1w", "1e9", "h"])
def test_a_time_that_cannot_be_read_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="KERNEL_LOADER_REFRESH_AFTER"):
        Settings.from_env({"KERNEL_LOADER_REFRESH_AFTER": value})


def test_the_home_of_an_unknown_user_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match="KERNEL_LOADER_MANIFESTS"):
        Settings.from_env({"KERNEL_LOADER_MANIFESTS": "~no-such-user/x"})


def test_offline_is_also_that_of_the_hub_client() -> None:
    assert Settings.from_env({"HF_HUB_OFFLINE": "1"}).offline
    assert Settings.from_env({"KERNEL_LOADER_OFFLINE": "yes"}).offline
    assert not Settings.from_env({}).offline


def test_the_store_is_where_the_setting_says_or_in_the_users_cache() -> None:
    assert Settings.from_env({"KERNEL_LOADER_CACHE": "/x/y"}).cache == Path("/x/y")
    assert Settings.from_env({}).cache.name == "kernel-loader"


HOME, HERE = Path.home(), Path.cwd()


@pytest.mark.parametrize(
    ("entries", "cache", "shared"),
    [
        (["/x"], Path("/x"), ()),
        (["/x", "/y", "/z"], Path("/x"), (Path("/y"), Path("/z"))),
        (["", "/x", "", "/y", ""], Path("/x"), (Path("/y"),)),
        (["/x", "/y", "/x", "/z", "/y/"], Path("/x"), (Path("/y"), Path("/z"))),
        (["x", "y"], HERE / "x", (HERE / "y",)),
        (["~/x", "~"], HOME / "x", (HOME,)),
        (["", ""], Settings().cache, ()),
    ],
)
def test_of_several_stores_the_first_is_written_and_the_others_are_shared(entries, cache, shared) -> None:
    settings = Settings.from_env({"KERNEL_LOADER_CACHE": os.pathsep.join(entries)})
    assert (settings.cache, settings.shared) == (cache.absolute(), shared)
    assert Settings(cache=cache, shared=shared) == settings


def test_shared_stores_made_in_python_are_paths() -> None:
    assert Settings(cache="x", shared=["y", "x"]).shared == (HERE / "y",)  # type: ignore[arg-type, list-item]
    with pytest.raises(SettingsError, match="manifests and shared"):
        Settings(shared="y")  # type: ignore[arg-type]


def test_each_of_several_stores_needs_a_home_that_is_known() -> None:
    with pytest.raises(SettingsError, match="KERNEL_LOADER_CACHE"):
        Settings.from_env({"KERNEL_LOADER_CACHE": os.pathsep.join(["/x", "~no-such-user/y"])})
