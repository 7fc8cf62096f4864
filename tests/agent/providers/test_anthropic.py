"""The anthropic provider: its requests and its answers. No result contains the API key."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import fake_messages as fake
import pytest
from asking import ASK, CACHED, KEY, TALK, USAGE, ask, claude, refused
from fake_messages import FakeMessages

from coda_agent.agent.providers import Message, ProviderError, Question, ToolCall, Turn, make
from coda_agent.agent.providers.scrub import Scrub, ScrubbedStream
from coda_agent.agent.run.tools import TOOLS
from coda_agent.agent.storage.journal import Journal

pytestmark = pytest.mark.usefixtures("no_keys")


def test_a_whole_answer() -> None:
    result, server, streamed = ask(fake.answer("here it is"))
    assert result == Turn("here it is ", USAGE, "claude-fake-1 via anthropic", "end_turn")
    assert streamed == "here it is "
    assert len(server.requests) == 1


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_AGENT_MODEL", "claude-of-the-environment")
    with FakeMessages(fake.answer("a"), fake.answer("b")) as server:
        claude(server, max_tokens=123).next_turn(Question("SYSTEM", TALK))
        claude(server, model="claude-given").next_turn(Question("SYSTEM", TALK))
    first, second = server.requests
    assert first["model"] == "claude-of-the-environment"
    assert first["system"] == [{"type": "text", "text": "SYSTEM", "cache_control": {"type": "ephemeral"}}]
    texts: list[dict[str, Any]] = [{"type": "text", "text": m.text} for m in TALK]
    texts[-1] |= CACHED
    assert first["messages"] == [{"role": m.role, "content": [t]} for m, t in zip(TALK, texts, strict=True)]
    assert (first["max_tokens"], first["thinking"]) == (123, {"type": "adaptive"})
    assert first["stream"] is True
    assert second["model"] == "claude-given"


def test_the_default_model_is_one_the_sdk_knows() -> None:
    from typing import get_args

    from anthropic.types.model import Model

    from coda_agent.agent.providers.anthropic import DEFAULT_MODEL

    assert DEFAULT_MODEL in get_args(get_args(Model)[0])


def test_a_model_is_asked_only_for_what_it_has() -> None:
    with FakeMessages(fake.answer("a"), fake.answer("b"), model=fake.describes(False, 5000)) as server:
        provider = claude(server)
        provider.next_turn(Question("SYSTEM", ASK))
        provider.next_turn(Question("SYSTEM", ASK))
    assert all("thinking" not in r and r["max_tokens"] == 5000 for r in server.requests)
    short = FakeMessages(fake.answer("half", "max_tokens"), model=fake.describes(max_tokens=5000))
    told = "5000 tokens.*its model's limit; choose another --model"
    with short as server, pytest.raises(ProviderError, match=told):
        claude(server, max_tokens=9000).next_turn(Question("SYSTEM", ASK))
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
    assert turn.calls == (ToolCall("toolu_1", *calls[0]), ToolCall("toolu_2", *calls[1]))
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
    """Journals of an older version contain blank text, and their runs can still be resumed."""
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
            assert "nothing was cached" not in "".join(said)  # the first request fills the cache
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
    """The key must not be in the turn, which the journal records, nor in the streamed text, which may be
    logged."""
    use = fake.uses(("check", {"source": [f"key = '{KEY}'"], KEY: 1}), text=f"it is {KEY}!", thinking=KEY)
    result, _, streamed = ask(use)
    assert isinstance(result, Turn)
    assert KEY not in repr(result) + streamed
    assert result.text == streamed == "it is [key]! "
    assert result.calls[0].input == {"source": ["key = '[key]'"], "[key]": 1}
    # the key is in the thinking, whose signature forbids any change, so this block is dropped
    assert [block["type"] for block in result.blocks] == ["text", "tool_use"]
    with Journal.create(tmp_path / "run.db", {"spec": "s"}) as journal:
        journal.once("answer/1", "answer", result.to_json)
        assert KEY not in journal.export()


@pytest.mark.parametrize("at", range(1, len(KEY)))
def test_a_key_in_pieces_is_not_streamed(at: int) -> None:
    said: list[str] = []
    stream = ScrubbedStream(Scrub(KEY), said.append)
    for piece in (f"a sk {KEY[:at]}", KEY[at:], f"{KEY}sk", KEY[:at]):
        stream.piece(piece)
    stream.end()
    assert "".join(said) == f"a sk [key][key]sk{KEY[:at]}"


@pytest.mark.parametrize("key", [KEY + "\nX: y", KEY + "é", "a b" + KEY])
def test_a_key_that_cannot_be_sent_is_not_quoted(key: str) -> None:
    with pytest.raises(ProviderError, match="contains invalid characters") as caught:
        make("anthropic", api_key=key)
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_listener_is_not_taken_for_the_servers() -> None:
    def fails(text: str) -> None:
        raise ValueError("the terminal is gone")

    with FakeMessages(fake.answer("a")) as server, pytest.raises(ValueError, match="gone"):
        claude(server).next_turn(Question("SYSTEM", ASK, say=fails))
