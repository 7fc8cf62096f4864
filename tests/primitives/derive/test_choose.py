"""The choices of a derived backward: which values it stores or recomputes, how many bytes it moves, and which
step computes each sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derived import backward, error, evaluate
from kernels import signature, tensor, trace

from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.derive import Derived, chains, derive, ledger
from coda_agent.primitives.derive.arrange import BackwardPlan, PlannedBackward
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut

SIZES = {"M": 16384, "D": 2048, "F": 5632}
SMALL = {"M": 6, "D": 8, "F": 10}
WRT = ["h", "gamma", "w_up", "w_down"]
ITEM = 2  # bytes of a bf16 value


def mlp(rows: int = SIZES["M"], **asked: Any) -> tuple[Program, Derived]:
    program = chains.mlp().program("mlp")
    return program, derive(program, SIZES | {"M": rows}, wrt=WRT, of=["out"], **asked)


def agrees(program: Program, derived: Derived) -> bool:
    """Return whether the derived gradients equal autograd's."""
    random = torch.Generator().manual_seed(0)
    leaves = {
        n: torch.randn([d(SMALL) for d in t.shape], generator=random, dtype=torch.float64)
        for n, t in program.signature.inputs.items()
    }
    leaves |= {n: leaves[n].requires_grad_() for n in WRT} | {"eps": torch.tensor(1e-6)}
    outputs = evaluate(program, leaves, SMALL)
    coming = torch.randn(outputs["out"].shape, generator=random, dtype=torch.float64)
    truth = torch.autograd.grad(outputs["out"], [leaves[n] for n in WRT], coming)
    memory = leaves | outputs | {"d_out": coming} | {f"sum_{n}": torch.zeros_like(leaves[n]) for n in WRT}
    found = backward(program, derived, {n: t.detach() for n, t in memory.items()}, SMALL)
    return all(error(found[f"d_{n}"], t) < 1e-11 for n, t in zip(WRT, truth, strict=True))


@pytest.mark.parametrize(("rows", "beside", "stored"), [(16384, "h", "d_h"), (2**20, "w_up", "d_w_up")])
def test_the_norm_weights_gradient_rides_where_it_moves_least(rows: int, beside: str, stored: str) -> None:
    """There are two ways to compute dgamma, and derive takes the way that moves fewer bytes.

    One way is ``column_sums(d * h)``, with the product ``d = dzs @ w_up``. The step of d then also reads h,
    and writes sums for each tile of rows. The other way is ``column_sums(p * w_up)``, with the product
    ``p = dzs' @ h``. The step of p then also reads the weight.
    """
    _, derived = mlp(rows)
    program = derived.program
    assert program is not None
    nodes, outputs = program.nodes, program.outputs
    (summed,) = nodes[outputs["d_gamma"]].args
    assert nodes[outputs["d_gamma"]].op == "column_sums"
    product, other = (nodes[i] for i in nodes[summed].args)
    assert (nodes[summed].op, product.op, other.attribute) == ("multiply", "gemm", beside)
    step = next(s for s in cut(program).gemms if nodes[s.gemm] == product)
    assert step.stores == [outputs[stored]] and step.reductions == [outputs["d_gamma"]]


def test_one_value_in_place_of_another_is_tried() -> None:
    """If the limit has room for act but for nothing else, act is stored. Storing the smaller hg would save as
    many FLOPs but fewer bytes."""
    program, derived = mlp(save_bytes=12_000)
    assert "act" in derived.stored and not derived.saves and agrees(program, derived)


def test_a_whole_layer_takes_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan costs about ten milliseconds, and a derivation should take less than a second."""
    tried: list[BackwardPlan] = []
    made = PlannedBackward.derive

    def derive_and_count(attempt: PlannedBackward) -> Derived:
        tried.append(attempt.plan)
        return made(attempt)

    monkeypatch.setattr(PlannedBackward, "derive", derive_and_count)
    program = chains.between_attentions().program("layer")
    sizes = SIZES | {"A": 2048, "H": 96, "P": 32}
    wrt = [n for n in program.signature.inputs if n not in ("eps", "turned", "cos_sin")]
    derive(program, sizes, wrt=wrt, of=["out", "qkv"], save_bytes=26_000)
    assert len(tried) == len(set(tried)) < 100


def test_the_ledger_is_the_rooflines() -> None:
    _, derived = mlp()
    assert derived.program is not None
    floor, count = roofline(derived.program, SIZES), ledger.count(derived.program, None, SIZES)
    assert (count.moved, count.flops) == (floor.bytes, floor.flops)
    assert count.least < count.moved


def test_no_plan_is_below_the_bound() -> None:
    for limit in (None, 0, 10**9):
        _, derived = mlp(save_bytes=limit)
        assert derived.program is not None
        count = ledger.count(derived.program, derived.head, SIZES)
        assert derived.bound.flops <= count.flops and derived.bound.least <= count.least
        products = 2 * SIZES["M"] * SIZES["D"] * SIZES["F"]
        assert derived.bound.flops == 6 * products  # each of the three [D, F] weights has two products


@pytest.mark.parametrize(
    ("limit", "again"),
    [
        (None, set()),
        (2 * 3 * 5632 + 4, set()),
        (2 * 2 * 5632 + 4, {"act"}),  # z and rstd are stored
        (4, {"act", "z"}),  # only rstd is stored
    ],
)
def test_what_is_stored_fits_the_limit(limit: int | None, again: set[str]) -> None:
    program, derived = mlp(save_bytes=limit)
    assert {n for n in derived.recomputed if n in program.outputs} == again
    assert not again & set(derived.stored)
    assert agrees(program, derived)


def test_a_limit_that_cannot_be_met_says_what_can() -> None:
    program = chains.loss().program("loss")
    with pytest.raises(ProgramError) as refused:
        derive(program, {"M": 64, "D": 32, "V": 128}, wrt=["w"], of=["rest_lse"], save_bytes=3)
    assert refused.value.code == "save_bytes" and "\n" not in refused.value.message


@pytest.mark.parametrize("column", ["a", "z"])
def test_rows_are_those_of_a_tile(column: str) -> None:
    """The limit on bytes per row does not depend on the order of the outputs' names."""
    outputs = {column: tensor("N", "fp32"), "y": tensor("M, N")}
    own = signature({"x": tensor("M, K"), "w": tensor("N, K")}, dict(sorted(outputs.items())))
    lines = ("t = gemm(x, w.mT)", f"return {{{column!r}: column_sums(t * t), 'y': tanh(t)}}")
    program = Program.from_json(trace(own, *lines).to_json())
    derived = derive(program, {"M": 4096, "N": 256, "K": 256}, save_bytes=1000, recompute=["y"])
    assert [program.nodes[i].op for i in derived.saves.values()] == ["gemm"]


def test_what_is_saved_and_recomputed_is_refused() -> None:
    own = signature({"x": tensor("M, K"), "w": tensor("N, K")}, {"y": tensor("M, N")})
    program = trace(own, "return {'y': tanh(gemm(x, w.mT))}")
    with pytest.raises(ProgramError, match="'y' is to be stored, and not to be"):
        derive(program, {"M": 8, "N": 8, "K": 8}, save=["y"], recompute=["y"])
    with pytest.raises(ProgramError, match="no output or node 'node ²'"):
        derive(program, {"M": 8, "N": 8, "K": 8}, save=["node ²"])


def test_the_choice_can_be_forced() -> None:
    program, derived = mlp(recompute=["act"])
    assert "act" in derived.recomputed and "act" not in derived.stored and agrees(program, derived)
    product = next(i for i, n in enumerate(program.nodes) if n.op == "gemm")
    program, derived = mlp(save=[f"node {product}"], recompute=["z"])
    assert list(derived.saves.values()) == [product] and "z" not in derived.stored
    assert agrees(program, derived)


@pytest.mark.parametrize("name", ["q", "node 99", "h", "node 0"])
def test_only_what_the_forward_computes_can_be_forced(name: str) -> None:
    with pytest.raises(ProgramError) as refused:
        mlp(save=[name])
    assert refused.value.code == "save"


def test_weight_gradients_are_added_to_a_buffer() -> None:
    program, derived = mlp(accumulate=["w_up", "w_down", "gamma"])
    made = derived.program
    assert made is not None
    updates = {"d_w_up": "sum_w_up", "d_w_down": "sum_w_down", "d_gamma": "sum_gamma"}
    assert made.signature.updates == updates
    assert {made.signature.outputs[n].dtype for n in updates} == {"fp32"}
    assert len(cut(made).gemms) == 4 and lower(made).text
    assert agrees(program, derived)


def test_a_gradient_without_a_product_is_added_to_no_buffer() -> None:
    program = chains.attention_out().program("out")
    with pytest.raises(ProgramError) as refused:
        derive(program, {"M": 8, "A": 8, "D": 8}, accumulate=["x"])
    assert refused.value.code == "accumulate"
