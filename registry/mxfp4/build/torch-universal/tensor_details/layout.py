"""Layouts of codes and scales. Here there is the plain one alone."""

from typing import Any

from torch import Tensor


class StridedLayout:
    """Elements by their strides, as torch has them.

    Args:
        shape: of the data.
    """

    name = None

    def __init__(self, shape: Any) -> None:  # noqa: ANN401 - as published
        self.initial_shape = shape

    def swizzle_data(self, data: Tensor) -> Tensor:
        """What lies in memory, of data by their strides."""
        return data

    def unswizzle_data(self, data: Tensor) -> Tensor:
        """Data by their strides, of what lies in memory."""
        return data


def make_default_matmul_mxfp4_w_layout(mx_axis: int) -> tuple[type[StridedLayout], dict[str, Any]]:  # noqa: ARG001
    """The layout that the product wants codes of weights in, and the arguments to make it."""
    return StridedLayout, {}
