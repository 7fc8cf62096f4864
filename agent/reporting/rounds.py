"""The rounds of a run, with the cost and gain of each round. A round is one attempt: the first attempt, a
repair of a rejected attempt, or an improvement after an accepted attempt."""

from __future__ import annotations

from dataclasses import dataclass

from coda_agent.agent.reporting.render import interval
from coda_agent.agent.run.budget import RESERVED, SETTLED, Spent, spent
from coda_agent.agent.run.history import dollars
from coda_agent.agent.run.run_summary import Account, Attempt
from coda_agent.agent.storage.journal import Event
from coda_agent.verifier.decision import KEPT
from coda_agent.verifier.report import Ratio, Rejected

HEADINGS = ("attempt", "round", "outcome", "tokens", "dollars", "GPU s", "drafts", f"speed over {KEPT}")
# An event of these kinds belongs to the attempt of the next report; a report belongs to its own attempt. Any
# other event, such as a measurement, belongs to the attempt of the previous report.
ASKING = (RESERVED, SETTLED, "answer", "draft", "report")


@dataclass(frozen=True)
class Round:
    """One attempt: the kind of its round, its cost and its result."""

    attempt: Attempt
    kind: str
    spent: Spent

    @property
    def gain(self) -> dict[str, Ratio]:
        """The speedup over the kernel that was accepted before, by case. A case is left out if it did not
        time the attempt's kernel together with that kernel."""
        return {t.case: t.ratios[KEPT] for t in self.attempt.timings if KEPT in t.ratios}


def rounds(run: Account) -> list[Round]:
    """The attempts of a run, in order."""
    costs, found, improving = _costs(run), [], False
    for attempt in run.attempts:
        kind = "improvement" if improving else "first" if attempt.number == 1 else "repair"
        found.append(Round(attempt, kind, costs.get(attempt.number, Spent())))
        improving |= attempt.status == "accepted"
    return found


def _costs(run: Account) -> dict[int, Spent]:
    """The cost of each attempt, by number. The cost covers the attempt's measurements and all of its
    requests, including requests without an answer."""
    grouped: dict[int, list[Event]] = {}
    judged = 0
    for event in (step.event for step in run.steps):
        grouped.setdefault(judged + (event.kind in ASKING), []).append(event)
        judged += event.kind == "report"
    return {number: spent(events) for number, events in grouped.items()}


def cells(round: Round) -> tuple[str, ...]:
    """The cells of a round's table row, in the order of HEADINGS."""
    attempt, spent, report = round.attempt, round.spent, round.attempt.report
    return (
        str(attempt.number),
        round.kind,
        f"rejected {report.gate}/{report.code}" if isinstance(report, Rejected) else attempt.status,
        f"{spent.tokens:,}" if spent.tokens else "not counted",
        dollars(spent),
        f"{spent.gpu_seconds:.0f}" if spent.gpu_seconds else "–",
        str(len(attempt.drafts)),
        ", ".join(f"{case} {interval(ratio)}" for case, ratio in round.gain.items()),
    )
