"""Compile one kernel of a lowered module in this process, with QuACK and CuTeDSL.

QuACK's object cache (QUACK_CACHE_DIR) stores compiled kernels. A kernel's key contains the operands' dtypes
and layouts, and the names of the lowered module and class. These names contain the code's hash.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from coda_agent.primitives.compiler.lowered import Argument, GemmKernel, Lowered, VectorKernel
from coda_agent.primitives.compiler.split import ORDER, ordered
from coda_agent.primitives.frozen_names import device, frozen_names
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.system.files import cache_dir, write_atomic
from coda_agent.primitives.target import TARGET

REFUSED = ".refused"  # suffix of a file next to an object; it records that the kernel was refused


def import_quack() -> None:
    """Import QuACK's GEMM but not QuACK's own operators. The tuner of these operators would import
    TorchDynamo, which takes a third of the start-up time of a process that only compiles. A later import of
    QuACK's operators works normally. Garbage collection pauses during the import, because nearly all new
    objects stay in use."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        _import_quack()
    finally:
        if enabled:
            gc.enable()


def _import_quack() -> None:
    if "quack" not in sys.modules:
        operators = "rmsnorm", "softmax", "cross_entropy"
        for name in operators:
            stand_in = sys.modules[f"quack.{name}"] = ModuleType(f"quack.{name}")
            setattr(stand_in, name, None)
        try:
            import quack
        finally:
            for name in operators:
                del sys.modules[f"quack.{name}"]
        for name in operators:
            delattr(quack, name)
    import quack.compile_utils
    import quack.gemm_runtime.host  # noqa: F401


_importing = threading.RLock()  # a module is in sys.modules before its code has run


def load_module(lowered: Lowered) -> ModuleType:
    """Import a lowered text, from a cached file that is named by the text's hash. Code that an author edited
    is never imported here, because only a confined child process may compile such code."""
    with _importing:
        if lowered.module in sys.modules:
            return sys.modules[lowered.module]
        if lowered.edited:
            raise ValueError(f"{lowered.module} is raw CuTeDSL: nothing imports it but a confined compiler")
        path = cache_dir() / "lowered" / f"{lowered.module}.py"
        if not path.exists() or path.read_bytes() != lowered.text.encode():
            write_atomic(path, lowered.text)
        return import_file(lowered.module, path)


def import_file(name: str, path: Path) -> ModuleType:
    """Import a file under a module name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a path always has a spec and a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with frozen_names():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _cute_dtype(argument: Argument) -> Any:
    return numeric("fp32" if argument.packed else argument.dtype)


def numeric(dtype: str) -> Any:
    """The CuTeDSL type of a signature's dtype."""
    import cutlass

    return {
        "bf16": cutlass.BFloat16,
        "fp16": cutlass.Float16,
        "fp32": cutlass.Float32,
        "fp8_e4m3": cutlass.Float8E4M3FN,
        "fp8_e5m2": cutlass.Float8E5M2,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
    }[dtype]


def _resource_key(argument: Argument, sizes: Mapping[str, int]) -> tuple[str, Any]:
    """The key of an epilogue argument, in the form that QuACK's compile function takes (``host_arg_key``)."""
    dtype = _cute_dtype(argument)
    match argument.role:
        case "load" | "store" | "range":
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


def cached_gemm(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> Callable[..., Any]:
    """Load a step's kernel from QuACK's cache, or compile it into the cache. The kernel's operands are as in
    ``primitives.runtime.compile``."""
    return _gemm(_compiler(kernel), lowered, kernel, schedule, sizes)


def _compiler(kernel: GemmKernel) -> Callable[..., Any]:
    """The function that compiles a step, given the step's ``_gemm_key``. QuACK's cache stores the results."""
    if kernel.own:
        return _cached(_compile_own)
    from quack.gemm_runtime.host import _compile_gemm_epi

    return _compile_gemm_epi


def _gemm(
    compile_it: Callable[..., Any],
    lowered: Lowered,
    kernel: GemmKernel,
    schedule: Schedule,
    sizes: Mapping[str, int],
) -> Callable[..., Any]:
    key = _gemm_key(lowered, kernel, schedule, sizes)
    with ordered(schedule):
        return compile_it(*key, post_init_attrs=_attributes(kernel, schedule, sizes))


def _gemm_key(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> tuple[Any, ...]:
    """The arguments of QuACK's compile function for a step."""
    from quack.gemm_runtime.identity import static_gemm_class_ref

    operand = numeric(kernel.dtype)
    return (
        static_gemm_class_ref(getattr(load_module(lowered), kernel.name)),
        TARGET.capability,
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
        kernel.offsets is not None,
        kernel.index is not None,
        kernel.offsets is not None,  # batched
        not kernel.b_transposed,
        tuple(sorted(_resource_key(a, sizes) for a in kernel.arguments)),
    )


def _attributes(
    kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> tuple[tuple[str, Any], ...]:
    """Attributes of the step's class that change its compiled object."""
    starts = (("range_starts", kernel.range_starts(sizes)),) if kernel.starts else ()
    bounds = (("column_bounds", kernel.column_bounds(sizes)),) if kernel.bounds else ()
    # A kernel with offsets must not start before its predecessor ends: the predecessor clamps the offsets.
    alone = (("use_pdl", False),) if kernel.offsets is not None else ()
    return (
        *starts,
        *bounds,
        *alone,
        ("deep", schedule.deep),
        ("evict_loads", schedule.evict_loads),
        ("evict_stores", schedule.evict_stores),
        ("head_widths", kernel.head_widths(sizes)),
        ("split", ORDER if schedule.split else 0),
    )


def cached_vector(lowered: Lowered, kernel: VectorKernel) -> Callable[..., Any]:
    """Load a vector kernel, which runs between steps, from QuACK's cache, or compile it into the cache."""
    load_module(lowered)
    return _cached(_compile_vector)(*_vector_key(lowered, kernel))


def _vector_key(lowered: Lowered, kernel: VectorKernel) -> tuple[Any, ...]:
    """The arguments with which a vector kernel is compiled. QuACK's cache hashes the pickled arguments. Equal
    strings must be interned, because pickling one string object twice gives other bytes than pickling two
    equal objects."""
    arguments = ((sys.intern(a.role), sys.intern(a.dtype), a.rank) for a in kernel.arguments)
    return lowered.module, kernel.name, tuple(arguments)


def compile_object(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> bool | None:
    """Look up in the cache whether a step compiles at one schedule. True: the cache has the step's objects
    and those of all vector kernels. False: the schedule was refused. None: the cache lacks an object.

    If the result is not None, the caller need not start a worker, which would take longer than loading an
    object. For edited code the result is always None, because a worker must inspect the stack of edited code
    every time.
    """
    if lowered.edited:
        return None
    own = _objects(lowered, kernel, schedule, sizes)
    if own[0].with_suffix(REFUSED).exists():
        return False
    from quack.cache import jit

    keys = [(_compile_vector.__qualname__, *_vector_key(lowered, vector)) for vector in lowered.vectors]
    vectors = (own[0].with_name(f"{jit._key_to_hash(key)}.o") for key in keys)
    return True if all(path.exists() for path in (*own, *vectors)) else None


def refuse(lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]) -> None:
    """Write a file next to a step's object. The file records that the step must not be timed at this
    schedule."""
    write_atomic(_objects(lowered, kernel, schedule, sizes)[0].with_suffix(REFUSED), "")


def _objects(
    lowered: Lowered, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]
) -> list[Path]:
    """The object files of a step in QuACK's cache, one per launch."""
    from quack.cache import jit

    attributes = ("post_init_attrs", _attributes(kernel, schedule, sizes))
    folder = objects()
    keys = (_gemm_key(lowered, kernel, each, sizes) for each in schedule.launches)
    name = _compiler(kernel).__qualname__
    return [folder / f"{jit._key_to_hash((name, *key, attributes))}.o" for key in keys]


def objects() -> Path:
    """The folder in QuACK's cache for the installed versions. The folder also holds QuACK's own objects."""
    from quack.cache import jit

    return jit.get_cache_path() / jit._compute_source_fingerprint()


def compile_kernel(
    lowered: Lowered, kernel: GemmKernel | VectorKernel, schedule: Schedule | None, sizes: Mapping[str, int]
) -> Callable[..., Any]:
    """Compile a step's kernel or a vector kernel now, without a cache. A step's kernel needs a schedule."""
    if isinstance(kernel, VectorKernel):
        load_module(lowered)
        return _compile_vector(*_vector_key(lowered, kernel))
    assert schedule is not None
    uncached = _compiler(kernel).__wrapped__  # type: ignore[attr-defined]
    return _gemm(uncached, lowered, kernel, schedule, sizes)


@cache
def _cached(compile_it: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of this module in QuACK's cache. This imports QuACK."""
    from quack.cache import jit_cache

    return jit_cache(compile_it)


def _compile_own(
    reference: Any,
    capability: Any,
    dtype: Any,
    _: Any,
    d_dtype: Any,
    c_dtype: Any,
    a_major: str,
    b_major: str,
    d_major: str,
    c_major: None,
    tile: tuple[int, int],
    cluster: tuple[int, int, int],
    pingpong: bool,
    *unused: Any,
    post_init_attrs: tuple[tuple[str, Any], ...] = (),
) -> Callable[..., Any]:
    """Compile a kernel that has one GEMM per expert, over that expert's rows (QuACK's ``varlen_k``). QuACK's
    ``_compile_gemm_epi`` cannot compile such a kernel; this function takes the same arguments."""
    from quack import gemm_tvm_ffi_utils as host
    from quack.gemm_runtime.identity import resolve_gemm_class

    def post_init(gemm: Any) -> None:
        for name, value in post_init_attrs:
            setattr(gemm, name, value)

    made, majors = resolve_gemm_class(reference), (a_major, b_major, d_major, c_major)
    *tensors, _m, _n, _k, experts = host.make_fake_gemm_tensors(
        dtype, dtype, d_dtype, c_dtype, *majors, varlen_k=True
    )
    return host.compile_gemm_kernel(
        made, dtype, tile, cluster, pingpong, True, False, False, capability, *tensors,
        made.EpilogueArguments(), host.make_fake_scheduler_args(False, False, experts),
        host.make_fake_varlen_args(False, True, False, None), post_init=post_init,
    )  # fmt: skip


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
        elif role == "count":
            fakes.append(cutlass.Int32(1))
        elif role == "pointer":
            fakes.append(make_fake_tensor(numeric(dtype), (1,)))
        elif rank == 3:
            fakes.append(make_fake_tensor(numeric(dtype), (cute.sym_int(), cute.sym_int(), cute.sym_int())))
        else:
            fakes.append(make_fake_tensor(numeric(dtype), (rows,)))
    made = getattr(sys.modules[module], name)()
    return cute.compile(made, *fakes, make_fake_stream(), options="--enable-tvm-ffi")


@contextmanager
def noting_stages() -> Iterator[list[tuple[int, int, int]]]:
    """Record the number of stages of each mainloop that is compiled in the ``with`` block. The stages divide
    an SM's shared memory. No tool can read these numbers from a cubin."""
    gemm = device("mainloop").FusedGemm
    usual, seen = gemm._compute_stages, list[tuple[int, int, int]]()

    def noted(*arguments: Any, **more: Any) -> tuple[int, int, int]:
        seen.append(usual(*arguments, **more))
        return seen[-1]

    gemm._compute_stages = noted
    try:
        yield seen
    finally:
        gemm._compute_stages = usual
