"""The grids of the kernels that ship here, one module a family."""
