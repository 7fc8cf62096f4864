"""The search for a schedule. The tests define the time of each schedule, so they need no GPU and no clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import kernels
import pytest

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import GemmKernel, editable, lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.lang.schedule import SMALL_TILES, TILES, Schedule
from coda_agent.primitives.runtime import precompile, tune
from coda_agent.primitives.runtime.race import Load
from coda_agent.primitives.target import H100

SIZES = {"M": 16384, "D": 2048, "F": 5632}


@pytest.fixture
def kernel() -> GemmKernel:
    (gemm,) = lower(kernels.BACKWARD.program).gemms
    assert gemm.c  # the kernel streams this tile, so that every hint matters
    return gemm


class Course:
    """Runs races without a GPU: the function ``milliseconds`` gives the time of each schedule. ``fields`` has
    the schedules of each race so far."""

    def __init__(self, milliseconds: Callable[[Schedule], float]) -> None:
        self.milliseconds, self.fields = milliseconds, list[list[Schedule]]()

    def __call__(self, schedules: list[Schedule], rounds: int) -> list[tuple[Schedule, float]]:
        self.fields.append(schedules)
        assert len(set(schedules)) == len(schedules)
        return sorted(((s, self.milliseconds(s)) for s in schedules), key=lambda pair: pair[1])


def found(kernel: GemmKernel, race: Course) -> Schedule:
    """Return the schedule that the search finds."""
    ranked = tune.search(candidates(kernel, SIZES), partial(tune.refinements, gemm=kernel), race)
    return ranked[0][0]


def tiles(schedules: list[Schedule]) -> set[tuple[int, int, bool]]:
    return {(s.tile_m, s.tile_n, s.pingpong) for s in schedules}


def test_a_tile_that_is_best_at_its_own_group_size_is_found(kernel: GemmKernel) -> None:
    wide = Schedule(128, 160, True, 2, 1, 16, evict_loads=True, deep=True)

    def milliseconds(s: Schedule) -> float:
        if s == wide:
            return 0.9
        # apart from ``wide``, a pingpong tile of 128x128 is faster than all others, whatever its cluster
        if (s.tile_m, s.tile_n, s.pingpong) == (128, 128, True):
            return 1.0 + s.swizzle / 1e4
        return 1.1 if s._replace(swizzle=16, evict_loads=True) == wide else 1.2

    assert found(kernel, Course(milliseconds)) == wide


def test_the_very_best_is_tried_on_a_cluster_of_four(kernel: GemmKernel) -> None:
    best = Schedule(128, 128, True, 2, 2, 8, evict_loads=True, evict_stores=True, deep=True)

    def milliseconds(s: Schedule) -> float:
        return 1.0 + sum(a != b for a, b in zip(s, best, strict=True))

    assert found(kernel, Course(milliseconds)) == best


def test_the_best_tiles_are_tried_in_two_launches(kernel: GemmKernel) -> None:
    """The second-best tile is tried in two launches too, because only a race shows which tile gains from
    them."""
    best = Schedule(192, 128, True, 2, 2, 16, deep=True, split=True)

    def milliseconds(s: Schedule) -> float:
        if s._replace(swizzle=16) == best:
            return 0.9 + abs(s.swizzle - 16) / 1e4
        return 1.0 + (s.tile_m != 128) / 1e4 + (s.tile_n != 128) + (not s.deep) / 1e3

    assert found(kernel, Course(milliseconds)) == best


def test_deep_mainloops_are_raced_where_warp_groups_take_turns(kernel: GemmKernel) -> None:
    first = candidates(kernel, SIZES)
    assert {s.pingpong for s in first if s.deep} == {True}
    assert {s._replace(deep=True) for s in first if s.pingpong} <= set(first)
    assert {(s.cluster_m, s.cluster_n) for s in first} == {(1, 2), (2, 1)}


def test_the_last_race_is_short_and_has_the_five_best_tiles(kernel: GemmKernel) -> None:
    order = dict.fromkeys([(128, 128, True), (192, 128, True), (128, 256, False)], 1.0)
    order |= {(256, 128, False): 1.1, (128, 192, True): 1.2}
    race = Course(lambda s: order.get((s.tile_m, s.tile_n, s.pingpong), 2.0) + s.swizzle / 1e4)
    found(kernel, race)
    assert len(race.fields) == 3 and len(race.fields[-1]) <= tune.FINAL + tune.LAST_TILES
    assert tiles(race.fields[-1]) == set(order)


def test_known_schedules_of_one_tile_race_with_the_best_of_others(kernel: GemmKernel) -> None:
    wide = Schedule(128, 256, False, 2, 1)
    known = [Schedule(128, 128, True, 1, 2, swizzle) for swizzle in (2, 4, 8)]
    race = Course(lambda s: 0.9 if s == wide else 1.0 if s in known else 1.2)
    ranked = tune.search_again(known, candidates(kernel, SIZES), race)
    assert ranked[0][0] == wide and set(known) < set(race.fields[-1])


def test_what_was_good_is_revisited_in_two_launches_and_where_it_fits(kernel: GemmKernel) -> None:
    known = [Schedule(128, 128, True, 1, 2), Schedule(192, 128, True, 1, 2)]
    start = candidates(kernel, SIZES)
    again = tune.revisited(kernel, SIZES, known, start)
    assert again[:2] == known and {s.split for s in again[2:]} == {True}
    assert {s.swizzle for s in again[2:]} == {*tune.SPLIT_GROUPS}
    assert (
        tune.revisited(kernel, SIZES, known, start, edited=True) == known
    )  # two-launch variants have been raced with the kernel before the edit
    (heads,) = lower(kernels.QK_NORM.program).gemms
    sizes = {"M": 16384, "K": 2048, "H": 32, "P": 32}
    # a tile of 160 columns cuts a head
    assert tune.revisited(heads, sizes, [Schedule(128, 160)], [], edited=True) == []


def test_what_an_author_was_shown_races_alone(kernel: GemmKernel) -> None:
    known = [Schedule(128, 128, True, 1, 2)]
    for edited, races in ((True, 1), (False, 2)):
        race = Course(lambda s: s.tile_n)
        refine = partial(tune.refinements, gemm=kernel)
        tune.ranking(candidates(kernel, SIZES), refine, race, known, edited=edited)
        assert len(race.fields) == races and set(known) <= set(race.fields[-1])
        assert (race.fields == [known]) == edited


def test_small_tiles_race_where_large_ones_are_too_few(kernel: GemmKernel) -> None:
    rows, columns = (dim(SIZES) for dim in kernel.shape)
    assert -(-rows // 128) * -(-columns // 128) >= H100.multiprocessors.value
    assert not tiles(candidates(kernel, SIZES)) & SMALL_TILES
    few = SIZES | {"M": 128}
    assert tiles(candidates(kernel, few)) == TILES
    small = Schedule(128, 64, False, 1, 2)
    known = [Schedule(128, 128, True, 1, 2), Schedule(192, 128, True, 1, 2), Schedule(128, 256, False, 2, 1)]
    race = Course(lambda s: 0.9 if s == small else 1.0)
    assert tune.search_again(known, candidates(kernel, few), race)[0][0] == small
    again = Course(lambda s: 1.0)
    tune.search_again([*known, small], candidates(kernel, few), again)
    assert again.fields == [[*known, small]]


def test_known_schedules_of_several_tiles_race_by_themselves(kernel: GemmKernel) -> None:
    known = [Schedule(128, 128, True, 1, 2), Schedule(192, 128, True, 1, 2), Schedule(128, 256, False, 2, 1)]
    race = Course(lambda s: s.tile_n)
    tune.search_again(known, candidates(kernel, SIZES), race)
    assert race.fields == [known]


def test_a_tuning_is_of_one_gpu_and_one_set_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, places = KernelSource(kernels.BACKWARD.program), set[Path]()
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda gpu=gpu: gpu)
        places |= {tune.cache_path(kernel, sizes) for sizes in (SIZES, SIZES | {"M": 8192})}
    assert len(places) == 4


def test_a_tuning_is_kept_by_what_the_program_says_of_schedules_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a program fixes a schedule, this schedule is used even if the cache has a tuning. The program
    without the schedule still gets the cached tuning."""
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    plain, chosen = kernels.BACKWARD.program, Schedule(128, 160)
    said = plain._replace(schedule={0: chosen})
    found = tune.cache_path(KernelSource(plain), SIZES)
    found.parent.mkdir(parents=True)
    kept = {"schedules": {"0": Schedule().to_json()}, "milliseconds": {}}
    found.write_text(json.dumps(kept))
    assert tune.tuned_schedules(KernelSource(said), {}, SIZES) == {0: chosen}
    assert tune.tuned_schedules(KernelSource(plain), {}, SIZES) == {0: Schedule()}


def test_a_step_with_a_given_schedule_is_not_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is cached for this schedule only, also for edited code."""
    raced = []

    def race(kernel: KernelSource, gemm: GemmKernel, *given: Any) -> list[tuple[Schedule, float]]:
        raced.append(gemm.step)
        return [(schedule, 1.0) for schedule in given[-2]]

    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tune, "_race", race)
    program, given, known = kernels.CHAIN.program, Schedule(128, 192), {1: [Schedule(128, 160)]}
    source = KernelSource(program, {0: given}, editable(program))
    sizes = dict.fromkeys(program.signature.dims, 4096)
    expected = {0: given, 1: Schedule(128, 160)}
    assert tune.tuned_schedules(source, {}, sizes, known) == expected
    assert set(raced) == {1} and tune.cached(source, sizes, known) == expected
    assert tune.cached(replace(source, schedules={0: Schedule()}), sizes, known) is None


def test_a_tuning_is_kept_by_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning holds only for its sizes, because the best schedule depends on them. The order of the sizes'
    names does not matter."""
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tune, "_race", lambda *given: [(schedule, 1.0) for schedule in given[-2]])
    program, narrow, wide = kernels.BACKWARD.program, Schedule(128, 128), Schedule(128, 192)
    for more_rows, fastest in ((SIZES, narrow), (SIZES | {"M": 32768}, wide)):
        monkeypatch.setattr(tune, "search", lambda *given, fastest=fastest: [(fastest, 1.0)])
        assert tune.tuned_schedules(KernelSource(program), {}, more_rows) == {0: fastest}
    assert tune.cached(KernelSource(program), dict(reversed(SIZES.items()))) == {0: narrow}


def test_of_an_edited_text_a_tuning_over_more_than_is_known_of_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached tuning of an edited text is ignored if it raced a schedule on which the text was never shown
    to be correct."""
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tune, "_race", lambda *given: [(schedule, 1.0) for schedule in given[-2]])
    program, right, other = kernels.BACKWARD.program, Schedule(128, 160), Schedule(128, 192)
    edit = KernelSource(program, edited=editable(program))
    assert tune.tuned_schedules(edit, {}, SIZES, {0: [other]}) == {0: other}
    assert tune.cached(edit, SIZES) == tune.cached(edit, SIZES, {0: [right, other]})
    assert tune.cached(edit, SIZES, {0: [right]}) is None
    assert tune.tuned_schedules(edit, {}, SIZES, {0: [right]}) == {0: right}
    assert tune.cached(edit, SIZES, {0: [right]}) == {0: right}


def test_what_spills_too_far_is_refused_by_every_process_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, schedule = kernels.BACKWARD.program, Schedule(128, 160)
    for variable in ("CODA_AGENT_CACHE", "CUTE_DSL_DUMP_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    for compiler in ("compile_gemm", "compile_vector"):
        monkeypatch.setattr(precompile, compiler, lambda *given: None)
    task = (program.to_json(), "{}", 0, schedule, None)
    monkeypatch.setattr(precompile, "MOST_STACK", -1)
    assert not precompile._compile_one(task)
    monkeypatch.setattr(precompile, "_compiled", {})
    monkeypatch.setattr(
        "coda_agent.primitives.system.workers.run_all", lambda task, asked: [True for _ in asked]
    )
    asked = [(0, schedule), (0, schedule._replace(swizzle=16)), (0, Schedule())]
    assert precompile.compile_all(KernelSource(program), SIZES, asked) == [False, False, True]


def test_load_counts_until_it_has_cooled_off() -> None:
    now = iter([0.0, 0.7, 0.7, 3.0, 3.5, 3.6, 9.0, 9.1])
    load = Load(lambda: next(now))
    followed = []
    for _ in range(4):
        with load.more() as before:
            followed.append(round(before, 3))
    # the second block brings the load to 3 s, of which at most 2 s count; half a second of rest cancels 1 s
    assert followed == [0.0, 0.7, 1.0, 0.0]
