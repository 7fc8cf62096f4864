"""Write a spec for a derived backward. The spec contains the references of the backward and the forward, and
the forward's sizes.

The ordinary gates then judge forward and backward as a pair. Inputs are drawn for the forward. The forward's
reference computes the tensors that the backward reads. The backward's results are compared with the gradient
that autograd derives from the forward's reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coda_agent.primitives.derive import NEXT, NEXT_SIZE, Derived, all_sizes
from coda_agent.primitives.derive.arrange import UNUSED
from coda_agent.primitives.derive.ranges import Joined, joined
from coda_agent.primitives.derive.reference import reference
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.verifier.apart import check_reference
from coda_agent.verifier.spec import file
from coda_agent.verifier.spec.model import Spec

NEXT_VALUE = "next"  # the output of the matmul after this kernel; d_next is the gradient of that output


class Pair(NamedTuple):
    """The program with the backward's matmuls, and the program's spec as YAML text."""

    program: Program
    text: str

    @property
    def spec(self) -> Spec:
        """Load the spec and run its reference. Raises SpecError, for example if the backward does not compute
        the gradient of its forward."""
        return file.of_text(Path(f"{self.program.signature.name}.yaml"), self.text, Spec, check_reference)


def pair(
    spec: Spec,
    program: Program,
    derived: Derived,
    of: Collection[str] | None = None,
    behind: str | None = None,
) -> Pair | None:
    """Write the spec of a derived backward; return None if the backward has no matmuls. ``of`` and
    ``behind``: the same arguments as for ``derive``. Raises ProgramError for an operation that has no PyTorch
    text."""
    if derived.program is None:
        return None
    whole = joined(program)
    of, program = None if of is None else whole.named(of), whole.program
    spelled = _Spelled(derived.widths, spec.static, spec.only)
    made = spelled(derived.program) if derived.widths else derived.program
    signature = made.signature
    forward, head = _forward(spec, whole, derived, behind), _head(derived)
    again = [f"{name} = {other}" for name, other in derived.same.items() if other in made.outputs]
    constants = [f"{name} = {value!r}" for name, value in spec.constants.items()]
    every = spec.signature().inputs | _coming(program, of, behind) | _read(derived)
    read = {n: spelled.tensor(t) for n, t in every.items() if n not in signature.inputs}
    lines = [
        f"name: {signature.name}",
        f"summary: Backward of {spec.name}, derived from its program.",
        f"dims: {json.dumps({d: spec.dims.get(d, 'width') for d in signature.dims})}",
        "inputs:",
        *_inputs(spec, signature.inputs, "  "),
        *([f"static: {json.dumps(list(signature.static))}"] if signature.static else []),
        *([f"only: {json.dumps(dict(signature.only))}"] if signature.only else []),
        "outputs:",
        *(f"  {n}: {json.dumps(_entry(t) | _updated(signature, n))}" for n, t in signature.outputs.items()),
        "forward:",
        *(["  inputs:", *_inputs(spec, read, "    ")] if read else []),
        *_block("  reference", [*constants, *forward]),
        *(_block("  head", head) if head else []),
        *_block("reference", [*reference(made).splitlines(), *again]),
        *_block("baseline", reference(made, cast=True).splitlines()),
        "cases:",
        *_cases(spec, derived, signature.dims),
        "accept: {speedup: 1.0}",
    ]
    return Pair(made, "\n".join(lines) + "\n")


class _Spelled(NamedTuple):
    """Replace each of the backward's ``widths`` by an expression of the forward's dims. ``static`` and
    ``only`` are those of the forward's spec."""

    widths: Mapping[str, Dim]
    static: tuple[str, ...]
    only: Mapping[str, tuple[int, ...]]

    def tensor(self, tensor: TensorType) -> TensorType:
        return tensor._replace(shape=tuple(map(self.dim, tensor.shape)))

    def dim(self, dim: Dim) -> Dim:
        known = {n: f"({d})" for n, d in self.widths.items()}
        return Dim.parse(re.sub(r"\w+", lambda found: known.get(found[0], found[0]), str(dim)))

    def __call__(self, program: Program) -> Program:
        own = program.signature
        inputs = {n: self.tensor(t) for n, t in own.inputs.items()}
        outputs = {n: self.tensor(t) for n, t in own.outputs.items()}
        names = {n for t in (*inputs.values(), *outputs.values()) for d in t.shape for n in d.names}
        dims = (*(d for d in own.dims if d not in self.widths), *sorted(names - set(own.dims)))
        static = tuple(d for d in self.static if d in names | set(own.static))
        only = {d: sizes for d, sizes in self.only.items() if d in static}
        return program._replace(
            signature=own._replace(inputs=inputs, outputs=outputs, dims=dims, static=static, only=only)
        ).check()


def _forward(spec: Spec, whole: Joined, derived: Derived, behind: str | None) -> list[str]:
    """Return the lines of the forward's reference. The first lines are the spec's own reference. Further
    lines compute the other tensors that the forward must store, join outputs that are column ranges of one
    tile, and compute the next matmul."""
    text = spec.reference
    if derived.saves:
        text = f"{text.rstrip()}\n{reference(whole.program._replace(outputs=dict(derived.saves)))}"
    joins = [f"{name} = cat(({', '.join(parts)}), 1)" for name, parts in whole.parts.items()]
    return [*text.splitlines(), *joins, *([f"{NEXT_VALUE} = {behind} @ w_next.mT"] if behind else [])]


def _coming(program: Program, of: Collection[str] | None, behind: str | None) -> dict[str, TensorType]:
    """The incoming gradients. Gradients that the backward does not read are included, so that the gates
    detect a derivative rule that wrongly drops a gradient. An output is left out if it depends on an
    operation without a derivative (a statistic), because gradients stop at that operation."""
    types, stops = program.types(), list[bool]()
    for node in program.nodes:
        stopped = bool(node.args) and OPERATIONS[node.op].derivative is None
        stops.append(stopped or any(stops[a] for a in node.args))
    chosen = {n: program.outputs[n] for n in of or program.outputs if n != behind}
    chosen = {n: i for n, i in chosen.items() if not stops[i] and types[i].kind not in ("head", "range")}
    return {f"d_{n}": program.signature.outputs[n] for n in chosen}


def _head(derived: Derived) -> list[str]:
    """The lines that compute the backward's pointwise part before its matmuls (``head``), and the gradients
    that are zero or equal another value."""
    lines = reference(derived.head).splitlines() if derived.head else []
    later = derived.program.outputs if derived.program else {}
    lines += [f"{name} = {other}" for name, other in derived.same.items() if other not in later]
    return lines + [f"d_{name} = {name} * 0.0" for name, why in derived.left.items() if why == UNUSED]


def _read(derived: Derived) -> dict[str, TensorType]:
    parts = [part for part in (derived.program, derived.head) if part]
    return {name: tensor for part in parts for name, tensor in part.signature.inputs.items()}


def _inputs(spec: Spec, tensors: Mapping[str, TensorType], indent: str) -> Iterable[str]:
    for name, tensor in tensors.items():
        entry = _entry(tensor)
        if name in spec.inputs:
            known = spec.inputs[name]
            entry |= known.model_dump(mode="json", include={"init", "domain"}, exclude_none=True)
        yield f"{indent}{name}: {json.dumps(entry)}"


def _entry(tensor: TensorType) -> dict[str, Any]:
    return {"shape": [str(d) for d in tensor.shape], "dtype": tensor.dtype}


def _updated(signature: Signature, output: str) -> dict[str, Any]:
    return {"updates": signature.updates[output]} if output in signature.updates else {}


def _block(key: str, lines: Iterable[str]) -> list[str]:
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    return [f"{key}: |", *(indent + line for line in lines)]


def _cases(spec: Spec, derived: Derived, dims: Iterable[str]) -> Iterable[str]:
    for case in spec.cases:
        sized = all_sizes(derived, {NEXT: NEXT_SIZE, **case.sizes})
        sizes = {d: sized[d] for d in dims}
        yield f"  - {json.dumps({'name': case.name, **sizes, 'bench': case.bench})}"
