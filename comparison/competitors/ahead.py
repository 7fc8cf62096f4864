"""Slow imports of the libraries' arms, which a worker makes while the session before it runs.

A library that is missing or does not load is reported by its arm.
"""

from contextlib import suppress

with suppress(Exception):  # a library may raise anything
    import liger_kernel.ops  # noqa: F401  (and with it transformers)
