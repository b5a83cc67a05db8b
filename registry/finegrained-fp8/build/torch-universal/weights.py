"""Quantised weights: which format a pair (B, Bs) is in, and fp32 tiles of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

# torch 2.6 has no float8_e8m0fnu; there UE8M0 scales can only be raw exponent bytes.
UE8M0_DTYPES: Final = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))

# OCP Microscaling Formats (MX) v1.0: one UE8M0 scale for 32 elements along K.
MX_GROUP: Final = 32

# e2m1 of OCP MX v1.0, by the four bits of the code: one of sign, two of exponent, one of mantissa.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Weights:
    """A stack of quantised matrices; element (n, k) of matrix e is `code * scale[e, n // block_n, k // block_k]`.

    codes: (E, N, K) float8_e4m3fn, or (E, N, K / 2) uint8 holding two e2m1 codes a byte, low nibble first.
    scale: (E, ceil(N / block_n), ceil(K / block_k)), float32 or uint8 (UE8M0 exponents).
    mx: activations take power-of-two scales too.
    """

    codes: Tensor
    scale: Tensor
    n: int
    k: int
    block_n: int
    block_k: int
    mx: bool

    def tile(self, expert: int, n0: int, n1: int, k0: int, k1: int) -> Tensor:
        """Codes of rows n0:n1 and columns k0:k1, without their scales. k0 and k1 are even. (n, k) float32, exact."""
        codes = self.codes[expert]
        if codes.dtype != torch.uint8:
            return codes[n0:n1, k0:k1].to(torch.float32)
        packed = codes[n0:n1, k0 // 2 : k1 // 2]
        table = torch.tensor(_E2M1, dtype=torch.float32, device=packed.device)
        values = torch.empty((n1 - n0, k1 - k0), dtype=torch.float32, device=packed.device)
        values[:, 0::2] = table[(packed & 0xF).long()]
        values[:, 1::2] = table[(packed >> 4).long()]
        return values

    def column_scale(self, expert: int, n0: int, n1: int, block: int) -> Tensor:
        """Scales of output columns n0:n1 in K-block `block`. (n,) float32."""
        return _decode_scale(self.scale[expert, :, block].index_select(0, self._blocks(n0, n1, self.block_n)))

    def dequantised(self, expert: int, n0: int, n1: int, k0: int, k1: int) -> Tensor:
        """Real values of rows n0:n1 and columns k0:k1, which need not begin or end at a block. (n, k) float32."""
        rows, columns = self._blocks(n0, n1, self.block_n), self._blocks(k0, k1, self.block_k)
        scale = self.scale[expert][rows.unsqueeze(1), columns]
        return self.tile(expert, n0, n1, k0, k1) * _decode_scale(scale)

    def _blocks(self, start: int, stop: int, block: int) -> Tensor:
        return torch.arange(start, stop, device=self.scale.device) // block


def read_weights(B: Tensor, Bs: Tensor, block_size: Sequence[int] | None, *, experts: bool) -> Weights:
    """Recognise the format of (B, Bs), or say what does not fit. Looks at shapes and dtypes only.

    MX is recognised by the scales alone, whatever `block_size`: that is how the published kernel routes.

    Raises:
        TypeError: dtype of B or Bs.
        ValueError: shape of B or Bs, or `block_size`.
    """
    if B.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise TypeError(f"B: expected float8_e4m3fn, or int8 holding two e2m1 codes a byte, got {B.dtype}")
    if Bs.dtype != torch.float32 and Bs.dtype not in UE8M0_DTYPES:
        raise TypeError(f"Bs: expected float32, float8_e8m0fnu or uint8 (UE8M0 exponents), got {Bs.dtype}")
    if B.ndim != (3 if experts else 2):
        raise ValueError(f"B: expected shape {'(E, N, K)' if experts else '(N, K)'}, got {tuple(B.shape)}")
    if B.device != Bs.device:
        raise ValueError(f"Bs: expected on {B.device}, where B is, got {Bs.device}")

    packed = B.dtype == torch.int8
    n, k = B.shape[-2], B.shape[-1] * (2 if packed else 1)
    block_n, block_k, mx = _blocking(B, Bs, block_size, n, k)
    matrices = B.shape[0] if experts else 1
    # The views cost nothing, and few devices can index float8_e8m0fnu or shift int8 without its sign.
    return Weights(
        codes=(B.view(torch.uint8) if packed else B).reshape(matrices, n, B.shape[-1]),
        scale=(Bs if Bs.dtype == torch.float32 else Bs.view(torch.uint8)).reshape(
            matrices, -(-n // block_n), -(-k // block_k)
        ),
        n=n,
        k=k,
        block_n=block_n,
        block_k=block_k,
        mx=mx,
    )


def _blocking(B: Tensor, Bs: Tensor, block_size: Sequence[int] | None, n: int, k: int) -> tuple[int, int, bool]:
    """(block_n, block_k, mx), once the shape of Bs is known to agree with them."""
    stack = tuple(B.shape[:-2])
    if B.dtype == torch.int8:
        if Bs.dtype == torch.float32:
            raise TypeError("Bs: expected float8_e8m0fnu or uint8 (UE8M0 exponents) for int8 B, got torch.float32")
        if k % MX_GROUP:
            raise ValueError(f"B: expected K to be a multiple of {MX_GROUP} for int8 B, got K = {k}")
        _expect_scale(Bs, "one for 32 elements along K", (*stack, n, k // MX_GROUP))
        return 1, MX_GROUP, True
    if Bs.dtype in UE8M0_DTYPES and k % MX_GROUP == 0 and tuple(Bs.shape) == (*stack, n, k // MX_GROUP):
        return 1, MX_GROUP, True
    if block_size is None or tuple(block_size) == (n, k):
        one_each = [stack, (*stack, 1, 1)] if stack else [(), (1,), (1, 1)]
        _expect_scale(Bs, "one for a whole matrix", *one_each)
        return max(n, 1), max(k, 1), False  # an empty matrix still needs a block that can be divided by
    if len(block_size) != 2 or min(block_size) < 1:
        raise ValueError(f"block_size: expected None or two positive numbers [N, K], got {list(block_size)}")
    block_n, block_k = block_size
    blocks = (*stack, -(-n // block_n), -(-k // block_k))
    _expect_scale(Bs, f"one for {block_n} x {block_k} of B {tuple(B.shape)}", blocks)
    return block_n, block_k, False


def _expect_scale(Bs: Tensor, meaning: str, *shapes: tuple[int, ...]) -> None:
    if tuple(Bs.shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"Bs: expected shape {wanted} ({meaning}), got {tuple(Bs.shape)}")


def _decode_scale(scale: Tensor) -> Tensor:
    """UE8M0 exponents as float32, 2 ** (e - 127), 255 being NaN (OCP MX v1.0, E8M0); float32 as it is."""
    if scale.dtype == torch.float32:
        return scale
    exponent = scale.to(torch.int32)
    # e is the exponent field of the float32 itself, save at the ends: 2 ** -127 is subnormal there, and 255 with an
    # empty mantissa would be infinity.
    bits = (exponent << 23).masked_fill_(exponent == 0, 1 << 22).masked_fill_(exponent == 255, 0x7FC00000)
    return bits.view(torch.float32)
