"""Read the files of accepted kernels in generated_kernels/, and find the recordings of their runs.

A kernel has four files: NAME.py (the author's source), NAME.program.json (loaded by launch), NAME.cutedsl.py
(the generated code that ran) and NAME.report.json. If an author edited the generated code, there are three
more files: NAME.raw.py, NAME.raw.program.json (the same program, with the schedules of the edited code) and
NAME.raw.report.json. ``artifacts.accept`` writes these files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from coda_agent.agent.storage import atomic_files
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import InvalidInput, first_fault
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.files import KERNELS as KERNELS
from coda_agent.primitives.system.files import ROOT
from coda_agent.verifier.report import REPORT, Accepted
from coda_agent.verifier.spec.model import Spec

RECORDINGS = ROOT / "agent" / "recordings"
SUFFIXES = ("py", "program.json", "cutedsl.py", "report.json")
RAW_SUFFIXES = ("raw.py", "raw.program.json", "raw.report.json")


class KernelError(InvalidInput):
    """A file of an accepted kernel is unreadable. The message names the file, the fault and the remedy."""


@dataclass(frozen=True)
class AcceptedKernel:
    """An accepted kernel, as read from its files."""

    kernel: KernelSource
    report: Accepted


def files(name: str, directory: Path = KERNELS, *, edited: bool = False) -> list[Path]:
    """The paths of a kernel's files, with the source first, the program second and the report last."""
    return [directory / f"{name}.{suffix}" for suffix in (RAW_SUFFIXES if edited else SUFFIXES)]


@contextmanager
def consistent_files(
    name: str, directory: Path | None = None, *, edited: bool = False
) -> Iterator[list[Path]]:
    """Yield a kernel's ``files``, and keep them unchanged during the block, so that all files come from the
    same acceptance. An interrupted acceptance is completed first. ``directory`` is generated_kernels/ by
    default. Raises OSError, for example FileNotFoundError if the directory does not exist."""
    *others, evidence = files(name, directory or KERNELS, edited=edited)
    with atomic_files.consistent(evidence.parent, evidence.name):
        yield [*others, evidence]


def read(spec: Spec, directory: Path | None = None, *, edited: bool = False) -> AcceptedKernel | None:
    """Read a spec's accepted kernel; return None if the spec has no accepted kernel. ``edited``: read the
    kernel with edited code instead. ``directory`` is generated_kernels/ by default. This function trusts the
    report; ``verifier.audit.provenance`` checks that the report covers these files. Raises KernelError."""
    try:
        with consistent_files(spec.name, directory, edited=edited) as (source, program, *_, evidence):
            text = source.read_text(encoding="utf-8") if edited else None
            traced = Program.from_json(program.read_text(encoding="utf-8"), spec.signature())
            return AcceptedKernel(KernelSource(traced, edited=text), report(evidence))
    except FileNotFoundError:
        return None
    except (ProgramError, UnicodeDecodeError) as error:
        raise KernelError(f"{program}: {error}; accept that kernel again") from None


def superseded(edit: Accepted, own: Accepted) -> bool:
    """Whether a kernel's program (``own``) was measured later than the edit of its code (``edit``). If so,
    the program may be faster than the edit, because the program may have better schedules."""
    return datetime.fromisoformat(edit.date) < datetime.fromisoformat(own.date)


def is_there(name: str) -> bool:
    """Whether generated_kernels/ has an accepted kernel of this name. Raises OSError."""
    try:
        with consistent_files(name) as (*_, evidence):
            return evidence.is_file()
    except FileNotFoundError:
        return False


def report(path: Path) -> Accepted:
    """Read an accepted kernel's report. Raises KernelError if the file contains no report of an accepted
    kernel, and OSError if the file cannot be read."""
    try:
        found = REPORT.validate_json(path.read_bytes())
    except ValidationError as error:
        raise KernelError(f"{path}: {first_fault(error)}; accept that kernel again") from None
    if not isinstance(found, Accepted):
        raise KernelError(f"{path}: its kernel is {found.status}, not accepted; remove the file")
    return found


def recording_path(name: str, directory: Path = RECORDINGS, *, edited: bool = False) -> Path:
    """The path of the recording of the run that made a kernel. ``edited``: the run edited the kernel's code,
    or wrote a primitive."""
    return directory / (f"{name}.raw.jsonl" if edited else f"{name}.jsonl")
