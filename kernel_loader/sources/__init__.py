"""Where builds come from: one protocol, and the places that speak it."""

from kernel_loader.sources.directory import LocalDirectories, embedded
from kernel_loader.sources.protocol import Fetched, Listing, Request, Source

__all__ = ["Fetched", "Listing", "LocalDirectories", "Request", "Source", "embedded"]
