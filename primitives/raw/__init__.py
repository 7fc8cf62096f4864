"""Raw CuTeDSL: a lowered text that an author has edited is code, not data. Edited text -> checked object.

It runs in one kind of place only: a child, forked from a process that compiles and holds no GPU, confined
(``primitives.raw.confine``) before it reads the text. There the language check (``primitives.raw.language``)
goes first, then the import, then the compile. What comes out is an object file, taken for hostile
(``primitives.raw.objects``) and kept under the hash of the text and all that went into it; ``load`` gives its
function. No other process imports the text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import select
import signal
import stat
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
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

FORMAT = 1  # of what is kept of a compile
FUNCTION = "func"  # what an object exports
SECONDS = 120.0  # for one configuration: an honest one takes 2
MOST_OBJECT, MOST_ANSWER = 16 << 20, 1 << 20  # bytes
MOST_FILES, GLANCE = 256 << 20, 0.25  # bytes in its files, and seconds between two looks at them
MOST_WORDS = 2000  # characters of what a compiler says
MOST_STAGES = 100  # shared memory holds fewer
Within = Callable[[str], AbstractContextManager[object]]
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
        key = json.dumps([schedule, periods])
        name = f"{self.kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        return _folder(self.lowered) / f"{name}.o"


def _folder(lowered: Lowered) -> Path:
    return cache_dir() / "raw" / f"{lowered.hash}.{FORMAT}"


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


def packed(lowered: Lowered) -> dict[str, str]:
    """The objects of an edited text that are here, with their notes, for a machine that need not compile it:
    by name, zlib's in base64."""
    files = [path for notes in _folder(lowered).glob("*.json") for path in (notes, notes.with_suffix(".o"))]
    return {path.name: base64.b64encode(zlib.compress(_bytes(path), 9)).decode() for path in sorted(files)}


def unpack(lowered: Lowered, given: Mapping[str, str]) -> None:
    """Keep what ``packed`` gave elsewhere, each object looked at first; notes come last, for they vouch.
    Raises CompileError."""
    for name in sorted(given, key=lambda name: name.endswith(".json")):
        try:
            if not _NAME.fullmatch(name):
                raise RawError("object", f"{name!r} is no object's name")
            unzip = zlib.decompressobj()
            data = unzip.decompress(base64.b64decode(given[name], validate=True), MOST_OBJECT)
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
    """In a worker process."""
    try:
        build(wanted, Path(os.environ["CUTE_DSL_DUMP_DIR"]))
    except CompileError:
        return False
    return True


def build(wanted: Wanted, scratch: Path) -> Built:
    """Compile in a confined child, unless its object is here. Call it in a process that compiles, uses no
    GPU, and whose compiler leaves its files in ``scratch``, an empty folder. Raises CompileError."""
    path = wanted.path()
    notes = path.with_suffix(".json")
    if not notes.exists():
        try:
            told, data = _compiled(wanted, scratch)
            inspect(data)
            before = replace(wanted.lowered, text=wanted.lowered.given)
            _, honest = _compiled(replace(wanted, lowered=before), scratch)
            told = told | {"own_launch": same_host(data, honest)}
        except RawError as error:
            raise CompileError(error.message, error.code, error.line) from None
        finally:
            _empty(scratch)
        write_atomic(path, data)
        write_atomic(notes, json.dumps(told))
    return Built(inspect(_bytes(path)), *_notes(json.loads(notes.read_text(encoding="utf-8"))))


def _notes(told: Any) -> tuple[tuple[int, int, int] | None, float, bool]:
    """Stages, seconds, and whether the launch is the compiler's own: as of ``Built``. ValueError else."""
    match told:
        case {"stages": stages, "seconds": float(seconds), "own_launch": bool(own)} if _three(stages):
            return stages and tuple(stages), seconds, own
    raise ValueError(f"{str(told)[:200]!r} are no notes on an object")


def cubin(wanted: Wanted, scratch: Path, within: Within) -> tuple[bytes, str]:
    """As ``build``, kept nowhere: the cubin, and the path that the text had. ``within`` gives what the
    compile happens within, by that path. Raises CompileError."""
    try:
        _, data = _compiled(wanted, scratch, within)
        return inspect(data), str(_source(wanted, scratch))
    except RawError as error:
        raise CompileError(error.message, error.code, error.line) from None


def _source(wanted: Wanted, scratch: Path) -> Path:
    return scratch / f"{wanted.lowered.module}.py"


def _compiled(wanted: Wanted, scratch: Path, within: Within = nullcontext) -> tuple[dict[str, Any], bytes]:
    """What the child says of a compile that went well, and the object. RawError else."""
    _empty(scratch)
    _import_compilers()
    source = _source(wanted, scratch)
    source.write_text(wanted.lowered.text, encoding="utf-8")
    target = scratch / wanted.path().name
    answer = _confined(lambda: _compile(wanted, source, target, within), scratch)
    match answer:
        case {"stages": stages, "seconds": float(seconds)} if _three(stages) and 0 <= seconds <= SECONDS:
            return {"stages": stages, "seconds": round(seconds, 3)}, _bytes(target)
        case {"code": str(code), "message": str(message), "line": int() | None as line}:
            known = line if line and 0 < line <= wanted.lowered.text.count("\n") + 1 else None
            raise RawError(_printable(code[:32]), _printable(message[:MOST_WORDS]), known)
    raise RawError("forged", f"the compiling child said {str(answer)[:200]!r}, which is no answer")


def _three(stages: object) -> bool:
    return stages is None or (
        isinstance(stages, list)
        and len(stages) == 3
        and all(isinstance(n, int) and 0 <= n < MOST_STAGES for n in stages)
    )


def _printable(words: str) -> str:
    """Some words are an edited module's: they must be text, and steer no terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in words)


def _compile(wanted: Wanted, source: Path, target: Path, within: Within) -> dict[str, Any]:
    """In the confined child: the only place where an edited text is parsed, imported and run."""
    lowered, kernel = wanted.lowered, wanted.kernel
    check(lowered.text, names(lowered))
    import_file(lowered.module, source)
    start = time.monotonic()
    with noting_stages() as stages, within(str(source)):
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
        said = _read(answers, time.monotonic() + SECONDS, scratch)
    finally:
        os.close(answers)
        status = _ended(child)
    if said is None:
        raise RawError("slow_compile", f"the compile did not end within {SECONDS:g} s", None)
    if len(said) > MOST_ANSWER:
        raise RawError("forged", f"the compiling child said over {MOST_ANSWER} bytes", None)
    if not said:
        raise RawError("compiler_died", f"the compiling child ended with status {status}", None)
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        raise RawError("forged", "the compiling child said what is no answer", None) from None


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


def _read(descriptor: int, deadline: float, scratch: Path) -> bytes | None:
    """Bytes up to the end, or until there are too many; None where the end does not come in time. RawError
    where ``scratch`` fills up meanwhile."""
    output = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = poll.poll(min(left, GLANCE) * 1000)
        if _held(scratch) > MOST_FILES:
            raise RawError("files", f"the compile keeps over {MOST_FILES} bytes in files", None)
        if ready:
            chunk = os.read(descriptor, 1 << 16)
            output += chunk
            if not chunk or len(output) > MOST_ANSWER:
                return bytes(output)
    return None


def _held(scratch: Path) -> int:
    """Bytes that files of a child take. RawError where they cannot all be seen."""
    held = 0
    for place, _, names in os.walk(scratch, onerror=_hidden):
        for name in names:
            try:
                held += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError as error:
                _hidden(error)
    return held


def _hidden(error: OSError) -> None:
    """What is gone takes no room; what is out of reach may take any."""
    if not isinstance(error, FileNotFoundError):
        raise RawError("files", f"the compile made folders that cannot be listed: {error.strerror}", None)


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
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RawError("no_object", "the compile left no object: what bears its name is no file", None)
        data = b""
        while len(data) <= MOST_OBJECT and (chunk := os.read(descriptor, MOST_OBJECT + 1 - len(data))):
            data += chunk
    finally:
        os.close(descriptor)
    if len(data) > MOST_OBJECT:
        raise RawError("object", f"the object has over {MOST_OBJECT} bytes", None)
    return data


def _empty(scratch: Path) -> None:
    """Of whatever a child made: folders nested deeper than a path is long, or that nobody may list."""
    while left := list(scratch.iterdir()):
        for path in left:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
                continue
            path.chmod(0o700)
            for inner in path.iterdir():  # a step up, so that no path gets longer
                if inner.is_dir() and not inner.is_symlink():
                    inner.chmod(0o700)
                inner.rename(scratch / secrets.token_hex(16))
            path.rmdir()
