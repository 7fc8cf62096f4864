"""Tune: find the fastest schedule of each step at given sizes, on this GPU.

The first round times every tile in clusters of two at the default rasterisation. It adds pingpong tiles with
a deep mainloop, and small tiles if the output is small. The second round times the best three tiles with
several rasterisation group sizes and L2 eviction hints, and the best tile also in clusters of four. The first
two rounds are noisy. So the last round repeats, more often, the best schedules of the second round and the
best five tiles of the first. Candidates compile in parallel processes. Timing is interleaved in random order
with a cold L2. The choice is cached by code, sizes and GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from coda_agent.primitives import raw
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.cubin import deepest_stack
from coda_agent.primitives.compiler.jit import compile_object, import_quack, refuse
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import GemmKernel, Lowered, lower
from coda_agent.primitives.compiler.probe_schedules import candidates, probes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import SMALL_TILES, SWIZZLES, Schedule, by_step
from coda_agent.primitives.runtime.compile import compile_gemm, compile_vector
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launchable import LaunchError
from coda_agent.primitives.system import deadline, workers
from coda_agent.primitives.system.files import cache_dir, read_json, write_atomic

if TYPE_CHECKING:
    import torch

FORMAT = 6  # version of stored tunings
ROUNDS = 9
FINALISTS = 3  # number of tiles to refine
LAST_TILES = 5  # number of tiles in the last round, whose conditions are closest to the benchmark's
SPLIT = 2  # number of tiles that are also timed in two launches
SPLIT_GROUPS = (4, 8, 16)  # rasterisation groups of those tiles if an earlier last round is known
FINAL = 6
FINAL_ROUNDS = 40
# rounds for long kernels, whose differences are clear in few rounds; the last round's timing has 13
FEWEST = 4
PER_ROUND = 3.5  # a kernel that takes more milliseconds gets fewer rounds
MOST_STACK = 512  # bytes per thread; the largest stack of any winner so far is 192, with 456 spilled loads
WARM_UP = 0.7  # seconds of load before timing, until clock rates settle
LAST_WARM_UP = 2.0  # the same before the last round, to get near the power limit as a benchmark does
COOLING = 2.0  # seconds of load whose effect one second of rest cancels

HEAD_START = 1_000_000  # idle cycles before a short call, so that its launch time is hidden
SHORT = 0.2  # milliseconds; longer calls are enqueued back to back

Known = Mapping[int, Sequence[Schedule]]


class NoSchedule(Exception):
    """The compiler or the GPU refuses all schedules of a step."""


class Tiled(Protocol):
    """A schedule with a tile: ours or QuACK's."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def pingpong(self) -> bool: ...


Choice = TypeVar("Choice")
Tile = TypeVar("Tile", bound=Tiled)
Race = Callable[[list[Tile], int], list[tuple[Tile, float]]]


def _fitting(gemm: GemmKernel, sizes: Mapping[str, int]) -> list[Schedule]:
    """The schedules that a search for a step starts from. Raises LaunchError if there are none."""
    found = candidates(gemm, sizes)
    if not found:
        raise LaunchError(f"step {gemm.step}: no tile holds {gemm.wants(sizes)}")
    return found


def refinements(ranked: Sequence[Schedule], gemm: GemmKernel) -> list[Schedule]:
    """The second round's schedules: the best tiles with several rasterisation groups and L2 eviction hints.
    Hints for loads are tried only if the epilogue loads a tile."""
    hints = [(False, False), (True, False), (False, True), (True, True)]
    if gemm.c is None:
        hints = [(False, False), (False, True)]
    return [
        s._replace(swizzle=swizzle, evict_loads=loads, evict_stores=stores)
        for s in [*leaders(ranked), *map(_on_four, ranked[:1]), *_split(gemm, ranked, ranked)]
        for loads, stores in hints
        for swizzle in SWIZZLES
        if swizzle > 1
    ]


def _on_four(schedule: Schedule) -> Schedule:
    return schedule._replace(cluster_m=2, cluster_n=2)


def _split(gemm: GemmKernel, ranked: Sequence[Schedule], start: Iterable[Schedule]) -> list[Schedule]:
    """The best tiles in two launches, if the step is ``splittable``. None if tuning also starts from small
    tiles, because such an output has less than one wave of tiles."""
    best = leaders(ranked)[:SPLIT] if gemm.splittable and not any(map(_small, start)) else []
    return [_on_four(schedule)._replace(split=True) for schedule in best]


def search(
    start: list[Tile], refine: Callable[[list[Tile]], list[Tile]], race: Race[Tile]
) -> list[tuple[Tile, float]]:
    """Run the three rounds; return the last round's schedules with their milliseconds, fastest first.
    ``refine`` maps the first round's ranking to the second round's schedules."""
    first = [choice for choice, _ in race(start, ROUNDS)]
    refined = refine(first)
    second = [choice for choice, _ in race(refined, ROUNDS)] if refined else []
    return race(list(dict.fromkeys(second[:FINAL] + leaders(first, LAST_TILES))), FINAL_ROUNDS)


def ranking(
    start: list[Tile],
    refine: Callable[[list[Tile]], list[Tile]],
    race: Race[Tile],
    known: list[Tile],
    *,
    edited: bool,
) -> list[tuple[Tile, float]]:
    """The result of ``search``, or of ``search_again`` if there are ``known`` schedules. Code ``edited`` by
    an author is timed only on the known schedules, which its author saw."""
    if known and edited:
        return race(known, FINAL_ROUNDS)
    return search_again(known, start, race) if known else search(start, refine, race)


def search_again(known: list[Tile], start: list[Tile], race: Race[Tile]) -> list[tuple[Tile, float]]:
    """Time known good schedules. If they have too few tiles, also time the best of a first round, because the
    best tile depends on the GPU. For example, a GPU that reaches its power limit sooner prefers wider tiles
    (by 10 % over a 128x128 pingpong tile at 7B width). If tuning starts from small tiles, the known schedules
    must include small tiles."""
    others = [] if _enough(known, start) else leaders([choice for choice, _ in race(start, ROUNDS)])
    return race(list(dict.fromkeys([*known, *others])), FINAL_ROUNDS)


def _enough(known: Sequence[Tile], start: Sequence[Tile]) -> bool:
    return len(_by_tile(known)) >= FINALISTS and any(map(_small, known)) == any(map(_small, start))


def leaders(ranked: Sequence[Tile], tiles: int = FINALISTS) -> list[Tile]:
    """The fastest schedule of each of the best few tiles. Each tile is judged by its best schedule: a wide
    tile benefits from its lower memory traffic only with the right rasterisation group size."""
    return sorted(_by_tile(ranked).values(), key=ranked.index)[:tiles]


def _small(choice: Tiled) -> bool:
    return (choice.tile_m, choice.tile_n, choice.pingpong) in SMALL_TILES


def _by_tile(ranked: Sequence[Tile]) -> dict[tuple[int, int, bool], Tile]:
    return {(c.tile_m, c.tile_n, c.pingpong): c for c in reversed(ranked)}


def revisited(
    gemm: GemmKernel,
    sizes: Mapping[str, int],
    known: Sequence[Schedule],
    start: Sequence[Schedule],
    *,
    edited: bool = False,
) -> list[Schedule]:
    """The schedules to time if good ones are known: those of them that fit the sizes. The best tiles in two
    launches are added, because older tunings lack them, unless the code was edited. ``start``: the first
    schedules of a search."""
    fit = [s for s in known if gemm.admits(s, sizes)]
    split = [] if edited else _split(gemm, fit, start)
    return [*fit, *(s._replace(swizzle=group) for s in split for group in SPLIT_GROUPS)]


def within_reach(gemm: GemmKernel, sizes: Mapping[str, int], known: Sequence[Schedule]) -> list[Schedule]:
    """All schedules that ``tuned_schedules`` may choose if these are known. They can then be compiled in
    advance."""
    start = _fitting(gemm, sizes)
    again = revisited(gemm, sizes, known, start)
    return again if _enough(again, start) else [*again, *start]


def tuned_schedules(
    kernel: KernelSource,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    known: Known | None = None,
    *,
    afresh: bool = False,
) -> dict[int, Schedule]:
    """The fastest schedule of each step: from the cache (unless ``afresh``), or measured now, which takes
    seconds to minutes. If several processes need the same tuning, one measures and the others wait for its
    result.

    ``known``: good schedules by step, for ``search_again``. A step is not tuned if the program fixes its
    schedule. The schedules of ``kernel`` are ignored. Raises LaunchError if no tile can contain a whole head,
    and NoSchedule if no schedule runs.
    """
    if not afresh and (earlier := cached(kernel, sizes, known)):
        return earlier
    first = {g.step: _fitting(g, sizes) for g in lower(kernel.program).gemms}
    with _alone(cache_path(kernel, sizes)):
        # another process may have stored its choice meanwhile
        if not afresh and (earlier := cached(kernel, sizes, known)):
            return earlier
        return _searched(kernel, inputs, sizes, known, first)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the tuning stored at ``path``, so that no other thread or process does the same tuning. The lock
    is released if its process dies. Raises OSError, and Late at the deadline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    late = deadline.within(math.inf)
    lock = FileLock(path.with_name(f"{path.stem}.lock"))
    try:
        lock.acquire(timeout=-1 if late == math.inf else max(0.0, late - time.monotonic()))
    except Timeout:
        raise deadline.Late from None
    try:
        yield
    finally:
        lock.release()


def _searched(
    kernel: KernelSource,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    known: Known | None,
    first: Mapping[int, list[Schedule]],
) -> dict[int, Schedule]:
    """Search from the ``first`` schedules of each step, and cache the result."""
    start = time.monotonic()
    program, edited = kernel.program, kernel.edited is not None
    gemms = lower(program).gemms
    chosen = {g.step: (probes(program, g, sizes, [Schedule()]) or first[g.step])[0] for g in gemms}
    chosen |= program.schedule
    evidence: dict[str, Any] = {}
    for gemm in (g for g in gemms if g.step not in program.schedule):
        race = partial(_race, kernel.on(dict(chosen)), gemm, inputs, sizes)
        begin, good = first[gemm.step], (known or {}).get(gemm.step, ())
        again = revisited(gemm, sizes, good, begin, edited=edited)
        refine = partial(refinements, gemm=gemm)
        ranked = ranking(begin, refine, race, again, edited=edited)
        if not ranked:
            raise NoSchedule(f"no schedule of {gemm.name} runs at {dict(sizes)}")
        chosen[gemm.step] = ranked[0][0]
        evidence[str(gemm.step)] = [[s.to_json(), t] for s, t in ranked]
    record = {
        "schedules": {str(k): s.to_json() for k, s in chosen.items()},
        "milliseconds": evidence,
        "seconds": round(time.monotonic() - start, 1),
    }
    write_atomic(cache_path(kernel, sizes), json.dumps(record, indent=1))
    return chosen


def cached(
    kernel: KernelSource, sizes: Mapping[str, int], known: Known | None = None
) -> dict[int, Schedule] | None:
    """The earlier choice of ``tuned_schedules``, or None. For edited code with ``known`` schedules, the
    choice must be among them, because it may have been tuned over others too."""
    record = read_json(cache_path(kernel, sizes))
    chosen = by_step(record["schedules"]) if record else None
    if chosen and kernel.edited and known:
        tried = chosen.keys() - kernel.program.schedule.keys()
        return chosen if all(chosen[step] in known.get(step, ()) for step in tried) else None
    return chosen


def finalists(kernel: KernelSource, sizes: Mapping[str, int]) -> dict[int, list[Schedule]]:
    """The schedules in the last round of a cached tuning, fastest first; empty if there is none."""
    record = read_json(cache_path(kernel, sizes)) or {"milliseconds": {}}
    raced = record["milliseconds"].items()
    return {int(step): [Schedule.from_json(s) for s, _ in rows] for step, rows in raced}


def cache_path(kernel: KernelSource, sizes: Mapping[str, int]) -> Path:
    """The file of a tuning. Its name depends on the program, the code (which covers the compilers' versions),
    the sizes and the GPU."""
    import torch

    made = [FORMAT, kernel.program.hash, kernel.lowered.hash]
    where = [dict(sorted(sizes.items())), torch.cuda.get_device_name(), torch.version.cuda]
    key = json.dumps([*made, *where])
    return cache_dir() / "tuning" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


_Task = tuple[str, str, int, Schedule, str | None]  # program, static sizes, step, schedule, edited code

# Results of compilations in this process, by task. Sizes that are not static are symbolic, so one object
# serves all cases.
_compiled: dict[_Task, bool] = {}


def compile_all(
    kernel: KernelSource, sizes: Mapping[str, int], schedules: Iterable[tuple[int, Schedule]]
) -> list[bool]:
    """Compile these (step, schedule) pairs into the object cache, in parallel; return whether each compiled.
    Worker processes compile only what is missing."""
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
    """The tasks whose results are known neither to this process nor to the cache."""
    lowered = kernel.lowered
    gemms = {g.step: g for g in lowered.gemms}
    asked = [w for w in dict.fromkeys(wanted) if w not in _compiled]
    for w in asked:
        if (verdict := compile_object(lowered, gemms[w[2]], w[3], sizes)) is not None:
            _compiled[w] = verdict
    return [w for w in asked if w not in _compiled]


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions by which QuACK, the compiler or a confined child refuses a schedule."""
    from cutlass.base_dsl.common import DSLBaseError

    return DSLBaseError, RuntimeError, ValueError, AssertionError, CompileError


def _compile_one(task: _Task) -> bool:
    """Compile a configuration in a worker process; return False if the compiler refuses it, or if it spills
    too much."""
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
    if not lowered.edited:  # edited code's objects are inspected each time
        refuse(lowered, gemm, schedule, json.loads(static))
    return False


def _build_edited(
    lowered: Lowered, gemm: GemmKernel, schedule: Schedule, sizes: Mapping[str, int], cubins: Path
) -> None:
    """Build the objects of edited code, and write the step's cubins into the folder ``cubins``."""
    for vector in lowered.vectors:
        raw.build(raw.Wanted(lowered, vector, None, sizes), cubins)
    built = [raw.build(raw.Wanted(lowered, gemm, each, sizes), cubins) for each in schedule.launches]
    for number, one in enumerate(built):
        (cubins / f"built{number}.cubin").write_bytes(one.cubin)


def _race(
    kernel: KernelSource,
    gemm: GemmKernel,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    schedules: list[Schedule],
    rounds: int,
) -> list[tuple[Schedule, float]]:
    """Time a step on each schedule that runs; return the milliseconds, fastest first. Other steps run on the
    kernel's schedules."""
    fine = compile_all(kernel, sizes, [(gemm.step, s) for s in schedules])
    device = next(iter(inputs.values())).device
    plans: list[tuple[Schedule, Plan]] = []
    # The narrowest tiles need the largest workspace, which all schedules share.
    for s in sorted((s for s, ok in zip(schedules, fine, strict=True) if ok), key=lambda s: s.tile_n):
        shared = plans[0][1].workspace if plans else None
        plans.append((s, Plan(kernel.on({**kernel.schedules, gemm.step: s}), sizes, device, shared)))
    outputs = plans[0][1].in_place(inputs) if plans else {}
    running = []
    for schedule, plan in plans:
        # the schedule may need more resources than an SM has
        with contextlib.suppress(RuntimeError, ValueError):
            plan.run(inputs, outputs)  # compute the earlier steps' results, which this step reads
            running.append((schedule, partial(plan.run_step, gemm.step, inputs, outputs)))
    return race_calls(running, rounds)


def race_calls(
    calls: Sequence[tuple[Choice, Callable[[], object]]], rounds: int
) -> list[tuple[Choice, float]]:
    """The median milliseconds of each call that runs, fastest first. After a warm-up, the calls are
    interleaved in random order, each with a cold L2."""
    import torch

    running = []
    for choice, call in calls:
        with contextlib.suppress(RuntimeError, ValueError):  # the call may need more resources than an SM has
            call()
            running.append((choice, call))
    if not running:
        return []
    torch.cuda.synchronize()
    with _load.more() as warm:
        until = time.monotonic() + (LAST_WARM_UP if rounds == FINAL_ROUNDS else WARM_UP) - warm
        once = _interleaved([call for _, call in running], 1, [0.0])
        while time.monotonic() < until:
            once = _interleaved([call for _, call in running], 1, once)
        rounds = max(FEWEST, rounds // 3, min(rounds, round(rounds * PER_ROUND / max(*once, 1e-3))))
        times = _interleaved([call for _, call in running], rounds, once)
    ranked = sorted(range(len(running)), key=times.__getitem__)
    return [(running[i][0], times[i]) for i in ranked]


class Load:
    """The recent load on this process's GPU. Timing right after other timing needs less warm-up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seconds, self._ended = 0.0, -math.inf

    @contextlib.contextmanager
    def more(self) -> Iterator[float]:
        """Count the ``with`` block as load. Yields the seconds of earlier load that still have an effect."""
        begun = self._clock()
        before = max(0.0, self._seconds - COOLING * (begun - self._ended))
        yield before
        self._ended = self._clock()
        self._seconds = min(LAST_WARM_UP, before + self._ended - begun)


_load = Load()


def _interleaved(calls: Sequence[Callable[[], object]], rounds: int, before: Sequence[float]) -> list[float]:
    """The median milliseconds of each call. ``before`` holds earlier times of the calls. If any call is
    short, the GPU idles before each call, so that its launch time is hidden.

    The GPU must not idle between long calls. It would save power and then reach clock rates that no benchmark
    reaches, and the best tile depends on the clock rate.
    """
    import torch

    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    shuffle, idle = random.Random(0).sample, HEAD_START if min(before) < SHORT else 0
    spans: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    for _ in range(rounds):
        for i in shuffle(range(len(calls)), len(calls)):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            if idle:
                torch.cuda._sleep(idle)
            start.record()
            calls[i]()
            stop.record()
            spans[i].append((start, stop))
    torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) for a, b in span) for span in spans]
