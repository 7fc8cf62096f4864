"""Slow imports of the libraries' arms, which a worker makes while the previous session runs.

An arm reports a library that is missing or does not load.
"""

from contextlib import suppress

with suppress(Exception):  # a library may raise anything
    import liger_kernel.ops  # noqa: F401  (and with it transformers)
