"""Helpers that ask the anthropic provider questions. A scripted server on loopback answers, and a fake clock
replaces real waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fake_messages import FakeMessages, Reply

from coda_agent.agent.providers import (
    FREE,
    Message,
    Meter,
    Provider,
    ProviderError,
    Question,
    Turn,
    Usage,
    make,
)
from coda_agent.agent.providers.patience import Patience

KEY = "sk-ant-secret-0123456789"


ASK = [Message("user", "write a kernel")]


TALK = [*ASK, Message("assistant", "def k(): ..."), Message("user", "line 3 is wrong")]


USAGE = Usage(11, 7, 4000, 300)


CACHED = {"cache_control": {"type": "ephemeral"}}


@dataclass
class Coin:
    max_tokens: int
    settled: Usage | None = None

    def settle(self, usage: Usage, dollars: float | None = None) -> None:
        self.settled = usage


@dataclass
class Purse:
    """A meter that grants at most ``most`` tokens for a request, and records the requests."""

    most: int = 10**9
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    charges: list[Coin] = field(default_factory=list)

    def reserve(self, model: str, input_tokens: int, max_tokens: int) -> Coin:
        self.asked.append((model, input_tokens, max_tokens))
        self.charges.append(Coin(min(max_tokens, self.most)))
        return self.charges[-1]


@dataclass
class Night:
    """A fake clock, whose time passes only in ``sleep``. ``waits`` records the sleeps."""

    now: float = 1000.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def patience(self, **options: float) -> Patience:
        return Patience(clock=lambda: self.now, sleep=self.sleep, **options)


def claude(server: FakeMessages, **options: Any) -> Provider:
    defaults = {"api_key": KEY, "base_url": server.url, "timeout": 5.0, "patience": Night().patience()}
    return make("anthropic", **{**defaults, **options})


def ask(
    *script: Reply, meter: Meter = FREE, deadline: float | None = None, **options: Any
) -> tuple[Turn | ProviderError, FakeMessages, str]:
    """Ask a scripted server for one turn. Return the turn or the error, the server, and the streamed text."""
    streamed: list[str] = []
    result: Turn | ProviderError
    with FakeMessages(*script) as server:
        try:
            result = claude(server, **options).next_turn(
                Question("SYSTEM", ASK, meter=meter, say=streamed.append, deadline=deadline)
            )
        except ProviderError as error:
            result = error
    return result, server, "".join(streamed)


def refused(result: Turn | ProviderError) -> ProviderError:
    assert isinstance(result, ProviderError), result
    return result
