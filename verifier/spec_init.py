"""How a spec's inputs are drawn: the forms that ``init`` takes in its YAML, and the model they share.

A value that says "arithmetic over dims" is a number or text such as ``D**-0.5``; it is evaluated at the
sizes of a case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from verifier.spec_rules import fault, instead, integer, positive

Sizes = Mapping[str, int]
IGNORED_SHARE = 0.1  # of the values of an input with ``ignored``


class Model(BaseModel):
    """Strict and frozen; an unknown key is a fault that says what was meant."""

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                raise fault(f"unknown key {key!r}; {instead(key, cls.model_fields)}", key)
        return data


class Normal(Model):
    """Zero-mean normal; ``std`` is a number or arithmetic over dims such as ``D**-0.5``."""

    std: float | str = 1.0

    def at(self, sizes: Sizes) -> float:
        """The standard deviation at these sizes; ValueError where the arithmetic has no positive value."""
        return positive(self.std, sizes)


class Init(Model):
    """How an input is drawn: exactly one form, and ``ignored`` only beside ``integers``.

    normal: {std: arithmetic over dims}. uniform: [low, high]. integers: [low, high], uniform over low to
    high - 1, each arithmetic over dims; about one value in ten is ``ignored`` instead, where that is given.
    count: S, arithmetic over dims: value (or row) i is i % S. geometric: [low, high]: value j of n along
    the last axis is low * (high / low)**(j / n).
    """

    normal: Normal | None = None
    uniform: tuple[float, float] | None = None
    integers: tuple[int | str, int | str] | None = None
    count: int | str | None = None
    geometric: tuple[float, float] | None = None
    ignored: int | None = None

    @property
    def form(self) -> str:
        """The name of the form it takes."""
        return next(iter(self._forms()))

    def range_at(self, sizes: Sizes) -> tuple[int, int]:
        """The least and the largest integer that ``integers`` or ``count`` draw at these sizes, ``ignored``
        apart; ValueError where the arithmetic gives no such range."""
        if self.count is not None:
            return 0, integer(self.count, sizes, least=1) - 1
        low, high = (integer(bound, sizes) for bound in self.integers or ("none", "none"))
        if low >= high:
            raise ValueError(f"{list(self.integers or ())} is {low} to {high}; low must be less than high")
        if self.ignored is not None and low <= self.ignored < high:
            raise ValueError(f"ignored {self.ignored} lies within {low} to {high - 1}; take one outside")
        return low, high - 1

    def _forms(self) -> list[str]:
        forms = ("normal", "uniform", "integers", "count", "geometric")
        return [form for form in forms if getattr(self, form) is not None]

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(self._forms()) != 1:
            raise fault(
                "init takes one form: {normal: {std: D**-0.5}}, {uniform: [0.5, 1.5]}, {integers: [0, V]}, "
                "{count: 8192} or {geometric: [1.0, 1.0e-4]}"
            )
        if self.ignored is not None and self.integers is None:
            raise fault("ignored stands beside integers: {integers: [0, V], ignored: -100}", "ignored")
        if self.uniform and not (all(map(math.isfinite, self.uniform)) and self.uniform[0] < self.uniform[1]):
            raise fault(f"uniform {list(self.uniform)} must be finite, low then high", "uniform")
        if self.geometric and not all(math.isfinite(x) and x > 0 for x in self.geometric):
            raise fault(f"geometric {list(self.geometric)} must be positive and finite", "geometric")
        return self
