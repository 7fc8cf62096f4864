"""Correct kernels, written as nobody would: tests/honest/SPEC/NAME.py must each come out Checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifier.report import Checked
from verifier.spec_file import load
from verifier.verify import check

HERE = Path(__file__).parent
KERNELS = {f"{path.parent.name}: {path.stem}": path for path in sorted((HERE / "honest").glob("*/*.py"))}


@pytest.mark.usefixtures("one_probe")
@pytest.mark.parametrize("path", KERNELS.values(), ids=KERNELS)
def test_an_honest_kernel_is_checked(path: Path) -> None:
    spec = load(HERE.parent / "specs" / f"{path.parent.name}.yaml", check=False)
    report, _ = check(spec, path.read_text(encoding="utf-8"))
    assert isinstance(report, Checked), report.message


def test_the_corpus_is_as_large_as_was_promised() -> None:
    assert len(KERNELS) >= 30
    assert len({path.parent for path in KERNELS.values()}) >= 10
