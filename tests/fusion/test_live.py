"""fuse and unfuse: in place, all or nothing, in the original layout, and back bit for bit."""

import copy
import inspect
import io
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_loader import (
    FusionError,
    KernelConfig,
    KernelLoaderError,
    LayerRepository,
    LocalLayerRepository,
    MissingDependency,
    Mode,
    fuse,
    kernelize,
    kernelize_report,
    make_parent_class_for_kernel_fusion,
    unfuse,
    unkernelize,
    use_kernel_mapping,
)
from kernel_loader.fusion import Concatenate, QuantizeBlockFP8, Transpose, WeightConverter
from tests.builds import write_build
from tests.fusion.models import (
    ATTENTION,
    CONFIG,
    IDS,
    MLP,
    GatedMLP,
    Layer,
    Llama,
    assert_unchanged,
    llama,
    logits,
    snapshot as taken_of,
)

PAIR = (("A", "*.a"), ("B", "*.b"))
SOURCE = """
import torch
from torch import nn
from kernel_loader.fusion import Concatenate, WeightConverter

class Both(nn.Module):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight).chunk(2, -1)[1]

class BothLayout(nn.Module):
    conversion_mapping = [WeightConverter(["A.weight", "B.weight"], "weight", [Concatenate(0)])]
    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2, device="meta"))

class Broken(BothLayout):
    def __init__(self, a, b):
        raise KeyError("no such luck")

def product(x, by=2):
    return x * by

class productLayout(BothLayout):
    pass
"""


@pytest.fixture(autouse=True)
def _on_cpu(cpu_machine, monkeypatch):
    """Embedded kernels, as every machine has them."""
    monkeypatch.setenv("KERNEL_LOADER_DISABLE", "rmsnorm")


@pytest.fixture
def kernel(tmp_path) -> Callable[..., KernelConfig]:
    files = {"__init__.py": "from . import layers\n", "layers.py": SOURCE}
    write_build(tmp_path / "kernel", "torch-universal", files)

    def config(key=PAIR, layer="Both", **options):
        return KernelConfig({key: LocalLayerRepository(tmp_path / "kernel", layer_name=layer)}, **options)

    return config


class Pair(nn.Module):
    """Two products, one after the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


class Pairs(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        for number in range(count):
            self.add_module(f"p{number}", Pair())

    def forward(self, x):
        for pair in self.children():
            x = pair(x)
        return x


class Packed(nn.Module):
    """A layout whose weights are two, one below the other."""

    conversion_mapping = [WeightConverter(["a.weight", "b.weight"], "weight", [Concatenate(0)])]

    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2, device="meta"))

    def forward(self, x):
        a, b = self.weight.chunk(2)
        return x @ a.mT @ b.mT


class Blocks(Packed):
    """A layout that is not exact."""

    conversion_mapping = [
        WeightConverter("a.weight", ["weight", "scale"], [QuantizeBlockFP8((2, 2), torch.float32)]),
        WeightConverter("b.weight", "other", [Transpose(0, 1)]),
    ]

    def __init__(self, a, b):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
        self.scale = nn.Parameter(torch.empty(1, 1, device="meta"))
        self.other = nn.Parameter(torch.empty(2, 2, device="meta"))

    def forward(self, x):
        return x @ (self.weight.float() * self.scale).mT @ self.other


def fused_pair(layout=Packed):
    model = Pair()
    originals = (model.a, model.b)
    made = make_parent_class_for_kernel_fusion(Pair, ["a", "b"], layout)()
    made.load_state_dict(model.state_dict())
    return model, originals, made


# --- what becomes of a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_model_computes_the_same_when_it_is_fused_and_comes_back_as_it_was(bias, dtype):
    model = llama(bias=bias).to(dtype)
    before, expected = taken_of(model), logits(model)
    assert fuse(model, CONFIG) is model
    layer = model.model.layers[1]
    assert [type(layer.post_attention_layernorm).__name__, type(layer.mlp)] == ["RMSNormMLPLayout", nn.Identity]
    torch.testing.assert_close(logits(model), expected)
    assert list(dict(layer.named_children())) == ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
    assert unfuse(model) is model
    assert_unchanged(model, before)
    assert torch.equal(logits(model), expected)


def test_what_is_only_renamed_stays_the_same_object_in_an_optimiser():
    model = llama()
    layer = model.model.layers[0]
    norm, down, o = layer.post_attention_layernorm.weight, layer.mlp.down_proj.weight, layer.self_attn.o_proj[0].weight
    sinks, inv_freq = layer.self_attn.sinks, layer.self_attn.inv_freq
    fuse(model, CONFIG)
    assert layer.post_attention_layernorm.weight is norm
    assert layer.post_attention_layernorm.down_proj.weight is down
    assert layer.self_attn.o_proj[0].weight is o
    assert layer.self_attn.sinks is sinks
    assert layer.self_attn.inv_freq is inv_freq
    assert "inv_freq" in layer.self_attn._non_persistent_buffers_set
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_state_dict_of_a_fused_model_is_that_of_the_original_and_loads_both_ways():
    model, other = llama(0), llama(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fuse(model, CONFIG)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    Llama().load_state_dict(after, strict=True)
    model.load_state_dict(other.state_dict(), strict=True)
    torch.testing.assert_close(logits(model), logits(other))
    unfuse(model)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_loading_may_assign_and_what_comes_back_has_a_storage_of_its_own():
    model = fuse(llama(), CONFIG)
    model.load_state_dict(llama(1).state_dict(), assign=True)
    unfuse(model)
    assert torch.equal(logits(model), logits(llama(1)))
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, llama(1).model.layers[0].mlp.up_proj.weight)


def test_gradients_are_those_of_the_original_one_below_the_other():
    model = llama().double()
    original = copy.deepcopy(model)
    fuse(model, CONFIG)
    for one in (model, original):
        logits(one).square().sum().backward()
    for ours, theirs in zip(model.model.layers, original.model.layers, strict=True):
        mlp, attention = theirs.mlp, theirs.self_attn
        packed = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
        torch.testing.assert_close(ours.post_attention_layernorm.gate_up_proj.weight.grad, packed)
        packed = torch.cat([getattr(attention, f"{name}_proj").weight.grad for name in "qkv"])
        torch.testing.assert_close(ours.self_attn.qkv_proj.weight.grad, packed)
        torch.testing.assert_close(ours.self_attn.sinks.grad, attention.sinks.grad)


def test_weights_that_were_trained_come_back_and_old_gradients_do_not():
    model = llama()
    originals = dict(model.named_modules())
    logits(model).sum().backward()
    fuse(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        logits(model).square().sum().backward()
        optimizer.step()
    trained, expected = {k: v.clone() for k, v in model.state_dict().items()}, logits(model)
    unfuse(model)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(logits(model), expected)
    assert dict(model.named_modules()) == originals
    assert model.model.layers[0].mlp.gate_proj.weight.grad is None


def test_frozen_weights_stay_frozen_and_modes_stay():
    model = llama()
    layer = model.model.layers[0]
    layer.mlp.requires_grad_(False)
    layer.mlp.train()
    fuse(model, CONFIG)
    assert not layer.post_attention_layernorm.gate_up_proj.weight.requires_grad
    assert layer.post_attention_layernorm.weight.requires_grad
    unfuse(model)
    assert not layer.mlp.gate_proj.weight.requires_grad
    assert layer.mlp.gate_proj.training
    assert not layer.post_attention_layernorm.training
    fuse(model, CONFIG)
    model.train()
    layer.post_attention_layernorm.gate_up_proj.requires_grad_(True)
    unfuse(model)
    assert all(module.training for module in model.modules())
    assert layer.mlp.gate_proj.weight.requires_grad


def test_a_model_that_was_converted_to_another_dtype_comes_back_in_it():
    model, other = llama(), llama().to(torch.bfloat16)
    fuse(model, CONFIG).to(torch.bfloat16)
    unfuse(model)
    one, two = ((*m.parameters(), *m.buffers()) for m in (model, other))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_model_on_meta_is_fused_there_and_comes_back_where_it_is_filled():
    with torch.device("meta"):
        model = Llama().eval()
    fuse(model, CONFIG)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.load_state_dict(llama().state_dict())
    for layer in model.model.layers:
        layer.self_attn.inv_freq.copy_(llama().model.layers[0].self_attn.inv_freq)
    torch.testing.assert_close(logits(model), logits(llama()))
    unfuse(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(logits(model), logits(llama()))


def test_a_copy_is_fused_and_comes_back_alone():
    model = fuse(llama(), CONFIG)
    other = copy.deepcopy(model)
    unfuse(model)
    assert type(other.model.layers[0].mlp) is nn.Identity
    other.load_state_dict(llama(1).state_dict())
    unfuse(other)
    assert torch.equal(logits(other), logits(llama(1)))
    assert torch.equal(logits(model), logits(llama()))
    assert list(other.state_dict()) == list(model.state_dict())


def test_a_saved_model_is_read_fused_in_another_process_and_comes_back_there(run_python, tmp_path):
    torch.save(fuse(llama(), CONFIG), tmp_path / "model.pt")
    torch.save(llama(), tmp_path / "original.pt")
    out = run_python(
        f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
original = torch.load({str(tmp_path / "original.pt")!r}, weights_only=False)
from kernel_loader import unfuse
ids = torch.arange(10).view(2, 5)
torch.testing.assert_close(model(ids)["logits"], original(ids)["logits"])
print(type(model.model.layers[0].mlp).__name__)
unfuse(model)
print(torch.equal(model(ids)["logits"], original(ids)["logits"]), type(model.model.layers[0].mlp).__name__)
""",
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert out.split() == ["Identity", "True", "GatedMLP"]


@pytest.mark.parametrize("layer", ["Both", "product"])
def test_a_layout_that_takes_the_forward_of_the_layer_is_copied_and_pickled(kernel, layer):
    model = Pairs()
    fuse(model, kernel(layer=layer))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.p0.a) is type(model.p0.a)
        assert torch.equal(again(torch.ones(3, 2)), model(torch.ones(3, 2)))
        assert list(again.state_dict()) == ["p0.a.weight", "p0.b.weight", "p1.a.weight", "p1.b.weight"]


def test_fusing_again_is_refused_and_works_after_unfuse():
    model = llama()
    fuse(model, CONFIG)
    before = taken_of(model)
    with pytest.raises(FusionError, match=r"model\.layers\.0: self_attn is fused already; call unfuse first"):
        fuse(model, KernelConfig({ATTENTION: "qkv_packed:PackedQKV"}))
    assert_unchanged(model, before)
    unfuse(model)
    unfuse(model)
    fuse(model, CONFIG)
    torch.testing.assert_close(logits(model), logits(llama()))
    unfuse(model)
    assert torch.equal(logits(model), logits(llama()))


def test_two_fusions_of_one_parent_may_follow_each_other():
    model = llama()
    for key, value in CONFIG.kernel_mapping.items():
        fuse(model, KernelConfig({key: value}))
    assert list(model.state_dict()) == list(llama().state_dict())
    model.load_state_dict(llama(1).state_dict())
    unfuse(model)
    assert torch.equal(logits(model), logits(llama(1)))


def test_what_lies_in_a_fused_module_is_fused_after_it_and_comes_back_before_it(kernel):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.last = Pair(), nn.Linear(2, 2, bias=False)

    class Keeping(Packed):
        conversion_mapping = [WeightConverter("c.last.weight", "turned", [Transpose(0, 1)])]

        def __init__(self, inner):
            nn.Module.__init__(self)
            self.pair, self.turned = inner.pair, nn.Parameter(torch.empty(2, 2, device="meta"))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = Inner()

    model = make_parent_class_for_kernel_fusion(Outer, ["c"], Keeping)()
    keys = ["c.pair.a.weight", "c.pair.b.weight", "c.last.weight"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == keys
    fuse(model, kernel((("A", "c.pair.a"), ("B", "c.pair.b"))))
    assert list(model.state_dict()) == keys
    unfuse(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert isinstance(model.c, Inner)
    fuse(model, kernel((("A", "c.pair.a"), ("B", "c.pair.b"))))
    with pytest.raises(FusionError, match=r"c\.pair has modules that are fused already; call unfuse first"):
        fuse(model, kernel((("A", "c"),), layouts={"Both": Keeping}))


def test_children_of_a_fused_module_itself_come_back_before_it(kernel):
    class Triple(Pair):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(2, 2, bias=False)

    class Turned(nn.Module):
        conversion_mapping = [WeightConverter("c.last.weight", "turned", [Transpose(0, 1)])]

        def __init__(self, triple):
            super().__init__()
            self.a, self.b, self.turned = triple.a, triple.b, nn.Parameter(torch.empty(2, 2, device="meta"))

        def forward(self, x):
            return self.b(self.a(x)) @ self.turned

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = Triple()

    model = make_parent_class_for_kernel_fusion(Outer, ["c"], Turned)()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fuse(model, kernel((("A", "c.a"), ("B", "c.b"))))
    assert list(model.state_dict()) == ["c.a.weight", "c.b.weight", "c.last.weight"]
    model.load_state_dict(state)
    unfuse(model)
    assert [type(child) for child in model.c.children()] == [nn.Linear] * 3
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_conversion_that_loses_gives_back_what_it_was_made_of_unless_that_has_changed():
    _, _, model = fused_pair(Blocks)
    fresh = make_parent_class_for_kernel_fusion(Pair, ["a", "b"], Blocks)
    torch.manual_seed(3)
    expected = Pair()
    torch.manual_seed(3)
    model = fresh()
    with torch.no_grad():
        model.a.other.mul_(2)
    unfuse(model)
    assert torch.equal(model.a.weight, expected.a.weight)
    assert torch.equal(model.b.weight, 2 * expected.b.weight)
    model = fresh()
    model.load_state_dict(expected.state_dict())
    unfuse(model)
    assert not torch.equal(model.a.weight, expected.a.weight)  # what was loaded is there with loss alone
    torch.testing.assert_close(model.a.weight, expected.a.weight, rtol=0.1, atol=0.05)
    assert torch.equal(model.b.weight, expected.b.weight)


# --- all or nothing -------------------------------------------------------------------------------------------------


def _lora(model):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

        def forward(self, x):
            return self.base_layer(x)

    layer = model.model.layers[1]
    layer.mlp.up_proj = Adapter(layer.mlp.up_proj)


class Quantized(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Subclass(torch.Tensor):
    pass


def _set(path, value):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(f"model.layers.1.{parent}".rstrip(".")), name, value)

    return change


def _on(path, call):
    return lambda model: call(model.get_submodule(f"model.layers.1.{path}".rstrip(".")))


def _kernelized(model):
    with use_kernel_mapping({"RMSNorm": {"cpu": LayerRepository("rmsnorm", layer_name="RMSNorm")}}):
        kernelize(model, mode=Mode.INFERENCE)


def _tied_to(model):
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[0].mlp.up_proj.weight


def _shared(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def _aliased(model):
    model.model.extra = model.model.layers[1].self_attn


OBSTACLES = {
    "adapter": (_lora, r"mlp\.up_proj has an adapter; merge or remove it first"),
    "quantised": (_set("mlp.gate_proj", Quantized(16, 24)), "to be nn.Linear, got Quantized"),
    "subclass": (
        _set("self_attn.q_proj.weight", nn.Parameter(torch.zeros(16, 16).as_subclass(Subclass))),
        r"self_attn\.q_proj\.weight is a Subclass",
    ),
    "parametrized": (
        _on("mlp.gate_proj", parametrizations.weight_norm),
        r"mlp\.gate_proj is parametrized; call torch\.nn\.utils\.parametrize",
    ),
    "pruned": (_on("self_attn.q_proj", lambda m: prune.l1_unstructured(m, "weight", 0.5)), r"q_proj has hooks"),
    "forward hook": (_on("mlp.gate_proj", lambda m: m.register_forward_hook(print)), r"mlp\.gate_proj has hooks"),
    "pre-hook": (_on("mlp", lambda m: m.register_forward_pre_hook(print)), "mlp has hooks, which would not be called"),
    "backward hook": (_on("self_attn", lambda m: m.register_full_backward_hook(print)), "self_attn has hooks"),
    "hook of loading": (
        _on("mlp", lambda m: m.register_load_state_dict_post_hook(lambda *_: None)),
        "mlp has hooks",
    ),
    "hook of saving": (_on("mlp", lambda m: m.register_state_dict_post_hook(lambda *_: None)), "mlp has hooks"),
    "hook of a tensor": (_on("mlp.up_proj.weight", None), r"mlp\.up_proj\.weight has hooks"),
    "forward on the module": (_on("self_attn", lambda m: setattr(m, "forward", print)), "has a forward of its own"),
    "kernelized": (_kernelized, r"post_attention_layernorm is kernelized; call unkernelize first"),
    "tied": (_tied_to, r"mlp\.(gate|up)_proj\.weight is tied \(model\.layers\.0.*model\.layers\.1"),
    "shared": (_shared, r"mlp is tied \(model\.layers\.0\.mlp, model\.layers\.1\.mlp\)"),
    "alias": (_aliased, r"self_attn is tied \(model\.extra, model\.layers\.1\.self_attn\)"),
    "half frozen": (
        _on("mlp.gate_proj", lambda m: m.requires_grad_(False)),
        r"of mlp\.gate_proj\.weight, mlp\.up_proj\.weight, some require grad and some do not",
    ),
    "dtypes": (_on("mlp.gate_proj", lambda m: m.double()), "must have the same dtype|one dtype|dtype"),
    "dropout": (_on("mlp", lambda m: m.add_module("dropout", nn.Dropout())), "act_fn, got dropout too"),
    "other child": (_set("mlp", nn.Linear(16, 16)), "'Linear' object has no attribute 'gate_proj'"),
    "one more weight": (_on("mlp", lambda m: m.register_buffer("scale", torch.ones(()))), r"nothing of mlp\.scale"),
}


# What is to be done next: the only thing that is said of these cases.
REMEDIES = {
    "Do that to the model first, and fuse it then.": [
        *("adapter", "parametrized", "pruned", "forward hook", "pre-hook", "backward hook", "hook of loading"),
        *("hook of saving", "hook of a tensor", "forward on the module", "kernelized"),
    ],
    "Untie them, or fuse without the entry for them.": ["tied", "shared", "alias"],
    "Fuse the model before its weights are wrapped or quantised.": ["subclass"],
    "Fuse only modules that the layout is for, or correct its constructor.": [
        *("quantised", "dropout", "other child", "dtypes"),
    ],
    "Let all weights that become one require grad, or none of them.": ["half frozen"],
    "Correct the layout: what its constructor makes, or its conversion_mapping.": ["one more weight"],
}
REMEDY = {case: remedy for remedy, cases in REMEDIES.items() for case in cases}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_would_be_lost_is_refused_and_nothing_is_changed(case):
    model = llama()
    change, message = OBSTACLES[case]
    if case == "hook of a tensor":
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda g: g)
    else:
        change(model)
    before = taken_of(model)
    with pytest.raises(FusionError, match=message) as caught:
        fuse(model, CONFIG)
    assert_unchanged(model, before)
    assert caught.value.remedy.startswith("Nothing was changed. ")
    assert [remedy for remedy in REMEDIES if remedy in caught.value.remedy] == [REMEDY[case]]


def test_paths_of_the_places_that_fit_are_advised_where_others_do_not():
    model = llama(count=4)
    model.model.layers[1].mlp = nn.Linear(16, 16)  # as experts are in some layers
    model.model.layers[2].mlp = nn.Linear(16, 16)
    with pytest.raises(FusionError) as caught:
        fuse(model, CONFIG)
    assert len(caught.value.problems) == 2
    advice = re.search(r"To fuse RMSNorm \+ MLP only where it fits, (.*)", caught.value.remedy)[1]
    paths = [re.compile(text) for text in re.findall(r're\.compile\(r"(.*?)"\)', advice)]
    names = [name for name, _ in MLP]
    assert "Attention" not in caught.value.remedy
    fuse(model, KernelConfig({tuple(zip(names, paths, strict=True)): "rmsnorm_mlp:RMSNormMLP"}))
    assert [type(layer.mlp) for layer in model.model.layers] == [nn.Identity, nn.Linear, nn.Linear, nn.Identity]


def test_hooks_and_kernels_of_modules_that_stay_are_no_obstacle():
    model, called = llama(), []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: called.append("down"))
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: called.append("o"))
    model.model.layers[0].register_forward_hook(lambda *_: called.append("layer"))
    fuse(model, CONFIG)
    called.clear()
    logits(model)
    assert called == ["o", "down", "layer"]


def test_parents_that_are_in_several_places_are_fused_once():
    model = llama()
    model.model.layers.append(model.model.layers[0])
    expected, before = logits(model), taken_of(model)
    fuse(model, CONFIG)
    torch.testing.assert_close(logits(model), expected)
    assert list(model.state_dict()) == before["keys"]
    unfuse(model)
    assert_unchanged(model, before)


def test_problems_of_entries_and_of_the_model_are_named_together():
    with pytest.raises(FusionError) as caught:
        fuse(llama(), KernelConfig({(("MLP", "nowhere"),): "rmsnorm_mlp:RMSNormMLP", "RMSNorm": "org"}))
    assert len(caught.value.problems) == 2


def test_problems_of_all_places_are_named():
    model = llama(count=3)
    for number in (0, 2):
        model.model.layers[number].mlp.register_forward_hook(print)
    with pytest.raises(FusionError) as caught:
        fuse(model, CONFIG)
    assert [problem[:20] for problem in caught.value.problems] == ["model.layers.0: mlp ", "model.layers.2: mlp "]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layer": "Both", "layouts": {"Both": "Broken"}},
            r"Broken cannot be made of a, b \(KeyError: 'no such luck'\)",
        ),
        ({"layer": "Both", "layouts": {"Both": "Nowhere"}}, "has no layout Nowhere for Both; there is BothLayout"),
        ({"layer": "Missing"}, "has no layer Missing; it has Both"),
    ],
)
def test_a_kernel_that_cannot_be_had_leaves_the_model_as_it_was(kernel, options, message):
    model = Pairs()
    before = taken_of(model)
    with pytest.raises(FusionError, match=message):
        fuse(model, kernel(**options))
    assert_unchanged(model, before)


def test_a_kernel_that_the_hub_does_not_give_leaves_the_model_as_it_was():
    model = llama()
    before = taken_of(model)
    with pytest.raises(KernelLoaderError):
        fuse(model, KernelConfig({ATTENTION: "qkv_packed:PackedQKV", MLP: "org/nowhere:Both"}))
    assert_unchanged(model, before)


def test_a_kernel_in_a_directory_that_cannot_be_imported_is_to_be_corrected_there(tmp_path):
    write_build(tmp_path, "torch-universal", {"__init__.py": "raise ZeroDivisionError"})
    model = Pairs()
    before = taken_of(model)
    with pytest.raises(FusionError) as caught:
        fuse(model, KernelConfig({PAIR: f"{tmp_path}:Both"}, use_local_kernel=True))
    assert_unchanged(model, before)
    assert len(caught.value.problems) == 1
    assert "failed to import: ZeroDivisionError" in caught.value.problem
    assert caught.value.remedy == f"Correct the kernel in {tmp_path}, or name another directory. Nothing was changed."


def test_a_package_that_a_kernel_in_a_directory_needs_is_to_be_installed(tmp_path):
    write_build(tmp_path, "torch-universal", {"__init__.py": "import nowhere_at_all"})
    with pytest.raises(MissingDependency, match="pip install nowhere_at_all"):
        fuse(Pairs(), KernelConfig({PAIR: f"{tmp_path}:Both"}, use_local_kernel=True))


def test_a_conversion_that_fails_at_the_last_place_brings_all_others_back(kernel, monkeypatch):
    model = Pairs(3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = taken_of(model)
    apply, calls = Concatenate.apply, []

    def failing(self, tensors):
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError
        return apply(self, tensors)

    monkeypatch.setattr(Concatenate, "apply", failing)
    with pytest.raises(MemoryError):
        fuse(model, kernel())
    assert_unchanged(model, before)


def _layout(mapping, **parameters):
    class Made(nn.Module):
        conversion_mapping = mapping

        def __init__(self, a, b):
            super().__init__()
            self.kept = a
            for name, shape in parameters.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

        def forward(self, x):
            return x

    return Made


BOTH = WeightConverter(["a.weight", "b.weight"], "weight", [Concatenate(0)])
LAYOUTS = {
    "a shape that differs": (_layout([BOTH], weight=(2, 4)), r"gives a.weight in the shape \(4, 2\) for \(2, 4\)"),
    "a weight left over": (_layout([], weight=(4, 2)), "says nothing of (a|b).weight"),
    "a weight that nothing gives": (_layout([BOTH], weight=(4, 2), more=(1,)), "has a.more, which no converter gives"),
    "a weight that is not there": (_layout([BOTH]), "a converter gives a.weight, which .*Made has not"),
    "a module of before that is written to": (
        _layout([WeightConverter("a.weight", "kept.weight", [Transpose(0, 1)])]),
        "a.kept.weight would be written into a module that was there before",
    ),
    "no such source": (_layout([WeightConverter("c.weight", "weight")], weight=(2, 2)), "c.weight: matches none of 2"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_does_not_fit_its_conversion_is_refused(case):
    layout, message = LAYOUTS[case]
    with pytest.raises(FusionError, match=message):
        make_parent_class_for_kernel_fusion(Pair, ["a", "b"], layout)()


def test_a_fused_module_whose_weights_have_changed_their_names_is_not_taken_apart():
    model = fuse(llama(), CONFIG)
    model.model.layers[1].self_attn.register_parameter("added", nn.Parameter(torch.ones(1)))
    with pytest.raises(FusionError, match=r"has self_attn\.added, which the modules that it was made of have not"):
        unfuse(model)
    assert [type(layer.mlp) for layer in model.model.layers] == [nn.Identity, nn.Identity]


def test_another_kind_of_device_is_warned_of_and_nothing_is_fused(caplog):
    model = llama()
    before = taken_of(model)
    fuse(model, KernelConfig({MLP: {"cuda": "rmsnorm_mlp:RMSNormMLP"}}))
    assert_unchanged(model, before)
    assert "RMSNorm + MLP is not fused on cpu; the configuration is for cuda" in caplog.text


# --- classes --------------------------------------------------------------------------------------------------------


def test_a_class_is_fused_when_it_is_made_and_stays_that_class():
    cls = fuse(Llama, CONFIG, count=1)
    assert issubclass(cls, Llama)
    assert [cls.__name__, cls.__module__, cls.__qualname__] == ["Llama", Llama.__module__, "Llama"]
    assert inspect.signature(cls) == inspect.signature(Llama)
    model = cls(count=1).eval()
    assert type(model.model.layers[0].mlp) is nn.Identity
    model.load_state_dict(llama(count=1).state_dict())
    torch.testing.assert_close(logits(model), logits(llama(count=1)))
    assert type(copy.deepcopy(model)) is cls
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is Llama
    assert torch.equal(logits(again), logits(model))

    class Derived(cls):
        def __init__(self):
            super().__init__(count=1)
            self.more = nn.Linear(1, 1)

    assert isinstance(Derived(), Llama)
    assert type(Derived().model.layers[0].mlp) is nn.Identity


def test_from_pretrained_is_refused_on_a_class_that_is_fused_when_it_is_made():
    class Loaded(Llama):
        @classmethod
        def from_pretrained(cls, **options):
            model = cls(**options)
            model.model.layers[0].mlp.down_proj.weight.data.fill_(1)
            return model

    cls = fuse(Loaded, CONFIG, count=1)
    with pytest.raises(FusionError, match=r"fuse\(.*Loaded\.from_pretrained\(\.\.\.\), config\)"):
        cls.from_pretrained(count=1)
    assert type(fuse(Loaded.from_pretrained(count=1), CONFIG).model.layers[0].mlp) is nn.Identity
    assert not hasattr(fuse(Llama, CONFIG), "from_pretrained")


def test_a_parent_class_makes_parents_whose_children_are_one():
    pair, _, model = fused_pair()
    x = torch.randn(3, 2)
    torch.testing.assert_close(model(x), pair(x))
    assert isinstance(model, Pair)
    assert [type(model.a), type(model.b)] == [Packed, nn.Identity]
    assert list(model.state_dict()) == ["a.weight", "b.weight"]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is Pair
    assert torch.equal(unfuse(again)(x), pair(x))
    assert type(unfuse(model).b) is nn.Linear


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Pair, "ab", Packed), "child_names are 'ab', and no different names"),
        ((Pair, [], Packed), r"child_names are \[\], and no"),
        ((Pair, ["a", "a"], Packed), "no different names"),
        ((Pair(), ["a", "b"], Packed), "parent_cls is Pair"),
        ((Pair, ["a", "b"], Packed(None, None)), "kernel_cls is Packed"),
        ((Pair, ["a", "b"], nn.Module), "Module has no forward"),
    ],
)
def test_a_parent_class_is_made_of_a_class_names_and_a_layout(arguments, message):
    with pytest.raises(FusionError, match=message):
        make_parent_class_for_kernel_fusion(*arguments)


def test_a_child_that_the_parent_lacks_is_named():
    cls = make_parent_class_for_kernel_fusion(Pair, ["a", "training", "c"], Packed)
    with pytest.raises(FusionError, match="Pair has no child training, c; there is a, b"):
        cls()


def test_finding_parents_of_a_class_needs_no_memory():
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList(Layer(1 << 16, 1 << 18, False) for _ in range(4))

    class Watching(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in (t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and not t.is_meta):
                self.largest = max(self.largest, tensor.nbytes)
            return out

    with Watching() as watching:
        found = KernelConfig({MLP: "rmsnorm_mlp:RMSNormMLP"}).sanitize(Huge)
    assert [site.parent for site in found[0]] == [f"model.layers.{number}" for number in range(4)]
    assert watching.largest < 1024


# --- kernels, compilers, threads ------------------------------------------------------------------------------------


def test_a_fused_model_is_kernelized_and_unkernelized():
    model = fuse(llama(), CONFIG)
    mapping = {"RMSNormMLP": {"cpu": LayerRepository("rmsnorm_mlp", layer_name="RMSNormMLP")}}
    mapping |= {"PackedQKV": {"cpu": LayerRepository("qkv_packed", layer_name="PackedQKV")}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    used = {row.layer for row in kernelize_report(model).layers if row.code == "used"}
    assert used == {"RMSNormMLP", "PackedQKV"}
    torch.testing.assert_close(logits(model), logits(llama()))
    assert list(copy.deepcopy(model).state_dict()) == list(llama().state_dict())
    unkernelize(model)
    torch.testing.assert_close(logits(model), logits(llama()))
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    unfuse(model)
    assert torch.equal(logits(model), logits(llama()))


def test_a_fused_model_compiles_to_one_graph():
    torch.compiler.reset()
    model = fuse(llama(), CONFIG)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS)["logits"], logits(llama()))


def test_threads_may_call_one_fused_module_at_the_same_time():
    model = fuse(llama(), CONFIG)
    inputs = [torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(n)) for n in range(8)]
    with torch.no_grad():
        expected = [model(ids)["logits"] for ids in inputs]
    wrong, start = [], threading.Barrier(8)

    def call(number):
        start.wait()
        with torch.no_grad():
            for _ in range(20):
                wrong.extend([number] * (not torch.equal(model(inputs[number])["logits"], expected[number])))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_layer_of_a_type_is_fused_by_itself():
    layer = Layer(16, 24, False)
    fuse(layer, KernelConfig({(("RMSNorm", "post_attention_layernorm"), ("MLP", "mlp")): "rmsnorm_mlp:RMSNormMLP"}))
    assert type(layer.mlp) is nn.Identity
    assert isinstance(unfuse(layer).mlp, GatedMLP)


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (["x"], "has 'x', which is no WeightConverter"),
        (None, "cannot be read (TypeError: 'NoneType' object is not iterable)"),
        (property(lambda self: self.nothing), "cannot be read (AttributeError: "),
    ],
)
def test_a_layout_whose_conversion_is_none_is_refused_by_name(mapping, said):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    class PairLayout(nn.Module):
        conversion_mapping = mapping

        def __init__(self, first, second):
            super().__init__()

        def forward(self, x):
            return x

    with pytest.raises(FusionError) as caught:
        make_parent_class_for_kernel_fusion(Parent, ["first", "second"], PairLayout)()
    assert "PairLayout.conversion_mapping " + said in str(caught.value)


@pytest.mark.parametrize(
    ("called", "given", "message"),
    [
        (fuse, (None, KernelConfig()), "the model is an nn.Module or a class of them, and None was given"),
        (fuse, (dict, KernelConfig()), "the model is an nn.Module or a class of them, and <class 'dict'> was given"),
        (fuse, (KernelConfig(), nn.Linear(1, 1)), "Pass the model first"),
        (fuse, (nn.Linear(1, 1), {}), r"config is a KernelConfig, and \{\} was given"),
        (fuse, (nn.Linear(1, 1), KernelConfig(), 3), "a model was given with what a class is constructed with"),
        (unfuse, (None,), "the model is an nn.Module, and None was given"),
        (unfuse, (nn.Linear,), "the model is an nn.Module, and <class .*Linear'> was given"),
    ],
)
def test_what_is_no_model_or_no_configuration_is_refused(called, given, message):
    with pytest.raises(FusionError, match=message):
        called(*given)
