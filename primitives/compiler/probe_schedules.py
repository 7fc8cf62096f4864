"""Choose the schedules at which a program is compiled before tuning, and predict which schedules fit.

A schedule fits if it leaves the mainloop enough shared memory. The epilogue and the mainloop share an SM's
shared memory. So each tile that a step loads or stores through TMA leaves fewer pipeline stages for the
operands. QuACK divides the memory only while it compiles. This module predicts the division with the
arithmetic of QuACK's ``GemmSm90._compute_stages`` and our ``FusedGemm``.
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
# The maximum number of load stages. QuACK uses the first; we use the second if the first leaves fewer than
# three operand stages.
LOAD_STAGES = (4, 2)
FEWEST = 2  # least number of operand stages: with one stage, the mainloop waits for itself forever

Kind = Literal["once", "load", "store"]  # a buffer exists once, or once per load stage or store stage


def probes(
    program: Program, kernel: GemmKernel, sizes: Mapping[str, int], given: Iterable[Schedule] = PROBES
) -> list[Schedule]:
    """Return the ``given`` schedules that fit a step. If no given schedule fits, return only the first of the
    step's ``candidates`` that fits. If no candidate fits either, return an empty list. ``sizes`` contains at
    least the static dims."""
    resources = _resources(program, kernel)
    for tried in (given, candidates(kernel, sizes)):
        fitting = [s for s in tried if kernel.admits(s, sizes) and _stages(resources, s, sizes) >= FEWEST]
        if fitting:
            return fitting if tried is given else fitting[:1]
    return []


def candidates(kernel: GemmKernel, sizes: Mapping[str, int]) -> list[Schedule]:
    """Return the schedules that tuning tries first. Each tile that the step accepts at these sizes is
    combined with each cluster that has as many CTAs as the default schedule's cluster. Each pingpong schedule
    occurs without ``deep`` and with ``deep``. If the output's size is unknown, all tiles are large."""
    whole = all(dim.names <= sizes.keys() for dim in kernel.shape)
    found = starting([dim(sizes) for dim in kernel.shape] if whole else None)
    deep = [schedule._replace(deep=True) for schedule in found if schedule.pingpong]
    return [schedule for schedule in (*found, *deep) if kernel.admits(schedule, sizes)]


def starting(shape: Sequence[int] | None) -> list[Schedule]:
    """Return a schedule for each large tile and each cluster with as many CTAs as the default cluster. All
    other fields have their defaults. If the output has fewer 128x128 tiles than the GPU has SMs, also return
    schedules for the small tiles. ``shape``: the output's rows and columns, if known."""
    usual = Schedule()
    clusters = [(m, n) for m, n in CLUSTERS if m * n == usual.cluster_m * usual.cluster_n]
    few = shape is not None and prod(-(-size // 128) for size in shape) < TARGET.machine.multiprocessors.value
    tiles = sorted(LARGE_TILES) + (sorted(SMALL_TILES) if few else [])
    return [Schedule(*tile, *cluster) for tile in tiles for cluster in clusters]


def choices(
    program: Program, kernels: Iterable[GemmKernel], sizes: Mapping[str, int]
) -> list[dict[int, Schedule]]:
    """Combine the probes of all steps (see ``probes``). A combination gives one probe for each step. Each
    probe of each step occurs in at least one combination."""
    found = {kernel.step: probes(program, kernel, sizes) for kernel in kernels}
    most = max(map(len, found.values()))
    return [{step: tried[min(k, len(tried) - 1)] for step, tried in found.items()} for k in range(most)]


def fits(program: Program, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]) -> bool:
    """Whether a step admits a schedule (see ``GemmKernel.objection``), and the schedule leaves the mainloop
    enough shared memory."""
    return kernel.admits(schedule, sizes) and operand_stages(program, kernel, schedule, sizes) >= FEWEST


def operand_stages(program: Program, kernel: GemmKernel, schedule: Schedule, sizes: Mapping[str, int]) -> int:
    """Predict the number of operand stages of a step's mainloop. The number is 0 or less if the epilogue
    takes all shared memory. A ``deep`` schedule may get one stage more than predicted."""
    return _stages(_resources(program, kernel), schedule, sizes)


def crowded(program: Program, kernel: GemmKernel, sizes: Mapping[str, int]) -> tuple[str, int | None]:
    """Explain why a step fits no schedule: the tiles that its epilogue loads and stores take too much shared
    memory. Return a message for the author, and the node of the largest of these tiles. If several tiles are
    equally large, return the last node among them."""
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
    """Yield the epilogue's resources in shared memory. Each resource comes with the kind and the bytes of its
    buffer. For the kind "once", these are all bytes of the buffer; for "load" and "store", the bytes of one
    stage."""
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
