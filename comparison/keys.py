"""The keys of arms (competing implementations). An arm's stored figures are valid until the arm's key
changes."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.comparison import environment
from coda_agent.comparison.competitors import COLUMNS, UPSTREAM
from coda_agent.comparison.rows import Row
from coda_agent.primitives.runtime.tune import FORMAT as SEARCHED

if TYPE_CHECKING:
    from coda_agent.primitives.runtime.launch import Kernel

PACKAGES = {arm: column.packages for column in COLUMNS for arm in column.arms}
REVISIONS = {arm: column.revision for column in COLUMNS for arm in column.arms}


class Keyed(NamedTuple):
    """An arm's key, with the versions of its packages."""

    key: str
    versions: dict[str, str]


def keyed(row: Row, arm: str, upstream: str | None, build: str) -> Keyed | str:
    """The arm's key, or a text that says why the arm cannot be tried. ``upstream``: the Python interpreter of
    the environment with CODA's own package; None if this environment is not installed. ``build``: the GPU and
    PyTorch's build."""
    if why := row.absent(arm):
        return why
    versions = _versions(arm, upstream)
    if isinstance(versions, str):
        return versions
    parts = [f"{name} {number}" for name, number in versions.items()]
    parts += [f"revision {REVISIONS[arm]}"] if REVISIONS[arm] > 1 else []
    return Keyed(", ".join([*parts, *map(text, row.made_of(arm)), build]), versions)


def text(kernel: Kernel) -> str:
    """A kernel's key: the hashes of its lowered code and of its schedules. If the kernel must still be tuned,
    the second hash also covers the version of the search for schedules."""
    chosen: list[Any] = sorted({**(kernel.known or {}), **kernel.source.fixed}.items())
    if not kernel.source.schedules:
        chosen.append(SEARCHED)
    schedules = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:8]
    return f"text {kernel.source.lowered.hash[:16]} on schedules {schedules}"


def _versions(arm: str, upstream: str | None) -> dict[str, str] | str:
    """The versions of an arm's packages. If a package is missing, the result is a text that says how to
    install the package."""
    packages = PACKAGES[arm]
    if arm == UPSTREAM:
        if upstream is None:
            return "its environment is not installed: coda-agent compare --install"
        return environment.versions(upstream, packages)
    try:
        return {name: version(name) for name in packages}
    except PackageNotFoundError as error:
        return f"{error.name} is not installed: pip install {error.name}"
