"""The provider that asks Claude through the `claude` command line, headless: a subscription will do.

Each turn is one process that gets the whole conversation: nothing of a session is kept, so that a run can be
resumed anywhere. It has no tools, no settings and no files: it starts in an empty directory, and what it
answers is text. ANTHROPIC_API_KEY is withheld, with which it would bill the key instead.

An estimate of each turn is reserved before it. What it cost is what the command says at its end, in tokens
and US dollars; one that is killed says nothing and stays charged.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent.budget import price
from agent.prompt import tokens
from agent.providers import Message, ProviderError, Question, Turn, Usage
from primitives import children

DEFAULT_MAX_TOKENS = 32_000  # thinking counts too
WITHHELD = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
WORDS = 400  # characters of what the command said, in an error
LOGGED_OUT = ("/login", "log in", "logged in", "api key", "oauth", "authenticat")
OUTDATED = "unknown option"
COUNTS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
MODEL_COUNTS = ("inputTokens", "outputTokens", "cacheReadInputTokens", "cacheCreationInputTokens")


class ClaudeCode:
    """Claude by its command line. `model`: an alias or a model's name; the command's own default without one.
    `max_tokens` bounds one answer, thinking included, and so does `time_limit`, in seconds. Raises
    ProviderError where the command is not installed."""

    name = "claude-code"

    def __init__(
        self,
        *,
        model: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        time_limit: float = 3600.0,
        command: str = "claude",
    ):
        found = shutil.which(command)
        if found is None:
            raise ProviderError(
                f"there is no `{command}` command on this machine's PATH",
                "install Claude Code and log in once, or use --provider anthropic or handoff",
            )
        self._command = [found, "--print", "--output-format", "json", "--tools", "", "--strict-mcp-config"]
        self._command += ["--setting-sources", "", *(["--model", model] if model else [])]
        self._model = model or ""
        self._max_tokens = max_tokens
        self._time_limit = time_limit

    def next_turn(self, question: Question) -> Turn:
        """The command's answer, whole at its end. Raises ProviderError where it is logged out, refuses, fails
        or takes too long."""
        question.say("waiting for claude\n")
        prompt = _conversation(question.messages)
        priced = self._model if price(self._model, Usage()) is not None else ""  # an alias has no price
        read = tokens(question.system) + tokens(prompt)
        charge = question.meter.reserve(priced, read, self._max_tokens)
        with TemporaryDirectory(prefix="coda-claude-") as scratch:
            status, said, words = self._run(Path(scratch), question, prompt, charge.max_tokens)
        answer = _parse(said)
        told = _told(answer, said, words)
        usage, dollars = _usage(answer), _dollars(answer)
        if fault := _fault(status, answer, told):
            if isinstance(answer.get("usage"), dict) or _unsent(told):
                charge.settle(usage, dollars)
            raise fault
        question.say(answer["result"])
        author = f"{_model(answer)} via claude-code"
        return Turn(answer["result"], usage, author, "end_turn", dollars=dollars)

    def _run(self, scratch: Path, question: Question, prompt: str, most: int) -> tuple[int, str, str]:
        """Status, output and errors of one request, whose answer may have ``most`` tokens; nothing of the
        command is left."""
        prefix = scratch / "system"
        prefix.write_text(question.system, encoding="utf-8")  # as an argument it could be too long
        (scratch / "empty").mkdir()
        kept = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        begin = partial(
            subprocess.Popen,
            [*self._command, "--system-prompt-file", str(prefix)],
            cwd=scratch / "empty",
            env=kept | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(most)},
            start_new_session=True,
        )
        seconds = self._time_limit
        if question.deadline is not None:
            seconds = max(0.0, min(seconds, question.deadline - time.monotonic()))
        status, said, words = children.attend(begin, prompt, seconds)
        if status is None:
            raise ProviderError(
                f"claude did not answer within {seconds:.6g} s",
                "resume the run to ask again, with a larger --time-limit where that is too short",
                retryable=True,
            )
        return status, said, words


def _conversation(messages: Sequence[Message]) -> str:
    """One prompt: the task, then each answer so far and what was said to it."""
    if len(messages) == 1:
        return messages[0].text
    titles = {"user": "What you are told", "assistant": "What you answered"}
    return "\n\n".join(f"<!-- {i}. {titles[m.role]} -->\n\n{m.text}" for i, m in enumerate(messages, 1))


def _parse(said: str) -> dict[str, Any]:
    """The command's JSON object; empty where it gave none."""
    try:
        answer = json.loads(said)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _told(answer: Mapping[str, Any], said: str, words: str) -> str:
    """What the command had to say, in one line, for an error."""
    told = str(answer.get("result") or words or said or answer.get("subtype") or "nothing")
    return " ".join(told.split())[-WORDS:]


def _logged_out(told: str) -> bool:
    return any(sign in told.lower() for sign in LOGGED_OUT)


def _unsent(told: str) -> bool:
    """Whether no model was asked."""
    return _logged_out(told) or OUTDATED in told


def _fault(status: int, answer: Mapping[str, Any], told: str) -> ProviderError | None:
    """Why there is no whole answer; None where there is one."""
    if status != 0 or answer.get("is_error") or answer.get("subtype") != "success":
        if _logged_out(told):
            remedy = "run `claude`, log in, and resume the run"
            return ProviderError(f"claude is not logged in: {told}", remedy)
        if OUTDATED in told:
            return ProviderError(f"claude: {told}", "update Claude Code: `claude update`")
        remedy = "see what `claude --print hello` says, then resume the run"
        return ProviderError(f"claude ended with status {status}: {told}", remedy, retryable=True)
    text = answer.get("result")
    if not isinstance(text, str) or not text.strip():
        return ProviderError("claude gave an empty answer", "resume the run to ask again", retryable=True)
    if answer.get("stop_reason") == "max_tokens":
        remedy = "resume the run with a larger --max-tokens, or with more of a budget"
        return ProviderError("claude's answer was cut at its limit of tokens", remedy)
    return None


def _usage(answer: Mapping[str, Any]) -> Usage:
    return _counted(answer.get("usage"), COUNTS)


def _counted(found: Any, names: Sequence[str]) -> Usage:
    """Counts by their names, in the order of Usage; what is missing or no number is 0."""
    counts: Mapping[str, Any] = found if isinstance(found, dict) else {}
    return Usage(*(n if isinstance(n := counts.get(name), int) else 0 for name in names))


def _dollars(answer: Mapping[str, Any]) -> float | None:
    """What it cost by the command's account, else its models' tokens at their prices; None where that is
    not known either."""
    whole = answer.get("total_cost_usd")
    if isinstance(whole, int | float) and math.isfinite(whole) and whole >= 0:
        return float(whole)
    parts = [price(name, _counted(counts, MODEL_COUNTS)) for name, counts in _models(answer).items()]
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _model(answer: Mapping[str, Any]) -> str:
    """The model that wrote most of it: the command asks smaller ones for chores."""
    models = _models(answer)
    return max(models, key=lambda name: _counted(models[name], MODEL_COUNTS).output_tokens, default="Claude")


def _models(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What each model had to do with it, by their names."""
    models = answer.get("modelUsage")
    return models if isinstance(models, dict) else {}
