"""Builds that are carried to machines without a network: what a bundle says, how it is gathered, written and read.

::

    bundle.json                              what is carried (contents.py)
    builds/<first 32 digits of digest>/...   the files of each build, as they were published

An archive (`kernels.klb`) is a ZIP of these whose members are stored, not compressed: the same builds give the same
bytes everywhere, any tool lists them, and nothing can unfold to more than what is there. A wheel holds the same below
`kernel_loader_builds/`, where it is found once pip has installed it.
"""
