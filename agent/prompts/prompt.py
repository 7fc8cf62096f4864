"""Assemble the prompt.

The prompt begins with the system text, a stable prefix: rules, the vocabulary's docstrings, examples and
tips. The task, which contains the spec, follows. Nothing in the prefix is derived from the spec: the examples
show other operators, and tips learned from this spec are left out. The whole prompt fits a token budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.agent.prompts.vocabulary import page, primitive_names, vocabulary
from coda_agent.agent.tips import Tip, fitting, in_prompts, read_tips

if TYPE_CHECKING:
    from coda_agent.verifier.report import Rejected
    from coda_agent.verifier.spec.model import Spec

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
BUDGET, TASK_BUDGET = 25_000, 3_000  # limits in tokens: the whole prompt, and the task as a part of it
# parts of a spec that an example does not need
INIT = re.compile(r", +(init: \{([^{}]|\{[^{}]*\})*\}|domain: \w+)")
CHARACTERS_A_TOKEN = 3.5  # an estimate for these prompts, which are English, YAML and Python

ROLE = """\
You write CODA kernels for NVIDIA H100: a matrix product (GEMM) with the memory-bound operators around it
fused into its epilogue, where the output tile is still in registers. You answer with one small Python file
in the vocabulary below. A verifier checks it against PyTorch, compiles it for sm_90a and, on a GPU,
measures it.

# Rules

- The file imports names with `from primitives import ...` and defines one function marked `@kernel`, with a
  docstring. Its parameters are the spec's inputs, constants and static dims (both plain numbers), by name;
  some may go unused. It returns a dict of the spec's outputs. No other import, no class, string
  formatting, indexing, in-place update or `if` on values; no attribute but .mT of an input, and .rows and
  .columns of a tile (numbers).
- It is straight-line tensor code. Loads, stores, ragged edges and tile sizes are automatic.
- A 2-D value is a tile [M, N]; a 1-D input or a reduction is a vector; an input of shape [] is a scalar.
  Scalars and numbers combine with all values. A vector combines with vectors of its length, and with a tile
  only through per_row, per_column or per_head, which take expressions too.
- Each gemm starts a step. A tile expression is computed in the epilogue of the last gemm it needs. Its tiles
  have the gemm's rows, and half, once or twice its columns (pairs, join). A tile computed from inputs alone
  needs a step that loads all of these inputs anyway.
- A tile that is a later gemm's operand is stored once in 16 bits. Its own step uses it unrounded, as it does
  every output.
- Reductions along rows or columns are final after their step: return them, combine them with vectors, or
  spread them in a *later* gemm's epilogue. A row scale commutes with the next matmul: scale that gemm's
  result, not its operand. Statistics of heads are final within their step.
- An output that `updates` an input is a value like any other; read that input only where this output is
  computed, element by element.
- Arithmetic is fp32; an output is rounded once, to the spec's dtype; there are no casts. fp8 outputs saturate
  by themselves: multiply by the scale, no more.
- Accuracy is judged against fp64, at tiny sizes too, over each input's whole `domain`; *finite* is any sign
  and size, without NaN and infinity. The error may be 1.25 times that of the reference in fp32, rounded once
  (fp32 outputs: 4 times). Before rounding it may be 16 times, and each value must be right to 3 %. Cut no
  tail. Near 0, use no form that cancels, as exp(t) - 1 or log(1 + t) does, but a series to 1e-6, by where.
  Overflow only where the reference in fp32 does: inputs are tried at 2**16 times their usual size.
- Do not clamp, mask or guard where the reference does not. Each side of a choice (where, comparisons,
  maximum, minimum, abs) must change an output somewhere in the domain. Only in_columns may choose by sizes.
- Speed: `accept` is the speedup over the best torch.compile that every case not marked `bench` must reach.
  Fewer steps win; read each input once, compute each value once.
- Costs are machine instructions per element of a tile; MUFU ones run at an eighth of the rate. The compiler
  uses the *exact* form for reductions, fp32 and fp16 outputs and all values that these use, and the cheap
  form elsewhere. `+ - *`, comparisons and `** 2` cost 1, a multiply-add 1, `/` 15 with 1 MUFU: divide vectors
  and statistics (once per row or head), and multiply tiles. Loading a tile costs 5.

Operators: `+ - * /`, unary minus, `** 2`, comparisons (1 or 0).
"""

ANSWER = """\
Answer with the whole kernel file in one ```python block. A sentence before it on your reasoning is welcome;
only the last ```python block counts.
"""

TIPS_HEADING = "# Tips learned from earlier attempts\n\n"


@dataclass(frozen=True)
class Prompt:
    """The prompt of a run. ``system``: the stable prefix. ``task``: the first message."""

    system: str
    task: str

    def __str__(self) -> str:
        return f"{self.system}\n\n{self.task}"


def assemble(spec: Spec, text: str, tips: Iterable[Tip] | None = None) -> Prompt:
    """The prompt for a spec, whose YAML is ``text``. Tips come from tips_log.md by default. Only accepted
    tips are used. If the budget is too small for all tips, the least helpful tips are dropped."""
    parts = [ROLE, vocabulary(), examples(exclude=spec.name)]
    words = task(spec, text)
    known = in_prompts(read_tips() if tips is None else tips)
    # First select the tips that fit the budget; this selection is the same for every spec. Then leave out
    # tips learned from this spec. Because few specs have such tips, most specs share one prefix.
    shared = fitting(known, _room([*parts[:2], examples()], TASK_BUDGET))
    useful = fitting((tip for tip in shared if spec.name not in tip.specs), _room(parts, tokens(words)))
    if useful:
        parts.append(lessons(useful))
    return Prompt("\n\n".join(part.strip() for part in parts), words)


def lessons(tips: Iterable[Tip]) -> str:
    """The prompt's section of lessons from earlier attempts."""
    return TIPS_HEADING + "\n".join(f"- {tip.lesson}" for tip in tips)


def tokens(text: str) -> int:
    """An estimate of the number of tokens in a text."""
    return ceil(len(text) / CHARACTERS_A_TOKEN)


def _room(parts: Iterable[str], reserved: int) -> int:
    """The number of characters left for tips, if the prefix has ``parts`` and the task needs ``reserved``
    tokens."""
    beside = "\n\n".join([*(part.strip() for part in parts), TIPS_HEADING, ""])
    return int((BUDGET - reserved) * CHARACTERS_A_TOKEN) - len(beside)


def read(name: str, exclude: str = "") -> str | None:
    """A primitive's page (call and docstring) or a worked example, by name; None for an unknown name.
    ``exclude``: an example to treat as unknown."""
    if name in primitive_names():
        return page(name)
    named = [path for path in EXAMPLES.glob("*.yaml") if path.stem == name != exclude]
    return _example(named[0]) if named else None


def examples(exclude: str = "") -> str:
    """The prompt's section of worked examples: specs of other operators, each with a kernel that the verifier
    accepts. The example named ``exclude`` is left out."""
    pages = ["# Examples"]
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if path.stem != exclude:
            pages.append(_example(path))
    return "\n\n".join(pages)


def _example(path: Path) -> str:
    """A worked example: the part of its spec that defines the computation, then its kernel."""
    spec, kernel = (p.read_text(encoding="utf-8").strip() for p in (path, path.with_suffix(".py")))
    spec = INIT.sub("", spec[spec.index("inputs:") : spec.index("\ncases:")])
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
    """The message to the author after a rejected attempt: the verifier's message, and how to answer."""
    return f"{rejection(report)}\n\n{ANSWER}"


def rejection(report: Rejected) -> str:
    """The verifier's message about a rejected source."""
    place = f" (line {report.line} of your file)" if report.line else ""
    passed = ", ".join(g.gate for g in report.gates) or "none"
    return (
        f"Rejected at gate `{report.gate}`, reason `{report.code}`{place}:\n\n{report.message}\n\n"
        f"Gates passed before: {passed}."
    )
