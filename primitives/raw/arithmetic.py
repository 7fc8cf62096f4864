"""Evaluate an author's device functions without a GPU, by interpreting their syntax trees.

CuTeDSL runs only on GPUs, but the syntax tree of straight-line arithmetic is enough to compute the results
(``primitives.raw.interpreter``). A confined child process (``primitives.raw.confine``) evaluates the
functions. The child's library functions are more exact than the GPU's, and only a GPU can show the
difference. The child refuses any operation that it cannot compute, because without a GPU there is no other
test of the function.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.raw import child
from coda_agent.primitives.raw.confine import confine
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.interpreter import PAGE, Beyond, Functions, Interpreter, known_words
from coda_agent.primitives.system import subprocesses

if TYPE_CHECKING:
    import torch

SECONDS = 60.0
# limits numpy to one thread, because confinement covers only one thread
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Answer:
    """The child's answer about valid device functions. ``page``: the docstring of the function NAME.
    ``fast``: whether the author also wrote NAME_fast, a less exact variant. ``values``: the result of each
    call."""

    page: str
    fast: bool
    values: tuple[torch.Tensor, ...]


Calls = Sequence[tuple[bool, Sequence["torch.Tensor"]]]


def answer(source: str, name: str, arity: int, calls: Calls = ()) -> Answer:
    """Read an author's functions, and compute ``calls``. Each call is a flag and fp32 tensors. A true flag
    selects the less exact variant, if the author wrote one. Raises RawError with a reason that the author can
    read."""
    import torch

    given = [[coarse, [_packed(t.numpy().tobytes()) for t in tensors]] for coarse, tensors in calls]
    request = json.dumps({"source": source, "name": name, "arity": arity, "calls": given})
    with TemporaryDirectory(prefix="coda-arithmetic-") as scratch:
        status, said, words = subprocesses.attend(lambda **files: _start(scratch, files), request, SECONDS)
    try:
        told = json.loads(said)
    except ValueError:
        ended = f"did not end within {SECONDS:g} s" if status is None else f"ended with status {status}"
        raise RawError("unreadable", f"the reading child {ended}: {words[-500:] or 'no message'}") from None
    if refused := child.refusal(told, source):
        raise refused
    match told:
        case {"page": str(page), "fast": bool(fast), "values": list(values)} if len(values) == len(calls):
            made = tuple(
                torch.frombuffer(bytearray(base64.b64decode(v)), dtype=torch.float32).view(t[0].shape)
                for v, (_, t) in zip(values, calls, strict=True)
            )
            return Answer(page[:PAGE], fast, made)
    raise RawError("unreadable", "the reading child gave no answer")


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _start(scratch: str, files: dict[str, Any]) -> subprocess.Popen[bytes]:
    kept = subprocesses.environment() | ONE_THREAD
    module, parent = "coda_agent.primitives.raw.arithmetic", str(os.getpid())
    return subprocesses.start_module(module, scratch, parent, env=kept, **files)


# In the child


def _refused(words: str, line: int | None) -> RawError:
    """Return the error for an operation that cannot be computed. The error's message says what to write
    instead."""
    return RawError(
        "arithmetic",
        f"{words}: this cannot be computed without a GPU, so nothing would show that it is right; write "
        f"straight-line arithmetic of these functions: {known_words()}",
        line,
    )


def _read(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request. Only the confined child calls this function."""
    import numpy as np

    read = Functions.read(request["source"], request["name"], request["arity"])
    values = []
    machine = Interpreter(read)
    try:
        with np.errstate(all="ignore"):
            for coarse, packed in request["calls"]:
                tensors = [np.frombuffer(base64.b64decode(p), np.float32) for p in packed]
                name = f"{read.name}_fast" if coarse and read.fast else read.name
                machine = Interpreter(read)
                found = machine.call(name, tensors)
                if isinstance(found, tuple) or np.asarray(found).dtype.kind == "b":
                    raise RawError("form", f"{name} must return one fp32 value", read.functions[name].lineno)
                whole = np.broadcast_to(np.asarray(found, np.float32), tensors[0].shape)
                values.append(_packed(whole.tobytes()))
    except Beyond as error:
        raise _refused(str(error), machine.line) from None
    except RecursionError:
        raise _refused("an expression nested too deep", machine.line) from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise RawError("arithmetic", f"its arithmetic fails: {error}", machine.line) from None
    return {"page": read.page, "fast": read.fast, "values": values}


def _main(scratch: str, parent: int) -> None:
    import numpy  # noqa: F401  (imported before confinement)

    request = json.loads(sys.stdin.read())
    layers, missing = confine(parent, Path(scratch), keep=(1,))
    said: dict[str, Any]
    try:
        child.demand(layers, missing)
        said = _read(request)
    except RawError as error:
        said = child.refusal_fields(error)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
