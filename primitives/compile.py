"""Compiling lowered modules: kernels to call, and cubins with a resource report.

QuACK's object cache (QUACK_CACHE_DIR) keeps compiled kernels; its keys hold the lowered module's and
class's names, which hold the hash of the text, and the operands' dtypes and layouts. The resource report
needs no GPU: it compiles for sm_90a in a child process and reads the cubin. ``python -m
primitives.compile`` is that child.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from primitives import children, deadline
from primitives.cubin import Resources, inspect_cubin
from primitives.files import write_atomic
from primitives.ir import Program, Schedule
from primitives.lower import Argument, GemmKernel, Lowered, VectorKernel, lower
from primitives.probes import PROBES as PROBES  # whoever compiles wants them
from primitives.probes import candidates, crowded, probes
from primitives.refusal import refusal

HOPPER = (9, 0)
CROWDED = "shared_memory"  # the code of a step that no tile has room for
FORMAT = 4  # of the file that keeps a report, and of what is counted in it


class CompileError(Exception):
    """The compiler refused a lowered module, or would: its words, shortened, and a reason code; of a raw one
    also the line of its text, of a program where it is known the node behind it."""

    def __init__(
        self, message: str, code: str = "compiler", line: int | None = None, node: int | None = None
    ):
        super().__init__(message)
        self.code, self.line, self.node = code, line, node


def cache_dir() -> Path:
    """Where lowered texts, reports and tunings are kept: CODA_AGENT_CACHE or ~/.cache/coda-agent."""
    return Path(os.environ.get("CODA_AGENT_CACHE") or Path.home() / ".cache" / "coda-agent")


def load_module(lowered: Lowered) -> ModuleType:
    """Import a lowered text from its content-addressed file. Never a raw one: where that may run, in a
    confined child, it is imported already."""
    if lowered.module in sys.modules:
        return sys.modules[lowered.module]
    if lowered.raw:
        raise ValueError(f"{lowered.module} is raw CuTeDSL: nothing imports it but a confined compiler")
    path = cache_dir() / "lowered" / f"{lowered.module}.py"
    if not path.exists() or path.read_text(encoding="utf-8") != lowered.text:
        write_atomic(path, lowered.text)
    return import_file(lowered.module, path)


def import_file(name: str, path: Path) -> ModuleType:
    """Import a file under a name of our choice."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a path always gives both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _cute_dtype(argument: Argument) -> Any:
    return numeric("fp32" if argument.packed else argument.dtype)


def numeric(dtype: str) -> Any:
    """A signature's dtype -> CuTeDSL's."""
    import cutlass

    return {
        "bf16": cutlass.BFloat16,
        "fp16": cutlass.Float16,
        "fp32": cutlass.Float32,
        "fp8_e4m3": cutlass.Float8E4M3FN,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
    }[dtype]


def _resource_key(argument: Argument, sizes: Mapping[str, int]) -> tuple[str, Any]:
    """What QuACK's compile wants to know of a resource's argument (its ``host_arg_key``)."""
    dtype = _cute_dtype(argument)
    match argument.role:
        case "load" | "store":
            key: Any = (dtype, "n")
        case "scalar":
            key = ("immediate", dtype)
        case "pointer":
            key = ("pointer", dtype)
        case "head" | "table":
            assert argument.period is not None  # heads have a width
            key = ("width" if argument.role == "head" else dtype, argument.period(sizes))
        case _:
            key = (dtype, argument.rank)
    return argument.name, key


def compile_gemm(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int], *, cached: bool = True
) -> Callable[..., Any]:
    """Compile a step for one schedule; of ``sizes`` only those of static dims matter. Its A crosses as
    [M, K], whatever its strides; B as it is stored: [K, N], or [N, K] where ``b_transposed``. Of a raw text,
    the object that a confined child makes or has made: CompileError where it refuses, as below."""
    if lowered.raw and cached:
        return _loaded(lowered, kernel, schedule, sizes)
    from quack.gemm_runtime.host import _compile_gemm_epi

    compile_it = _compile_gemm_epi if cached else _compile_gemm_epi.__wrapped__
    return compile_it(
        *_gemm_key(lowered, kernel, schedule, sizes), post_init_attrs=_attributes(kernel, schedule, sizes)
    )


def _gemm_key(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> tuple[Any, ...]:
    """What QuACK compiles a step by."""
    from quack.gemm_runtime.identity import static_gemm_class_ref

    operand = numeric(kernel.dtype)
    return (
        static_gemm_class_ref(getattr(load_module(lowered), kernel.name)),
        HOPPER,
        operand,
        operand,
        _cute_dtype(kernel.d) if kernel.d else None,
        _cute_dtype(kernel.c) if kernel.c else None,
        "m" if kernel.a_transposed else "k",
        "k" if kernel.b_transposed else "n",
        "n" if kernel.d else None,
        "n" if kernel.c else None,
        (schedule.tile_m, schedule.tile_n),
        (schedule.cluster_m, schedule.cluster_n, 1),
        schedule.pingpong,
        True,  # persistent
        False,  # statically scheduled
        False,
        False,
        False,  # unbatched
        not kernel.b_transposed,
        tuple(sorted(_resource_key(a, sizes) for a in kernel.arguments)),
    )


def _attributes(
    kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> tuple[tuple[str, Any], ...]:
    """Of the step's class, which its object depends on too."""
    return (
        ("deep", schedule.deep),
        ("evict_loads", schedule.evict_loads),
        ("evict_stores", schedule.evict_stores),
        ("head_widths", kernel.head_widths(sizes)),
    )


def compile_vector(lowered: Lowered, kernel: VectorKernel, *, cached: bool = True) -> Callable[..., Any]:
    """Compile the kernel for vectors between steps."""
    if lowered.raw and cached:
        return _loaded(lowered, kernel, None, {})
    load_module(lowered)
    compile_it = _cached_vector() if cached else _compile_vector
    return compile_it(*_vector_key(lowered, kernel))


def _vector_key(lowered: Lowered, kernel: VectorKernel) -> tuple[Any, ...]:
    """What a kernel for vectors is compiled by. Words are interned: QuACK's cache hashes the pickled key, in
    which one object twice is not what two equal ones are."""
    arguments = ((sys.intern(a.role), sys.intern(a.dtype), a.rank) for a in kernel.arguments)
    return lowered.module, kernel.name, tuple(arguments)


def compiled(lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]) -> bool:
    """Whether a program's step at one schedule and all vectors were compiled before, by any process of this
    cache: then no worker need be started for them, which takes longer than loading what is there. Never of an
    edited text: a worker looks at its object's stack, compiled before or not."""
    if lowered.raw:
        return False
    from quack.cache import jit
    from quack.gemm_runtime.host import _compile_gemm_epi

    attributes = ("post_init_attrs", _attributes(kernel, schedule, sizes))
    keys = [(_compile_gemm_epi.__qualname__, *_gemm_key(lowered, kernel, schedule, sizes), attributes)]
    keys += [(_compile_vector.__qualname__, *_vector_key(lowered, vector)) for vector in lowered.vectors]
    folder = jit.get_cache_path() / jit._compute_source_fingerprint()
    return all((folder / f"{jit._key_to_hash(key)}.o").exists() for key in keys)


def compile_kernel(
    lowered: Lowered, kernel: GemmKernel | VectorKernel, schedule: Schedule | None, sizes: Mapping[str, int]
) -> Callable[..., Any]:
    """Either kind, now: no cache is asked or filled. A step's has a schedule."""
    if isinstance(kernel, VectorKernel):
        return compile_vector(lowered, kernel, cached=False)
    assert schedule is not None
    return compile_gemm(lowered, kernel, schedule, sizes, cached=False)


def _loaded(
    lowered: Lowered, kernel: GemmKernel | VectorKernel, schedule: Schedule | None, sizes: Mapping[str, int]
) -> Callable[..., Any]:
    from primitives import raw

    return raw.load(raw.Wanted(lowered, kernel, schedule, sizes))


def _cached_vector() -> Callable[..., Any]:
    global _vector_cache
    if _vector_cache is None:
        from quack.cache import jit_cache

        _vector_cache = jit_cache(_compile_vector)
    return _vector_cache


_vector_cache: Callable[..., Any] | None = None


def _compile_vector(
    module: str, name: str, arguments: tuple[tuple[str, str, int], ...]
) -> Callable[..., Any]:
    import cutlass
    import cutlass.cute as cute
    from quack.compile_utils import make_fake_stream, make_fake_tensor

    rows = cute.sym_int()
    fakes: list[Any] = []
    for role, dtype, rank in arguments:
        if role in ("scalar", "extent"):
            fakes.append(cutlass.Float32(1.0))
        elif role == "pointer":
            fakes.append(make_fake_tensor(numeric(dtype), (1,)))
        elif rank == 3:
            fakes.append(make_fake_tensor(numeric(dtype), (cute.sym_int(), cute.sym_int(), cute.sym_int())))
        else:
            fakes.append(make_fake_tensor(numeric(dtype), (rows,)))
    made = getattr(sys.modules[module], name)()
    return cute.compile(made, *fakes, make_fake_stream(), options="--enable-tvm-ffi")


def report(
    program: Program, sizes: Mapping[str, int], schedules: Iterable[Schedule] = PROBES, raw: str = ""
) -> tuple[Resources, ...]:
    """Compile every kernel of a program for sm_90a, without a GPU, and read the cubins; of an edited text
    (``raw``) in a confined child of the child.

    ``sizes`` holds the static dims; schedules that a step does not fit are left out, and where none is left,
    one that it fits is taken (``primitives.probes``). Runs in a child process (a compiler can crash) and is
    kept by content. Raises CompileError, with the code CROWDED where a step fits none.
    """
    lowered = lower(program, raw)
    static = {dim: sizes[dim] for dim in program.signature.static}
    tried = _tried(program, lowered, sizes, tuple(schedules))
    key = json.dumps(
        [FORMAT, program._replace(schedule={}).hash, lowered.hash, static, tried], sort_keys=True
    )
    path = cache_dir() / "resources" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if not path.exists():
        asked = {"program": program.to_json(), "sizes": static, "schedules": tried, "raw": raw}
        request = json.dumps(asked)
        write_atomic(path, _run_child(request))
    rows = json.loads(path.read_text(encoding="utf-8"))
    return tuple(Resources(**row | {"stages": row["stages"] and tuple(row["stages"])}) for row in rows)


def _tried(
    program: Program, lowered: Lowered, sizes: Mapping[str, int], schedules: tuple[Schedule, ...]
) -> list[list[dict[str, int | bool]]]:
    """The schedules that each step is compiled on; none where no tile holds its heads."""
    tried = []
    for gemm in lowered.gemms:
        fitting = probes(program, gemm, sizes, schedules)
        if not fitting and candidates(gemm, sizes):
            words, node = crowded(program, gemm, sizes)
            raise CompileError(words, CROWDED, node=node)
        tried.append([schedule.to_json() for schedule in fitting])
    return tried


COMPILE_SECONDS = 300


def _run_child(request: str) -> str:
    """The child's answer. CompileError with its words, or with the bound that ended it: time or memory."""
    with _turn:
        child = _child()
        try:
            return child.answer(request)
        except BaseException:  # one that failed, or was interrupted, is not asked again
            child.end()
            raise


def _child() -> _Child:
    """The one that was started before, or a new one."""
    global _kept
    if _kept is None or not _kept.usable():
        if _kept is not None:
            _kept.end()
        _kept = _Child()
    return _kept


class _Child:
    """A process that compiles, one request after the other: its imports take longer than most compiles."""

    def __init__(self) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="coda-compile-")  # removed with this object
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in end()
        self.made = self._circumstances()
        self.process = children.converse(
            "primitives.compile",
            self.scratch.name,
            stderr=self.errors,
            env=_environment() | {"CUTE_DSL_DUMP_DIR": self.scratch.name, "CUTE_DSL_KEEP_CUBIN": "1"},
        )

    @staticmethod
    def _circumstances() -> tuple[object, ...]:
        """Who starts a child, and what decides which code and files it works with."""
        paths = (os.environ.get("PYTHONPATH"), cache_dir())
        return os.getpid(), sys.executable, children.MEMORY_BYTES, *paths

    def usable(self) -> bool:
        return self.made == self._circumstances() and not children.ended(self.process)

    def answer(self, request: str) -> str:
        limit = deadline.within(COMPILE_SECONDS)
        line = children.ask(self.process, request.encode() + b"\n", limit)
        if line:
            answer = json.loads(line)
            if isinstance(answer, list):
                return json.dumps(answer)
            raise CompileError(refusal(answer["error"]), answer.get("code", "compiler"), answer.get("line"))
        if time.monotonic() >= limit:
            deadline.check(limit)
            raise CompileError(f"the compiler did not finish in {COMPILE_SECONDS} s")
        status = children.end(self.process)
        raise CompileError(refusal(children.tail(self.errors)) or f"the compiler died with status {status}")

    def end(self) -> None:
        if self.made[0] != os.getpid():  # after a fork it is the parent's
            return
        children.hang_up(self.process)
        self.errors.close()
        self.scratch.cleanup()


_turn = threading.Lock()
_kept: _Child | None = None


def _environment() -> dict[str, str]:
    """A user's settings of the compilers must not change what is reported."""
    given = {k: v for k, v in children.environment().items() if not k.startswith(("CUTE_DSL_", "QUACK_"))}
    return given | children.HOPPER


def _serve(scratch: Path) -> None:
    """A request a line in, an answer a line out: resources, or what the compiler said."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler that prints must not be taken for an answer
    for line in sys.stdin:
        try:
            answer: object = _answer(json.loads(line), scratch)
        except CompileError as error:
            answer = {"error": str(error), "code": error.code, "line": error.line}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    lowered = lower(Program.from_json(request["program"]), request["raw"])
    sizes, wanted = request["sizes"], list[tuple[GemmKernel | VectorKernel, Schedule | None]]()
    for gemm, tried in zip(lowered.gemms, request["schedules"], strict=True):
        wanted += [(gemm, Schedule.from_json(fields)) for fields in tried]
    wanted += [(vector, None) for vector in lowered.vectors]
    return [asdict(_resources(scratch, lowered, kernel, s, sizes)) for kernel, s in wanted]


def _resources(
    scratch: Path,
    lowered: Lowered,
    kernel: GemmKernel | VectorKernel,
    schedule: Schedule | None,
    sizes: Mapping[str, int],
) -> Resources:
    fields = schedule.to_json() if schedule else None
    if lowered.raw:
        from primitives import raw

        built = raw.build(raw.Wanted(lowered, kernel, schedule, sizes), scratch)
        cubin = scratch / "built.cubin"
        cubin.write_bytes(built.cubin)
        found = inspect_cubin(cubin, kernel.name, fields, built.stages, built.seconds)
        cubin.unlink()
        return replace(found, own_launch=built.own_launch)
    return _measured(scratch, kernel.name, fields, partial(compile_kernel, lowered, kernel, schedule, sizes))


def _measured(
    scratch: Path, name: str, schedule: dict[str, Any] | None, build: Callable[[], Any]
) -> Resources:
    start = time.monotonic()
    with noting_stages() as stages:
        build()
    seconds = time.monotonic() - start
    (cubin,) = scratch.rglob("*.cubin")
    found = inspect_cubin(cubin, name, schedule, stages[-1] if stages else None, seconds)
    cubin.unlink()  # the next configuration's has the same name
    return found


@contextmanager
def noting_stages() -> Iterator[list[tuple[int, int, int]]]:
    """How the mainloops that are compiled within share out an SM's memory: no tool reads it off a cubin."""
    from primitives.device.mainloop import FusedGemm

    usual, seen = FusedGemm._compute_stages, []

    def noted(*arguments: Any, **more: Any) -> tuple[int, int, int]:
        seen.append(usual(*arguments, **more))
        return seen[-1]

    FusedGemm._compute_stages = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        FusedGemm._compute_stages = usual  # type: ignore[method-assign]


if __name__ == "__main__":
    from primitives import compile as own  # by its name, or there would be two CompileErrors here

    children.die_with(int(sys.argv[2]))
    own._serve(Path(sys.argv[1]))
