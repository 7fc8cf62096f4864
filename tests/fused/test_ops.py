"""Tests of the operators of accepted kernels: order, shapes, dtypes, opcheck, and refused inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkout import ROOT
from layer_parts import Where

from coda_agent.fused import ops, programs
from coda_agent.fused.programs import Order
from coda_agent.primitives.lang.interpret import interpret, torch_dtype
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.values import trial
from coda_agent.verifier.spec.model import Spec

NAMES = sorted(programs.accepted())


def on_gpu(spec: Spec) -> dict[str, int]:
    """Return small sizes at which kernels can be launched."""
    return {dim: {"M": 200, "H": 6, "G": 2, "P": 32}.get(dim, 272) for dim in spec.dims}


def drawn(name: str, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """Return the operator of the kernel ``name``, and a dict with the operator's arguments in their order.
    The sizes are small; if ``device`` is cuda, the kernel can be launched at these sizes."""
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    sizes, inputs = trial(spec)
    if device == "cuda":
        sizes, inputs = on_gpu(spec), draw(spec, on_gpu(spec), seed=1, device=device)
    given = {n: inputs[n].to(torch_dtype(t.dtype)) for n, t in spec.inputs.items()}
    op = getattr(torch.ops.coda_agent, name).default
    dims = {dim: sizes[dim] for dim in ops.defined[name].program.signature.named}
    return op, {n: t if t.ndim else float(t) for n, t in given.items()} | dims


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_takes_and_gives_what_its_spec_says_in_order(name: str) -> None:
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    op, inputs = drawn(name)
    dims = ops.defined[name].program.signature.named
    assert [a.name for a in op._schema.arguments] == [*spec.inputs, *dims]
    found = op(*inputs.values())
    found = found if isinstance(found, tuple) else (found,)
    whole = {n: torch.as_tensor(v) for n, v in inputs.items() if n in spec.inputs}
    exact = interpret(ops.defined[name].program, whole, sizes={dim: inputs[dim] for dim in dims})
    assert len(found) == len(spec.outputs)
    for tensor, output in zip(found, spec.outputs, strict=True):
        assert torch.equal(tensor, exact[output]) and tensor.dtype == exact[output].dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_passes(name: str, where: Where) -> None:
    op, inputs = drawn(name, where.device)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if "fp8" in name:  # test_schema multiplies its inputs, and a CPU cannot multiply fp8
        utils.remove("test_schema")
    done = torch.library.opcheck(op, tuple(inputs.values()), test_utils=utils)
    assert done == dict.fromkeys(utils, "SUCCESS")


def swiglu(dtype: torch.dtype, rows: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 16), (64, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes] + [torch.rand(rows)]


def test_matrices_may_all_be_of_another_float_dtype() -> None:
    op = torch.ops.coda_agent.gemm_rmsnorm_swiglu
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w, rstd = swiglu(dtype)
        preact, act = op(x, w, rstd)
        assert preact.dtype == act.dtype == dtype
        wide = (x.double() @ w.double().mT) * rstd.double()[:, None]
        assert torch.allclose(preact.double(), wide, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_mixed_dtypes_are_refused_with_the_place() -> None:
    x, w, rstd = swiglu(torch.bfloat16)
    with pytest.raises(TypeError, match=r"w is torch.float32, but must be torch.bfloat16"):
        torch.ops.coda_agent.gemm_rmsnorm_swiglu(x, w.float(), rstd)
    with pytest.raises(TypeError, match=r"rstd is torch.bfloat16, but must be torch.float32"):
        torch.ops.coda_agent.gemm_rmsnorm_swiglu(x, w, rstd.bfloat16())


def test_a_tensor_that_requires_grad_is_refused_while_gradients_are_recorded() -> None:
    x, w, rstd = swiglu(torch.bfloat16)
    with pytest.raises(ops.NoBackward, match="w requires grad"):
        torch.ops.coda_agent.gemm_rmsnorm_swiglu(x, w.requires_grad_(), rstd)
    with torch.no_grad():
        torch.ops.coda_agent.gemm_rmsnorm_swiglu(x, w, rstd)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_operator_does_not_drop_a_gradient(backend: str) -> None:
    torch._dynamo.reset()
    x, w, rstd = swiglu(torch.bfloat16)
    op = torch.ops.coda_agent.gemm_rmsnorm_swiglu
    compiled = torch.compile(lambda *given: op(*given)[1].float().sum(), backend=backend)
    usual = compiled(x, w, rstd)
    with pytest.raises(Exception, match="w requires grad, and this operator has no backward"):
        compiled(x, w.requires_grad_(), rstd).backward()
    with torch.no_grad():
        assert torch.equal(compiled(x, w, rstd), usual)


def test_strided_inputs_give_the_same_numbers() -> None:
    x, w, rstd = swiglu(torch.bfloat16)
    op = torch.ops.coda_agent.gemm_rmsnorm_swiglu
    for strided, plain in zip(op(x.mT.contiguous().mT, w, rstd), op(x, w, rstd), strict=True):
        assert torch.equal(strided, plain)


def test_a_name_is_one_program_s() -> None:
    other = ops.defined["gemm_swiglu"].program
    with pytest.raises(ValueError, match="another program already defines operator gemm_geglu"):
        ops.define(other, Order(("x", "w"), ("preact", "act")), "gemm_geglu")


def test_an_operator_is_compiled_whole_for_any_rows() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def layer(x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> Any:
        return torch.ops.coda_agent.gemm_rmsnorm_swiglu(x, w, rstd)

    called = torch.compile(layer, backend=count, fullgraph=True)
    for rows in (8, 16, 24, 40, 56):
        given = swiglu(torch.bfloat16, rows)
        for mine, plain in zip(called(*given), torch.ops.coda_agent.gemm_rmsnorm_swiglu(*given), strict=True):
            assert torch.equal(mine, plain)
    assert len(graphs) <= 2  # one graph for the first number of rows, one for any other number


def test_dims_that_follow_from_no_shape_are_integers_and_graphs_take_any_rows() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    op = torch.ops.coda_agent.gemm_rmsnorm_qkv_rope
    compiled = torch.compile(lambda *given: op(*given), backend="aot_eager", fullgraph=True)
    w = torch.randn(10 * 4, 16).bfloat16()
    for rows in (8, 16, 24, 40, 56):
        given = torch.randn(rows, 16).bfloat16(), w, torch.rand(rows), torch.rand(rows, 4).bfloat16()
        q, k, v = op(*given, 4, 3)
        assert (q.shape, k.shape, v.shape) == ((rows, 16), (rows, 12), (rows, 12))
        for mine, plain in zip(compiled(*given, 4, 3), (q, k, v), strict=True):
            assert torch.equal(mine, plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    with pytest.raises(ValueError, match="input 'w' has shape"):
        op(*given, 4, 4)
