"""Check that a committed kernel's evidence covers the committed files.

The kernel is traced and lowered again, and every hash is compared. So this audit detects any edit of the
kernel, program, lowered code or spec after the measurement. ``report_audit`` checks a report's figures
against each other. The audit needs the jail (the process that traces a kernel file). It needs no GPU, because
it times nothing.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import Lowered, lower
from coda_agent.primitives.errors import first_fault
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.audit.report_audit import of_samples, unfounded
from coda_agent.verifier.decision import KEPT, no_slower
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import CANDIDATE, GATES, RAW_GATES, Accepted, Rejected
from coda_agent.verifier.sandbox import jail
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

UNTOLD = f"it does not say which kernel was {KEPT!r}, or which schedules it had"


def problems(name: str, kernels: Path, specs: Path, *, edited: bool = False) -> list[str]:
    """The faults in the evidence of ``kernels/NAME.*`` for ``specs/NAME.yaml``; empty if the evidence is
    valid. ``edited``: check ``kernels/NAME.raw.*`` instead, whose CuTeDSL an author edited.

    Raises JailUnavailable if this machine cannot trace kernels.
    """
    stem = f"{name}.raw" if edited else name
    try:
        spec = load(specs / f"{name}.yaml", check=False)
        report = Accepted.model_validate_json(_text(kernels / f"{stem}.report.json"))
        source, text = (_text(kernels / f"{stem}.{suffix}") for suffix in ("py", "program.json"))
        cutedsl, own = (_text(kernels / f"{name}.{suffix}") for suffix in ("cutedsl.py", "program.json"))
        program, whole = (Program.from_json(t, spec.signature()) for t in (text, own))
    except (SpecError, OSError, UnicodeDecodeError) as error:
        return [str(error)]
    except ValidationError as error:
        return [f"{stem}.report.json is not a report of an accepted kernel: {first_fault(error)}"]
    except ProgramError as error:
        return [f"{stem}.program.json is not a program of {name}: {error.message}"]
    bound = (
        _edited(stem, report, program, whole, source)
        if edited
        else [*_traced(name, spec, source, program), *_lowered(name, report, program, cutedsl)]
    )
    return [
        *_identity(stem, spec, report, program),
        *bound,
        *_gates(stem, report),
        *unfounded(stem, spec, program, report),
        *(_beaten(stem, report) if edited else ()),
    ]


def _text(path: Path) -> str:
    # do not convert line ends, because the hashes cover them
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def _identity(name: str, spec: Spec, report: Accepted, program: Program) -> list[str]:
    claimed = report.identity
    pairs = {
        "spec": (claimed.spec, spec.name),
        "spec hash": (claimed.spec_hash, spec.hash),
        "program hash": (claimed.program_hash, program.hash),
    }
    found = [
        f"{name}: the report is for {what} {there[:40]}, but here it is {here[:40]}: measure again"
        for what, (there, here) in pairs.items()
        if there != here
    ]
    if report.authorship is None or not report.authorship.author.strip():
        found.append(f"{name}: the report names no author: accept the run again")
    return found


def _traced(name: str, spec: Spec, source: str, program: Program) -> list[str]:
    """Check that the source traces to the program, so that reviewers read the code that runs."""
    traced = jail.trace(source, spec.signature())
    if isinstance(traced, Rejected):
        place = f"{name}.py:{traced.line}" if traced.line else f"{name}.py"
        return [f"{place}: rejected ({traced.code}): {traced.message}"]
    # a source specifies no schedules
    if traced.program._replace(schedule=program.schedule).hash == program.hash:
        return []
    return [f"{name}.py does not trace to {name}.program.json: accept a run of it"]


def _lowered(name: str, report: Accepted, program: Program, text: str) -> list[str]:
    """Check that the program lowers to the code that was measured."""
    lowered, found = lower(program), []
    if lowered.text != text:
        found.append(f"{name}.program.json lowers to another text than {name}.cutedsl.py: measure again")
    return found + _same_text(name, report, lowered)


def _edited(name: str, report: Accepted, program: Program, own: Program, text: str) -> list[str]:
    """Check that the report is for this edited code, and that the edited code belongs to the kernel's own
    program (schedules may differ)."""
    found = []
    if program._replace(schedule={}).hash != own._replace(schedule={}).hash:
        found.append(f"{name}.program.json is not the kernel's own program: optimize it again")
    if not report.identity.raw:
        found.append(f"{name}: the report does not cover edited CuTeDSL: optimize it again")
    return found + _same_text(name, report, KernelSource(program, edited=text).lowered)


def _same_text(name: str, report: Accepted, lowered: Lowered) -> list[str]:
    if lowered.hash == report.identity.lowered_hash:
        return []
    versions = ", ".join(f"{k} {v}" for k, v in report.identity.versions.items())
    return [
        f"{name}: the report is for lowered text {report.identity.lowered_hash[:12]}, here it is "
        f"{lowered.hash[:12]}: install the versions it was made with ({versions}), or measure again"
    ]


def _beaten(name: str, report: Accepted) -> list[str]:
    """Check from the report's samples that the edited code is faster in some case, and slower in no case,
    than the code that it replaces. Also check that the report names the replaced code (the program's own
    code, or an earlier edit) and the schedules of that code."""
    ratios = {t.case: of_samples(t, KEPT) for t in report.timings}
    missing = [case for case, ratio in ratios.items() if ratio is None]
    if missing:
        return [f"{name}: case {', '.join(missing)} has no samples of {KEPT}: measure again"]
    found = [r for r in ratios.values() if r is not None]
    held = [no_slower(t.samples[KEPT], t.samples[CANDIDATE]) for t in report.timings]
    if not all(held) or not any(r.low > 1 for r in found):
        return [f"{name}: by its samples, no case is faster than {KEPT}, or one may be slower"]
    if not report.rival or not all(t.kept_schedules for t in report.timings):
        return [f"{name}: {UNTOLD}: measure again"]
    return []


def _gates(name: str, report: Accepted) -> list[str]:
    """Check that every gate passed. Edited code has the gate ``edit`` instead of ``trace``."""
    passed = {gate.gate for gate in report.gates}
    wanted = RAW_GATES if report.identity.raw else GATES
    return [f"{name}: the report has no gate {gate}: measure again" for gate in wanted if gate not in passed]
