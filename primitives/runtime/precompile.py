"""Compile schedules in parallel worker processes, into QuACK's object cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from coda_agent.primitives import raw
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.cubin import deepest_stack
from coda_agent.primitives.compiler.jit import compile_object, import_quack, refuse
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import GemmKernel, Lowered
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.compile import compile_gemm, compile_vector
from coda_agent.primitives.system import workers

MOST_STACK = 512  # bytes per thread; the fastest schedules so far had at most 192 (with 456 spilled loads)

_Task = tuple[str, str, int, Schedule, str | None]  # program, static sizes, step, schedule, edited code

# Whether each task compiled, as far as this process knows. Only static sizes are compiled in, so one object
# serves all values of the other sizes.
_compiled: dict[_Task, bool] = {}


def compile_all(
    kernel: KernelSource, sizes: Mapping[str, int], schedules: Iterable[tuple[int, Schedule]]
) -> list[bool]:
    """Compile these (step, schedule) pairs into the object cache, in parallel. Return for each pair whether
    it compiled. Worker processes compile only the pairs that are not cached."""
    wanted = _tasks(kernel, sizes, schedules)
    new = _uncompiled(kernel, sizes, wanted)
    _compiled.update(zip(new, workers.run_all(_compile_one, new), strict=True))
    return [_compiled[w] for w in wanted]


def to_compile(
    kernel: KernelSource, sizes: Mapping[str, int], schedules: Iterable[tuple[int, Schedule]]
) -> list[workers.Job]:
    """The jobs that ``compile_all`` would give to worker processes."""
    return [(_compile_one, w) for w in _uncompiled(kernel, sizes, _tasks(kernel, sizes, schedules))]


def _tasks(
    kernel: KernelSource, sizes: Mapping[str, int], schedules: Iterable[tuple[int, Schedule]]
) -> list[_Task]:
    text = kernel.program._replace(schedule={}).to_json()
    static = json.dumps({dim: sizes[dim] for dim in kernel.program.signature.static})
    # Rasterisation is a launch argument, so one object serves all group sizes.
    return [(text, static, step, s._replace(swizzle=8), kernel.edited) for step, s in schedules]


def _uncompiled(kernel: KernelSource, sizes: Mapping[str, int], wanted: list[_Task]) -> list[_Task]:
    """The tasks that must still be compiled, because neither this process nor the cache has their results."""
    lowered = kernel.lowered
    gemms = {g.step: g for g in lowered.gemms}
    unknown = [task for task in dict.fromkeys(wanted) if task not in _compiled]
    for task in unknown:
        if (compiles := compile_object(lowered, gemms[task[2]], task[3], sizes)) is not None:
            _compiled[task] = compiles
    return [task for task in unknown if task not in _compiled]


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions by which QuACK, the compiler or a confined child refuses a schedule."""
    from cutlass.base_dsl.common import DSLBaseError

    return DSLBaseError, RuntimeError, ValueError, AssertionError, CompileError


def _compile_one(task: _Task) -> bool:
    """Compile one task in a worker process. Return False if the compiler refuses the schedule, or if the
    kernel spills too much."""
    import_quack()
    text, static, step, schedule, edited = task
    lowered = KernelSource(Program.from_json(text), edited=edited).lowered
    gemm, cubins = next(g for g in lowered.gemms if g.step == step), Path(os.environ["CUTE_DSL_DUMP_DIR"])
    try:
        if lowered.edited:
            _build_edited(lowered, gemm, schedule, json.loads(static), cubins)
        else:
            for vector in lowered.vectors:
                compile_vector(lowered, vector)
            for each in schedule.launches:
                compile_gemm(lowered, gemm, each, json.loads(static))
    except refusals():
        return False
    if deepest_stack(cubins) <= MOST_STACK:
        return True
    if not lowered.edited:  # because the stack of edited code is inspected at every build
        refuse(lowered, gemm, schedule, json.loads(static))
    return False


def _build_edited(
    lowered: Lowered, gemm: GemmKernel, schedule: Schedule, sizes: Mapping[str, int], cubins: Path
) -> None:
    """Build the objects of edited code. Write the step's cubins into the folder ``cubins``."""
    for vector in lowered.vectors:
        raw.build(raw.Wanted(lowered, vector, None, sizes), cubins)
    built = [raw.build(raw.Wanted(lowered, gemm, each, sizes), cubins) for each in schedule.launches]
    for number, one in enumerate(built):
        (cubins / f"built{number}.cubin").write_bytes(one.cubin)
