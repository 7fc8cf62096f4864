"""The primitives' documentation pages are complete. Their examples can be traced and contain no line of a
generated kernel."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module

import pytest
from authoring import KERNELS
from kernels import signature, tensor, trace

from coda_agent import primitives
from coda_agent.agent.prompts.prompt import tokens
from coda_agent.agent.prompts.vocabulary import FAMILIES, formed, vocabulary
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program

PAGES = sorted(set(primitives.__all__) - {"kernel"})
COLUMNS = {
    "2*F": "F",
    "H*W": "W",
    "2*H*P": "P",
}  # for each number of columns that an example's tile may have (pairs or heads), the static dim
OUTPUTS = ("M, {0}", "M, F", "M, K", "M, H", "M, {1}", "M", "{0}")
# for a primitive without an operation of its own name: an operation that it adds to the program
NODES = {"pairs": "even", "rope": "sin"}


def page(name: str) -> re.Match[str]:
    text = inspect.getdoc(getattr(primitives, name)) or ""
    found = formed(text)
    assert found, (
        f"{name}: a page is a summary, Shapes, Dtypes, Cost, Paper and two lines of example:\n{text}"
    )
    return found


def example(name: str) -> list[str]:
    return [line.strip() for line in page(name)["example"].splitlines()]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_shapes_dtypes_cost_and_family(name: str) -> None:
    found = page(name)
    module = import_module(getattr(primitives, name).__module__)
    assert (
        module.__name__ == f"coda_agent.primitives.lang.ops.{found['family']}" and found["family"] in FAMILIES
    )
    assert (module.__doc__ or "").startswith(f"Family {found['number']}, {found['family']}")
    assert re.search(r"\d|none|half", found["cost"])


def programs(lines: list[str]) -> Iterator[Program]:
    """Trace an example with several widths of the tile ``t`` and several shapes of the output. Yield the
    programs that are not refused."""
    result = lines[-1].partition(" = ")[0]
    for columns, static in COLUMNS.items():
        declared = {
            "left": tensor("M, K"), "right": tensor(f"{columns}, K"), "v": tensor("M", "fp32"),
            "b": tensor(columns), "g": tensor(static), "freq": tensor(static, "fp32"),
            "steps": tensor("M", "int32"), "index": tensor("M", "int64"),
        }  # fmt: skip
        for shape in OUTPUTS:
            dtype = "fp32" if shape in ("M", "{0}", "M, H") else "bf16"
            output = {"o": tensor(shape.format(columns, static), dtype)}
            try:
                sized = signature(declared, output, (static,))
                yield trace(sized, "t = gemm(left, right.mT)", *lines, f"return {{'o': {result}}}")
            except ProgramError:
                continue


@pytest.mark.parametrize("name", PAGES)
def test_an_example_traces_and_shows_its_primitive(name: str) -> None:
    lines = example(name)
    assert any(name in called(line) for line in lines)
    traced = list(programs(lines))
    assert traced
    assert all(NODES.get(name, name) in {n.op for n in program.nodes} for program in traced)


def called(line: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


class Nameless(ast.NodeTransformer):
    """Replaces all variables in an expression by one name. Names of primitives stay."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return node if node.id in primitives.__all__ else ast.Name("any")


def shapes(line: str) -> Iterator[str]:
    """Yield each expression in a line that combines at least two operations, with its variables replaced by
    one name."""
    for node in ast.walk(ast.parse(line)):
        steps = sum(isinstance(n, ast.Call | ast.BinOp | ast.Compare | ast.UnaryOp) for n in ast.walk(node))
        if isinstance(node, ast.expr) and steps > 1:
            yield ast.dump(Nameless().visit(node))


def test_no_example_is_a_line_of_a_kernel_by_any_names() -> None:
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py") if path.name.count(".") == 1]
    assert len(sources) >= 30
    lines = {line.strip() for source in sources for line in source.splitlines()}
    kernels = {shape for source in sources for shape in shapes(source)}
    for name in PAGES:
        for line in example(name):
            assert line not in lines
            assert not kernels & set(shapes(line)), line


def test_a_kernels_line_under_other_names_would_show() -> None:
    theirs = "gate = silu(left) * right + 1"
    assert set(shapes("x = silu(a) * b")) <= set(shapes(theirs)) and not set(shapes("x = silu(a)"))


def test_pages_stay_short() -> None:
    assert tokens(vocabulary()) < 2_000
    assert max(tokens(inspect.getdoc(getattr(primitives, name)) or "") for name in PAGES) < 220
