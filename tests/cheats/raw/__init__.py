"""Cheats that edit a lowered text, which is code, by theme."""

from __future__ import annotations

from cheats.raw.confined import ANSWERS, CONFINED
from cheats.raw.games import GAMES, STALE
from cheats.raw.language import BOMBS, ESCAPES, HOST

THEMES = {
    "host": HOST,
    "escapes": ESCAPES,
    "bombs": BOMBS,
    "confined": CONFINED,
    "answers": ANSWERS,
    "games": GAMES,
    "stale keys": STALE,
}
