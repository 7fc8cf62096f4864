"""The imports of a process that only compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
