"""Write a spec file with one change, and return the error message that loading a wrong file gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.file import SpecError


def write_changed(path: Path, text: str, old: str = "", new: str = "") -> Path:
    """Write ``text`` to a file, with the first ``old`` replaced by ``new``; return the path."""
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text, encoding="utf-8")
    return path


def fails(path: Path, check: bool = True) -> str:
    """Return the message of the error that loading raises."""
    with pytest.raises(SpecError) as caught:
        load(path, check=check)
    return str(caught.value)
