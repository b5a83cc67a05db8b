"""KernelConfig: what it takes, and what it says of what it does not."""

import re

import pytest
import torch
from torch import nn

from kernel_loader import (
    Device,
    FusionError,
    KernelConfig,
    LayerRepository,
    LocalLayerRepository,
    Mode,
    kernelize,
    kernelize_report,
    use_kernel_mapping,
)
from kernel_loader.layers.device import BACKENDS
from tests.builds import write_build
from tests.fusion.models import ATTENTION, CONFIG, MLP, Llama

HUB = "org/repo:Layer"
NORM, GATED = "model.layers.*.post_attention_layernorm", "model.layers.*.mlp"


@pytest.fixture(autouse=True)
def _on_cpu(cpu_machine):
    """Embedded kernels, as every machine has them."""


def meta():
    with torch.device("meta"):
        return Llama()


def problems_of(config, model=None):
    with pytest.raises(FusionError) as caught:
        config.sanitize(model or meta())
    return caught.value.problems


# --- what it takes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (HUB, LayerRepository("org/repo", layer_name="Layer", version=1)),
        ((HUB, {"version": 3}), LayerRepository("org/repo", layer_name="Layer", version=3)),
        ((HUB, {"revision": "main"}), LayerRepository("org/repo", layer_name="Layer", revision="main")),
        (
            (HUB, {"version": 1, "revision": None, "trust_remote_code": True}),
            LayerRepository("org/repo", layer_name="Layer", version=1, trust_remote_code=True),
        ),
        ("rmsnorm:RMSNorm", LayerRepository("rmsnorm", layer_name="RMSNorm")),
        (LocalLayerRepository("/a/b", layer_name="C"), LocalLayerRepository("/a/b", layer_name="C")),
    ],
)
def test_a_kernel_is_written_in_several_forms(value, expected):
    assert KernelConfig({"RMSNorm": value}).layer_mapping == {"RMSNorm": dict.fromkeys(BACKENDS, expected)}
    assert KernelConfig({"RMSNorm": {"cuda": value}}).layer_mapping == {"RMSNorm": {"cuda": expected}}
    (fusion,) = KernelConfig({MLP: {"cuda": value, "rocm": HUB}}).fusions
    assert fusion.repositories["cuda"] == expected
    assert str(fusion) == "RMSNorm + MLP"


def test_a_local_kernel_is_a_directory(tmp_path):
    config = KernelConfig({"RMSNorm": f"{tmp_path}:Norm"}, use_local_kernel=True)
    assert config.layer_mapping["RMSNorm"]["cpu"] == LocalLayerRepository(tmp_path, layer_name="Norm")


def test_single_layers_are_what_mappings_take():
    config = KernelConfig({"RMSNorm": {"cpu": "rmsnorm_mlp:RMSNormMLP"}, **CONFIG.kernel_mapping})
    assert len(config.fusions) == 2
    model = Llama()
    config.sanitize(model)
    with use_kernel_mapping(config.layer_mapping, inherit_mapping=config.inherit_mapping):
        kernelize(model, mode=Mode.INFERENCE)
    assert kernelize_report(model).layers
    assert Device("cpu").type in config.layer_mapping["RMSNorm"]


def test_a_layout_belongs_to_the_kernel_of_its_device():
    class One(nn.Module):
        pass

    key = (("A", "a"),)
    config = KernelConfig({key: {"cuda": "org/a:A", "rocm": "org/b:B"}}, layouts={"A": One, "B": "Other"})
    (fusion,) = config.fusions
    assert fusion.layouts == {"cuda": One, "rocm": "Other"}


def test_sanitize_gives_the_sites_of_a_model_and_of_a_class():
    expected = [[("model.layers.0.post_attention_layernorm", "model.layers.0.mlp")], [("model.layers.0.self_attn",)]]
    for given in ((Llama, 8, 8), (Llama(8, 8, 1),)):
        options = {"count": 1} if isinstance(given[0], type) else {}
        assert [[site.paths for site in sites] for sites in CONFIG.sanitize(*given, **options)] == expected


def test_nothing_is_looked_at_when_a_configuration_is_made():
    KernelConfig(None)
    KernelConfig({1: 2}, layouts=3)


def test_sanitize_changes_nothing():
    model = Llama()
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    CONFIG.sanitize(model)
    assert before == [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]


# --- what it does not -----------------------------------------------------------------------------------------------

WRONG = {
    "mapping": ([1], {}, r"the mapping is a table, and \[1\] was given"),
    "key that is a number": ({1: HUB}, {}, "1 is no key: it is the name of a layer, or a tuple"),
    "key without text": ({"": HUB}, {}, "'' is no key"),
    "key without children": ({(): HUB}, {}, r"\(\) is no key"),
    "key that is one pair": ({("RMSNorm", NORM): HUB}, {}, "'RMSNorm' in a key is no pair of a name and a path"),
    "key with a triple": ({(("A", GATED, 1),): HUB}, {}, r"\('A', 'model.*', 1\) in a key is no pair"),
    "child without a name": ({(("", GATED),): HUB}, {}, r"\('', 'model.*'\) in a key is no pair"),
    "child whose name is a number": ({((1, GATED),): HUB}, {}, r"\(1, 'model.*'\) in a key is no pair"),
    "child without a path": ({(("MLP", ""),): HUB}, {}, "MLP: '' is no path, such as"),
    "path that is a number": ({(("MLP", 3),): HUB}, {}, "MLP: 3 is no path"),
    "path in bytes": ({(("MLP", re.compile(rb".*mlp")),): HUB}, {}, r"MLP: re\.compile\(b'\.\*mlp'\) is no path"),
    "two children of one name": ({(("A", NORM), ("A", GATED)): HUB}, {}, r"A \+ A: two children have one name"),
    "layer that no model has": ({"LayerNorm": HUB}, {}, "no layer .* registered as 'LayerNorm'; there is RMSNorm"),
    "device": ({"RMSNorm": {"gpu": HUB}}, {}, "RMSNorm: 'gpu' is no kind of device; there are cpu, cuda, rocm"),
    "device that is no text": ({"RMSNorm": {0: HUB}}, {}, "RMSNorm: 0 is no kind of device"),
    "no devices": ({"RMSNorm": {}}, {}, "RMSNorm: a table of devices with nothing in it"),
    "kernel that is a number": ({"RMSNorm": 1}, {}, "RMSNorm: 1 is no kernel, such as org/repo:Layer"),
    "kernel that is a class": ({"RMSNorm": LayerRepository}, {}, "RMSNorm: <class .* is no kernel, such as"),
    "kernel that is a triple": ({"RMSNorm": (HUB, {}, 1)}, {}, r"RMSNorm: \('org/repo:Layer', \{\}, 1\) is no kernel"),
    "kernel without a layer": ({"RMSNorm": "org/repo"}, {}, "RMSNorm: 'org/repo' is no kernel of the form"),
    "kernel with an empty layer": ({"RMSNorm": "org/repo:"}, {}, "'org/repo:' is no kernel of the form org/repo:Layer"),
    "kernel without a repository": ({"RMSNorm": ":Layer"}, {}, "':Layer' is no kernel of the form"),
    "repository of three parts": ({"RMSNorm": "a/b/c:D"}, {}, "RMSNorm: 'a/b/c' is no repository of the form org/repo"),
    "repository without a name": ({"RMSNorm": "org/:D"}, {}, "'org/' is no repository of the form org/repo"),
    "repository without an owner": (
        {"RMSNorm": "/repo:D"},
        {},
        "'/repo' is no .* org/repo; a directory is one with use_",
    ),
    "version and revision": (
        {"RMSNorm": (HUB, {"version": 1, "revision": "main"})},
        {},
        r"RMSNorm: give version or revision, one of them; \{'version': 1, 'revision': 'main'\} was given",
    ),
    "neither": ({"RMSNorm": (HUB, {})}, {}, r"RMSNorm: give version or revision, one of them; \{\} was given"),
    "version that is a text": ({"RMSNorm": (HUB, {"version": "1"})}, {}, "RMSNorm: version='1' was given"),
    "version that is true": ({"RMSNorm": (HUB, {"version": True})}, {}, "RMSNorm: version=True was given"),
    "revision without text": ({"RMSNorm": (HUB, {"revision": ""})}, {}, "RMSNorm: revision '' is no branch, tag or"),
    "revision that is a number": ({"RMSNorm": (HUB, {"revision": 3})}, {}, "RMSNorm: revision 3 is no branch"),
    "option": ({"RMSNorm": (HUB, {"verison": 1})}, {}, r"RMSNorm: \{'verison': 1\} is no table of version or revision"),
    "options that are a number": ({"RMSNorm": (HUB, 1)}, {}, "RMSNorm: 1 is no table of version or revision"),
    "trust": (
        {"RMSNorm": (HUB, {"version": 1, "trust_remote_code": "all"})},
        {},
        "RMSNorm: trust_remote_code='all' was given",
    ),
    "local kernel that is no directory": (
        {"RMSNorm": "kernel:Layer"},
        {"use_local_kernel": True},
        "RMSNorm: 'kernel:Layer' is no kernel of the form /directory:Layer",
    ),
    "local kernel with a version": (
        {"RMSNorm": ("/kernel:Layer", {"version": 1})},
        {"use_local_kernel": True},
        r"RMSNorm: a local kernel takes no \{'version': 1\}",
    ),
    "local kernel that is not there": (
        {MLP: "/nowhere/kernel:Layer"},
        {"use_local_kernel": True},
        r"RMSNorm \+ MLP: .*/nowhere/kernel",
    ),
    "name that nothing has": ({MLP: "rmsnormmlp:Layer"}, {}, r"RMSNorm \+ MLP: No kernel .* name 'rmsnormmlp'"),
    "layer that the kernel lacks": (
        {MLP: "rmsnorm_mlp:RMSNorm"},
        {},
        r"RMSNorm \+ MLP: .*has no layer RMSNorm; it has .*RMSNormMLP",
    ),
    "layout that the kernel lacks": (
        {MLP: "rmsnorm_mlp:RMSNormMLP"},
        {"layouts": {"RMSNormMLP": "Other"}},
        r"RMSNorm \+ MLP: .*has no layout Other for RMSNormMLP; there is RMSNormMLPLayout",
    ),
    "layouts": ({MLP: HUB}, {"layouts": 3}, "layouts is a table, and 3 was given"),
    "layout of no entry": (
        {MLP: HUB, "RMSNorm": "org/repo:Norm"},
        {"layouts": {"Norm": "L"}},
        "layouts has 'Norm', which is the layer of no entry for modules that become one; there is Layer",
    ),
    "layout that is a number": ({MLP: HUB}, {"layouts": {"Layer": 3}}, "layouts has 3 for 'Layer', which is no nn.Mod"),
    "layout that is no module": ({MLP: HUB}, {"layouts": {"Layer": int}}, "layouts has <class 'int'> for 'Layer'"),
    "pattern": (
        {(("MLP", "model.layer.*.mlp"),): HUB},
        {},
        r"MLP: model\.layer\.\*\.mlp matches no module; there is model\.layers\.\*\.mlp",
    ),
    "regular expression": ({(("MLP", re.compile("mlp")),): HUB}, {}, r"MLP: re\.compile\('mlp'\) matches no module"),
    "part of a component": ({(("MLP", "model.layers.*.m*"),): HUB}, {}, r"\* stands for a whole component"),
    "missing child": (
        {(("A", NORM), ("B", "model.layers.1.mlp")): HUB},
        {},
        r"A \+ B: model\.layers\.0 has no child for model\.layers\.1\.mlp",
    ),
    "children of several parents": (
        {(("A", "model.norm"), ("B", GATED)): HUB},
        {},
        r"no parent in common: model\.norm in model and .*mlp in model\.layers\.0 and 1 more",
    ),
    "two children of one pattern": (
        {(("A", "model.layers.0.*"),): HUB},
        {},
        r"model\.layers\.0\.\* matches both self_attn and mlp of model\.layers\.0",
    ),
    "one child of two patterns": (
        {(("A", GATED), ("B", "model.layers.*.mlp")): HUB},
        {},
        r"A \+ B: model\.layers\.0\.mlp is matched by two of the patterns",
    ),
    "module of two entries": (
        {MLP: HUB, (("Other", GATED),): HUB},
        {},
        r"model\.layers\.0\.mlp is taken by RMSNorm \+ MLP and by Other",
    ),
    "module within one of another entry": (
        {MLP: HUB, (("Gate", "model.layers.*.mlp.gate_proj"),): HUB},
        {},
        r"mlp\.gate_proj is taken by Gate, and lies in model\.layers\.0\.mlp, which is taken by RMSNorm \+ MLP",
    ),
}


def test_there_are_at_least_thirty():
    assert len(WRONG) >= 30


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case):
    mapping, options, message = WRONG[case]
    config = KernelConfig(mapping, **options)
    found = problems_of(config)
    assert any(re.search(message, problem) for problem in found), found
    assert len(found) <= 3
    with pytest.raises(FusionError, match=re.escape(found[0])):
        config.sanitize(Llama, count=2)


def test_all_that_is_wrong_is_said_at_once():
    config = KernelConfig(
        {
            "RMSNorm": (HUB, {}),
            "LayerNorm": HUB,
            MLP: {"gpu": HUB, "cuda": "org"},
            (("MLP", "model.blocks.*.mlp"),): HUB,
            ATTENTION: "qkv_packed:QKV",
        }
    )
    found = "\n".join(problems_of(config))
    for part in ("give version", "registered as 'LayerNorm'", "'gpu'", "'org' is no kernel", "blocks", "no layer QKV"):
        assert part in found
    for name in ("layer_mapping", "fusions"):
        with pytest.raises(FusionError, match="give version or revision"):
            getattr(config, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wide",), r"Llama cannot be made on the meta device \(TypeError"),
        ((8, 8, 1, 1, 1, 1), r"cannot be made on the meta device \(TypeError: .*takes from 1 to 4 positional"),
    ],
)
def test_a_class_that_cannot_be_made_is_said_with_the_rest(arguments, message):
    with pytest.raises(FusionError, match=message) as caught:
        KernelConfig({"RMSNorm": (HUB, {})}).sanitize(Llama, *arguments)
    assert len(caught.value.problems) == 2


def test_the_layout_of_a_kernel_in_a_directory_is_looked_for(tmp_path):
    source = "from torch import nn\nclass Norm(nn.Module):\n    def forward(self, x):\n        return x\n"
    write_build(tmp_path, "torch-universal", {"__init__.py": "from . import layers\n", "layers.py": source})
    config = KernelConfig({MLP: f"{tmp_path}:Norm"}, use_local_kernel=True)
    (problem,) = problems_of(config)
    assert problem.endswith("has no layout NormLayout for Norm; there is none")


def test_a_kernel_for_other_machines_is_not_held_against_this_one(tmp_path):
    write_build(tmp_path, "torch-cuda", {"__init__.py": "raise ImportError"}, backend="cuda")
    KernelConfig({MLP: f"{tmp_path}:Norm"}, use_local_kernel=True).sanitize(meta())
