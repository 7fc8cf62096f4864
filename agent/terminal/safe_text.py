"""Make text from files safe to print. Every command prints through ``echo`` or ``Console``.

Journals, bundles, results, recordings and answers contain text that other people or models wrote. Control
characters in such text must not reach the terminal.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperGroup

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # colours in a compiler's messages
# Control characters, lone surrogates (not encodable in UTF-8), and characters that reorder or hide text.
_UNSEEN = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Remove terminal colours from ``text``, and replace each character that a terminal or page would not
    show by its escape ``\\u....``. Escaped JSON keeps its meaning, because JSON has the same escapes."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", _COLOURS.sub("", text))


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print ``text``, made ``visible``, to standard output or standard error."""
    typer.echo(visible(str(text)), err=err, nl=nl)


class Commands(TyperGroup):
    """A group of commands. It makes usage errors ``visible``, because an error may quote a file."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = visible(error.message)
            raise
