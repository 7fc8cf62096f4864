"""Measure whether a tip helps: author the same specs with and without the tip, under equal limits, and
compute a confidence interval for the difference.

The verdict depends on first attempts, because an author who knows the lesson should avoid the failure at
once. The verdict is "undecided" if the 95% interval contains 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coda_agent.agent.prompts import prompt
from coda_agent.agent.providers import OutOfBudget
from coda_agent.agent.reporting.proportions import Difference, difference
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.budget import RunLimits
from coda_agent.agent.run.loop import Listener, Loop
from coda_agent.agent.run.task import AuthoringTask, Measure
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import JournalError
from coda_agent.agent.tips import ACCEPTED, VOCABULARY, Tip, TipsError, in_prompts
from coda_agent.verifier.loading import load

Author = Callable[[Path, Sequence[Tip]], "int | None"]
"""Authors a spec's kernel with these tips in the prompt. Returns the number of attempts; None if all
failed."""


@dataclass(frozen=True)
class Effect:
    """How many runs succeeded with the tip and without the tip, each out of ``runs`` runs."""

    with_tip: int
    without: int
    runs: int

    @property
    def difference(self) -> Difference:
        return difference(self.with_tip, self.runs, self.without, self.runs)

    @property
    def verdict(self) -> str:
        found = self.difference
        return "helps" if found.low > 0 else "hurts" if found.high < 0 else "undecided"

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.with_tip}/{self.runs} with, {self.without}/{self.runs} without, "
            f"difference {self.difference}"
        )


@dataclass(frozen=True)
class TipMeasurement:
    """The result of measuring a tip. ``first`` counts the runs that passed at the first attempt, and decides
    the verdict. ``within`` counts the runs that passed at any attempt within the limit."""

    first: Effect
    within: Effect

    def __str__(self) -> str:
        return f"{self.first} on the first attempt; within the limit {self.within}"


def part(limits: RunLimits, runs: int) -> RunLimits:
    """The limits of one run: an equal part of the whole measurement's limits. The seconds are divided too,
    because the runs follow one another. The parts are rounded, so that doubling both the limits and the
    number of runs gives exactly the same parts."""
    shared = limits.shared(runs)
    seconds = None if limits.seconds is None else limits.seconds / runs
    parts = replace(shared, seconds=seconds).to_json()
    return RunLimits.from_json({name: round(value, 6) for name, value in parts.items()})


def measure(
    tip: Tip, known: Iterable[Tip], specs: Sequence[Path], repeats: int, author: Author
) -> TipMeasurement:
    """Author each spec ``repeats`` times with the tip, and ``repeats`` times without the tip. All prompts
    also contain the other accepted tips of ``known``. Call ``refuse_without_effect`` first."""
    with_tip, without = _arms(tip, known)
    needed: dict[bool, list[int | None]] = {True: [], False: []}
    for turn in range(repeats):
        for place, spec in enumerate(specs):
            # Every other time, author with the tip before authoring without the tip. So changes over time,
            # for example of a provider's model, affect both arms (with and without the tip) equally.
            for arm in (True, False) if (turn + place) % 2 == 0 else (False, True):
                needed[arm].append(author(spec, with_tip if arm else without))
    total = repeats * len(specs)
    first = {arm: sum(n == 1 for n in found) for arm, found in needed.items()}
    within = {arm: sum(n is not None for n in found) for arm, found in needed.items()}
    return TipMeasurement(*(Effect(passed[True], passed[False], total) for passed in (first, within)))


def _arms(tip: Tip, known: Iterable[Tip]) -> tuple[list[Tip], list[Tip]]:
    """Two lists of tips: for prompts with ``tip``, and for prompts without ``tip``."""
    without = [other for other in in_prompts(known) if other.id != tip.id]
    return sorted([*without, replace(tip, state=ACCEPTED)], key=lambda other: other.number), without


def refuse_without_effect(tip: Tip, known: Iterable[Tip], specs: Sequence[Path]) -> None:
    """Raise TipsError if there are no specs, or if a spec's prompt is the same with and without the tip."""
    with_tip, without = _arms(tip, known)
    if tip.level != VOCABULARY:
        raise TipsError(f"{tip.id}: only prompts for CuTeDSL edits contain it; choose another tip")
    if not specs:
        raise TipsError(f"{tip.id}: no spec to measure it on; give some with --specs")
    for path in specs:
        spec, text = load(path), path.read_text(encoding="utf-8")
        if spec.name in tip.specs:
            raise TipsError(
                f"{path}: {tip.id} was learned on {spec.name}, whose prompt never has it; choose other specs"
            )
        if prompt.assemble(spec, text, with_tip).system == prompt.assemble(spec, text, without).system:
            raise TipsError(
                f"{path}: the prompt's budget has no room for {tip.id}; retire tips that help less first"
            )


@dataclass
class Runs:
    """An ``Author`` that starts real runs. If an interrupted measurement of the same tip left a run with the
    same spec, prompt and options, that run is continued instead. ``options``: the fields of the runs' headers
    that ``generate`` also writes."""

    tip: Tip
    known: Sequence[Tip]
    options: dict[str, Any]
    listener: Listener
    total: int  # the number of all runs of the measurement, with and without the tip
    measure: Measure | None = None
    told: Callable[[str], None] = print
    taken: list[str] = field(default_factory=list)
    judged: int = 0  # attempts of all runs so far

    def __call__(self, path: Path, tips: Sequence[Tip]) -> int | None:
        run = self._run(path, tips)
        self.taken.append(run.name)
        with run.journal:
            options = run.journal.header
            loop = Loop(
                run.journal,
                run.spec,
                AuthoringTask(run.spec, run.text, tips, options["weak_jail"]),
                assembly.provider_of(run),
                self.listener,
                attempts=options["attempts"],
                measure=self.measure,
                limits=RunLimits.from_json(options["limits"]),
            )
            needed, attempts, words = _attempts_needed(loop)
        self.judged += attempts
        arm = "with" if self.tip.id in {tip.id for tip in tips} else "without"
        place = f"{len(self.taken)}/{self.total} {run.spec.name}"
        self.told(f"{place} {arm} {self.tip.id}: {words} ({run.name})")
        return needed

    def _run(self, path: Path, tips: Sequence[Tip]) -> runs.Run:
        accepted, chosen = {tip.id for tip in in_prompts(self.known)}, {tip.id for tip in tips}
        header = self.options | {
            "measures_tip": self.tip.id,
            "without_tips": sorted(accepted - chosen),
            "with_tips": sorted(chosen - accepted),
        }
        spec, text = load(path), path.read_text(encoding="utf-8")
        given = prompt.assemble(spec, text, tips)
        for name in runs.names():
            if name not in self.taken and _same(name, header | {"spec_hash": spec.hash}, given):
                return runs.reopen(name)
        return runs.create(spec, text, header)


def _same(name: str, header: dict[str, Any], given: prompt.Prompt) -> bool:
    """Whether a run was started with this header and has this prompt."""
    try:
        found, events = record.glance(runs.runs_dir() / name / runs.JOURNAL)
    except JournalError:  # the journal is damaged or of another version
        return False
    if any(key not in found or found[key] != value for key, value in header.items()):
        return False
    asked = next((event.payload for event in events if event.kind == "prompt"), None)
    return asked == asdict(given)


def _attempts_needed(loop: Loop) -> tuple[int | None, int, str]:
    """Run a loop. Return the number of attempts that the run needed to pass (None if it did not pass), the
    number of judged attempts, and a text about the run's end. A run does not pass if its budget is used up,
    or if a requested measurement is missing."""
    try:
        outcome = loop.run()
    except OutOfBudget:
        outcome = None
    attempts = sum(event.kind == "report" for event in loop.journal.events())
    times = f"{attempts} attempt{'' if attempts == 1 else 's'}"
    if outcome is None or outcome.stopped:
        return None, attempts, f"did not pass: the run's part of the budget ended it after {times}"
    status = outcome.report.status
    if status == "rejected":
        return None, attempts, f"did not pass in {times}"
    if loop.measure and status == "checked":
        return None, attempts, f"did not pass: its kernel of attempt {attempts} was not measured"
    return attempts, attempts, f"passed at attempt {attempts}"
