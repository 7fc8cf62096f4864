"""Fenced blocks of code in a Markdown answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

PYTHON = ("python", "py")


def blocks(text: str, *languages: str) -> Iterator[re.Match[str]]:
    """Find the blocks of these languages, in order; without ``languages``, the blocks of any named language.
    Each match has the groups ``language`` and ``content``."""
    named = "|".join(languages) or r"\w+"
    pattern = rf"^```(?P<language>{named})[ \t]*\n(?P<content>.*?)^```[ \t]*$"
    return re.finditer(pattern, text, re.DOTALL | re.MULTILINE)


def last(text: str, *languages: str) -> str | None:
    """The content of the last block of these languages; None if there is no such block."""
    contents = [found["content"] for found in blocks(text, *languages)]
    return contents[-1] if contents else None
