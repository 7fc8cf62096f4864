"""The provider that asks Claude through the `claude` command line, headless: a subscription will do.

Each turn is one process that gets the whole conversation: nothing of a session is kept, so that a run can be
resumed anywhere. It has none of the command's tools, no settings and no files: it starts in an empty
directory, and what it answers is text. ANTHROPIC_API_KEY is withheld, with which it would bill the key
instead. The loop's tools it uses in its text, by blocks of code: so each request is a turn, which is reserved
and kept by itself, where a server of the command's own would be asked within one.

An estimate of each turn is reserved before it. What it cost is what the command says at its end, in tokens
and US dollars; one that is killed says nothing and stays charged. An outage is outlived as that of a line is.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent.budget import price
from agent.prompt import tokens
from agent.providers import Call, Charge, Message, ProviderError, Question, Tool, Turn, Usage
from agent.providers.patience import EMPTY, Fault, Patience, persist
from primitives import children

DEFAULT_MAX_TOKENS = 32_000  # thinking counts too
WITHHELD = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
WORDS = 400  # characters of what the command said, in an error
LOGGED_OUT = ("/login", "log in", "logged in", "api key", "oauth", "authenticat")
OUTDATED = "unknown option"
COUNTS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
BLOCK = re.compile(r"^```(\w+)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "py")
SUBMIT = "submit"  # the tool that an answer with a block of Python is
MODEL_COUNTS = ("inputTokens", "outputTokens", "cacheReadInputTokens", "cacheCreationInputTokens")


class ClaudeCode:
    """Claude by its command line. `model`: an alias or a model's name; the command's own default without one.
    `max_tokens` bounds one answer, thinking included, and so does `time_limit`, in seconds. `patience`: how
    long it is asked again. Raises ProviderError where the command is not installed."""

    name = "claude-code"

    def __init__(
        self,
        *,
        model: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        time_limit: float = 3600.0,
        patience: Patience | None = None,
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
        self._patience = patience or Patience()

    def next_turn(self, question: Question) -> Turn:
        """The command's answer, whole at its end. Raises ProviderError where it is logged out, refuses, or
        fails or takes too long until patience or the question's deadline is over."""
        question.say("waiting for claude\n")
        system, prompt = question.system + _how_to_use(question.tools), _conversation(question.messages)
        priced = self._model if price(self._model, Usage()) is not None else ""  # an alias has no price
        read = tokens(system) + tokens(prompt)

        def attempt(seconds: float) -> Turn | Fault:
            charge = question.meter.reserve(priced, read, self._max_tokens)
            return self._attempt(system, prompt, charge, min(self._time_limit, seconds))

        turn = persist(attempt, question, self._patience)
        question.say(turn.text)
        calls = _calls(turn.text, question.tools)
        return replace(turn, calls=calls, stop_reason="tool_use" if calls else turn.stop_reason)

    def _attempt(self, system: str, prompt: str, charge: Charge, seconds: float) -> Turn | Fault:
        """One request, ended after so long. Settled where it failed at a known cost."""
        with TemporaryDirectory(prefix="coda-claude-") as scratch:
            status, said, words = self._run(Path(scratch), system, prompt, charge.max_tokens, seconds)
        if status is None:
            remedy = "resume the run to ask again, with a larger --time-limit where that is too short"
            return Fault(f"claude did not answer within {seconds:.6g} s", remedy, math.inf, unknown=True)
        answer = _parse(said)
        told = _told(answer, said, words)
        usage, dollars = _usage(answer), _dollars(answer)
        if fault := _fault(status, answer, told):
            known = isinstance(answer.get("usage"), dict) or _unsent(told)
            if known:
                charge.settle(usage, dollars)
            return replace(fault, unknown=not known)
        author = f"{_model(answer)} via claude-code"
        return Turn(answer["result"], usage, author, "end_turn", dollars=dollars)

    def _run(
        self, scratch: Path, system: str, prompt: str, most: int, seconds: float
    ) -> tuple[int | None, str, str]:
        """Status (None: it took too long), output and errors of one request, whose answer may have ``most``
        tokens; nothing of the command is left."""
        prefix = scratch / "system"
        prefix.write_text(system, encoding="utf-8")  # as an argument it could be too long
        (scratch / "empty").mkdir()
        kept = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        begin = partial(
            subprocess.Popen,
            [*self._command, "--system-prompt-file", str(prefix)],
            cwd=scratch / "empty",
            env=kept | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(most)},
            start_new_session=True,
        )
        return children.attend(begin, prompt, seconds)


def _how_to_use(tools: Sequence[Tool]) -> str:
    """The end of the system prompt: the tools, and how an answer in text uses them."""
    offered = [tool for tool in tools if tool.name != SUBMIT]
    if not offered:
        return ""
    shown = "\n\n".join(f"{tool.description}\n\n{_example(tool)}" for tool in offered)
    return (
        "\n\n# Tools\n\nA message of yours that holds one or more of the following blocks, each as it stands"
        " here and with nothing of another, uses tools: the next message says what they gave. A ```python"
        f" block submits, as one of your attempts.\n\n{shown}\n"
    )


def _example(tool: Tool) -> str:
    """A tool's block: its argument alone, or a line for each."""
    arguments = {name: schema["description"] for name, schema in tool.schema["properties"].items()}
    if len(arguments) == 1:
        body = next(iter(arguments.values()))
    else:
        body = "\n".join(f"{name}: {words}" for name, words in arguments.items())
    return f"```{tool.name}\n{body}\n```"


def _calls(text: str, tools: Sequence[Tool]) -> tuple[Call, ...]:
    """The uses of tools in an answer, what it submits among them; none where it only submits."""
    named = {tool.name: tool for tool in tools if tool.name != SUBMIT}
    found = [(name, body) for name, body in BLOCK.findall(text) if name in named]
    calls = [(name, _input(named[name], body)) for name, body in found]
    submitted = [body for name, body in BLOCK.findall(text) if name in PYTHON]
    if calls and submitted and any(tool.name == SUBMIT for tool in tools):
        calls.append((SUBMIT, {"source": submitted[-1]}))
    return tuple(Call(str(number), name, given) for number, (name, given) in enumerate(calls, 1))


def _input(tool: Tool, body: str) -> dict[str, str]:
    names = list(tool.schema["properties"])
    if len(names) == 1:
        return {names[0]: body if names[0] == "source" else body.strip()}
    lines = (line.partition(":") for line in body.splitlines() if line.strip())
    return {name.strip(): value.strip() for name, _, value in lines}


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


def _fault(status: int, answer: Mapping[str, Any], told: str) -> Fault | None:
    """Why there is no whole answer; None where there is one."""
    if status != 0 or answer.get("is_error") or answer.get("subtype") != "success":
        if _logged_out(told):
            return Fault(f"claude is not logged in: {told}", "run `claude`, log in, and resume the run")
        if OUTDATED in told:
            return Fault(f"claude: {told}", "update Claude Code: `claude update`")
        remedy = "see what `claude --print hello` says, then resume the run"
        return Fault(f"claude ended with status {status}: {told}", remedy, math.inf)
    text = answer.get("result")
    if not isinstance(text, str) or not text.strip():
        return Fault("claude gave an empty answer", "resume the run to ask again", EMPTY)
    if answer.get("stop_reason") == "max_tokens":
        remedy = "resume the run with a larger --max-tokens, or with more of a budget"
        return Fault("claude's answer was cut at its limit of tokens", remedy)
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
