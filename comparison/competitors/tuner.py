"""Prepare a process for CODA's own package. The preparation checks the versions that the package pins, and
caches the choices of the package's tuner on disk. It also makes the tuning shorter, with progress messages.

The package tunes with QuACK's autotuner, which calls each of up to 76 schedules at least 254 times, anew in
every process. That takes more than half an hour, with minutes of silence. Here all schedules are timed with
few calls, and the best few are timed again by the tuner's own method. Few calls alone would choose badly:
compilers run between the timings, the GPU cools in these pauses, and a cool GPU runs at a higher clock rate.
Importing this module imports nothing heavy.
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
from coda_agent.verifier.worker import report

PINNED = {"quack-kernels": "0.6.1", "nvidia-cutlass-dsl": "4.6.0"}
WARM, TIMED = 10, 20  # limits on warm-up and timed calls per schedule; QuACK makes at least 54 and 200
SHORT, FEWEST = 100.0, 4  # timed calls end after SHORT milliseconds, but there are at least FEWEST calls
OWN = 254  # number of calls in the tuner's own timing
# The final round times the fastest schedules again. Its limits are the largest and the smallest number of
# schedules, and the milliseconds that all of them may take.
FINALISTS, LEAST, LONGEST = 8, 3, 20_000.0
GATE = "tuning"
SECONDS = 10.0  # seconds between reports while only compilers work


@cache
def prepare() -> None:
    """Prepare the process before the package is imported. Raises RuntimeError if the environment lacks the
    pinned versions."""
    check()
    os.environ |= {
        "QUACK_CACHE_AUTOTUNING": "1",  # the package disables this default of QuACK
        "QUACK_CACHE_DIR": str(cache_folder()),
        "QUACK_COMPILE_WORKERS": str(cores()),
    }
    importlib.import_module("quack.cache").CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]
    shorten(*map(importlib.import_module, ("quack.autotuner", "quack.cache.async_compile")))


def check() -> None:
    """Raise RuntimeError unless this process has the versions that the package pins."""
    for package, wanted in PINNED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            raise RuntimeError(
                f"coda-kernels needs {package} {wanted}, but its worker found {found}: delete "
                f"{cache_dir() / 'environments'}, then run coda-agent compare --install"
            )


def cache_folder() -> Path:
    """The folder of compiled kernels and of the tuner's choices. The folder's name contains the GPU and the
    timing method, because QuACK's cache keys contain neither."""
    import torch

    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "no-gpu"
    return cache_dir() / "upstream" / f"{device}-{TIMED}-calls-{FINALISTS}-finalists"


def shorten(autotuner: Any, pool: Any) -> None:
    """Patch QuACK's modules ``autotuner`` and ``cache.async_compile``. Then the tuner times all schedules
    with fewer calls, times the fastest ones again in a final round, and reports each timing."""
    kind, own = autotuner.Autotuner, autotuner._bench_cuda_graph_l2_rotate
    autotuner._bench_cuda_graph_l2_rotate = time_configs
    kind._bench = _announced(kind._bench, count(1))
    kind.__call__ = _remembered(kind.__call__)
    kind.check_disk_cache = _decided(kind.check_disk_cache, autotuner, own)
    pool.CompilePool.poll = _reporting(pool.CompilePool.poll)


def time_configs(
    fn: Callable[..., object],
    arg_sets: Sequence[Sequence[Any]],
    kwarg_sets: Sequence[Mapping[str, Any]],
    extra_kwargs: Mapping[str, Any],
    quantiles: Sequence[float] | None = None,
) -> float | list[float]:
    """Return a schedule's milliseconds per call. This function replaces QuACK's
    ``_bench_cuda_graph_l2_rotate`` and takes the same arguments. It makes WARM calls, then replays a CUDA
    graph of about TIMED calls, which cycle through the sets of inputs. If a call is long, it is repeated
    fewer times."""
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

    run(1)  # the first call also loads the kernel and may be slower
    torch.cuda.synchronize()
    enough = max(FEWEST, math.ceil(SHORT / max(timed(partial(run, 1)), SHORT / TIMED)))
    calls = max(1, enough // len(sets)) * len(sets)  # so that each set of inputs is used equally often
    run(WARM * enough // TIMED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(calls)
    torch.cuda.synchronize()
    milliseconds = timed(graph.replay) / calls
    return [milliseconds for _ in quantiles] if quantiles else milliseconds


def _remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tuner's call. During the call, ``tuner.given`` has the tuned function's arguments, because the
    final round needs these arguments."""

    def remembered(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.given = args, kwargs
        try:
            return call(tuner, *args, **kwargs)
        finally:
            tuner.given = None

    return remembered


def _decided(check: Callable[..., Any], autotuner: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the tuner run a final round (``_final``) before it stores a choice. ``own``: the tuner's own
    timing."""

    def decided(tuner: Any, key: Any, configs: Any, race: Callable[[], None]) -> Any:
        def all_of_it() -> None:
            race()
            _final(tuner, key, autotuner, own)

        return check(tuner, key, configs, all_of_it)

    return decided


def _final(tuner: Any, key: Any, autotuner: Any, own: Callable[..., Any]) -> None:
    """Time the fastest few schedules again with the tuner's own timing, one after another. The fastest of
    these schedules becomes the tuner's choice."""
    args, kwargs = tuner.given
    timings = {c: times[0] for c, times in tuner.configs_timings.items() if math.isfinite(times[0])}
    ranked = sorted(timings, key=timings.__getitem__)
    if len(ranked) < 2:
        return
    many = int(LONGEST / (OWN * timings[ranked[0]]))
    finalists = ranked[: min(FINALISTS, max(LEAST, many))]
    try:
        sets = autotuner._clone_l2_rotate_inputs(args, kwargs, autotuner._pick_l2_rotate_count(args, kwargs))
    except (RuntimeError, MemoryError):  # there is no memory for the sets of inputs, so keep the choice
        return
    autotuner._bench_cuda_graph_l2_rotate = own
    tuner._l2_cold_arg_sets, tuner._l2_cold_kwarg_sets = sets
    try:
        found = {config: tuner._bench(*args, config=config, **kwargs) for config in finalists}
    finally:
        autotuner._bench_cuda_graph_l2_rotate = time_configs
        tuner._l2_cold_arg_sets = tuner._l2_cold_kwarg_sets = None
    tuner.configs_timings = found
    tuner.cache[key] = min(found, key=found.__getitem__)


def _announced(bench: Callable[..., Any], races: Iterator[int]) -> Callable[..., Any]:
    """Report each timing. A schedule that is not compiled yet is tried again later, and reported again."""

    def announced(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        report(GATE, f"{tuner.fn.__name__.strip('_')}, try {next(races)}")
        return bench(tuner, *args, **kwargs)

    return announced


def _reporting(poll: Callable[..., Any]) -> Callable[..., Any]:
    """Report "compiling" every SECONDS seconds, while the tuner waits for one compiler after another."""
    said = time.monotonic()

    def heard(pool: Any, sha: str) -> Any:
        nonlocal said
        if time.monotonic() - said > SECONDS:
            said = time.monotonic()
            report(GATE, "compiling")
        return poll(pool, sha)

    return heard
