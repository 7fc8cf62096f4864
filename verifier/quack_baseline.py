"""QuACK's human-written epilogues as arms: the same outputs as our spec, on a schedule of one's choice.

Row sums are finished inside the call, as a user of the library would: ``rms_final_reduce`` for RMSNorm
(QuACK's own second kernel), a torch sum for the SwiGLU backward's. Importing this module imports
nothing heavy; ``quack_library`` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primitives import workers
from primitives.compile import cache_dir
from primitives.files import write_atomic
from primitives.ir import CLUSTERS, SWIZZLES, TILES
from primitives.tune import race_calls, search
from verifier.spec import Spec

if TYPE_CHECKING:
    from quack.gemm_config import GemmConfig
    from torch import Tensor

PAIR_GRAIN = 32  # SM90: tile_n of an epilogue over pairs of columns is a multiple of this


@dataclass(frozen=True)
class QuackEpilogue:
    """One of QuACK's epilogues on given tensors: D = epilogue(a @ b, c, operands).

    ``outs`` are its buffers under QuACK's names ("D" and the declared ones) and ``names`` maps them to
    the spec's. ``finish`` turns partial sums (by QuACK's names, [M, N tiles] fp32) into the rest.
    """

    mod: Any
    a: Tensor  # [M, K]
    b: Tensor  # [K, N], any strides
    c: Tensor | None
    operands: dict[str, Tensor]
    outs: dict[str, Tensor]
    names: dict[str, str]
    paired: bool
    finish: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

    def configs(
        self,
        clusters: Sequence[tuple[int, int]] = CLUSTERS,
        swizzles: Sequence[int] = SWIZZLES,
    ) -> list[GemmConfig]:
        """Every schedule our own kernels may choose from, as far as this epilogue admits it."""
        return [
            config(*tile, cluster=cluster, swizzle=swizzle)
            for tile in sorted(TILES)
            if not (self.paired and tile[1] % PAIR_GRAIN)
            for cluster in clusters
            for swizzle in swizzles
        ]

    def prepare(self, config: GemmConfig) -> Callable[[], dict[str, Tensor]]:
        """Compile for ``config``; a call that launches and gives the spec's outputs by name.

        The outputs' buffers are shared by all calls and all configs of this epilogue.
        """
        plan = self.mod.plan(self.a, self.b, self.c, out=self.outs, config=config, **self.operands)
        stored = {self.names[name]: tensor for name, tensor in self.outs.items()}

        def call() -> dict[str, Tensor]:
            plan.run(self.a, self.b, self.c, out=self.outs, **self.operands)
            return stored | self.finish(plan.scratch)

        return call


def config(
    tile_m: int, tile_n: int, pingpong: bool, *, cluster: tuple[int, int] = (2, 1), swizzle: int = 8
) -> GemmConfig:
    """A Hopper schedule with the static persistent scheduler, the one that QuACK tunes with there."""
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


def quack_library(
    spec_name: str,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    *,
    constants: Mapping[str, float] | None = None,
) -> QuackEpilogue:
    """QuACK's epilogue for a spec of ours, on CUDA tensors; ``sizes`` and ``constants`` as the spec's.

    Raises ValueError where QuACK's library has none that computes the same outputs.
    """
    if spec_name not in LIBRARY:
        raise ValueError(f"QuACK has no epilogue for spec {spec_name!r}; there are {', '.join(LIBRARY)}")
    return LIBRARY[spec_name](inputs, sizes, constants or {})


def _residual_partial_rmsnorm(
    inputs: Mapping[str, Tensor], sizes: Mapping[str, int], constants: Mapping[str, float]
) -> QuackEpilogue:
    from quack.epilogue.library import rms_partial_epi
    from quack.rms_final_reduce import rms_final_reduce

    x, shape, eps = inputs["x"], (sizes["M"], sizes["N"]), constants["eps"]

    def finish(partials: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"rstd": rms_final_reduce(partials["sqsum"], 1 / sizes["N"], eps)}

    return QuackEpilogue(
        mod=rms_partial_epi,
        a=inputs["y"],
        b=inputs["w"].mT,
        c=x,
        operands={"weight": inputs["gamma"]},
        outs={"D": x.new_empty(shape), "resid_out": x.new_empty(shape)},
        names={"D": "hg", "resid_out": "h"},
        paired=False,
        finish=finish,
    )


def _rmsnorm_swiglu(
    inputs: Mapping[str, Tensor], sizes: Mapping[str, int], constants: Mapping[str, float]
) -> QuackEpilogue:
    from quack.epilogue.library import norm_act_mod

    x, m, f = inputs["x"], sizes["M"], sizes["F"]
    # Not rstd_swiglu_preact_epi: that one stores the pre-activation without its row scale.
    mod = norm_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=True)
    return QuackEpilogue(
        mod=mod,
        a=x,
        b=inputs["w"].mT,
        c=None,
        operands={"mColVecBroadcast": inputs["rstd"]},
        outs={"D": x.new_empty(m, 2 * f), "mAuxOut": x.new_empty(m, f)},
        names={"D": "preact", "mAuxOut": "act"},
        paired=True,
        finish=lambda partials: {},
    )


def _swiglu_bwd(
    inputs: Mapping[str, Tensor], sizes: Mapping[str, int], constants: Mapping[str, float]
) -> QuackEpilogue:
    import torch
    from quack.epilogue.library import dswiglu_dpreact_mod

    z, m, f = inputs["z"], sizes["M"], sizes["F"]
    s = z.new_empty(m, dtype=torch.float32)

    def finish(partials: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"s": torch.sum(partials["dsum"], dim=-1, out=s)}

    return QuackEpilogue(
        mod=dswiglu_dpreact_mod,
        a=inputs["dy"],
        b=inputs["w_down"],
        c=z,
        operands={},
        outs={"D": z.new_empty(m, 2 * f), "postact": z.new_empty(m, f)},
        names={"D": "dz", "postact": "act"},
        paired=True,
        finish=finish,
    )


LIBRARY: dict[
    str, Callable[[Mapping[str, Tensor], Mapping[str, int], Mapping[str, float]], QuackEpilogue]
] = {
    "gemm_residual_partial_rmsnorm": _residual_partial_rmsnorm,
    "gemm_rmsnorm_swiglu": _rmsnorm_swiglu,
    "gemm_swiglu_bwd": _swiglu_bwd,
}


SWIZZLE = 8  # what QuACK's own tuner fixes


def tuned_library(
    spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> Callable[[], dict[str, Tensor]]:
    """QuACK's epilogue on the fastest schedule of our own space, found by our own search. Compiles in
    parallel; the choice is kept on disk. RuntimeError if none runs."""
    library = quack_library(spec.name, inputs, sizes, constants=spec.constants)
    path = _kept(spec, sizes)
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        return library.prepare(
            config(*known["tile"], cluster=tuple(known["cluster"]), swizzle=known["swizzle"])
        )
    start = library.configs(clusters=CLUSTERS[1:], swizzles=(SWIZZLE,))
    ranked = search(start, _rasterised, partial(_race, spec, library))
    if not ranked:
        raise RuntimeError(f"no schedule of QuACK's epilogue for {spec.name} runs at {dict(sizes)}")
    chosen = ranked[0][0]
    record = {
        "tile": [chosen.tile_m, chosen.tile_n, chosen.pingpong],
        "cluster": [chosen.cluster_m, chosen.cluster_n],
        "swizzle": chosen.max_swizzle_size,
    }
    write_atomic(path, json.dumps(record))
    return library.prepare(chosen)


def _rasterised(configs: list[GemmConfig]) -> list[GemmConfig]:
    return [replace(c, max_swizzle_size=s) for c in configs for s in SWIZZLES if s > 1]


def _kept(spec: Spec, sizes: Mapping[str, int]) -> Path:
    import torch

    key = json.dumps(
        [spec.hash, dict(sorted(sizes.items())), torch.cuda.get_device_name(), version("quack-kernels")]
    )
    return cache_dir() / "tuning" / f"quack-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _race(
    spec: Spec, library: QuackEpilogue, configs: list[GemmConfig], rounds: int
) -> list[tuple[GemmConfig, float]]:
    """Fastest first; those that the library or the compiler refuses are left out."""
    _compile_all(spec, configs)
    prepared = []
    for each in configs:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            prepared.append((each, library.prepare(each)))
    return race_calls(prepared, rounds)


def _compile_all(spec: Spec, configs: Sequence[GemmConfig]) -> None:
    """Fill QuACK's object cache: sizes are symbolic in it, so small tensors of the same kind do."""
    tasks = {(spec.name, (c.tile_m, c.tile_n, c.pingpong), (c.cluster_m, c.cluster_n)) for c in configs}
    new = sorted(tasks - _compiled)
    workers.run_all(_compile_one, [(spec, *rest) for _, *rest in new])
    _compiled.update(new)


_compiled: set[tuple[str, tuple[int, int, bool], tuple[int, int]]] = set()


def _compile_one(task: tuple[Spec, tuple[int, int, bool], tuple[int, int]]) -> bool:
    """In a worker process, on the GPU: whether the compiler took it."""
    from verifier.numerics import draw

    spec, tile, cluster = task
    sizes = {dim: 256 for dim in spec.dims}
    library = quack_library(spec.name, draw(spec, sizes, 0, device="cuda"), sizes, constants=spec.constants)
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # one not to race
        library.prepare(config(*tile, cluster=cluster))
        return True
    return False
