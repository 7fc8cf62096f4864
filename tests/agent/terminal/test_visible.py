"""Text from files is shown as text: no terminal obeys it, and no markup in it is interpreted."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from authoring import make_run
from checkout import ROOT
from commanding import Command

from coda_agent.agent.artifacts.bundle import BundleResults, KernelResult
from coda_agent.agent.reporting.progress import LiveView
from coda_agent.agent.run import runs
from coda_agent.agent.run.loop import result_of
from coda_agent.agent.terminal.console import Console
from coda_agent.agent.terminal.safe_text import visible
from coda_agent.verifier.report import Checked, Rejected

HOSTILE = "\x1b]0;owned\x07\x9b2J [/x] [red]\u202egnp.exe :smile: \x7f"
SHOWN = r"\u001b]0;owned\u0007\u009b2J [/x] [red]\u202egnp.exe :smile: \u007f"
ON_SCREEN = SHOWN.replace(r"\u0007", "")  # rich itself drops the bell
PRINTS = {"print", "typer.echo", "typer.secho", "sys.stdout.write"}


def test_controls_are_shown_and_json_stays_json() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("\x1b[31mred\x1b[0m\ttwo\nlines") == "red\ttwo\nlines"  # a compiler's colours are removed
    text = json.dumps({"code": HOSTILE, "lone": "\ud800"}, ensure_ascii=False)
    assert json.loads(visible(text)) == {"code": HOSTILE, "lone": "\ud800"}


def test_a_console_obeys_its_own_styles_alone() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system="standard")
    console.print(HOSTILE, style="red")
    assert out.getvalue() == f"\x1b[31m{ON_SCREEN}\x1b[0m\n"


def test_a_live_view_shows_what_an_author_says() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=200, color_system=None)) as watch:
        watch.text(HOSTILE)
        watch.report(1, Rejected(gate=HOSTILE, code=HOSTILE, message=HOSTILE))
        watch.tool(HOSTILE, HOSTILE)
    assert ON_SCREEN in out.getvalue() and "\x07" not in out.getvalue() and "\x1b]" not in out.getvalue()


def test_one_place_prints() -> None:
    """In the agent, only safe_text.py prints. Another module that prints could forget to call ``visible``."""
    for path in sorted((ROOT / "agent").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert name == "agent/terminal/safe_text.py" or not called & PRINTS, f"{name} prints"
        imported = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        made = "Console" in called and "rich.console.Console" in imported
        assert not made, f"{name} makes a console of rich's"


@pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")
def test_imported_results_do_not_reach_the_terminal(
    spec: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_run(spec)
    outcome = result_of(*runs.look(name))
    assert outcome is not None and isinstance(outcome.report, Checked)
    found = Rejected(gate=HOSTILE, code=HOSTILE, message=HOSTILE, gates=outcome.report.gates[:1])
    results = BundleResults(
        results=(
            KernelResult(
                run=name,
                attempt=1,
                identity=outcome.report.identity,
                measurement=found.model_dump(mode="json"),
            ),
        )
    )
    file = tmp_path / "results.json"
    file.write_text(results.model_dump_json())
    monkeypatch.chdir(tmp_path)
    for arguments in (("import", file), ("runs",), ("review", name), ("report", name), ("runs", "--json")):
        done = command(*arguments)
        assert done.status in (0, 1) and "Traceback" not in done.err, done
        assert not {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"} & set(done.out + done.err), done
    assert ON_SCREEN in command("review", name).out
    assert "\x1b" not in (runs.runs_dir() / name / f"{name}.html").read_text(encoding="utf-8")
