"""NVFP4: e2m1 codes, an e4m3 scale for 16 along K, and one float32 for the whole tensor."""

import torch
from torch import Tensor

from .swizzle import GROUP

E4M3_MAX = 448.0
E2M1_MAX = 6.0

# e2m1 of OCP MX v1.0, by the four bits of the code: one of sign, two of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Halfway between two codes; a tie goes to the even one: the lower in the first row, the upper in the second.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def global_scale_for(w: Tensor) -> Tensor:
    """448 * 6 / max(abs(w)), what the elements are multiplied by so that scales fit into e4m3. (1,) float32.

    Raises:
        TypeError: the dtype of `w`.
        ValueError: `w` is empty.
    """
    if not w.dtype.is_floating_point:
        raise TypeError(f"w: expected a floating-point dtype, got {w.dtype}")
    if not w.numel():
        raise ValueError(f"w: expected at least one element, got shape {tuple(w.shape)}")
    amax = w.detach().abs().amax().to(torch.float32).clamp(min=1e-12)
    return (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).reshape(1)


def quantize_reference(w: Tensor) -> Tensor:
    """What a weight becomes: quantised as `pack` does it, and dequantised. (N, K) in the dtype of `w`.

    Raises:
        TypeError: the dtype of `w`.
        ValueError: `w` is not (N, K), K a multiple of 16.
    """
    check_matrix(w)
    if not w.numel():
        return w.detach().clone()
    global_scale = global_scale_for(w)
    codes, scales = quantize(w.detach().to(torch.float32), global_scale)
    return (scaled_values(codes, scales) / global_scale).to(w.dtype)


def check_matrix(w: Tensor) -> None:
    """Whether `w` is what can be packed."""
    if not w.dtype.is_floating_point:
        raise TypeError(f"w: expected a floating-point dtype, got {w.dtype}")
    if w.ndim != 2 or w.shape[1] % GROUP:
        raise ValueError(f"w: expected shape (N, K) with K a multiple of {GROUP}, got {tuple(w.shape)}")


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x * global_scale / scale, and scales. x: (rows, K) float32.

    Returns:
        Two codes a byte, (rows, K / 2) uint8, and e4m3 scales by their bits, (rows, K / 16) uint8.
    """
    groups = torch.unflatten(x, 1, (-1, GROUP))
    amax = groups.abs().amax(dim=2)
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number, which is one ulp away from dividing.
    wanted = amax / torch.full_like(amax, E2M1_MAX) * global_scale
    scales = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    scale = scales.to(torch.float32)
    factor = (global_scale / scale).masked_fill(scale == 0, 0.0)
    codes = _e2m1_codes(groups * factor.unsqueeze(2)).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales.view(torch.uint8)


def scaled_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times the scales of their groups, without the scale of the tensor; exact. (rows, K) float32."""
    table = torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)
    values = torch.empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float32, device=codes.device)
    values[:, 0::2] = table[(codes & 0xF).long()]
    values[:, 1::2] = table[(codes >> 4).long()]
    scale = scales.view(torch.float8_e4m3fn).to(torch.float32)
    return torch.unflatten(values, 1, (-1, GROUP)).mul_(scale.unsqueeze(2)).flatten(1)


def _e2m1_codes(x: Tensor) -> Tensor:
    """The nearest code, ties to even, saturating. uint8."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for halfway in _TIES_DOWN:
        code += magnitude > halfway
    for halfway in _TIES_UP:
        code += magnitude >= halfway
    return code.add_(torch.signbit(x).to(torch.uint8) << 3)
