"""QuACK's kernels as arms (competitors in a benchmark).

Two arms compute a spec's outputs with QuACK's epilogues, and differ in how they choose schedules. ``QuACK
(its own tuner)`` times the schedules that QuACK's autotuner would time. ``QuACK (our search)`` uses the
search that tunes our own kernels, which tries more rasterisations. A third arm, ``QuACK matmul``, runs
QuACK's GEMMs without an epilogue. Our kernels use QuACK's mainloop.

Our code times all schedules, with a cold L2. An earlier measurement may have recorded the schedules of its
last tuning round. If these schedules have enough tile shapes, no others are timed. Importing this module is
cheap; ``tuned_calls`` imports heavy packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.primitives.compiler.jit import objects
from coda_agent.primitives.compiler.probe_schedules import starting
from coda_agent.primitives.lang.schedule import SWIZZLES
from coda_agent.primitives.runtime.precompile import refusals
from coda_agent.primitives.runtime.race import race_calls
from coda_agent.primitives.runtime.tune import FORMAT as SEARCHED
from coda_agent.primitives.runtime.tune import leaders, ranking
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import SPECS, cache_dir, read_json, write_atomic
from coda_agent.verifier.baselines.pytorch import products
from coda_agent.verifier.baselines.quack_epilogue import QuackEpilogue, Tensors
from coda_agent.verifier.baselines.quack_library import LIBRARY, quack_library
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Config, Finalists, QuackTuned
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from quack.gemm_config import GemmConfig
    from torch import Tensor

FORMAT = 2  # version of the search and of the cached tunings
OWN_TUNER, OUR_SEARCH = "QuACK (its own tuner)", "QuACK (our search)"
MATMUL = "QuACK matmul"
LIBRARY_ARMS = (OWN_TUNER, OUR_SEARCH)
ARMS = (*LIBRARY_ARMS, MATMUL)
PAIR_GRAIN = 32  # on SM90, if an epilogue works on pairs of columns, tile_n must be a multiple of this
SWIZZLE = 8  # the only rasterisation group size that QuACK's own tuner uses
SMALL = 256  # the size of symbolic dims during compilation

Configs = list["GemmConfig"]


def admitted(spec: Spec, arms: Sequence[str], *, beside_kept: bool = False) -> tuple[str, ...]:
    """The arms that apply to a spec. QuACK's arms with epilogues are left out if QuACK has no epilogue for
    the spec, or if the spec is not the shipped spec of its name. QuACK's bare matmul is left out if an
    operand is in fp8 or rows are grouped by experts.

    ``beside_kept``: always leave out QuACK's bare matmul. Edited code needs no such arm, because the
    comparison with the accepted kernel says more, and tuning the matmul would take longer than tuning the
    edited code.
    """
    alone = any(t.dtype == "fp8_e4m3" or t.init.offsets is not None for t in spec.inputs.values())
    known = spec.name in LIBRARY and _is_shipped(spec)
    there = dict.fromkeys(LIBRARY_ARMS, known) | {MATMUL: not alone and not beside_kept}
    return tuple(name for name in arms if there.get(name, True))


def _is_shipped(spec: Spec) -> bool:
    """Whether a spec is the shipped operator of its name, perhaps with other cases."""
    path = SPECS / f"{spec.name}.yaml"
    return path.exists() and load(path, check=False).operator_hash == spec.operator_hash


def config(
    tile_m: int, tile_n: int, pingpong: bool, *, cluster: tuple[int, int] = (2, 1), swizzle: int = SWIZZLE
) -> GemmConfig:
    """A Hopper schedule with the static persistent scheduler, which QuACK's own tuner also uses on Hopper."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=pingpong,
        is_dynamic_persistent=False,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        max_swizzle_size=swizzle,
        device_capacity=9,
    )


def own_space(stage: QuackEpilogue) -> Configs:
    """The schedules that QuACK's autotuner times on Hopper for this epilogue (``gemm_runtime.autotune``).
    These schedules combine QuACK's tiles and clusters with one rasterisation. They include schedules that
    swap the operands, if the epilogue neither pairs columns nor reduces."""
    from quack.gemm_config import get_all_configs

    swaps = not (stage.paired or stage.mod.sinks)
    every = get_all_configs(epilogue="gated" if stage.paired else None)
    return [c for c in every if c.device_capacity == 9 and (swaps or not c.swap_ab)]


def our_space(stage: QuackEpilogue) -> Configs:
    """The schedules of our search's first round: the tiles that this epilogue accepts, in clusters of two,
    and small tiles if the output is small."""
    return [
        config(s.tile_m, s.tile_n, s.pingpong, cluster=(s.cluster_m, s.cluster_n))
        for s in starting((stage.a.shape[0], stage.b.shape[1]))
        if not (stage.paired and s.tile_n % PAIR_GRAIN)
    ]


def _as_they_are(ranked: Configs) -> Configs:
    """Return no schedules for a second round, because QuACK's own tuner has no second round."""
    return []


def _rasterised(ranked: Configs) -> Configs:
    """The schedules of our search's second round: the best schedules with several rasterisation groups, and
    the very best schedule also in clusters of four."""
    every = [*leaders(ranked), *(replace(best, cluster_m=2, cluster_n=2) for best in ranked[:1])]
    return [replace(c, max_swizzle_size=s) for c in every for s in SWIZZLES if s > 1]


Refine = Callable[[Configs], Configs]
SPACES: dict[str, tuple[Callable[[QuackEpilogue], Configs], Refine]] = {
    OWN_TUNER: (own_space, _as_they_are),
    OUR_SEARCH: (our_space, _rasterised),
    MATMUL: (own_space, _as_they_are),
}


class Tuned(NamedTuple):
    """A tuned arm. ``calls``: one call per set of inputs. ``finalists``: for each stage (one QuACK GEMM), the
    schedules of the last tuning round as JSON data. A stage runs with its first finalist."""

    calls: list[Callable[[], dict[str, Tensor]]]
    finalists: list[list[Config]]


def tuned_calls(
    arm: str,
    spec: Spec,
    sets: Sequence[Tensors],
    sizes: Mapping[str, int],
    known: QuackTuned | None = None,
) -> Tuned:
    """Tune ``arm`` (one of ``ARMS``). For each set of inputs, return one call that runs QuACK's GEMMs, each
    with its fastest schedule. The call returns the spec's outputs by name. For ``MATMUL``, it returns the
    GEMMs' results, named ``product 0``, ``product 1``, ...

    Compiles in parallel; the last tuning round is cached on disk. ``known``: schedules of an earlier tuning.
    They are timed again if they come from this GPU model and this version of QuACK. Raises ValueError if
    QuACK has no epilogue for the spec, and RuntimeError if no schedule runs.
    """
    every = [_stages(spec, inputs, sizes, arm) for inputs in sets]
    first = every[0]
    path = _cache_path(spec, sizes, arm, first)
    if (ranked := read_json(path, _from_json)) is None:
        ranked = _ranked(spec, sizes, arm, first, _again(arm, known))
        write_atomic(path, json.dumps(_to_json(ranked)))
    if arm == MATMUL:  # nobody reads the results, so all sets of inputs share the outputs
        every = [[replace(s, outs=f.outs) for s, f in zip(own, first, strict=True)] for own in every]
    calls = [chained([s.prepare(c) for s, (c, *_) in zip(own, ranked, strict=True)]) for own in every]
    return Tuned(calls, _to_json(ranked))


def is_tuned(arm: str, spec: Spec, sizes: Mapping[str, int], known: QuackTuned | None = None) -> bool:
    """Whether ``tuned_calls`` can skip the full search, because good schedules are on disk or in ``known``.
    Generates small inputs on the GPU. Raises ValueError if QuACK has no epilogue for the spec."""
    if _again(arm, known):
        return True
    return _cache_path(spec, sizes, arm, _on_small(spec, _small(spec, sizes), arm)).exists()


def parsed(arms: Mapping[str, Finalists]) -> dict[str, list[Configs]]:
    """Parse the schedules of each arm and stage. Raises ValueError for an arm that is not QuACK's, or an
    unknown field of a schedule."""
    if unknown := sorted(arms.keys() - {*ARMS}):
        raise ValueError(f"{unknown[0]!r} is not an arm of QuACK's; known: {', '.join(ARMS)}")
    return {arm: _from_json(stages) for arm, stages in arms.items()}


def _stages(spec: Spec, inputs: Tensors, sizes: Mapping[str, int], arm: str) -> Sequence[QuackEpilogue]:
    if arm != MATMUL:
        return quack_library(spec.name, inputs, sizes, spec.constants)
    from quack.epilogue.library import identity_epi

    found = products(spec, inputs, sizes)
    return [
        QuackEpilogue(identity_epi, p.a, p.b, {"D": p.out()}, {"D": f"product {i}"})
        for i, p in enumerate(found)
    ]


def chained(calls: Sequence[Callable[[], dict[str, Tensor]]]) -> Callable[[], dict[str, Tensor]]:
    """Return a function that makes the calls in order and merges their outputs."""

    def call() -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for each in calls:
            outputs |= each()
        return outputs

    return call


def _again(arm: str, known: QuackTuned | None) -> list[Configs]:
    """The known schedules by stage; empty if they come from another GPU or another version of QuACK."""
    if known is None or [known.gpu, known.version] != _here():
        return []
    return parsed(known.arms).get(arm, [])


def _ranked(
    spec: Spec, sizes: Mapping[str, int], arm: str, stages: Sequence[QuackEpilogue], known: list[Configs]
) -> list[Configs]:
    """Search, or time the ``known`` schedules. Return the schedules of each stage's last tuning round,
    fastest first."""
    space, refine = SPACES[arm]
    ranked: list[Configs] = []
    for index, stage in enumerate(stages):
        start = space(stage)
        again = _admitted(known[index], start, refine) if index < len(known) else []
        found = ranking(start, refine, partial(_race, spec, sizes, arm, index, stage), again, edited=False)
        if not found:
            name = stage.mod.fn.__name__
            raise RuntimeError(f"no schedule of QuACK's {name} for {spec.name} runs at {dict(sizes)}")
        ranked.append([each for each, _ in found])
        stage.prepare(ranked[-1][0])()  # the next stage reads this stage's results
    return ranked


def _admitted(known: Configs, start: Configs, refine: Refine) -> Configs:
    """The known schedules that a search from ``start`` could reach."""
    reached = {c: c for c in (*start, *(finer for each in start for finer in refine([each])))}
    return list(dict.fromkeys(reached[c] for c in known if c in reached))


def _cache_path(spec: Spec, sizes: Mapping[str, int], arm: str, stages: Sequence[QuackEpilogue]) -> Path:
    epilogues = [stage.mod.semantic_digest for stage in stages]
    what: list[Any] = [spec.hash, dict(sorted(sizes.items()))]
    if arm == MATMUL:  # specs with the same GEMMs share the tuning
        what = [_geometry(t) for stage in stages for t in (stage.a, stage.b, stage.outs["D"])]
    key = json.dumps([SEARCHED, FORMAT, *what, arm, epilogues, *_here()])
    return cache_dir() / "tuning" / f"quack-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _geometry(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


def _here() -> list[str]:
    """The GPU's name and QuACK's version. A tuning is valid only for this GPU model and this version."""
    import torch

    return [torch.cuda.get_device_name(), version("quack-kernels")]


def _to_json(ranked: Sequence[Configs]) -> list[list[Config]]:
    return [[asdict(each) for each in stage] for stage in ranked]


def _from_json(ranked: Sequence[Sequence[Config]]) -> list[Configs]:
    """The schedules of each stage from JSON data. Raises ValueError for an unknown field of a schedule."""
    from quack.gemm_config import GemmConfig

    names = [field.name for field in fields(GemmConfig)]
    for each in (each for stage in ranked for each in stage):
        if unknown := sorted(each.keys() - {*names}):
            raise ValueError(f"QuACK's schedules have no field {unknown[0]!r}; known: {', '.join(names)}")
    made: Callable[..., GemmConfig] = GemmConfig
    return [[made(**each) for each in stage] for stage in ranked]


def _race(
    spec: Spec,
    sizes: Mapping[str, int],
    arm: str,
    index: int,
    stage: QuackEpilogue,
    configs: Configs,
    rounds: int,
) -> list[tuple[GemmConfig, float]]:
    """Time the schedules; return them with their milliseconds, fastest first. Schedules that the library or
    the compiler refuses are left out."""
    prepared = []
    for each in _compilable(spec, sizes, arm, index, stage, configs):
        with contextlib.suppress(*refusals()):
            prepared.append((each, stage.prepare(each)))
    return race_calls(prepared, rounds)


Small = tuple[tuple[str, int], ...]
Task = tuple[Spec, Small, str, int, "GemmConfig"]


def to_compile(
    arm: str, spec: Spec, sizes: Mapping[str, int], known: QuackTuned | None = None
) -> list[workers.Job]:
    """Return jobs that compile, into QuACK's object cache, the schedules that ``tuned_calls`` would time
    first. These are the known schedules, or else the schedules of the first round. Generates small inputs on
    the GPU. Raises ValueError if QuACK has no epilogue for the spec."""
    small, again = _small(spec, sizes), _again(arm, known)
    space, refine = SPACES[arm]
    jobs: list[workers.Job] = []
    for index, stage in enumerate(_on_small(spec, small, arm)):
        start = space(stage)
        first = _admitted(again[index], start, refine) if index < len(again) else start
        new, _ = _untried(spec, small, arm, index, stage, first)
        jobs += [(_compile_one, (spec, small, arm, index, c)) for c in new]
    return jobs


def _untried(
    spec: Spec, small: Small, arm: str, index: int, stage: QuackEpilogue, configs: Configs
) -> tuple[Configs, dict[GemmConfig, Path]]:
    """Return the configs (schedules) that no process has tried to compile. Also return, for each config, the
    file that records whether the config compiled."""
    wanted = dict.fromkeys(map(_launched_alike, configs))
    notes = {c: _note(spec, small, arm, index, stage, c) for c in wanted}
    return [c for c, note in notes.items() if not note.exists()], notes


def _compilable(
    spec: Spec, sizes: Mapping[str, int], arm: str, index: int, stage: QuackEpilogue, configs: Configs
) -> Configs:
    """Compile untried configs into QuACK's object cache; return the configs that compile.

    Cached objects leave non-static sizes symbolic, so small tensors of the same dtypes and layouts suffice.
    Rasterisation is a launch argument, so configs that differ only in rasterisation share an object. A small
    file in the cache records each config's result for all processes. Without this file, each process would
    have to start a worker, which takes longer than loading an object. A config whose compilation killed the
    worker has no such file, so this config is tried again next time.
    """
    small = _small(spec, sizes)
    new, notes = _untried(spec, small, arm, index, stage, configs)
    workers.run_all(_compile_one, [(spec, small, arm, index, c) for c in new])
    refused = {c for c, note in notes.items() if read_json(note) is False}
    return [c for c in configs if _launched_alike(c) not in refused]


def _launched_alike(config: GemmConfig) -> GemmConfig:
    """The config that stands for all configs with the same compiled object."""
    return replace(config, max_swizzle_size=SWIZZLE)


def _note(spec: Spec, small: Small, arm: str, index: int, stage: QuackEpilogue, config: GemmConfig) -> Path:
    """The file that records whether the compiler accepted a config."""
    key = [spec.hash, small, arm == MATMUL, index, stage.mod.semantic_digest, asdict(config)]
    return objects() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.tried"


def _small(spec: Spec, sizes: Mapping[str, int]) -> Small:
    return tuple((dim, sizes[dim] if dim in spec.static else SMALL) for dim in spec.dims)


def _on_small(spec: Spec, small: Small, arm: str) -> Sequence[QuackEpilogue]:
    """The arm's GEMMs on small inputs, which this function draws on the GPU."""
    from coda_agent.verifier.numerics.inputs import draw

    sizes = dict(small)
    return _stages(spec, draw(spec, sizes, 0, device="cuda"), sizes, arm)


def _compile_one(task: Task) -> bool:
    """Compile a config in a worker process on the GPU; return whether the compiler accepts it."""
    spec, small, arm, index, chosen = task
    stage, fine = _on_small(spec, small, arm)[index], False
    with contextlib.suppress(*refusals()):  # a refused config is not timed
        stage.prepare(chosen)
        fine = True
    write_atomic(_note(spec, small, arm, index, stage, chosen), json.dumps(fine))
    return fine
