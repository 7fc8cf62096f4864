"""Compile lowered code into callable kernels, and report the resources of compiled kernels.

Lowered code compiles in the calling process (``jit``). Edited code compiles in a confined child process
(``primitives.raw``). The resource report needs no GPU: a child process (``python -m
coda_agent.primitives.runtime.compile``) compiles for sm_90a and reads the cubin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coda_agent.primitives import raw
from coda_agent.primitives.compiler.compile_error import CompileError, refusal
from coda_agent.primitives.compiler.cubin import GROUPED, OWN, PLAIN, Resources, inspect_cubin
from coda_agent.primitives.compiler.jit import (
    cached_gemm,
    cached_vector,
    compile_kernel,
    import_quack,
    noting_stages,
)
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import GemmKernel, Lowered, VectorKernel
from coda_agent.primitives.compiler.probe_schedules import (
    PROBES,
    candidates,
    crowded,
    probes,
)
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.system import deadline, subprocesses
from coda_agent.primitives.system.files import cache_dir, cached_json
from coda_agent.primitives.target import TARGET

CROWDED = "shared_memory"  # the error code for a step that fits no tile
FORMAT = 6  # version of cached reports


def compile_gemm(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> Callable[..., Any]:
    """Compile a step for one schedule. ``sizes`` must contain the static dims; other dims have no effect.

    The kernel takes A as [M, K] with any strides, and B as it is stored: [K, N], or [N, K] if
    ``b_transposed``. Edited code compiles in a confined child process, unless its object is cached. Raises
    CompileError if the child refuses the code.
    """
    if lowered.edited:
        return raw.load(raw.Wanted(lowered, kernel, schedule, sizes))
    return cached_gemm(lowered, kernel, schedule, sizes)


def compile_vector(lowered: Lowered, kernel: VectorKernel) -> Callable[..., Any]:
    """Compile a vector kernel, which runs before or after a step's GEMM."""
    if lowered.edited:
        return raw.load(raw.Wanted(lowered, kernel, None, {}))
    return cached_vector(lowered, kernel)


def report(
    kernel: KernelSource, sizes: Mapping[str, int], schedules: Iterable[Schedule] = PROBES
) -> tuple[Resources, ...]:
    """Compile every kernel of a program for sm_90a, without a GPU, and read each kernel's resources from its
    cubin.

    ``sizes``: the static dims. Each step is compiled for all ``schedules`` that fit the step. If none of
    these ``schedules`` fits, the step is compiled for the first of tuning's candidates that fits
    (``probe_schedules``). Compilation runs in a child process, because a compiler can crash. Edited code
    compiles in a confined child of that process. Results are cached by content. Raises CacheError and
    CompileError. The code of a CompileError is CROWDED if a step fits no tile.
    """
    program, lowered = kernel.program, kernel.lowered
    static = {dim: sizes[dim] for dim in program.signature.static}
    tried = _schedules_to_compile(program, lowered, sizes, tuple(schedules))
    key = json.dumps(
        [FORMAT, program._replace(schedule={}).hash, lowered.hash, static, tried], sort_keys=True
    )
    request = kernel.to_json() | {"sizes": static, "schedules": tried}
    return cached_json("resources", key, lambda: _run_child(json.dumps(request)), _as_resources)


def _as_resources(rows: list[dict[str, Any]]) -> tuple[Resources, ...]:
    """Each kernel's resources; none if no tile suits the program. Raises ValueError for another form, such as
    an object, whose keys would count as no rows if it is empty."""
    if not isinstance(rows, list):
        raise ValueError("not a list")
    return tuple(Resources(**row | {"stages": row["stages"] and tuple(row["stages"])}) for row in rows)


def _schedules_to_compile(
    program: Program, lowered: Lowered, sizes: Mapping[str, int], schedules: tuple[Schedule, ...]
) -> list[list[dict[str, int | bool]]]:
    """For each step, return a list of the schedules for which to compile the step. A step's list is empty if
    no tile suits the step. Raises CompileError if the step's epilogue leaves too little shared memory on
    every tile."""
    tried = []
    for gemm in lowered.gemms:
        fitting = probes(program, gemm, sizes, schedules)
        if not fitting and candidates(gemm, sizes):
            message, node = crowded(program, gemm, sizes)
            raise CompileError(message, CROWDED, node=node)
        tried.append([schedule.to_json() for schedule in fitting])
    return tried


COMPILE_SECONDS = 300


def _run_child(request: str) -> str:
    """Send a request to the child; return its answer. Raises CompileError if the compiler refuses the code,
    or if the child dies or takes too long."""
    with _turn:
        child = _child()
        try:
            answer = child.answer(request)
        except BaseException:  # never reuse a child that failed or was interrupted
            child.end()
            raise
        if isinstance(answer, list):
            return json.dumps(answer)
        if "code" not in answer:  # after an unexpected exception, the child's compiler may be unusable
            child.end()
    raise CompileError(refusal(answer["error"]), answer.get("code", "compiler"), answer.get("line"))


def _child() -> _Child:
    """Return a usable child. If no child is running, or if the running child is not usable, start a new
    child."""
    global _running
    if _running is None or not _running.usable():
        if _running is not None:
            _running.end()
        _running = _Child()
    return _running


class _Child:
    """A process that compiles one request after another. The process is reused, because its imports take
    longer than most compilations."""

    def __init__(self) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="coda-compile-")  # removed with this object
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in end()
        self.origin = self._settings()
        self.process = subprocesses.converse(
            "coda_agent.primitives.runtime.compile",
            self.scratch.name,
            stderr=self.errors,
            env=_environment() | {"CUTE_DSL_DUMP_DIR": self.scratch.name, "CUTE_DSL_KEEP_CUBIN": "1"},
        )

    @staticmethod
    def _settings() -> tuple[object, ...]:
        """The id of this process, and the settings that a child inherits from this process. A child is usable
        only while these values are the same as when the child started."""
        paths = (os.environ.get("PYTHONPATH"), cache_dir())
        return os.getpid(), sys.executable, subprocesses.MEMORY_BYTES, *paths

    def usable(self) -> bool:
        return self.origin == self._settings() and not subprocesses.ended(self.process)

    def answer(self, request: str) -> Any:
        """The resources of each kernel, or an error as a dict. Raises CompileError if the child dies or takes
        too long."""
        limit = deadline.within(COMPILE_SECONDS)
        line = subprocesses.ask(self.process, request.encode() + b"\n", limit)
        if line:
            return json.loads(line)
        if time.monotonic() >= limit:
            deadline.check(limit)
            raise CompileError(f"the compiler did not finish in {COMPILE_SECONDS} s")
        status = subprocesses.end(self.process)
        raise CompileError(
            refusal(subprocesses.tail(self.errors)) or f"the compiler died with status {status}"
        )

    def end(self) -> None:
        if self.origin[0] != os.getpid():  # another process started the child, and this process is its fork
            return
        subprocesses.hang_up(self.process)
        self.errors.close()
        self.scratch.cleanup()


_turn = threading.Lock()
_running: _Child | None = None


def _environment() -> dict[str, str]:
    """The environment for the compiler. The user's own compiler settings are left out, because they would
    change the report."""
    settings = ("CUTE_DSL_", "QUACK_")
    plain = {k: v for k, v in subprocesses.environment().items() if not k.startswith(settings)}
    return plain | TARGET.environment


def _serve(scratch: Path) -> None:
    """Read one request per line. For each request, write one line with the answer: the resources, or the
    compiler's message."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that a compiler's prints do not mix with the answers
    import_quack()
    gc.freeze()  # the compiler's modules stay in memory, so garbage collections can skip their objects
    for line in sys.stdin:
        try:
            answer: object = _answer(json.loads(line), scratch)
        except CompileError as error:  # from a confined child, or from reading a cubin
            answer = {"error": str(error), "code": error.code, "line": error.line}
            raw.child.empty(scratch)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    lowered = KernelSource.from_json(request).lowered
    sizes, wanted = request["sizes"], list[tuple[GemmKernel | VectorKernel, Schedule | None]]()
    for gemm, tried in zip(lowered.gemms, request["schedules"], strict=True):
        wanted += [(gemm, launch) for fields in tried for launch in Schedule.from_json(fields).launches]
    wanted += [(vector, None) for vector in lowered.vectors]
    return [asdict(_resources(scratch, lowered, kernel, s, sizes)) for kernel, s in wanted]


def _resources(
    scratch: Path,
    lowered: Lowered,
    kernel: GemmKernel | VectorKernel,
    schedule: Schedule | None,
    sizes: Mapping[str, int],
) -> Resources:
    fields, copies = schedule.to_json() if schedule else None, _bulk_copies(kernel)
    if lowered.edited:
        built = raw.build(raw.Wanted(lowered, kernel, schedule, sizes), scratch)
        cubin = scratch / "built.cubin"
        cubin.write_bytes(built.cubin)
        resources = inspect_cubin(cubin, kernel.name, fields, built.stages, built.seconds, copies)
        cubin.unlink()
        return replace(resources, own_launch=built.own_launch)
    start = time.monotonic()
    with noting_stages() as stages:
        compile_kernel(lowered, kernel, schedule, sizes)
    seconds = time.monotonic() - start
    (cubin,) = scratch.rglob("*.cubin")
    resources = inspect_cubin(cubin, kernel.name, fields, stages[-1] if stages else None, seconds, copies)
    cubin.unlink()  # because the next configuration's cubin has the same name
    return resources


def _bulk_copies(kernel: GemmKernel | VectorKernel) -> tuple[str, ...]:
    """The kinds of bulk copies that a kernel may contain."""
    if not isinstance(kernel, GemmKernel) or kernel.offsets is None:
        return PLAIN
    return OWN if kernel.own else GROUPED


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
