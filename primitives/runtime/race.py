"""Time several calls on the GPU: interleaved in random order, each with a cold L2."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

FINAL_ROUNDS = 40  # rounds of the last, most careful comparison
FEWEST = 4  # least number of rounds, used for long calls; the last comparison has at least 13
PER_ROUND = 3.5  # milliseconds; a longer call gets proportionally fewer rounds
WARM_UP = 0.7  # seconds of load before timing, so that clock rates settle
LAST_WARM_UP = 2.0  # seconds before the last comparison, to get as near the power limit as a benchmark does
COOLING = 2.0  # one second of rest cancels the effect of this many seconds of load
HEAD_START = 1_000_000  # cycles that the GPU idles before a short call, to hide the call's launch time
SHORT = 0.2  # milliseconds; the GPU does not idle if all calls are longer

Choice = TypeVar("Choice")


def race_calls(
    calls: Sequence[tuple[Choice, Callable[[], object]]], rounds: int
) -> list[tuple[Choice, float]]:
    """Warm the GPU up, then time the calls. Return each choice with its call's median milliseconds, fastest
    first. A call that fails is left out."""
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
    """The recent load on this process's GPU. After recent load, the next warm-up can be shorter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seconds, self._ended = 0.0, -math.inf

    @contextlib.contextmanager
    def more(self) -> Iterator[float]:
        """Count the ``with`` block as load. Yields how many seconds of earlier load still count as a
        warm-up."""
        begun = self._clock()
        before = max(0.0, self._seconds - COOLING * (begun - self._ended))
        yield before
        self._ended = self._clock()
        self._seconds = min(LAST_WARM_UP, before + self._ended - begun)


_load = Load()


def _interleaved(calls: Sequence[Callable[[], object]], rounds: int, before: Sequence[float]) -> list[float]:
    """The median milliseconds of each call. ``before``: the calls' milliseconds in an earlier round. If any
    call is short, the GPU idles before each call, so that the launch time is hidden.

    The GPU must not idle between long calls. An idle GPU saves power, so its clock rate afterwards would be
    higher than in a benchmark, and the best tile depends on the clock rate.
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
