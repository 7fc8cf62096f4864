"""Tests of ``output``. Children that are started by ``start`` are tested with the workers and the jail."""

from __future__ import annotations

import subprocess

import pytest

from coda_agent.primitives.system.subprocesses import output


def test_output_fails_as_its_command_fails() -> None:
    assert output("echo", "said") == "said\n"
    with pytest.raises(FileNotFoundError):
        output("no-such-command")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        output("sh", "-c", "echo why >&2; exit 3")
    assert (failed.value.returncode, failed.value.stderr) == (3, "why\n")
    with pytest.raises(TimeoutError, match=r"no answer in 0\.1 s.*sleep"):
        output("sleep", "60", seconds=0.1)
