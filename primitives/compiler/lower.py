"""Lower a program to the text of one CuTeDSL module, and list each kernel's arguments.

Each GEMM step becomes a class (``gemm_codegen``), and the vector arithmetic after a step becomes small
kernels (``vector_codegen``). The lowering generates all names in the text. Each constant is written so that
Python reads back exactly the same number.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from coda_agent.primitives.compiler.gemm_codegen import StepWriter
from coda_agent.primitives.compiler.lowered import Argument, GemmKernel, Lowered, VectorKernel
from coda_agent.primitives.compiler.vector_codegen import bounds_writers, finish_writers
from coda_agent.primitives.lang.ir import OPERATIONS, Operation, Program
from coda_agent.primitives.lang.partition import cut

PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels")


def lower_edited(program: Program, text: str) -> Lowered:
    """Lower a program, then replace the lowered text by ``text``, an author's edit of
    ``editable(program)``."""
    plain = lower(program, hashed=False)
    named = [module for module in exports() if re.search(rf"\b{module}\b", text)]
    digest = _digest([text, plain.hash, *_device_sources(named)])
    return replace(plain, text=text, hash=digest, unedited=plain)


def editable(program: Program) -> str:
    """Return the lowered text that an author may edit. The classes in this text have names without a hash."""
    return lower(program, hashed=False).text


def lower(program: Program, *, hashed: bool = True) -> Lowered:
    """Lower a checked program. Without ``hashed``, the kernels' names have no hash. Raises ProgramError if
    QuACK's epilogue operators cannot express the program."""
    operations = tuple(OPERATIONS.get(node.op) for node in program.nodes)
    header, body, gemms, vectors = _written(program, program.hash, operations)
    digest = _digest([header, body, *_device_sources(_imported(header)), *map(version, PACKAGES)])
    suffix = f"_{digest[:12]}" if hashed else ""
    text = header + "\n\n" + re.sub(r"@@(\w+)", lambda m: m[1] + suffix, body)
    return Lowered(
        text,
        digest,
        tuple(replace(kernel, name=kernel.name + suffix) for kernel in gemms),
        tuple(replace(kernel, name=kernel.name + suffix) for kernel in vectors),
    )


@lru_cache(maxsize=64)
def _written(
    program: Program, program_hash: str, operations: tuple[Operation | None, ...]
) -> tuple[str, str, tuple[GemmKernel, ...], tuple[VectorKernel, ...]]:
    """The module's header, body and kernels, before a hash is appended to the kernels' names.

    ``program_hash`` and ``operations`` are arguments only so that the cache tells calls apart. Two programs
    that differ only in the sign of a zero compare equal, but have different hashes. A proposed primitive may
    redefine an operation. Then the program and its hash stay the same, but ``operations`` differ."""
    steps = cut(program)
    writers = [StepWriter(program, steps, step) for step in steps.gemms]
    bounds, finishes = bounds_writers(program, steps), finish_writers(program, steps)
    vectors = [(w.text(), w.kernel()) for w in bounds] + [(w.text(), w.kernel()) for w in finishes]
    body = "\n\n".join([w.text() for w in writers] + [text for text, _ in vectors])
    return _header(body), body, tuple(w.kernel() for w in writers), tuple(kernel for _, kernel in vectors)


def _digest(meant: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(meant).encode()).hexdigest()


DEVICE = Path(__file__).parents[1] / "device"
RESOURCES = ("Scalar", "TileLoad", "TileStore")  # QuACK resources that any lowered code may use


def resources() -> set[str]:
    """The QuACK resources that lowered code uses: ``RESOURCES``, and those that operations name."""
    found = [o.reduction or o.statistic or o.spread for o in OPERATIONS.values()]
    named = {name for how in found if how for name in re.findall(r"\b[A-Z]\w*", how.resource)}
    return {*RESOURCES, *named}.difference(*exports().values())


def _header(body: str) -> str:
    """The lowered module's docstring, and its imports from QuACK and ``primitives.device``."""
    used = set(re.findall(r"\w+", body))
    lines = ["import cutlass", "import cutlass.cute as cute", "from cutlass import Float32"]
    chosen: dict[str, Iterable[str]] = {"quack.epilogue.ops": resources()}
    chosen |= {f"primitives.device.{module}": names for module, names in exports().items()}
    for module, names in chosen.items():
        found = sorted(used.intersection(names))
        lines += [f"from {module} import {', '.join(found)}"] if found else []
    return (
        '"""Lowered by coda-agent from a program: do not edit, lower again."""\n\n' + "\n".join(lines) + "\n"
    )


@cache
def exports() -> dict[str, list[str]]:
    """Read the names in each device module's ``__all__`` without importing the module."""
    found = {}
    for path in sorted(DEVICE.glob("[a-z]*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                found[path.stem] = list(ast.literal_eval(statement.value))
    return found


@cache
def device_source(module: str) -> str:
    """The source of a device module. The hash of lowered code covers this source, because lowered code
    imports the module."""
    return (DEVICE / f"{module}.py").read_text(encoding="utf-8")


def _imported(text: str) -> list[str]:
    """The device modules that a text imports."""
    return re.findall(r"^from primitives\.device\.(\w+) import", text, re.M)


def _device_sources(modules: Iterable[str]) -> list[str]:
    """The sources of these device modules, and of all device modules that they import. So a change of any
    other device module does not change the hash."""
    pending, found = list(modules), dict[str, str]()
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = device_source(module)
            pending += _imported(found[module])
    return [found[module] for module in sorted(found)]


__all__ = [
    "PACKAGES",
    "Argument",
    "GemmKernel",
    "Lowered",
    "VectorKernel",
    "device_source",
    "editable",
    "exports",
    "lower",
    "lower_edited",
    "resources",
]
