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


def test_a_directory_may_begin_with_that_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for where, expected in (("~/kernel", tmp_path / "kernel"), ("~", tmp_path)):
        config = KernelConfig({"RMSNorm": f"{where}:Norm"}, use_local_kernel=True)
        assert config.layer_mapping["RMSNorm"]["cpu"] == LocalLayerRepository(expected, layer_name="Norm")
    nobody = KernelConfig({MLP: "~nobody-of-that-name/kernel:Norm"}, use_local_kernel=True)
    with pytest.raises(FusionError, match="~nobody-of-that-name/kernel: No such file"):
        nobody.sanitize(meta())


def test_a_configuration_is_read_once_and_again_where_it_was_wrong():
    mapping = {MLP: {"cuda": HUB}, "RMSNorm": "org"}
    config = KernelConfig(mapping)
    with pytest.raises(FusionError, match="'org' is no kernel"):
        _ = config.fusions
    mapping["RMSNorm"] = HUB
    assert config.fusions[0] is config.fusions[0]
    config.layer_mapping["RMSNorm"].clear()
    assert set(config.layer_mapping["RMSNorm"]) == set(BACKENDS)
    del mapping[MLP]
    assert len(config.fusions) == len(config.sanitize(meta())) == 1


@pytest.mark.parametrize("given", [None, "model", dict, KernelConfig()])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(FusionError, match="the model is an nn.Module or a class of them, and .* was given"):
        CONFIG.sanitize(given)
    with pytest.raises(FusionError, match="a model was given with what a class is constructed with. Leave that out"):
        CONFIG.sanitize(meta(), 3)


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
    "key with a model": ({(("MLP", Llama(8, 8)),): HUB}, {}, "MLP: a value of type Llama is no path, such as"),
    "kernel that is a model": ({"RMSNorm": Llama(8, 8)}, {}, "RMSNorm: a value of type Llama is no kernel, such as"),
    "key that is one pair": ({("RMSNorm", NORM): HUB}, {}, "'RMSNorm' in a key is no pair of a name and a path"),
    "key with a triple": ({(("A", GATED, 1),): HUB}, {}, r"\('A', 'model.*', 1\) in a key is no pair"),
    "child without a name": ({(("", GATED),): HUB}, {}, r"\('', 'model.*'\) in a key is no pair"),
    "child whose name is a number": ({((1, GATED),): HUB}, {}, r"\(1, 'model.*'\) in a key is no pair"),
    "child without a path": ({(("MLP", ""),): HUB}, {}, "MLP: '' is no path, such as"),
    "path that is a number": ({(("MLP", 3),): HUB}, {}, "MLP: 3 is no path"),
    "path in bytes": ({(("MLP", re.compile(rb".*mlp")),): HUB}, {}, r"MLP: re\.compile\(b'\.\*mlp'\) is no path"),
    "two children of one name": ({(("A", NORM), ("A", GATED)): HUB}, {}, r"A \+ A: two children have one name"),
    "layer that no model has": ({"LayerNorm": HUB}, {}, "no layer .* registered as 'LayerNorm'; it has RMSNorm"),
    "layers that no model has": ({"A": HUB, "B": HUB}, {}, "no layer .* registered as 'A' or 'B'; it has RMSNorm"),
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
    "repository without an owner": ({"RMSNorm": "/repo:D"}, {}, "'/repo' is no repository of the form org/repo"),
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
    "version of a kernel with a name": (
        {"RMSNorm": ("rmsnorm:RMSNorm", {"version": 1, "revision": "main"})},
        {},
        "RMSNorm: rmsnorm was given version=1, revision='main'",
    ),
    "local kernel that is no directory": (
        {"RMSNorm": "kernel:Layer"},
        {"use_local_kernel": True},
        "RMSNorm: 'kernel:Layer' is no kernel of the form /directory:Layer",
    ),
    "local kernel that is a number": (
        {"RMSNorm": 1},
        {"use_local_kernel": True},
        "RMSNorm: 1 is no kernel, such as /directory:Layer",
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
    "local or not": ({MLP: HUB}, {"use_local_kernel": "no"}, "use_local_kernel is True or False, and 'no' was given"),
    "inherited or not": ({MLP: HUB}, {"inherit_mapping": None}, "inherit_mapping is True or False, and None was given"),
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
    "regular expression that is a text": (
        {(("MLP", r"model\.layers\.[01]\.mlp"),): HUB},
        {},
        r"MLP: model\\\.layers\\\.\[01\]\\\.mlp matches no module",
    ),
    "text that is no regular expression": ({(("MLP", "model.layers.(.mlp"),): HUB}, {}, "matches no module"),
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


# What is to be done next: the only thing that is said of these cases.
REMEDIES = {
    'Write {"RMSNorm": "org/repo:Layer"}, or {(("MLP", "model.layers.*.mlp"),): "org/repo:Layer"}.': ["mapping"],
    'Write "RMSNorm" for a layer, and a tuple of pairs for modules': [
        *("key that is a number", "key without text", "key without children", "key that is one pair"),
        *("key with a triple", "child without a name", "child whose name is a number"),
    ],
    'Write "model.layers.*.mlp", or re.compile(': [
        "child without a path",
        "path that is a number",
        "path in bytes",
        "key with a model",
    ],
    "Give each child the name by which the layout knows it.": ["two children of one name"],
    "Correct the name; modules that have none": ["layer that no model has", "layers that no model has"],
    'Write one of them, such as {"cuda": "org/repo:Layer"}.': ["device", "device that is no text"],
    "Write a kernel for a kind of device": ["no devices"],
    'Write "org/repo:Layer", ("org/repo:Layer", {"version": 2}), or "name:Layer"': [
        *("kernel that is a number", "kernel that is a class", "kernel that is a triple", "kernel without a layer"),
        *("kernel with an empty layer", "kernel without a repository", "kernel that is a model"),
    ],
    'Write "org/repo:Layer", or pass use_local_kernel=True for a directory.': [
        *("repository of three parts", "repository without a name", "repository without an owner"),
    ],
    'Write {"version": 2}, or {"revision": "main"}.': [
        *("version and revision", "neither", "revision without text", "revision that is a number"),
    ],
    "A version is a whole number, such as version=1.": ["version that is a text", "version that is true"],
    'Write {"version": 2} or {"revision": "main"}, and "trust_remote_code"': ["option", "options that are a number"],
    "Pass True, False or repositories, as org/name.": ["trust"],
    "Pass one of them.": ["version of a kernel with a name"],
    'Write "/directory:Layer" or "./directory:Layer"': [
        *("local kernel that is no directory", "local kernel that is a number"),
    ],
    "Leave that out: what is in the directory is taken as it is.": ["local kernel with a version"],
    "Correct the directory of this LocalLayerRepository": ["local kernel that is not there"],
    "Did you mean rmsnorm_mlp": ["name that nothing has"],
    "Correct the name of the layer in the mapping.": ["layer that the kernel lacks"],
    'Name one of these by KernelConfig(..., layouts={"RMSNormMLP": ...}).': ["layout that the kernel lacks"],
    "Pass True or False.": ["local or not", "inherited or not"],
    'Write layouts={"Layer": "LayerLayout"}': ["layouts", "layout that is a number", "layout that is no module"],
    "Name the layer of a kernel, as it is after the colon.": ["layout of no entry"],
    "Write the path from the root of the model, with * for one component.": [
        *("pattern", "part of a component", "text that is no regular expression"),
    ],
    "A regular expression must match all of a path": ["regular expression"],
    r'Wrap a regular expression as one, re.compile(r"model\.layers\.[01]\.mlp"), which': [
        "regular expression that is a text"
    ],
    r'To take what is whole, write the paths as re.compile(r"model\.layers\.1\.post_attention_layernorm") and': [
        "missing child"
    ],
    "Write paths to children of one module.": ["children of several parents"],
    "Write a path that matches one child of a parent.": ["two children of one pattern"],
    "Give each child a path of its own.": ["one child of two patterns"],
    "Leave it to one of the entries": ["module of two entries", "module within one of another entry"],
}
REMEDY = {case: remedy for remedy, cases in REMEDIES.items() for case in cases}


def test_there_are_at_least_thirty():
    assert len(WRONG) >= 30


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case):
    mapping, options, message = WRONG[case]
    config = KernelConfig(mapping, **options)
    found = problems_of(config)
    assert any(re.search(message, problem) for problem in found), found
    assert len(found) <= 3
    with pytest.raises(FusionError, match=re.escape(found[0])) as caught:
        config.sanitize(Llama, count=2)
    assert [remedy for remedy in REMEDIES if remedy in caught.value.remedy] == [REMEDY[case]]


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
    with pytest.raises(
        FusionError, match="has no layout NormLayout for Norm; there is none. Write one beside the layer"
    ):
        config.sanitize(meta())


def test_a_kernel_for_other_machines_is_not_held_against_this_one(tmp_path):
    write_build(tmp_path, "torch-cuda", {"__init__.py": "raise ImportError"}, backend="cuda")
    KernelConfig({MLP: f"{tmp_path}:Norm"}, use_local_kernel=True).sanitize(meta())
