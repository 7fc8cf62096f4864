"""Tuning: which schedule runs each step fastest at given sizes, on this GPU.

Two stages: every tile and cluster at the usual rasterisation; then the best few over rasterisation
group sizes and L2 eviction hints. Candidates are compiled in parallel processes, timed interleaved
with a cold L2, and the choice is kept under the hash of text, sizes, GPU and versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primitives.compile import cache_dir, compile_gemm, compile_vector
from primitives.files import write_atomic
from primitives.ir import CLUSTERS, SWIZZLES, TILES, Program, Schedule
from primitives.lower import GemmKernel, Lowered, lower

if TYPE_CHECKING:
    import torch

ROUNDS = 9
FINALISTS = 3


def candidates(kernel: GemmKernel) -> list[Schedule]:
    """First stage: tiles that the step's stores allow, on clusters of two."""
    tiles = sorted(t for t in TILES if not kernel.half or t[1] % 32 == 0)
    return [
        Schedule(m, n, pingpong, *cluster)
        for m, n, pingpong in tiles
        for cluster in CLUSTERS
        if cluster != (1, 1)
    ]


def refinements(best: Sequence[Schedule], kernel: GemmKernel) -> list[Schedule]:
    """Second stage: the best few over rasterisation and, where tiles are streamed, eviction hints."""
    hints = [(False, False), (True, False), (False, True), (True, True)]
    if kernel.c is None:
        hints = [(False, False), (False, True)]
    return [
        replace(s, swizzle=swizzle, evict_loads=loads, evict_stores=stores)
        for s in best
        for loads, stores in hints
        for swizzle in SWIZZLES
        if swizzle > 1
    ]


def tuned(
    program: Program,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[int, Schedule]:
    """The fastest schedule for each step: from the cache, or measured now (seconds to minutes)."""
    path = cache_path(program, sizes)
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {int(k): Schedule.from_json(v) for k, v in kept["schedules"].items()}
    start = time.monotonic()
    lowered = lower(program)
    chosen: dict[int, Schedule] = {}
    evidence: dict[str, Any] = {}
    for kernel in lowered.gemms:
        default = {g.step: Schedule() for g in lowered.gemms} | chosen
        first = _race(program, lowered, kernel, candidates(kernel), default, inputs, sizes, on_progress)
        second = _race(
            program,
            lowered,
            kernel,
            refinements([s for s, _ in first[:FINALISTS]], kernel),
            default,
            inputs,
            sizes,
            on_progress,
        )
        ranked = sorted(second, key=lambda pair: pair[1])
        chosen[kernel.step] = ranked[0][0]
        evidence[str(kernel.step)] = [[s.to_json(), t] for s, t in ranked[:8] + first[:8]]
    record = {
        "schedules": {str(k): s.to_json() for k, s in chosen.items()},
        "milliseconds": evidence,
        "seconds": round(time.monotonic() - start, 1),
    }
    write_atomic(path, json.dumps(record, indent=1))
    return chosen


def cache_path(program: Program, sizes: Mapping[str, int]) -> Path:
    """Where a tuning is kept: text (which covers the versions of the compilers), sizes, GPU."""
    import torch

    key = json.dumps(
        [lower(program).hash, dict(sorted(sizes.items())), torch.cuda.get_device_name(), torch.version.cuda]
    )
    return cache_dir() / "tuning" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def workers() -> int:
    """Compile workers: QUACK_COMPILE_WORKERS, or one a core up to 16."""
    return int(os.environ.get("QUACK_COMPILE_WORKERS") or min(16, os.cpu_count() or 1))


# What this process has seen compile, by lowered text: sizes are symbolic, so one object serves all cases.
_compiled: dict[tuple[str, int, Schedule], bool] = {}


def compile_all(program: Program, schedules: Iterable[tuple[int, Schedule]]) -> list[bool]:
    """Fill the object cache with these (step, schedule) in parallel; whether each compiled."""
    digest, text = lower(program).hash, program.to_json()
    # Rasterisation is a launch argument: one object serves every group size.
    wanted = [(digest, step, replace(s, swizzle=8)) for step, s in schedules]
    new = [w for w in dict.fromkeys(wanted) if w not in _compiled]
    found = compile_pool().map(_compile_one, [(text, step, schedule) for _, step, schedule in new])
    _compiled.update(zip(new, found, strict=True))
    return [_compiled[w] for w in wanted]


@cache
def compile_pool() -> ProcessPoolExecutor:
    """Worker processes that compile, started once: importing the compiler takes each some seconds."""
    return ProcessPoolExecutor(workers(), mp_context=get_context("spawn"))


def _compile_one(task: tuple[str, int, Schedule]) -> bool:
    """In a worker process: a configuration that the compiler refuses is one not to race."""
    text, step, schedule = task
    lowered = lower(Program.from_json(text))
    for vector in lowered.vectors:
        compile_vector(lowered, vector)
    kernel = next(g for g in lowered.gemms if g.step == step)
    try:
        compile_gemm(lowered, kernel, schedule, a_major="m" if kernel.a_transposed else "k")
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


def _race(
    program: Program,
    lowered: Lowered,
    kernel: GemmKernel,
    schedules: list[Schedule],
    default: dict[int, Schedule],
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    on_progress: Callable[[str, int, int], None] | None,
) -> list[tuple[Schedule, float]]:
    """Milliseconds of each schedule that runs, fastest first."""
    from primitives.launch import Plan

    if on_progress:
        on_progress("compiling", 0, len(schedules))
    fine = compile_all(program, [(kernel.step, s) for s in schedules])
    runners: list[tuple[Schedule, Callable[[], None]]] = []
    outputs: dict[str, torch.Tensor] | None = None
    for schedule, compiled in zip(schedules, fine, strict=True):
        if not compiled:
            continue
        made = Plan(program, sizes, default | {kernel.step: schedule}, next(iter(inputs.values())).device)
        outputs = outputs or made.outputs()
        try:
            made.run(inputs, outputs)
        except (RuntimeError, ValueError):
            continue  # needs more of an SM than there is, say
        runners.append((schedule, lambda p=made, o=outputs: p.run(inputs, o)))
    if on_progress:
        on_progress("racing", len(runners), len(schedules))
    times = time_interleaved([run for _, run in runners], ROUNDS)
    return sorted(zip([s for s, _ in runners], times, strict=True), key=lambda pair: pair[1])


def time_interleaved(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Median milliseconds of each, round robin, each from a cold L2."""
    import torch

    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events = [
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runs]
        for _ in range(rounds)
    ]
    for run in runs:
        run()
    for row in events:
        for run, (start, stop) in zip(runs, row, strict=True):
            flush.zero_()
            start.record()
            run()
            stop.record()
    torch.cuda.synchronize()
    return [statistics.median(row[i][0].elapsed_time(row[i][1]) for row in events) for i in range(len(runs))]
