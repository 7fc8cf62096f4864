"""The command line: short names work, and a wrong name gets one message that suggests the right name."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from authoring import BROKEN, HEADER, TOY_KERNEL, UNSCALED, Notes, Scripted, fenced, make_run
from commanding import Command, Done

from coda_agent.agent import tips
from coda_agent.agent.artifacts.bundle import Bundle
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")


class Interrupted(io.TextIOBase):
    """A terminal where the user presses Ctrl-C."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        raise KeyboardInterrupt


@pytest.fixture
def place(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change the working directory to a folder with a spec and its accepted kernel; return this folder."""
    run = runs.reopen(make_run(spec))
    for folder in ("generated_kernels", "specs"):
        (tmp_path / folder).mkdir()
    with run.journal:
        program = run.journal.events()[-1].payload["program"]
    (tmp_path / "generated_kernels" / "toy.program.json").write_text(program)
    (tmp_path / "generated_kernels" / "toy.py").write_text(TOY_KERNEL)
    shutil.move(spec, tmp_path / "specs" / "toy.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrong(done: Done, *words: str) -> None:
    """Check that the command reports wrong usage, and that its message contains ``words``."""
    said = " ".join(done.err.split())
    assert done.status == 2 and "Traceback" not in said and ".tmp" not in said, done
    for word in words:
        assert word in said, said


# names and paths


@pytest.mark.usefixtures("no_compiler", "place")
@pytest.mark.parametrize("looking", ["show", "verify"])
def test_an_accepted_kernels_name_will_do(looking: str, command: Command) -> None:
    done = command(looking, "toy", "--json")
    assert done.status == 0 and json.loads(done.out)
    wrong(command(looking, "toys", "--json"), "no such kernel file; did you mean toy?")


def test_a_spec_s_name_will_do(command: Command, place: Path, no_compiler: None) -> None:
    assert command("prompt", "toy") == command("prompt", "specs/toy.yaml")
    done = command("verify", "toy", "--spec", "toy", "--no-gpu")
    assert done.status == 0 and "checked, not benchmarked" in done.out
    done = command("generate", "toy", "--provider", "replay")
    assert done.status == 3 and "no recorded run of toy" in done.said()
    wrong(done := command("generate", "toys"), "specs/toys.yaml: no such file; did you mean specs/toy.yaml?")
    assert done.err.endswith("toy.yaml?\n")  # no list of all specs follows
    (place / "toy").write_text("- no mapping")
    wrong(command("prompt", "toy"), "toy:1: a spec is a mapping")  # a file of this name takes precedence


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("looking", ["show", "verify"])
def test_a_kernel_s_spec_may_lie_beside_it(looking: str, command: Command, place: Path) -> None:
    mine = place / "mine"
    mine.mkdir()
    shutil.copy(place / "generated_kernels" / "toy.py", mine / "own.py")
    wrong(command(looking, "mine/own.py"), "mine/own.yaml", "specs/own.yaml", "--spec")
    text = (place / "specs" / "toy.yaml").read_text()
    (mine / "own.yaml").write_text(text.replace("name: toy", "name: own"))
    done = command(looking, "mine/own.py", "--json")
    assert done.status == 0 and json.loads(done.out) and "--spec" not in done.err
    both = text.replace("name: toy", "name: both")
    for folder, used, other in (
        ("mine", "mine", "specs"),
        ("generated_kernels", "specs", "generated_kernels"),  # the kernel was accepted for the spec in specs
    ):
        (place / used / "both.yaml").write_text(both)
        (place / other / "both.yaml").write_text("- no spec")
        shutil.copy(mine / "own.py", place / folder / "both.py")
        done = command(looking, f"{folder}/both.py", "--json")
        assert done.status == 0 and f"{used}/both.yaml" in done.err and "--spec" in done.err
    (place / "specs" / "bad.yaml").write_text("- no spec")
    wrong(command(looking, "mine/own.py", "--spec", "bad", "--json"), "specs/bad.yaml")


@pytest.mark.parametrize("words", [("generate", "toy"), ("prompt", "toy"), ("optimize", "toy")])
def test_a_spec_s_name_outside_a_checkout(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*words, "--provider", "replay") if words[0] != "prompt" else command(*words)
    wrong(done, "specs/toy.yaml", "path of a YAML file", "gemm_swiglu")
    assert done.err.count("\n") == 1 and "no specs" not in done.err


def test_tips_are_measured_on_a_spec_s_name(
    command: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tips, "TIPS", place / "tips.md")
    tips.add(tips.Lesson("Scale rows", "other", "trace/python", "did", "unknown"), place / "tips.md")
    done = command("tips", "measure", "tip-1", "--specs", "toy", "--provider", "replay")
    assert done.status == 2 and "provider 'replay': a recording answers the same" in done.said()


def test_a_name_may_be_given_as_its_file(command: Command, place: Path) -> None:
    done = command("optimize", "specs/toy.yaml", "--provider", "handoff", "--no-gpu")
    assert done.status == 3 and "no accepted kernel for toy" in done.said()
    wrong(command("optimize", "toy.yaml"), "toy.yaml: no such file", "gemm_swiglu")
    kernel = "generated_kernels/toy.py"
    wrong(command("optimize", kernel), f"{kernel}: not in specs; give a name from there")
    proposed = "specs/primitives/softsign.yaml"
    wrong(command("primitive", proposed), f"{proposed}: no such proposal", "primitive softsign")


# kernels


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("toy.program.json", "which coda-agent show generated_kernels/toy.program.json shows"),
        ("toy.raw.program.json", "coda-agent show generated_kernels/toy.raw.program.json"),
        ("toy.raw.py", "edited CuTeDSL, which coda-agent optimize toy verifies"),
        ("toy.cutedsl.py", "the lowered text of a kernel"),
        ("toy.report.json", "not Python"),
        ("toy.yaml", "a spec"),
    ],
)
def test_what_is_no_source_is_not_judged(command: Command, place: Path, name: str, words: str) -> None:
    path = Path("generated_kernels") / name
    source = "verify takes a kernel's source: generated_kernels/toy.py"
    wrong(command("verify", path), f"{path}: this is ", words, source)


def test_the_source_of_a_spec_elsewhere_is_an_accepted_kernel(command: Command, place: Path) -> None:
    takes = "this is a spec; verify takes a kernel's source"
    wrong(command("verify", "specs/gemm_rope.yaml"), f"{takes}: gemm_rope")
    assert command("verify", "elsewhere.yaml").err.endswith(f"elsewhere.yaml: {takes}\n")


@pytest.mark.parametrize(("name", "words"), [("toy.cutedsl.py", "the lowered text"), ("toy.yaml", "a spec")])
def test_what_is_no_kernel_is_not_shown(command: Command, place: Path, name: str, words: str) -> None:
    path = Path("generated_kernels") / name
    source = "show takes a kernel's source: generated_kernels/toy.py"
    wrong(command("show", path), f"{path}: this is {words}", source)


@pytest.mark.parametrize("looking", ["verify", "show"])
def test_a_kernel_that_is_not_there(command: Command, place: Path, looking: str) -> None:
    wrong(command(looking, "toyy"), "toyy: no such kernel file; did you mean toy?")
    wrong(command(looking, "generated_kernels/tay.py"), "tay.py: no such kernel file; did you mean")
    wrong(command(looking, "nothing"), "no such kernel file; give a file or an accepted kernel's name")
    (name,) = runs.names()
    wrong(command(looking, name), f"it is a run: coda-agent review {name}, or report {name}")


def test_accept_names_the_run_that_was_given(command: Command, spec: Path) -> None:
    first = make_run(spec)
    name = make_run(spec, replays=first)
    done = command("accept", name)
    assert done.status == 1 and f"run {name} is checked, not accepted" in done.said()


# questions without an answer


@pytest.fixture
def mended(spec: Path, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a run that fixed two failures. The run's author proposed a tip about a different
    failure."""
    monkeypatch.setattr(tips, "TIPS", tmp_path / "tips.md")
    run = runs.start(spec, HEADER | {"provider": "handoff", "author": "Ada"})
    answers = Scripted([fenced(source) for source in (BROKEN, UNSCALED, TOY_KERNEL)])
    said = {"lesson": "Scale rows", "failed": "compile/registers", "fix": "did"}
    with run.journal:
        Loop(run.journal, run.spec, assembly.task_of(run), answers, Notes(), attempts=3).run()
        run.journal.once("tip/1.1", "tip", lambda: said)
    return run.name


@pytest.mark.parametrize("typed", ["", "Give gemm both operands\n"])
def test_a_lesson_that_nobody_gives(
    command: Command, mended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    wrong(command("tips", "propose", mended), "no answer; give the lesson with --lesson '...' with --failed")
    assert not (tmp_path / "tips.md").exists()


def test_ctrl_c_at_a_prompt(
    command: Command, mended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ops.py").write_text("def f(x, w):\n    return x @ w\n")
    for arguments in (("tips", "propose", mended), ("new", f"{tmp_path}/ops.py:f", "--input")):
        monkeypatch.setattr(sys, "stdin", Interrupted())
        done = command(*arguments)
        assert done.status == 130 and "coda-agent: interrupted" in done.err, done
    assert not (tmp_path / "tips.md").exists()


# files


def test_a_bundle_is_looked_for_before_a_gpu(command: Command, tmp_path: Path) -> None:
    wrong(
        command("measure", tmp_path / "none.json"), "none.json: no such file; give a file written by bundle"
    )
    path = tmp_path / "b.json"
    path.write_text("{}")
    wrong(command("measure", path), "b.json: this is not a bundle")
    path.write_text(Bundle(entries=()).model_dump_json())
    done = command("measure", path)
    assert done.status == 3 and f"copy {path} to a machine with an H100" in done.said()
    assert "--gpu" not in done.err


def test_a_bundle_holds_a_run_once_and_is_no_results(command: Command, spec: Path, tmp_path: Path) -> None:
    name, path = make_run(spec), tmp_path / "b.json"
    done = command("bundle", name, runs.runs_dir() / name, name, "-o", path)
    assert done.status == 0 and "1 kernel(s)" in done.out
    wrong(command("import", path), f"this is a bundle; measure it first: coda-agent measure {path}")


def test_a_page_that_tables_cannot_be_put_into(command: Command, tmp_path: Path) -> None:
    binary, half = tmp_path / "binary.md", tmp_path / "half.md"
    binary.write_bytes(b"\xff\xfe")
    half.write_text("<!-- table: edited -->\n<!-- /table -->\n<!-- table: measured -->\nand on\n")
    nothing = tmp_path / "nothing.md"
    wrong(command("table", "--write", nothing), f"{nothing}: no such file")
    wrong(command("table", "--write", tmp_path), f"{tmp_path}: Is a directory")
    wrong(command("table", "--write", binary), f"{binary}: cannot be read as text")
    wrong(
        command("table", "--write", half), "<!-- table: measured --> has no end: put <!-- /table --> after it"
    )


def test_a_place_that_cannot_be_written(command: Command, spec: Path, tmp_path: Path) -> None:
    name = make_run(spec)
    wrong(command("report", name, "--jsonl", tmp_path), f"{tmp_path}: Is a directory; give another file")
    wrong(command("report", name, "-o", tmp_path), f"{tmp_path}: Is a directory; give another file")
    (tmp_path / "ops.py").write_text("def f(x, w):\n    return x @ w.T\n")
    shapes = ("--shape", "x=M,K", "--shape", "w=N,K")
    out = spec / "toy.yaml"  # the parent of this path is a file
    wrong(command("new", f"{tmp_path}/ops.py:f", *shapes, "-o", out), f"{out}: ", "another path with --out")


def test_counters_of_a_folder(command: Command, place: Path, no_compiler: None) -> None:
    wrong(command("show", "toy", "--counters-from", place), f"{place}: Is a directory")


# scaffolding


def test_half_of_a_dim_is_said_by_doubling_it(command: Command, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(
        "def f(x, w, b):\n    a, g = (x @ w.T + b).chunk(2, -1)\n    return a * g\n"
    )
    out = tmp_path / "f.yaml"
    asked = ("new", f"{tmp_path}/ops.py:f", "--shape", "x=M,K", "-o", out)
    done = command(*asked, "--shape", "w=N,K", "--shape", "b=N")
    words = "an axis of output out is half of N, but a shape cannot divide a dim"
    wrong(done, f"{words}; give --shape w=2*N,K --shape b=2*N")
    assert command(*asked, *done.err.strip().partition("give ")[2].split()).status == 0 and out.exists()


def test_indices_are_asked_for(command: Command, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(
        "import torch.nn.functional as F\ndef f(x, w, targets):\n"
        "    return F.cross_entropy(x @ w.T, targets, reduction='none')\n"
    )
    shapes = ("--shape", "x=M,K", "--shape", "w=V,K", "--shape", "targets=M")
    asked = ("new", f"{tmp_path}/ops.py:f", *shapes, "-o", tmp_path / "f.yaml")
    wrong(command(*asked), "ops.py:3: ", "for a vector of indices, give --dtype targets=int64")
    assert command(*asked, "--dtype", "targets=int64").status == 0


def test_an_option_that_is_given_twice(command: Command, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("def f(x, w):\n    return x @ w.T\n")
    done = command("new", f"{tmp_path}/ops.py:f", "--shape", "x=M,K", "--shape", "x=K,M")
    wrong(done, "--shape x occurs 2 times; keep one")


@pytest.mark.parametrize(
    ("option", "number"),
    [
        ("--budget-seconds", "inf"),
        ("--budget-gpu-seconds", "inf"),
        ("--budget-dollars", "1e12"),
        ("--budget-tokens", 1 << 50),
        ("--max-tokens", 1 << 50),
    ],
)
def test_a_limit_that_a_journal_cannot_hold(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch, option: str, number: object
) -> None:
    """Such a run would be unreadable afterwards."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-fake")
    monkeypatch.setattr("coda_agent.agent.run.loop.Loop.run", lambda loop: pytest.fail("it began"))
    wrong(command("generate", spec, "--provider", "anthropic", "--no-gpu", option, number), option)
    assert runs.names() == []


def test_a_run_that_is_named_twice_is_resumed_once(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.cli.authoring._attend", lambda *_: pytest.fail("several runs"))
    name = make_run(spec)
    assert f"run {name}, provider handoff" in command("resume", name, runs.runs_dir() / name, "--no-gpu").out
