"""Run a step as two launches, so that no SM is idle.

Clusters of four read less from the L2, but an H100's GPCs can place them on only 120 of its 132 SMs. The
first launch uses these SMs for most rows. The second launch uses the other SMs, in clusters of two. The
launches overlap by programmatic dependent launch: the second may start once all blocks of the first have
started. The next kernel on the stream waits for the second launch, which ends after the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import ceil
from threading import RLock
from typing import Any

from coda_agent.primitives.lang.schedule import Schedule

ORDER = 1  # version of the launch order in ``ordered``, a part of the compiled objects' cache keys

_tracing = RLock()  # ``ordered`` patches the whole process


def share(shape: tuple[int, int], schedule: Schedule, first: int, second: int) -> int:
    """The number of an output's rows that the first launch of a ``split`` schedule computes: whole tiles of
    whole clusters, or all rows if the second launch cannot run. ``first`` and ``second``: how many clusters
    of each launch run concurrently."""
    rows, columns = ceil(shape[0] / schedule.tile_m), ceil(shape[1] / schedule.tile_n)
    if second < 1:
        return shape[0]

    def waves(rows: int, cluster: Schedule, clusters: int) -> int:
        return ceil(ceil(rows / cluster.cluster_m) * ceil(columns / cluster.cluster_n) / clusters)

    def longest(taken: int) -> int:
        return max(waves(taken, schedule, first), waves(rows - taken, schedule.rest, second))

    choices = range(schedule.cluster_m, rows + 1, schedule.cluster_m)
    best = min(reversed(choices), key=longest, default=rows)
    return min(best * schedule.tile_m, shape[0])


@contextmanager
def ordered(schedule: Schedule) -> Iterator[None]:
    """Patch QuACK, within the ``with`` block, for tracing a kernel of a ``split`` schedule. Without the
    patch, QuACK's GEMM waits for its predecessor on the stream before its first load. The GEMM's blocks let
    the successor start when they have no more tiles. With this patch, the first launch waits for that
    predecessor and then lets the second start at once. In the second launch, a block that has no more tiles
    waits for the first launch."""
    with _tracing, _waiting(second=schedule == schedule.rest) if schedule.split else nullcontext():
        yield


@contextmanager
def _waiting(second: bool) -> Iterator[None]:
    from cutlass.experimental import primitives as prims

    usual, action = prims.griddepcontrol, prims.GridDepAction

    def waits(kind: Any, **more: Any) -> None:
        if kind == action.LAUNCH_DEPENDENTS:
            usual(action.WAIT if second else kind, **more)
        elif not second:
            usual(kind, **more)
            usual(action.LAUNCH_DEPENDENTS, **more)

    prims.griddepcontrol = waits
    try:
        yield
    finally:
        prims.griddepcontrol = usual
