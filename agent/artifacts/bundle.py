"""Pack checked kernels for an H100 on another machine, and import the measurements into the kernels' runs.

A bundle is one JSON file with programs, specs, expected hashes and known schedules. The results come back in
another JSON file. The measuring machine gets only programs and edited CuTeDSL, not an author's kernel file.
If the objects of edited CuTeDSL are missing, the measuring machine compiles the CuTeDSL in the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coda_agent.agent.run import runs
from coda_agent.agent.run.assembly import task_of
from coda_agent.agent.run.view import RunView
from coda_agent.agent.storage import kernel_files, quack_tunings
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import CodaError, InvalidInput, first_fault
from coda_agent.primitives.system.files import regular, write_atomic
from coda_agent.verifier.gates import Progress, silent
from coda_agent.verifier.report import (
    MEASUREMENT,
    Checked,
    Identity,
    Measured,
    Measurement,
    QuackTuned,
    Unmeasured,
)
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.verifier.incumbent import Incumbent

FORMAT = 1
T = TypeVar("T", "Bundle", "BundleResults")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Schedules = dict[str, tuple[dict[str, Any], ...]]  # the schedules of each step, as JSON data


class PackedIncumbent(_File):
    """The kernel to beat (``verifier.incumbent.Incumbent``) as JSON data."""

    program: str
    schedules: dict[str, dict[str, dict[str, Any]]]
    finalists: dict[str, Schedules] = {}
    raw: str = ""

    @classmethod
    def of(cls, kept: Incumbent) -> PackedIncumbent:
        return cls(
            program=kept.kernel.program.to_json(),
            schedules={
                case: {str(step): dict(s.to_json()) for step, s in steps.items()}
                for case, steps in kept.schedules.items()
            },
            finalists={
                case: {str(step): tuple(dict(s.to_json()) for s in raced) for step, raced in steps.items()}
                for case, steps in kept.finalists.items()
            },
            raw=kept.kernel.edited or "",
        )


class PackedKernel(_File):
    """A checked kernel that awaits measurement. ``known``: the best schedules of an earlier tuning, by case.
    ``quack``: the best schedules of QuACK's arms, by case. ``kept``: the kernel to beat. ``raw``: the edited
    code, or "" if no author edited the kernel's code. ``objects``: the compiled objects of the edited code,
    so that the measuring machine need not run the edited Python."""

    run: str
    attempt: int
    spec_text: str
    program: str
    identity: Identity
    known: dict[str, Schedules] = {}
    quack: dict[str, QuackTuned] = {}
    kept: PackedIncumbent | None = None
    raw: str = ""
    objects: dict[str, str] = {}


class Bundle(_File):
    coda_agent_bundle: int = FORMAT
    entries: tuple[PackedKernel, ...]


class KernelResult(_File):
    """The measurement of one kernel of a bundle."""

    run: str
    attempt: int
    identity: Identity
    measurement: dict[str, Any]


class BundleResults(_File):
    coda_agent_results: int = FORMAT
    results: tuple[KernelResult, ...]


def pack(names: Sequence[str], path: Path, progress: Progress = silent) -> Bundle:
    """Write the last checked kernel of each run to ``path``. Raises InvalidInput for a run that does not
    await a measurement. Compiling edited code takes minutes if tuning tries many schedules. ``progress``
    receives a message for each case."""
    bundle = Bundle(entries=tuple(_entry(name, progress) for name in names))
    write(path, bundle)
    return bundle


def _entry(name: str, progress: Progress) -> PackedKernel:
    run = runs.reopen(name)
    with run.journal:
        if "proposes" in run.journal.header:
            raise InvalidInput(
                f"run {run.name} writes a primitive, so it cannot be bundled: copy its folder to the "
                f"H100's {runs.runs_dir()}, and run there: coda-agent resume {run.name} --gpu; or, if the "
                "checkout there has the run's recording: "
                f"coda-agent primitive {run.journal.header['spec']} --provider replay --gpu"
            )
        view = RunView(run.journal.events())
        last = view.last
        if last is None or not isinstance(last.checked, Checked) or last.measured:
            raise InvalidInput(f"run {run.name} awaits no measurement: only a checked kernel can be bundled")
        kernel, kept, report = last.kernel(run.spec), _incumbent(run, view), last.checked
        assert kernel is not None  # a checked attempt has a kernel
        return PackedKernel(
            run=run.name,
            attempt=last.number,
            spec_text=run.text,
            program=kernel.program.to_json(),
            identity=report.identity,
            known=_known_schedules(run.spec, report.identity),
            quack=quack_tunings.quack(run.spec),
            kept=PackedIncumbent.of(kept) if kept else None,
            raw=kernel.edited or "",
            objects=_objects(run.spec, kernel, kept, progress) if kernel.edited else {},
        )


def _objects(
    spec: Spec, kernel: KernelSource, kept: Incumbent | None, progress: Progress = silent
) -> dict[str, str]:
    """Compile edited code, and return the objects. Compile for the schedules of the compile gate, and for all
    schedules that tuning may measure. The incumbent's schedules determine what tuning may measure."""
    from coda_agent.primitives.compiler.probe_schedules import fits, probes
    from coda_agent.primitives.raw import packed
    from coda_agent.primitives.runtime.precompile import compile_all
    from coda_agent.primitives.runtime.tune import within_reach

    program, lowered = kernel.program, kernel.lowered
    for case in spec.cases:
        raced = dict(kept.finalists.get(case.name, {})) if kept and case.bench else {}
        if kept and not kept.kernel.edited:
            raced |= {
                g.step: within_reach(g, case.sizes, raced[g.step]) for g in lowered.gemms if g.step in raced
            }
        wanted = [
            (g.step, schedule)
            for g in lowered.gemms
            for schedule in (*probes(program, g, case.sizes), *raced.get(g.step, ()))
            if fits(program, g, schedule, case.sizes)
        ]
        wanted += list(program.schedule.items())
        progress("compile", f"{spec.name}, case {case.name}: {len(set(wanted))} schedules")
        compile_all(kernel, case.sizes, wanted)
    return packed(lowered)


def _incumbent(run: runs.Run, view: RunView) -> Incumbent | None:
    from coda_agent.verifier.incumbent import Incumbent

    at = view.standing
    kernel = at.kernel(run.spec) if at else None
    if at and kernel and isinstance(at.measurement, Measured):
        return Incumbent.of(kernel, at.measurement.timings)
    return task_of(run).rival()


def _known_schedules(spec: Spec, identity: Identity) -> dict[str, Schedules]:
    """Return the tuned schedules of the spec's accepted kernel, if that kernel has the program of
    ``identity``. Tuning then measures only these schedules, even if the lowering has changed since."""
    try:
        before = kernel_files.read(spec)
    except kernel_files.KernelError:  # another version of coda-agent wrote the files
        return {}
    if before is None or before.report.identity.program_hash != identity.program_hash:
        return {}
    return {timing.case: timing.finalists for timing in before.report.timings}


def read(path: Path) -> Bundle:
    """Read a bundle. Raises InvalidInput if the file is not a bundle, or has another format version."""
    return _read(path, Bundle)


def take(path: Path) -> Iterator[tuple[str, Measurement]]:
    """Copy the measurements of a result file into their runs' journals, and yield each with its run. A second
    call changes nothing. An ``Unmeasured`` result is not copied, so that its kernel can be measured again.

    Raises CodaError after the last result if any result has no run here or belongs to another kernel than the
    run's, or if its run already has a different measurement.
    """
    refused = list[CodaError]()
    for result in _read(path, BundleResults).results:
        try:
            yield _take(path, result)
        except CodaError as error:
            refused.append(error)
    if refused:
        raise refused[0] if len(refused) == 1 else InvalidInput("\n".join(map(str, refused)))


def _take(path: Path, result: KernelResult) -> tuple[str, Measurement]:
    try:
        measurement = MEASUREMENT.validate_python(result.measurement)
    except ValidationError as error:
        raise InvalidInput(
            f"{path}: run {result.run}: the measurement has {error.error_count()} errors, the first: "
            f"{first_fault(error)}; measure again"
        ) from None
    run = runs.reopen(result.run)
    with run.journal:
        recorded = RunView(run.journal.events()).attempts.get(result.attempt)
        report = recorded.checked if recorded else None
        named = [result.identity]
        if isinstance(measurement, Measured):
            named.append(measurement.identity)
        if not isinstance(report, Checked) or not all(report.identity.same(n) for n in named):
            raise InvalidInput(
                f"{path}: run {result.run}, attempt {result.attempt}: the measurement is of "
                "a different kernel than this run's: bundle the run again"
            )
        key = f"measurement/{result.attempt}"
        if isinstance(measurement, Unmeasured):
            return run.name, measurement
        if run.journal.once(key, "measurement", partial(dict, result.measurement)) != result.measurement:
            raise InvalidInput(
                f"{path}: run {result.run}, attempt {result.attempt} already has a different "
                "measurement, which stays: to measure again, start a new run"
            )
    return run.name, measurement


def check_free(out: Path, path: Path, bundle: Bundle) -> None:
    """Check that measuring the bundle at ``path`` may replace ``out``. Raises InvalidInput if ``out`` holds
    the results of another bundle, or is no file of results."""
    if not out.exists():
        return
    ours = {(entry.run, entry.attempt) for entry in bundle.entries}
    others = [r.run for r in _read(out, BundleResults).results if (r.run, r.attempt) not in ours]
    if others:
        raise InvalidInput(
            f"{out}: holds results of another bundle than {path} (run {others[0]}), which would be lost; "
            "give another --out, or move the file"
        )


def write(path: Path, content: BaseModel) -> None:
    try:
        write_atomic(path, content.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}; give a writable path") from None


def _read(path: Path, kind: type[T]) -> T:
    try:
        content = regular(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}; give a file written by bundle or measure") from None
    try:
        tree = json.loads(content)
        if isinstance(tree, dict) and kind is BundleResults and "coda_agent_bundle" in tree:
            raise InvalidInput(f"{path}: this is a bundle; measure it first: coda-agent measure {path}")
        found = kind.model_validate(tree)
    # the content is not UTF-8, is not JSON, is nested too deeply, or has other fields
    except (ValueError, RecursionError) as error:
        words = first_fault(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        name = "results" if kind is BundleResults else "bundle"
        raise InvalidInput(
            f"{path}: this is not a {name} file of coda-agent: {words}; make it again"
        ) from None
    version = found.coda_agent_bundle if isinstance(found, Bundle) else found.coda_agent_results
    if version != FORMAT:
        raise InvalidInput(f"{path}: format {version}, but this version reads {FORMAT}; make it again")
    return found
