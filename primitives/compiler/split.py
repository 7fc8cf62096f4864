"""Run a step as two launches, so that no SM is idle.

Clusters of four read less from the L2, but an H100's GPCs can place such clusters on only 120 of the 132 SMs.
The first launch uses these 120 SMs for most rows. The second launch uses the other SMs, in clusters of two.
The launches overlap by programmatic dependent launch: the second launch may start once all blocks of the
first launch have started. The next kernel on the stream waits for the second launch, which ends after the
first launch.
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
    of the first and of the second launch run concurrently."""
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
    """Within the ``with`` block, patch QuACK so that a kernel of a ``split`` schedule can be traced. Without
    the patch, QuACK's GEMM waits for the previous kernel on the stream before the GEMM's first load. A block
    without more tiles lets the next kernel start. With the patch, the first launch waits for the previous
    kernel and then lets the second launch start at once. In the second launch, a block without more tiles
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
