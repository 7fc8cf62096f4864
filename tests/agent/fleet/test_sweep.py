"""A sweep in real processes on this machine: a fake API authors the kernels; checks and compiler are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from authoring import BROKEN, TOY_KERNEL, fenced, write_toy
from checkout import ROOT
from commanding import Command
from fake_messages import MODEL, FakeMessages, answer

from coda_agent.agent.fleet import sweep
from coda_agent.agent.fleet.driver import Driver
from coda_agent.agent.run import runs
from coda_agent.verifier import loading
from coda_agent.verifier.spec import file

pytestmark = pytest.mark.slow
KEY = "sk-ant-fake-0123456789abcdef"


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path) -> Path:
    return write_toy(tmp_path)


def sweeping(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that has an API key; return the finished process."""
    line = [sys.executable, "-m", "coda_agent.agent.cli.main", *map(str, arguments)]
    return subprocess.run(line, env=with_key(), capture_output=True, text=True, timeout=280)


def with_key() -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT / "src"), "ANTHROPIC_API_KEY": KEY, "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | ours


def the_sweep() -> str:
    (found,) = (path.name for path in runs.runs_dir().iterdir() if path.name.startswith("sweep-"))
    return found


def test_two_candidates_compile_their_common_program_once(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = answer(fenced(TOY_KERNEL)), answer(fenced(BROKEN))
    with FakeMessages(right, wrong, right, right) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        more = ("--provider", "anthropic", "--model", MODEL, "--no-gpu", "--at-once", "2", "--json")
        done = sweeping("sweep", toy, "--candidates", "3", *more, "--budget-tokens", "1000000")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["statuses"] == {"checked": 3} and told["compiled"] == 1
    phases = {phase["phase"]: phase for phase in told["phases"]}
    assert phases["compiling"]["pieces"] == 1 and phases["checking"]["pieces"] == 4
    assert phases["authoring"]["seconds"] > 0
    assert {slot["kind"] for slot in told["slots"]} == {"CPU"}
    assert sum(slot["pieces"] for slot in told["slots"]) == 5
    assert all(0 <= slot["idle"] <= 1 for slot in told["slots"])
    page = (runs.runs_dir() / the_sweep() / f"{the_sweep()}.html").read_text()
    assert all(run in page for run in runs.names())
    assert sweeping("report", the_sweep(), "--json").stdout == done.stdout
    refused = sweeping("report", the_sweep(), *runs.names())
    assert refused.returncode == 2 and "name it alone" in refused.stderr
    _expect_no_key(runs.runs_dir(), done.stdout + done.stderr)


def test_a_sweep_reads_its_spec_once(toy: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def read(path: Path, *given: Any) -> Any:
        seen.append(path)
        return file.read(path, *given)

    monkeypatch.setattr(loading, "read", read)
    monkeypatch.setattr(Driver, "start", lambda *_: threading.Thread())
    done = command("sweep", toy, toy, "--candidates", 2, "--provider", "handoff", "--no-gpu")
    assert (done.status, seen.count(toy)) == (1, 1)  # no run has a checked kernel
    assert len(runs.names()) == 2


def _expect_no_key(directory: Path, said: str) -> None:
    assert KEY not in said
    for path in directory.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


def test_mistakes_are_reported_before_anything_is_written(toy: Path, command: Command) -> None:
    done = command("sweep", toy, toy.with_name("missing.yaml"), "--provider", "replay")
    assert done.status == 2 and "missing.yaml" in done.err
    assert command("sweep", toy, "--provider", "replay", "--gpu").status == 3  # there is no GPU
    assert not runs.runs_dir().exists()
    assert not sweep.is_sweep("sweep-20260101-000000")
