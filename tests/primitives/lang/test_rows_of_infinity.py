"""Rows of -inf, as in masked logits, give correct reductions in the interpreter, in lowered text and in the
finishing kernels."""

from __future__ import annotations

import ast
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkout import ROOT
from kernels import Tensors, draw, run_lowered, signature, tensor, trace
from machine import fp32

from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program

DECLARED = signature(
    {"x": tensor("M, K"), "w": tensor("N, K"), "mask": tensor("M, N", "fp32"), "index": tensor("M", "int64")},
    {n: tensor("M", "fp32") for n in ("lse", "peak", "picked", "gap")},
)
MASKED = trace(
    DECLARED,
    "t = gemm(x, w.mT) + mask",
    "lse, peak, picked = row_logsumexp(t), row_max(t), row_select(t, index)",
    "return {'lse': lse, 'peak': peak, 'picked': picked, 'gap': peak - picked}",
)
RUNS: dict[str, Callable[[Program, Tensors], Tensors]] = {"interpreted": interpret, "lowered": run_lowered}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("columns", [8, 40])
def test_rows_of_minus_infinity(run: Callable[[Program, Tensors], Tensors], columns: int) -> None:
    inputs = draw(DECLARED, {"M": 6, "K": 8, "N": columns})
    inputs["mask"] = torch.zeros(6, columns)
    inputs["mask"][:4] = -math.inf
    inputs["mask"][3, 5] = 0.0  # one element of this row is finite
    inputs["index"] = torch.tensor([0, columns - 1, -100, 5, 4, columns])
    got = run(MASKED, inputs)
    t = inputs["x"].float() @ inputs["w"].float().mT + inputs["mask"]
    assert got["lse"][:3].tolist() == got["peak"][:3].tolist() == [-math.inf] * 3
    torch.testing.assert_close(got["lse"], t.logsumexp(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got["peak"], t.amax(1), rtol=1e-5, atol=1e-5)
    expected = [-math.inf, -math.inf, 0.0, float(t[3, 5]), float(t[4, 4]), 0.0]  # an ignored target gives 0
    torch.testing.assert_close(got["picked"], torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert got["gap"][:2].isnan().all() and got["gap"][2] == -math.inf  # inf - inf is nan, as in torch


def device_functions(name: str, **stand_ins: Any) -> dict[str, Any]:
    """Return the functions of a module of ``primitives/device``, by name. ``stand_ins`` are Python objects
    that replace the module's imports."""
    source = ROOT / "primitives" / "device" / f"{name}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    body = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)]
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
    made = dict(stand_ins)
    exec(compile(ast.Module(body, []), source.name, "exec"), made)
    return made


def test_partials_of_minus_infinity_are_finished() -> None:
    """In this test, one thread finishes a row: it combines all partials of the row in order. On a GPU, eight
    threads share the partials of a row."""
    cute = types.SimpleNamespace(math=types.SimpleNamespace(
        exp=lambda x, fastmath: torch.exp(x), log=lambda x, fastmath=True: torch.log(x)
    ))  # fmt: skip
    finish = device_functions(
        "finish",
        cute=cute,
        cutlass=types.SimpleNamespace(range=range),
        Float32=fp32,
        LOWEST=-math.inf,
        choose=lambda condition, a, b: torch.where(condition, fp32(a), fp32(b)),
        largest=lambda a, b: torch.fmax(fp32(a), fp32(b)),
    )
    finish.update(LANES=1, _across=lambda value, how: value)
    none, low = -math.inf, -3.0
    partials = torch.tensor([[[none] * 3, [none, low, none], [low, none, none], [1.0, 2.0, 3.0]]])
    for row, tiles in enumerate(partials[0]):
        lse = finish["finish_logsumexp"](partials, row, 0)
        torch.testing.assert_close(lse, tiles.logsumexp(0))
        assert finish["finish_row"](partials, row, 0, "max") == tiles.amax()
