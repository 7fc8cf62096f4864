"""Tests of the authoring experiment: the committed specs are the drafts that the scaffold makes of PyTorch
functions, and the result tables count correct answers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from checkout import ROOT

from benchmarks.authoring import table
from benchmarks.authoring.operators import KINDS, OPTIONS
from coda_agent.agent.scaffold import ScaffoldOptions, new
from coda_agent.verifier.loading import load

FOLDER = ROOT / "benchmarks" / "authoring"
# after the drafts were made, these specs' baselines were changed to call torch._scaled_mm
FP8 = {"fp8_relu2", "fp8_gate_residual"}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_spec_is_the_draft_of_its_function(tmp_path: Path, name: str) -> None:
    words = shlex.split(OPTIONS[name])
    given = {kind: [v for k, v in zip(words[::2], words[1::2], strict=True) if k == f"--{kind}"]
             for kind in ("dim", "shape", "dtype", "init")}  # fmt: skip
    options = ScaffoldOptions.parse(False, **given)
    path, _ = new(f"{FOLDER}/operators.py:{name}", tmp_path / f"{name}.yaml", options)
    kept = FOLDER / "specs" / f"{name}.yaml"
    if name in FP8:
        one, other = load(path, check=False), load(kept, check=False)
        assert one.baseline != other.baseline and one.model_copy(update={"baseline": other.baseline}) == other
    else:
        assert path.read_text() == kept.read_text()


def test_kinds_have_each_operator_once() -> None:
    assert sorted(name for names in KINDS.values() for name in names) == sorted(OPTIONS)
    assert {path.stem for path in (FOLDER / "specs").glob("*.yaml")} == OPTIONS.keys()
    assert not {path.stem for path in (ROOT / "specs").glob("*.yaml")} & OPTIONS.keys()


def made(pack: str, *verdicts: str) -> table.Outcome:
    return {"pack": pack, "operator": "symlog", "tries": [{"verdict": v, "message": "so"} for v in verdicts]}


def test_rates_count_the_first_answers() -> None:
    late = ["interpret/numerics", "trace/call", "passed"]
    outcomes = [made("old", *late), made("old", *late[:2], "trace/call"), made("new", "passed")]
    assert [table.passed(outcomes, tries) for tries in (1, 2, 3)] == [1, 1, 2]
    rows = table.rates(outcomes).splitlines()
    assert "0 of 2 [0%, 66%]" in rows[-2] and "1 of 2 [9%, 91%]" in rows[-2]
    assert rows[-1].count("1 of 1 [21%, 100%]") == 2 and "no run" in rows[2]
    assert table.gain(outcomes)[0].startswith("Difference at the first answer: +1.00 [")
    assert not table.gain(outcomes[:2])
    assert [len(table.decided([made("old", *late[:2]), *outcomes], tries)) for tries in (1, 3)] == [4, 3]
    assert "| `symlog` | interpret/numerics, trace/call, passed | passed |" in table.each(outcomes[::2])
    assert "| `symlog` | old | 2 | trace/call: so |" in table.failures(outcomes)
