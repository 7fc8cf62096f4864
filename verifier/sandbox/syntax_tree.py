"""Parse a kernel file into its syntax tree. Find the names that the file binds, and the places where strings
are allowed.

This module needs only the standard library and ``primitives``, since the jail's child imports it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from coda_agent.primitives.lang.errors import ProgramError

MAX_SOURCE_BYTES = 64 << 10
MAX_DEPTH = 100  # limit on nested syntax; a sum of n terms is n deep

_BEYOND = re.compile(r"[^\x00-\x7f]")
_UNLIKE = "zq7"  # a replacement that NFKC normalisation never produces from a single letter


def parse(source: str) -> ast.Module:
    """Return a kernel file's syntax tree.

    Raises ProgramError if the file is too large (code ``too_large``), cannot be parsed (``syntax``), or has a
    name with letters beyond ASCII (``language``).
    """
    tree = _parsed(source)
    _refuse_letters(source, tree)
    return tree


def _parsed(source: str) -> ast.Module:
    if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise ProgramError("too_large", f"the file is over {MAX_SOURCE_BYTES} bytes: shorten it")
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ProgramError("syntax", f"syntax error: {error.msg}", error.lineno) from None
    except ValueError as error:  # for example NUL bytes and lone surrogates
        raise ProgramError("syntax", f"the file is not text that Python reads: {error}") from None
    except (RecursionError, MemoryError):
        raise too_deep() from None


def _refuse_letters(source: str, tree: ast.Module) -> None:
    """Check that names are written in ASCII. Python normalises names by NFKC, which turns fullwidth letters
    into ASCII letters. So replace all non-ASCII letters, parse the file again, and check that no name has
    changed."""
    if source.isascii():
        return
    other = _parsed(_BEYOND.sub(_UNLIKE, source))
    for node, changed in zip(ast.walk(tree), ast.walk(other), strict=True):
        for name, again in zip(_names(node), _names(changed), strict=True):
            if name != again:
                words = f"name {name!a} is written with letters beyond ASCII, which can look like others"
                raise ProgramError("language", f"{words}: spell it out", getattr(node, "lineno", None))


def _names(node: ast.AST) -> list[str]:
    """The names in a node itself, without those in child nodes. A constant's text is not a name."""
    if isinstance(node, ast.Constant):
        return []
    fields = [value for _, value in ast.iter_fields(node)]
    # lists of names, as in ``global``
    listed = [part for value in fields if isinstance(value, list) for part in value]
    return [name for name in (*fields, *listed) if isinstance(name, str)]


def too_deep(line: int | None = None) -> ProgramError:
    """The error for syntax that is nested over MAX_DEPTH deep."""
    return ProgramError("syntax", f"expressions are nested over {MAX_DEPTH} deep: name the parts", line)


def bindings(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the file binds, except by import; a name bound twice is yielded twice."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield name


def texts(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the expressions that are allowed to be strings."""
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=keys):
                yield from (key for key in keys if key is not None)
            case ast.DictComp(key=key):
                yield key
            case ast.Call(args=arguments, keywords=keywords):
                yield from arguments
                yield from (k.value for k in keywords)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                yield from parts
            case ast.Subscript(slice=index):
                yield index
