"""What show and doctor say: expressions that compute what the program computes, tables, findings."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType

import primitives  # noqa: F401  # trace_source looks the vocabulary up
from agent import doctor, show
from agent.doctor import Finding, Requirement
from primitives.compile import Resources
from primitives.dims import Dim
from primitives.interpret import interpret
from primitives.ir import Program, Schedule, Signature, TensorType
from primitives.trace import trace_source
from verifier import jail
from verifier.report import Rejected
from verifier.spec import load

ROOT = Path(__file__).parents[1]
SWIGLU_BACKWARD = """
from primitives import gemm, join, kernel, pairs, row_sums, sigmoid
@kernel
def k(dy, w_down, z):
    d = gemm(dy, w_down)
    gate, up = pairs(z)
    s = sigmoid(gate)
    dgate, dup = d * up * (s + gate * s * (1 - s)), d * gate * s
    return {"dz": join(dgate, dup), "act": gate * s * up, "s": row_sums(dgate * gate + dup * up)}
"""
RESIDUAL = """
from primitives import gemm, kernel, per_column, row_sums, rsqrt
@kernel
def k(y, w, x, gamma, eps):
    h = gemm(y, w.mT) + x
    return {"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(row_sums(h * h) / h.columns + eps)}
"""
TWO_STEPS = """
from primitives import gemm, kernel, per_column, per_row, row_sums, rsqrt
@kernel
def k(y, w, x, gamma, u):
    h = gemm(y, w) + x
    return {"up": gemm(h * per_column(gamma), u) * per_row(rsqrt(row_sums(h * h) / h.columns + 1e-6))}
"""


def tensor(dtype: str, *shape: str) -> TensorType:
    return TensorType(tuple(map(Dim.parse, shape)), dtype)


def of_spec(name: str, source: str) -> Program:
    return trace_source(source, load(ROOT / "specs" / f"{name}.yaml", check=False).signature())


def two_steps() -> Program:
    inputs = {
        "y": tensor("bf16", "M", "K"), "w": tensor("bf16", "K", "N"), "x": tensor("bf16", "M", "N"),
        "gamma": tensor("bf16", "N"), "u": tensor("bf16", "N", "P"),
    }  # fmt: skip
    outputs = {"up": tensor("bf16", "M", "P")}
    return trace_source(TWO_STEPS, Signature("two", ("M", "K", "N", "P"), inputs, outputs))


def body(expression: str) -> Program:
    """One fp32 output of a product ``a`` and an input ``x``."""
    inputs = {"p": tensor("bf16", "M", "K"), "q": tensor("bf16", "K", "N"), "x": tensor("fp32", "M", "N")}
    outputs = {"o": tensor("fp32", "M", "N")}
    source = "from primitives import gemm, kernel, maximum, where, exp\n@kernel\ndef k(p, q, x):\n"
    source += f'    a = gemm(p, q)\n    return {{"o": {expression}}}\n'
    return trace_source(source, Signature("body", ("M", "K", "N"), inputs, outputs))


def words(program: Program) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [(s.title, [(x.verb, x.text, x.tensor) for x in s.lines]) for s in show.steps(program)]


def test_residual_rmsnorm_reads_as_mathematics() -> None:
    assert words(of_spec("gemm_residual_partial_rmsnorm", RESIDUAL)) == [
        ("step 0: gemm [M, N] over K", [
            ("load", "y", "bf16 [M, K]"),
            ("load", "w", "bf16 [N, K]"),
            ("load", "x", "bf16 [M, N]"),
            ("load", "gamma", "bf16 [N]"),
            ("store", "h = gemm(y, w.mT) + x", "bf16 [M, N]"),
            ("store", "hg = h * per_column(gamma)", "bf16 [M, N]"),
            ("reduce", "partials0 = row_sums(h * h)", "fp32 [M, N / tile_n]"),
        ]),
        ("vectors [M] after step 0", [
            ("load", "partials0", "fp32 [M, N / tile_n]"),
            ("store", "rstd = rsqrt(sum(partials0) / N + 1e-06)", "fp32 [M]"),
        ]),
    ]  # fmt: skip


def test_what_passes_between_steps_has_one_name_on_both_sides() -> None:
    first, finish, second = show.steps(two_steps())
    assert ("store", "t0 = r0 * per_column(gamma)") in [(x.verb, x.text) for x in first.lines]
    assert finish.lines[-1].text == "v0 = rsqrt(sum(partials0) / N + 1e-06)"
    assert [x.text for x in second.lines] == ["t0", "u", "v0", "up = gemm(t0, u) * per_row(v0)"]


def evaluate(program: Program, inputs: dict[str, torch.Tensor], sizes: dict[str, int]) -> dict[str, Any]:
    """Run the shown text itself as Python over PyTorch, each step on the names that it loads."""
    known: dict[str, Any] = {k: v.float() for k, v in inputs.items()}
    scope: dict[str, Any] = {
        "gemm": torch.matmul, "sigmoid": torch.sigmoid, "rsqrt": torch.rsqrt, "exp": torch.exp,
        "where": lambda c, a, b: torch.where(c.bool(), a, b), "maximum": lambda a, b: a.clamp_min(b),
        "row_sums": lambda t: t.sum(-1), "sum": lambda partials: partials,
        "even": lambda t: t[:, 0::2], "odd": lambda t: t[:, 1::2],
        "join": lambda a, b: torch.stack((a, b), -1).flatten(1),
        "per_row": lambda v: v[:, None], "per_column": lambda v: v[None, :], **sizes,
    }  # fmt: skip
    for step in show.steps(program):
        local = {line.text: known[line.text] for line in step.lines if line.verb == "load"}
        for line in step.lines:
            if line.verb == "load":
                continue
            name, _, expression = line.text.partition(" = ")
            value = eval(expression, scope, local)  # the text under test, made by us
            local[name] = value.float() if value.dtype == torch.bool else value
            if line.verb != "compute":
                stored = torch.bfloat16 if line.tensor.startswith("bf16") else torch.float32
                known[name] = local[name].to(stored).float()
    return known


def draw(program: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return {
        name: torch.randn([d(sizes) for d in t.shape]).to(dtypes[t.dtype])
        for name, t in program.signature.inputs.items()
    }


EXPRESSIONS = [
    "a - (x - a)", "a - x - a", "a / (x * a)", "a / x * a", "-(a + x)", "-(-a)", "2 - -x * a", "(-2) * a",
    "x * (a < x)", "(a < x) < 1", "1 > (a >= x)", "where(a > x, a, x) * exp(-maximum(a * a, 0.1)) - 0.3",
    "(a + x) * (a + x) / (1 + a * a)", "a - 1e-30 - 16777217.0", "a * x.columns - x.rows",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_keep_their_meaning(expression: str) -> None:
    program, sizes = body(expression), {"M": 8, "K": 4, "N": 6}
    inputs = draw(program, sizes)
    expected = interpret(program, inputs)["o"]
    assert torch.equal(evaluate(program, inputs, sizes)["o"], expected)


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        (of_spec("gemm_residual_partial_rmsnorm", RESIDUAL), {"M": 8, "K": 16, "N": 32}),
        (of_spec("gemm_swiglu_bwd", SWIGLU_BACKWARD), {"M": 8, "D": 16, "F": 12}),
        (two_steps(), {"M": 8, "K": 16, "N": 32, "P": 24}),
    ],
    ids=["residual", "swiglu_bwd", "two_steps"],
)
def test_the_text_of_whole_kernels_computes_their_outputs(program: Program, sizes: dict[str, int]) -> None:
    inputs = draw(program, sizes)
    found = evaluate(program, inputs, sizes)
    for name, expected in interpret(program, inputs).items():
        assert torch.equal(found[name].to(expected.dtype), expected), name


STEP = Resources("Step0_0123456789ab", Schedule().to_json(), 168, 80, 1024, 3, 4, 16, 7, 8, 2.5)
VECTOR = Resources("Finish1_15_0123456789ab", None, 24, 0, 0, 0, 0, 0, 0, 0, 0.2)
CASES = {"1B": {"M": 16384, "D": 2048, "F": 5632}, "small": {"M": 256, "D": 64, "F": 128}}


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


def test_render_shows_steps_resources_and_floors() -> None:
    program = of_spec("gemm_swiglu_bwd", SWIGLU_BACKWARD)
    text = printed(show.render(program, resources=[STEP, VECTOR], sizes=CASES))
    assert text.startswith("gemm_swiglu_bwd")
    assert "bf16 [M, 2*F]" in text  # brackets are no markup
    assert re.search(r"Step0 +│ 128x128 pingpong 2x1 +│ +168 │ +80 │ +1024 │ +3/4 │ +16 │ +7/8 │", text)
    assert re.search(r"Finish1_15 +│ - +│ +24 │", text)
    row = ["1B (M 16384, D 2048, F 5632)", "step 0"]
    row += ["378.0", "459.3", "555.1", "382.0", "302.8", "382.0", "compute"]
    assert row in [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    assert text.count("vectors after 0") == 2
    assert "cutlass" not in text
    bare = printed(show.render(program))
    assert "roofline" not in bare and "resources" not in bare


def test_cutedsl_is_the_lowered_text_on_request() -> None:
    from primitives.lower import lower

    program = two_steps()
    text = printed(show.render(program, cutedsl=True))
    assert "class Step1_" in text and "epi_visit_subtile" in text
    assert show.as_dict(program, cutedsl=True)["cutedsl"] == lower(program).text


def test_as_dict_is_json_with_the_same_figures() -> None:
    program = of_spec("gemm_swiglu_bwd", SWIGLU_BACKWARD)
    data = json.loads(json.dumps(show.as_dict(program, spec_name="named", resources=[STEP], sizes=CASES)))
    assert (data["spec"], data["program"], data["cutedsl"]) == ("named", program.hash, None)
    assert data["resources"][0]["registers"] == 168
    assert data["roofline"]["1B"]["steps"][0]["reads"]["z"] == 369_098_752
    assert data["steps"][0]["lines"][0] == {"verb": "load", "text": "dy", "tensor": "bf16 [M, D]"}
    assert show.as_dict(program)["resources"] is None


def test_a_case_that_lacks_a_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="F is missing"):
        show.render(of_spec("gemm_swiglu_bwd", SWIGLU_BACKWARD), sizes={"half": {"M": 8, "D": 8}})


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {f.name: f for f in findings}


def test_doctor_looks_at_all_and_hides_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "made-up-value-1")
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    found = doctor.check()
    names = by_name(found)
    assert len(names) == len(found)
    assert {
        "python",
        "torch",
        "torch build",
        "CUDA device",
        "cuobjdump",
        "nvdisasm",
        "jail",
        "cache",
        "git",
        "anthropic key",
        "handoff provider",
        "quack-kernels",
        "nvidia-cutlass-dsl",
    } <= names.keys()
    assert all(bool(f.remedy) == (f.status != "ok") for f in found)
    assert names["handoff provider"].status == names["anthropic key"].status == "ok"
    said = printed(doctor.table(found)) + json.dumps(doctor.as_dict(found))
    assert "made-up-value-1" not in said
    assert all(name in said for name in names)


def test_doctors_jail_is_the_real_one() -> None:
    found = doctor.jail()
    assert found.status == "ok" and "limits" in found.detail
    assert re.search(r"\d+ ms a trace", found.detail)


def test_doctor_judges_what_the_jail_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*args: object) -> None:
        raise jail.JailUnavailable("no seccomp: allow it")

    monkeypatch.setattr(jail, "trace", unavailable)
    assert doctor.jail().status == "broken" and "no seccomp" in doctor.jail().detail
    refusal = Rejected(gate="trace", code="crashed", message="it died")
    monkeypatch.setattr(jail, "trace", lambda *args: refusal)
    assert doctor.jail().status == "broken" and "crashed" in doctor.jail().detail


def test_what_is_absent_is_missing_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    assert doctor.key().status == "missing" and "handoff" in doctor.key().remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: ("unknown", ""))
    absent = doctor.device()
    assert absent.status == "missing" and "bundle" in absent.remedy
    assert doctor.healthy([doctor.key(), absent])


def test_a_gpu_that_pytorch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: ("580.1", "NVIDIA H100"))
    found = doctor.device()
    assert found.status == "broken" and "580.1" in found.detail and torch.__version__ in found.detail
    assert not doctor.healthy([found])


def test_only_hopper_is_a_device_to_measure_on() -> None:
    assert doctor.judged_device("NVIDIA H100 80GB HBM3", (9, 0), "580.1") == Finding(
        "CUDA device", "ok", "NVIDIA H100 80GB HBM3, driver 580.1, capability 9.0"
    )
    assert doctor.judged_device("NVIDIA A100", (8, 0), "580.1").status == "missing"


@pytest.mark.parametrize(
    ("installed", "status"),
    [("0.6.4", "broken"), ("0.6.5", "ok"), ("0.6.5.post1", "ok"), ("0.6.10", "ok"), ("0.7", "broken"),
     ("1.0+cu130", "broken")],
)  # fmt: skip
def test_versions_compare_as_numbers(monkeypatch: pytest.MonkeyPatch, installed: str, status: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    found = doctor.package(Requirement("quack-kernels", "0.6.5", "0.7"))
    assert found.status == status
    assert found.remedy == ("" if status == "ok" else "pip install 'quack-kernels>=0.6.5,<0.7'")


def test_requirements_are_the_projects_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    declared = {r.name: r for r in doctor.requirements()}
    assert declared["quack-kernels"] == Requirement("quack-kernels", "0.6.5", "0.7")
    assert "pytest" not in declared
    monkeypatch.setattr(doctor, "PYPROJECT", tmp_path / "none.toml")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["rich>=15", 'mypy>=2; extra == "test"'])
    assert doctor.requirements() == [Requirement("rich", "15")]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.package(Requirement("coda-agent-has-no-such-package", "1"))
    assert (found.status, found.remedy) == ("missing", "pip install 'coda-agent-has-no-such-package>=1'")
    assert doctor.python((3, 10, 9)).status == "broken"
    assert doctor.python(sys.version_info[:3]).status == "ok"


def test_cache_that_cannot_be_written_or_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "file" / "below"))
    assert doctor.cache().status == "broken" and "CODA_AGENT_CACHE" in doctor.cache().remedy
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    assert doctor.cache().status == "ok"
    monkeypatch.setattr(doctor, "FREE_BYTES", 1 << 80)
    assert doctor.cache().status == "broken" and "GiB free" in doctor.cache().detail


def test_tools_and_git_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.tool(tmp_path / "cuobjdump").status == "missing"
    failing = tmp_path / "nvdisasm"
    failing.write_text("#!/bin/sh\nexit 3\n")
    failing.chmod(0o755)
    assert doctor.tool(failing).status == "broken"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.git().status == "missing"
