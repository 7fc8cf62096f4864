"""Run compute-sanitizer on a kernel at small sizes, to find out-of-bounds accesses and shared-memory
races."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from coda_agent.primitives.errors import Absent
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.checks import KernelCase, launch
from coda_agent.verifier.worker import SAID, Task, Worker, cuda_error

TOOLS = ("memcheck", "racecheck")
PATIENCE = 500.0  # seconds; instrumentation makes a kernel up to a hundred times slower
# API errors are not reported, because a process that probes the driver for optional functions causes dozens.
OPTIONS = ("--report-api-errors", "no", "--print-limit", "5")
# PyTorch's caching allocator is off, because the allocator puts several tensors into one allocation. An
# overrun from one of these tensors into the next would look legal.
EACH_ITS_OWN = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def sanitized(job: KernelCase) -> dict[str, Any]:
    """Run every tool. Returns the number of errors by tool (all zero). Raises Failed with a tool's message if
    the tool found an error.

    Raises Absent if compute-sanitizer is not installed.
    """
    return {tool: errors(tool, launch, job) for tool in TOOLS}


def errors(tool: str, task: Task, argument: Any) -> int:
    """Run a task in a worker under one tool. Returns 0 if the tool finds no error; otherwise raises
    Failed."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise Absent("no compute-sanitizer on the PATH: it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as scratch:
        # a separate file, so that the tool's output does not mix with a worker's answers
        log = Path(scratch) / "log"
        wrapper = [*EACH_ITS_OWN, program, "--tool", tool, "--log-file", str(log), *OPTIONS]
        with Worker(wrapper) as worker:
            died = worker.ask(_to_its_end, (task, argument), patience=PATIENCE).get("died")
            status = worker.finish(PATIENCE)
        words = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = [int(n) for n in _SUMMARY.findall(words)]
    if any(found):
        raise Failed("sanitizer", f"{tool} found {max(found)} error(s): {_first(words)}")
    if died:
        raise Failed("sanitizer", f"under {tool}, which reported no error, the kernel crashed: {died}")
    if status or not found:
        raise Failed("sanitizer", f"{tool} ended with status {status}: {words[-500:] or 'it said nothing'}")
    return 0


def _to_its_end(asked: tuple[Task, Any]) -> dict[str, Any]:
    """Run a task; if the task raises a CUDA error, return the error as the answer.

    The tool stops a kernel that accesses memory out of bounds, but reports the error only when the process
    exits by itself. If the task raised the CUDA error, the worker would be killed before the tool reports.
    """
    task, argument = asked
    try:
        task(argument)
    except Exception as error:
        if not cuda_error(str(error)):
            raise
        return {"died": str(error)[:SAID]}
    return {}


def _first(words: str) -> str:
    """The tool's first finding."""
    lines = [line.removeprefix("=========").strip() for line in words.splitlines()]
    start = next((i for i, line in enumerate(lines) if "Invalid" in line or "hazard" in line), 0)
    return " ".join(lines[start : start + 4])[:600]
