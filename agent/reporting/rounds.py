"""What each round of a run cost and gained: its first attempt, repairs of what was rejected, improvements of
what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coda_agent.agent.run.budget import RESERVED, SETTLED, Spent, spent
from coda_agent.agent.run.journal import Event
from coda_agent.agent.run.run_summary import Account, Attempt
from coda_agent.verifier.decision import BASELINE, KEPT
from coda_agent.verifier.report import Ratio, Rejected

__all__ = ["IMPROVEMENT", "REPAIR", "Round", "cost", "fates", "improved", "repaired", "rounds", "speeds"]

REPAIR, IMPROVEMENT = "repair", "improvement"
ASKING = (RESERVED, SETTLED, "answer", "draft", "report")  # these come before the judgement that they led to


@dataclass(frozen=True)
class Round:
    """An attempt: what kind of round it was, and what it took."""

    attempt: Attempt
    kind: str
    spent: Spent

    @property
    def gain(self) -> dict[str, Ratio]:
        """Its speed over the kernel before, by case, where both were timed in the same rounds."""
        return {t.case: t.ratios[KEPT] for t in self.attempt.timings if KEPT in t.ratios}

    @property
    def passes(self) -> bool:
        return self.attempt.status in ("accepted", "checked")


def rounds(run: Account) -> list[Round]:
    """A run's attempts in their order."""
    costs, found, improving = _costs(run), [], False
    for attempt in run.attempts:
        kind = IMPROVEMENT if improving else "first" if attempt.number == 1 else REPAIR
        found.append(Round(attempt, kind, costs.get(attempt.number, Spent())))
        improving |= attempt.status == "accepted"
    return found


def _costs(run: Account) -> dict[int, Spent]:
    """By attempt: its requests, those without an answer too, and its measurements."""
    grouped: dict[int, list[Event]] = {}
    judged = 0
    for event in (step.event for step in run.steps):
        grouped.setdefault(judged + (event.kind in ASKING), []).append(event)
        judged += event.kind == "report"
    return {number: spent(events) for number, events in grouped.items()}


def cost(found: Iterable[Round]) -> str:
    """What rounds took together, in words."""
    whole = sum((round.spent for round in found), Spent())
    return str(whole) if whole != Spent() else "tokens that nobody counted"


def speeds(ratios: Mapping[str, Ratio]) -> str:
    return ", ".join(f"{case} {r.estimate:.3f} [{r.low:.3f}, {r.high:.3f}]" for case, r in ratios.items())


def repaired(found: Sequence[Round]) -> str:
    """A sentence on a run's repairs; "" without any."""
    repairs = [round for round in found if round.kind == REPAIR]
    if not repairs:
        return ""
    first, last = found[0].attempt, repairs[-1].attempt
    words = f"{_count(repairs)} cost {cost(repairs)}, and led from {_outcome(first)} to {_outcome(last)}"
    timed = [round.attempt for round in (found[0], *repairs) if round.attempt.timings]
    if timed:
        words += f"; over {BASELINE}, each by its own measurement: {'; then '.join(map(_over, timed))}"
    return words + "."


def improved(found: Sequence[Round]) -> str:
    """A sentence on a run's improvement rounds; "" without any."""
    improvements = [round for round in found if round.kind == IMPROVEMENT]
    if not improvements:
        return ""
    return f"{_count(improvements)} cost {cost(improvements)}: {fates(improvements)}."


def fates(improvements: Iterable[Round]) -> str:
    """What became of each change."""
    return "; ".join(f"attempt {round.attempt.number} {_fate(round)}" for round in improvements)


def _fate(round: Round) -> str:
    measured = f", with {speeds(round.gain)} times the speed of {KEPT}" if round.gain else ""
    match round.attempt.status:
        case "accepted":
            return f"was kept{measured}"
        case "checked":
            return "is undecided, as it was not measured"
        case "rejected":
            return f"was not kept{measured}" if measured else f"was {_outcome(round.attempt)}"
    return "is not judged yet"


def _over(attempt: Attempt) -> str:
    return speeds({t.case: t.ratios[BASELINE] for t in attempt.timings})


def _outcome(attempt: Attempt) -> str:
    report = attempt.report
    return f"rejected at {report.gate} ({report.code})" if isinstance(report, Rejected) else attempt.status


def _count(found: Sequence[Round]) -> str:
    return f"{len(found)} {found[0].kind} round{'s' if len(found) > 1 else ''}"
