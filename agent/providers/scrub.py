"""Remove an API key from all text that is stored or shown, because a server or proxy may quote the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scrub:
    """Remove `secret` from strings, and from all strings in JSON data."""

    secret: str

    def text(self, text: str) -> str:
        return text.replace(self.secret, "[key]")

    def data(self, data: Any) -> Any:
        """A copy of JSON data without the secret. Tuples become lists."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, Mapping):
            return {self.data(name): self.data(value) for name, value in data.items()}
        if isinstance(data, list | tuple):
            return [self.data(item) for item in data]
        return data


class ScrubbedStream:
    """A stream that removes the secret from text, and passes the text to a listener. If the end of a piece
    may be the beginning of the secret, that end is held back until the next piece."""

    def __init__(self, scrub: Scrub, say: Callable[[str], None]):
        self._scrub = scrub
        self._say = say
        self._held = ""

    def piece(self, text: str) -> None:
        """Pass on the text that cannot be part of the secret."""
        known, secret = self._scrub.text(self._held + text), self._scrub.secret
        ends = (known[at:] for at in range(max(0, len(known) - len(secret) + 1), len(known)))
        self._held = next((end for end in ends if secret.startswith(end)), "")
        if sure := known.removesuffix(self._held):
            self._say(sure)

    def end(self) -> None:
        """Pass on the text that is held back."""
        if self._held:
            self._say(self._held)
