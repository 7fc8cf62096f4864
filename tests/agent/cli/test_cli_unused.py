"""Some options would do nothing, because of another option or because of the provider. The command refuses
such options, names them in its message, and states a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from authoring import TOY_KERNEL, make_run
from commanding import Command

from coda_agent.agent import tips
from coda_agent.agent.fleet import sweep
from coda_agent.agent.options import AuthoringOptions, BudgetOptions, MeasuringOptions, typed_options
from coda_agent.agent.run import runs
from coda_agent.comparison.options import Choice, Drawing, Effort

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")


@pytest.fixture
def place(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change the working directory to a folder with a spec and a kernel for this spec; return this folder."""
    (tmp_path / "specs").mkdir()
    shutil.move(spec, tmp_path / "specs" / "toy.yaml")
    (tmp_path / "toy.py").write_text(TOY_KERNEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def unused(command: Command, *words: object, of: str, why: str) -> None:
    """Check that the command reports wrong usage and begins no run. The message has to name the options
    ``of`` and to state why these options would do nothing."""
    before = runs.names()
    done = command(*words)
    said = " ".join(done.err.split())
    assert done.status == 2 and done.out == "" and "Traceback" not in said, done
    assert f"{of} would do nothing: " in said and why in said, said
    assert runs.names() == before


def test_options_are_named_as_they_are_typed() -> None:
    groups = (Choice(everything=True, cases=["1B"]), Effort(quick=True, rounds=12), Drawing(as_json=True))
    assert typed_options(*groups) == ["--cases", "--all", "--quick", "--rounds", "--json"]
    assert typed_options(MeasuringOptions(max_autotune=True), BudgetOptions(budget_dollars=0.0)) == [
        "--max-autotune", "--budget-dollars",
    ]  # fmt: skip
    assert (
        typed_options(AuthoringOptions(), MeasuringOptions(), BudgetOptions(), Effort(), Choice(), Drawing())
        == []
    )


def test_events_are_exported_without_a_page(command: Command, spec: Path, tmp_path: Path) -> None:
    asked = ("report", make_run(spec), "--jsonl", tmp_path / "e.jsonl")
    why = "--jsonl writes the events and no page; leave it out"
    unused(command, *asked, "-o", tmp_path / "p.html", of="--out", why=why)
    unused(command, *asked, "-o", tmp_path / "p.html", "--json", of="--out and --json", why=why)
    assert not list(tmp_path.glob("*.jsonl")) and not list(tmp_path.glob("*.html"))
    assert command(*asked).status == 0 and (tmp_path / "e.jsonl").exists()


def test_a_report_that_is_printed_is_no_page(command: Command, spec: Path, tmp_path: Path) -> None:
    asked = ("report", make_run(spec), "--json")
    unused(
        command, *asked, "-o", tmp_path / "p.html", of="--out", why="--json prints instead of writing a page"
    )
    assert json.loads(command(*asked).out)["runs"]


def test_tables_are_put_into_a_file_or_printed(command: Command, tmp_path: Path) -> None:
    asked = ("table", "--write", tmp_path / "README.md", "--json")
    unused(command, *asked, of="--json", why="--write puts the tables into FILE; leave one of the two out")


@pytest.mark.usefixtures("no_compiler", "place")
def test_what_shows_machine_code_takes_sass(command: Command) -> None:
    unused(command, "show", "toy.py", "--full", of="--full", why="add --sass")


@pytest.mark.parametrize(
    ("words", "of"),
    [
        (("verify", "toy.py", "--again"), "--again"),
        (("verify", "toy.py", "--rounds", 9, "--sanitize", "--again"), "--rounds and --sanitize and --again"),
        (("generate", "toy", "--provider", "handoff", "--quack"), "--quack"),
        (("generate", "toy", "--provider", "handoff", "--candidates", 2, "--warm"), "--warm"),
    ],
)
@pytest.mark.usefixtures("place")
def test_without_a_gpu_nothing_is_measured(command: Command, words: tuple[object, ...], of: str) -> None:
    unused(command, *words, "--no-gpu", of=of, why="--no-gpu measures nothing; leave one of the two out")


def test_a_run_that_goes_on_without_a_gpu_measures_nothing(command: Command, spec: Path) -> None:
    name = make_run(spec)
    unused(command, "resume", name, "--no-gpu", "--processes", 4, of="--processes", why="--no-gpu measures")


@pytest.mark.parametrize(
    ("provider", "words", "why"),
    [
        ("handoff", ("--model", "opus"), "the author is handoff, but this option is for anthropic"),
        ("handoff", ("--max-tokens", 2048), "this option is for anthropic and claude-code; leave it out"),
        ("anthropic", ("--time-limit", 60), "the author is anthropic, but this option is for claude-code"),
        ("anthropic", ("--author", "Ada"), "this option is for handoff; leave it out"),
        ("anthropic", ("--directory", "hands"), "this option is for handoff; leave it out"),
    ],
)
def test_an_option_of_another_provider(
    command: Command,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    words: tuple[object, ...],
    why: str,
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    unused(command, "generate", "toy", "--provider", provider, *words, of=str(words[0]), why=why)
    if words[0] != "--directory":
        monkeypatch.setattr(tips, "TIPS", place / "tips.md")
        tips.add(tips.Lesson("Scale rows", "other", "trace/python", "did", "unknown"), place / "tips.md")
        asked = ("tips", "measure", "tip-1", "--specs", "toy", "--provider", provider)
        unused(command, *asked, *words, of=str(words[0]), why=why)


def test_a_model_is_not_asked_where_a_recording_is_played(command: Command) -> None:
    """Without a key, ``--provider auto`` plays the recording, so ``--model`` would do nothing."""
    unused(
        command,
        "generate",
        "gemm_rope",
        "--model",
        "opus",
        of="--model",
        why="the author is replay, but this option is",
    )


def test_a_run_goes_on_with_what_its_provider_takes(command: Command, spec: Path) -> None:
    name = make_run(spec)
    unused(command, "resume", name, "--max-tokens", 2048, of="--max-tokens", why="the author is handoff")


@pytest.mark.parametrize(
    ("words", "of", "why"),
    [
        (("--merge", "--provider", "handoff"), "--provider", "--merge only writes a patch; leave it out"),
        (("--merge", "--reference", "x", "--json"), "--json and --reference", "--merge only writes a patch"),
        (("--reference", "x", "--no-gpu"), "--gpu", "--reference only writes a proposal; leave it out"),
        (("--reference", "x", "--budget-seconds", 9), "--budget-seconds", "--reference only writes"),
        (("--out", "p.patch"), "--out", "it belongs to --merge; leave it out"),
        (("--arguments", "x,y"), "--arguments", "it belongs to --reference; leave it out"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_primitive_is_proposed_authored_or_merged(
    command: Command, words: tuple[object, ...], of: str, why: str
) -> None:
    unused(command, "primitive", "softsign", *words, of=of, why=why)
    assert not Path("specs/primitives").exists()


def test_only_the_list_of_tips_is_printed_for_programs(command: Command) -> None:
    why = "it belongs to the list, not to retire; leave it out"
    unused(command, "tips", "--json", "retire", "tip-1", of="--json", why=why)


@pytest.fixture
def a_sweep(runs_home: Path) -> str:
    """Create a sweep of a handoff author, without runs; return the sweep's name."""
    header = AuthoringOptions().header() | {"provider": "handoff"}
    made = sweep.create({"specs": ["toy.yaml"], "candidates": 1, "limits": {}, "headers": [header]})
    made.close()
    return made.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget-tokens", 5), "--budget-tokens would limit nothing: the spending of handoff is not known"),
        (("--max-tokens", 2048), "--max-tokens would do nothing: the author is handoff"),
        (("--no-gpu", "--rounds", 20), "--rounds would do nothing: --no-gpu measures nothing"),
        (("--readmit", "GPU-1"), "has not excluded GPU-1"),
    ],
)
def test_a_sweep_goes_on_with_what_its_provider_takes(
    command: Command, a_sweep: str, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], said: str
) -> None:
    monkeypatch.setattr("coda_agent.agent.cli.sweep._drive", lambda *_: pytest.fail("the sweep went on"))
    done = command("resume", a_sweep, *words)
    assert done.status == 2 and said in " ".join(done.err.split()), done
    sweep.reopen(a_sweep).close()  # not locked any more


def test_the_page_of_a_sweep_that_is_not_written(command: Command, a_sweep: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = command("report", a_sweep, "--json", "--out", page)
    assert done.status == 2 and "--out would do nothing: --json prints" in " ".join(done.err.split())
    (tmp_path / "folder").mkdir()
    done = command("report", a_sweep, "--out", tmp_path / "folder")
    assert done.status == 2 and f"{tmp_path / 'folder'}: Is a directory" in "".join(done.err.splitlines())
    assert command("report", a_sweep, "--out", page).status == 0 and page.is_file()


def test_a_sweep_is_no_run(command: Command, a_sweep: str, spec: Path, tmp_path: Path) -> None:
    run = make_run(spec)
    for words in (
        ("review", a_sweep),
        ("accept", a_sweep),
        ("bundle", a_sweep, "--out", tmp_path / "b.json"),
        ("resume", a_sweep, run),
        ("tips", "propose", a_sweep),
    ):
        done = command(*words)
        assert done.status == 3 and f"{a_sweep} is a sweep, not a run: name one of its runs" in done.err, done
