"""Count the machine instructions for each line of lowered code.

CuTeDSL can record for each instruction the file and line where its operation was traced. The recording does
not change the instructions. An operation in a helper function, such as ``sigmoid`` or ``pack``, counts for
the lowered line that calls the helper. Each instruction counts once, however often it runs. An epilogue is
fully unrolled, so its counts are for one thread and one tile.

Compilation needs no GPU. It happens in a child process, which runs this module with ``python -m``.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from coda_agent.primitives import raw
from coda_agent.primitives.compiler.compile_error import CompileError, refusal
from coda_agent.primitives.compiler.cubin import tool
from coda_agent.primitives.compiler.jit import compile_kernel, import_quack, load_module
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import GemmKernel, Lowered, VectorKernel
from coda_agent.primitives.compiler.probe_schedules import probes
from coda_agent.primitives.lang.schedule import Schedule, by_step, schedules_json
from coda_agent.primitives.runtime.compile import COMPILE_SECONDS, _environment
from coda_agent.primitives.system import subprocesses
from coda_agent.primitives.system.files import cached_json

FORMAT = 3  # version of the cached listings
LOWERED = ""  # stands for the lowered code's own file name

_KINDS = {
    "HGMMA": "HGMMA QGMMA",
    "FP32": "FADD FMUL FFMA FMNMX FSEL FSET FSETP FCHK",
    "MUFU": "MUFU",
    "convert": "F2F F2FP F2I F2IP I2F I2FP FRND",
    "shuffle": "SHFL REDUX VOTE MATCH",
    "shared": "LDS LDSM STS STSM ATOMS",
    "global": "LDG LD STG ST ATOM ATOMG RED REDG",
    "TMA": "UTMALDG UTMASTG UTMAREDG UTMAPF UBLKCP UBLKRED UBLKPF",
    "spill": "LDL STL",
    "sync": "BAR SYNCS WARPSYNC WARPGROUP DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR UTMACMDFLUSH UCGABAR_ARV "
    "UCGABAR_WAIT ACQBULK",
    "integer": "IADD3 IMAD IMNMX ISETP LEA LOP3 MOV PLOP3 POPC PRMT SEL SHF VIADD VIADDMNMX VIMNMX",
}
OTHER = "other"
KINDS = (*_KINDS, OTHER)  # kinds of instructions, in display order
Key = TypeVar("Key", int, str)
_KIND = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: its byte address in the kernel, its text, and the source line that caused it.
    ``file``: LOWERED, a file of a library or of the project, or "?" if unknown."""

    address: int
    text: str
    file: str
    line: int

    @property
    def kind(self) -> str:
        """The instruction's kind, one of KINDS."""
        opcode = re.sub(r"^@!?U?P\w+\s+", "", self.text)
        name = re.match(r"\w+", opcode)
        return _KIND.get(name[0], OTHER) if name else OTHER


@dataclass(frozen=True)
class Listing:
    """A kernel's instructions, in order of address. ``schedule``: None for a vector kernel. ``source``: the
    lines of the kernel's class in the lowered code, by line number. ``part``: which of the step's launches
    this is, from 1, and how many launches the step has (two for a ``split`` step)."""

    kernel: str
    schedule: Schedule | None
    source: dict[int, str]
    instructions: tuple[Instruction, ...]
    part: tuple[int, int] = (1, 1)

    def total(self) -> Counter[str]:
        """The number of instructions of each kind."""
        return Counter(i.kind for i in self.instructions)

    def lines(self) -> dict[int, Counter[str]]:
        """The number of instructions of each kind, by line of the lowered code."""
        return _counted((i.line, i.kind) for i in self.instructions if i.file == LOWERED)

    def elsewhere(self) -> dict[str, Counter[str]]:
        """For each file except the lowered code, the number of instructions of each kind. The file with the
        most instructions comes first. These files contain the mainloop, the scheduler and the TMA stores."""
        counts = _counted((i.file, i.kind) for i in self.instructions if i.file != LOWERED)
        return dict(sorted(counts.items(), key=lambda item: -item[1].total()))


def _counted(pairs: Iterable[tuple[Key, str]]) -> dict[Key, Counter[str]]:
    counts: dict[Key, Counter[str]] = {}
    for key, kind in pairs:
        counts.setdefault(key, Counter())[kind] += 1
    return dict(sorted(counts.items()))


def disassemble(kernel: KernelSource, sizes: Mapping[str, int]) -> tuple[Listing, ...]:
    """Compile every kernel of a program for sm_90a, without a GPU, and read each kernel's instructions. A
    step with two launches gives two listings, in order.

    ``sizes``: the sizes of the static dims. A step without a schedule uses its first probe schedule
    (``probe_schedules``). Compilation runs in a child process; edited code compiles in a confined child of
    that process. Results are cached by content. Raises CompileError and CacheError.
    """
    lowered = kernel.lowered
    static = {dim: sizes[dim] for dim in kernel.program.signature.static}
    chosen = schedules_json(kernel.fixed)
    # the program's hash is part of the key, because the lowered code does not state the tiles' dtypes
    own = kernel.program._replace(schedule={}).hash
    key = json.dumps([FORMAT, own, lowered.hash, static, chosen], sort_keys=True)
    request = kernel.to_json() | {"sizes": static, "schedules": chosen}
    text = lowered.text.splitlines()

    def listings(rows: list[dict[str, Any]]) -> tuple[Listing, ...]:
        return tuple(_listing(row, text) for row in rows)

    return cached_json("sass", key, lambda: _run_child(json.dumps(request)), listings)


def _listing(row: dict[str, Any], text: list[str]) -> Listing:
    number, instructions = row["launch"], tuple(Instruction(*fields) for fields in row["instructions"])
    launches = Schedule.from_json(row["step"]).launches if row["step"] else (None,)
    source = dict(_class(row["kernel"], text))
    return Listing(row["kernel"], launches[number], source, instructions, (number + 1, len(launches)))


def _class(name: str, text: list[str]) -> Iterator[tuple[int, str]]:
    """The numbered lines of a class in the lowered code."""
    start = next(i for i, line in enumerate(text) if re.match(rf"class {name}\b", line))
    for index in range(start, len(text)):
        if index > start and re.match(r"\S", text[index]):
            return
        if text[index].strip():
            yield index + 1, text[index]


def _run_child(request: str) -> str:
    """Send a request to a child process; return the child's answer. Raises CompileError if the compiler
    refuses the code, or if the child dies or takes too long."""
    with tempfile.TemporaryDirectory(prefix="coda-sass-") as scratch:
        dump = {"CUTE_DSL_LINEINFO": "1", "CUTE_DSL_DUMP_DIR": scratch, "CUTE_DSL_KEEP_CUBIN": "1"}
        module, environment = "coda_agent.primitives.runtime.sass", _environment() | dump
        begin = partial(subprocesses.start_module, module, scratch, env=environment)
        status, answer, errors = subprocesses.attend(begin, request, COMPILE_SECONDS)
    if status is None:
        raise CompileError(f"the compiler did not finish in {COMPILE_SECONDS} s")
    if status:
        raise CompileError(refusal(errors) or f"the compiler died with status {status}")
    return answer


def _answer(request: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    source = KernelSource.from_json(request)
    lowered = source.lowered
    sizes, wanted = request["sizes"], list[tuple[GemmKernel | VectorKernel, Schedule | None, int]]()
    chosen = by_step(request["schedules"])
    for gemm in lowered.gemms:
        schedule = chosen.get(gemm.step) or probes(source.program, gemm, sizes)[0]
        wanted += [(gemm, schedule, launch) for launch in range(len(schedule.launches))]
    wanted += [(vector, None, 0) for vector in lowered.vectors]
    return [_row(lowered, kernel, step, launch, sizes, scratch) for kernel, step, launch in wanted]


def _cubin(
    lowered: Lowered,
    kernel: GemmKernel | VectorKernel,
    schedule: Schedule | None,
    sizes: Mapping[str, int],
    scratch: Path,
) -> tuple[bytes, str]:
    """Return a kernel's cubin, and the path of the lowered code in the cubin's line information."""
    if lowered.edited:
        return raw.cubin(raw.Wanted(lowered, kernel, schedule, sizes), scratch, _lines_of)
    path = load_module(lowered).__file__ or ""
    with _lines_of(path):
        compile_kernel(lowered, kernel, schedule, sizes)
    (cubin,) = scratch.rglob("*.cubin")
    data = cubin.read_bytes()
    cubin.unlink()  # because the next kernel's cubin may have the same name
    return data, path


def _lines_of(path: str) -> AbstractContextManager[None]:
    """Make the line information of operations that are traced in the ``with`` block refer to the lowered code
    at ``path``. An operation gets the innermost line of its call stack that is in this file."""
    from cutlass._mlir import ir
    from cutlass._mlir_helpers.op import loc_transform

    def located(usual: Any) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != path:
            frame = frame.f_back
        return usual if frame is None else ir.Location.file(path, frame.f_lineno, 0)

    return loc_transform(located)


def _row(
    lowered: Lowered,
    kernel: GemmKernel | VectorKernel,
    step: Schedule | None,
    launch: int,
    sizes: Mapping[str, int],
    scratch: Path,
) -> dict[str, Any]:
    """The fields of the Listing of one launch. ``launch``: the number of the launch in the schedule ``step``,
    from 0."""
    data, path = _cubin(lowered, kernel, step and step.launches[launch], sizes, scratch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(data)
        cubin.flush()
        instructions = list(parse(tool("nvdisasm", "-c", "-g", cubin.name), path))
    return {
        "kernel": kernel.name,
        "step": step and step.to_json(),
        "launch": launch,
        "instructions": [[i.address, i.text, i.file, i.line] for i in instructions],
    }


_PLACE = re.compile(r'\s*//## File "(.*)", line (\d+)')
_CODE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")


def parse(sass: str, lowered: str) -> Iterator[Instruction]:
    """Parse the output of ``nvdisasm -c -g``. ``lowered``: the path of the lowered code. In the instructions'
    texts, addresses replace labels."""
    place, waiting = ("?", 0), []
    labels: dict[str, str] = {}
    instructions: list[Instruction] = []
    for line in sass.splitlines():
        if at := _PLACE.match(line):
            place = (LOWERED if at[1] == lowered else _short(at[1]), int(at[2]))
        elif label := _LABEL.match(line):
            waiting.append(label[1])
        elif code := _CODE.match(line):
            labels |= dict.fromkeys(waiting, f"{int(code[1], 16):#06x}")
            waiting.clear()
            instructions.append(Instruction(int(code[1], 16), code[2], *place))
    while instructions and instructions[-1].text == "NOP":  # padding at the end of the kernel
        instructions.pop()
    for i in instructions:
        text = re.sub(r"`\((\.L_\w+)\)", lambda m: labels.get(m[1], m[1]), i.text)
        yield Instruction(i.address, text, i.file, i.line)


def _short(path: str) -> str:
    """A file's path relative to the folder of its package."""
    root = f"{Path(__file__).parents[2]}{os.sep}"
    return re.sub(r"^.*?/(?:site|dist)-packages/", "", path.removeprefix(root))


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that a compiler's prints do not mix with the answer
    import_quack()
    gc.freeze()  # the compiler's modules stay in memory, so garbage collections can skip their objects
    json.dump(_answer(json.load(sys.stdin), Path(sys.argv[1])), answers)
    answers.close()
