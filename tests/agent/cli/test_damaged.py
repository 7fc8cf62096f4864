"""Damaged files: a command prints one message that names the damaged file, and its exit status is in the
list of docs/index.md."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from authoring import SPECS, TOY, accepted_run, make_run, write_toy
from checkout import ROOT
from commanding import Command

import comparison
from coda_agent.agent.cli.exit_codes import USAGE
from coda_agent.agent.run import history, runs
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import DamagedError
from coda_agent.comparison.results import read
from coda_agent.primitives.errors import InvalidInput
from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.file import DEEPEST, LARGEST, SpecError

pytestmark = pytest.mark.usefixtures("runs_home", "plain")


def change(name: str, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(runs.folder(name) / runs.JOURNAL, isolation_level=None)) as db:
        db.execute(statement, values)


def payload(key: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[str], None]:
    """Return a function that applies ``edit`` to the payload of an event in a run's journal."""

    def damage(name: str) -> None:
        with closing(sqlite3.connect(runs.folder(name) / runs.JOURNAL)) as db:
            (text,) = db.execute("SELECT payload FROM events WHERE key = ?", (key,)).fetchone()
        found = json.loads(text)
        edit(found)
        change(name, "UPDATE events SET payload = ? WHERE key = ?", json.dumps(found), key)

    return damage


DAMAGE: dict[str, tuple[Callable[[str], None], str]] = {
    "no answer": (lambda name: change(name, "DELETE FROM events WHERE key = 'answer/1'"), "report/1"),
    "no report": (lambda name: change(name, "DELETE FROM events WHERE key = 'report/1'"), "measurement/1"),
    "no header": (lambda name: change(name, "DELETE FROM header"), "0 headers"),
    "no UTF-8": (lambda name: change(name, "UPDATE header SET json = CAST(x'ff' AS TEXT)"), "journal.db"),
    "no text": (lambda name: change(name, "UPDATE events SET kind = x'00'"), "event 1"),
    "no time": (lambda name: change(name, "UPDATE events SET time = 'now'"), "event 1"),
    "a list": (lambda name: change(name, "UPDATE events SET payload = '[]'"), "not a JSON object"),
    "deep": (lambda name: change(name, "UPDATE events SET payload = ?", "[" * 9999), "nested too deep"),
    "a number": (lambda name: change(name, "UPDATE events SET key = 'report/x' WHERE seq = 3"), "event 3"),
    "tokens": (payload("answer/1", lambda p: p["usage"].update(input_tokens="x")), "answer/1.usage.input"),
    "no source": (payload("report/1", lambda p: p.pop("source")), "report/1.source"),
    "program": (payload("report/1", lambda p: p.update(program="{}")), "report/1"),
    "kernels": (
        payload("report/1", lambda p: p["report"]["gates"][3]["figures"].update(kernels=7)),
        "report/1",
    ),
    "no time of it": (
        payload("measurement/1", lambda p: p["timings"][0]["milliseconds"].pop("candidate")),
        "measurement/1.measured.timings.0",
    ),
    "endless": (
        payload("measurement/1", lambda p: p["timings"][0].update(roofline_milliseconds=1e308)),
        "measurement/1.measured.timings.0.roofline_milliseconds",
    ),
    "another kernel": (
        payload("measurement/1", lambda p: p["identity"].update(program_hash="0")),
        "measurement/1",
    ),
    "schedules": (
        payload("measurement/1", lambda p: p["timings"][0].update(schedules={"x": {}})),
        "measurement/1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_says_where(spec: Path, damage: str) -> None:
    name, good = accepted_run(spec), make_run(spec)
    act, place = DAMAGE[damage]
    act(name)
    if damage != "program":  # a damaged program is found only if the spec is read too
        with pytest.raises(DamagedError) as error:
            record.glance(runs.folder(name) / runs.JOURNAL)
        assert name in str(error.value) and place in str(error.value)
        told = {run.run: run for run in history.past()}
        assert (told[name].status, told[good].status) == ("unreadable", "checked")
        assert place in told[name].why and "\n" not in told[name].why
    with pytest.raises(DamagedError, match=place):
        runs.look(name)
    with pytest.raises(DamagedError, match=place):
        runs.reopen(name)


def test_commands_end_by_one_message(spec: Path, tmp_path: Path, command: Command) -> None:
    name = accepted_run(spec)
    DAMAGE["no answer"][0](name)
    for given in ("review", "accept", "bundle", "report", "resume"):
        done = command(given, name)
        assert done.status == USAGE and name in done.said(), given
    done = command("runs")
    assert done.status == 0 and name in done.out and "unreadable" in done.out


def test_a_run_of_an_unknown_provider_can_be_read_but_not_resumed(spec: Path, command: Command) -> None:
    name = make_run(spec)
    change(name, "UPDATE header SET json = json_set(json, '$.provider', 'oracle')")
    done = command("resume", name)
    assert done.status == USAGE and name in done.said() and "must be one of the providers" in done.said()
    assert command("review", name).status == 0
    with pytest.raises(DamagedError, match="must be one of the providers"):
        runs.reopen(name)


def test_one_place_reads_records() -> None:
    """In ``agent/run`` and ``agent/storage``, only record.py and journal.py read journals and recordings
    directly. Any other module that did so would use records that nobody has checked."""
    for path in sorted(p for folder in ("run", "storage") for p in (ROOT / "agent" / folder).rglob("*.py")):
        if path.name not in ("record.py", "journal.py"):
            text = path.read_text(encoding="utf-8")
            found = [name for name in ("read_export", "Journal.open", "journal.glance") if name in text]
            assert not found and "import glance" not in text, path


# specs

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(64))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("name: toy\n", BOMB, 1),
        ("M: 4096, K", f"M: 0x{'f' * 6000}, K", 13),  # Python refuses to print so many decimal digits
        ("M: 4096, K", f"M: {2**64}, K", 13),
        ("speedup: 1.1", f"speedup: {'[' * (DEEPEST + 1)}{']' * (DEEPEST + 1)}", 16),
        ("  c = (a", "  assert False\n  c = (a", 11),
        ("  c = (a", "  raise torch.jit.Error('no')\n  c = (a", 11),
        ("  c = (a", f"  z = {'-' * 9999}1\n  c = (a", 11),
        ("  c = (a", f"  z = a{'.mT' * 9999}\n  c = (a", 11),
        ("name: toy\n", "name: toy\n? {a: {b: 1}}\n: 1\n", 1),
        ("name: toy\n", "name: toy\n<<: {a: 1}\n", 1),
    ],
)
def test_a_spec_that_is_none(tmp_path: Path, old: str, new: str, line: int) -> None:
    assert old in TOY
    path = tmp_path / "toy.yaml"
    path.write_text(TOY.replace(old, new, 1))
    with pytest.raises(SpecError) as error:
        load(path)
    assert error.value.line == line


def test_a_spec_has_a_largest_size(tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    with path.open("a") as file:
        file.write("#" * LARGEST)
    with pytest.raises(SpecError):
        load(path)


def test_every_shipped_spec_is_a_small_tree() -> None:
    for path in SPECS.glob("*.yaml"):
        assert load(path, check=False).name == path.stem


# comparisons


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("roofline",), 1e-320),
        (("roofline",), 1e308),
        (("arms", "eager", "milliseconds", 3), 1e308),
        (("arms", "eager", "milliseconds", 3), float("nan")),
        (("arms", "eager", "bytes"), 10**400),
        (("arms", "eager", "seconds"), -1),
        (("arms", "eager", "losses", "y", "relative"), float("inf")),
        (("sizes", "M"), 0),
        (("process",), 2**70),
    ],
)
def test_numbers_that_no_measurement_gives(tmp_path: Path, place: tuple[Any, ...], value: object) -> None:
    found = json.loads(comparison.results([("gemm_rope", "7B")]).model_dump_json(by_alias=True))
    holder = found["sittings"][1]
    *way, last = place
    for key in way:
        holder = holder[key]
    holder[last] = value
    path = tmp_path / "results.json"
    path.write_text(json.dumps(found))
    with pytest.raises(InvalidInput) as error:
        read(path)
    assert "sittings.1." + ".".join(map(str, place)) in str(error.value)


def test_a_run_whose_folder_was_copied_is_whole(spec: Path) -> None:
    name = accepted_run(spec)
    shutil.copytree(runs.folder(name), runs.runs_dir() / "copied")
    assert [run.status for run in history.past()] == ["accepted", "accepted"]
