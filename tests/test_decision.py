"""Who decides: each case that is measured, except those that are only to be reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from authoring import TOY, TOY_KERNEL, checked, measured, program_of, timing

from verifier.claims import unfounded
from verifier.decision import Void, decide
from verifier.gates import Failed
from verifier.report import Accepted, Authorship, Timing, accepted
from verifier.spec import Spec
from verifier.spec_file import load


def toy(tmp_path: Path, wide: str) -> Spec:
    """The toy spec, whose case wide has that ``bench``."""
    path = tmp_path / "toy.yaml"
    assert "N: 8192}" in TOY
    path.write_text(TOY.replace("N: 8192}", f"N: 8192, bench: {wide}}}"))
    return load(path, check=False)


def timings(spec: Spec, speedups: dict[str, float]) -> list[Timing]:
    return [timing(case, speedups.get(case.name, 1.3)) for case in spec.cases if case.bench]


def decided(spec: Spec, speedups: dict[str, float], **changes: Any) -> dict[str, Any]:
    """The decision's figures for these speedups over torch.compile; intervals reach 4 % to either side."""
    figures: dict[str, Any] = {}
    rows = tuple(t.model_copy(update=changes) for t in timings(spec, speedups))
    decide(spec, program_of(spec, TOY_KERNEL), rows, figures)
    return figures


def evidence_of(spec: Spec, speedup: float) -> Accepted:
    program = program_of(spec, TOY_KERNEL)
    author = Authorship(author="Ada", attempts=1, run="r")
    return accepted(checked(spec, program), measured(spec, program, speedup), author)


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
    rows[1] = rows[1].model_copy(update={"milliseconds": rows[1].milliseconds | {"candidate": 1e-4}})
    with pytest.raises(Void, match="case wide: 0.0001 ms is less than"):
        decide(spec, program_of(spec, TOY_KERNEL), tuple(rows), {})
    with pytest.raises(Void, match="case large: 0.0002 ms is less than"):
        decided(spec, {}, graph_milliseconds=2e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"processes": 2}, r"2 process\(es\)"), ({"rounds": 11}, "11 rounds"), ({"cold": False}, "warm L2")],
)
def test_too_little_to_accept_on_is_no_verdict(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    spec = toy(tmp_path, "true")
    with pytest.raises(Void, match=words):
        decided(spec, {}, **changes)
    with pytest.raises(Failed, match="case large"):  # but enough to reject
        decided(spec, {"large": 0.9}, **changes)


def test_evidence_needs_a_reported_case_s_timing_but_not_its_speedup(tmp_path: Path) -> None:
    spec = toy(tmp_path, "report")
    program, report = program_of(spec, TOY_KERNEL), evidence_of(spec, 0.9)
    (said,) = unfounded("toy", spec, program, report)
    assert "case large: 0.900x torch.compile" in said
    untimed = report.model_copy(update={"timings": report.timings[:1]})
    assert "0 timings of case wide" in unfounded("toy", spec, program, untimed)[0]
