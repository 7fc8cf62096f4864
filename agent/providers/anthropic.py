"""The provider that asks Claude through Anthropic's SDK, streaming.

What can go wrong on the way is decided here, once, for all faults alike: the SDK's own retries are off, since
they obey a Retry-After of an hour and stop where the stream begins. A fault of the line (no connection, 408,
409, 429, 5xx, an overload inside the stream, a cut or stalled or early-ended stream) is tried again a bounded
number of times; what trying again cannot mend (a wrong key or model, an answer cut at max_tokens, a refusal)
is raised at once with its remedy.
"""

from __future__ import annotations

import email.utils
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import anthropic
import httpx2
from anthropic.lib.streaming import MessageStream

from agent.providers import Call, Charge, Message, OnText, ProviderError, Question, Turn, Usage

DEFAULT_MODEL = "claude-opus-5-5"
DEFAULT_MAX_TOKENS = 32_000  # thinking counts too

CACHED = {"type": "ephemeral"}
ASIDE = 15.0  # seconds for what can be done without: counting, and describing the model
Effort = Literal["low", "medium", "high", "xhigh", "max"]

# what the SDK's parser raises on a stream that is no Messages stream: there is no common type
_MALFORMED = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class _Fault:
    """Why an attempt gave no message; `retry_after` is the server's wish in seconds, 0 where it has none."""

    message: str
    remedy: str
    retryable: bool
    retry_after: float = 0.0


class Anthropic:
    """Claude by the Messages API, with adaptive thinking where the model has it; prefix and conversation are
    cached.

    `model`: or CODA_AGENT_MODEL, or the default. `max_tokens` bounds one answer, thinking included. `effort`
    and `thinking=False` are for models that take them. `api_key`: or ANTHROPIC_API_KEY. `timeout`: seconds of
    silence that count as a stall. `retries`: how often a fault of the line is tried again, waiting `backoff`
    seconds, doubled each time, or what the server asks, but never more than `max_retry_after`.
    Raises ProviderError without a key.
    """

    name = "anthropic"

    def __init__(
        self,
        *,
        model: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        effort: Effort | None = None,
        thinking: bool = True,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 300.0,
        retries: int = 4,
        backoff: float = 1.0,
        max_retry_after: float = 60.0,
    ):
        self._key = _check_key(api_key or os.environ.get("ANTHROPIC_API_KEY") or "")
        self.model = model or os.environ.get("CODA_AGENT_MODEL") or DEFAULT_MODEL
        self._max_tokens = max_tokens
        self._optional: dict[str, Any] = {"thinking": {"type": "adaptive"}} if thinking else {}
        if effort:
            self._optional["output_config"] = {"effort": effort}
        self._learned = False
        self._retries = retries
        self._backoff = backoff
        self._max_retry_after = max_retry_after
        self._client = anthropic.Anthropic(
            api_key=self._key,
            base_url=base_url,
            timeout=anthropic.Timeout(timeout, connect=min(timeout, 10.0)),
            max_retries=0,
        )

    def next_turn(self, question: Question) -> Turn:
        """One whole answer. Raises ProviderError as the module says."""
        self._learn()
        request = self._request(question)
        read = self._count(request)
        attempts = 0
        while True:
            charge = question.meter.reserve(self.model, read, self._max_tokens)
            result = self._attempt(request, charge, question.say)
            attempts += 1
            if isinstance(result, Turn):
                return result
            if not result.retryable or attempts > self._retries:
                # raised here, with no SDK exception as its context: one may hold the key in a header
                raise self._error(result, attempts)
            wait = self._wait(attempts, result.retry_after)
            question.say(f"\n[{self._scrub(result.message)}; asking again in {wait:.0f} s]\n")
            time.sleep(wait)

    def _request(self, question: Question) -> dict[str, Any]:
        """Everything but the answer's length. Two marks for the cache: the prefix that all runs share, and
        the conversation, which the next request repeats."""
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
        """What the model can do, asked once: thinking that it lacks would be refused. One that the API does
        not describe is taken to have what today's models have."""
        if self._learned:
            return
        self._learned = True
        with suppress(anthropic.APIError, httpx2.RequestError, *_MALFORMED):
            model = self._client.models.retrieve(self.model, timeout=ASIDE)
            if model.capabilities and not model.capabilities.thinking.types.adaptive.supported:
                self._optional.pop("thinking", None)
            self._max_tokens = min(self._max_tokens, model.max_tokens or self._max_tokens)

    def _count(self, request: dict[str, Any]) -> int:
        """Tokens of a request, as the API counts them; where it does not, more than they can be."""
        try:
            return self._client.messages.count_tokens(**request, timeout=ASIDE).input_tokens
        except (anthropic.APIError, httpx2.RequestError, *_MALFORMED):
            return len(json.dumps(request)) // 2

    def _attempt(self, request: dict[str, Any], charge: Charge, say: OnText) -> Turn | _Fault:
        """One request. It is settled where its cost is known, else it stays charged."""
        stream: MessageStream[None] | None = None
        try:
            with self._client.messages.stream(max_tokens=charge.max_tokens, **request) as stream:
                if not _drain(stream, say):
                    return _broken("the response holds no message")
                result = self._judge(stream.get_final_message(), charge.max_tokens)
                if isinstance(result, _Fault) and not result.retryable:  # whole, and of no use
                    charge.settle(_usage(stream.get_final_message()))
                return result
        except anthropic.APIStatusError as error:
            if stream is None:  # refused before it began
                charge.settle(Usage())
            return _status_fault(error)
        except anthropic.APIConnectionError as error:  # before the stream; its own text names no cause
            if isinstance(error.__cause__, httpx2.ConnectError):  # it was never sent
                charge.settle(Usage())
            return _broken(f"no connection: {_name(error.__cause__ or error)}")
        except httpx2.RequestError as error:
            return _broken(f"the stream broke: {_name(error)}")
        except _MalformedStream as error:
            return _broken(f"the stream is malformed: {error}")

    def _judge(self, message: anthropic.types.Message, max_tokens: int) -> Turn | _Fault:
        """What to make of a stream that came to its end."""
        usage = _usage(message)
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = tuple(Call(b.id, b.name, dict(b.input)) for b in message.content if b.type == "tool_use")
        author = f"{message.model} via anthropic"
        match message.stop_reason:
            case "tool_use" if calls:
                return Turn(text, usage, author, message.stop_reason, calls, _kept(message))
            case "end_turn" | "stop_sequence" if text.strip():
                return Turn(text, usage, author, message.stop_reason)
            case "end_turn" | "stop_sequence":
                return _Fault("the answer holds no text", "resume the run to ask again", False)
            case None:
                return _broken("the stream ended in the middle of the answer")
            case "max_tokens":
                cut = f"the answer was cut off at {max_tokens} tokens, thinking included"
                remedy = "raise --max-tokens in a new run, or what is left of the budget"
                return _Fault(cut, remedy, False)
            case "refusal":
                details = message.stop_details
                reason = (details.explanation or details.category) if details else None
                refused = f"{message.model} refused to answer" + (f" ({reason})" if reason else "")
                remedy = "reword the spec's hints, or choose another --model, in a new run"
                return _Fault(refused, remedy, False)
            case "model_context_window_exceeded":
                full = f"the conversation is longer than {message.model} can read"
                return _Fault(full, "start a new run, or allow fewer rounds", False)
            case other:
                odd = f"the answer ended with stop_reason {other!r}, which no request here leads to"
                return _Fault(odd, "choose another --model in a new run", False)

    def _wait(self, attempts: int, retry_after: float) -> float:
        """Seconds before the next attempt; the jitter keeps parallel runs from returning in step."""
        if retry_after:
            return min(retry_after, self._max_retry_after)
        return min(self._backoff * 2 ** (attempts - 1), self._max_retry_after) * random.uniform(0.75, 1.0)

    def _error(self, fault: _Fault, attempts: int) -> ProviderError:
        message = self._scrub(fault.message) + (f" ({attempts} attempts)" if attempts > 1 else "")
        return ProviderError(message, fault.remedy, retryable=fault.retryable)

    def _scrub(self, text: str) -> str:
        return text.replace(self._key, "[key]")


def _check_key(key: str) -> str:
    key = key.strip()
    remedy = "set ANTHROPIC_API_KEY, or use --provider handoff, which needs none"
    if not key:
        raise ProviderError("provider 'anthropic' has no API key", remedy)
    if not all("!" <= character <= "~" for character in key):  # else the HTTP client quotes it in an error
        raise ProviderError("the API key holds characters that no key has", remedy)
    return key


def _blocks(message: Message) -> list[dict[str, Any]]:
    return [dict(block) for block in message.blocks] or [{"type": "text", "text": message.text}]


def _kept(message: anthropic.types.Message) -> tuple[dict[str, Any], ...]:
    """An answer's blocks as the next request has to repeat them: thinking that led to a call is signed."""
    return tuple(
        {field: getattr(block, field) for field in ("type", *_REPEATED[block.type])}
        for block in message.content
        if block.type in _REPEATED
    )


_REPEATED = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
}


class _MalformedStream(Exception):
    """The server's events make no message."""


def _drain(stream: MessageStream[None], say: OnText) -> bool:
    """Read the stream to its end; whether a message began in it."""
    started = False
    for event in _events(stream):
        started = started or event.type == "message_start"
        if event.type == "text":
            say(event.text)
    return started


def _events(stream: MessageStream[None]) -> Iterator[Any]:
    # a generator, so that only the SDK's errors are caught, not those of whoever reads the text
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


def _broken(message: str) -> _Fault:
    return _Fault(message, "check the network and resume the run", True)


def _status_fault(error: anthropic.APIStatusError) -> _Fault:
    """An error the server reported, before the stream or (with status 200) inside it."""
    status = error.status_code
    kind = error.type or "error"
    message = f"the API answered {status} {kind}: {error.api_message or error.message}"
    headers = error.response.headers
    passing = status in (408, 409, 429) or status >= 500 or (status == 200 and kind in _PASSING)
    if {"true": True, "false": False}.get(headers.get("x-should-retry", ""), passing):
        return _Fault(message, "resume the run later", True, _retry_after(headers))
    return _Fault(message, _REMEDIES.get(status, "see the API's message"), False)


#: errors inside a stream that pass with time
_PASSING = {"overloaded_error", "api_error", "rate_limit_error", "timeout_error"}

_REMEDIES = {
    400: "check --model and --max-tokens against what the model takes, in a new run",
    401: "check ANTHROPIC_API_KEY",
    403: "use a key that may use this model",
    404: "check --model or CODA_AGENT_MODEL",
    413: "allow fewer rounds, or shorten the tips",
}


def _retry_after(headers: httpx2.Headers) -> float:
    """Seconds the server asks to wait: Retry-After as a number or a date, or its variant in milliseconds."""
    for value, scale in ((headers.get("retry-after-ms"), 1e-3), (headers.get("retry-after"), 1.0)):
        try:
            return max(0.0, float(value or "") * scale)  # NaN is no wish: 0
        except ValueError:
            continue
    date = email.utils.parsedate_tz(headers.get("retry-after") or "")
    return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else 0.0


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
