"""What CODA's own package needs of its process before it is imported: the versions that it pins, its tuner's
choices kept on disk, and races that are shorter and never silent.

The package tunes with QuACK's autotuner: up to 76 schedules, each called 254 times at least, in every
process anew: more than half an hour, and minutes without a word. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from primitives.files import cache_dir
from primitives.workers import count as cores
from verifier.gpu import report

PINNED = {"quack-kernels": "0.6.1", "nvidia-cutlass-dsl": "4.6.0"}
WARM, TIMED = 10, 20  # calls of a schedule: QuACK's own are 54 at least, and 200
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
    return cache_dir() / "upstream" / f"{device}-{TIMED}-calls"


def shorten(autotuner: Any, pool: Any) -> None:
    """QuACK's modules ``autotuner`` and ``cache.async_compile``: fewer calls, and a word for each race."""
    autotuner._bench_cuda_graph_l2_rotate = raced
    autotuner.Autotuner._bench = _announced(autotuner.Autotuner._bench, count(1))
    pool.CompilePool.poll = _heard(pool.CompilePool.poll)


def raced(
    fn: Callable[..., object],
    arg_sets: Sequence[Sequence[Any]],
    kwarg_sets: Sequence[Mapping[str, Any]],
    extra_kwargs: Mapping[str, Any],
    quantiles: Sequence[float] | None = None,
) -> float | list[float]:
    """Milliseconds a call, as QuACK's own function of this name takes them (one replay of a CUDA graph that
    goes round the sets of inputs), of WARM and about TIMED calls."""
    import torch

    sets = list(zip(arg_sets, kwarg_sets, strict=True))

    def run(calls: int) -> None:
        for i in range(calls):
            args, kwargs = sets[i % len(sets)]
            fn(*args, **kwargs, **extra_kwargs)

    calls = max(1, TIMED // len(sets)) * len(sets)  # each set as often as another
    run(WARM)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(calls)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    milliseconds = float(start.elapsed_time(end)) / calls
    return [milliseconds for _ in quantiles] if quantiles else milliseconds


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
