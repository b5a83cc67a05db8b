"""Bundles: what a named kernel offers, as frozen dataclasses of entrypoints, one module a family.

A bundle states in types and docstrings what its entrypoints take, return and raise; the reference builds in
`registry/` do exactly that. No module here imports torch at run time, so that asking which kernels exist costs nothing.
"""
