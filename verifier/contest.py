"""On the GPU, in a worker: arms of a comparison take turns. Tasks of ``verifier.gpu`` are made of it.

Every arm prepares what it likes outside the clock, and is compared with the truth once; what an arm's library
refuses or fails at is that arm's answer, and stops no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from primitives.ir import Program, Schedule
from verifier import timing
from verifier.gpu import cuda_error, report
from verifier.scoring import milliseconds, rotating, timed

if TYPE_CHECKING:
    from primitives.launch import Kernel

SAID = 300  # characters of what an arm failed with
GATE = "compare"


@dataclass(frozen=True)
class Contender:
    """An accepted kernel: its program, or an edited text of it. ``schedules`` as it was tuned at these
    sizes; where there are none, it is tuned over those that were good elsewhere."""

    program: Program
    raw: str = ""
    schedules: Mapping[int, Schedule] | None = None
    known: Mapping[int, Sequence[Schedule]] | None = None

    def made(self) -> Kernel:
        """As a function of CUDA tensors."""
        from primitives.launch import Kernel

        return Kernel(self.program, self.schedules, self.known, self.raw)


class Entrant(NamedTuple):
    """An arm that is ready on the first of the stage's inputs, and how far its outputs are from the truth."""

    call: Callable[[], object]
    losses: dict[str, dict[str, float]]


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


def contest(stage: Stage, names: Sequence[str], anchor: str, rounds: int) -> dict[str, Any]:
    """``arms``: of each its milliseconds by round, its losses and its bytes; ``failed``: why others have
    none; ``conditions``. RuntimeError where the anchor is among those."""
    import torch

    seated: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    arms = []
    for name in names:
        report(GATE, name)  # before it may take the process along
        before = torch.cuda.memory_allocated()
        try:
            call, losses = stage.enter(name)
            peak = _peak(call, before)
            calls = [call, *(stage.again(name, turn) for turn in range(1, stage.turns))]
            for each in calls:  # what fails must fail here
                each()
            torch.cuda.synchronize()
        except Exception as error:  # a library may raise anything: it is its cell that says so
            if cuda_error(str(error)):
                raise  # this process is of no more use to anyone
            failed[name] = _words(error)
        else:
            seated[name] = {"losses": losses, "bytes": peak}
            arms.append(timing.Arm(name, rotating(calls)))
    if anchor not in seated:
        raise RuntimeError(f"{anchor} did not run: {failed[anchor]}")
    stage.forget_truth()
    report(GATE, "timing")
    samples, conditions = timed(arms, rounds)
    for name, found in seated.items():
        found["milliseconds"] = milliseconds(samples[name])
    return {"arms": seated, "failed": failed, "conditions": conditions}


def machine(_: object) -> dict[str, Any]:
    """``gpu``, and the ``ceilings`` that it reaches: the fastest of several cuBLAS products (FLOP/s of 16-bit
    and of fp8 operands) and of copies (B/s, read and written)."""
    import torch

    from verifier.conditions import device

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
    samples = timing.measure(arms, rounds=20, warmup_seconds=0.2)
    ceilings = {name: work[name] / min(found.seconds) for name, found in samples.items()}
    return {"gpu": device()["gpu"], "ceilings": ceilings}


def _peak(call: Callable[[], object], before: int) -> int:
    """Bytes held at most during a call beyond those of ``before`` it was prepared."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _words(error: Exception) -> str:
    first = (str(error).strip() or "it said nothing").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:SAID]
