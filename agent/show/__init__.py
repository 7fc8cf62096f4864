"""``coda-agent show KERNEL``: show a program's steps in words, and its CuTeDSL, resources and roofline.

``Shown.to_dict`` returns the data and uses only the standard library. ``Shown.render`` draws the same data
with rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.show.explain import StepText, steps
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.roofline import Roofline, StepFloor, roofline
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule, by_step, schedules_json
from coda_agent.primitives.target import TARGET

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from coda_agent.primitives.compiler.cubin import Resources

Cases = Mapping[str, Mapping[str, int]]


def floors(program: Program, sizes: Cases) -> dict[str, Roofline]:
    """The roofline of each case, by the case's name. Raises ValueError for a case that lacks the size of a
    dim."""
    return {case: roofline(program, at) for case, at in sizes.items()}


def sibling(kernel: Path, suffix: str) -> Path:
    """The path NAME.SUFFIX next to a kernel's file. NAME is the part of the file's name before the first
    dot."""
    return kernel.with_name(f"{kernel.name.partition('.')[0]}.{suffix}")


def edited(kernel: Path) -> str | None:
    """The text of NAME.raw.py if the kernel's file is one of NAME.raw.*; otherwise None. Raises OSError."""
    return sibling(kernel, "raw.py").read_text(encoding="utf-8") if ".raw." in kernel.name else None


def report_schedules(kernel: Path, program: Program, case: str) -> dict[int, Schedule]:
    """The schedules of a measured case by step, from the report next to a kernel's file. Empty if no report
    of this program covers the case. Raises KernelError for an unreadable report."""
    from coda_agent.agent.storage import atomic_files, kernel_files

    path = sibling(kernel, "raw.report.json" if ".raw." in kernel.name else "report.json")
    with atomic_files.consistent(path.parent, path.name):
        if not path.exists():
            return {}
        report = kernel_files.report(path)
    if report.identity.program_hash != program.hash:
        return {}
    found = [t.schedules for t in report.timings if t.case == case]
    return by_step(found[0]) if found else {}


@dataclass(frozen=True)
class Shown:
    """A kernel and its description. The description always contains the steps. It also contains the
    ``resources``, if given; the roofline at each case's ``sizes``, if given; and the CuTeDSL code, if
    ``cutedsl`` is true."""

    kernel: KernelSource
    name: str = ""  # the spec's name
    resources: Sequence[Resources] | None = None
    sizes: Cases = field(default_factory=dict)
    cutedsl: bool = False

    @property
    def program(self) -> Program:
        return self.kernel.program

    @property
    def title(self) -> str:
        return self.name or self.program.signature.name

    def to_dict(self) -> dict[str, Any]:
        """The data for ``--json``. Raises ProgramError if ``cutedsl`` is true and the program cannot be
        lowered."""
        return {
            "spec": self.title,
            "program": self.program.hash,
            "steps": [asdict(step) for step in steps(self.program)],
            "schedule": schedules_json(self.program.schedule),
            "resources": None if self.resources is None else [asdict(r) for r in self.resources],
            "roofline": {case: floor.to_dict() for case, floor in floors(self.program, self.sizes).items()},
            "cutedsl": self.kernel.lowered.text if self.cutedsl else None,
        }

    def render(self) -> Group:
        """The data of ``to_dict``, drawn for a terminal."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [
            Text.assemble((self.title, "bold"), f"  program {self.program.hash[:12]}"),
            Text("each name is a value in fp32 registers; values are rounded only when stored", style="dim"),
        ]
        parts += [step_table(step) for step in steps(self.program)]
        parts += tables(self.resources, floors(self.program, self.sizes))
        if self.cutedsl:
            from rich.syntax import Syntax

            parts.append(Syntax(self.kernel.lowered.text, "python", theme="ansi_dark", word_wrap=True))
        return Group(*parts)


def step_table(step: StepText) -> Table:
    """A step's table: one row per action, with the dtype and shape of a tensor in memory."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=step.title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False)
    table.show_header = False
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_column(style="green")
    for line in step.lines:
        # Text, so that [M, N] is not read as markup
        table.add_row(line.verb, Text(line.text), Text(line.tensor))
    return table


def tables(resources: Sequence[Resources] | None, rooflines: Mapping[str, Roofline]) -> list[Table]:
    """The resource table and the roofline table. A table without rows is left out."""
    found = [resource_table(resources)] if resources else []
    return found + ([roofline_table(rooflines)] if rooflines else [])


def resource_table(resources: Sequence[Resources]) -> Table:
    """The table of resources: one row per compiled kernel and schedule. Spills, and a GEMM without HGMMA
    instructions, are highlighted."""
    from rich.text import Text

    numbers = ["registers", "stack B", "stages A+B/st/ld", "spills ld/st", "HGMMA", "TMA ld/st", "compile s"]
    table = new_table(f"resources, compiled for {TARGET.architecture}", ["kernel", "schedule"], numbers)
    for r in resources:
        spilled = f"{r.spill_loads}/{r.spill_stores}"
        spills = Text(spilled, "yellow" if r.spill_loads or r.spill_stores else "")
        idle = r.schedule is not None and not r.hgmma
        table.add_row(
            r.kernel.rpartition("_")[0] or r.kernel, schedule_words(r.schedule), str(r.registers),
            str(r.stack), "/".join(map(str, r.stages or "-")), spills,
            Text(str(r.hgmma), "red" if idle else ""),
            f"{r.tma_loads}/{r.tma_stores}", f"{r.seconds:.1f}",
        )  # fmt: skip
    return table


def schedule_words(schedule: Mapping[str, int | bool] | None) -> str:
    """A schedule as text, such as ``128x192 pingpong deep 2x1`` (tile, kind, cluster)."""
    if schedule is None:
        return "-"
    kind = "pingpong" if schedule["pingpong"] else "cooperative"
    kind += " deep" if schedule["deep"] else ""
    kind += " split" if schedule.get("split") else ""
    return f"{schedule['tile_m']}x{schedule['tile_n']} {kind} {schedule['cluster_m']}x{schedule['cluster_n']}"


def roofline_table(rooflines: Mapping[str, Roofline]) -> Table:
    """The roofline table. For each case and kernel, the table shows the work, the time at the machine's peak
    rates, and the rate that limits the time."""
    machine = next(iter(rooflines.values())).machine
    title = (
        f"roofline, {machine.name}: {machine.tensor.value / 1e12:.1f} T{machine.tensor.unit} "
        f"({machine.tensor_fp8.value / 1e12:.1f} of fp8), "
        f"{machine.memory.value / 1e12:.2f} T{machine.memory.unit}; epilogue arithmetic not counted"
    )
    table = new_table(
        title, ["case", "kernel"], ["GFLOP", "read MB", "written MB", "compute us", "memory us", "floor us"]
    )
    table.add_column("binds")
    for case, found in rooflines.items():
        label = f"{case} ({', '.join(f'{k} {v}' for k, v in found.sizes.items())})"
        for position, floor in enumerate(found.steps):
            table.add_row(
                label if position == 0 else "",
                _kernel(floor),
                *_figures([floor]),
                f"{floor.seconds * 1e6:.1f}",
                floor.binds,
            )
        table.add_row(
            "",
            "all",
            *_figures(found.steps),
            f"{found.seconds * 1e6:.1f}",
            found.binds,
            style="bold",
            end_section=True,
        )
    return table


def _kernel(floor: StepFloor) -> str:
    if floor.kind == "gemm":
        return f"step {floor.step}"
    return f"vectors after {floor.step}" if floor.step >= 0 else "vectors before 0"


def _figures(found: Sequence[StepFloor]) -> list[str]:
    return [
        f"{sum(f.flops for f in found) / 1e9:.1f}",
        f"{sum(sum(f.reads.values()) for f in found) / 1e6:.1f}",
        f"{sum(sum(f.writes.values()) for f in found) / 1e6:.1f}",
        f"{sum(f.compute_seconds for f in found) * 1e6:.1f}",
        f"{sum(f.memory_seconds for f in found) * 1e6:.1f}",
    ]


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table with a title, columns of text and then columns of numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold cyan")
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table
