"""Imported by a comparison's worker while the one before it sits: what would take a library's arm seconds.

A library that is missing, or does not load, is told of by its arm when it sits.
"""

from contextlib import suppress

with suppress(Exception):  # a library may raise anything
    import liger_kernel.ops  # noqa: F401  (and with it transformers)
