"""Tests of the modules for plain PyTorch models. A Llama made of these modules loads the weights of Hugging
Face's Llama, and must compute the same results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import torch
from layer_parts import ACTIVATIONS, Counted
from small_models import VOCABULARY, tokens, trained
from torch import Tensor, nn
from torch.nn import functional as nn_f

from coda_agent.fused import modules

WIDTH, HIDDEN, HEADS, KV_HEADS, EPS = 32, 48, 4, 2, 1e-5


class PlainModel(nn.Module):
    """A Llama made of the modules of ``fused``. Its parameters have the same names as Hugging Face's."""

    def __init__(self, rotary: Any):
        super().__init__()
        self.model: Any = nn.Module()
        self.rotary = [rotary]  # in a list, so that PyTorch does not register it as a submodule
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        layers = (modules.DecoderLayer(WIDTH, HIDDEN, HEADS, KV_HEADS, eps=EPS) for _ in range(2))
        self.model.layers = nn.ModuleList(layers)
        head = modules.CausalHead(WIDTH, VOCABULARY, eps=EPS)
        self.model.norm, self.lm_head, self.head = head.norm, head.lm_head, head

    def stream(self, ids: Tensor) -> Tensor:
        x: Tensor = self.model.embed_tokens(ids)
        turns = self.rotary[0](x, torch.arange(ids.shape[1])[None])
        for layer in self.model.layers:
            x = layer(x, *turns)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        target = nn_f.pad(labels, (0, 1), value=-100)[:, 1:]
        return SimpleNamespace(loss=self.head(self.stream(input_ids), target))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return small_models.model("Llama")


@pytest.fixture
def ours(theirs: Any) -> PlainModel:
    made = PlainModel(theirs.model.rotary_emb)
    left = made.load_state_dict(theirs.state_dict(), strict=False)
    assert not left.unexpected_keys and all(name.startswith("head.") for name in left.missing_keys)
    return made


def test_loss_and_every_gradient_pass_the_error_gate(theirs: Any, ours: PlainModel) -> None:
    ids = tokens()
    exact = trained(small_models.model("Llama", torch.float64), ids)
    assert not small_models.faults(trained(ours, ids), exact, trained(theirs, ids))


def test_logits_are_the_models(theirs: Any, ours: PlainModel) -> None:
    ids = tokens()
    with torch.no_grad():
        assert torch.allclose(ours.head.logits(ours.stream(ids)), theirs(input_ids=ids).logits, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [True, False])
def test_an_mlp_is_pytorchs(activation: str, residual: bool) -> None:
    torch.manual_seed(0)
    mlp, norm = modules.MLP(WIDTH, HIDDEN, activation), nn.RMSNorm(WIDTH, eps=EPS)
    x = torch.randn(2, 5, WIDTH)
    z = mlp.up_proj(norm(x))
    if hasattr(mlp, "gate_proj"):
        z = torch.stack((mlp.gate_proj(norm(x)), z), -1).flatten(-2)
    plain = mlp.down_proj(ACTIVATIONS[activation](z)) + (x if residual else 0)
    assert torch.allclose(mlp(x, norm, residual), plain, atol=1e-5)


def test_a_layer_compiles_whole(ours: PlainModel) -> None:
    backend = Counted("eager")
    compiled = torch.compile(ours.stream, fullgraph=True, backend=backend, dynamic=True)
    for length in (3, 9, 12):
        ids = tokens(length=length)
        assert torch.allclose(compiled(ids), ours.stream(ids), atol=1e-5)
    assert backend.graphs == 1


def test_a_batch_without_a_target_has_gradients_of_zero() -> None:
    head, x = modules.CausalHead(WIDTH, VOCABULARY), torch.randn(3, WIDTH, requires_grad=True)
    loss = head(x, torch.full((3,), -100))
    loss.backward()
    assert loss.isnan() and x.grad is not None and not x.grad.any()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="'silu' is unknown; use one of .*swiglu"):
        modules.MLP(WIDTH, HIDDEN, "silu")
    with pytest.raises(ValueError, match="no tile suits heads of 72 columns"):
        modules.DecoderLayer(144, HIDDEN, 2)
    layer, x, angle = modules.DecoderLayer(32, HIDDEN, 2), torch.randn(1, 4, 32), torch.ones(4, 16)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"torch.float32, and do not follow autocast: convert the module"),
    ):
        layer(x, angle, angle)
    with pytest.raises(ValueError, match="the RMSNorm has eps=None"):
        modules.MLP(WIDTH, HIDDEN)(torch.randn(2, WIDTH), nn.RMSNorm(WIDTH))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: modules.Attention(32, 6, 4, 8), "6 query heads must be a positive multiple of 4 key heads"),
        (lambda: modules.Attention(32, 4, 0, 8), "multiple of 0 key heads"),
        (lambda: modules.DecoderLayer(32, 48, 3), "width 32 is no multiple of 3 heads: pass head_width"),
        (lambda: modules.DecoderLayer(32, 48, 0, head_width=8), "no multiple of 0 heads"),
        (lambda: modules.MLP(32, 44), "a weight of 44 x 32: both must be positive multiples of 8"),
        (lambda: modules.CausalHead(32, 0), "a weight of 0 x 32"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused_when_a_module_is_made(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_dtype_that_no_kernel_takes_is_refused_when_a_module_is_made() -> None:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(TypeError, match="kernels do not take torch.float64"):
            modules.MLP(32, 48)
    finally:
        torch.set_default_dtype(usual)
