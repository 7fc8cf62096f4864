"""Tests of a comparison's run: which sessions are measured, which results are stale, and what happens if an
arm fails.

Fake workers return the figures; tests/gpu uses real workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from comparison_machine import ARMS, H100, SPEEDS, Machine, asked, cells, kept_nowhere, never, stood_in

from coda_agent.agent.storage import quack_tunings
from coda_agent.comparison import environment, kernels, keys, rows, workers
from coda_agent.comparison.competitors import (
    COMPILE,
    EAGER,
    EDITED,
    FLASHINFER,
    FUSED,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    PROGRAM,
    REFERENCE_ARM,
    UPSTREAM,
)
from coda_agent.comparison.drawing.cells import CHANGED, Cell, Empty, current_sessions, lines
from coda_agent.comparison.measuring import OutOfTime, measure
from coda_agent.comparison.results import LAYER_BOTH, LAYER_FORWARD, Present, Results, read, write
from coda_agent.fused.programs import accepted
from coda_agent.primitives.compiler.lower import editable
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system.files import SPECS
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import OUR_SEARCH, OWN_TUNER
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.worker import Lost
from comparison import arm, session


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with stood_in(monkeypatch) as found:
        yield found


def test_what_is_there_is_not_measured_again(gpu: Machine, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = measure(asked(processes=2), Results(), lambda made: write(path, made))
    assert first == read(path) and len(first.sessions) == 4
    ours = (
        REFERENCE_ARM,
        PROGRAM,
        EAGER,
        COMPILE,
        LIGER,
        OWN_TUNER,
    )  # our kernel is first, because the memory may be too small for all arms of a 70B model's row
    assert gpu.sat == [(None, ours), ("/other/python", (REFERENCE_ARM, UPSTREAM))] * 2
    gpu.sat.clear()
    assert measure(asked(processes=2), read(path), never) == first and not gpu.sat
    more = measure(asked(processes=3), read(path), lambda made: None)
    assert len(gpu.sat) == 2 and {s.process for s in more.sessions} == {0, 1, 2}


def test_columns_of_two_environments_are_compared_through_the_anchor(gpu: Machine) -> None:
    found = cells(measure(asked(processes=2), Results(), lambda made: None))
    human, upstream, own = (found[name] for name in (HUMAN, "upstream CODA", LLM))
    assert isinstance(human, Cell) and isinstance(upstream, Cell) and isinstance(own, Cell)
    assert human.against and human.against.estimate == pytest.approx(1.1) and not human.indirect
    assert upstream.against and upstream.against.estimate == pytest.approx(1.2) and upstream.indirect
    assert own.against is None and own.processes == 2


def test_a_session_tells_the_versions_that_sat_in_it(gpu: Machine) -> None:
    here, there = measure(asked(), Results(), lambda made: None).sessions
    assert here.conditions["versions"]["liger-kernel"] == "0.8.5"
    assert "liger-kernel" not in there.conditions["versions"]
    assert there.conditions["versions"]["coda-kernels"] == "0.2"


def test_a_changed_kernel_makes_its_own_cells_stale(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(asked(), Results(), lambda made: None)
    gpu.sat.clear()
    usual = kernels.by_arm

    def other(*given: Any) -> Any:
        return {
            arm: Kernel(found.source.on({0: Schedule(128, 256, False)}))
            for arm, found in usual(*given).items()
        }

    monkeypatch.setattr(kernels, "by_arm", other)
    again = measure(asked(), first, lambda made: None)
    assert gpu.sat == [(None, (REFERENCE_ARM, PROGRAM))]
    found = cells(again)[HUMAN]
    assert isinstance(found, Cell) and found.indirect  # the human kernel was never timed with the new kernel


def test_another_version_of_a_library_is_another_column(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(asked(), Results(), lambda made: None)
    gpu.sat.clear()
    monkeypatch.setattr(keys, "version", lambda name: "0.9" if name == "liger-kernel" else "1.0")
    measure(asked(), first, lambda made: None)
    assert gpu.sat == [(None, (REFERENCE_ARM, LIGER))]


def test_what_was_another_for_a_while_is_measured_again(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four things change in turn, and change back: Liger's version, torch's version, the reference arm, and
    the definition of the row. Liger is measured again after each change, and the table shows the new
    figures."""
    versions = {"liger-kernel": "0.8.5", "torch": "1.0"}
    monkeypatch.setattr(keys, "version", lambda name: versions.get(name, "1.0"))
    found = measure(asked(), Results(), kept_nowhere)
    for name, other in (("liger-kernel", "0.9"), ("torch", "2.0")):
        before = versions[name]
        for number in (other, before):
            versions[name] = number
            gpu.sat.clear()
            found = measure(asked(), found, kept_nowhere)
            assert LIGER in gpu.sat[0][1]
            cell, newest = cells(found)[LIGER], [s for s in found.sessions if LIGER in s.arms][-1]
            assert isinstance(cell, Cell) and f"{name} {number}" in newest.arms[LIGER].key
    assert measure(asked(), found, never) == found
    for revision in (2, 1):
        monkeypatch.setitem(keys.REVISIONS, REFERENCE_ARM, revision)
        gpu.sat.clear()
        found = measure(asked(), found, kept_nowhere)
        assert LIGER in gpu.sat[0][1] and isinstance(cells(found)[LIGER], Cell)
    question = rows.OperatorRow.question
    for text in ("another", ""):
        monkeypatch.setattr(rows.OperatorRow, "question", text or question)
        gpu.sat.clear()
        found = measure(asked(), found, kept_nowhere)
        assert LIGER in gpu.sat[0][1] and isinstance(cells(found)[LIGER], Cell)


def test_what_is_another_since_has_no_figures_until_it_is_measured(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.seconds = 100.0
    first = measure(asked("gemm_swiglu", "gemm_rope"), Results(), kept_nowhere)
    versions = {"liger-kernel": "0.9"}
    monkeypatch.setattr(keys, "version", lambda name: versions.get(name, "1.0"))
    kept: list[Results] = []
    with pytest.raises(OutOfTime):
        measure(asked("gemm_swiglu", "gemm_rope", seconds=150.0), first, kept.append)
    done, waits = lines(kept[-1])
    assert isinstance(done.cells[LIGER], Cell) and waits.cells[LIGER] == Empty(f"{LIGER}: {CHANGED}")
    assert isinstance(waits.cells[LLM], Cell)
    versions["torch"] = "2.0"
    with pytest.raises(OutOfTime):
        measure(asked("gemm_swiglu", "gemm_rope", seconds=1.0), kept[-1], kept.append)
    waits = lines(kept[-1])[-1]  # the new torch makes the reference arm stale, too
    assert waits.cells[LLM] == Empty(f"{PROGRAM}: {CHANGED}") and isinstance(waits.cells[MATMUL], Cell)


def test_another_build_of_torch_makes_all_stale(gpu: Machine) -> None:
    first = measure(asked(), Results(), kept_nowhere)
    gpu.sat.clear()
    gpu.torch = "2.0+cu126"
    found = measure(asked(), first, kept_nowhere)
    assert len(gpu.sat) == 2 and gpu.sat[0][1][:2] == (REFERENCE_ARM, PROGRAM)
    assert "2.0+cu126" in found.sessions[-1].arms[REFERENCE_ARM].key


def test_another_way_to_call_a_library_is_another_column(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(asked(), Results(), kept_nowhere)
    gpu.sat.clear()
    monkeypatch.setitem(keys.REVISIONS, LIGER, 2)
    measure(asked(), first, kept_nowhere)
    assert gpu.sat == [(None, (REFERENCE_ARM, LIGER))]


def test_a_spec_s_other_cases_and_thresholds_make_no_row_stale(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(asked(), Results(), kept_nowhere)
    loaded: list[Spec] = []

    def fewer(path: Path, **more: Any) -> Spec:
        spec = load(path, **more)
        loaded.append(spec.model_copy(update={"cases": spec.cases[:3]}))
        assert loaded[-1].hash != spec.hash
        return loaded[-1]

    monkeypatch.setattr("coda_agent.comparison.rows.load", fewer)
    assert measure(asked(), first, never) == first and loaded


def test_a_broken_column_says_so_and_stops_nothing(gpu: Machine) -> None:
    gpu.broken = {LIGER: "ValueError: no such width"}
    found = measure(asked("gemm_swiglu", "gemm_rope", processes=2), Results(), lambda made: None)
    assert [line.cells[LIGER] for line in lines(found)] == [Empty(f"{LIGER}: ValueError: no such width")] * 2
    assert all(isinstance(line.cells[HUMAN], Cell) for line in lines(found))
    # Liger was tried once per row, not in every process
    assert sum(LIGER in arms for _, arms in gpu.sat) == 2
    gpu.broken, gpu.sat = {}, []
    assert measure(asked("gemm_swiglu", "gemm_rope", processes=2), found, never) == found
    assert not gpu.sat  # an arm that has failed is tried again only with ``again``
    mended = measure(asked("gemm_swiglu", "gemm_rope", processes=2, again=True), found, kept_nowhere)
    assert gpu.sat == [(None, (REFERENCE_ARM, LIGER))] * 4
    assert all(isinstance(line.cells[LIGER], Cell) for line in lines(mended))


def test_an_arm_that_failed_in_one_process_keeps_its_figures_and_says_so(gpu: Machine) -> None:
    found = measure(asked(), Results(), kept_nowhere)
    gpu.deadly = {LIGER}
    cell = cells(measure(asked(processes=3), found, kept_nowhere))[LIGER]
    assert isinstance(cell, Cell) and cell.processes == 1
    assert f"failed in another process: crashed: {LIGER} wrote astray" in cell.note
    gpu.deadly = set()
    cell = cells(measure(asked(processes=3, again=True), found, kept_nowhere))[LIGER]
    assert isinstance(cell, Cell) and cell.processes == 3 and "failed" not in cell.note


def test_an_reference_arm_that_is_left_alone_is_not_kept(gpu: Machine) -> None:
    gpu.broken = {EAGER: "ValueError: no"}
    (session,) = measure(asked(arms=(EAGER,)), Results(), kept_nowhere).sessions
    assert not session.arms and set(session.failed) == {EAGER}
    (session,) = measure(asked(arms=(REFERENCE_ARM,)), Results(), kept_nowhere).sessions
    # the session is kept without other arms, because the request names the reference arm
    assert set(session.arms) == {REFERENCE_ARM}


def test_why_a_column_cannot_be_tried_is_kept_though_nobody_sat(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure(asked(arms=(EAGER,)), Results(), kept_nowhere)
    monkeypatch.setattr(environment, "python", lambda: None)
    kept: list[Results] = []
    measure(asked(arms=(EAGER, UPSTREAM)), found, kept.append)
    assert "compare --install" in kept[-1].absent["gemm_swiglu"][UPSTREAM]


def test_each_environment_imports_while_the_other_sits(gpu: Machine) -> None:
    measure(asked(processes=2), Results(), kept_nowhere)
    opened = [(seat.python, seat.ahead) for seat in gpu.opened]
    assert opened.count(("/other/python", workers.APART_AHEAD)) == 2
    # workers: two for each environment, one for the ceilings, one for compilers
    assert gpu.ready[0] == len(opened)


def test_rows_are_whole_before_the_next_begins(gpu: Machine) -> None:
    found = measure(asked("gemm_swiglu", "gemm_rope", processes=2, arms=(EAGER,)), Results(), kept_nowhere)
    assert [(s.operator, s.process) for s in found.sessions] == [
        ("gemm_swiglu", 0),
        ("gemm_swiglu", 1),
        ("gemm_rope", 0),
        ("gemm_rope", 1),
    ]
    # one worker for the ceilings, and one for each session
    assert len(gpu.opened) == 5 and all(seat.asked for seat in gpu.opened)
    assert gpu.ready == [5, 5, 5, 5]  # the next three sessions' workers are already importing


def test_whoever_waits_hears_how_many_sessions_are_left(gpu: Machine) -> None:
    said: list[str] = []
    measure(asked(processes=2), Results(), kept_nowhere, lambda place, words: said.append(place))
    sat = [place for place in dict.fromkeys(said) if "process" in place]
    assert sat == [f"gemm_swiglu 1B, process {1 + i // 2}, {3 - i} to come" for i in range(4)]


def test_not_all_of_a_comparison_imports_at_once(gpu: Machine) -> None:
    measure(asked(processes=6, arms=(EAGER,)), Results(), kept_nowhere)
    # at first 5 workers: for the ceilings, this session, and the next three sessions
    assert gpu.ready == [5, 6, 7, 7, 7, 7]


def test_an_arm_that_another_of_its_column_outdoes_is_timed_once(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an arm is clearly slower than another arm of its column (here by 4%, but not by 2%), the arm is left
    out of the second process. If the faster arm changes, the slower arm is timed again."""
    wanted = asked(processes=2, arms=(COMPILE, MAX_AUTOTUNE, OWN_TUNER, OUR_SEARCH))
    monkeypatch.setitem(SPEEDS, OUR_SEARCH, 1.02 * SPEEDS[OWN_TUNER])
    monkeypatch.setitem(SPEEDS, MAX_AUTOTUNE, 1.04 * SPEEDS[COMPILE])
    found = measure(wanted, Results(), kept_nowhere)
    both = (REFERENCE_ARM, COMPILE, MAX_AUTOTUNE, OWN_TUNER, OUR_SEARCH)
    assert [arms for _, arms in gpu.sat] == [both, tuple(arm for arm in both if arm != MAX_AUTOTUNE)]
    cell = cells(found)["torch.compile"]
    assert isinstance(cell, Cell) and (cell.arm, cell.processes) == (COMPILE, 2)
    assert measure(wanted, found, never) == found
    monkeypatch.setitem(keys.PACKAGES, COMPILE, ("torch",))  # changes the key of the faster arm
    measure(wanted, found, kept_nowhere)
    assert [arms for _, arms in gpu.sat[2:]] == [
        (REFERENCE_ARM, COMPILE),
        (REFERENCE_ARM, COMPILE, MAX_AUTOTUNE),
    ]


def test_what_all_of_them_run_is_compiled_before_the_first_sits(gpu: Machine) -> None:
    wanted = asked("gemm_swiglu", "gemm_rope", processes=2)
    found = measure(wanted, Results(), kept_nowhere)
    ours = (PROGRAM, EAGER, COMPILE, LIGER, OWN_TUNER)
    assert gpu.compiled == [[ours, ours]] and gpu.tuned == [ours, ours]
    # workers: ceilings, compilers, this session, the next three, two in CODA's environment
    assert gpu.ready[0] == 8
    assert all(seat.ahead == workers.AHEAD for seat in gpu.opened if seat.python is None)
    assert "coda_agent.comparison.competitors.ahead" in workers.AHEAD
    assert measure(wanted, found, never) == found and len(gpu.compiled) == 1
    # the comparison continues, and each arm reports its own compile errors
    gpu.compiler_dies = True
    assert len(measure(wanted, Results(), kept_nowhere).sessions) == len(found.sessions)


def test_who_is_lost_ahead_of_its_session_keeps_no_other_row_from_being_tuned(gpu: Machine) -> None:
    said: list[tuple[str, str]] = []
    gpu.tuning_kills = {OWN_TUNER}
    wanted = asked("gemm_swiglu", "gemm_rope", arms=(PROGRAM, OWN_TUNER))
    made = measure(wanted, Results(), kept_nowhere, lambda *words: said.append(words))
    ours = (PROGRAM, OWN_TUNER)
    assert gpu.compiled == [[ours, ours]] and gpu.tuned == [ours, ours]
    for row in ("gemm_swiglu 1B", "gemm_rope 1B"):
        assert (row, "failed ahead of time: a schedule wrote astray") in said
    # the human arm is tuned in its session
    assert all(isinstance(line.cells[HUMAN], Cell) for line in lines(made))
    gpu.gone = True  # no arm is blamed for a lost GPU
    with pytest.raises(Lost, match="ECC"):
        measure(wanted, Results(), kept_nowhere)
    assert len(gpu.tuned) == 3


def test_one_file_is_of_one_gpu(gpu: Machine) -> None:
    found = measure(asked(), Results(), kept_nowhere)
    gpu.name = "another GPU"
    with pytest.raises(InvalidInput, match="measured on a GPU, but this is another GPU"):
        measure(asked(processes=2), found, never)
    older = found.model_copy(update={"machine": None})
    with pytest.raises(InvalidInput, match="measured on a GPU"):
        measure(asked(processes=2), older, never)


def test_ceilings_are_measured_once_a_file(gpu: Machine, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    gpu.interrupted_at = 0
    with pytest.raises(KeyboardInterrupt):
        measure(asked(), Results(), lambda made: write(path, made))
    gpu.interrupted_at = -1
    found = measure(asked(), read(path), kept_nowhere)
    assert gpu.ceilings == 1 and found.machine and found.machine.ceilings == H100


def test_an_interrupted_comparison_goes_on(gpu: Machine, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    gpu.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        measure(asked(processes=2), Results(), lambda made: write(path, made))
    assert len(read(path).sessions) == 3
    gpu.interrupted_at = -1
    gpu.opened.clear()
    whole = measure(asked(processes=2), read(path), lambda made: write(path, made))
    assert not gpu.opened[0].ahead  # the first worker only names the GPU, so it imports nothing ahead
    assert len(gpu.sat) == 4 and [s.process for s in whole.sessions] == [0, 0, 1, 1]


def test_what_cannot_be_tried_has_its_reason(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "flashinfer-python":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(keys, "version", missing)
    monkeypatch.setattr(environment, "python", lambda: None)
    monkeypatch.setattr(kernels, "by_arm", lambda *given: {})
    found = cells(measure(asked(arms=(*ARMS, FLASHINFER)), Results(), lambda made: None))
    assert found[FLASHINFER] == Empty("flashinfer-python is not installed: pip install flashinfer-python")
    assert found[UPSTREAM] == Empty("its environment is not installed: coda-agent compare --install")
    assert found[LLM] == Empty("no accepted kernel")
    human = found[HUMAN]
    assert isinstance(human, Cell) and human.against is None


def test_where_only_the_reference_arm_is_as_it_was_its_sessions_are_told() -> None:
    sat, now = session({PROGRAM: arm(1.25)}), Present(question="another", keys={})
    found = Results(sessions=(sat,), present={sat.operator: {sat.case: now}})
    (line,) = lines(found)
    assert line.cells[LLM] == Empty(f"{PROGRAM}: {CHANGED}") and isinstance(line.cells[MATMUL], Cell)
    assert current_sessions(found) == [sat]


def test_of_a_models_two_kernels_the_slower_one_is_told_beside_the_other() -> None:
    sat = session({PROGRAM: arm(1.25), EDITED: arm(1.2), COMPILE: arm(2.0), MAX_AUTOTUNE: arm(1.9)})
    (line,) = lines(Results(sessions=(sat,)))
    cell, rival = line.cells[LLM], line.cells["torch.compile"]
    assert isinstance(cell, Cell) and (cell.arm, cell.note) == (EDITED, f"{PROGRAM}: 1.25 ms")
    assert isinstance(rival, Cell) and rival.note == ""


def test_a_layer_is_a_row_too(gpu: Machine) -> None:
    found = measure(asked(LAYER_FORWARD, arms=(*ARMS, FUSED)), Results(), lambda made: None)
    ((_, arms),) = gpu.sat
    assert arms == (EAGER, FUSED, COMPILE, LIGER)
    (line,) = lines(found)
    assert line.operator == LAYER_FORWARD and line.cells[MATMUL] == Empty("it has no layer")
    flops = 2 * 16384 * 2048 * (4 * 2048 + 3 * 5632) + 2 * 8 * 2048**2 * 2048
    assert line.roofline == pytest.approx(flops / H100["tensor"] * 1e3, rel=1e-5)
    assert found.sessions[0].arms[FUSED].key.count("text ") == 2  # the key names the texts of both programs
    (both,) = rows.choose_rows((LAYER_BOTH,), ("1B",), everything=False, quick=False)
    assert both.least(H100) == pytest.approx(3 * flops / H100["tensor"], rel=1e-5)


def test_a_forward_layer_is_made_of_forward_kernels_alone() -> None:
    """If a backward program changes, the forward's figures do not become stale. A session of the forward
    compiles no backward kernel."""
    forward, both = rows.choose_rows((LAYER_FORWARD, LAYER_BOTH), ("1B",), everything=False, quick=False)
    assert (len(forward.made_of(FUSED)), len(both.made_of(FUSED))) == (2, 4)
    assert forward.made_of(PROGRAM) == [] and forward.absent(PROGRAM) == "it has no layer"


def test_the_usual_rows() -> None:
    usual = rows.choose_rows((), (), everything=False, quick=False)
    assert len([row for row in usual if row.case.startswith("square")]) == 9
    assert len([row for row in usual if row.case in ("1B", "7B", "70B")]) == 36  # including rows of layers
    for row in usual:
        if row.case.startswith("square"):
            n = int(row.case.split()[1])
            assert isinstance(row, rows.OperatorRow)
            assert roofline(kernels.written(row.spec), row.sizes).flops == 2 * n**3
            assert row.least(H100) >= 2 * n**3 / H100["tensor"]
    assert len(rows.choose_rows((), (), everything=False, quick=True)) == 3
    everything = rows.choose_rows((), (), everything=True, quick=False)
    assert {row.operator for row in everything} == {*accepted(), LAYER_FORWARD, LAYER_BOTH}
    with pytest.raises(InvalidInput, match="there is no gemm_nothing"):
        rows.choose_rows(("gemm_nothing",), (), everything=False, quick=False)
    with pytest.raises(InvalidInput, match="these operators have the cases 1B, 7B"):
        rows.choose_rows(("gemm_rope",), ("2B",), everything=False, quick=False)


def test_a_kernel_comes_as_it_was_tuned_or_to_be_tuned_as_its_rivals_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At sizes for which no schedules were tuned, a program has no schedules. For an edited kernel, only the
    schedules on which its text was found correct may be tried."""
    spec = load(SPECS / "gemm_residual_partial_rmsnorm.yaml")
    program = kernels.accepted_kernel(spec, edited=False)
    assert program
    text = editable(program.kernel.program)
    edited = replace(program, kernel=replace(program.kernel, edited=text))
    found = {False: program, True: edited}
    monkeypatch.setattr(kernels, "accepted_kernel", lambda spec, *, edited: found[edited])
    at_7b = kernels.by_arm(spec, spec.case("7B").sizes)
    assert at_7b[PROGRAM].source.schedules == program.schedules["7B"]
    assert at_7b[EDITED].source.schedules == edited.schedules["7B"]
    elsewhere = kernels.by_arm(spec, rows.square(spec.name, 4096))
    assert not elsewhere[PROGRAM].source.schedules and not elsewhere[PROGRAM].known
    known = elsewhere[EDITED].known
    assert not elsewhere[EDITED].source.schedules and known
    assert set(known[0]) == {tuned[0] for tuned in edited.schedules.values()}
    assert len(set(known[0])) == len(known[0]) > 1


def test_quacks_arms_come_with_what_they_were_tuned_to(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = QuackTuned(gpu="a GPU", version="1", arms={})
    monkeypatch.setattr(
        quack_tunings, "quack", lambda spec: {"7B": tuned} if spec.name == "gemm_swiglu" else {}
    )
    chosen = rows.choose_rows(
        ("gemm_swiglu", "gemm_rope"), ("7B", "square 8192"), everything=False, quick=False
    )
    given = {(row.operator, row.case): row.task((OWN_TUNER,), 12)[1].quack for row in chosen}
    assert given.pop(("gemm_swiglu", "7B")) is tuned and len(given) == 3 and set(given.values()) == {None}
