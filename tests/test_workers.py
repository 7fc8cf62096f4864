"""Workers are real processes: what they answer, and that one's death is its task's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primitives import workers

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def tasks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def positive(number: int) -> bool:
    return number > 0


def dies_of_zero(number: int) -> bool:
    if number == 0:
        os._exit(1)
    print("no answer of mine")
    return True


def raises(number: int) -> bool:
    raise ValueError(number)


def own_process(parent: int) -> bool:
    return os.getpid() != parent and os.getppid() == parent


def test_answers_come_in_the_order_of_the_arguments():
    assert workers.run_all(positive, [1, -1, 2, 0, 3, -5, 7, 8, -9]) == [
        n > 0 for n in (1, -1, 2, 0, 3, -5, 7, 8, -9)
    ]
    assert workers.run_all(own_process, [os.getpid()] * 3) == [True] * 3


def test_a_worker_that_dies_fails_its_task_only():
    assert workers.run_all(dies_of_zero, [1, 0, 2, 0, 0, 3]) == [True, False, True, False, False, True]
    assert workers.run_all(raises, [1]) == [False]
    assert workers.run_all(positive, [1, 2]) == [True, True]


def test_a_script_without_a_main_guard_can_use_them(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os.path\nfrom primitives import workers\n"
        "print(workers.run_all(os.path.isabs, ['/', 'a', '/b']), flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QUACK_COMPILE_WORKERS": "2"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[True, False, True]\n", done.stderr
