"""The language check: which kernel files pass, and which errors it gives for other files."""

from __future__ import annotations

import ast
import time

import pytest

from coda_agent import primitives
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.verifier.sandbox import language
from coda_agent.verifier.sandbox.syntax_tree import MAX_SOURCE_BYTES

HEAD = "from primitives import gemm, kernel, pairs, rsqrt, where\n"


def kernel(*lines: str, before: str = "") -> str:
    """Return a kernel file. If ``before`` is empty, the first of ``lines`` is line 4 of the file."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"{HEAD}{before}@kernel\ndef f(x, w, eps):\n{body}    return {{'y': gemm(x, w)}}\n"


def check(source: str) -> ast.Module:
    return language.check(source, primitives.__all__)


def refusal(source: str) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check(source)
    return caught.value


@pytest.mark.parametrize(
    "source",
    [
        kernel('"""Docstring, with \u03b3 and __dunder__."""', "h = gemm(x, w) + x  # \u03b3"),
        kernel("h = x", before="# \uff47emm \u2028 \u0085\n").replace("'y'", "'\uff59\\\n\u00e9'"),
        kernel("a, b = pairs(x)", "a, _ = b, 1", "h = -x.mT * 0.5 / x.columns", "h += a ** 2"),
        kernel("c = where(x > 0, x, 1e-3)", "c = where(x <= w, c, x)"),
        kernel("for i in range(8):", "    x = x * i", "for _ in (1, 2):", "    pass"),
        kernel("for i, t in enumerate((x, w)):", "    x = x + t * i"),
        kernel("for i in range(N):", "    for j in range(-2, N, 2):", "        x = x * j", before="N = 4\n"),
        kernel("y = {name: t for name, t in zip(('a', 'b'), (x, w))}", "z = [2 * t for t in (x, w)]"),
        kernel("out = {}", "out['h'] = x", "z = out['h']"),
        kernel("h = half(x, scale=2.0)", before="def half(t, scale=0.5):\n    return t * scale\n"),
        '"""A docstring."""\nfrom primitives import kernel\nfrom primitives import gemm\nC = (1 + 2) / 3.0\n'
        "@kernel\ndef f(x, w):\n    return dict(y=gemm(x, w))\n",
        kernel("h = " + " + ".join(["x"] * 90)),
    ],
)
def test_honest_files_pass(source: str) -> None:
    assert ast.dump(check(source)) == ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os", "the one import is: from primitives"),
        ("from os import system", "the one import is: from primitives"),
        ("from .primitives import gemm", "the one import is: from primitives"),
        ("from coda_agent.primitives.lang.trace import sys", "the one import is: from primitives"),
        ("import primitives", "the one import is: from primitives"),
        ("from primitives import gemm as g", "without as"),
        ("().__class__", "is not used"),
        ("a = ().__class__", "no .__class__ here"),
        ("a = x._index", "no ._index here"),
        ("a = f.func_globals", "no .func_globals here"),
        ("a = 'x'.format", "no .format here"),
        ("x.mT = w", "assign to names"),
        ("x.mT += w", "only names can be updated"),
        ("a = __builtins__", "must not start with _"),
        ("_a = 1", "must not start with _"),
        ("a__b = 1", "contain __"),
        ("a\uff3f\uff3fb = 1", "'a__b'"),  # NFKC turns fullwidth low lines into _
        ("a = ().__\u217dlass__", "letters beyond ASCII"),  # NFKC turns this Roman numeral into c
        ("a = \U0001d452val('1')", "letters beyond ASCII"),  # NFKC turns this name into eval
        ("a = \uff47\uff45\uff4d\uff4d(x, w)", "letters beyond ASCII"),  # fullwidth; NFKC turns it into gemm
        ("a = x.\uff4dT", "letters beyond ASCII"),
        ("\U0001d41a = x", "letters beyond ASCII"),  # a bold a
        ("a = gemm(x, \uff57=w)", "letters beyond ASCII"),
        ("a\u0301 = x", "letters beyond ASCII"),  # a combining accent
        ("g\u0435mm = x", "letters beyond ASCII"),  # Cyrillic
        ("\u03b3 = x", "letters beyond ASCII"),
        ("a = gemm(x, __w=w)", "must not start with _"),
        ("a = eval('1')", "the name 'eval' is unknown"),
        ("a = getattr(x, 'mT')", "the name 'getattr' is unknown"),
        ("a = sigmoid(x)", "import it from primitives"),
        ("a = x.tanh()", "everything else is a function"),
        ("print(x)", "print has nothing to show"),
        ("if x:\n        pass", "where(condition, a, b)"),
        ("a = x if eps else w", "where(condition, a, b)"),
        ("a = where(x > 0 and w > 0, x, w)", "no truth value"),
        ("a = where((x > 0) & (w > 0), x, w)", "no truth value"),
        ("a = where(not x, x, w)", "no truth value"),
        ("a = where(0 < x < 1, x, w)", "two at a time"),
        ("while 1:\n        pass", "range(number)"),
        ("for i in x:\n        pass", "plain to see"),
        ("for i in range(10**9):\n        pass", "whole numbers written out"),
        ("for i in range(10000000000):\n        pass", "at most 4096"),
        ("for i in range(100):\n        for j in range(100):\n            pass", "at most 4096"),
        ("a = [[[1 for k in range(99)] for j in range(99)] for i in range(99)]", "at most 4096"),
        ("for i in range(1, 2, 0):\n        pass", "the third not zero"),
        ("for i in range(2):\n        pass\n    else:\n        pass", "for ... else"),
        ("for range in (1, 2):\n        pass", "is a name of Python's"),
        ("a = [t for t in (x, w) if t]", "cannot filter"),
        ("a = (t for t in (x, w))", "a generator"),
        ("a = lambda: 1", "lambda"),
        ("a = (b := 1)", "separate line"),
        ("a: int = 1", "annotation"),
        ("def g():\n        pass", "at the top level, beside the kernel"),
        ("class A:\n        pass", "class"),
        ("try:\n        pass\n    finally:\n        pass", "try"),
        ("with x:\n        pass", "With"),
        ("global x", "Global"),
        ("del x", "Delete"),
        ("assert x", "assert"),
        ("raise x", "raise"),
        ("yield x", "once"),
        ("a = yield x", "Yield"),
        ("a = await x", "Await"),
        ("a = gemm(*x)", "*arguments"),
        ("a = gemm(**x)", "**arguments"),
        ("a = {**x}", "**dict"),
        ("*a, b = x", "*arguments"),
        ("a = f'{x}'", "f-string"),
        ("a = 'a%s' % x", "cannot be computed with"),
        ("a = x % 2", "remainders"),
        ("a = 'a' + 'b'", "strings are docstrings"),
        ("a = 'a'", "strings are docstrings"),
        ("a = b'a'", "bytes literal"),
        ("a = 1j", "complex literal"),
        ("a = ...", "ellipsis literal"),
        ("a = 1e999", "infinite"),
        ("a = 1000000000000001", "1e+15"),
        ("a = 2 ** 65", "exponent"),
        ("a = 2 ** 2 ** 2", "exponent"),
        ("a = 2\n    a **= 65", "exponent"),
        ("a = x @ w", "gemm(a, b)"),
        ("a = 1 << 60", "LShift"),
        ("a = x[:, 0::2]", "pairs(t)"),
        ("a = x[0:1]", "pairs(t)"),
        ("a = (gemm)(x, w)(x)", "by their name"),
        ("x + w", "is not used"),
        ("a = " + "(" * 120 + "x" + ",)" * 120, "nested over 100"),
    ],
)
def test_what_is_refused_names_its_line_and_a_remedy(line: str, said: str) -> None:
    error = refusal(kernel("h = x", line))
    assert said in error.message
    assert error.line in (5, 6), error.line  # 6 if ``line`` has a second line with the mistake
    assert error.code == ("syntax" if "nested" in said else "language")


@pytest.mark.parametrize(
    ("source", "code", "line", "said"),
    [
        ("", "kernel", None, "this has 0"),
        ("N = 1\n", "kernel", None, "this has 0"),
        (kernel() + kernel(), "kernel", 7, "this has 2"),
        (kernel().replace("@kernel\n", ""), "kernel", None, "this has 0"),
        (kernel().replace("import gemm", "import \uff47emm"), "language", 1, "letters beyond ASCII"),
        (kernel().replace("def f(", "def \uff46("), "language", 3, "letters beyond ASCII"),
        (kernel().replace("(x, w, eps)", "(x, w, \uff45ps)"), "language", 3, "letters beyond ASCII"),
        (kernel().replace("from p", "# \u03b3\rfrom \uff50"), "language", 2, "letters beyond ASCII"),
        (kernel().replace("@kernel", "@kernel(1)"), "language", 2, "without arguments"),
        (kernel().replace("kernel, ", ""), "language", 2, "import it from primitives"),
        (kernel().replace("(x, w, eps)", "(x, *w)"), "language", 3, "name the parameters"),
        (kernel().replace("(x, w, eps)", "(x: int, w)"), "language", 3, "parameter's name alone"),
        (kernel().replace("(x, w, eps)", "(x, len)"), "language", 3, "is a name of Python's"),
        (kernel().replace("eps):", "eps) -> dict:"), "language", 3, "annotations"),
        ("from primitives import __builtins__ as b\n", "vocabulary", 1, "primitives has no '__builtins__'"),
        ("from primitives import *\n", "vocabulary", 1, "primitives has no '*'"),
        ("from primitives import trace\n", "vocabulary", 1, "primitives has no 'trace'"),
        ("a = gemm(1, 2)\n", "language", 1, "move this into"),
        ("for i in range(3):\n    pass\n", "language", 1, "move this into"),
        ("if 1:\n    pass\n", "language", 1, "where(condition, a, b)"),
        ("async def f():\n    pass\n", "language", 1, "AsyncFunctionDef"),
        (kernel("for i in range(N):", "    pass", before="N = 3\nN = 4\n"), "language", 6, "written out"),
        (kernel("for i in a:", "    pass", before="a = a\n"), "syntax", 5, "nested"),
        ("x = = 1\n", "syntax", 1, "invalid syntax"),
        ("x = 1\0\n", "syntax", None, "null bytes"),
        ("x = '\ud800'\n", "syntax", None, "surrogates"),
        ("x = " + "(" * 5000 + ")" * 5000, "syntax", 1, "nested"),
        ("x = " + "-" * 20000 + "1", "syntax", None, "nested"),
        ("x = " + "+".join(["x"] * 20000), "syntax", None, "nested"),
        ("x = " + "+".join(["x"] * 500), "syntax", 1, "nested"),
        ("x = " + "9" * 5000, "syntax", 1, "integer"),
        ("#" * (MAX_SOURCE_BYTES + 1), "too_large", None, "shorten"),
        ("#" + "\u03b3" * (MAX_SOURCE_BYTES // 2), "too_large", None, "shorten"),
    ],
)
def test_whole_files_are_refused_cleanly(source: str, code: str, line: int | None, said: str) -> None:
    error = refusal(source)
    assert (error.code, error.line) == (code, line), error.message
    assert said in error.message


def test_no_kind_of_syntax_is_allowed_by_accident() -> None:
    """If a newer Python adds syntax, the check refuses this syntax until someone adds it to the check."""
    visitors = language._KernelChecker(ast.parse(""), frozenset())._visitors
    reached = {k.__name__ for k in [*visitors, *language._PLAIN] if issubclass(k, ast.stmt | ast.expr)}
    statements = {"ImportFrom", "FunctionDef", "Assign", "AugAssign", "Expr", "For", "Return", "Pass"}
    leaves = {"Name", "Attribute", "Constant", "Subscript", "Call"}
    compound = {"BinOp", "UnaryOp", "Compare", "Dict", "Tuple", "List", "ListComp", "DictComp"}
    assert reached == statements | leaves | compound


def test_the_check_takes_milliseconds_on_the_largest_file() -> None:
    line = "    h = h * 1.5 + gemm(x, w)\n"
    source = kernel("h = x", line.strip() + "\n" + line * (60_000 // len(line)))
    start = time.process_time()
    check(source)
    assert time.process_time() - start < 10
