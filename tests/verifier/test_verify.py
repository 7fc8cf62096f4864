"""Tests of the gates on a machine without a GPU: the order of the gates, the sources that each gate refuses,
the messages of refusals, and honest kernels that pass."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from authoring import (
    BROKEN,
    HONEST,
    SPECS,
    TOY_KERNEL,
    UNSCALED,
    kernel_of,
    measured,
    program_of,
    slow,
    write_toy,
)

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.cubin import Resources
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier import verify as gates
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import GATES, MEASUREMENT, REPORT, Accepted, Checked, Rejected, Unmeasured
from coda_agent.verifier.sandbox.jail import JailUnavailable
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import check, line_behind, verify

pytestmark = [pytest.mark.usefixtures("no_compiler"), pytest.mark.slow]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return load(write_toy(tmp_path))


def rejected(spec: Spec, source: str) -> Rejected:
    report, program = check(spec, source)
    assert isinstance(report, Rejected) and program is None, report
    return report


def passed(report: Checked | Rejected | Accepted) -> list[str]:
    return [gate.gate for gate in report.gates]


# honest kernels


@pytest.mark.usefixtures("some_runs")
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_is_checked(name: str) -> None:
    spec, said = load(SPECS / f"{name}.yaml"), []
    report, program = check(spec, HONEST[name], progress=lambda gate, words: said.append(f"{gate} {words}"))
    assert isinstance(report, Checked) and program is not None, report
    assert passed(report) == list(GATES[:4])
    assert said == [f"{gate} {words}" for gate in GATES[:4] for words in ("started", "passed")]
    assert report.identity.spec_hash == spec.hash and report.identity.program_hash == program.hash
    assert report.identity.lowered_hash == lower(program).hash
    ratios = report.gates[2].figures["worst_rms_ratio"]
    assert ratios.keys() == spec.outputs.keys() and min(ratios.values()) > 0.5
    assert all(ratio < 1.3 for name, ratio in ratios.items() if spec.outputs[name].dtype != "fp32")
    assert REPORT.validate_json(report.model_dump_json()) == report


def test_figures(spec: Spec) -> None:
    trace, contract, _, compiled = check(spec, TOY_KERNEL).report.gates
    assert trace.figures["nodes"] == 6 and {"seccomp", "landlock"} & set(trace.figures["layers"])
    assert 0 < trace.figures["milliseconds"] < 5000
    assert contract.figures == {"steps": 1, "vector_kernels": 0}
    (kernel,) = compiled.figures["kernels"]
    assert (kernel["registers"], kernel["tile"], kernel["pingpong"], kernel["hgmma"]) == (
        168,
        "128x128",
        True,
        16,
    )
    assert compiled.findings == ()


def test_spills_are_findings(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    spilling = Resources("Step0_x", None, 255, 512, None, 44, 40, 0, 0, 0, 1.0)
    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", lambda *given: (spilling,))
    report, _ = check(spec, TOY_KERNEL)
    assert isinstance(report, Checked)
    assert report.gates[3].findings == ("Step0_x spills 44 loads and 40 stores",)
    assert report.gates[3].figures["kernels"][0]["tile"] is None


def test_the_identity_names_versions(spec: Spec) -> None:
    report, _ = check(spec, TOY_KERNEL)
    assert isinstance(report, Checked)
    assert report.identity.versions.keys() >= {"nvidia-cutlass-dsl", "quack-kernels", "torch"}


# refusals of each gate


def first(statement: str) -> str:
    """Return the toy kernel with ``statement`` inserted before its return."""
    return TOY_KERNEL.replace("    return", f"    {statement}\n    return")


# source, reason code, line, words
TRACE = {
    "syntax": (TOY_KERNEL.replace("toy(a", "toy((a"), "syntax", 5, "syntax error"),
    "an import": ("import os\n" + TOY_KERNEL, "language", 1, "the one import is: from primitives import"),
    "a forged print": (first('print("accepted")'), "language", 7, "print"),
    "an exit": (first("os._exit(0)"), "language", 7, "_exit"),
    "an endless loop": (first("while 1: pass"), "language", 7, "loop with for over range"),
    "a parameter": (TOY_KERNEL.replace("v)", "w)"), "parameters", 4, "a, b, v"),
    "a missing output": (TOY_KERNEL.replace('"c":', '"d":'), "outputs", 7, "exactly c: missing c; extra d"),
    "an extra output": (TOY_KERNEL.replace('{"c"', '{"d": v, "c"'), "outputs", 7, "exactly c: extra d"),
    "an argument": (BROKEN, "python", 7, "missing 1 required positional argument: 'b'"),
    "a shape": (TOY_KERNEL.replace("gemm(a, b)", "gemm(a, b.mT)"), "shapes", 7, "K and N differ"),
    "memory": (first("x = (0,) * 10000000000"), "memory", None, "MB"),
    "nothing": ("", "kernel", None, "@kernel"),
}


@pytest.mark.parametrize(("source", "code", "line", "words"), TRACE.values(), ids=TRACE)
def test_the_trace_gate(spec: Spec, source: str, code: str, line: int | None, words: str) -> None:
    report = rejected(spec, source)
    assert (report.gate, report.code, report.line, report.gates) == ("trace", code, line, ())
    assert words in report.message


def test_the_contract_gate_demands_16_bytes(tmp_path: Path) -> None:
    spec = load(write_toy(tmp_path, "M: 1000, K: 520, N: 776", "M: 1000, K: 519, N: 776"), check=False)
    report = rejected(spec, TOY_KERNEL)
    assert (report.gate, report.code, passed(report)) == ("contract", "alignment", ["trace"])
    assert report.message.startswith("case ragged: ") and "519" in report.message


def test_the_contract_gate_has_the_lowerings_words(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    from coda_agent.primitives.lang.errors import ProgramError

    def refuse(program: Program) -> None:
        raise ProgramError("width", "a tile has no home", 8)

    monkeypatch.setattr(gates, "lower", refuse)
    report = rejected(spec, TOY_KERNEL)
    assert (report.gate, report.code, report.message, report.line) == (
        "contract",
        "width",
        "a tile has no home",
        8,
    )


@pytest.mark.parametrize(
    ("name", "chosen", "words"),
    [
        ("gemm_qk_norm_rope", Schedule(128, 208), "208 columns does not hold whole heads of"),
        ("gemm_qk_norm_rope", Schedule(256, 208, False), "208 columns does not hold whole heads of"),
        (
            "gemm_grouped_down",
            Schedule(128, 128, True, 2, 2, split=True),
            "two launches cannot share rows that belong to experts; choose another",
        ),
    ],
)
def test_the_contract_gate_refuses_a_schedule_that_does_not_fit(
    no_compiler: None, name: str, chosen: Schedule, words: str
) -> None:
    spec = load(SPECS / f"{name}.yaml", check=False)
    report, _ = check(spec, kernel_of(name), schedules={0: chosen})
    assert isinstance(report, Rejected) and (report.gate, report.code) == ("contract", "schedule")
    assert report.message.startswith(f"case {spec.cases[0].name}, step 0: ") and words in report.message


def test_the_schedule_that_its_author_chose_is_compiled(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Schedule] = []

    def compiler(kernel: object, sizes: object, schedules: Iterable[Schedule]) -> tuple[()]:
        asked.extend(schedules)
        return ()

    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", compiler)
    report, _ = check(spec, TOY_KERNEL, schedules={0: Schedule(128, 192)})
    assert isinstance(report, Checked) and Schedule(128, 192) in asked


# Wrong formulas that an author may write by mistake. A key holds the spec and the output that becomes wrong;
# a value holds the correct text and the wrong text.
WRONG = {
    ("gemm_residual_partial_rmsnorm", "rstd"): ("mean + eps", "mean + 0.001"),
    ("gemm_residual_partial_rmsnorm", "h"): ("x + gemm", "x - gemm"),
    ("gemm_residual_partial_rmsnorm", "hg"): ("per_column(gamma) * stream", "per_column(gamma) * x"),
    ("gemm_rmsnorm_swiglu", "act"): ("g * sigmoid(g) * u", "u * sigmoid(u) * g"),
    ("gemm_rmsnorm_swiglu", "preact"): ('"preact": z', '"preact": 1.002 * z'),
    ("gemm_swiglu_bwd", "dz"): ("(1 + g * (1 - t))", "(1 + g * t)"),
    ("gemm_swiglu_bwd", "s"): ("g * dg + u * du", "g * dg"),
    ("gemm_swiglu_bwd", "act"): ('"act": g * t * u', '"act": g * u'),
}


@pytest.mark.parametrize(("name", "output"), WRONG)
def test_wrong_mathematics(name: str, output: str) -> None:
    old, new = WRONG[name, output]
    assert HONEST[name].count(old) == 1
    report = rejected(load(SPECS / f"{name}.yaml", check=False), HONEST[name].replace(old, new))
    assert (report.gate, report.code) == ("interpret", "numerics")
    assert passed(report) == ["trace", "contract"]
    assert "in the interpreter, inputs" in report.message and f"output '{output}'" in report.message
    failed = {e["name"] for e in report.evidence["outputs"] if not e["passed"]}
    assert output in failed
    json.dumps(report.model_dump(mode="json"))  # the journal stores evidence as JSON


SQUARE = """\
name: toy
summary: A square output, so that rows and columns have one size.
dims: {M: rows, K: inner}
inputs:
  a: {shape: [M, K], dtype: bf16}
  b: {shape: [K, M], dtype: bf16, init: {normal: {std: K**-0.5}}}
  v: {shape: [M], dtype: fp32, init: {uniform: [0.5, 1.5]}}
outputs:
  c: {shape: [M, M], dtype: bf16}
reference: |
  c = (a @ b) * v[:, None]
cases:
  - {name: small, M: 512, K: 256}
"""


def test_a_vector_along_the_wrong_axis(tmp_path: Path) -> None:
    """If the output is square, shapes cannot show that a vector lies along the wrong axis. Values must show
    the mistake."""
    path = tmp_path / "toy.yaml"
    path.write_text(SQUARE)
    spec = load(path)
    assert isinstance(check(spec, TOY_KERNEL).report, Checked)
    assert rejected(spec, TOY_KERNEL.replace("per_row", "per_column")).gate == "interpret"


def test_the_compile_gate_has_the_compilers_words(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise CompileError("error: too many registers")

    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", refuse)
    report = rejected(spec, TOY_KERNEL)
    assert (report.gate, report.code) == ("compile", "compiler")
    assert "does not compile for sm_90a: error: too many registers" in report.message
    assert passed(report) == ["trace", "contract", "interpret"]


def test_progress_of_a_rejection(spec: Spec) -> None:
    said: list[tuple[str, str]] = []
    check(spec, UNSCALED, progress=lambda gate, words: said.append((gate, words)))
    assert said[-2:] == [("interpret", "started"), ("interpret", "rejected: numerics")]


# a machine with a GPU; a stand-in replaces ``measure``


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list. Each worker that was started ahead of the gates is added to the list when it ends."""
    closed: list[object] = []
    monkeypatch.setattr("coda_agent.verifier.stages.start_workers", lambda: [closing(Ahead(closed))])
    return closed


class Ahead:
    def __init__(self, closed: list[object]):
        self._closed = closed

    def close(self) -> None:
        self._closed.append(self)


def test_with_a_gpu_all_gates(spec: Spec, monkeypatch: pytest.MonkeyPatch, ended: list[object]) -> None:
    asked: list[MeasureOptions] = []

    def measure(
        spec: Spec, kernel: KernelSource, options: MeasureOptions, *, ahead: Sequence[Ahead], **_: Any
    ) -> object:
        assert len(ahead) == 1 and not ended
        asked.append(options)
        return measured(spec, kernel.program)

    monkeypatch.setattr("coda_agent.verifier.measure.measure", measure)
    options = MeasureOptions(("torch.compile",), rounds=9)
    report, program = verify(spec, TOY_KERNEL, gpu=True, options=options)
    assert isinstance(report, Accepted) and program == program_of(spec, TOY_KERNEL)
    assert passed(report) == list(GATES)
    assert asked == [options] and len(ended) == 1
    assert isinstance(verify(spec, TOY_KERNEL, gpu=False).report, Checked) and len(ended) == 1
    assert verify(spec, BROKEN, gpu=True).report.status == "rejected" and len(asked) == 1
    assert len(ended) == 2  # the workers started for the broken kernel ended unused


@pytest.mark.usefixtures("ended")
def test_a_rejection_on_the_gpu_keeps_the_gates_before(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "coda_agent.verifier.measure.measure", lambda spec, program, *_, **options: slow(spec)
    )
    report, program = verify(spec, TOY_KERNEL, gpu=True)
    assert isinstance(report, Rejected) and report.code == "slow" and program is not None
    assert passed(report) == list(GATES[:4])


@pytest.mark.usefixtures("ended")
def test_a_void_measurement_leaves_a_checked_kernel(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    void = Unmeasured(reason="a kernel timed against itself gave 1.02")
    monkeypatch.setattr("coda_agent.verifier.measure.measure", lambda spec, program, *_, **options: void)
    report, program = verify(spec, TOY_KERNEL, gpu=True)
    assert isinstance(report, Checked) and program is not None
    assert report.unmeasured == "checked; measurement invalid: a kernel timed against itself gave 1.02"


# machines without a jail


def test_no_jail_is_no_verdict(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*arguments: object, **options: object) -> None:
        raise JailUnavailable("neither seccomp nor Landlock")

    monkeypatch.setattr("coda_agent.verifier.sandbox.jail.trace", unavailable)
    with pytest.raises(JailUnavailable):
        check(spec, TOY_KERNEL)


# reports


@pytest.mark.parametrize("change", [{"status": "accepted"}, {"gate": None}, {"extra": 1}, {"line": "x"}])
def test_a_report_of_a_wrong_form_is_refused(change: dict[str, Any]) -> None:
    good = Rejected(gate="trace", code="syntax", message="no", line=7).model_dump(mode="json")
    assert REPORT.validate_python(good) == MEASUREMENT.validate_python(good)
    with pytest.raises(ValueError):
        REPORT.validate_python(good | change)


def test_a_compilers_words_lead_back_to_the_kernel_file() -> None:
    words = 'File "coda_lowered.py", line 30\n    n2_0 = accumulator[i]\n    n3_1 = nonsense(n2_0)\nNameError'
    assert line_behind(words, (None, 1, 4, 7)) == 7
    assert line_behind(words, (None, 1, 4)) == 4  # node 3 has no line, but node 2 has
    assert line_behind("ptxas died", (1, 2, 3)) is None
