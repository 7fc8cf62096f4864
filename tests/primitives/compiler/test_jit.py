"""Tests of QuACK's imports in a process that only compiles, and of importing files of lowered text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coda_agent.primitives.compiler.jit import import_file
from coda_agent.primitives.system import subprocesses

LATER = """
import sys
from coda_agent.primitives.compiler.jit import import_quack
import_quack()
import_quack()
assert "torch._dynamo" not in sys.modules and "quack.gemm_runtime.host" in sys.modules
import quack
assert not hasattr(quack, "rmsnorm")
from quack.cross_entropy import cross_entropy
from quack.rmsnorm import rmsnorm
from quack.softmax import softmax
assert all(map(callable, (cross_entropy, rmsnorm, softmax)))
"""


@pytest.mark.slow
def test_quacks_own_operators_are_imported_by_whoever_wants_them() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATER],
        env=subprocesses.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_file_that_fails_to_import_can_be_imported_once_it_is_mended(tmp_path: Path) -> None:
    path, name = tmp_path / "lowered.py", "coda_lowered_for_a_test"
    path.write_text("begun = True\nraise RuntimeError('no such op')\n")
    with pytest.raises(RuntimeError, match="no such op"):
        import_file(name, path)
    assert name not in sys.modules  # a partly executed module would count as imported
    path.write_text("answer = 42\n")
    assert import_file(name, path) is sys.modules.pop(name)
