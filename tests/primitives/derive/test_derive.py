"""Derived backwards agree with fp64 autograd, for every committed program and for random programs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from authoring import SHIPPED, kernel_of
from checkout import ROOT
from derived import backward, error, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import signature, tensor, trace

from coda_agent.primitives import gemm, pairs, per_column, per_row, row_sums, rsqrt, silu
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.derive import Derived, derive
from coda_agent.primitives.derive.ledger import count
from coda_agent.primitives.derive.ranges import joined
from coda_agent.primitives.derive.reference import reference as text_of
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret, torch_dtype
from coda_agent.primitives.lang.ir import LEAVES, OPERATIONS, Node, Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.lang.trace import Tensor, Trace, tracing
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.values import trial

REFUSED = {n: "dtype" for n in SHIPPED if "fp8" in n} | {
    "gemm_grad_accumulate": "updates", "gemm_gathered_swiglu": "wrt",
}  # fmt: skip
# outputs that have no gradient of their own
STATISTICS = {("gemm_row_abs_max", "amax"), ("gemm_qk_norm_rope", "rstd"), ("gemm_qk_norm_rope_eps", "rstd")}
# inputs that many heads read; no primitive can add up the contributions of the heads to the gradient
LEFT = {n: {"cos_sin"} for n in SHIPPED if n.endswith("_rope")} | {
    "gemm_qk_norm_rope": set(), "gemm_qk_norm_rope_eps": {"eps"},
    "gemm_rmsnorm_qkv_norm_rope": {"cos_sin", "eps"},
}  # fmt: skip


@functools.cache
def committed(name: str) -> tuple[Any, Program]:
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    return spec, trace_source(kernel_of(name), spec.signature())


@pytest.mark.parametrize("name", [n for n in SHIPPED if n not in REFUSED])
def test_a_committed_program_has_the_gradients_of_its_reference(name: str) -> None:
    spec, program = committed(name)
    positive = {n for n, t in spec.inputs.items() if t.domain == "positive"}
    asked = {n for n in joined(program).program.outputs if (name, n) not in STATISTICS}
    derived = derive(program, spec.cases[0].sizes, of=asked, positive=positive)
    assert derived.left.keys() == LEFT.get(name, set())
    assert derived.program and lower(derived.program).text
    sizes, drawn = trial(spec)
    leaves = {n: t.double() if t.is_floating_point() else t for n, t in drawn.items()}
    leaves = {n: t.abs() + 0.1 if n in positive else t for n, t in leaves.items()}
    floats = {n: t.requires_grad_() for n, t in leaves.items() if t.is_floating_point()}
    outputs = reference.run(spec, leaves, sizes)
    generator = torch.Generator().manual_seed(0)
    outputs |= {n: torch.cat([outputs[p] for p in parts], 1) for n, parts in joined(program).parts.items()}
    coming = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in outputs.items()}
    parts = [(outputs[n] * coming[n]).sum() for n in asked]
    total = torch.stack(parts).sum()
    truth = dict(zip(floats, torch.autograd.grad(total, list(floats.values())), strict=True))
    memory = leaves | outputs | {f"d_{n}": t for n, t in coming.items()}
    found = backward(program, derived, {n: t.detach() for n, t in memory.items()}, sizes)
    assert found.keys() >= {f"d_{n}" for n in floats.keys() - derived.left.keys()}
    for each in floats.keys() - derived.left.keys():
        assert error(found[f"d_{each}"], truth[each]) < 1e-10, each


@pytest.mark.parametrize(("name", "code"), REFUSED.items())
def test_what_cannot_be_derived_says_so(name: str, code: str) -> None:
    spec, program = committed(name)
    with pytest.raises(ProgramError) as refused:
        derive(program, spec.cases[0].sizes)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("name", "asked", "code"),
    [
        ("gemm_rmsnorm", {"wrt": ["q"]}, "wrt"),
        ("gemm_rope_positions", {"wrt": ["positions"]}, "wrt"),
        ("gemm_row_abs_max", {"of": ["amax"]}, "wrt"),
        ("gemm_swiglu", {"of": ["y"]}, "of"),
        ("gemm_swiglu", {"behind": "y"}, "of"),
        ("gemm_partial_cross_entropy", {"behind": "lse"}, "behind"),
        ("gemm_qk_norm_rope", {"of": ["rstd"]}, "of"),
        ("gemm_partial_cross_entropy", {"save_bytes": 1}, "save_bytes"),
        ("gemm_swiglu", {"accumulate": ["b"]}, "accumulate"),
        ("gemm_swiglu", {"recompute": ["b"]}, "save"),
        ("gemm_qkv_rope", {"of": ["q", "v"]}, "of"),
        ("gemm_qkv_rope", {"behind": "q"}, "of"),
    ],
)
def test_bad_requests(name: str, asked: dict[str, Any], code: str) -> None:
    spec, program = committed(name)
    with pytest.raises(ProgramError) as refused:
        derive(program, spec.cases[0].sizes, **asked)
    assert refused.value.code == code and "\n" not in refused.value.message


@pytest.mark.parametrize(("name", "op"), [("gemm_row_abs_max", "row_abs_max"), ("gemm_relu2", "maximum")])
def test_extrema_and_ties_are_said(name: str, op: str) -> None:
    spec, program = committed(name)
    assert derive(program, spec.cases[0].sizes).notes == (f"{op}: {OPERATIONS[op].caveat}",)


def test_what_has_no_derivative_says_why() -> None:
    without = {n for n, o in OPERATIONS.items() if o.derivative is None} - set(LEAVES)
    assert without == {n for n in without if OPERATIONS[n].caveat} >= {"row_max", "head_abs_max"}


# A whole MLP


def mlp() -> Program:
    """Return the graph of a pre-norm SwiGLU MLP with its residual."""
    inputs = {
        "h": tensor("M, D"),
        "gamma": tensor("D"),
        "wgu": tensor("2*F, D"),
        "wd": tensor("D, F"),
    }
    outputs = {
        "rstd": tensor("M", "fp32"),
        "z": tensor("M, 2*F"),
        "act": tensor("M, F"),
        "out": tensor("M, D"),
    }
    made = Trace(Signature("mlp", ("M", "D", "F"), inputs, outputs))
    with tracing(made):
        given: Any = [Tensor(made.add(Node("input", (), name))) for name in inputs]
        h, gamma, wgu, wd = given
        rstd: Any = rsqrt(row_sums(h * h) / h.columns + 1e-6)
        z: Any = gemm(h * per_column(gamma), wgu.mT)
        z = z * per_row(rstd)
        gate, up = pairs(z)
        act: Any = silu(gate)
        act = act * up
        returned = {"rstd": rstd, "z": z, "act": act, "out": gemm(act, wd.mT) + h}
    return Program(made.signature, tuple(made.nodes), {n: t._index for n, t in returned.items()}).check()


def test_the_backward_of_a_whole_mlp_is_one_program_of_four_products() -> None:
    program, sizes = mlp(), {"M": 12, "D": 10, "F": 8}
    derived = derive(program, sizes, of=["out"])
    assert derived.program and derived.head is None and not (derived.same or derived.saves or derived.left)
    steps = cut(derived.program)
    assert len(steps.gemms) == 4
    nodes = derived.program.nodes
    # The first product has one sum and stores one tile, dz * rstd. No product reads the normalised stream.
    (first, *rest) = steps.gemms
    assert [nodes[i].op for i in first.reductions] == ["row_sums"]
    assert [nodes[i].op for i in first.stores] == ["multiply"]
    weights = [s for s in rest if derived.program.outputs["d_wgu"] in s.stores]
    assert all(nodes[a].op in ("transpose", "input") for s in weights for a in nodes[s.gemm].args)
    random = torch.Generator().manual_seed(1)
    leaves = {
        n: torch.randn([d(sizes) for d in t.shape], generator=random, dtype=torch.float64).requires_grad_()
        for n, t in program.signature.inputs.items()
    }
    outputs = evaluate(program, leaves, sizes)
    coming = torch.randn(outputs["out"].shape, generator=random, dtype=torch.float64)
    truth = torch.autograd.grad(outputs["out"], list(leaves.values()), coming)
    memory = {n: t.detach() for n, t in (leaves | outputs | {"d_out": coming}).items()}
    found = backward(program, derived, memory, sizes)
    for name, expected in zip(leaves, truth, strict=True):
        assert error(found[f"d_{name}"], expected) < 1e-12, name


def test_a_derived_program_runs_as_kernels_round() -> None:
    program, sizes = mlp(), {"M": 64, "D": 48, "F": 40}
    made = derive(program, sizes, of=["out"]).program
    assert made is not None
    random = torch.Generator().manual_seed(2)
    inputs = {
        n: torch.rand([d(sizes) for d in t.shape], generator=random).sub(0.5).to(torch_dtype(t.dtype))
        for n, t in made.signature.inputs.items()
    }
    inputs["rstd"] += 1
    exact = evaluate(made, {n: t.double() for n, t in inputs.items()}, sizes)
    for name, got in interpret(made, inputs).items():
        assert error(got.double(), exact[name]) < 2e-2, name


@pytest.mark.parametrize(
    ("forward", "output", "hand"),
    [("gemm_swiglu", "act", "gemm_swiglu_bwd"), ("gemm_bias_gelu", "act", "gemm_gelu_bwd")],
)
def test_behind_a_product_it_moves_no_more_than_by_hand(forward: str, output: str, hand: str) -> None:
    spec, program = committed(forward)
    by_hand_spec, by_hand = committed(hand)
    sizes = spec.cases[0].sizes
    made = derive(program, sizes, of=[output], behind=output).program
    assert made is not None
    first = cut(made).gemms[0]
    own = cut(by_hand).gemms[0]
    assert len(first.stores) <= len(own.stores) and len(first.loads) <= len(own.loads)
    # the program written by hand leaves the two products that read dz to separate kernels
    assert len(cut(made).gemms) == len(cut(by_hand).gemms) + 2


def test_logits_that_are_not_stored_ride_on_their_product_again() -> None:
    spec, program = committed("gemm_partial_cross_entropy_unstored")
    _, by_hand = committed("gemm_cross_entropy_bwd")
    sizes = spec.cases[0].sizes
    derived = derive(program, sizes)
    assert derived.program and derived.head is None and len(cut(derived.program).gemms) == 3
    first = cut(derived.program).gemms[0]
    assert len(first.stores) == len(cut(by_hand).gemms[0].stores) == 1
    assert count(derived.program, None, sizes).flops == 3 * count(by_hand, None, sizes).flops


# Random programs

UNARY = ("silu(t)", "gelu(t)", "tanh(t)", "sigmoid(t)", "softplus(t)", "exp(0.1 * t)", "maximum(t, 0) ** 2",
         "-t", "abs(t)", "minimum(t, per_row(r))", "where(t > 0, t, 0.1 * t)", "sin(t)", "cos(t)",
         "log(1 + t * t)",
         "sqrt(1 + t * t)", "t * rsqrt(1 + t * t)", "join(*pairs(t))", "t / (1 + t * t)",
         "rope(t, positions, freq)", "where(in_columns(t, 2 * P, 2 * P), 2 * t, t)",
         "t * per_head(head_sums(t, 2 * P))")  # fmt: skip
BINARY = ("t * per_row(r)", "t + per_column(c)", "t * e", "t - e", "t * per_column(c)", "t / (1 + e * e)",
          "join(pairs(t)[0] * pairs(e)[1], pairs(e)[0])", "t + per_row(r) * per_column(c)")  # fmt: skip
ENDS = ('"v": row_sums(t)', '"v": row_logsumexp(t)', '"v": row_select(t, index)', '"v": row_sums(t * e)')
INPUTS = {
    "x": tensor("M, K"), "w": tensor("2*H*P, K"), "e": tensor("M, 2*H*P"), "r": tensor("M", "fp32"),
    "c": tensor("2*H*P", "fp32"), "index": tensor("M", "int64"), "positions": tensor("M", "int32"),
    "freq": tensor("P", "fp32"),
}  # fmt: skip
SIZES = {"M": 5, "K": 4, "H": 3, "P": 2}
SHAPE = signature(INPUTS, {"y": tensor("M, 2*H*P"), "v": tensor("M", "fp32")}, static=("P",))


def agrees(body: tuple[str, ...], end: str) -> float:
    """Derive the backward of the program with the operations ``body`` and the output ``end``. Return the
    largest error among the gradients of x, w, e, r and c. A gradient that autograd does not compute is left
    out."""
    lines = ["t = gemm(x, w.mT)", *(f"t = {each}" for each in body), f'return {{"y": t, {end}}}']
    made = Trace(SHAPE)
    scope = {n: getattr(__import__("coda_agent.primitives", fromlist=["x"]), n) for n in VOCABULARY}
    with tracing(made):
        values = {n: Tensor(made.add(Node("input", (), n))) for n in INPUTS}
        values["P"] = Tensor(made.add(Node("dim", (), "P")))
        text = "def k(" + ", ".join(values) + "):\n" + "".join(f"    {line}\n" for line in lines)
        exec(text, scope)
        outputs = scope["k"](**values)
    program = Program(SHAPE, tuple(made.nodes), {n: t._index for n, t in outputs.items()})
    return worst(program)


VOCABULARY = ("abs", "cos", "exp", "gelu", "gemm", "head_sums", "in_columns", "join", "log", "maximum",
              "minimum", "pairs", "per_column", "per_head", "per_row", "rope", "row_logsumexp", "row_select",
              "row_sums", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh", "where")  # fmt: skip


def worst(program: Program) -> float:
    random = torch.Generator().manual_seed(3)
    leaves = {
        n: torch.randn([d(SIZES) for d in t.shape], generator=random, dtype=torch.float64)
        for n, t in INPUTS.items()
    }
    leaves["index"] = torch.tensor([0, 3, -100, 11, 40])
    leaves["positions"] = torch.arange(5)
    wanted = ("x", "w", "e", "r", "c")
    for name in wanted:
        leaves[name].requires_grad_()
    outputs = evaluate(program, leaves, SIZES)
    coming = {n: torch.randn(t.shape, generator=random, dtype=torch.float64) for n, t in outputs.items()}
    total = torch.stack([(t * coming[n]).sum() for n, t in outputs.items()]).sum()
    known = torch.autograd.grad(total, [leaves[n] for n in wanted], allow_unused=True)
    truth = {n: t for n, t in zip(wanted, known, strict=True) if t is not None}
    derived = derive(program, SIZES, wrt=list(truth))
    memory = leaves | outputs | {f"d_{n}": t for n, t in coming.items()}
    found = backward(program, derived, {n: t.detach() for n, t in memory.items()}, SIZES)
    return max(error(found[f"d_{n}"], t) for n, t in truth.items())


@pytest.mark.slow
def test_random_programs_agree_with_autograd(pytestconfig: pytest.Config) -> None:
    """A random program may be refused, but only with a message of one line. The test tries 60 programs, or
    200 with --thorough."""

    @settings(max_examples=200 if pytestconfig.getoption("thorough") else 60, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(UNARY + BINARY), max_size=5), st.sampled_from(ENDS))
    def each_agrees(body: list[str], end: str) -> None:
        try:
            assert agrees(tuple(body), end) < 1e-7
        except ProgramError as refused:
            assert refused.message and "\n" not in refused.message

    each_agrees()


LINEAR = {"x": tensor("M, K"), "w": tensor("N, K")}


@pytest.mark.parametrize(("scale", "least"), [("sqrt(v)", 0.0), ("exp(v)", -800.0), ("sigmoid(v)", -800.0)])
def test_no_gradient_divides_by_a_scale_that_may_be_zero(scale: str, least: float) -> None:
    own = signature({**LINEAR, "v": tensor("M", "fp32")}, {"y": tensor("M, N"), "z": tensor("M, N")})
    program = trace(
        own, "t = gemm(x, w.mT)", f"z = t * per_row({scale})", "return {'y': silu(t) + z, 'z': z}"
    )
    sizes = {"M": 4, "N": 8, "K": 8}
    derived = derive(program, sizes, wrt=["x", "w"], of=["y"])
    torch.manual_seed(0)
    leaves = {n: torch.randn(4 if n == "x" else 8, 8).double().requires_grad_() for n in LINEAR}
    inputs = {**leaves, "v": torch.tensor([least, 1, 2, 3]).double()}
    made = evaluate(program, inputs, sizes)
    gradient = torch.randn(4, 8).double()
    truth = torch.autograd.grad((made["y"] * gradient).sum(), [*leaves.values()])
    memory = {n: t.detach() for n, t in {**inputs, **made, "d_y": gradient}.items()}
    found = backward(program, derived, memory, sizes)
    assert all(error(found[f"d_{n}"], t) < 1e-9 for n, t in zip(leaves, truth, strict=True))


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("minimum(1, maximum(-1, t))", "M, 4*H"), ("t * rsqrt(t.columns)", "M, 4*H"),
        ("maximum(cos(0.5) + 1, t)", "M, 4*H"), ("t * gelu(silu(0.5))", "M, 4*H"),
        ("row_max(t)", "M"), ("row_abs_max(t)", "M"), ("column_max(t)", "4*H"), ("column_abs_max(t)", "4*H"),
        ("head_abs_max(t, 4)", "M, H"), ("column_sums((column_index(t) < 3) * per_column(b))", "4*H"),
        ("column_sums(in_columns(t, 0, H) * per_column(b))", "4*H"),
    ],
)  # fmt: skip
def test_a_program_has_a_text_that_pytorch_runs(value: str, shape: str) -> None:
    dtype = "bf16" if "," in shape else "fp32"
    own = signature(
        {"x": tensor("M, K"), "w": tensor("4*H, K"), "b": tensor("4*H", "fp32")},
        {"y": tensor(shape, dtype)},
        ("H",),
    )
    program = trace(own, "t = gemm(x, w.mT)", f"return {{'y': {value}}}")
    sizes = {"M": 6, "H": 2, "K": 8}
    torch.manual_seed(0)
    shapes = {n: [d(sizes) for d in t.shape] for n, t in own.inputs.items()}
    inputs = {n: torch.randn(s).double() for n, s in shapes.items()}
    names = {**reference.scope(), **inputs, **sizes}
    exec(text_of(program), names)
    assert error(names["y"], evaluate(program, inputs, sizes)["y"]) < 1e-12
    assert names["y"].dtype == torch.float64


def gradients_agree(program: Program, sizes: dict[str, int], **asked: Any) -> Derived:
    """Derive a backward, and compare its gradients with autograd's."""
    derived, own = derive(program, sizes, **asked), program.signature
    torch.manual_seed(0)
    inputs = {n: torch.randn([d(sizes) for d in t.shape]).double() for n, t in own.inputs.items()}
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    made = evaluate(program, leaves, sizes)
    given = {n: torch.randn(t.shape).double() for n, t in made.items()}
    sum((made[n] * given[n]).sum() for n in made).backward()  # type: ignore[union-attr]
    whole = joined(program)
    memory = {n: t.detach() for n, t in {**leaves, **evaluate(whole.program, leaves, sizes)}.items()}
    memory |= {f"d_{n}": g for n, g in given.items()}
    memory |= {f"d_{n}": torch.cat([given[p] for p in parts], 1) for n, parts in whole.parts.items()}
    for name, found in backward(program, derived, memory, sizes).items():
        truth = leaves[name.removeprefix("d_")].grad
        assert truth is not None and error(found, truth) < 1e-9, name
    return derived


def test_an_output_asked_for_twice_has_one_gradient() -> None:
    own = signature({"x": tensor("M, K"), "w": tensor("N, K")}, {"y": tensor("M, N")})
    program, sizes = trace(own, "return {'y': tanh(gemm(x, w.mT))}"), dict.fromkeys("MNK", 8)
    assert derive(program, sizes, of=["y", "y"]) == derive(program, sizes, of=["y"])
    once = derive(program, sizes, accumulate=["w"])
    assert derive(program, sizes, accumulate=["w", "w"]) == once


def test_a_tensor_named_as_a_gradient_is_refused() -> None:
    own = signature({"d_x": tensor("M, N"), "x": tensor("M, K"), "w": tensor("N, K")}, {"y": tensor("M, N")})
    with pytest.raises(ProgramError, match="'d_x' would name the gradient of 'x' too: rename it"):
        derive(trace(own, "return {'y': gemm(x, w.mT) * d_x}"), {"M": 8, "N": 8, "K": 8})
    own = signature({"x": tensor("M, K"), "w_next": tensor("N, K")}, {"y": tensor("M, N")})
    program = trace(own, "return {'y': tanh(gemm(x, w_next.mT))}")
    with pytest.raises(ProgramError, match="'w_next' would name a tensor of the next matmul too: rename it"):
        derive(program, {"M": 8, "N": 8, "K": 8}, behind="y")


def test_a_tile_and_its_ranges_add_their_gradients() -> None:
    outputs = {"q": tensor("M, P"), "k": tensor("M, P"), "t": tensor("M, 2*P")}
    own = signature({"x": tensor("M, K"), "w": tensor("2*P, K")}, outputs, ("P",))
    ends = "'q': column_range(t, 0, P), 'k': column_range(t, P, P)"
    gradients_agree(trace(own, "t = gemm(x, w.mT)", f"return {{{ends}, 't': t}}"), {"M": 8, "K": 8, "P": 8})


@pytest.mark.parametrize("width", ["F", "H*P"])
def test_half_as_wide_outputs_of_several_dims_are_solvable(width: str) -> None:
    own = signature({"x": tensor("M, K"), "w": tensor(f"2*{width}, K")}, {"y": tensor(f"M, {width}")})
    program = trace(own, "a, b = pairs(gemm(x, w.mT))", "return {'y': a + b}")
    gradients_agree(program, dict.fromkeys(own.dims, 4))


def test_a_backward_reads_no_fp8_output() -> None:
    own = signature({"x": tensor("M, K"), "w": tensor("N, K")}, {"y": tensor("M, N", "fp8_e5m2")})
    derived = derive(trace(own, "return {'y': exp(gemm(x, w.mT))}"), {"M": 16, "N": 16, "K": 16})
    assert "y" in derived.recomputed and "y" not in derived.stored


def test_a_row_that_is_spread_over_a_tile_fills_all_lanes() -> None:
    """A gradient that is one number per row is stored in every column of its tile."""
    inputs = {n: tensor("K, K" if n in "wc" else "M, K") for n in "xwzac"}
    own = signature(inputs, {"y": tensor("M, K"), "s": tensor("M", "fp32")})
    lines = ("s = row_sums(gemm(x, w.mT) + z)", "return {'y': gemm(a, c.mT) * per_row(s), 's': s}")
    derived = gradients_agree(trace(own, *lines), {"M": 16, "K": 16}, wrt=["a", "z"])
    assert derived.program is not None
    (store,) = {i for i in derived.program.outputs.values() if derived.program.nodes[i].op == "as_tile"}
    text = lower(derived.program).text
    assert f"o{store}[2 * i + 0] = " in text and f"o{store}[2 * i + 1] = " in text


def test_a_branch_of_an_extremum_keeps_its_tile() -> None:
    inputs = {"x": tensor("M, K"), "w": tensor("H*P, K"), "r": tensor("P"), "b": tensor("H*P")}
    lines = (
        "t = gemm(x, w.mT)",
        "m = minimum(per_head(r), t)",
        "return {'y': where(m < per_column(b), per_column(b), m)}",
    )
    program = trace(signature(inputs, {"y": tensor("M, H*P")}, ("P",)), *lines)
    gradients_agree(program, {"M": 16, "K": 8, "H": 2, "P": 4}, wrt=["x"])
