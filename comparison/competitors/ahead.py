"""Import slow libraries ahead of time. A worker imports this module while the previous session runs.

If a library is missing or does not load, the library's arm reports the failure later.
"""

from contextlib import suppress

with suppress(Exception):  # a library may raise anything
    import liger_kernel.ops  # noqa: F401  (this also imports transformers)
