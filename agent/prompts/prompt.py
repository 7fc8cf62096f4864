"""Assemble the prompt pack.

The system text is a stable prefix: rules, the vocabulary's own docstrings, examples, tips. The task is the
spec. No part derives from the spec it is for: examples are other operators, and tips learned on this spec are
left out. All of it fits a token budget.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent import primitives
from coda_agent.agent.tips import Tip, in_prompts, kept, read_tips

if TYPE_CHECKING:
    from coda_agent.verifier.report import Rejected
    from coda_agent.verifier.spec.model import Spec

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
BUDGET, TASK_BUDGET = 25_000, 3_000  # of the pack, and the task's share of it
CHARACTERS_A_TOKEN = 3.5  # for these prompts: English, YAML and Python
FAMILIES = ("tiles", "elementwise", "vectors", "reductions", "stateful")

ROLE = """\
You write CODA kernels for NVIDIA H100: a matrix product (GEMM) with the memory-bound operators around it
fused into its epilogue, where the output tile is still in registers. You answer with one small Python file
in the vocabulary below. A verifier traces it, checks it against PyTorch, compiles it for sm_90a and
measures it; what it finds wrong comes back to you, and you answer with the whole corrected file.

# Rules

- The file imports names with `from primitives import ...`, and defines exactly one function marked
  `@kernel`, with a docstring. No other import, no class, no string formatting, no attribute but .mT, .rows
  and .columns.
- The function's parameters are the spec's inputs, constants and static dims, all of them, by name. It
  returns a dict with exactly the spec's outputs. An output that `updates` an input is a value like any
  other; that input may then be read only where this output is computed, element by element.
- It is straight-line tensor code over whole matrices and vectors. Running it computes nothing: it writes
  down a program. There is no `if` on values (use where), no indexing, no in-place update.
- Kinds come from symbolic shapes. A 2-D value is a tile [M, N]; a 1-D input or a reduction is a vector; an
  input of shape [] is a scalar. A vector meets a tile only through per_row(v) (one value a row),
  per_column(v) (one value a column) or per_head(v) (repeated for each head). Vectors of one length, scalars
  and numbers combine freely.
- Each gemm starts a step. A tile expression is computed in the epilogue of the last gemm it needs, in fp32
  registers: loads and stores are implied. Tiles in a step have the gemm's rows, and half, once or twice
  its columns (pairs and join change the width).
- A tile built from inputs alone rides along in a step that loads all of those inputs anyway; otherwise it
  has no home and is refused.
- A tile that becomes a later gemm's operand is stored once in 16 bits; where its own step uses it, it is
  seen unrounded.
- Reductions along rows or columns are final only after their step: they may be returned, combined with
  other vectors, or spread in a *later* gemm's epilogue. A row scale commutes with the next matmul: instead
  of scaling a tile before a gemm, scale that gemm's result. Statistics of heads (head_sums,
  head_abs_max) alone are final within their step.
- Inputs are tried over their whole `domain`, far beyond what `init` draws: finite means any finite value, of
  either sign and any size. Do not clamp, mask or guard where the reference does not. Each side of a choice
  (where, comparisons, maximum, minimum, abs) must change some output somewhere in the domain, else it is
  refused; so is a choice by sizes and literals alone.
- Arithmetic is fp32 whatever the inputs' dtype; outputs are rounded once, to the spec's dtype. Do not
  round yourself: there are no casts. fp8 outputs saturate by themselves: multiply by the scale, no more.
- Costs on the pages below are machine instructions an element of a tile; MUFU instructions
  (special-function unit) run at an eighth of the others' rate. *Exact* is what reductions and outputs
  of fp32 or fp16 see; bf16 outputs see the coarser instructions of the hardware.
- Fewer, larger fusions win: read each input once, reuse values (one sigmoid serves several uses).

Operators: `+ - * /`, unary minus, `** 2`, comparisons `< <= > >= == !=` (giving 1 or 0), with tiles,
vectors, scalars and Python numbers.
"""

ANSWER = """\
Answer with the whole kernel file in one ```python block. A sentence before it on your reasoning is welcome;
only the last ```python block counts.
"""

TIPS_HEADING = "# Tips learned from earlier attempts\n\n"


@dataclass(frozen=True)
class Prompt:
    """``system``: the stable prefix; ``task``: the first message."""

    system: str
    task: str

    def __str__(self) -> str:
        return f"{self.system}\n\n{self.task}"


def assemble(spec: Spec, text: str, tips: Iterable[Tip] | None = None) -> Prompt:
    """The prompt for a spec, with its YAML as ``text``. Tips default to tips_log.md. Only accepted tips
    count; the least helpful are dropped if the budget is short."""
    parts = [ROLE, vocabulary(), examples(exclude=spec.name)]
    words = task(spec, text)
    known = in_prompts(read_tips() if tips is None else tips)
    # Dropped before the spec's own are left out, so that all specs' prompts share one prefix.
    shared = kept(known, _room([*parts[:2], examples()], TASK_BUDGET))
    useful = kept((tip for tip in shared if spec.name not in tip.specs), _room(parts, tokens(words)))
    if useful:
        parts.append(lessons(useful))
    return Prompt("\n\n".join(part.strip() for part in parts), words)


def lessons(tips: Iterable[Tip]) -> str:
    """The lessons of earlier attempts in the form of the prompt."""
    return TIPS_HEADING + "\n".join(f"- {tip.lesson}" for tip in tips)


def tokens(text: str) -> int:
    """An estimate of a text's tokens."""
    return ceil(len(text) / CHARACTERS_A_TOKEN)


def _room(parts: Iterable[str], reserved: int) -> int:
    """Characters left for tips besides parts of the prefix, with ``reserved`` tokens for the task."""
    beside = "\n\n".join([*(part.strip() for part in parts), TIPS_HEADING, ""])
    return int((BUDGET - reserved) * CHARACTERS_A_TOKEN) - len(beside)


def vocabulary() -> str:
    """The pages of all primitives: signatures and docstrings, by family."""
    pages = ["# Vocabulary"]
    for family in FAMILIES:
        module = import_module(f"coda_agent.primitives.lang.ops.{family}")
        title = (inspect.getdoc(module) or "").partition("\n")[0]
        pages.append(f"## {title}")
        for name in primitives.__all__:
            primitive = getattr(primitives, name)
            if name != "kernel" and primitive.__module__ == module.__name__:
                pages.append(_page(name, primitive))
    return "\n\n".join(pages)


def read(name: str, exclude: str = "") -> str | None:
    """A primitive's page or a worked example, by name; None for an unknown name. ``exclude``: as for
    examples."""
    if name in primitives.__all__ and name != "kernel":
        return _page(name, getattr(primitives, name))
    named = [path for path in EXAMPLES.glob("*.yaml") if path.stem == name != exclude]
    return _example(named[0]) if named else None


def _page(name: str, primitive: object) -> str:
    arguments = ", ".join(inspect.signature(primitive).parameters)  # type: ignore[arg-type]
    return f"### {name}({arguments})\n\n{inspect.getdoc(primitive)}"


def examples(exclude: str = "") -> str:
    """Worked examples: other operators' specs with kernels that the verifier accepts."""
    pages = ["# Examples"]
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if path.stem != exclude:
            pages.append(_example(path))
    return "\n\n".join(pages)


def _example(path: Path) -> str:
    spec, kernel = (p.read_text(encoding="utf-8").strip() for p in (path, path.with_suffix(".py")))
    return f"```yaml\n{spec}\n```\n\n```python\n{kernel}\n```"


def task(spec: Spec, text: str) -> str:
    """The first message: the spec, and how to answer."""
    parameters = ", ".join([*spec.inputs, *spec.constants, *spec.static])
    return (
        "Write the kernel for this spec. In `reference`, torch and torch.nn.functional names are in scope;\n"
        f"it is the mathematics, not the way to compute it.\n\n```yaml\n{text.strip()}\n```\n\n"
        f"The function: `def {spec.name}({parameters})`, returning a dict of "
        f"{', '.join(spec.outputs)}.\n\n{ANSWER}"
    )


def feedback(report: Rejected) -> str:
    """The verifier's message on a rejected attempt, as the next message."""
    return f"{rejection(report)}\n\n{ANSWER}"


def rejection(report: Rejected) -> str:
    """The verifier's message on a rejected source."""
    place = f" (line {report.line} of your file)" if report.line else ""
    passed = ", ".join(g.gate for g in report.gates) or "none"
    return (
        f"Rejected at gate `{report.gate}`, reason `{report.code}`{place}:\n\n{report.message}\n\n"
        f"Gates passed before: {passed}."
    )
