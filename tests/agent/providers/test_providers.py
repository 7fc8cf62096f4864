"""Code that all providers share: their types, their registry, and the replay of runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from asking import ASK, KEY, TALK

from coda_agent.agent.providers import Message, ProviderError, Question, Turn, Usage, make, specs
from coda_agent.agent.storage.journal import Journal

pytestmark = pytest.mark.usefixtures("no_keys")


# the types and the registry
def test_usage_adds_up() -> None:
    assert Usage(1, 2, 3, 4) + Usage(10, 20, 30, 40) == Usage(11, 22, 33, 44)


def test_a_turn_survives_json() -> None:
    turn = Turn("text", Usage(1, 2, 3, 4), "someone via handoff", "end_turn")
    assert Turn.from_json(turn.to_json()) == turn


def test_an_unknown_provider_lists_the_known() -> None:
    with pytest.raises(ProviderError, match=f"'gpt' is unknown; use one of {', '.join(specs())}"):
        make("gpt")
    assert {"anthropic", "claude-code", "handoff", "mcp", "replay"} <= specs().keys()


def test_no_sdk_is_imported_before_its_use() -> None:
    heavy = "{'anthropic', 'torch', 'httpx2', 'pydantic', 'rich'}"
    code = "import sys, coda_agent.agent.providers, coda_agent.agent.storage.journal; "
    code += f"print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coda_agent.agent.providers.anthropic", raising=False)
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(ProviderError, match=r"pip install 'coda-agent\[author\]'"):
        make("anthropic", api_key=KEY)


# replay
TURNS = [
    Turn("first", Usage(1, 2, 3, 4), "claude-x via anthropic", "end_turn"),
    Turn("second", Usage(), "Ada via handoff", "end_turn"),
]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with Journal.create(tmp_path / "run.db", {"run": "s-1", "spec": "s", "author": None}) as journal:
        for number, turn in enumerate(TURNS, 1):
            journal.once(f"answer/{number}", "answer", turn.to_json)
            journal.once(f"report/{number}", "report", lambda: {"report": {"status": "rejected"}})
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
    with pytest.raises(ProviderError, match="has 2 recorded answers, but the run asks for number 3"):
        make("replay", path=recording).next_turn(Question("S", more))


def test_replay_refuses_what_is_no_recording(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="missing.jsonl"):
        make("replay", path=tmp_path / "missing.jsonl")
    lines = recording.read_text().splitlines(keepends=True)
    recording.write_text(lines[0])
    with pytest.raises(ProviderError, match="has no recorded answer"):
        make("replay", path=recording)
    recording.write_text(lines[0] + lines[1].replace('"author"', '"writer"'))
    with pytest.raises(ProviderError, match="answer/1.author: "):
        make("replay", path=recording)
