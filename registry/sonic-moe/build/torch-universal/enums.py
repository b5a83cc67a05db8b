"""The names of activations."""

from enum import Enum


class ActivationType(Enum):
    """What lies between the two products of an expert. The layers take those that have a gate: SWIGLU and GEGLU."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"
    RELU_SQ = "relu_sq"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"
