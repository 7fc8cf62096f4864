"""The versions of other packages with which these kernels were tested. Other versions are refused."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

PROVED = {  # the lowest tested version, and the first that is refused
    "torch": ("2.11", "3"),
    "quack-kernels": ("0.6.5", "0.7"),
    "nvidia-cutlass-dsl": ("4.8.1", "5"),
    "transformers": ("5.24", "6"),
}


class UnprovedVersion(ImportError):
    """A package is missing, or its version is not one with which this was tested."""


def expect(*packages: str) -> None:
    """Raise UnprovedVersion for packages that are missing or have an untested version."""
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
    """The numbers of a release, such as 2, 13, 0 for 2.13.0+cpu."""
    release = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in release[0].split(".")] if release else []
