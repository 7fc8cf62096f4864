"""The interpret gate's runs: a program against its spec's reference on a CPU, over families and sizes.

Each run is judged twice: as a kernel would store its outputs, and with outputs left in fp32. The second
sees mathematics that is almost right (GELU's other form, a sigmoid by pieces), which the rounding of
16-bit outputs hides, and which no kernel of the program could put right. There small values count as
much as large ones: an activation's tail must be right, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from random import Random
from typing import NamedTuple

from primitives.interpret import interpret
from primitives.ir import Program
from primitives.place import untransposed
from verifier import numerics, reference
from verifier.inputs import DTYPES, FAMILIES, ON_CPU, draw
from verifier.limits import Limits, of_stored, of_unrounded
from verifier.numerics import FEW, OutputError
from verifier.sizes import LARGEST_ON_CPU, between, hidden, small_sizes, stretched, together
from verifier.spec import Spec

STORED = "as stored"


class Run(NamedTuple):
    """Inputs by what draws them again."""

    sizes: Mapping[str, int]
    family: str
    seed: int
    long: bool = False

    def __str__(self) -> str:
        return f"inputs {self.family!r}, sizes {dict(self.sizes)}, seed {self.seed}"


def runs(spec: Spec, seed: int) -> Iterator[Run]:
    """Each family at hidden sizes of its own; the first also at the fixed small sizes, at each extent that a
    dim has in a case, where all are longer at once, and between the cases' extents. At one row and at few
    integers, of which much is exact: a handful of values makes poor statistics."""
    fresh = partial(Random(seed).getrandbits, 48)
    for sizes in small_sizes(spec):
        yield Run(sizes, "normal", fresh())
    for sizes in stretched(spec, fresh()):
        yield Run(sizes, "normal", fresh(), long=True)
    for family in (*FAMILIES, *ON_CPU):
        yield Run(hidden(spec, fresh(), LARGEST_ON_CPU), family, fresh())
    yield Run(hidden(spec, fresh(), LARGEST_ON_CPU, rows=1), "integers", fresh())
    for sizes in together(spec, fresh()):
        yield Run(sizes, "normal", fresh())
    for dim, sizes in between(spec, fresh()):
        yield Run(sizes, "integers" if sizes[dim] < FEW else "normal", fresh(), long=True)


def judged(spec: Spec, program: Program, run: Run) -> Iterator[tuple[str, list[OutputError]]]:
    """How the outputs were judged, in words, and what the error gate says: as stored, then unrounded, there
    value by value alone where a family is ``limits.EXTREME``."""
    sizes = run.sizes
    inputs = draw(spec, sizes, run.seed, family=run.family)
    truth, values = reference.oracle(spec, inputs, sizes), reference.fp32(spec, inputs, sizes)
    exact = numerics.exact_outputs(values, truth) if run.family == "integers" else frozenset()

    def errors(spec: Spec, program: Program, limits: Limits) -> list[OutputError]:
        yard = {name: values[name].to(DTYPES[output.dtype]) for name, output in spec.outputs.items()}
        return numerics.compare(spec, interpret(program, inputs), truth, yard, limits, exact)

    yield STORED, errors(spec, program, of_stored(run.family, run.long))
    wide = numerics.unrounded(spec), _unrounded(program)
    yield "not rounded", errors(*wide, of_unrounded(run.family, run.long))


def _unrounded(program: Program) -> Program:
    """The program with its outputs in fp32. One that a matmul reads is made twice: rounded as it was, for the
    matmul, and by its own name unrounded."""
    nodes, outputs = list(program.nodes), dict(program.outputs)
    types = {name: tensor._replace(dtype="fp32") for name, tensor in program.signature.outputs.items()}
    for name in _handed_on(program):
        read = f"{name} for a matmul"
        types[read], outputs[read] = program.signature.outputs[name], outputs[name]
        outputs[name] = len(nodes)
        nodes.append(nodes[outputs[read]])
    signature = program.signature._replace(outputs=types, updates={})
    return program._replace(signature=signature, nodes=tuple(nodes), outputs=outputs)


def _handed_on(program: Program) -> list[str]:
    """Outputs that one of the program's matmuls reads, and reads rounded."""
    operands = {untransposed(program, a) for n in program.nodes if n.op == "gemm" for a in n.args}
    return [name for name, index in program.outputs.items() if index in operands]
