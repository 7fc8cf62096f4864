"""Run the gates in order, cheapest first: source -> Accepted | Checked | Rejected.

``check`` runs on any machine; ``verifier.measure`` needs a GPU.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES, candidates, fits
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.compile import CROWDED
from coda_agent.primitives.target import TARGET
from coda_agent.verifier import apart
from coda_agent.verifier.gates import Failed, Gates, Progress, Stop, identity, silent
from coda_agent.verifier.gpu import visible
from coda_agent.verifier.report import Checked, Gate, Identity, QuackTuned, Rejected, Report, joined
from coda_agent.verifier.sandbox import jail
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Case

if TYPE_CHECKING:
    from coda_agent.primitives.compiler.cubin import Resources
    from coda_agent.verifier.measure import MeasureOptions
    from coda_agent.verifier.stages import Checkpoint

MAX_STEPS = 16  # limit on the matmuls of a kernel; each is compiled and tuned separately


class Verdict(NamedTuple):
    """A report, and the program if it passed the gates that need no GPU."""

    report: Report
    program: Program | None


def check(
    spec: Spec,
    source: str,
    *,
    schedules: Mapping[int, Schedule] | None = None,
    weak_jail: bool = False,
    progress: Progress = silent,
) -> Verdict:
    """Trace a source in the jail, then run the gates ``contract``, ``interpret`` and ``compile``. Compiling
    for sm_90a needs no GPU. ``schedules``: the author's schedules by step."""
    found = examine(spec, source, schedules=schedules, weak_jail=weak_jail, progress=progress)
    return (
        Verdict(found, None)
        if isinstance(found, Rejected)
        else compile_examined(spec, found, progress=progress)
    )


class Examined(NamedTuple):
    """A program that passed the gates before compile, with the source line of each node."""

    program: Program
    lines: tuple[int | None, ...]
    gates: tuple[Gate, ...]


def examine(
    spec: Spec,
    source: str,
    *,
    schedules: Mapping[int, Schedule] | None = None,
    weak_jail: bool = False,
    progress: Progress = silent,
) -> Examined | Rejected:
    """Trace a source in the jail, then run the gates ``contract`` and ``interpret``."""
    gates = Gates(progress)
    try:
        with gates.gate("trace") as figures:
            traced = _trace(spec, source, weak_jail, figures)
            program = _scheduled(traced.program, schedules)
        _check_program(spec, program, gates, traced.lines)
    except Stop as stop:
        return stop.rejected
    return Examined(program, tuple(traced.lines), tuple(gates.passed))


def compile_examined(spec: Spec, found: Examined, *, progress: Progress = silent) -> Verdict:
    """Compile an examined program for sm_90a, without a GPU."""
    gates, kernel = Gates(progress, passed=[*found.gates]), KernelSource(found.program)
    try:
        with gates.gate("compile") as figures:
            compile_gate(spec, kernel, _schedules_to_compile(found.program), figures, lines=found.lines)
    except Stop as stop:
        return Verdict(stop.rejected, None)
    return Verdict(_checked(spec, kernel, gates), found.program)


def check_edited(
    spec: Spec,
    program: Program,
    text: str,
    *,
    schedules: Mapping[int, Schedule] | None = None,
    tuned: Sequence[Schedule] = (),
    progress: Progress = silent,
) -> Verdict:
    """Run the gates on lowered code that an author edited: the gate ``edit`` in place of ``trace``, then the
    other gates of ``check``. The code is compiled in confinement, for the schedules of ``check`` and for the
    ``tuned`` schedules. Only a GPU can check the code's results."""
    # The tests have an audit hook for this event. The hook checks that edited code runs only in confinement.
    sys.audit("coda_agent.verifier.verify.check_edited", text)
    gates = Gates(progress)
    try:
        with gates.gate("edit") as figures:
            program = _scheduled(program, schedules)
            figures["lines"] = text.count("\n")
        _check_program(spec, program, gates)
        with gates.gate("compile") as figures:
            kernel = KernelSource(program, edited=text)
            compile_gate(spec, kernel, _schedules_to_compile(program, tuned), figures)
    except Stop as stop:
        return Verdict(stop.rejected, None)
    return Verdict(_checked(spec, kernel, gates), program)


def verify(
    spec: Spec,
    source: str,
    *,
    gpu: bool,
    weak_jail: bool = False,
    progress: Progress = silent,
    options: MeasureOptions | None = None,
    keep: Callable[[Identity], Checkpoint] | None = None,
    quack: Mapping[str, QuackTuned] | None = None,
) -> Verdict:
    """Run the gates that need no GPU. If ``gpu`` is true, then measure the kernel
    (``verifier.measure.measure``). The measurement stores its finished stages in the checkpoint that ``keep``
    returns. ``quack``: known schedules of QuACK's arms."""
    if not gpu:
        return check(spec, source, weak_jail=weak_jail, progress=progress)
    from coda_agent.verifier.measure import measure
    from coda_agent.verifier.stages import start_workers

    with ExitStack() as stack:
        # Start the workers first. They import modules while ``check`` runs, which takes about as long.
        ahead = [stack.enter_context(worker) for worker in start_workers()]
        report, program = check(spec, source, weak_jail=weak_jail, progress=progress)
        if program is None or not isinstance(report, Checked):
            return Verdict(report, program)
        pieces = keep(report.identity) if keep else None
        kernel = KernelSource(program)
        found = measure(spec, kernel, options, progress=progress, keep=pieces, quack=quack, ahead=ahead)
        return Verdict(joined(report, found), program)


def _trace(spec: Spec, source: str, weak_jail: bool, figures: dict[str, Any]) -> jail.Traced:
    traced = jail.trace(source, spec.signature(), weak=weak_jail)
    if isinstance(traced, Rejected):
        raise Failed(traced.code, traced.message, traced.line, **traced.evidence)
    figures |= {
        "milliseconds": round(traced.seconds * 1000, 1),
        "layers": list(traced.layers),
        "nodes": len(traced.program.nodes),
    }
    if traced.missing:
        figures["findings"] = [f"the jail lacks {', '.join(traced.missing)} on this machine"]
    return traced


def _scheduled(program: Program, schedules: Mapping[int, Schedule] | None) -> Program:
    if not schedules:
        return program
    try:
        return program._replace(schedule=dict(schedules)).check()
    except ProgramError as error:
        raise Failed(error.code, error.message) from None


def _check_program(spec: Spec, program: Program, gates: Gates, lines: Sequence[int | None] = ()) -> None:
    with gates.gate("contract") as figures:
        _contract(spec, program, figures, lines)
    with gates.gate("interpret") as figures:
        _interpret(spec, program, figures, lines)


def check_program(spec: Spec, program: Program) -> Rejected | None:
    """Run only the gates ``contract`` and ``interpret`` on a traced program. Return None if both pass."""
    try:
        _check_program(spec, program, Gates(silent))
    except Stop as stop:
        return stop.rejected
    return None


def _schedules_to_compile(program: Program, tuned: Sequence[Schedule] = ()) -> tuple[Schedule, ...]:
    """The schedules for the compile gate, including the author's schedules."""
    return tuple(dict.fromkeys([*PROBES, *program.schedule.values(), *tuned]))


def _checked(spec: Spec, kernel: KernelSource, gates: Gates) -> Checked:
    return Checked(identity=identity(spec, kernel), gates=tuple(gates.passed), unmeasured=_unmeasured())


def _unmeasured() -> str:
    why = "no measurement was requested" if visible.usable() else "no CUDA device"
    return f"checked, not benchmarked: {why}"


def _contract(spec: Spec, program: Program, figures: dict[str, Any], lines: Sequence[int | None]) -> None:
    """Check the hardware's requirements on names and shapes. Type inference has already checked everything
    else."""
    from coda_agent.primitives.runtime.launchable import alignment_errors

    try:
        lowered = lower(program)
    except ProgramError as error:
        raise Failed(error.code, error.message, error.line) from None
    if len(lowered.gemms) > MAX_STEPS:
        raise Failed("steps", f"{len(lowered.gemms)} matmuls in one kernel; at most {MAX_STEPS}")
    for case in spec.cases:
        errors = alignment_errors(program, case.sizes)
        if errors:
            line = _first_line(_tensor_nodes(program, errors[0]), lines)
            raise Failed("alignment", f"case {case.name}: {'; '.join(errors)}", line)
        for gemm in lowered.gemms:
            if not candidates(gemm, case.sizes):
                words = f"case {case.name}, step {gemm.step}: no tile holds {gemm.wants(case.sizes)}"
                fitting = ", ".join(map(str, gemm.fitting()))
                step = cut(program).gemms[gemm.step]
                torn, heads = gemm.torn(case.sizes), (*step.statistics, *step.repeats)
                line = _first_line(torn or heads, lines)
                words += f"; heads of {fitting} columns of the gemm fit" if fitting and not torn else ""
                raise Failed("range" if torn else "heads", words, line)
            chosen = program.schedule.get(gemm.step)
            if chosen and not fits(program, gemm, chosen, case.sizes):
                why = gemm.objection(chosen, case.sizes) or (
                    f"a tile of {chosen.tile_m}x{chosen.tile_n} leaves its mainloop less than two stages of "
                    "shared memory"
                )
                words = f"case {case.name}, step {gemm.step}: {why}; choose another schedule, or none"
                raise Failed("schedule", words)
    figures |= {"steps": len(lowered.gemms), "vector_kernels": len(lowered.vectors)}
    if spec.only:
        allowed = "; ".join(f"{dim} is {' or '.join(map(str, sizes))}" for dim, sizes in spec.only.items())
        figures["findings"] = [f"checked only where {allowed}: a launch refuses other sizes"]


def _tensor_nodes(program: Program, words: str) -> list[int]:
    """The nodes of the tensor that a message names first: the node of an output, or all nodes that read an
    input."""
    name = words.partition(":")[0]
    if name in program.outputs:
        return [program.outputs[name]]
    return [
        index
        for index, node in enumerate(program.nodes)
        if any(program.nodes[a] == Node("input", (), name) for a in node.args)
    ]


def _first_line(nodes: Iterable[int], lines: Sequence[int | None]) -> int | None:
    return next((lines[n] for n in sorted(nodes) if n < len(lines) and lines[n] is not None), None)


def _interpret(
    spec: Spec, program: Program, figures: dict[str, Any], lines: Sequence[int | None] = ()
) -> None:
    figures |= apart.interpret(spec, program, secrets.randbits(48), lines)


_VALUE = re.compile(r"\bn(\d+)_\d+ =")


def line_behind(words: str, lines: Sequence[int | None]) -> int | None:
    """The line of the kernel file that a compiler's message is about. The message quotes lowered code, in
    which the name of a value contains the number of its node."""
    nodes = [int(found) for found in _VALUE.findall(words)]
    return next((lines[node] for node in reversed(nodes) if node < len(lines)), None)


def _static(spec: Spec, case: Case) -> tuple[tuple[str, int], ...]:
    return tuple((dim, case.sizes[dim]) for dim in spec.static)


def _at_dims(dims: Mapping[str, int]) -> str:
    return " at " + ", ".join(f"{dim} = {size}" for dim, size in dims.items()) if dims else ""


def _compile_cases(
    kernel: KernelSource,
    dims: Mapping[str, int],
    schedules: Iterable[Schedule],
    lines: Sequence[int | None],
) -> Sequence[Resources]:
    """Compile a kernel; return the compiler's report. Raises Failed with the compiler's message and, if
    known, the line of the kernel file."""
    from coda_agent.primitives.runtime.compile import report

    try:
        return report(kernel, dims, schedules)
    except CompileError as error:
        if kernel.edited is not None:
            raise Failed(error.code, str(error), error.line) from None
        if error.code == CROWDED:
            line = lines[error.node] if error.node is not None and error.node < len(lines) else None
            raise Failed(error.code, str(error), line) from None
        words = f"the lowered kernel does not compile for {TARGET.architecture}{_at_dims(dims)}: {error}"
        raise Failed("compiler", words, line_behind(str(error), lines)) from None


def _left_out(
    program: Program, dims: Mapping[str, int], schedules: Iterable[Schedule], shown: Mapping[str, int]
) -> list[str]:
    """Findings on steps that are not compiled for some tile, because the epilogue leaves too little shared
    memory for the operands."""
    return [
        f"{gemm.name} was not compiled for {s.tile_m}x{s.tile_n}{_at_dims(shown)}: the tiles that it reads "
        "and returns leave that one no room in shared memory for the operands"
        for gemm in lower(program).gemms
        for s in schedules
        if gemm.admits(s, dims) and not fits(program, gemm, s, dims)
    ]


def compile_gate(
    spec: Spec,
    kernel: KernelSource,
    schedules: Iterable[Schedule],
    figures: dict[str, Any],
    lines: Sequence[int | None] = (),
) -> None:
    """Compile every step with each schedule that fits the step, once for each combination of static sizes in
    the cases. Compile the kernels between steps (vector kernels) only once."""
    schedules = tuple(schedules)
    several = [dict(dims) for dims in dict.fromkeys(_static(spec, case) for case in spec.cases)]
    resources: list[tuple[dict[str, int], Resources]] = []
    figures["findings"] = []
    for dims in several:
        found = _compile_cases(kernel, dims, schedules, lines)
        shown = dims if len(several) > 1 else {}
        resources += [(shown, r) for r in found if r.schedule or dims == several[0]]
        figures["findings"] += _left_out(kernel.program, dims, schedules, shown)
    figures["kernels"] = [
        {k: getattr(r, k) for k in ("kernel", "registers", "stack", "spill_loads", "spill_stores", "hgmma")}
        | {
            "tile": f"{r.schedule['tile_m']}x{r.schedule['tile_n']}" if r.schedule else None,
            "pingpong": bool(r.schedule["pingpong"]) if r.schedule else None,
        }
        | ({"static": dims} if dims and r.schedule else {})
        for dims, r in resources
    ]
    figures["findings"] += [
        f"{r.kernel} spills {r.spill_loads} loads and {r.spill_stores} stores{_at_dims(dims)}"
        for dims, r in resources
        if r.spill_loads
    ]
    launches = dict.fromkeys(r.kernel for _, r in resources if not r.own_launch)
    figures["findings"] += [f"{kernel} has its own launch code: look at it" for kernel in launches]
