"""The provider that asks Claude through Anthropic's SDK, streaming.

What can go wrong on the way is decided here, once, for all faults alike: the SDK's own retries are off, since
they obey a Retry-After of an hour and stop where the stream begins. A fault of the line (no connection, 408,
409, 429, 5xx, an overload inside the stream, a cut or stalled or early-ended stream) is tried again a bounded
number of times; what trying again cannot mend (a wrong key or model, an answer cut at max_tokens, a refusal)
is raised at once with its remedy.
"""

from __future__ import annotations

import email.utils
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import anthropic
import httpx2
from anthropic.lib.streaming import MessageStream
from anthropic.types import MessageParam

from agent.providers import Message, OnText, ProviderError, Turn, Usage

DEFAULT_MODEL = "claude-opus-5-5"
DEFAULT_MAX_TOKENS = 32_000  # thinking counts too

Effort = Literal["low", "medium", "high", "xhigh", "max"]

# what the SDK's parser raises on a stream that is no Messages stream: there is no common type
_MALFORMED = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class _Fault:
    """Why an attempt gave no message; `retry_after` is the server's wish in seconds, 0 where it has none."""

    message: str
    remedy: str
    retryable: bool
    usage: Usage = Usage()
    retry_after: float = 0.0


class Anthropic:
    """Claude by the Messages API, with adaptive thinking and the system prompt cached.

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
        self._retries = retries
        self._backoff = backoff
        self._max_retry_after = max_retry_after
        self._client = anthropic.Anthropic(
            api_key=self._key,
            base_url=base_url,
            timeout=anthropic.Timeout(timeout, connect=min(timeout, 10.0)),
            max_retries=0,
        )

    def next_turn(self, system: str, messages: Sequence[Message], *, on_text: OnText | None = None) -> Turn:
        """One whole answer, its usage summed over the attempts. Raises ProviderError as the module says."""
        say = on_text or (lambda text: None)
        spent, attempts = Usage(), 0
        while True:
            result = self._attempt(system, messages, say)
            spent, attempts = spent + result.usage, attempts + 1
            if isinstance(result, Turn):
                return replace(result, usage=spent)
            if not result.retryable or attempts > self._retries:
                # raised here, with no SDK exception as its context: one may hold the key in a header
                raise self._error(result, attempts, spent)
            wait = self._wait(attempts, result.retry_after)
            say(f"\n[{self._scrub(result.message)}; asking again in {wait:.0f} s]\n")
            time.sleep(wait)

    def _attempt(self, system: str, messages: Sequence[Message], say: OnText) -> Turn | _Fault:
        stream: MessageStream[None] | None = None
        try:
            with self._client.messages.stream(
                model=self.model,
                max_tokens=self._max_tokens,
                system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
                messages=[cast(MessageParam, {"role": m.role, "content": m.text}) for m in messages],
                **self._optional,
            ) as stream:
                started = _drain(stream, say)
                return self._judge(stream) if started else _broken("the response holds no message")
        except anthropic.APIStatusError as error:
            return _status_fault(error, _spent(stream))
        except anthropic.APIConnectionError as error:  # before the stream; its own text names no cause
            return _broken(f"no connection: {_name(error.__cause__ or error)}")
        except httpx2.RequestError as error:
            return _broken(f"the stream broke: {_name(error)}", _spent(stream))
        except _MalformedStream as error:
            return _broken(f"the stream is malformed: {error}", _spent(stream))

    def _judge(self, stream: MessageStream[None]) -> Turn | _Fault:
        """What to make of a stream that came to its end."""
        message, usage = stream.get_final_message(), _spent(stream)
        text = "".join(block.text for block in message.content if block.type == "text")
        match message.stop_reason:
            case "end_turn" | "stop_sequence" if text.strip():
                return Turn(text, usage, f"{message.model} via anthropic", message.stop_reason)
            case "end_turn" | "stop_sequence":
                return _Fault("the answer holds no text", "resume the run to ask again", False, usage)
            case None:
                return _broken("the stream ended in the middle of the answer", usage)
            case "max_tokens":
                cut = f"the answer was cut off at {self._max_tokens} tokens, thinking included"
                return _Fault(cut, "raise --max-tokens in a new run", False, usage)
            case "refusal":
                details = message.stop_details
                reason = (details.explanation or details.category) if details else None
                refused = f"{message.model} refused to answer" + (f" ({reason})" if reason else "")
                return _Fault(
                    refused, "reword the spec's hints, or choose another --model, in a new run", False, usage
                )
            case "model_context_window_exceeded":
                full = f"the conversation is longer than {message.model} can read"
                return _Fault(full, "start a new run, or allow fewer rounds", False, usage)
            case other:
                odd = f"the answer ended with stop_reason {other!r}, which no request here leads to"
                return _Fault(odd, "choose another --model in a new run", False, usage)

    def _wait(self, attempts: int, retry_after: float) -> float:
        """Seconds before the next attempt; the jitter keeps parallel runs from returning in step."""
        if retry_after:
            return min(retry_after, self._max_retry_after)
        return min(self._backoff * 2 ** (attempts - 1), self._max_retry_after) * random.uniform(0.75, 1.0)

    def _error(self, fault: _Fault, attempts: int, spent: Usage) -> ProviderError:
        message = self._scrub(fault.message) + (f" ({attempts} attempts)" if attempts > 1 else "")
        return ProviderError(message, fault.remedy, retryable=fault.retryable, usage=spent)

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


def _spent(stream: MessageStream[None] | None) -> Usage:
    """What the server has counted so far; zero where no message began."""
    if stream is None:
        return Usage()
    try:
        usage = stream.current_message_snapshot.usage
    except (AssertionError, AttributeError):  # the SDK asserts that a message began
        return Usage()
    return Usage(
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_input_tokens or 0,
        usage.cache_creation_input_tokens or 0,
    )


def _broken(message: str, usage: Usage | None = None) -> _Fault:
    return _Fault(message, "check the network and resume the run", True, usage or Usage())


def _status_fault(error: anthropic.APIStatusError, usage: Usage) -> _Fault:
    """An error the server reported, before the stream or (with status 200) inside it."""
    status = error.status_code
    kind = error.type or "error"
    message = f"the API answered {status} {kind}: {error.api_message or error.message}"
    headers = error.response.headers
    passing = status in (408, 409, 429) or status >= 500 or (status == 200 and kind in _PASSING)
    if {"true": True, "false": False}.get(headers.get("x-should-retry", ""), passing):
        return _Fault(message, "resume the run later", True, usage, _retry_after(headers))
    return _Fault(message, _REMEDIES.get(status, "see the API's message"), False, usage)


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
