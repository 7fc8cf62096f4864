"""The types of values and tensors, and the signature that a kernel must match.

This module needs only the standard library, because the jail (the process that traces a kernel file) imports
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from coda_agent.primitives.lang.dims import NAME as DIM_NAME
from coda_agent.primitives.lang.dims import Dim, named_by_callers
from coda_agent.primitives.lang.errors import ProgramError

DTYPES = ("bf16", "fp16", "fp32")
# fp8 dtypes of output tiles; a value beyond the dtype's range is stored as the nearest end of the range
EIGHTS = ("fp8_e4m3", "fp8_e5m2")
OPERANDS = ("fp8_e4m3",)  # fp8 dtypes of inputs; only gemm reads such an input
INDICES = ("int32", "int64")  # dtypes of vectors of targets and positions
# dtypes of inputs, by rank
READABLE = {0: ("fp32",), 1: DTYPES + INDICES, 2: DTYPES + OPERANDS, 3: DTYPES[:2]}
WRITABLE = {1: DTYPES, 2: DTYPES + EIGHTS, 3: DTYPES}  # dtypes of outputs, by rank
VALUE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # names in specs
MAX_NAMES = 64  # limit on the number of dims, inputs, outputs, ... of a signature


Kind = Literal[
    "tile", "range", "operand", "experts", "vector", "row", "column", "scalar", "head", "spread", "repeated"
]  # fmt: skip


class Type(NamedTuple):
    """The type of a node. The kinds are: ``tile``, a matrix [M, N]; ``range``, some columns of a tile;
    ``operand``, a transpose x.mT for gemm; ``experts``, one matrix per expert [E, N, K]; ``vector``, [M];
    ``row``, a vector that per_row spreads over a tile; ``column``, a vector that per_column spreads over a
    tile; ``scalar``, a number. Three more kinds are for tiles whose columns form heads of ``period`` columns
    each: ``head``, a number per row and head [M, heads], also called a statistic; ``spread``, a statistic
    that per_head spreads over the heads' columns; ``repeated``, a vector [period] or tile [M, period] that
    per_head repeats for each head."""

    kind: Kind
    shape: tuple[Dim, ...] = ()
    period: Dim | None = None

    def __str__(self) -> str:
        size = ", ".join(map(str, self.shape))
        spread = {
            "row": f"per_row of [{size}]",
            "column": f"per_column of [{size}]",
            "scalar": "a scalar",
            "head": f"head statistic [{size}]",
            "range": f"a column_range [{size}]",
            "spread": f"per_head of a statistic [{size}]",
            "repeated": f"per_head of [{size}]",
        }
        return spread.get(self.kind, f"{self.kind} [{size}]")


def sole(name: str, kind: Kind, types: tuple[Type, ...]) -> Type:
    """The type of an operation's only argument. Raises ProgramError unless there is one, of this kind."""
    if [t.kind for t in types] != [kind]:
        given = ", ".join(map(str, types)) or "nothing"
        raise ProgramError("arguments", f"{name} takes one {kind}, not {given}")
    return types[0]


class TensorType(NamedTuple):
    """The symbolic shape (rank 0 to 3) and dtype of a kernel's input or output.

    Inputs and outputs may be bf16, fp16 or fp32. A matrix that only gemm reads may also be fp8_e4m3. An
    output tile may also be fp8_e4m3 or fp8_e5m2. A vector of targets or positions is int32 or int64. A scalar
    is fp32. A tensor of rank 3 has one matrix for each expert. An input of rank 3 is bf16 or fp16, and only
    gemm reads such an input.
    """

    shape: tuple[Dim, ...]
    dtype: str

    def type(self) -> Type:
        """The type of the tensor inside a kernel."""
        return Type(("scalar", "vector", "tile", "experts")[len(self.shape)], self.shape)

    def to_json(self) -> dict[str, Any]:
        return {"shape": [str(d) for d in self.shape], "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorType:
        if len(data["shape"]) > 3:
            raise ValueError(f"a tensor of rank {len(data['shape'])}")
        return cls(tuple(Dim.parse(d) for d in data["shape"]), str(data["dtype"]))


class Signature(NamedTuple):
    """The names, shapes and dtypes that a kernel must match. Tracing reads nothing else of a spec.

    ``static``: dims that are fixed when the kernel is compiled. ``updates``: for each output that overwrites
    an input's buffer, the name of that input. ``only``: for some static dims, the only sizes that they may
    have.
    """

    name: str
    dims: tuple[str, ...]
    inputs: dict[str, TensorType]
    outputs: dict[str, TensorType]
    constants: Mapping[str, float] = {}  # a shared default is safe, because nothing writes to it
    static: tuple[str, ...] = ()
    updates: Mapping[str, str] = {}
    only: Mapping[str, tuple[int, ...]] = {}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dims": list(self.dims),
            "inputs": {k: t.to_json() for k, t in self.inputs.items()},
            "outputs": {k: t.to_json() for k, t in self.outputs.items()},
            "constants": {k: v.hex() for k, v in self.constants.items()},
            "static": list(self.static),
            "updates": dict(self.updates),
            # absent if empty, so that the hashes of programs without it do not change
            **({"only": {dim: list(sizes) for dim, sizes in self.only.items()}} if self.only else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        """Rebuild a signature and check it. Raises ProgramError if no spec could have such a signature."""
        try:
            for field in ("dims", "inputs", "outputs", "constants", "static", "updates"):
                if len(data[field]) > MAX_NAMES:
                    raise ValueError(f"{len(data[field])} {field}, of at most {MAX_NAMES}")
            signature = cls(
                str(data["name"]),
                tuple(str(d) for d in data["dims"]),
                {str(k): TensorType.from_json(t) for k, t in data["inputs"].items()},
                {str(k): TensorType.from_json(t) for k, t in data["outputs"].items()},
                {str(k): float.fromhex(v) for k, v in data["constants"].items()},
                tuple(str(d) for d in data["static"]),
                {str(k): str(v) for k, v in data["updates"].items()},
                {str(k): tuple(map(int, sizes)) for k, sizes in data.get("only", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProgramError("signature", f"the program's signature is malformed: {error}") from None
        signature._check()
        return signature

    def _check(self) -> None:
        tensors = [*self.inputs.items(), *self.outputs.items()]
        names = [n for n, _ in tensors] + list(self.constants) + [self.name]
        unknown = {n for _, t in tensors for d in t.shape for n in d.names} - set(self.dims)
        bad = (
            next((f"name {n!r}" for n in names if not VALUE_NAME.fullmatch(n)), None)
            or next((f"name {n!r}, used twice" for n in names[:-1] if names[:-1].count(n) > 1), None)
            or next((f"dim {n!r}" for n in self.dims if not DIM_NAME.fullmatch(n)), None)
            or next((f"dim {n!r}" for n in sorted(unknown)), None)
            or next((f"dtype or rank of {n!r}" for n, t in self.inputs.items() if not _readable(t)), None)
            or next((f"dtype or rank of {n!r}" for n, t in self.outputs.items() if not _writable(t)), None)
            or next((f"static dim {n!r}" for n in self.static if n not in self.dims), None)
            or next((f"sizes of {n!r}" for n in self.only if n not in self.static), None)
            or next((f"update of {n!r}" for n in self.updates if not self._updatable(n)), None)
            or next((f"constant {n!r}" for n, v in self.constants.items() if not math.isfinite(v)), None)
        )
        if bad:
            raise ProgramError("signature", f"the program's signature has an unusable {bad}")

    @property
    def shapes(self) -> dict[str, tuple[Dim, ...]]:
        """The inputs' shapes by name. The shapes of tensors determine the sizes of dims."""
        return {name: tensor.shape for name, tensor in self.inputs.items()}

    @property
    def named(self) -> tuple[str, ...]:
        """The static dims that no input's shape determines. Callers must pass the sizes of these dims by
        name."""
        return named_by_callers(self.shapes, self.dims, self.static)

    def _updatable(self, output: str) -> bool:
        target = self.updates[output]
        alone = list(self.updates.values()).count(target) == 1
        return alone and self.inputs.get(target, ()) == self.outputs.get(output)


def _readable(tensor: TensorType) -> bool:
    return tensor.dtype in READABLE.get(len(tensor.shape), ())


def _writable(tensor: TensorType) -> bool:
    return tensor.dtype in WRITABLE.get(len(tensor.shape), ())


def check_output_names(given: Mapping[str, Any], signature: Signature) -> None:
    """Raise ProgramError for missing or extra outputs."""
    missing = sorted(signature.outputs.keys() - given.keys())
    extra = sorted(given.keys() - signature.outputs.keys())
    if missing or extra:
        said = [
            f"missing {', '.join(missing)}" if missing else "",
            f"extra {', '.join(extra)}" if extra else "",
        ]
        raise ProgramError(
            "outputs",
            f"the kernel must return exactly {', '.join(signature.outputs)}: "
            f"{'; '.join(s for s in said if s)}",
        )


def check_output_type(name: str, got: Type, signature: Signature, line: int | None = None) -> None:
    """Raise ProgramError if a value of type ``got`` cannot be the output ``name``."""
    expected = signature.outputs[name]
    if got.kind not in ("tile", "range", "experts", "vector", "head") or got.shape != expected.shape:
        want = expected.type().kind
        part = got.kind == want == "tile" and got.shape[0] == expected.shape[0]
        raise ProgramError(
            "output_shape",
            f"output {name!r} is {got}, but the spec says {want} [{', '.join(map(str, expected.shape))}]"
            f"{'; some of its columns are column_range(t, first, width)' if part else ''}",
            line,
        )
    if got.kind == "head" and expected.dtype in EIGHTS:
        raise ProgramError("output_dtype", f"output {name!r} is {got}: say bf16, fp16 or fp32, not fp8", line)
