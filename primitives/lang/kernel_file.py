"""Trace a kernel file: run its kernel on symbolic tensors to build a Program.

This module needs only the standard library, because the jail (the process that traces a kernel file) imports
it. ``trace_source`` executes the file's code, so untrusted source must be traced inside
``verifier.sandbox.jail``.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable
from typing import Any

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Signature, check_output_names, check_output_type
from coda_agent.primitives.lang.trace import (
    FILENAME,
    KernelFunction,
    Tensor,
    Trace,
    apply,
    tracing,
    vocabulary,
)

BUILTINS = ("dict", "enumerate", "float", "int", "len", "list", "range", "reversed", "tuple", "zip")


def trace_source(source: str, signature: Signature) -> Program:
    """Trace a kernel file as ``trace_lines`` does, but return only the program."""
    return trace_lines(source, signature)[0]


def trace_lines(source: str, signature: Signature) -> tuple[Program, list[int | None]]:
    """Execute a kernel file's code and trace its kernel against ``signature``. Return the program, and for
    each node the line that created it.

    Raises ProgramError with the line of any error in the file. The code runs with a handful of builtins and
    no import machinery, and may import only names in ``primitives.__all__``.
    """
    trace = Trace(signature)
    at: int | None = None  # the line to report if an error has no line of its own
    try:
        function, tree = _load(source)
        at = function.__code__.co_firstlineno
        with tracing(trace):
            outputs = _call(function, trace)
            at, entries = _returned(tree, function.__name__)
            traced = _canonical(trace, _outputs(outputs, trace, entries))
    except ProgramError as error:
        if error.line is None:
            error.line = _line_of(error) or at
        raise
    except NameError as error:
        hint = f": {diagnostics.unknown(error.name, vocabulary())}" if error.name else ""
        raise ProgramError("python", f"NameError: {error}{hint}", _line_of(error)) from None
    except RecursionError:
        raise ProgramError("depth", "the kernel recurses too deeply: write straight-line code") from None
    except (
        SyntaxError
    ) as error:  # text that parses may fail to compile, for example a return outside a function
        raise ProgramError("syntax", f"syntax error: {error.msg}", error.lineno) from None
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ProgramError("python", f"{type(error).__name__}: {error}", _line_of(error)) from None
    return traced


def _line_of(error: BaseException) -> int | None:
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == FILENAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _load(source: str) -> tuple[Callable[..., Any], ast.Module]:
    if "\0" in source:  # for a null byte, Python raises ValueError or SyntaxError, depending on its version
        raise ProgramError("syntax", "syntax error: source code string cannot contain null bytes")
    try:
        tree = ast.parse(source, FILENAME)
    except MemoryError:
        raise ProgramError("syntax", "syntax error: an expression is nested too deeply") from None
    namespace: dict[str, Any] = {"__builtins__": {name: getattr(builtins, name) for name in BUILTINS}}
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "primitives"]
    for statement in imports:
        namespace.update(_imported(statement))
    tree.body = [n for n in tree.body if n not in imports]
    exec(compile(tree, FILENAME, "exec"), namespace)  # untrusted source runs only in the jail
    kernels = [v for v in namespace.values() if isinstance(v, KernelFunction)]
    if len(kernels) != 1:
        raise ProgramError(
            "kernel", f"a kernel file has exactly one @kernel function; this has {len(kernels)}"
        )
    return kernels[0].function, tree


def _imported(statement: ast.ImportFrom) -> dict[str, Any]:
    vocabulary = sys.modules["coda_agent.primitives"]
    for alias in statement.names:
        if alias.name not in vocabulary.__all__:
            raise ProgramError(
                "vocabulary",
                f"primitives has no {alias.name!r}; it has {diagnostics.these(vocabulary.__all__)}",
                statement.lineno,
            )
    return {alias.asname or alias.name: getattr(vocabulary, alias.name) for alias in statement.names}


def _call(function: Callable[..., Any], trace: Trace) -> Any:
    signature = trace.signature
    code = function.__code__
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    expected = [*signature.inputs, *signature.constants, *signature.static]
    if sorted(given) != sorted(expected):
        wrong = [n for n in given if n not in expected]
        missing = [n for n in expected if n not in given]
        said = [
            f"unknown {', '.join(wrong)}" if wrong else "",
            f"missing {', '.join(missing)}" if missing else "",
        ]
        raise ProgramError(
            "parameters",
            f"the kernel's parameters must be {', '.join(expected)}: {'; '.join(s for s in said if s)}",
            code.co_firstlineno,
        )
    values: dict[str, Any] = {n: Tensor(trace.add(Node("input", (), n))) for n in signature.inputs}
    sizes = {n: apply("dim", attribute=n) for n in signature.static}
    return function(**values, **signature.constants, **sizes)


def _returned(tree: ast.Module, name: str) -> tuple[int | None, dict[Any, int]]:
    """Return the line of the return statement of the function ``name``, or the line of the function if it has
    no return statement. If the statement returns a dict literal, also return the line of each entry."""
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    found = next((n for f in functions for n in ast.walk(f) if isinstance(n, ast.Return)), None)
    if found is None:
        return next((f.lineno for f in functions), None), {}
    keys = found.value.keys if isinstance(found.value, ast.Dict) else []
    return found.lineno, {k.value: k.lineno for k in keys if isinstance(k, ast.Constant)}


def _outputs(given: Any, trace: Trace, entries: dict[Any, int]) -> dict[str, int]:
    """Return the nodes of the outputs. If a value has the wrong type, raise ProgramError with the line of its
    dict entry."""
    if not isinstance(given, dict) or not all(isinstance(k, str) for k in given):
        raise ProgramError("outputs", "the kernel must return a dict of outputs by name")
    check_output_names(given, trace.signature)
    for name, value in given.items():
        line = entries.get(name)
        if not isinstance(value, Tensor):
            said = f"output {name!r} is {type(value).__name__}, not a tile or vector"
            raise ProgramError("outputs", said, line)
        check_output_type(name, trace.types[value._index], trace.signature, line)
    return {name: value._index for name, value in given.items()}


def _canonical(trace: Trace, outputs: dict[str, int]) -> tuple[Program, list[int | None]]:
    """Return the program and each node's line. The program keeps only nodes on which outputs depend, and
    numbers them depth first. So variable names and the order of statements do not affect the program."""
    order: dict[int, int] = {}
    for root in (outputs[name] for name in sorted(outputs)):
        stack = [(root, False)]
        while stack:
            index, done = stack.pop()
            if index in order:
                continue
            if done:
                order[index] = len(order)
            else:
                stack.append((index, True))
                stack.extend((a, False) for a in reversed(trace.nodes[index].args))
    nodes = tuple(
        Node(n.op, tuple(order[a] for a in n.args), n.attribute) for n in (trace.nodes[i] for i in order)
    )
    lines = [trace.lines[i] for i in order]
    program = Program(trace.signature, nodes, {k: order[v] for k, v in outputs.items()}).check(lines)
    cut(program, tuple(lines))
    return program, lines
