"""The spec of a derived backward: the ordinary gates judge the backward and its forward as a pair."""

from __future__ import annotations

import functools

import pytest
import torch
from checkout import ROOT

from coda_agent.agent.backward import Pair, pair
from coda_agent.primitives.derive import derive
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import gradients, reference
from coda_agent.verifier.numerics.inputs import draw, draw_free
from coda_agent.verifier.numerics.sizes import hidden, row_dims
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import check_program

# Specs of every kind of forward, each with the name of an output or None. If an output is named, the derived
# backward computes the gradient of this output as a matmul of ``d_next`` and ``w_next``.
PAIRS = [
    ("gemm_alpha_residual", None), ("gemm_bias_gelu", None), ("gemm_bias_gelu", "act"), ("gemm_geglu", "act"),
    ("gemm_layernorm", None), ("gemm_partial_cross_entropy_unstored", None), ("gemm_qk_norm_rope", None),
    ("gemm_relu2", "act"), ("gemm_residual_partial_rmsnorm", None), ("gemm_residual_rmsnorm_gemm", None),
    ("gemm_rmsnorm_rope", None), ("gemm_rmsnorm_swiglu_fp16", None), ("gemm_rope_positions", None),
    ("gemm_row_abs_max", None), ("gemm_softcap_cross_entropy", None), ("gemm_swiglu", None),
    ("gemm_swiglu", "act"), ("gemm_swiglu_mlp", None),
]  # fmt: skip
OF = {"gemm_qk_norm_rope": ["q"]}  # no kernel reads the gradient of a head statistic


@functools.cache
def derived(name: str, behind: str | None = None, accumulate: str | None = None) -> tuple[Spec, Pair]:
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    text = (ROOT / "generated_kernels" / f"{name}.program.json").read_text()
    program = Program.from_json(text, spec.signature())
    positive = {n for n, t in spec.inputs.items() if t.domain == "positive"}
    of = [behind] if behind else OF.get(name)
    into = [accumulate] if accumulate else []
    found = derive(program, spec.cases[0].sizes, of=of, behind=behind, positive=positive, accumulate=into)
    made = pair(spec, program, found, of, behind)
    assert made is not None
    return spec, made


@pytest.mark.parametrize(("name", "behind"), PAIRS)
def test_its_spec_loads_and_has_the_program_s_signature(name: str, behind: str | None) -> None:
    _, made = derived(name, behind)
    spec = made.spec
    assert spec.signature() == made.program.signature
    assert gradients.wrong(spec, draw_free(spec, hidden(spec, 3, 48), 4), hidden(spec, 3, 48)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "behind", "accumulate"),
    [("gemm_relu2", "act", None), ("gemm_swiglu", None, None), ("gemm_swiglu", "act", "w")],
)
def test_a_pair_passes_the_gates(name: str, behind: str | None, accumulate: str | None) -> None:
    _, made = derived(name, behind, accumulate)
    assert check_program(made.spec, made.program) is None


def test_what_the_forward_stores_follows_from_what_is_drawn() -> None:
    forward, made = derived("gemm_swiglu", "act")
    spec = made.spec
    sizes = hidden(spec, 1, 48)
    own = {dim: sizes[dim] for dim in forward.dims}
    free, inputs = draw_free(spec, sizes, 2), draw(spec, sizes, 2)
    assert inputs.keys() == spec.inputs.keys() and "preact" not in free
    exact = reference.oracle(forward, {n: free[n] for n in forward.inputs}, own)
    assert torch.equal(inputs["preact"], exact["preact"].to(torch.bfloat16))
    assert inputs["preact"].dtype == torch.bfloat16


def test_a_head_runs_on_what_is_stored() -> None:
    _, made = derived("gemm_swiglu")
    spec = made.spec
    sizes = hidden(spec, 1, 48)
    assert spec.before and spec.head
    assert {"preact", *spec.inputs} >= spec.before.outputs.keys() == {"preact"}
    free, inputs = draw_free(spec, sizes, 2), draw(spec, sizes, 2)
    (name,) = spec.head.outputs
    preact = reference.oracle(spec.before, free, sizes)["preact"].to(torch.bfloat16)
    exact = reference.oracle(spec.head, {**free, "preact": preact}, sizes)[name]
    assert torch.equal(inputs[name], exact.to(torch.bfloat16))


def test_only_the_forward_s_rows_are_rows() -> None:
    _, made = derived("gemm_partial_cross_entropy_unstored")
    assert row_dims(made.spec) == {"M"}  # the vocabulary is a weight's first dim, so it is no row dim


@pytest.mark.parametrize(
    ("name", "behind", "accumulate", "old", "new"),
    [
        ("gemm_rmsnorm", None, None, "  d_w = ", "  d_w = -1.0 * "),
        ("gemm_swiglu", None, None, "v8 = sigmoid(v3)", "v8 = silu(v3)"),
        ("gemm_relu2", "act", None, " > 0.0", " > -9.0"),
        ("gemm_swiglu", "act", "w", "  d_w = sum_w + v21", "  d_w = v21"),
        ("gemm_swiglu", "act", "w", "  d_w = sum_w + v21", "  d_w = 1.0 * sum_w"),
        ("gemm_swiglu", "act", "w", "  d_w = sum_w + v21", "  d_w = 2.0 * sum_w + v21"),
    ],
)
def test_a_wrong_text_is_no_spec(
    name: str, behind: str | None, accumulate: str | None, old: str, new: str
) -> None:
    _, made = derived(name, behind, accumulate)
    text, rest = made.text.split("baseline: |")
    head, separator, tail = text.rpartition(old)
    assert separator, text
    wrong = made._replace(text=f"{head}{new}{tail}baseline: |{rest}")
    with pytest.raises(SpecError, match="is not the gradient"):
        check_program(wrong.spec, wrong.program)
