"""Judge a proposed elementwise primitive: a person defines its meaning, and an author writes its CuTeDSL.

The definition is a YAML file with one line of PyTorch, and the domain on which this line must hold. An
author's device functions are inserted into a toy kernel, called the frame. The frame is lowered code that
applies the primitive to an accumulator and to loaded tiles. The frame's output ``loaded``, in fp32, uses the
exact function. The error of ``loaded`` at each point is limited in units in the last place (ulps). The output
``fused``, in bf16, uses the coarser variant of the function if there is one. The error gate judges ``fused``.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from coda_agent.primitives.compiler.lower import editable, exports
from coda_agent.primitives.lang.ir import OPERATIONS, Node, Operation, Program, register
from coda_agent.primitives.lang.signature import VALUE_NAME
from coda_agent.verifier.spec.fields import UNPARSABLE, Model, fault, unparsable
from coda_agent.verifier.spec.file import of_text, read
from coda_agent.verifier.spec.model import BadReference, Spec

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 256  # extent of the toy kernel's matrices: 65536 points per family, as many as bf16 has values
SIZES = {"M": SIZE, "N": SIZE, "K": SIZE}
OPERANDS, SUM, OUTPUTS = ("left", "right"), "accumulated", ("fused", "loaded")
STAND_INS = ("abs", "maximum", "where")  # existing operations with one, two and three arguments
LARGEST = (2 - 2.0**-23) * 2.0**127  # the largest finite fp32 number
USUAL = 8.0  # activations usually lie between minus and plus this
SCOPE = (
    "a primitive of this kind works element by element on one to three arguments; reductions, changes of "
    "width and tables belong elsewhere (primitives/lang/ops/reductions.py, tiles.py, stateful.py)"
)


def _end(value: object) -> object:
    if isinstance(value, str) and value.strip().lstrip("+-") in ("inf", ".inf"):
        return float(value.replace(".", ""))
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


End = Annotated[float, BeforeValidator(_end)]


class Proposal(Model):
    """A primitive as its owner defines it.

    ``reference``: an expression of the arguments with torch's names. ``domain``: the closed interval of each
    argument on which the reference must hold; by default all of fp32 except NaN. ``ulps``: the allowed error
    of the exact function, in units in the last place of the truth. The truth may be evaluated at any argument
    within two ulps of the given argument. ``derivative_of``: the operation of which this primitive is the
    derivative, with respect to the first argument. ``example``: a line of a kernel that uses the primitive.
    """

    name: str
    summary: str
    arguments: tuple[str, ...]
    reference: str
    domain: dict[str, tuple[End, End]] = {}
    ulps: Annotated[float, BeforeValidator(_end)] = 4.0
    derivative_of: str | None = None
    example: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_name(self.name, "name")
        if not 1 <= len(self.arguments) <= len(STAND_INS):
            raise fault(f"{len(self.arguments)} arguments: {SCOPE}", "arguments")
        taken = {self.name, SUM, *OPERANDS, *OUTPUTS, "torch"}
        for argument in self.arguments:
            _check_name(argument, "arguments")
            if argument in taken:
                raise fault(f"{argument!r} is taken: give the argument another name", "arguments")
            taken.add(argument)
        for argument, (low, high) in self.domain.items():
            if argument not in self.arguments:
                raise fault(f"{argument!r} is not one of the arguments {', '.join(self.arguments)}", "domain")
            if not low < high or low > LARGEST or high < -LARGEST:
                raise fault(f"[{low}, {high}] is not an fp32 interval: write [low, high]", "domain", argument)
        if not 1 <= self.ulps <= 1024:
            raise fault(f"ulps is {self.ulps}; it must be between 1 and 1024", "ulps")
        if self.derivative_of is not None and self.derivative_of not in OPERATIONS:
            raise fault(f"there is no operation {self.derivative_of!r} to differentiate", "derivative_of")
        for key in ("summary", "reference", "example"):
            if "\n" in getattr(self, key).strip() or "`" in getattr(self, key):
                raise fault(f"{key} must be one line, without backquotes", key)
        return self

    # The meaning

    @cached_property
    def text(self) -> str:
        """The reference with torch's full names, for the interpreter. Raises BadReference."""
        import torch

        from coda_agent.verifier.numerics.reference import scope

        try:
            tree = ast.parse(self.reference.strip(), mode="eval")
        except UNPARSABLE as error:
            raise BadReference(f"reference: not one expression: {unparsable(error)}") from None

        class Qualify(ast.NodeTransformer):
            def visit_Name(inner, node: ast.Name) -> ast.expr:  # noqa: N805
                if node.id in self.arguments or node.id == "torch":
                    return node
                if node.id not in scope():
                    known = ", ".join(self.arguments)
                    raise BadReference(f"reference: {node.id!r} is neither a torch name nor one of {known}")
                if hasattr(builtins, node.id) and getattr(builtins, node.id) is scope()[node.id]:
                    return node
                home = "torch" if hasattr(torch, node.id) else "torch.nn.functional"
                return ast.parse(f"{home}.{node.id}", mode="eval").body

        return ast.unparse(Qualify().visit(tree))

    @property
    def meaning(self) -> str:
        """Source text of the function that the interpreter evaluates for the primitive."""
        return f"lambda torch, {', '.join(self.arguments)}: {self.text}"

    def truth(self, *arguments: Tensor) -> Tensor:
        """Evaluate the reference on these tensors, in their dtype."""
        import torch

        found: Tensor = _function(self.meaning)(torch, *arguments)
        return found

    def interval(self, argument: str) -> tuple[float, float]:
        """An argument's interval in the domain; without one, from minus to plus infinity."""
        return self.domain.get(argument, (-math.inf, math.inf))

    # The frame

    @cached_property
    def frame(self) -> str:
        """The spec of the toy kernel, as YAML."""
        first, *rest = self.arguments
        fused = re.sub(rf"(?<![\w.]){first}\b", SUM, self.reference.strip())
        tiles = "".join(
            f"  {a}: {{shape: [M, N], dtype: fp32, init: {{uniform: [{low!r}, {high!r}]}}}}\n"
            for a, (low, high) in ((a, usual_range(self.interval(a))) for a in (first, *rest))
        )
        return (
            f"name: {self.name}\nsummary: The frame of a proposed primitive.\n"
            "dims: {M: rows, N: columns, K: depth}\ninputs:\n"
            "  left: {shape: [M, K], dtype: bf16}\n  right: {shape: [K, N], dtype: bf16}\n"
            f"{tiles}outputs:\n"
            "  fused: {shape: [M, N], dtype: bf16}\n  loaded: {shape: [M, N], dtype: fp32}\n"
            f"reference: |\n  {SUM} = left @ right + {first}\n  fused = {fused}\n"
            f"  loaded = {self.reference.strip()}\n"
            f"cases:\n  - {{name: frame, M: {SIZE}, N: {SIZE}, K: {SIZE}}}\n"
        )

    def program(self, spec: Spec, operation: str = "") -> Program:
        """The toy kernel with ``operation`` in the primitive's place. The default is an existing operation
        with the same number of arguments. The kernel's reads, writes and launches are the same for every
        operation."""
        names = (*OPERANDS, *self.arguments)
        nodes = [Node("input", (), name) for name in names]
        first, rest = len(OPERANDS), tuple(range(len(OPERANDS) + 1, len(names)))
        gemm = len(nodes)
        op = operation or STAND_INS[len(self.arguments) - 1]
        nodes += [
            Node("gemm", (0, 1)),
            Node("add", (gemm, first)),
            Node(op, (gemm + 1, *rest)),
            Node(op, (first, *rest)),
        ]
        return Program(spec.signature(), tuple(nodes), {"fused": gemm + 2, "loaded": gemm + 3}).check()

    def framed(self, spec: Spec, source: str, fast: bool) -> str:
        """The toy kernel's lowered code with an author's functions in it. If the vocabulary already has the
        primitive, the author's functions replace the vocabulary's functions, which are not imported."""
        with self._operation(fast):
            text = editable(self.program(spec, self.name))
        head, _, body = text.partition("\nclass ")
        head = re.sub(rf"^from primitives\.device\.{self.name} import .*\n", "", head, flags=re.M)
        added = "\n".join(line for line in imports(source).splitlines() if line not in head.splitlines())
        return f"{head.rstrip()}\n{added}\n\n{source.strip()}\n\n\nclass {body}"

    @contextmanager
    def _operation(self, fast: bool) -> Iterator[None]:
        """Add the primitive to the vocabulary during the ``with`` block, so that the frame can be lowered."""
        exact, coarse = self.templates(fast)
        there = OPERATIONS.pop(self.name, None)
        infer = OPERATIONS[STAND_INS[len(self.arguments) - 1]].infer
        register(Operation(self.name, infer, None, exact, coarse))
        try:
            yield
        finally:
            del OPERATIONS[self.name]
            if there:
                OPERATIONS[self.name] = there

    def templates(self, fast: bool) -> tuple[str, str | None]:
        """The operation's code templates ``cute`` and ``fast``, which call the author's functions."""
        places = ", ".join(f"{{{i}}}" for i in range(len(self.arguments)))
        return f"{self.name}({places})", f"{self.name}_fast({places})" if fast else None


@cache
def _function(meaning: str) -> Callable[..., Any]:
    function: Callable[..., Any] = eval(meaning)  # the owner's text is trusted, like a spec's reference
    return function


def load(path: str | Path, new: bool = True) -> Proposal:
    """Read a proposal. ``new``: also check the proposal's reference, and that the vocabulary lacks the
    primitive. Raises SpecError."""
    return read(path, Proposal, _check if new else lambda made: None)


def imports(source: str) -> str:
    """The imports that an author's functions need."""
    used = set(re.findall(r"\w+", source))
    values = sorted(used.intersection(exports()["values"]))
    lines = ["import math"] if re.search(r"(?<![\w.])math\.", source) else []
    lines += ["from typing import Any", ""]
    lines += ["import cutlass"] if re.search(r"\bcutlass\.", source) else []
    lines += ["import cutlass.cute as cute"] if "cute" in used else []
    lines += ["from cutlass import Float32"] if "Float32" in used else []
    lines += ["", f"from primitives.device.values import {', '.join(values)}"] if values else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def parse(text: str) -> Proposal:
    """Parse a proposal from a run's journal. The proposal was already checked when the run began. Raises
    SpecError."""
    return of_text(Path("the run's proposal"), text, Proposal, lambda made: None)


def _check_name(name: str, place: str) -> None:
    if not VALUE_NAME.fullmatch(name) or keyword.iskeyword(name) or hasattr(builtins, name):
        rule = "use a-z, 0-9 and _, a letter first, and no word of Python's own"
        raise fault(f"{name!r} is not a valid name; {rule}", place)


def _check(proposal: Proposal) -> None:
    """Check that the reference is elementwise, finite at usual arguments, and new to the vocabulary."""
    import torch

    from coda_agent.verifier.numerics.reference import MISTAKES

    device = {*exports(), *(name for names in exports().values() for name in names)}
    if proposal.name in OPERATIONS or {proposal.name, f"{proposal.name}_fast"} & device:
        raise BadReference(f"primitives has {proposal.name!r} already: take another name", key="name")
    used = {node.id for node in ast.walk(ast.parse(proposal.text)) if isinstance(node, ast.Name)}
    if idle := [argument for argument in proposal.arguments if argument not in used]:
        raise BadReference(f"reference: does not use {', '.join(idle)}: leave it out", key="arguments")
    generator = torch.Generator().manual_seed(0)
    usual = [uniform(usual_range(proposal.interval(a)), generator).double() for a in proposal.arguments]
    try:
        found = proposal.truth(*usual)
        turned = proposal.truth(*(x.mT[: SIZE // 2] for x in usual))
        whole = isinstance(found, torch.Tensor) and found.shape == usual[0].shape
        if not whole or not torch.equal(found.mT[: SIZE // 2].nan_to_num(), turned.nan_to_num()):
            raise BadReference(f"reference: not element by element: {SCOPE}")
        if found.dtype != torch.float64:
            raise BadReference(
                f"reference: gives {found.dtype}; leave out casts: * 1.0 makes a condition a number"
            )
        proposal.truth(*(x.float() for x in usual))
    except MISTAKES as error:
        raise BadReference(f"reference: {str(error).splitlines()[0]}") from None
    if not bool(found.isfinite().all()):
        at = int((~found.isfinite()).flatten().int().argmax())
        place = ", ".join(
            f"{a} = {float(x.flatten()[at]):.6g}" for a, x in zip(proposal.arguments, usual, strict=True)
        )
        raise BadReference(f"reference: not finite at {place}, which is in the domain", key="domain")
    for name, operation in OPERATIONS.items():
        if operation.cute and operation.torch and _agree(operation.torch, usual, found):
            raise BadReference(f"reference: this is {name}, which is there already")
    if proposal.derivative_of is not None:
        _check_derivative(proposal, usual, found)


def _agree(meaning: Callable[..., Any], usual: Sequence[Tensor], found: Tensor) -> bool:
    import torch

    try:
        other = meaning(torch, *usual)
    except TypeError:  # this operation takes another number of arguments
        return False
    return isinstance(other, torch.Tensor) and torch.allclose(
        other.double(), found, rtol=1e-9, atol=0, equal_nan=True
    )


def _check_derivative(proposal: Proposal, usual: Sequence[Tensor], found: Tensor) -> None:
    import torch

    of = OPERATIONS[str(proposal.derivative_of)].torch
    inputs = [x.clone().requires_grad_() for x in usual]
    try:
        assert of is not None
        (slope,) = torch.autograd.grad(of(torch, *inputs).sum(), inputs[0])
    except (AssertionError, TypeError, RuntimeError):
        words = f"{proposal.derivative_of} is not a differentiable function of {len(usual)} argument(s)"
        raise BadReference(words, key="derivative_of") from None
    if not torch.allclose(slope, found, rtol=1e-6, atol=1e-9):
        worst = float((slope - found).abs().max())
        words = f"reference: not the derivative of {proposal.derivative_of}: off by up to {worst:.3g}"
        raise BadReference(words, key="derivative_of")


def usual_range(interval: tuple[float, float]) -> tuple[float, float]:
    """Return the part of an interval in which activations usually lie. If this part is empty, return the
    interval's finite part."""
    low, high = (max(-LARGEST, min(LARGEST, end)) for end in interval)
    if max(low, -USUAL) < min(high, USUAL):
        return max(low, -USUAL), min(high, USUAL)
    return low, high


def uniform(interval: tuple[float, float], generator: Any) -> Tensor:
    import torch

    low, high = interval
    drawn = torch.rand(SIZE, SIZE, generator=generator, dtype=torch.float64)
    return (low * (1 - drawn) + high * drawn).float().clamp(low, high)
