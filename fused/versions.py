"""The versions of other packages that these kernels were proved with; others are refused."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

PROVED = {  # the lowest, and the first that is not
    "torch": ("2.11", "3"),
    "quack-kernels": ("0.6.5", "0.7"),
    "nvidia-cutlass-dsl": ("4.8.1", "5"),
    "transformers": ("5.24", "6"),
}


class UnprovedVersion(ImportError):
    """A package is missing, or its version is not one that this was proved with."""


def expect(*packages: str) -> None:
    """Raise UnprovedVersion for packages that are not there in a proved version."""
    for name in packages:
        lowest, first = PROVED[name]
        remedy = f"pip install '{name}>={lowest},<{first}'"
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UnprovedVersion(f"fused needs {name}: {remedy}") from None
        if not _parts(lowest) <= _parts(found) < _parts(first):
            raise UnprovedVersion(
                f"fused was proved with {name} {lowest} to below {first}; this is {found}: {remedy}"
            )


def _parts(text: str) -> list[int]:
    """The release's numbers: 2, 13, 0 of 2.13.0+cpu."""
    release = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in release[0].split(".")] if release else []
