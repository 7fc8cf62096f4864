"""A spec: what an operator must compute. ``verifier.spec.file`` reads one from its YAML file.

Nothing here needs torch; the reference is tried by ``verifier.numerics.trial``.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import model_validator

from coda_agent.primitives.lang.dims import solve
from coda_agent.primitives.lang.ir import Signature, TensorType
from coda_agent.verifier.spec.fields import instead
from coda_agent.verifier.spec.parts import Case, Declared
from coda_agent.verifier.spec.rules import check, describe


class BadReference(Exception):
    """A reference (or baseline, by ``key``) that contradicts its spec's declarations; ``line`` counts in its
    text."""

    def __init__(self, message: str, line: int | None = None, key: str = "reference"):
        super().__init__(message)
        self.message, self.line, self.key = message, line, key


class Spec(Declared):
    """A consistent spec: an operator's signature, mathematics, cases and acceptance threshold."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check(self)
        return self

    def signature(self) -> Signature:
        """The names, shapes and dtypes that a kernel must match; a tracer sees nothing else of the spec."""
        return Signature(
            name=self.name,
            dims=tuple(self.dims),
            inputs={n: TensorType(t.shape, t.dtype) for n, t in self.inputs.items()},
            outputs={n: TensorType(t.shape, t.dtype) for n, t in self.outputs.items()},
            constants=dict(self.constants),
            static=self.static,
            updates={n: t.updates for n, t in self.outputs.items() if t.updates is not None},
        )

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides meaning; comments, layout, order of keys and prose do not count.
        """
        meaning = self._meaning({"name", "constants", "cases", "accept"})
        meaning["tolerance"] = self.tolerance and self.tolerance.factor
        return _digest(meaning)

    @property
    def operator_hash(self) -> str:
        """SHA-256 of the operator and its baseline alone, without cases and threshold."""
        return _digest(self._meaning({"name", "constants"}))

    def _meaning(self, said: set[str]) -> dict[str, Any]:
        # exclude_none: a form of init added later leaves the hashes of specs without it as they are
        meaning = self.model_dump(mode="json", include=said, exclude_none=True)
        for kind in ("inputs", "outputs"):
            meaning[kind] = {
                name: t.model_dump(mode="json", exclude={"shape", "domain"}, exclude_none=True)
                | {"shape": [str(d) for d in t.shape]}
                for name, t in getattr(self, kind).items()
            }
        for text in ("reference", "baseline"):
            meaning[text] = ast.unparse(ast.parse(getattr(self, text) or ""))
        return meaning | {"dims": sorted(self.dims), "static": sorted(self.static)}

    def case(self, name: str) -> Case:
        """The case of this name; KeyError lists the known ones."""
        found = [c for c in self.cases if c.name == name]
        if not found:
            raise KeyError(f"no case {name!r}; {instead(name, (c.name for c in self.cases))}")
        return found[0]

    def solve(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Dims from the inputs' shapes; ValueError naming the input and axis that do not agree."""
        for name, tensor in self.inputs.items():
            if len(shapes[name]) != len(tensor.shape):
                raise ValueError(f"input {name!r} has {len(shapes[name])} axes; it is {describe(tensor)}")
        return solve({name: t.shape for name, t in self.inputs.items()}, tuple(self.dims), shapes)


def _digest(meaning: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
