"""Accepting a kernel: the written files, the runs that are refused, full disks, killed processes, and the git
commit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from authoring import (
    TOY_KERNEL,
    TWICE,
    accepted_run,
    make_run,
    program_of,
    slow,
)
from checkout import ROOT
from small_disk import mounted

from coda_agent.agent import arguments as typed
from coda_agent.agent.artifacts import accept as accepting
from coda_agent.agent.artifacts.accept import accept
from coda_agent.agent.reporting import table
from coda_agent.agent.run import runs
from coda_agent.agent.run.loop import Outcome, result_of
from coda_agent.agent.storage import kernel_files
from coda_agent.agent.storage.journal import JournalError, read_export
from coda_agent.comparison.kernels import written
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.errors import Refused
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Accepted
from coda_agent.verifier.spec.model import Spec

pytestmark = [pytest.mark.usefixtures("runs_home"), pytest.mark.slow]
NAMES = ["toy.py", "toy.program.json", "toy.cutedsl.py", "toy.report.json", "toy.jsonl"]


def outcome_of(name: str) -> Outcome:
    run = runs.reopen(name)
    with run.journal:
        outcome = result_of(run.journal, run.spec)
    assert outcome is not None
    return outcome


def put(name: str, directory: Path, recordings: Path | None = None) -> list[Path]:
    """Accept the run's kernel into ``directory``; return the paths of the written files."""
    outcome = outcome_of(name)
    run = runs.reopen(name)
    with run.journal:
        return accept(outcome, run.journal, directory, recordings or directory)


def runs_spec(name: str) -> Spec:
    run = runs.reopen(name)
    run.journal.close()
    return run.spec


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def test_four_files_and_a_recording(spec: Path, tmp_path: Path) -> None:
    name = accepted_run(spec)
    program = program_of(runs_spec(name), TOY_KERNEL)
    paths = put(name, tmp_path / "kernels", tmp_path / "recordings")
    assert [p.name for p in paths] == NAMES and all(p.is_file() for p in paths)
    source, text, cutedsl, evidence, recording = paths
    assert source.read_text() == TOY_KERNEL
    assert text.read_text() == program.to_json()
    assert cutedsl.read_text() == lower(program).text
    report = Accepted.model_validate_json(evidence.read_text())
    assert (
        report.identity.program_hash == program.hash and report.identity.lowered_hash == lower(program).hash
    )
    assert report.identity.spec_hash == runs_spec(name).hash
    assert report.authorship is not None
    assert report.authorship.model_dump() == {"author": "Ada via handoff", "attempts": 1, "run": name}
    assert recording.parent == tmp_path / "recordings"
    _, events = read_export(recording)
    assert [e.kind for e in events] == ["prompt", "answer", "report", "measurement"]


def test_a_recording_says_nothing_of_the_machine(spec: Path, tmp_path: Path) -> None:
    name = accepted_run(spec)
    recording = put(name, tmp_path / "kernels")[-1]
    header, _ = read_export(recording)
    assert list(header) == ["run", "spec", "spec_hash", "provider", "attempts", "author", "model"]
    assert header["run"] == name and header["author"] == "Ada"
    assert not any(word in recording.read_text() for word in ("/home", "secret project", str(tmp_path)))


def test_a_replay_is_put_down_to_the_run_that_it_replays(spec: Path, tmp_path: Path) -> None:
    first = accepted_run(spec)
    put(first, tmp_path / "kernels")
    before = contents(tmp_path / "kernels")
    put(accepted_run(spec, replays=first), tmp_path / "kernels")
    after = contents(tmp_path / "kernels")
    assert after["toy.jsonl"] == before["toy.jsonl"]
    assert json.loads(after["toy.report.json"])["authorship"]["run"] == first


def test_again_gives_the_same_bytes(spec: Path, tmp_path: Path) -> None:
    name = accepted_run(spec)
    put(name, tmp_path / "kernels")
    first = contents(tmp_path / "kernels")
    put(name, tmp_path / "kernels")
    assert contents(tmp_path / "kernels") == first and sorted(first) == sorted(NAMES)


def test_only_what_is_accepted(spec: Path, tmp_path: Path) -> None:
    unmeasured = make_run(spec)
    rejected = make_run(spec, found=slow(runs_spec(unmeasured)))
    for name, status in ((unmeasured, "checked"), (rejected, "rejected")):
        with pytest.raises(Refused, match=f"run {name} is {status}, not accepted"):
            put(name, tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("field", ["lowered_hash", "program_hash"])
def test_evidence_for_another_text(spec: Path, tmp_path: Path, field: str) -> None:
    name = accepted_run(spec)
    outcome = outcome_of(name)
    assert isinstance(outcome.report, Accepted)
    other = outcome.report.model_copy(
        update={"identity": outcome.report.identity.model_copy(update={field: "0" * 64})}
    )
    changed = Outcome(other, outcome.source, outcome.kernel, outcome.authorship, outcome.usage)
    run = runs.reopen(name)
    with (
        run.journal,
        pytest.raises(Refused, match="toy: program or lowered code differ from the measured ones"),
    ):
        accept(changed, run.journal, tmp_path / "kernels", tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


# An acceptance writes all files of a kernel or none. The report is the evidence for the other files, so it
# must never be in the folder without these files.


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("writes", range(6))
def test_a_disk_that_fills_up_leaves_the_kernel_before(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """If the disk is full after ``writes`` files are written, the older kernel's files stay unchanged."""
    put(accepted_run(spec, TWICE), tmp_path / "kernels")
    before = contents(tmp_path / "kernels")
    name, done = accepted_run(spec), iter(range(100))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_mode & 0o40000 == 0 and next(done) >= writes:
            raise FULL
        real(descriptor)

    run = runs.reopen(name)
    outcome = result_of(run.journal, run.spec)
    assert outcome is not None
    with run.journal, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises((Refused, JournalError), match=f"{tmp_path}.*: No space left on device"):
            accept(outcome, run.journal, tmp_path / "kernels", tmp_path / "kernels")
    assert contents(tmp_path / "kernels") == before
    assert len(list((tmp_path / "kernels").iterdir())) == len(before)  # no temporary file is left
    put(name, tmp_path / "kernels")
    assert contents(tmp_path / "kernels")["toy.py"].decode() == TOY_KERNEL


def test_an_acceptance_that_is_interrupted_leaves_nothing(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, real, done = accepted_run(spec), os.fsync, iter(range(5))

    def fsync(descriptor: int) -> None:
        if next(done) == 4:
            raise KeyboardInterrupt
        real(descriptor)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", fsync)
        put(name, tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_place_that_cannot_be_written_says_so(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("no folder")
    with pytest.raises(Refused, match="kernels: File exists; make it writable and accept again"):
        put(accepted_run(spec), tmp_path / "kernels")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the path of a 32 KB file system if this user may mount one, otherwise the path of an ordinary
    directory."""
    with mounted(tmp_path / "disk", 32 << 10) as disk:
        yield disk


def test_a_disk_that_is_full(spec: Path, small_disk: Path) -> None:
    """On a full disk the command leaves no report and prints one error. If this user may mount a small disk,
    the test fills that disk. Otherwise a limit on file sizes makes the writes fail."""
    name = accepted_run(spec)
    (small_disk / "ballast").write_bytes(b"x" * 28_000 if os.path.ismount(small_disk) else b"")
    limit = "" if os.path.ismount(small_disk) else "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    code = f"""
import resource, sys
from pathlib import Path
from coda_agent.agent.artifacts import accept; from coda_agent.agent.cli import main as cli
{limit}
accept.accept.__defaults__ = (Path({str(small_disk)!r}), Path({str(small_disk)!r}))
sys.argv = ["coda-agent", "accept", {name!r}]
cli.main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 3) and done.stdout == "", done.stderr
    assert "Traceback" not in done.stderr
    assert f"coda-agent: {small_disk}" in done.stderr
    assert (
        ": No space left on device; free disk space" in done.stderr or ": File too large; free" in done.stderr
    )
    left = contents(small_disk)
    assert "toy.report.json" not in left and not [n for n in left if n.endswith(".tmp")]


# This program starts one process after another. Each process accepts the run's kernel into a fresh copy of
# the old kernel's files. Each process is killed one file system operation later than the previous process,
# until a process ends normally. After each process, another process reads the kernel. The program prints the
# files before and after this read.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from coda_agent.agent.artifacts import accept; from coda_agent.agent.run import runs
from coda_agent.agent.run.loop import result_of

name, before, here = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
STEPS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")
outcome = result_of(*runs.look(name))
journal = runs.reopen(name).journal

def killed_at(limit):
    steps = iter(range(limit))
    def step(event, arguments):
        if event in STEPS and str(here) in str(arguments[0]) and next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
    return step

def contents():
    return {p.name: p.read_text() for p in here.iterdir() if p.is_file()}

def in_a_process(act):
    child = os.fork()
    if not child:
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def accepts(limit):
    sys.addaudithook(killed_at(limit))
    accept.accept(outcome, journal, here, here)

limit, status = 0, -signal.SIGKILL
while status:
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(before, here)
    status = in_a_process(lambda: accepts(limit))
    left, limit = contents(), limit + 1
    looked = in_a_process(lambda: accept.changes(outcome, here))
    print(json.dumps({"status": status, "looked": looked, "left": left, "then": contents(),
                      "folders": [p.name for p in here.iterdir() if p.is_dir()]}))
"""


def test_an_acceptance_killed_at_each_step_is_none_or_is_ended_by_the_next_look(
    spec: Path, tmp_path: Path
) -> None:
    put(accepted_run(spec, TWICE), tmp_path / "before")
    name = accepted_run(spec)
    put(name, tmp_path / "after")
    old, new = ({n: c.decode() for n, c in contents(tmp_path / d).items()} for d in ("before", "after"))
    command = [sys.executable, "-c", KILLED, name, str(tmp_path / "before"), str(tmp_path / "here")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["status"] for f in found] == [-signal.SIGKILL] * (len(found) - 1) + [0] and len(found) > 30
    assert not any(f["looked"] or f["folders"] for f in found)
    evidence = "toy.report.json"
    # Even right after a kill, a folder with a report holds exactly the old files or exactly the new files.
    for left in (f["left"] for f in found):
        assert evidence not in left or {n: left.get(n) for n in NAMES} in (old, new)
    ends = [f["then"] for f in found]
    decided = ends.index(new)
    assert ends == [old] * decided + [new] * (len(ends) - decided)
    # at least one read completed an acceptance that was killed
    assert any(f["left"] != f["then"] == new for f in found)


def test_an_acceptance_that_was_cut_off_is_ended_by_the_next(spec: Path, tmp_path: Path) -> None:
    """An acceptance that was cut off has left its files in a separate folder. The next read moves these files
    to their final paths. Afterwards another run's kernel can be accepted."""
    kernels = tmp_path / "kernels"
    put(accepted_run(spec, TWICE), tmp_path / "staged")
    names = [n for n in NAMES if n != "toy.report.json"] + ["toy.report.json"]
    whole = kernels / ".toy.report.json.whole"
    whole.mkdir(parents=True)
    for number, file in enumerate(names):
        (tmp_path / "staged" / file).rename(whole / str(number))
    (whole / "places.json").write_text(json.dumps(names))
    twice = (whole / "0").read_text()
    assert kernel_files.read(runs_spec(accepted_run(spec)), kernels) is not None
    assert (kernels / "toy.py").read_text() == twice == TWICE and not whole.exists()
    put(accepted_run(spec), kernels)
    assert (kernels / "toy.py").read_text() == TOY_KERNEL and len(list(kernels.iterdir())) == len(NAMES)


def test_the_tables_are_of_the_kernel_whose_acceptance_was_cut_off(spec: Path, tmp_path: Path) -> None:
    kernels, whole = tmp_path / "kernels", tmp_path / "kernels" / ".toy.report.json.whole"
    put(accepted_run(spec), kernels)
    whole.mkdir()
    (kernels / "toy.report.json").rename(whole / "0")
    (whole / "places.json").write_text('["toy.report.json"]')
    assert [r.identity.spec for r in table.read(kernels, kernels).reports] == ["toy"]
    assert not whole.exists() and table.read(tmp_path / "none", kernels).reports == ()


def cut_off(kernels: Path) -> Path:
    """Move three files of the kernel in ``kernels`` into a separate folder, as if the kernel's acceptance was
    cut off before it moved these files to their final paths. Return the separate folder."""
    names, whole = ["toy.py", "toy.program.json", "toy.report.json"], kernels / ".toy.report.json.whole"
    whole.mkdir()
    for number, file in enumerate(names):
        (kernels / file).rename(whole / str(number))
    (whole / "places.json").write_text(json.dumps(names))
    return whole


def test_whoever_reads_a_kernel_ends_an_acceptance_that_was_cut_off(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    put(accepted_run(spec), kernels)
    monkeypatch.setattr("coda_agent.agent.storage.kernel_files.KERNELS", kernels)
    program = program_of(load(spec, check=False), TOY_KERNEL)
    readers: list[Callable[[], object]] = [
        lambda: written(load(spec, check=False)).hash == program.hash,
        lambda: typed.kernel_source(kernels / "toy.py") == TOY_KERNEL,
        lambda: kernel_files.is_there("toy"),
    ]
    for reader in readers:
        whole = cut_off(kernels)
        assert reader() and not whole.exists()


# This program accepts two runs in turn until it is killed.
ACCEPTING = """
import itertools, sys
from pathlib import Path
from coda_agent.agent.artifacts import accept; from coda_agent.agent.run import runs
from coda_agent.agent.run.loop import result_of

here = Path(sys.argv[3])
opened = [runs.reopen(name) for name in sys.argv[1:3]]
found = [(result_of(run.journal, run.spec), run.journal) for run in opened]
for outcome, journal in itertools.cycle(found):
    accept.accept(outcome, journal, here, here)
"""


def test_a_kernel_is_read_whole_while_others_accept(spec: Path, tmp_path: Path) -> None:
    """While another process accepts two kernels in turn, a reader always finds all files, and all files come
    from the same acceptance."""
    first, second = accepted_run(spec), accepted_run(spec, TWICE)
    put(first, tmp_path)
    loaded = load(spec, check=False)
    command = [sys.executable, "-c", ACCEPTING, first, second, str(tmp_path)]
    seen: set[str] = set()
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while len(seen) < 2:
                assert process.poll() is None
                seen.add(read_once(loaded, tmp_path))
            for _ in range(300):
                read_once(loaded, tmp_path)
        finally:
            process.kill()


def read_once(spec: Spec, kernels: Path) -> str:
    found = kernel_files.read(spec, kernels)
    assert found is not None
    assert found.kernel.program.hash == found.report.identity.program_hash
    return found.kernel.program.hash


def test_a_folder_that_is_a_link(spec: Path, tmp_path: Path) -> None:
    """The folder of kernels is a link. The recording goes to the given folder of recordings, although the
    link's target also has a folder of that name beside it."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "kernels").symlink_to(tmp_path / "far" / "away")
    paths = put(accepted_run(spec), tmp_path / "kernels", tmp_path / "recordings")
    assert all(path.is_file() for path in paths)
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["away"]


# the commit


def test_what_a_kernel_changes(spec: Path, tmp_path: Path) -> None:
    first, second = accepted_run(spec), accepted_run(spec, TWICE)
    assert accepting.changes(outcome_of(first), tmp_path) == ""  # no kernel is there yet
    put(first, tmp_path)
    assert accepting.changes(outcome_of(first), tmp_path) == ""
    changes = accepting.changes(outcome_of(second), tmp_path).splitlines()
    assert changes[:2] == ["--- toy.py", f"+++ run {second}"]
    removed, added = (line for line in changes[2:] if line[0] in "+-")
    assert removed == '-    return {"c": gemm(a, b) * per_row(v)}'
    assert added == '+    return {"c": 2 * gemm(a, b) * per_row(v)}'
    assert accepting.changes(outcome_of(make_run(spec, TWICE, slow(runs_spec(first)))), tmp_path) == ""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a git repository in which someone has edited one file and staged another file."""
    root = tmp_path / "repository"
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Reviewer")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "reviewer@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root.mkdir()
    git(root, "init", "--quiet")
    (root / "README.md").write_text("hello\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    (root / "README.md").write_text("hello, half edited\n")
    (root / "other.txt").write_text("staged by someone\n")
    git(root, "add", "other.txt")
    monkeypatch.setattr(accepting, "ROOT", root)
    return root


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def committed(spec: Path, root: Path) -> str:
    name = accepted_run(spec)
    outcome = outcome_of(name)
    paths = put(name, root / "generated_kernels", root / "agent" / "recordings")
    assert isinstance(outcome.report, Accepted)
    return accepting.commit(paths, accepting.message(outcome.report, outcome.authorship))


def test_the_commit_holds_exactly_the_files(spec: Path, repository: Path) -> None:
    commit = committed(spec, repository)
    assert git(repository, "rev-parse", "--short", "HEAD").strip() == commit
    shown = git(repository, "show", "--format=", "--name-only", "HEAD").split()
    assert shown == sorted([*(f"generated_kernels/{n}" for n in NAMES[:4]), "agent/recordings/toy.jsonl"])
    status = git(repository, "status", "--porcelain").splitlines()
    assert sorted(status) == [" M README.md", "A  other.txt"]


def test_the_message_has_figures_and_author(spec: Path, repository: Path) -> None:
    committed(spec, repository)
    subject, _, body = git(repository, "log", "-1", "--format=%B").partition("\n")
    assert subject == "Accept toy"
    assert "Author: Ada via handoff, 1 attempt(s), run toy-" in body
    assert "Device: NVIDIA H100 80GB HBM3, 2026-11-20T12:00:00+00:00" in body
    matmuls = "0.950x cuBLAS matmul [0.913, 0.988], 0.950x QuACK matmul [0.913, 0.988]"
    ratios = f"1.300x torch.compile [1.250, 1.352], {matmuls}"
    assert f"large: 2.000 ms; {ratios}\nwide: 2.000 ms; {ratios}\n" in body


def test_git_that_refuses_is_quoted(spec: Path, repository: Path) -> None:
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'the house says no' >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(Refused, match="git commit failed: the house says no; .*commit them yourself"):
        committed(spec, repository)


def test_nothing_new_to_commit(spec: Path, repository: Path) -> None:
    name = accepted_run(spec)
    paths = put(name, repository / "generated_kernels", repository / "agent" / "recordings")
    first = accepting.commit(paths, "first")
    assert accepting.commit(paths, "again") == first  # files that are already committed are no error


def test_no_repository(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(accepting, "ROOT", tmp_path / "plain")
    with pytest.raises(Refused, match="git add failed: .*not a git repository"):
        committed(spec, tmp_path / "plain")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="git is not installed"):
        committed(spec, tmp_path / "plain")


def test_the_command_in_a_repository(spec: Path, repository: Path) -> None:
    """Run the real command in a copy of the checkout, so that it writes and commits kernels and recordings in
    the copy. Without pyproject.toml, as in an installed package, the command accepts no kernel."""
    shutil.copy(ROOT / "__init__.py", repository)
    (repository / "src").mkdir()
    (repository / "src" / "coda_agent").symlink_to("..")
    for package in ("agent", "comparison", "fused", "primitives", "verifier"):
        shutil.copytree(ROOT / package, repository / package, ignore=shutil.ignore_patterns("__pycache__"))
    name = accepted_run(spec, author="Ada [/x]")
    command = [sys.executable, "-m", "coda_agent.agent.cli.main", "accept", name, "--commit"]
    environment = os.environ | {"PYTHONPATH": str(repository / "src")}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, text=True, check=False
        )

    assert run().returncode == 3 and not (repository / "generated_kernels" / NAMES[0]).exists()
    shutil.copy(ROOT / "pyproject.toml", repository)
    done = run()
    assert done.returncode == 0, done.stderr
    *paths, last = done.stdout.splitlines()
    written = [*(f"generated_kernels/{n}" for n in NAMES[:4]), "agent/recordings/toy.jsonl"]
    assert paths == ["specs/toy.yaml", *written]
    assert (repository / paths[0]).read_text() == spec.read_text()
    assert all((repository / path).is_file() for path in paths)
    assert last == f"committed {git(repository, 'rev-parse', '--short', 'HEAD').strip()}"
    report = json.loads((repository / "generated_kernels" / "toy.report.json").read_text())
    assert report["authorship"]["author"] == "Ada [/x] via handoff"
    assert run().stdout.splitlines()[:-1] == written  # the spec is there now
    other = spec.read_text().replace("speedup: 1.1", "speedup: 0.5")
    (repository / "specs" / "toy.yaml").write_text(other)
    refused = run()
    assert refused.returncode != 0 and "a spec that differs from" in refused.stderr
