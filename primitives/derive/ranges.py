"""Join outputs that are ranges of one tile's columns, such as q, k and v, because a backward reads the
gradient of the whole tile."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program, sizes_named
from coda_agent.primitives.lang.signature import TensorType


class Joined(NamedTuple):
    """A program with joined outputs. ``parts``: for each joined output, the names of its ranges in order."""

    program: Program
    parts: dict[str, tuple[str, ...]]

    def named(self, outputs: Collection[str]) -> tuple[str, ...]:
        """Replace the names of ranges by the name of their joined output. Raises ProgramError if
        ``outputs`` has only some ranges of a tile."""
        names = list(outputs)
        for whole, parts in self.parts.items():
            present = [n for n in parts if n in names]
            if present and len(present) < len(parts):
                raise ProgramError(
                    "of",
                    f"the backward takes the gradients of {', '.join(parts)} as one tile: ask for all of "
                    f"them, not for {present[0]!r} alone",
                )
            if present:
                names[names.index(present[0])] = whole
        ranges = {n for parts in self.parts.values() for n in parts}
        return tuple(n for n in names if n not in ranges)


def joined(program: Program) -> Joined:
    """If some outputs are ranges that together contain all columns of a tile, join them into one output, such
    as q, k and v into q_k_v. The program's nodes keep their numbers."""
    types, tiles = program.types(), dict[int, dict[Dim, str]]()
    for name, index in program.outputs.items():
        if types[index].kind == "range":
            first, _ = sizes_named(program.nodes[index])
            tiles.setdefault(program.nodes[index].args[0], {})[Dim.parse(first)] = name
    outputs, tensors, wholes = dict(program.outputs), dict(program.signature.outputs), {}
    for tile, ranges in tiles.items():
        at, parts = Dim({}), list[str]()
        while at in ranges:
            parts.append(ranges[at])
            at = at + tensors[parts[-1]].shape[1]
        if at == types[tile].shape[1] and len(parts) == len(ranges):
            dtype = tensors[parts[0]].dtype
            for name in parts:
                del outputs[name], tensors[name]
            whole = "_".join(parts)
            while whole in {**tensors, **program.signature.inputs}:
                whole += "_"
            outputs[whole], tensors[whole] = tile, TensorType(types[tile].shape, dtype)
            wholes[whole] = tuple(parts)
    signature = program.signature._replace(outputs=tensors)
    return Joined(program._replace(signature=signature, outputs=outputs), wholes)
