"""Load a spec, with or without a trial run of its reference."""

from __future__ import annotations

from pathlib import Path

from coda_agent.verifier.spec.file import read
from coda_agent.verifier.spec.model import Spec


def load(path: str | Path, check: bool = True) -> Spec:
    """Read and check a spec. With ``check=False`` the reference does not run, so torch is not needed.

    Raises SpecError for any fault of the file.
    """

    def tried(spec: Spec) -> None:
        if check:
            from coda_agent.verifier.apart import check_reference

            check_reference(spec)

    return read(path, Spec, tried)
