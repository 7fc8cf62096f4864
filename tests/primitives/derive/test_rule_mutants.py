"""Every mistake in a derivative rule is found: the reference of the derived backward then does not compute
autograd's gradients.

A mutant changes a gradient that a rule returns, or one operation that a rule adds to the graph. A changed
operation has, for example, the wrong sign, factor, term, mask or order of arguments. Each mutant is tried on
the smallest program that uses the rule's primitive.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
from kernels import signature, tensor, trace

from coda_agent.agent.backward import Pair, pair
from coda_agent.primitives.derive import derive
from coda_agent.primitives.derive.reference import reference
from coda_agent.primitives.derive.simplify import Simplifier
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Node, Program
from coda_agent.verifier.numerics import gradients
from coda_agent.verifier.numerics.inputs import draw_free
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

pytestmark = pytest.mark.slow

INPUTS = {
    "x": tensor("M, K"), "w": tensor("2*N, K"), "e": tensor("M, 2*N"), "r": tensor("M", "fp32"),
    "c": tensor("2*N", "fp32"), "index": tensor("M", "int64"),
}  # fmt: skip
HEADS = {"x": tensor("M, K"), "w": tensor("H*P, K"), "f": tensor("P", "fp32")}
SIZES = {"M": 16, "K": 8, "N": 24, "H": 3, "P": 8}
OF_HEADS = "t * per_head(head_sums(t, P)) * per_head(f)"
USES = {
    "add": "t + e", "subtract": "e - t", "multiply": "t * e", "divide": "e / (t * t + 1) + t / (1 + e * e)",
    "negative": "-t", "where": "where(e > 0, t, 3 * t)", "maximum": "maximum(t, e)", "abs": "abs(t)",
    "minimum": "minimum(t, e)", "exp": "exp(t)", "log": "log(1 + t * t)", "sqrt": "sqrt(1 + t * t)",
    "rsqrt": "rsqrt(1 + t * t)", "tanh": "tanh(t)", "sin": "sin(t)", "cos": "cos(t)", "silu": "silu(t)",
    "sigmoid": "sigmoid(t)", "gelu": "gelu(t)", "softplus": "softplus(t)", "per_row": "t * per_row(r)",
    "per_column": "t * per_column(c)", "per_head": OF_HEADS, "head_sums": OF_HEADS,
    "even": "join(pairs(t)[0] * 2, pairs(t)[1])", "odd": "join(pairs(t)[0], pairs(t)[1] * 2)",
    "join": "join(pairs(t)[1], pairs(e)[0] * pairs(t)[0])", "gemm": "t * e", "row_sums": "row_sums(t * e)",
    "column_sums": "column_sums(t * e)", "row_logsumexp": "row_logsumexp(t)",
    "row_select": "row_select(t, index)",
}  # fmt: skip
COMPARISONS = {"greater": "less", "less": "greater", "greater_equal": "less", "less_equal": "greater",
               "equal": "not_equal", "not_equal": "equal"}  # fmt: skip
# operations without mutants, because their rules return no gradient or only pass the gradient on
IDLE = {"column_index", "in_columns", "transpose", "as_tile", *COMPARISONS}
OTHER = COMPARISONS | {"even": "odd", "odd": "even", "sin": "cos", "cos": "sin"}

Add = Callable[[Node], int]
Change = Callable[[Simplifier, Node, Add], int]


def negated(trace: Simplifier, node: Node, add: Add) -> int:
    value = add(node)
    return value if trace.is_zero(value) else add(Node("negative", (value,)))


def without(place: int) -> Change:
    """Return a change that leaves out a factor, a term or a condition. The change replaces an operation by
    its argument at ``place``."""
    return lambda trace, node, add: node.args[place]


def reordered(trace: Simplifier, node: Node, add: Add) -> int:
    return add(node._replace(args=(*node.args[:-2], node.args[-1], node.args[-2])))


def another(trace: Simplifier, node: Node, add: Add) -> int:
    return add(node._replace(op=OTHER[node.op]))


def doubled(trace: Simplifier, node: Node, add: Add) -> int:
    assert isinstance(node.attribute, float)
    return add(node._replace(attribute=2 * node.attribute + 1))


def changes(op: str) -> dict[str, Change]:
    """Return the possible mistakes, by name, in an operation ``op`` that a rule adds to the graph."""
    signless = ("transpose", "as_tile", "column_index", *COMPARISONS)
    found: dict[str, Change] = {} if op in signless else {"sign": negated}
    if op in ("multiply", "divide"):
        found |= {"first factor": without(1), "second factor": without(0)}
    if op in ("add", "subtract"):
        found |= {"first term": without(1), "second term": without(0)}
    if op == "where":
        found |= {"mask": without(1), "other mask": without(2)}
    if op in ("divide", "subtract", "where", "join", "gemm"):
        found["order"] = reordered
    if op in OTHER:
        found["another"] = another
    if op in ("exp", "sigmoid", "tanh", "per_row", "per_column", "per_head", "transpose", "negative"):
        found["function"] = without(0)
    return {"constant": doubled} if op == "constant" else found


class Mutant(NamedTuple):
    """A change to one operation or one gradient of a rule. An ``at`` of 0 or more is the index of an
    operation that the rule adds. A negative ``at`` means the gradient at index ``-at - 1``."""

    at: int
    name: str
    change: Any


class Altered:
    """A derivative rule that records the operations it adds, and applies the mutant."""

    def __init__(self, op: str, mutant: Mutant | None = None):
        self.rule, self.mutant = OPERATIONS[op].derivative, mutant
        self.active, self.added, self.parts = False, list[str](), 0

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        self.active, self.added = True, []
        assert self.rule
        try:
            parts = list(self.rule(*given))
        finally:
            self.active = False
        self.parts = max(self.parts, len(parts))
        if self.mutant and self.mutant.at < 0:
            place = -self.mutant.at - 1
            parts[place] = None if parts[place] is None else self.mutant.change(parts[place])
        return tuple(parts)

    def add(self, trace: Simplifier, node: Node) -> int:
        if not self.active:
            return plain(trace, node)
        self.active = False  # do not count operations that a simplification adds
        try:
            self.added.append(node.op)
            here = self.mutant is not None and self.mutant.at == len(self.added) - 1
            if here and self.mutant:
                changed: int = self.mutant.change(trace, node, functools.partial(plain, trace))
                return changed
            return plain(trace, node)
        finally:
            self.active = True


plain = Simplifier.add


@contextmanager
def altered(op: str, mutant: Mutant | None) -> Iterator[Altered]:
    rule = Altered(op, mutant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATIONS, op, OPERATIONS[op]._replace(derivative=rule))
        patch.setattr(Simplifier, "add", lambda trace, node: rule.add(trace, node))
        yield rule


@functools.cache
def forward(op: str) -> tuple[Spec, Program]:
    value = USES[op]
    known = HEADS if value is OF_HEADS else INPUTS
    vector = {"row": "M", "column": "2*N"}.get(op.partition("_")[0] if "_" in op else "", "")
    read = {n: t for n, t in known.items() if n in ("x", "w") or re.search(rf"\b{n}\b", value)}
    outputs = {"y": tensor("M, H*P" if known is HEADS else "M, 2*N")}
    outputs |= {"v": tensor(vector, "fp32")} if vector else {}
    shape = signature(read, outputs, static=("P",) if known is HEADS else ())
    returned = f'"y": t, "v": {value}' if vector else f'"y": {value}'
    program = trace(shape, "t = gemm(x, w.mT)", f"return {{{returned}}}")
    made = {n: {"shape": tuple(map(str, t.shape)), "dtype": t.dtype} for n, t in outputs.items()}
    tensors: dict[str, Any] = {
        n: {"shape": tuple(map(str, t.shape)), "dtype": t.dtype} for n, t in read.items()
    }
    if "index" in tensors:
        tensors["index"]["init"] = {"integers": (0, "2*N")}
    case = {"name": "small", **{d: SIZES[d] for d in shape.dims}}
    spec = Spec.model_validate(
        {"name": "kernel", "summary": op, "dims": dict.fromkeys(shape.dims, "size"), "inputs": tensors,
         "outputs": made, "reference": reference(program), "static": shape.static, "cases": (case,)}
    )  # fmt: skip
    return spec, program


def made(op: str) -> Pair | None:
    spec, program = forward(op)
    return pair(spec, program, derive(program, SIZES))


def refused(found: Pair) -> bool:
    try:
        spec = found.spec
    except SpecError:
        return True
    sizes = {dim: SIZES[dim] for dim in spec.dims}
    return bool(gradients.wrong(spec, draw_free(spec, sizes, 5), sizes))


@functools.cache
def right(op: str) -> tuple[str, tuple[str, ...], int]:
    """Derive a backward with the correct rule of ``op``. Return the text of the backward and its forward, the
    operations that the rule adds, and the number of gradients that the rule returns."""
    with altered(op, None) as rule:
        found = made(op)
    assert found and not refused(found) and rule.parts
    return found.text, tuple(rule.added), rule.parts


def gradients_of(op: str) -> set[str]:
    """Return the names of the gradients in the backward that the correct rule gives."""
    found = made(op)
    assert found
    return set(found.program.signature.outputs)


def mutants(op: str) -> Iterator[Mutant]:
    _, added, parts = right(op)
    for at, each in enumerate(added):
        yield from (Mutant(at, f"{each} {at}: {name}", change) for name, change in changes(each).items())
    for place in range(parts):
        returned = {"sign": lambda g: -g, "factor": lambda g: 2 * g, "term": lambda g: None}
        yield from (Mutant(-place - 1, f"gradient {place}: {n}", c) for n, c in returned.items())


def test_every_rule_is_used() -> None:
    rules = {name for name, operation in OPERATIONS.items() if operation.derivative}
    assert rules == USES.keys() | IDLE


@pytest.mark.parametrize("op", sorted(USES))
def test_each_wrong_rule_is_refused(op: str) -> None:
    text, *_ = right(op)
    tried, missed = 0, []
    for mutant in mutants(op):
        found = None
        # deriving with a mutant may raise ProgramError, for example because values have the wrong kinds
        with altered(op, mutant), suppress(ProgramError):
            found = made(op)
        if found and found.text == text:  # the mutant changes nothing
            continue
        tried += 1
        # a mutant that loses a gradient is found, because derive reports the missing gradient
        left = found is None or found.program.signature.outputs.keys() < gradients_of(op)
        missed += [] if found is None or left or refused(found) else [mutant.name]
    assert tried >= 3 and not missed
