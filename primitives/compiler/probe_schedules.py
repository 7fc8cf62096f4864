"""Choose schedules with which to try a program before tuning. These schedules must leave the mainloop enough
shared memory.

Epilogue and mainloop share an SM's memory, so tiles that a step loads and stores through TMA leave fewer
pipeline stages for the operands. QuACK divides the memory only while it compiles. This module predicts the
division with the same arithmetic as QuACK's ``GemmSm90._compute_stages`` and our ``FusedGemm``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal

from coda_agent.primitives.compiler.lowered import SUBTILE, Argument, GemmKernel, subtile
from coda_agent.primitives.compiler.resources import StepResources
from coda_agent.primitives.compiler.roofline import ITEM_BYTES
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import CLUSTERS, LARGE_TILES, SMALL_TILES, Schedule
from coda_agent.primitives.target import TARGET

PROBES = tuple(Schedule(*probe) for probe in TARGET.probes)
MAINLOOP_BYTES = 1024  # shared memory that the mainloop's barriers take
ALIGNMENT = 1024  # bytes that the alignment of an epilogue's buffer may take from the operands
ROW_BYTES = 128  # bytes per row of an operand in one stage, for any dtype
LOAD_STAGES = (4, 2)  # QuACK's first choice; the second if the first leaves under three operand stages
FEWEST = 2  # least operand stages: with one stage, the mainloop waits for its own loads

Kind = Literal["once", "load", "store"]  # whether a buffer exists once, or once per load or store stage


def probes(
    program: Program, kernel: GemmKernel, sizes: Mapping[str, int], given: Iterable[Schedule] = PROBES
) -> list[Schedule]:
    """The ``given`` schedules that fit a step. If no given schedule fits, return only the first of
    ``candidates`` that fits; if no candidate fits, return an empty list. ``sizes`` contains the static
    dims."""
    resources = _resources(program, kernel)
    for tried in (given, candidates(kernel, sizes)):
        fitting = [s for s in tried if kernel.admits(s, sizes) and _stages(resources, s, sizes) >= FEWEST]
        if fitting:
            return fitting if tried is given else fitting[:1]
    return []


def candidates(kernel: GemmKernel, sizes: Mapping[str, int]) -> list[Schedule]:
    """The schedules that tuning tries first: the tiles that the step accepts at these sizes, in clusters of
    the default schedule's size. Each pingpong schedule is tried without and with ``deep``. If the output's
    size is unknown, only large tiles are tried."""
    whole = all(dim.names <= sizes.keys() for dim in kernel.shape)
    found = starting([dim(sizes) for dim in kernel.shape] if whole else None)
    deep = [schedule._replace(deep=True) for schedule in found if schedule.pingpong]
    return [schedule for schedule in (*found, *deep) if kernel.admits(schedule, sizes)]


def starting(shape: Sequence[int] | None) -> list[Schedule]:
    """Schedules with the large tiles, and with the default schedule's cluster size and rasterisation. Small
    tiles are added if the output has fewer 128x128 tiles than the GPU has SMs."""
    usual = Schedule()
    clusters = [(m, n) for m, n in CLUSTERS if m * n == usual.cluster_m * usual.cluster_n]
    few = shape is not None and prod(-(-size // 128) for size in shape) < TARGET.machine.multiprocessors.value
    tiles = sorted(LARGE_TILES) + (sorted(SMALL_TILES) if few else [])
    return [Schedule(*tile, *cluster) for tile in tiles for cluster in clusters]


def choices(
    program: Program, kernels: Iterable[GemmKernel], sizes: Mapping[str, int]
) -> list[dict[int, Schedule]]:
    """Combinations of one probe per step (see ``probes``). Each probe of each step occurs at least once."""
    found = {kernel.step: probes(program, kernel, sizes) for kernel in kernels}
    most = max(map(len, found.values()))
    return [{step: tried[min(k, len(tried) - 1)] for step, tried in found.items()} for k in range(most)]


def fits(program: Program, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]) -> bool:
    """Whether a schedule's tile contains whole heads and pairs, and leaves the mainloop enough memory."""
    return kernel.admits(schedule, sizes) and operand_stages(program, kernel, schedule, sizes) >= FEWEST


def operand_stages(program: Program, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]) -> int:
    """The number of operand stages that a step's mainloop gets; 0 or less if the epilogue takes all memory. A
    ``deep`` schedule may get one more stage."""
    return _stages(_resources(program, kernel), schedule, sizes)


def crowded(program: Program, kernel: GemmKernel, sizes: Mapping[str, int]) -> tuple[str, int | None]:
    """A message for the author of a step that fits no tile, and the node of the largest tile that the step
    loads or stores. Of several equally large tiles, the last node is returned."""
    names = {i: str(node.attribute) for i, node in enumerate(program.nodes) if node.op == "input"}
    names |= {index: name for name, index in program.outputs.items()}
    shares = list(_shares(_resources(program, kernel), PROBES[0], sizes))

    def named(wanted: Kind) -> str:
        found = [names.get(a.node, "one between gemms") for a, kind, _ in shares if kind == wanted]
        return f"{len(found)} tiles ({', '.join(found)})" if found else "none"

    tiles = [(size, a.node) for a, kind, size in shares if kind != "once"]
    return (
        f"step {kernel.step} reads {named('load')} and stores {named('store')}, which leave no room in "
        "shared memory for the operands of its gemm, whatever the tile: read and return fewer tiles, or "
        "narrower ones, or split the work over two kernels"
    ), max(tiles, default=(0, None))[1]


def _resources(program: Program, kernel: GemmKernel) -> StepResources:
    steps = cut(program)
    return StepResources(program, steps, steps.gemms[kernel.step])


def _stages(resources: StepResources, schedule: Schedule, sizes: Mapping[str, int]) -> int:
    rows, columns = subtile(schedule, resources.d)
    subtiles = schedule.tile_m * schedule.tile_n // (rows * columns)
    taken, beside = Counter[Kind](), 0
    for argument, kind, size in _shares(resources, schedule, sizes):
        taken[kind] += size
        beside += size if argument not in (resources.c, resources.d) else 0
    room = TARGET.block_bytes - MAINLOOP_BYTES - (ALIGNMENT if beside else 0)
    room -= taken["once"] + taken["store"] * min(subtiles, 4 if columns <= 16 else 2)
    operands = (schedule.tile_m + schedule.tile_n) * ROW_BYTES
    usual, fewer = ((room - taken["load"] * min(subtiles, most)) // operands for most in LOAD_STAGES)
    return usual if usual >= 3 else fewer


def _shares(
    resources: StepResources, schedule: Schedule, sizes: Mapping[str, int]
) -> Iterator[tuple[Argument, Kind, int]]:
    """The epilogue's resources in shared memory. Each comes with the kind and the bytes of its buffer: in
    total for "once", per stage for "load" and "store"."""
    rows, columns = subtile(schedule, resources.d)
    warps = rows // 16
    own = [a for a in (resources.c, resources.d) if a]
    for argument in (*own, *(a for a, _ in resources.all())):
        each = 4 if argument.packed else ITEM_BYTES[argument.dtype]
        period = argument.period(sizes) if argument.period else 0
        match argument.role:
            case "load":
                yield argument, "load", rows * columns * each
            case "table" if period % SUBTILE == 0:  # otherwise threads read the table from global memory
                yield argument, "load", rows * columns * each
            case "store":
                yield argument, "store", int(rows * columns * min(1, resources.width_of(argument))) * each
            case "row" | "index":
                yield argument, "once", schedule.tile_m * each
            case "column":
                yield argument, "once", schedule.tile_n * each
            case "head":
                yield argument, "once", schedule.tile_m * (schedule.tile_n // period) * each
            case "partial" if resources.reduction(argument.node).axis == "column":
                yield argument, "once", schedule.tile_n * (warps - 1) * each
