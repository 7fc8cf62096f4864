"""The base class of a spec's parts: a strict model whose errors have a position and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

# the errors of ast.parse; the last two mean that the text is nested too deeply
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def unparsable(error: BaseException) -> str:
    """Why a text does not parse, from an error in ``UNPARSABLE``."""
    return str(getattr(error, "msg", error)) if str(error) else "it is nested too deep"


def fault(message: str, *place: str | int) -> PydanticCustomError:
    """An error with a message for the spec's author. ``place``: the keys that lead from the validated model
    to the fault."""
    return PydanticCustomError("spec", "{message}", {"message": message, "place": place})


def instead(word: object, known: Iterable[str]) -> str:
    """A suggestion to replace an unknown word."""
    names = sorted(known)
    close = get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names) or '(none declared)'}"


class Model(BaseModel):
    """A strict, frozen model. An unknown key raises a fault that suggests a known key."""

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                raise fault(f"unknown key {key!r}; {instead(key, cls.model_fields)}", key)
        return data
