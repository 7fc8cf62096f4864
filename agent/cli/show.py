"""``coda-agent show``: describe a kernel from its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_agent.agent import arguments, setup
from coda_agent.agent.options import WeakJail, grouped
from coda_agent.agent.terminal.safe_text import echo

if TYPE_CHECKING:
    from coda_agent.primitives.compiler.cubin import Resources
    from coda_agent.primitives.compiler.kernel_source import KernelSource
    from coda_agent.primitives.lang.ir import Program
    from coda_agent.primitives.lang.schedule import Schedule
    from coda_agent.verifier.spec.model import Spec


@dataclass(frozen=True)
class ShowOptions:
    """The parts of a kernel to show, besides its steps and resources."""

    cutedsl: Annotated[bool, typer.Option("--cutedsl", help="Also print the lowered CuTeDSL text.")] = False
    sass: Annotated[
        bool, typer.Option("--sass", help="Also count the machine instructions of each lowered line.")
    ] = False
    full: Annotated[bool, typer.Option("--full", help="With --sass: print the instructions themselves.")] = (
        False
    )
    counters: Annotated[
        bool,
        typer.Option("--counters", help="Also show hardware counters from NAME.counters.csv beside KERNEL."),
    ] = False
    counters_from: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also show hardware counters from this CSV export of ncu."),
    ] = None
    case: Annotated[
        str | None,
        typer.Option(
            help="Show what this case was measured with. Default: resources on two fixed schedules, machine "
            "code of the first case, counters of the export's case."
        ),
    ] = None

    @property
    def counted(self) -> bool:
        """Whether hardware counters are shown."""
        return self.counters or self.counters_from is not None


@grouped
def show(
    kernel: Annotated[
        Path,
        typer.Argument(
            metavar="KERNEL",
            help="An accepted kernel's name or program.json, a kernel file, or an edit's NAME.raw.*.",
        ),
    ],
    options: ShowOptions,
    spec: Annotated[
        Path | None, typer.Option(help="The kernel's spec. Default: NAME.yaml next to NAME.py, or in specs/.")
    ] = None,
    weak_jail: WeakJail = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other software.")] = False,
) -> None:
    """Show a kernel: steps, resources on sm_90a and roofline. Options add its machine code and hardware
    counters."""
    from coda_agent.agent import show as showing
    from coda_agent.agent.show import counters as counting
    from coda_agent.agent.show import sass as listing
    from coda_agent.primitives.runtime.sass import disassemble

    kernel = arguments.accepted_file(kernel, "program.json")
    loaded, source = read(kernel, spec, weak_jail)
    sizes = {each.name: each.sizes for each in loaded.cases}
    if options.case is not None and options.case not in sizes:
        raise typer.BadParameter(f"--case {options.case}: {loaded.name} has the cases {', '.join(sizes)}")
    if not options.sass:
        arguments.refuse_unused("it applies to machine code; add --sass", full=options.full)
    chosen = options.case or loaded.cases[0].name
    asked = options.case or options.sass
    measured = showing.report_schedules(kernel, source.program, chosen) if asked else {}
    resources = _resources(kernel, source, sizes[chosen], measured if options.case else {})
    shown = showing.Shown(source, loaded.name, resources, sizes, options.cutedsl)
    listings = export = found = None
    if options.sass:
        listings = disassemble(source.on(measured), sizes[chosen])
    if options.counted:
        export_name = "raw.counters.csv" if source.edited else "counters.csv"
        path = options.counters_from or showing.sibling(kernel, export_name)
        with arguments.naming_file(path):
            export, found = counting.counted(source, loaded, kernel, path, options.case)
    if as_json:
        data = shown.to_dict()
        data["sass"] = listings and listing.as_dict(listings, full=options.full)
        data["counters"] = found and counting.as_dict(found)
        echo(json.dumps(data, indent=1))
        return
    drawn = [shown.render(), *(listing.tables(listings, full=options.full) if listings else ())]
    drawn += [counting.as_table(found, export)] if export and found else []
    setup.console(False).print(*drawn, sep="\n")


def read(kernel: Path, given: Path | None, weak_jail: bool) -> tuple[Spec, KernelSource]:
    """Read a kernel and its spec."""
    from coda_agent.agent.show import edited, sibling
    from coda_agent.primitives.compiler.kernel_source import KernelSource
    from coda_agent.verifier.loading import load

    arguments.refuse_no_source(kernel, "show", ".raw.py", ".program.json", ".json")
    source = arguments.kernel_source(kernel)  # a missing kernel is reported before a missing spec
    spec = load(arguments.spec_for(kernel, given), check=False)
    if text := edited(kernel):
        kernel = sibling(kernel, "raw.program.json")
        source = arguments.kernel_source(kernel)
    return spec, KernelSource(_program(kernel, source, spec, weak_jail), edited=text)


def _resources(
    kernel: Path, source: KernelSource, sizes: Mapping[str, int], schedules: Mapping[int, Schedule]
) -> tuple[Resources, ...]:
    """The resources of each step on its schedule; without schedules, on the schedules of the compile gate."""
    from coda_agent.primitives.compiler.probe_schedules import PROBES
    from coda_agent.primitives.lang.errors import ProgramError
    from coda_agent.primitives.runtime.compile import report

    try:
        found = report(source, sizes, tuple(dict.fromkeys(schedules.values())) or PROBES)
    except ProgramError as error:
        raise typer.BadParameter(f"{kernel}: {error.message}") from None
    own = {g.name: schedules[g.step].to_json() for g in source.lowered.gemms if g.step in schedules}
    return tuple(each for each in found if own.get(each.kernel, each.schedule) == each.schedule)


def _program(kernel: Path, text: str, spec: Spec, weak_jail: bool) -> Program:
    """Read a kernel's program from its program.json, or trace the kernel's source in the jail."""
    from coda_agent.primitives.lang.errors import ProgramError
    from coda_agent.primitives.lang.ir import Program
    from coda_agent.verifier.report import Rejected
    from coda_agent.verifier.sandbox import jail

    if kernel.suffix == ".json":
        try:
            return Program.from_json(text, spec.signature())
        except ProgramError as error:
            raise typer.BadParameter(f"{kernel}: {error.message}") from None
    traced = jail.trace(text, spec.signature(), weak=weak_jail)
    if isinstance(traced, Rejected):
        raise typer.BadParameter(f"{kernel}:{traced.line or 1}: {traced.code}: {traced.message}")
    return traced.program
