"""Capabilities: how they are spelt and listed, who offers what, and which kernel serves."""

import dataclasses
import functools
import json
import os
import pickle
import tomllib
from pathlib import Path

import pytest
import torch

import kernel_loader
from kernel_loader import capability
from kernel_loader.binder import bundle_class
from kernel_loader.capability import Feature, Wanted, spelt, together
from kernel_loader.catalog import Catalog
from kernel_loader.errors import (
    KernelImportError,
    ManifestError,
    NoCompatibleBuild,
    NotCached,
    RequestError,
    SettingsError,
    UnknownKernel,
)
from kernel_loader.loader import KernelLoader
from kernel_loader.manifest import Manifest
from kernel_loader.resources import data_directory
from kernel_loader.settings import Settings
from tests.builds import CPU_HOST, H200, write_build

LISTED = """
[doubling]
summary = "Doubles"
entrypoints = ["double"]
order = ["first", "second"]

[doubling.features]
odd = "odd numbers too"
half-way = { meaning = "halves too", entrypoints = ["halve"] }

[tripling]
"""


def parse(text: str) -> dict[str, capability.Capability]:
    return capability.parse(text, "c.toml")


def manifest(**keys: object) -> Manifest:
    return Manifest.from_table({"name": "first", "repo": "org/first", "version": 1} | keys, "first.toml")


# --- how a caller spells it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("attention", Wanted("attention")),
        ("rms-norm", Wanted("rms_norm")),
        ("Attention[]", Wanted("attention")),
        (" attention [ varlen , sinks ] ", Wanted("attention", ("sinks", "varlen"))),
        ("attention[sinks,sinks]", Wanted("attention", ("sinks",))),
        ("attention[gqa_backward]", Wanted("attention", ("gqa-backward",))),
    ],
)
def test_a_capability_is_spelt_as_the_extras_of_a_package(text, wanted):
    assert spelt(text) == wanted
    assert spelt(str(wanted)) == wanted


@pytest.mark.parametrize("text", ["", "[varlen]", "attention[varlen", "attention]", "attention[a][b]", "a b", "a[b]c"])
def test_what_is_not_of_that_form_asks_for_no_capability(text):
    assert spelt(text) is None


# --- the list -----------------------------------------------------------------------------------------------------


def test_a_file_lists_capabilities_their_features_and_the_order_of_kernels():
    found = parse(LISTED)
    assert found["doubling"].entrypoints == ("double",)
    assert found["doubling"].order == ("first", "second")
    assert found["doubling"].features == {
        "odd": Feature("odd numbers too"),
        "half-way": Feature("halves too", ("halve",)),
    }
    assert found["tripling"] == capability.Capability("tripling", "", (), {}, ())


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("[a", "", "not TOML"),
        ("Big = {}", "Big", "lower case"),
        ("a = 1", "a", "a table was expected"),
        ("[a]\nsumary = ''", "a.sumary", "did you mean summary?"),
        ("[a]\nentrypoints = ['a.b']", "a.entrypoints[0]", "the name of a field"),
        ("[a]\norder = ['my-kernel']", "a.order[0]", "the name of a kernel"),
        ("[a.features]\nBig = ''", "a.features.Big", "lower case with dashes"),
        ("[a.features]\nb = 1", "a.features.b", "a table was expected"),
        ("[a.features.b]\nentrypoints = []", "a.features.b", "the key meaning is missing"),
        ("[a.features]\nb = { meaning = '', x = 1 }", "a.features.b.x", "unknown key"),
    ],
)
def test_what_is_wrong_in_a_list_is_named_with_its_place(text, path, said):
    with pytest.raises(ManifestError, match=said) as caught:
        parse(text)
    assert (caught.value.file, caught.value.path) == ("c.toml", path)


def test_lists_add_up_and_the_first_counts_most():
    mine = parse("[doubling]\norder = ['mine', 'second']\n[doubling.features]\nodd = 'my own'\nnew = 'more'\n[own]")
    both = together([mine, parse(LISTED)])
    assert set(both) == {"doubling", "tripling", "own"}
    assert both["doubling"].order == ("mine", "second", "first")
    assert both["doubling"].summary == "Doubles"
    assert both["doubling"].entrypoints == ("double",)
    assert {name: feature.meaning for name, feature in both["doubling"].features.items()} == {
        "odd": "my own",
        "new": "more",
        "half-way": "halves too",
    }


@pytest.mark.parametrize(
    ("keys", "path", "said"),
    [
        ({"capabilities": {"dubling": []}}, "capabilities.dubling", "did you mean doubling?"),
        ({"capabilities": {"zzz": []}}, "capabilities.zzz", "there are doubling, tripling"),
        ({"capabilities": {"doubling": ["od"]}}, "capabilities.doubling[0]", "did you mean odd?"),
        ({"capabilities": {"tripling": ["odd"]}}, "capabilities.tripling[0]", "there are none"),
        ({"capabilities": {"doubling": ["half-way"]}}, "capabilities.doubling", "the entrypoints double, halve"),
        (
            {"capabilities": {"doubling": ["half-way"]}, "entrypoints": {"double": "d"}},
            "capabilities.doubling",
            "the entrypoints halve, and first has not",
        ),
        (
            {
                "capabilities": {"doubling": []},
                "entrypoints": {"double": "d"},
                "alternatives": [{"repo": "org/b", "version": 1, "entrypoints": {"triple": "t"}}],
            },
            "capabilities.doubling",
            "the entrypoints double, and first has not",
        ),
    ],
)
def test_a_manifest_offers_what_is_listed_with_its_entrypoints(keys, path, said):
    with pytest.raises(ManifestError, match=said) as caught:
        capability.check(manifest(**keys), parse(LISTED))
    assert caught.value.path == path


def test_a_manifest_that_has_what_it_offers_passes():
    offered = {"doubling": ["odd", "half-way"], "tripling": []}
    capability.check(manifest(capabilities=offered, entrypoints={"double": "d", "halve": "h"}), parse(LISTED))


# --- what ships ---------------------------------------------------------------------------------------------------


def test_every_shipped_offer_is_listed_and_has_its_entrypoints():
    catalog = Catalog(Settings())
    offered = {name: catalog.get(name) for name in catalog.names() if catalog.get(name).capabilities}
    assert {"moe_experts", "rmsnorm"} <= set(offered)
    for kernel in offered.values():
        capability.check(kernel, catalog.capabilities)
        cls = bundle_class(kernel)
        sure = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        for name in kernel.capabilities:
            capability.check_fields(kernel, catalog.capabilities[name], sure)


def test_every_shipped_order_names_the_kernels_that_offer_it():
    catalog = Catalog(Settings())
    for name, listed in catalog.capabilities.items():
        offering = [offer.manifest.name for offer in catalog.offers(Wanted(name), "cuda") if not offer.lacks]
        assert listed.order == tuple(offering), name
        assert listed.summary
        assert listed.entrypoints


def references_of(name: str) -> list[object]:
    """Each shipped kernel of a capability that has a reference: its features, and the reference loaded."""
    catalog = Catalog(Settings())
    offering = [offer.manifest for offer in catalog.offers(Wanted(name), "cpu") if offer.manifest.reference]
    loader = KernelLoader(Settings(disable={manifest.name for manifest in offering}), CPU_HOST)
    return [pytest.param(m.offers(name), functools.partial(loader.load, m.name), id=m.name) for m in offering]


def attention(q, k, v, causal=False, window=(-1, -1), softcap=0.0, s_aux=None):
    """Of one sequence: q (Sq, H, D) over k and v (Sk, Hk, D), scaled by 0.5."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[0])[:, None] - (k.shape[1] - q.shape[0])
    hidden = (ahead > 0) & causal
    hidden |= (ahead < -window[0]) & (window[0] >= 0) | (ahead > window[1]) & (window[1] >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = s_aux[:, None, None].expand(-1, q.shape[0], 1) if s_aux is not None else scores[..., :0]
    return (torch.cat([scores, sinks], -1).softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def first(result):
    return result[0] if isinstance(result, tuple | list) else result


@pytest.mark.parametrize(("features", "load"), references_of("attention"))
def test_attention_is_called_alike_whichever_kernel_serves(features, load):
    kernel, draw = load(), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, heads, 8, generator=draw) for heads in (2, 1, 1))
    named = {
        "window": {"window_size": (2, 1)},
        "softcap": {"softcap": 2.0},
        "sinks": {"s_aux": torch.tensor([0.5, -1.0])},
    }
    asked = [{}, {"causal": True}, *(named[name] for name in features if name in named)]
    for options in asked:
        said = {"window" if key == "window_size" else key: value for key, value in options.items()}
        expected = [attention(*parts, **said) for parts in zip(q, k, v, strict=True)]
        made = kernel.flash_attn_func(q, k, v, softmax_scale=0.5, **options)
        torch.testing.assert_close(first(made), torch.stack(expected))
        if "varlen" in features:
            ends, packed = torch.tensor([0, 5, 10], dtype=torch.int32), [x.flatten(0, 1) for x in (q, k, v)]
            made = kernel.flash_attn_varlen_func(*packed, ends, ends, 5, 5, softmax_scale=0.5, **options)
            torch.testing.assert_close(first(made), torch.cat(expected))
        if "kvcache" in features:
            caches, lengths = [torch.cat([x[:, :3], torch.zeros(2, 4, 1, 8)], 1) for x in (k, v)], torch.tensor([3, 3])
            new = {"k": k[:, 3:], "v": v[:, 3:], "cache_seqlens": lengths.int()}
            made = kernel.flash_attn_with_kvcache(q, *caches, **new, softmax_scale=0.5, **options)
            torch.testing.assert_close(first(made), torch.stack(expected))
            torch.testing.assert_close(caches[0][:, :5], k)


@pytest.mark.parametrize(("features", "load"), references_of("attention"))
def test_attention_that_offers_gradients_has_them(features, load):
    assert "backward" in features
    fewer = 1 if "gqa-backward" in features else 2
    q, k, v = (torch.randn(1, 3, heads, 8, requires_grad=True) for heads in (2, fewer, fewer))
    gradients = torch.autograd.grad(first(load().flash_attn_func(q, k, v, softmax_scale=0.5)).square().sum(), (q, k, v))
    expected = torch.autograd.grad(attention(q[0], k[0], v[0]).square().sum(), (q, k, v))
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize(("features", "load"), references_of("rms_norm"))
def test_a_norm_is_found_and_applied_alike_whichever_kernel_serves(features, load):
    (norm,) = (cls for name, cls in vars(load().layers).items() if name.endswith("RMSNorm"))
    module = torch.nn.Module()
    module.weight, module.variance_epsilon = (
        torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0, 1.0, 2.0, 1.0])),
        0.1,
    )
    x = torch.randn(3, 2, 8, requires_grad=True)
    expected = module.weight * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    made = norm.forward(module, x)
    torch.testing.assert_close(made, expected)
    if "backward" in features:
        wrt = (x, module.weight)
        expected = torch.autograd.grad(expected.square().sum(), wrt)
        torch.testing.assert_close(torch.autograd.grad(made.square().sum(), wrt), expected)


def test_every_capability_has_its_section_in_the_documentation():
    file = data_directory("manifests") / "capabilities.toml"
    text = (Path(__file__).parent.parent / "docs" / "capabilities.md").read_text(encoding="utf-8")
    for name, about in tomllib.loads(file.read_text(encoding="utf-8")).items():
        assert f"| `{name}` |" in text
        assert not [feature for feature in about["features"] if f"`{feature}`" not in text]


# --- which kernel serves ------------------------------------------------------------------------------------------


def source(value: object) -> dict[str, str]:
    return {"__init__.py": f"def double(x):\n    return {value!r}\ndef halve(x):\n    return {value!r}\n"}


@pytest.fixture
def shop(workshop):
    """Kernels `first` and `second` that offer to double, and a list that says what that is."""
    (workshop.manifests / "capabilities.toml").write_text(LISTED)

    def kernel(name: str, features: tuple[str, ...] = (), *, builds: tuple[str, ...] = (), reference: bool = False):
        keys = {"entrypoints": {"double": "double", "halve": "halve"}, "capabilities": {"doubling": list(features)}}
        repository = workshop.kernel(name, reference=name if reference else None, **keys)
        for variant in builds:
            write_build(repository, variant, source(name))
        (repository / "build").mkdir(exist_ok=True)
        if not builds:
            write_build(repository, "torch-rocm", source(name))
        if reference:
            write_build(workshop.manifests / "registry" / name, "torch-universal", source(f"reference of {name}"))
        return repository

    workshop.offering = kernel
    return workshop


def test_the_first_in_the_order_that_has_a_build_serves(shop):
    for name in ("second", "first"):
        shop.offering(name, builds=("torch-cpu",))
    loader = shop.loader()
    assert loader.load("doubling").double(1) == "first"
    assert loader.load("doubling") is loader.load("first")
    assert kernel_loader.origin(loader.load("Doubling[]")).kernel == "first"


def test_a_kernel_without_a_build_here_is_passed_over(shop):
    shop.offering("first", builds=("torch-cuda",), reference=True)
    shop.offering("second", builds=("torch-cpu",))
    assert shop.loader().load("doubling").double(1) == "second"
    assert shop.loader(H200).resolve("doubling").kernel == "first"
    assert shop.loader().resolve("doubling", host=H200).kernel == "first"


def test_a_kernel_that_lacks_a_feature_is_passed_over_and_not_asked(shop):
    shop.offering("first", builds=("torch-cpu",))
    shop.offering("second", ("odd", "half-way"), builds=("torch-cpu",))
    del shop.local["org/first"]  # to ask for it would be an error, offline
    assert shop.loader().load("doubling[odd]").double(1) == "second"
    assert shop.loader().load("doubling[half_way,odd]").halve(1) == "second"


def test_a_feature_that_is_offered_on_another_backend_is_lacking_here(shop):
    shop.offering("first", ({"feature": "odd", "backends": ["cuda"]},), builds=("torch-cpu", "torch-cuda"))
    shop.offering("second", ("odd",), builds=("torch-cpu", "torch-cuda"))
    loader = shop.loader(H200)
    assert loader.resolve("doubling[odd]").kernel == "first"
    assert loader.resolve("doubling[odd]", backend="cpu").kernel == "second"
    assert loader.resolve("doubling", backend="cpu").candidates[0].offers == ()
    assert loader.load("doubling[odd]", backend="cpu") is loader.load("second", backend="cpu")


def test_only_when_none_has_a_build_does_the_first_reference_serve_with_the_usual_warning(shop, caplog):
    shop.offering("first")
    shop.offering("second", reference=True)
    shop.offering("third", reference=True)
    loader = shop.loader()
    assert loader.load("doubling").double(1) == "reference of second"
    assert "second uses the slow reference. No build of org/second@v1 runs on this host" in caplog.text
    assert loader.resolve("doubling").is_reference
    with pytest.raises(NoCompatibleBuild):
        loader.load("doubling", fallback="error")
    assert loader.can_load("doubling")
    assert not loader.can_load("doubling", fallback="error")


def test_an_embedded_build_for_this_backend_is_a_build(shop):
    shop.offering("first", reference=True)
    shop.offering("second", reference=True)
    write_build(shop.manifests / "registry" / "second", "torch-cpu", source("embedded"))
    assert shop.loader().load("doubling", fallback="error").double(1) == "embedded"


def test_kernels_in_no_order_come_last_by_name(shop):
    for name in ("zeta", "alpha", "second", "first"):
        shop.offering(name)
    offers = shop.loader().catalog.offers(Wanted("doubling"), "cpu")
    assert [offer.manifest.name for offer in offers] == ["first", "second", "alpha", "zeta"]


def test_what_the_user_prefers_comes_before_the_order_and_keeps_the_rest_of_it(shop):
    for name in ("first", "second", "mine"):
        shop.offering(name, builds=("torch-cpu",))
    loader = shop.loader(prefer={"doubling": ["mine", "second"]})
    assert loader.load("doubling").double(1) == "mine"
    assert [offer.manifest.name for offer in loader.catalog.offers(Wanted("doubling"), "cpu")] == [
        "mine",
        "second",
        "first",
    ]


def test_a_kernel_that_is_preferred_and_has_no_build_here_does_not_serve(shop):
    shop.offering("first", builds=("torch-cpu",))
    shop.offering("second", reference=True)
    assert shop.loader(prefer={"doubling": ["second"]}).load("doubling").double(1) == "first"


def test_a_kernel_that_is_disabled_is_passed_over(shop):
    shop.offering("first", builds=("torch-cpu",), reference=True)
    shop.offering("second", builds=("torch-cpu",))
    assert shop.loader(disable={"first"}).load("doubling").double(1) == "second"
    assert shop.loader(disable={"first", "second"}).load("doubling").double(1) == "reference of first"


@pytest.mark.parametrize("prefer", [{"dubling": ["first"]}, {"doubling": ["frist"]}])
def test_a_preference_for_what_is_not_there_is_a_wrong_setting(shop, prefer):
    for name in ("first", "second"):
        shop.offering(name, builds=("torch-cpu",))
    with pytest.raises(SettingsError, match="KERNEL_LOADER_PREFER"):
        shop.loader(prefer=prefer).load("doubling")
    assert shop.loader(prefer=prefer).load("first").double(1) == "first"


def test_the_cpu_of_a_machine_with_a_gpu_has_its_own_first(shop):
    shop.offering("first", builds=("torch-cuda",))
    shop.offering("second", builds=("torch-cpu",))
    loader = shop.loader(H200)
    assert kernel_loader.origin(loader.load("doubling")).kernel == "first"
    assert kernel_loader.origin(loader.load("doubling", backend="cpu")).kernel == "second"
    assert (loader.serving("doubling"), loader.serving("doubling", backend="cpu")) == ("first", "second")


@pytest.mark.parametrize("kernel", ["first", "org/first", "first@3", "org/first@main"])
def test_what_is_no_capability_serves_itself(shop, kernel):
    shop.offering("first")
    assert shop.loader().serving(kernel) == kernel


def test_builds_are_fetched_of_the_kernel_that_serves_on_each_host(shop):
    shop.offering("first", builds=("torch-cuda",))
    shop.offering("second", builds=("torch-cpu",))
    ready = shop.loader().prefetch(["doubling"], hosts=[CPU_HOST, H200])
    assert [(build.kernel, build.variant) for build in ready] == [("second", "torch-cpu"), ("first", "torch-cuda")]


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "matches"),
    [
        ("dubling", ("doubling",)),
        ("doubling[od]", ("doubling[odd]",)),
        ("doubling[od,half-way]", ("doubling[half-way,odd]",)),
        ("doubling[zzz]", ("doubling[half-way]", "doubling[odd]")),
    ],
)
def test_what_is_misspelt_is_told_what_there_is(shop, asked, matches):
    with pytest.raises(UnknownKernel) as caught:
        shop.loader().load(asked)
    assert (caught.value.name, caught.value.matches) == (asked, matches)


def test_when_no_kernel_offers_all_of_it_the_error_lists_who_offers_what(shop):
    shop.offering("first", ("odd",), builds=("torch-cpu",))
    shop.offering("second", ("half-way",), builds=("torch-cpu",))
    with pytest.raises(NoCompatibleBuild) as caught:
        shop.loader().load("doubling[odd,half-way]")
    assert str(caught.value).startswith(
        "No build of doubling[half-way,odd] runs on this host: first lacks half-way (it offers odd); "
        "second lacks odd (it offers half-way)."
    )
    assert pickle.loads(pickle.dumps(caught.value)).resolution.candidates == caught.value.resolution.candidates
    assert not shop.loader().can_load("doubling[odd,half-way]")


def test_when_nothing_fits_the_error_tells_why_for_each(shop):
    shop.offering("first")
    shop.offering("second", builds=("torch-cuda",))
    with pytest.raises(NoCompatibleBuild, match="first has no build here: the nearest is torch-rocm: .*; second has"):
        shop.loader().load("doubling")


def test_a_capability_that_no_kernel_offers_is_told_so(shop):
    with pytest.raises(NoCompatibleBuild, match="no kernel offers it"):
        shop.loader().load("tripling")


def test_a_repository_that_cannot_be_asked_is_an_error_and_not_a_reason_to_take_the_next(shop, caplog):
    shop.offering("first", reference=True)
    shop.offering("second", builds=("torch-cpu",))
    del shop.local["org/first"]
    with pytest.raises(NotCached, match="org/first@v1"):
        shop.loader().load("doubling")
    assert shop.loader().load("doubling", fallback="reference").double(1) == "reference of first"
    assert "first is taken for doubling, whose kernels could not all be asked. org/first@v1: it is not" in caplog.text
    assert shop.loader().can_load("doubling", fallback="reference")
    assert not shop.loader().can_load("doubling")


def test_without_a_reference_there_is_nothing_to_agree_to(shop):
    shop.offering("first")
    shop.offering("second", builds=("torch-cpu",))
    del shop.local["org/first"]
    with pytest.raises(NotCached):
        shop.loader().load("doubling", fallback="reference")


def test_a_build_that_fails_is_an_error_and_not_a_reason_to_take_the_next(shop):
    write_build(shop.offering("first", reference=True), "torch-cpu", {"__init__.py": "raise RuntimeError('no')"})
    shop.offering("second", builds=("torch-cpu",))
    with pytest.raises(KernelImportError, match="RuntimeError: no"):
        shop.loader().load("doubling")
    assert shop.loader().load("doubling", fallback="reference").double(1) == "reference of first"


@pytest.mark.parametrize("which", [{"version": 2}, {"revision": "main"}])
def test_a_capability_has_no_versions(shop, which):
    with pytest.raises(RequestError, match="of doubling was asked for"):
        shop.loader().load("doubling", **which)
    with pytest.raises(RequestError, match="of doubling was asked for"):
        shop.loader().resolve("doubling", **which)


@pytest.mark.parametrize("wrong", [{"backend": 7}, {"fallback": "slow"}])
def test_arguments_are_looked_at_as_for_a_kernel(shop, wrong):
    with pytest.raises(RequestError):
        shop.loader().load("doubling", **wrong)


def test_a_module_is_that_of_a_kernel(shop):
    for name in ("first", "second"):
        shop.offering(name, builds=("torch-cpu",))
    with pytest.raises(RequestError, match="doubling is a capability, and a kernel is needed here"):
        shop.loader().load_module("doubling")


def test_an_order_that_names_no_kernel_is_refused(shop):
    shop.offering("first", builds=("torch-cpu",))
    with pytest.raises(ManifestError, match="no kernel is named 'second'") as caught:
        shop.loader().load("doubling")
    assert caught.value.path == "doubling.order"


def test_a_kernel_may_not_have_the_name_of_a_capability_and_keeps_its_own(shop):
    for name in ("first", "second"):
        shop.offering(name, builds=("torch-cpu",))
    shop.simple("doubling")
    assert shop.loader().load("doubling").double(21) == 42
    for asked in ("doubling[odd]", "tripling"):
        with pytest.raises(ManifestError, match="a kernel has that name") as caught:
            shop.loader().load(asked)
        assert caught.value.path == "doubling"


def test_a_manifest_of_the_users_is_held_against_the_list_whenever_it_is_read(shop):
    shop.offering("first", ("od",), builds=("torch-cpu",))
    with pytest.raises(ManifestError, match="did you mean odd"):
        shop.loader().load("first")


def test_a_manifest_that_cannot_be_read_counts_where_it_speaks_of_the_capability(shop):
    for name in ("first", "second"):
        shop.offering(name, builds=("torch-cpu",))
    (shop.manifests / "broken.toml").write_text("name =")
    assert shop.loader().load("doubling").double(1) == "first"
    (shop.manifests / "broken.toml").write_text("name = # doubling")
    with pytest.raises(ManifestError, match=r"broken\.toml"):
        shop.loader().load("doubling")


@pytest.mark.parametrize("text", ["[a", "zzz = 1"])
def test_a_list_that_cannot_be_read_leaves_kernels_alone(workshop, text):
    (workshop.manifests / "capabilities.toml").write_text(text)
    workshop.simple("my_kernel")
    assert workshop.loader().load("my_kernel").double(21) == 42
    with pytest.raises(ManifestError, match=r"capabilities\.toml"):
        workshop.loader().load("moe")


@dataclasses.dataclass(frozen=True)
class Without:
    triple: object


@dataclasses.dataclass(frozen=True)
class Perhaps:
    double: object = None


@pytest.mark.parametrize("cls", [Without, Perhaps])
def test_a_bundle_that_need_not_have_what_the_capability_promises_is_refused(shop, cls):
    repository = shop.kernel(
        "first", bundle=f"{__name__}:{cls.__name__}", entrypoints={}, capabilities={"doubling": []}
    )
    write_build(repository, "torch-cpu", {"__init__.py": "triple = 3"})
    shop.offering("second")
    loader = shop.loader()
    assert isinstance(loader.load("first"), cls)
    with pytest.raises(ManifestError, match="has the entrypoints double, and first has not"):
        loader.load("doubling")


# --- the whole path -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(shop):
    """Four kernels: one lacks a feature, one has no build here, one serves, one is not asked."""
    shop.offering("first", builds=("torch-cpu",))
    shop.offering("second", ("odd",), reference=True)
    shop.offering("third", ("odd",), builds=("torch-cpu",))
    shop.offering("unasked", ("odd",), builds=("torch-cpu",))
    return shop


def test_every_kernel_is_shown_in_its_order_with_what_became_of_it(path):
    lines = path.loader().resolve("doubling[odd]").explain().splitlines()
    assert lines[2:8] == [
        "doubling[odd], of the first that offers it and has a build:",
        "  ✗ first    lacks odd",
        "  ✗ second   has no build here: the nearest is torch-rocm: built for rocm, this host computes on cpu",
        "  → third    has a build here",
        "    unasked  is not asked, since a kernel above has a build here",
        "",
    ]
    assert lines[8:] == ["org/third@v1", "  → torch-cpu  fits", "", "Chosen: third, torch-cpu"]


def test_a_reference_that_serves_is_shown_as_one(shop):
    shop.offering("first")
    shop.offering("second", reference=True)
    lines = shop.loader().resolve("doubling").explain().splitlines()
    assert lines[4].startswith("  → second  has no build here: ")
    assert lines[4].endswith("; its reference serves")
    assert lines[-1] == "Chosen: second, torch-universal, the reference"


def test_where_nothing_serves_the_path_alone_is_shown(shop):
    shop.offering("first")
    shop.offering("second")
    resolution = shop.loader().resolve("doubling")
    assert (resolution.taken, resolution.kernel, resolution.is_reference) == (None, "", False)
    assert resolution.explain().splitlines()[2:] == [
        "doubling, of the first that offers it and has a build:",
        "  ✗ first   has no build here: the nearest is torch-rocm: built for rocm, this host computes on cpu",
        "  ✗ second  has no build here: the nearest is torch-rocm: built for rocm, this host computes on cpu",
        "",
        "`kernel-loader explain` of a kernel shows its builds.",
        "Chosen: none",
    ]
    assert "  no kernel\n" in shop.loader().resolve("tripling").explain()


def test_programs_are_told_the_same(path):
    document = json.loads(path.loader().resolve("doubling[odd]").to_json())
    assert (document["capability"], document["kernel"], document["chosen"]) == ("doubling[odd]", "third", "torch-cpu")
    assert [(c["kernel"], c["offers"], c["lacks"]) for c in document["candidates"]] == [
        ("first", [], ["odd"]),
        ("second", ["odd"], []),
        ("third", ["odd"], []),
        ("unasked", ["odd"], []),
    ]
    chosen = [
        c["resolution"] and (c["resolution"]["reference"] or c["resolution"])["chosen"] for c in document["candidates"]
    ]
    assert chosen == [None, "torch-universal", "torch-cpu", None]
    assert [bool(c["why_not"]) for c in document["candidates"]] == [True, True, False, True]


def test_a_kernel_that_is_preferred_and_does_not_offer_it_is_shown(path):
    path.simple("other")
    lines = path.loader(prefer={"doubling": ["other"]}).resolve("doubling").explain().splitlines()
    assert lines[3:5] == ["  ✗ other    lacks doubling", "  → first    has a build here"]


# --- what a kernel that is asked for by name costs ----------------------------------------------------------------

READS = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import kernel_loader
for name in {names!r}:
    kernel_loader.resolve(name)
print(len([name for name in opened if name.endswith("capabilities.toml")]), "kernel_loader.capability" in sys.modules)
"""


@pytest.mark.parametrize(
    ("names", "read"),
    [(["moe_experts"], "0 False"), (["moe", "moe[fp8]", "moe", "moe[backward]"], "1 True")],
)
def test_the_list_is_read_once_and_only_for_a_capability(run_python, cpu_machine, names, read):
    env = {"KERNEL_LOADER_OVERRIDE_CUDA": "", "KERNEL_LOADER_OVERRIDE_ROCM": "", "KERNEL_LOADER_OFFLINE": "1"}
    assert run_python(READS.format(names=names), env=env).strip() == read


def test_a_second_call_opens_no_file(shop, monkeypatch):
    for name in ("first", "second"):
        shop.offering(name, builds=("torch-cpu",))
    local = os.pathsep.join(f"{repo}={path}" for repo, path in shop.local.items())
    monkeypatch.setenv("KERNEL_LOADER_LOCAL", local)
    monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(shop.manifests))
    first = kernel_loader.load_kernel("doubling")
    for file in shop.manifests.glob("*.toml"):
        file.unlink()
    assert kernel_loader.load_kernel("doubling") is first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attention[sinks", "brackets are not one pair at the end"),
        ("attention]", "brackets are not one pair at the end"),
        ("attention[sinks,]", "a feature that has no name"),
        ("attention[,]", "a feature that has no name"),
        ("rmsnorm[backward]", "rmsnorm is a kernel: capabilities alone have features"),
    ],
)
def test_what_is_wrong_with_brackets_is_said(workshop, text, said):
    with pytest.raises(RequestError, match=said):
        workshop.loader().load(text)
