"""The provider that asks Claude through the `claude` command line, headless: a subscription will do.

Each turn is one process that gets the whole conversation: nothing of a session is kept, so that a run can be
resumed anywhere. It has no tools, no settings and no files: it starts in an empty directory, and what it
answers is text. ANTHROPIC_API_KEY is withheld, with which it would bill the key instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent.providers import Message, ProviderError, Question, Turn, Usage
from primitives import children

WITHHELD = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
WORDS = 400  # characters of what the command said, in an error
LOGGED_OUT = ("/login", "log in", "logged in", "api key", "oauth", "authenticat")


class ClaudeCode:
    """Claude by its command line. `model`: an alias or a model's name; the command's own default without one.
    `time_limit` bounds one answer, in seconds. Raises ProviderError where the command is not installed."""

    name = "claude-code"

    def __init__(self, *, model: str | None = None, time_limit: float = 3600.0, command: str = "claude"):
        found = shutil.which(command)
        if found is None:
            raise ProviderError(
                f"there is no `{command}` command on this machine's PATH",
                "install Claude Code and log in once, or use --provider anthropic or handoff",
            )
        self._command = [found, "--print", "--output-format", "json", "--tools", "", "--strict-mcp-config"]
        self._command += ["--setting-sources", "", *(["--model", model] if model else [])]
        self._time_limit = time_limit

    def next_turn(self, question: Question) -> Turn:
        """The command's answer, whole at its end. Raises ProviderError where it is logged out, refuses, fails
        or takes too long."""
        question.say("waiting for claude\n")
        with TemporaryDirectory(prefix="coda-claude-") as scratch:
            status, said, words = self._run(Path(scratch), question.system, _conversation(question.messages))
        answer = _parse(said)
        if answer is None or status != 0 or answer.get("is_error") or answer.get("subtype") != "success":
            raise _fault(status, answer, said, words)
        text = answer.get("result")
        if not isinstance(text, str) or not text.strip():
            raise ProviderError("claude gave an empty answer", "resume the run to ask again", retryable=True)
        if answer.get("stop_reason") == "max_tokens":
            raise ProviderError(
                "claude's answer was cut at its limit of tokens",
                "raise CLAUDE_CODE_MAX_OUTPUT_TOKENS and resume the run",
                usage=_usage(answer),
            )
        question.say(text)
        return Turn(text, _usage(answer), f"{_model(answer)} via claude-code", "end_turn")

    def _run(self, scratch: Path, system: str, prompt: str) -> tuple[int, str, str]:
        """Status, output and errors; nothing of the command is left."""
        prefix = scratch / "system"
        prefix.write_text(system, encoding="utf-8")  # as an argument it could be too long
        (scratch / "empty").mkdir()
        begin = partial(
            subprocess.Popen,
            [*self._command, "--system-prompt-file", str(prefix)],
            cwd=scratch / "empty",
            env={k: v for k, v in os.environ.items() if k not in WITHHELD},
            start_new_session=True,
        )
        status, said, words = children.attend(begin, prompt, self._time_limit)
        if status is None:
            raise ProviderError(
                f"claude did not answer within {self._time_limit:g} s",
                "resume the run to ask again, or raise the time limit",
                retryable=True,
            )
        return status, said, words


def _conversation(messages: Sequence[Message]) -> str:
    """One prompt: the task, then each answer so far and what was said to it."""
    if len(messages) == 1:
        return messages[0].text
    titles = {"user": "What you are told", "assistant": "What you answered"}
    return "\n\n".join(f"<!-- {i}. {titles[m.role]} -->\n\n{m.text}" for i, m in enumerate(messages, 1))


def _parse(said: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(said)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _fault(status: int, answer: Mapping[str, Any] | None, said: str, words: str) -> ProviderError:
    told = str((answer or {}).get("result") or words or said or (answer or {}).get("subtype") or "nothing")
    told = " ".join(told.split())[-WORDS:]
    usage = _usage(answer or {})
    if any(sign in told.lower() for sign in LOGGED_OUT):
        return ProviderError(f"claude is not logged in: {told}", "run `claude`, log in, and resume the run")
    if "unknown option" in told:
        return ProviderError(f"claude: {told}", "update Claude Code: `claude update`")
    remedy = "see what `claude --print hello` says, then resume the run"
    return ProviderError(f"claude ended with status {status}: {told}", remedy, retryable=True, usage=usage)


def _usage(answer: Mapping[str, Any]) -> Usage:
    found = answer.get("usage")
    counts: Mapping[str, Any] = found if isinstance(found, dict) else {}
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return Usage(*(n if isinstance(n := counts.get(name), int) else 0 for name in names))


def _model(answer: Mapping[str, Any]) -> str:
    """The model that wrote most of it: the command asks smaller ones for chores."""
    models = answer.get("modelUsage")
    if not isinstance(models, dict) or not models:
        return "Claude"
    return str(max(models, key=lambda name: (models[name] or {}).get("outputTokens", 0)))
