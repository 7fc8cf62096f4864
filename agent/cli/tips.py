"""``coda-agent tips``: list, propose, accept, retire and measure the tips of tips_log.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_agent.agent import arguments, providers
from coda_agent.agent import tips as log
from coda_agent.agent.cli import exit_codes
from coda_agent.agent.options import AuthoringOptions, BudgetOptions, WeakJail, grouped, typed_options
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.agent.tips import Added, Lesson, Tip, TipsError

if TYPE_CHECKING:
    from coda_agent.agent.learning.lessons import FixedFailure, RunLessons
    from coda_agent.agent.run.budget import RunLimits

tips = typer.Typer(
    rich_markup_mode=None, help="List the tips that prompts read; propose, accept, retire and measure them."
)

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Tips, such as tip-3.")]


@tips.callback(invoke_without_command=True)
def listing(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other software.")] = False,
) -> None:
    """List all tips with their state, measured verdict, lesson and evidence."""
    if context.invoked_subcommand:
        word = context.invoked_subcommand
        arguments.refuse_unused(f"it belongs to the list, not to {word}; leave it out", json=as_json)
        return
    known = log.read_tips(log.TIPS)
    if as_json:
        echo(json.dumps({"tips": [asdict(tip) | {"verdict": tip.verdict} for tip in known]}, indent=1))
    elif not known:
        echo(f"{log.TIPS.name}: no tips yet. Learn from a run: coda-agent tips propose RUN")
    for tip in known if not as_json else ():
        echo(f"{tip.id} {tip.state}, {tip.verdict}: {tip.lesson}\n    {_evidence(tip)}")
        if tip.measured:
            echo(f"    {tip.measured}")


@tips.command()
def propose(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
    lesson: Annotated[
        str | None, typer.Option(help="The lesson from the failure, in the imperative. Default: ask.")
    ] = None,
    failed: Annotated[
        str | None, typer.Option(metavar="GATE/REASON", help="The failure, if the run has several.")
    ] = None,
) -> None:
    """Propose tips from the failures that a run fixed, and the tips that its author proposed."""
    from coda_agent.agent.learning.lessons import learned

    found = learned(run)
    # ask the person for lessons, and check them, before the log changes
    given = _ask_lessons(found, failed) if lesson is None else [found.named(failed).teaches(lesson)]
    refused = exit_codes.OK
    for told in found.told:
        try:
            _say(log.add(told.failure.teaches(told.lesson), log.TIPS))
        except TipsError as error:
            echo(f"refused a tip that the author proposed: {error}", err=True)
            refused = exit_codes.REJECTED
    for words in given:
        _say(log.add(words, log.TIPS))
    if not found.told and not found.failures:
        echo(f"{found.run}: no failure that a later attempt fixed, and no tip from its author")
    raise typer.Exit(refused)


@tips.command()
def accept(ids: Ids) -> None:
    """Add tips to the prompt."""
    _set(ids, log.ACCEPTED)


@tips.command()
def retire(ids: Ids) -> None:
    """Remove tips from the prompt. They stay in the log, so that they are not proposed again."""
    _set(ids, log.RETIRED)


@tips.command()
@grouped
def measure(
    ids: Ids,
    specs: Annotated[list[Path], typer.Option(metavar="SPEC", help="A spec to author. May be repeated.")],
    authoring: AuthoringOptions,
    budget: BudgetOptions,
    runs: Annotated[
        int, typer.Option(min=1, max=1000, help="Runs of each spec with a tip, and as many without it.")
    ] = 5,
    weak_jail: WeakJail = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu/--no-gpu", help="Also require the gates that need a GPU. Default: only the other gates."
        ),
    ] = False,
) -> None:
    """Author specs with a tip and without it, and record how much the tip helps. A second call continues an
    interrupted one; with more --runs and larger budgets, it adds runs. A budget is for all runs together, and
    each run gets an equal part of it. --provider replay is refused: a recording answers the same with and
    without a tip."""
    from coda_agent.agent import setup
    from coda_agent.agent.learning import trials
    from coda_agent.agent.learning.watch import QuietView
    from coda_agent.verifier.measure import MeasureOptions

    specs = [arguments.spec_file(path) for path in specs]
    tried = _measurable(ids, specs)
    setup.need_gpu(gpu)
    provider, each = _provider(authoring.provider, specs), 2 * runs * len(specs)
    setup.refuse_idle(provider, *typed_options(authoring))
    setup.refuse_uncounted(provider, budget.limits(), authoring.model)
    part = trials.part(budget.limits(), each * len(tried))
    options = authoring.header() | {"provider": provider, "limits": part.to_json(), "weak_jail": weak_jail}
    echo(_plan(tried, specs, runs, part))
    for tip in tried:
        known = log.read_tips(log.TIPS)
        with QuietView(setup.console(True), speaks=providers.provider_spec(provider).by_hand) as watch:
            measurer = setup.measurer(gpu, MeasureOptions(), watch)
            author = trials.Runs(tip, known, options, watch, each, measurer, echo)
            with _told_how_to_go_on():
                trial = trials.measure(tip, known, specs, runs, author)
        if not author.judged:
            remedy = "give a larger budget, or fewer --runs"
            raise TipsError(f"{tip.id}: no run's part of the budget was enough for an answer; {remedy}")
        # print the result first, so that it is not lost if the log cannot be written
        echo(f"{tip.id} {trial}")
        on = ", ".join(dict.fromkeys(path.stem for path in specs))
        log.change(tip.id, log.TIPS, measured=f"{trial}; on {on}, by {_writer(authoring, provider)}")


@contextmanager
def _told_how_to_go_on() -> Iterator[None]:
    """If the measurement in the block raises an error, print how to continue the measurement."""
    try:
        yield
    except BaseException:
        echo("stopped; finished runs are kept: repeat the command to continue", err=True)
        raise


def _measurable(ids: Sequence[str], specs: Sequence[Path]) -> list[Tip]:
    """The tips to measure. Raises TipsError, before any run starts, if a tip cannot be measured."""
    from coda_agent.agent.learning import trials

    for stray in ids:
        if stray.endswith((".yaml", ".yml")):
            raise TipsError(f"{stray} is not a tip; write --specs before each spec: --specs {stray}")
    known = log.read_tips(log.TIPS)
    tried = [log.find(id, log.TIPS) for id in dict.fromkeys(ids)]
    for tip in tried:
        trials.refuse_without_effect(tip, known, specs)
    return tried


def _plan(tried: Sequence[Tip], specs: Sequence[Path], runs: int, part: RunLimits) -> str:
    """Describe the number of runs, and each run's limits."""
    times = [f"{len(tried)} tips"] * (len(tried) > 1) + [f"{len(specs)} specs"] * (len(specs) > 1)
    count = 2 * runs * len(specs) * len(tried)
    words = f"{count} runs: {' x '.join([*times, f'{runs} with the tip and {runs} without'])}"
    units = {"tokens": "{:,} tokens", "dollars": "${:g}", "gpu_seconds": "{:g} s of GPU", "seconds": "{:g} s"}
    costs = [units[name].format(value) for name, value in part.to_json().items()]
    return f"{words}; each may cost {', '.join(costs)}" if costs else words


def _writer(authoring: AuthoringOptions, provider: str) -> str:
    """The author's name for the log of tips, because a tip may help only some authors."""
    known = authoring.author if providers.provider_spec(provider).by_hand else authoring.model
    return log.one_line(f"{provider} ({known})" if known else provider, 100)


def _provider(name: str, specs: list[Path]) -> str:
    from coda_agent.agent import setup
    from coda_agent.verifier.loading import load

    chosen = setup.choose_provider(name, load(specs[0], check=False).name)
    if providers.provider_spec(chosen).replays:
        others = [spec.name for spec in providers.specs().values() if spec.offered and not spec.replays]
        raise TipsError(
            f"provider {str(chosen)!r}: a recording answers the same with a tip and without; use one of "
            f"{', '.join(others)}"
        )
    return chosen


def _ask_lessons(found: RunLessons, failed: str | None) -> list[Lesson]:
    """Ask a person for a lesson from each failure on which the run's author proposed no tip, or only from the
    failure ``failed``. Raises TipsError if nobody answers."""
    if failed is not None:
        found.named(failed)  # raises an error for a failure that the run does not have
    untold = [failure for failure in found.untold() if failed in (None, failure.failed)]
    try:
        with arguments.asking():
            return [lesson for failure in untold if (lesson := _ask(failure))]
    except EOFError:
        many = " with --failed GATE/REASON" if len(untold) > 1 else ""
        raise TipsError(f"{found.run}: no answer; give the lesson with --lesson '...'{many}") from None


def _ask(failure: FixedFailure) -> Lesson | None:
    """Ask a person for the lesson from one failure. Return None if the person gives no lesson. If the log
    already has a tip on this failure, print the tip and return None."""
    for tip in log.read_tips(log.TIPS):
        if log.of_failure(tip, failure.spec, failure.failed, failure.fix):
            echo(
                f"{tip.id} ({tip.state}) already covers the failure {failure.failed}: {tip.lesson}\n"
                f"    to add another lesson of it: --failed {failure.failed} --lesson '...'"
            )
            return None
    echo(f"Failed at {failure.failed}, fixed by: {failure.fix}")
    while words := typer.prompt("Lesson (empty: none)", default="", show_default=False):
        try:
            return failure.teaches(words)
        except TipsError as error:
            echo(f"{error}", err=True)
    return None


def _say(added: Added) -> None:
    tip = added.tip
    if added.merged:
        echo(f"{tip.id} ({tip.state}) already says that, and now has this evidence too: {tip.lesson}")
        if tip.state == log.RETIRED:
            echo(f"    to put it into prompts again: coda-agent tips accept {tip.id}")
        return
    echo(f"{tip.id} proposed: {tip.lesson}\n    {_evidence(tip)}")
    for other in added.alike:
        echo(f"    possible duplicate of {other.id} ({other.state}): {other.lesson}")
    echo(f"    coda-agent tips accept {tip.id}, or retire it")


def _set(ids: list[str], state: str) -> None:
    for id in ids:
        log.find(id, log.TIPS)  # check all ids before changing any tip
    for id in ids:
        before = log.change(id, log.TIPS, state=state)
        echo(f"{id} {state}, was {before.state}: {before.lesson}")


def _evidence(tip: Tip) -> str:
    return f"learned on {tip.spec} at {tip.failed}; {tip.fix}"
