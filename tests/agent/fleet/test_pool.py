"""The pool leases slots (cores and GPUs) to pieces of work: one piece at a time on a slot, pieces that start
again on another slot, and slots that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from checkout import PYTHONPATH
from fleet_tasks import wait_for
from slots import FakeExecutor, FakeSlot
from waiting import eventually
from worker_tasks import double

from coda_agent.agent.fleet import pool as pools
from coda_agent.agent.fleet.local import Local
from coda_agent.agent.fleet.pool import GivenUp, Pool, Suspect
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.worker import Lost, Task, WorkerError

Events = list[tuple[str, dict[str, Any]]]


def made(*slots: FakeSlot, **more: Any) -> tuple[Pool, FakeExecutor, Events]:
    events: Events = []
    executor = FakeExecutor(list(slots))
    return Pool(executor, lambda kind, told: events.append((kind, told)), **more), executor, events


def told(events: Events, kind: str) -> list[dict[str, Any]]:
    return [payload for name, payload in events if name == kind]


def raising(error: Callable[[], Exception]) -> Any:
    def act(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        raise error()

    return act


def test_who_asked_first_gets_the_next_slot() -> None:
    order, go = list[int](), threading.Event()

    def act(task: Task, argument: int, progress: Progress) -> dict[str, Any]:
        go.wait(9)
        order.append(argument)
        return {}

    pool, _, _ = made(FakeSlot("a", act=act))
    threads = [threading.Thread(target=pool.run, args=(f"r{n}", double, n), kwargs={"patience": 9})
               for n in range(12)]  # fmt: skip
    for n, thread in enumerate(threads):
        thread.start()
        assert eventually(lambda n=n: len(pool._queues[False]) == n, 9)  # type: ignore[misc]
    go.set()
    for thread in threads:
        thread.join()
    assert order == [*range(12)]


def test_a_piece_gets_the_slot_that_it_prefers_if_that_is_free() -> None:
    pool, _, _ = made(FakeSlot("a", "H100"), FakeSlot("b", "H100"))
    with pool.lease(True, "r1 measure", prefer="b") as first, pool.lease(True, "r2", prefer="b") as second:
        assert (first.name, second.name) == ("b", "a")


def test_one_piece_at_a_time_on_a_slot() -> None:
    under_way, most = 0, 0

    def act(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.01)
        under_way -= 1
        return {}

    pool, _, events = made(FakeSlot("a", act=act))
    threads = [
        threading.Thread(target=lambda n=n: pool.run(f"r{n} check", double, n, patience=9)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and len(told(events, "lease")) == 8
    assert pool.uses["a"].busy >= 0.08


def test_a_piece_goes_on_elsewhere_when_its_slot_is_lost() -> None:
    pool, _, events = made(FakeSlot("a", lost=False), FakeSlot("b"))
    pool.uses["a"].slot.lost = True  # type: ignore[attr-defined]
    assert pool.run("r check", double, 4, patience=9)["twice"] == 8
    assert [e["outcome"] for e in told(events, "lease")] == ["void", "done"]
    (left,) = told(events, "left")
    assert left["slot"] == "a" and not left["stays_out"] and "a" not in pool.uses


def test_a_slot_where_alone_a_piece_fails_stays_out() -> None:
    pool, _, events = made(
        FakeSlot(
            "full", node="n1", act=raising(lambda: WorkerError("trace\nOSError: No space left on device"))
        ),
        FakeSlot("also full", node="n1"),
        FakeSlot("good", node="n2"),
    )
    assert pool.run("r check", double, 4, patience=9)["twice"] == 8
    assert "No space left" in pool.left_out["full"]
    assert [e["slot"] for e in told(events, "lease")] == ["full", "good"]


def test_a_slot_that_succeeds_the_second_time_stays() -> None:
    words = ["Killed"]

    def act(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        if words:
            raise WorkerError(words.pop())
        return task(argument)

    pool, _, _ = made(FakeSlot("only", act=act))
    assert pool.run("r check", double, 4, patience=9)["twice"] == 8
    assert pool.uses.keys() == {"only"} and not pool.left_out


def test_a_piece_that_failed_tries_another_slot_of_its_node() -> None:
    pool, _, events = made(
        FakeSlot("bad", node="n", act=raising(lambda: WorkerError("Killed"))), FakeSlot("good", node="n")
    )
    assert pool.run("r check", double, 4, patience=9)["twice"] == 8
    assert [e["slot"] for e in told(events, "lease")] == ["bad", "good"] and pool.left_out.keys() == {"bad"}


def test_an_interrupted_command_leases_no_more() -> None:
    pool, _, events = made(FakeSlot("a"))
    go = threading.Event()

    def lease(number: int) -> None:
        go.wait(9)
        with pool.lease(False, f"r{number}"):
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt), pool.threads(1) as threads:
        for number in range(3):
            threads.submit(lease, number)
        threading.Timer(0.3, go.set).start()
        raise KeyboardInterrupt
    assert not told(events, "lease")


def test_an_interrupted_command_ends_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    began = threading.Event()
    with closing(Local(cpus=1, gpus=())) as executor:
        pool = Pool(executor, lambda kind, told: None)
        with pytest.raises(KeyboardInterrupt), pool.threads(1) as threads:
            never = str(tmp_path / "never")
            done = threads.submit(
                pool.run, "r", wait_for, never, patience=300, progress=lambda *_: began.set()
            )
            assert began.wait(120)
            raise KeyboardInterrupt
    assert done.exception(0)
    assert not pool.left_out


def test_a_piece_that_fails_everywhere_is_at_fault_and_no_slot_leaves() -> None:
    bad = raising(lambda: WorkerError("KeyError: ours"))
    pool, _, _ = made(FakeSlot("a", node="n1", act=bad), FakeSlot("b", node="n2", act=bad))
    with pytest.raises(GivenUp, match="KeyError: ours"):
        pool.run("r check", double, 4, patience=9)
    assert pool.uses.keys() == {"a", "b"} and not pool.left_out


def test_a_piece_that_hangs_twice_is_at_fault() -> None:
    slot = FakeSlot("a", act=raising(lambda: Lost("hung", "silent")))
    pool, _, _ = made(slot)
    with pytest.raises(Lost):
        pool.run("r compile", double, 4, patience=9)
    assert len(slot.ran) == 2


def test_a_lost_slot_counts_for_no_hang() -> None:
    answers = iter([Lost("hung", "silent")])

    def hangs_once(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        for error in answers:
            raise error
        return task(argument)

    pool, _, _ = made(FakeSlot("a", lost=False), FakeSlot("b", act=hangs_once))
    pool.uses["a"].slot.lost = True  # type: ignore[attr-defined]
    assert pool.run("r compile", double, 4, patience=9)["twice"] == 8


def test_gpus_of_another_kind_and_those_left_out_before_stay_out() -> None:
    pool, executor, events = made(
        FakeSlot("GPU-1", "H100"),
        FakeSlot("GPU-2", "H200"),
        FakeSlot("GPU-3", "H100"),
        left_out={"GPU-3": "it failed its controls"},
    )
    assert [use.slot.name for use in pool.gpus] == ["GPU-1"] and pool.kind == "H100"
    assert "this sweep measures only on" in pool.left_out["GPU-2"]
    with pool.lease(True, "r measure") as gpu, pytest.raises(TimeoutError):
        assert gpu.name == "GPU-1"
        with pool.lease(True, "s measure", time.monotonic()):
            pass
    executor.made.append(FakeSlot("GPU-4", "H100"))
    assert eventually(lambda: "GPU-4" in pool.uses)
    executor.nodes["n9"] = "torch is 2.0 there and 2.1 here"
    assert eventually(lambda: bool(told(events, "refused")))


def test_the_end_of_a_cluster_ends_waiting_and_says_why() -> None:
    pool, executor, _ = made(FakeSlot("a"))
    with pool.lease(False, "r check"):
        executor.gone = "the head is gone"
        with pytest.raises(GivenUp, match="the head is gone"), pool.lease(False, "s check"):
            pass


def test_waiting_for_a_slot_that_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ALONE", 0.05)
    pool, _, _ = made(FakeSlot("a"))
    with pytest.raises(GivenUp, match="no GPU"), pool.lease(True, "r measure"):
        pass


def test_a_measurement_that_fails_without_fault_is_suspect_once() -> None:
    pool, _, _ = made(FakeSlot("GPU-1", "H100", node="n1"), FakeSlot("GPU-2", "H100", node="n2"))
    with pytest.raises(Suspect), pool.lease(True, "r measure") as first:
        raise WorkerError("CUDA driver version is insufficient")
    with pool.lease(True, "r measure") as second:
        assert second.node != first.node
    assert first.name in pool.left_out
