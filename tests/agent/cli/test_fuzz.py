"""Ten thousand damaged inputs cause no traceback, and only exit statuses that docs/index.md lists.

Every fourth input is tried; with --thorough, every input is tried. An input depends only on its kind and
number. No damaged kernel source runs outside the jail.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from asking import ASK
from authoring import (
    HONEST,
    RECORDINGS,
    SHIPPED,
    SPECS,
    TOY,
    TOY_KERNEL,
    Notes,
    accepted_run,
    fenced,
    make_run,
    measured,
    program_of,
    slow,
    write_toy,
)
from checkout import ROOT
from commanding import Command
from fuzzing import VALUES, Damage
from mcp.server.mcpserver.exceptions import ToolError

import comparison
from coda_agent import primitives
from coda_agent.agent import setup
from coda_agent.agent.artifacts import accept, bundle, bundle_measuring
from coda_agent.agent.artifacts.bundle import BundleResults, KernelResult
from coda_agent.agent.cli import exit_codes, mcp
from coda_agent.agent.providers import Question
from coda_agent.agent.providers.handoff import Handoff
from coda_agent.agent.providers.replay import Replay
from coda_agent.agent.reporting import compared as side_by_side
from coda_agent.agent.reporting import html_report as page
from coda_agent.agent.reporting import render, table_rows
from coda_agent.agent.run import history, improve, run_summary, runs
from coda_agent.agent.run.loop import extract
from coda_agent.agent.storage import kernel_files, record
from coda_agent.agent.terminal.console import Console
from coda_agent.comparison import results
from coda_agent.comparison.drawing import html_page as compared
from coda_agent.comparison.drawing import markdown, terminal
from coda_agent.comparison.drawing.cells import NAMES, lines
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Checked, Rejected
from coda_agent.verifier.sandbox import jail, language

COUNTS = {
    "specs": 200,
    "programs": 3800,
    "sources": 3300,
    "traced sources": 40,
    "bundles": 350,
    "results": 300,
    "comparisons": 300,
    "journals": 300,
    "recordings": 800,
    "answers": 500,
    "MCP arguments": 120,
    "commands": 60,
}
STATUSES = {
    exit_codes.OK,
    exit_codes.REJECTED,
    exit_codes.USAGE,
    exit_codes.ABSENT,
    exit_codes.UNFINISHED,
    exit_codes.INTERRUPTED,
}
Try = Callable[[Damage], object]  # damages one input and has the product read it

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "no_keys")


def test_ten_thousand_inputs() -> None:
    assert sum(COUNTS.values()) >= 10_000 and COUNTS.keys() == TRIES.keys()
    page = " ".join((ROOT / "docs" / "verification.md").read_text(encoding="utf-8").split())
    for kind, count in COUNTS.items():
        assert f"{count:,} {kind}" in page, f"{count:,} {kind}"


@pytest.mark.parametrize("kind", COUNTS)
def test_no_traceback(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = TRIES[kind](tmp_path, request)
    crashes: dict[str, str] = {}  # the first crash at each line of code
    for number in range(0, COUNTS[kind], 1 if request.config.getoption("thorough") else 4):
        try:
            status = ended(partial(attempt, Damage(f"{kind}/{number}")))
            assert status in STATUSES, status
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            words = f"input {number}: {type(error).__name__}: {str(error)[:300]}"
            crashes.setdefault(f"{last.filename}:{last.lineno}", words)
    assert not crashes, "\n".join(f"{place} {words}" for place, words in crashes.items())


def ended(act: Callable[[], object]) -> int:
    """Return the exit status with which the command would end. Raise any error that the command would show as
    a traceback."""
    try:
        found = act()
    except typer.BadParameter:
        return exit_codes.USAGE
    except (ProgramError, ToolError):  # errors of a kernel or a client, which the command treats as results
        return exit_codes.REJECTED
    except Exception as error:
        return exit_codes.print_error(error)
    return found if type(found) is int else exit_codes.OK


# Each of the following functions handles one kind of input. It returns a function that damages one input and
# has the product read this input.


def specs(place: Path, request: pytest.FixtureRequest) -> Try:
    sound = [TOY, *((SPECS / f"{name}.yaml").read_text() for name in SHIPPED[:4])]
    file = place / "spec.yaml"

    def attempt(damage: Damage) -> None:
        text = damage.random.choice((TOY, TOY, *sound))
        file.write_bytes(damage.text(text).encode("utf-8", "replace"))
        load(file, check=damage.random.random() < 0.1)

    return attempt


def programs(place: Path, request: pytest.FixtureRequest) -> Try:
    sound = [json.loads(path.read_text()) for path in sorted(kernel_files.KERNELS.glob("*.program.json"))[:8]]

    def attempt(damage: Damage) -> None:
        lower(Program.from_json(damage.json(damage.random.choice(sound)).decode("utf-8", "replace")))

    return attempt


def sources(place: Path, request: pytest.FixtureRequest) -> Try:
    # Rename the functions. Otherwise the audit of the test session would take these texts for candidates,
    # which only the jail may compile.
    sound = [source.replace("def ", "def fuzzed_") for source in HONEST.values()]

    def attempt(damage: Damage) -> None:
        language.check(damage.text(damage.random.choice(sound)), primitives.__all__)

    return attempt


def traced(place: Path, request: pytest.FixtureRequest) -> Try:
    signature = load(write_toy(place), check=False).signature()

    def attempt(damage: Damage) -> None:
        jail.trace(damage.lines(TOY_KERNEL), signature)

    return attempt


def bundles(place: Path, request: pytest.FixtureRequest) -> Try:
    file = place / "bundle.json"
    bundle.pack([make_run(write_toy(place))], file)
    sound = json.loads(file.read_text())

    def attempt(damage: Damage) -> None:
        file.write_bytes(damage.json(sound))
        for entry in bundle.read(file).entries:
            spec, _ = bundle_measuring.verified(file, entry)
            (
                bundle_measuring._schedules(file, entry),
                bundle_measuring._quack(file, entry),
                bundle_measuring._rival(file, entry, spec),
            )

    return attempt


def imported(place: Path, request: pytest.FixtureRequest) -> Try:
    spec = load(write_toy(place), check=False)
    name = make_run(place / "toy.yaml")
    before, file = place / "before", place / "results.json"
    shutil.copytree(runs.folder(name), before)
    sound = [results_of(name, found) for found in (measured(spec, program_of(spec, TOY_KERNEL)), slow(spec))]

    def attempt(damage: Damage) -> None:
        file.write_bytes(damage.json(damage.random.choice(sound)))
        if [*bundle.take(file)]:
            shown(name)
            shutil.rmtree(runs.folder(name))
            shutil.copytree(before, runs.runs_dir() / name)

    return attempt


def results_of(name: str, found: Any) -> Any:
    report = setup.run_result(name).report
    assert isinstance(report, Checked)
    made = KernelResult(
        run=name, attempt=1, identity=report.identity, measurement=found.model_dump(mode="json")
    )
    return json.loads(BundleResults(results=(made,)).model_dump_json())


def comparisons(place: Path, request: pytest.FixtureRequest) -> Try:
    few = comparison.results([("gemm_rope", "7B"), ("gemm_swiglu_bwd", "70B")])
    sound, file = json.loads(few.model_dump_json()), place / "results.json"

    def attempt(damage: Damage) -> None:
        file.write_bytes(damage.json(sound))
        found = results.read(file)
        lines(found, NAMES)
        markdown.markdown(found, NAMES)
        if damage.random.random() < 0.1:
            compared.page(found, {}, NAMES)
            quiet().print(terminal.table(found))

    return attempt


def journals(place: Path, request: pytest.FixtureRequest) -> Try:
    names, damage_one = made_journals(place)

    def attempt(damage: Damage) -> None:
        name = damage_one(damage)
        assert len(history.past()) == len(names)  # a damaged run hides no other run
        shown(name)

    return attempt


def made_journals(place: Path) -> tuple[list[str], Callable[[Damage], str]]:
    """Return the names of two runs, and a function that restores both runs, damages one of them, and returns
    the name of the damaged run."""
    toy = write_toy(place)
    names = [make_run(toy, found=slow(load(toy, check=False))), accepted_run(toy)]
    for name in names:
        with runs.reopen(name).journal as journal:
            journal.once("stopped/1", "stopped", lambda: {"reason": "interrupted"})
            journal.once("tip/1.1", "tip", lambda: {"lesson": "Be brief", "failed": "trace", "fix": "less"})
    paths = [runs.folder(name) / runs.JOURNAL for name in names]
    sound = {path: path.read_bytes() for path in paths}

    def damage_one(damage: Damage) -> str:
        for path, content in sound.items():
            path.write_bytes(content)
            for left in ("-wal", "-shm", "-room"):  # left over from an earlier input
                path.with_name(f"{path.name}{left}").unlink(missing_ok=True)
        path = damage.random.choice(paths)
        if damage.random.random() < 0.3:
            path.write_bytes(damage.bytes(sound[path]))
        else:
            damage_row(path, damage)
        return path.parent.name

    return names, damage_one


def damage_row(path: Path, damage: Damage) -> None:
    """In a journal that is otherwise intact, change the header, or change or delete one event."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        rows = db.execute("SELECT seq, key, kind, payload, time FROM events").fetchall()
        seq, *fields, payload, time = damage.random.choice(rows)
        what = damage.random.random()
        if what < 0.15:
            header = json.loads(db.execute("SELECT json FROM header").fetchone()[0])
            db.execute("UPDATE header SET json = ?", (json.dumps(damage.value(header)),))
        elif what < 0.3:
            column = damage.random.choice(("key", "kind", "time", "payload"))
            word: object = damage.random.choice((*fields, *VALUES))
            value = str(word).encode("utf-8", "surrogatepass") if damage.random.random() < 0.5 else str(word)
            value = value if isinstance(value, bytes) or value.isascii() else "é"
            db.execute(f"UPDATE OR IGNORE events SET {column} = ? WHERE seq = ?", (value, seq))
        elif what < 0.35:
            db.execute("DELETE FROM events WHERE seq = ?", (seq,))
        else:
            changed = json.dumps(damage.value(json.loads(payload)))
            db.execute("UPDATE events SET payload = ? WHERE seq = ?", (changed, seq))


def shown(name: str) -> None:
    """Call every function that shows a run."""
    text = page.page(run_summary.read(runs.folder(name)))
    assert "\x1b" not in text
    side_by_side.as_dict([name])
    outcome = setup.run_result(name)
    render.show(quiet(), outcome.report)
    accept.changes(outcome)
    if outcome.report.status == "accepted":
        accept.message(outcome.report, outcome.authorship)


def quiet() -> Console:
    """Return a console without output."""
    return Console(quiet=True)


def recordings(place: Path, request: pytest.FixtureRequest) -> Try:
    paths = sorted(RECORDINGS.glob("*.jsonl"), key=lambda path: path.stat().st_size)[:6]
    sound = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    file = place / "toy.jsonl"

    def attempt(damage: Damage) -> None:
        lines_ = damage.random.choice(sound)
        damaged = damage.value(lines_) if damage.random.random() < 0.7 else lines_
        rows = damaged if isinstance(damaged, list) else [damaged]
        text = "".join(json.dumps(line) + "\n" for line in rows).encode()
        file.write_bytes(text if damaged is not lines_ else damage.bytes(text))
        player = Replay(file)
        player.next_turn(Question("S", ASK))
        table_rows.run_row(*record.read_recording(file), set())

    return attempt


def answers(place: Path, request: pytest.FixtureRequest) -> Try:
    sound = f'{fenced(TOY_KERNEL)}\n```json\n{{"0": {{"swizzle": 16}}}}\n```\n<!-- end -->\n'

    def attempt(damage: Damage) -> None:
        (place / "answer-1.md").write_bytes(damage.bytes(sound.encode()))
        asked = Handoff(place, author="Ada", time_limit=0, settle=0, patience=0)
        turn = asked.next_turn(Question("S", ASK))
        extract(turn.text), improve.schedules(turn.text)

    return attempt


def arguments(place: Path, request: pytest.FixtureRequest) -> Try:
    """Call the tools of the MCP server with damaged text arguments, just as the SDK calls the tools. A fake
    replaces the verification of a source, because other tests cover this verification."""
    monkeypatch = request.getfixturevalue("monkeypatch")
    (place / "specs").mkdir()
    toy = write_toy(place / "specs")
    monkeypatch.setattr(mcp, "Progress", lambda ctx: Notes())
    monkeypatch.setattr(mcp, "_client", lambda ctx: "Ada")
    refused = Rejected(gate="trace", code="python", message="no")
    monkeypatch.setattr("coda_agent.verifier.verify.check", lambda *_, **__: (refused, None))
    name, bench = make_run(toy, provider="mcp"), mcp.McpTools(2)
    tip = {"lesson": "Be brief", "failed": "trace/python", "fix": "less"}
    calls: list[tuple[Any, dict[str, str]]] = [
        (bench.report, {"run": name}),
        (bench.read, {"run": name, "page": "per_row"}),
        (bench.prompt, {"spec": "toy"}),
        (bench.check, {"run": name, "source": TOY_KERNEL}),
        (bench.verify, {"run": name, "source": TOY_KERNEL}),
        (bench.measure, {"run": name}),
        (bench.propose_tip, {"run": name, **tip}),
    ]

    def attempt(damage: Damage) -> None:
        tool, sound = damage.random.choice(calls)
        given = {k: v if damage.random.random() < 0.5 else damage.text(v) for k, v in sound.items()}
        context = {} if tool == bench.report else {"ctx": None}
        mcp._in_words(tool)(**given, **context)

    return attempt


def commands(place: Path, request: pytest.FixtureRequest) -> Try:
    """Run whole commands in this process."""
    command: Command = request.getfixturevalue("command")
    request.getfixturevalue("no_compiler")
    names, damage_one = made_journals(place)
    program = json.loads((kernel_files.KERNELS / "gemm_rope.program.json").read_text())
    compared = json.loads(comparison.results([("gemm_rope", "7B")]).model_dump_json())
    packed = {"coda_agent_bundle": 1, "entries": [{"run": names[0], "attempt": 1}]}
    spec, kernel = place / "spec.yaml", place / "toy.py"

    def attempt(damage: Damage) -> int:
        name = damage_one(damage)
        for file, sound in (("bundle", packed), ("program", program), ("compared", compared)):
            (place / f"{file}.json").write_bytes(damage.json(sound))
        spec.write_text(damage.text(TOY), encoding="utf-8", errors="replace")
        kernel.write_text(damage.lines(TOY_KERNEL), encoding="utf-8", errors="replace")
        given = damage.random.choice(
            [
                *(("runs",), ("runs", "--json"), ("review", name), ("review", name, "--json")),
                *(("report", name), ("report", "--json", *names), ("report", name, "--jsonl", "out.jsonl")),
                *(("accept", name), ("bundle", name), ("tips", "propose", name), ("table",)),
                *(("resume", name, "--no-gpu"), ("import", "bundle.json"), ("measure", "bundle.json")),
                *(("prompt", "spec.yaml"), ("show", "program.json"), ("runs",)),
                *(("show", "toy.py", "--spec", "toy.yaml"), ("compare", "--from", "compared.json")),
            ]
        )
        done = command(*given)
        assert "Traceback" not in done.err and "\x1b" not in done.out + done.err, (given, done)
        return done.status

    return attempt


TRIES: dict[str, Callable[[Path, pytest.FixtureRequest], Try]] = {
    "specs": specs,
    "programs": programs,
    "sources": sources,
    "traced sources": traced,
    "bundles": bundles,
    "results": imported,
    "comparisons": comparisons,
    "journals": journals,
    "recordings": recordings,
    "answers": answers,
    "MCP arguments": arguments,
    "commands": commands,
}
