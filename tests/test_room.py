"""A journal on a disk without room: real small file systems, real kills, the real SDK."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_messages as fake
import pytest
from authoring import HEADER, ROOT, TOY_KERNEL, Notes, Scripted, fenced, write_toy
from fake_messages import FakeMessages
from small_disk import mounted

from coda_agent.agent import setup
from coda_agent.agent.providers import Question, Turn, make
from coda_agent.agent.run import runs
from coda_agent.agent.run.budget import spent
from coda_agent.agent.run.journal import Journal, JournalError
from coda_agent.agent.run.loop import Loop
from coda_agent.agent.run.room import BYTES, Room

FEW = 8 << 20  # bytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, where this user may mount one; else a directory."""
    with mounted(tmp_path / "disk", FEW) as disk:
        yield disk


def test_a_full_disk_writes_nothing_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal.create(path, {}) as journal:
        journal.once("small", "answer", lambda: {"text": "kept"})
        journal._db.execute("PRAGMA max_page_count = 12")  # SQLite then fails as on a full disk
        words = "run.db: database or disk is full; free space .* resume; .*; large is kept in run.db-room"
        with pytest.raises(JournalError, match=words):
            journal.once("large", "answer", lambda: {"text": "x" * 100_000})
        assert [event.key for event in journal.events()] == ["small"]
        with pytest.raises(JournalError, match="run.db: database or disk is full"):  # nor is more produced
            journal.once("next", "answer", never)
    assert (tmp_path / "run.db-room").exists()
    with Journal.open(path) as journal:
        assert journal.once("small", "answer", never) == {"text": "kept"}
        assert len(journal.once("large", "answer", never)["text"]) == 100_000
        assert [event.key for event in journal.events()] == ["small", "large"]
    assert [p.name for p in tmp_path.iterdir() if "room" in p.name] == []


def never() -> dict[str, Any]:
    raise AssertionError("it was asked for again")


# A process that asks for a long answer and is told more than its disk can take; then it kills itself.
ASKING = """
import os, signal, sys
from contextlib import suppress
from pathlib import Path
from coda_agent.agent.run.journal import Journal, JournalError

path = Path(sys.argv[1])
journal = Journal.open(path)

def produce():
    if not os.path.ismount(path.parent):
        journal._db.execute("PRAGMA max_page_count = 12")  # SQLite then fails as on a full disk
    else:
        with (path.parent / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
    return {"text": "paid " * 100_000}

try:
    journal.once("answer/1", "answer", produce)
except JournalError as error:
    print(error, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_disk_that_fills_up_between_request_and_answer(small_disk: Path) -> None:
    """A real one, where it can be had; the process is killed besides."""
    path = small_disk / "run.db"
    Journal.create(path, {}).close()
    command = [sys.executable, "-c", ASKING, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and "run.db: database or disk is full; free" in done.stdout
    assert "answer/1 is kept in run.db-room, and will not be asked for again" in done.stdout
    (small_disk / "filler").unlink(missing_ok=True)
    with Journal.open(path) as journal:
        assert journal.once("answer/1", "answer", never) == {"text": "paid " * 100_000}


def test_a_run_whose_disk_fills_up_during_an_answer_pays_once(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    """By the real SDK: the disk is full when the answer's text arrives, and the run goes on from it later."""
    if not os.path.ismount(small_disk):
        monkeypatch.setattr(Filling, "full", lambda self: self.journal._db.execute(FULL))
    monkeypatch.setenv("CODA_AGENT_RUNS", str(small_disk / "runs"))
    text = "thinking aloud " * 20_000 + fenced(TOY_KERNEL)
    run = runs.start(write_toy(tmp_path), HEADER | {"provider": "anthropic"})
    with FakeMessages(fake.answer(text)) as server:  # which has one answer to give

        def loop(run: runs.Run, watch: Notes) -> Loop:
            author = make("anthropic", api_key="sk-ant-secret", base_url=server.url)
            return Loop(run.journal, run.spec, setup.work_of(run), author, watch)

        with run.journal, pytest.raises(JournalError, match="answer/1 is kept in journal.db-room"):
            loop(run, Filling(journal=run.journal, disk=small_disk)).run()
        (small_disk / "filler").unlink(missing_ok=True)
        again = runs.reopen(run.name)
        with again.journal:
            outcome = loop(again, Notes()).run()
            assert spent(again.journal.events()).uncertain_tokens == 0
        assert outcome.report.status == "checked" and len(server.requests) == 1


FULL = "PRAGMA max_page_count = 12"  # SQLite then fails as on a full disk


@dataclass
class Filling(Notes):
    """A listener under whom the disk fills up as soon as text arrives."""

    journal: Journal = field(kw_only=True)
    disk: Path = field(kw_only=True)

    def text(self, words: str) -> None:
        self.full()

    def full(self) -> None:
        with (self.disk / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)


def test_an_interruption_on_a_full_disk_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_home: Path
) -> None:
    run = runs.start(write_toy(tmp_path), HEADER | {"provider": "anthropic"})

    class Interrupted(Scripted):
        def next_turn(self, question: Question) -> Turn:
            run.journal._db.execute(FULL)
            raise KeyboardInterrupt

    with run.journal, pytest.raises(KeyboardInterrupt):
        Loop(run.journal, run.spec, setup.work_of(run), Interrupted([]), Notes()).run()
    with runs.reopen(run.name).journal as journal:
        assert journal.events()[-1].payload == {"reason": "interrupted"}  # it was kept in the room


def test_nothing_is_asked_for_where_there_is_no_room(small_disk: Path) -> None:
    with Journal.create(small_disk / "run.db", {}) as journal:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if os.path.ismount(small_disk):
            (small_disk / "filler").write_bytes(b"x" * (FEW - (1 << 20)))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        words = (
            "run.db-room: (No space|File too large).*; free 4 MB on that disk and resume; nothing was asked"
        )
        with pytest.raises(JournalError, match=words):
            journal.once("answer/1", "answer", never)
        assert not (small_disk / "run.db-room").exists()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (small_disk / "filler").unlink(missing_ok=True)
        assert journal.once("answer/1", "answer", dict) == {}


def test_a_room_that_cannot_be_removed_keeps_no_journal_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that failed, and can only be read since."""

    def fails(room: Room) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    journal = Journal.create(tmp_path / "run.db", {})
    journal.once("answer/1", "answer", dict)
    with monkeypatch.context() as patch:
        patch.setattr(Room, "give_back", fails)
        journal.close()
    Journal.open(tmp_path / "run.db").close()
    assert not (tmp_path / "run.db-room").exists()


def test_an_event_that_was_half_kept_is_none(tmp_path: Path) -> None:
    room = Room(tmp_path / "room")
    room.take()
    assert room.kept() is None and room.path.stat().st_blocks * 512 >= BYTES
    room.keep('["ä"]')
    assert room.kept() == '["ä"]' and room.path.stat().st_size == BYTES
    content = bytearray(room.path.read_bytes())
    content[content.index(b"\n") + 3] ^= 1
    room.path.write_bytes(content)
    assert room.kept() is None


def test_a_write_that_the_system_breaks_off(tmp_path: Path) -> None:
    """The kernel refuses the log's growth in the middle of a commit; the journal stays whole."""
    path = tmp_path / "run.db"
    Journal.create(path, {}).close()
    code = f"""
import resource
from coda_agent.agent.run.journal import Journal, JournalError
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
    assert "run.db" in done.stdout and "what was committed is safe" in done.stdout
    with Journal.open(path) as journal:
        assert [event.key for event in journal.events()] == ["small"]
