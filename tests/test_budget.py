"""What a run may spend: what is reserved, settled, uncertain, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from authoring import BROKEN, TOY_KERNEL, USAGE, Notes, Scripted, fenced, measured, slow, write_toy

from agent import runs, session
from agent.budget import FEWEST_TOKENS, Ledger, Limits, OutOfBudget, Spent, price, spent
from agent.journal import Journal
from agent.loop import Loop
from agent.providers import ProviderError, Question, Turn, Usage
from primitives.ir import Program
from verifier.report import Checked, Measured, Rejected
from verifier.spec import Spec

MODEL = "claude-opus-4-5"
GOOD, BAD = fenced(TOY_KERNEL), fenced(BROKEN)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.create(tmp_path / "journal.db", {"run": "r"}) as made:
        yield made


def ledger(journal: Journal, **limits: Any) -> Ledger:
    return Ledger(journal, Limits(**limits), turn=1)


def answer(journal: Journal, ledger: Ledger, usage: Usage) -> None:
    payload = Turn("text", usage, "Ada", "end_turn").to_json() | ledger.answered(usage)
    journal.once(f"answer/{ledger.turn}", "answer", lambda: payload)


def amounts(ledger: Ledger) -> tuple[float, ...]:
    found = ledger.spent()
    return found.tokens, found.dollars, found.uncertain_tokens, found.uncertain_dollars


# prices


def test_a_price_by_hand() -> None:
    """Dollars a million: 5 read, 25 written, 0.5 from the cache, 6.25 into it."""
    usage = Usage(1000, 2000, 10_000, 4000)
    assert price(MODEL, usage) == pytest.approx((1000 + 0.1 * 10_000 + 1.25 * 4000) * 5e-6 + 2000 * 25e-6)
    assert price("claude-of-nowhere", usage) is None


# reservations


def test_an_answer_settles_the_request_that_gave_it(journal: Journal) -> None:
    book = ledger(journal)
    first = book.reserve(MODEL, 1000, 2000)
    assert first.max_tokens == 2000
    worst = 1000 * 1.25 * 5e-6 + 2000 * 25e-6
    assert amounts(book) == pytest.approx((3000, worst, 3000, worst))
    book.reserve(MODEL, 1000, 2000)
    answer(journal, book, Usage(900, 100))
    paid = 900 * 5e-6 + 100 * 25e-6
    assert amounts(book) == pytest.approx((4000, worst + paid, 3000, worst))
    first.settle(Usage())
    assert amounts(book) == pytest.approx((1000, paid, 0, 0))


def test_a_killed_request_stays_charged_and_the_next_has_a_place_of_its_own(journal: Journal) -> None:
    ledger(journal).reserve(MODEL, 1000, 500)
    again = ledger(journal)
    again.reserve(MODEL, 1000, 500)
    answer(journal, again, Usage(10, 10))
    assert (again.spent().uncertain_tokens, again.spent().tokens) == (1500, 1520)


def test_turns_are_kept_apart(journal: Journal) -> None:
    book = ledger(journal)
    for turn in (1, 11, 2):
        book.turn = turn
        book.reserve(MODEL, 100, 100)
        answer(journal, book, Usage(1, turn))
    assert book.spent().tokens == 3 + 14 and not book.spent().uncertain_tokens


def test_an_answer_without_a_meter_counts_its_tokens(journal: Journal) -> None:
    book = ledger(journal)
    answer(journal, book, USAGE)
    book.turn = 2
    book.failed(Usage(5, 5))
    book.failed(Usage(5, 5))
    book.failed(Usage())
    assert book.spent() == Spent(USAGE.total + 20)


def test_tokens_shrink_an_answer_and_end_a_run(journal: Journal) -> None:
    book = ledger(journal, tokens=10_000)
    assert book.reserve(MODEL, 4000, 3000).max_tokens == 3000
    assert book.reserve(MODEL, 1000, 32_000).max_tokens == 2000
    with pytest.raises(OutOfBudget, match=r"10,000 of 10,000 tokens are used up.*--budget-tokens"):
        book.reserve(MODEL, 1, 3000)
    book = ledger(journal, tokens=15_000)
    with pytest.raises(OutOfBudget, match="has 900 tokens for an answer, after 10,000 tokens"):
        book.reserve(MODEL, 4100, 3000)
    assert book.reserve(MODEL, 5000 - FEWEST_TOKENS, 3000).max_tokens == FEWEST_TOKENS
    assert ledger(journal, tokens=16_000).reserve(MODEL, 300, 700).max_tokens == 700  # all that was asked for


def test_dollars_shrink_an_answer_at_the_dearest_price(journal: Journal) -> None:
    book = ledger(journal, dollars=0.10)
    charge = book.reserve(MODEL, 4000, 32_000)
    assert charge.max_tokens == 3000  # after 4000 at 6.25 dollars a million, at 25
    with pytest.raises(OutOfBudget, match=r"0.1 of 0.1 dollars are used up.*--budget-dollars"):
        book.afford()
    with pytest.raises(OutOfBudget, match="no price is known for claude-of-nowhere"):
        ledger(journal, dollars=5).reserve("claude-of-nowhere", 10, 2000)


def test_equal_parts() -> None:
    assert Limits(100, 1.0, 10.0, 60.0).shared(4) == Limits(25, 0.25, 2.5, 60.0)
    assert Limits().shared(4) == Limits()
    assert Limits.from_json(Limits(tokens=5, seconds=1.5).to_json()) == Limits(tokens=5, seconds=1.5)


# in a run


@pytest.fixture
def begin(runs_home: Path, tmp_path: Path, no_compiler: None) -> Callable[[], runs.Run]:
    return lambda: runs.start(write_toy(tmp_path), {})


class Metered(Scripted):
    def next_turn(self, question: Question) -> Turn:
        question.meter.reserve(MODEL, 1000, 2000)
        return super().next_turn(question)


def loop(run: runs.Run, provider: Scripted, notes: Notes | None = None, **options: Any) -> Loop:
    return Loop(run.journal, run.spec, session.work_of(run), provider, notes or Notes(), **options)


def test_a_run_out_of_budget_ends_at_its_last_report_and_goes_on_with_more(
    begin: Callable[[], runs.Run],
) -> None:
    run, notes = begin(), Notes()
    with run.journal:
        outcome = loop(run, Metered([BAD, GOOD]), notes, limits=Limits(tokens=3000)).run()
        assert isinstance(outcome.report, Rejected) and "--budget-tokens" in outcome.stopped
        assert [s.tokens for s in notes.costs] == [USAGE.total]
        assert [e.key for e in run.journal.events()] == ["prompt", "reserved/1.1", "answer/1", "report/1"]
        outcome = loop(run, Metered([BAD, GOOD]), limits=Limits(tokens=9000)).run()
        assert isinstance(outcome.report, Checked) and not outcome.stopped
        assert spent(run.journal.events()).tokens == 2 * USAGE.total


def test_a_run_that_cannot_begin_says_so(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    with run.journal, pytest.raises(OutOfBudget, match="has 1,000 tokens|has 1000 tokens"):
        loop(run, Metered([GOOD]), limits=Limits(tokens=2000)).run()


def test_what_a_failed_turn_cost_is_charged(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    fault = ProviderError("cut", "wait", usage=Usage(7, 3))
    with run.journal, pytest.raises(ProviderError):
        loop(run, Scripted([fault])).run()
    again = runs.reopen(run.name)
    with again.journal:
        loop(again, Scripted([GOOD])).run()
        assert spent(again.journal.events()) == Spent(10 + USAGE.total)


def test_time_ends_a_run_before_the_next_request(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    with run.journal:
        going = loop(run, Scripted([BAD, GOOD]), limits=Limits(seconds=3600.0))
        going.ledger.began -= 3600
        with pytest.raises(OutOfBudget, match=r"of 3,600 seconds are used up.*--budget-seconds"):
            going.run()


def test_gpu_time_is_charged_and_ends_measuring_only(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    measurements: list[Program] = []

    def measure(
        spec: Spec, program: Program, keep: object, kept: object = None, raw: str = ""
    ) -> Measured | Rejected:
        measurements.append(program)
        return slow(spec) if len(measurements) == 1 else measured(spec, program)

    with run.journal:
        going = loop(run, Scripted([GOOD, GOOD]), measure=measure, limits=Limits(gpu_seconds=0.0))
        outcome = going.run()
        assert isinstance(outcome.report, Checked) and not measurements  # it awaits measurement elsewhere
        going = loop(run, Scripted([GOOD, GOOD]), measure=measure, limits=Limits(gpu_seconds=60.0))
        outcome = going.run()
        assert len(measurements) == 2 and outcome.report.status == "accepted"
        assert 0 <= spent(run.journal.events()).gpu_seconds < 60
