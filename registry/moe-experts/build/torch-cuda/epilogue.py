# ruff: noqa: ANN001, ANN201, ANN202 - arguments of kernels have no types of Python
"""What becomes of the sums of a tile before they are written."""

import triton
import triton.language as tl

from .activations import activation, clamp_gate, clamp_up


@triton.jit
def _write(total, out, kept, bias, expert, row, end, column, columns, bias_strides, alpha, ACTIVATION: tl.constexpr):
    """Add the bias, apply the activation, and write a tile of one half.

    total: float32, with rows and columns along the dimensions that `row` and `column` have. kept, bias: or None.
    """
    there = (row < end) & (column < columns)
    at = row.to(tl.int64) * columns + column
    if bias is not None:
        of_expert = bias + expert.to(tl.int64) * bias_strides[0]
        total += tl.load(of_expert + column * bias_strides[1], mask=column < columns, other=0.0).to(tl.float32)
    if kept is not None:
        tl.store(kept + at, total.to(kept.dtype.element_ty), mask=there)
    if ACTIVATION is not None:
        total = activation(total, alpha, ACTIVATION)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _write_gated(
    gate,
    up,
    out,
    kept,
    bias,
    expert,
    row,
    end,
    column,
    columns,
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """The same for gate and up. places: how far the up is from the gate in bias and kept, and the next column."""
    there = (row < end) & (column < columns)
    at_gate = column * places[1]
    at_up = at_gate + places[0]
    if bias is not None:
        of_expert = bias + expert.to(tl.int64) * bias_strides[0]
        gate += tl.load(of_expert + at_gate * bias_strides[1], mask=column < columns, other=0.0).to(tl.float32)
        up += tl.load(of_expert + at_up * bias_strides[1], mask=column < columns, other=0.0).to(tl.float32)
    if kept is not None:
        of_row = kept + row.to(tl.int64) * (2 * columns)
        tl.store(of_row + at_gate, gate.to(kept.dtype.element_ty), mask=there)
        tl.store(of_row + at_up, up.to(kept.dtype.element_ty), mask=there)
    if LIMITED:
        gate = clamp_gate(gate, limit)
        up = clamp_up(up, limit)
    if ACTIVATION == "swiglu_oai":
        up += 1
    result = activation(gate, alpha, ACTIVATION) * up
    tl.store(out + row.to(tl.int64) * columns + column, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def finish(
    total,
    out,
    kept,
    bias,
    expert,
    row,
    end,
    column,
    columns,
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    HALVES: tl.constexpr,
    ALTERNATING: tl.constexpr,
    TURNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write a tile (HEIGHT, HALVES * WIDTH) that begins at a row and a column, or one that is transposed if TURNED.

    ALTERNATING: its gates and ups alternate; otherwise all gates come first.
    """
    rows = row + tl.arange(0, HEIGHT)
    ns = column + tl.arange(0, WIDTH)
    if TURNED:
        r, n = rows[None, :], ns[:, None]
    else:
        r, n = rows[:, None], ns[None, :]
    if HALVES == 1:
        _write(total, out, kept, bias, expert, r, end, n, columns, bias_strides, alpha, ACTIVATION)
    else:
        # Both halves of a column are mostly in the registers of one thread, so that nothing moves.
        if TURNED and ALTERNATING:
            gate, up = total.reshape(WIDTH, 2, HEIGHT).permute(0, 2, 1).split()
        elif TURNED:
            gate, up = total.reshape(2, WIDTH, HEIGHT).permute(1, 2, 0).split()
        elif ALTERNATING:
            gate, up = total.reshape(HEIGHT, WIDTH, 2).split()
        else:
            gate, up = total.reshape(HEIGHT, 2, WIDTH).permute(0, 2, 1).split()
        _write_gated(
            gate,
            up,
            out,
            kept,
            bias,
            expert,
            r,
            end,
            n,
            columns,
            bias_strides,
            places,
            alpha,
            limit,
            ACTIVATION,
            LIMITED,
        )
