"""Text from files made safe to print: every command prints through ``echo`` or ``Console``.

Journals, bundles, results, recordings and answers come from elsewhere. What they hold is shown, never obeyed.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["Commands", "echo", "visible"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # a compiler's
# Controls, lone surrogates (no UTF-8 has them), and what would reorder or hide the text around it.
_UNSEEN = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """``text`` without a terminal's colours, with ``\\u....`` for each character that a terminal or a page
    would not show as it is; JSON stays JSON of the same values."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", _COLOURS.sub("", text))


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print ``text``, made ``visible``, to standard output or error."""
    typer.echo(visible(str(text)), err=err, nl=nl)


class Commands(TyperGroup):
    """Commands whose usage errors, which may quote a file, are made ``visible`` before click prints them."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = visible(error.message)
            raise
