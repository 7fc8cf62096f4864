"""Slow imports of the libraries' arms; a worker makes them while the previous session runs.

If a library is missing or fails to load, its arm reports that.
"""

from contextlib import suppress

with suppress(Exception):  # a library may raise anything
    import liger_kernel.ops  # noqa: F401  (and with it transformers)
