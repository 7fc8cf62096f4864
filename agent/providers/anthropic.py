"""Ask Claude through Anthropic's SDK, with streaming.

This module handles all faults itself. The SDK's own retries are off, because they would obey a Retry-After of
an hour, and would not cover a stream that has begun. After a transient fault, the request is repeated for the
time that ``Patience`` allows. Transient faults are: no connection; status 408, 409, 429 or 5xx; an overload
inside the stream; and a stream that breaks, stalls, never ends or ends early. There are only a few retries
after an empty answer, or after failed requests that may have cost something. Other faults (a wrong key or
model, an answer cut at max_tokens, a refusal) are raised at once with a remedy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coda_agent.agent.finding import Finding
from coda_agent.agent.providers import (
    Charge,
    Message,
    OnText,
    OutOfBudget,
    ProviderError,
    Question,
    ToolCall,
    Turn,
    Usage,
)
from coda_agent.agent.providers.patience import (
    EMPTY,
    Fault,
    Patience,
    TookTooLong,
    persist,
    retry_after,
    whole_within,
)
from coda_agent.agent.providers.scrub import Scrub, ScrubbedStream
from coda_agent.agent.providers.spec import Auto, ProviderSpec

if TYPE_CHECKING:
    import anthropic
    from anthropic.lib.streaming import MessageStream

KEY = "ANTHROPIC_API_KEY"
DEFAULT_MODEL = "claude-opus-5-5"
DEFAULT_MAX_TOKENS = 32_000  # includes thinking
ANSWER_TIME = 1800.0  # seconds for an answer of up to DEFAULT_MAX_TOKENS; longer answers get more time

CACHED = {"type": "ephemeral"}
ASIDE = 15.0  # time limit, in seconds, of requests that count tokens or describe the model

# The errors that the SDK's parser raises for a malformed stream. They have no common base class.
_MALFORMED = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)


class Anthropic:
    """Claude through the Messages API, with adaptive thinking if the model supports it. The prompt's prefix
    and the conversation are cached.

    `model` defaults to the environment's CODA_AGENT_MODEL, or else to DEFAULT_MODEL. `max_tokens` limits one
    answer, including thinking. `api_key` defaults to the environment's ANTHROPIC_API_KEY. `timeout`: a stream
    counts as stalled after this many seconds of silence. `answer_time`: the limit on the seconds of a whole
    answer. `patience`: how long to retry after transient faults.
    Raises ProviderError if there is no key.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 300.0,
        answer_time: float | None = None,
        patience: Patience | None = None,
    ):
        import anthropic

        key = _check_key(api_key or os.environ.get(KEY) or "")
        self._scrub = Scrub(key)
        self.model = model or os.environ.get("CODA_AGENT_MODEL") or DEFAULT_MODEL
        self._max_tokens = self._asked_tokens = max_tokens
        self._optional: dict[str, Any] = {"thinking": {"type": "adaptive"}}
        self._learned = False
        self._remarked = False
        self._timeout = timeout
        self._answer_time = answer_time or ANSWER_TIME * max(1.0, max_tokens / DEFAULT_MAX_TOKENS)
        self._patience = patience or Patience()
        self._client = anthropic.Anthropic(api_key=key, base_url=base_url, max_retries=0)

    def next_turn(self, question: Question) -> Turn:
        """Return one complete answer. Raises ProviderError after the faults that the module's docstring
        names, and at the question's deadline. Raises OutOfBudget if the budget has too little left."""
        self._learn()
        request = self._request(question)
        read = self._count(request)

        def attempt(seconds: float) -> Turn | Fault | OutOfBudget:
            charge = question.meter.reserve(self.model, read, self._max_tokens)
            result = self._attempt(request, charge, question.say, min(self._answer_time, seconds))
            if isinstance(result, Fault):
                return replace(result, message=self._scrub.text(result.message))
            return result

        turn = persist(attempt, question, self._patience)
        self._remark(turn, question)
        return turn

    def _request(self, question: Question) -> dict[str, Any]:
        """The request, without the limit on the answer's tokens. The request marks two prefixes for the
        cache: the system text, which all runs share, and the conversation, which the next request repeats."""
        conversation = [(m.role, _blocks(m)) for m in question.messages]
        conversation[-1][1][-1]["cache_control"] = CACHED
        request: dict[str, Any] = {
            "model": self.model,
            "system": [{"type": "text", "text": question.system, "cache_control": CACHED}],
            "messages": [{"role": role, "content": content} for role, content in conversation],
            **self._optional,
        }
        if question.tools:
            request["tools"] = [
                {"name": t.name, "description": t.description, "input_schema": dict(t.schema)}
                for t in question.tools
            ]
        return request

    def _learn(self) -> None:
        """Ask the API once for the model's capabilities, because the API refuses a request for thinking if
        the model cannot think. If the API does not describe the model, keep the settings."""
        if self._learned:
            return
        import anthropic
        import httpx2

        self._learned = True
        with suppress(anthropic.APIError, httpx2.RequestError, *_MALFORMED):
            model = self._client.models.retrieve(self.model, timeout=ASIDE)
            if model.capabilities and not model.capabilities.thinking.types.adaptive.supported:
                self._optional.pop("thinking", None)
            self._max_tokens = min(self._max_tokens, model.max_tokens or self._max_tokens)

    def _count(self, request: dict[str, Any]) -> int:
        """The number of a request's tokens, as counted by the API. If the API fails to count, the result is
        an upper bound."""
        import anthropic
        import httpx2

        try:
            return self._client.messages.count_tokens(**request, timeout=ASIDE).input_tokens
        except (anthropic.APIError, httpx2.RequestError, *_MALFORMED):
            return len(json.dumps(request)) // 2

    def _attempt(
        self, request: dict[str, Any], charge: Charge, say: OnText, seconds: float
    ) -> Turn | Fault | OutOfBudget:
        """Make one request, limited to ``seconds``. A failed request is charged at its cost if the cost is
        known, and otherwise at its whole reservation."""
        import anthropic
        import httpx2

        silence = min(self._timeout, seconds)
        timeout = anthropic.Timeout(silence, connect=min(silence, 10.0))
        sent = self._client.messages.stream(max_tokens=charge.max_tokens, timeout=timeout, **request)
        stream: MessageStream[None] | None = None
        try:
            with sent as stream, whole_within(stream.response, seconds):
                if not _drain(stream, ScrubbedStream(self._scrub, say)):
                    return _broken("the response holds no message")
                message = stream.get_final_message()
                result = self._judge(message, charge.max_tokens)
                # the answer is complete but unusable
                if not isinstance(result, Turn) and message.stop_reason:
                    charge.settle(_usage(message))
                return result
        except anthropic.APIStatusError as error:
            if stream is None:  # the API refused the request before the stream began
                charge.settle(Usage())
            return replace(_status_fault(error), unknown=stream is not None)
        # raised before the stream begins; the error's own message does not state the cause
        except anthropic.APIConnectionError as error:
            sent_none = isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout)
            if sent_none:
                charge.settle(Usage())
            found = _broken(f"no connection: {_name(error.__cause__ or error)}")
            return replace(found, unknown=not sent_none)
        except httpx2.RequestError as error:
            return _broken(f"the stream broke: {_name(error)}")
        except TookTooLong as error:
            return _broken(str(error))
        except _MalformedStream as error:
            return _broken(f"the stream is malformed: {error}")

    def _judge(self, message: anthropic.types.Message, max_tokens: int) -> Turn | Fault | OutOfBudget:
        """Convert a message to a turn. If the message is not a whole answer, return a fault. If the answer
        was cut at its token limit, and the budget had lowered this limit, return OutOfBudget."""
        usage = _usage(message)
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = tuple(ToolCall(b.id, b.name, dict(b.input)) for b in message.content if b.type == "tool_use")
        author = f"{message.model} via anthropic"
        match message.stop_reason:
            case "tool_use" if calls:
                return self._scrubbed(
                    Turn(text, usage, author, message.stop_reason, calls, self._kept(message))
                )
            case "end_turn" | "stop_sequence" if text.strip():
                return self._scrubbed(Turn(text, usage, author, message.stop_reason))
            case "end_turn" | "stop_sequence":
                return Fault("the answer holds no text", "resume the run to ask again", EMPTY)
            case None:
                return _broken("the stream ended in the middle of the answer")
            case "max_tokens" if max_tokens < self._max_tokens:
                return OutOfBudget.within_an_answer(max_tokens)
            case "max_tokens":
                cut = f"the answer was cut off at {max_tokens} tokens (thinking counts)"
                if self._max_tokens < self._asked_tokens:
                    return Fault(f"{cut}, its model's limit", "choose another --model in a new run")
                return Fault(cut, "resume the run with a larger --max-tokens")
            case "refusal":
                details = message.stop_details
                reason = (details.explanation or details.category) if details else None
                refused = f"{message.model} refused to answer" + (f" ({reason})" if reason else "")
                remedy = "reword the spec's hints, or choose another --model, in a new run"
                return Fault(refused, remedy)
            case "model_context_window_exceeded":
                full = f"the conversation is longer than {message.model} can read"
                return Fault(full, _TOO_LONG)
            case other:
                odd = f"the answer ended with the unexpected stop_reason {other!r}"
                return Fault(odd, "choose another --model in a new run")

    def _scrubbed(self, turn: Turn) -> Turn:
        return Turn.from_json(self._scrub.data(turn.to_json()))

    def _kept(self, message: anthropic.types.Message) -> tuple[dict[str, Any], ...]:
        """An answer's blocks, as the next request must repeat them. The API key cannot be scrubbed from
        signed thinking, which must not change. So a block of thinking that contains the key is left out."""
        return tuple(
            {field: getattr(block, field) for field in ("type", *_REPEATED[block.type])}
            for block in message.content
            if block.type in _REPEATED
            if not (block.type == "text" and _blank(block.text))
            if not (block.type == "thinking" and self._scrub.secret in block.thinking)
        )

    def _remark(self, turn: Turn, question: Question) -> None:
        """Tell the user once if caching has no effect, because the API reports no error in this case. The
        first answer is not judged, because it only fills the cache."""
        cached = turn.usage.cache_read_tokens or turn.usage.cache_write_tokens
        if question.number > 1 and not cached and not self._remarked:
            self._remarked = True
            question.say(f"\n[nothing was cached: the prompt may be too short for {self.model}'s cache]\n")


def _check_key(key: str) -> str:
    key = key.strip()
    remedy = "set ANTHROPIC_API_KEY, or use --provider handoff, which needs none"
    if not key:
        raise ProviderError("provider 'anthropic' has no API key", remedy)
    # the HTTP client's own error would quote the key
    if not all("!" <= character <= "~" for character in key):
        raise ProviderError("the API key contains invalid characters", remedy)
    return key


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks = [dict(b) for b in message.blocks if not (b["type"] == "text" and _blank(b["text"]))]
    return blocks or [{"type": "text", "text": message.text}]


def _blank(text: str) -> bool:
    """Whether a text is blank. The API refuses blank text in a request, although the API's own answers may
    contain blank text before a tool call."""
    return not text.strip()


_REPEATED = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
}


class _MalformedStream(Exception):
    """The server's events do not form a message."""


def _drain(stream: MessageStream[None], heard: ScrubbedStream) -> bool:
    """Read the stream to its end; return whether a message began."""
    started = False
    for event in _events(stream):
        started = started or event.type == "message_start"
        if event.type == "text":
            heard.piece(event.text)
    heard.end()
    return started


def _events(stream: MessageStream[None]) -> Iterator[Any]:
    # a generator, so that this ``except`` catches no errors of the loop that uses the events
    try:
        yield from stream
    except _MALFORMED as error:
        raise _MalformedStream(_name(error)) from error


def _usage(message: anthropic.types.Message) -> Usage:
    usage = message.usage
    return Usage(
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_input_tokens or 0,
        usage.cache_creation_input_tokens or 0,
    )


def _broken(message: str) -> Fault:
    return Fault(message, "check the network and resume the run", math.inf, unknown=True)


def _status_fault(error: anthropic.APIStatusError) -> Fault:
    """The fault for an error that the server reported before or inside the stream. An error inside the stream
    has status 200."""
    status = error.status_code
    kind = error.type or "error"
    message = f"the API answered {status} {kind}: {error.api_message or error.message}"
    headers = error.response.headers
    passing = status in (408, 409, 429) or status >= 500 or (status == 200 and kind in _PASSING)
    if {"true": True, "false": False}.get(headers.get("x-should-retry", ""), passing):
        return Fault(message, "resume the run later", math.inf, retry_after(headers))
    remedy = _REMEDIES.get(status, "see the API's message")
    if status == 400:
        remedy = next((_TOLD[said] for said in _TOLD if said in message.casefold()), remedy)
    return Fault(message, remedy)


# errors inside a stream that are transient
_PASSING = {"overloaded_error", "api_error", "rate_limit_error", "timeout_error"}

_TOO_LONG = "start a new run, or allow fewer rounds"
_BILLING = "check the account's billing and limits, then resume the run"
# The API also answers 400 to these, with words in place of a type.
_TOLD = {
    "credit balance": _BILLING,
    "usage limit": _BILLING,
    "prompt is too long": _TOO_LONG,
}
_REMEDIES = {
    400: "check --model and --max-tokens, in a new run",
    401: "check ANTHROPIC_API_KEY",
    402: _BILLING,
    403: "use a key that may use this model",
    404: "check --model or CODA_AGENT_MODEL",
    413: "allow fewer rounds, or shorten the tips",
}


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _check() -> Finding:
    """Check that a key is set, without showing the key."""
    if os.environ.get(KEY, "").strip():
        return Finding("anthropic key", "ok", f"{KEY} is set")
    remedy = f"set {KEY}, or use --provider handoff, which needs no key"
    return Finding("anthropic key", "missing", f"{KEY} is not set", remedy)


SPEC = ProviderSpec(
    name="anthropic",
    make=Anthropic,
    arguments=lambda header, run: {"model": header["model"], "max_tokens": header.get("max_tokens")},
    options=("--model", "--max-tokens"),
    package="coda-agent[author]",
    auto=Auto(1, "anthropic with a key", lambda run: "" if os.environ.get(KEY) else f"no {KEY}"),
    check=_check,
)
