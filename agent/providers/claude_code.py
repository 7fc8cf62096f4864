"""Ask Claude through the `claude` command line, without its interactive mode. A subscription is enough.

Each request starts the command once. The command gets the whole conversation and keeps no session, so a run
can be resumed on any machine. The command may not use its own tools, the user's settings, or files named in
the prompt. The command runs in an empty directory and answers with text. It adds the model's name, the
platform, the directory's path and the date to the prompt. ANTHROPIC_API_KEY is withheld, because with this
key the command would charge the key's account instead of the subscription. To use tools of the authoring
loop, the model writes blocks of code in its answer. So each request is a turn, with its own reservation and
record.

Each turn first reserves its estimated cost. When the command ends, it reports its cost in tokens and US
dollars. A turn that is killed or breaks off is charged its whole reservation. The command's own retries are
off, so that only the module ``patience`` retries. Two kinds of retry cannot be turned off. The command
continues an answer that was cut at its limit, up to three times. It also repeats a request once after an
empty answer. The requests of these retries are charged without a reservation.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coda_agent.agent import finding
from coda_agent.agent.prompts.markdown_fences import PYTHON, blocks
from coda_agent.agent.prompts.prompt import tokens
from coda_agent.agent.providers import (
    Charge,
    Message,
    OutOfBudget,
    ProviderError,
    Question,
    Tool,
    ToolCall,
    Turn,
    Usage,
)
from coda_agent.agent.providers.patience import EMPTY, Fault, Patience, persist
from coda_agent.agent.providers.prices import is_priced, price
from coda_agent.agent.providers.spec import ProviderSpec
from coda_agent.primitives.system import become, subprocesses

DEFAULT_MAX_TOKENS = 32_000  # includes thinking
FLAGS = (
    "--print", "--output-format", "stream-json", "--verbose", "--include-partial-messages", "--tools", "",
    "--strict-mcp-config", "--setting-sources", "", "--no-session-persistence",
)  # fmt: skip
WITHHELD = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
SET = {
    "CLAUDE_CODE_DISABLE_ATTACHMENTS": "1",  # otherwise `@/a/path` anywhere in a prompt sends that file
    "CLAUDE_CODE_MAX_RETRIES": "0",  # otherwise the command retries ten times within one reservation
    # otherwise the command repeats a request without streaming if the request's stream breaks
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    "CLAUDE_CODE_DISABLE_REFUSAL_RETRY": "1",
    "CLAUDE_CODE_DISABLE_REFUSAL_FALLBACK": "1",  # otherwise the command falls back to another model
}
WORDS = 400  # an error message quotes at most this many characters of the command's output
LOGGED_OUT = ("/login", "log in", "logged in", "api key", "oauth", "authenticat")
OUTDATED = "unknown option"
UNREACHED = ("ECONNREFUSED", "EAI_AGAIN", "ENOTFOUND", "ENETUNREACH", "EHOSTUNREACH")
PASSING = (408, 409, 429)  # transient API statuses, besides 5xx
COUNTS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
SUBMIT = "submit"  # the tool that a ```python block calls
MODEL_COUNTS = ("inputTokens", "outputTokens", "cacheReadInputTokens", "cacheCreationInputTokens")


@dataclass(frozen=True)
class Said:
    """The output of the command. ``result``: the output's final summary, or empty. ``text``: all of the
    model's text; the summary has only the last block of the text. ``begun``: the number of responses that
    began. ``stops``: the stop reasons of the completed responses."""

    result: Mapping[str, Any]
    text: str
    begun: int
    stops: tuple[str, ...]


class ClaudeCode:
    """Claude through its command line. `model` is a model's name or alias; if it is None, the command chooses
    its default model. `max_tokens` and `time_limit` (seconds) limit one answer, including thinking.
    `patience` limits retries. Raises ProviderError if the command is not installed."""

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
        # absolute, because the command runs in another directory and PATH may be relative
        self._command = [os.path.abspath(found), *FLAGS, *(["--model", model] if model else [])]
        self._model = model or ""
        self._max_tokens = max_tokens
        self._time_limit = time_limit
        self._patience = patience or Patience()

    def next_turn(self, question: Question) -> Turn:
        """Return the command's whole answer. Raises ProviderError if the command is logged out, or if the
        model refuses. Also raises ProviderError if there is no whole answer when the time for retries ends or
        at the question's deadline. Raises OutOfBudget if the budget does not suffice for an answer."""
        question.say("waiting for claude\n")
        system, prompt = question.system + _how_to_use(question.tools), _conversation(question.messages)
        priced = self._model if is_priced(self._model) else ""
        read = tokens(system) + tokens(prompt)

        def attempt(seconds: float) -> Turn | Fault | OutOfBudget:
            charge = question.meter.reserve(priced, read, self._max_tokens)
            return self._attempt(system, prompt, charge, min(self._time_limit, seconds))

        turn = persist(attempt, question, self._patience)
        question.say(turn.text)
        calls = _calls(turn.text, question.tools)
        return replace(turn, calls=calls, stop_reason="tool_use" if calls else turn.stop_reason)

    def _attempt(
        self, system: str, prompt: str, charge: Charge, seconds: float
    ) -> Turn | Fault | OutOfBudget:
        """Make one request, and kill it after ``seconds``. A failed request is charged at its cost if the
        cost is known, and otherwise at its whole reservation."""
        # Cleanup can fail, because the command's processes may still write to this folder. Ignore the error,
        # so that the answer is not lost.
        with TemporaryDirectory(prefix="coda-claude-", ignore_cleanup_errors=True) as scratch:
            try:
                status, printed, words = self._run(Path(scratch), system, prompt, charge.max_tokens, seconds)
            # the command did not start, for example during an update or on a full disk
            except OSError as error:
                return _not_started(charge, str(error))
        if status is None:
            remedy = "resume the run to ask again, with a larger --time-limit if that was too short"
            return Fault(f"claude did not answer within {seconds:.6g} s", remedy, math.inf, unknown=True)
        if status in (become.NOT_STARTED, become.NOT_FOUND) and not printed:
            return _not_started(charge, " ".join(words.split())[-WORDS:])
        said = _parse(printed)
        told = _message(said.result, printed, words)
        usage, dollars = _usage(said.result), _dollars(said.result)
        fault = self._cut(said, charge.max_tokens) or _fault(status, said, told)
        if fault is None:
            author = f"{_model(said.result)} via claude-code"
            return Turn(said.text, usage, author, "end_turn", dollars=dollars)
        known = _is_known(said, told)
        if known:
            charge.settle(usage, dollars)
        return fault if isinstance(fault, OutOfBudget) else replace(fault, unknown=not known)

    def _cut(self, said: Said, most: int) -> Fault | OutOfBudget | None:
        """The error for an answer that reached its token limit; None for other answers. At the limit, the
        command itself asks the model to continue. Such an answer is not used, because the continuation may
        not agree with the beginning."""
        if "max_tokens" not in said.stops:
            return None
        if most < self._max_tokens:
            return OutOfBudget.within_an_answer(most)
        cut = f"claude's answer was cut at its limit of {most:,} tokens (thinking counts)"
        return Fault(cut, "resume the run with a larger --max-tokens")

    def _run(
        self, scratch: Path, system: str, prompt: str, most: int, seconds: float
    ) -> tuple[int | None, str, str]:
        """Run one request for at most ``most`` tokens. Return the command's exit status (None if ``seconds``
        ran out), its output and its error output. Afterwards, no process of the command is running."""
        prefix = scratch / "system"
        # as a file, because the text may be too long for an argument
        prefix.write_text(system, encoding="utf-8")
        (scratch / "empty").mkdir()
        kept = {name: value for name, value in os.environ.items() if name not in WITHHELD}

        def begin(**files: Any) -> subprocess.Popen[bytes]:
            return subprocesses.start(
                [*self._command, "--system-prompt-file", str(prefix)],
                cwd=scratch / "empty",
                # TMPDIR: a killed command leaves its socket and other files, which are deleted with scratch
                env=kept | SET | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(most), "TMPDIR": str(scratch)},
                **files,
            )

        return subprocesses.attend(begin, prompt, seconds)


def _not_started(charge: Charge, why: str) -> Fault:
    """The error for a request that was never made."""
    charge.settle(Usage())
    remedy = "check `claude --print hello` and free disk space, then resume the run"
    return Fault(f"claude could not be started: {why}", remedy, math.inf)


def _how_to_use(tools: Sequence[Tool]) -> str:
    """The end of the system prompt: the list of tools, and how to use them in a text answer."""
    offered = [tool for tool in tools if tool.name != SUBMIT]
    if not offered:
        return ""
    shown = "\n\n".join(f"{tool.description}\n\n{_example(tool)}" for tool in offered)
    return (
        "\n\n# Tools\n\nTo use tools, write a message with one or more of the following blocks. Write each"
        " block as shown here, and do not mix two blocks. The next message gives the tools' results. A"
        f" ```python block submits the kernel, as one of your attempts.\n\n{shown}\n"
    )


def _example(tool: Tool) -> str:
    """The code block that calls a tool. It has the tool's only argument, or one line per argument."""
    arguments = {name: schema["description"] for name, schema in tool.schema["properties"].items()}
    if len(arguments) == 1:
        body = next(iter(arguments.values()))
    else:
        body = "\n".join(f"{name}: {words}" for name, words in arguments.items())
    return f"```{tool.name}\n{body}\n```"


def _calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """The tool calls in an answer. A submitted source counts as a call only if the answer also has other
    calls."""
    named = {tool.name: tool for tool in tools if tool.name != SUBMIT}
    found = [(block["language"], block["content"]) for block in blocks(text)]
    calls = [(name, _input(named[name], body)) for name, body in found if name in named]
    submitted = [body for name, body in found if name in PYTHON]
    if calls and submitted and any(tool.name == SUBMIT for tool in tools):
        calls.append((SUBMIT, {"source": submitted[-1]}))
    return tuple(ToolCall(str(number), name, given) for number, (name, given) in enumerate(calls, 1))


def _input(tool: Tool, body: str) -> dict[str, str]:
    names = list(tool.schema["properties"])
    if len(names) == 1:
        return {names[0]: body if names[0] == "source" else body.strip()}
    lines = (line.partition(":") for line in body.splitlines() if line.strip())
    return {name.strip(): value.strip() for name, _, value in lines}


def _conversation(messages: Sequence[Message]) -> str:
    """The conversation as one prompt: the task, then each answer with the reply to it."""
    if len(messages) == 1:
        return messages[0].text
    titles = {"user": "What you are told", "assistant": "What you answered"}
    return "\n\n".join(f"<!-- {i}. {titles[m.role]} -->\n\n{m.text}" for i, m in enumerate(messages, 1))


def _parse(printed: str) -> Said:
    """Parse the command's output, which has one JSON object per line. Other lines are skipped."""
    lines = [found for line in printed.split("\n") if isinstance(found := _json(line), dict)]
    events = [line.get("event") for line in lines if line.get("type") == "stream_event"]
    texts = [
        _nested(event, "delta", "text") for event in events if _nested(event, "delta", "type") == "text_delta"
    ]
    stops = [
        _nested(event, "delta", "stop_reason")
        for event in events
        if _nested(event, "type") == "message_delta"
    ]
    return Said(
        result=next((line for line in reversed(lines) if line.get("type") == "result"), {}),
        text="".join(text for text in texts if isinstance(text, str)),
        begun=sum(_nested(event, "type") == "message_start" for event in events),
        stops=tuple(stop for stop in stops if isinstance(stop, str)),  # null if a response broke off
    )


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _nested(found: Any, *names: str) -> Any:
    """The value at the path ``names`` in nested objects; None if there is no such value."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _message(answer: Mapping[str, Any], printed: str, words: str) -> str:
    """The command's error message on one line, to be quoted."""
    told = str(answer.get("result") or answer.get("errors") or words or printed or "nothing")
    return " ".join(told.split())[-WORDS:]


def _logged_out(told: str) -> bool:
    return any(sign in told.lower() for sign in LOGGED_OUT)


def _is_known(said: Said, told: str) -> bool:
    """Whether the cost of a failed request is known. If a response broke off, the cost is unknown, because
    the summary omits or guesses that response's cost. If no response began, the cost is known in two cases:
    the cost is zero if the API refused the request, or never received it."""
    if said.begun:
        return len(said.stops) == said.begun and isinstance(said.result.get("usage"), dict)
    refused = isinstance(said.result.get("api_error_status"), int)
    return refused or _logged_out(told) or OUTDATED in told or any(code in told for code in UNREACHED)


def _fault(status: int, said: Said, told: str) -> Fault | None:
    """The fault of a command that gave no whole answer; None for a whole answer."""
    answer, code = said.result, said.result.get("api_error_status")
    if status != 0 or answer.get("is_error") or answer.get("subtype") != "success":
        if code in (None, 401, 403) and _logged_out(told):
            return Fault(f"claude is not logged in: {told}", "run `claude`, log in, and resume the run")
        if OUTDATED in told:
            return Fault(f"claude: {told}", "update Claude Code: `claude update`")
        if "refusal" in said.stops:
            remedy = "reword the spec's hints, or choose another --model, in a new run"
            return Fault(f"claude refused to answer: {told}", remedy)
        if "model_context_window_exceeded" in said.stops:
            return Fault(f"claude: {told}", "start a new run, or allow fewer rounds")
        if isinstance(code, int) and code < 500 and code not in PASSING:
            remedy = "choose another --model in a new run" if code == 404 else "see the API's message"
            return Fault(f"the API answered {code}: {told}", remedy)
        remedy = "see what `claude --print hello` says, then resume the run"
        return Fault(f"claude ended with status {status}: {told}", remedy, math.inf)
    if not said.text.strip():
        return Fault("claude gave an empty answer", "resume the run to ask again", EMPTY)
    return None


def _usage(answer: Mapping[str, Any]) -> Usage:
    return _token_counts(answer.get("usage"), COUNTS)


def _token_counts(found: Any, names: Sequence[str]) -> Usage:
    """Token counts under ``names``, in the order of Usage's fields; 0 for a missing or invalid count."""
    counts: Mapping[str, Any] = found if isinstance(found, dict) else {}
    return Usage(*(n if isinstance(n := counts.get(name), int) else 0 for name in names))


def _dollars(answer: Mapping[str, Any]) -> float | None:
    """The cost that the summary states. If the summary states no cost, compute it from each model's tokens
    and price; None if a model's price is unknown."""
    whole = answer.get("total_cost_usd")
    if isinstance(whole, int | float) and math.isfinite(whole) and whole >= 0:
        return float(whole)
    parts = [price(name, _token_counts(counts, MODEL_COUNTS)) for name, counts in _models(answer).items()]
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _model(answer: Mapping[str, Any]) -> str:
    """The model that wrote the most tokens; the command uses smaller models for side tasks."""
    models = _models(answer)
    return max(
        models, key=lambda name: _token_counts(models[name], MODEL_COUNTS).output_tokens, default="Claude"
    )


def _models(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The usage of each model, by the model's name."""
    models = answer.get("modelUsage")
    return models if isinstance(models, dict) else {}


def _objection(model: str | None) -> str:
    """Why a dollar limit cannot be enforced for a model; "" if the model's price is known."""
    if is_priced(model):
        return ""
    named = f"--model {model}" if model else "the command's default model"
    return (
        f"--budget-dollars cannot be enforced: no price is known for {named}, so nothing can be reserved"
        " before a request; give --model a full name, such as claude-opus-5-5, or use --budget-tokens"
    )


SPEC = ProviderSpec(
    name="claude-code",
    make=ClaudeCode,
    arguments=lambda header, run: {
        "model": header["model"],
        "max_tokens": header.get("max_tokens"),
        "time_limit": header["time_limit"],
    },
    options=("--model", "--max-tokens", "--time-limit"),
    package="coda-agent[author]",
    objection=_objection,
    check=lambda: finding.program(  # does not check the login, which only a request can show
        "claude command",
        "claude",
        "--provider claude-code cannot run",
        "install Claude Code and log in, or use --provider anthropic or handoff",
        "reinstall Claude Code",
    ),
)
