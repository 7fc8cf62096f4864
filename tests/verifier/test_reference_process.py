"""Tests of references that end their process, never end, or fail, in the child process that runs them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from authoring import TWICE, program_of, write_toy
from pytest import MonkeyPatch

from coda_agent.verifier import apart
from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.verify import check_program

pytestmark = pytest.mark.apart
REFERENCE = "  c = (a @ b) * v[:, None]"


def changed(folder: Path, first_line: str) -> Path:
    return write_toy(folder, REFERENCE, f"  {first_line}\n{REFERENCE}")


def child() -> int:
    worker = apart._child(os.getpid()).worker
    assert worker is not None
    return worker._process.pid


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.os._exit(0)", r"toy.yaml:10: the process that runs it died .exit status 0"),
        ("torch.os._exit(3)", r"toy.yaml:10: the process that runs it died .exit status 3"),
        ("torch.os.kill(torch.os.getpid(), 9)", r"toy.yaml:10: the process that runs it died .SIGKILL"),
        ("torch.sys.exit(0)", r"toy.yaml:11: reference: 0 \(tried with"),
        ("x = missing", r"toy.yaml:\d+: reference: name 'missing' is not defined"),
    ],
)
def test_a_reference_that_ends_its_process_is_a_fault_of_the_spec(
    tmp_path: Path, line: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load(changed(tmp_path, line))
    load(write_toy(tmp_path))  # the next spec has a child again


def test_a_reference_that_never_ends_is_a_fault_of_the_spec(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    load(write_toy(tmp_path))
    monkeypatch.setattr(apart, "PATIENCE", 1.0)
    with pytest.raises(SpecError, match="it takes longer than 1 s on a small input"):
        load(changed(tmp_path, "while True: pass"))


def test_a_reference_that_ends_at_larger_sizes_ends_the_gate(tmp_path: Path) -> None:
    spec = load(changed(tmp_path, "torch.os._exit(0) if M > 200 else None"))
    with pytest.raises(
        SpecError, match="spec toy: its reference: the process that runs it died .exit status 0."
    ):
        check_program(spec, program_of(spec, TWICE))


def test_the_child_serves_again_and_gives_a_gates_verdict(tmp_path: Path) -> None:
    spec = load(write_toy(tmp_path))
    before = child()
    rejected = check_program(spec, program_of(spec, TWICE))
    assert rejected is not None and (rejected.gate, rejected.code) == ("interpret", "numerics")
    assert rejected.evidence["draw"]["family"] == "normal" and child() == before


def test_an_interrupt_ends_the_child(tmp_path: Path) -> None:
    load(write_toy(tmp_path))
    before = child()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        load(changed(tmp_path, "torch.os.system('sleep 30')"))
    assert not Path(f"/proc/{before}").exists()
    load(write_toy(tmp_path))
    assert child() != before
