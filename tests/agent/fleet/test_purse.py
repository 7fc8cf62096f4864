"""Many runs share one budget: 30 requests at once, the return of unused reservations, and the end of the
budget."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from waiting import eventually

from coda_agent.agent.providers import OutOfBudget, Turn, Usage
from coda_agent.agent.run.budget import BudgetLedger, Purse, RunLimits
from coda_agent.agent.storage.journal import Journal

MODEL = "claude-opus-4-5"


def ledger(tmp_path: Path, number: int, purse: Purse, limits: RunLimits) -> BudgetLedger:
    journal = Journal.create(tmp_path / str(number) / "journal.db", {"run": f"r{number}"})
    return BudgetLedger(journal, limits, turn=1, purse=purse)


def settle(ledger: BudgetLedger, usage: Usage) -> None:
    turn = Turn("", usage, "Ada", "end_turn").to_json() | ledger.answered(Turn("", usage, "Ada", "end_turn"))
    ledger.journal.once("answer/1", "answer", lambda: turn)
    ledger.close_turn()


def test_thirty_requests_under_way_fit_the_budget_together(tmp_path: Path) -> None:
    """Each request reserves 11,000 tokens and uses 3,000, so the budget of 100,000 has room for 9 requests at
    once. Each request that ends returns its unused tokens, so in the end all 30 requests fit the budget."""
    purse, limits = Purse(), RunLimits(tokens=100_000)
    ledgers = [ledger(tmp_path, n, purse, limits) for n in range(30)]
    most, refused, paid = 0, [], []

    def ask(own: BudgetLedger) -> None:
        nonlocal most
        try:
            charge = own.reserve(MODEL, 1000, 10_000)
        except OutOfBudget:
            refused.append(own)
            return
        most = max(most, purse.total().tokens)
        time.sleep(0.01)
        assert charge.max_tokens >= 1024
        settle(own, Usage(1000, 2000))
        paid.append(own)

    threads = [threading.Thread(target=ask, args=(each,)) for each in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most <= 100_000
    assert len(paid) == 30 and not refused  # 30 x 3,000 fit, although 30 x 11,000 do not
    assert purse.total().tokens == 90_000 == sum(each.spent().tokens for each in ledgers)


def test_a_budget_that_is_used_up_refuses_and_names_its_total(tmp_path: Path) -> None:
    purse, limits = Purse(), RunLimits(tokens=5000)
    first, second = (ledger(tmp_path, n, purse, limits) for n in (1, 2))
    first.reserve(MODEL, 1000, 4000)
    settle(first, Usage(1000, 3900))
    with pytest.raises(OutOfBudget, match="4,900 tokens"):
        second.reserve(MODEL, 100, 4000)


def test_a_waiting_request_ends_with_the_sweep(tmp_path: Path) -> None:
    purse, limits = Purse(), RunLimits(tokens=5000)
    first, second = (ledger(tmp_path, n, purse, limits) for n in (1, 2))
    first.reserve(MODEL, 1000, 4000)
    ended: list[str] = []

    def ask() -> None:
        try:
            second.reserve(MODEL, 100, 4000)
        except OutOfBudget as error:
            ended.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    purse.stop("interrupted")
    assert eventually(lambda: bool(ended))
    assert ended == ["interrupted"]


def test_the_spending_before_counts(tmp_path: Path) -> None:
    first = ledger(tmp_path, 1, Purse(), RunLimits())
    first.reserve(MODEL, 1000, 4000)
    settle(first, Usage(1000, 3900))
    again = Purse({"r1": first.spent()})
    with pytest.raises(OutOfBudget):
        ledger(tmp_path, 2, again, RunLimits(tokens=4900)).afford()
