"""Schedules of a step, and the tiles that the mainloop supports. This module needs only the standard
library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.target import TARGET

_TILE_M, _TILE_N, _PINGPONG, _CLUSTER_M, _CLUSTER_N = TARGET.probes[0]


class Schedule(NamedTuple):
    """A step's schedule: CTA tile, cluster, pingpong, rasterisation group (``swizzle``), L2 eviction hints.

    ``deep``: take shared memory from the epilogue if that gives the mainloop another stage. ``split``: run
    the step as two launches. The first launch, in clusters of four, leaves some of an H100's SMs idle. The
    second launch, in clusters of two, computes part of the rows on these SMs (``primitives.compiler.split``).
    """

    tile_m: int = _TILE_M
    tile_n: int = _TILE_N
    pingpong: bool = _PINGPONG
    cluster_m: int = _CLUSTER_M
    cluster_n: int = _CLUSTER_N
    swizzle: int = 8
    evict_loads: bool = False
    evict_stores: bool = False
    deep: bool = False
    split: bool = False

    @property
    def rest(self) -> Schedule:
        """The schedule of a ``split`` step's second launch."""
        return self._replace(cluster_m=1, cluster_n=2)

    @property
    def launches(self) -> tuple[Schedule, ...]:
        """The schedules of a step's launches, in order."""
        return (self, self.rest) if self.split else (self,)

    def to_json(self) -> dict[str, int | bool]:
        return self._asdict()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """Read a schedule. Raises ProgramError for an unknown field, a wrong type or an unsupported value."""
        known = {name: type(default) for name, default in cls._field_defaults.items()}
        for name, value in data.items():
            if name not in known or type(value) is not known[name]:
                raise ProgramError(
                    "schedule", f"schedule field {name!r} = {value!r}; known: {', '.join(known)}"
                )
        schedule = cls(**data)
        if (schedule.tile_m, schedule.tile_n, schedule.pingpong) not in TILES:
            raise ProgramError(
                "schedule",
                f"no tile {schedule.tile_m}x{schedule.tile_n} with "
                f"pingpong={schedule.pingpong}; known: {sorted(TILES)}",
            )
        if (schedule.cluster_m, schedule.cluster_n) not in CLUSTERS or schedule.swizzle not in SWIZZLES:
            raise ProgramError("schedule", f"cluster must be one of {CLUSTERS}, swizzle one of {SWIZZLES}")
        if schedule.split and schedule.cluster_m * schedule.cluster_n < 4:
            raise ProgramError("schedule", "split takes a cluster of four: smaller clusters leave no SM idle")
        return schedule


def by_step(data: Mapping[str, Mapping[str, Any]]) -> dict[int, Schedule]:
    """Parse the schedules of steps from JSON, whose keys are step numbers. Raises ProgramError."""
    return {int(step): Schedule.from_json(fields) for step, fields in data.items()}


def schedules_json(schedules: Mapping[int, Schedule]) -> dict[str, dict[str, int | bool]]:
    """Convert the schedules of steps to JSON, in the order of steps."""
    return {str(step): schedule.to_json() for step, schedule in sorted(schedules.items())}


def all_by_step(tunings: Iterable[Mapping[int, Schedule]]) -> dict[int, list[Schedule]]:
    """Collect the distinct schedules of each step. ``tunings``: dicts from steps to schedules."""
    found: dict[int, dict[Schedule, None]] = {}
    for step, schedule in (pair for tuned in tunings for pair in tuned.items()):
        found.setdefault(step, {})[schedule] = None
    return {step: [*schedules] for step, schedules in found.items()}


LARGE_TILES, SMALL_TILES = TARGET.large_tiles, TARGET.small_tiles
TILES = LARGE_TILES | SMALL_TILES
CLUSTERS, SWIZZLES = TARGET.clusters, TARGET.swizzles
