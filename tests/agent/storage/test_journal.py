"""The journal under kills, full disks, second openers and damage, with real processes and real files."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT

from coda_agent.agent.storage.journal import Event, Journal, JournalError, glance, is_open, read_export
from coda_agent.primitives.system.files import write_atomic

# This program is a run of `steps` steps. The program notes each token that a step produces in the file
# "produced", and each token that `once` returns in the file "given". A note is one write(2), so that a later
# SIGKILL cannot undo the note. `kill` names the point at which the process kills itself.
RUN = """
import functools, os, signal, sqlite3, sys, uuid
from pathlib import Path
from coda_agent.agent.storage.journal import Journal

directory, steps, kill = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def note(name, text):
    descriptor = os.open(directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{text}\\n".encode())
    os.close(descriptor)

def reached(point):
    if point == kill:
        os.kill(os.getpid(), signal.SIGKILL)

class Connection(sqlite3.Connection):
    def executescript(self, script):
        super().executescript(script)
        reached("create")

sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)
path = directory / "run.db"
journal = Journal.open(path) if path.exists() else Journal.create(path, {"spec": "s"})
for step in range(steps):
    def produce():
        token = uuid.uuid4().hex
        note("produced", f"{step} {token}")
        reached(f"produced {step}")
        return {"token": token, "text": "x" * 3000}

    reached(f"between {step}")
    payload = journal.once(f"step/{step}", "answer", produce)
    note("given", f"{step} {payload['token']}")
    reached(f"given {step}")
"""


def start(directory: Path, steps: int, kill: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(directory), str(steps), kill], cwd=ROOT)


def noted(directory: Path, name: str) -> list[list[str]]:
    path = directory / name
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def check_finished(directory: Path, steps: int) -> None:
    """Check that `once` returned the same token every time for a step, and that the journal holds this
    token."""
    first: dict[str, str] = {}
    for step, token in noted(directory, "given"):
        assert first.setdefault(step, token) == token, f"step {step} was given back twice, differently"
    with Journal.open(directory / "run.db") as journal:
        events = journal.events()
    assert [e.key for e in events] == [f"step/{i}" for i in range(steps)]
    assert {e.key[5:]: e.payload["token"] for e in events} == first
    produced = noted(directory, "produced")
    # No step is produced again after its commit. So the journal holds the token that was produced last.
    for step, token in first.items():
        assert [t for s, t in produced if s == step][-1] == token


def test_a_kill_at_each_boundary_loses_and_repeats_nothing(tmp_path: Path) -> None:
    steps = range(3)
    points = ["create", *(f"{point} {step}" for step in steps for point in ("between", "produced", "given"))]
    for point in points:
        assert start(tmp_path, len(steps), point).wait() == -signal.SIGKILL, point
        given = [step for step, _ in noted(tmp_path, "given")]
        with_step = int(point[-1]) + point.startswith("given") if point != "create" else 0
        assert sorted(set(given)) == [str(step) for step in range(with_step)], point
    assert start(tmp_path, len(steps)).wait() == 0
    # Each step is produced twice: by the process that is killed before the commit, and by the next process.
    # The kills at all other points repeat no step.
    assert [step for step, _ in noted(tmp_path, "produced")] == [str(step) for step in steps for _ in "12"]
    check_finished(tmp_path, len(steps))


def test_kills_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(20261120)
    for _ in range(12):
        before = len(noted(tmp_path, "produced"))
        child = start(tmp_path, 1_000_000)  # more steps than the process lives for
        while child.poll() is None and len(noted(tmp_path, "produced")) == before:
            time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.002))  # the kill may then interrupt a commit
        child.kill()
        assert child.wait() == -signal.SIGKILL
    with Journal.open(tmp_path / "run.db") as journal:
        steps = len(journal.events()) + 1
    assert start(tmp_path, steps).wait() == 0
    check_finished(tmp_path, steps)


def test_a_step_is_produced_once_and_comes_back_as_json(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run.db", {"spec": "gemm", "seed": 3}) as journal:
        first = journal.once("a", "prompt", lambda: {"pair": (1, 2), "text": "größer \u2028 \U0001f9ee"})
        again = journal.once("a", "prompt", lambda: pytest.fail("produced twice"))
    assert first == again == {"pair": [1, 2], "text": "größer \u2028 \U0001f9ee"}
    with Journal.open(tmp_path / "run.db") as journal:
        assert journal.header == {"spec": "gemm", "seed": 3}
        assert journal.once("a", "prompt", lambda: pytest.fail("produced twice")) == first
        (event,) = journal.events()
    assert (event.seq, event.key, event.kind) == (1, "a", "prompt")
    assert event.time.endswith("+00:00")


def test_a_step_that_fails_records_nothing(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run.db", {}) as journal:
        with pytest.raises(ZeroDivisionError):
            journal.once("a", "answer", lambda: {"x": 1 // 0})
        with pytest.raises(TypeError):
            journal.once("a", "answer", lambda: {"x": object()})
        assert journal.events() == []
        assert journal.once("a", "answer", lambda: {"x": 1}) == {"x": 1}
        with pytest.raises(ValueError, match="'a' is recorded as 'answer', not 'report'"):
            journal.once("a", "report", lambda: {})


def test_commits_are_durable(tmp_path: Path) -> None:
    """The journal uses a write-ahead log, and every commit is on disk before the call returns."""
    with Journal.create(tmp_path / "run.db", {}) as journal:
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert not journal._db.in_transaction


# one writer


def test_a_second_opener_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    code = f"""
from coda_agent.agent.storage.journal import Journal
from pathlib import Path
journal = Journal.create(Path({str(path)!r}), {{}})
print("open", flush=True)
input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"open\n"
        with pytest.raises(
            JournalError, match="run.db is in use by another process; wait for it, or stop it"
        ):
            Journal.open(path)
        with pytest.raises(JournalError, match="in use"):
            Journal.create(path, {})
        assert is_open(path)
        child.kill()
    assert not is_open(path)
    Journal.open(path).close()


def test_asking_who_has_a_journal_takes_it_from_nobody(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    assert not is_open(path) and list(tmp_path.iterdir()) == []
    Journal.create(path, {}).close()
    code = f"""
from coda_agent.agent.storage.journal import is_open
from pathlib import Path
print("asking", flush=True)
while True:
    is_open(Path({str(path)!r}))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout and child.stdout.readline() == b"asking\n"
            for _ in range(50):
                Journal.open(path).close()
        finally:
            child.kill()
    with (tmp_path / "run.db.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as if a process called is_open right now
        assert not is_open(path)


def test_close_gives_the_journal_free_and_so_does_a_failed_open(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    journal = Journal.create(path, {})
    with pytest.raises(JournalError, match="in use"):
        Journal.open(path)
    journal.close()
    journal.close()
    content = path.read_bytes()
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(JournalError):
        Journal.open(path)
    path.write_bytes(content)
    Journal.open(path).close()


# files that are not journals


def test_create_refuses_an_existing_run(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run.db", {"a": 1}).close()
    with pytest.raises(JournalError, match="run.db: this run already exists; resume it"):
        Journal.create(tmp_path / "run.db", {"a": 2})
    with Journal.open(tmp_path / "run.db") as journal:
        assert journal.header == {"a": 1}


def test_create_refuses_another_journals_log(tmp_path: Path) -> None:
    (tmp_path / "run.db-wal").write_bytes(b"of a run whose main file was removed")
    with pytest.raises(JournalError, match="run.db-wal: left over"):
        Journal.create(tmp_path / "run.db", {})


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="run.db: no journal here"):
        Journal.open(tmp_path / "run.db")
    assert list(tmp_path.iterdir()) == []


def test_create_makes_directories_or_says_why_not(tmp_path: Path) -> None:
    Journal.create(tmp_path / "a" / "b" / "run.db", {}).close()
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="choose a writable directory"):
        Journal.create(tmp_path / "file" / "run.db", {})


def filled(path: Path) -> bytes:
    with Journal.create(path, {}) as journal:
        for i in range(20):
            journal.once(str(i), "answer", lambda: {"text": "x" * 2000})
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9])
def test_a_truncated_journal(tmp_path: Path, share: float) -> None:
    path = tmp_path / "run.db"
    content = filled(path)
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(JournalError, match="run.db"):
        Journal.open(path)


def test_garbage(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    path.write_bytes(random.Random(1).randbytes(20_000))
    with pytest.raises(JournalError, match="file is not a database; restore it"):
        Journal.open(path)


@pytest.mark.parametrize("damage", [b"\xff", b"\x00"])
def test_a_damaged_page(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "run.db"
    content = filled(path)
    for page in range(1, len(content) // 4096):
        start = page * 4096
        path.write_bytes(content[:start] + damage * 4096 + content[start + 4096 :])
        with pytest.raises(JournalError, match=r"run.db: .*restore it"):
            Journal.open(path)


def test_another_programs_database_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(JournalError, match="not a journal of coda-agent"):
        Journal.open(path)
    assert path.read_bytes() == content


def test_another_schema(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run.db", {}).close()
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(JournalError, match="schema 2, but this version reads 1"):
        Journal.open(tmp_path / "run.db")


# reading on a disk that cannot be written


def cut_off(path: Path) -> None:
    """Make a journal with one event, and kill its process. The event is then only in the write-ahead log.
    Remove the journal's index file."""
    code = f"""
import os, signal
from coda_agent.agent.storage.journal import Journal
from pathlib import Path
journal = Journal.create(Path({str(path)!r}), {{"spec": "s"}})
journal.once("a", "answer", lambda: {{"text": "kept"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    path.with_name(path.name + "-shm").unlink()


def no_index(path: Path) -> None:
    """In place of the journal's index file, make a link that points to itself. Nobody can open such a link,
    not even root."""
    path.with_name(path.name + "-shm").symlink_to(path.name + "-shm")


def test_a_journal_is_read_where_no_index_can_be_made(tmp_path: Path) -> None:
    ended, killed = tmp_path / "ended.db", tmp_path / "killed.db"
    with Journal.create(ended, {"spec": "s"}) as journal:
        journal.once("a", "answer", lambda: {"text": "kept"})
        journal.once("b", "answer", dict)
    cut_off(killed)
    for path in (ended, killed):
        no_index(path)
        with pytest.raises(sqlite3.OperationalError):
            sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True).execute("SELECT * FROM events")
        before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
        header, (event, *more) = glance(path)
        assert header == {"spec": "s"} and event.payload == {"text": "kept"}
        assert glance(path, event.seq) == (header, more)
        assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_a_full_disk_writes_nothing_of_the_step(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run.db", {}) as journal:
        journal.once("small", "answer", lambda: {"text": "kept"})
        journal._db.execute("PRAGMA max_page_count = 12")  # SQLite then fails as on a full disk
        with pytest.raises(JournalError, match="run.db: database or disk is full; free space"):
            journal.once("large", "answer", lambda: {"text": "x" * 100_000})
        assert [event.key for event in journal.events()] == ["small"]
    with Journal.open(tmp_path / "run.db") as journal:
        assert len(journal.once("large", "answer", lambda: {"text": "x" * 100_000})["text"]) == 100_000
        assert [event.key for event in journal.events()] == ["small", "large"]


def test_a_write_that_the_system_breaks_off(tmp_path: Path) -> None:
    """In the middle of a commit, the operating system does not let the write-ahead log grow. The journal
    keeps all earlier events."""
    path = tmp_path / "run.db"
    Journal.create(path, {}).close()
    code = f"""
import resource
from coda_agent.agent.storage.journal import Journal, JournalError
from pathlib import Path
journal = Journal.open(Path({str(path)!r}))
journal.once("small", "answer", lambda: {{"text": "kept"}})
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    journal.once("large", "answer", lambda: {{"text": "x" * 100_000}})
except JournalError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "run.db" in done.stdout and "committed steps are safe" in done.stdout
    with Journal.open(path) as journal:
        assert [event.key for event in journal.events()] == ["small"]


def test_what_can_be_read_nowhere_says_why(tmp_path: Path) -> None:
    """In the child process, no file can grow, as on a full disk. The child process can read a journal that
    was closed. The child cannot read the journal of a killed process, and the error says why."""
    ended, killed = tmp_path / "ended.db", tmp_path / "killed.db"
    Journal.create(ended, {"spec": "ended well"}).close()
    cut_off(killed)
    code = f"""
import resource
from coda_agent.agent.storage.journal import JournalError, glance
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(glance(Path({str(ended)!r})))
try:
    glance(Path({str(killed)!r}))
except JournalError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    environment = {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT / "src")}
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    read, refused = done.stdout.splitlines()
    assert "ended well" in read
    assert refused.startswith(f"{killed}: cannot be read in place (disk I/O error) or from a copy (")
    assert refused.endswith("free space on its disk, or set TMPDIR to a directory with free space")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [event.key for event in glance(killed)[1]] == ["a"]


def test_a_damaged_copy_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    cut_off(path)
    no_index(path)
    shutil.copyfile(path, tmp_path / "whole")
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096)
    with pytest.raises(JournalError, match=r"run.db: .*restore it"):
        glance(path)
    shutil.copyfile(tmp_path / "whole", path)
    assert len(glance(path)[1]) == 1


# export


def test_export_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    with Journal.create(tmp_path / "run.db", {"spec": "s"}) as journal:
        for i, kind in enumerate(("prompt", "answer", "report", "end")):
            journal.once(f"k{i}", kind, lambda i=i: {"i": i, "text": "two\nlines \u2028"})  # type: ignore[misc]
        out.write_text(journal.export())
        events = journal.events()
    assert read_export(out) == ({"spec": "s"}, events)
    assert len(out.read_text().split("\n")) == 1 + 4 + 1
    assert json.loads(out.read_text().split("\n")[0])["header"] == {"spec": "s"}


def test_write_atomic_replaces(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "ä\n")
    write_atomic(tmp_path / "f", "ö\n")
    assert (tmp_path / "f").read_bytes() == "ö\n".encode()


GOOD = '{"coda_agent_journal": 1, "header": {}}\n'
EVENT = '{"seq": 1, "key": "a", "kind": "answer", "payload": {}, "time": "2026-11-20T00:00:00+00:00"}\n'


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("", 1, "not a line of JSON"),
        ("{}", 1, "coda_agent_journal"),
        ('{"coda_agent_journal": 2, "header": {}}', 1, "schema 2"),
        (GOOD + EVENT + EVENT[:30], 3, "not a line of JSON"),
        (GOOD + "[]\n", 2, "needs an object"),
        (GOOD + "\n" + EVENT.replace('"seq"', '"nr"'), 3, "seq, key, kind"),
        (GOOD + EVENT.replace("1", '"1"', 1), 2, "'seq' must be int, not '1'"),
        (GOOD + EVENT.replace("{}", "[]"), 2, "'payload' must be dict"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, named: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(JournalError) as caught:
        read_export(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert named in str(caught.value)


def test_reading_a_good_export(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(GOOD + EVENT)
    assert read_export(path) == ({}, [Event(1, "a", "answer", {}, "2026-11-20T00:00:00+00:00")])
    path.write_bytes((GOOD + EVENT).encode() + b"\xff\xfe\n")
    with pytest.raises(JournalError, match="run.jsonl:3: not a line of JSON"):
        read_export(path)
