"""Specs: what an operator must compute, in one YAML file an operator.

``load`` either gives a consistent ``Spec`` or raises ``SpecError``, whose text names the file, the line,
the value and what would do. Nothing here needs torch; the reference is tried by ``verifier.spec_trial``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, SkipValidation, ValidationError, model_validator
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import FoldedScalarString, LiteralScalarString

from primitives.dims import Dim, solve
from primitives.ir import Signature, TensorType
from verifier.spec_init import Init, Model, Normal
from verifier.spec_rules import check, describe, fault, instead

Place = tuple[str | int, ...]
Kind = TypeVar("Kind", bound=Model)


class SpecError(Exception):
    """A spec that cannot be used; ``str`` of it reads ``file:line: what is wrong and what would do``."""

    def __init__(self, path: str | Path, line: int | None, message: str):
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")
        self.path, self.line, self.message = Path(path), line, message


class BadReference(Exception):
    """A reference (or baseline: ``key``) that is not what its spec declares; ``line`` counts in its text."""

    def __init__(self, message: str, line: int | None = None, key: str = "reference"):
        super().__init__(message)
        self.message, self.line, self.key = message, line, key


def _dim(value: object) -> Dim:
    try:
        return value if isinstance(value, Dim) else Dim.parse(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise fault(f"size {error}") from None


Size = Annotated[Dim, BeforeValidator(_dim)]
Dtype = Literal["bf16", "fp16", "fp32", "fp8_e4m3", "int32", "int64"]


def _bench(value: object) -> object:
    if isinstance(value, bool) or value == "report":
        return value
    raise fault(f"bench is {value!r}; it must be true, false or report")


class TensorSpec(Model):
    """An input: symbolic shape ([] for a scalar), dtype, distribution."""

    shape: tuple[Size, ...]
    dtype: Dtype
    init: Init = Init(normal=Normal())


class OutputSpec(Model):
    """An output; with ``updates`` it is written over that input's buffer."""

    shape: tuple[Size, ...]
    dtype: Dtype
    updates: str | None = None


class Case(Model):
    """Sizes at which a kernel is checked and, unless ``bench`` is False, measured.

    ``bench="report"``: measured and reported, but it does not decide acceptance.
    """

    name: str
    sizes: dict[str, Annotated[int, SkipValidation]]  # checked by Spec, which knows the dims
    bench: Annotated[bool | Literal["report"], BeforeValidator(_bench)] = True

    @property
    def decides(self) -> bool:
        """Whether its speedup must exceed what the spec demands."""
        return self.bench is True

    @model_validator(mode="before")
    @classmethod
    def _sizes_beside_the_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "sizes" in data:
            return data
        own = {k: v for k, v in data.items() if k in cls.model_fields}
        return own | {"sizes": {str(k): v for k, v in data.items() if k not in own}}


class Accept(Model):
    """What the lower confidence bound of the speedup must exceed on every case that decides."""

    speedup: float = 1.0

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not (math.isfinite(self.speedup) and self.speedup > 0):
            raise fault(f"speedup {self.speedup} must be positive and finite", "speedup")
        return self


class Tolerance(Model):
    """Widens the error gate's ratios by ``factor``, for a ``reason`` a reviewer can judge."""

    factor: float
    reason: str

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not 1 <= self.factor <= 10:
            raise fault(f"tolerance factor {self.factor} must be between 1 and 10", "factor")
        if not self.reason.strip():
            raise fault("a tolerance needs its reason", "reason")
        return self


class Spec(Model):
    """An operator: signature, mathematics, cases and what counts as good enough."""

    name: str
    summary: str
    dims: dict[str, str]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, OutputSpec]
    constants: dict[str, float] = {}
    static: tuple[str, ...] = ()
    reference: str
    baseline: str | None = None
    cases: tuple[Case, ...]
    accept: Accept = Accept()
    tolerance: Tolerance | None = None
    hints: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check(self)
        return self

    def signature(self) -> Signature:
        """What a kernel must match, and all that a tracer sees of this spec."""
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
        """SHA-256 of what decides meaning: not of comments, layout, order of keys or prose."""
        # exclude_none: a form of init added later leaves the hashes of specs without it as they are
        said = {"name", "constants", "cases", "accept"}
        meaning = self.model_dump(mode="json", include=said, exclude_none=True)
        for kind in ("inputs", "outputs"):
            meaning[kind] = {
                name: t.model_dump(mode="json", exclude={"shape"}, exclude_none=True)
                | {"shape": [str(d) for d in t.shape]}
                for name, t in getattr(self, kind).items()
            }
        for text in ("reference", "baseline"):
            meaning[text] = ast.unparse(ast.parse(getattr(self, text) or ""))
        meaning |= {"dims": sorted(self.dims), "static": sorted(self.static)}
        meaning["tolerance"] = self.tolerance and self.tolerance.factor
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()

    def case(self, name: str) -> Case:
        """The case of that name; KeyError naming those there are."""
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


def load(path: str | Path, check: bool = True) -> Spec:
    """Read and check a spec; ``check=False`` leaves out running its reference, and so needs no torch.

    Raises SpecError for whatever is wrong with the file.
    """

    def tried(spec: Spec) -> None:
        if check:
            from verifier.spec_trial import check_reference  # torch: only when a reference is to be run

            check_reference(spec)

    return read(path, Spec, tried)


def read(path: str | Path, kind: type[Kind], check: Callable[[Kind], None]) -> Kind:
    """A YAML file of a model's, once ``check`` raises no BadReference. Raises SpecError."""
    path = Path(path)
    tree = _read(path, kind)
    try:
        made = kind.model_validate(plain(tree))
        check(made)
    except ValidationError as error:
        found = [(_line(tree, place), message) for place, message in map(_explain, error.errors())]
        raise SpecError(path, *min(found)) from None
    except BadReference as error:
        raise SpecError(path, _line(tree, (error.key, error.line or 0)), error.message) from None
    return made


def _read(path: Path, kind: type[Model]) -> CommentedMap:
    try:
        tree = YAML().load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(path, None, f"there is no such file; {_nearby(path)}") from None
    except OSError as error:
        raise SpecError(path, None, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SpecError(path, None, f"is no UTF-8 text: byte {error.start} is {byte:#x}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context).partition(" with value")[0]
        if "duplicate key" in problem:
            problem += "; keep one of the two"
        raise SpecError(path, mark.line + 1 if mark else 1, f"this is no YAML mapping: {problem}") from None
    except YAMLError as error:
        raise SpecError(path, 1, f"this is no YAML mapping: {str(error).splitlines()[0]}") from None
    except (ValueError, RecursionError) as error:  # a date of no calendar, !!int abc, nested too deep
        raise SpecError(path, 1, f"this is no YAML that can be read: {error}") from None
    if not isinstance(tree, CommentedMap):
        raise SpecError(path, 1, f"a spec is a mapping with keys {', '.join(kind.model_fields)}")
    return tree


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("specs")
    names = sorted(p.stem for p in folder.glob("*.yaml"))
    close = get_close_matches(path.stem, names, n=1)
    if close:
        return f"did you mean {folder / close[0]}.yaml? {folder} has {', '.join(names)}"
    return f"{folder} has {', '.join(names) or 'no specs'}"


def plain(node: Any) -> Any:
    """The same tree in Python's own types, which strict validation takes; lists become tuples."""
    match node:
        case dict():
            return {plain(k): plain(v) for k, v in node.items()}
        case list():
            return tuple(plain(v) for v in node)
        case bool() | None:
            return node
    for kind in (str, int, float):
        if isinstance(node, kind):
            return kind(node)
    return node


def _line(tree: Any, place: Place) -> int:
    """The line of the deepest part of ``place`` that the file has; in a text, the line counted from 1."""
    line, node = 1, tree
    for part in place:
        if isinstance(node, CommentedMap) and part in node:
            line, node = node.lc.key(part)[0] + 1, node[part]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line, node = node.lc.item(part)[0] + 1, node[part]
        elif isinstance(node, str) and isinstance(part, int) and part > 0:
            block = isinstance(node, LiteralScalarString | FoldedScalarString)
            line += part if block else part - 1
    return line


_NEEDED = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "string_type": "text (in quotes, where YAML reads something else)",
    "float_type": "a number",
    "int_type": "an integer",
    "too_long": "a list of two numbers",
}


def _explain(error: ErrorDetails) -> tuple[Place, str]:
    """Where one validation error is and what to say of it."""
    place, kind = tuple(error["loc"]), error["type"]
    if kind == "spec":
        return place + error["ctx"]["place"], error["ctx"]["message"]
    keys = [part for part in place if isinstance(part, str) and part not in ("[key]", "float", "int", "str")]
    key = keys[-1] if keys else "spec"
    if kind == "missing":
        return place, f"{'.'.join(map(str, place))} is missing"
    value = repr(error["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    if kind == "literal_error":
        choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return place, f"{key} {value} is unknown; use one of {choices}"
    needed = _NEEDED.get(kind)
    return place, f"{key} is {value}; it must be {needed}" if needed else f"{key} is {value}: {error['msg']}"
