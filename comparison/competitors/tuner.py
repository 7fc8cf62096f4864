"""What CODA's own package needs of its process before it is imported: the versions that it pins, its tuner's
choices kept on disk, and races that are shorter and never silent.

The package tunes with QuACK's autotuner: up to 76 schedules, each called 254 times at least, in every
process anew: more than half an hour, and minutes without a word. Here all are timed by few calls, and the
fastest few again by its own race. Few calls alone choose badly: between them compilers are waited for, and
what comes after a pause runs at a cool GPU's clock. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from coda_agent.primitives.system.files import cache_dir
from coda_agent.primitives.system.workers import count as cores
from coda_agent.verifier.gpu.worker import report

PINNED = {"quack-kernels": "0.6.1", "nvidia-cutlass-dsl": "4.6.0"}
WARM, TIMED = 10, 20  # calls of a schedule, at most: QuACK's own are 54 at least, and 200
SHORT, FEWEST = 100.0, 4  # milliseconds of timed calls that are enough, and the fewest calls
OWN = 254  # calls of its own race
FINALISTS, LEAST, LONGEST = 8, 3, 20_000.0  # in the final: at most, at least, milliseconds that it may take
GATE = "tuning"
SECONDS = 10.0  # between words while nothing but compilers work


@cache
def prepare() -> None:
    """Once, before the package is imported. RuntimeError where the environment is not its own."""
    check()
    os.environ |= {
        "QUACK_CACHE_AUTOTUNING": "1",  # the package says no where QuACK's default is yes
        "QUACK_CACHE_DIR": str(kept()),
        "QUACK_COMPILE_WORKERS": str(cores()),
    }
    importlib.import_module("quack.cache").CACHE_DIR = str(kept())  # type: ignore[attr-defined]
    shorten(*map(importlib.import_module, ("quack.autotuner", "quack.cache.async_compile")))


def check() -> None:
    """RuntimeError unless this process finds the versions that the package pins."""
    for package, wanted in PINNED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            raise RuntimeError(
                f"coda-kernels wants {package} {wanted}, and its worker finds {found}: delete "
                f"{cache_dir() / 'environments'}, then coda-agent compare --install"
            )


def kept() -> Path:
    """Where compiled kernels and choices are kept: QuACK's keys name no GPU, and not how it raced."""
    import torch

    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "no-gpu"
    return cache_dir() / "upstream" / f"{device}-{TIMED}-calls-{FINALISTS}-finalists"


def shorten(autotuner: Any, pool: Any) -> None:
    """QuACK's modules ``autotuner`` and ``cache.async_compile``: fewer calls but for a final of the fastest,
    and a word for each race."""
    kind, own = autotuner.Autotuner, autotuner._bench_cuda_graph_l2_rotate
    autotuner._bench_cuda_graph_l2_rotate = raced
    kind._bench = _announced(kind._bench, count(1))
    kind.__call__ = _remembered(kind.__call__)
    kind.check_disk_cache = _decided(kind.check_disk_cache, autotuner, own)
    pool.CompilePool.poll = _heard(pool.CompilePool.poll)


def raced(
    fn: Callable[..., object],
    arg_sets: Sequence[Sequence[Any]],
    kwarg_sets: Sequence[Mapping[str, Any]],
    extra_kwargs: Mapping[str, Any],
    quantiles: Sequence[float] | None = None,
) -> float | list[float]:
    """Milliseconds a call, as QuACK's own function of this name takes them (one replay of a CUDA graph that
    goes round the sets of inputs), of WARM and about TIMED calls; of long ones fewer."""
    import torch

    sets = list(zip(arg_sets, kwarg_sets, strict=True))

    def run(calls: int) -> None:
        for i in range(calls):
            args, kwargs = sets[i % len(sets)]
            fn(*args, **kwargs, **extra_kwargs)

    def timed(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    run(1)  # that launches, loads and may be slower
    torch.cuda.synchronize()
    enough = max(FEWEST, math.ceil(SHORT / max(timed(partial(run, 1)), SHORT / TIMED)))
    calls = max(1, enough // len(sets)) * len(sets)  # each set as often as another
    run(WARM * enough // TIMED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(calls)
    torch.cuda.synchronize()
    milliseconds = timed(graph.replay) / calls
    return [milliseconds for _ in quantiles] if quantiles else milliseconds


def _remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    """What a tuner is called with, as long as the call lasts: its final wants inputs, too."""

    def remembered(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.given = args, kwargs
        try:
            return call(tuner, *args, **kwargs)
        finally:
            tuner.given = None

    return remembered


def _decided(check: Callable[..., Any], autotuner: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Where a choice would be kept on disk: a final before it. ``own``: the tuner's own race."""

    def decided(tuner: Any, key: Any, configs: Any, race: Callable[[], None]) -> Any:
        def all_of_it() -> None:
            race()
            _final(tuner, key, autotuner, own)

        return check(tuner, key, configs, all_of_it)

    return decided


def _final(tuner: Any, key: Any, autotuner: Any, own: Callable[..., Any]) -> None:
    """The fastest few by the tuner's own race, one after the other: its choice is the fastest of these."""
    args, kwargs = tuner.given
    timings = {c: times[0] for c, times in tuner.configs_timings.items() if math.isfinite(times[0])}
    ranked = sorted(timings, key=timings.__getitem__)
    if len(ranked) < 2:
        return
    many = int(LONGEST / (OWN * timings[ranked[0]]))
    finalists = ranked[: min(FINALISTS, max(LEAST, many))]
    try:
        sets = autotuner._clone_l2_rotate_inputs(args, kwargs, autotuner._pick_l2_rotate_count(args, kwargs))
    except (RuntimeError, MemoryError):  # no room for them, as QuACK's race may find: its choice stands
        return
    autotuner._bench_cuda_graph_l2_rotate = own
    tuner._l2_cold_arg_sets, tuner._l2_cold_kwarg_sets = sets
    try:
        found = {config: tuner._bench(*args, config=config, **kwargs) for config in finalists}
    finally:
        autotuner._bench_cuda_graph_l2_rotate = raced
        tuner._l2_cold_arg_sets = tuner._l2_cold_kwarg_sets = None
    tuner.configs_timings = found
    tuner.cache[key] = min(found, key=found.__getitem__)


def _announced(bench: Callable[..., Any], races: Iterator[int]) -> Callable[..., Any]:
    """A schedule that is not compiled yet is tried again, and announced again."""

    def announced(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        report(GATE, f"{tuner.fn.__name__.strip('_')}, try {next(races)}")
        return bench(tuner, *args, **kwargs)

    return announced


def _heard(poll: Callable[..., Any]) -> Callable[..., Any]:
    """The tuner waits for compilers by asking for one after another, without end in sight for us."""
    said = time.monotonic()

    def heard(pool: Any, sha: str) -> Any:
        nonlocal said
        if time.monotonic() - said > SECONDS:
            said = time.monotonic()
            report(GATE, "compiling")
        return poll(pool, sha)

    return heard
