"""The anthropic provider with a local server that misbehaves: retries, time limits, and the charge for each
fault."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import fake_messages as fake
import pytest
from asking import ASK, KEY, USAGE, Night, Purse, ask, claude, refused
from fake_messages import FakeMessages, Reply

from coda_agent.agent.providers import OutOfBudget, ProviderError, Question, Turn, Usage, make
from coda_agent.agent.providers.patience import Patience
from coda_agent.agent.run.budget import BudgetLedger, RunLimits
from coda_agent.agent.storage.journal import Journal

pytestmark = [pytest.mark.usefixtures("no_keys"), pytest.mark.slow]


# Temporary faults. The second value is True if the cost of the failed request stays unknown.
PASSING = {
    "429": (fake.status(429, "rate_limit_error", retry_after="3600"), False),
    "429, date": (fake.status(429, "rate_limit_error", retry_after="Fri, 01 Jan 2100 00:00:00 GMT"), False),
    "429, nonsense": (fake.status(429, "rate_limit_error", retry_after="nan"), False),
    "500": (fake.status(500, "api_error"), False),
    "529": (fake.status(529, "overloaded_error"), False),
    "overload in the stream": (fake.error_in_stream("overloaded_error"), True),
    "cut off": (fake.cut_off, True),
    "clean early end": (fake.ends_early, True),
    "no JSON": (fake.not_json, True),
    "out of order": (fake.out_of_order, True),
    "a web page": (fake.a_web_page, True),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_is_tried_again(name: str) -> None:
    fault, uncertain = PASSING[name]
    purse = Purse()
    result, server, streamed = ask(fault, fake.answer("here it is"), meter=purse)
    assert isinstance(result, Turn)
    assert (result.text, result.usage) == ("here it is ", USAGE)  # those of the second request
    assert len(server.requests) == 2
    assert "asking again" in streamed
    assert [c.settled for c in purse.charges] == [None if uncertain else Usage(), None]


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_stays_is_given_up_when_patience_is_over(name: str) -> None:
    night = Night()
    result, server, streamed = ask(*[PASSING[name][0]] * 40, patience=night.patience(total=272.0))
    assert refused(result).retryable
    assert sum(night.waits) == pytest.approx(272.0) and max(night.waits) <= 60.0
    assert len(server.requests) == len(night.waits) + 1 >= 6  # the last request is sent when patience ends
    assert f"({len(server.requests)} requests in 5 min)" in str(result)
    assert streamed.count("asking again in") == len(night.waits)


@pytest.mark.parametrize("name", [name for name, (_, uncertain) in PASSING.items() if uncertain])
def test_answers_that_may_cost_something_do_not_break_off_all_night(name: str) -> None:
    night = Night()
    result, server, _ = ask(*[PASSING[name][0]] * 40, patience=night.patience())
    assert refused(result).retryable and len(server.requests) == 12


def test_an_outage_of_most_of_two_hours_is_outlived() -> None:
    night = Night()

    def overloaded(handler: Any) -> None:
        over = night.now > 1000.0 + 110 * 60
        (fake.answer("here it is") if over else fake.status(529, "overloaded_error"))(handler)

    result, server, streamed = ask(*[overloaded] * 400, patience=night.patience())
    assert isinstance(result, Turn) and result.text == "here it is "
    assert 110 < len(server.requests) < 200
    assert night.waits[0] <= 1.0 and all(45.0 <= wait <= 60.0 for wait in night.waits[7:])
    assert "529 overloaded_error: no; asking again in 1 s; retries end within 120 min]" in streamed


def test_a_run_s_deadline_ends_patience() -> None:
    night, purse = Night(), Purse()
    faults = [fake.status(529, "overloaded_error")] * 40
    result, server, streamed = ask(*faults, meter=purse, patience=night.patience(), deadline=1100.0)
    assert night.now == pytest.approx(1100.0)  # the provider waits until the run's time ends
    assert len(server.requests) == len(night.waits)
    assert "the run's time ended" in str(refused(result)) and "529" in str(result)
    assert "--budget-seconds" in str(result)
    assert streamed.count("the run's time ends in") == 1
    result, server, _ = ask(fake.answer("a"), meter=purse, patience=night.patience(), deadline=1100.0)
    assert "the run's time ended" in str(refused(result))
    assert not server.requests and len(purse.charges) == len(night.waits)


def test_retry_after_is_obeyed_up_to_the_cap() -> None:
    night = Night()
    asked = [{"retry_after": "7"}, {"retry_after_ms": "300"}, {"retry_after": "3600"}, {"retry_after": "0"}]
    faults = [fake.status(429, "rate_limit_error", **headers) for headers in asked]
    ask(*faults, fake.answer("a"), patience=night.patience())
    assert night.waits[:3] == [7.0, 0.3, 60.0]
    assert 6.0 <= night.waits[3] <= 8.0  # a Retry-After of 0 does not permit an immediate retry


def test_a_stall_ends_at_the_timeout() -> None:
    began = time.monotonic()
    result, _, _ = ask(fake.stalls, timeout=0.3, patience=Patience(total=0.0))
    assert 0.3 <= time.monotonic() - began < 30
    assert refused(result).retryable and "ReadTimeout" in str(result)


def test_pings_do_not_prolong_an_answer() -> None:
    purse = Purse()
    result, server, _ = ask(fake.pings, fake.answer("here it is"), meter=purse, answer_time=1.0)
    assert isinstance(result, Turn) and result.text == "here it is "
    assert [c.settled for c in purse.charges] == [None, None]  # the cost of the first answer is unknown
    result, server, _ = ask(fake.pings, answer_time=0.1, patience=Patience(total=0.0))
    assert "no complete answer within 0 s" in str(refused(result)) and refused(result).retryable
    assert len(server.requests) == 1


@pytest.mark.parametrize("hangs", [fake.pings, fake.stalls])
def test_a_run_s_deadline_ends_an_answer(hangs: Reply) -> None:
    night, purse = Night(), Purse()
    options = {"patience": night.patience(), "timeout": 600.0}
    result, server, _ = ask(hangs, meter=purse, deadline=night.now + 0.3, **options)
    assert "the run's time ended before an answer came" in str(refused(result))
    assert "RemoteProtocolError" not in str(result)  # the provider ended the request, not the server
    assert len(server.requests) == 1
    assert [c.settled for c in purse.charges] == [None]


@pytest.mark.parametrize("ping", [False, True])
def test_a_slow_answer_is_whole(ping: bool) -> None:
    """The whole answer takes longer than the timeout, but each pause is shorter than the timeout."""
    result, server, streamed = ask(fake.slowly("one ", "two ", "three", pause=0.4, ping=ping), timeout=1.0)
    assert isinstance(result, Turn) and result.text == streamed == "one two three"
    assert len(server.requests) == 1


def test_no_server_is_a_fault_of_the_line() -> None:
    with FakeMessages() as server:
        pass
    with pytest.raises(ProviderError, match="no connection: ConnectError") as caught:
        claude(server).next_turn(Question("SYSTEM", ASK))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (fake.answer("half", "max_tokens"), "resume the run with a larger --max-tokens"),
        (fake.answer("no", "refusal"), "hints"),
        (fake.answer("no", "model_context_window_exceeded"), "fewer rounds"),
        (fake.answer("no", "tool_use"), "--model"),
        (fake.status(400, "invalid_request_error"), "--max-tokens"),
        (fake.status(400, "invalid_request_error", "Your credit balance is too low"), "credit balance"),
        (fake.status(400, "invalid_request_error", "Your credit balance is too low"), "account's billing"),
        (fake.status(400, "invalid_request_error", "You have reached your usage limits"), "billing"),
        (fake.status(400, "invalid_request_error", "prompt is too long: 9 tokens > 8"), "fewer rounds"),
        (fake.status(401, "authentication_error"), "ANTHROPIC_API_KEY"),
        (fake.status(402, "billing_error"), "billing"),
        (fake.status(403, "permission_error"), "may use this model"),
        (fake.status(404, "not_found_error"), "CODA_AGENT_MODEL"),
        (fake.status(429, "rate_limit_error", x_should_retry="false"), "message"),
        (fake.error_in_stream("invalid_request_error"), "message"),
    ],
)
def test_what_trying_again_cannot_mend(fault: Reply, remedy: str) -> None:
    result, server, _ = ask(fault)
    assert not refused(result).retryable
    assert remedy in str(result)
    assert len(server.requests) == 1


def test_each_request_is_reserved_and_its_answer_shrinks_to_fit() -> None:
    purse = Purse(most=2000)
    _, server, _ = ask(fake.status(529, "overloaded_error"), fake.answer("a"), meter=purse, model="claude-m")
    assert purse.asked == [("claude-m", fake.COUNTED, 32_000)] * 2
    assert [r["max_tokens"] for r in server.requests] == [2000, 2000]
    (counted,) = server.counted  # tokens were counted once, for the request that was then sent
    assert counted == {k: v for k, v in server.requests[0].items() if k not in ("max_tokens", "stream")}


def test_an_answer_of_no_use_is_paid() -> None:
    purse = Purse()
    ask(fake.answer("half", "max_tokens", output_tokens=99), meter=purse)
    assert [c.settled for c in purse.charges] == [Usage(11, 99, 4000, 300)]


@pytest.mark.parametrize("empty", [fake.answer(""), fake.nothing])
def test_an_empty_answer_is_asked_for_again_and_paid(empty: Reply) -> None:
    purse = Purse()
    result, server, streamed = ask(empty, empty, fake.answer("here it is"), meter=purse)
    assert isinstance(result, Turn) and result.text == "here it is "
    assert [c.settled for c in purse.charges] == [USAGE, USAGE, None]  # the loop settles the last charge
    assert streamed.count("the answer holds no text; asking again") == 2
    result, server, _ = ask(*[empty] * 9, meter=purse)
    assert "the answer holds no text (3 requests" in str(refused(result))
    assert len(server.requests) == 3


def test_empty_answers_are_counted_without_the_faults_before_them() -> None:
    overload = fake.status(529, "overloaded_error")
    result, _, _ = ask(*[overload] * 5, fake.nothing, overload, fake.nothing, fake.answer("here it is"))
    assert isinstance(result, Turn)


def test_an_answer_that_the_budget_cut_ends_out_of_budget(tmp_path: Path) -> None:
    cut = fake.answer("half", "max_tokens", output_tokens=1500)
    remedy = r"cut off at 1,689 tokens, .*resume the run with a larger --budget-tokens or --budget-dollars"
    with Journal.create(tmp_path / "run.db", {"spec": "s"}) as journal:
        ledger = BudgetLedger(journal, RunLimits(tokens=fake.COUNTED + 1689), turn=1)
        with pytest.raises(OutOfBudget, match=remedy) as caught:
            ask(cut, meter=ledger)
        assert ledger.spent().tokens == Usage(11, 1500, 4000, 300).total
        assert ledger.spent().uncertain_tokens == 0
    assert caught.value.__context__ is None  # a chained exception may hold the key in a header


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_was_never_sent_costs_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With http, the server refuses the connection. With https, the server never completes the TLS handshake.
    Neither request costs anything."""
    monkeypatch.setattr("coda_agent.agent.providers.anthropic.ASIDE", 0.1)
    purse, mute = Purse(), socket.create_server(("127.0.0.1", 0))
    url = f"{scheme}://127.0.0.1:{mute.getsockname()[1]}"
    if scheme == "http":
        mute.close()
    provider = make("anthropic", api_key=KEY, base_url=url, timeout=0.1, patience=Patience(total=0.0))
    with mute, pytest.raises(ProviderError, match="no connection: Connect"):
        provider.next_turn(Question("SYSTEM", ASK, meter=purse))
    assert [c.settled for c in purse.charges] == [Usage()]


def test_tokens_that_cannot_be_counted_are_overrated() -> None:
    purse = Purse()
    with FakeMessages(fake.answer("a"), count=fake.status(500, "api_error")) as server:
        claude(server).next_turn(Question("SYSTEM " * 700, ASK, meter=purse))
    assert 2450 < purse.asked[0][1] < 3000  # one token for every two characters, which is too many
