"""A kernel for tests, right and with one fault at a time: each row of x times the matrix of its expert.

y[t] = x[t] @ w[ids[t]].T / 4, (T, K) x (E, N, K) -> (T, N); zeros where ids[t] >= E, whatever stands in the row.
"""

import torch

from kernel_loader.conformance import Case, Draw, Entry, Inputs, Tolerance

E, N, K = 3, 8, 5


def formula(x, ids, w):
    zero = x.new_zeros(w.shape[1], dtype=torch.float64)
    rows = [w[i].double() @ x[t].double() / 4 if i < len(w) else zero for t, i in enumerate(ids.tolist())]
    return torch.stack(rows) if rows else zero.expand(0, -1)


def problem(draw: Draw, *, t: int, sentinels: bool = True) -> Inputs:
    x = draw.normal(t, K)
    ids = torch.arange(t, device=draw.device) % (E + 1 if sentinels else E)
    x[ids >= E] = float("nan")
    return Inputs(x, ids, draw.normal(E, N, K))


GRID = (
    Entry(
        entrypoint="routed",
        formula=formula,
        gradients=(0,),
        tolerance=Tolerance(row=1e-5),
        cases=(
            Case("no row", lambda draw: problem(draw, t=0)),
            Case("a row", lambda draw: problem(draw, t=1)),
            Case("rows", lambda draw: problem(draw, t=9, sentinels=False)),
            Case("sentinels", lambda draw: problem(draw, t=9)),
            Case("strided", lambda draw: problem(draw, t=9).replace((0,), draw.strided)),
        ),
        skip={"compile": "the rows of an expert are counted on the host"},
        problem=problem,
        sizes=({"t": 16}, {"t": 64, "sentinels": False}),
    ),
)

RIGHT = """
import ctypes, os, time
import torch

WORK = {}

class Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, w):
        ctx.save_for_backward(ids, w)
        out = torch.zeros(len(x), w.shape[1], device=x.device)
        for e in range(len(w)):
            rows = (ids == e).nonzero().flatten()
            out[rows] = 0.25 * (x[rows] @ w[e].T)
        return out

    @staticmethod
    def backward(ctx, grad):
        ids, w = ctx.saved_tensors
        dx = torch.zeros(len(grad), w.shape[2], device=grad.device)
        for e in range(len(w)):
            rows = (ids == e).nonzero().flatten()
            dx[rows] = 0.25 * (grad[rows] @ w[e])
        return dx, None, None

def routed(x, ids, w):
    return Routed.apply(x, ids, w)
"""

_HEAD, _ZEROS, _END = "def forward(ctx, x, ids, w):\n", "out = torch.zeros(len(x), w.shape[1], ", "        return out\n"

# Fault -> the text that is right, what stands in its place, and a part of what is found.
FAULTS = {
    "uninitialised rows": (_ZEROS, "out = torch.empty(len(x), w.shape[1], ", "nan came, 0.0 is right"),
    "off-by-one store": (
        _END,
        f"        if len(x): ctypes.memset(out.data_ptr() + 4 * out.numel(), 0, 4)\n{_END}",
        "4 bytes written past its end, up to 4 beyond it",
    ),
    "store before the start": (
        _END,
        f"        if len(x): ctypes.memset(out.data_ptr() - 4, 0, 4)\n{_END}",
        "4 bytes written before its start",
    ),
    "clamped sentinels": (_HEAD, f"{_HEAD}        ids = ids.clamp(max=len(w) - 1)\n", "nan came, 0.0 is right"),
    "wrong scale": ("out[rows] = 0.25 *", "out[rows] = 0.2501 *", "times what is tolerated"),
    "stale workspace": (
        f"{_ZEROS}device=x.device)",
        f"out = WORK.setdefault(len(x), {_ZEROS.partition('= ')[2]}device=x.device))",
        "the output of an earlier call was overwritten by a later one",
    ),
    "writes its input": (_END, f"        w.mul_(1.0001)\n{_END}", "input 2: "),
    "uninitialised gradient": ("dx = torch.zeros(", "dx = torch.empty(", "gradient of argument 0"),
    "an expanded gradient twice": (
        "rows] = 0.25 * (grad[rows]",
        "rows] = 0.25 * (1 + (0 in grad.stride() and len(grad) > 1)) * (grad[rows]",
        "gradient of argument 0",
    ),
    "a gradient that is kept": (
        "dx = torch.zeros(len(grad), w.shape[2], device=grad.device)",
        "dx = WORK.setdefault(-len(grad), torch.zeros(len(grad), w.shape[2])).zero_()",
        "the gradient of an earlier call was overwritten by a later one",
    ),
    "a gradient that writes weights": (
        "return dx, None, None",
        "w.data.mul_(1.5); return dx, None, None",
        "input 2: ",
    ),
    "a gradient that writes what comes from above": (
        "return dx, None, None",
        "grad.data.mul_(1.5); return dx, None, None",
        "the gradient from above, which may be another's too, was overwritten",
    ),
    "half precision": (
        "return Routed.apply(x, ids, w)",
        "return Routed.apply(x, ids, w).bfloat16()",
        "torch.bfloat16 came",
    ),
    "a tuple": (
        "return Routed.apply(x, ids, w)",
        "return (Routed.apply(x, ids, w),)",
        "a tuple came, a tensor is right",
    ),
    "no gradient": ("return Routed.apply(x, ids, w)", "return Routed.apply(x, ids, w).detach()", "has no gradient"),
    "wrong shape": ("return Routed.apply(x, ids, w)", "return Routed.apply(x, ids, w)[:, :-1]", "shape (9, 7) came"),
    "raises": (_HEAD, f"{_HEAD}        if len(x) > 1: raise ValueError('no')\n", "raised ValueError: no"),
}
ENDS_THE_PROCESS = (_HEAD, f"{_HEAD}        if len(x) == 1: os.abort()\n")
HANGS = (_HEAD, f"{_HEAD}        if len(x) == 1: time.sleep(600)\n")


def broken(right: str, wrong: str) -> str:
    """The source with one thing wrong."""
    assert RIGHT.count(right) == 1
    return RIGHT.replace(right, wrong)
