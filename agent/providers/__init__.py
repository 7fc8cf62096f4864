"""Providers get answers from an author, for example through a model's API. Each provider is one file, with a
class whose method ``next_turn`` returns the next answer.

``next_turn`` takes the stable prompt prefix and the conversation so far, and returns the next assistant turn.
Each file in this package that exports a `SPEC` is a provider; no other list of providers exists.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coda_agent.primitives.errors import Absent, Refused

if TYPE_CHECKING:
    from coda_agent.agent.providers.spec import Auto, ProviderSpec


OnText = Callable[[str], None]


@dataclass(frozen=True)
class Message:
    """One message of the conversation. The first message is the user's, and roles alternate.

    ``blocks``: the message in the format of the provider's API, if the message has more than text (tool
    calls, tool results or thinking).
    """

    role: Literal["user", "assistant"]
    text: str
    blocks: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Tool:
    """A tool that an author may use before answering. ``schema`` is the JSON Schema of the tool's input."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer."""

    id: str
    name: str
    input: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens as billed. `input_tokens` excludes cache reads and cache writes."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )

    @property
    def total(self) -> int:
        return self.given + self.output_tokens

    @property
    def given(self) -> int:
        """All input tokens: uncached tokens, cache reads and cache writes."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens


@dataclass(frozen=True)
class Turn:
    """One complete assistant turn, never truncated.

    `author` says who wrote the turn and through which provider, such as "claude-opus-5-5 via anthropic".
    `usage` covers only the request that succeeded; the meter records failed requests. `blocks`: as in
    Message. `dollars`: the turn's cost, if the provider reports it.
    """

    text: str
    usage: Usage
    author: str
    stop_reason: str
    calls: tuple[ToolCall, ...] = ()
    blocks: tuple[Mapping[str, Any], ...] = ()
    dollars: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The payload of a journal's "answer" event. The dollars are left out, because the budget's ledger
        adds them to the event."""
        told = {key: value for key, value in asdict(self).items() if key != "dollars"}
        return {key: value for key, value in told.items() if value or key not in ("calls", "blocks")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Turn:
        """The inverse of `to_json`. The data must be valid; `agent.storage.record` validates journals and
        recordings."""
        calls = tuple(ToolCall(**call) for call in data.get("calls", ()))
        usage, blocks = Usage(**data.get("usage", {})), tuple(data.get("blocks", ()))
        return cls(data["text"], usage, data["author"], data["stop_reason"], calls, blocks)


class Charge(Protocol):
    """The tokens and dollars reserved for one request. If the request succeeds, the turn's usage replaces the
    reservation. If the request fails, call ``settle`` with its cost. If that cost is unknown, do not call
    ``settle``; then the whole reservation counts as spent. ``dollars``: as in Turn."""

    @property
    def max_tokens(self) -> int:
        """The limit on the answer's tokens, which may be lower than the requested limit."""
        ...

    def settle(self, usage: Usage, dollars: float | None = None) -> None: ...


class Meter(Protocol):
    """Reserves the cost of each request. Failed and repeated requests have reservations of their own.
    ``model`` is "" if the model is unknown until the answer arrives; then only tokens are reserved.
    ``reserve`` raises OutOfBudget."""

    def reserve(self, model: str, input_tokens: int, max_tokens: int) -> Charge: ...


@dataclass(frozen=True)
class _Unpaid:
    max_tokens: int

    def settle(self, usage: Usage, dollars: float | None = None) -> None: ...


class _Free:
    def reserve(self, model: str, input_tokens: int, max_tokens: int) -> Charge:
        return _Unpaid(max_tokens)


FREE: Meter = _Free()


def _unheard(text: str) -> None:
    pass


@dataclass(frozen=True)
class Question:
    """A question to a provider. The answer is the turn that follows `messages`.

    `system` is the prompt's stable prefix, which is equal in every question of a run, so that the provider
    can cache the prefix. `tools` are the tools that the author may use, if the provider supports tools.
    `meter` accounts for the cost; a provider that cannot see token counts ignores the meter. `say` receives
    the answer's text as it arrives, to show the text to a person. `deadline`: the time, by `time.monotonic`,
    at which the provider raises ProviderError if it has no answer yet. `run`: the run's folder, which has the
    run's name.
    """

    system: str
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    meter: Meter = FREE
    say: OnText = _unheard
    deadline: float | None = None
    run: Path | None = None

    @property
    def number(self) -> int:
        """The number of the requested turn, from 1. The number appears in the names of a handoff's files, and
        selects a replay's answer."""
        return sum(message.role == "user" for message in self.messages)


class Provider(Protocol):
    """The interface through which the loop asks for turns."""

    def next_turn(self, question: Question) -> Turn:
        """The next turn. Raises ProviderError if there is no complete turn."""
        ...


class ProviderError(Absent):
    """The provider has no answer. `retryable`: the same request may succeed later."""

    def __init__(self, message: str, remedy: str, *, retryable: bool = False):
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy
        self.retryable = retryable


class OutOfBudget(Refused):
    """A limit of the budget is reached. The message names the limit and says how to continue."""

    @classmethod
    def within_an_answer(cls, tokens: int) -> OutOfBudget:
        """The error for an answer that was cut off at ``tokens``."""
        return cls(
            f"the answer was cut off at {tokens:,} tokens, all that the budget had left (thinking counts); "
            "resume the run with a larger --budget-tokens or --budget-dollars"
        )


@cache
def specs() -> Mapping[str, ProviderSpec]:
    """The descriptions (``SPEC``) of all providers by name, in alphabetical order."""
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    found: list[ProviderSpec] = [module.SPEC for module in modules if hasattr(module, "SPEC")]
    return {spec.name: spec for spec in sorted(found, key=lambda spec: spec.name)}


def provider_spec(name: str) -> ProviderSpec:
    """The description (``SPEC``) of the provider called `name`. Raises ProviderError for an unknown name."""
    if name not in specs():
        raise ProviderError(f"provider {name!r} is unknown", f"use one of {', '.join(specs())}")
    return specs()[name]


def automatic() -> list[tuple[str, Auto]]:
    """The providers that ``--provider auto`` chooses from, each with its rule, in order of preference."""
    found = [(spec.name, spec.auto) for spec in specs().values() if spec.auto]
    return sorted(found, key=lambda choice: choice[1].rank)


def used_by(option: str) -> list[str]:
    """The names of the providers that use an option such as "--model". The list is empty for an option that
    no provider lists, because all providers use such an option."""
    return [spec.name for spec in specs().values() if option in spec.options]


def make(name: str, **options: Any) -> Provider:
    """Create the provider called `name`. `options` are the keyword arguments of the provider's class.

    Raises ProviderError for an unknown name, a missing package, or options that the provider rejects.
    """
    spec = provider_spec(name)
    try:
        return spec.make(**options)
    except ModuleNotFoundError as error:
        if not spec.package or str(error.name).startswith("coda_agent"):
            raise
        raise ProviderError(
            f"provider {str(name)!r} needs the package {error.name!r}", f"pip install '{spec.package}'"
        ) from error
