"""If ``verify --gpu`` is interrupted, the next call continues the measurement. The command and the
measurement are real; the workers are stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from authoring import TOY_KERNEL, program_of, write_toy
from gpu_taken import gpu_taken
from test_measure import Workers

from coda_agent.agent.cli import main
from coda_agent.agent.storage.checkpoint import resumed
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.system.files import cache_dir
from coda_agent.verifier import stages
from coda_agent.verifier.gates import identity
from coda_agent.verifier.gpu.benchmark import score
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import PROTOCOL, REPORT, Accepted, Identity, QuackTuned

USUAL = MeasureOptions()
Verify = Callable[..., tuple[int, str, str]]


class Cards(Workers):
    card = "one"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cards]:
    """Return stand-in workers on a simulated GPU. The test uses a new, empty cache."""
    made = Cards()
    monkeypatch.setattr(stages, "Worker", made)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("coda_agent.verifier.gpu.visible.DEVICES", ("/",))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("coda_agent.verifier.gpu.telemetry.card", lambda: made.card)
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    yield made


@pytest.fixture
def verify(
    tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Verify:
    spec, kernel = write_toy(tmp_path), tmp_path / "toy.py"
    monkeypatch.setattr(
        "coda_agent.verifier.verify._interpret", lambda *given: None
    )  # the interpret gate is not tested here

    def run(*more: str, source: str = TOY_KERNEL) -> tuple[int, str, str]:
        kernel.write_text(source)
        words = ["coda-agent", "verify", str(kernel), "--spec", str(spec), "--gpu", "--json", *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, " ".join(said.err.split())

    return run


def asked(workers: Workers) -> list[tuple[str, str]]:
    """Return the tasks that the workers received since the last call."""
    found = [asked for each in workers.asked for asked in each]
    workers.asked.clear()
    return found


def cut_at(workers: Workers, score_number: int) -> None:
    """Make the score with number ``score_number`` raise KeyboardInterrupt. All other scores return
    figures."""
    left = score_number

    def cut(given: Any) -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return workers.score(given)

    workers.answers[score] = cut


def kept() -> list[str]:
    return sorted(path.name for path in (cache_dir() / "verifying").rglob("*.json"))


def test_a_measurement_that_was_cut_off_goes_on(workers: Workers, verify: Verify) -> None:
    cut_at(workers, 4)
    status, out, _ = verify()
    assert status == 130 and out == ""
    before, pieces_left = asked(workers), kept()
    assert ("tune", "large") in before and len([task for task, _ in before if task == "score"]) == 4
    # equal numbers: the interrupted score left no piece, but the hidden sizes left a piece without a task
    assert len(pieces_left) == len(before)
    status, out, err = verify()
    assert status == 0 and isinstance(REPORT.validate_json(out), Accepted)
    assert f"continuing with {len(pieces_left)} finished stage(s)" in err and "--again" in err
    assert asked(workers) == [("score", "wide"), ("score", "large"), ("score", "wide")]


def test_what_is_whole_is_measured_anew_on_other_inputs(workers: Workers, verify: Verify) -> None:
    assert verify()[0] == 0
    first = asked(workers)
    assert kept() == []
    status, _, err = verify()
    assert status == 0 and "going on" not in err and asked(workers) == first
    workers.speedup = 0.5  # a rejected measurement is complete, too, and leaves no piece
    assert verify()[0] == 1
    assert kept() == []


def test_what_quack_won_with_before_is_raced_again(
    workers: Workers, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = QuackTuned(gpu="a GPU", version="1", arms={})
    monkeypatch.setattr(
        "coda_agent.agent.storage.quack_tunings.quack",
        lambda spec: {"wide": tuned} if spec.name == "toy" else {},
    )
    assert verify()[0] == 0
    assert [race.quack for race in workers.races] == [None, tuned] * 3


def test_again_starts_anew(workers: Workers, verify: Verify) -> None:
    cut_at(workers, 4)
    verify()
    first = asked(workers)
    status, _, err = verify("--again")
    assert status == 0 and "going on" not in err
    assert asked(workers)[: len(first)] == first


def test_what_is_kept_stands_for_nothing_else(workers: Cards, tmp_path: Path) -> None:
    spec = load(write_toy(tmp_path), check=False)
    made = identity(spec, KernelSource(program_of(spec, TOY_KERNEL)))
    said: list[str] = []
    found: list[object] = []

    def left(identity: Identity = made, options: MeasureOptions = USUAL, protocol: int = PROTOCOL) -> object:
        """Start a measurement and cut it off at once; return the kept piece that the measurement found, or
        None."""
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr("coda_agent.verifier.report.PROTOCOL", protocol)
            with resumed(options, False, said.append) as keep:
                kept = keep(identity)
                found.append(kept.load("tune/8/16"))
                kept.save("tune/8/16", {"schedules": {}})
                raise KeyboardInterrupt
        return found[-1]

    assert left() is None and said == []
    assert left() == {"schedules": {}} and "continuing with 1 finished stage(s)" in said[0]
    for name in ("spec_hash", "program_hash", "lowered_hash", "versions"):
        other = {"torch": "0"} if name == "versions" else "0" * 64
        assert left(made.model_copy(update={name: other})) is None
    assert (
        left(options=MeasureOptions(rounds=20)) is None
        and left(options=MeasureOptions(sanitize=True)) is None
    )
    assert left(protocol=PROTOCOL + 1) is None
    workers.card = "two"
    assert left() is None and len(said) == 1
    workers.card = "one"
    assert left() == {"schedules": {}}


def test_a_piece_that_was_damaged_is_measured_again(workers: Workers, verify: Verify) -> None:
    cut_at(workers, 4)
    verify()
    (tuned,) = (
        path
        for path in (cache_dir() / "verifying").rglob("*.json")
        if "wide" in path.name and path.name.startswith("tune")
    )
    tuned.write_text('{"schedules"')
    asked(workers)
    assert verify()[0] == 0
    assert ("tune", "wide") in asked(workers)


def test_it_waits_for_a_run_that_measures(
    workers: Workers, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``verify`` waits until a run that measures frees the GPU. An author's run waits in the same way, and so
    does a second ``verify`` of the same kernel."""
    with gpu_taken(monkeypatch, lambda: asked(workers)) as waited:
        status, _, err = verify()
    assert status == 0 and waited == [False] and "waiting for it" in err
