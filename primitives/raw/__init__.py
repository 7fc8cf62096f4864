"""Raw CuTeDSL: a lowered text that an author has edited is code, not data. Edited text -> checked object.

It runs in one kind of place only: a child, forked from a process that compiles and holds no GPU, confined
(``primitives.raw.confine``) before it reads the text. There the language check (``primitives.raw.language``)
goes first, then the import, then the compile. What comes out is an object file, taken for hostile
(``primitives.raw.objects``) and kept under the hash of the text and all that went into it; ``load`` gives its
function. No other process imports the text.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primitives import workers
from primitives.compile import (
    CompileError,
    cache_dir,
    compile_gemm,
    compile_vector,
    import_file,
    noting_stages,
)
from primitives.files import write_atomic
from primitives.ir import Schedule
from primitives.lowered import GemmKernel, Lowered, VectorKernel
from primitives.raw.confine import confine
from primitives.raw.error import RawError
from primitives.raw.language import check
from primitives.raw.objects import inspect, same_host

FORMAT = 1  # of the notes beside an object
FUNCTION = "func"  # what an object exports
SECONDS = 120.0  # for one configuration: an honest one takes 2
MOST_OBJECT, MOST_ANSWER = 16 << 20, 1 << 20  # bytes
MOST_WORDS = 2000  # characters of what a compiler says
LAYERS = frozenset({"seccomp", "landlock"})  # without both nothing runs


@dataclass(frozen=True)
class Wanted:
    """A kernel of an edited text, a step's at one schedule; of ``sizes`` only heads' widths matter."""

    lowered: Lowered
    kernel: GemmKernel | VectorKernel
    schedule: Schedule | None
    sizes: Mapping[str, int]

    def path(self) -> Path:
        """Where its object is kept. Rasterisation is a launch argument: all group sizes share one."""
        schedule = self.schedule._replace(swizzle=8).to_json() if self.schedule else None
        periods = [a.period(self.sizes) for a in self.kernel.arguments if a.period]
        if isinstance(self.kernel, GemmKernel):
            periods += self.kernel.head_widths(self.sizes)
        key = json.dumps([FORMAT, schedule, periods])
        name = f"{self.kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        return cache_dir() / "raw" / self.lowered.hash / f"{name}.o"


@dataclass(frozen=True)
class Built:
    """An object that was checked: its cubin, what the confined child says of the compile, and whether its
    launch is the very code that the compiler makes of the text before it was edited. An edit of resources or
    of a launch makes it another; so does a forgery."""

    cubin: bytes
    stages: tuple[int, int, int] | None
    seconds: float
    own_launch: bool


def load(wanted: Wanted) -> Callable[..., Any]:
    """The kernel's function, from its object; built in a worker process first where there is none. Raises
    CompileError."""
    import cutlass.cute as cute

    path = wanted.path()
    if path not in _loaded:
        if not path.exists() and not workers.run_all(_build, [wanted])[0]:
            raise CompileError(f"{wanted.kernel.name}: the edited text does not compile")
        try:  # the cache is a folder: what is loaded is what was looked at
            inspect(_bytes(path))
        except RawError as error:
            raise CompileError(f"{path}: {error.message}", error.code) from None
        _loaded[path] = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
    return _loaded[path]


_loaded: dict[Path, Callable[..., Any]] = {}


def _build(wanted: Wanted) -> bool:
    """In a worker process."""
    try:
        build(wanted, Path(os.environ["CUTE_DSL_DUMP_DIR"]))
    except CompileError:
        return False
    return True


def build(wanted: Wanted, scratch: Path) -> Built:
    """Compile in a confined child, unless its object is here. Call it in a process that compiles, has no GPU,
    and whose compiler leaves its files in ``scratch``, an empty folder. Raises CompileError."""
    path = wanted.path()
    notes = path.with_suffix(".json")
    if not notes.exists():
        try:
            told, data = _compiled(wanted, scratch)
            inspect(data)
            before = replace(wanted.lowered, text=wanted.lowered.given)
            _, honest = _compiled(replace(wanted, lowered=before), scratch)
            told["own_launch"] = same_host(data, honest)
        except RawError as error:
            raise CompileError(error.message, error.code, error.line) from None
        finally:
            _empty(scratch)
        write_atomic(path, data)
        write_atomic(notes, json.dumps(told))
    told = json.loads(notes.read_text(encoding="utf-8"))
    stages = told["stages"] and tuple(told["stages"])
    return Built(inspect(_bytes(path)), stages, told["seconds"], told["own_launch"])


def _compiled(wanted: Wanted, scratch: Path) -> tuple[dict[str, Any], bytes]:
    """What the child says of a compile that went well, and the object. RawError else."""
    _empty(scratch)
    _import_compilers()
    source = scratch / f"{wanted.lowered.module}.py"
    source.write_text(wanted.lowered.text, encoding="utf-8")
    target = scratch / wanted.path().name
    answer = _confined(lambda: _compile(wanted, source, target), scratch)
    match answer:
        case {"stages": stages, "seconds": float(seconds)} if _three(stages):
            return {"stages": stages, "seconds": round(seconds, 3)}, _bytes(target)
        case {"code": str(code), "message": str(message), "line": int() | None as line}:
            raise RawError(code[:32], message[:MOST_WORDS], line)
    raise RawError("compiler", f"the compiling child said {str(answer)[:200]!r}, which is no answer")


def _three(stages: object) -> bool:
    return stages is None or (
        isinstance(stages, list) and len(stages) == 3 and all(isinstance(n, int) for n in stages)
    )


def _compile(wanted: Wanted, source: Path, target: Path) -> dict[str, Any]:
    """In the confined child: the only place where an edited text is parsed, imported and run."""
    lowered, kernel = wanted.lowered, wanted.kernel
    check(lowered.text, names(lowered))
    import_file(lowered.module, source)
    start = time.monotonic()
    with noting_stages() as stages:
        if isinstance(kernel, VectorKernel):
            made = compile_vector(lowered, kernel, cached=False)
        else:
            assert wanted.schedule is not None  # every step has one
            _same_arguments(lowered, kernel)
            made = compile_gemm(lowered, kernel, wanted.schedule, wanted.sizes, cached=False)
    made.export_to_c(object_file_path=str(target), function_name=FUNCTION)  # type: ignore[attr-defined]
    return {"stages": stages[-1] if stages else None, "seconds": time.monotonic() - start}


def names(lowered: Lowered) -> list[str]:
    """The classes that an edited text has to define."""
    return [g.name for g in lowered.gemms] + [v.name for v in lowered.vectors]


def _same_arguments(lowered: Lowered, kernel: GemmKernel) -> None:
    """The launcher passes the epilogue's arguments by their order in the text that was given to edit."""
    fields = getattr(sys.modules[lowered.module], kernel.name).EpilogueArguments._fields
    wanted = [a.name for a in kernel.arguments]
    if [name for name in fields if name in wanted] != wanted:
        raise RawError(
            "arguments",
            f"{kernel.name}: its EpilogueArguments are {', '.join(fields)}; they must have "
            f"{', '.join(wanted) or 'none'} in this order, as in the text that was given",
            None,
        )


def _import_compilers() -> None:
    """Before a fork, all that a compile imports: after it there are no files, and imports take seconds."""
    import quack.compile_utils
    import quack.gemm_runtime.host  # noqa: F401

    import primitives.device.finish
    import primitives.device.heads
    import primitives.device.lanes
    import primitives.device.mainloop
    import primitives.device.tables  # noqa: F401


def _confined(work: Callable[[], dict[str, Any]], scratch: Path) -> Any:
    """``work``'s answer from a forked, confined child, or what it died of; nothing of the child is left."""
    parent, (answers, answer) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(work, parent, scratch, answer)
    os.close(answer)
    try:
        said = _read(answers, time.monotonic() + SECONDS)
    finally:
        os.close(answers)
        status = _ended(child)
    if said is None:
        raise RawError("slow_compile", f"the compile did not end within {SECONDS:g} s", None)
    try:
        return json.loads(said)
    except ValueError:
        raise RawError("compiler_died", f"the compiling child ended with status {status}", None) from None


def _in_child(work: Callable[[], dict[str, Any]], parent: int, scratch: Path, answer: int) -> None:
    try:
        layers, missing = confine(parent, scratch, keep=(answer,))
        if not set(layers) >= LAYERS:
            found: object = _missing(missing)
        else:
            found = work()
    except RawError as error:
        found = {"code": error.code, "message": error.message, "line": error.line}
    except BaseException as error:  # whatever an edited text raises, SystemExit too, is its author's to read
        found = {"code": "compiler"} | _words(error, scratch)
    with suppress(BaseException), os.fdopen(answer, "w") as pipe:
        pipe.write(json.dumps(found))
    os._exit(0)


def _missing(missing: tuple[str, ...]) -> dict[str, Any]:
    words = (
        f"this system lacks {', '.join(missing)}: raw CuTeDSL is compiled behind seccomp and Landlock only "
        "(Linux 5.13 or later; in a container, a runtime that lets its processes set a seccomp filter)"
    )
    return {"code": "weak_jail", "message": words, "line": None}


def _words(error: BaseException, scratch: Path) -> dict[str, Any]:
    """What a compiler raised, and the last line of the text that it was at."""
    line, seen = None, error
    while line is None:
        frames = traceback.extract_tb(seen.__traceback__)
        line = next((f.lineno for f in reversed(frames) if Path(f.filename).parent == scratch), None)
        if (cause := seen.__cause__ or seen.__context__) is None:
            break
        seen = cause
    words = "".join(traceback.format_exception_only(error))
    return {"message": words.strip()[-MOST_WORDS:], "line": line}


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Bytes up to the end; None where it does not come in time, or too many do."""
    output = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and len(output) <= MOST_ANSWER:
        if poll.poll(left * 1000):
            if not (chunk := os.read(descriptor, 1 << 16)):
                return bytes(output)
            output += chunk
    return None


def _ended(child: int) -> int:
    """Kill what is left of the child and its group, and reap it."""
    for kill in (os.killpg, os.kill):  # it leads a group of its own since it is confined
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _bytes(path: Path) -> bytes:
    """A file that somebody else may have made."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RawError("no_object", f"the compile left no object: {error.strerror}", None) from None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MOST_OBJECT + 1)
    if len(data) > MOST_OBJECT:
        raise RawError("object", f"the object has over {MOST_OBJECT} bytes", None)
    return data


def _empty(scratch: Path) -> None:
    for path in scratch.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
