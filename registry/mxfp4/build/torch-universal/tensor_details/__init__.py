"""How codes lie in memory."""

from . import layout

__all__ = ["layout"]
