"""Machines that kernels are resolved for: each a kind that people have, with what its torch brings."""

from kernel_loader.host import Host, HostDevice

_LINUX = {"os": "linux", "cpu": "x86_64", "glibc": "2.39", "python": "3.12.3", "cxx11_abi": True}
_TRITON = {"triton": "3.7.0"}
_MORE = {"einops": "0.8.1", "apache-tvm-ffi": "0.1.9", "nvidia-cutlass-dsl": "4.5.0", "transformers": "5.0.0"}


def _device(arch: str, name: str) -> tuple[HostDevice, ...]:
    return (HostDevice(arch=arch, name=name),)


# In the order in which the table of the catalogue shows them. Few have the packages that some kernels need.
HOSTS = {
    "cpu": Host(**_LINUX, torch="2.13.0+cpu"),
    "cpu-arm": Host(**_LINUX | {"cpu": "aarch64"}, torch="2.13.0+cpu"),
    "T4": Host(
        **_LINUX,
        torch="2.12.1+cu126",
        cuda="12.6",
        driver="550.163.01",
        devices=_device("7.5", "Tesla T4"),
        packages=_TRITON,
    ),
    "A100": Host(
        **_LINUX,
        torch="2.13.0+cu126",
        cuda="12.6",
        driver="560.35.05",
        devices=_device("8.0", "NVIDIA A100"),
        packages=_TRITON | {"einops": "0.8.1"},
    ),
    "H200": Host(
        **_LINUX,
        torch="2.13.0+cu130",
        cuda="13.0",
        driver="580.159.04",
        cuda_toolkit="13.0",
        devices=_device("9.0", "NVIDIA H200"),
        tvm_ffi="0.1.9",
        packages=_TRITON | _MORE,
    ),
    "B200": Host(
        **_LINUX,
        torch="2.13.0+cu132",
        cuda="13.2",
        driver="595.45.04",
        cuda_toolkit="13.2",
        devices=_device("10.0", "NVIDIA B200"),
        tvm_ffi="0.1.9",
        packages=_TRITON | _MORE,
    ),
    "GB10": Host(
        **_LINUX | {"cpu": "aarch64"},
        torch="2.13.0+cu130",
        cuda="13.0",
        driver="580.95.05",
        devices=_device("12.1", "NVIDIA GB10"),
        packages=_TRITON,
    ),
    "MI250": Host(
        **_LINUX,
        torch="2.12.1+rocm7.1",
        rocm="7.1",
        devices=_device("gfx90a", "AMD Instinct MI250X"),
        packages={"triton-rocm": "3.7.0"},
    ),
    "MI300": Host(
        **_LINUX,
        torch="2.13.0+rocm7.2",
        rocm="7.2",
        devices=_device("gfx942", "AMD Instinct MI300X"),
        packages={"triton-rocm": "3.7.0"},
    ),
    "PVC": Host(**_LINUX, torch="2.13.0+xpu", xpu="2026.0", packages={"triton-xpu": "3.7.0"}),
    "Mac": Host(os="darwin", cpu="aarch64", macos="26.1", python="3.12.3", torch="2.13.0", metal=True),
    "Win": Host(
        os="windows",
        cpu="x86_64",
        python="3.12.3",
        torch="2.13.0+cu130",
        cuda="13.0",
        driver="581.42",
        devices=_device("8.9", "NVIDIA GeForce RTX 4090"),
    ),
}
