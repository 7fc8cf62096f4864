"""On the GPU, in a worker: arms of a comparison take turns. Tasks of ``verifier.gpu.worker`` are made of it.

Every arm prepares what it likes outside the clock, and is compared with the truth once; what an arm's library
refuses or fails at is that arm's answer, and stops no other.
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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.system import workers
from coda_agent.verifier import timing
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.benchmark import milliseconds, rotating, timed
from coda_agent.verifier.gpu.worker import cuda_error, report

if TYPE_CHECKING:
    from coda_agent.primitives.runtime.launch import Kernel

SAID = 300  # characters of what an arm failed with
GATE = "compare"
PREPARING, TIMING = "inputs and truth", "timing"  # what is at work where no arm is
BEAT, LONGEST = 60.0, 1800.0  # seconds
ROUNDS_SECONDS = 6.0  # at most: at the power limit rounds spread by some 4 %, and 12 arms are long rounds
WARM = 4.0  # seconds: a cool GPU is faster than any that has worked for a while
OUT_OF_MEMORY = "OutOfMemoryError"  # PyTorch's, by its name
# Of the truth's RMS, what an output may be off by. To round to bf16 costs 0.0017; as often as eager PyTorch
# does on its way, 0.0043 at worst of all specs, and 0.010 of a layer's gradients. Another computation (a norm
# or rotation left out, operands exchanged) is off by about 1. Smaller mistakes stand in the table of errors.
WORST = 0.1

Made = TypeVar("Made")


@dataclass(frozen=True)
class Contender:
    """An accepted kernel: its program, or an edited text of it. ``schedules`` as it was tuned at these
    sizes; where there are none, it is tuned here, an edited text over those ``known`` to be right."""

    program: Program
    raw: str = ""
    schedules: Mapping[int, Schedule] | None = None
    known: Mapping[int, Sequence[Schedule]] | None = None

    def made(self) -> Kernel:
        """As a function of CUDA tensors."""
        from coda_agent.primitives.runtime.launch import Kernel

        return Kernel(self.program, self.schedules, self.known, self.raw)

    @property
    def fixed(self) -> dict[int, Schedule]:
        """By step, the schedules that it runs on whatever is raced."""
        return {**(self.schedules or {}), **self.program.schedule}

    def to_compile(self, sizes: Mapping[str, int]) -> list[workers.Job]:
        """On the schedules that it runs on there, or is raced on first."""
        from coda_agent.primitives.compiler.lower import lower
        from coda_agent.primitives.compiler.probe_schedules import candidates
        from coda_agent.primitives.runtime import tune

        fixed, known, fitting = self.fixed, self.known or {}, []
        for kernel in lower(self.program).gemms:
            step = kernel.step
            raced = [fixed[step]] if step in fixed else known.get(step) or candidates(kernel, sizes)
            fitting += [(step, schedule) for schedule in raced if kernel.admits(schedule, sizes)]
        return tune.to_compile(self.program, sizes, fitting, self.raw)

    def is_tuned(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is known what it runs on there. Asks for the GPU's name."""
        from coda_agent.primitives.lang.partition import cut
        from coda_agent.primitives.runtime import tune

        steps = {step.index for step in cut(self.program).gemms}
        return steps <= self.fixed.keys() or bool(tune.kept(self.program, sizes, self.known, self.raw))


class Seated(Protocol):
    """Whom a sitting is asked for."""

    def compiles(self) -> Iterable[Callable[[], list[workers.Job]]]:
        """By arm, what fills the caches with objects that it will load."""

    def tunes(self) -> Iterable[Callable[[], object]]:
        """By arm of which nothing is known at these sizes, what keeps a tuning of it on disk."""


class Wrong(Exception):
    """An arm's output is not what was asked for. Says which, and how far off it is."""


class Entrant(NamedTuple):
    """An arm that is ready on the first of the stage's inputs, and how far its outputs are from the truth,
    relatively and in yardsticks: NaN or infinite where values are that should not be. ``arranged``: bytes of
    what was prepared in an input's place, which no call is charged with."""

    call: Callable[[], object]
    losses: dict[str, dict[str, float]]
    arranged: int = 0


class Stage(ABC):
    """Where arms are prepared: ``turns`` sets of inputs, and what is true of the first. Made in a worker."""

    turns = 1

    @abstractmethod
    def enter(self, arm: str) -> Entrant:
        """On the first set of inputs. Raises whatever the arm's library does."""

    @abstractmethod
    def again(self, arm: str, turn: int) -> Callable[[], object]:
        """The same on another, for an arm that has entered."""

    @abstractmethod
    def forget_truth(self) -> None:
        """It is large, and only ``enter`` wants it."""


def contest(made: Callable[[], Stage], names: Sequence[str], anchor: str, rounds: int) -> dict[str, Any]:
    """``arms``: of each its milliseconds by round, its losses, its bytes and the seconds that it took to
    prepare; ``failed``: why others have none; ``conditions``. Failed where the anchor is among those, which
    comes first."""
    report(GATE, PREPARING)  # before it may take the process along
    import torch

    with _heard(PREPARING):
        stage = made()
    _release()
    seated: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    arms: list[timing.Arm] = []
    for name in names:
        report(GATE, name)
        try:
            with _heard(name):
                torch.cuda.empty_cache()  # not every library allocates from PyTorch's
                arms.append(_entered(stage, name, seated))
        except Exception as error:  # a library may raise anything: it is its cell that says so
            if cuda_error(str(error)):
                raise  # this process is of no more use to anyone
            if name == anchor:
                raise Failed("no_anchor", f"{anchor} did not run: {_words(error)}") from None
            failed[name] = _words(error)
        if name in failed:
            _release()
    stage.forget_truth()
    _release()
    report(GATE, TIMING)
    samples, conditions = _raced(arms, seated, failed, anchor, rounds)
    for name, found in seated.items():
        found["milliseconds"] = milliseconds(samples[name])
    return {"arms": seated, "failed": failed, "conditions": conditions}


def _entered(stage: Stage, name: str, seated: dict[str, dict[str, Any]]) -> timing.Arm:
    """An arm that ran on every set of inputs; ``seated`` gets what is known of it before it is timed."""
    import torch

    begun, before = time.monotonic(), torch.cuda.memory_allocated()
    entrant = stage.enter(name)
    _expect_right(entrant.losses)
    peak = _peak(entrant.call, before)
    calls = [entrant.call, *(stage.again(name, turn) for turn in range(1, stage.turns))]
    for each in calls:  # what fails must fail here
        each()
    torch.cuda.synchronize()
    seated[name] = {
        "losses": entrant.losses,
        "bytes": max(peak - entrant.arranged, 0),
        "seconds": round(time.monotonic() - begun, 1),
    }
    return timing.Arm(name, rotating(calls))


def _expect_right(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Raises Wrong: figures of another computation are no figures of this one."""
    for output, found in losses.items():
        error = found["relative"]
        if not math.isfinite(error):
            raise Wrong(
                f"output {output!r} is NaN or infinite where the truth is not, or the other way round"
            )
        if error > WORST:
            raise Wrong(f"output {output!r} is off by {error:.3g} of the truth's RMS (limit {WORST})")


def _raced(
    arms: list[timing.Arm], seated: dict[str, Any], failed: dict[str, str], anchor: str, rounds: int
) -> tuple[dict[str, timing.Samples], dict[str, Any]]:
    """The samples of those that have room beside each other: where there is none, whoever holds the most
    memory fails, and leaves ``arms``, which alone keep its buffers. Raises what PyTorch does where only the
    anchor is left."""
    while True:
        try:
            return timed(arms, rounds, longest=ROUNDS_SECONDS)
        except Exception as error:
            rivals = [name for name in seated if name != anchor]
            if type(error).__name__ != OUT_OF_MEMORY or not rivals:
                raise
            most = max(rivals, key=lambda name: seated[name]["bytes"])
        failed[most] = "out of memory while all took turns, of which this one holds the most"
        del seated[most]
        arms[:] = [arm for arm in arms if arm.name != most]
        _release()


@contextmanager
def _heard(words: str) -> Iterator[None]:
    """Says so every BEAT seconds for at most LONGEST: a compiler may be silent for longer than whoever
    listens has patience. A kernel that does not end while it is prepared is found after that."""
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
    """Give back what nobody refers to any more: to the driver, which other libraries allocate from. Raises
    what the device has to tell: not every library's own words say that it is of no more use."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def compiled(sittings: Sequence[Seated]) -> dict[str, Any]:
    """What these will load, compiled in parallel before the first one sits. What is refused here will be
    again, and is for its arm to tell."""
    words = f"compiling what {len(sittings)} row(s) run"
    report(GATE, words)
    jobs: dict[bytes, workers.Job] = {}  # rows of one operator may want the same
    with _heard(words):
        for arm in (arm for each in sittings for arm in each.compiles()):
            jobs |= {pickle.dumps(job): job for job in _tried(arm) or ()}
        workers.run_jobs(jobs.values())
    return {}


def tuned(sitting: Seated) -> dict[str, Any]:
    """Schedules for what it runs and no report has any of, kept on disk: by a process that has compiled
    before, whose compilers are warm. What is refused here will be again, as above."""
    words = "tuning ahead of its first sitting"
    report(GATE, words)
    with _heard(words):
        new: list[Callable[[], object]] | None = _tried(partial(list, sitting.tunes()))
        for arm in new or ():
            _tried(arm)
            _release()
    return {}


def _tried(ahead: Callable[[], Made]) -> Made | None:
    """What it gives; None where it does not work. Raises what the device has to tell, for this process is of
    no more use then."""
    try:
        return ahead()
    except Exception as error:  # a library may raise anything
        if cuda_error(str(error)):
            raise
        report(GATE, f"not ahead: {_words(error)}")
        return None


def gpu(_: object) -> dict[str, Any]:
    """``gpu``: what this machine's is called; ``torch`` and ``cuda``: the build that drives it."""
    from coda_agent.verifier.gpu.telemetry import device

    return {name: device()[name] for name in ("gpu", "torch", "cuda")}


def machine(_: object) -> dict[str, Any]:
    """The ``ceilings`` that a warm GPU reaches: the fastest of several cuBLAS products (FLOP/s of 16-bit and
    of fp8 operands) and of copies (B/s, read and written); and what it is called."""
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
    """Bytes held at most during a call beyond those of ``before`` it was prepared."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _words(error: Exception) -> str:
    if isinstance(error, Wrong):
        return str(error)
    first = (str(error).strip() or "it said nothing").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:SAID]
