"""Tabulate the authoring experiment: ``python -m benchmarks.authoring.table [--collect PACK=FOLDER ...]``.

``--collect`` reads the journals of finished runs (a folder of runs for each version of the prompt, called a
pack) into ``outcomes.json``, with every answer's code and verdict. Then the tables are written to the end of
docs/authoring_experiment.md. They show why answers were rejected, and, with Wilson's 95 % intervals, how
many runs passed the gates that need no GPU: at the first answer, and within three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from benchmarks.authoring.operators import KINDS, OPTIONS
from coda_agent.agent.reporting.proportions import difference, wilson
from coda_agent.agent.run.loop import extract
from coda_agent.agent.run.runs import JOURNAL
from coda_agent.agent.storage import record
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE, MARK = Path("docs/authoring_experiment.md"), "## Outcomes\n"
MOST = 3  # most answers per run
LONGEST = 240  # characters of a message in the table
TRIES = {1: "at the first answer", MOST: "within three"}
Outcome = Mapping[str, Any]


def outcome(pack: str, run: Path) -> Outcome:
    """Return a run's pack and operator, and the code, verdict and message of each answer."""
    header, events = record.glance(run / JOURNAL)
    answers = [extract(event.payload["text"]) for event in events if event.kind == "answer"]
    reports = [event.payload["report"] for event in events if event.kind == "report"]
    tries = [
        {"verdict": verdict(report), "message": report.get("message", ""), "code": code}
        for code, report in zip(answers, reports, strict=False)  # the last answer may have no report yet
    ]
    return {"pack": pack, "operator": header["spec"], "tries": tries}


def decided(outcomes: Iterable[Outcome], tries: int) -> list[Outcome]:
    """The runs whose result after ``tries`` answers is known: they passed within ``tries`` answers, or have
    at least ``tries`` judged answers."""
    return [run for run in outcomes if passed([run], tries) or len(run["tries"]) >= tries]


def verdict(report: Mapping[str, Any]) -> str:
    """ "passed", or the gate and reason of a rejection."""
    return f"{report['gate']}/{report['code']}" if report["status"] == "rejected" else "passed"


def passed(outcomes: Iterable[Outcome], tries: int) -> int:
    """The number of runs that passed within ``tries`` answers."""
    return sum("passed" in [t["verdict"] for t in o["tries"][:tries]] for o in outcomes)


def rates(outcomes: Sequence[Outcome]) -> str:
    """A table of success rates, by kind of operator and by pack."""
    lines: list[list[object]] = []
    for kind, names in {**KINDS, "all": tuple(chain(*KINDS.values()))}.items():
        for pack in packs(outcomes):
            of = [o for o in outcomes if o["pack"] == pack and o["operator"] in names]
            lines.append([kind, pack, *(_share(passed(of, n), len(decided(of, n))) for n in TRIES)])
    return markdown_table(["operators", "pack", *(f"passed {words}" for words in TRIES.values())], lines)


def packs(outcomes: Sequence[Outcome]) -> list[str]:
    """The packs, in the order in which they first appear in the data."""
    return list(dict.fromkeys(o["pack"] for o in outcomes))


def gain(outcomes: Sequence[Outcome]) -> list[str]:
    """A line with the second pack's success rate at the first answer, minus the first pack's rate. There is
    no line if the number of packs is not two."""
    arms = [[o for o in outcomes if o["pack"] == pack] for pack in packs(outcomes)]
    if len(arms) != 2:
        return []
    (one, of), (other, others) = ((passed(arm, 1), len(arm)) for arm in arms)
    return [f"Difference at the first answer: {difference(other, others, one, of)}.\n"]


def each(outcomes: Sequence[Outcome]) -> str:
    """A table of each operator's verdicts, with one column per pack. Verdicts are in the order of the
    answers."""
    found = {(o["operator"], o["pack"]): [t["verdict"] for t in o["tries"]] for o in outcomes}
    lines: list[list[object]] = [
        [f"`{name}`", *(", ".join(found.get((name, pack), ["no run"])) for pack in packs(outcomes))]
        for name in chain(*KINDS.values())
    ]
    return markdown_table(["operator", *(f"{pack} pack" for pack in packs(outcomes))], lines)


def failures(outcomes: Sequence[Outcome]) -> str:
    """A table of all rejected answers, with the beginning of the verifier's message."""
    lines: list[list[object]] = [
        [f"`{o['operator']}`", o["pack"], number, shorten(f"{t['verdict']}: {t['message']}", LONGEST)]
        for o in outcomes
        for number, t in enumerate(o["tries"], 1)
        if t["verdict"] != "passed"
    ]
    return markdown_table(["rejected", "pack", "answer", "why"], lines) if lines else "Every answer passed.\n"


def _share(number: int, total: int) -> str:
    if not total:
        return "no run"
    low, high = wilson(number, total)
    return f"{number} of {total} [{low:.0%}, {high:.0%}]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", nargs="+", metavar="PACK=FOLDER", help="folders of finished runs")
    if folders := parser.parse_args(arguments).collect:
        places = [(pack, Path(folder)) for pack, _, folder in (text.partition("=") for text in folders)]
        made = [outcome(pack, p.parent) for pack, place in places for p in sorted(place.glob(f"*/{JOURNAL}"))]
        write_atomic(OUTCOMES, json.dumps(decided(made, 1), indent=1) + "\n")
    outcomes = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    above = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    judged = f"{len(outcomes)} of {2 * len(OPTIONS)} runs have a judged answer; the others are not counted.\n"
    tables = [judged, rates(outcomes), *gain(outcomes), each(outcomes), failures(outcomes)]
    write_atomic(PAGE, f"{above}{MARK}\n" + "\n".join(tables))


if __name__ == "__main__":
    main()
