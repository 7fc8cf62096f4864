"""Spec files: one YAML file an operator.

``load`` either gives a consistent ``Spec`` or raises ``SpecError``, whose text names the file, the line,
the value and what would do.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import FoldedScalarString, LiteralScalarString

from verifier.spec import BadReference, Spec
from verifier.spec_model import Model

Place = tuple[str | int, ...]
Kind = TypeVar("Kind", bound=Model)


class SpecError(Exception):
    """A spec that cannot be used; ``str`` of it reads ``file:line: what is wrong and what would do``."""

    def __init__(self, path: str | Path, line: int | None, message: str):
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")
        self.path, self.line, self.message = Path(path), line, message


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
