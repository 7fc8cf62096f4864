"""An interleaved benchmark on the GPU, inside a worker. Tasks of ``verifier.worker`` call this module.

Every arm is prepared before the timing, and the arm's outputs are compared once with the truth. If a library
fails, the failure is the result of the library's arm, and the other arms still run.
"""

from __future__ import annotations

import gc
import math
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from coda_agent.primitives.system import workers
from coda_agent.verifier import timing
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.benchmark import milliseconds, rotating, timed
from coda_agent.verifier.worker import cuda_error, report

SAID = 300  # characters of an arm's error
GATE = "compare"
PREPARING, TIMING = "inputs and truth", "timing"  # stages in which no arm runs
BEAT, LONGEST = 60.0, 1800.0  # seconds between the reports of ``_heartbeat``, and until its last report
# Limit in seconds for all rounds together. It must leave time for many rounds, because rounds vary by about
# 4 % at the power limit, and because a round of twelve arms is long.
ROUNDS_SECONDS = 6.0
WARM = 4.0  # seconds; a cool GPU is faster than one under load
OUT_OF_MEMORY = "OutOfMemoryError"  # the name of PyTorch's exception
# The largest allowed error of an output, relative to the truth's RMS. Rounding to bf16 costs 0.0017. Rounding
# as often as eager PyTorch costs at most 0.0043 over all specs, and 0.010 in a layer's gradients. A wrong
# computation (without a norm or rotation, or with exchanged operands) is off by about 1. Smaller mistakes are
# visible in the table of errors.
WORST = 0.1

Made = TypeVar("Made")


class SessionArms(Protocol):
    """The arms of a session."""

    def compiles(self) -> Iterable[Callable[[], list[workers.Job]]]:
        """One function per arm. The function lists the jobs that compile the arm's objects."""

    def tunes(self) -> Iterable[Callable[[], object]]:
        """One function per arm that lacks schedules for the session's sizes. The function tunes the arm and
        stores the result on disk."""


class WrongOutput(Exception):
    """An arm's output is wrong. The message says which output, and by how much."""


class PreparedArm(NamedTuple):
    """An arm that is ready to run on the stage's first inputs. ``losses``: each output's distance from the
    truth, relative to the truth and to the yardstick (the error that every kernel must make). A loss is NaN
    or infinite if the output has such values where the truth has none. ``arranged``: the bytes of prepared
    copies of inputs, which do not count as memory of a call."""

    call: Callable[[], object]
    losses: dict[str, dict[str, float]]
    arranged: int = 0


class Stage(ABC):
    """The inputs on which a worker prepares arms: ``turns`` sets of inputs, and the true outputs for the
    first set."""

    turns = 1

    @abstractmethod
    def enter(self, arm: str) -> PreparedArm:
        """Prepare the arm on the first set of inputs. Raises whatever the arm's library raises."""

    @abstractmethod
    def again(self, arm: str, turn: int) -> Callable[[], object]:
        """Prepare an arm on another set of inputs, after ``enter``."""

    @abstractmethod
    def forget_truth(self) -> None:
        """Free the truth, which is large and which only ``enter`` needs."""


def run_interleaved(
    made: Callable[[], Stage], names: Sequence[str], reference_arm: str, rounds: int
) -> dict[str, Any]:
    """Run an interleaved benchmark, and return its results.

    ``arms``: each arm's milliseconds by round, losses, bytes and seconds of preparation. ``failed``: why
    the other arms have no figures. ``conditions``: clock rates and power. ``names`` begins with the reference
    arm. Raises Failed if the reference arm fails.
    """
    report(GATE, PREPARING)  # reported before the stage starts, because the stage may kill the process
    import torch

    with _heartbeat(PREPARING):
        stage = made()
    _release()
    prepared: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    arms: list[timing.Arm] = []
    for name in names:
        report(GATE, name)
        try:
            with _heartbeat(name):
                torch.cuda.empty_cache()  # makes room for libraries that do not allocate through PyTorch
                arms.append(_prepared(stage, name, prepared))
        except Exception as error:  # a library may raise anything, and the arm's cell reports it
            if cuda_error(str(error)):
                raise  # the device is lost, so this process cannot continue
            if name == reference_arm:
                raise Failed("no_anchor", f"{reference_arm} did not run: {_words(error)}") from None
            failed[name] = _words(error)
        if name in failed:
            _release()
    stage.forget_truth()
    _release()
    report(GATE, TIMING)
    samples, conditions = _time_fitting(arms, prepared, failed, reference_arm, rounds)
    for name, found in prepared.items():
        found["milliseconds"] = milliseconds(samples[name])
    return {"arms": prepared, "failed": failed, "conditions": conditions}


def _prepared(stage: Stage, name: str, prepared: dict[str, dict[str, Any]]) -> timing.Arm:
    """Prepare the arm, and run it once on every set of inputs. ``prepared`` receives everything about the arm
    except times."""
    import torch

    begun, before = time.monotonic(), torch.cuda.memory_allocated()
    entrant = stage.enter(name)
    _expect_right(entrant.losses)
    peak = _peak(entrant.call, before)
    calls = [entrant.call, *(stage.again(name, turn) for turn in range(1, stage.turns))]
    for each in calls:  # so that every failure occurs before the timing
        each()
    torch.cuda.synchronize()
    prepared[name] = {
        "losses": entrant.losses,
        "bytes": max(peak - entrant.arranged, 0),
        "seconds": round(time.monotonic() - begun, 1),
    }
    return timing.Arm(name, rotating(calls))


def _expect_right(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Raise WrongOutput if the arm's outputs are wrong, because the times of a wrong arm mean nothing."""
    for output, found in losses.items():
        error = found["relative"]
        if not math.isfinite(error):
            raise WrongOutput(
                f"output {output!r} is NaN or infinite where the truth is not, or the other way round"
            )
        if error > WORST:
            raise WrongOutput(f"output {output!r} is off by {error:.3g} of the truth's RMS (limit {WORST})")


def _time_fitting(
    arms: list[timing.Arm], prepared: dict[str, Any], failed: dict[str, str], reference_arm: str, rounds: int
) -> tuple[dict[str, timing.Samples], dict[str, Any]]:
    """Time as many arms as fit in memory together. While the arms do not fit, the arm that uses the most
    memory fails, and is removed from ``arms``, so that its buffers are freed. Raises PyTorch's error if only
    the reference arm is left."""
    while True:
        try:
            return timed(arms, rounds, longest=ROUNDS_SECONDS)
        except Exception as error:
            rivals = [name for name in prepared if name != reference_arm]
            if type(error).__name__ != OUT_OF_MEMORY or not rivals:
                raise
            most = max(rivals, key=lambda name: prepared[name]["bytes"])
        failed[most] = "out of memory with all arms loaded; this one uses the most"
        del prepared[most]
        arms[:] = [arm for arm in arms if arm.name != most]
        _release()


@contextmanager
def _heartbeat(words: str) -> Iterator[None]:
    """Report ``words`` every BEAT seconds, because a compiler may be silent for longer than the parent
    process waits. The reports stop after LONGEST seconds. Only then can the parent process detect a kernel
    that hangs during preparation."""
    done = threading.Event()

    def beat() -> None:
        for _ in range(int(LONGEST / BEAT)):
            if done.wait(BEAT):
                return
            report(GATE, words)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        done.set()
        beating.join()


def _release() -> None:
    """Return unused memory to the driver, because other libraries allocate directly from the driver. If the
    device has a pending error, raise this error, because some libraries ignore it."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def compile_ahead(sessions: Sequence[SessionArms]) -> dict[str, Any]:
    """Compile in parallel the objects that these sessions will load. A failure is only reported, because the
    arm will fail again in its session."""
    words = f"compiling what {len(sessions)} row(s) run"
    report(GATE, words)
    jobs: dict[bytes, workers.Job] = {}  # rows of one operator may need the same object
    with _heartbeat(words):
        for arm in (arm for each in sessions for arm in each.compiles()):
            jobs |= {pickle.dumps(job): job for job in _attempt(arm) or ()}
        workers.run_jobs(jobs.values())
    return {}


def tune_ahead(session: SessionArms) -> dict[str, Any]:
    """Tune every arm that has no known schedules, and store the results on disk. Tuning runs in this process,
    because the compilers of this process have already started. A failure is only reported, because the arm
    will fail again in its session."""
    words = "tuning ahead of its first session"
    report(GATE, words)
    with _heartbeat(words):
        new: list[Callable[[], object]] | None = _attempt(partial(list, session.tunes()))
        for arm in new or ():
            _attempt(arm)
            _release()
    return {}


def _attempt(ahead: Callable[[], Made]) -> Made | None:
    """The result of the function ``ahead``, or None if the function fails. Raises the function's error if the
    device is lost."""
    try:
        return ahead()
    except Exception as error:  # a library may raise anything
        if cuda_error(str(error)):
            raise
        report(GATE, f"failed ahead of time: {_words(error)}")
        return None


def gpu(_: object) -> dict[str, Any]:
    """The name of this machine's GPU (``gpu``), and the versions of PyTorch's build (``torch`` and
    ``cuda``)."""
    from coda_agent.verifier.gpu.telemetry import device

    return {name: device()[name] for name in ("gpu", "torch", "cuda")}


def machine(_: object) -> dict[str, Any]:
    """The GPU's name, and the peak rates (``ceilings``) that the GPU reaches when warm. Each rate comes from
    the fastest of several calls. The calls are a cuBLAS matmul with 16-bit operands (FLOP/s), the same matmul
    with fp8 operands, and a copy (B/s, for the bytes read plus the bytes written)."""
    import torch

    n, size = 8192, 1 << 30
    a = torch.randn(n, n, device="cuda").bfloat16()
    small, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    calls: dict[str, Callable[[], object]] = {
        "tensor": partial(torch.mm, a, a.mT, out=product),
        "tensor_fp8": partial(
            torch._scaled_mm, small, small.mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        "memory": partial(target.copy_, source),
    }
    work = {"tensor": 2 * n**3, "tensor_fp8": 2 * n**3, "memory": 2 * size}
    arms = [timing.Arm(name, call) for name, call in calls.items()]
    samples = timing.measure(arms, rounds=20, warmup_seconds=WARM)
    ceilings = {name: work[name] / min(found.seconds) for name, found in samples.items()}
    return {"gpu": gpu(None)["gpu"], "ceilings": ceilings}


def _peak(call: Callable[[], object], before: int) -> int:
    """The peak of allocated bytes during a call, minus ``before``, the bytes that were allocated before the
    arm was prepared."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _words(error: Exception) -> str:
    if isinstance(error, WrongOutput):
        return str(error)
    first = (str(error).strip() or "it said nothing").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:SAID]
