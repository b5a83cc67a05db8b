"""State dicts in another layout, and back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import Converters, compose
from kernel_loader.fusion.operation import TensorSpec
from kernel_loader.fusion.plan import Plan, Specs, plan

# Where a converted state dict remembers the order of the original. An attribute of an OrderedDict, as torch's own
# `_metadata` is: it survives torch.save, and torch.load with weights_only.
_ORDER: Final = "_original_keys"
_METADATA: Final = "_metadata"


def convert_state_dict(state_dict: Mapping[str, Any], converters: Converters) -> OrderedDict[str, Any]:
    """A state dict in the layout that converters lead to.

    The given one stays as it is. Tensors that are untouched or only renamed are the same objects in the result, so
    that tied ones stay tied; all others are new. torch's `_metadata` is carried over, and the order of the keys is kept
    in the result for `revert_state_dict`.

    Args:
        state_dict: names and tensors; values that are no tensors may not be converted.
        converters: one, several, a composition, or what has a `conversion_mapping`.

    Raises:
        FusionError: the plan has problems, all of which are named, or a tensor is not as its converter needs it.
    """
    converted = _carried_out(state_dict, plan(specs_of(state_dict), converters))
    setattr(converted, _ORDER, tuple(state_dict))
    return converted


def revert_state_dict(state_dict: Mapping[str, Any], converters: Converters) -> OrderedDict[str, Any]:
    """The state dict that `convert_state_dict` made this one of, or would have.

    Bit for bit where all converters are exact, and with the keys in their order where the converted state dict still
    knows it; otherwise sources stand where the first target of their group stood.

    Raises:
        FusionError: as `convert_state_dict`.
    """
    reverted = _carried_out(state_dict, plan(specs_of(state_dict), compose(converters).inverse()))
    return _in_order(reverted, getattr(state_dict, _ORDER, ()))


def specs_of(state_dict: Mapping[str, Any]) -> Specs:
    """What a plan needs to know of a state dict.

    Raises:
        FusionError: it is no table.
    """
    given: object = state_dict
    if not isinstance(given, Mapping):
        raise FusionError((f"{given!r} is no state dict",), "Pass a table of names and tensors.")
    return {name: TensorSpec.of(value) if isinstance(value, Tensor) else None for name, value in state_dict.items()}


def _carried_out(state_dict: Mapping[str, Any], steps: Plan) -> OrderedDict[str, Any]:
    made: dict[str, Any] = {name: state_dict[name] for name in steps.kept}
    for group in steps.groups:
        made |= group.run(state_dict)
    result = OrderedDict((name, made[name]) for name in steps.targets)
    if hasattr(state_dict, _METADATA):
        setattr(result, _METADATA, copy.deepcopy(getattr(state_dict, _METADATA)))
    return result


def _in_order(state_dict: OrderedDict[str, Any], names: tuple[str, ...]) -> OrderedDict[str, Any]:
    if names and set(names) == state_dict.keys():
        for name in names:
            state_dict.move_to_end(name)
    return state_dict
