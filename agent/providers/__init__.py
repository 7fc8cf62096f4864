"""Providers of answers: one method, one file a provider.

A provider takes the stable prompt prefix and the conversation so far, and returns the next assistant turn.
Each file in this package that exports a `SPEC` is a provider; nothing else lists them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coda_agent.primitives.errors import Absent

if TYPE_CHECKING:
    from coda_agent.agent.providers.spec import Auto, ProviderSpec

__all__ = [
    "FREE",
    "Call",
    "Charge",
    "Message",
    "Meter",
    "OnText",
    "Provider",
    "ProviderError",
    "Question",
    "Tool",
    "Turn",
    "Usage",
    "automatic",
    "make",
    "named",
    "specs",
    "used_by",
]

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Message:
    """One message of the conversation; the first is the user's, and the roles alternate.

    ``blocks``: the message as the provider's API has it, where that is more than its text (tool calls, their
    results, thinking)."""

    role: Literal["user", "assistant"]
    text: str
    blocks: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Tool:
    """What an author may use before it answers; ``schema`` is its input's, as JSON Schema."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """An answer's use of a tool."""

    id: str
    name: str
    input: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """Tokens as they are billed; `input_tokens` leaves out what the cache gave or took."""

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
        """What was read: anew, from the cache and into it."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens


@dataclass(frozen=True)
class Turn:
    """One finished assistant turn; never a truncated one.

    `author` says who wrote it and how it came here, such as "claude-opus-5-5 via anthropic". `usage` is its
    own: requests that failed before are the meter's. `blocks`: as in Message. `dollars`: what it cost by the
    provider's account, where it gives one; the ledger keeps that.
    """

    text: str
    usage: Usage
    author: str
    stop_reason: str
    calls: tuple[Call, ...] = ()
    blocks: tuple[Mapping[str, Any], ...] = ()
    dollars: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The payload of a journal's "answer" event, but for what the ledger adds."""
        told = {key: value for key, value in asdict(self).items() if key != "dollars"}
        return {key: value for key, value in told.items() if value or key not in ("calls", "blocks")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Turn:
        """The inverse of `to_json`. Raises ValueError naming the field that is missing or of a wrong type."""
        for field in ("text", "author", "stop_reason"):
            if not isinstance(data.get(field), str):
                raise ValueError(f"an answer needs {field!r} as a string, not {data.get(field)!r}")
        usage = data.get("usage", {})
        try:
            spent = Usage(**usage)
        except TypeError:
            raise ValueError(f"an answer's 'usage' holds token counts by name, not {usage!r}") from None
        try:
            calls = tuple(Call(**call) for call in data.get("calls", ()))
        except TypeError:
            raise ValueError(f"an answer's 'calls' are id, name and input, not {data['calls']!r}") from None
        blocks = tuple(data.get("blocks", ()))
        return cls(data["text"], spent, data["author"], data["stop_reason"], calls, blocks)


class Charge(Protocol):
    """One request's reservation. The turn's usage settles that of the request which gave it; any other stays
    charged, for nobody knows what it cost, unless it is settled. ``dollars``: as in Turn."""

    @property
    def max_tokens(self) -> int:
        """What the answer may have: at most what was asked for."""
        ...

    def settle(self, usage: Usage, dollars: float | None = None) -> None: ...


class Meter(Protocol):
    """What each request is paid from, those that fail and are tried again included. ``model``: "" where only
    the answer tells it; then tokens alone are reserved."""

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
    """What a provider is asked: the turn that follows `messages`.

    `system` is the prompt's stable prefix, the same in every question of a run, so that it can be cached.
    `tools` are there to use, for a provider that can. `meter` pays; a provider whose author's tokens nobody
    sees leaves it alone. `say` hears text as it arrives, for a person to watch; only the turn counts.
    `deadline`: the moment of `time.monotonic` from which no answer is of use; a provider gives up then, by a
    ProviderError.
    """

    system: str
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    meter: Meter = FREE
    say: OnText = _unheard
    deadline: float | None = None

    @property
    def number(self) -> int:
        """Which turn of the conversation it asks for, from 1: names a handoff's files, a replay's answer."""
        return sum(message.role == "user" for message in self.messages)


class Provider(Protocol):
    """What the loop asks for turns."""

    name: str

    def next_turn(self, question: Question) -> Turn:
        """The turn that answers. Raises ProviderError when there is no whole one."""
        ...


class ProviderError(Absent):
    """No answer. `retryable`: asking the same again later may succeed."""

    def __init__(self, message: str, remedy: str, *, retryable: bool = False):
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy
        self.retryable = retryable


@cache
def specs() -> Mapping[str, ProviderSpec]:
    """The specs of all providers by name, in alphabetical order."""
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    found: list[ProviderSpec] = [module.SPEC for module in modules if hasattr(module, "SPEC")]
    return {spec.name: spec for spec in sorted(found, key=lambda spec: spec.name)}


def named(name: str) -> ProviderSpec:
    """The spec of the provider called `name`. Raises ProviderError where there is none."""
    if name not in specs():
        raise ProviderError(f"provider {name!r} is unknown", f"use one of {', '.join(specs())}")
    return specs()[name]


def automatic() -> list[tuple[str, Auto]]:
    """The providers that `auto` chooses among, by name, the first choice first."""
    found = [(spec.name, spec.auto) for spec in specs().values() if spec.auto]
    return sorted(found, key=lambda choice: choice[1].rank)


def used_by(option: str) -> list[str]:
    """The providers that use an option such as "--model"; none for an option that all use."""
    return [spec.name for spec in specs().values() if option in spec.options]


def make(name: str, **options: Any) -> Provider:
    """The provider called `name`; `options` are the keyword arguments of its class.

    Raises ProviderError for an unknown name, a package that is not installed, or what the provider refuses.
    """
    spec = named(name)
    try:
        return spec.make(**options)
    except ModuleNotFoundError as error:
        if not spec.package or str(error.name).startswith("coda_agent"):
            raise
        raise ProviderError(
            f"provider {str(name)!r} needs the package {error.name!r}", f"pip install '{spec.package}'"
        ) from error
