"""Lease the slots (cores and GPUs) of an executor. Each piece of work gets one slot, and each slot runs one
piece at a time.

If a slot is lost, its piece starts over on another slot. The driver's clock times the leases, so the clocks
of other machines do not matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coda_agent.agent.fleet.executor import CPU, Executor, ExecutorLost, Slot, SlotLost
from coda_agent.primitives.errors import Absent
from coda_agent.verifier.gates import Progress, silent
from coda_agent.verifier.worker import Lost, Task, WorkerError

TICK = 0.5  # seconds between two reads of the executor's slots
# seconds to wait for a core or GPU if the fleet has none, for example because nodes are still joining
ALONE = 600.0
INVALID = 2  # a GPU that fails its controls this often in a row is excluded; one failure may be noise
LOSSES = 5  # a piece of work is given up after it loses this many slots

Record = Callable[[str, dict[str, Any]], None]  # takes an event's kind and payload


class GivenUp(Absent):
    """A piece of work is given up: it lost too many slots, failed twice, or has no slot left to run on."""


class Suspect(Exception):
    """A piece of work failed for the first time, and no kernel caused the failure. The piece starts over, if
    possible on another node."""


@dataclass
class SlotState:
    """The state of a slot. ``now``: the piece that runs on the slot; "" if the slot is idle. ``invalid``: how
    often in a row the GPU has failed its controls."""

    slot: Slot
    joined: float
    now: str = ""
    busy: float = 0.0
    since: float = 0.0
    invalid: int = 0


@dataclass
class Pool:
    """The slots of one driver.

    ``left_out``: the excluded slots, each with the reason; an earlier driver of the sweep may have excluded
    them. ``kind``: the GPU model to measure on, by default the model of the first GPU. Other models are
    excluded, because times on two models cannot be compared. ``objects``: the names of compiled objects, by
    the label of the work that compiled them (``agent.fleet.objects``).
    """

    executor: Executor
    record: Record
    left_out: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    uses: dict[str, SlotState] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    objects: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._closed = ""
        self._suspects: dict[str, tuple[Slot, str]] = {}  # slot and error of each piece that failed once
        # requests that wait for a GPU (True) or for a core (False)
        self._queues: dict[bool, list[object]] = {True: [], False: []}
        self._look()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def clock(self) -> float:
        """Seconds since this driver began."""
        return time.monotonic() - self._began

    @property
    def gpus(self) -> list[SlotState]:
        return [use for use in list(self.uses.values()) if use.slot.kind != CPU]

    def close(self, reason: str = "the driver ends") -> None:
        """Allow no further leases."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    @contextmanager
    def lease(
        self, gpu: bool, piece: str, deadline: float | None = None, *, prefer: str = ""
    ) -> Iterator[Slot]:
        """Hold a slot during the block: a GPU if ``gpu`` is true, else a core. If the slot named ``prefer``
        is free, take that slot. Requests are served in their order. Raises TimeoutError if no slot is free at
        ``deadline``. Raises GivenUp if the pool is closed, or if the pool has had no GPU (or no core) for
        ``ALONE`` seconds. If the block fails and no kernel caused the failure, raises Suspect for the piece's
        first failure, and GivenUp for the second."""
        asked = self.clock()
        use = self._take(gpu, piece, deadline, prefer)
        outcome = "void"
        try:
            yield use.slot
            outcome = "done"
            suspect, words = self._suspects.pop(piece, (use.slot, ""))
            if suspect.name != use.slot.name:
                self.leave_out(suspect, f"a piece failed there, and not elsewhere: {words}")
        except SlotLost as lost:
            if not self._closed:
                self.leave_out(use.slot, f"lost: {lost}", forget=True)
            raise
        except (WorkerError, Lost) as error:
            if isinstance(error, Lost) and error.code == "hung" and not gpu:
                raise
            raise self._suspect(piece, use.slot, str(error).strip().splitlines()[-1]) from error
        finally:
            end = self.clock()
            with self._changed:
                use.now, use.busy = "", use.busy + end - use.since
                self._changed.notify_all()
            spent = {"waited": round(use.since - asked, 3), "seconds": round(end - use.since, 3)}
            self.record("lease", {"piece": piece, **_slot_fields(use.slot), **spent, "outcome": outcome})

    def run(
        self, piece: str, task: Task, argument: Any, *, patience: float, progress: Progress = silent
    ) -> dict[str, Any]:
        """Run a piece on a core. The piece starts over if its slot is lost. If the piece's process dies or
        hangs, the piece starts over once, because the machine may be the cause. Raises Lost if the piece
        hangs twice, and GivenUp if the piece fails twice in another way."""
        hung = False
        for _ in range(LOSSES):
            try:
                with self.lease(False, piece) as slot:
                    return slot.run(task, argument, patience=patience, progress=progress)
            except (SlotLost, Suspect):
                continue
            except Lost:
                if hung:
                    raise
                hung = True
        raise GivenUp(
            f"{piece}: {LOSSES} slots were lost while they ran it; check their nodes, and resume the sweep"
        )

    def _suspect(self, piece: str, slot: Slot, words: str) -> Exception:
        """The error for a piece whose failure no kernel caused. The first failure is blamed on the slot
        (Suspect), and the second failure on this project's own code (GivenUp)."""
        if piece in self._suspects:
            del self._suspects[piece]
            return GivenUp(f"{piece} failed twice, the second time on {slot.name}: {words}")
        self._suspects[piece] = slot, words
        return Suspect(words)

    def leave_out(self, slot: Slot, reason: str, *, forget: bool = False) -> None:
        """Do not lease this slot again. ``forget``: the slot was lost and may return with its node. Without
        ``forget``, the slot stays excluded until a person resumes the sweep and readmits it."""
        with self._changed:
            self.uses.pop(slot.name, None)
            if not forget:
                self.left_out[slot.name] = reason
        self.record("left", {**_slot_fields(slot), "reason": reason, "stays_out": not forget})

    def controlled(self, slot: Slot, fault: str) -> None:
        """Record whether a GPU's controls (``driver.measured_on``) failed in a measurement. Exclude the GPU
        after INVALID failures in a row. ``fault``: why the controls failed; "" if all controls passed."""
        if not (use := self.uses.get(slot.name)):
            return
        use.invalid = use.invalid + 1 if fault else 0
        if use.invalid == INVALID:
            self.leave_out(slot, f"it failed its controls {INVALID} times in a row: {fault}")

    def _take(self, gpu: bool, piece: str, deadline: float | None, prefer: str) -> SlotState:
        lonely, queue, turn = time.monotonic() + ALONE, self._queues[gpu], object()
        with self._changed, _queued(queue, turn):
            while True:
                if self._closed:
                    raise GivenUp(self._closed)
                able = [use for use in self.uses.values() if (use.slot.kind != CPU) is gpu]
                if piece in self._suspects:  # if possible, avoid the node or the slot on which it failed
                    suspect = self._suspects[piece][0]
                    others = [u for u in able if u.slot.name != suspect.name]
                    able = [u for u in others if u.slot.node != suspect.node] or others or able
                free = [use for use in able if not use.now]
                use = next((use for use in free if use.slot.name == prefer), free[0] if free else None)
                if use and queue[0] is turn:
                    use.now, use.since = piece, self.clock()
                    self._changed.notify_all()  # so that the next request takes its turn
                    return use
                if not use and piece in self._suspects and queue[0] is turn:
                    # this request waits for a slot on another node; meanwhile serve the other requests
                    queue.append(queue.pop(0))
                lonely = time.monotonic() + ALONE if able else lonely
                if time.monotonic() >= lonely:
                    raise GivenUp(self._alone("GPU" if gpu else "core"))
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError
                self._changed.wait(TICK)

    def await_gpu(self) -> None:
        """Wait for the first GPU. Raises GivenUp if the pool is closed, or after ``ALONE`` seconds."""
        end = time.monotonic() + ALONE
        while not self.gpus:
            if self._closed or time.monotonic() >= end:
                raise GivenUp(self._closed or self._alone("GPU"))
            time.sleep(TICK)

    @contextmanager
    def threads(self, number: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that lease slots. If the block is interrupted, all work ends, and no further lease
        starts."""
        with ThreadPoolExecutor(number or 1) as threads:
            try:
                yield threads
            except KeyboardInterrupt:
                self.close("interrupted")
                threads.shutdown(wait=False, cancel_futures=True)
                for use in list(self.uses.values()):
                    use.slot.close()
                raise

    def _alone(self, kind: str) -> str:
        excluded = "".join(f"; {name} is excluded: {why}" for name, why in self.left_out.items())
        remedy = "; to use one again: coda-agent resume SWEEP --readmit NAME" if excluded else ""
        return f"no {kind} has been in the fleet for {ALONE:.0f} s{excluded}{remedy}"

    def _follow(self) -> None:
        while not self._closed:
            time.sleep(TICK)
            try:
                self._look()
            except ExecutorLost as lost:
                self.close(str(lost))

    def _look(self) -> None:
        """Add new slots, drop idle slots that are gone, exclude GPUs of another model, and record the nodes
        that the executor refuses."""
        found = self.executor.slots()
        here = {slot.name for slot in found}
        for use in [use for name, use in self.uses.items() if name not in here and not use.now]:
            self.leave_out(use.slot, "its node has gone", forget=True)
        for slot in found:
            if slot.name in self.uses or slot.name in self.left_out:
                continue
            if slot.kind != CPU:
                self.kind = self.kind or slot.kind
                if slot.kind != self.kind:
                    self.leave_out(slot, f"this sweep measures only on {self.kind}")
                    continue
            with self._changed:
                self.uses[slot.name] = SlotState(slot, self.clock())
                self._changed.notify_all()
            self.record("joined", _slot_fields(slot))
        for node, reason in self.executor.refused().items():
            if node not in self.refusals:
                self.refusals[node] = reason
                self.record("refused", {"node": node, "reason": reason})


@contextmanager
def _queued(queue: list[object], turn: object) -> Iterator[None]:
    queue.append(turn)
    try:
        yield
    finally:
        queue.remove(turn)


def _slot_fields(slot: Slot) -> dict[str, str]:
    return {"slot": slot.name, "node": slot.node, "kind": slot.kind}
