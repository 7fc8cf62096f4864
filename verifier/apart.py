"""Run a spec's reference in a child process, because it may end its process, or never end.

The owner of a spec is trusted, so the child is not confined. It stays alive for the next task, because its
imports take seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import BadReference, Spec
from coda_agent.verifier.worker import Lost, Worker

Task = Callable[[Any], dict[str, Any]]

PATIENCE = 60.0  # seconds for one run of a reference on a CPU; a run takes under a second
IMPORTS = ("coda_agent.verifier.numerics.strength.gate", "coda_agent.verifier.numerics.trial")


def run(task: Task, argument: Any) -> dict[str, Any]:
    """Run a task, which is a top-level function of a module and returns JSON data. The task may raise Failed
    and InvalidInput. Raises BadReference if the child dies, or reports nothing for PATIENCE seconds."""
    try:
        reply = _child(os.getpid()).ask(_carried, (task, argument))
    except Lost as lost:
        slow = f"it takes longer than {PATIENCE:g} s on a small input"
        raise BadReference(slow if lost.code == "hung" else lost.message) from None
    match reply:
        case {"bad_reference": [message, line, key]}:
            raise BadReference(message, line, key)
        case {"spec_error": [path, line, message]}:
            raise SpecError(path, line, message)
        case {"invalid": message}:
            raise InvalidInput(message)
    answer: dict[str, Any] = reply["answer"]
    return answer


# The tasks are imported in the child, so that this process need not import torch.


def check_reference(spec: Spec, *, strict: bool = True) -> None:
    """Run ``trial.check_reference`` in the child. Raises BadReference."""
    run(_check_reference, (spec, strict))


def interpret(spec: Spec, program: Program, seed: int, lines: Sequence[int | None]) -> dict[str, Any]:
    """Run ``gate.interpret_gate`` in the child. Raises Failed, and SpecError for a fault of the spec."""
    try:
        return run(_interpret, (spec, program, seed, tuple(lines)))
    except BadReference as error:
        raise SpecError(f"spec {spec.name}", None, f"its reference: {error.message}") from None


def _check_reference(job: tuple[Spec, bool]) -> dict[str, Any]:
    from coda_agent.verifier.numerics import trial

    trial.check_reference(job[0], strict=job[1])
    return {}


def _interpret(job: tuple[Spec, Program, int, Sequence[int | None]]) -> dict[str, Any]:
    from coda_agent.verifier.numerics.strength.gate import interpret_gate

    return interpret_gate(job)


def _carried(call: tuple[Task, Any]) -> dict[str, Any]:
    """Run a task in the child; return its answer, or its exception as data."""
    task, argument = call
    try:
        return {"answer": task(argument)}
    except BadReference as error:
        return {"bad_reference": [error.message, error.line, error.key]}
    except SpecError as error:
        return {"spec_error": [str(error.path), error.line, error.message]}
    except InvalidInput as error:
        return {"invalid": str(error)}


class _ReferenceProcess:
    """A child process that runs one task at a time. It is started when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.worker: Worker | None = None

    def ask(self, task: Task, argument: Any) -> dict[str, Any]:
        with self.lock:
            if self.worker is None or not self.worker.alive:
                self.worker = Worker(ahead=IMPORTS, name="the process that runs it")
            try:
                return self.worker.ask(task, argument, patience=PATIENCE)
            except Failed:
                raise
            except BaseException:  # the answer may still come, and must not be taken for the next one
                self.worker.close()
                raise


@cache
def _child(process: int) -> _ReferenceProcess:
    """The child of this ``process``. A fork must not use its parent's child."""
    return _ReferenceProcess()
