"""Fine-grained FP8 matmul in plain PyTorch: slow, exact, and the definition of what a faster build must compute.

`A` is quantised to float8_e4m3fn on the way in, `B` is stored quantised, and `C = A @ B.T` comes out:

    matmul_2d         one weight for all rows
    matmul_batched    each row names its expert
    matmul_grouped    rows sorted by expert
    fp8_act_quant     the activation quantiser alone

Runs on every device that has float8_e4m3fn, with torch 2.6 or later, under autograd and torch.compile.
"""

from .batched import matmul_batched
from .grouped import matmul_grouped
from .matmul import matmul_2d
from .quantize import fp8_act_quant

__all__ = ["fp8_act_quant", "matmul_2d", "matmul_batched", "matmul_grouped"]
