"""Create, find and reopen runs on disk. ``runs/NAME/`` contains the run's journal, the spec as it was when
the run started, and the files of the ``handoff`` provider."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coda_agent.agent import providers
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import DamagedError, Journal, JournalError, Snapshot
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

STAMP = re.compile(r"-(\d{8}-\d{6})(?:-(\d+))?$")
JOURNAL = "journal.db"  # in a run's folder
SWEEP = "sweep.db"  # the journal in a sweep's folder
DERIVED = "derived"  # the field of a journal's header that holds the program of a derived backward
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")


def runs_dir() -> Path:
    """The folder that holds all runs: CODA_AGENT_RUNS or ./runs."""
    return Path(os.environ.get("CODA_AGENT_RUNS") or "runs")


@dataclass
class Run:
    """A run that is open in this process. Its journal stays locked until ``journal.close()``."""

    name: str
    journal: Journal
    spec: Spec
    text: str

    @property
    def directory(self) -> Path:
        return runs_dir() / self.name

    @property
    def derived(self) -> Program | None:
        """The derived program that the run's kernel has to beat, as it was when the run started; None if the
        header has no such program. Raises JournalError if the program is damaged."""
        text = self.journal.header.get(DERIVED)
        try:
            return Program.from_json(text, self.spec.signature()) if text else None
        except ProgramError as error:
            raise JournalError(
                f"{self.directory / JOURNAL}: its derived program is damaged: {error}"
            ) from None


def start(path: Path, options: Mapping[str, Any]) -> Run:
    """Start a run of the spec at ``path``. Raises SpecError if the spec or the derived program next to it is
    invalid; the run is not created then. Raises JournalError if the run's files cannot be written."""
    spec = load(path)
    return create(spec, path.read_text(encoding="utf-8"), {**options, **derived_beside(path, spec)})


def derived_beside(path: Path, spec: Spec) -> dict[str, str]:
    """The derived program next to a spec, as a field for the journal's header; empty if there is no such
    program. Raises SpecError."""
    program = derived_program(path, spec)
    return {DERIVED: program.to_json()} if program else {}


def create(spec: Spec, text: str, options: Mapping[str, Any]) -> Run:
    """Start a run of a spec. ``text``: the spec's YAML. Raises JournalError."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        name = f"{spec.name}-{stamp}{suffix}"
        if _claim(runs_dir() / name, text):
            break
    # Create the journal last. A folder without a journal is not a run, so an interrupted start leaves no run.
    header = {"run": name, "spec": spec.name, "spec_hash": spec.hash, **options}
    return Run(name, Journal.create(runs_dir() / name / JOURNAL, header), spec, text)


def derived_program(path: Path, spec: Spec) -> Program | None:
    """The derived program in the file next to the spec of a backward; None if there is no such file. Raises
    SpecError if the program does not fit the spec."""
    file = path.with_suffix(".program.json")
    if spec.forward is None or not file.is_file():
        return None
    try:
        return Program.from_json(file.read_text(encoding="utf-8"), spec.signature())
    except (ProgramError, UnicodeDecodeError) as error:
        words = f"is not a program of {path}: {error}; derive both again, or move this file away"
        raise SpecError(file, None, words) from None


def _claim(directory: Path, spec: str) -> bool:
    """Create a run's folder with its spec. Return False if the name is taken. Raises JournalError."""
    try:
        directory.mkdir(parents=True)
        write_atomic(directory / "spec.yaml", spec)
    except FileExistsError:
        return False
    except OSError as error:
        full = error.errno == errno.ENOSPC
        remedy = "free disk space, or set CODA_AGENT_RUNS" if full else "choose a writable directory"
        raise JournalError(f"{directory}: {error.strerror}; {remedy}") from None
    return True


def latest() -> str:
    """The latest runs' names, for a message about an unknown run."""
    known = ", ".join(names()[-5:])
    return f"the latest runs are {known}" if known else "this folder has no runs"


def folder(name: str) -> Path:
    """The folder of an existing run, by name or path. Raises JournalError."""
    given, name = Path(name), Path(name).name
    if not NAME.fullmatch(name) or not (runs_dir() / name).is_dir():
        raise JournalError(f"{runs_dir().resolve()}: there is no run {name!r}; {latest()}")
    if given.is_dir() and given.resolve() != (runs_dir() / name).resolve():
        raise JournalError(f"{given} is not a run in {runs_dir()}; set CODA_AGENT_RUNS to its parent folder")
    if has_journal(runs_dir() / name, SWEEP):
        raise JournalError(
            f"{name} is a sweep, not a run: name one of its runs, which coda-agent report {name} --json "
            "lists (only report and resume take a sweep, and they take it alone)"
        )
    return runs_dir() / name


def reopen(name: str) -> Run:
    """Reopen an existing run with its original spec. Raises JournalError if the run is missing, its spec was
    edited, or its provider is unknown."""
    directory = folder(name)
    path = directory / JOURNAL
    journal = record.opened(path)
    try:
        check_provider(path, journal.header)
        spec, text = _spec(directory, journal.header)
        record.check_programs(path, journal.events(), spec)
    except BaseException:
        journal.close()
        raise
    return Run(directory.name, journal, spec, text)


def check_provider(journal: Path, header: Mapping[str, Any]) -> None:
    """Raise DamagedError if the header of a journal names an unknown provider, so that the run cannot
    continue."""
    if header["provider"] not in providers.specs():
        known = ", ".join(providers.specs())
        raise DamagedError(
            f"{journal}: provider: must be one of the providers {known}; {record.OTHER_VERSION}"
        )


def look(name: str) -> tuple[Snapshot, Spec]:
    """Read a run and its spec, even while another process has the run open. Raises JournalError if the run is
    missing or its spec was edited."""
    path = folder(name) / JOURNAL
    taken = Snapshot(*record.glance(path))
    spec, _ = _spec(path.parent, taken.header)
    record.check_programs(path, taken.events(), spec)
    return taken, spec


def _spec(directory: Path, header: dict[str, Any]) -> tuple[Spec, str]:
    path = directory / "spec.yaml"
    # not checked again, because the spec was checked when the run started
    spec, text = load(path, check=False), path.read_text(encoding="utf-8")
    if spec.hash != header["spec_hash"]:
        raise JournalError(f"{path}: the spec has changed since the run started; undo the change")
    return spec, text


def names() -> list[str]:
    """The names of all runs, oldest first; empty if the folder of runs does not exist. Raises OSError if the
    folder cannot be read."""
    try:
        found = [*runs_dir().iterdir()]
    except FileNotFoundError:
        return []
    return sorted((p.name for p in found if has_journal(p, JOURNAL)), key=_age)


def has_journal(folder: Path, name: str) -> bool:
    """Whether a folder has a journal of this name. A folder that may not be read, such as another user's,
    counts as a run."""
    try:
        return (folder / name).is_file()
    except PermissionError:
        return name == JOURNAL


def _age(name: str) -> tuple[str, int, str]:
    """A sort key from a run's name: the start time, then the order among runs of the same second."""
    stamp = STAMP.search(name)
    return (stamp[1], int(stamp[2] or 1), name) if stamp else ("", 0, name)
