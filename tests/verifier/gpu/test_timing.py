"""Tests of timing: rounds on a simulated clock, statistics of known distributions, and baselines against
eager PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from simulated_clock import SimulatedClock

from coda_agent.verifier.baselines.pytorch import (
    BASELINES,
    calls,
    compiled,
    eager,
    formulation,
    matmuls,
    products,
)
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.statistics import across, detectable, ratio, student_quantile
from coda_agent.verifier.timing import FEWEST, Arm, host_time, measure


def run(clock: SimulatedClock, *, arms: int = 3, **options: object) -> list[list[str]]:
    """Run a measurement; return its log as one list of words per round. The last 30 rounds are the measured
    rounds, and all earlier rounds are warm-up."""
    measure([clock.work(n, lambda: 0.1) for n in "abc"[:arms]], clock=clock, **options)  # type: ignore[arg-type]
    text = " ".join(clock.log).split("wait")
    assert text.pop() == ""
    return [part.split() for part in text]


def arms_of(rounds: list[list[str]]) -> list[list[str]]:
    return [[word for word in r if word in "abc"] for r in rounds]


def test_every_round_runs_every_arm_once_inside_one_region() -> None:
    clock = SimulatedClock()
    for words in run(clock)[-30:]:
        assert sorted(w for w in words if w in "abc") == ["a", "b", "c"]
        for i in range(0, len(words), 4):
            assert words[i : i + 2] == ["flush", "start"]
            assert words[i + 3] == "stop"


@pytest.mark.parametrize("cold", [True, False])
def test_what_comes_before_a_call_comes_before_its_flush_and_is_not_timed(cold: bool) -> None:
    clock = SimulatedClock()

    def before() -> None:
        clock.log.append("before")
        clock.time += 0.05

    arms = [replace(clock.work("a", lambda: 0.1), before=before), clock.work("b", lambda: 0.1)]
    samples = measure(arms, rounds=9, clock=clock, cold=cold)
    assert samples["a"].seconds == pytest.approx([0.1] * 9)
    assert samples["b"].seconds == pytest.approx([0.1] * 9)
    ahead = ["before", *(["flush"] if cold else []), "start"]
    for i, word in enumerate(clock.log):
        if word == "a":
            assert clock.log[i - len(ahead) : i] == ahead
        if word == "b":
            assert clock.log[i - len(ahead) : i][0] != "before"
    assert clock.log.count("before") == clock.log.count("a") > 9


def test_warm_measurement_never_flushes() -> None:
    clock = SimulatedClock()
    run(clock, cold=False)
    assert "flush" not in clock.log and clock.log.count("start") == clock.log.count("stop") > 90


def test_order_varies_and_follows_the_seed_alone() -> None:
    first = arms_of(run(SimulatedClock())[-30:])
    longer_warm_up = arms_of(run(SimulatedClock(), warmup_seconds=5.0)[-30:])
    other = arms_of(run(SimulatedClock(), seed=1)[-30:])
    assert first == longer_warm_up != other
    assert {r[0] for r in first} == {"a", "b", "c"}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (2.0, 8)])
def test_warm_up_lasts_as_long_as_asked_after_the_first_round(seconds: float, rounds: int) -> None:
    # The first round compiles and does not count. A round takes 3 * (0.1 + 0.01) s, so seven more rounds are
    # the fewest that reach 2 s.
    assert len(run(SimulatedClock(), warmup_seconds=seconds)) == rounds + 30


@pytest.mark.parametrize(("longest", "rounds"), [(0.5, FEWEST), (7.0, 22), (60.0, 30)])
def test_long_kernels_get_fewer_rounds(longest: float, rounds: int) -> None:
    # A round takes 0.33 s, so round 22 is the first round that ends after more than 7 s.
    assert len(run(SimulatedClock(), longest=longest, warmup_seconds=0.0)) == 1 + rounds


def test_a_slow_first_call_is_neither_measured_nor_counted_as_warm_up() -> None:
    clock, calls = SimulatedClock(), iter([60.0])
    samples = measure([clock.work("a", lambda: next(calls, 0.1))], clock=clock, warmup_seconds=1.0)
    assert max(samples["a"].seconds) == pytest.approx(0.1)
    assert clock.log.count("a") > 30 + 5


class AsynchronousClock(SimulatedClock):
    """A clock for calls that enqueue work. As on a GPU, the device does the enqueued work while the host
    waits; ``pending`` is the work's duration in seconds."""

    pending = 0.0

    def drain(self) -> tuple[float, ...]:
        self.time += self.pending
        self.pending = 0.0
        return super().drain()


def test_work_left_by_the_first_round_is_not_counted_as_warm_up() -> None:
    """A first call that compiles may also tune, and tuning may leave the device busy for a long time. The
    warm-up must begin after this work."""
    clock, left = AsynchronousClock(), iter([60.0])

    def call() -> None:
        clock.log.append("a")
        clock.time += 0.1
        clock.pending += next(left, 0.0)

    measure([Arm("a", call)], clock=clock, warmup_seconds=1.0)
    assert clock.log.count("a") == 1 + 10 + 30


def test_samples_belong_to_their_arms_and_leave_the_flush_out() -> None:
    clock = SimulatedClock()
    heard: list[int] = []
    arms = [clock.work("fast", lambda: 0.1), clock.work("slow", lambda: 0.3)]
    samples = measure(arms, rounds=9, clock=clock, on_round=heard.append)
    assert list(samples) == ["fast", "slow"] and heard == list(range(1, 10))
    assert samples["fast"].seconds == pytest.approx([0.1] * 9)
    assert samples["slow"].median == pytest.approx(0.3)


def test_interleaving_cancels_drift() -> None:
    noise = random.Random(5)
    clock = SimulatedClock(drift=0.03)  # calls at the end are 20% slower than calls at the start
    arms = [
        clock.work("a", lambda: 0.102 * noise.gauss(1, 0.002)),
        clock.work("b", lambda: 0.1 * noise.gauss(1, 0.002)),
    ]
    samples = measure(arms, clock=clock, warmup_seconds=0.0, cold=False)
    assert samples["a"].seconds[-1] / samples["a"].seconds[0] > 1.1
    low, high = ratio(samples["a"].seconds, samples["b"].seconds).student
    assert 1.015 < low < 1.02 < high < 1.025


def test_misuse_is_named() -> None:
    clock = SimulatedClock()
    twice = [clock.work("a", lambda: 0.1)] * 2
    with pytest.raises(ValueError, match="no arms"):
        measure([], clock=clock)
    with pytest.raises(ValueError, match="share a name"):
        measure(twice, clock=clock)
    with pytest.raises(ValueError, match="0 rounds"):
        measure(twice[:1], rounds=0, clock=clock)


def test_host_time_waits_outside_its_region() -> None:
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        sum(range(300_000))  # takes some milliseconds, which must not be counted

    assert host_time(lambda: None, 5, synchronize=wait) < 1e-4
    assert waits >= 5


# Statistics ---------------------------------------------------------------------------------------


def noisy(generator: random.Random, seconds: float, n: int = 30) -> list[float]:
    """Return random kernel times like those measured on a GPU: they spread by 0.5%, and 3% of them are 50%
    longer."""
    return [seconds * generator.gauss(1, 0.005) * (1.5 if generator.random() < 0.03 else 1) for _ in range(n)]


def test_intervals_cover_equal_arms_and_are_not_vacuous() -> None:
    generator = random.Random(11)
    found = [ratio(noisy(generator, 5e-4), noisy(generator, 5e-4)) for _ in range(60)]
    for covered in (
        sum(i.low <= 1 <= i.high for i in found),
        sum(i.bootstrap[0] <= 1 <= i.bootstrap[1] for i in found),
        sum(i.student[0] <= 1 <= i.student[1] for i in found),
    ):
        assert covered >= 52  # of 60; correct 95% intervals cover fewer than 52 with a probability of 0.3%
    assert sum(i.student[0] <= 1 <= i.student[1] for i in found) < 60
    assert sum(i.high - i.low for i in found) / 60 < 0.015


def test_a_planted_two_percent_is_found() -> None:
    generator = random.Random(12)
    found = [ratio(noisy(generator, 5.1e-4), noisy(generator, 5e-4)) for _ in range(20)]
    assert sum(i.low > 1 for i in found) >= 19
    assert sum(i.low <= 1.02 <= i.high for i in found) >= 17


def test_outliers_do_not_decide() -> None:
    generator = random.Random(13)
    a, b = ([5e-4 * generator.gauss(1, 0.003) for _ in range(30)] for _ in range(2))
    clean = ratio(a, b)
    a[3], a[7], a[20], b[11] = 5e-3, 4e-3, 1e-3, 9e-3
    dirty = ratio(a, b)
    assert dirty.estimate == pytest.approx(clean.estimate, rel=0.002)
    assert dirty.high - dirty.low < 2.5 * (clean.high - clean.low)


def test_pairing_uses_what_rounds_share() -> None:
    generator = random.Random(14)
    weather = [math.exp(generator.gauss(0, 0.1)) for _ in range(30)]
    a, b = ([w * generator.gauss(1, 0.002) for w in weather] for _ in range(2))
    low, high = ratio(a, b).student
    assert low < 1 < high and high - low < 0.004


def test_a_clock_that_steps_leaves_the_ratio_alone() -> None:
    """Half of the rounds run at one clock rate, and half at another. So the two arms' medians may come from
    rounds at different rates."""
    generator = random.Random(15)
    found = []
    for _ in range(20):
        clocks = [1.0 if i < 20 else 1.15 for i in range(40)]
        a, b = ([c * generator.gauss(1, 0.02) for c in clocks] for _ in range(2))
        found.append(ratio(a, b).estimate)
    assert max(abs(r - 1) for r in found) < 0.015


def test_ratio_is_reproducible_exact_and_serialises() -> None:
    a, b = noisy(random.Random(1), 3.0), noisy(random.Random(2), 2.0)
    assert ratio(a, b) == ratio(a, b)
    exact = ratio([3.0] * 10, [2.0] * 10)
    written = exact.to_dict()
    assert written.pop("confidence") == 0.95
    assert written.pop("bootstrap") == written.pop("student") == pytest.approx((1.5, 1.5))
    assert written == pytest.approx({"estimate": 1.5, "low": 1.5, "high": 1.5})
    interval = ratio(a, b)
    assert interval.low == min(interval.bootstrap[0], interval.student[0])


def process(generator: random.Random, speedup: float, spread: float) -> tuple[list[float], list[float]]:
    """Return the times of two arms in one process. Each process has its own ratio of the two arms: its
    logarithm is random, with mean log(``speedup``) and standard deviation ``spread``."""
    own = speedup * math.exp(generator.gauss(0, spread))
    return noisy(generator, 2e-3 * own, 12), noisy(generator, 2e-3, 12)


def test_processes_are_the_sample_not_their_rounds() -> None:
    """The rounds of one process agree with each other, but a whole process may measure a wrong ratio. Only
    intervals over several processes cover the true ratio."""
    generator = random.Random(3)
    covered = within = 0
    for seed in range(60):
        pairs = [process(generator, 1.1, 0.01) for _ in range(3)]
        found = across(pairs, seed=seed)
        covered += found.low <= 1.1 <= found.high
        within += (alone := ratio(*pairs[0], seed=seed)).low <= 1.1 <= alone.high
    assert covered >= 55 and within < 48


def test_across_is_student_s_interval_of_the_processes_ratios() -> None:
    pairs = [([1.1] * 8, [1.0] * 8), ([1.2] * 8, [1.0] * 8), ([1.3] * 8, [1.0] * 8)]
    logs = [math.log(x) for x in (1.1, 1.2, 1.3)]
    centre = sum(logs) / 3
    deviation = math.sqrt(sum((x - centre) ** 2 for x in logs) / 2 / 3)
    found = across(pairs)
    assert math.isclose(found.estimate, math.exp(centre))
    assert math.isclose(found.low, math.exp(centre - 4.30265 * deviation), rel_tol=1e-5)
    assert list(found.bootstrap) == pytest.approx([1.1, 1.3])
    assert math.isclose(detectable(pairs), math.expm1((4.30265 + 1.06066) * deviation), rel_tol=1e-4)
    with pytest.raises(ValueError, match="at least 2"):
        across(pairs[:1])


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.90, 5, 2.0150), (0.99, 10, 3.1693), (0.95, 29, 2.0452)],
)
def test_student_quantile_agrees_with_printed_tables(confidence: float, freedom: int, t: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(t, abs=6e-5)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([1.0] * 10, [1.0] * 9, "pairs rounds"),
        ([1.0] * 7, [1.0] * 7, "at least 8"),
        ([1.0] * 9 + [0.0], [1.0] * 10, "finite and positive"),
        ([1.0] * 9 + [math.nan], [1.0] * 10, "finite and positive"),
    ],
)
def test_samples_that_give_no_ratio(a: list[float], b: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ratio(a, b)


# Baselines ----------------------------------------------------------------------------------------


SPEC = {
    "name": "tiny",
    "summary": "A row scale, SwiGLU and a row statistic.",
    "dims": {"M": "rows", "D": "depth", "F": "columns"},
    "inputs": {
        "x": {"shape": ("M", "D"), "dtype": "bf16"},
        "w": {"shape": ("2*F", "D"), "dtype": "bf16"},
        "rstd": {"shape": ("M",), "dtype": "fp32"},
    },
    "outputs": {
        "preact": {"shape": ("M", "2*F"), "dtype": "bf16"},
        "act": {"shape": ("M", "F"), "dtype": "bf16"},
        "s": {"shape": ("M",), "dtype": "fp32"},
    },
    "constants": {"eps": 1e-6},
    "reference": (
        "preact = (x @ w.mT) * rstd[:, None]\n"
        "act = silu(preact[:, 0::2]) * preact[:, 1::2]\n"
        "s = rsqrt((act * act).sum(-1) / F + eps)\n"
    ),
    "cases": ({"name": "tiny", "M": 24, "D": 32, "F": 16},),
}


def tiny(**changes: object) -> Spec:
    return Spec.model_validate({**SPEC, **changes})


SIZES = {"M": 24, "D": 32, "F": 16}
ONLY_S = {"s": {"shape": ("M",), "dtype": "fp32"}}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 32, generator=generator).to(torch.bfloat16) for n in (24, 32))
    return {"x": x, "w": w / 6, "rstd": torch.rand(24, generator=generator) + 0.5}


def by_hand(x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the tiny spec as a user would write it in bf16."""
    preact = torch.mm(x, w.t()) * rstd.unsqueeze(1)
    gate, up = preact[:, 0::2], preact[:, 1::2]
    act = gate * torch.sigmoid(gate) * up
    s = 1 / torch.sqrt(act.square().mean(-1) + 1e-6)
    return {"preact": preact.bfloat16(), "act": act.bfloat16(), "s": s}


def test_eager_is_the_formulation_by_hand(inputs: dict[str, torch.Tensor]) -> None:
    out = eager(tiny(), [inputs], SIZES)[0]()
    for name, want in by_hand(**inputs).items():
        assert out[name].dtype == want.dtype
        torch.testing.assert_close(out[name], want)


def test_compiled_gives_the_same_numbers(inputs: dict[str, torch.Tensor]) -> None:
    out = compiled(tiny(), [inputs], SIZES, backend="aot_eager")[0]()  # inductor would take 25 s on a CPU
    for name, want in eager(tiny(), [inputs], SIZES)[0]().items():
        assert out[name].dtype == want.dtype
        torch.testing.assert_close(out[name], want)


def test_compiled_is_one_graph_of_the_inputs_dtypes_with_the_casts_inside(
    inputs: dict[str, torch.Tensor],
) -> None:
    text: list[str] = []

    def spy(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        text.append(graph.code)
        assert sorted(str(t.dtype) for t in example) == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
        return graph.forward

    (call,) = compiled(tiny(), [inputs], SIZES, backend=spy)  # type: ignore[arg-type]
    call()
    call()
    assert len(text) == 1 and text[0].count("bfloat16") == 2


def test_max_autotune_copies_no_inputs_into_graphs(
    inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def spy(function: Callable[..., object], **options: object) -> Callable[..., object]:
        asked.update(options)
        return function

    monkeypatch.setattr(torch, "compile", spy)
    calls("torch.compile max-autotune", tiny(), [inputs], SIZES)
    assert asked["mode"] == "max-autotune-no-cudagraphs"
    assert asked["fullgraph"] is True and asked["dynamic"] is False


def test_baseline_replaces_reference(inputs: dict[str, torch.Tensor]) -> None:
    spec = tiny(baseline="preact = x @ w.mT\nact = preact[:, :F]\ns = rstd * 2")
    out = eager(spec, [inputs], SIZES)[0]()
    torch.testing.assert_close(out["s"], inputs["rstd"] * 2)


def test_sizes_are_those_given(inputs: dict[str, torch.Tensor]) -> None:
    spec = tiny(outputs=ONLY_S, reference="s = rstd * F")
    small, large = (formulation(spec, SIZES | {"F": f}) for f in (2, 3))
    tensors = list(inputs.values())
    torch.testing.assert_close(small(*tensors)["s"] * 1.5, large(*tensors)["s"])


def test_many_sizes_compile_in_one_process(inputs: dict[str, torch.Tensor]) -> None:
    spec = tiny(outputs=ONLY_S, reference="s = rstd * F")
    for f in range(2, 14):  # torch.compile keeps at most eight compiled versions of a function
        (call,) = compiled(spec, [inputs], SIZES | {"F": f}, backend="eager")
        out = call()
        torch.testing.assert_close(out["s"], inputs["rstd"] * f)


def test_matmul_takes_the_formulation_s_own_operands(inputs: dict[str, torch.Tensor]) -> None:
    (call,) = matmuls(tiny(), [inputs], SIZES)
    (product,) = call()
    torch.testing.assert_close(product, inputs["x"] @ inputs["w"].mT)
    again = call()
    assert again[0] is product  # the output is preallocated


UPDATE = {
    "dims": {"M": "rows", "D": "depth", "F": "columns"},
    "inputs": {
        "x": {"shape": ("M", "D"), "dtype": "bf16"},
        "dy": {"shape": ("M", "F"), "dtype": "bf16"},
        "dw": {"shape": ("F", "D"), "dtype": "fp32"},
        "target": {"shape": ("M",), "dtype": "int64", "init": {"integers": (0, "D")}},
        "alpha": {"shape": (), "dtype": "fp32"},
    },
    "outputs": {
        "picked": {"shape": ("M",), "dtype": "fp32"},
        "new": {"shape": ("F", "D"), "dtype": "fp32", "updates": "dw"},
        "old": {"shape": ("D",), "dtype": "fp32"},
    },
    "reference": (
        "new = dw + alpha * (dy.mT @ x)\npicked = x.gather(1, target[:, None])[:, 0]\nold = dw.sum(0)\n"
    ),
}


def updating() -> tuple[Spec, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, dy, dw = (torch.randn(*shape, generator=generator) for shape in ((24, 32), (24, 16), (16, 32)))
    target = torch.randint(0, 32, (24,), generator=generator)
    inputs = {"x": x.bfloat16(), "dy": dy.bfloat16(), "dw": dw, "target": target, "alpha": torch.tensor(0.5)}
    return tiny(**UPDATE), inputs


@pytest.mark.parametrize("build", [BASELINES["eager"], partial(compiled, backend="aot_eager")])
def test_an_update_is_written_into_the_input_s_buffer(build: Callable[..., list[Callable[[], Any]]]) -> None:
    spec, inputs = updating()
    first = inputs["dw"].clone()
    step = 0.5 * (inputs["dy"].mT @ inputs["x"])
    (call,) = build(spec, [inputs], SIZES)
    for turn in (1, 2, 3):
        before = first + (turn - 1) * step
        out = call()
        assert list(out) == ["picked", "new", "old"]
        assert out["new"].data_ptr() == inputs["dw"].data_ptr()
        torch.testing.assert_close(inputs["dw"], before + step)
        torch.testing.assert_close(out["old"], before.sum(0))  # dw is read before it is overwritten
    rows = torch.arange(24)
    torch.testing.assert_close(out["picked"], inputs["x"][rows, inputs["target"]].float())


def test_the_compiler_sees_an_update_in_place() -> None:
    graphs: list[str] = []

    def spy(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        assert {t.dtype for t in example} == {torch.bfloat16, torch.float32, torch.int64}
        return graph.forward

    spec, inputs = updating()
    compiled(spec, [inputs], SIZES, backend=spy)[0]()  # type: ignore[arg-type]
    assert len(graphs) == 1 and graphs[0].count("copy_(") == 1


def test_matmul_of_an_update_and_of_addmm() -> None:
    spec, inputs = updating()
    (product,) = matmuls(spec, [inputs], SIZES)[0]()
    torch.testing.assert_close(product, inputs["dy"].mT @ inputs["x"])
    assert product.dtype == torch.bfloat16
    text = "new = torch.addmm(dw, dy.mT.float(), x.float())\npicked = x[:, 0]\nold = dw.sum(0)"
    (product,) = matmuls(spec.model_copy(update={"reference": text}), [inputs], SIZES)[0]()
    torch.testing.assert_close(product, inputs["dy"].mT.float() @ inputs["x"].float())


@pytest.mark.parametrize("fast", [False, True])
def test_matmul_of_fp8_is_a_scaled_one(fast: bool) -> None:
    eights = {name: {"shape": shape, "dtype": "fp8_e4m3"} for name, shape in
              {"x": ("M", "D"), "w": ("F", "D")}.items()}  # fmt: skip
    scales = {name: {"shape": (dim,), "dtype": "fp32"} for name, dim in {"sx": "M", "sw": "F"}.items()}
    how = f"scale_a=sx[:, None], scale_b=sw[None], out_dtype=torch.bfloat16, use_fast_accum={fast}"
    spec = tiny(
        inputs=eights | scales,
        outputs={"y": {"shape": ("M", "F"), "dtype": "bf16"}},
        reference="y = (x @ w.mT) * sx[:, None] * sw + 1",
        baseline=f"y = torch._scaled_mm(x, w.mT, {how}) + 1",
    )
    inputs = draw(spec, SIZES, 0) | {"sx": torch.rand(24) + 0.5, "sw": torch.rand(16) + 0.5}
    (call,) = matmuls(spec, [inputs], SIZES)
    (product,) = call()
    want = (inputs["x"].double() @ inputs["w"].double().mT) * inputs["sx"][:, None] * inputs["sw"]
    assert product.dtype == torch.bfloat16 and call()[0] is product
    torch.testing.assert_close(product.double(), want, rtol=2**-8, atol=1e-3)
    (found,) = products(spec, inputs, SIZES)
    assert found.fast_accum == fast and found.scales is not None and found.dtype == torch.bfloat16


def test_baseline_mistakes_are_named(inputs: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="input w"):
        eager(tiny(), [{k: inputs[k] for k in ("x", "rstd")}], SIZES)
    with pytest.raises(ValueError, match="no matmul"):
        matmuls(tiny(outputs=ONLY_S, reference="s = rstd + 1"), [inputs], SIZES)
    with pytest.raises(ValueError, match="'reduce-overhead' is unknown"):
        compiled(tiny(), [inputs], SIZES, mode="reduce-overhead")
    with pytest.raises(ValueError, match="torch.compile"):
        calls("fastest", tiny(), [inputs], SIZES)
    assert "cuBLAS matmul" in BASELINES
