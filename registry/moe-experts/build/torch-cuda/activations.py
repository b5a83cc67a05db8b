# ruff: noqa: ANN001, ANN201, RET505 - kernels: no types of Python, and branches of the compiler
"""What stands between the two products, and its derivative."""

import triton
import triton.language as tl


@triton.jit
def activation(x, alpha, NAME: tl.constexpr):
    """The function of the gate, float32."""
    if NAME == "silu":
        return x / (1 + tl.exp(-x))
    elif NAME == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # (1 + tanh(u)) / 2 is sigmoid(2 * u)
    elif NAME == "relu":
        return tl.where(x < 0, 0.0, x)
    elif NAME == "relu2":
        return tl.where(x < 0, 0.0, x) * x
    else:
        return x / (1 + tl.exp(-alpha * x))


@triton.jit
def derivative(x, alpha, NAME: tl.constexpr):
    """The derivative of `activation`, float32."""
    if NAME == "gelu":
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        s = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif NAME == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif NAME == "relu2":
        return tl.where(x > 0, 2 * x, 0.0)
    else:
        a = 1.0 if NAME == "silu" else alpha
        s = 1 / (1 + tl.exp(-a * x))
        return s + a * x * s * (1 - s)


@triton.jit
def clamp_gate(gate, limit):
    """At most `limit`; NaN stays."""
    return tl.where(gate > limit, limit, gate)


@triton.jit
def clamp_up(up, limit):
    """Within -limit and limit; NaN stays."""
    return tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
