"""The command line: `kernel-loader`."""

from kernel_loader.cli.main import main

__all__ = ["main"]
