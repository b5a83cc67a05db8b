"""kernelize: in place, all or nothing, and the model back as it was."""

import copy
import gc
import io
import logging
import pickle
import subprocess
import sys
import textwrap
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import kernel_loader
from kernel_loader import (
    Device,
    KernelizeError,
    KernelizeFallback,
    LayerRepository,
    LocalLayerRepository,
    Mode,
    RequestError,
    api,
    kernelize,
    kernelize_report,
    replace_kernel_forward_from_hub,
    unkernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)
from kernel_loader.layers.fit import unsupported
from kernel_loader.layers.mapping import shipped_mapping
from kernel_loader.layers.swap import _warn_of_training
from kernel_loader.loader import KernelLoader
from kernel_loader.settings import Settings
from tests.builds import CPU_HOST, write_build
from tests.layers.conftest import Model, Scale

MODES = [
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
]


def mapped(repository, name="Scale", device="cpu"):
    return use_kernel_mapping({name: {device: repository}}, inherit_mapping=False)


def kernelized(model, repository, mode=Mode.INFERENCE, **options):
    with mapped(repository):
        return kernelize(model, mode=mode, **options)


def codes(model):
    return {(row.layer, row.code): row.total for row in kernelize_report(model).layers}


# --- replaced, and back ---------------------------------------------------------------------------------------------


def test_a_layer_gets_the_forward_of_its_kernel_and_gives_it_back(kernel, x):
    model = Model()
    before = model(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    instance = dict(model.first.__dict__)
    assert kernelized(model, kernel()) is model
    assert torch.equal(model.first(x), 10 * x * model.first.weight)
    assert isinstance(model.first, Scale)
    assert [type(model.first).__name__, type(model.first).__module__] == ["Scale", Scale.__module__]
    assert model.state_dict().keys() == state.keys()
    assert codes(model) == {("Scale", "used"): 2}
    unkernelize(model)
    assert torch.equal(model(x), before)
    assert type(model.first) is Scale
    assert model.first.__dict__ == instance
    assert codes(model) == {("Scale", "not-kernelized"): 2}


def test_nothing_stands_between_the_call_and_the_kernel(kernel):
    model = kernelized(Model(), kernel())
    forward = type(model.first).forward
    assert "forward" not in model.first.__dict__
    assert forward.__module__.startswith("kernel_loader.loaded.")
    assert forward.__code__.co_filename.endswith("layers.py")


def test_doing_it_again_changes_nothing_more(kernel, x):
    repository = kernel()
    model = kernelized(Model(), repository)
    cls = type(model.first)
    kernelized(model, repository)
    assert type(model.first) is cls
    kernelized(model, kernel(factor=3))
    assert torch.equal(model.first(x), 3 * x * model.first.weight)
    unkernelize(model)
    assert type(model.first) is Scale


def test_another_mode_takes_another_kernel_or_gives_the_forward_back(kernel, x):
    modes = {Mode.INFERENCE: kernel(factor=2), Mode.TRAINING: kernel(factor=3)}
    model = kernelized(Model(), modes)
    assert torch.equal(model.first(x), 2 * x * model.first.weight)
    kernelized(model, modes, Mode.TRAINING)
    assert torch.equal(model.first(x), 3 * x * model.first.weight)
    kernelized(model, modes, Mode.TRAINING | Mode.TORCH_COMPILE)
    assert type(model.first) is Scale
    assert codes(model) == {("Scale", "no-mode"): 2}


def test_a_model_without_a_kernel_is_warned_of_and_refused_where_that_is_strict(kernel, caplog):
    kernelized(nn.Linear(2, 2), kernel())
    assert "replaced no layer. the model has no layer that mappings could know" in caplog.text
    caplog.clear()
    with use_kernel_mapping({}, inherit_mapping=False):
        kernelize(Model(), mode=Mode.INFERENCE)
        assert "replaced no layer. Scale: no mapping has the name Scale" in caplog.text
        with pytest.raises(KernelizeError, match="not one was replaced"):
            kernelize(Model(), mode=Mode.INFERENCE, strict=True)
    kernelized(Model(), kernel(), strict=True)


def test_each_kernel_is_told_of_once(kernel, caplog):
    caplog.set_level(logging.INFO, logger="kernel_loader")
    kernelized(nn.Sequential(*(Scale() for _ in range(5))), kernel())
    assert sum("layer Scale takes" in message for message in caplog.messages) == 1


# --- fallbacks ------------------------------------------------------------------------------------------------------


CASES = {
    "no-layer": ({"Other": {"cpu": "kernel"}}, KernelizeFallback.NO_LAYER),
    "no-device": ({"Scale": {"cuda": "kernel"}}, KernelizeFallback.NO_DEVICE),
    "no-properties": (
        {"Scale": {Device("cpu", kernel_loader.CapabilityRange(1, 2)): "kernel"}},
        KernelizeFallback.NO_COMPATIBLE_PROPERTIES,
    ),
    "no-mode": (
        {"Scale": {"cpu": {Mode.TRAINING | Mode.TORCH_COMPILE: "kernel"}}},
        KernelizeFallback.NO_COMPATIBLE_MODE,
    ),
    "cannot-load": ({"Scale": {"cpu": "gone"}}, KernelizeFallback.CANNOT_LOAD),
    "misfit": ({"Scale": {"cpu": "misfit"}}, KernelizeFallback.CANNOT_LOAD),
}


@pytest.mark.parametrize(("code", "case"), CASES.items(), ids=CASES)
def test_every_reason_is_covered_by_a_fallback_of_its_own(kernel, tmp_path, x, code, case):
    mapping, flag = case
    repositories = {
        "kernel": kernel(),
        "gone": LocalLayerRepository(tmp_path / "gone", layer_name="Scale"),
        "misfit": kernel(layers="from torch import nn\nclass Scale(nn.Module):\n    def forward(self, x, y): ..."),
    }

    def filled(value):
        return {k: filled(v) for k, v in value.items()} if isinstance(value, dict) else repositories[value]

    mode = Mode.INFERENCE | Mode.TORCH_COMPILE if code == "no-mode" else Mode.INFERENCE
    if code == "no-mode":
        mapping = {"Scale": {"cpu": {Mode.TRAINING: "kernel"}}}
    with use_kernel_mapping(filled(mapping), inherit_mapping=False):
        for allowed in (True, KernelizeFallback.ALL, flag):
            model = kernelize(Model(), mode=mode, use_fallback=allowed)
            assert codes(model) == {("Scale", code): 2}
            assert torch.equal(model.first(x), x * model.first.weight)
        for refused in (False, KernelizeFallback.NONE, KernelizeFallback.ALL & ~flag):
            model = Model()
            with pytest.raises(kernel_loader.KernelLoaderError):
                kernelize(model, mode=mode, use_fallback=refused)
            assert type(model.first) is Scale


FAILURES = {
    "raises": "raise RuntimeError('broken')",
    "exits": "import sys; sys.exit(1)",
    "needs a package": "import no_such_package_here",
    "syntax": "this is no Python",
    "memory": "raise MemoryError",
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_fallback_covers_every_failure_of_loading(kernel, failure):
    model = kernelized(Model(), kernel(init=failure))
    assert codes(model) == {("Scale", "cannot-load"): 2}


def test_a_repository_of_the_users_own_may_raise_whatever_it_likes():
    class Own:
        def load(self, backend=None):
            raise LookupError("not today")

    assert codes(kernelized(Model(), Own())) == {("Scale", "cannot-load"): 2}
    with mapped(Own()), pytest.raises(KernelizeError, match="LookupError: not today"):
        kernelize(Model(), mode=Mode.INFERENCE, use_fallback=False)


def test_nothing_is_replaced_when_a_later_layer_raises(kernel, tmp_path):
    @use_kernel_forward_from_hub("Other")
    class Other(nn.Module):
        def forward(self, x):
            return x

    model = nn.Sequential(Scale(), Other())
    mapping = {"Scale": {"cpu": kernel()}, "Other": {"cpu": LocalLayerRepository(tmp_path / "no", layer_name="Other")}}
    with use_kernel_mapping(mapping, inherit_mapping=False), pytest.raises(kernel_loader.KernelLoaderError):
        kernelize(model, mode=Mode.INFERENCE, use_fallback=False)
    assert type(model[0]) is Scale
    assert codes(model) == {("Scale", "not-kernelized"): 1, ("Other", "not-kernelized"): 1}


@pytest.mark.parametrize(
    ("layer", "mode", "used"),
    [
        ("Scale", Mode.TRAINING | Mode.TORCH_COMPILE, True),
        ("NoBackward", Mode.INFERENCE, True),
        ("NoBackward", Mode.TRAINING, False),
        ("NoCompile", Mode.TRAINING, True),
        ("NoCompile", Mode.INFERENCE | Mode.TORCH_COMPILE, False),
    ],
)
def test_what_a_layer_says_of_itself_is_believed(kernel, layer, mode, used):
    model = kernelized(Model(), kernel(layer), mode)
    assert codes(model) == {("Scale", "used" if used else "no-mode"): 2}


@pytest.mark.parametrize("registered", [*MODES, Mode.FALLBACK], ids=str)
@pytest.mark.parametrize("asked", MODES, ids=str)
def test_a_kernel_serves_the_modes_that_it_is_tried_for(kernel, registered, asked):
    model = kernelized(Model(), {registered: kernel()}, asked, use_fallback=True)
    assert codes(model) == {("Scale", "used" if registered in asked.tried else "no-mode"): 2}


@pytest.fixture
def faulty(kernel, monkeypatch, cpu_machine, tmp_path):
    """A repository with an advisory against training its layer Scale and its function; gives one of its layers."""
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "advisories.toml").write_text("""
[[advisories]]
id = "lost"
repo = "org/scales"
effect = "warn"
no-training = ["Scale", "double"]
fault = "the gradient is lost"
remedy = "Stop."
source = "a test"
""")
    root = kernel(init="double = layers.double\n").repo_path
    monkeypatch.setenv("KERNEL_LOADER_LOCAL", f"org/scales={root}")
    monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(tmp_path / "manifests"))
    kernel_loader.api.reset()
    yield lambda layer: LayerRepository("org/scales", layer_name=layer, version=1)
    kernel_loader.api.reset()


LOST = "its gradient is known to be wrong or missing (advisory lost)"


def test_a_layer_whose_gradient_is_known_to_be_wrong_is_for_inference_alone(faulty, caplog):
    infer = kernelized(Model(), faulty("Scale"))
    assert {row.code for row in kernelize_report(infer).layers} == {"used"}
    train = kernelized(Model(), faulty("Scale"), Mode.TRAINING)
    assert codes(train) == {("Scale", "no-mode"): 2}
    assert kernelize_report(train).layers[0].message == f"org/scales@1:Scale is not for TRAINING: {LOST}"
    with pytest.raises(KernelizeError, match="advisory lost"):
        kernelized(Model(), faulty("Scale"), Mode.TRAINING, use_fallback=False)
    assert not any("known fault" in record.getMessage() for record in caplog.records)
    assert codes(kernelized(Model(), faulty("NoCompile"), Mode.TRAINING)) == {("Scale", "used"): 2}


def test_a_layer_that_must_not_be_trained_follows_the_mode(faulty, x):
    model = kernelized(Model(), faulty("Scale"), Mode.TRAINING, follow_mode=True)
    own = unkernelize(kernelized(Model(), faulty("Scale")))
    own.load_state_dict(model.state_dict())
    assert torch.equal(model(x), own(x))
    assert {row.code for row in kernelize_report(model.eval()).layers} == {"used"}
    assert not torch.equal(model(x), own(x))


def test_a_function_whose_gradient_is_known_to_be_wrong_is_for_inference_alone(faulty):
    assert faulty("double").load().untrained == "lost"
    assert faulty("NoBackward").load().untrained == ""


def test_an_advisory_that_is_ignored_keeps_nothing_out_of_training(faulty, monkeypatch):
    monkeypatch.setenv("KERNEL_LOADER_IGNORE_ADVISORIES", "lost")
    kernel_loader.api.reset()
    assert codes(kernelized(Model(), faulty("Scale"), Mode.TRAINING)) == {("Scale", "used"): 2}


@pytest.mark.parametrize(
    ("repo", "name", "kernel_layer", "version"),
    [("liger-kernels", "RMSNorm", "LigerRMSNorm", 3), ("activation", "SiLU", "Silu", 1)],
)
def test_what_ships_does_not_train_a_layer_without_a_right_gradient(
    monkeypatch, tmp_path, repo, name, kernel_layer, version
):
    """A build of the version with the fault, in the place of the published one, for the mapping that ships."""
    source = f"from torch import nn\nclass {kernel_layer}(nn.Module):\n    can_torch_compile = True\n"
    source += "    def forward(self, x): return x\n"
    files = {"__init__.py": "from . import layers\n", "layers.py": source}
    mode = Mode.TRAINING if name == "RMSNorm" else Mode.INFERENCE | Mode.TORCH_COMPILE
    for number in (version, version + 1):
        root = tmp_path / str(number) / repo
        write_build(root, "torch-universal", files, name=repo, version=number)
        settings = Settings(local={f"kernels-community/{repo}": root}, offline=True, cache=tmp_path / "store")
        monkeypatch.setattr(api, "_DEFAULT", [KernelLoader(settings, replace(CPU_HOST, packages={"triton": "3.4.0"}))])
        layer = shipped_mapping().select(name, "cuda", 90, mode).repository.load("cpu")
        assert not layer.origin.reference
        assert bool(unsupported(layer.cls, Mode.TRAINING, layer.untrained)) == (number == version)
        assert not unsupported(layer.cls, Mode.INFERENCE, layer.untrained)


def test_a_kernel_that_is_registered_for_what_it_cannot_do_is_refused(kernel):
    with mapped({Mode.TRAINING: kernel("NoBackward")}), pytest.raises(KernelizeError, match="no backward pass"):
        kernelize(Model(), mode=Mode.TRAINING, use_fallback=False)


def test_the_environment_can_switch_mappings_off(kernel, monkeypatch):
    monkeypatch.setenv("KERNEL_LOADER_DISABLE_MAPPING", "1")
    model = kernelized(Model(), kernel())
    assert codes(model) == {("Scale", "disabled"): 2}


@pytest.mark.parametrize("mode", [Mode.FALLBACK, Mode.TORCH_COMPILE, "inference", None])
def test_a_mode_that_is_for_mappings_alone_is_refused(mode):
    with pytest.raises(RequestError):
        kernelize(Model(), mode=mode)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x", torch.device("meta")])
def test_a_device_that_is_none_is_refused_or_has_no_kernel(device, kernel):
    if isinstance(device, torch.device):
        assert codes(kernelized(Model(), kernel(), device=device)) == {("Scale", "no-device"): 2}
    else:
        with pytest.raises(RequestError):
            kernelized(Model(), kernel(), device=device)


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_condition_is_asked_of_every_module(kernel, x):
    @use_kernel_forward_from_hub("Scale", condition=lambda module: module.weight[0] > 1)
    class Conditional(Scale):
        def forward(self, x):
            return x

    model = nn.Sequential(Conditional(), Conditional())
    with torch.no_grad():
        model[1].weight += 5
    kernelized(model, kernel())
    assert codes(model) == {("Scale", "condition"): 1, ("Scale", "used"): 1}
    assert torch.equal(model[0](x), x)


def test_a_subclass_inherits_the_name_along_with_forward_and_not_without(kernel):
    class Same(Scale):
        pass

    class Changed(Scale):
        def forward(self, x):
            return -x

    class Deeper(Changed):
        pass

    model = kernelized(nn.Sequential(Same(), Changed(), Deeper()), kernel())
    assert [kernelize_report(layer).layers[0].code for layer in model] == ["used", "overridden", "overridden"]


def test_two_users_name_one_class_without_taking_it_from_each_other(kernel, x):
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x

    replace_kernel_forward_from_hub(Theirs, "OneName")
    replace_kernel_forward_from_hub(Theirs, "OtherName", condition=lambda module: True)
    for name, factor in (("OneName", 2), ("OtherName", 3)):
        with mapped(kernel(factor=factor), name):
            assert torch.equal(kernelize(Theirs(), mode=Mode.INFERENCE)(x), factor * x)
    with use_kernel_mapping({"OneName": {"cpu": kernel()}, "OtherName": {"cpu": kernel(factor=7)}}):
        assert torch.equal(kernelize(Theirs(), mode=Mode.INFERENCE)(x), 7 * x)


def test_classes_that_the_peer_has_named_are_known(kernel, x):
    class Peers(Scale):
        kernel_layer_name = "PeerName"
        kernel_condition = staticmethod(lambda module: module.training)

        def forward(self, x):
            return x

    with mapped(kernel(), "PeerName"):
        model = kernelize(nn.Sequential(Peers(), Peers().eval()), mode=Mode.INFERENCE)
    assert codes(model) == {("PeerName", "used"): 1, ("PeerName", "condition"): 1}


@pytest.mark.parametrize("target", [3, "name", nn.Linear(1, 1)])
def test_only_classes_and_functions_can_be_named(target):
    with pytest.raises(RequestError):
        use_kernel_forward_from_hub("Scale")(target)
    with pytest.raises(RequestError):
        replace_kernel_forward_from_hub(target, "Scale")


# --- functions ------------------------------------------------------------------------------------------------------


def test_a_function_becomes_a_layer_and_is_replaced_for_all_who_call_it(kernel):
    @use_kernel_forward_from_hub("double")
    def double(x, by=2):
        """Doc."""
        return x * by

    @use_kernelized_func(double)
    class Caller(nn.Module):
        def forward(self, x):
            return double(x)

    assert (double.__name__, double.__doc__, double(torch.tensor(2))) == ("double", "Doc.", 4)
    one, two = nn.Sequential(Caller(), nn.Linear(1, 1)), nn.Sequential(Caller(), nn.Linear(1, 1))
    with mapped(kernel("double"), "double"):
        kernelize(one, mode=Mode.INFERENCE)
        assert double(torch.tensor(2)) == two[0](torch.tensor(2)) == 40
        assert codes(one) == codes(two) == {("double", "used"): 1}
        kernelize(two, mode=Mode.INFERENCE)
        unkernelize(one)
        assert double(torch.tensor(2)) == 40
        unkernelize(two)
    assert double(torch.tensor(2)) == 4
    assert not list(one[0].parameters())


def test_a_function_without_a_name_cannot_be_attached():
    with pytest.raises(RequestError, match="use_kernel_forward_from_hub first"):
        use_kernelized_func(lambda x: x)


# --- devices --------------------------------------------------------------------------------------------------------


@use_kernel_forward_from_hub("Activation")
class Activation(nn.Module):
    """Has no parameters of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


ACTIVATION = "from torch import nn\nclass Activation(nn.Module):\n    def forward(self, x):\n        return -x\n"


def test_a_layer_without_parameters_computes_where_those_around_it_do(kernel):
    meta = nn.Sequential(nn.Linear(2, 2, device="meta"), Activation())
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Activation()), nn.Sequential(Activation()), Activation())
    with mapped(kernel("Activation", layers=ACTIVATION), "Activation"):
        assert codes(kernelize(model, mode=Mode.INFERENCE)) == {("Activation", "used"): 3}
        assert codes(kernelize(meta, mode=Mode.INFERENCE)) == {("Activation", "no-device"): 1}
        assert "pass device=" in str(kernelize_report(meta))
        assert codes(kernelize(meta, mode=Mode.INFERENCE, device="cpu")) == {("Activation", "used"): 1}


def test_a_layer_that_is_offloaded_computes_where_its_hook_brings_it(kernel):
    class Hook:
        execution_device = "cpu"

    model = Scale().to("meta")
    model._hf_hook = Hook()
    assert codes(kernelized(model, kernel())) == {("Scale", "used"): 1}


def test_each_layer_of_a_mixed_model_takes_what_is_for_its_own_device(kernel):
    model = nn.Sequential(Scale(), Scale().to("meta"), Scale())
    kernelized(model, kernel())
    assert [type(layer) is Scale for layer in model] == [False, True, False]


# --- wrapped and hooked ---------------------------------------------------------------------------------------------


def test_hooks_go_on_working(kernel, x):
    model, calls = Model(), []
    model.first.register_forward_hook(lambda module, args, output: calls.append("after") or output + 1)
    model.first.register_forward_pre_hook(lambda module, args: calls.append("before"))
    kernelized(model, kernel())
    assert torch.equal(model.first(x), 10 * x * model.first.weight + 1)
    assert calls == ["before", "after"]


def test_a_forward_that_is_wrapped_on_the_module_is_left_alone(kernel, x):
    model = Model()
    original = model.first.forward
    model.first.forward = lambda x: original(x) + 100
    kernelized(model, kernel())
    assert codes(model) == {("Scale", "used"): 1, ("Scale", "wrapped"): 1}
    assert torch.equal(model.first(x), x * model.first.weight + 100)


def test_a_forward_that_is_wrapped_afterwards_calls_the_kernel(kernel, x):
    model = kernelized(Model(), kernel())
    replaced = model.first.forward
    model.first.forward = lambda x: replaced(x) + 100
    assert torch.equal(model.first(x), 10 * x * model.first.weight + 100)


def test_a_forward_that_accelerate_keeps_is_the_kernels(kernel, x):
    model = Model()
    layer = model.first
    layer._old_forward = layer.forward
    layer.forward = lambda x: layer._old_forward(x) + 100
    kernelized(model, kernel())
    assert torch.equal(model.first(x), 10 * x * model.first.weight + 100)
    unkernelize(model)
    assert torch.equal(model.first(x), x * model.first.weight + 100)


def test_adapters_around_a_layer_go_on_working(kernel, x):
    class Adapter(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer, self.lora = base_layer, nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.lora(x)

    model = kernelized(Adapter(Scale()), kernel())
    assert torch.allclose(model(x), 10 * x * model.base_layer.weight + model.lora(x))


def test_a_compiled_model_takes_its_kernels(kernel, x):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        plain = compiled(x)
        kernelized(compiled, kernel(), Mode.INFERENCE | Mode.TORCH_COMPILE)
        changed = compiled(x)
        assert torch.allclose(changed, model(x))
        assert not torch.allclose(changed, plain)
        unkernelize(compiled)
        assert torch.allclose(compiled(x), plain)


def test_a_compiled_model_changes_over_with_its_mode(kernel, x):
    torch._dynamo.reset()
    model = Model().eval()
    modes = {
        Mode.INFERENCE | Mode.TORCH_COMPILE: kernel(factor=2),
        Mode.TRAINING | Mode.TORCH_COMPILE: kernel(factor=3),
    }
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    kernelized(compiled, modes, Mode.INFERENCE | Mode.TORCH_COMPILE, follow_mode=True)
    with torch.no_grad():
        for training in (False, True, False, True):
            compiled.train(training)
            assert torch.allclose(model.first(x), (3 if training else 2) * x * model.first.weight)
            assert torch.allclose(compiled(x), model(x))


DISTRIBUTED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from kernel_loader import LocalLayerRepository, Mode, kernelize, kernelize_report, unkernelize, use_kernel_mapping
from tests.layers.conftest import Model
dist.init_process_group("gloo", init_method={store!r}, rank=0, world_size=1)
mesh, x = init_device_mesh("cpu", (1,)), torch.ones(2, 4)
repository = LocalLayerRepository({path!r}, layer_name="Scale")
def shard(model):
    for layer in (model.first, model.linear, model.last, model): fully_shard(layer, mesh=mesh)
    return model
def kernel(model, **options):
    with use_kernel_mapping({{"Scale": {{"cpu": {{Mode.INFERENCE: repository}}}}}}):
        return kernelize(model, mode=Mode.INFERENCE, **options)
def same(one, other): return torch.allclose(one(x), other(x))
def used(model): return kernelize_report(model).used
plain, fast = Model(), Model()
fast.load_state_dict(plain.state_dict())
kernel(fast)
for wrap in (DistributedDataParallel, shard):
    for before in (True, False):
        model = Model()
        model.load_state_dict(plain.state_dict())
        model = kernel(wrap(model)) if before else wrap(kernel(model))
        print(used(model), same(model, fast), used(kernel(model)), same(model, fast), end=" ")
        model(x).sum().backward()
        print(used(unkernelize(model)), same(model, plain))
model = Model()
model.load_state_dict(plain.state_dict())
model = shard(kernel(model, follow_mode=True))
print(same(model.eval(), fast), same(model.train(), plain), same(model.eval(), fast), type(model.first).__name__)
dist.destroy_process_group()
"""


def test_models_that_are_distributed_before_or_after_take_their_kernels_and_give_them_back(kernel, tmp_path):
    values = {"store": f"file://{tmp_path / 'store'}", "path": str(kernel().repo_path)}
    *rows, follows = run(DISTRIBUTED, **values).splitlines()
    assert rows == ["2 True 2 True 0 True"] * 4
    assert follows == "True True True FSDPScale"


def test_a_scripted_module_is_left_alone(kernel):
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    replace_kernel_forward_from_hub(torch.jit.RecursiveScriptModule, "Scale")
    try:
        model = nn.Sequential(nn.Linear(1, 1), torch.jit.script(Plain()))
        kernelized(model, kernel())
        assert ("Scale", "scripted") in codes(model)
    finally:
        del torch.jit.RecursiveScriptModule._kernel_loader_names


# --- training mode ----------------------------------------------------------------------------------------------------


def test_training_a_model_that_was_kernelized_for_inference_is_warned_of_once(kernel, caplog):
    _warn_of_training.cache_clear()
    model = kernelized(Model().eval(), kernel())
    model.eval()
    assert "is set to training" not in caplog.text
    for _ in range(3):
        model.train()
    assert sum("is set to training" in message for message in caplog.messages) == 1
    assert all(module.training for module in model.modules())
    caplog.clear()
    _warn_of_training.cache_clear()
    kernelized(model, kernel(), Mode.TRAINING).train()
    assert "is set to training" not in caplog.text


def test_layers_that_follow_the_mode_change_over_with_it(kernel, x, caplog):
    model = Model().eval()
    modes = {Mode.INFERENCE: kernel(factor=2), Mode.TRAINING: kernel(factor=3)}
    kernelized(model, modes, follow_mode=True)
    assert torch.equal(model.first(x), 2 * x * model.first.weight)
    model.train()
    assert torch.equal(model.first(x), 3 * x * model.first.weight)
    assert model.first.training
    copied = copy.deepcopy(model).eval()
    assert torch.equal(copied.first(x), 2 * x * model.first.weight)
    model.eval()
    assert torch.equal(model.first(x), 2 * x * model.first.weight)
    assert kernelize_report(model).layers[0].mode == "INFERENCE"
    assert "is set to training" not in caplog.text
    unkernelize(model.train())
    assert type(model.first) is Scale


def test_a_layer_that_has_a_kernel_for_one_mode_follows_too(kernel, x):
    model = kernelized(Model().train(), {Mode.INFERENCE: kernel()}, follow_mode=True)
    assert torch.equal(model.first(x), x * model.first.weight)
    assert codes(model) == {("Scale", "no-mode"): 2}
    assert torch.equal(model.eval().first(x), 10 * x * model.first.weight)
    assert codes(model) == {("Scale", "used"): 2}


def test_gradients_flow_through_a_kernel(kernel):
    model = kernelized(Scale(), kernel(), Mode.TRAINING)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, 10 * model.weight.detach().expand(2, 4))
    assert torch.equal(model.weight.grad, torch.full((4,), 20.0))


# --- copies and files ------------------------------------------------------------------------------------------------


def test_a_copy_has_the_same_kernels_and_its_own_weights(kernel, x):
    model = kernelized(Model(), kernel())
    copied = copy.deepcopy(model)
    assert type(copied.first) is type(model.first)
    assert copied.first is not model.first
    with torch.no_grad():
        copied.first.weight.zero_()
    assert torch.equal(model.first(x), 10 * x * model.first.weight)
    assert str(kernelize_report(copied)) == str(kernelize_report(model))
    unkernelize(model)
    assert codes(copied) == {("Scale", "used"): 2}


def test_a_copy_shares_what_was_shared(kernel):
    layer = Scale()
    copied = copy.deepcopy(kernelized(nn.Sequential(layer, layer), kernel()))
    assert copied[0] is copied[1]


SAVE = """
import torch
from tests.layers.conftest import Model
from kernel_loader import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
with use_kernel_mapping({{"Scale": {{"cpu": LocalLayerRepository({path!r}, layer_name="Scale")}}}}):
    model = kernelize(Model(), mode=Mode.INFERENCE)
torch.save(model, {file!r})
"""
LOAD = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(message)s")
model = torch.load({file!r}, weights_only=False)
from kernel_loader import kernelize_report
print([(row.code, row.total) for row in kernelize_report(model).layers], model.first(torch.ones(4)).tolist())
"""


def run(script, **values):
    done = subprocess.run(
        [sys.executable, "-c", script.format(**values)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_saved_model_has_its_kernels_again_in_another_process(kernel, tmp_path):
    path = kernel().repo_path
    values = {"path": str(path), "file": str(tmp_path / "model.pt")}
    run(SAVE, **values)
    assert run(LOAD, **values) == "[('used', 2)] [10.0, 20.0, 30.0, 40.0]\n"
    source = path / "build/torch-universal/layers.py"
    source.write_text(source.read_text() + "\n# another build\n")
    changed = run(LOAD, **values)
    assert "keeps its own forward: it was saved with torch-universal" in changed
    assert changed.endswith("[('not-restored', 2)] [1.0, 2.0, 3.0, 4.0]\n")
    source.unlink()
    gone = run(LOAD, **values)
    assert "unlike in the process that saved it" in gone
    assert gone.endswith("[('not-restored', 2)] [1.0, 2.0, 3.0, 4.0]\n")


def test_a_model_that_follows_its_mode_is_pickled_with_both(kernel, x):
    modes = {Mode.INFERENCE: kernel(factor=2), Mode.TRAINING: kernel(factor=3)}
    model = kernelized(Model().eval(), modes, follow_mode=True)
    back = pickle.loads(pickle.dumps(model))
    assert torch.equal(back.first(x), 2 * x * model.first.weight)
    assert torch.equal(back.train().first(x), 3 * x * model.first.weight)


def test_a_state_dict_knows_nothing_of_kernels(kernel):
    model, buffer = kernelized(Model(), kernel()), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    Model().load_state_dict(torch.load(buffer, weights_only=True))


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_tells_every_layer_and_why(kernel):
    class Own(Scale):
        def forward(self, x):
            return x

    model = kernelized(nn.ModuleDict({"a": Scale(), "b": Scale(), "c": Own(), "d": nn.Linear(1, 1)}), kernel())
    report = kernelize_report(model)
    assert (report.used, report.unused) == (2, 1)
    used, unused = report.layers
    assert (used.total, used.path, used.origin.variant, used.mode) == (2, "a", "torch-universal", "INFERENCE")
    assert (unused.code, unused.path, unused.origin) == ("overridden", "c", None)
    assert "2 layers use a kernel, 1 keep their own forward" in str(report)
    assert '"code": "overridden"' in report.to_json()


def test_registered_kernels_serve_layers_where_no_build_fits(cpu_machine):
    @use_kernel_forward_from_hub("SomeActivation")
    class SomeActivation(nn.Module):
        def forward(self, hidden):
            return hidden

    with mapped(LayerRepository("activation", layer_name="Silu"), "SomeActivation"):
        model = kernelize(nn.Sequential(SomeActivation()), mode=Mode.INFERENCE, device="cpu")
    row = kernelize_report(model).layers[0]
    assert row.used, row.message
    assert row.origin.reference
    x = torch.linspace(-2, 2, 9)
    assert torch.allclose(model(x), nn.functional.silu(x))
    assert torch.allclose(model[0](hidden=x), nn.functional.silu(x))  # its parameter is called x


def test_the_peers_script_runs_with_another_import():
    script = textwrap.dedent("""
        import torch, sys
        from torch import nn
        from kernel_loader import (Mode, LayerRepository, Device, CUDAProperties, kernelize, use_kernel_mapping,
            use_kernel_forward_from_hub, register_kernel_mapping)
        @use_kernel_forward_from_hub("SiluAndMul")
        class SiluAndMul(nn.Module):
            def forward(self, x):
                d = x.shape[-1] // 2
                return nn.functional.silu(x[..., :d]) * x[..., d:]
        device = Device(type="cuda", properties=CUDAProperties(min_capability=75, max_capability=89))
        repository = LayerRepository(repo_id="kernels-community/activation", layer_name="SiluAndMul", version=1)
        register_kernel_mapping({"SiluAndMul": {device: repository}})
        model = nn.Sequential(nn.Linear(4, 8), SiluAndMul())
        model = kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE)
        print(model(torch.ones(1, 4)).shape)
    """)
    assert run(script.replace("{", "{{").replace("}", "}}")) == "torch.Size([1, 4])\n"


# --- models that do unusual things ----------------------------------------------------------------------------------


def hook(layer):
    """As accelerate does: forward on the module calls the one that is kept."""
    layer._old_forward = layer.forward
    layer.forward = lambda x: layer._old_forward(x)  # noqa: PLW0108 - looked up at each call


@use_kernel_forward_from_hub("Identity")
class Identity(nn.Module):
    """Gives back what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


TEN = "def ten(x):\n    return x * 10\n"


@pytest.mark.parametrize("hooked_first", [True, False])
def test_a_function_serves_a_layer_whose_forward_accelerate_keeps(kernel, hooked_first):
    model, x = nn.Sequential(Identity()), torch.ones(1)
    with mapped(kernel("ten", layers=TEN), "Identity"):
        if hooked_first:
            hook(model[0])
        kernelize(model, mode=Mode.INFERENCE, device="cpu")
        if not hooked_first:
            hook(model[0])
    assert model(x) == 10
    unkernelize(model)
    assert model(x) == 1
    assert codes(model) == {("Identity", "not-kernelized"): 1}


def test_a_kept_forward_that_is_not_the_layers_is_a_wrapper(kernel, x):
    model = nn.Sequential(Scale())
    original = model[0].forward
    model[0].forward = lambda x: original(x) + 100
    hook(model[0])
    kernelized(model, kernel())
    assert codes(model) == {("Scale", "wrapped"): 1}
    assert torch.equal(model(x), x * model[0].weight + 100)


def test_the_report_tells_what_runs_when_a_kernel_was_wrapped(kernel, x, caplog):
    model = kernelized(nn.Sequential(Scale()), kernel())
    replaced = model[0].forward
    model[0].forward = lambda x: replaced(x) + 100
    for _ in range(2):
        assert codes(kernelized(model, kernel(factor=3))) == {("Scale", "used"): 1}
        assert torch.equal(model(x), 10 * x * model[0].weight + 100)
    unkernelize(model)
    assert "Unwrap it first" in caplog.text
    assert codes(model) == {("Scale", "used"): 1}
    del model[0].forward
    assert torch.equal(unkernelize(model)(x), x * model[0].weight)


@pytest.mark.parametrize("kernelize_first", [True, False])
def test_parametrized_layers_take_kernels_and_stay_parametrized(kernel, x, kernelize_first):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize = torch.nn.utils.parametrize
    model = nn.Sequential(Scale())
    weight = model[0].weight.detach().clone()
    if kernelize_first:
        kernelized(model, kernel())
    parametrize.register_parametrization(model[0], "weight", Double())
    kernelized(model, kernel())
    assert torch.equal(model(x), 20 * x * weight)
    copied = copy.deepcopy(model)
    assert codes(copied) == codes(model) == {("Scale", "used"): 1}
    assert torch.equal(unkernelize(copied)(x), 2 * x * weight)
    assert torch.equal(model(x), 20 * x * weight)
    unkernelize(model)
    assert torch.equal(model(x), 2 * x * weight)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is Scale


def test_a_class_that_derives_from_a_kernelized_one_is_copied_and_kept(kernel, x, caplog):
    class Mixin:
        pass

    model = kernelized(nn.Sequential(Scale()), kernel())
    model[0].__class__ = type("Lora", (Mixin, type(model[0])), {})
    copied = copy.deepcopy(model)
    assert isinstance(copied[0], Mixin)
    assert torch.equal(copied(x), model(x))
    unkernelize(copied)
    assert isinstance(copied[0], Mixin)
    assert torch.equal(copied(x), x * model[0].weight)

    class Sub(type(kernelized(Scale(), kernel()))):
        def extra_repr(self):
            return "s" + super().extra_repr()

    sub = nn.Sequential(Sub())
    unkernelize(sub)
    assert "keeps its kernel" in caplog.text
    assert "s" in repr(sub)
    assert codes(sub) == {("Scale", "used"): 1}


class Reduced(Scale):
    """Says itself how it is pickled."""

    def __reduce__(self):
        return (self.__class__, (4,), self.__dict__)


def test_a_layer_that_says_how_it_is_pickled_is_pickled_so(kernel, x):
    model = kernelized(Reduced(), kernel())
    for back in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert torch.equal(back(x), model(x))
        assert unkernelize(back).__class__ is Reduced


def test_libraries_that_register_their_classes_never_see_a_swapped_one(kernel):
    register = {}

    @use_kernel_forward_from_hub("Scale")
    class Registered(nn.Module):
        weight = 1

        def __init_subclass__(cls, *, kind, **options):
            register[cls.__name__] = cls

        def forward(self, x):
            return x

    class Child(Registered, kind="a"):
        pass

    model = kernelized(nn.Sequential(nn.Linear(1, 1), Child()), kernel())
    assert codes(model) == {("Scale", "used"): 1}
    assert register == {"Child": Child}
    assert codes(nn.Sequential(register["Child"]())) == {("Scale", "not-kernelized"): 1}


UNFIT = {
    "builtin": "import torch\ndouble = torch.rms_norm\n",
    "classmethod": (
        "from torch import nn\nclass double(nn.Module):\n    @classmethod\n    def forward(cls, x): return x\n"
    ),
    "super": (
        "from torch import nn\nclass Base(nn.Module):\n    def forward(self, x): return x\n"
        "class double(Base):\n    def forward(self, x): return super().forward(x)\n"
    ),
    "getattr": (
        "from torch import nn\nclass double(nn.Module):\n    def __getattr__(self, name): return 2\n"
        "    def forward(self, x): return x * self.two\n"
    ),
}


@pytest.mark.parametrize("source", UNFIT.values(), ids=UNFIT)
def test_a_kernel_that_could_not_run_in_the_model_does_not_fit(kernel, source):
    repository = kernel("double", layers=source)
    assert codes(kernelized(Model(), repository)) == {("Scale", "misfit"): 2}
    with pytest.raises(KernelizeError):
        kernelized(Model(), repository, use_fallback=False)


@pytest.mark.parametrize("forward", [classmethod(lambda cls, x: x), property(lambda self: lambda x: x)])
def test_a_layer_whose_forward_is_no_function_keeps_it(kernel, forward):
    cls = type("Odd", (nn.Module,), {"forward": forward})
    replace_kernel_forward_from_hub(cls, "Scale")
    assert codes(kernelized(nn.Sequential(nn.Linear(1, 1), cls()), kernel())) == {("Scale", "misfit"): 1}


def test_a_condition_that_raises_refuses_or_is_an_error(kernel):
    @use_kernel_forward_from_hub("Scale", condition=lambda module: module.nothing)
    class Conditional(Scale):
        def forward(self, x):
            return x

    assert codes(kernelized(nn.Sequential(Conditional()), kernel())) == {("Scale", "condition"): 1}
    with pytest.raises(KernelizeError, match="its condition raised AttributeError"):
        kernelized(nn.Sequential(Conditional()), kernel(), use_fallback=False)


def test_a_frozen_layer_follows_the_mode_that_it_is_in(kernel, x):
    class Frozen(Scale):
        def train(self, mode=True):
            return self

    model = nn.Sequential(Frozen())
    model[0].training = False
    kernelized(model, {Mode.INFERENCE: kernel(factor=2), Mode.TRAINING: kernel(factor=3)}, follow_mode=True)
    assert torch.equal(model.train()(x), 2 * x * model[0].weight)


@use_kernel_forward_from_hub("double")
def double(x, by=2):
    """Doubles."""
    return x * by


class Holder(nn.Module):
    """Has the function as an attribute."""

    def __init__(self):
        super().__init__()
        self.act, self.linear = double, nn.Linear(1, 1)


def test_functions_take_the_kernel_of_the_mode_that_was_asked_for(kernel):
    model = use_kernelized_func(double)(type("Caller", (nn.Module,), {}))().eval()
    model.linear = nn.Linear(1, 1)
    with mapped({Mode.INFERENCE: kernel("double", factor=5), Mode.TRAINING: kernel("double", factor=7)}, "double"):
        kernelize(model, mode=Mode.INFERENCE, follow_mode=True)
    assert double(torch.tensor(1)) == 10
    unkernelize(model)
    assert double(torch.tensor(1)) == 2


def test_functions_are_pickled_and_copied_by_reference(kernel):
    assert pickle.loads(pickle.dumps(double)) is copy.deepcopy(double) is double
    with mapped(kernel("double"), "double"):
        model = kernelize(Holder(), mode=Mode.INFERENCE)
        assert pickle.loads(pickle.dumps(model)).act is copy.deepcopy(model).act is double
        other = kernelize(Holder(), mode=Mode.INFERENCE)
    unkernelize(model)
    assert double(torch.tensor(1)) == 20
    unkernelize(other)
    assert double(torch.tensor(1)) == 2


def test_many_layers_are_read_with_one_load_and_one_warning(kernel, caplog, monkeypatch):
    model = kernelized(nn.Sequential(*(Scale() for _ in range(20))), kernel())
    data, loads = pickle.dumps(model), []
    load = LocalLayerRepository.load
    monkeypatch.setattr(LocalLayerRepository, "load", lambda *args: loads.append(1) or load(*args))
    assert codes(pickle.loads(data)) == {("Scale", "used"): 20}
    assert len(loads) == 1
    monkeypatch.setenv("KERNEL_LOADER_DISABLE_MAPPING", "1")
    assert codes(pickle.loads(data)) == {("Scale", "disabled"): 20}
    monkeypatch.delenv("KERNEL_LOADER_DISABLE_MAPPING")
    monkeypatch.setattr(LocalLayerRepository, "load", lambda *args: load(LocalLayerRepository("gone", layer_name="x")))
    assert codes(pickle.loads(data)) == {("Scale", "not-restored"): 20}
    assert sum("keeps its own forward" in message for message in caplog.messages) == 1


def test_a_kernel_that_no_longer_fits_a_saved_layer_is_told(kernel, monkeypatch, caplog):
    data = pickle.dumps(kernelized(Scale(), kernel()))
    monkeypatch.setattr(Scale, "forward", lambda self, x, y: x)
    assert codes(pickle.loads(data)) == {("Scale", "not-restored"): 1}
    assert "no longer fits" in caplog.text


def test_classes_are_forgotten_with_their_models(kernel):
    def make():
        cls = type("Local", (Scale,), {})
        model = kernelized(nn.Sequential(cls()), kernel())
        kernelize_report(model)
        unkernelize(kernelized(model, kernel()))
        return weakref.ref(cls)

    reference = make()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda model: kernelize(None, mode=Mode.INFERENCE),
        lambda model: kernelize(model, mode=Mode.INFERENCE, use_fallback="yes"),
        lambda model: kernelize(model, mode=Mode.INFERENCE, device=0),
        lambda model: kernelize(model, mode=Mode.INFERENCE, device=True),
        lambda model: replace_kernel_forward_from_hub(int, "Scale"),
        lambda model: replace_kernel_forward_from_hub(Scale, 3),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call):
    with pytest.raises(RequestError):
        call(Model())


READS = """
from torch import nn

class Scale(nn.Module):
    def forward(self, x):
        return x * self.weight * self.factor
"""


class Plain(nn.Module):
    """What a layer reads of it is set by whoever makes it."""

    def forward(self, x):
        return x


def plain(**names):
    made = use_kernel_forward_from_hub("Scale")(type("Plain", (Plain,), {"forward": Plain.forward}))()
    made.weight = nn.Parameter(torch.ones(4))
    for name, value in names.items():
        setattr(made, name, value)
    return nn.Sequential(made)


def test_a_module_without_what_a_kernel_reads_keeps_its_forward(kernel):
    repository = kernel(layers=READS)
    report = kernelize_report(kernelized(plain(), repository))
    assert codes(plain()) != {("Scale", "misfit"): 1}
    assert report.layers[0].code == "misfit"
    assert "its forward reads factor of the module, which has no such thing" in report.layers[0].message
    with pytest.raises(KernelizeError, match="reads factor") as raised:
        kernelized(plain(), repository, use_fallback=False)
    assert "Name a layer that fits" in str(raised.value)


def test_modules_of_one_class_may_differ_in_what_they_have(kernel):
    cls = use_kernel_forward_from_hub("Scale")(type("Plain", (Plain,), {"forward": Plain.forward}))
    model = nn.Sequential(cls(), cls())
    for module in model:
        module.weight = nn.Parameter(torch.ones(4))
    model[1].factor = 2
    assert codes(kernelized(model, kernel(layers=READS))) == {("Scale", "misfit"): 1, ("Scale", "used"): 1}


class Answers(Plain):
    def __getattr__(self, name):
        return 2 if name == "factor" else super().__getattr__(name)


class Property(Plain):
    @property
    def factor(self):
        raise RuntimeError("not yet")


class OnClass(Plain):
    factor = 2


class SetLater(Plain):
    def prepare(self):
        self.factor = 2


class RegistersLater(Plain):
    def prepare(self):
        self.register_buffer("factor", torch.ones(()))


@pytest.mark.parametrize("cls", [Answers, Property, OnClass, SetLater, RegistersLater])
def test_what_may_be_there_when_it_is_read_is_no_reason_to_refuse(kernel, cls):
    made = use_kernel_forward_from_hub("Scale")(type("Plain", (cls,), {"forward": Plain.forward}))()
    made.weight = nn.Parameter(torch.ones(4))
    assert codes(kernelized(nn.Sequential(made), kernel(layers=READS))) == {("Scale", "used"): 1}


@pytest.mark.parametrize("register", ["register_parameter", "register_buffer", "register_module"])
def test_what_is_none_is_there(kernel, register):
    model = plain()
    getattr(model[0], register)("factor", None)
    assert codes(kernelized(model, kernel(layers=READS))) == {("Scale", "used"): 1}


@pytest.mark.parametrize(
    "body",
    [
        "return x * self.factor if hasattr(self, 'factor') else x",
        "self.factor = 2; return x * self.factor",
        "try:\n            return x * self.factor\n        except AttributeError:\n            return x",
        "return x * getattr(self, 'factor', 1)",
    ],
)
def test_what_a_layer_need_not_read_is_no_reason_to_refuse(kernel, body):
    source = f"from torch import nn\n\nclass Scale(nn.Module):\n    def forward(self, x):\n        {body}\n"
    assert codes(kernelized(plain(), kernel(layers=source))) == {("Scale", "used"): 1}


def test_a_misfit_that_is_refused_is_not_said_to_keep_its_forward(kernel, caplog):
    repository = kernel(layers="from torch import nn\nclass Scale(nn.Module):\n    def forward(self, x, y): ...")
    with pytest.raises(KernelizeError, match="Name a layer that fits in the mapping"):
        kernelized(Model(), repository, use_fallback=False)
    assert "keeps its own forward" not in caplog.text


def test_a_directory_of_a_mapping_that_is_not_there_is_corrected_in_the_mapping(x):
    with pytest.raises(kernel_loader.SourceError, match="Correct the directory of this LocalLayerRepository"):
        kernelized(Model(), LocalLayerRepository("/nope", layer_name="Scale"), use_fallback=False)


def test_imports_of_a_module_of_layers_are_not_listed_as_layers(kernel):
    repository = kernel(
        "Nope", layers="from torch import Tensor, nn\nfrom torch.nn import RMSNorm\nclass Scale(nn.Module): ..."
    )
    with pytest.raises(KernelizeError, match="it has Scale"):
        kernelized(Model(), repository, use_fallback=False)


def test_a_mapping_without_a_mode_says_so():
    with mapped({}), pytest.raises(KernelizeError, match="is for no mode at all, not for"):
        kernelize(Model(), mode=Mode.INFERENCE, use_fallback=False)


@pytest.mark.parametrize("function", [kernelize_report, unkernelize])
def test_what_is_no_model_is_refused(function):
    with pytest.raises(RequestError, match="int object was given as the model"):
        function(3)


def test_one_repository_may_be_trusted_by_its_name():
    made = LayerRepository("org/kernel", layer_name="a", version=1, trust_remote_code="org/kernel")
    assert made.trust_remote_code == ("org/kernel",)


@pytest.mark.parametrize("name", ["attention", "rms_norm"])
def test_a_capability_is_no_repository_of_layers(name, cpu_machine):
    for call in (LayerRepository(name, layer_name="RMSNorm").load, lambda: kernel_loader.load_module(name)):
        with pytest.raises(RequestError, match=f"{name} is a capability, and a kernel is needed here. Name a kernel"):
            call()
