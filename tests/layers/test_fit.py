"""Which layers fit in the place of others."""

import inspect

import pytest
import torch
from torch import nn

from kernel_loader import Mode
from kernel_loader.layers.fit import faults, forward_for, unsupported
from kernel_loader.layers.repository import function_layer


def layer(forward, **members):
    return type("Layer", (nn.Module,), {"forward": forward, **members})


def original(self, hidden, scale=2, *, flag=False):
    return hidden * scale


FITS = {
    "the same": lambda self, hidden, scale=2, *, flag=False: (hidden, scale, flag),
    "another name": lambda self, x, scale=2, *, flag=False: (x, scale, flag),
    "all names": lambda self, x, y=2, *, flag=False: (x, y, flag),
    "more with defaults": lambda self, hidden, scale=2, more=3, *, flag=False: (hidden, scale, flag),
    "a default where none was": lambda self, hidden=None, scale=2, *, flag=False: (hidden, scale, flag),
    "keywords of any name": lambda self, hidden, scale=2, **options: (hidden, scale, options.get("flag", False)),
}
MISFITS = {
    "positional-only": (lambda self, hidden, scale=2, /, *, flag=False: hidden, "positional-only"),
    "fewer": (lambda self, hidden, *, flag=False: hidden, "lacks the parameter scale"),
    "no keyword": (lambda self, hidden, scale=2: hidden, "lacks the parameter flag"),
    "other default": (lambda self, hidden, scale=3, *, flag=False: hidden, "another default than scale"),
    "no default": (lambda self, hidden, scale, *, flag=False: hidden, "another default than scale"),
    "other kind": (lambda self, hidden, *, scale=2, flag=False: hidden, "takes scale by keyword alone"),
    "more required": (lambda self, hidden, scale=2, *, flag=False, more: hidden, "needs more parameters: more"),
    "other order": (lambda self, scale, hidden=2, *, flag=False: hidden, "in another order"),
}


@pytest.mark.parametrize("forward", FITS.values(), ids=FITS)
def test_a_layer_that_takes_the_same_calls_fits(forward):
    kernel, base = layer(forward), layer(original)
    assert faults(kernel, base) == ()
    swapped = type("Swapped", (base,), {"forward": forward_for(kernel, base)})()
    assert swapped.forward(5) == swapped.forward(hidden=5) == (5, 2, False)
    assert swapped.forward(5, 3, flag=True) == swapped.forward(scale=3, hidden=5, flag=True) == (5, 3, True)


@pytest.mark.parametrize(("forward", "fault"), MISFITS.values(), ids=MISFITS)
def test_a_layer_that_takes_other_calls_does_not(forward, fault):
    found = faults(layer(forward), layer(original))
    assert fault in found[0]


def test_a_renamed_parameter_changes_nothing_else():
    unit = 3

    def forward(self, x, *, by=2):
        """Doc."""
        inner = lambda: x * by * unit  # noqa: E731
        return inner()

    kernel = layer(forward)
    base = layer(lambda self, hidden, *, by=2: hidden)
    renamed = forward_for(kernel, base)
    assert list(inspect.signature(renamed).parameters) == ["self", "hidden", "by"]
    assert renamed(None, 5) == renamed(None, hidden=5) == 30
    assert renamed(None, 5, by=1) == 15
    assert (renamed.__doc__, renamed.__name__) == ("Doc.", "forward")
    assert forward(None, 5) == forward(None, x=5, by=2) == 30


def test_a_parameter_whose_new_name_is_taken_cannot_be_renamed():
    def forward(self, x):
        for hidden in (x, x):
            x = x + hidden
        return x

    (found,) = faults(layer(forward), layer(lambda self, hidden: hidden))
    assert "other names" in found


def test_a_decorated_forward_cannot_be_renamed_and_fits_under_its_own_names():
    @torch.no_grad()
    def forward(self, x):
        return x

    assert faults(layer(forward), layer(lambda self, x: x)) == ()
    assert "other names" in faults(layer(forward), layer(lambda self, hidden: hidden))[0]


def test_an_original_that_takes_anything_says_nothing():
    assert faults(layer(lambda self, x, y=2: x), layer(lambda self, *args, **options: args)) == ()


def test_functions_fit_functions():
    kernel, base = function_layer(lambda x, y=2: x * y, "kernel"), function_layer(lambda a, y=2: a, "base")
    assert faults(kernel, base) == ()
    assert type("Swapped", (base,), {"forward": forward_for(kernel, base)})()(a=3) == 6


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (layer(lambda self: None, __init__=lambda self, size=1: None), "has a constructor"),
        (layer(lambda self: None, helper=lambda self: None), "members beside forward (helper)"),
        (layer(lambda self: None, buffer=torch.ones(1)), "members beside forward (buffer)"),
        (type("NoModule", (), {"forward": lambda self: None}), "is no nn.Module"),
    ],
)
def test_a_layer_with_a_state_of_its_own_does_not_fit(kernel, fault):
    assert fault in faults(kernel, layer(lambda self: None))[0]


def test_flags_and_annotations_are_no_state():
    kernel = layer(lambda self: None, can_torch_compile=True, has_backward=False, __annotations__={"weight": "Tensor"})
    assert faults(kernel, layer(lambda self: None)) == ()
    assert unsupported(kernel, Mode.INFERENCE | Mode.TORCH_COMPILE) == ""
    assert "no backward" in unsupported(kernel, Mode.TRAINING)
    assert "torch.compile" in unsupported(layer(lambda self: None), Mode.INFERENCE | Mode.TORCH_COMPILE)
