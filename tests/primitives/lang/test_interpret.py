"""The interpreter agrees with independent fp64 PyTorch code, and it rounds exactly where kernels do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels import EXAMPLES, Tensors, draw, signature, tensor, trace
from torch.nn.functional import gelu, one_hot, rms_norm, silu

from coda_agent.primitives.lang.interpret import interpret, solve_sizes
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Signature

# the limit for fp32 also allows for errors of summation
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}


def close(got: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, slack: float = 1e-5) -> None:
    """Check that ``got`` is within half an ulp of ``truth``. ``slack`` allows for errors before the final
    rounding."""
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
    """Compute the backward by automatic differentiation of the forward."""
    z = i["z"].clone().requires_grad_()
    gate, up = z.unflatten(1, (-1, 2)).unbind(-1)
    act = silu(gate) * up
    (dz,) = torch.autograd.grad(act, z, i["dy"] @ i["w_down"])
    return {"dz": dz, "act": act.detach(), "s": (dz * z.detach()).sum(1)}


def chain(i: Tensors) -> Tensors:
    h = i["y"] @ i["wo"] + i["x"]
    normed = rms_norm(h, (h.shape[1],), i["gamma"], eps=1e-6)
    return {"h": h, "up": normed @ i["w_up"].T}


def turned(heads: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return the complex product of ``heads`` and ``by`` as real numbers [M, 2HP]. ``heads`` [M, H, 2P] holds
    pairs of a real and an imaginary part. ``by`` [M, P] is complex and applies to every head."""
    numbers = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(numbers * by[:, None, :]).flatten(1)


def qk_norm(i: Tensors) -> Tensors:
    heads = (i["x"] @ i["w"].T).unflatten(1, (-1, i["gamma"].shape[0]))
    rstd = (heads.square().mean(-1) + 1e-6).pow(-0.5)
    angle = torch.outer(i["positions"], i["inv_freq"])
    normed = rms_norm(heads, (heads.shape[-1],), i["gamma"], eps=1e-6)
    return {"q": turned(normed, torch.polar(torch.ones_like(angle), angle)), "rstd": rstd}


def rope(i: Tensors) -> Tensors:
    heads = (i["x"] @ i["w"].T).unflatten(1, (-1, i["cos_sin"].shape[1]))
    by = torch.view_as_complex(i["cos_sin"].unflatten(1, (-1, 2)).contiguous())
    return {"q": turned(heads, by)}


def onehot(index: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a one-hot row for each index. An index that is not a column's number gives a row of zeros."""
    known = (index >= 0) & (index < columns)
    return one_hot(torch.where(known, index, 0).long(), columns) * known[:, None]


def cross_entropy(i: Tensors) -> Tensors:
    z = i["x"] @ i["w"].T
    picked = (onehot(i["target"], z.shape[1]) * z).sum(1)
    return {"logits": z, "lse": z.exp().sum(1).log(), "picked": picked}


def cross_entropy_backward(i: Tensors) -> Tensors:
    z = i["x"] @ i["w"].T
    p = torch.exp(z - i["lse"][:, None])
    return {"dlogits": torch.diag(i["dloss"]) @ (p - onehot(i["target"], z.shape[1]))}


def norm_backward(i: Tensors) -> Tensors:
    """Differentiate h * rstd * gamma automatically with rstd constant. The part of the gradient that passes
    through rstd is computed from the input s."""
    d, h, gamma = i["dz"] @ i["w"], i["h"].clone().requires_grad_(), i["gamma"].clone().requires_grad_()
    hhat = torch.diag(i["rstd"]) @ h
    dh, dgamma = torch.autograd.grad(hhat * gamma, (h, gamma), d)
    dx = i["dres"] + dh - torch.diag(i["rstd"].square() * i["s"]) @ i["h"]
    return {"dx": dx, "dgamma": dgamma, "hn": (hhat * gamma).detach()}


def gelu_backward(i: Tensors) -> Tensors:
    z = i["z"].clone().requires_grad_()
    act = gelu(z, approximate="tanh")
    (dz,) = torch.autograd.grad(act, z, i["dy"] @ i["w"])
    return {"dz": dz, "act": act.detach(), "dbias": dz.sum(0)}


def accumulate(i: Tensors) -> Tensors:
    return {"dw_new": torch.einsum("mn,mk->nk", i["dy"], i["x"]) + i["dw"]}


def alpha(i: Tensors) -> Tensors:
    h = torch.addmm(i["x"], i["y"], i["w"].T, alpha=float(i["alpha"]))
    return {"h": h, "amax": i["alpha"] * torch.linalg.vector_norm(h, torch.inf, dim=1)}


def fp8(i: Tensors) -> Tensors:
    return {"y": torch.diag(i["sx"]) @ i["x"] @ i["w"].T @ torch.diag(i["sw"])}


def widths(i: Tensors) -> Tensors:
    t = i["x"] @ i["w"].T
    h = t.unflatten(1, (-1, 2)).prod(-1) + i["half"] + i["b"]
    d = torch.stack((t, t.square()), -1).flatten(1) + i["wide"] @ torch.diag(i["b2"])
    return {
        "h": h, "d": d, "sums": d.sum(0), "largest": torch.linalg.vector_norm(h, torch.inf, dim=0),
        "high": h.sort(1).values[:, -1], "lse": d.exp().sum(1).log(), "half_lse": h.exp().sum(1).log(),
    }  # fmt: skip


TRUTHS: dict[str, Callable[[Tensors], Tensors]] = {
    "norm": norm, "swiglu": swiglu, "backward": backward, "chain": chain, "qk norm": qk_norm, "rope": rope,
    "cross entropy": cross_entropy, "cross entropy backward": cross_entropy_backward,
    "norm backward": norm_backward, "gelu backward": gelu_backward, "accumulate": accumulate, "alpha": alpha,
    "fp8": fp8, "widths": widths,
}  # fmt: skip
SLACK = {"chain": 2e-2}  # the second GEMM reads h * gamma rounded to bf16


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EXAMPLES)
def test_agrees_with_fp64(name: str, seed: int) -> None:
    example, slack = EXAMPLES[name], SLACK.get(name, 1e-5)
    inputs = draw(example.signature, example.sizes, seed)
    before = {n: t.clone() for n, t in inputs.items()}
    got = interpret(example.program, inputs)
    expected = TRUTHS[name]({n: t.double() for n, t in inputs.items()})
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
    """Return the inputs and the exact value of ``gemm(x, eye) * per_row(v)``, in fp32. bf16 cannot hold
    this value exactly."""
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
    """The step that computes h also computes ``t = 3 h``. The later step reads the rounded t; it does not
    multiply a rounded h by 3."""
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
    """If a tile depends only on inputs, every step that needs this tile recomputes it. So the tile is never
    stored and rounded."""
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
    assert set(cut(program).dtypes.values()) == {"fp16"}


SCALARS: list[tuple[str, Callable[[int, int], float]]] = [
    ("h.columns", lambda m, n: n),
    ("h.rows * 2 - 1", lambda m, n: 2 * m - 1),
    ("1 / h.columns", lambda m, n: 1 / n),
    ("rsqrt(h.columns)", lambda m, n: n**-0.5),
    (
        "exp(1) * tanh(0.5) + silu(1.0) - sigmoid(-1.0)",
        lambda m, n: 2.7182818 * 0.46211716 + 0.7310586 - 0.26894142,
    ),
    ("-sqrt(h.rows) + log(2)", lambda m, n: -(m**0.5) + 0.6931472),
    ("sin(0.5) - cos(-1.0) + gelu(1.0)", lambda m, n: 0.7803152),
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
    "abs(h) + 1": lambda h: torch.maximum(h, -h) + 1,
    "gelu(h * 3)": lambda h: (
        3 * h * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (3 * h + 0.044715 * 27 * h**3))
    ),
    "sin(h)": lambda h: torch.exp(1j * h).imag,
    "cos(h)": lambda h: torch.exp(1j * h).real,
    "(h == h) + 2 * (h != 0.5) + 4 * (h == 0)": lambda h: torch.full_like(h, 3),
    "where(h != h, 1, column_index(h))": lambda h: torch.arange(8.0).double().expand(16, 8),
    "(column_index(h) == 3) * h": lambda h: h @ torch.diag(torch.eye(8).double()[3]),
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


PACKED = {"x": tensor("M, K"), "w": tensor("H*W + 2*G*W, K"), "g": tensor("W")}


def test_callers_name_static_dims_that_follow_from_no_shape() -> None:
    declared = signature(PACKED, {})._replace(dims=("M", "K", "H", "G", "W"), static=("H", "G", "W"))
    assert declared.named == ("H", "G")  # W follows from g
    shapes = {"x": (3, 4), "w": (80, 4), "g": (8,)}
    assert solve_sizes(declared, shapes, {"H": 6, "G": 2, "M": 9}) == {"M": 3, "K": 4, "H": 6, "G": 2, "W": 8}
    assert declared._replace(static=("G",)).named == ("G",)  # here H follows from w
    assert solve_sizes(declared._replace(static=("G",)), shapes, {"G": 2})["H"] == 6
    wrong: list[dict[str, int]] = [{}, {"H": 6}, {"H": 6, "G": 0}, {"H": 6, "G": True}, {"H": 6, "G": 3}]
    for given in wrong:
        with pytest.raises(ValueError, match=r"give it by name|no positive W makes"):
            solve_sizes(declared, shapes, given)


REDUCTIONS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "row_sums(h)": ("M", lambda h: h @ torch.ones(8).double()),
    "row_max(h - 9)": ("M", lambda h: h.sort(1).values[:, -1] - 9),
    "row_abs_max(h)": ("M", lambda h: torch.linalg.vector_norm(h, torch.inf, dim=1)),
    "row_logsumexp(h)": ("M", lambda h: h.exp().sum(1).log()),
    "row_logsumexp(h * 500 + 300)": ("M", lambda h: torch.logsumexp(500 * h + 300, 1)),  # exp would overflow
    "column_sums(h)": ("N", lambda h: h.T @ torch.ones(16).double()),
    "column_max(h - 9)": ("N", lambda h: h.sort(0).values[-1] - 9),
    "column_abs_max(h)": ("N", lambda h: torch.linalg.vector_norm(h, torch.inf, dim=0)),
    "column_max(pairs(h)[0])": ("F", lambda h: h[:, ::2].sort(0).values[-1]),
    "column_sums(pairs(h)[1])": ("F", lambda h: h[:, 1::2].mean(0) * 16),
    "column_abs_max(join(h, h * 2))": (
        "2*N",
        lambda h: torch.kron(h.abs().sort(0).values[-1], torch.tensor([1.0, 2.0]).double()),
    ),
}


@pytest.mark.parametrize("text", REDUCTIONS)
def test_each_reduction(text: str) -> None:
    shape, truth = REDUCTIONS[text]
    inputs, exact = products()
    given = EYE | {"x": tensor("M, 2*F"), "eye": tensor("2*F, 2*F")}
    declared = signature(given, {"s": tensor(shape.replace("N", "2*F"), "fp32")})
    got = interpret(trace(declared, "h = gemm(x, eye) * per_row(v)", f"return {{'s': {text}}}"), inputs)["s"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), truth(exact.double()), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_row_select_gives_0_where_the_index_is_no_column(dtype: str) -> None:
    inputs, exact = products()
    index = torch.tensor([0, 7, 3, -1, 8, -100, 2**31 - 1, -(2**31), *range(8)])
    inputs["index"] = index.to(torch.int32 if dtype == "int32" else torch.int64)
    declared = signature(EYE | {"index": tensor("M", dtype)}, {"s": tensor("M", "fp32")})
    program = trace(declared, "h = gemm(x, eye) * per_row(v)", "return {'s': row_select(h, index)}")
    expected = [float(exact[row, i]) if 0 <= i < 8 else 0.0 for row, i in enumerate(index.tolist())]
    assert interpret(program, inputs)["s"].tolist() == expected


HEADS = {
    "x": tensor("M, K"), "eye": tensor("K, 2*H*P"), "pattern": tensor("2*P"), "tile": tensor("M, 2*P"),
    "half": tensor("P", "fp32"), "positions": tensor("M", "int64"), "hours": tensor("M", "fp32"),
}  # fmt: skip


def heads(dtypes: dict[str, str], *lines: str) -> tuple[Tensors, torch.Tensor, Tensors]:
    """Return the outputs, the exact tile of the gemm, and the inputs. The tile is split into heads, so its
    shape is [M, 3, 4]."""
    outputs = {n: tensor(shape, "fp32") for n, shape in dtypes.items()}
    declared = signature(HEADS, outputs, ("P",))
    inputs = draw(declared, {"M": 6, "K": 12, "H": 3, "P": 2})
    inputs["eye"] = torch.eye(12).bfloat16()
    got = interpret(trace(declared, "t = gemm(x, eye)", *lines), inputs)
    return got, inputs["x"].float().unflatten(1, (3, 4)), inputs


def test_head_sums_are_of_each_head_and_final_at_once() -> None:
    got, t, _ = heads(
        {"s": "M, H", "narrow": "M, 2*H", "o": "M, 2*H*P"},
        "s = head_sums(t, 2 * P)",
        "return {'s': s, 'narrow': head_sums(t * t, P) / P, 'o': t - per_head(s / (2 * P))}",
    )
    torch.testing.assert_close(got["s"], t.sum(-1))
    torch.testing.assert_close(got["narrow"], t.flatten(1).square().unflatten(1, (6, 2)).mean(-1))
    torch.testing.assert_close(got["o"], torch.cat([h - h.mean(1, keepdim=True) for h in t.unbind(1)], 1))


def test_per_head_spreads_and_repeats() -> None:
    got, t, given = heads(
        {"a": "M, 2*H*P", "b": "M, 2*H*P", "c": "M, 2*H*P", "d": "M, H*P"},
        "even, odd = pairs(per_head(tile))",
        "p, q = pairs(t)",
        "return {'a': t * 0 + per_head(head_sums(t, 2 * P) * 0 + per_row(hours)), 'b': t * per_head(pattern),"
        " 'c': t * per_head(tile), 'd': p * odd + q * even + per_head(half)}",
    )
    assert torch.equal(got["a"], given["hours"][:, None].expand(6, 12))
    assert torch.equal(got["b"], (t * given["pattern"].float()).flatten(1))
    assert torch.equal(got["c"], (t * given["tile"].float()[:, None, :]).flatten(1))
    flipped = given["tile"].float().unflatten(1, (1, 2, 2)).flip(-1)
    crossed = (t.unflatten(2, (2, 2)) * flipped).sum(-1) + given["half"]
    torch.testing.assert_close(got["d"], crossed.flatten(1))


@pytest.mark.parametrize("positions", ["positions", "hours"])
def test_rope_is_a_rotation_of_complex_numbers(positions: str) -> None:
    lines = (f"o = rope(t, {positions}, half)", f"return {{'o': o, 'back': rope(o, {positions}, -half)}}")
    got, t, given = heads({"o": "M, 2*H*P", "back": "M, 2*H*P"}, *lines)
    angle = torch.outer(given[positions].double(), given["half"].double())
    expected = turned(t.double(), torch.exp(1j * angle))
    torch.testing.assert_close(got["o"].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["back"], t.flatten(1), rtol=1e-5, atol=1e-6)


def test_a_scalar_input_enters_tiles_and_vectors() -> None:
    inputs, exact = products()
    inputs["alpha"] = torch.tensor(-0.375)
    declared = signature(
        EYE | {"alpha": tensor("", "fp32")}, {"o": tensor("M, N", "fp32"), "s": tensor("M", "fp32")}
    )
    lines = ("h = gemm(x, eye) * per_row(v)", "return {'o': h * alpha + exp(alpha), 's': v / alpha}")
    got = interpret(trace(declared, *lines), inputs)
    torch.testing.assert_close(got["o"], exact * -0.375 + torch.tensor(-0.375).exp())
    torch.testing.assert_close(got["s"], inputs["v"] / -0.375)


def test_fp8_operands_are_read_exactly() -> None:
    """All 254 finite e4m3 codes pass through a gemm whose other operand is the identity."""
    codes = torch.tensor([c for c in range(256) if c not in (127, 255)], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    inputs = {"x": torch.eye(254).to(torch.float8_e4m3fn), "w": values[None, :]}
    declared = signature(
        {"x": tensor("M, K", "fp8_e4m3"), "w": tensor("N, K", "fp8_e4m3")}, {"o": tensor("M, N", "fp32")}
    )
    got = interpret(trace(declared, "return {'o': gemm(x, w.mT)}"), inputs)["o"][:, 0]
    sign, exponent, mantissa = codes // 128, codes // 8 % 16, codes % 8
    magnitude = [
        (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
        for e, m in zip(exponent.tolist(), mantissa.tolist(), strict=True)
    ]
    expected = torch.tensor([-v if s else v for s, v in zip(sign.tolist(), magnitude, strict=True)])
    assert torch.equal(got, expected)


def test_integers_are_numbers_in_vectors_and_tiles() -> None:
    inputs, exact = products()
    inputs["index"] = torch.arange(-3, 13)
    declared = signature(
        EYE | {"index": tensor("M", "int64")}, {"o": tensor("M, N", "fp32"), "s": tensor("M", "fp32")}
    )
    lines = (
        "h = gemm(x, eye) * per_row(v)",
        "return {'o': h + (column_index(h) == per_row(index)) * 100, 's': index * 0.5}",
    )
    got = interpret(trace(declared, *lines), inputs)
    assert got["s"].tolist() == [i / 2 for i in range(-3, 13)]
    marked = exact.clone()
    for row, column in enumerate(range(-3, 13)):
        if 0 <= column < 8:
            marked[row, column] += 100
    assert torch.equal(got["o"], marked)
