"""Tests of the choice of a model's kernels for a comparison, and of the reason that a comparison gives if it
leaves out a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from comparison_machine import Machine, stood_in

from coda_agent.comparison import kernels, rows
from coda_agent.comparison.competitors import EAGER, EDITED, LLM, PROGRAM, TORCH
from coda_agent.comparison.drawing.cells import Cell, Empty, lines
from coda_agent.comparison.measuring import ComparisonRequest, measure
from coda_agent.comparison.results import Results
from coda_agent.primitives.compiler import lower as lowering
from coda_agent.primitives.compiler.kernel_source import KernelSource

DSL, QUACK = (version(name) for name in lowering.PACKAGES)
ELSEWHERE = (
    f"it was accepted with nvidia-cutlass-dsl {DSL}, quack-kernels {QUACK}, but nvidia-cutlass-dsl "
    f"9.9, quack-kernels {QUACK} is installed: pip install nvidia-cutlass-dsl=={DSL} quack-kernels=={QUACK}, "
    "or measure and accept it again"
)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that another version of CuTeDSL is installed."""

    def there(name: str) -> str:
        return "9.9" if name == "nvidia-cutlass-dsl" else version(name)

    monkeypatch.setattr(lowering, "version", there)
    monkeypatch.setattr(kernels, "version", there)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with stood_in(monkeypatch) as found:
        yield found


def asked(*names: str) -> ComparisonRequest:
    chosen = rows.choose_rows(names, ("1B",), everything=False, quick=False)
    return ComparisonRequest(tuple(chosen), (EAGER, PROGRAM, EDITED), 1, 12)


def test_a_kernel_of_other_versions_says_so(gpu: Machine, elsewhere: None) -> None:
    """With another version of CuTeDSL, a program may lower to a text that nobody measured. So the kernel is
    left out."""
    (line,) = lines(measure(asked("gemm_swiglu"), Results(), lambda made: None))
    assert line.cells[LLM] == Empty(f"{ELSEWHERE}; its CuTeDSL was not edited")
    assert isinstance(line.cells[TORCH], Cell)


def test_a_kernel_that_is_lowered_otherwise_by_the_same_versions_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KernelSource, "lowered", SimpleNamespace(hash="another"))
    (row,) = asked("gemm_swiglu").rows
    assert row.absent(PROGRAM) == (
        "its program no longer lowers to the accepted code: measure and accept it again"
    )


def test_a_kernel_that_is_taken_is_not_outdated_nor_is_one_that_is_not_there() -> None:
    (row,) = asked("gemm_swiglu").rows
    assert isinstance(row, rows.OperatorRow) and PROGRAM in row.kernels
    assert [kernels.outdated(row.spec, edited=edited) for edited in (False, True)] == [None, None]
    assert row.absent(PROGRAM) is None and row.absent(EDITED) == "its CuTeDSL was not edited"


def test_a_withdrawn_kernel_leaves_the_table(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure(asked("gemm_swiglu"), Results(), lambda made: None)
    monkeypatch.setattr(kernels, "accepted_kernel", lambda spec, *, edited: None)
    (line,) = lines(measure(asked("gemm_swiglu"), before, lambda made: None))
    assert line.cells[LLM] == Empty("no accepted kernel; its CuTeDSL was not edited")
