"""One script on layers, for either package: what becomes of a layer in each case. Run by bench/layers_agreement.py.

    python bench/layers_cases.py PACKAGE KERNELS

PACKAGE is kernels or kernel_loader, KERNELS a directory with the kernels that the cases use. Prints JSON.
"""

import contextlib
import copy
import importlib
import json
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

k = importlib.import_module(sys.argv[1])
KERNELS = Path(sys.argv[2])
logging.disable(logging.CRITICAL)

INFER, TRAIN, COMPILE, REST = k.Mode.INFERENCE, k.Mode.TRAINING, k.Mode.TORCH_COMPILE, k.Mode.FALLBACK
MODES = {"I": INFER, "T": TRAIN, "I|C": INFER | COMPILE, "T|C": TRAIN | COMPILE, "F": REST}
CASES: dict[str, Callable[[], object]] = {}


def case(name: str) -> Callable[[Callable[[], object]], None]:
    """Register a case."""
    return lambda function: CASES.update({name: function})


def repo(layer: str = "Double", kernel: str = "kernel") -> object:
    """A layer of a kernel in a directory."""
    return k.LocalLayerRepository(KERNELS / kernel, layer_name=layer)


def layer(name: str = "Layer", **members: object) -> nn.Module:
    """A module whose own forward gives what it gets."""
    cls = type("Layer", (nn.Module,), {"forward": lambda self, x: x, **members})
    k.use_kernel_forward_from_hub(name)(cls)
    module = cls()
    module.weight = nn.Parameter(torch.ones(1))
    return module


def outcome(module: nn.Module) -> str:
    """Which forward a call runs: the module's own, or that of a kernel, which doubles."""
    return {1: "original", 2: "kernel", 3: "other kernel"}.get(int(module(torch.tensor(1.0))), "?")


def kernelized(module: nn.Module, mapping: object, mode: object = INFER, **options: object) -> str:
    """Kernelize one module, and see what it runs."""
    with k.use_kernel_mapping(mapping, inherit_mapping=False):
        k.kernelize(module, mode=mode, **options)
    return outcome(module)


def cpu(repository: object, name: str = "Layer") -> dict[str, object]:
    """A mapping for the CPU."""
    return {name: {"cpu": repository}}


for there, registered in MODES.items():
    for wanted, asked in list(MODES.items())[:4]:
        CASES[f"registered for {there}, asked for {wanted}"] = lambda r=registered, a=asked: kernelized(
            layer(), cpu({r: repo()}), a
        )
CASES |= {
    "no mapping": lambda: kernelized(layer(), {}),
    "mapping for another device": lambda: kernelized(layer(), {"Layer": {"cuda": repo()}}),
    "no mapping, no fallback": lambda: kernelized(layer(), {}, use_fallback=False),
    "other device, no fallback": lambda: kernelized(layer(), {"Layer": {"cuda": repo()}}, use_fallback=False),
    "other mode, no fallback": lambda: kernelized(layer(), cpu({TRAIN: repo()}), INFER | COMPILE, use_fallback=False),
    "no directory, default fallback": lambda: kernelized(layer(), cpu(repo(kernel="none"))),
    "no directory, KernelizeFallback.DEFAULT": lambda: kernelized(
        layer(), cpu(repo(kernel="none")), use_fallback=k.KernelizeFallback.DEFAULT
    ),
    "no directory, KernelizeFallback.ALL": lambda: kernelized(
        layer(), cpu(repo(kernel="none")), use_fallback=k.KernelizeFallback.ALL
    ),
    "kernel raises at import, KernelizeFallback.ALL": lambda: kernelized(
        layer(), cpu(repo(kernel="broken")), use_fallback=k.KernelizeFallback.ALL
    ),
    "layer that is not there, KernelizeFallback.ALL": lambda: kernelized(
        layer(), cpu(repo("None")), use_fallback=k.KernelizeFallback.ALL
    ),
    "no backward, asked for T": lambda: kernelized(layer(), cpu({REST: repo("NoBackward")}), TRAIN),
    "no torch.compile, asked for I|C": lambda: kernelized(layer(), cpu({REST: repo("NoCompile")}), INFER | COMPILE),
    "no backward, registered for T": lambda: kernelized(layer(), cpu({TRAIN: repo("NoBackward")}), TRAIN),
    "layer with a constructor": lambda: kernelized(layer(), cpu(repo("Constructor"))),
    "layer with a member": lambda: kernelized(layer(), cpu(repo("Member"))),
    "layer with two parameters for one": lambda: kernelized(layer(), cpu(repo("TwoParameters"))),
    "parameter by keyword alone": lambda: kernelized(layer(), cpu(repo("Keyword"))),
    "condition refuses": lambda: kernelized(conditional(lambda module: False), cpu(repo())),
    "condition agrees": lambda: kernelized(conditional(lambda module: True), cpu(repo())),
    "INFERENCE | TRAINING": lambda: INFER | TRAIN,
    "FALLBACK | INFERENCE": lambda: REST | INFER,
    "kernelize for FALLBACK": lambda: kernelized(layer(), cpu(repo()), REST),
    "kernelize for TORCH_COMPILE alone": lambda: kernelized(layer(), cpu(repo()), COMPILE),
    "device that is none": lambda: kernelized(layer(), cpu(repo()), device="gpu"),
    "device given": lambda: kernelized(layer(), cpu(repo()), device="cpu"),
    "properties the wrong way round": lambda: k.Device("cuda", k.CUDAProperties(90, 80)) and "made",
    "properties of another vendor": lambda: k.Device("cuda", k.ROCMProperties(80, 90)) and "made",
}


def conditional(condition: Callable[[nn.Module], bool]) -> nn.Module:
    """A layer with a condition."""
    cls = type("Layer", (nn.Module,), {"forward": lambda self, x: x})
    k.use_kernel_forward_from_hub("Layer", condition=condition)(cls)
    module = cls()
    module.weight = nn.Parameter(torch.ones(1))
    return module


@case("parameter of another name, called by it")
def _() -> object:
    module = layer(forward=lambda self, hidden: hidden)
    with k.use_kernel_mapping(cpu(repo()), inherit_mapping=False):
        k.kernelize(module, mode=INFER)
    return int(module(hidden=torch.tensor(1.0)))


@case("subclass with a forward of its own")
def _() -> object:
    base = layer()
    cls = type("Own", (type(base),), {"forward": lambda self, x: x * 1})
    module = cls()
    module.weight = base.weight
    return kernelized(module, cpu(repo()))


@case("mappings stack")
def _() -> object:
    module = layer()
    with k.use_kernel_mapping(cpu(repo()), inherit_mapping=False):
        with k.use_kernel_mapping({"Other": {"cpu": repo("Triple")}}):
            k.kernelize(module, mode=INFER)
        inside = outcome(module)
        with k.use_kernel_mapping({}, inherit_mapping=False):
            k.kernelize(module, mode=INFER)
    return f"{inside}, {outcome(module)}"


@case("a block in one thread, kernelize in another")
def _() -> object:
    module, entered, done = layer("Threads"), threading.Event(), threading.Event()

    def hold() -> None:
        with k.use_kernel_mapping(cpu(repo(), "Threads"), inherit_mapping=False):
            entered.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(20)
    k.kernelize(module, mode=INFER)
    done.set()
    thread.join(20)
    return outcome(module)


@case("two users name one class")
def _() -> object:
    module = layer("Theirs")
    k.replace_kernel_forward_from_hub(type(module), "Mine")
    return kernelized(module, cpu(repo(), "Theirs"))


@case("kernelized for I, then for T without a kernel")
def _() -> object:
    module = layer()
    first = kernelized(module, cpu({INFER: repo()}))
    return f"{first}, {kernelized(module, cpu({INFER: repo()}), TRAIN)}"


@case("deepcopy of a kernelized layer, its weight changed")
def _() -> object:
    module = layer()
    kernelized(module, cpu(repo("TimesWeight")))
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.fill_(3)
    return [m(torch.tensor(1.0)).item() for m in (module, copied)]


@case("forward wrapped on the module before")
def _() -> object:
    module = layer()
    own = module.forward
    module.forward = lambda x: own(x) + 100
    with k.use_kernel_mapping(cpu(repo()), inherit_mapping=False):
        k.kernelize(module, mode=INFER)
    return int(module(torch.tensor(1.0)))


@case("a function as a layer")
def _() -> object:
    @k.use_kernel_forward_from_hub("function")
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    cls = k.use_kernelized_func(function)(type("Caller", (nn.Module,), {"forward": lambda self, x: function(x)}))
    module = cls()
    module.weight = nn.Parameter(torch.ones(1))
    return kernelized(module, cpu(repo(), "function"))


class Pickled(nn.Module):
    """Can be pickled by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give it back."""
        return x


k.use_kernel_forward_from_hub("Pickled")(Pickled)


@case("pickled, and read in another process")
def _() -> object:
    module = Pickled()
    kernelized(module, cpu(repo(), "Pickled"))
    data = pickle.dumps(module)
    script = f"import sys; sys.argv[1:] = {sys.argv[1:]!r}; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    script += "import layers_cases, pickle; sys.modules['__main__'].Pickled = layers_cases.Pickled\n"
    script += f"print(layers_cases.outcome(pickle.loads({data!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout or done.stderr).splitlines()[-1]


def models() -> dict[str, object]:
    """A tiny Llama and a tiny mixture of experts of transformers, random weights, before and after."""
    import transformers
    from transformers.models.llama import modeling_llama
    from transformers.models.mixtral import modeling_mixtral

    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny |= {"num_key_value_heads": 2, "vocab_size": 100}
    found: dict[str, object] = {}
    for name, config, module, norm in (
        ("Llama", transformers.LlamaConfig(**tiny), modeling_llama.LlamaForCausalLM, modeling_llama.LlamaRMSNorm),
        (
            "Mixtral",
            transformers.MixtralConfig(**tiny, num_local_experts=4),
            modeling_mixtral.MixtralForCausalLM,
            modeling_mixtral.MixtralRMSNorm,
        ),
    ):
        k.replace_kernel_forward_from_hub(norm, "Norm")
        torch.manual_seed(0)
        model = module(config).eval()
        ids = torch.arange(20).view(2, 10)
        with torch.no_grad():
            before = model(ids).logits
            with k.use_kernel_mapping(cpu(repo("RMSNorm", "rmsnorm"), "Norm"), inherit_mapping=False):
                k.kernelize(model, mode=INFER)
            after = model(ids).logits
        norms = [m for m in model.modules() if isinstance(m, norm)]
        used = sum("rmsnorm" in m.forward.__func__.__code__.co_filename for m in norms)
        close = torch.allclose(before, after, atol=1e-5)
        found[name] = {"norms": len(norms), "by kernel": used, "close": close, "logits": after.double().sum().item()}
    return found


def main() -> None:
    """Run all cases."""
    found: dict[str, object] = {}
    for name, run in CASES.items():
        try:
            found[name] = str(run())
        except Exception as error:  # noqa: BLE001 - what is raised is the outcome
            base = next((b.__name__ for b in type(error).__mro__ if b.__module__ == "builtins"), "")
            found[name] = f"raises {base}"
    with contextlib.redirect_stdout(sys.stderr):
        found["models"] = models()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
