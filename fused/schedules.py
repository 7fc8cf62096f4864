"""Choose schedules at any sizes without tuning. Each step gets the schedule of the nearest row in this
machine's tables, in the tables of this package (``fused/tuned``), or in the shipped reports.

A row gives the fastest schedule of one step at some sizes on one GPU. Only rows whose schedule fits the step
are used. Rows of the same GPU come first; among these, rows with the same kind of matmul (grouped by experts
or not); among these, the nearest row. A row's distance is the sum of the absolute log2 ratios of M (rounded),
N, K and the number of experts. For a row of another program or step, ``OTHER`` is added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from coda_agent.fused.programs import accepted
from coda_agent.primitives.compiler.lower import GemmKernel, lower
from coda_agent.primitives.compiler.probe_schedules import candidates, fits, probes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import Schedule, by_step
from coda_agent.primitives.runtime.launchable import LaunchError
from coda_agent.primitives.system.files import KERNELS, cache_dir, read_json, write_atomic

# The values 0 to 4 were compared on cases of the shipped reports, whose own rows were left out. With 2, more
# of these cases than with any other value get the tile that is fastest in the report.
OTHER = 2.0
TUNED = Path(__file__).resolve().parent / "tuned"  # tables in the form that ``keep`` writes


class TunedStep(NamedTuple):
    """The fastest schedule of a step on a GPU. ``shape``: the ``products`` of the step's matmul."""

    gpu: str
    kernel: str
    step: int
    shape: tuple[int, ...]
    schedule: Schedule


def chosen(
    program: Program, sizes: Mapping[str, int], gpu: str, rows: list[TunedStep]
) -> dict[int, Schedule]:
    """Choose for each step a schedule whose tile contains whole heads. Raises LaunchError if a step has no
    such schedule."""
    shapes = products(program, sizes)
    return {
        kernel.step: program.schedule.get(kernel.step)
        or _nearest(program, kernel, sizes, shapes[kernel.step], gpu, rows)
        for kernel in lower(program).gemms
    }


def _nearest(
    program: Program,
    kernel: GemmKernel,
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    gpu: str,
    rows: list[TunedStep],
) -> Schedule:
    def distance(row: TunedStep) -> tuple[float, ...]:
        m, *others = (abs(log2(a / b)) for a, b in zip(row.shape, shape, strict=False))
        own = (row.kernel, row.step) == (program.signature.name, kernel.step)
        far = round(m) + sum(others) + (0 if own else OTHER)
        return row.gpu != gpu, len(row.shape) != len(shape), far, m

    fitting = (row for row in sorted(rows, key=distance) if fits(program, kernel, row.schedule, sizes))
    first = next(fitting, None)
    if first:
        return first.schedule
    usual = [*probes(program, kernel, sizes, [Schedule()]), *candidates(kernel, sizes)]
    if not usual:
        wish = kernel.wants(sizes)
        raise LaunchError(f"{program.signature.name}, step {kernel.step}: no tile holds {wish}")
    return usual[0]


def products(program: Program, sizes: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    """M, N and K of each step's matmul, and the number of experts if the matmul's rows are grouped by
    experts."""
    steps = cut(program)
    found = {}
    for step in steps.gemms:
        *_, rows, columns = steps.types[step.gemm].shape
        inner = steps.types[program.nodes[step.gemm].args[0]]
        offsets = program.nodes[step.gemm].offsets
        experts = () if offsets is None else (steps.types[offsets].shape[0](sizes) - 1,)
        found[step.index] = rows(sizes), columns(sizes), inner.shape[1](sizes), *experts
    return found


@cache
def known() -> list[TunedStep]:
    """All rows: first the rows of this machine's tables, then the package's tables, then the shipped
    reports."""
    tables = [path for folder in (_own_tables(), TUNED) for path in sorted(folder.glob("*.json"))]
    return [*(row for path in tables for row in _rows(path)), *_reports()]


def _own_tables() -> Path:
    return cache_dir() / "schedules"


def _rows(path: Path) -> list[TunedStep]:
    """A table's rows; none if the file is damaged."""

    def step(row: Any) -> TunedStep:
        schedule = Schedule.from_json(row["schedule"])
        return TunedStep(row["gpu"], row["kernel"], row["step"], tuple(row["shape"]), schedule)

    return read_json(path, lambda rows: [step(row) for row in rows]) or []


def _reports() -> Iterator[TunedStep]:
    for name, (program, _) in accepted().items():
        report = read_json(KERNELS / f"{name}.report.json") or {"timings": ()}
        for timing in report["timings"]:
            shapes, gpu = products(program, timing["sizes"]), report["conditions"]["gpu"]
            for step, schedule in by_step(timing["schedules"]).items():
                yield TunedStep(gpu, name, step, shapes[step], schedule)


def keep(name: str, rows: Iterable[TunedStep]) -> Path:
    """Add rows to this machine's table for one kernel, and return the table's path. A new row replaces an old
    row for the same step and sizes on the same GPU. Other processes may add rows at the same time."""
    path = _own_tables() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        whole = {row[:4]: row for row in (*_rows(path), *rows)}
        said = [row._asdict() | {"schedule": row.schedule.to_json()} for row in whole.values()]
        write_atomic(path, json.dumps(said, indent=1))
    known.cache_clear()
    return path
