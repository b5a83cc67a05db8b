"""Where block scales lie: row by row, or in the tiles that tensor cores read.

A tile is of 128 rows and 4 scales; row 32 * i + j of it, scale c, is byte 16 * j + 4 * i + c. Tiles follow each other
along the columns first. (cuBLAS documentation, 1D block scaling factors layout.)
"""

import torch
from torch import Tensor

GROUP = 16


def swizzled_sf_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the swizzled scales of (rows, cols) elements, four bytes an int32."""
    return -(-rows // 128) * 128, -(-(cols // GROUP) // 4)


def swizzle(scales: Tensor) -> Tensor:
    """(rows, cols / 16) uint8 -> int32 as `swizzled_sf_shape` says; what is filled up is zero."""
    rows, columns = swizzled_sf_shape(scales.shape[0], scales.shape[1] * GROUP)
    padded = scales.new_zeros((rows, 4 * columns))
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.view(rows // 128, 4, 32, columns, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, 4 * columns).view(torch.int32)


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle`, (rows, cols / 16) uint8."""
    height, width = swizzled.shape
    tiles = swizzled.contiguous().view(torch.uint8).view(height // 128, width, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(height, 4 * width)[:rows, : cols // GROUP].contiguous()
