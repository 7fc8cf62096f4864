"""Blocks of code in an answer, which is Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

PYTHON = ("python", "py")


def blocks(text: str, *languages: str) -> Iterator[re.Match[str]]:
    """Those of the languages, in order, or all that name one; of each ``language`` and ``content``."""
    named = "|".join(languages) or r"\w+"
    pattern = rf"^```(?P<language>{named})[ \t]*\n(?P<content>.*?)^```[ \t]*$"
    return re.finditer(pattern, text, re.DOTALL | re.MULTILINE)


def last(text: str, *languages: str) -> str | None:
    """The content of the last one of these languages; None where there is none."""
    contents = [found["content"] for found in blocks(text, *languages)]
    return contents[-1] if contents else None
