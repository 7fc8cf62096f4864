"""Time several arms interleaved on one GPU, each call from a cold L2 by default.

Every round runs every arm once in random order, so clock rate, temperature and other load affect all arms
equally. ``verifier.statistics.ratio`` then compares round by round. The GPU's clocks are never set.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


FEWEST = 12  # least number of rounds in a measurement
Region = tuple["torch.cuda.Event", "torch.cuda.Event"]


@dataclass(frozen=True)
class Arm:
    """One implementation to time. ``call`` launches work on the current CUDA stream, and returns before the
    work ends. ``before`` launches other work ahead of the flush and of each ``call``, and is not timed."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Samples:
    """The seconds of one arm, in order of rounds: sample i of every arm is from round i."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)


class Clock(Protocol):
    """A clock for ``measure``: ``CudaClock`` on a GPU, or a simulated clock in tests."""

    def now(self) -> float:
        """The time on the host, in seconds."""

    def flush(self) -> None:
        """Enqueue an operation that evicts everything from the L2."""

    def start(self) -> int:
        """Mark the start of a timed region. The host may enqueue the region's work before the device reaches
        the region."""

    def stop(self, mark: int) -> None:
        """Mark the end of a timed region."""

    def turn(self) -> tuple[float, ...]:
        """End a round, and wait for the previous round. Returns the seconds of the previous round's regions
        in order, or an empty tuple if ``drain`` has already returned them."""

    def drain(self) -> tuple[float, ...]:
        """Wait for the last ended round; return the seconds of its regions."""


def measure(
    arms: Sequence[Arm],
    *,
    rounds: int = 30,
    warmup_seconds: float = 2.0,
    longest: float = math.inf,
    cold: bool = True,
    seed: int = 0,
    clock: Clock | None = None,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Samples]:
    """Measure every arm in every round; return the seconds by the arm's name.

    ``cold`` flushes the L2 before each timed call, outside the timed region. ``seed`` fixes the order of the
    arms in every round. ``on_round`` receives the number of finished rounds. The warm-up drops whole rounds:
    one round in which first calls compile, then ``warmup_seconds`` of rounds. The warm-up is long because a
    GPU slows down over seconds as it reaches its power limit, and some kernels slow down more than others.
    Once FEWEST rounds have run, no round begins after ``longest`` seconds. Raises ValueError if there are no
    arms or rounds, or if names repeat.
    """
    _check(arms, rounds)
    clock = CudaClock() if clock is None else clock
    _warm_up(arms, warmup_seconds, cold, clock)
    shuffled = random.Random(seed)
    orders: list[Sequence[Arm]] = []
    seconds = []  # each round is read while the next round runs, so that the device always has work
    end = clock.now() + longest
    while len(orders) < rounds and (len(orders) < FEWEST or clock.now() < end):
        orders.append(shuffled.sample(arms, len(arms)))
        seconds.append(_round(orders[-1], cold, clock))
        if on_round is not None:
            on_round(len(orders))
    seconds = [*seconds[1:], clock.drain()]
    found: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for order, row in zip(orders, seconds, strict=True):
        for arm, taken in zip(order, row, strict=True):
            found[arm.name].append(taken)
    return {name: Samples(tuple(row)) for name, row in found.items()}


def _check(arms: Sequence[Arm], rounds: int) -> None:
    names = [arm.name for arm in arms]
    if not names:
        raise ValueError("there are no arms to measure")
    if len(set(names)) < len(names):
        raise ValueError(f"arms {', '.join(names)}: two share a name, and samples are kept by name")
    if rounds < 1:
        raise ValueError(f"{rounds} rounds measure nothing; use at least 1, and 30 for an interval")


def _warm_up(arms: Sequence[Arm], seconds: float, cold: bool, clock: Clock) -> None:
    _round(arms, cold, clock)
    clock.drain()  # the first round compiles, which must not count as warm-up
    begin = clock.now()
    turn = 0
    while clock.now() - begin < seconds:
        turn = (turn + 1) % len(arms)
        _round([*arms[turn:], *arms[:turn]], cold, clock)


def _round(arms: Sequence[Arm], cold: bool, clock: Clock) -> tuple[float, ...]:
    """Enqueue every arm once; return the seconds of the previous round."""
    for arm in arms:
        if arm.before is not None:
            arm.before()
        if cold:
            clock.flush()
        mark = clock.start()
        arm.call()
        clock.stop(mark)
    return clock.turn()


class CudaClock:
    """A clock that times regions with CUDA events on the current stream of the current device.

    The host enqueues each region before the device reaches it, so a region's time does not include launch
    latency; ``host_time`` measures this latency. The host is one round ahead of the device. Before each
    region, the device spins so that the host has time to enqueue the region. The device does not spin for
    long kernels. Kernels are long if the device's time for a round's regions is more than twice the host's
    time to enqueue the whole round, including flushes and ``before`` calls. Long kernels must run back to
    back. An H100 that idles between kernels saves power, and then reaches clock rates that no training step
    reaches.
    """

    MIN_HEAD_START = 100e-6
    MAX_HEAD_START = 5e-3  # limit, because a first call that compiles would demand a far longer spin
    FLUSH_BYTES = 256 << 20  # as in triton's do_bench; twice the L2 if that is more
    CYCLES_PER_SECOND = 2e9  # higher than any GPU's boost clock so far, so that no spin is too short

    def __init__(self) -> None:
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = max(self.FLUSH_BYTES, 2 * properties.L2_cache_size)
        self._scratch = torch.empty(size // 4, dtype=torch.int32, device="cuda")
        self._regions: list[Region] = []
        self._before: list[Region] = []  # regions of the last ended round
        self._entered = 0.0
        self._spin = self.MIN_HEAD_START
        self._longest = 0.0  # the longest time, in host seconds, to enqueue a region of this round
        self._turned = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter()

    def flush(self) -> None:
        self._scratch.fill_(1)  # written by a kernel, because a memset might take another path

    def start(self) -> int:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._regions.append((begin, end))
        if self._spin:
            torch.cuda._sleep(int(self._spin * self.CYCLES_PER_SECOND))
        self._entered = time.perf_counter()
        begin.record()
        return len(self._regions) - 1

    def stop(self, mark: int) -> None:
        self._regions[mark][1].record()
        self._longest = max(self._longest, time.perf_counter() - self._entered)

    def turn(self) -> tuple[float, ...]:
        host = time.perf_counter() - self._turned
        seconds = self.drain()
        if sum(seconds) > 2 * host:
            self._spin = 0.0
        else:
            self._spin = min(max(self.MIN_HEAD_START, 2 * self._longest), self.MAX_HEAD_START)
        self._before, self._regions, self._longest = self._regions, [], 0.0
        self._turned = time.perf_counter()
        return seconds

    def drain(self) -> tuple[float, ...]:
        ended, self._before = self._before, []
        if ended:
            ended[-1][1].synchronize()
        return tuple(begin.elapsed_time(end) * 1e-3 for begin, end in ended)


def host_time(
    call: Callable[[], object], n: int = 200, *, synchronize: Callable[[], object] | None = None
) -> float:
    """The seconds that the host spends in ``call``, as the median of ``n`` calls. The host waits for the
    device before each call. Otherwise the launch queue could fill up, and the result would be the device's
    time.

    With small inputs, the result is the cost of a launch.
    """
    if n < 1:
        raise ValueError(f"{n} calls give no median; use at least 1")
    if synchronize is None:
        import torch

        synchronize = torch.cuda.synchronize
    call()
    costs = []
    for _ in range(n):
        synchronize()
        begin = time.perf_counter()
        call()
        costs.append(time.perf_counter() - begin)
    synchronize()
    return median(costs)
