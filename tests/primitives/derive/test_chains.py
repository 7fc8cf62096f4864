"""The derived backwards of the Transformer's chains agree with fp64 autograd and have the expected number of
products."""

from __future__ import annotations

import pytest
import torch
from derived import backward, error, evaluate

from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.derive import chains, derive
from coda_agent.primitives.lang.partition import cut

SIZES = {"M": 6, "D": 8, "F": 10, "A": 8, "H": 3, "P": 4, "V": 12}
CHAINS = {
    "mlp": (chains.mlp(), ("out",), 4),
    "mlp_geglu": (chains.mlp("geglu"), ("out",), 4),
    "mlp_gelu": (chains.mlp("gelu"), ("out",), 4),
    "mlp_relu2": (chains.mlp("relu2"), ("out",), 4),
    "attention_in_bias": (chains.attention_in(bias=True), ("qkv",), 3),
    "loss": (chains.loss(), ("rest_lse", "target_logit"), 3),
    "attention_out": (chains.attention_out(), ("h",), 2),
    "attention_in": (chains.attention_in(), ("qkv",), 2),
    "between_attentions": (chains.between_attentions(), ("out", "qkv"), 8),
}
FIXED = ("eps", "turned", "cos_sin", "target")  # inputs whose gradients are not requested


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_has_the_gradients_of_autograd(name: str) -> None:
    chain, of, products = CHAINS[name]
    program = chain.program(name)
    wrt = [n for n in program.signature.inputs if n not in FIXED]
    derived = derive(program, SIZES, wrt=wrt, of=of)
    assert derived.program and not derived.saves and not derived.left
    assert len(cut(derived.program).gemms) == products and lower(derived.program).text
    random = torch.Generator().manual_seed(0)
    leaves = {
        n: torch.randn([d(SIZES) for d in t.shape], generator=random, dtype=torch.float64)
        for n, t in program.signature.inputs.items()
    }
    leaves["target"] = torch.tensor([0, 3, -100, 11, 40, 2])
    leaves |= {"eps": torch.tensor(1e-6), "turned": torch.tensor(16.0)}
    outputs = evaluate(program, leaves | {n: leaves[n].requires_grad_() for n in wrt}, SIZES)
    coming = {n: torch.randn(outputs[n].shape, generator=random, dtype=torch.float64) for n in of}
    truth = torch.autograd.grad([outputs[n] for n in of], [leaves[n] for n in wrt], list(coming.values()))
    memory = leaves | outputs | {f"d_{n}": t for n, t in coming.items()}
    found = backward(program, derived, {n: t.detach() for n, t in memory.items()}, SIZES)
    for each, expected in zip(wrt, truth, strict=True):
        assert error(found[f"d_{each}"], expected) < 1e-11, each
