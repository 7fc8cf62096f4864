"""A new reduction needs only one definition. After the reduction is registered, every part of the compiler
can use it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import minima
import pytest
import torch
from kernels import draw, kernel_names, run_lowered, signature, source, tensor

from coda_agent.agent.show.explain import steps
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.runtime.compile import _environment

pytestmark = pytest.mark.slow

# Reductions of a tile as wide as the GEMM, of one twice as wide, and of one half as wide. Because 9 is added,
# the values of a tile past the matrix's edge are not 0.
DECLARED = signature(
    {"x": tensor("M, K"), "w": tensor("2*F, K"), "r": tensor("M, 2*F")},
    {
        "least": tensor("M", "fp32"),
        "low": tensor("M", "fp32"),
        "each": tensor("2*F", "fp32"),
        "wide": tensor("4*F", "fp32"),
        "half": tensor("F", "fp32"),
    },
)
LINES = (
    "t = gemm(x, w.mT) + 9",
    "return {'least': row_min(t), 'low': row_min(join(t, r)) * 2 + t.columns, 'each': column_min(t),"
    " 'wide': column_min(join(t, r)), 'half': column_min(pairs(t)[1])}",
)
IMPORTED = ("column_min", "gemm", "join", "kernel", "pairs", "row_min")


def traced(declared: Signature, *lines: str) -> Program:
    body = source(declared, *lines).partition("@kernel")[2]
    return trace_source(f"from primitives import {', '.join(IMPORTED)}\n\n\n@kernel{body}", declared)


@pytest.fixture
def program() -> Iterator[Program]:
    with minima.registered():
        yield traced(DECLARED, *LINES)


@pytest.mark.parametrize("rows", [1, 13])
def test_its_text_computes_what_torch_says(program: Program, rows: int) -> None:
    inputs = draw(program.signature, {"M": rows, "K": 8, "F": 12}, 3)
    t = inputs["x"].float() @ inputs["w"].float().mT + 9
    joined = torch.stack((t, inputs["r"].float()), dim=-1).flatten(-2)
    meant = {
        "least": t.amin(1),
        "low": joined.amin(1) * 2 + 24,
        "each": t.amin(0),
        "wide": joined.amin(0),
        "half": t[:, 1::2].amin(0),
    }
    for got in (interpret(program, inputs), run_lowered(program, inputs)):
        torch.testing.assert_close(got, meant)


def test_words_for_people_follow(program: Program) -> None:
    said = [line.text for step in steps(program) for line in step.lines]
    assert any("row_min(" in text for text in said) and any("-max(partials" in text for text in said)


def test_it_compiles_for_hopper(tmp_path: Path) -> None:
    outputs = {name: DECLARED.outputs[name] for name in ("least", "half")}
    inputs = {name: DECLARED.inputs[name] for name in ("x", "w")}
    declared = DECLARED._replace(inputs=inputs, outputs=outputs)
    with minima.registered():
        lines = (LINES[0], "return {'least': row_min(t), 'half': column_min(pairs(t)[1])}")
        program = traced(declared, *lines)
        lowered = lower(program)
    schedules = [[PROBES[0].to_json()] for _ in lowered.gemms]
    request = {"program": program.to_json(), "sizes": {}, "schedules": schedules, "raw": ""}
    done = subprocess.run(
        [sys.executable, minima.__file__, str(tmp_path)],
        input=json.dumps(request) + "\n",
        env=_environment() | {"CUTE_DSL_DUMP_DIR": str(tmp_path), "CUTE_DSL_KEEP_CUBIN": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert isinstance(answer, list), answer["error"]
    assert [found["kernel"] for found in answer] == kernel_names(lowered)
    assert answer[0]["hgmma"] > 0 and all(0 < found["registers"] <= 255 for found in answer)


def test_the_vocabulary_is_as_it_was(program: Program) -> None:
    assert "row_min" in OPERATIONS
    with pytest.raises(ValueError, match="'row_min' is defined twice"), minima.registered():
        pass
