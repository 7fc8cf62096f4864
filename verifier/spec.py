"""Specs: what an operator must compute, in one YAML file an operator.

``load`` either gives a consistent ``Spec`` or raises ``SpecError``, whose text names the file, the line,
the value and what would do. Nothing here needs torch; the reference is run by ``verifier.reference``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import keyword
import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SkipValidation,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import FoldedScalarString, LiteralScalarString

from primitives.dims import NAME as DIM_NAME
from primitives.dims import Dim
from primitives.ir import VALUE_NAME, Signature, TensorType

Place = tuple[str | int, ...]


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


def _fault(message: str, *place: str | int) -> PydanticCustomError:
    """An error at ``place`` (keys from the model being validated), with a message for the spec's author."""
    return PydanticCustomError("spec", "{message}", {"message": message, "place": place})


def _instead(word: object, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names) or '(none declared)'}"


def _dim(value: object) -> Dim:
    try:
        return value if isinstance(value, Dim) else Dim.parse(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise _fault(f"size {error}") from None


Size = Annotated[Dim, BeforeValidator(_dim)]
Dtype = Literal["bf16", "fp16", "fp32"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                raise _fault(f"unknown key {key!r}; {_instead(key, cls.model_fields)}", key)
        return data


class Normal(_Model):
    """Zero-mean normal; ``std`` is a number or arithmetic over dims such as ``D**-0.5``."""

    std: float | str = 1.0

    def at(self, sizes: Mapping[str, int]) -> float:
        """The standard deviation at these sizes; ValueError where the arithmetic has no positive value."""
        return _positive(self.std, sizes)


class Init(_Model):
    """How an input is drawn: exactly one of ``normal`` and ``uniform: [low, high]``."""

    normal: Normal | None = None
    uniform: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.normal is None) == (self.uniform is None):
            raise _fault("init takes one form: {normal: {std: D**-0.5}} or {uniform: [0.5, 1.5]}")
        if self.uniform and not (all(map(math.isfinite, self.uniform)) and self.uniform[0] < self.uniform[1]):
            raise _fault(f"uniform {list(self.uniform)} must be finite, low then high", "uniform")
        return self


class TensorSpec(_Model):
    """An input: symbolic shape, dtype, distribution."""

    shape: tuple[Size, ...]
    dtype: Dtype
    init: Init = Init(normal=Normal())


class OutputSpec(_Model):
    """An output; with ``updates`` it is written over that input's buffer."""

    shape: tuple[Size, ...]
    dtype: Dtype
    updates: str | None = None


class Case(_Model):
    """Sizes at which a kernel is checked and, where ``bench``, measured."""

    name: str
    sizes: dict[str, Annotated[int, SkipValidation]]  # checked by Spec, which knows the dims
    bench: bool = True

    @model_validator(mode="before")
    @classmethod
    def _sizes_beside_the_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "sizes" in data:
            return data
        own = {k: v for k, v in data.items() if k in cls.model_fields}
        return own | {"sizes": {str(k): v for k, v in data.items() if k not in own}}


class Accept(_Model):
    """What the lower confidence bound of the speedup must exceed on every measured case."""

    speedup: float = 1.0

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not (math.isfinite(self.speedup) and self.speedup > 0):
            raise _fault(f"speedup {self.speedup} must be positive and finite", "speedup")
        return self


class Tolerance(_Model):
    """Widens the error gate's ratios by ``factor``, for a ``reason`` a reviewer can judge."""

    factor: float
    reason: str

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not 1 <= self.factor <= 10:
            raise _fault(f"tolerance factor {self.factor} must be between 1 and 10", "factor")
        if not self.reason.strip():
            raise _fault("a tolerance needs its reason", "reason")
        return self


class Spec(_Model):
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
        _check_names(self)
        _check_shapes(self)
        _solving_order(self)
        _check_updates(self)
        _check_cases(self)
        _check_text(self, "reference")
        if self.baseline is not None:
            _check_text(self, "baseline")
        return self

    def signature(self) -> Signature:
        """What a kernel must match, and all that a tracer sees of this spec."""
        return Signature(
            name=self.name,
            dims=tuple(self.dims),
            inputs={n: TensorType(t.shape, t.dtype) for n, t in self.inputs.items()},
            outputs={n: TensorType(t.shape, t.dtype) for n, t in self.outputs.items()},
            constants=dict(self.constants),
        )

    @property
    def hash(self) -> str:
        """SHA-256 of what decides meaning: not of comments, layout, order of keys or prose."""
        meaning = self.model_dump(include={"name", "static", "constants", "cases", "accept"}, mode="json")
        for kind in ("inputs", "outputs"):
            meaning[kind] = {
                name: t.model_dump(exclude={"shape"}) | {"shape": [str(d) for d in t.shape]}
                for name, t in getattr(self, kind).items()
            }
        for text in ("reference", "baseline"):
            meaning[text] = ast.unparse(ast.parse(getattr(self, text) or ""))
        meaning["dims"] = sorted(self.dims)
        meaning["tolerance"] = self.tolerance and self.tolerance.factor
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()

    def case(self, name: str) -> Case:
        """The case of that name; KeyError naming those there are."""
        found = [c for c in self.cases if c.name == name]
        if not found:
            raise KeyError(f"no case {name!r}; {_instead(name, (c.name for c in self.cases))}")
        return found[0]

    def solve(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Dims from the inputs' shapes; ValueError naming the input and axis that do not agree."""
        for name, tensor in self.inputs.items():
            if len(shapes[name]) != len(tensor.shape):
                raise ValueError(f"input {name!r} has {len(shapes[name])} axes; it is {_show(tensor)}")
        sizes: dict[str, int] = {}
        for dim, name, axis in _solving_order(self):
            formula, size = self.inputs[name].shape[axis], shapes[name][axis]
            rest = formula(sizes | {dim: 0})
            step = formula(sizes | {dim: 1}) - rest
            if step == 0 or (size - rest) % step or (size - rest) // step <= 0:
                raise ValueError(f"input {name!r}, axis {axis}: no positive {dim} makes {formula} = {size}")
            sizes[dim] = (size - rest) // step
        for name, tensor in self.inputs.items():
            shape, expected = tuple(shapes[name]), tuple(d(sizes) for d in tensor.shape)
            if shape != expected:
                raise ValueError(
                    f"input {name!r} has shape {shape}; {_show(tensor)} is {expected} at {sizes}"
                )
        return sizes


def load(path: str | Path, check: bool = True) -> Spec:
    """Read and check a spec; ``check=False`` leaves out running its reference, and so needs no torch.

    Raises SpecError for whatever is wrong with the file.
    """
    path = Path(path)
    tree = _read(path)
    try:
        spec = Spec.model_validate(_plain(tree))
        if check:
            from verifier.reference import check_reference  # torch: only when a reference is to be run

            check_reference(spec)
    except ValidationError as error:
        found = [(_line(tree, place), message) for place, message in map(_explain, error.errors())]
        raise SpecError(path, *min(found)) from None
    except BadReference as error:
        raise SpecError(path, _line(tree, (error.key, error.line or 0)), error.message) from None
    return spec


def _read(path: Path) -> CommentedMap:
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
    if not isinstance(tree, CommentedMap):
        raise SpecError(path, 1, f"a spec is a mapping with keys {', '.join(Spec.model_fields)}")
    return tree


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("specs")
    names = sorted(p.stem for p in folder.glob("*.yaml"))
    close = get_close_matches(path.stem, names, n=1)
    if close:
        return f"did you mean {folder / close[0]}.yaml? {folder} has {', '.join(names)}"
    return f"{folder} has {', '.join(names) or 'no specs'}"


def _plain(node: Any) -> Any:
    """The same tree in Python's own types, which strict validation takes; lists become tuples."""
    match node:
        case dict():
            return {_plain(k): _plain(v) for k, v in node.items()}
        case list():
            return tuple(_plain(v) for v in node)
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
    "bool_type": "true or false",
    "too_long": "a list of two numbers",
}


def _explain(error: ErrorDetails) -> tuple[Place, str]:
    """Where one validation error is and what to say of it."""
    place, kind = tuple(error["loc"]), error["type"]
    if kind == "spec":
        return place + error["ctx"]["place"], error["ctx"]["message"]
    keys = [part for part in place if isinstance(part, str) and part not in ("[key]", "float", "str")]
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


def _check_names(spec: Spec) -> None:
    for dim in spec.dims:
        if not DIM_NAME.fullmatch(dim) or keyword.iskeyword(dim) or dim in Case.model_fields:
            raise _fault(f"dim {dim!r} is no name for a size; use a word such as M or d_model", "dims", dim)
    for dim in spec.static:
        if dim not in spec.dims:
            raise _fault(f"static dim {dim!r} is not declared; {_instead(dim, spec.dims)}", "static")
    _check_name(spec.name, "name")
    taken = {dim: "a dim" for dim in spec.dims}
    for kind in ("inputs", "outputs", "constants"):
        for name in getattr(spec, kind):
            _check_name(name, kind, name)
            if name in taken:
                raise _fault(f"{name!r} is already {taken[name]}; give it a name of its own", kind, name)
            taken[name] = f"among the {kind}"
    for name, value in spec.constants.items():
        if not math.isfinite(value):
            raise _fault(f"constant {name} is {value}; it must be finite", "constants", name)


def _check_name(name: str, *place: str | int) -> None:
    if not VALUE_NAME.fullmatch(name) or keyword.iskeyword(name):
        rule = "use a-z, 0-9 and _, a letter first, at most 32, no Python keyword"
        raise _fault(f"{name!r} is no name for a value; {rule}", *place)


def _check_shapes(spec: Spec) -> None:
    for kind in ("inputs", "outputs"):
        tensors: dict[str, TensorSpec | OutputSpec] = getattr(spec, kind)
        if not tensors:
            raise _fault(f"{kind} is empty; declare at least one", kind)
        for name, tensor in tensors.items():
            for axis, dim in enumerate(tensor.shape):
                for unknown in sorted(dim.names - set(spec.dims)):
                    message = f"dim {unknown!r} is not declared; {_instead(unknown, spec.dims)}"
                    raise _fault(message, kind, name, "shape", axis)


def _solving_order(spec: Spec) -> list[tuple[str, str, int]]:
    """(dim, input, axis): in this order each dim follows from one axis and the dims before it."""
    axes = [(d, name, axis) for name, t in spec.inputs.items() for axis, d in enumerate(t.shape)]
    order: list[tuple[str, str, int]] = []
    known: set[str] = set()
    while len(known) < len(spec.dims):
        step = next(((u, n, a) for d, n, a in axes if (u := _only_unknown(d, known))), None)
        if step is None:
            dim = min(set(spec.dims) - known)
            message = f"dim {dim!r} follows from no input's shape; give some input an axis of {dim}"
            raise _fault(message, "dims", dim)
        order.append(step)
        known.add(step[0])
    return order


def _only_unknown(formula: Dim, known: set[str]) -> str | None:
    """The one name still unknown, where the formula is linear in it."""
    unknown = formula.names - known
    linear = all(m.count(name) <= 1 for m, _ in formula.terms for name in unknown)
    return next(iter(unknown)) if len(unknown) == 1 and linear else None


def _check_updates(spec: Spec) -> None:
    seen: dict[str, str] = {}
    for name, output in spec.outputs.items():
        target = output.updates
        if target is None:
            continue
        place = ("outputs", name, "updates")
        if target not in spec.inputs:
            raise _fault(f"updates {target!r} is no input; {_instead(target, spec.inputs)}", *place)
        into = spec.inputs[target]
        if (into.shape, into.dtype) != (output.shape, output.dtype):
            message = f"{name} is {_show(output)} but updates {target}, {_show(into)}; make them alike"
            raise _fault(message, *place)
        if target in seen:
            raise _fault(f"input {target!r} is already updated by {seen[target]!r}", *place)
        seen[target] = name


def _show(tensor: TensorSpec | OutputSpec) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _check_cases(spec: Spec) -> None:
    if not spec.cases:
        raise _fault("cases is empty; give at least one", "cases")
    names: set[str] = set()
    for index, case in enumerate(spec.cases):
        _check_sizes(spec, case, index)
        if case.name in names:
            raise _fault(f"case {case.name!r} is there twice; give each its own name", "cases", index, "name")
        names.add(case.name)
        _check_values(spec, case)


def _check_sizes(spec: Spec, case: Case, index: int) -> None:
    for dim, size in case.sizes.items():
        if dim not in spec.dims:
            instead = _instead(dim, [*spec.dims, "name", "bench"])
            raise _fault(f"case {case.name!r}: unknown key {dim!r}; {instead}", "cases", index, dim)
        if type(size) is not int or size <= 0:
            message = f"case {case.name!r}: {dim} is {size!r}; it must be a positive integer"
            raise _fault(message, "cases", index, dim)
    missing = [dim for dim in spec.dims if dim not in case.sizes]
    if missing:
        raise _fault(f"case {case.name!r} gives no size for {', '.join(missing)}", "cases", index)


def _check_values(spec: Spec, case: Case) -> None:
    for kind in ("inputs", "outputs"):
        for name, tensor in getattr(spec, kind).items():
            for axis, dim in enumerate(tensor.shape):
                if dim(case.sizes) <= 0:
                    message = f"size {dim} is {dim(case.sizes)} in case {case.name!r}; it must be positive"
                    raise _fault(message, kind, name, "shape", axis)
    for name, tensor in spec.inputs.items():
        if tensor.init.normal:
            try:
                tensor.init.normal.at(case.sizes)
            except ValueError as error:
                message = f"std {error} in case {case.name!r}"
                raise _fault(message, "inputs", name, "init", "normal", "std") from None


def _check_text(spec: Spec, key: Literal["reference", "baseline"]) -> None:
    text = getattr(spec, key)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise _fault(f"{key}: {getattr(error, 'msg', error)}", key, line) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            raise _fault(f"{key}: needs no import: torch and its names are in scope", key, node.lineno)
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for output in spec.outputs:
        if output not in stored:
            raise _fault(f"{key} never assigns output {output!r}; add a line '{output} = ...'", key)


def _positive(formula: float | str, sizes: Mapping[str, int]) -> float:
    try:
        value = _arithmetic(ast.parse(str(formula), mode="eval").body, sizes)
    except (SyntaxError, ArithmeticError) as error:
        raise ValueError(f"{formula!r} has no value ({error})") from None
    except KeyError as error:
        instead = _instead(error.args[0], sizes)
        raise ValueError(f"{formula!r}: dim {error} is not declared; {instead}") from None
    if isinstance(value, complex) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{formula!r} is {value}; it must be positive and finite")
    return value


def _arithmetic(node: ast.expr, sizes: Mapping[str, int]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return float(sizes[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_arithmetic(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _arithmetic(left, sizes), _arithmetic(right, sizes)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
                case ast.Pow():
                    return a**b
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic; use dims, numbers and + - * / **")
