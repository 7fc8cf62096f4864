"""The `claude` command as an author: a stand-in on the PATH is run as the real one would be."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authoring import TOY_KERNEL, coda_agent, fenced, write_toy

from agent.providers import Message, ProviderError, Question, Usage, make

# It keeps what it was started with, and does as STAND_IN says.
STAND_IN = f"""#!{sys.executable}
import json, os, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
plan = json.load(open(here + "/plan.json"))
system = open(sys.argv[sys.argv.index("--system-prompt-file") + 1]).read()
kept = {{"argv": sys.argv[1:], "prompt": sys.stdin.read(), "system": system, "env": dict(os.environ),
        "files": os.listdir(".")}}
json.dump(kept, open(here + "/kept.json", "w"))
if plan.get("hangs"):
    child = subprocess.Popen(["sleep", "600"])
    open(here + "/child", "w").write(str(child.pid))
    time.sleep(600)
sys.stderr.write(plan.get("stderr", ""))
sys.stdout.write(plan.get("stdout", ""))
sys.exit(plan.get("status", 0))
"""
TASK = [Message("user", "write a kernel")]
RESULT: dict[str, Any] = {
    "type": "result",
    "subtype": "success",
    "is_error": False,
    "result": "Here it is.",
    "usage": {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 11,
              "cache_creation_input_tokens": 13, "service_tier": "standard"},
    "modelUsage": {"claude-haiku-4-5": {"outputTokens": 2}, "claude-opus-5-5": {"outputTokens": 5}},
}  # fmt: skip

Plan = Callable[..., Path]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Puts the stand-in on the PATH and tells it what to do; its folder."""
    here = tmp_path / "bin"
    here.mkdir()
    (here / "claude").write_text(STAND_IN)
    (here / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ['PATH']}")

    def told(result: dict[str, Any] | None = None, **more: Any) -> Path:
        stdout = {"stdout": json.dumps(result)} if result else {}
        (here / "plan.json").write_text(json.dumps(stdout | more))
        return here

    return told


def kept(here: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here / "kept.json").read_text())
    return found


def test_an_answer_with_its_model_and_tokens(plan: Plan) -> None:
    plan(RESULT)
    heard: list[str] = []
    turn = make("claude-code").next_turn(Question("S", TASK, say=heard.append))
    assert turn.text == "Here it is." and turn.author == "claude-opus-5-5 via claude-code"
    assert turn.usage == Usage(5, 7, 11, 13) and heard[-1] == turn.text


def test_it_gets_the_conversation_and_nothing_else(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-secret")
    here = plan(RESULT)
    system = "the prefix " * 30_000  # longer than an argument may be
    talk = [*TASK, Message("assistant", "my draft"), Message("user", "rejected: why")]
    make("claude-code", model="opus").next_turn(Question(system, talk))
    found = kept(here)
    assert found["system"] == system and found["files"] == []
    assert "ANTHROPIC_API_KEY" not in found["env"] and "sk-ant-secret" not in json.dumps(found)
    places = [found["prompt"].index(message.text) for message in talk]
    assert places == sorted(places)
    flags = found["argv"]
    assert flags[flags.index("--tools") + 1] == "" and flags[flags.index("--setting-sources") + 1] == ""
    assert flags[flags.index("--model") + 1] == "opus" and "--strict-mcp-config" in flags
    make("claude-code").next_turn(Question("S", TASK))
    assert kept(here)["prompt"] == "write a kernel" and "--model" not in kept(here)["argv"]


def test_without_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProviderError, match="no `claude` command .*; install Claude Code") as caught:
        make("claude-code")
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("answer", "words", "retryable"),
    [
        ({"stdout": json.dumps(RESULT | {"is_error": True, "result": "Invalid API key · Please run /login"}),
          "status": 1}, "not logged in: Invalid API key .*; run `claude`, log in", False),
        ({"stderr": "error: unknown option '--tools'", "status": 1}, "unknown option.*; update", False),
        ({"stdout": json.dumps(RESULT | {"is_error": True, "result": "Claude usage limit reached"})},
         "status 0: Claude usage limit reached", True),
        ({"stdout": json.dumps({"type": "result", "subtype": "error_during_execution"})},
         "error_during_execution", True),
        ({"stderr": "boom\n" * 900, "status": 134}, "status 134: ", True),
        ({"stdout": "no JSON"}, "status 0: no JSON", True),
        ({"stdout": "[1]"}, r"status 0: \[1\]", True),
        ({}, "status 0: nothing", True),
        ({"stdout": json.dumps(RESULT | {"result": "  \n"})}, "an empty answer", True),
        ({"stdout": json.dumps(RESULT | {"stop_reason": "max_tokens"})}, "cut at its limit", False),
    ],
)  # fmt: skip
def test_no_answer_says_why(plan: Plan, answer: dict[str, Any], words: str, retryable: bool) -> None:
    plan(**answer)
    with pytest.raises(ProviderError, match=words) as caught:
        make("claude-code").next_turn(Question("S", TASK))
    assert caught.value.retryable is retryable and len(str(caught.value)) < 800


def test_one_that_hangs_is_ended_with_all_it_started(plan: Plan) -> None:
    here = plan(hangs=True)
    with pytest.raises(ProviderError, match="did not answer within 2 s; resume"):
        make("claude-code", time_limit=2.0).next_turn(Question("S", TASK))
    child = int((here / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_unknown_fields_and_a_missing_account_do_no_harm(plan: Plan) -> None:
    plan({"subtype": "success", "is_error": False, "result": "x", "usage": None, "news": 1})
    turn = make("claude-code").next_turn(Question("S", TASK))
    assert (turn.usage, turn.author) == (Usage(), "Claude via claude-code")


def test_a_run_by_the_command_line(plan: Plan, tmp_path: Path) -> None:
    plan(RESULT | {"result": fenced(TOY_KERNEL)})
    spec = write_toy(tmp_path)
    done = coda_agent(
        "generate", spec, "--provider", "claude-code", "--no-gpu", CODA_AGENT_RUNS=str(tmp_path / "r")
    )
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
