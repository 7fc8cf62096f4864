"""The interpreter against independent fp64 PyTorch, and where exactly it rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels import BACKWARD, CHAIN, EXAMPLES, NORM, SWIGLU, Example, Tensors, draw, signature, tensor, trace
from torch.nn.functional import rms_norm, silu

from primitives.interpret import interpret, solve_sizes, store_dtypes
from primitives.ir import Signature

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}  # fp32: with its sums


def close(got: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, slack: float = 1e-5) -> None:
    """Within half an ulp of the truth, and ``slack`` for what came before that rounding."""
    assert got.dtype == dtype and got.shape == truth.shape
    error = (got.double() - truth).abs()
    allowed = HALF_ULP[dtype] * truth.abs() + slack
    assert bool((error <= allowed).all()), float((error - allowed).max())


def norm(i: Tensors) -> Tensors:
    h = torch.addmm(i["x"], i["y"], i["w"].T)
    rstd = (h.square().mean(1) + 1e-6).pow(-0.5)
    return {"h": h, "hg": torch.einsum("mn,n->mn", h, i["gamma"]), "rstd": rstd}


def swiglu(i: Tensors) -> Tensors:
    z = torch.diag(i["rstd"]) @ i["x"] @ i["w"].T
    gate, up = z[:, 0::2], z[:, 1::2]
    return {"preact": z, "act": silu(gate) * up}


def backward(i: Tensors) -> Tensors:
    """By automatic differentiation of the forward."""
    z = i["z"].clone().requires_grad_()
    gate, up = z.unflatten(1, (-1, 2)).unbind(-1)
    act = silu(gate) * up
    (dz,) = torch.autograd.grad(act, z, i["dy"] @ i["w_down"])
    return {"dz": dz, "act": act.detach(), "s": (dz * z.detach()).sum(1)}


def chain(i: Tensors) -> Tensors:
    h = i["y"] @ i["wo"] + i["x"]
    normed = rms_norm(h, (h.shape[1],), i["gamma"], eps=1e-6)
    return {"h": h, "up": normed @ i["w_up"].T}


TRUTHS: list[tuple[Example, Callable[[Tensors], Tensors], float]] = [
    (NORM, norm, 1e-5), (SWIGLU, swiglu, 1e-5), (BACKWARD, backward, 1e-5),
    (CHAIN, chain, 2e-2),  # its second GEMM reads h * gamma rounded to bf16
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("example", "truth", "slack"), TRUTHS, ids=EXAMPLES)
def test_agrees_with_fp64(
    example: Example, truth: Callable[[Tensors], Tensors], slack: float, seed: int
) -> None:
    inputs = draw(example.signature, example.sizes, seed)
    before = {name: t.clone() for name, t in inputs.items()}
    got = interpret(example.program, inputs)
    expected = truth({name: t.double() for name, t in inputs.items()})
    assert got.keys() == expected.keys()
    for name, value in got.items():
        dtype = torch.float32 if example.signature.outputs[name].dtype == "fp32" else torch.bfloat16
        close(value, expected[name], dtype, slack)
    assert all(torch.equal(t, before[name]) for name, t in inputs.items())


EYE = {
    "x": tensor("M, N"), "eye": tensor("N, N"), "v": tensor("M", "fp32"), "zero": tensor("N, N"),
    "none": tensor("M, N"),
}  # fmt: skip
SIZES = {"M": 16, "N": 8}


def products() -> tuple[Tensors, torch.Tensor]:
    """Inputs, and ``gemm(x, eye) * per_row(v)`` exactly: fp32 numbers that bf16 has to round."""
    inputs = draw(signature(EYE, {}), SIZES)
    inputs |= {"eye": torch.eye(8).bfloat16(), "zero": torch.zeros(8, 8).bfloat16()}
    inputs["none"] = torch.zeros(16, 8).bfloat16()
    inputs["v"] = inputs["v"].bfloat16().float()  # products of two bf16 numbers are exact in fp32
    exact = inputs["x"].float() * inputs["v"][:, None]
    assert not torch.equal(exact.bfloat16().float(), exact)
    return inputs, exact


def run(dtypes: dict[str, str], *lines: str) -> tuple[Tensors, torch.Tensor]:
    outputs = {name: tensor("M" if name == "s" else "M, N", dtype) for name, dtype in dtypes.items()}
    inputs, exact = products()
    program = trace(signature(EYE, outputs), "h = gemm(x, eye) * per_row(v)", *lines)
    return interpret(program, inputs), exact


def test_an_operand_is_rounded_once() -> None:
    got, exact = run({"o": "fp32"}, "return {'o': gemm(h, eye)}")
    assert torch.equal(got["o"], exact.bfloat16().float())


def test_an_operand_that_is_an_output_is_rounded_to_that() -> None:
    got, exact = run({"h": "bf16", "o": "fp32"}, "return {'h': h, 'o': gemm(h, eye)}")
    assert torch.equal(got["h"], exact.bfloat16())
    assert torch.equal(got["o"], exact.bfloat16().float())


def test_in_its_own_step_a_stored_tile_is_seen_unrounded() -> None:
    got, exact = run(
        {"h": "bf16", "twice": "fp32", "s": "fp32", "o": "fp32"},
        "return {'h': h, 'twice': h + h, 's': row_sums(h), 'o': gemm(h, eye)}",
    )
    assert torch.equal(got["twice"], 2 * exact)
    torch.testing.assert_close(got["s"], exact.sum(1), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got["s"], exact.bfloat16().float().sum(1), rtol=1e-6, atol=1e-6)


def test_a_later_step_reads_a_stored_tile_back_rounded() -> None:
    got, exact = run(
        {"h": "bf16", "own": "fp32", "later": "fp32"},
        "return {'h': h, 'own': h * 1.0, 'later': h + gemm(h, zero)}",
    )
    assert torch.equal(got["own"], exact)
    assert torch.equal(got["later"], exact.bfloat16().float())


def test_an_expression_of_an_earlier_step_is_rounded_where_it_leaves_it() -> None:
    """t = 3 h belongs to h's step: the later step reads t rounded, not three times a rounded h."""
    got, exact = run({"o": "fp32"}, "t = h * 3.0", "return {'o': t + gemm(x, zero) * per_row(row_sums(h))}")
    assert torch.equal(got["o"], (3 * exact).bfloat16().float())
    assert not torch.equal(got["o"], 3 * exact.bfloat16().float())


def test_an_expression_that_waits_is_computed_from_what_is_read_back() -> None:
    got, exact = run(
        {"o": "fp32"}, "t = h * per_row(row_sums(h) * 0 + 3.0)", "return {'o': t + gemm(h, zero)}"
    )
    assert torch.equal(got["o"], 3 * exact.bfloat16().float())


def test_a_tile_that_is_an_fp32_output_is_read_back_whole() -> None:
    got, exact = run(
        {"h": "fp32", "o": "fp32"}, "return {'h': h, 'o': h + gemm(x, zero) * per_row(row_sums(h))}"
    )
    assert torch.equal(got["o"], exact)


def test_a_vector_that_is_a_16_bit_output_is_read_back_rounded() -> None:
    got, exact = run(
        {"s": "bf16", "o": "fp32"}, "s = row_sums(h)", "g = gemm(x, zero) + 1",
        "return {'s': s, 'o': g * per_row(s)}",
    )  # fmt: skip
    assert torch.equal(got["o"], got["s"].float()[:, None].expand(16, 8))
    assert torch.equal(got["s"], exact.sum(1).bfloat16())


def test_inputs_are_recomputed_from_unrounded() -> None:
    """A tile of inputs alone is computed in each step that needs it, and leaves none."""
    got, _ = run({"o": "fp32"}, "t = x / 3.0", "return {'o': gemm((h + t) * 0, eye) + t}")
    assert torch.equal(got["o"], products()[0]["x"].float() / 3.0)


def test_sixteen_bit_outputs_are_rounded_to_their_dtype() -> None:
    inputs, exact = products()
    outputs = {"a": tensor("M, N", "bf16"), "b": tensor("M, N", "fp16"), "c": tensor("M, N", "fp32")}
    lines = ("h = gemm(x, eye) * per_row(v)", "return {'a': h, 'b': h * 1.0, 'c': 1.0 * h}")
    got = interpret(trace(signature(EYE, outputs), *lines), inputs)
    assert torch.equal(got["a"], exact.bfloat16())
    assert torch.equal(got["b"], exact.half()) and torch.equal(got["c"], exact)


def test_intermediates_take_the_operands_dtype() -> None:
    fp16 = {"x": tensor("M, N", "fp16"), "w": tensor("N, N", "fp16")}
    program = trace(signature(fp16, {"o": tensor("M, N", "fp16")}), "return {'o': gemm(gemm(x, w) * 2, w)}")
    assert set(store_dtypes(program).values()) == {"fp16"}


SCALARS: list[tuple[str, Callable[[int, int], float]]] = [
    ("h.columns", lambda m, n: n),
    ("h.rows * 2 - 1", lambda m, n: 2 * m - 1),
    ("1 / h.columns", lambda m, n: 1 / n),
    ("rsqrt(h.columns)", lambda m, n: n**-0.5),
    ("where(h.rows > h.columns, 3, 5)", lambda m, n: 3 if m > n else 5),
    ("where(h.rows < h.columns, 3, 5)", lambda m, n: 3 if m < n else 5),
    ("maximum(h.rows, 9) + minimum(1, h.columns)", lambda m, n: max(m, 9) + min(1, n)),
    (
        "exp(1) * tanh(0.5) + silu(1.0) - sigmoid(-1.0)",
        lambda m, n: 2.7182818 * 0.46211716 + 0.7310586 - 0.26894142,
    ),
    ("-sqrt(h.rows) + log(2)", lambda m, n: -(m**0.5) + 0.6931472),
    ("(h.rows >= 16) + (h.rows <= 15)", lambda m, n: 1),
]


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=[s[0] for s in SCALARS])
def test_scalars(text: str, value: Callable[[int, int], float]) -> None:
    inputs, _ = products()
    program = trace(
        signature(EYE, {"o": tensor("M, N", "fp32")}), "h = gemm(none, eye)", f"return {{'o': h + {text}}}"
    )
    expected = torch.full((16, 8), float(value(16, 8)))
    torch.testing.assert_close(interpret(program, inputs)["o"], expected, rtol=1e-6, atol=1e-6)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "h + h * 2 - 1": lambda h: 3 * h - 1,
    "(1 - h) / (2 + h * h)": lambda h: (1 - h) / (2 + h.square()),
    "-h": torch.neg,
    "h ** 2": torch.square,
    "where(h > 0.1, h, -1)": lambda h: torch.where(h > 0.1, h, -torch.ones_like(h)),
    "where(h >= 0, 1, h)": lambda h: h.masked_fill(h >= 0, 1),
    "(h < 0) + 2 * (h <= 0)": lambda h: 3 * (h < 0).double(),
    "maximum(h, 0)": torch.relu,
    "minimum(0.25, h)": lambda h: h.clamp(max=0.25),
    "exp(h)": torch.exp,
    "log(h * h)": lambda h: 2 * torch.log(h.abs()),
    "sqrt(h * h)": torch.abs,
    "rsqrt(h * h + 1)": lambda h: 1 / torch.hypot(h, torch.ones_like(h)),
    "tanh(h)": torch.tanh,
    "sigmoid(h)": lambda h: 1 / (1 + torch.exp(-h)),
    "silu(h)": silu,
}


@pytest.mark.parametrize("text", FUNCTIONS)
def test_each_function(text: str) -> None:
    inputs, exact = products()
    lines = ("h = gemm(x, eye) * per_row(v)", f"return {{'o': {text}}}")
    got = interpret(trace(signature(EYE, {"o": tensor("M, N", "fp32")}), *lines), inputs)["o"]
    assert bool((exact.double() != 0).all())
    torch.testing.assert_close(got.double(), FUNCTIONS[text](exact.double()), rtol=2e-6, atol=1e-6)


def test_transposes_on_either_side() -> None:
    inputs = {"x": tensor("K, M"), "w": tensor("N, K"), "g": tensor("M, P")}
    outputs = {"o": tensor("M, N", "fp32"), "dw": tensor("N, P", "fp32")}
    program = trace(
        signature(inputs, outputs), "h = gemm(x.mT, w.mT)", "return {'o': h, 'dw': gemm((h * 1).mT, g)}"
    )
    given = draw(program.signature, {"K": 8, "M": 16, "N": 24, "P": 32})
    got = interpret(program, given)
    x, w, g = (given[n].double() for n in "xwg")
    close(got["o"], x.T @ w.T, torch.float32)
    close(got["dw"], (x.T @ w.T).float().bfloat16().double().T @ g, torch.float32)


SOLVED: list[tuple[dict[str, str], dict[str, tuple[int, ...]], dict[str, int]]] = [
    ({"a": "M, K", "b": "2*F, K"}, {"a": (3, 4), "b": (10, 4)}, {"M": 3, "K": 4, "F": 5}),
    ({"a": "M, 2*F + D", "b": "2*F, D"}, {"a": (3, 14), "b": (10, 4)}, {"M": 3, "D": 4, "F": 5}),
    ({"a": "M*H, D", "b": "M, H"}, {"a": (6, 4), "b": (3, 2)}, {"M": 3, "H": 2, "D": 4}),
]


@pytest.mark.parametrize(("shapes", "given", "sizes"), SOLVED)
def test_sizes_are_solved(
    shapes: dict[str, str], given: dict[str, tuple[int, ...]], sizes: dict[str, int]
) -> None:
    assert solve_sizes(signature({k: tensor(v) for k, v in shapes.items()}, {}), given) == sizes


@pytest.mark.parametrize(
    "given", [{"a": (3, 4), "b": (10, 5)}, {"a": (3, 4), "b": (9, 4)}, {"a": (3, 4, 1), "b": (10, 4)}]
)
def test_shapes_that_do_not_fit_are_refused(given: dict[str, tuple[int, ...]]) -> None:
    declared: Signature = signature({"a": tensor("M, K"), "b": tensor("2*F, K")}, {})
    with pytest.raises(ValueError, match="shape|argument|axis 0: no positive F makes"):
        solve_sizes(declared, given)
