"""The `claude` command ends when the process that started it ends, even if that process is killed. Processes
and kills are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from attending import expect
from checkout import ROOT

from coda_agent.agent.providers import Message, ProviderError, Question, make
from coda_agent.agent.providers.patience import Patience
from coda_agent.primitives.system import subprocesses

# This stand-in for `claude` writes its process ID into a file and sleeps for ten minutes.
ENDLESS = f"""#!{sys.executable}
import os, sys, time
note = os.path.dirname(os.path.abspath(__file__)) + "/note"
open(note + ".draft", "w").write(str(os.getpid()))
os.rename(note + ".draft", note)
time.sleep(600)
"""
ASKING = """
from coda_agent.agent.providers import Message, Question, make
make("claude-code").next_turn(Question("S", [Message("user", "write a kernel")]))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the PATH that holds a stand-in for `claude`."""
    (tmp_path / "claude").write_text(ENDLESS)
    (tmp_path / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_it_is_killed_with_us(here: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ASKING], cwd=ROOT) as process:
        try:
            expect((here / "note").exists)
        finally:
            process.send_signal(signal.SIGKILL)
    claude = int((here / "note").read_text())
    try:
        expect(lambda: not runs(claude))
    finally:
        with suppress(ProcessLookupError):
            os.kill(claude, signal.SIGKILL)


def test_one_that_is_no_program_was_not_asked(here: Path) -> None:
    (here / "claude").write_text("#!/no/such/interpreter\n")
    with pytest.raises(ProviderError, match="claude could not be started: No such file or directory"):
        make("claude-code", patience=Patience(total=0.0)).next_turn(Question("S", [Message("user", "x")]))


def test_a_program_is_as_if_it_were_started_at_once(tmp_path: Path) -> None:
    """``subprocesses.start`` gives a program the same arguments, files, working directory and signals as
    ``Popen`` does. ``subprocesses.attend`` returns the program's own exit status."""
    command = ["/bin/sh", "-c", 'cat; pwd; echo "$1"; grep SigIgn /proc/self/status; exit 7', "sh", "a b"]
    found = [
        subprocesses.attend(partial(begin, command, cwd=tmp_path), "given\n", 60)
        for begin in (partial(subprocess.Popen, start_new_session=True), subprocesses.start)
    ]
    assert found[0][0] == 7 and found[1] == found[0]
    assert found[0][1].startswith(f"given\n{tmp_path}\na b\nSigIgn:")
