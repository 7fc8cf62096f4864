"""Tests of the search for schedules inside a training step, with made-up times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.models import step_schedules
from benchmarks.models.step_schedules import GROUPS, LEADERS, TILES, Choice, Place
from coda_agent.primitives.lang.schedule import Schedule

PLACES: list[Place] = [("up", 0, (4096, 512, 256)), ("down", 1, (4096, 256, 512))]
SHIPPED = Schedule(128, 224, False, 2, 1)


def searched(times: step_schedules.Times) -> list[Choice]:
    """Return the trials of a search. In this search, the place "up" is fastest with the last tile, and the
    place "down" with the first tile."""
    step = SimpleNamespace(times=times, places=lambda: [(place, "") for place in PLACES])
    made = list[Choice]()
    for choice in step_schedules.trials(cast(Any, step)):
        made.append(choice)
        for place, order in zip(PLACES, (-1, 1), strict=True):
            schedule = choice.get(place, SHIPPED)
            tile = schedule._replace(swizzle=TILES[0].swizzle)
            rank = TILES.index(tile) * order if tile in TILES else len(TILES)
            times.setdefault(place, {})[schedule] = 100.0 + rank
    return made


def test_each_tile_is_tried_and_then_other_groups_of_the_two_fastest() -> None:
    made = searched({})
    assert made[: len(TILES) + 1] == [{}, *(dict.fromkeys(PLACES, tile) for tile in TILES)]
    refined = made[len(TILES) + 1 :]
    assert len(refined) == LEADERS * len(GROUPS)
    assert [each[PLACES[0]] for each in refined[: len(GROUPS)]] == [
        TILES[-1]._replace(swizzle=group) for group in GROUPS
    ]
    assert {each[PLACES[1]]._replace(swizzle=8) for each in refined[: len(GROUPS)]} == {TILES[0]}


def test_known_times_are_read_again_and_their_tiles_are_not_tried_again(tmp_path: Path) -> None:
    times: step_schedules.Times = {place: {tile: 7.5 for tile in TILES[1:]} for place in PLACES}
    file = tmp_path / "times.json"
    step_schedules.write(file, cast(Any, SimpleNamespace(gpu="an H100", times=times)))
    assert step_schedules.read(file) == times
    tried = searched(step_schedules.read(file))
    assert [each for each in tried if set(each.values()) <= set(TILES)][:2] == [
        {},
        dict.fromkeys(PLACES, TILES[0]),
    ]
