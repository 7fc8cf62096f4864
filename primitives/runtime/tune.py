"""Find the fastest schedule of each step at given sizes, on this GPU.

A search has three rounds. The first round times every tile, in clusters of two with the default
rasterisation; pingpong tiles are also timed with ``deep`` schedules. For a small output, small tiles are also
timed. The second round times the best three tiles with several rasterisation groups and L2 eviction hints. It
also times the best tile in clusters of four. Timings in the first two rounds are noisy, so the last round
times the best schedules again, with more repetitions.

The result of a search is cached by code, sizes and GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import GemmKernel, lower
from coda_agent.primitives.compiler.probe_schedules import candidates, probes
from coda_agent.primitives.lang.schedule import SMALL_TILES, SWIZZLES, Schedule, by_step, schedules_json
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launchable import LaunchError
from coda_agent.primitives.runtime.precompile import compile_all
from coda_agent.primitives.runtime.race import FINAL_ROUNDS, race_calls
from coda_agent.primitives.system import deadline
from coda_agent.primitives.system.files import cache_dir, read_json, write_atomic

if TYPE_CHECKING:
    import torch

FORMAT = 6  # version of stored tunings
ROUNDS = 9  # repetitions in the first and second round
FINALISTS = 3  # tiles of the first round that the second round refines
LAST_TILES = 5  # tiles of the first round that the last round times again
FINAL = 6  # schedules of the second round that the last round times again
SPLIT = 2  # how many of the best tiles are also timed in two launches
SPLIT_GROUPS = (4, 8, 16)  # rasterisation groups to try with two launches, if good schedules are known

Known = Mapping[int, Sequence[Schedule]]


class NoSchedule(Exception):
    """The compiler or the GPU refuses all schedules of a step."""


class Tiled(Protocol):
    """A schedule of this project or of QuACK."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def pingpong(self) -> bool: ...


Tile = TypeVar("Tile", bound=Tiled)
Race = Callable[[list[Tile], int], list[tuple[Tile, float]]]


def _fitting(gemm: GemmKernel, sizes: Mapping[str, int]) -> list[Schedule]:
    """The schedules of the first round. Raises LaunchError if no tile suits the step."""
    fitting = candidates(gemm, sizes)
    if not fitting:
        raise LaunchError(f"step {gemm.step}: no tile holds {gemm.wants(sizes)}")
    return fitting


def refinements(ranked: Sequence[Schedule], gemm: GemmKernel) -> list[Schedule]:
    """The schedules of the second round. Eviction hints for loads are tried only if the epilogue loads a
    tile."""
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
    """Schedules that run the best tiles in two launches. There are none if the step is not ``splittable``.
    There are also none if the first round has small tiles, because the output is then less than one wave of
    large tiles."""
    best = leaders(ranked)[:SPLIT] if gemm.splittable and not any(map(_small, start)) else []
    return [_on_four(schedule)._replace(split=True) for schedule in best]


def search(
    start: list[Tile], refine: Callable[[list[Tile]], list[Tile]], race: Race[Tile]
) -> list[tuple[Tile, float]]:
    """Run the three rounds. Return the schedules of the last round with their milliseconds, fastest first.
    ``refine`` maps the ranking of the first round to the schedules of the second round."""
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
    """Return the result of ``search``, or of ``search_again`` if good schedules are ``known``. Edited code
    (``edited``) is timed only on the known schedules, because the author saw no other schedules."""
    if known and edited:
        return race(known, FINAL_ROUNDS)
    return search_again(known, start, race) if known else search(start, refine, race)


def search_again(known: list[Tile], start: list[Tile], race: Race[Tile]) -> list[tuple[Tile, float]]:
    """Time known good schedules. If the known schedules cover too few tiles, also time the best tiles of a
    first round, because the best tile depends on the GPU. For example, on a GPU that reaches its power limit
    sooner, wider tiles beat a 128x128 pingpong tile by 10 % at 7B width."""
    others = [] if _enough(known, start) else leaders([choice for choice, _ in race(start, ROUNDS)])
    return race(list(dict.fromkeys([*known, *others])), FINAL_ROUNDS)


def _enough(known: Sequence[Tile], start: Sequence[Tile]) -> bool:
    """Whether the known schedules make a first round unnecessary. For that, they must have at least
    ``FINALISTS`` tiles. They must include small tiles if the first round (``start``) would include small
    tiles, and only then."""
    return len(_by_tile(known)) >= FINALISTS and any(map(_small, known)) == any(map(_small, start))


def leaders(ranked: Sequence[Tile], tiles: int = FINALISTS) -> list[Tile]:
    """For each of the best few tiles, return the tile's fastest schedule. Tiles are ranked by their fastest
    schedules, because a wide tile saves memory traffic only with the right rasterisation group."""
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
    """The schedules to time if good schedules are known. These include the known schedules that fit the
    sizes. For unedited code, they also include the best tiles in two launches, because older tunings did not
    try two launches. ``start``: the schedules of the first round."""
    fit = [s for s in known if gemm.admits(s, sizes)]
    split = [] if edited else _split(gemm, fit, start)
    return [*fit, *(s._replace(swizzle=group) for s in split for group in SPLIT_GROUPS)]


def within_reach(gemm: GemmKernel, sizes: Mapping[str, int], known: Sequence[Schedule]) -> list[Schedule]:
    """All schedules that ``tuned_schedules`` may time for a step with these ``known`` schedules, so that they
    can be compiled in advance."""
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
    """The fastest schedule of each step, from the cache or measured now. Measuring takes seconds to minutes.
    If several processes need the same tuning, one process measures and the others wait for its result.

    ``known``: good schedules by step, for ``search_again``. ``afresh``: ignore the cache. A step with a
    given schedule (``kernel.fixed``) is not tuned. Raises LaunchError if no tile suits another step, and
    NoSchedule if no schedule of such a step runs.
    """
    if not afresh and (earlier := cached(kernel, sizes, known)):
        return earlier
    first = {g.step: _fitting(g, sizes) for g in lower(kernel.program).gemms if g.step not in kernel.fixed}
    with _locked(cache_path(kernel, sizes)):
        # another process may have measured while this process waited for the lock
        if not afresh and (earlier := cached(kernel, sizes, known)):
            return earlier
        return _search_and_cache(kernel, inputs, sizes, known, first)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the tuning at ``path``, so that no other thread or process measures it at the same time. If the
    process dies, the system releases the lock. Raises OSError, and Late at the deadline."""
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


def _search_and_cache(
    kernel: KernelSource,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    known: Known | None,
    first: Mapping[int, list[Schedule]],
) -> dict[int, Schedule]:
    """Tune the steps in ``first`` and cache the result. ``first``: each step's schedules for the first
    round."""
    start = time.monotonic()
    program, edited = kernel.program, kernel.edited is not None
    tuned = [gemm for gemm in lower(program).gemms if gemm.step in first]
    chosen = {g.step: (probes(program, g, sizes, [Schedule()]) or first[g.step])[0] for g in tuned}
    chosen |= kernel.fixed
    milliseconds: dict[str, Any] = {}
    for gemm in tuned:
        race = partial(_race, kernel.on(dict(chosen)), gemm, inputs, sizes)
        begin, good = first[gemm.step], (known or {}).get(gemm.step, ())
        again = revisited(gemm, sizes, good, begin, edited=edited)
        refine = partial(refinements, gemm=gemm)
        ranked = ranking(begin, refine, race, again, edited=edited)
        if not ranked:
            raise NoSchedule(f"no schedule of {gemm.name} runs at {dict(sizes)}")
        chosen[gemm.step] = ranked[0][0]
        milliseconds[str(gemm.step)] = [[s.to_json(), t] for s, t in ranked]
    record = {
        "schedules": schedules_json(chosen),
        "milliseconds": milliseconds,
        "seconds": round(time.monotonic() - start, 1),
    }
    write_atomic(cache_path(kernel, sizes), json.dumps(record, indent=1))
    return chosen


def cached(
    kernel: KernelSource, sizes: Mapping[str, int], known: Known | None = None
) -> dict[int, Schedule] | None:
    """Return the cached result of ``tuned_schedules``, or None if nothing is cached. For edited code with
    ``known`` schedules, also return None if a cached schedule is not a known schedule, because an earlier
    tuning may have timed other schedules."""
    chosen: dict[int, Schedule] | None = read_json(
        cache_path(kernel, sizes), lambda record: by_step(record["schedules"])
    )
    if chosen and kernel.edited and known:
        tried = chosen.keys() - kernel.fixed.keys()
        return chosen if all(chosen[step] in known.get(step, ()) for step in tried) else None
    return chosen


def finalists(kernel: KernelSource, sizes: Mapping[str, int]) -> dict[int, list[Schedule]]:
    """The schedules in the last round of a cached tuning, by step, fastest first. The result is empty if no
    tuning is cached."""

    def raced(record: Any) -> dict[int, list[Schedule]]:
        times = record["milliseconds"].items()
        return {int(step): [Schedule.from_json(s) for s, _ in rows] for step, rows in times}

    return read_json(cache_path(kernel, sizes), raced) or {}


def cache_path(kernel: KernelSource, sizes: Mapping[str, int]) -> Path:
    """The file of a tuning. The file's name depends on the program, the given schedules, the lowered code,
    the sizes and the GPU. The hash of the lowered code covers the compilers' versions."""
    import torch

    code = [FORMAT, kernel.program.hash, schedules_json(kernel.schedules), kernel.lowered.hash]
    machine = [torch.cuda.get_device_name(), torch.version.cuda]
    key = json.dumps([*code, dict(sorted(sizes.items())), *machine])
    return cache_dir() / "tuning" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _race(
    kernel: KernelSource,
    gemm: GemmKernel,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    schedules: list[Schedule],
    rounds: int,
) -> list[tuple[Schedule, float]]:
    """Time one step on each of the ``schedules`` that run; the other steps keep the kernel's schedules.
    Return schedules with milliseconds, fastest first."""
    fine = compile_all(kernel, sizes, [(gemm.step, s) for s in schedules])
    device = next(iter(inputs.values())).device
    plans: list[tuple[Schedule, Plan]] = []
    # All plans share the first plan's workspace. The plan with the narrowest tiles needs the largest
    # workspace, so this plan comes first.
    for s in sorted((s for s, ok in zip(schedules, fine, strict=True) if ok), key=lambda s: s.tile_n):
        shared = plans[0][1].workspace if plans else None
        plans.append((s, Plan(kernel.on({**kernel.schedules, gemm.step: s}), sizes, device, shared)))
    written = kernel.program.signature.updates.values()  # the caller's tensors stay as they are
    inputs = {name: t.clone() if name in written else t for name, t in inputs.items()}
    outputs = plans[0][1].in_place(inputs) if plans else {}
    running = []
    for schedule, plan in plans:
        # the schedule may need more resources than an SM has
        with contextlib.suppress(RuntimeError, ValueError):
            plan.run(inputs, outputs)  # computes the results of earlier steps, which this step reads
            running.append((schedule, partial(plan.run_step, gemm.step, inputs, outputs)))
    return race_calls(running, rounds)
