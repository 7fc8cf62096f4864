"""Join outputs that are ranges of one tile's columns, such as q, k and v. A backward reads the whole tile."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program, TensorType, sizes_named


class Joined(NamedTuple):
    """A program that returns each tile whole. ``Joined`` also maps each whole output to the names of its
    ranges."""

    program: Program
    parts: dict[str, tuple[str, ...]]

    def named(self, outputs: Collection[str]) -> tuple[str, ...]:
        """Replace the ranges of a tile by the tile's name. Raises ProgramError if some of them are
        missing."""
        found = list(outputs)
        for whole, parts in self.parts.items():
            given = [n for n in parts if n in found]
            if given and len(given) < len(parts):
                said = f"the gradients of {', '.join(parts)} come in side by side"
                raise ProgramError("of", f"{said}: ask for all of them, not for {given[0]!r} alone")
            if given:
                found[found.index(given[0])] = whole
        ranges = {n for parts in self.parts.values() for n in parts}
        return tuple(n for n in found if n not in ranges)


def joined(program: Program) -> Joined:
    """Join outputs that together are all columns of a tile into one output, such as q, k and v into q_k_v.
    The program's nodes keep their numbers."""
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
