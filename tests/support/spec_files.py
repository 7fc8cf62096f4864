"""Spec files for tests: a text written with one change, and what loading a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.file import SpecError


def write_changed(path: Path, text: str, old: str = "", new: str = "") -> Path:
    """The text with the first ``old`` replaced by ``new``, in a file."""
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text, encoding="utf-8")
    return path


def fails(path: Path, check: bool = True) -> str:
    """The words of the error that loading raises."""
    with pytest.raises(SpecError) as caught:
        load(path, check=check)
    return str(caught.value)
