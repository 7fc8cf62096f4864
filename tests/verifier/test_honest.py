"""Correct kernels, written in unusual ways. Every file tests/honest/SPEC/NAME.py must be Checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from authoring import program_of
from checkout import ROOT, TESTS

from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.cpu_numerics import Comparison, InputSettings
from coda_agent.verifier.report import Checked
from coda_agent.verifier.verify import check

pytestmark = pytest.mark.slow

KERNELS = {f"{path.parent.name}: {path.stem}": path for path in sorted((TESTS / "honest").glob("*/*.py"))}


@pytest.mark.usefixtures("some_runs", "some_compiles")
@pytest.mark.parametrize("path", KERNELS.values(), ids=KERNELS)
def test_an_honest_kernel_is_checked(path: Path) -> None:
    spec = load(ROOT / "specs" / f"{path.parent.name}.yaml", check=False)
    report, _ = check(spec, path.read_text(encoding="utf-8"))
    assert isinstance(report, Checked), str(report)


def test_what_few_products_make_loud_may_cancel_in_an_honest_kernel() -> None:
    """A value is a sum of only D = 16 products, so some rows and columns have much larger values than others.
    In these rows and columns, cancellation in GELU's tail leaves a larger error, which must pass."""
    path = KERNELS["gemm_geglu: relu_less_a_tail"]
    spec = load(ROOT / "specs" / "gemm_geglu.yaml", check=False)
    program = program_of(spec, path.read_text(encoding="utf-8"))
    run = InputSettings({"M": 1564, "D": 16, "F": 24}, "normal", 165345315174726, long=True)
    assert [
        e.reason for _, errors in Comparison.of(spec, run).errors(program) for e in errors if not e.passed
    ] == []


def test_the_corpus_is_as_large_as_was_promised() -> None:
    assert len(KERNELS) >= 30
    page = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    assert f"{len(KERNELS)} correct kernels" in page
    assert len({path.parent for path in KERNELS.values()}) >= 10
