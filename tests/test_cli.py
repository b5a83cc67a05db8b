"""The command line as a person and a program see it: answers, exit status, and errors of one paragraph."""

import json
import os
import subprocess
import sys

import pytest

from kernel_loader.host import Host
from tests.builds import H200, write_build
from tests.hosts import HOSTS


@pytest.fixture
def run(workshop, cpu_machine):
    """Run a command in a process of its own; gives its exit status, output and errors."""

    def run(*arguments, **environ):
        local = os.pathsep.join(f"{repo}={path}" for repo, path in workshop.local.items())
        settings = {"KERNEL_LOADER_MANIFESTS": str(workshop.manifests), "KERNEL_LOADER_LOCAL": local} | environ
        done = subprocess.run(
            [sys.executable, "-m", "kernel_loader", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | settings,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def test_host_shows_every_fact_with_its_source_and_reads_back(run):
    status, out, _ = run("host")
    assert status == 0
    assert "platform.machine" in out
    status, out, _ = run("host", "--json")
    assert Host.from_json(out) == Host.detect(
        dict.fromkeys(("CUDA", "ROCM", "XPU", "CANN", "METAL", "NEURON", "TPU"), "")
    )


def test_host_applies_overrides(run):
    status, out, _ = run("host", KERNEL_LOADER_OVERRIDE_CUDA="12.8", KERNEL_LOADER_OVERRIDE_ARCH="9.0,9.0")
    assert status == 0
    assert "KERNEL_LOADER_OVERRIDE_CUDA" in out
    assert "9.0, 9.0" in out


def test_list_shows_what_each_kernel_would_take_here(run, workshop):
    workshop.simple("my_kernel", summary="Doubles")
    workshop.kernel("broken_kernel")
    status, out, _ = run("list")
    assert status == 0
    assert "my_kernel\n    Doubles\n    org/my-kernel\n    here: torch-universal\n" in out
    rows = {row["name"]: row for row in json.loads(run("list", "--json")[1])["kernels"]}
    assert rows["my_kernel"]["build"] == "torch-universal"
    assert rows["finegrained_fp8"]["build"] == "torch-universal (reference)"
    assert rows["rmsnorm"]["build"].startswith("not known yet")
    assert rows["broken_kernel"]["build"].startswith("none: ")
    assert "there are no builds in it" in rows["broken_kernel"]["build"]


def test_explain_answers_for_this_host_and_for_others(run, workshop, tmp_path):
    write_build(workshop.kernel("my_kernel"), "torch211-cxx11-cu130-x86_64-linux")
    file = tmp_path / "h200.json"
    file.write_text(H200.to_json())
    status, out, _ = run("explain", "my_kernel", "--host", file)
    assert status == 0
    assert "→ torch211-cxx11-cu130-x86_64-linux" in out
    status, out, _ = run("explain", "my_kernel")
    assert status == 1
    assert "✗ torch211-cxx11-cu130-x86_64-linux" in out
    status, out, _ = run("explain", "org/my-kernel@3", "--host", file, "--json")
    assert status == 0
    assert json.loads(out)["repo"] == "org/my-kernel@v3"
    assert json.loads(run("explain", "org/my-kernel@some-branch", "--host", file, "--json")[1])["repo"].endswith(
        "@some-branch"
    )


def test_explain_of_a_kernel_that_only_its_reference_serves_succeeds(run):
    status, out, _ = run("explain", "finegrained-fp8")
    assert status == 0
    assert "Chosen: torch-universal, the reference" in out


@pytest.fixture
def tesla_t4(tmp_path):
    file = tmp_path / "t4.json"
    file.write_text(HOSTS["T4"].to_json())
    return file


def test_explain_offline_tells_what_is_known_without_builds(run, workshop, tesla_t4):
    keys = {"requires": {"cuda-capability": ">=7"}, "alternatives": [{"repo": "org/other", "version": 1}]}
    workshop.kernel("my_kernel", reference="mine", **keys)
    workshop.local.clear()
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    (workshop.manifests / "advisories.toml").write_text(
        '[[advisories]]\nid = "a-b"\nrepo = "org/my-kernel"\neffect = "warn"\nfault = "it fails"\nremedy = "Stop."\n'
        'source = "issue 1"\n'
    )
    status, out, err = run("explain", "my_kernel", "--host", tesla_t4)
    assert status == 1
    assert "its builds are unknown: it is not on this machine" in out
    assert "known fault a-b: it fails" in out
    assert "org/other@v1\n  it is asked where no build above fits" in out
    assert "✓ torch-universal" in out or "→ torch-universal" in out
    assert out.endswith("Chosen: not known\n")
    assert "Run `kernel-loader prefetch`" in err
    status, out, _ = run("explain", "my_kernel", "--host", tesla_t4, "--json")
    document = json.loads(out)
    assert status == 1
    assert "must not be asked" in document["undecided"]
    assert document["reference"]["chosen"] == "torch-universal"
    status, out, err = run("explain", "my_kernel", "--host", tesla_t4, KERNEL_LOADER_FALLBACK="reference")
    assert (status, err) == (0, "")
    assert out.endswith("Chosen: torch-universal, the reference\n")
    assert run("load", "my_kernel", KERNEL_LOADER_FALLBACK="reference")[0] == 0


def test_what_the_manifest_decides_needs_no_hub(run, workshop, tesla_t4):
    workshop.kernel("my_kernel", reference="mine", requires={"cuda-capability": ">=9"})
    workshop.local.clear()
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    status, out, err = run("explain", "my_kernel", "--host", tesla_t4)
    assert (status, err) == (0, "")
    assert "  whatever builds it has, the kernel needs compute capability >=9, and a visible device has 7.5\n" in out
    assert out.endswith("Chosen: torch-universal, the reference\n")


def test_a_capability_offline_tells_what_is_known(run, workshop):
    (workshop.manifests / "capabilities.toml").write_text('[doubling]\norder = ["unknown_kernel"]\n')
    workshop.kernel("unknown_kernel", capabilities={"doubling": []})
    workshop.local.clear()
    workshop.simple("my_kernel", capabilities={"doubling": []}, reference="mine")
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    status, out, err = run("explain", "doubling")
    assert status == 1
    assert "unknown_kernel  may have a build here" in out
    assert out.endswith("Chosen: not known\n")
    assert "must not be asked" in err
    for command in ("explain", "load"):
        assert run(command, "doubling")[0] == 1
        status, out, _ = run(command, "doubling", KERNEL_LOADER_FALLBACK="reference")
        assert status == 0
        assert "my_kernel" in out


def test_other_repositories_and_embedded_builds_are_shown(run, workshop, tmp_path):
    alternatives = [{"repo": "org/other", "version": 1}]
    write_build(workshop.kernel("my_kernel", alternatives=alternatives, reference="mine"), "torch-rocm")
    write_build(workshop.manifests / "registry" / "mine", "torch-cuda")
    other = workshop.root / "repositories" / "other"
    write_build(other, "torch-cpu")
    workshop.local["org/other"] = other
    assert "here: torch-cpu of org/other@v1" in run("list")[1]
    status, out, _ = run("explain", "my_kernel")
    assert status == 0
    assert out.endswith("Chosen: torch-cpu, of org/other@v1\n")
    file = tmp_path / "h200.json"
    file.write_text(H200.to_json())
    status, out, _ = run("explain", "my_kernel", "--host", file)
    assert status == 0
    assert out.endswith("Chosen: torch-cuda, embedded\n")
    assert json.loads(run("load", "my_kernel", "--json")[1])["repo"] == "org/other"
    status, out, _ = run("prefetch", "my_kernel", "--host", file)
    assert status == 0
    assert out.startswith("my_kernel  torch-cuda  ")


def test_guards_and_advisories_are_shown(run, workshop):
    workshop.simple("my_kernel", guards={"double": ["no-gradient"]})
    (workshop.manifests / "advisories.toml").write_text(
        '[[advisories]]\nid = "a-b"\nrepo = "org/my-kernel"\neffect = "warn"\nfault = "it fails"\nremedy = "Stop."\n'
        'source = "issue 1"\n'
    )
    status, out, _ = run("explain", "my_kernel")
    assert status == 0
    assert "known fault a-b: it fails\n" in out
    assert "Guarded: double: no-gradient" in out
    status, out, err = run("load", "my_kernel")
    assert status == 0
    assert "guards       double: no-gradient" in out
    assert "my_kernel has a known fault a-b: it fails. Stop. Reported: issue 1." in err
    assert json.loads(run("load", "my_kernel", "--json")[1])["guards"] == ["double: no-gradient"]
    assert "ignored by" in run("explain", "my_kernel", KERNEL_LOADER_IGNORE_ADVISORIES="a-b")[1]


def test_a_capability_may_stand_where_a_kernel_does(run, workshop):
    (workshop.manifests / "capabilities.toml").write_text('[doubling.features]\nodd = "odd numbers too"\n')
    workshop.simple("my_kernel", capabilities={"doubling": ["odd"]})
    workshop.simple("plain_kernel", capabilities={"doubling": []})
    assert "    offers: doubling[odd]\n" in run("list")[1]
    status, out, _ = run("explain", "doubling[odd]")
    assert status == 0
    assert "  → my_kernel     has a build here\n  ✗ plain_kernel  lacks odd\n" in out
    assert json.loads(run("explain", "doubling", "--json")[1])["kernel"] == "my_kernel"
    assert json.loads(run("load", "doubling[odd]", "--json")[1])["kernel"] == "my_kernel"
    preferred = {"KERNEL_LOADER_PREFER": "doubling=plain_kernel"}
    assert json.loads(run("load", "doubling", "--json", **preferred)[1])["kernel"] == "plain_kernel"
    assert run("prefetch", "doubling[odd]")[1].startswith("my_kernel  torch-universal  ")
    assert "Did you mean doubling[odd]?" in run("load", "doubling[od]")[2]


def test_load_shows_what_was_loaded_from_where(run, workshop):
    build = workshop.simple("my_kernel")
    status, out, _ = run("load", "my_kernel")
    assert status == 0
    assert str(build) in out
    facts = json.loads(run("load", "my_kernel", "--json")[1])
    assert facts["variant"] == "torch-universal"
    assert facts["entrypoints"] == ["double"]


def test_seal_writes_digests_and_check_finds_stale_ones(run, workshop):
    build = workshop.simple("my_kernel")
    assert run("seal", build, "--check")[0] == 1
    assert run("seal", build) == (0, f"sealed  {build}\n", "")
    assert run("seal", build) == (0, f"up to date  {build}\n", "")
    assert run("seal", build, "--check")[0] == 0
    (build / "__init__.py").write_text("x = 1")
    status, out, _ = run("seal", build, "--check", "--json")
    assert status == 1
    assert json.loads(out) == {"changed": [str(build)]}
    assert run("load", "my_kernel")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["explain", "no_such_kernel"], 1, "No kernel or capability is registered"),
        (["load", "finegraned_fp8"], 1, "Did you mean finegrained_fp8?"),
        (["prefetch", "org/no-such-repository"], 1, "it is not on this machine, and the Hub must not be asked"),
        (["load", "finegrained_fp8", "--backend", "rocm"], 1, "this host has cpu"),
        (["load"], 2, "Missing argument"),
        (["load", "finegrained_fp8", "--fallback", "maybe"], 2, "--fallback"),
        (["explain", "finegrained_fp8", "--host", "no-such-file.json"], 2, "does not exist"),
        (["seal", "no-such-directory"], 2, "does not exist"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_a_wrong_command_is_answered_in_a_paragraph(run, arguments, status, said):
    found, out, err = run(*arguments)
    assert (found, out) == (status, "")
    assert said in err
    if status == 1:
        assert err.startswith("kernel-loader: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KERNEL_LOADER_FALLBACK", "maybe"),
        ("KERNEL_LOADER_LOCAL", "nonsense"),
        ("KERNEL_LOADER_STRICT", "perhaps"),
        ("KERNEL_LOADER_OVERRIDE_FLUX", "1"),
        ("KERNEL_LOADER_OVERRIDE_CUDA", "twelve"),
    ],
)
def test_a_wrong_setting_is_answered_in_a_paragraph_that_names_it(run, variable, value):
    for command in (["load", "finegrained_fp8"], ["explain", "finegrained_fp8"]):
        status, out, err = run(*command, **{variable: value})
        assert (status, out) == (1, "")
        assert f"{variable}={value!r}" in err
        assert err.count("\n") == 1


def test_garbage_on_every_side_is_answered_in_a_paragraph(run, workshop, tmp_path):
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b"\xff\xfe\x00garbage")
    assert run("explain", "finegrained_fp8", "--host", garbage)[0] == 1
    build = workshop.simple("my_kernel")
    (build / "metadata.json").write_bytes(b"\xff\xfe\x00garbage")
    for command in (["load", "my_kernel"], ["explain", "my_kernel"], ["seal", build]):
        status, _, err = run(*command)
        assert status == 1
        assert err.count("\n") == 1
        assert "metadata.json" in err
    (workshop.manifests / "my_kernel.toml").write_bytes(b"\xff\xfe\x00garbage")
    status, _, err = run("load", "my_kernel")
    assert status == 1
    assert "my_kernel.toml" in err


def test_a_kernel_that_raises_at_import_is_answered_in_a_paragraph(run, workshop):
    workshop.simple("my_kernel", "raise RuntimeError('line one\\nline two')")
    status, _, err = run("load", "my_kernel")
    assert status == 1
    assert "RuntimeError: line one line two" in err
    assert err.count("\n") == 1


def test_the_help_names_every_command(run):
    status, out, _ = run("--help")
    assert status == 0
    for command in ("host", "list", "explain", "load", "seal"):
        assert f"  {command} " in out
    assert run("--version")[1].startswith("kernel-loader")


def test_list_shows_capabilities_and_in_which_order_their_kernels_are_asked(run, workshop):
    (workshop.manifests / "capabilities.toml").write_text(
        '[doubling]\nsummary = "Twice"\norder = ["plain_kernel"]\n[doubling.features]\nodd = "odd numbers too"\n'
    )
    workshop.simple("my_kernel", capabilities={"doubling": ["odd"]})
    workshop.simple("plain_kernel", capabilities={"doubling": []})
    assert (
        "doubling\n    Twice\n    odd: odd numbers too\n    asked in this order: plain_kernel, my_kernel\n"
        in run("list")[1].partition("Capabilities:\n")[2]
    )
    document = json.loads(run("list", "--json")[1])
    assert {row["name"]: row["offers"] for row in document["kernels"]}["my_kernel"] == {"doubling": ["odd"]}
    doubling = next(one for one in document["capabilities"] if one["name"] == "doubling")
    assert doubling["order"] == ["plain_kernel", "my_kernel"]
    assert doubling["features"] == {"odd": "odd numbers too"}


def test_a_reader_that_has_enough_hears_no_complaint(run):
    command = f"{sys.executable} -m kernel_loader list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=True, env=os.environ)
    assert done.stderr == ""
