"""The experts, as ops with a gradient: one expert after the other, in float32, over the rows that go to it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import activations
from ._ops import ops, qualified, without_autocast
from .arguments import check_routing, check_triples, check_weights

_ARGUMENTS = (
    "Tensor x, Tensor scores, Tensor tokens, Tensor experts, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2,"
    " str activation, bool concat_layout"
)


class _Mixture(NamedTuple):
    """The arguments of a mixture.

    x: (T, H). scores, tokens, experts: (R,). w1: (2I, H, E), its rows gates and ups in turn, or with concat_layout all
    gates first. b1: (E, 2I). w2: (H, I, E). b2: (E, H).
    """

    x: Tensor
    scores: Tensor
    tokens: Tensor
    experts: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str
    concat_layout: bool

    @property
    def wide(self) -> torch.dtype:
        """What is computed in."""
        return wide(self.x.dtype)

    def check(self) -> None:
        """Raise unless shapes, dtypes and devices agree."""
        check_weights(self.x, self.w1, self.b1, self.w2, self.b2)
        check_triples(self.x, self.scores, self.tokens, self.experts)

    def segments(self) -> Iterator[tuple[int, Tensor]]:
        """Each expert that has rows, with their numbers; sentinels are in no segment, so that none is ever read."""
        check_routing(self.tokens, self.experts, self.x.shape[0])
        count = self.w2.shape[2]
        experts = self.experts.clamp(max=count)
        order = experts.argsort(stable=True)
        sizes = torch.bincount(experts, minlength=count + 1).tolist()
        runs = order.split_with_sizes(sizes)[:count]
        return ((expert, rows) for expert, rows in enumerate(runs) if len(rows))


class _Made(NamedTuple):
    """What one expert makes of its rows (n, H): the two halves of its first product, and its result."""

    rows: Tensor
    gate: Tensor
    up: Tensor
    hidden: Tensor
    result: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mixture(*arguments: Any) -> Tensor:  # noqa: ANN401 - those of _Mixture
    """The sum over the rows of each token of score * expert(x[token]), (T, H) in the dtype of x."""
    result: Tensor = ops.mixture.default(*arguments)
    return result


def _halves(pairs: Tensor, *, concat_layout: bool) -> tuple[Tensor, Tensor]:
    """Views of the gates and the ups along the last dimension."""
    inner = pairs.shape[-1] // 2
    return (pairs[..., :inner], pairs[..., inner:]) if concat_layout else (pairs[..., 0::2], pairs[..., 1::2])


def _compute(m: _Mixture, expert: int, tokens: Tensor) -> _Made:
    rows = m.x[tokens].to(m.wide)
    pairs = rows @ m.w1[:, :, expert].to(m.wide).t()
    if m.b1 is not None:
        pairs += m.b1[expert]
    gate, up = _halves(pairs, concat_layout=m.concat_layout)
    hidden = activations.forward(gate, up, m.activation)
    result = hidden @ m.w2[:, :, expert].to(m.wide).t()
    if m.b2 is not None:
        result += m.b2[expert]
    return _Made(rows, gate, up, hidden, result)


@torch.library.custom_op(qualified("mixture"), mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
@without_autocast
def _mixture(*arguments: Any) -> Tensor:  # noqa: ANN401 - those of _Mixture
    m = _Mixture(*arguments)
    m.check()
    total = torch.zeros(m.x.shape, dtype=m.wide, device=m.x.device)
    for expert, rows in m.segments():
        tokens = m.tokens[rows]
        score = m.scores[rows].to(m.wide).unsqueeze(1)
        total.index_add_(0, tokens, score * _compute(m, expert, tokens).result)
    return total.to(m.x.dtype)


@_mixture.register_fake
def _(*arguments: Any) -> Tensor:  # noqa: ANN401 - those of _Mixture
    m = _Mixture(*arguments)
    m.check()
    return m.x.new_empty(m.x.shape)


@torch.library.custom_op(
    qualified("mixture_backward"),
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@without_autocast
def _mixture_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - those of _Mixture
    """The gradients to x, scores, w1, b1, w2 and b2; empty for a bias that is not there."""
    m = _Mixture(*arguments)
    to_x = torch.zeros(m.x.shape, dtype=m.wide, device=m.x.device)
    to_scores, to_w1, to_w2 = torch.zeros_like(m.scores), torch.zeros_like(m.w1), torch.zeros_like(m.w2)
    to_b1, to_b2 = (grad.new_zeros(0) if bias is None else torch.zeros_like(bias) for bias in (m.b1, m.b2))
    for expert, rows in m.segments():
        tokens = m.tokens[rows]
        made = _compute(m, expert, tokens)
        above = grad[tokens].to(m.wide)
        to_scores[rows] = (above * made.result).sum(1).to(m.scores.dtype)

        to_result = above * m.scores[rows].to(m.wide).unsqueeze(1)
        to_w2[:, :, expert] = (to_result.t() @ made.hidden).to(m.w2.dtype)
        to_hidden = to_result @ m.w2[:, :, expert].to(m.wide)

        to_pairs = to_hidden.new_empty(len(rows), m.w1.shape[0])
        to_gate, to_up = _halves(to_pairs, concat_layout=m.concat_layout)
        for view, value in zip(
            (to_gate, to_up), activations.backward(to_hidden, made.gate, made.up, m.activation), strict=True
        ):
            view.copy_(value)
        to_w1[:, :, expert] = (to_pairs.t() @ made.rows).to(m.w1.dtype)
        to_x.index_add_(0, tokens, to_pairs @ m.w1[:, :, expert].to(m.wide))

        if m.b1 is not None:
            to_b1[expert] = to_pairs.sum(0).to(m.b1.dtype)
        if m.b2 is not None:
            to_b2[expert] = to_result.sum(0).to(m.b2.dtype)
    return to_x.to(m.x.dtype), to_scores, to_w1, to_b1, to_w2, to_b2


@_mixture_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - those of _Mixture
    m = _Mixture(*arguments)
    to_b1, to_b2 = (grad.new_empty(0) if bias is None else torch.empty_like(bias) for bias in (m.b1, m.b2))
    to_x = m.x.new_empty(m.x.shape)
    return to_x, torch.empty_like(m.scores), torch.empty_like(m.w1), to_b1, torch.empty_like(m.w2), to_b2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401, ARG001 - torch's
    ctx.save_for_backward(*inputs[:8])
    ctx.rest = inputs[8:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    x, scores, w1, b1, w2, b2 = ops.mixture_backward.default(grad, *ctx.saved_tensors, *ctx.rest)
    has_bias = ctx.saved_tensors[5] is not None
    return x, scores, None, None, w1, b1 if has_bias else None, w2, b2 if has_bias else None, None, None


_mixture.register_autograd(_gradients, setup_context=_setup_context)
