"""`doctor`: all that decides what loads on one page, whatever is broken, and without a word to the network."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from kernel_loader.diagnosis import LEAST_FREE, diagnose, without_secrets
from kernel_loader.host import Host, HostDevice
from kernel_loader.settings import VARIABLES, Settings
from tests.builds import CPU_HOST, H200, NO_ACCELERATOR, write_build
from tests.hosts import HOSTS
from tests.published.conftest import REPO, files, own_hf_cache, site

__all__ = ["own_hf_cache", "site"]  # fixtures

VARIANT = "torch-universal"


@pytest.fixture
def environ(tmp_path):
    """An environment in which nothing is wrong."""
    return {"KERNEL_LOADER_CACHE": str(tmp_path / "store")}


@pytest.fixture
def run():
    """The command in a process of its own: exit status, output, errors."""

    def run(*arguments, **environ):
        done = subprocess.run(
            [sys.executable, "-m", "kernel_loader", "doctor", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"KERNEL_LOADER_OFFLINE": "0"} | environ,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def found(diagnosis):
    return {(finding.severity, finding.problem) for finding in diagnosis.findings}


def host(like, **changes):
    return Host(**{name: getattr(like, name) for name in like.__dataclass_fields__} | changes)


def test_of_a_machine_where_all_is_well_nothing_is_found(environ):
    for machine in (CPU_HOST, H200, *HOSTS.values()):
        seen = diagnose(environ, machine)
        if machine in (HOSTS["PVC"], HOSTS["Mac"]):
            assert not seen.fails  # some facts of these are not known
        else:
            assert seen.findings == ()
        assert len(seen.kernels) > 50


GPU = {"devices": (HostDevice("9.0"),), "driver": "580.95.05"}


@pytest.mark.parametrize(
    ("machine", "severity", "problem", "remedy"),
    [
        (host(CPU_HOST, torch=None), "error", "torch cannot be found", "Install torch"),
        (
            host(H200, driver=None, devices=()),
            "error",
            "needs an NVIDIA driver, 580 or later; none",
            "Install an NVIDIA",
        ),
        (
            host(H200, driver="535.54"),
            "error",
            "needs an NVIDIA driver, 580 or later; this is 535.54",
            "Install an NVID",
        ),
        (host(H200, devices=()), "error", "needs a cuda device, and none is visible", "Look at CUDA_VISIBLE_DEVICES"),
        (host(HOSTS["MI300"], devices=()), "error", "needs a rocm device", "Look at HIP_VISIBLE_DEVICES"),
        (
            host(H200, driver=None, unknown=frozenset({"driver"}), provenance={"driver": "no answer in 5 s"}),
            "warning",
            "driver (no answer in 5 s)",
            "the description can tell it",
        ),
    ],
)
def test_a_machine_on_which_torch_cannot_compute_is_told(environ, machine, severity, problem, remedy):
    (finding,) = diagnose(environ, machine).findings
    assert finding.severity == severity
    assert problem in finding.problem
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("variable", "value", "severity", "problem"),
    [
        ("KERNEL_LOADER_STRICT", "maybe", "error", "KERNEL_LOADER_STRICT='maybe' cannot be read"),
        ("KERNEL_LOADER_FALLBACK", "never", "error", "KERNEL_LOADER_FALLBACK='never' cannot be read"),
        ("KERNEL_LOADER_LOCAL", "nonsense", "error", "KERNEL_LOADER_LOCAL='nonsense' cannot be read"),
        ("KERNEL_LOADER_LOCAL", "org/x={tmp}/none", "error", "{tmp}/none: No such file or directory"),
        ("KERNEL_LOADER_PREFER", "attention=nobody", "error", "KERNEL_LOADER_PREFER='nobody' cannot be read"),
        ("KERNEL_LOADER_MANIFESTS", "{tmp}/none", "error", "KERNEL_LOADER_MANIFESTS='{tmp}/none' cannot be read"),
        ("KERNEL_LOADER_LOCK", "{tmp}/none", "error", "Lock file {tmp}/none: there is no such file"),
        ("KERNEL_LOADER_LOCK", "{file}", "error", "Lock file {file}: not TOML"),
        ("KERNEL_LOADER_CACHE", "{file}", "error", "The store at {file} is no directory"),
        ("KERNEL_LOADER_CACHE", "{file}/below", "error", "The store at {file}/below is no directory"),
        ("KERNEL_LOADER_CACHE", "{tmp}/a:{tmp}/none", "warning", "The store at {tmp}/none is not there"),
        ("KERNEL_LOADER_OFFLINE", "1", "error", "Offline, and no build is here"),
        ("HF_HUB_OFFLINE", "1", "error", "Offline, and no build is here"),
        ("HF_HUB_OFFLINE", "perhaps", "error", "HF_HUB_OFFLINE='perhaps' cannot be read"),
        ("KERNEL_LOADER_DISABLE", "flash-attn3,relu", "note", "Disabled: flash_attn3, relu."),
        ("KERNEL_LOADER_DISABLE", "my_relu", "warning", "KERNEL_LOADER_DISABLE names what is no kernel: my_relu"),
        ("KERNEL_LOADER_DISABLE_MAPPING", "1", "note", "`kernelize` replaces no layer"),
        ("KERNEL_LOADER_IGNORE_ADVISORIES", "all", "note", "Advisories are not heeded: all"),
        (
            "KERNEL_LOADER_FALBACK",
            "error",
            "warning",
            "KERNEL_LOADER_FALBACK is no setting; did you mean KERNEL_LOADER_F",
        ),
        ("KERNEL_LOADER_QUITE_ANOTHER_THING", "error", "warning", "KERNEL_LOADER_QUITE_ANOTHER_THING is no setting."),
    ],
)
@pytest.mark.usefixtures("own_hf_cache")
def test_each_setting_that_is_wrong_or_may_surprise_is_one_finding(
    environ, tmp_path, capfd, variable, value, severity, problem
):
    file = tmp_path / "file"
    file.write_text("garbage")
    names = {"tmp": str(tmp_path), "file": str(file)}
    seen = diagnose(environ | {variable: value.format(**names).replace(":", os.pathsep)}, CPU_HOST)
    (finding,) = seen.findings
    assert finding.severity == severity
    assert problem.format(**names) in finding.problem
    assert finding.remedy
    assert seen.fails == (severity == "error")
    assert len(seen.kernels) > 50
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["flux", "FLUX=1"])
def test_an_override_that_cannot_be_read_is_told_and_the_machine_too(environ, value):
    name, _, said = value.partition("=")
    seen = diagnose(environ | {f"KERNEL_LOADER_OVERRIDE_{name}": said, "KERNEL_LOADER_OVERRIDE_TORCH": "2.9.0"})
    assert any(f"KERNEL_LOADER_OVERRIDE_{name}='{said}' cannot be read" in problem for _, problem in found(seen))
    torch = next(fact for fact in seen.machine if fact.name == "torch")
    assert torch == ("torch", "2.9.0", "KERNEL_LOADER_OVERRIDE_TORCH")


def test_overrides_in_force_are_told_where_they_count(environ):
    variables = environ | NO_ACCELERATOR | {"KERNEL_LOADER_OVERRIDE_TORCH": "2.13.0+cpu"}
    (finding,) = (finding for finding in diagnose(variables).findings if finding.severity == "note")
    assert "KERNEL_LOADER_OVERRIDE_CUDA=, " in finding.problem
    assert "KERNEL_LOADER_OVERRIDE_TORCH=2.13.0+cpu" in finding.problem
    assert diagnose(variables, CPU_HOST).findings == ()


def test_an_overridden_backend_names_its_variable(environ):
    for variable, note in (("CUDA", "KERNEL_LOADER_OVERRIDE_CUDA"), ("ROCM", "KERNEL_LOADER_OVERRIDE_ROCM")):
        seen = diagnose(environ | {f"KERNEL_LOADER_OVERRIDE_{variable}": "7.2"})
        assert next(fact for fact in seen.machine if fact.name == "backend") == (
            "backend",
            f"{variable.lower()} 7.2",
            note,
        )


@pytest.fixture
def open_hf_cache(open_path, monkeypatch):
    """A Hugging Face cache that every user may read."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(open_path / "hub"))


@pytest.mark.usefixtures("open_hf_cache")
def test_a_store_that_cannot_be_written_is_an_error_and_offline_a_warning(open_path, unprivileged):
    home = open_path / "store"
    home.mkdir(mode=0o555)
    environ = {"KERNEL_LOADER_CACHE": str(home)}
    with unprivileged():
        online = diagnose(environ, CPU_HOST)
        offline = diagnose(environ | {"KERNEL_LOADER_OFFLINE": "1"}, CPU_HOST)
    assert found(online) == {("error", f"The store at {home} cannot be written.")}
    assert ("warning", f"The store at {home} cannot be written.") in found(offline)
    assert not online.directories[0].writable


def test_a_store_that_cannot_be_read_is_told(open_path, unprivileged):
    (open_path / "store").mkdir(mode=0o000)
    with unprivileged():
        seen = diagnose({"KERNEL_LOADER_CACHE": str(open_path / "store")}, CPU_HOST)
    assert ("error", f"The store at {open_path / 'store'} cannot be read.") in found(seen)
    assert len(seen.findings) < 4  # and not one for each kernel
    assert len(seen.kernels) > 50


def test_a_disk_that_is_nearly_full_is_told(environ, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=LEAST_FREE - 1))
    seen = diagnose(environ, CPU_HOST)
    ((severity, problem),) = found(seen)
    assert severity == "warning"
    assert f"has {LEAST_FREE - 1:,} B left" in problem
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=LEAST_FREE))
    assert found(diagnose(environ, CPU_HOST)) == set()


def test_a_manifest_that_cannot_be_read_takes_no_other_kernel_with_it(environ, workshop):
    build = workshop.simple("my_kernel")
    (workshop.manifests / "wrong.toml").write_bytes(b"\xff")
    local = {"KERNEL_LOADER_LOCAL": f"org/my-kernel={build}", "KERNEL_LOADER_MANIFESTS": str(workshop.manifests)}
    seen = diagnose(environ | local, CPU_HOST)
    kernels = {kernel.name: kernel for kernel in seen.kernels}
    assert kernels["wrong"].state == "does not load"
    assert kernels["my_kernel"] == ("my_kernel", "ready", VARIANT, "local directory", "")
    assert any("wrong.toml" in problem for severity, problem in found(seen) if severity == "error")


def test_of_each_kernel_is_told_what_would_load_without_the_network(site, environ):
    manifests = {"KERNEL_LOADER_MANIFESTS": str(site.manifests)}

    def kernel(name="kernel", machine=CPU_HOST, **more):
        seen = diagnose(environ | manifests | more, machine)
        return next(kernel for kernel in seen.kernels if kernel.name == name), seen

    assert kernel()[0].state == "not known"
    site.loader().load("kernel")
    ready, seen = kernel()
    assert ready == ("kernel", "ready", VARIANT, "store", "")
    assert (seen.directories[0].builds, seen.directories[0].size) == (1, sum(map(len, files().values())))
    elsewhere = {"KERNEL_LOADER_CACHE": os.pathsep.join([str(site.root / "own"), str(site.store)])}
    assert kernel(**elsewhere)[0] == ready
    shutil.move(site.build(), site.root / "away")
    assert kernel()[0] == ("kernel", "to fetch", VARIANT, "", "")
    shutil.move(site.root / "away", site.store / "builds" / Path(next((site.store / "receipts").iterdir())).stem)
    (site.build() / "part3.py").write_text("part = 4\n")
    damaged, seen = kernel()
    assert damaged.state == "does not load"
    assert any("part3.py has other content" in problem for _, problem in found(seen))
    reference = kernel("finegrained_fp8")[0]
    assert (reference.state, reference.build) == ("reference", VARIANT)
    assert reference.why == "for cuda, rocm, xpu, and not cpu"
    refused = kernel("finegrained_fp8", KERNEL_LOADER_FALLBACK="error")[0]
    assert (refused.state, refused.why) == ("does not load", "KERNEL_LOADER_FALLBACK=error refuses the reference")
    assert kernel("moe_experts", HOSTS["H200"])[0][1:] == ("ready", "torch-cuda", "embedded", "")


def test_a_dependency_that_is_not_here_keeps_a_kernel_from_being_ready(site, environ):
    build = {name: content for name, content in files().items() if not name.endswith("metadata.json")}
    needs = {"name": "kernel", "version": 1, "python-depends": [], "kernel-depends": {}}
    needs["kernel-depends"] = [{"repo-id": "org/other", "version": 1}]
    site.publish(build | {f"build/{VARIANT}/metadata.json": json.dumps(needs).encode()})
    other = site.hub.kernel("org/other")
    other.commit(files(), branch="v1")
    loader = site.loader()
    environ |= {"KERNEL_LOADER_MANIFESTS": str(site.manifests)}
    loader.prefetch("kernel", trust_remote_code=True)

    def state():
        return next(kernel.state for kernel in diagnose(environ, CPU_HOST).kernels if kernel.name == "kernel")

    assert state() == "ready"
    for file in (site.store / "index").glob("org--other*"):
        file.unlink()
    for receipt in (site.store / "receipts").iterdir():
        if "org/other" in receipt.read_text():
            receipt.unlink()
    assert state() == "to fetch"


def test_nothing_is_asked_of_the_network(site, run):
    environ = site.environ()
    status, out, _ = run(**environ)
    assert status == 0
    assert "not known until the Hub is asked" in out
    assert not site.hub.counts()
    site.loader().load("kernel")
    before = site.hub.counts()
    assert before
    status, out, _ = run("--json", **environ)
    assert {"name": "kernel", "state": "ready", "build": VARIANT, "where": "store", "why": ""} in json.loads(out)[
        "kernels"
    ]
    assert site.hub.counts() == before


def test_the_page_fits_a_terminal_and_ends_with_the_findings(run, environ, tmp_path):
    for name, machine in HOSTS.items():
        file = tmp_path / f"{name}.json"
        file.write_text(machine.to_json())
        status, out, _ = run("--host", file, **environ)
        lines = out.splitlines()
        assert status == 0
        assert lines[0] == f"Machine, by {file}"
        assert len(lines) <= 60, name
        assert max(len(line) for line in lines) <= max(100, len(str(file)) + 20)
        assert "No findings." in lines or "Findings" in lines


def test_every_kernel_is_on_the_page_or_counted_there(run, environ):
    overrides = dict.fromkeys((f"KERNEL_LOADER_OVERRIDE_{n}" for n in ("CUDA", "ROCM", "XPU", "METAL")), "")
    out = run(**environ, **overrides)[1]
    kernels = json.loads(run("--json", **environ, **overrides)[1])["kernels"]
    words = set(out.replace(",", " ").replace(":", " ").split())
    assert {kernel["name"] for kernel in kernels} <= words


def test_when_everything_is_broken_the_page_is_printed_all_the_same(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("garbage")
    broken = dict.fromkeys(VARIABLES, str(file)) | {"LOCAL_KERNELS": "x", "HF_HUB_OFFLINE": "x"}
    status, page, err = run(**broken, KERNEL_LOADER_OVERRIDE_CUDA="twelve", KERNEL_LOADER_OVERRIDE_FLUX="1")
    assert (status, err) == (1, "")
    for section in ("Machine", "Versions", "Settings", "Store", "Kernels", "Findings"):
        assert f"\n{section}" in f"\n{page}"
    out = " ".join(page.split())
    for variable in (
        "STRICT",
        "FALLBACK",
        "LOCAL",
        "OFFLINE",
        "REFRESH_AFTER",
        "PREFER",
        "DISABLE_MAPPING",
        "MANIFESTS",
    ):
        assert f"error: KERNEL_LOADER_{variable}=" in out
    for said in ("LOCAL_KERNELS='x'", "HF_HUB_OFFLINE='x'", "OVERRIDE_CUDA='twelve'", "OVERRIDE_FLUX='1'", "Lock file"):
        assert said in out
    assert "rmsnorm" in out
    order = [line.split(":")[0].strip() for line in page.split("\nFindings\n")[1].splitlines() if line[2] != " "]
    assert order == sorted(order, key=["error", "warning", "note"].index)


def test_without_torch_the_page_says_so(run_python, environ):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kernel_loader.cli import main\n"
        "try: main(['doctor'])\n"
        "except SystemExit as end: print('exit', end.code)\n"
    )
    out = run_python(code, env=environ)
    assert "  torch         none\n" in out
    assert "error: torch cannot be found. Install torch" in out
    assert out.endswith("exit 1\n")


def test_torch_is_not_imported(run_python, environ):
    code = (
        "import sys; from kernel_loader.diagnosis import diagnose\n"
        "print(len(diagnose().kernels), 'torch' in sys.modules)"
    )
    count, imported = run_python(code, env=environ).split()
    assert int(count) > 50
    assert imported == "False"


SECRET = "hf_abcdefghijklmnop"


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("HTTPS_PROXY", "http://user:pass@proxy:3128", "HTTPS_PROXY: http://***@proxy:3128"),
        ("https_proxy", "http://user:pa/ss@word@proxy:3128/", "https_proxy: http://***@proxy:3128/"),
        ("ALL_PROXY", "user:pass@proxy:3128", "ALL_PROXY: ***@proxy:3128"),
        ("HTTP_PROXY", "http://proxy:3128", "HTTP_PROXY: http://proxy:3128"),
        ("HF_ENDPOINT", "https://user:pass@hub.example/x?token=pass#pass", "HF_ENDPOINT: https://***@hub.example/x"),
        ("HF_ENDPOINT", "https://hub.example", "HF_ENDPOINT: https://hub.example"),
        ("KERNEL_LOADER_LOCK", "https://user:pass@host/lock", "https:/***@host/lock"),
        ("KERNEL_LOADER_LOCAL", "https://user:pass@host/x", "https://***@host/x"),
        ("HF_TOKEN", SECRET, "token: there, in HF_TOKEN"),
        ("HUGGING_FACE_HUB_TOKEN", "another pass", "token: there, in HUGGING_FACE_HUB_TOKEN"),
        ("KERNEL_LOADER_LOCAL", f"org/x=/{SECRET}", "/hf_***"),
    ],
)
def test_no_secret_is_on_the_page(run, environ, variable, value, shown):
    for arguments in ((), ("--json",)):
        _, out, err = (
            run(*arguments, **environ, HF_TOKEN="", **{variable: value})
            if variable != "HF_TOKEN"
            else run(*arguments, **environ, HF_TOKEN=value)
        )
        assert err == ""
        for secret in ("pass", "pa/ss", "user", SECRET):
            assert secret not in out
        assert (shown if not arguments else shown.rpartition(": ")[2]) in " ".join(out.split())


def test_the_value_of_a_token_is_taken_out_wherever_it_stands():
    environ = {"HF_TOKEN": "a-secret"}
    assert without_secrets("x a-secret//y/a-secret", environ) == "x ***//y/***"
    assert without_secrets("org/name@3 user@host //u@h/x", {}) == "org/name@3 user@host //***@h/x"


def test_of_each_setting_is_told_which_variable_says_it(environ, tmp_path):
    manifests = str(tmp_path)
    more = {"KERNEL_LOADER_STRICT": "1", "HF_HUB_OFFLINE": "1", "KERNEL_LOADER_OFFLINE": "0", "LOCAL_KERNELS": ""}
    more |= {"KERNEL_LOADER_MANIFESTS": manifests, "KERNEL_LOADER_PREFER": "attention=flash_attn2,flash_attn3"}
    settings = {setting.name: setting for setting in diagnose(environ | more, CPU_HOST).settings}
    assert set(settings) == set(Settings.__dataclass_fields__)
    assert settings["strict"] == ("strict", "yes", ("KERNEL_LOADER_STRICT",))
    assert settings["offline"].variables == ("HF_HUB_OFFLINE",)
    assert settings["manifests"] == ("manifests", manifests, ("KERNEL_LOADER_MANIFESTS",))
    assert settings["prefer"].value == "attention=flash_attn2,flash_attn3"
    assert settings["cache"].variables == ("KERNEL_LOADER_CACHE",)
    assert settings["local"] == ("local", "none", ())
    assert settings["refresh_after"] == ("refresh_after", "86400 s", ())


@pytest.fixture
def locked(site):
    """A lock of a kernel that has a build for the CPU."""
    variant = "torch213-cxx11-cpu-x86_64-linux"
    site.publish(files(variant=variant))
    file = site.root / "kernel-loader.lock"
    file.write_text(site.loader().make_lock(["kernel"]).to_toml())
    return {"KERNEL_LOADER_LOCK": str(file), "KERNEL_LOADER_MANIFESTS": str(site.manifests)}, variant


def test_of_a_lock_is_told_what_it_names_and_what_runs_here(locked, environ):
    variables, variant = locked
    seen = diagnose(environ | variables, CPU_HOST)
    assert seen.findings == ()
    assert seen.lock == (variables["KERNEL_LOADER_LOCK"], 1, {"kernel": variant})
    kernels = {kernel.name: kernel for kernel in seen.kernels}
    assert (kernels["kernel"].state, kernels["kernel"].build) == ("to fetch", variant)
    assert (kernels["relu"].state, kernels["relu"].why) == ("does not load", "not in the lock")


def test_a_locked_kernel_without_a_build_here_is_found(locked, environ, site):
    variables, _ = locked
    machine = host(CPU_HOST, cpu="aarch64")
    seen = diagnose(environ | variables, machine)
    (finding,) = seen.findings
    assert finding.severity == "error"
    assert "The lock names kernel and no build of it runs here (built for x86_64, this is aarch64)" in finding.problem
    assert seen.lock.kernels == {"kernel": ""}
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(f'reference = "mine"\n{manifest.read_text()}')
    write_build(site.manifests / "registry" / "mine", VARIANT)
    (finding,) = diagnose(environ | variables, machine).findings
    assert finding.severity == "warning"
    assert "its slow reference is taken" in finding.problem


def test_a_locked_repository_without_a_name_and_without_a_build_here_is_found(environ, site):
    site.publish(files(variant="torch-rocm"))
    file = site.root / "kernel-loader.lock"
    file.write_text(site.loader().make_lock([f"{REPO}@1"], trust_remote_code=True).to_toml())
    (finding,) = diagnose(environ | {"KERNEL_LOADER_LOCK": str(file)}, CPU_HOST).findings
    assert finding.severity == "error"
    assert f"The lock names {REPO}@1 and no build of it runs here" in finding.problem


def test_a_lock_of_another_version_is_found(locked, environ, site):
    variables, _ = locked
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(manifest.read_text().replace("version = 1", "version = 2"))
    (finding,) = diagnose(environ | variables, CPU_HOST).findings
    assert finding.severity == "error"
    assert "it has org/kernel at v1, and v2 is asked for" in finding.problem
    assert "kernel-loader lock" in finding.remedy


def test_a_lock_of_commits_alone_is_told(environ, tmp_path):
    file = tmp_path / "kernels.lock"
    file.write_text(json.dumps([{"dependency": {"repo-id": REPO}, "lock": {"repo-id": REPO, "commit": "a" * 40}}]))
    seen = diagnose(environ | {"KERNEL_LOADER_LOCK": str(file)}, CPU_HOST)
    assert seen.lock == (str(file), 1, {})
    assert not seen.fails


def test_installed_packages_of_builds_are_told(site, run, environ):
    wheel = site.root / "my_kernels-1.0-py3-none-any.whl"
    bundle = site.loader(Host.from_json(CPU_HOST.to_json())).export(["kernel"], wheel, wheel=True)
    packages = site.root / "packages"
    zipfile.ZipFile(wheel).extractall(packages)
    home = packages / "kernel_loader_builds" / "my_kernels"
    status, out, _ = run(**environ, PYTHONPATH=str(packages))
    assert status == 0
    assert f"package       {home}: 1 build, {bundle.size:,} B" in out.replace("\n" + " " * 16, " ")
    (home / "bundle.json").write_text("garbage")
    status, out, _ = run("--json", **environ, PYTHONPATH=str(packages))
    assert status == 1
    (finding,) = json.loads(out)["findings"]
    assert "bundle.json" in finding["problem"]
