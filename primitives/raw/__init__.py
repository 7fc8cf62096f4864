"""Compile edited CuTeDSL, which is untrusted code, into a checked object file.

Edited code runs in one kind of process only: a confined child (``primitives.raw.confine``). The child's
parent is a process that compiles and uses no GPU. The child gives up its rights before it reads the code.
Then the child checks the code's language (``primitives.raw.language``), and imports and compiles the code.
The result is an object file, which ``primitives.raw.objects`` checks as hostile bytes. The checked file is
cached under a hash of the code and of everything else on which the object depends. ``load`` returns the
object's function. No other process imports the code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.jit import compile_kernel, import_file, import_quack, noting_stages
from coda_agent.primitives.compiler.lowered import GemmKernel, Lowered, VectorKernel
from coda_agent.primitives.compiler.split import ORDER
from coda_agent.primitives.frozen_names import device
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.raw import child
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.language import check
from coda_agent.primitives.raw.objects import inspect, same_host
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import cache_dir, write_atomic

FORMAT = 2  # version of the cached objects, and of the checks on code and objects
FUNCTION = "func"  # the function that an object exports
MOST_STAGES = 100  # more pipeline stages than shared memory can hold
Within = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Wanted:
    """A kernel of edited code to compile. ``schedule`` is None for a vector kernel. ``sizes`` determine the
    widths of heads."""

    lowered: Lowered
    kernel: GemmKernel | VectorKernel
    schedule: Schedule | None
    sizes: Mapping[str, int]

    def path(self) -> Path:
        """The kernel's object file. Schedules that differ only in the size of the rasterisation group share
        the file, because this size is a launch argument."""
        schedule = self.schedule._replace(swizzle=8).to_json() if self.schedule else None
        periods = [a.period(self.sizes) for a in self.kernel.arguments if a.period]
        if isinstance(self.kernel, GemmKernel):
            periods += self.kernel.head_widths(self.sizes)
        key = json.dumps([schedule, periods, *([ORDER] if self.schedule and self.schedule.split else [])])
        name = f"{self.kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        return _folder(self.lowered) / f"{name}.o"


def _folder(lowered: Lowered) -> Path:
    return cache_dir() / "raw" / f"{lowered.hash}.{FORMAT}"


@dataclass(frozen=True)
class Built:
    """The result of compiling a kernel. ``stages``: the pipeline stages of the kernel's mainloop.
    ``seconds``: the compile time. The confined child reports both numbers, so they may be false.
    ``own_launch``: whether the object's launch code equals the launch code of the unedited kernel. The two
    launch codes differ if an edit changes resources or launches, or if the object is forged."""

    cubin: bytes
    stages: tuple[int, int, int] | None
    seconds: float
    own_launch: bool


def load(wanted: Wanted) -> Callable[..., Any]:
    """Load the kernel's function from its object. If the object is missing, a worker process builds it first.
    Raises CompileError."""
    import cutlass.cute as cute

    path = wanted.path()
    if path not in _loaded:
        if not path.exists() and not workers.run_all(_build, [wanted])[0]:
            refused = _refusal(wanted)
            why = refused.read_text(encoding="utf-8") if refused.exists() else "its compiler died"
            raise CompileError(f"{wanted.kernel.name}: the edited text does not compile: {why}")
        try:  # others may write to the cache folder, so check the bytes that are loaded
            inspect(child.read_untrusted(path))
        except RawError as error:
            raise CompileError(f"{path}: {error.message}", error.code) from None
        _loaded[path] = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
    return _loaded[path]


_loaded: dict[Path, Callable[..., Any]] = {}


def packed(lowered: Lowered) -> dict[str, str]:
    """Return the cached object files of edited code, and each object's file of notes (see ``Built``). Another
    machine can store these files with ``unpack``, instead of compiling the code. The result maps file names
    to the files' contents, compressed by zlib and encoded in base64."""
    files = [path for notes in _folder(lowered).glob("*.json") for path in (notes, notes.with_suffix(".o"))]
    return {
        path.name: base64.b64encode(zlib.compress(child.read_untrusted(path), 9)).decode()
        for path in sorted(files)
    }


def unpack(lowered: Lowered, given: Mapping[str, str]) -> None:
    """Check the files that ``packed`` returned on another machine, and store them on this machine. Notes are
    stored last, because an object counts as complete once its notes exist. Raises CompileError."""
    for name in sorted(given, key=lambda name: name.endswith(".json")):
        try:
            if not _NAME.fullmatch(name):
                raise RawError("object", f"{name!r} is not an object's name")
            unzip = zlib.decompressobj()
            data = unzip.decompress(base64.b64decode(given[name], validate=True), child.MOST_OBJECT)
            if not unzip.eof:
                raise RawError("object", "cut short, or too large")
            if name.endswith(".o"):
                inspect(data)
            else:
                _notes(json.loads(data))
        except (RawError, ValueError, zlib.error) as error:
            raise CompileError(f"{name}: {error}", "object") from None
        write_atomic(_folder(lowered) / name, data)


_NAME = re.compile(r"\w{1,64}-[0-9a-f]{32}\.(o|json)")


def _build(wanted: Wanted) -> bool:
    """Build one object, in a worker process. Return whether the code compiles."""
    refused = _refusal(wanted)
    refused.unlink(missing_ok=True)
    try:
        build(wanted, Path(os.environ["CUTE_DSL_DUMP_DIR"]))
    except CompileError as error:
        write_atomic(refused, str(error))
        return False
    return True


def _refusal(wanted: Wanted) -> Path:
    """The file that says why the code does not compile."""
    return wanted.path().with_suffix(".why")


def build(wanted: Wanted, scratch: Path) -> Built:
    """Compile in a confined child, unless the object is cached. Call this function in a process that compiles
    and uses no GPU. The compiler of this process must write its files to the empty folder ``scratch``. Raises
    CompileError."""
    path = wanted.path()
    notes = path.with_suffix(".json")
    if not notes.exists():
        try:
            told, data = _compile_confined(wanted, scratch)
            inspect(data)
            told = told | {"own_launch": same_host(data, _before(wanted, scratch))}
        except RawError as error:
            raise CompileError(error.message, error.code, error.line) from None
        finally:
            child.empty(scratch)
        write_atomic(path, data)
        write_atomic(notes, json.dumps(told))
    return Built(inspect(child.read_untrusted(path)), *_notes(json.loads(notes.read_text(encoding="utf-8"))))


def _before(wanted: Wanted, scratch: Path) -> bytes:
    """The object of the unedited kernel. All edits of the kernel use the same cached object. Raises RawError
    if compiling fails."""
    plain = wanted.lowered.unedited
    assert plain is not None  # this is called only for edited code
    honest = replace(wanted, lowered=replace(wanted.lowered, text=plain.text, hash=plain.hash))
    path = honest.path()
    if not path.exists():
        write_atomic(path, _compile_confined(honest, scratch)[1])
    return child.read_untrusted(path)


def _notes(told: Any) -> tuple[tuple[int, int, int] | None, float, bool]:
    """Check the notes of an object, and return its ``stages``, ``seconds`` and ``own_launch`` (see
    ``Built``). Raises ValueError for invalid notes."""
    match told:
        case {"stages": stages, "seconds": float(seconds), "own_launch": bool(own)} if _three(stages):
            return stages and tuple(stages), seconds, own
    raise ValueError(f"{str(told)[:200]!r} is not a valid record of an object")


def cubin(wanted: Wanted, scratch: Path, within: Within) -> tuple[bytes, str]:
    """Compile as ``build`` does, but without the cache. Return the cubin, and the path of the file that holds
    the edited code. The compilation runs inside the context that ``within`` returns for this path. Raises
    CompileError."""
    try:
        _, data = _compile_confined(wanted, scratch, within)
        return inspect(data), str(_source(wanted, scratch))
    except RawError as error:
        raise CompileError(error.message, error.code, error.line) from None


def _source(wanted: Wanted, scratch: Path) -> Path:
    return scratch / f"{wanted.lowered.module}.py"


def _compile_confined(
    wanted: Wanted, scratch: Path, within: Within = nullcontext
) -> tuple[dict[str, Any], bytes]:
    """Compile in a confined child. Return the child's notes and the object. Raises RawError on failure."""
    child.empty(scratch)
    _import_compilers()
    source = _source(wanted, scratch)
    source.write_text(wanted.lowered.text, encoding="utf-8")
    target = scratch / wanted.path().name
    answer = child.run(lambda: _compile(wanted, source, target, within), scratch)
    match answer:
        case {"stages": stages, "seconds": float(seconds)} if (
            _three(stages) and 0 <= seconds <= child.SECONDS
        ):
            return {"stages": stages, "seconds": round(seconds, 3)}, child.read_untrusted(target)
    if refused := child.refusal(answer, wanted.lowered.text):
        raise refused
    raise RawError("forged", f"the compiling child said {str(answer)[:200]!r}, which is not an answer")


def _three(stages: object) -> bool:
    return stages is None or (
        isinstance(stages, list)
        and len(stages) == 3
        and all(isinstance(n, int) and 0 <= n < MOST_STAGES for n in stages)
    )


def _compile(wanted: Wanted, source: Path, target: Path, within: Within) -> dict[str, Any]:
    """Compile in the confined child, the only place where edited code is parsed, imported and run."""
    lowered, kernel = wanted.lowered, wanted.kernel
    check(lowered.text, names(lowered))
    import_file(lowered.module, source)
    start = time.monotonic()
    with noting_stages() as stages, within(str(source)):
        if isinstance(kernel, GemmKernel):
            _same_arguments(lowered, kernel)
            if kernel.index is not None:
                _same_base(lowered, kernel, device("gathered").GatheredGemm)
        elif any(argument.role == "bounds" for argument in kernel.arguments):
            _same_base(lowered, kernel, device("grouped").Bounds)
        made = compile_kernel(lowered, kernel, wanted.schedule, wanted.sizes)
    made.export_to_c(object_file_path=str(target), function_name=FUNCTION)  # type: ignore[attr-defined]
    return {"stages": stages[-1] if stages else None, "seconds": time.monotonic() - start}


def names(lowered: Lowered) -> list[str]:
    """The classes that edited code must define."""
    return [g.name for g in lowered.gemms] + [v.name for v in lowered.vectors]


def _same_arguments(lowered: Lowered, kernel: GemmKernel) -> None:
    """Check that the epilogue arguments keep their order, because the launcher passes them in the order of
    the unedited code."""
    fields = getattr(sys.modules[lowered.module], kernel.name).EpilogueArguments._fields
    wanted = [a.name for a in kernel.arguments]
    if [name for name in fields if name in wanted] != wanted:
        raise RawError(
            "arguments",
            f"{kernel.name}: its EpilogueArguments are {', '.join(fields)}; they must have "
            f"{', '.join(wanted) or 'none'} in this order, as in the text that was given",
            None,
        )


def _same_base(lowered: Lowered, kernel: GemmKernel | VectorKernel, base: type) -> None:
    """Check that the kernel still inherits from the project's class that clamps offsets or row indices. The
    clamping is needed, because loads do not check offsets or row indices. The language check ensures that no
    edit changes the clamping."""
    if not issubclass(getattr(sys.modules[lowered.module], kernel.name), base):
        message = f"{kernel.name} must stay a class of {base.__name__}, as in the text that was given"
        raise RawError("kernel", message)


def _import_compilers() -> None:
    """Import, before the fork, everything that compiling needs. Imports take seconds, and the confined child
    can read few files."""
    import_quack()
    for module in ("finish", "gathered", "grouped", "heads", "lanes", "mainloop", "tables"):
        device(module)
