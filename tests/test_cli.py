"""The command: exit statuses, one clear message for each mistake, JSON on stdout and nothing else.

Most run ``agent.cli.main`` in this process; each exit status also comes from a real process once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_messages as fake
import pytest
from authoring import (
    BROKEN,
    RECORDINGS,
    ROOT,
    SPECS,
    TOY,
    TOY_KERNEL,
    TWICE,
    UNSCALED,
    accepted_run,
    coda_agent,
    fenced,
    make_run,
    measured,
    slow,
    write_toy,
)
from gpu_taken import gpu_taken

from agent import cli, live, runs, session
from agent.budget import Limits
from agent.journal import read_export
from agent.loop import Outcome
from agent.options import Budget, Further, Measuring, flags
from primitives.ir import Program
from primitives.refusal import CompileError
from verifier.gates import Progress
from verifier.measure import Keep, Kept, Options
from verifier.quack_baseline import LIBRARY_ARMS, MATMUL
from verifier.report import REPORT, Checked, Measured
from verifier.spec import Spec
from verifier.spec_file import load

pytestmark = pytest.mark.usefixtures("runs_home", "plain")


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def said(self) -> str:
        """The one message on stderr, its lines joined."""
        assert self.out == "" and "Traceback" not in self.err
        assert self.err.startswith("coda-agent: ") and "\ncoda-agent: " not in self.err
        return " ".join(self.err.split())


Command = Callable[..., Done]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no GPU, and lines long enough that words are not broken."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["coda-agent", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return write_toy(tmp_path)


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[[str], Path]:
    def write(source: str) -> Path:
        path = tmp_path / "toy.py"
        path.write_text(source)
        return path

    return write


def of_process(done: subprocess.CompletedProcess[str]) -> Done:
    return Done(done.returncode, done.stdout, done.stderr)


# what a spec may have wrong: status 2, file, line and remedy, and no run begun

SPEC_MISTAKES = {
    "a key": (
        "reference: |",
        "refrence: |",
        r"toy\.yaml:10: unknown key 'refrence'; did you mean 'reference'\?",
    ),
    "a dtype": ("dtype: bf16}", "dtype: bfloat}", r"toy\.yaml:5: dtype 'bfloat' is unknown; use one of bf16"),
    "a dim": ("[M, K]", "[M, Q]", r"toy\.yaml:5: dim 'Q' is not declared"),
    "shapes": ("(a @ b)", "(b @ a)", r"toy\.yaml:11: .*shapes cannot be multiplied"),
    "a key twice": ("summary:", "name: toy\nsummary:", r"toy\.yaml:2: .*duplicate key.*keep one"),
    "no mapping": (TOY, "- a\n- list\n", r"toy\.yaml:1: a spec is a mapping"),
    "no YAML": (TOY, "name: [\n", r"toy\.yaml:\d: this is no YAML mapping"),
}


@pytest.mark.parametrize(("old", "new", "words"), SPEC_MISTAKES.values(), ids=SPEC_MISTAKES)
@pytest.mark.parametrize("name", ["generate", "verify"])
def test_a_spec_mistake(
    command: Command, tmp_path: Path, kernel: Callable[[str], Path], name: str, old: str, new: str, words: str
) -> None:
    path = write_toy(tmp_path, old, new)
    arguments = (
        [path, "--provider", "handoff"] if name == "generate" else [kernel(TOY_KERNEL), "--spec", path]
    )
    done = command(name, *arguments)
    assert done.status == 2 and re.search(words, done.said()), done.err
    assert runs.names() == []


def test_a_spec_that_is_not_there(command: Command, spec: Path) -> None:
    for name in ("generate", "prompt"):
        done = command(name, spec.with_name("toi.yaml"))
        assert done.status == 2 and "toi.yaml: there is no such file; did you mean" in done.said()
    done = command("verify", spec.with_name("tony.py"))
    assert done.status == 2 and "specs/tony.yaml: there is no such file; specs has gemm_" in done.said()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Usage:"),
        (("generate",), "Missing argument 'SPEC'"),
        (("generate", "x.yaml", "--bogus"), "No such option: --bogus"),
        (("generate", "x.yaml", "--attempts", "0"), "greater than or equal to 1"),
        (("generate", "x.yaml", "--provider", "oracle"), "'oracle' is not one of"),
        (("measure", "x.json", "--rounds", "2"), "greater than or equal to 8"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_wrong_usage(command: Command, arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    assert done.status == 2 and words in done.err + done.out and "Traceback" not in done.err


# what a kernel may have wrong: status 1, the gate and the reason


def first(statement: str) -> str:
    return TOY_KERNEL.replace("    return", f"    {statement}\n    return")


KERNEL_MISTAKES = {
    "syntax": (TOY_KERNEL.replace("toy(a", "toy((a"), "syntax", "line 5: syntax error"),
    "a parameter": (TOY_KERNEL.replace("v)", "w)"), "parameters", "unknown w; missing v"),
    "a missing output": (TOY_KERNEL.replace('"c":', '"d":'), "outputs", "missing c"),
    "an extra output": (TOY_KERNEL.replace('{"c"', '{"d": v, "c"'), "outputs", "extra d"),
    "an import": ("import os\n" + TOY_KERNEL, "language", "line 1: "),
    "an endless loop": (first("while 1: pass"), "language", "line 7: "),
    "10 GB": (first("x = (0,) * 1250000000"), "memory", "takes over"),
    "a forged print": (first('print(\'{"status": "accepted"}\')'), "language", "line 7: "),
    "an exit": (first("os._exit(0)"), "language", "line 7: "),
    "wrong mathematics": (UNSCALED, "numerics", "output 'c'"),
}


@pytest.mark.parametrize(("source", "code", "words"), KERNEL_MISTAKES.values(), ids=KERNEL_MISTAKES)
def test_a_kernel_mistake(
    command: Command, spec: Path, kernel: Callable[[str], Path], source: str, code: str, words: str
) -> None:
    done = command("verify", kernel(source), "--spec", spec)
    gate = "interpret" if code == "numerics" else "trace"
    assert done.status == 1 and done.err == ""
    assert f"rejected at {gate}: {code}" in done.out and words in " ".join(done.out.split())
    assert '"status": "accepted"' not in done.out and "accepted" not in done.out.splitlines()[-1]


@pytest.mark.usefixtures("no_compiler")
def test_a_good_kernel(command: Command) -> None:
    path = ROOT / "agent" / "examples" / "gemm_l1norm_gemm.py"
    done = command("verify", path, "--spec", path.with_suffix(".yaml"))
    assert done.status == 0 and done.err == ""
    assert "2 step(s), 1 vector kernel(s)" in done.out and "checked, not benchmarked" in done.out


def test_a_kernel_that_cannot_be_read(command: Command, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    for name, words in (("nothing.py", "there is no such file"), ("binary.py", "cannot be read as text")):
        done = command("verify", tmp_path / name, "--spec", spec)
        assert done.status == 2 and words in done.err and "Traceback" not in done.err


# what is not here: status 3


def test_no_gpu(command: Command, spec: Path, kernel: Callable[[str], Path], tmp_path: Path) -> None:
    for arguments in (
        ("generate", spec, "--provider", "handoff", "--gpu"),
        ("verify", kernel(TOY_KERNEL), "--spec", spec, "--gpu"),
        ("resume", make_run(spec), "--gpu"),
        ("measure", tmp_path / "bundle.json"),
    ):
        done = command(*arguments)
        assert done.status == 3 and "no H100 (CUDA capability 9.0) here; " in done.said()
    assert len(runs.names()) == 1  # generate began none


def test_no_key(command: Command, spec: Path) -> None:
    words = "provider 'anthropic' has no API key; set ANTHROPIC_API_KEY, or use --provider handoff"
    for more in ((), ("--candidates", 2)):
        done = command("generate", spec, "--provider", "anthropic", "--no-gpu", *more)
        assert done.status == 3 and words in done.said()
    done = command("optimize", "gemm_rope", "--provider", "anthropic", "--no-gpu")
    assert done.status == 3 and words in done.said()
    assert runs.names() == []


def test_no_claude_command(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = command("generate", spec, "--provider", "claude-code", "--no-gpu")
    assert done.status == 3 and "there is no `claude` command" in done.said()
    assert runs.names() == []


@pytest.mark.parametrize("budget", [("--budget-dollars", 1), ("--budget-tokens", 9, "--budget-dollars", 1)])
def test_a_budget_that_nobody_counts(command: Command, spec: Path, budget: tuple[object, ...]) -> None:
    done = command("generate", spec, "--provider", "handoff", "--no-gpu", *budget)
    words = f"{' and '.join(str(option) for option in budget[::2])} would limit nothing"
    assert done.status == 2 and words in done.err and "use --attempts, --time-limit" in done.err
    assert runs.names() == []
    other, mine = make_run(spec, provider="replay"), make_run(spec, provider="mcp")
    done = command("resume", other, mine, "--no-gpu", *budget)
    assert done.status == 2 and words in done.err and "author by mcp" in done.err
    assert Budget(budget_seconds=9.0).limits().to_json() == {"seconds": 9.0}
    session.refuse_uncounted("handoff", Budget(budget_seconds=9.0, budget_gpu_seconds=9.0).limits())
    session.refuse_uncounted("replay", Budget(budget_dollars=1.0).limits())


def test_no_key_and_no_recording(command: Command, spec: Path) -> None:
    done = command("generate", spec)
    assert done.status == 3 and "no ANTHROPIC_API_KEY, and no recorded run of toy" in done.said()
    done = command("generate", spec, "--provider", "replay")
    assert done.status == 3 and "no recorded run of toy; author one first" in done.said()
    assert runs.names() == []


def test_an_unknown_run(command: Command, tmp_path: Path) -> None:
    for arguments in (
        ("resume", "x"),
        ("review", "x"),
        ("accept", "x"),
        ("bundle", "x", "-o", tmp_path / "b"),
    ):
        done = command(*arguments)
        assert done.status == 3 and "there is no run 'x'; the latest are: none" in done.said()
    assert not (tmp_path / "b").exists()


def test_a_run_without_a_kernel_yet(command: Command, spec: Path) -> None:
    run = runs.start(spec, {})
    run.journal.close()
    for name in ("review", "accept"):
        done = command(name, run.name)
        assert done.status == 3 and f"has no verified kernel yet: coda-agent resume {run.name}" in done.said()


def test_a_run_that_another_process_has(command: Command, spec: Path) -> None:
    name = make_run(spec)
    run = runs.reopen(name)
    with run.journal:
        done = command("resume", name, "--no-gpu")
    assert done.status == 3 and "is in use by another process; wait or stop it" in done.said()


def test_a_tips_log_with_a_mistake(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent import prompt, tips

    log = tmp_path / "tips.md"
    log.write_text("## tip-1: a lesson without its fields\n")
    monkeypatch.setattr(prompt, "read_tips", lambda: tips.read_tips(log))
    done = command("prompt", spec)
    assert done.status == 2 and "tips.md:1: tip-1 needs exactly the fields" in done.said()


def test_our_own_bug_is_not_explained_away(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("agent.prompt.assemble", fail)
    with pytest.raises(ZeroDivisionError):
        command("prompt", spec)


# two machines


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and figures as it might give them."""
    monkeypatch.setattr(session, "need_gpu", lambda gpu: None)
    monkeypatch.setattr(
        "verifier.measure.measure", lambda spec, program, *_, **options: measured(spec, program)
    )


def test_bundle_measure_import(command: Command, spec: Path, tmp_path: Path, gpu: None) -> None:
    name, path, results = make_run(spec), tmp_path / "b.json", tmp_path / "r.json"
    done = command("bundle", name, "-o", path)
    assert done == Done(0, f"{path}: 1 kernel(s). There: coda-agent measure {path}\n", "")
    done = command("measure", path, "-o", results)
    assert (
        done.status == 0 and f"{name}: measured\n" in done.out and f"coda-agent import {results}" in done.out
    )
    for _ in range(2):
        done = command("import", results)
        assert done == Done(0, f"{name}: measured. Look at it: coda-agent review {name}\n", "")
    assert "accepted: toy, program " in command("review", name).out


def test_a_bundle_is_measured_when_the_gpu_is_free(
    command: Command, spec: Path, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    begun: list[Program] = []

    def measure(spec: Spec, program: Program, *_: object, **options: object) -> Measured:
        begun.append(program)
        return measured(spec, program)

    monkeypatch.setattr("verifier.measure.measure", measure)
    command("bundle", make_run(spec), "-o", tmp_path / "b.json")
    with gpu_taken(monkeypatch, lambda: begun) as waited:
        done = command("measure", tmp_path / "b.json", "-o", tmp_path / "r.json")
    assert done.status == 0 and waited == [False] and len(begun) == 1 and "waiting for it" in done.out


def test_a_slow_kernel_there(
    command: Command, spec: Path, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.measure.measure", lambda spec, program, *_, **options: slow(spec))
    name = make_run(spec)
    command("bundle", name, "-o", tmp_path / "b.json")
    done = command("measure", tmp_path / "b.json", "-o", tmp_path / "r.json")
    assert done.status == 1 and f"{name}: rejected at decision: case large: 0.900x" in done.out
    done = command("import", tmp_path / "r.json")
    assert done.status == 0 and f"rejected at decision: slow. Feed back: coda-agent resume {name}" in done.out


def test_a_program_that_no_tracer_wrote(command: Command, spec: Path, tmp_path: Path, gpu: None) -> None:
    name, path = make_run(spec), tmp_path / "b.json"
    command("bundle", name, "-o", path)
    data = json.loads(path.read_text())
    data["entries"][0]["program"] = '{"__import__": "os"}'
    path.write_text(json.dumps(data))
    done = command("measure", path, "-o", tmp_path / "r.json")
    assert done.status == 2 and f"b.json: run {name}: its program is refused: " in done.said()
    assert not (tmp_path / "r.json").exists()


def test_files_that_are_none(command: Command, spec: Path, gpu: None) -> None:
    for name, kind in (("measure", "bundle"), ("import", "results")):
        done = command(name, spec)
        assert done.status == 2 and f"toy.yaml: this is no {kind} file of coda-agent" in done.said()
        done = command(name, spec.with_name("nothing"))
        assert done.status == 2 and "nothing: No such file or directory; give a file" in done.said()


# looking at kernels


def test_prompt(command: Command, spec: Path) -> None:
    from agent.prompt import assemble

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
    monkeypatch.setattr(cli, "_accept", accept)
    name = accepted_run(spec)
    assert command("review", name).status == 0
    assert asked == ["you have read it: accept it and commit?"]
    assert accepted == ([(name, True, True, TOY_KERNEL)] if agreed else [])
    for other in (make_run(spec), make_run(spec, found=slow(load(spec, check=False)))):
        command("review", other)
    command("review", name, "--json")
    assert len(asked) == 1


def test_what_is_accepted_is_what_was_shown(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on, in another process, while a person read."""
    name, later = accepted_run(spec), accepted_run(spec, TWICE)

    def confirm(question: str) -> bool:
        shutil.copyfile(runs.folder(later) / runs.JOURNAL, runs.folder(name) / runs.JOURNAL)
        return True

    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("typer.confirm", confirm)
    monkeypatch.setattr("agent.accept.accept", None)  # it would write into the checkout
    done = command("review", name)
    assert done.status == 1 and f"run {name} went on while it was read: coda-agent review {name}" in done.err


def test_review_of_a_rejected_kernel(command: Command, spec: Path) -> None:
    done = command("review", make_run(spec, found=slow(load(spec, check=False))))
    assert done.status == 1 and "rejected at decision: slow" in done.out


def test_accept_refuses_what_was_not_measured(command: Command, spec: Path) -> None:
    name = make_run(spec)
    done = command("accept", name)
    assert done.status == 1 and f"run {name} is checked, not accepted: only a kernel measured" in done.said()


def test_shared_options_are_those_of_measuring_and_say_themselves_again() -> None:
    assert Measuring().options() == Options() and flags(None, Measuring(), Budget()) == []
    given = Measuring(max_autotune=True, quack=True, rounds=9, warm=True)
    assert flags(False, given) == ["--no-gpu", "--max-autotune", "--quack", "--rounds", "9", "--warm"]
    assert flags(True, Budget(budget_tokens=5)) == ["--gpu", "--budget-tokens", "5"]
    assert Budget().limits() == Limits() and Budget(budget_gpu_seconds=3.0).limits() == Limits(
        gpu_seconds=3.0
    )


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
    def refuse(*given: object, raw: str) -> None:
        raise CompileError("error: too many registers")

    monkeypatch.setattr("primitives.compile.report", refuse)
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


def test_doctor(command: Command) -> None:
    done = command("doctor", "--json")
    data = json.loads(done.out)
    assert done.status == (0 if data["healthy"] else 3)
    assert {"python", "jail", "cache", "anthropic key"} <= {f["name"] for f in data["findings"]}


# authoring: in this process with an answer that lies ready, and in real ones that are stopped


def answered(directory: Path, *answers: str) -> Path:
    directory.mkdir(exist_ok=True)
    for number, answer in enumerate(answers, 1):
        (directory / f"answer-{number}.md").write_text(f"{answer}\n<!-- end -->\n")
    return directory


@pytest.mark.usefixtures("no_compiler")
def test_generate_says_how_it_went(command: Command, spec: Path, tmp_path: Path) -> None:
    directory = answered(tmp_path / "handoff", fenced(BROKEN), fenced(TOY_KERNEL))
    options = ("--provider", "handoff", "--directory", directory, "--author", "[/x] A")
    done = command("generate", spec, *options, "--no-gpu")
    assert done.status == 0 and done.err == ""
    (name,) = runs.names()
    assert f"run {name}, provider handoff\n" in done.out
    assert "attempt 1: rejected" in done.out and "trace/python: TypeError: gemm() missing" in done.out
    assert "attempt 2: checked" in done.out and "written by [/x] A via handoff in 2 attempt(s)" in done.out
    assert f"coda-agent bundle {name}" in done.out


def test_resume_takes_what_may_be_more(command: Command, spec: Path, tmp_path: Path) -> None:
    """A run of one attempt; what replaces its header's counts for that time."""
    directory = answered(tmp_path / "handoff", "no code")
    options = ("--provider", "handoff", "--directory", directory, "--attempts", 1)
    assert command("generate", spec, *options, "--no-gpu").status == 1
    (name,) = runs.names()
    done = command("resume", name, "--no-gpu", "--attempts", 2, "--time-limit", 0.1)
    assert done.status == 3 and "did not come within 0.1 s" in done.err and "--time-limit" in done.err
    (directory / "answer-2.md").write_text("nor here\n<!-- end -->\n")
    more = ("--attempts", 2, "--time-limit", 60, "--improve", 2, "--max-tokens", 2048)
    done = command("resume", name, "--no-gpu", *more)
    assert done.status == 1 and "attempt 2: rejected" in done.out
    assert f"in 2 attempt(s), run {name}" in command("resume", name, "--no-gpu").out
    assert flags(None, Further(attempts=2, time_limit=60.0)) == ["--attempts", "2", "--time-limit", "60.0"]


def test_what_is_given_replaces_the_header_s(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr("agent.providers.make", lambda name, **options: made.update(options))
    monkeypatch.setattr("agent.loop.Loop.run", lambda loop: made.update(vars(loop)))
    limits = {"tokens": 5000, "dollars": 2.0}
    run = runs.reopen(make_run(spec, provider="claude-code", limits=limits, improve=1))
    given = Further(attempts=9, improve=3, max_tokens=2048, time_limit=5.0).header()
    with run.journal, live.Watch(session.console(True)) as watch:
        session.author(run, watch, None, given | {"limits": {"dollars": 9.0}})
        assert (made["max_tokens"], made["time_limit"]) == (2048, 5.0)
        assert (made["attempts"], made["improve"]) == (9, 3)
        assert made["limits"] == Limits(tokens=5000, dollars=9.0)
        session.author(run, watch, None)
        assert (made["attempts"], made["improve"], made["limits"]) == (6, 1, Limits(5000, 2.0))


def test_a_run_s_name_is_not_coloured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = session.console(False)
    with console.capture() as shown:
        console.print("the best: toy-20261121-032539")
    assert shown.get() == "the best: toy-20261121-032539\n"


@pytest.mark.usefixtures("no_compiler")
def test_generate_with_a_gpu(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms: list[tuple[str, ...]] = []

    def measure(
        spec: Any,
        program: Any,
        options: Options,
        *,
        progress: Progress,
        keep: Keep,
        kept: Kept | None,
        raw: str,
    ) -> object:
        assert kept is None and not raw
        arms.append(options.arms)
        progress("benchmark", "case large")
        return measured(spec, program)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("verifier.measure.measure", measure)
    directory = answered(tmp_path / "handoff", fenced(TOY_KERNEL))
    done = command("generate", spec, "--provider", "handoff", "--directory", directory, "--gpu", "--quack")
    assert done.status == 0 and "accepted: toy" in done.out
    assert f"coda-agent accept {runs.names()[0]} --commit" in done.out
    assert arms == [("torch.compile", "cuBLAS matmul", MATMUL, *LIBRARY_ARMS)]


@pytest.mark.usefixtures("no_compiler")
def test_json_is_all_there_is_on_stdout(command: Command, spec: Path, tmp_path: Path) -> None:
    directory = answered(tmp_path / "handoff", fenced(TOY_KERNEL))
    done = command("generate", spec, "--provider", "handoff", "--directory", directory, "--no-gpu", "--json")
    assert done.status == 0 and isinstance(REPORT.validate_json(done.out), Checked)
    assert "provider handoff" in done.err
    done = command("resume", runs.names()[0], "--no-gpu", "--json")
    assert done.status == 0 and isinstance(REPORT.validate_json(done.out), Checked)


def background(*arguments: object) -> subprocess.Popen[str]:
    # Ctrl-C of a shell reaches a process whose SIGINT is as it was born with
    return subprocess.Popen(
        [sys.executable, "-m", "agent.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "220"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finished(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return Done(process.returncode, out, err)


def appears(path: Path, after: float = 0.0) -> None:
    """Wait until ``path`` was written later than ``after``."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_mtime <= after:
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_handoff_is_stopped_interrupted_and_resumed(spec: Path, tmp_path: Path) -> None:
    directory = tmp_path / "handoff"
    prompt, stop = directory / "prompt-1.md", directory / "stop"
    options = ("--provider", "handoff", "--directory", directory, "--author", "Ada", "--attempts", 2)
    waiting = background("generate", spec, *options, "--no-gpu")
    appears(prompt)
    stop.touch()
    done = finished(waiting)
    assert done.status == 3 and f"coda-agent: stopped by {stop}; remove that file and resume" in done.err
    (name,) = runs.names()
    assert f"run {name}, provider handoff" in done.out

    stop.unlink()
    written = prompt.stat().st_mtime
    waiting = background("resume", name, "--no-gpu", "--json")
    appears(prompt, after=written)
    waiting.send_signal(signal.SIGINT)
    done = finished(waiting)
    assert done.status == 130 and done.out == ""
    assert "goes on\n" in done.err and done.err.endswith("coda-agent: interrupted\n")

    answered(directory, fenced(BROKEN), "I have no other idea.")
    done = of_process(coda_agent("resume", name, "--no-gpu", "--json"))
    report = REPORT.validate_json(done.out)
    assert done.status == 1 and report.status == "rejected" and report.code == "no_source"
    done = of_process(coda_agent("review", name, "--json"))
    assert done.status == 1 and REPORT.validate_json(done.out) == report


# real processes, one an exit status at least; the first with a real compile


def test_status_0_a_recorded_run_is_authored_again(command: Command, tmp_path: Path) -> None:
    """What a visitor without a key or a GPU sees first: replay, all gates here, a real compile."""
    path = SPECS / "gemm_rmsnorm_swiglu.yaml"
    done = of_process(coda_agent("generate", path, "--json"))
    assert done.status == 0, done.err
    report = REPORT.validate_json(done.out)
    assert isinstance(report, Checked) and [g.gate for g in report.gates][-1] == "compile"
    kernels = report.gates[3].figures["kernels"]
    assert {(k["tile"], k["pingpong"]) for k in kernels} == {("128x128", True), ("256x128", False)}
    assert all(k["hgmma"] > 0 and 0 < k["registers"] <= 255 for k in kernels)
    (name,) = runs.names()
    assert f"run {name}, provider replay" in done.err and "Traceback" not in done.err
    # From here the compiler's report is kept, and in this process.
    assert REPORT.validate_json(command("review", name, "--json").out) == report
    assert command("bundle", name, "-o", tmp_path / "b.json").status == 0
    source = tmp_path / "gemm_rmsnorm_swiglu.py"
    run = runs.reopen(name)
    with run.journal:
        source.write_text(run.journal.events()[-1].payload["source"])
        recorded, _ = read_export(RECORDINGS / f"{path.stem}.jsonl")
        assert run.journal.header["replays"] == recorded["run"] != name
    assert "HGMMA" in command("show", source, "--spec", path).out
    again = command("verify", source, "--spec", path, "--no-gpu", "--json")
    found = REPORT.validate_json(again.out)
    assert isinstance(found, Checked) and found.identity == report.identity


def test_status_1(spec: Path, kernel: Callable[[str], Path]) -> None:
    done = of_process(
        coda_agent("verify", kernel("import os\n" + TOY_KERNEL), "--spec", spec, "--no-gpu", "--json")
    )
    report = REPORT.validate_json(done.out)
    assert done.status == 1 and report.status == "rejected" and (report.gate, report.line) == ("trace", 1)
    assert "Traceback" not in done.err


def test_status_2(tmp_path: Path) -> None:
    done = of_process(coda_agent("prompt", write_toy(tmp_path, "bf16", "bfloat")))
    assert done.status == 2 and "toy.yaml:5: dtype 'bfloat' is unknown" in done.said()
    done = of_process(coda_agent("generate"))
    assert done.status == 2 and "Missing argument 'SPEC'" in done.err and "Traceback" not in done.err


def test_status_3(spec: Path) -> None:
    done = of_process(coda_agent("generate", spec))
    assert done.status == 3 and "no ANTHROPIC_API_KEY, and no recorded run of toy" in done.said()
    done = of_process(coda_agent("review", "x"))
    assert done.status == 3 and "there is no run 'x'" in done.said()


def test_help_names_every_command(command: Command) -> None:
    done = command("--help")
    names = (
        "generate",
        "resume",
        "verify",
        "bundle",
        "measure",
        "import",
        "review",
        "accept",
        "prompt",
        "show",
        "tips",
        "doctor",
    )
    assert done.status == 0 and all(f"\n  {name} " in done.out for name in names)


@pytest.fixture(autouse=True)
def nothing_beside(tmp_path: Path) -> Iterator[None]:
    """No command of these tests writes into the checkout."""
    before = set(os.listdir(ROOT))
    yield
    assert set(os.listdir(ROOT)) - before <= {".cache", ".coverage"}


def test_a_gpu_of_another_kind_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, used in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda c=capability: c)
        assert session.use_gpu(None) is used
    with pytest.raises(session.Absent, match="no H100"):
        session.use_gpu(True)


def test_a_key_is_in_nothing_that_a_run_leaves(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the real SDK, against a server that repeats the key in its errors."""
    key = "sk-ant-secret-0123456789"
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    passing, final = (
        fake.status(code, kind, f"the key {key} is not welcome", retry_after_ms="10")
        for code, kind in ((500, "api_error"), (401, "authentication_error"))
    )
    with fake.FakeMessages(fake.answer(fenced(BROKEN)), passing, final) as server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        done = subprocess.run(
            [sys.executable, "-m", "agent.cli", "generate", str(spec), "--provider", "anthropic", "--no-gpu"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 3 and "[key] is not welcome" in done.stderr
    assert "answered 500" in done.stdout and any(key in value for value in server.headers[0].values())
    kept = [path.read_bytes() for path in runs.runs_dir().rglob("*") if path.is_file()]
    assert len(kept) >= 3 and key.encode() not in b"".join(
        [*kept, done.stdout.encode(), done.stderr.encode()]
    )
