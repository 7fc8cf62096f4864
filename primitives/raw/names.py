"""The names that an edited module may use: names of imported modules, of Python, and of the classes that the
module extends."""

from __future__ import annotations

from functools import partial
from types import ModuleType


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Modules whose public names are allowed. The tuple after a module lists other modules, from which the module
# may re-export names.
_NUMBERS = ("cutlass.base_dsl.typing", "cutlass.cutlass_dsl", "cutlass.base_dsl.arch")
_CUTE = tuple(
    f"cutlass.cute.{name}" for name in ("core", "tensor", "tuple", "algorithm", "atom", "math", "typing")
)
MODULES: dict[str, tuple[str, ...]] = {
    "cutlass": (),
    "cutlass.cute": (*_CUTE, *_NUMBERS),
    "cutlass.cute.arch": ("cutlass.cute.arch",),
    "cutlass.cute.math": ("cutlass._mlir_helpers.math",),
    "cutlass.cute.nvgpu": ("cutlass.cute.nvgpu",),
    "cutlass.cute.nvgpu.cpasync": ("cutlass.cute.nvgpu",),
    "cutlass.cute.nvgpu.warp": ("cutlass.cute.nvgpu",),
    "cutlass.cute.nvgpu.warpgroup": ("cutlass.cute.nvgpu",),
    "cutlass.pipeline": ("cutlass.pipeline",),
    "cutlass.utils": (),
    "cutlass.utils.hopper_helpers": (),
    "math": (),
    "quack.activation": (),
    "quack.copy_utils": (),
    "quack.epilogue.mixin": (),
    "quack.epilogue.ops": (),
    "quack.fast_math": (),
    "quack.gemm_sm90": (),
    "quack.layout_utils": (),
    "quack.rounding": (),
    "quack.sm90_utils": (),
    "primitives.device.eights": (),
    "primitives.device.finish": (),
    "primitives.device.gathered": (),
    "primitives.device.grouped": (),
    "primitives.device.head_maxima": (),
    "primitives.device.heads": (),
    "primitives.device.lanes": (),
    "primitives.device.mainloop": (),
    "primitives.device.ranges": (),
    "primitives.device.softplus": (),
    "primitives.device.tables": (),
    "primitives.device.values": ("quack.activation",),
}
# Modules of which only the listed names are allowed. Other names in these modules compile, print, load
# libraries, or reach the compiler's internals.
CHOSEN = {
    "cutlass": _names(
        "AddressSpace BFloat16 Boolean Constexpr Float16 Float32 Float64 Float8E4M3FN Float8E5M2 Int16 Int32 "
        "Int4 Int64 Int8 Numeric TFloat32 Uint16 Uint32 Uint64 Uint8 all_ and_ any_ const_expr dynamic_expr "
        "max min not_ or_ range range_constexpr select_ cute pipeline utils"
    ),
    "cutlass.utils": frozenset({"SmemAllocator"}),
    "functools": frozenset({"partial"}),
    "typing": frozenset({"Any", "Callable", "Literal", "Optional", "Tuple", "Type", "Union"}),
}
DENIED = _names(
    "print_tensor printf print_nd_vector inline_ptx dsl_user_op mangle ParamsBase make_fake_tensor "
    "register_jit_arg_adapter"
)
ALSO = {"cutlass.cute": frozenset({"AddressSpace", "ReductionOp", "jit", "kernel"})}

BUILTINS = _names(
    "abs all any bool dict enumerate float int isinstance len list max min range reversed round sorted sum "
    "tuple zip slice"
)
# Attributes that lead from an object to the interpreter, to the compiler or to a function's internals.
BANNED = _names(
    "mro format format_map func launch compile compile_to export_to_c ir_value value owner operation context "
    "location jit_engine"
)
BANNED_PREFIXES = ("gi_", "cr_", "ag_", "f_", "tb_", "co_", "func_", "host_")

# Methods that an edited step may define, because CuTeDSL traces them inside the kernel. Other methods run on
# the host to launch the kernel. We found the two groups by observing compilations.
STEP_METHODS = _names(
    "kernel load_tma mma epilogue epi_begin epi_begin_loop epi_end epi_end_loop epi_get_smem_tensors "
    "epi_load_acc_subtile epi_prepass_end epi_prepass_subtile epi_r2s_pair_xor epi_retile_acc "
    "epi_setup_aux_out epi_tile_load_g2s_copy_fns epi_tile_load_s2r epi_visit_acc epi_visit_subtile "
    "epilog_gmem_copy_and_partition epilog_smem_copy_atom epilog_smem_load_and_partition "
    "epilog_smem_store_and_partition make_ab_pipeline make_epi_pipeline make_epi_store_pipeline "
    "make_sched_pipeline pingpong_barrier_arrive pingpong_barrier_sync"
)
STAGES = "_compute_stages"  # runs on the host, so it may only do arithmetic
RESOURCE_METHODS = _names(
    "begin begin_loop end end_loop_finish end_loop_stage fn_apply fn_prepare fn_prepass_end "
    "fn_prepass_resolve fn_sink_flush get_smem_tensor load_g2s_copy_fn load_s2r needs_async_fence "
    "prepass_resolve_needed stat_value stats_begin stats_slice store_convert store_r2s store_setup "
    "_broadcast_stride _combine_op _coord_idx _end_loop_smem _end_loop_values _finalize _fold _fold_identity "
    "_get_gmem_vec _guard_neg_inf _mask_oob_active _merge _select_packed16"
)
GIVEN = frozenset({"_epi_ops", "EpilogueArguments"})  # attributes of a base class that a class may redefine
SETTINGS = frozenset({"_epi_ops"})  # underscored names that a class may set


def permitted(module: ModuleType, name: str) -> bool:
    """Whether an edited module may use ``name`` of a listed module."""
    home = module.__name__
    if name.startswith("_") or name in DENIED or not hasattr(module, name):
        return False
    if home in CHOSEN:
        return name in CHOSEN[home]
    found = getattr(module, name)
    if name in ALSO.get(home, ()):
        return True
    if isinstance(found, ModuleType):
        return found.__name__ in MODULES and found.__name__.startswith(home)
    if isinstance(found, int | float | str):
        return True
    while isinstance(found, partial):
        found = found.func
    origin = getattr(found, "__module__", None) or ""
    return origin == home or any((origin + ".").startswith(o + ".") for o in MODULES[home])
