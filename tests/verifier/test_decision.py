"""Every measured case decides about acceptance, except the cases that are only reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from authoring import TOY, TOY_KERNEL, checked, measured, program_of, timing

from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.target import H100, H200
from coda_agent.verifier.audit.report_audit import unfounded
from coda_agent.verifier.decision import (
    BASELINE,
    KEPT,
    NO_FASTER,
    InvalidMeasurement,
    central,
    compared,
    decide,
)
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Accepted, Authorship, Ratio, Timing, joined
from coda_agent.verifier.spec.model import Spec


def toy(tmp_path: Path, wide: str) -> Spec:
    """Return the toy spec. The argument ``wide`` is the value of ``bench`` in the case of the same name."""
    path = tmp_path / "toy.yaml"
    assert "N: 8192}" in TOY
    path.write_text(TOY.replace("N: 8192}", f"N: 8192, bench: {wide}}}"))
    return load(path, check=False)


def timings(spec: Spec, speedups: dict[str, float]) -> list[Timing]:
    return [timing(case, speedups.get(case.name, 1.3)) for case in spec.cases if case.bench]


def decided(spec: Spec, speedups: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Return the figures of the decision on a kernel with these speedups over torch.compile, by case. The
    interval of a speedup reaches 4% to either side."""
    figures: dict[str, Any] = {}
    rows = tuple(t.model_copy(update=changes) for t in timings(spec, speedups))
    decide(spec, program_of(spec, TOY_KERNEL), rows, figures)
    return figures


def evidence_of(spec: Spec, speedup: float) -> Accepted:
    program = program_of(spec, TOY_KERNEL)
    author = Authorship(author="Ada", attempts=1, run="r")
    made = joined(checked(spec, program), measured(spec, program, speedup))
    assert isinstance(made, Accepted)
    return made.model_copy(update={"authorship": author})


@pytest.mark.parametrize("slow", ["large", "wide"])
def test_every_measured_case_decides(tmp_path: Path, slow: str) -> None:
    spec = toy(tmp_path, "true")
    assert list(decided(spec, {})["speedup"]) == ["large", "wide"]
    with pytest.raises(Failed, match=rf"case {slow}: 1.120x torch.compile \[1.077, 1.165\], but") as caught:
        decided(spec, {slow: 1.12})
    assert caught.value.code == "slow"


def test_a_reported_case_has_no_vote(tmp_path: Path) -> None:
    spec = toy(tmp_path, "report")
    figures = decided(spec, {"wide": 0.4})
    assert figures["speedup"].keys() == {"large"}
    assert figures["reported"]["wide"]["estimate"] == 0.4
    with pytest.raises(Failed, match="case large"):
        decided(spec, {"large": 1.12})


def test_a_reported_case_that_beats_the_hardware_is_a_wrong_measurement(tmp_path: Path) -> None:
    spec = toy(tmp_path, "report")
    rows = timings(spec, {})
    assert rows[1].case == "wide"
    rows[1] = rows[1].model_copy(update={"samples": rows[1].samples | {"candidate": ((1e-4,) * 12,) * 3}})
    with pytest.raises(InvalidMeasurement, match="case wide: process 0: 0.0001 ms is less than"):
        decide(spec, program_of(spec, TOY_KERNEL), tuple(rows), {})
    with pytest.raises(InvalidMeasurement, match="case large: in a CUDA graph: 0.0002 ms is less than"):
        decided(spec, {}, graph_milliseconds=2e-4)


def test_each_gpu_has_its_own_limit(tmp_path: Path) -> None:
    spec, thin = toy(tmp_path, "true"), {"M": 16384, "N": 8192, "K": 64}
    program = program_of(spec, TOY_KERNEL)
    limits = [roofline(program, thin, gpu).limit * 1e3 for gpu in (H200, H100)]
    assert limits[0] < 0.8 * limits[1]
    between = (sum(limits) / 2,) * 12
    rows = tuple(
        t.model_copy(update={"sizes": thin, "samples": t.samples | {"candidate": (between,) * 3}})
        for t in timings(spec, {})
    )
    decide(spec, program, rows, {}, H200)
    with pytest.raises(InvalidMeasurement, match="case large: process 0: .* ms that the H100 SXM allows"):
        decide(spec, program, rows, {}, H100)


def test_one_process_that_beats_the_hardware_is_not_averaged_away(tmp_path: Path) -> None:
    """In the case ``large``, the hardware allows no time below 0.1389 ms. Process 1 reports 0.1 ms, but the
    mean over all processes is above this bound."""
    spec = toy(tmp_path, "true")
    own = ((2.0,) * 12, (0.1,) * 12, (2.0,) * 12)
    assert central(own) > 0.7
    samples = timings(spec, {})[0].samples | {"candidate": own}
    with pytest.raises(
        InvalidMeasurement, match=r"case large: process 1: 0.1 ms is less than the 0.13891 ms that the H100"
    ):
        decided(spec, {}, samples=samples)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_sample_that_is_no_duration_makes_figures_void(wrong: float) -> None:
    row = (1.0,) * 11
    rows, others = ((1.0, *row), (wrong, *row)), ((1.0, *row),) * 2
    for given in ((rows, others), (others, rows)):
        words = f"a timed call took {wrong} ms, which is not a duration"
        with pytest.raises(InvalidMeasurement, match=words):
            compared(*given)
    with pytest.raises(InvalidMeasurement, match="not a duration"):
        central(rows)


def test_a_lower_bound_at_the_threshold_does_not_exceed_it(tmp_path: Path) -> None:
    spec = toy(tmp_path, "true")
    row = timings(spec, {})[0]
    for low, slow in ((spec.accept.speedup, True), (spec.accept.speedup + 1e-5, False)):
        ratio = Ratio(estimate=1.3, low=low, high=1.4)
        given = (row.model_copy(update={"ratios": row.ratios | {BASELINE: ratio}}),)
        if slow:
            with pytest.raises(Failed, match=r"the lower bound must exceed 1\.1"):
                decide(spec, program_of(spec, TOY_KERNEL), given, {})
        else:
            decide(spec, program_of(spec, TOY_KERNEL), given, {})


@pytest.mark.parametrize(
    ("ratios", "spread", "kept"),
    [
        ((1.0, 1.001, 0.999), 0.0, True),
        ((1.1, 1.2, 1.15), 0.0, True),
        ((0.5, 0.6, 0.55), 0.0, False),
        ((0.9965, 0.9966, 0.9964), 0.002, False),  # Student's interval is below 1, the bootstrap's contains 1
        ((0.9985, 0.999, 0.9995), 0.0, True),  # Student's interval contains 1, the bootstrap's is below 1
        ((0.98, 1.0, 1.02), 0.0, False),  # may be as fast, or slower by more than 1%
        ((0.996, 1.001, 1.006), 0.0, False),
    ],
)
def test_a_change_that_is_or_may_be_slower_is_not_kept(
    tmp_path: Path, ratios: tuple[float, ...], spread: float, kept: bool
) -> None:
    spec = toy(tmp_path, "true")
    own = ((2.0,) * 15,) * 3
    rows = []
    for t, by_process in zip(timings(spec, {}), ((1.02,) * 3, ratios), strict=True):
        before = tuple(tuple(2.0 * r * math.exp(k * spread) for k in range(-7, 8)) for r in by_process)
        samples = t.samples | {"candidate": own, KEPT: before}
        rows.append(
            t.model_copy(update={"samples": samples, "ratios": t.ratios | {KEPT: compared(before, own)}})
        )
    if kept:
        decide(spec, program_of(spec, TOY_KERNEL), tuple(rows), {})
        return
    with pytest.raises(Failed, match="may be by more than 1%, on wide;") as caught:
        decide(spec, program_of(spec, TOY_KERNEL), tuple(rows), {})
    assert caught.value.code == NO_FASTER


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"processes": 2}, r"2 process\(es\)"), ({"rounds": 11}, "11 rounds"), ({"cold": False}, "warm L2")],
)
def test_too_little_to_accept_on_is_no_verdict(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    spec = toy(tmp_path, "true")
    with pytest.raises(InvalidMeasurement, match=words):
        decided(spec, {}, **changes)
    with pytest.raises(Failed, match="case large"):  # a rejection needs less
        decided(spec, {"large": 0.9}, **changes)


def test_evidence_needs_a_reported_case_s_timing_but_not_its_speedup(tmp_path: Path) -> None:
    spec = toy(tmp_path, "report")
    program, report = program_of(spec, TOY_KERNEL), evidence_of(spec, 0.9)
    (said,) = unfounded("toy", spec, program, report)
    assert "case large: 0.900x torch.compile" in said
    untimed = report.model_copy(update={"timings": report.timings[:1]})
    assert "0 timings of case wide" in unfounded("toy", spec, program, untimed)[0]
