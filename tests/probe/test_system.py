"""Operating system, CPU and C library, for every system by argument."""

import platform

import pytest

from kernel_loader.probe import system


@pytest.mark.parametrize(
    ("answers", "os", "cpu"),
    [
        (("Linux", "x86_64"), "linux", "x86_64"),
        (("Linux", "aarch64"), "linux", "aarch64"),
        (("Linux", "riscv64"), "linux", "riscv64"),
        (("Darwin", "arm64"), "darwin", "aarch64"),
        (("Darwin", "x86_64"), "darwin", "x86_64"),
        (("Windows", "AMD64"), "windows", "x86_64"),
        (("Windows", "ARM64"), "windows", "aarch64"),
        (("FreeBSD", "amd64"), "freebsd", "x86_64"),
    ],
)
def test_systems_and_cpus_have_one_name_each(answers: tuple[str, str], os: str, cpu: str) -> None:
    facts = system.probe(*answers)
    assert (facts["os"].value, facts["cpu"].value) == (os, cpu)
    assert all(fact.known for fact in facts.values())
    assert facts.keys() == {"os", "cpu", "macos", "glibc"}


@pytest.mark.parametrize("name", ["Darwin", "Windows", "FreeBSD"])
def test_glibc_is_known_to_be_absent_elsewhere(name: str) -> None:
    assert system.probe(name, "x86_64")["glibc"].value is None


@pytest.mark.parametrize(
    ("answer", "version"),
    [("glibc 2.36", "2.36"), ("glibc 2.28", "2.28"), ("glibc", None), ("musl 1.2.5", None), ("", None)],
)
def test_glibc_is_read_from_the_answer_of_confstr(answer: str, version: str | None) -> None:
    assert system.glibc(answer).value == version


def test_this_machine_is_what_the_standard_library_says() -> None:
    facts = system.probe()
    assert facts["os"].value == platform.system().lower()
    if platform.libc_ver()[0] == "glibc":
        assert facts["glibc"].value == platform.libc_ver()[1]


def test_macos_has_a_release_on_macs_only(monkeypatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    assert system.probe("Darwin", "arm64")["macos"].value == "26.1"
    assert system.probe("Linux", "x86_64")["macos"].value is None
