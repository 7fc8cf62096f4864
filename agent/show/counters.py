"""``coda-agent show KERNEL --counters``: show hardware counters of a kernel's launches, from a stored export
of Nsight Compute, next to the roofline's bytes.

An export is the output of ``ncu --csv --page raw`` (or ``--page details``); docs/performance.md has the
command. ``read``, ``counters`` and ``as_dict`` return data, ``words`` returns text for a prompt, and
``as_table`` returns a table.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.show import new_table, report_schedules
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.roofline import StepFloor, roofline
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.system.files import regular
from coda_agent.primitives.system.markdown_table import markdown_table

if TYPE_CHECKING:
    from rich.table import Table

    from coda_agent.verifier.spec.model import Spec

TOP_STALLS = 3
MISSING = "–"


@dataclass(frozen=True)
class Metric:
    """A figure to show. ``names``: ncu's names for the figure; the first name that an export contains is
    used. ``unit``: the unit in which the figure is shown. ``scale``: the size of this unit in base units
    (seconds, bytes, percent, counts). ``label``: the figure's name on the details page."""

    title: str
    unit: str
    names: tuple[str, ...]
    scale: float = 1.0
    label: str = ""


_WAVEFRONTS, _CONFLICTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared", "l1tex__data_bank_conflicts_pipe_lsu"
METRICS = {
    "time": Metric("time", "us", ("gpu__time_duration.sum", "gpu__time_duration.avg"), 1e-6, "Duration"),
    "tensor": Metric(
        "tensor pipe active",
        "%",
        (
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
            "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        ),
    ),
    "sm": Metric(
        "SM throughput",
        "%",
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
        label="Compute (SM) Throughput",
    ),
    "l2": Metric(
        "L2 throughput",
        "%",
        ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
        label="L2 Cache Throughput",
    ),
    "dram": Metric(
        "DRAM throughput",
        "%",
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
        label="DRAM Throughput",
    ),
    "read": Metric("read from DRAM", "MB", ("dram__bytes_read.sum", "dram__bytes_op_read.sum"), 1e6),
    "written": Metric("written to DRAM", "MB", ("dram__bytes_write.sum", "dram__bytes_op_write.sum"), 1e6),
    "l2_sectors": Metric("sectors read from L2", "millions", ("lts__t_sectors_op_read.sum",), 1e6),
    "wavefronts": Metric("shared memory wavefronts", "millions", (f"{_WAVEFRONTS}.sum",), 1e6),
    "conflicts": Metric(
        "bank conflicts", "millions", (f"{_CONFLICTS}_mem_shared.sum", f"{_CONFLICTS}.sum"), 1e6
    ),
    "registers": Metric(
        "registers", "a thread", ("launch__registers_per_thread",), label="Registers Per Thread"
    ),
    "occupancy": Metric(
        "warps active",
        "% of an SM's",
        ("sm__warps_active.avg.pct_of_peak_sustained_active",),
        label="Achieved Occupancy",
    ),
    "ctas": Metric("CTAs", "", ("launch__grid_size",), label="Grid Size"),
}
# ncu's metric for a stall reason: how many warps, on average, are stalled for this reason when an instruction
# is issued.
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_ASKED = (
    "barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard "
    "math_pipe_throttle membar mio_throttle misc no_instruction short_scoreboard sleeping tex_throttle wait"
)
_NO_STALL = ("selected", "not_selected")  # warps in these states issue an instruction, or could do so


def wanted(available: Collection[str] = ()) -> list[str]:
    """The metrics to request from ncu: each figure's first available name, and all available stall reasons.
    ``available``: the names of the GPU's metrics, without suffixes; if empty, all metrics count as
    available."""

    def there(name: str) -> bool:
        return not available or name.startswith("launch__") or name.partition(".")[0] in available

    figures = [next(filter(there, metric.names), None) for metric in METRICS.values()]
    stalls = [f"smsp__average_warps_issue_stalled_{r}_per_issue_active.ratio" for r in _ASKED.split()]
    return [*filter(None, figures), *filter(there, stalls)]


@dataclass(frozen=True)
class Counters:
    """One kernel's figures, as medians over its ``launches``. ``values``: the known figures, in base units,
    by the keys of METRICS. ``stalls``: for each stall reason, the average number of warps that are stalled
    when an instruction is issued; largest first. ``floor``: the roofline at the export's case.
    ``other_text``: whether the export measures lowered code that differs from the kernel's. ``schedule``: the
    schedule in the export. ``tuned``: the schedule in the kernel's report for the export's case. A schedule
    is a text from ``spelled``, "" if it is unknown, or None for a kernel without schedules."""

    kernel: str
    launches: int
    values: dict[str, float]
    stalls: dict[str, float]
    floor: StepFloor | None = None
    other_text: bool = False
    schedule: str | None = None
    tuned: str | None = None

    @property
    def other_schedule(self) -> bool | None:
        """Whether the schedule in the export differs from the schedule in the report; None if either schedule
        is unknown."""
        return self.schedule != self.tuned if self.schedule and self.tuned else None


@dataclass(frozen=True)
class Export:
    """The contents of an export file. ``program``: the program's name, if the file states the name. ``case``:
    the case that the file states, or else the case that was given to ``read``. ``launches``: for each launch,
    the kernel's name, and the values in base units by ncu's names. For edited CuTeDSL, the program's name
    ends in .raw, and ``text`` is the beginning of the code's hash. ``schedules``: texts from ``spelled`` by
    step; empty for older files."""

    path: Path
    program: str | None
    case: str | None
    launches: tuple[tuple[str, dict[str, float]], ...]
    text: str | None = None
    schedules: Mapping[int, str] = field(default_factory=dict)


def read(path: Path, case: str | None = None) -> Export:
    """Read a CSV export of ncu. Raises InvalidInput if the file is not such an export, or if it measures a
    case other than ``case``."""
    try:
        lines = regular(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise InvalidInput(
            f"{path}: no such file; docs/performance.md has the command that makes one"
        ) from None
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise InvalidInput(
            f'{path}: no line begins with "ID",: it is not a CSV export of ncu; use ncu --csv --page raw'
        )
    # The rows may be interleaved with the profiled program's output and ncu's own ==PROF== lines.
    header, *cells = csv.reader(line for line in lines[start:] if not line.startswith("=="))
    if "Kernel Name" not in header:
        raise InvalidInput(f"{path}:{start + 1}: no column Kernel Name; export with ncu --csv --page raw")
    rows = [dict(zip(header, row, strict=True)) for row in cells if len(row) == len(header)]
    said = next((found for line in lines if (found := _SAID.match(line))), None)
    program, measured, text = (said[1], said[2], said[3]) if said else (None, case, None)
    if case not in (None, measured):
        raise InvalidInput(
            f"{path}: it measures case {measured}, not {case}; leave out --case, or profile {case}"
        )
    launches = _details(rows) if "Metric Name" in header else _raw(rows)
    schedules = {int(step): words for step, words in _STEP.findall(said.string)} if said else {}
    return Export(path, program, measured, tuple(launches), text, schedules)


_SAID = re.compile(r"# (\S+) at (.+?)(?:, text ([0-9a-f]+))?:")  # the format of ``heading``
_STEP = re.compile(r"; step (\d+): ([^;]+)")


def heading(
    name: str, case: str, sizes: Mapping[str, int], schedules: Mapping[int, Schedule], text: str = ""
) -> str:
    """The line that names the kernel in an export. ``text``: the beginning of the hash of edited CuTeDSL."""
    what = f"{name}.raw at {case}, text {text}" if text else f"{name} at {case}"
    steps = "".join(f"; step {step}: {spelled(s)}" for step, s in sorted(schedules.items()))
    return f"# {what}: {', '.join(f'{dim} {size}' for dim, size in sizes.items())}{steps}"


def spelled(schedule: Schedule) -> str:
    """A complete schedule as text, such as ``128x128 pingpong cluster 1x2 swizzle 8 evict_loads deep``."""
    s = schedule
    on = [name for name, value in s._asdict().items() if value is True and name != "pingpong"]
    kind = "pingpong" if s.pingpong else "cooperative"
    words = [f"{s.tile_m}x{s.tile_n} {kind} cluster {s.cluster_m}x{s.cluster_n} swizzle {s.swizzle}", *on]
    return " ".join(words)


def _raw(rows: list[dict[str, str]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Parse the raw page, which has one row per launch and one column per metric. The page's first row has
    the units."""
    units = rows.pop(0) if rows and not rows[0]["ID"] else {}
    for row in rows:
        values = {name: _value(text, units.get(name, "")) for name, text in row.items() if "__" in name}
        yield row["Kernel Name"], {name: value for name, value in values.items() if value is not None}


def _details(rows: list[dict[str, str]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Parse the details page, which has one row per metric. Rows with the same ID belong to one launch."""
    names = {metric.label: metric.names[0] for metric in METRICS.values() if metric.label}
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        _, values = launches.setdefault(row["ID"], (row["Kernel Name"], {}))
        name = row["Metric Name"]
        value = _value(row["Metric Value"], row["Metric Unit"])
        if value is not None:
            values.setdefault(names.get(name, name), value)
    yield from launches.values()


_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT = re.compile(r"([numKMGT]?)(second|s|byte|sector|inst)$")


def _value(text: str, unit: str) -> float | None:
    """The value of a figure, such as ``1,234.5 usecond``, in its base unit; None if the text is not a
    number."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    prefix = _UNIT.match(unit)
    return number * _PREFIXES[prefix[1]] if prefix else number


def counters(
    source: KernelSource, export: Export, sizes: Mapping[str, int] | None = None
) -> tuple[Counters, ...]:
    """Return the figures of each kernel of ``source`` in an export, in launch order, with the kernel's
    schedules in the export and in the report. ``sizes``: the sizes of the export's case. Raises InvalidInput
    if the export contains no kernel of ``source``."""
    program, edited = source.program, source.edited is not None
    name = program.signature.name + (".raw" if edited else "")
    if export.program not in (None, name):
        raise InvalidInput(f"{export.path}: it measures {export.program}, not {name}; profile {name}")
    lowered = source.lowered
    another = export.text is not None and not lowered.hash.startswith(export.text)
    floors = {(f.step, str(f.kind)): f for f in roofline(program, sizes).steps} if sizes else {}
    kernels = [(g.step, "gemm", g.name) for g in lowered.gemms]
    kernels += [(v.step, "vector", v.name) for v in lowered.vectors]
    ran = {step: spelled(s) for step, s in source.schedules.items()}
    found = []
    for step, kind, name in sorted(kernels):
        # only the names of unedited kernels end in a hash
        stem, digest = (name, None) if edited else name.rsplit("_", 1)
        module = f"coda_{'edited' if edited else 'lowered'}_"
        pattern = re.compile(rf"{module}.*?{stem}(?:_([0-9a-f]{{12}}))?(?![0-9A-Za-z]|_\d)")
        own = [(m[1], values) for text, values in export.launches if (m := pattern.search(text))]
        other = another or any(d != digest for d, _ in own)
        at = (export.schedules.get(step, ""), ran.get(step, "")) if kind == "gemm" else (None, None)
        parts = _parts([values for _, values in own])
        for number, launches in enumerate(parts, 1):
            kernel = stem if len(parts) == 1 else f"{stem}, part {number} of {len(parts)}"
            # the roofline is for the whole step, not for a part
            floor = floors.get((step, kind)) if len(parts) == 1 else None
            found.append(_summary(kernel, launches, floor, other, at))
    if not found:
        there = ", ".join(sorted({text[:80] for text, _ in export.launches})) or "none"
        raise InvalidInput(
            f"{export.path}: it has no kernel of this program ({', '.join(name for *_, name in kernels)}); "
            f"its kernels: {there}; profile it with python -m benchmarks.counters"
        )
    return tuple(found)


def _parts(launches: Iterable[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Group a kernel's launches into parts. Launches with grids of the same size belong to one part. A step
    whose schedule has ``split`` has two parts."""
    parts: dict[float | None, list[dict[str, float]]] = {}
    for values in launches:
        parts.setdefault(values.get(METRICS["ctas"].names[0]), []).append(values)
    return list(parts.values())


def _summary(
    kernel: str,
    launches: list[dict[str, float]],
    floor: StepFloor | None,
    other: bool,
    schedules: tuple[str | None, str | None],
) -> Counters:
    def median(name: str) -> float | None:
        values = [launch[name] for launch in launches if name in launch]
        return statistics.median(values) if values else None

    figures = {
        key: next((v for name in metric.names if (v := median(name)) is not None), None)
        for key, metric in METRICS.items()
    }
    reasons = {name: m[1] for launch in launches for name in launch if (m := _STALL.fullmatch(name))}
    stalls = {
        reason.replace("_", " "): value
        for name, reason in reasons.items()
        if reason not in _NO_STALL and (value := median(name))
    }
    return Counters(
        kernel,
        len(launches),
        {key: value for key, value in figures.items() if value is not None},
        dict(sorted(stalls.items(), key=lambda item: -item[1])),
        floor,
        other,
        *schedules,
    )


def as_dict(found: Sequence[Counters]) -> list[dict[str, Any]]:
    """One entry per kernel, with figures in base units (seconds, bytes, percent, counts); None for a missing
    figure."""
    return [
        {
            "kernel": c.kernel,
            "launches": c.launches,
            "other_text": c.other_text,
            "schedule": c.schedule,
            "other_schedule": c.other_schedule,
            **{key: c.values.get(key) for key in METRICS},
            "stalls": c.stalls,
            "roofline": c.floor and c.floor.to_dict(),
        }
        for c in found
    ]


def rows(c: Counters) -> list[tuple[str, str]]:
    """A kernel's figures as pairs of name and value; MISSING for a missing figure."""
    shown = [(metric.title, _figure(c, key)) for key, metric in METRICS.items()]
    top = [f"{reason} {value:.2f}" for reason, value in list(c.stalls.items())[:TOP_STALLS]]
    stalls = ("stalls, warps at each issue", ", ".join(top) or MISSING)
    return [("schedule", _scheduled(c)), *shown, stalls]


def _scheduled(c: Counters) -> str:
    if c.schedule is None:
        return MISSING
    if c.other_schedule:
        return f"{c.schedule}: NOT as in the report: {c.tuned}"
    return c.schedule or "not in this export; it may differ from the schedule in the report"


def _figure(c: Counters, key: str) -> str:
    metric, value = METRICS[key], c.values.get(key)
    if value is None:
        return MISSING
    words = f"{_short(value / metric.scale)} {metric.unit}".strip()
    if c.floor and key in ("read", "written"):
        least = sum((c.floor.reads if key == "read" else c.floor.writes).values())
        return f"{words} (roofline {_short(least / metric.scale)})"
    if c.floor and key == "time":
        return f"{words} (roofline {_short(c.floor.seconds / metric.scale)})"
    return words


def _short(value: float) -> str:
    """Format a value with three significant digits. A whole number, or a value of at least 100, has no
    decimals."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def counted(
    source: KernelSource, spec: Spec, kernel: Path, path: Path, case: str | None = None
) -> tuple[Export, tuple[Counters, ...]]:
    """Read an export and its figures. The tuned schedules come from the report next to ``kernel``. The sizes
    are those of the export's case; if the export states no case, they are those of the spec's first case.
    Raises InvalidInput for an unusable export, and KernelError for an unreadable report."""
    export = read(path, case)
    at = export.case or spec.cases[0].name
    sizes = {each.name: each.sizes for each in spec.cases}
    return export, counters(source.on(report_schedules(kernel, source.program, at)), export, sizes.get(at))


def words(found: Sequence[Counters]) -> str:
    """The counters as compact Markdown for a prompt: a table with one column per kernel."""
    lines = zip(*map(rows, found), strict=True)
    table = ([cells[0][0], *(text for _, text in cells)] for cells in lines)
    return markdown_table(["hardware counter", *map(_title, found)], table).rstrip("\n")


def _title(c: Counters) -> str:
    times = f"median of {c.launches} launches" if c.launches > 1 else "one launch"
    return f"{c.kernel}, {times}" + (", of other lowered code" if c.other_text else "")


def as_table(found: Sequence[Counters], export: Export) -> Table:
    """The counters as a table for a terminal, with one column per kernel."""
    said = f"hardware counters, {export.path.name}" + (f", case {export.case}" if export.case else "")
    drawn = new_table(said, ["counter", *map(_title, found)], [])
    for cells in zip(*map(rows, found), strict=True):
        drawn.add_row(cells[0][0], *(text for _, text in cells))
    return drawn
