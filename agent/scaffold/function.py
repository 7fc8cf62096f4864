"""Read the parts of a spec from a PyTorch function's source: parameters, outputs and a reference.

The file is only parsed, never imported, because an import would run its code. This module needs no torch.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from coda_agent.agent.scaffold.halves import Swap, halves
from coda_agent.agent.scaffold.helpers import Inlined, helpers
from coda_agent.agent.scaffold.special import Specialised
from coda_agent.agent.scaffold.torch_names import Casts, Names, TorchNames, without_idle_dtypes
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.signature import VALUE_NAME
from coda_agent.primitives.system.files import regular

# A spec states shapes, so its reference needs no assert.
DROPPED = (ast.Import, ast.ImportFrom, ast.Assert, ast.Pass)
KEPT = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)
DECORATORS = ("compile", "inference_mode", "no_grad")
ANNOTATED = {"BFloat16": "bf16", "Float16": "fp16", "Float32": "fp32", "Int32": "int32", "Int64": "int64"}
REMEDIES = {
    ast.If: "a reference has no branches; use torch.where, or write one function per case",
    ast.While: "a reference has no while loop; use a for loop over a range",
    ast.With: "a reference has no with statement; leave it out",
    ast.Expr: "a reference has no side effects; assign the value to a name",
    ast.Return: "a reference returns once, at its end",
    ast.FunctionDef: "a reference defines no function; write its body out",
}


class ScaffoldError(InvalidInput):
    """A function cannot become a spec. The message names the place, the value and the remedy."""


@dataclass(frozen=True)
class TensorParameter:
    """A tensor parameter. A jaxtyping annotation such as ``BFloat16[Tensor, "M K"]`` gives its shape and
    dtype."""

    name: str
    shape: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class SourceLine:
    """A line of a reference or baseline. ``number``: the number of this line in the user's file."""

    text: str
    number: int


@dataclass(frozen=True)
class Note:
    """A remark on line ``number`` of the user's file. The spec shows ``text`` as a comment. If ``text`` has a
    second line, that line is code. ``remedy``: an option that the user can give. ``swaps`` and ``otherwise``
    have the same meaning as in ``halves.Advice``."""

    text: str
    number: int
    remedy: str = ""
    swaps: tuple[Swap, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True)
class Function:
    """A parsed function. ``sizes``: the integer parameters with their values; a parameter that a shape names
    is a static dim. ``reference``: the function's body without casts. ``exact``: the body with casts to fp64,
    in case the function needs a cast, for example of a comparison. ``baseline``: the body with its own casts;
    None if it has none."""

    path: Path
    name: str
    line: int
    summary: str
    tensors: tuple[TensorParameter, ...]
    constants: dict[str, float]
    sizes: dict[str, int | None]
    outputs: tuple[str, ...]
    reference: tuple[SourceLine, ...]
    exact: tuple[SourceLine, ...]
    baseline: tuple[SourceLine, ...] | None
    notes: tuple[Note, ...] = ()


def read(target: str, required: Collection[str] = ()) -> Function:
    """Parse the function ``path/to/file.py:function``.

    A parameter that defaults to None is dropped, and so are the branches that run only if the parameter is
    given. A parameter in ``required`` is kept. Raises ScaffoldError if the function cannot become a spec.
    """
    name = target.rpartition(":")[2]
    path = Path(target.rpartition(":")[0])
    if not target.rpartition(":")[0] or not name.isidentifier():
        raise ScaffoldError(f"{target!r} names no function; write path/to/file.py:function")
    source = _text(path)
    tree = _parsed(path, source)
    return _Reader(path, source, tree, _find(path, tree, name), required).function()


def _text(path: Path) -> str:
    try:
        return regular(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScaffoldError(f"{path}: no such file") from None
    except OSError as error:
        raise ScaffoldError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScaffoldError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def _parsed(path: Path, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ScaffoldError(f"{path}:{error.lineno or 1}: {error.msg}; correct it") from None
    except (ValueError, RecursionError) as error:
        raise ScaffoldError(f"{path}: the file is not valid Python: {error}") from None


def _find(path: Path, tree: ast.Module, name: str) -> ast.FunctionDef:
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name in defined:
        return defined[name]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = getattr(node, "name", None) == name or name in [getattr(t, "id", None) for t in targets]
        if named:
            kind = "lambda" if isinstance(getattr(node, "value", None), ast.Lambda) else type(node).__name__
            raise ScaffoldError(
                f"{path}:{node.lineno}: {name} is not a plain function ({kind}); write def {name}(...)"
            )
    close = get_close_matches(name, defined, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"its functions: {', '.join(defined) or 'none'}"
    raise ScaffoldError(f"{path}: the file has no top-level function {name!r}; {remedy}")


class _Reader:
    """Analyses one function. Its methods raise ScaffoldError, which names a line of the file."""

    def __init__(
        self, path: Path, source: str, tree: ast.Module, node: ast.FunctionDef, required: Collection[str]
    ):
        self.path, self.node, self.lines, self.tree = path, node, source.split("\n"), tree
        self.required, self.absent, self.skipped = required, set[str](), set[int]()
        self.notes: list[Note] = []
        self.tensors: list[TensorParameter] = []
        self.constants: dict[str, float] = {}
        self.sizes: dict[str, int | None] = {}
        self.documented = ast.get_docstring(node)
        self.body = node.body[1:] if self.documented is not None else node.body
        self.names = Names.of(tree, node, self.fail)

    def fail(self, node: ast.AST, message: str) -> ScaffoldError:
        return ScaffoldError(f"{self.path}:{getattr(node, 'lineno', self.node.lineno)}: {message}")

    def function(self) -> Function:
        for decorator in self.node.decorator_list:
            name = ast.unparse(decorator).partition("(")[0]
            if name.rpartition(".")[2] not in DECORATORS:
                raise self.fail(decorator, f"@{name} may change what the function computes; remove it")
        self._parameters()
        self._specialise()
        self._check(self.body)
        names, statements = self._returned()
        with_casts = tuple(self._transcribed(statements, "kept"))
        without = tuple(self._transcribed(statements, "removed"))
        self._note_halves(statements)
        texts = [[line.text for line in lines] for lines in (with_casts, without)]
        return Function(
            path=self.path,
            name=self.node.name,
            line=self.node.lineno,
            summary=" ".join((self.documented or f"The function {self.node.name}.").split("\n\n")[0].split()),
            tensors=tuple(self.tensors),
            constants=self.constants,
            sizes=self.sizes,
            outputs=names,
            reference=without,
            exact=tuple(self._transcribed(statements, "to fp64")),
            baseline=with_casts if texts[0] != texts[1] else None,
            notes=tuple(self.notes),
        )

    def _parameters(self) -> None:
        args = self.node.args
        for star in (args.vararg, args.kwarg):
            if star:
                raise self.fail(
                    star, f"*{star.arg} takes any number of inputs; write one parameter per input"
                )
        plain = [*args.posonlyargs, *args.args]
        absent: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
        for arg, default in zip(plain, [*absent, *args.defaults], strict=True):
            self._parameter(arg, default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            self._parameter(arg, default)
        if not self.tensors:
            raise self.fail(self.node, f"{self.node.name} has no tensor parameter; add one")

    def _parameter(self, arg: ast.arg, default: ast.expr | None) -> None:
        annotation = ast.unparse(arg.annotation) if arg.annotation else ""
        try:
            value: Any = ast.literal_eval(default) if default else None
        except (ValueError, TypeError):
            value = ast.unparse(default) if default else None
        number = type(value) in (int, float)
        none = default is not None and value is None
        if number and (isinstance(value, float) or annotation == "float"):
            self.constants[self._named(arg)] = float(value)
        elif isinstance(value, int) or (annotation == "int" and not default):
            self.sizes[arg.arg] = value
        elif none and arg.arg not in self.required:
            self.absent.add(arg.arg)
            remedy = f"--shape {arg.arg}=... makes it an input"
            self.notes.append(Note(f"{arg.arg} is left out: it is None by default", arg.lineno, remedy))
        elif default and not none:
            message = f"parameter {arg.arg}={ast.unparse(default)} is neither a tensor nor a number"
            raise self.fail(arg, f"{message}; remove its default, or make it a number")
        elif annotation in ("float", "bool", "str"):
            raise self.fail(arg, f"parameter {arg.arg} has no value; give it a default, such as 1.0e-6")
        else:
            self.tensors.append(TensorParameter(self._named(arg), *_hints(arg.annotation)))

    def _named(self, arg: ast.arg) -> str:
        if not VALUE_NAME.fullmatch(arg.arg):
            raise self.fail(arg, f"parameter {arg.arg!r} is not a valid name for a value; use a-z, 0-9 and _")
        return arg.arg

    def _specialise(self) -> None:
        """Inline helpers. Remove the branches that do not run when the dropped parameters are None."""
        special = Specialised(self.absent, {t.name for t in self.tensors})
        names = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}
        names |= {a.arg for a in ast.walk(self.tree) if isinstance(a, ast.arg)}
        inlined = Inlined(helpers(self.tree, DECORATORS), self.names.own, names, self.fail)
        body = list(inlined.body(list(special.body(self.body))))
        # Specialise again: an inlined helper may test its argument for None.
        self.body = list(Specialised(self.absent, special.present).body(body))
        self.skipped = special.skipped

    def _note_halves(self, statements: Sequence[ast.stmt]) -> None:
        uncast = [node for node in self._renamed(statements, "removed") if node]
        weights = [t.name for t in self.tensors[1:]]
        for advice in halves(uncast, weights):
            number = getattr(advice.place, "lineno", self.node.lineno)
            self.notes.append(Note(advice.text, number, swaps=advice.swaps, otherwise=advice.otherwise))

    def _check(self, body: Sequence[ast.stmt], depth: int = 0) -> None:
        """Raise ScaffoldError for a statement that a reference may not contain."""
        for node in body:
            if isinstance(node, ast.For):
                self._check([*node.body, *node.orelse], depth + 1)
            last = depth == 0 and node is self.body[-1] and isinstance(node, ast.Return)
            if not isinstance(node, KEPT + DROPPED) and not last:
                remedy = next((r for kind, r in REMEDIES.items() if isinstance(node, kind)), "leave it out")
                raise self.fail(node, f"{self.lines[node.lineno - 1].strip()!r}: {remedy}")

    def _returned(self) -> tuple[tuple[str, ...], list[ast.stmt]]:
        """Replace the return by one assignment per output. Return the outputs' names and the new body."""
        last = self.body[-1] if self.body else None
        if not isinstance(last, ast.Return) or last.value is None:
            raise self.fail(
                last or self.node,
                f"{self.node.name} ends without a value; return a tensor, a tuple or a dict",
            )
        results = list(self._results(last.value))
        if not results:
            raise self.fail(last, f"{self.node.name} returns no tensor; return one, a tuple or a dict")
        names: list[str] = []
        assignments: list[ast.stmt] = []
        for index, (wish, value) in enumerate(results):
            assigned = isinstance(value, ast.Name) and value.id == wish
            needed = set() if assigned else {n for _, later in results[index + 1 :] for n in _names(later)}
            taken = wish in needed or wish in self._parameter_names or wish in names
            name = _fresh(wish, {*self.names.own, *names}) if taken else wish
            names.append(name)
            if taken or not assigned:
                assignments.append(_assignment(name, value, last))
        return tuple(names), [*self.body[:-1], *assignments]

    @property
    def _parameter_names(self) -> set[str]:
        return {t.name for t in self.tensors} | set(self.constants) | set(self.sizes)

    def _results(self, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """Yield each output's name and expression. The name comes from the function's code, or else is
        ``out``, with a number if there are several outputs."""
        match value:
            case ast.Dict(keys=keys, values=values):
                for key, each in zip(keys, values, strict=True):
                    if not (isinstance(key, ast.Constant) and VALUE_NAME.fullmatch(str(key.value))):
                        name = ast.unparse(key) if key else "**"
                        raise self.fail(key or each, f"output {name} has no valid name; use a-z, 0-9 and _")
                    yield str(key.value), each
            case ast.Tuple(elts=values) | ast.List(elts=values):
                for index, each in enumerate(values):
                    yield self._wish(each, f"out{index}"), each
            case _:
                yield self._wish(value, "out"), value

    def _wish(self, value: ast.expr, otherwise: str) -> str:
        name = value.id if isinstance(value, ast.Name) else ""
        return name if VALUE_NAME.fullmatch(name) else otherwise

    def _renamed(self, statements: Sequence[ast.stmt], casts: Casts) -> list[ast.stmt | None]:
        """Rewrite each statement with the names that a reference can use. A statement that the reference does
        not need becomes None."""
        names = TorchNames(self.names, casts)
        changed = [None if isinstance(n, DROPPED) else names.visit(copy.deepcopy(n)) for n in statements]
        return without_idle_dtypes(changed) if casts == "removed" else changed

    def _transcribed(self, statements: Sequence[ast.stmt], casts: Casts) -> Iterator[SourceLine]:
        first = self.node.body[0]
        end = (first.end_lineno or 1) if self.documented is not None else first.lineno - 1
        for node, new in zip(statements, self._renamed(statements, casts), strict=True):
            start, end = end, node.end_lineno or node.lineno
            if new is None:
                continue
            yield from self._comments(start, node.lineno - 1)
            text = self._as_written(node)
            same = text is not None and _means(text, new)
            if text is None or not same:
                text = ast.unparse(ast.fix_missing_locations(new))
            step = 1 if same and node in self.body else 0
            yield from (SourceLine(t, node.lineno + i * step) for i, t in enumerate(text.splitlines()))

    def _comments(self, start: int, end: int) -> Iterator[SourceLine]:
        for number, text in enumerate(self.lines[start:end], start + 1):
            if text.strip().startswith("#") and number not in self.skipped:
                yield SourceLine(text.strip(), number)

    def _as_written(self, node: ast.stmt) -> str | None:
        """Return a statement's lines as the file has them, with parentheses and comments. Return None if
        other code shares the lines."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        if node not in self.body and isinstance(node, ast.Assign):  # this assignment replaces the return
            value = ast.get_source_segment("\n".join(self.lines), node.value) or ""
            return None if "\n" in value else f"{ast.unparse(node.targets[0])} = {value}"
        before = lines[0].encode()[: node.col_offset].strip()
        after = lines[-1].encode()[node.end_col_offset :].strip()
        return None if before or after[:1] not in (b"", b"#") else textwrap.dedent("\n".join(lines))


def _hints(annotation: ast.expr | None) -> tuple[str | None, str | None]:
    match annotation:
        case ast.Subscript(value=kind, slice=ast.Tuple(elts=[_, ast.Constant(value=str(axes))])):
            return ",".join(axes.split()) or "[]", ANNOTATED.get(ast.unparse(kind).rpartition(".")[2])
    return None, None


def _assignment(name: str, value: ast.expr, place: ast.stmt) -> ast.stmt:
    assignment = ast.Assign([ast.Name(name, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(assignment, place))


def _means(text: str, node: ast.stmt) -> bool:
    """Whether a text parses to exactly this statement."""
    try:
        return [ast.dump(read) for read in ast.parse(text).body] == [ast.dump(node)]
    except SyntaxError:
        return False


def _names(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _fresh(wish: str, taken: set[str]) -> str:
    return next(name for i in range(len(taken) + 1) if (name := f"{wish}_out{i or ''}") not in taken)
