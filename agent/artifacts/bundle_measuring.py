"""Measure a bundle on this machine: check all entries again, and measure each entry in stages. Finished
stages survive an interruption."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.artifacts.bundle import Bundle, BundleResults, KernelResult, PackedKernel, write
from coda_agent.agent.storage.checkpoint import SAME, FilePieces
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.verifier.gates import Progress, identity, silent
from coda_agent.verifier.gpu.visible import visible_gpus
from coda_agent.verifier.report import Measurement, QuackTuned, Unmeasured
from coda_agent.verifier.spec.file import SpecError, of_text
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.verifier.incumbent import Incumbent, Known
    from coda_agent.verifier.measure import MeasureOptions
    from coda_agent.verifier.stages import Checkpoint
    from coda_agent.verifier.worker import Worker

WHOLE = "whole"  # the name of the stage that stores a finished entry's result


def partial_folder(out: Path) -> Path:
    """The folder that holds finished stages until ``out`` is complete."""
    return out.with_name(out.name + ".partial")


def stages(out: Path, entry: PackedKernel, options: MeasureOptions) -> FilePieces:
    """The folder that holds the stages of one entry's measurement until ``out`` is complete."""
    rival = entry.kept.model_dump_json() if entry.kept else ""
    return FilePieces.of(partial_folder(out), entry.identity, options, rival)


def measure(
    path: Path, bundle: Bundle, out: Path, options: MeasureOptions, *, progress: Callable[[str], Progress]
) -> BundleResults:
    """Measure every entry of a bundle on this machine's GPU, and write ``out`` after each entry. Stages that
    this GPU stored in ``out``.partial are not measured again. Raises InvalidInput if the bundle is damaged,
    or if this machine lowers a program to another text than the checking machine did. The error's message
    names ``path``."""
    from coda_agent.verifier.stages import start_workers

    done, here, waiting = BundleResults(results=()), [], start_workers()
    try:
        checked = [verified(path, entry) for entry in bundle.entries]
        for place, (entry, (spec, kernel)) in enumerate(zip(bundle.entries, checked, strict=True), 1):
            # Start the next entry's workers now, so that they import their modules during this measurement.
            here, waiting = waiting, start_workers() if place < len(checked) else []
            keep, said = stages(out, entry, options), progress(entry.run)
            _forget_other_gpus(keep)
            found = whole(keep, partial(_measure_on, path, entry, spec, kernel, options, keep, said, here))
            made = identity(spec, kernel)
            result = KernelResult(run=entry.run, attempt=entry.attempt, identity=made, measurement=found)
            done = BundleResults(results=(*done.results, result))
            write(out, done)
            _close(here)  # an entry that was already finished leaves its workers unused
    finally:
        _close([*here, *waiting])
    shutil.rmtree(partial_folder(out), ignore_errors=True)
    return done


def _forget_other_gpus(keep: FilePieces) -> None:
    """Delete the stages of an unfinished measurement that began on another GPU, because one measurement must
    not use two GPUs."""
    here = {"gpu": next((gpu.uuid for gpu in visible_gpus()), "")}
    if keep.load(WHOLE) is None and keep.load(SAME) != here:
        keep.clear()
        keep.save(SAME, here)


def _close(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.close()


def whole(keep: FilePieces, measured: Callable[[], Measurement]) -> dict[str, Any]:
    """Return an entry's stored result if the entry was finished before an interruption; otherwise measure the
    entry. A stored result never changes, because a user may already have imported that result. If the
    measurement is invalid, its stages are deleted, so that the next call measures them again."""
    kept = keep.load(WHOLE)
    if kept is not None:
        return kept
    measurement = measured()
    found = measurement.model_dump(mode="json")
    if isinstance(measurement, Unmeasured):
        keep.clear()
    else:
        keep.save(WHOLE, found)
    return found


def measure_entry(
    path: Path,
    entry: PackedKernel,
    options: MeasureOptions,
    keep: Checkpoint,
    progress: Progress = silent,
    ahead: Sequence[Worker] = (),
) -> Measurement:
    """Measure one entry on this process's GPU. ``ahead``: workers that were started in advance. ``path``: the
    bundle, for error messages."""
    return _measure_on(path, entry, *verified(path, entry), options, keep, progress, ahead)


def _measure_on(
    path: Path,
    entry: PackedKernel,
    spec: Spec,
    kernel: KernelSource,
    options: MeasureOptions,
    keep: Checkpoint,
    progress: Progress,
    ahead: Sequence[Worker],
) -> Measurement:
    from coda_agent.verifier.measure import measure as measure_program

    if kernel.edited:
        _unpack(path, entry, kernel)
    return measure_program(
        spec,
        kernel,
        options,
        progress=progress,
        keep=keep,
        known=_schedules(path, entry),
        kept=_rival(path, entry, spec),
        quack=_quack(path, entry),
        ahead=ahead,
    )


@contextmanager
def _refusing(path: Path, entry: PackedKernel, what: str) -> Iterator[None]:
    """Wrap a block that reads one part of an entry (``what``). If the part is damaged, raise InvalidInput
    with a message that names the bundle's ``path``, the run and the part."""
    try:
        yield
    except (CompileError, ProgramError, ValueError) as error:
        raise InvalidInput(
            f"{path}: run {entry.run}: {what} cannot be used: {error}; bundle the run again"
        ) from None


def _unpack(path: Path, entry: PackedKernel, kernel: KernelSource) -> None:
    from coda_agent.primitives.raw import unpack

    with _refusing(path, entry, "an object"):
        unpack(kernel.lowered, entry.objects)


def _schedules(path: Path, entry: PackedKernel) -> dict[str, Known]:
    from coda_agent.verifier.incumbent import parse_schedules

    with _refusing(path, entry, "a known schedule"):
        return parse_schedules(entry.known)


def _quack(path: Path, entry: PackedKernel) -> dict[str, QuackTuned]:
    from coda_agent.verifier.baselines.quack import parsed

    with _refusing(path, entry, "a QuACK schedule"):
        for case in entry.quack.values():
            parsed(case.arms)
    return entry.quack


def _rival(path: Path, entry: PackedKernel, spec: Spec) -> Incumbent | None:
    from coda_agent.verifier.incumbent import Incumbent

    if entry.kept is None:
        return None
    with _refusing(path, entry, "the kernel to beat"):
        kernel = KernelSource.from_json(dict(entry.kept), spec.signature())
        steps = {str(gemm.step) for gemm in kernel.lowered.gemms}
        for case in (case.name for case in spec.cases if case.bench):
            if steps - entry.kept.schedules.get(case, {}).keys():
                raise ValueError(f"it lacks a schedule for some step at case {case}")
        return Incumbent.parsed(kernel, entry.kept.schedules, entry.kept.finalists)


def verified(path: Path, entry: PackedKernel) -> tuple[Spec, KernelSource]:
    """Load an entry's spec and kernel, and lower the program again on this machine. Raises InvalidInput if a
    hash differs from the hash that the checking machine computed."""
    spec = _spec(path, entry)
    with _refusing(path, entry, "its program"):
        kernel = KernelSource.from_json(dict(entry), spec.signature())
        hashes = (spec.hash, kernel.program.hash, kernel.lowered.hash)
    expected = (entry.identity.spec_hash, entry.identity.program_hash, entry.identity.lowered_hash)
    for what, here, there in zip(("spec", "program", "lowered text"), hashes, expected, strict=True):
        if here != there:
            raise InvalidInput(
                f"{path}: run {entry.run}: the {what} differs from what was checked "
                f"({here[:12]} here, {there[:12]} there): install the versions it was made with "
                f"({', '.join(f'{k} {v}' for k, v in entry.identity.versions.items())})"
            )
    return spec, kernel


def _spec(path: Path, entry: PackedKernel) -> Spec:
    try:  # parse without running the reference, because the hash shows that the spec was checked
        return of_text(path, entry.spec_text, Spec, lambda spec: None)
    except SpecError as error:
        place = f"line {error.line} of its spec" if error.line else "its spec"
        raise InvalidInput(f"{path}: run {entry.run}: {place}: {error.message}") from None
