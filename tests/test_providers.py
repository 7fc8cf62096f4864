"""Providers against what really happens: a server that misbehaves on loopback, files, recordings."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_messages as fake
import pytest
from fake_messages import FakeMessages, Reply

from agent.budget import Ledger, Limits, OutOfBudget
from agent.journal import Journal
from agent.providers import FREE, Call, Message, Meter, Provider, ProviderError, Question, Turn, Usage, make
from agent.providers.patience import Patience
from agent.providers.scrub import Scrub, Stream
from agent.tools import TOOLS

KEY = "sk-ant-secret-0123456789"
ASK = [Message("user", "write a kernel")]
TALK = [*ASK, Message("assistant", "def k(): ..."), Message("user", "line 3 is wrong")]
USAGE = Usage(11, 7, 4000, 300)
CACHED = {"cache_control": {"type": "ephemeral"}}


@dataclass
class Coin:
    max_tokens: int
    settled: Usage | None = None

    def settle(self, usage: Usage, dollars: float | None = None) -> None:
        self.settled = usage


@dataclass
class Purse:
    """A meter that grants ``most`` tokens and keeps what it is asked for."""

    most: int = 10**9
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    charges: list[Coin] = field(default_factory=list)

    def reserve(self, model: str, input_tokens: int, max_tokens: int) -> Coin:
        self.asked.append((model, input_tokens, max_tokens))
        self.charges.append(Coin(min(max_tokens, self.most)))
        return self.charges[-1]


@dataclass
class Night:
    """Time that passes only by sleeping."""

    now: float = 1000.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def patience(self, **options: float) -> Patience:
        return Patience(clock=lambda: self.now, sleep=self.sleep, **options)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "CODA_AGENT_MODEL", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def claude(server: FakeMessages, **options: Any) -> Provider:
    defaults = {"api_key": KEY, "base_url": server.url, "timeout": 5.0, "patience": Night().patience()}
    return make("anthropic", **{**defaults, **options})


def ask(
    *script: Reply, meter: Meter = FREE, deadline: float | None = None, **options: Any
) -> tuple[Turn | ProviderError, FakeMessages, str]:
    """One turn against a scripted server: the turn or the error, the server, the text that was streamed."""
    streamed: list[str] = []
    result: Turn | ProviderError
    with FakeMessages(*script) as server:
        try:
            result = claude(server, **options).next_turn(
                Question("SYSTEM", ASK, meter=meter, say=streamed.append, deadline=deadline)
            )
        except ProviderError as error:
            result = error
    return result, server, "".join(streamed)


def refused(result: Turn | ProviderError) -> ProviderError:
    assert isinstance(result, ProviderError), result
    return result


# the types and the registry


def test_usage_adds_up() -> None:
    assert Usage(1, 2, 3, 4) + Usage(10, 20, 30, 40) == Usage(11, 22, 33, 44)


def test_a_turn_survives_json() -> None:
    turn = Turn("text", Usage(1, 2, 3, 4), "someone via handoff", "end_turn")
    assert Turn.from_json(turn.to_json()) == turn


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"author": "a", "stop_reason": "s"}, "'text'"),
        ({"text": "t", "author": 3, "stop_reason": "s"}, "'author'"),
        ({"text": "t", "author": "a", "stop_reason": "s", "usage": {"tokens": 1}}, "'usage'"),
        ({"text": "t", "author": "a", "stop_reason": "s", "usage": 5}, "'usage'"),
    ],
)
def test_a_damaged_answer_names_its_field(data: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Turn.from_json(data)


def test_an_unknown_provider_lists_the_known() -> None:
    with pytest.raises(
        ProviderError, match="'gpt' is unknown; use one of anthropic, claude-code, handoff, mcp, replay"
    ):
        make("gpt")


def test_no_sdk_is_imported_before_its_use() -> None:
    heavy = "{'anthropic', 'torch', 'httpx2', 'pydantic', 'rich'}"
    code = f"import sys, agent.providers, agent.journal; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agent.providers.anthropic", raising=False)
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(ProviderError, match="pip install anthropic"):
        make("anthropic", api_key=KEY)


# anthropic


def test_a_whole_answer() -> None:
    result, server, streamed = ask(fake.answer("here it is"))
    assert result == Turn("here it is ", USAGE, "claude-fake-1 via anthropic", "end_turn")
    assert streamed == "here it is "
    assert len(server.requests) == 1


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_AGENT_MODEL", "claude-of-the-environment")
    with FakeMessages(fake.answer("a"), fake.answer("b")) as server:
        claude(server, max_tokens=123, effort="high").next_turn(Question("SYSTEM", TALK))
        claude(server, model="claude-given", thinking=False).next_turn(Question("SYSTEM", TALK))
    first, second = server.requests
    assert first["model"] == "claude-of-the-environment"
    assert first["system"] == [{"type": "text", "text": "SYSTEM", "cache_control": {"type": "ephemeral"}}]
    texts: list[dict[str, Any]] = [{"type": "text", "text": m.text} for m in TALK]
    texts[-1] |= CACHED
    assert first["messages"] == [{"role": m.role, "content": [t]} for m, t in zip(TALK, texts, strict=True)]
    assert (first["max_tokens"], first["thinking"]) == (123, {"type": "adaptive"})
    assert first["output_config"] == {"effort": "high"}
    assert first["stream"] is True
    assert second["model"] == "claude-given"
    assert "thinking" not in second and "output_config" not in second


def test_the_default_model_is_one_the_sdk_knows() -> None:
    from typing import get_args

    from anthropic.types.model import Model

    from agent.providers.anthropic import DEFAULT_MODEL

    assert DEFAULT_MODEL in get_args(get_args(Model)[0])


# A fault, and whether it leaves a charge that nobody knows.
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
    assert (result.text, result.usage) == ("here it is ", USAGE)  # no half of the broken attempt
    assert len(server.requests) == 2
    assert "asking again" in streamed
    assert [c.settled for c in purse.charges] == [None if uncertain else Usage(), None]


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_stays_is_given_up_when_patience_is_over(name: str) -> None:
    night = Night()
    result, server, streamed = ask(*[PASSING[name][0]] * 40, patience=night.patience(total=272.0))
    assert refused(result).retryable
    assert sum(night.waits) == pytest.approx(272.0) and max(night.waits) <= 60.0
    assert len(server.requests) == len(night.waits) + 1 >= 6  # the last when patience is just over
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
    assert "529 overloaded_error: no; asking again in 1 s, for 120 min at most]" in streamed


def test_a_run_s_deadline_ends_patience() -> None:
    night, purse = Night(), Purse()
    faults = [fake.status(529, "overloaded_error")] * 40
    result, server, streamed = ask(*faults, meter=purse, patience=night.patience(), deadline=1100.0)
    assert night.now == pytest.approx(1100.0)  # no earlier: only then is the run's time used up
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
    assert 6.0 <= night.waits[3] <= 8.0  # no wish is no leave to hammer the server


def test_a_stall_ends_at_the_timeout() -> None:
    began = time.monotonic()
    result, _, _ = ask(fake.stalls, timeout=0.3, patience=Patience(total=0.0))
    assert 0.3 <= time.monotonic() - began < 30
    assert refused(result).retryable and "ReadTimeout" in str(result)


def test_pings_do_not_prolong_an_answer() -> None:
    purse = Purse()
    result, server, _ = ask(fake.pings, fake.answer("here it is"), meter=purse, answer_time=1.0)
    assert isinstance(result, Turn) and result.text == "here it is "
    assert [c.settled for c in purse.charges] == [None, None]  # nobody knows what the first cost
    result, server, _ = ask(fake.pings, answer_time=0.1, patience=Patience(total=0.0))
    assert "no whole answer within 0 s" in str(refused(result)) and refused(result).retryable
    assert len(server.requests) == 1


@pytest.mark.parametrize("hangs", [fake.pings, fake.stalls])
def test_a_run_s_deadline_ends_an_answer(hangs: Reply) -> None:
    night, purse = Night(), Purse()
    options = {"patience": night.patience(), "timeout": 600.0}
    result, server, _ = ask(hangs, meter=purse, deadline=night.now + 0.3, **options)
    assert "the run's time ended before there was an answer" in str(refused(result))
    assert "RemoteProtocolError" not in str(result)  # it is not the server that ended it
    assert len(server.requests) == 1
    assert [c.settled for c in purse.charges] == [None]


@pytest.mark.parametrize("ping", [False, True])
def test_a_slow_answer_is_whole(ping: bool) -> None:
    """Slower in all than the silence that counts as a stall, but never silent for so long."""
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
    (counted,) = server.counted  # what is counted is what is sent
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
    assert [c.settled for c in purse.charges] == [USAGE, USAGE, None]  # the turn settles its own
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
    remedy = r"budget had 1,689 tokens .*resume the run with a larger --budget-tokens or --budget-dollars"
    with Journal.create(tmp_path / "run.db", {"spec": "s"}) as journal:
        ledger = Ledger(journal, Limits(tokens=fake.COUNTED + 1689), turn=1)
        with pytest.raises(OutOfBudget, match=remedy) as caught:
            ask(cut, meter=ledger)
        assert ledger.spent().tokens == Usage(11, 1500, 4000, 300).total
        assert ledger.spent().uncertain_tokens == 0
    assert caught.value.__context__ is None  # which may hold the key in a header


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_was_never_sent_costs_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, or nobody shakes hands."""
    monkeypatch.setattr("agent.providers.anthropic.ASIDE", 0.1)
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
    assert 2450 < purse.asked[0][1] < 3000  # a token has more than two letters


def test_a_model_is_asked_only_for_what_it_has() -> None:
    with FakeMessages(fake.answer("a"), fake.answer("b"), model=fake.describes(False, 5000)) as server:
        provider = claude(server)
        provider.next_turn(Question("SYSTEM", ASK))
        provider.next_turn(Question("SYSTEM", ASK))
    assert all("thinking" not in r and r["max_tokens"] == 5000 for r in server.requests)
    with FakeMessages(fake.answer("a"), model=fake.status(404, "not_found_error")) as server:
        claude(server).next_turn(Question("SYSTEM", ASK))
    assert server.requests[0]["thinking"] == {"type": "adaptive"}


def test_tools_are_offered_and_their_use_is_repeated_with_its_thinking() -> None:
    calls = (("check", {"source": "a = 1"}), ("read", {"page": "per_row"}))
    with FakeMessages(fake.uses(*calls, text="let me see", thinking="hm"), fake.answer("done")) as server:
        provider = claude(server)
        turn = provider.next_turn(Question("SYSTEM", ASK, tools=TOOLS))
        said = Message(
            "user", "fine", ({"type": "tool_result", "tool_use_id": "toolu_1", "content": "fine"},)
        )
        talk = [*ASK, Message("assistant", turn.text, turn.blocks), said]
        assert provider.next_turn(Question("SYSTEM", talk, tools=TOOLS)).text == "done "
    assert turn.calls == (Call("toolu_1", *calls[0]), Call("toolu_2", *calls[1]))
    assert (turn.text, turn.stop_reason, turn.usage) == ("let me see ", "tool_use", USAGE)
    assert Turn.from_json(turn.to_json()) == turn
    first, second = server.requests
    assert [t["name"] for t in first["tools"]] == [t.name for t in TOOLS]
    assert first["tools"] == second["tools"] and first["system"] == second["system"]
    assert second["messages"][1] == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "let me see "},
            {"type": "thinking", "thinking": "hm", "signature": "s1"},
            {"type": "tool_use", "id": "toolu_1", "name": "check", "input": {"source": "a = 1"}},
            {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {"page": "per_row"}},
        ],
    }
    assert second["messages"][2]["content"] == [{**said.blocks[0], **CACHED}]


SAID = Message("user", "fine", ({"type": "tool_result", "tool_use_id": "toolu_1", "content": "fine"},))


def test_blank_text_before_a_call_is_not_kept() -> None:
    with FakeMessages(fake.uses(("check", {"source": "a = 1"}), text=""), fake.answer("done")) as server:
        provider = claude(server)
        turn = provider.next_turn(Question("SYSTEM", ASK, tools=TOOLS))
        assert [block["type"] for block in turn.blocks] == ["tool_use"]
        talk = [*ASK, Message("assistant", turn.text, turn.blocks), SAID]
        assert provider.next_turn(Question("SYSTEM", talk, tools=TOOLS)).text == "done "


def test_blank_text_that_was_kept_is_not_sent() -> None:
    """By a version that kept it: its journals can be resumed."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "check", "input": {"source": "a = 1"}}
    old = Message("assistant", " \n", ({"type": "text", "text": " \n"}, call))
    with FakeMessages(fake.answer("done")) as server:
        assert claude(server).next_turn(Question("SYSTEM", [*ASK, old, SAID])).text == "done "
    assert server.requests[0]["messages"][1]["content"] == [call]


def test_the_server_refuses_blank_text() -> None:
    with FakeMessages(fake.answer("a")) as server, pytest.raises(ProviderError, match="non-whitespace text"):
        claude(server).next_turn(Question("SYSTEM", [Message("user", " \n")]))


def test_a_cache_that_is_none_is_said_once() -> None:
    none = {**fake.USAGE, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    for usage, times in ((none, 1), (fake.USAGE, 0)):
        said: list[str] = []
        with FakeMessages(*[fake.answer("a", usage=usage)] * 3) as server:
            provider = claude(server)
            provider.next_turn(Question("SYSTEM", ASK, say=said.append))
            assert "nothing was cached" not in "".join(said)  # the first fills it
            for _ in range(2):
                provider.next_turn(Question("SYSTEM", TALK, say=said.append))
        assert "".join(said).count("nothing was cached") == times


def test_a_tool_s_input_that_was_cut_is_no_use_of_it() -> None:
    result, _, _ = ask(fake.uses(("submit", {"source": "a = 1"}), cut=True))
    assert "cut off at 32000 tokens" in str(refused(result))


def test_a_refusal_says_why() -> None:
    details = {"type": "refusal", "category": "cyber", "explanation": "it looked like an exploit"}
    result, _, _ = ask(fake.answer("no", "refusal", stop_details=details))
    assert "it looked like an exploit" in str(result)


def test_no_key() -> None:
    with pytest.raises(ProviderError, match="no API key; set ANTHROPIC_API_KEY"):
        make("anthropic")


def test_the_key_is_in_no_error() -> None:
    echo = fake.status(401, "authentication_error", f"key {KEY} is wrong")
    result, server, _ = ask(echo)
    assert KEY in server.headers[0].get("authorization", "") + server.headers[0].get("x-api-key", "")
    assert "[key] is wrong" in str(result)
    assert KEY not in "".join(traceback.format_exception(refused(result)))
    _, _, streamed = ask(fake.status(500, "api_error", f"key {KEY}"), fake.answer("a"))
    assert "[key]" in streamed and KEY not in streamed


def test_the_key_is_in_no_turn(tmp_path: Path) -> None:
    """A turn is journalled, and what is streamed may be logged."""
    use = fake.uses(("check", {"source": [f"key = '{KEY}'"], KEY: 1}), text=f"it is {KEY}!", thinking=KEY)
    result, _, streamed = ask(use)
    assert isinstance(result, Turn)
    assert KEY not in repr(result) + streamed
    assert result.text == streamed == "it is [key]! "
    assert result.calls[0].input == {"source": ["key = '[key]'"], "[key]": 1}
    # thinking is signed as it was: the API would refuse another text
    assert [block["type"] for block in result.blocks] == ["text", "tool_use"]
    with Journal.create(tmp_path / "run.db", {"spec": "s"}) as journal:
        journal.once("answer/1", "answer", result.to_json)
        assert KEY not in journal.export()


@pytest.mark.parametrize("at", range(1, len(KEY)))
def test_a_key_in_pieces_is_not_streamed(at: int) -> None:
    said: list[str] = []
    stream = Stream(Scrub(KEY), said.append)
    for piece in (f"a sk {KEY[:at]}", KEY[at:], f"{KEY}sk", KEY[:at]):
        stream.piece(piece)
    stream.end()
    assert "".join(said) == f"a sk [key][key]sk{KEY[:at]}"


@pytest.mark.parametrize("key", [KEY + "\nX: y", KEY + "é", "a b" + KEY])
def test_a_key_that_cannot_be_sent_is_not_quoted(key: str) -> None:
    with pytest.raises(ProviderError, match="characters that no key has") as caught:
        make("anthropic", api_key=key)
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_listener_is_not_taken_for_the_servers() -> None:
    def fails(text: str) -> None:
        raise ValueError("the terminal is gone")

    with FakeMessages(fake.answer("a")) as server, pytest.raises(ValueError, match="gone"):
        claude(server).next_turn(Question("SYSTEM", ASK, say=fails))


# handoff


def hand(directory: Path, **options: Any) -> Provider:
    defaults = {"directory": directory, "author": "Ada", "settle": 0.1, "patience": 0.1, "poll": 0.02}
    return make("handoff", **{**defaults, **options})


def in_background(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 5
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_handoff_answered_by_a_rename(tmp_path: Path) -> None:
    def author() -> None:
        wait_for(tmp_path / "prompt-2.md")
        (tmp_path / "draft").write_text("the answer\n<!-- end -->\n")
        (tmp_path / "draft").rename(tmp_path / "answer-2.md")

    told: list[str] = []
    in_background(author)
    turn = hand(tmp_path, settle=60.0).next_turn(Question("SYSTEM", TALK, say=told.append))
    assert turn == Turn("the answer\n", Usage(), "Ada via handoff", "end_turn")
    prompt = (tmp_path / "prompt-2.md").read_text()
    places = [prompt.index(part) for part in ("SYSTEM", *(m.text for m in TALK), "answer-2.md")]
    assert places == sorted(places)
    assert len(told) == 1 and "prompt-2.md" in told[0] and "answer-2.md" in told[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answer-2.md", "prompt-2.md"]


def test_handoff_waits_for_a_slow_writer(tmp_path: Path) -> None:
    def author() -> None:
        with (tmp_path / "answer-1.md").open("w") as file:
            for part, pause in (("", 0.1), ("  \n", 0.5), ("one ", 0.1), ("two ", 0.1), ("three", 0)):
                file.write(part)
                file.flush()
                time.sleep(pause)

    in_background(author)
    patient = hand(tmp_path, time_limit=5, patience=0.3)
    assert patient.next_turn(Question("S", ASK)).text == "  \none two three"


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("Two steps.\n\n```python\na = 1\n", "b = 2\n```\n"),  # within its code
        ("I think that\n", "this is it:\n\n```python\na = 1\n```\n"),  # before any
        ("```python\na = 1\n```\n", "No:\n\n```python\na = 2\n```\n"),  # between two blocks
    ],
)
def test_handoff_waits_for_a_writer_that_pauses(tmp_path: Path, first: str, rest: str) -> None:
    """For far longer than a whole answer has to wait: its END is seen at once."""
    answer = tmp_path / "answer-1.md"

    def author() -> None:
        wait_for(tmp_path / "prompt-1.md")
        answer.write_text(first)
        time.sleep(0.3)
        with answer.open("a") as file:
            file.write(f"{rest}<!-- end -->")

    in_background(author)
    patient = hand(tmp_path, settle=60.0, patience=60.0)
    assert patient.next_turn(Question("S", ASK)).text == first + rest


def test_handoff_an_answer_without_its_end_has_to_stand_still_for_long(tmp_path: Path) -> None:
    """The defaults, by which a pause of seconds is none."""
    (tmp_path / "answer-1.md").write_text("```python\na = 1\n```\n")
    with pytest.raises(
        ProviderError, match=r"answer-1.md is not known to be whole \(it still changed\) .*end it"
    ):
        make("handoff", directory=tmp_path, author="Ada", time_limit=1.2).next_turn(Question("S", ASK))


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("no code", "it holds no block of code"),
        ("```python\na = 1\n```", ""),
        ("```python\na = 1\n``", "its last block of code is open"),
        ("```yaml\na: 1\n```\nand\n```python\n", "its last block of code is open"),
        ("~~~\n```\n~~~\n", ""),
        ("````md\n```python\n```\n", "its last block of code is open"),
        ("a ``` in a line, ```code``` too\n```in one``` line\n", "it holds no block of code"),
    ],
)
def test_handoff_takes_what_looks_unfinished_after_a_long_while(
    tmp_path: Path, text: str, lacks: str
) -> None:
    (tmp_path / "answer-1.md").write_text(text)
    patient = hand(tmp_path, time_limit=0.2, settle=0.0, patience=60.0)
    if not lacks:
        assert patient.next_turn(Question("S", ASK)).text == text
        return
    with pytest.raises(ProviderError, match=rf"not known to be whole \({lacks}\).*end it with") as caught:
        patient.next_turn(Question("S", ASK))
    assert caught.value.retryable
    assert hand(tmp_path, time_limit=20, patience=0.3).next_turn(Question("S", ASK)).text == text


@pytest.mark.parametrize("text", ["<!-- end -->", "\n\n  <!-- end -->\r\n", "\ufeff<!-- end -->\n"])
def test_handoff_waits_for_more_than_an_end(tmp_path: Path, text: str) -> None:
    answer = tmp_path / "answer-1.md"
    answer.write_text(text)
    words = f"{answer} has no more than the line <!-- end --> .*write the answer above it and resume"
    with pytest.raises(ProviderError, match=words) as caught:
        hand(tmp_path, time_limit=0.1, settle=0.0, patience=0.0).next_turn(Question("S", ASK))
    assert caught.value.retryable
    answer.write_text("an answer\n" + text.lstrip("\ufeff"))
    assert hand(tmp_path, settle=60.0).next_turn(Question("S", ASK)).text.startswith("an answer\n")


@pytest.mark.parametrize("text", ["I say <!-- end -->", "a = 1<!-- end -->\n", "<!-- end --> and more"])
def test_handoff_s_end_is_a_line_of_its_own(tmp_path: Path, text: str) -> None:
    """Else it is text, which has to stand still."""
    (tmp_path / "answer-1.md").write_text(text)
    with pytest.raises(ProviderError, match="not known to be whole"):
        hand(tmp_path, time_limit=0.1, settle=60.0).next_turn(Question("S", ASK))
    assert hand(tmp_path, settle=0.0, patience=0.0).next_turn(Question("S", ASK)).text == text


def test_handoff_gives_up_at_its_limit(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"did not come within 0.1 s; .*--time-limit") as caught:
        hand(tmp_path / "new", time_limit=0.1).next_turn(Question("S", ASK))
    assert caught.value.retryable
    assert (tmp_path / "new" / "prompt-1.md").exists()


def test_handoff_gives_up_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="did not come"):
        hand(tmp_path, time_limit=600).next_turn(Question("S", ASK, deadline=time.monotonic() + 0.1))


def test_handoff_stops_when_told(tmp_path: Path) -> None:
    def person() -> None:
        wait_for(tmp_path / "prompt-1.md")
        (tmp_path / "stop").touch()

    in_background(person)
    with pytest.raises(ProviderError, match="stopped by .*stop; remove that file") as caught:
        hand(tmp_path, time_limit=5).next_turn(Question("S", ASK))
    assert not caught.value.retryable


def test_handoff_says_a_word_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    told: list[str] = []
    provider = hand(tmp_path)
    monkeypatch.setattr("agent.providers.handoff.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        provider.next_turn(Question("S", ASK, say=told.append))
    assert "interrupted" in told[-1] and "prompt-1.md" in told[-1]


def test_handoff_resumes_with_the_answer_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ProviderError):
        hand(tmp_path, time_limit=0.0).next_turn(Question("S", ASK))
    prompt = tmp_path / "prompt-1.md"
    before = prompt.stat()
    (tmp_path / "answer-1.md").write_text("late")
    assert hand(tmp_path, time_limit=5).next_turn(Question("S", ASK)).text == "late"
    assert (prompt.stat().st_ino, prompt.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_handoff_refuses_the_answer_to_another_prompt(tmp_path: Path) -> None:
    (tmp_path / "answer-1.md").write_text("for another run")
    (tmp_path / "prompt-1.md").write_text("another prompt")
    with pytest.raises(ProviderError, match="answers another prompt"):
        hand(tmp_path).next_turn(Question("S", ASK))


def test_handoff_takes_an_answer_to_the_same_prompt_of_another_version(tmp_path: Path) -> None:
    with pytest.raises(ProviderError):
        hand(tmp_path, time_limit=0.0).next_turn(Question("S", ASK))
    prompt = tmp_path / "prompt-1.md"
    asked, mark, _ = prompt.read_text().partition("<!-- how to answer -->")
    prompt.write_text(f"{asked}{mark}\n\nBy a pigeon.\n")
    (tmp_path / "answer-1.md").write_text("late\n<!-- end -->\n")
    assert hand(tmp_path, settle=60.0).next_turn(Question("S", ASK)).text == "late\n"


def test_handoff_names_what_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "answer-1.md").write_bytes(b"caf\xe9")
    with pytest.raises(ProviderError, match="answer-1.md is not UTF-8"):
        hand(tmp_path).next_turn(Question("S", ASK))
    with pytest.raises(ProviderError, match="give a directory"):
        hand(tmp_path / "answer-1.md").next_turn(Question("S", ASK))


# replay


TURNS = [
    Turn("first", Usage(1, 2, 3, 4), "claude-x via anthropic", "end_turn"),
    Turn("second", Usage(), "Ada via handoff", "end_turn"),
]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with Journal.create(tmp_path / "run.db", {"spec": "s"}) as journal:
        for number, turn in enumerate(TURNS):
            journal.once(f"answer/{number}", "answer", turn.to_json)
            journal.once(f"report/{number}", "report", lambda: {"status": "rejected"})
        (tmp_path / "run.jsonl").write_text(journal.export())
    return tmp_path / "run.jsonl"


def test_replay_plays_a_run_back(recording: Path) -> None:
    player, told = make("replay", path=recording), list[str]()
    assert [player.next_turn(Question("S", messages, say=told.append)) for messages in (ASK, TALK)] == TURNS
    assert told == ["first", "second"]


def test_replay_goes_on_in_a_resumed_run(recording: Path) -> None:
    assert make("replay", path=recording).next_turn(Question("S", TALK)) == TURNS[1]


def test_replay_runs_out(recording: Path) -> None:
    more = [*TALK, Message("assistant", "x"), Message("user", "y")]
    with pytest.raises(ProviderError, match="records 2 answers, and the run asks for number 3; .*record"):
        make("replay", path=recording).next_turn(Question("S", more))


def test_replay_refuses_what_is_no_recording(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="missing.jsonl"):
        make("replay", path=tmp_path / "missing.jsonl")
    lines = recording.read_text().splitlines(keepends=True)
    recording.write_text(lines[0])
    with pytest.raises(ProviderError, match="records no answer"):
        make("replay", path=recording)
    recording.write_text(lines[0] + lines[1].replace('"author"', '"writer"'))
    with pytest.raises(ProviderError, match="event 1: .*'author'"):
        make("replay", path=recording)
