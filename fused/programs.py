"""Load the accepted programs by name, and adapt a program to the dtypes of a call's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from ruamel.yaml import YAML

from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import DTYPES
from coda_agent.primitives.system.files import KERNELS, SPECS

NARROW = ("bf16", "fp16")
NAMES = {torch_dtype(name): name for name in DTYPES}
Dtypes = tuple[tuple[str, torch.dtype], ...]


class Order(NamedTuple):
    """The order of a kernel's arguments and results in the spec. The program itself sorts them by name."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@cache  # parsing the specs takes a second
def accepted() -> Mapping[str, tuple[Program, Order]]:
    """Every accepted kernel's program and ``Order``, by name."""
    texts = {path.name.removesuffix(".program.json"): path for path in KERNELS.glob("*.program.json")}
    return {
        name: (Program.from_json(path.read_text(encoding="utf-8")), _order(name))
        for name, path in sorted(texts.items())
        if not name.endswith(".raw")
    }


def _order(name: str) -> Order:
    """The order in which a kernel's spec names its inputs and outputs."""
    spec = YAML(typ="safe").load((SPECS / f"{name}.yaml").read_text(encoding="utf-8"))
    return Order(tuple(spec["inputs"]), tuple(spec["outputs"]))


def matrices(program: Program) -> str:
    """The dtype of a program's first 16-bit input matrix. For a program without such a matrix, the result is
    fp32 if an input matrix is fp32, and otherwise bf16."""
    kinds = [t.dtype for t in program.signature.inputs.values() if len(t.shape) == 2 and t.dtype in DTYPES]
    return next((kind for kind in kinds if kind in NARROW), kinds[0] if kinds else "bf16")


class Typed(NamedTuple):
    """A program that is adapted to the dtypes of given tensors. ``wide``: whether all matrices are fp32; then
    only the interpreter can run the program."""

    program: Program
    wide: bool


def typed(program: Program, given: Dtypes) -> Typed:
    """Adapt the program to inputs of these dtypes. If the program declares 16-bit matrices, the given
    matrices may have another float dtype, which must be the same for all of them. A vector that the program
    declares in the matrices' dtype may have the dtype of the given matrices, or fp32. Raises TypeError for
    other dtypes."""
    signature, own = program.signature, matrices(program)
    found = {n: d for n, d in given if own in NARROW and signature.inputs[n].dtype == own}
    first = next((d for n, d in found.items() if len(signature.inputs[n].shape) == 2), torch_dtype(own))
    first = first if first in NAMES else torch_dtype(own)
    wide = first == torch.float32 and own in NARROW
    for name, dtype in given:
        tensor = signature.inputs[name]
        wanted = {first} if name in found else {torch_dtype(tensor.dtype)}
        if name in found and len(tensor.shape) == 1:
            wanted = {first, torch.float32}
        if dtype not in wanted:
            said = " or ".join(sorted(str(d) for d in wanted))
            raise TypeError(f"{signature.name}: {name} is {dtype}, but must be {said}")
    if wide:
        return Typed(program, True)
    inputs = {n: t._replace(dtype=NAMES[found[n]]) if n in found else t for n, t in signature.inputs.items()}
    outputs = {}
    for name, tensor in signature.outputs.items():
        # the gradient of a vector in fp32 stays in fp32, like its other gradients under autocast
        wide = len(tensor.shape) == 1 and found.get(name.removeprefix("d_")) == torch.float32
        adapted = tensor._replace(dtype="fp32" if wide else NAMES[first])
        outputs[name] = adapted if found and tensor.dtype == own else tensor
    return Typed(program._replace(signature=signature._replace(inputs=inputs, outputs=outputs)), False)


def output_dtype(how: Typed, name: str) -> torch.dtype:
    declared = how.program.signature.outputs[name].dtype
    return torch.float32 if how.wide else torch_dtype(declared)
