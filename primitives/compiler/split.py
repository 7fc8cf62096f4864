"""Run a step as two launches, so that no SM is idle.

Clusters of four read less from the L2. But a cluster must lie within one GPC, so an H100 can place clusters
of four on only 120 of its 132 SMs. The first launch uses these 120 SMs for most rows. The second launch uses
the other SMs, in clusters of two. The launches overlap by programmatic dependent launch: the second launch
may start once all blocks of the first launch have started. The next kernel on the stream waits for the second
launch, which ends after the first launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import ceil
from threading import RLock
from typing import Any

from coda_agent.primitives.lang.schedule import Schedule

ORDER = 1  # version of the launch order in ``ordered``, a part of the compiled objects' cache keys

_tracing = RLock()  # held by ``ordered``, because its patch affects the whole process


def share(shape: tuple[int, int], schedule: Schedule, first: int, second: int) -> int:
    """Return how many of an output's rows the first launch of a ``split`` schedule computes. The number
    minimises the waves of the longer launch. The rows fill whole clusters of tiles. If the second launch
    cannot run, return all rows. ``first`` and ``second``: how many clusters of the first and of the second
    launch can run at the same time."""
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
    """Patch the waits of the kernel that QuACK traces in the ``with`` block, if ``schedule`` is ``split``.
    Without the patch, a GEMM waits for the previous kernel on the stream before its first load. Each
    block of the GEMM lets the next kernel start when the block has no more tiles. With the patch, the first
    launch waits for the previous kernel, and then lets the second launch start at once. In the second launch,
    a block without more tiles waits for the end of the first launch."""
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
