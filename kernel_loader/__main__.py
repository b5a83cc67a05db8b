"""`python -m kernel_loader` is `kernel-loader`."""

from kernel_loader.cli import main

main(prog_name="kernel-loader")
