"""A spec: the definition of an operator. ``verifier.spec.file`` reads a spec from its YAML file.

This module does not need torch; ``verifier.numerics.trial`` runs the reference.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import model_validator

from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.verifier.spec.fields import instead
from coda_agent.verifier.spec.parts import Case, Declared, ForwardSpec, OutputSpec, TensorSpec
from coda_agent.verifier.spec.rules import assigned, check


class BadReference(Exception):
    """The reference contradicts the spec's declarations. ``key`` names the text at fault: the reference, or
    another text such as the baseline. ``line`` is the line in that text."""

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
        """The names, shapes and dtypes that a kernel must match. Tracing reads nothing else of the spec."""
        return Signature(
            name=self.name,
            dims=tuple(self.dims),
            inputs={n: TensorType(t.shape, t.dtype) for n, t in self.inputs.items()},
            outputs={n: TensorType(t.shape, t.dtype) for n, t in self.outputs.items()},
            constants=dict(self.constants),
            static=self.static,
            updates={n: t.updates for n, t in self.outputs.items() if t.updates is not None},
            only=dict(self.only),
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the spec's content. Comments, layout, prose and the order of keys do not affect the
        hash."""
        meaning = self._meaning({"name", "constants", "cases", "accept"})
        meaning["tolerance"] = self.tolerance and self.tolerance.factor
        return _digest(meaning)

    @property
    def operator_hash(self) -> str:
        """SHA-256 of the operator and its baseline, without cases and threshold."""
        return _digest(self._meaning({"name", "constants"}))

    def _meaning(self, said: set[str]) -> dict[str, Any]:
        # with exclude_none, a new form of init changes no hash of an existing spec
        meaning = self.model_dump(mode="json", include=said, exclude_none=True)
        for kind in ("inputs", "outputs"):
            meaning[kind] = _hashed_tensors(getattr(self, kind))
        for text in ("reference", "baseline"):
            meaning[text] = ast.unparse(ast.parse(getattr(self, text) or ""))
        if self.forward:
            texts = {n: ast.unparse(ast.parse(getattr(self.forward, n))) for n in ("reference", "head")}
            meaning["forward"] = {"inputs": _hashed_tensors(self.forward.inputs), **texts}
        if self.only:
            meaning["only"] = {dim: sorted(sizes) for dim, sizes in self.only.items()}
        return meaning | {"dims": sorted(self.dims), "static": sorted(self.static)}

    @cached_property
    def before(self) -> Spec | None:
        """The forward of a backward, as a spec; None for any other spec. The outputs of the forward's spec
        are the backward's inputs that the forward computes."""
        forward = self.forward
        return self._part(forward, forward.reference, forward.head) if forward else None

    @cached_property
    def head(self) -> Spec | None:
        """The part of a backward that runs before its matmuls, as a spec; None if there is no such part."""
        forward = self.forward
        return self._part(forward, forward.head) if forward and forward.head else None

    def _part(self, forward: ForwardSpec, text: str, later: str = "") -> Spec:
        """The spec of a ``text`` that runs before this spec's reference. Its inputs are the tensors that
        neither this text nor the ``later`` one computes."""
        known, made = self.inputs | forward.inputs, assigned(text)
        inputs = {n: t for n, t in known.items() if n not in made | assigned(later)}
        outputs = {n: OutputSpec(shape=known[n].shape, dtype=known[n].dtype) for n in known if n in made}
        changes = {"inputs": inputs, "outputs": outputs, "reference": text}
        return self.model_copy(update=changes | {"forward": None, "baseline": None})

    @property
    def drawn(self) -> dict[str, TensorSpec]:
        """The inputs that are drawn, not computed. For a backward, these are the forward's inputs and the
        incoming gradients."""
        return (self.before or self).inputs

    def case(self, name: str) -> Case:
        """The case of this name. Raises KeyError with a suggestion."""
        found = [c for c in self.cases if c.name == name]
        if not found:
            raise KeyError(f"no case {name!r}; {instead(name, (c.name for c in self.cases))}")
        return found[0]


def _hashed_tensors(tensors: Mapping[str, TensorSpec | OutputSpec]) -> dict[str, Any]:
    """The tensors' declarations, as they enter a hash. Domains are left out, because a domain limits the
    tested inputs but does not change the function."""
    return {
        name: t.model_dump(mode="json", exclude={"shape", "domain"}, exclude_none=True)
        | {"shape": [str(d) for d in t.shape]}
        for name, t in tensors.items()
    }


def _digest(meaning: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
