"""Check that the installed packages have versions with which these kernels were tested."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

PROVED = {
    "torch": ">=2.11,<3",
    "quack-kernels": ">=0.6.5,<0.7",
    "nvidia-cutlass-dsl": ">=4.8.1,<5",
    "transformers": ">=5.24,<6",
}


class UnprovedVersion(ImportError):
    """A package is missing, or its version is untested."""


def expect(*packages: str) -> None:
    """Raise UnprovedVersion for packages that are missing or have an untested version."""
    for name in packages:
        proved = f"{name}{PROVED[name]}"
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UnprovedVersion(f"fused needs {name}: pip install '{proved}'") from None
        if not SpecifierSet(PROVED[name]).contains(found, prereleases=True):
            raise UnprovedVersion(f"fused was tested with {proved}; this is {found}: pip install '{proved}'")
