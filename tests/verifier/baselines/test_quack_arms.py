"""Test QuACK's arms without a GPU. The outputs of each arm are compared with the spec's reference, and the
schedule search is tested with invented times.

An epilogue is a Python function of the accumulator. Here an epilogue runs on fp64 tensors, in tiles of 64
columns, and PyTorch functions replace QuACK's operators. tests/gpu/test_quack.py checks the compiled
epilogues.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from quack.gemm_config import GemmConfig
from torch import Tensor

from coda_agent.comparison import interleaved, rows, session
from coda_agent.comparison.competitors import PROGRAM
from coda_agent.primitives.runtime.tune import FINALISTS
from coda_agent.primitives.system.files import cache_dir
from coda_agent.primitives.system.workers import Job
from coda_agent.verifier.baselines import quack, quack_library, quack_norms
from coda_agent.verifier.baselines.pytorch import products
from coda_agent.verifier.baselines.quack import (
    ARMS,
    LIBRARY_ARMS,
    MATMUL,
    OUR_SEARCH,
    OWN_TUNER,
    Tuned,
    admitted,
    chained,
    config,
    tuned_calls,
)
from coda_agent.verifier.baselines.quack_epilogue import QuackEpilogue
from coda_agent.verifier.baselines.quack_library import LIBRARY
from coda_agent.verifier.gpu import benchmark
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate, reference
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec

SPECS = ROOT / "specs"
TILE = 64
NONE = {
    "gemm_cross_entropy_bwd",
    "gemm_fp8_bias_gelu",
    "gemm_fp8_gelu_blocks",
    "gemm_fp8_residual_rmsnorm",
    "gemm_fp8_row_scale",
    "gemm_fp8_swiglu",
    "gemm_fp8_tensor_scale",
    "gemm_qk_norm_rope_eps",
    "gemm_qkv_rope",
    "gemm_rmsnorm_qkv_bias_rope",
    "gemm_rmsnorm_qkv_norm_rope",
    "gemm_grouped_swiglu",
    "gemm_gathered_swiglu",
    "gemm_grouped_down",
    "gemm_grouped_swiglu_bwd",
    "gemm_grouped_weight_grad",
    "gemm_rmsnorm_qkv_rope",
}


def spec_of(name: str) -> Spec:
    return load(SPECS / f"{name}.yaml", check=False)


def small(spec: Spec) -> dict[str, int]:
    """Return small, ragged sizes. A spec with heads gets three heads, with P = 16."""
    return {dim: {"M": 70, "H": 3, "P": 16}.get(dim, 72 + 8 * i) for i, dim in enumerate(spec.dims)}


# ── PyTorch counterparts of QuACK's operators and functions ─────────────────────────────────────────────


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _gradient(of: Callable[..., Tensor], out: Tensor, *at: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in at]
    with torch.enable_grad():
        value = of(*leaves)
    return *torch.autograd.grad(value, leaves, out), value.detach()


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


TWINS: dict[str, Callable[..., Any]] = {
    "swiglu": _swiglu,
    "geglu": lambda gate, up: _gelu(gate) * up,
    "gelu_tanh_approx": _gelu,
    "relu_sq": lambda x: x.relu().square(),
    "dgelu_tanh_approx": lambda z, d: _gradient(_gelu, d, z),
    "dswiglu": lambda gate, up, d: _gradient(_swiglu, d, gate, up),
    "_angle_turns": lambda pos, freq: (pos * freq[0], pos * freq[1]),
    "_sincos_turns": lambda t, lo: (torch.sin(2 * math.pi * (t + lo)), torch.cos(2 * math.pi * (t + lo))),
    "cutlass.cute": SimpleNamespace(math=SimpleNamespace(tanh=torch.tanh)),  # type: ignore[dict-item]
}


def on_torch(fn: Any) -> Any:
    """Return a copy of ``fn`` that calls PyTorch functions with the same meaning instead of QuACK's
    functions."""

    def twin(value: Any) -> Any:
        return TWINS.get(getattr(value, "__name__", ""), value)

    scope = {name: twin(value) for name, value in fn.__globals__.items()}
    cells = fn.__closure__ and tuple(CellType(twin(cell.cell_contents)) for cell in fn.__closure__)
    return FunctionType(fn.__code__, scope, fn.__name__, None, cells)


class Played:
    """A stand-in for QuACK's ``EpiMod``. Its plans compute on the CPU in fp64, and reduce in tiles of
    ``TILE`` columns."""

    def __init__(self, mod: Any):
        self.mod, self.mode, self.sinks = mod, mod.mode, mod.sinks

    def plan(self, a: Tensor, b: Tensor, c: Tensor | None, *, out: dict[str, Tensor], **rest: Any) -> Any:
        from quack.epilogue.math import Pair

        rest.pop("config")
        add = rest.pop("add_to_output", False)
        for buffer in out.values():
            if not add:
                buffer.fill_(float("nan"))
        scratch: dict[str, Tensor] = {}

        def lanes(value: Tensor) -> Any:
            return Pair(value[..., 0::2], value[..., 1::2]) if value.shape[-1] > 1 else value

        def run(*_: Any, **__: Any) -> None:
            acc = a.double() @ b.double()
            given: dict[str, Any] = {"acc": acc, "c": None if c is None else c.double()}
            given |= {n: self.operand(n, rest[n], acc) for n in self.mod.operand_names if n != "c"}
            if self.mode == "acc_pair":
                given = {n: lanes(v) if isinstance(v, Tensor) else v for n, v in given.items()}
            elif self.mode == "packed_cd_b16x2":
                given["c"] = lanes(given["c"])
            values = on_torch(self.mod.fn)(*(given[n] for n in ("acc", *self.mod.operand_names)))
            for name, buffer in out.items():
                value = values[name]
                if isinstance(value, Pair):
                    value = torch.stack(tuple(value), -1).flatten(1)
                buffer.copy_(buffer + value if add else value)
            for name, op in self.sinks.items():
                self.sink(name, op, values[name], rest, scratch)
            if "rstd_out" in rest:
                rest["rstd_out"].copy_(self.heads(rest["qk"], acc))

        return SimpleNamespace(run=run, scratch=scratch)

    def operand(self, name: str, value: Any, acc: Tensor) -> Any:
        kind = type(self.mod.ops[name]).__name__ if name in self.mod.ops else ""
        if kind == "HeadRstd":
            return self.heads(value, acc).repeat_interleave(value, 1)
        if kind.startswith("Rotary"):
            return value.double().repeat(1, acc.shape[1] // value.shape[1])
        if not isinstance(value, Tensor):
            return value
        return value.double()[:, None] if kind == "ColVecLoad" else value.double()

    def heads(self, width: int, acc: Tensor) -> Tensor:
        eps = self.mod.ops["qk"].eps
        return (acc.unflatten(1, (-1, width)).square().mean(-1) + eps).rsqrt()

    def sink(self, name: str, op: Any, value: Any, rest: dict[str, Any], scratch: dict[str, Tensor]) -> None:
        if getattr(op, "scaled", False):
            value = value[0] * value[1]
        match type(op).__name__:
            case "ColVecSelect":
                target = rest[op.idx_op.name]
                rows = ((target >= 0) & (target < value.shape[1])).nonzero()[:, 0]
                rest[name][rows] = value[rows, target[rows]].float()
            case "OnlineLSEReduce":
                scratch[name] = torch.stack([t.logsumexp(1) for t in value.split(TILE, 1)], -1).float()
            case "RowVecReduce":
                scratch[name] = torch.stack([t.sum(0) for t in value.split(TILE, 0)]).float()
            case _:
                parts = value.split(TILE, 1)
                fold = [t.sum(1) if op.combine == "add" else t.abs().amax(1) for t in parts]
                scratch[name] = torch.stack(fold, -1).float()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spec, dict[str, Tensor], dict[str, int]], Any]:
    """Return a function that builds QuACK's arm of a spec for the CPU."""

    def reduce(partials: Tensor, rstd: Tensor, scale: float, eps: float) -> None:
        torch.rsqrt(partials.sum(-1) * scale + eps, out=rstd)

    monkeypatch.setattr("quack.rms_final_reduce._rms_final_reduce_out", reduce)
    for module in (quack_library, quack_norms):
        monkeypatch.setattr(module, "fused", lambda function: function)

    def arm(spec: Spec, inputs: dict[str, Tensor], sizes: dict[str, int]) -> Callable[[], dict[str, Tensor]]:
        stages = quack_library.quack_library(spec.name, inputs, sizes, spec.constants)
        config: Any = None
        return chained([replace(stage, mod=Played(stage.mod)).prepare(config) for stage in stages])

    return arm


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", LIBRARY)
def test_an_arm_computes_the_outputs_of_its_spec(name: str, played: Any) -> None:
    spec = spec_of(name)
    sizes = small(spec)
    inputs = draw(spec, sizes, seed=3)
    before = {n: t.clone() for n, t in inputs.items()}
    truth, yard = reference.oracle(spec, inputs, sizes), reference.yardstick(spec, inputs, sizes)
    errors = error_gate.compare(spec, played(spec, inputs, sizes)(), truth, yard)
    assert all(e.passed for e in errors), [e.reason for e in errors]
    assert all(torch.equal(before[n].float(), inputs[n].float()) for n in inputs)


def test_a_target_that_became_ignored_leaves_no_logit_behind(played: Any) -> None:
    spec = spec_of("gemm_partial_cross_entropy")
    sizes = small(spec)
    inputs = draw(spec, sizes, seed=0)
    call = played(spec, inputs, sizes)
    assert call()["target_logit"].count_nonzero() > sizes["M"] // 2
    inputs["target"].fill_(-100)
    assert call()["target_logit"].count_nonzero() == 0


def test_every_spec_has_an_arm_or_a_reason() -> None:
    assert {path.stem for path in SPECS.glob("*.yaml")} - LIBRARY.keys() == NONE
    reasons = ("fp8", "backward of cross-entropy", "head norm", "packed heads", "expert has its own rows")
    assert all(name in (quack_library.__doc__ or "") for name in reasons)


@pytest.mark.parametrize("name", LIBRARY)
def test_what_is_called_library_is_quacks_own(name: str) -> None:
    spec = spec_of(name)
    sizes = small(spec)
    stages = quack_library.quack_library(name, draw(spec, sizes, seed=0), sizes, spec.constants)
    own = all(stage.mod.fn.__module__.startswith("quack.epilogue") for stage in stages)
    assert LIBRARY[name].kind == ("library" if own else "composed")


def test_arms_are_left_out_where_there_is_none() -> None:
    wanted = ("torch.compile", *ARMS)
    assert admitted(spec_of("gemm_relu2"), wanted) == wanted
    other = spec_of("gemm_relu2").model_copy(update={"reference": "preact = x @ w.mT\nact = preact"})
    assert admitted(other, wanted) == ("torch.compile", MATMUL)  # its name is that of a shipped spec
    assert admitted(spec_of("gemm_fp8_row_scale"), wanted) == ("torch.compile",)
    assert admitted(spec_of("gemm_cross_entropy_bwd"), wanted) == ("torch.compile", MATMUL)
    assert admitted(spec_of("gemm_cross_entropy_bwd"), wanted, beside_kept=True) == ("torch.compile",)
    with pytest.raises(ValueError, match="no epilogue for spec 'gemm_fp8_row_scale'"):
        quack_library.quack_library("gemm_fp8_row_scale", {}, {}, {})


def stage_of(name: str) -> Any:
    spec = spec_of(name)
    sizes = small(spec)
    return quack_library.quack_library(name, draw(spec, sizes, seed=0), sizes, spec.constants)[0]


@pytest.mark.parametrize(
    ("name", "tiles", "swaps"),
    [("gemm_relu2", 11, True), ("gemm_row_abs_max", 11, False), ("gemm_swiglu", 9, False)],
)
def test_its_own_tuners_space_is_quacks(name: str, tiles: int, swaps: bool) -> None:
    space = quack.own_space(stage_of(name))
    assert len({(c.tile_m, c.tile_n, c.pingpong) for c in space}) == tiles
    assert {(c.cluster_m, c.cluster_n) for c in space} == {(1, 2), (2, 1)}
    assert {c.max_swizzle_size for c in space} == {8}
    assert {c.swap_ab for c in space} == ({False, True} if swaps else {False})
    assert {c.device_capacity for c in space} == {9}


Races = list[tuple[str, list[Any]]]


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Races:
    """Fake the races of schedules; return a list that records the stage and the schedules of each race. The
    schedule with the widest swizzle wins; among equals, the last one wins."""
    races: Races = []

    def race(
        spec: Spec, sizes: Any, arm: str, index: int, stage: Any, configs: list[Any], rounds: int
    ) -> Any:
        races.append((f"{index}", configs))
        ranked = sorted(enumerate(configs), key=lambda c: (-c[1].max_swizzle_size, -c[0]))
        return [(config, float(at)) for at, (_, config) in enumerate(ranked)]

    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr(quack, "_race", race)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    return races


@pytest.mark.parametrize(("arm", "swizzle"), [(OWN_TUNER, 8), (OUR_SEARCH, 32)])
def test_each_stage_of_a_chain_is_tuned_and_kept(
    arm: str, swizzle: int, raced: Races, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[tuple[str, Any]] = []

    def prepare(stage: Any, config: Any) -> Callable[[], dict[str, Tensor]]:
        prepared.append((stage.mod.fn.__name__, config))
        return lambda: dict.fromkeys(stage.names.values(), torch.empty(0))

    monkeypatch.setattr(QuackEpilogue, "prepare", prepare)
    spec = spec_of("gemm_swiglu_mlp")
    sizes = small(spec)
    inputs = draw(spec, sizes, seed=0)
    (call,), finalists = tuned_calls(arm, spec, [inputs], sizes)
    outputs = call()
    assert outputs.keys() == spec.outputs.keys()
    races = 2 if arm == OWN_TUNER else 3
    assert [index for index, _ in raced] == ["0"] * races + ["1"] * races
    # the search runs each stage once, to compute the next stage's input; then the call prepares both stages
    assert [name for name, _ in prepared] == ["linear_act_epi", "identity_epi"] * 2
    assert {config.max_swizzle_size for _, config in prepared} == {swizzle}
    first = prepared[2:]
    assert [[GemmConfig(**each) for each in stage][0] for stage in finalists] == [c for _, c in first]
    assert [len(stage) for stage in finalists] == [len(raced[races - 1][1]), len(raced[-1][1])]
    again = tuned_calls(arm, spec, [inputs], sizes)
    assert len(raced) == 2 * races and prepared[4:] == first  # the choice was read from the disk
    assert again.finalists == finalists


def test_what_any_process_compiled_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A schedule that QuACK refused is not compiled again either, and is left out of races. A schedule is
    compiled again if its compilation killed a worker, if the epilogue differs, or if the cache is empty."""
    spec, asked = spec_of("gemm_relu2"), list[Any]()
    narrow, wide, deadly = config(128, 128, True), config(128, 256, False), config(256, 128, False)
    monkeypatch.setattr(quack, "objects", lambda: tmp_path / "objects")
    monkeypatch.setattr("coda_agent.verifier.numerics.inputs.draw", lambda *given, device: draw(*given))

    def prepare(stage: Any, chosen: Any) -> None:
        asked.append(chosen)
        if chosen == wide:
            raise ValueError("too wide")
        assert chosen != deadly

    def run_all(task: Any, tasks: list[Any]) -> None:
        for each in tasks:
            with suppress(AssertionError):
                task(each)

    monkeypatch.setattr(QuackEpilogue, "prepare", prepare)
    monkeypatch.setattr("coda_agent.primitives.system.workers.run_all", run_all)
    monkeypatch.setattr(quack, "refusals", lambda: (ValueError,))

    def compiled(factor: int, *configs: Any, arm: str = OWN_TUNER, digest: str = "") -> tuple[Any, Any]:
        asked.clear()
        sizes = {dim: factor * size for dim, size in small(spec).items()}
        (stage,) = quack._stages(spec, draw(spec, sizes, 0), sizes, arm)
        if digest:
            stage = replace(stage, mod=SimpleNamespace(semantic_digest=digest))
        return quack._compilable(spec, sizes, arm, 0, stage, list(configs)), list(asked)

    other = replace(narrow, max_swizzle_size=4)
    assert compiled(1, narrow, other) == ([narrow, other], [narrow])
    assert compiled(2, narrow, wide, other) == ([narrow, other], [wide])
    assert compiled(1, wide, arm=OUR_SEARCH) == ([], [])
    assert compiled(1, deadly) == compiled(1, deadly) == ([deadly], [deadly])
    assert compiled(1, narrow, arm=MATMUL) == ([narrow], [narrow])
    assert compiled(1, narrow, digest="another") == ([narrow], [narrow])
    for note in (tmp_path / "objects").iterdir():
        note.unlink()
    assert compiled(1, narrow) == ([narrow], [narrow])


@pytest.fixture
def relu(monkeypatch: pytest.MonkeyPatch, raced: Races) -> Callable[..., Tuned]:
    """Return a function that tunes an arm of a GEMM with squared ReLU. The function first
    deletes all tunings on disk and all recorded races."""
    spec = spec_of("gemm_relu2")
    sizes = small(spec)
    monkeypatch.setattr(QuackEpilogue, "prepare", lambda stage, config: dict)

    def again(arm: str, known: QuackTuned | None = None) -> Tuned:
        for kept in cache_dir().rglob("quack-*.json"):
            kept.unlink()
        raced.clear()
        return tuned_calls(arm, spec, [draw(spec, sizes, seed=0)], sizes, known)

    return again


def known_of(arm: str, stages: Any, **other: str) -> QuackTuned:
    here = {"gpu": "a GPU", "version": version("quack-kernels")}
    return QuackTuned.model_validate(here | other | {"arms": {arm: stages}})


@pytest.mark.parametrize("arm", ARMS)
def test_what_was_raced_last_is_raced_again_alone(arm: str, relu: Callable[..., Tuned], raced: Races) -> None:
    finalists = relu(arm).finalists
    last = raced[-1][1]
    assert len(raced) > 1 and len(last) >= 3
    again = relu(arm, known_of(arm, finalists))
    ((_, configs),) = raced
    assert {*configs} == {*last}
    assert again.finalists[0][0] in finalists[0] and len(again.finalists[0]) == len(last)


def test_what_is_known_of_one_tile_races_with_the_best_of_others(
    relu: Callable[..., Tuned], raced: Races
) -> None:
    (best, *_), *_ = relu(OWN_TUNER).finalists
    relu(OWN_TUNER, known_of(OWN_TUNER, [[best]]))
    start, last = (configs for _, configs in raced)
    assert len(start) > 40 and 3 <= len(last) <= 1 + FINALISTS and asdict(last[0]) == best


def test_what_is_raced_first_is_compiled_ahead(
    relu: Callable[..., Tuned], raced: Races, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If finalists are known, the compile jobs cover these finalists. Otherwise the jobs cover the first race
    of a search."""
    monkeypatch.setattr("coda_agent.verifier.numerics.inputs.draw", lambda *given, device: draw(*given))
    monkeypatch.setattr(quack, "objects", lambda: tmp_path / "objects")
    finalists = relu(OWN_TUNER).finalists
    spec = spec_of("gemm_relu2")
    for known, expected in (
        (None, raced[0][1]),
        (known_of(OWN_TUNER, finalists), [GemmConfig(**each) for each in finalists[0]]),
    ):
        jobs = quack.to_compile(OWN_TUNER, spec, small(spec), known)
        assert {task for task, _ in jobs} == {quack._compile_one}
        assert {chosen for _, (*_, chosen) in jobs} == {replace(c, max_swizzle_size=8) for c in expected}


def test_every_row_of_a_comparison_says_what_it_will_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said, asked = list[str](), list[Job]()
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("coda_agent.verifier.numerics.inputs.draw", lambda *given, device: draw(*given))
    monkeypatch.setattr(quack, "_here", lambda: ["a GPU", "1"])
    monkeypatch.setattr(quack, "objects", lambda: tmp_path / "objects")
    monkeypatch.setattr("coda_agent.primitives.runtime.precompile.compile_object", lambda *given: None)
    monkeypatch.setattr(interleaved, "report", lambda gate, words: said.append(words))
    monkeypatch.setattr("coda_agent.primitives.system.workers.run_jobs", asked.extend)
    chosen = rows.choose_rows((), ("1B",), everything=False, quick=False)
    seats = [row.task((PROGRAM, *LIBRARY_ARMS), 12)[1] for row in chosen]
    interleaved.compile_ahead(seats)
    assert said == [f"compiling what {len(chosen)} row(s) run"]
    per_task = Counter(task.__module__ for task, _ in asked)
    assert (
        per_task["coda_agent.primitives.runtime.precompile"] >= 10
        and per_task["coda_agent.verifier.baselines.quack"] > 300
    )


@pytest.mark.parametrize("arm", LIBRARY_ARMS)
def test_a_schedule_that_an_arms_own_search_never_comes_to_is_not_raced(
    arm: str, relu: Callable[..., Tuned], raced: Races
) -> None:
    wide = asdict(quack.config(256, 128, False))
    strange = [wide | change for change in ({"tile_n": 64}, {"cluster_m": 4}, {"split_k": 2})]
    relu(arm, known_of(arm, [strange]))
    searched = len(raced)
    relu(arm)
    assert len(raced) == searched > 1  # as many races as if nothing were known
    fours = wide | {"cluster_n": 2, "max_swizzle_size": 32}  # only OUR_SEARCH can reach this one
    relu(arm, known_of(arm, [[wide | {"pingpong": 0}, fours, *strange]]))
    told = [asdict(c) for c in raced[-1][1]]
    assert wide in told and (fours in told) == (arm == OUR_SEARCH)
    assert all(type(each["pingpong"]) is bool for each in told)  # the known 0 became False


@pytest.mark.parametrize("other", [{"gpu": "another GPU"}, {"version": "0.1"}])
def test_what_another_gpu_or_quack_won_with_is_not_raced(
    other: dict[str, str], relu: Callable[..., Tuned], raced: Races
) -> None:
    finalists = relu(OWN_TUNER).finalists
    relu(OWN_TUNER, known_of(OWN_TUNER, finalists, **other))
    assert len(raced) == 2
    relu(OWN_TUNER, known_of(MATMUL, finalists))  # another arm's finalists are ignored too
    assert len(raced) == 2


def test_scores_and_sessions_hand_on_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known, spec, given = known_of(OWN_TUNER, []), spec_of("gemm_relu2"), []

    def found(*asked: Any) -> Tuned:
        given.append(asked)
        return Tuned([dict], [[{"tile_m": 128}]])

    monkeypatch.setattr(quack, "tuned_calls", found)
    sizes: dict[str, int] = {}
    sets: Any = SimpleNamespace(inputs=[{}], arm=lambda name, calls: (name, calls))
    job: Any = SimpleNamespace(spec=spec, sizes=sizes)
    arm: Any
    arm, finalists = benchmark._rival(OWN_TUNER, job, sets, known)
    assert arm == (OWN_TUNER, [dict]) and finalists == [[{"tile_m": 128}]]
    seats = session.OperatorArms(spec, sizes, (OWN_TUNER,), {}, 12, known)
    assert session.prepare(OWN_TUNER, seats, {}).call is dict
    assert given == [(OWN_TUNER, spec, [{}], sizes, known)] * 2


def test_bare_products_are_those_of_the_formulation(raced: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls for the two sets of inputs share their outputs. If two specs have the same matrix product,
    the second spec reuses the tuning of the first."""
    monkeypatch.setattr(QuackEpilogue, "prepare", lambda stage, config: lambda: {id(stage.outs["D"]): stage})
    specs = [spec_of(name) for name in ("gemm_swiglu_mlp", "gemm_relu2", "gemm_bias_gelu")]
    for spec in specs:
        sizes = small(spec)
        sets = [draw(spec, sizes, seed) for seed in (0, 1)]
        made: Any = [call() for call in tuned_calls(MATMUL, spec, sets, sizes).calls]
        one, other = made
        assert one.keys() == other.keys() and len(one) == (2 if spec is specs[0] else 1)
        for inputs, stages in zip(sets, (one, other), strict=True):
            for stage, product in zip(stages.values(), products(spec, inputs, sizes), strict=True):
                assert torch.equal(stage.a, product.a) and torch.equal(stage.b, product.b)
                played = replace(stage, mod=Played(stage.mod))
                played.mod.plan(played.a, played.b, None, out=played.outs, config=None).run()
                want = product.a.double() @ product.b.double()
                torch.testing.assert_close(played.outs["D"].double(), want, rtol=2**-8, atol=1e-2)
    assert len(raced) == 2 * (2 + 1)  # the third spec has the second spec's product


def test_layernorms_statistics() -> None:
    h = torch.randn(5, 3 * TILE, dtype=torch.float64)
    parts = h.unflatten(1, (3, TILE))
    mean, rstd = quack_norms.mean_rstd(parts.sum(-1), parts.square().sum(-1), h.shape[1], 1e-5)
    want = torch.nn.functional.layer_norm(h, h.shape[1:], eps=1e-5)
    torch.testing.assert_close((h - mean[:, None]) * rstd[:, None], want)
