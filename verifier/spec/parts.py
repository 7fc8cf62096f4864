"""The parts of a spec file: tensors, cases, tolerance and threshold.

Here, each part checks itself. ``verifier.spec.rules`` checks that the parts fit together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, SkipValidation, model_validator

from coda_agent.primitives.lang.dims import Dim
from coda_agent.verifier.spec.domain import Domain, bounds
from coda_agent.verifier.spec.fields import Model, fault
from coda_agent.verifier.spec.init import Init, Normal


def _dim(value: object) -> Dim:
    try:
        return value if isinstance(value, Dim) else Dim.parse(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise fault(f"size {error}") from None


Size = Annotated[Dim, BeforeValidator(_dim)]
Dtype = Literal["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int32", "int64"]


def _bench(value: object) -> object:
    if isinstance(value, bool) or value == "report":
        return value
    raise fault(f"bench is {value!r}; it must be true, false or report")


class TensorSpec(Model):
    """An input: symbolic shape ([] for a scalar), dtype, ``init`` (typical values) and ``domain`` (legal
    values). The value ``ignored`` of ``init`` is legal even outside the domain."""

    shape: tuple[Size, ...]
    dtype: Dtype
    init: Init = Init(normal=Normal())
    domain: Domain = "finite"

    def bounds(self, sizes: Mapping[str, int]) -> tuple[float, float]:
        """The least and the largest legal value at these sizes."""
        return bounds(self.domain, self.dtype, sizes)


class OutputSpec(Model):
    """An output. ``updates``: the input whose buffer the output overwrites."""

    shape: tuple[Size, ...]
    dtype: Dtype
    updates: str | None = None


class Case(Model):
    """Sizes at which a kernel is checked and, unless ``bench`` is False, measured.

    A case with ``bench="report"`` is measured and reported, but does not decide acceptance.
    """

    name: str
    sizes: dict[str, Annotated[int, SkipValidation]]  # checked by Spec, which knows the dims
    bench: Annotated[bool | Literal["report"], BeforeValidator(_bench)] = True

    @property
    def decides(self) -> bool:
        """Whether the case's speedup decides acceptance."""
        return self.bench is True

    @model_validator(mode="before")
    @classmethod
    def _sizes_beside_the_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "sizes" in data:
            return data
        own = {k: v for k, v in data.items() if k in cls.model_fields}
        return own | {"sizes": {str(k): v for k, v in data.items() if k not in own}}


class Accept(Model):
    """The threshold for acceptance. On every deciding case, the speedup's lower confidence bound must exceed
    the threshold."""

    speedup: float = 1.0

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not (math.isfinite(self.speedup) and self.speedup > 0):
            raise fault(f"speedup {self.speedup} must be positive and finite", "speedup")
        return self


class Tolerance(Model):
    """Wider limits of the error gate: ``factor`` multiplies the limits on ratios, and ``reason`` explains the
    factor to a reviewer."""

    factor: float
    reason: str

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not 1 <= self.factor <= 10:
            raise fault(f"tolerance factor {self.factor} must be between 1 and 10", "factor")
        if not self.reason.strip():
            raise fault("a tolerance needs a reason; say why in reason", "reason")
        return self


class ForwardSpec(Model):
    """The code that runs before a backward's own reference. ``reference`` is the forward. ``head`` is the
    backward's part before its matmuls. ``inputs`` are the inputs that only this code reads. An input to which
    this code assigns a value is computed, not drawn.

    An input ``d_y`` is the gradient of the forward's value ``y``, and an output ``d_x`` is the gradient of an
    input ``x``.
    """

    inputs: dict[str, TensorSpec] = {}
    reference: str
    head: str = ""


class Declared(Model):
    """All parts of a spec before its rules are checked."""

    name: str
    summary: str
    dims: dict[str, str]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, OutputSpec]
    constants: dict[str, float] = {}
    static: tuple[str, ...] = ()
    only: dict[str, tuple[int, ...]] = {}
    reference: str
    baseline: str | None = None
    forward: ForwardSpec | None = None
    cases: tuple[Case, ...]
    accept: Accept = Accept()
    tolerance: Tolerance | None = None
    hints: str = ""
