"""Accept a kernel that passed every gate: write the kernel's files to generated_kernels/, and commit them.

The run that made the kernel is recorded for replay. The files are replaced atomically: after an interruption,
the next reader completes the replacement.
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path

from coda_agent.agent.run.loop import PIECE, STOPPED, Outcome
from coda_agent.agent.run.runs import JOURNAL, Run, folder
from coda_agent.agent.storage import atomic_files, record
from coda_agent.agent.storage.journal import Record, Snapshot
from coda_agent.agent.storage.kernel_files import RECORDINGS, consistent_files, files, recording_path
from coda_agent.primitives.compiler.lower import editable
from coda_agent.primitives.errors import Refused
from coda_agent.primitives.system.files import KERNELS, ROOT, SPECS, write_atomic
from coda_agent.primitives.system.subprocesses import output
from coda_agent.verifier.report import Accepted, Authorship, Rejected

# The fields of a run's header that a recording keeps. Other fields, such as paths, describe the machine.
HEADER = (
    *("run", "spec", "spec_hash", "provider", "attempts", "author", "model", "optimizes", "proposes"),
    *("measures_tip", "without_tips", "with_tips"),
)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, quota or file size limit


def recorded(journal: Record) -> str:
    """A run's recording as text. The text leaves out facts about the machine, and everything that the report
    contains."""
    header = {key: journal.header[key] for key in HEADER if key in journal.header}
    return journal.export(header, leaving_out={PIECE, STOPPED})


def export(run: str, path: Path) -> Path:
    """Write all events of a run to ``path``, with the run's header except ``directory``, a local path. The
    run may be in any state, and another process may be writing the run's journal. Raises JournalError and
    OSError."""
    journal = Snapshot(*record.glance(folder(run) / JOURNAL))
    header = {key: value for key, value in journal.header.items() if key != "directory"}
    write_atomic(path, journal.export(header))
    return path


def new_spec(run: Run) -> dict[Path, str]:
    """Return the spec's file and text if specs/ has no spec of this name yet, so that the kernel can be
    accepted with its spec. Raises Refused if specs/ has another spec of this name. Raises SpecError."""
    from coda_agent.verifier.loading import load

    path = SPECS / f"{run.spec.name}.yaml"
    if not path.exists():
        return {path: run.text}
    if load(path, check=False).hash != run.spec.hash:
        raise Refused(
            f"run {run.name} has a spec that differs from {path}, so the kernel's evidence would not fit; "
            "give one of the two specs another name, and generate the kernel for it"
        )
    return {}


def accept(
    outcome: Outcome,
    journal: Record,
    directory: Path = KERNELS,
    recordings: Path = RECORDINGS,
    *,
    looked: bool = False,
    spec: Mapping[Path, str] | None = None,
) -> list[Path]:
    """Write an accepted kernel's files and its run's recording: either all files or none. ``looked``: whether
    a person has read the kernel; if an author edited the code, this is required. ``spec``: the spec's file
    and text, if it must be written too. Raises Refused if the run's result is not an accepted kernel, or if
    writing fails."""
    report, kernel = outcome.report, outcome.kernel
    if "proposes" in journal.header:
        primitive = journal.header["spec"]
        raise Refused(
            f"{primitive} is a primitive, not a kernel; merge it: coda-agent primitive {primitive} --merge"
        )
    given = journal.header["run"]  # the name of this run; a replay's authorship names the recorded run
    if not isinstance(report, Accepted) or kernel is None:
        raise Refused(
            f"run {given} is {report.status}, not accepted: "
            "only a kernel measured on an H100 and found faster can be accepted"
        )
    name, edited = report.identity.spec, kernel.edited is not None
    if edited and not looked:
        raise Refused(
            f"{name}: this is edited CuTeDSL, which a person must read first: coda-agent review {given}; "
            f"then coda-agent accept {given} --looked"
        )
    lowered = kernel.lowered
    if lowered.hash != report.identity.lowered_hash or kernel.program.hash != report.identity.program_hash:
        raise Refused(
            f"{name}: program or lowered code differ from the measured ones (other versions?): measure again"
        )
    report = report.model_copy(update={"authorship": outcome.authorship})
    *paths, evidence = files(name, directory, edited=edited)
    run = recording_path(name, recordings, edited=edited)
    texts = (outcome.source, kernel.program.to_json(), lowered.text)
    # an edit is its own lowered text
    written = dict(spec or {}) | dict(zip(paths, texts, strict=not edited))
    # a replayed run already has its recording
    if not journal.header.get("replays"):
        written[run] = recorded(journal)
    written[evidence] = report.model_dump_json(indent=1) + "\n"
    try:
        atomic_files.put(directory, evidence.name, written)
    except OSError as error:
        place = error.filename or directory  # the error of a failed write does not name a file
        remedy = "free disk space" if error.errno in FULL else "make it writable"
        raise Refused(f"{place}: {error.strerror}; {remedy} and accept again") from None
    return [*(spec or ()), *paths, evidence, run]


def changes(outcome: Outcome, directory: Path = KERNELS) -> str:
    """A unified diff from the spec's accepted kernel to this outcome's kernel. The diff is empty if the spec
    has no accepted kernel, or if nothing changed. An interrupted acceptance is completed first."""
    if isinstance(outcome.report, Rejected):
        return ""
    kernel = outcome.kernel
    assert kernel is not None  # only a rejected outcome can lack a kernel
    edited = kernel.edited is not None
    if edited and kernel.lowered.hash != outcome.report.identity.lowered_hash:
        return ""  # the source consists of a primitive's functions, not of a program's code
    name = outcome.report.identity.spec
    path, *_ = files(name, directory, edited=edited)
    try:
        with consistent_files(name, directory, edited=edited):
            before = path.read_text(encoding="utf-8")
    except OSError:
        if not edited:
            return ""
        before = editable(kernel.program)  # the code that the edit started from
    old, new = (text.splitlines(keepends=True) for text in (before, outcome.source))
    return "".join(unified_diff(old, new, fromfile=path.name, tofile=f"run {outcome.authorship.run}"))


def message(report: Accepted, authorship: Authorship) -> str:
    """The commit message, which names the accepted kernel and its author, and lists the measurements."""
    lines = [
        f"Accept {report.identity.spec}" + (", raw CuTeDSL" if report.identity.raw else ""),
        "",
        f"Author: {authorship.author}, {authorship.attempts} attempt(s), run {authorship.run}",
        f"Device: {report.conditions.get('gpu', 'unknown')}, {report.date}",
        "",
    ]
    for t in report.timings:
        ratios = ", ".join(
            f"{r.estimate:.3f}x {arm} [{r.low:.3f}, {r.high:.3f}]" for arm, r in t.ratios.items()
        )
        lines.append(f"{t.case}: {t.milliseconds['candidate']:.3f} ms; {ratios}")
    return "\n".join(lines) + "\n"


def commit(paths: list[Path], words: str) -> str:
    """Commit exactly these files; return the commit's hash. Raises Refused with git's message."""
    names = [str(p) for p in paths]
    _git("add", "--", *names)
    if not _git("diff", "--cached", "--name-only", "--", *names):
        return _git("rev-parse", "--short", "HEAD").strip()  # an earlier commit contains these files
    _git("commit", "--quiet", "-m", words, "--", *names)
    return _git("rev-parse", "--short", "HEAD").strip()


def _git(*arguments: str) -> str:
    try:
        return output("git", "-C", str(ROOT), *arguments)
    except FileNotFoundError:
        raise Refused("git is not installed: the files are written, commit them yourself") from None
    except subprocess.CalledProcessError as error:
        raise Refused(
            f"git {arguments[0]} failed: {(error.stderr or error.stdout).strip()}; "
            "the files are written, commit them yourself"
        ) from None
