"""Invented results of a comparison, for tests of the display. No figure here was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from coda_agent.agent.reporting.table_rows import GROUPS
from coda_agent.comparison.competitors import (
    COLUMNS,
    COMPILE,
    EDITED,
    FLASHINFER,
    LIGER,
    LLM,
    PROGRAM,
    REFERENCE_ARM,
    UPSTREAM,
)
from coda_agent.comparison.drawing.cells import Cell, Empty, TableRow
from coda_agent.comparison.drawing.terminal import table
from coda_agent.comparison.results import ArmFailure, ArmResult, Loss, Results, Session
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import OUR_SEARCH, OWN_TUNER
from coda_agent.verifier.statistics import Interval

TEN = GROUPS["CODA's ten"]
WIDTHS, SQUARES = ("1B", "7B", "70B"), ("square 2048", "square 4096", "square 8192")
SIZES = dict(zip((*WIDTHS, *SQUARES), (2048, 4096, 8192) * 2, strict=True))
ROWS = [(name, case) for name in TEN for case in (WIDTHS + SQUARES if name in TEN[:3] else WIDTHS)]
ROUNDS = 8
WIDE = 120  # columns of a terminal that is wide enough for a whole table
FLASHINFER_REASON = "its kernels build with nvcc, which this machine lacks"
LIGER_REASON = "AssertionError: hidden size 8192 | <none>"
AUTOTUNE_REASON = "out of memory: 2.1 GiB asked for"
UPSTREAM_LACKS, UPSTREAM_REASON = "gemm_rmsnorm_partial_cross_entropy", "has no such operator"
NOTE = "weight transposed before timing"
CONDITIONS = {
    "gpu": "made-up GPU",
    "driver": "1.2.3",
    "torch": "9.9.9",
    "cuda": "99.0",
    "versions": {"quack-kernels": "0.0.1", "liger-kernel": "0.0.2"},
}


def arm(milliseconds: float, spread: float = 0.0, **changes: Any) -> ArmResult:
    """Return an arm with about the same time in every round. The rounds vary by the fraction ``spread`` at
    most."""
    rounds = tuple(milliseconds * (1 + spread * ((7 * i) % 5 - 2) / 2) for i in range(ROUNDS))
    given: dict[str, Any] = {
        "key": "1",
        "losses": {"y": Loss(relative=1.7e-3, yardsticks=1.01)},
        "bytes": 3 << 20,
        "seconds": 41.5,
    }
    return ArmResult(milliseconds=rounds, **given | changes)


def session(
    arms: Mapping[str, ArmResult], operator: str = "gemm_rope", case: str = "7B", **changes: Any
) -> Session:
    """Return the session of one row in one process. The reference arm is cuBLAS's bare matmul, which takes
    1 ms unless ``arms`` replaces this arm."""
    given: dict[str, Any] = {
        "sizes": {"M": 16384, "N": 4096, "K": 4096},
        "question": "0",
        "process": 0,
        "anchor": REFERENCE_ARM,
        "roofline": 0.8,
        "conditions": CONDITIONS,
        "date": "2001-02-03T04:05:06+00:00",
        "seconds": 321.5,
    }
    return Session(
        operator=operator, case=case, arms={REFERENCE_ARM: arm(1.0, losses={}), **arms}, **given | changes
    )


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, 0.95, (low, high), (low, high))


def line(
    case: str,
    operator: str = "gemm_rope",
    ratios: Mapping[str, tuple[float, float, float]] | None = None,
    *,
    processes: int = 3,
    indirect: bool = False,
    reference_arm: str = REFERENCE_ARM,
    roofline: float = 0.1,
) -> TableRow:
    """Return a table row in which the LLM's kernel takes 1 ms. ``ratios`` holds the interval of each
    other column that was measured."""

    def cell(name: str, milliseconds: float, ratio: Interval | None) -> Cell:
        return Cell(name, milliseconds, ratio, indirect, {}, 1 << 20, "", processes)

    cells: dict[str, Cell | Empty] = {column.name: Empty("not measured") for column in COLUMNS}
    cells[LLM] = cell(PROGRAM, 1.0, None)
    cells |= {name: cell(name, given[0], interval(*given)) for name, given in (ratios or {}).items()}
    return TableRow(operator, case, {"M": 1}, roofline, reference_arm, cells)


def results(rows: Sequence[tuple[str, str]] = ROWS) -> Results:
    """Return results for ``rows``, which are pairs (operator, case). Some arms failed or are absent. Each row
    has three or four sessions, each in its own process. One session timed an outdated kernel, and two are
    complete. For most operators, a fourth session timed a single column beside the reference arm."""
    operators = {operator for operator, _ in rows}
    found = [s for place, row in enumerate(rows) for s in _sessions(place, *row, SIZES[row[1]])]
    absent = {name: {FLASHINFER: FLASHINFER_REASON} for name in operators}
    for name in {UPSTREAM_LACKS} & operators:
        absent[name][UPSTREAM] = UPSTREAM_REASON
    return Results(sessions=tuple(found), absent=absent)


def _sessions(place: int, operator: str, case: str, size: int) -> list[Session]:
    bare = size**2 / 2e7  # milliseconds
    swing = 1 + 0.05 * (place % 7 - 3) / 3
    gain = 1.1 + 0.5 * (2048 / size) * ("bwd" in operator) + 0.2 * (place % 3) / 3
    ours = bare * 1.08
    arms = {
        REFERENCE_ARM: arm(bare, 0.004, losses={}, bytes=size << 14),
        "eager": arm(ours * gain * 1.3, 0.01, bytes=size << 17),
        COMPILE: arm(ours * gain, 0.02, bytes=size << 16),
        OWN_TUNER: arm(ours * swing, 0.012, bytes=size << 15),
        OUR_SEARCH: arm(ours * swing * (1.01 - 0.02 * (place % 2)), 0.012, bytes=size << 15),
        PROGRAM: arm(ours, 0.008, bytes=size << 15, losses=_losses(place)),
    }
    failed = {}
    if case == "70B":
        failed[LIGER] = ArmFailure(key="1", reason=LIGER_REASON)
        failed[MAX_AUTOTUNE] = ArmFailure(key="1", reason=AUTOTUNE_REASON)
    else:
        arms[LIGER] = arm(ours * gain * 1.15, 0.03, bytes=size << 16, note=NOTE)
        arms[MAX_AUTOTUNE] = arm(ours * gain * (1.03 - 0.06 * (place % 2)), 0.02, bytes=size << 16)
    if operator == "gemm_swiglu_bwd":
        arms[EDITED] = arm(ours * 0.95, 0.008, bytes=size << 15, losses=_losses(place))
    shared: dict[str, Any] = {"sizes": {"M": 16384, "N": size, "K": size}, "roofline": bare * 0.93}
    stale = {REFERENCE_ARM: arms[REFERENCE_ARM], PROGRAM: arm(ours * 2, 0.008, key="0")}
    apart = {REFERENCE_ARM: arms[REFERENCE_ARM], UPSTREAM: arm(ours * 1.06, 0.01, bytes=size << 15)}
    whole = [
        session(stale, operator, case, process=0, **shared),
        session(arms, operator, case, process=1, failed=failed, **shared),
        session(arms, operator, case, process=2, failed=failed, **shared),
    ]
    return whole + (
        [session(apart, operator, case, process=3, **shared)] if operator != UPSTREAM_LACKS else []
    )


def _losses(place: int) -> dict[str, Loss]:
    return {
        "y": Loss(relative=1.7e-3, yardsticks=1.01),
        "rstd": Loss(relative=4e-7, yardsticks=1.2 + place / 100),
    }


def printed(results: Results, doing: str = "", width: int = WIDE) -> str:
    """Return the text of these results on a terminal."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table(results, doing))
    return capture.get()
