"""The command ``show``: the expressions that it prints compute what the program computes, and its tables and
figures are right."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import pytest
import torch
from operators import BODIES, kernel, of_spec, tensor, two_steps, widths
from rich.console import Console, RenderableType

from coda_agent.agent.show import Shown, explain
from coda_agent.primitives.compiler.cubin import Resources
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import interpret, torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import Signature


def body(expression: str) -> Program:
    """Return a program whose fp32 output is ``expression``. The expression may contain ``a``, a matrix
    product, and ``x``, an input."""
    inputs = {"p": tensor("bf16", "M", "K"), "q": tensor("bf16", "K", "N"), "x": tensor("fp32", "M", "N")}
    signature = Signature("body", ("M", "K", "N"), inputs, {"o": tensor("fp32", "M", "N")})
    return kernel(signature, f'    a = gemm(p, q)\n    return {{"o": {expression}}}\n')


def said(program: Program) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [(s.title, [(x.verb, x.text, x.tensor) for x in s.lines]) for s in explain.steps(program)]


def test_residual_rmsnorm_reads_as_mathematics() -> None:
    assert said(of_spec("gemm_residual_partial_rmsnorm")) == [
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
    first, finish, second = explain.steps(two_steps())
    assert ("store", "t0 = r0 * per_column(gamma)") in [(x.verb, x.text) for x in first.lines]
    assert finish.lines[-1].text == "v0 = rsqrt(sum(partials0) / N + 1e-06)"
    assert [x.text for x in second.lines] == ["t0", "u", "v0", "up = gemm(t0, u) * per_row(v0)"]


def test_a_heads_statistic_is_swept_before_it_is_used() -> None:
    ((_, lines),) = said(of_spec("gemm_qk_norm_rope"))
    assert lines[2:5] == [
        ("load", "positions", "int32 [M]"), ("load", "gamma", "bf16 [2*P]"), ("load", "inv_freq", "fp32 [P]"),
    ]  # fmt: skip
    assert [line for line in lines if line[0] != "load"] == [
        ("compute", "acc = gemm(x, w.mT)", ""),
        ("sweep", "heads0 = head_sums(acc * acc, 2*P)", ""),
        ("store", "rstd = rsqrt(heads0 / (2 * P) + 1e-06)", "fp32 [M, H]"),
        ("compute", "r0 = acc * per_head(rstd) * per_head(gamma)", ""),
        ("compute", "r1 = per_row(positions) * per_head(inv_freq)", ""),
        ("compute", "r2 = cos(r1)", ""),
        ("compute", "r3 = sin(r1)", ""),
        ("store", "q = join(even(r0) * r2 - odd(r0) * r3, even(r0) * r3 + odd(r0) * r2)", "bf16 [M, 2*H*P]"),
    ]


def test_cross_entropy_says_what_is_left_and_how_it_is_finished() -> None:
    (_, gemm), (title, finish) = said(of_spec("gemm_partial_cross_entropy"))
    kept = {"partials0": "fp32 [M, V / tile_n]", "selected0": "fp32 [M]", "target": "int64 [M]"}
    assert gemm[2:] == [
        ("load", "target", kept["target"]),
        ("store", "logits = gemm(x, w.mT)", "bf16 [M, V]"),
        ("reduce", "partials0 = row_logsumexp(logits)", kept["partials0"]),
        ("reduce", "selected0 = row_select(logits, target)", kept["selected0"]),
    ]
    assert title == "vectors [M] after step 0"
    assert finish == [
        *(("load", name, tensor) for name, tensor in kept.items()),
        ("store", "lse = logsumexp(partials0)", "fp32 [M]"),
        ("store", "target_logit = where((target >= 0) & (target < V), selected0, 0)", "fp32 [M]"),
        ("store", "selected0 = -inf", "fp32 [M]"),
    ]


def test_columns_numbers_and_buffers_are_named_for_what_they_are() -> None:
    lines = {x for name in BODIES for _, found in said(of_spec(name)) for x in found}
    assert {
        ("load", "alpha", "fp32 []"),
        ("load", "cos_sin", "bf16 [M, 2*P]"),
        ("load", "sw", "fp32 [N]"),
        ("store", "h = x + alpha * gemm(y, w.mT)", "bf16 [M, N]"),
        ("store", "dw_new = dw + gemm(dy.mT, x)", "fp32 [N, K] over dw"),
        ("store", "y = gemm(x, w.mT) * per_row(sx) * per_column(sw)", "bf16 [M, N]"),
        ("reduce", "partials0 = column_sums(acc * r0)", "fp32 [M / tile_m, N]"),
        ("store", "dgamma = sum(partials0)", "fp32 [N]"),
    } <= lines
    (onehot,) = (text for _, text, _ in lines if "column_index" in text)
    # The argument of column_index is the dim V, not the whole expression of a tile.
    assert onehot == (
        "dlogits = (exp(gemm(x, w.mT) - per_row(lse)) - where(column_index(V) == per_row(target), 1, 0)) "
        "* per_row(dloss)"
    )
    wide = {text.split(" = ")[1]: tensor for _, found in said(widths()) for verb, text, tensor in found
            if verb == "reduce"}  # fmt: skip
    assert wide["column_sums(d)"] == "fp32 [2, M / tile_m, 2*F]"
    assert wide["column_abs_max(h)"] == "fp32 [M / tile_m, 2*F]"
    assert wide["row_abs_max(h)"] == "fp32 [M, (2*F) / tile_n]"


def per_head(columns: int, heads: int) -> Any:
    """Return a function that spreads a statistic [M, heads] over the columns of each head. The
    function repeats any other tensor once for each head."""

    def spread(v: torch.Tensor) -> torch.Tensor:
        if v.ndim == 2 and v.shape[1] == heads:
            return v.repeat_interleave(columns // heads, dim=1)
        return v.repeat(1, heads)

    return spread


SCOPE: dict[str, Any] = {
    "gemm": torch.matmul, "sigmoid": torch.sigmoid, "rsqrt": torch.rsqrt, "exp": torch.exp, "sin": torch.sin,
    "cos": torch.cos, "silu": lambda a: a * torch.sigmoid(a), "inf": torch.tensor(math.inf),
    "where": lambda c, a, b: torch.where(c.bool(), a, b), "maximum": lambda a, b: a.clamp_min(b),
    "row_sums": lambda t: t.sum(-1), "column_sums": lambda t: t.sum(0), "row_max": lambda t: t.amax(-1),
    "row_abs_max": lambda t: t.abs().amax(-1), "column_abs_max": lambda t: t.abs().amax(0),
    "row_logsumexp": lambda t: t.logsumexp(-1),
    # An index out of range selects nothing, so the initial value, -inf, stays.
    "row_select": lambda t, at: torch.stack(
        [row[int(i)] if 0 <= i < len(row) else torch.tensor(-math.inf) for row, i in zip(t, at, strict=True)]
    ),
    **dict.fromkeys(("sum", "max", "logsumexp"), lambda partials: partials),
    "head_sums": lambda t, width: t.unflatten(1, (-1, width)).sum(-1),
    "column_index": lambda n: torch.arange(n)[None, :].float(),
    "even": lambda t: t[:, 0::2], "odd": lambda t: t[:, 1::2],
    "join": lambda a, b: torch.stack((a, b), -1).flatten(1),
    "per_row": lambda v: v[:, None], "per_column": lambda v: v[None, :],
}  # fmt: skip


def evaluate(program: Program, inputs: dict[str, torch.Tensor], sizes: dict[str, int]) -> dict[str, Any]:
    """Run the text that ``show`` prints as Python, on PyTorch tensors; return the values by name. A step sees
    only the tensors that it loads or computes."""
    known: dict[str, Any] = {k: v.float() for k, v in inputs.items()}
    heads = sizes.get("H", 1)
    scope = SCOPE | sizes | {"per_head": per_head(2 * heads * sizes["P"] if "P" in sizes else 1, heads)}
    for step in explain.steps(program):
        local = {line.text: known[line.text] for line in step.lines if line.verb == "load"}
        for line in step.lines:
            if line.verb == "load":
                continue
            name, _, expression = line.text.partition(" = ")
            value = eval(expression, scope, local)  # safe, because coda-agent wrote this text
            local[name] = value.float() if value.dtype == torch.bool else value
            if line.verb in ("store", "reduce"):
                known[name] = local[name].to(torch_dtype(line.tensor.split()[0])).float()
    return known


def draw(program: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Draw normal values for floating-point inputs, and column indices for integer inputs. An index may be
    out of range, by at most two columns at either end."""
    torch.manual_seed(0)
    drawn = {}
    for name, t in program.signature.inputs.items():
        shape = [d(sizes) for d in t.shape]
        number = torch.randint(-2, sizes.get("V", 9) + 2, shape) if "int" in t.dtype else torch.randn(shape)
        drawn[name] = number.to(torch_dtype(t.dtype))
    return drawn


EXPRESSIONS = [
    "a - (x - a)", "a - x - a", "a / (x * a)", "a / x * a", "-(a + x)", "-(-a)", "2 - -x * a", "(-2) * a",
    "x * (a < x)", "(a < x) < 1", "1 > (a >= x)", "where(a > x, a, x) * exp(-maximum(a * a, 0.1)) - 0.3",
    "(a + x) * (a + x) / (1 + a * a)", "a - 1e-30 - 16777217.0", "a * x.columns - x.rows",
    "where(a - a == 0, a, x)", "where(a - a != 0, a, x)", "where(column_index(x) < 3, a, x)",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_keep_their_meaning(expression: str) -> None:
    program, sizes = body(expression), {"M": 8, "K": 4, "N": 6}
    inputs = draw(program, sizes)
    expected = interpret(program, inputs)["o"]
    assert torch.equal(evaluate(program, inputs, sizes)["o"], expected)


SIZES = {"M": 24, "K": 16, "N": 32, "D": 16, "F": 12, "V": 20, "H": 3, "P": 4}
PROGRAMS = {**{name: of_spec(name) for name in BODIES}, "two": two_steps(), "widths": widths()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_of_whole_kernels_computes_their_outputs(name: str) -> None:
    program = PROGRAMS[name]
    sizes = {d: SIZES[d] for d in program.signature.dims}
    inputs = draw(program, sizes)
    found = evaluate(program, inputs, sizes)
    for output, expected in interpret(program, inputs).items():
        assert torch.equal(found[output].to(expected.dtype), expected), output


STEP = Resources("Step0_0123456789ab", Schedule().to_json(), 168, 80, (5, 2, 4), 3, 4, 16, 7, 8, 2.5)
VECTOR = Resources("Finish1_15_0123456789ab", None, 24, 0, None, 0, 0, 0, 0, 0, 0.2)
CASES = {"1B": {"M": 16384, "D": 2048, "F": 5632}, "small": {"M": 256, "D": 64, "F": 128}}


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


def test_render_shows_steps_resources_and_floors() -> None:
    program = of_spec("gemm_swiglu_bwd")
    text = printed(Shown(KernelSource(program), resources=[STEP, VECTOR], sizes=CASES).render())
    assert text.startswith("gemm_swiglu_bwd")
    assert "bf16 [M, 2*F]" in text  # rich does not take the brackets for markup
    assert re.search(r"Step0 +│ 128x128 pingpong 2x1 +│ +168 │ +80 │ +5/2/4 │ +3/4 │ +16 │ +7/8 │", text)
    assert re.search(r"Finish1_15 +│ - +│ +24 │", text)
    row = ["1B (M 16384, D 2048, F 5632)", "step 0"]
    row += ["378.0", "459.3", "555.1", "382.0", "302.8", "382.0", "compute"]
    assert row in [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    assert text.count("vectors after 0") == 2
    assert "cutlass" not in text
    bare = printed(Shown(KernelSource(program)).render())
    assert "roofline" not in bare and "resources" not in bare


def test_cutedsl_is_the_lowered_text_on_request() -> None:
    from coda_agent.primitives.compiler.lower import lower

    program = two_steps()
    text = printed(Shown(KernelSource(program), cutedsl=True).render())
    assert "class Step1_" in text and "epi_visit_subtile" in text
    assert Shown(KernelSource(program), cutedsl=True).to_dict()["cutedsl"] == lower(program).text


def test_as_dict_is_json_with_the_same_figures() -> None:
    program = of_spec("gemm_swiglu_bwd")
    data = json.loads(json.dumps(Shown(KernelSource(program), "named", [STEP], CASES).to_dict()))
    assert (data["spec"], data["program"], data["cutedsl"]) == ("named", program.hash, None)
    assert data["resources"][0]["registers"] == 168
    assert data["roofline"]["1B"]["steps"][0]["reads"]["z"] == 369_098_752
    assert data["steps"][0]["lines"][0] == {"verb": "load", "text": "dy", "tensor": "bf16 [M, D]"}
    assert Shown(KernelSource(program)).to_dict()["resources"] is None


def test_a_case_that_lacks_a_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="F is missing"):
        Shown(KernelSource(of_spec("gemm_swiglu_bwd")), sizes={"half": {"M": 8, "D": 8}}).render()
