"""The commands that a person uses before a kernel is accepted: prompt, review, accept and show."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from authoring import (
    BROKEN,
    TOY,
    TOY_KERNEL,
    TWICE,
    accepted_run,
    make_run,
    slow,
)
from commanding import Command, Done

from coda_agent.agent.cli import main
from coda_agent.agent.run import runs
from coda_agent.agent.run.loop import Outcome
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import REPORT, Checked

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")


def test_prompt(command: Command, spec: Path) -> None:
    from coda_agent.agent.prompts.prompt import assemble

    done = command("prompt", spec)
    assert done == Done(0, f"{assemble(load(spec), TOY)}\n", "")


def test_review(command: Command, spec: Path) -> None:
    name = make_run(spec, author="Ada [/x] [bold]")
    done = command("review", name)
    assert (
        done.status == 0 and f"written by Ada [/x] [bold] via handoff in 1 attempt(s), run {name}" in done.out
    )
    assert '{"c": gemm(a, b) * per_row(v)}' in done.out and "checked, not benchmarked" in done.out
    assert "needs an H100" in done.out
    report = REPORT.validate_json(command("review", name, "--json").out)
    assert isinstance(report, Checked)


def test_review_of_an_accepted_kernel(command: Command, spec: Path) -> None:
    done = command("review", accepted_run(spec))
    assert done.status == 0 and "1.300 [1.250, 1.352]" in done.out and "must exceed 1.1" in done.out
    chosen = "128x192 pingpong, cluster 2x1, group 8, operands swapped"
    assert f"large: QuACK (its own tuner) {chosen}\nwide: QuACK (its own tuner) {chosen}\n" in done.out


@pytest.mark.parametrize("agreed", [True, False])
def test_review_asks_at_a_terminal_before_it_accepts(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    asked: list[str] = []
    accepted: list[tuple[str, bool, bool, str]] = []

    def accept(run: str, commit: bool, looked: bool, shown: Outcome) -> None:
        accepted.append((run, commit, looked, shown.source))

    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("typer.confirm", lambda question: asked.append(question) or agreed)  # type: ignore[func-returns-value]
    monkeypatch.setattr(main, "_accept", accept)
    name = accepted_run(spec)
    assert command("review", name).status == 0
    assert asked == ["Have you read it? Accept it and commit?"]
    assert accepted == ([(name, True, True, TOY_KERNEL)] if agreed else [])
    for other in (make_run(spec), make_run(spec, found=slow(load(spec, check=False)))):
        command("review", other)
    command("review", name, "--json")
    assert len(asked) == 1


def test_what_is_accepted_is_what_was_shown(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process continues the run while a person reads the review, nothing is accepted."""
    name, later = accepted_run(spec), accepted_run(spec, TWICE)

    def confirm(question: str) -> bool:
        shutil.copyfile(runs.folder(later) / runs.JOURNAL, runs.folder(name) / runs.JOURNAL)
        return True

    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("typer.confirm", confirm)
    # the real function would write into the checkout
    monkeypatch.setattr("coda_agent.agent.artifacts.accept.accept", None)
    done = command("review", name)
    again = f"run {name} changed while you read it; review it again: coda-agent review {name}"
    assert done.status == 1 and again in done.err


def test_review_of_a_rejected_kernel(command: Command, spec: Path) -> None:
    done = command("review", make_run(spec, found=slow(load(spec, check=False))))
    assert done.status == 1 and "rejected at decision: slow" in done.out


def test_accept_refuses_what_was_not_measured(command: Command, spec: Path) -> None:
    name = make_run(spec)
    done = command("accept", name)
    assert done.status == 1 and f"run {name} is checked, not accepted: only a kernel measured" in done.said()


@pytest.mark.usefixtures("no_compiler")
def test_show(command: Command, spec: Path, kernel: Callable[[str], Path], tmp_path: Path) -> None:
    path = kernel(TOY_KERNEL)
    done = command("show", path, "--spec", spec)
    assert done.status == 0 and "gemm [M, N] over K" in done.out and "roofline" in done.out
    assert "ragged" in done.out and "import cutlass" not in done.out
    assert "import cutlass" in command("show", path, "--spec", spec, "--cutedsl").out
    data = json.loads(command("show", path, "--spec", spec, "--json").out)
    assert data["spec"] == "toy" and data["cutedsl"] is None
    program = tmp_path / "toy.program.json"
    run = runs.reopen(make_run(spec))
    with run.journal:
        program.write_text(run.journal.events()[-1].payload["program"])
    assert json.loads(command("show", program, "--spec", spec, "--json").out) == data


@pytest.mark.usefixtures("no_compiler")
def test_show_of_what_is_no_kernel(command: Command, spec: Path, kernel: Callable[[str], Path]) -> None:
    done = command("show", kernel(BROKEN), "--spec", spec)
    assert done.status == 2 and "toy.py:7: python: TypeError: gemm() missing" in " ".join(done.err.split())
    program = spec.with_name("toy.program.json")
    program.write_text("{}")
    done = command("show", program, "--spec", spec)
    assert done.status == 2 and "toy.program.json" in done.err and "Traceback" not in done.err


def test_show_of_what_does_not_compile(
    command: Command, spec: Path, kernel: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise CompileError("error: too many registers")

    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", refuse)
    done = command("show", kernel(TOY_KERNEL), "--spec", spec)
    assert done.status == 1 and "error: too many registers" in done.said()


def test_show_of_what_no_tile_has_room_for(command: Command, tmp_path: Path) -> None:
    names = "abcdef"
    tile = "{shape: [M, 2*N], dtype: bf16}"
    lines = ["name: crowd", "summary: Tiles.", "dims: {M: rows, K: inputs, N: columns}", "inputs:"]
    lines += ["  x: {shape: [M, K], dtype: bf16}", "  w: {shape: [N, K], dtype: bf16}"]
    lines += [f"  {name}: {tile}" for name in names] + ["outputs:"]
    lines += [f"  o{name}: {tile}" for name in names] + ["reference: |", "  t = x @ w.mT"]
    lines += [f"  o{name} = torch.stack((t, t), -1).flatten(1) * {name}" for name in names]
    lines += ["cases:", "  - {name: one, M: 16384, K: 256, N: 2048}", "accept: {speedup: 1.0}"]
    returned = ", ".join(f"'o{name}': join(t, t) * {name}" for name in names)
    spec, kernel = tmp_path / "crowd.yaml", tmp_path / "crowd.py"
    spec.write_text("\n".join(lines) + "\n")
    kernel.write_text(
        "from primitives import gemm, join, kernel\n\n\n@kernel\n"
        f"def crowd(x, w, {', '.join(names)}):\n    t = gemm(x, w.mT)\n    return {{{returned}}}\n"
    )
    done = command("show", kernel, "--spec", spec)
    assert done.status == 1 and "Traceback" not in done.err
    assert "step 0 reads 6 tiles (a, b, c, d, e, f)" in done.said() and "split the work" in done.said()
