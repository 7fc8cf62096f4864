"""Read spec files: one YAML file per operator.

``read`` returns a consistent model, or raises ``SpecError``. The error's message names the file, the line,
the value and the remedy. A file must be small. It must not use YAML aliases, because ten lines of aliases can
expand beyond any memory.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import LiteralScalarString

from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import regular
from coda_agent.verifier.spec.fields import Model
from coda_agent.verifier.spec.model import BadReference

LARGEST = 1 << 18  # limit on the characters of a file
DEEPEST = 20  # limit on the levels of nesting
INT64 = 1 << 63
Place = tuple[str | int, ...]
Kind = TypeVar("Kind", bound=Model)


class SpecError(InvalidInput):
    """A spec is unusable; the message reads ``file:line: fault and remedy``."""

    def __init__(self, path: str | Path, line: int | None, message: str):
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")
        self.path, self.line, self.message = Path(path), line, message


def read(path: str | Path, kind: type[Kind], check: Callable[[Kind], None]) -> Kind:
    """Read a model from a YAML file, and run ``check`` on it. Raises SpecError; a BadReference from ``check``
    becomes a SpecError too."""
    path = Path(path)
    return of_text(path, _text(path), kind, check)


def of_text(path: Path, text: str, kind: type[Kind], check: Callable[[Kind], None]) -> Kind:
    """Like ``read``, for text that was already read from ``path``."""
    if len(text) > LARGEST:
        raise SpecError(path, None, f"has more than {LARGEST} characters; a spec describes one operator")
    tree = _tree(path, text, kind)
    _check_numbers(path, tree, 1)
    try:
        made = kind.model_validate(plain(tree))
        check(made)
    except ValidationError as error:
        found = [(_line(tree, place), message) for place, message in map(_explain, error.errors())]
        raise SpecError(path, *min(found)) from None
    except BadReference as error:
        raise SpecError(path, _line(tree, (error.key, error.line or 0)), error.message) from None
    return made


def _text(path: Path) -> str:
    try:
        with regular(path).open("rb") as file:
            return file.read(4 * LARGEST + 4).decode("utf-8")
    except FileNotFoundError:
        raise SpecError(path, None, f"no such file; {_nearby(path)}") from None
    except OSError as error:
        raise SpecError(path, None, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SpecError(path, None, f"is not UTF-8 text: byte {error.start} is {byte:#x}") from None


class _NoAlias(Composer):
    """A YAML composer that refuses aliases."""

    def return_alias(self, a: Any) -> Any:
        words = "a spec may not use a YAML alias (*) of this; write the value out"
        raise ComposerError(None, None, words, a.start_mark)


def _tree(path: Path, text: str, kind: type[Model]) -> CommentedMap:
    try:
        tree = _parsed(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context).partition(" with value")[0]
        if "duplicate key" in problem:
            problem += "; keep one of the two"
        line = mark.line + 1 if mark else 1
        raise SpecError(path, line, f"this is not a YAML mapping: {problem}") from None
    except YAMLError as error:
        raise SpecError(path, 1, f"this is not a YAML mapping: {str(error).splitlines()[0]}") from None
    # for example, a date that does not exist, or a mapping as a key
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(path, 1, f"this YAML cannot be read: {error}") from None
    if not isinstance(tree, CommentedMap):
        raise SpecError(path, 1, f"a spec is a mapping with keys {', '.join(kind.model_fields)}")
    return tree


@lru_cache(128)  # one command loads the same spec several times, and parsing takes most of the time
def _parsed(text: str) -> Any:
    yaml = YAML()
    yaml.Composer, yaml.max_depth = _NoAlias, DEEPEST
    return yaml.load(text)


def _check_numbers(path: Path, node: Any, line: int) -> None:
    """Raise SpecError for an integer of more than 64 bits; Python would accept millions of digits."""
    if isinstance(node, int) and not -INT64 <= node < INT64:
        raise SpecError(path, line, f"an integer has {node.bit_length()} bits; 64 at most")
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    lines = node.lc.data if isinstance(node, CommentedMap | CommentedSeq) else None
    for key, value in pairs:
        at = (lines or {}).get(key)
        for part in (key, value) if isinstance(node, dict) else (value,):
            _check_numbers(path, part, at[0] + 1 if at else line)


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("specs")
    names = sorted(p.stem for p in folder.glob("*.yaml"))
    close = get_close_matches(path.stem, names, n=1)
    if close:
        return f"did you mean {folder / close[0]}.yaml?"
    if not names:
        return "give the path of a YAML file, or the name of a shipped spec, such as gemm_swiglu"
    return f"{folder} has {', '.join(names)}"


def plain(node: Any) -> Any:
    """Convert a YAML tree to Python's own types, for strict validation. Lists become tuples."""
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
    """Return the line of the deepest key of ``place`` that the file contains. If this key's value is a text,
    and a number n follows the key in ``place``, return the line of the file that holds line n of the text
    (counted from 1). Only the lines of a literal text (``|``) are lines of the file. For another text, return
    the line where it begins."""
    line, begins, node = 1, 1, tree
    for part in place:
        if isinstance(node, CommentedMap) and part in (node.lc.data or ()) and part in node:
            line, begins, node = node.lc.key(part)[0] + 1, node.lc.value(part)[0] + 1, node[part]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line, node = node.lc.item(part)[0] + 1, node[part]
        elif isinstance(node, str) and isinstance(part, int) and part > 0:
            line = begins + (part if isinstance(node, LiteralScalarString) else 0)
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
    """Return the place and the message of one validation error."""
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
