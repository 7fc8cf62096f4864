"""The prompt pack: what an author is given, and nothing else.

The system text is a stable prefix (rules, the vocabulary's own docstrings, examples, tips), the task is
the spec. Nothing in it derives from the spec it is for: examples are other operators, and tips that
were learned on this spec are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import primitives
from agent.tips import Tip, read_tips

if TYPE_CHECKING:
    from verifier.report import Rejected
    from verifier.spec import Spec

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
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
  of scaling a tile before a gemm, scale that gemm's result. Statistics of heads (head_sums) alone are final
  within their step.
- Arithmetic is fp32 whatever the inputs' dtype; outputs are rounded once, to the spec's dtype. Do not
  round yourself: there are no casts.
- Fewer, larger fusions win: read each input once, reuse values (one sigmoid serves several uses).

Operators: `+ - * /`, unary minus, `** 2`, comparisons `< <= > >= == !=` (giving 1 or 0), with tiles,
vectors, scalars and Python numbers.
"""

ANSWER = """\
Answer with the whole kernel file in one ```python block. A sentence before it on your reasoning is welcome;
only the last ```python block counts.
"""


@dataclass(frozen=True)
class Prompt:
    """``system``: the stable prefix; ``task``: the first message."""

    system: str
    task: str

    def __str__(self) -> str:
        return f"{self.system}\n\n{self.task}"


def assemble(spec: Spec, text: str, tips: Iterable[Tip] | None = None) -> Prompt:
    """The prompt for a spec, ``text`` being its YAML. Tips default to those of tips_log.md."""
    known = read_tips() if tips is None else tips
    useful = [tip for tip in known if tip.spec != spec.name]
    parts = [ROLE, vocabulary(), examples(exclude=spec.name)]
    if useful:
        parts.append(
            "# Tips learned from earlier attempts\n\n" + "\n".join(f"- {tip.lesson}" for tip in useful)
        )
    return Prompt("\n\n".join(part.strip() for part in parts), task(spec, text))


def vocabulary() -> str:
    """The pages of all primitives: their signatures and docstrings, by family."""
    pages = ["# Vocabulary"]
    for family in FAMILIES:
        module = import_module(f"primitives.{family}")
        title = (inspect.getdoc(module) or "").partition("\n")[0]
        pages.append(f"## {title}")
        for name in primitives.__all__:
            primitive = getattr(primitives, name)
            if name != "kernel" and primitive.__module__ == module.__name__:
                pages.append(_page(name, primitive))
    return "\n\n".join(pages)


def _page(name: str, primitive: object) -> str:
    arguments = ", ".join(inspect.signature(primitive).parameters)  # type: ignore[arg-type]
    return f"### {name}({arguments})\n\n{inspect.getdoc(primitive)}"


def examples(exclude: str = "") -> str:
    """Worked examples: other operators' specs with kernels that the verifier accepts."""
    pages = ["# Examples"]
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if path.stem != exclude:
            kernel = path.with_suffix(".py").read_text(encoding="utf-8")
            pages.append(
                f"```yaml\n{path.read_text(encoding='utf-8').strip()}\n```\n\n```python\n{kernel.strip()}\n```"
            )
    return "\n\n".join(pages)


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
    """The verifier's words on a rejected attempt, as the next message."""
    place = f" (line {report.line} of your file)" if report.line else ""
    passed = ", ".join(g.gate for g in report.gates) or "none"
    return (
        f"Rejected at gate `{report.gate}`, reason `{report.code}`{place}:\n\n{report.message}\n\n"
        f"Gates passed before: {passed}.\n\n{ANSWER}"
    )
