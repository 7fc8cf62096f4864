"""Tests of interleaved sessions: which arms take part, what is reported, and that a failed arm does not harm
the other arms."""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coda_agent.agent.storage import kernel_files
from coda_agent.comparison import interleaved as contests
from coda_agent.comparison.interleaved import PreparedArm, Stage
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system.workers import Job
from coda_agent.verifier import timing
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu import benchmark
from coda_agent.verifier.worker import cuda_error


class Toy(Stage):
    """A stage whose arms record their calls. Some arms fail."""

    turns = 2

    def __init__(self) -> None:
        self.called: list[str] = []
        self.knows = True

    def enter(self, arm: str) -> PreparedArm:
        assert self.knows
        if arm == "refuses":
            raise ValueError("no such width\nand more")
        return PreparedArm(lambda: self.called.append(arm), {"y": {"relative": 0.1, "yardsticks": 1.0}})

    def again(self, arm: str, turn: int) -> Callable[[], object]:
        if arm == "fails later":
            return lambda: 1 / 0
        return lambda: self.called.append(f"{arm} {turn}")

    def forget_truth(self) -> None:
        self.knows = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the CUDA functions that a stage calls. On the fake clock, every call takes a millisecond."""
    sizes = itertools.count(1000, 100)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: next(sizes))
    usual = timing.measure

    def measured(arms: Any, **given: Any) -> Any:
        return usual(arms, **{**given, "warmup_seconds": 0.0}, clock=Clock())

    monkeypatch.setattr(timing, "measure", measured)


class Clock:
    """A fake clock in place of CUDA's events."""

    def __init__(self) -> None:
        self.begun = 0
        self.before: tuple[float, ...] = ()

    def now(self) -> float:
        return 0.0

    def flush(self) -> None:
        pass

    def start(self) -> int:
        self.begun += 1
        return self.begun - 1

    def stop(self, mark: int) -> None:
        pass

    def turn(self) -> tuple[float, ...]:
        ended, self.before, self.begun = self.before, (1e-3,) * self.begun, 0
        return ended

    def drain(self) -> tuple[float, ...]:
        ended, self.before = self.before, ()
        return ended


@pytest.mark.usefixtures("device")
def test_a_stage_seats_who_can_and_says_why_others_cannot() -> None:
    stage = Toy()
    found = contests.run_interleaved(lambda: stage, ("one", "refuses", "fails later", "two"), "one", 12)
    assert found["failed"] == {
        "refuses": "ValueError: no such width",
        "fails later": "ZeroDivisionError: division by zero",
    }
    assert list(found["arms"]) == ["one", "two"] and not stage.knows
    assert found["arms"]["one"].pop("seconds") >= 0
    assert found["arms"]["one"] == {
        "losses": {"y": {"relative": 0.1, "yardsticks": 1.0}},
        "bytes": 100,
        "milliseconds": [1.0] * 12,
    }
    assert stage.called.count("two 1") > 6 < stage.called.count("two")  # both sets of inputs were used


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (0.0999, ""),
        (0.1001, "output 'z' is off by 0.1 of the truth's RMS (limit 0.1)"),
        (7.0, "output 'z' is off by 7 of the truth's RMS (limit 0.1)"),
        (float("nan"), "output 'z' is NaN or infinite where the truth is not, or the other way round"),
        (float("inf"), "output 'z' is NaN or infinite where the truth is not, or the other way round"),
    ],
)
def test_an_arm_that_answers_something_else_fails_unless_it_is_the_anchor(error: float, reason: str) -> None:
    class Stage(Toy):
        def enter(self, arm: str) -> PreparedArm:
            # an arm may round y twice instead of keeping it in fp32
            right = {"y": {"relative": 0.0043, "yardsticks": 2000.0}}
            wrong = {"z": {"relative": error, "yardsticks": 1.0}} if arm == "wrong" else {}
            return super().enter(arm)._replace(losses=right | wrong)

    found = contests.run_interleaved(Stage, ("one", "wrong", "two"), "one", 12)
    assert found["failed"] == ({"wrong": reason} if reason else {})
    assert "two" in found["arms"]
    if reason:
        with pytest.raises(Failed, match=re.escape(f"wrong did not run: {reason}")):
            contests.run_interleaved(Stage, ("wrong", "one"), "wrong", 12)


@pytest.mark.usefixtures("device")
def test_an_arm_finds_what_others_do_not_hold_with_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuTeDSL and FlashInfer allocate memory directly from the CUDA driver, not from PyTorch. So PyTorch must
    return its unused memory to the driver before each arm is prepared."""
    said: list[str] = []
    stage = Toy()
    usual = stage.enter

    def enter(arm: str) -> PreparedArm:
        said.append(arm)
        return usual(arm)

    monkeypatch.setattr(stage, "enter", enter)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: said.append("given back"))
    contests.run_interleaved(lambda: stage, ("one", "two"), "one", 12)
    assert said[said.index("one") - 1] == said[said.index("two") - 1] == "given back"


@pytest.mark.usefixtures("device")
def test_without_its_reference_arm_there_is_no_contest() -> None:
    stage = Toy()
    with pytest.raises(Failed, match="refuses did not run: ValueError: no such width"):
        contests.run_interleaved(lambda: stage, ("refuses", "one"), "refuses", 12)
    assert not stage.called


@pytest.mark.usefixtures("device")
def test_who_has_no_room_on_the_clock_goes_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    usual, raced = benchmark.timed, []

    def crowded(arms: Any, rounds: int, **more: Any) -> Any:
        raced.append([arm.name for arm in arms])
        if len(arms) > 2:
            raise OutOfMemoryError("Tried to allocate 2.1 GiB")
        return usual(arms, rounds, **more)

    monkeypatch.setattr(contests, "timed", crowded)
    held = iter([900, 100, 300, 200])
    monkeypatch.setattr(contests, "_peak", lambda call, before: next(held))
    found = contests.run_interleaved(Toy, ("anchor", "small", "large", "middle"), "anchor", 12)
    assert raced == [
        ["anchor", "small", "large", "middle"],
        ["anchor", "small", "middle"],
        ["anchor", "small"],
    ]
    assert list(found["arms"]) == ["anchor", "small"]
    assert set(found["failed"]) == {"large", "middle"} and "out of memory" in found["failed"]["large"]


@pytest.mark.usefixtures("device")
def test_slow_arms_have_rounds_enough_for_swinging_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated round takes 0.2 s, as with twelve arms of 17 ms each. The limit for all rounds is 6 s, so
    about 30 of the 40 requested rounds take place."""
    usual, done = Clock.turn, []

    def turn(self: Clock) -> tuple[float, ...]:
        done.append(0.2)
        return usual(self)

    monkeypatch.setattr(Clock, "turn", turn)
    monkeypatch.setattr(Clock, "now", lambda self: sum(done))
    found = contests.run_interleaved(Toy, ("anchor", "one"), "anchor", 40)
    assert len(found["arms"]["one"]["milliseconds"]) in (30, 31)


class Large:
    """The memory that an arm holds."""


@pytest.mark.usefixtures("device")
def test_who_leaves_the_clock_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    kept: dict[str, weakref.ref[Large]] = {}
    usual, raced = benchmark.timed, []

    class Stage(Toy):
        def enter(self, arm: str) -> PreparedArm:
            kept[arm] = weakref.ref(held := Large())
            return PreparedArm(lambda: held, {})

        def again(self, arm: str, turn: int) -> Callable[[], object]:
            held = kept[arm]()
            return lambda: held

    def crowded(arms: Any, rounds: int, **more: Any) -> Any:
        raced.append({name for name, held in kept.items() if held() is not None})
        if len(raced) < 3:
            raise OutOfMemoryError("Tried to allocate 2.1 GiB")
        return usual(arms, rounds, **more)

    monkeypatch.setattr(contests, "timed", crowded)
    monkeypatch.setattr(contests, "_peak", lambda call, before: len(kept))  # later arms hold more
    found = contests.run_interleaved(Stage, ("anchor", "one", "two", "three"), "anchor", 12)
    assert raced == [{"anchor", "one", "two", "three"}, {"anchor", "one", "two"}, {"anchor", "one"}]
    assert list(found["arms"]) == ["anchor", "one"]


@pytest.mark.usefixtures("device")
def test_nothing_of_a_failed_arm_is_kept() -> None:
    seen: list[weakref.ref[Large]] = []

    class Stage(Toy):
        def enter(self, arm: str) -> PreparedArm:
            if arm == "one":
                return super().enter(arm)
            assert all(ref() is None for ref in seen)
            held = Large()
            seen.append(weakref.ref(held))
            return PreparedArm(lambda: held and 1 / 0, {})

    found = contests.run_interleaved(Stage, ("one", "two", "three"), "one", 12)
    assert set(found["failed"]) == {"two", "three"} and len(seen) == 2


@pytest.mark.usefixtures("device")
def test_a_compiler_that_is_silent_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, enough = [], threading.Event()

    def report(gate: str, words: str) -> None:
        heard.append(words)
        if heard.count("slow") == 4:
            enough.set()

    class Stage(Toy):
        def enter(self, arm: str) -> PreparedArm:
            assert arm != "slow" or enough.wait(60)
            return super().enter(arm)

    monkeypatch.setattr(contests, "report", report)
    monkeypatch.setattr(contests, "BEAT", 0.001)
    contests.run_interleaved(Stage, ("one", "slow"), "one", 12)
    assert heard[0] == contests.PREPARING and heard[-1] == contests.TIMING  # no heartbeat during timing


@pytest.mark.usefixtures("device")
def test_what_is_arranged_for_an_arm_is_not_what_a_call_holds() -> None:
    class Stage(Toy):
        def enter(self, arm: str) -> PreparedArm:
            return super().enter(arm)._replace(arranged=70)

    assert contests.run_interleaved(Stage, ("one",), "one", 12)["arms"]["one"]["bytes"] == 30


@pytest.mark.usefixtures("device")
def test_an_error_of_the_device_is_no_arms_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "CUDA error: an illegal memory access was encountered"
    assert cuda_error(words) and not cuda_error("CUDA out of memory")

    def enter(self: Toy, arm: str) -> PreparedArm:
        raise RuntimeError(words)

    monkeypatch.setattr(Toy, "enter", enter)
    with pytest.raises(RuntimeError, match="illegal memory"):
        contests.run_interleaved(Toy, ("one", "two"), "one", 12)


@pytest.mark.usefixtures("device")
def test_an_arm_that_breaks_the_device_in_words_of_its_own_is_the_last_that_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session ends when an arm breaks the device. If the session went on, the next arm would fail too
    and would be left out of the row."""
    words, heard, broken = "Triton Error [CUDA]: an illegal memory access was encountered", list[str](), False
    assert not cuda_error(words)

    def enter(self: Toy, arm: str) -> PreparedArm:
        nonlocal broken
        if arm == "breaks":
            broken = True
            raise RuntimeError(words)
        return PreparedArm(lambda: None, {})

    def synchronize() -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Toy, "enter", enter)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(contests, "report", lambda gate, said: heard.append(said))
    with pytest.raises(RuntimeError, match="CUDA error"):
        contests.run_interleaved(Toy, ("one", "breaks", "next"), "one", 12)
    assert heard[-1] == "breaks"


def test_a_ceiling_is_the_fastest_of_its_calls_and_a_copy_reads_and_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors are meta tensors, so nothing is computed or allocated."""
    asked: list[str] = []

    def measured(arms: Any, **given: Any) -> Any:
        asked.extend(arm.name for arm in arms)
        return {arm.name: SimpleNamespace(seconds=(3e-3, 1e-3, 2e-3)) for arm in arms}

    for name in ("randn", "ones", "empty"):
        usual = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *size, usual=usual, **given: usual(*size, **given | {"device": "meta"})
        )
    monkeypatch.setattr(timing, "measure", measured)
    monkeypatch.setattr(contests, "gpu", lambda _: {"gpu": "H100"})
    found = contests.machine(None)
    assert found["gpu"] == "H100" and asked == list(found["ceilings"])
    products, copied = 2 * 8192**3 / 1e-3, 2 * 2**30 / 1e-3
    assert found["ceilings"] == pytest.approx(
        {"tensor": products, "tensor_fp8": products, "memory": copied}, rel=1e-12
    )


def tried(number: int) -> bool:
    return number > 1


class Untuned:
    """A session whose arms need nothing compiled or tuned ahead of time."""

    def compiles(self) -> Iterator[Callable[[], list[Job]]]:
        yield from ()

    def tunes(self) -> Iterator[Callable[[], object]]:
        yield from ()


def test_what_sessions_load_is_compiled_ahead_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that two rows need runs once. If an arm cannot name its jobs, the failure is reported and the
    other jobs still run."""
    said, asked = list[str](), list[list[bool]]()
    monkeypatch.setattr(contests, "report", lambda gate, words: said.append(words))
    monkeypatch.setattr(
        "coda_agent.primitives.system.workers.run_jobs",
        lambda jobs: asked.append([task(given) for task, given in jobs]),
    )

    def refused() -> list[Job]:
        raise ValueError("refused")

    class Asked(Untuned):
        def compiles(self) -> Iterator[Callable[[], list[Job]]]:
            yield refused
            yield lambda: [(tried, 1), (tried, 2)]

    class Other(Untuned):
        def compiles(self) -> Iterator[Callable[[], list[Job]]]:
            yield lambda: [(tried, 2), (tried, 3)]

    assert contests.compile_ahead([Asked(), Other()]) == {} and asked == [[False, True, True]]
    assert said == ["compiling what 2 row(s) run", "failed ahead of time: ValueError: refused"]


def test_what_a_session_runs_is_tuned_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms are tuned one after the other, and unused memory is released before each tuning. A failed tuning
    does not stop the other tunings, unless the device no longer works."""
    said, done = list[str](), list[str]()
    monkeypatch.setattr(contests, "report", lambda gate, words: said.append(words))
    monkeypatch.setattr(contests, "_release", lambda: done.append("room"))

    @contextmanager
    def heard(words: str) -> Iterator[None]:
        done.append("heard")
        yield
        done.append("silent")

    monkeypatch.setattr(contests, "_heartbeat", heard)

    def fails(words: str) -> None:
        raise RuntimeError(words)

    class Asked(Untuned):
        def tunes(self) -> Iterator[Callable[[], object]]:
            yield lambda: fails("no schedule runs")
            yield lambda: done.append("tuned")

    class Wide(Untuned):
        def tunes(self) -> Iterator[Callable[[], object]]:
            fails("inputs have no room")
            yield lambda: done.append("tuned")

    class Deadly(Untuned):
        def tunes(self) -> Iterator[Callable[[], object]]:
            yield lambda: fails("CUDA error: an illegal memory access was encountered")

    assert contests.tune_ahead(Asked()) == {}
    assert done == ["heard", "room", "tuned", "room", "silent"]
    assert said[1:] == ["failed ahead of time: RuntimeError: no schedule runs"]
    assert (
        contests.tune_ahead(Wide()) == {}
        and said[-1] == "failed ahead of time: RuntimeError: inputs have no room"
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        contests.tune_ahead(Deadly())


def test_a_kernel_is_compiled_on_the_schedules_that_it_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("coda_agent.primitives.runtime.launch.to_compile", lambda *given: asked.append(given))
    text = (kernel_files.KERNELS / "gemm_qk_norm_rope.program.json").read_text()
    program, sizes = Program.from_json(text), {"M": 128, "K": 256, "H": 2, "P": 64}
    one, other, never = Schedule(128, 128), Schedule(128, 256, False), Schedule(128, 160)
    edit = KernelSource(program, edited="text")
    Kernel(edit.on({0: one}), known={0: [other]}).compile_jobs(sizes)
    Kernel(edit, known={0: [one, never, other]}).compile_jobs(sizes)
    assert asked == [(edit.on({0: one}), sizes, [(0, one)]), (edit, sizes, [(0, one), (0, other)])]
    Kernel(KernelSource(program._replace(schedule={0: other})), known={0: [one]}).compile_jobs(sizes)
    assert asked.pop()[2] == [(0, other)]
    Kernel(KernelSource(program)).compile_jobs(sizes)
    (gemm,) = lower(program).gemms
    assert asked[2][2] == [(0, schedule) for schedule in candidates(gemm, sizes)] != []
