"""Count the bytes that derived backwards move: ``python -m benchmarks.derived.ledger PAGE``, without a GPU.

The page has three tables. The first shows every forward operator of ``specs`` with its derived backward. The
second compares derived backwards with backwards that people arranged from hand-authored kernels. The third
shows a Transformer layer's backward.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.by_hand.runners import accepted_programs, calls
from benchmarks.derived.layer import backwards, beside_stream
from benchmarks.layer_profile.ledger import ATTENTION, rows
from benchmarks.programs import forward
from coda_agent.agent.backward import pair
from coda_agent.comparison.layers.shape import WIDTHS, Shape
from coda_agent.primitives import gelu, gemm, pairs, per_column, row_logsumexp, row_select, silu
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.derive import NEXT, NEXT_SIZE, Derived, all_sizes, chains, derive, ledger
from coda_agent.primitives.derive.chains import Chain
from coda_agent.primitives.derive.ranges import joined
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.system.files import KERNELS, ROOT, SPECS, write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.gradients import errors
from coda_agent.verifier.numerics.values import trial
from coda_agent.verifier.spec.model import Spec

BACKWARDS = ("_bwd", "_accumulate")  # the name of a backward's spec ends in one of these
KEPT = ("preact", "rstd", "mean", "amax", "logits")  # outputs that a forward stores only for its backward
Sizes = Mapping[str, int]


# Operators


def operators() -> list[str]:
    """The forward operators of ``specs``."""
    return sorted(p.stem for p in SPECS.glob("*.yaml") if not p.stem.endswith(BACKWARDS))


def results(program: Program) -> tuple[str, ...]:
    """The outputs whose gradients are inputs of the backward."""
    return tuple(n for n in joined(program).program.outputs if n not in KEPT)


def operator(name: str, agreement: bool = True) -> list[list[str]]:
    """The table rows of an operator. The first row is for the operator's backward alone. The second row is
    for a longer program: a matmul first computes an output's gradient, and then the backward follows."""
    spec, program = forward(name)
    of = results(program)
    whole = joined(program).program
    tiles = [n for n in of if len(whole.signature.outputs[n].shape) == 2]
    found = [_operator(spec, program, of, None, agreement)]
    if not tiles:
        return [*found, [name, "behind a product", "a loss: no product reads it", *[""] * 6]]
    return [*found, _operator(spec, program, of, tiles[-1], agreement)]


def _operator(
    spec: Spec, program: Program, of: Sequence[str], behind: str | None, agreement: bool
) -> list[str]:
    form = [spec.name, f"behind a product, by {behind}" if behind else "alone"]
    sizes = {NEXT: NEXT_SIZE, **spec.cases[0].sizes}
    positive = {n for n, t in spec.inputs.items() if t.domain == "positive"}
    try:
        made = derive(program, sizes, of=of, behind=behind, positive=positive)
    except ProgramError as refused:
        return [*form, f"refused: {refused.message.partition(': ')[0]}", *[""] * 6]
    count = ledger.count(made.program, made.head, all_sizes(made, sizes))
    judged = pair(spec, program, made, of, behind)
    worst = ""
    if agreement and judged:
        small, drawn = trial(judged.spec)
        worst = f"{max(errors(judged.spec, drawn, small).values()):.0e}"
    return [
        *form,
        str(len(cut(made.program).gemms) if made.program else 0),
        ", ".join(made.head.outputs) if made.head else "–",
        str(_stored(program, made, sizes)),
        ", ".join([*made.recomputed, *(f"or stored: node {i}" for i in made.saves.values())]) or "–",
        f"{count.moved / 1e9:.3f}",
        f"{made.bound.least / 1e9:.3f}",
        worst,
    ]


def _stored(program: Program, made: Derived, sizes: Sizes) -> int:
    """The size, in bytes per row, of the forward's results that the backward reads."""
    parts = [p for p in (made.program, made.head) if p]
    read = {n: t for p in parts for n, t in p.signature.inputs.items()}
    kept = [t for n, t in read.items() if n in made.stored and n not in program.signature.inputs]
    first = next(iter(program.signature.outputs.values())).shape[0](sizes)
    return ledger.size(kept, all_sizes(made, sizes)) // first


OPERATORS = ["operator", "form", "products", "without a product", "stored, bytes per row", "computed again",
             "moved, GB", "least, GB", "error"]  # fmt: skip


# Comparison with the backwards arranged by hand


class ByHand(NamedTuple):
    """A backward that people arranged by hand, and a derived backward that computes the same gradients.

    The backward by hand runs a hand-authored kernel, plain matmuls, and separate passes over memory.
    ``kernel`` and ``sizes`` describe the hand-authored kernel. ``products`` has (m, k, n) for each plain
    matmul [m, k] @ [k, n]. ``passes`` is the number of bytes that the separate passes move. ``derived`` is
    the derived backward, and ``all_sizes`` has its sizes."""

    kernel: str
    sizes: Sizes
    products: tuple[tuple[int, int, int], ...]
    passes: int
    derived: Derived
    all_sizes: Sizes

    def hand(self) -> tuple[int, int]:
        """The number of matmuls of the backward by hand, and the number of bytes that this backward moves."""
        text = (KERNELS / f"{self.kernel}.program.json").read_text(encoding="utf-8")
        program = Program.from_json(text)
        moved = roofline(program, self.sizes).bytes + sum(map(matmul, self.products)) + self.passes
        return len(cut(program).gemms) + len(self.products), moved

    def ours(self) -> tuple[int, int]:
        assert self.derived.program
        sizes = all_sizes(self.derived, self.all_sizes)
        count = ledger.count(self.derived.program, self.derived.head, sizes)
        return len(cut(self.derived.program).gemms), count.moved


def matmul(sizes: tuple[int, int, int]) -> int:
    """The bytes that [m, k] @ [k, n] moves in bf16."""
    m, k, n = sizes
    return 2 * (m * k + k * n + m * n)


def two_products(width: str, activation: Callable[..., Any]) -> Chain:
    """An MLP without a norm. The MLP's first matmul has a bias if ``width`` is F."""

    def body(x: Any, w_up: Any, w_down: Any, bias: Any = None) -> dict[str, Any]:
        z: Any = gemm(x, w_up.mT)
        z = z if bias is None else z + per_column(bias)
        act = activation(z)
        return {"z": z, "act": act, "out": gemm(act, w_down.mT)}

    inputs = {"x": "M, D", "w_up": f"{width}, D", "w_down": "D, F"}
    inputs |= {"bias": width} if width == "F" else {}
    return Chain(inputs, {"z": f"M, {width}", "act": "M, F", "out": "M, D"}, body)


def swiglu(z: Any) -> Any:
    gate, up = pairs(z)
    half: Any = silu(gate)
    return half * up


def loss() -> Chain:
    """The cross-entropy of logits that are not stored."""

    def body(x: Any, w: Any, target: Any) -> dict[str, Any]:
        logits = gemm(x, w.mT)
        lse: Any = row_logsumexp(logits)
        return {"lse": lse, "loss": lse - row_select(logits, target)}

    inputs = {"x": "M, D", "w": "V, D", "target": "M: int64"}
    return Chain(inputs, {"lse": "M: fp32", "loss": "M: fp32"}, body)


def by_hand() -> Iterator[ByHand]:
    """Yield a ``ByHand`` for each hand-authored backward kernel, at the first case of its spec."""
    for kernel, build in HANDS.items():
        case = load(SPECS / f"{kernel}.yaml", check=False).cases[0].sizes
        yield build(kernel, case)


def _mlp(kernel: str, case: Sizes, width: str, activation: Callable[..., Any]) -> ByHand:
    m, d, f = case["M"], case["D"], case["F"]
    wide = 2 * f if width == "2*F" else f
    program = two_products(width, activation).program("mlp")
    derived = derive(program, case, of=["out"])
    return ByHand(kernel, case, ((d, m, f), (m, wide, d), (wide, m, d)), 0, derived, case)


def _loss(kernel: str, case: Sizes) -> ByHand:
    m, d, v = case["M"], case["D"], case["V"]
    derived = derive(loss().program("loss"), case, wrt=["x", "w"], of=["loss"])
    return ByHand(kernel, case, ((m, v, d), (v, m, d)), 0, derived, case)


def _norm(kernel: str, case: Sizes) -> ByHand:
    m, k, n = case["M"], case["K"], case["N"]
    sizes = {"M": m, "D": n, "N": k}
    wrt = ["out", "gamma_in", "w_qkv"]
    derived = derive(beside_stream(rotates=False).program("norm"), sizes, wrt=wrt, of=["qkv", "stream"])
    return ByHand(kernel, case, ((k, m, n),), 2 * 2 * m * k + 4 * m, derived, sizes)


def _norms(kernel: str, case: Sizes) -> ByHand:
    m, n, d, k = (case[name] for name in "MNDK")
    spec, program = forward("gemm_residual_rmsnorm_gemm")
    derived = derive(program, case, of=["h", "z"])
    passes = 2 * 2 * m * n + 4 * m + 2 * 2 * m * d  # for sum(dz * z) and for the normed stream
    return ByHand(kernel, case, ((n, m, d), (d, m, k)), passes, derived, case)


HANDS: dict[str, Callable[[str, Sizes], ByHand]] = {
    "gemm_swiglu_bwd": lambda kernel, case: _mlp(kernel, case, "2*F", swiglu),
    "gemm_gelu_bwd": lambda kernel, case: _mlp(kernel, case, "F", gelu),
    "gemm_cross_entropy_bwd": _loss,
    "gemm_residual_rmsnorm_bwd": _norm,
    "gemm_residual_rmsnorm_gemm_bwd": _norms,
}
HAND_TITLES = ["kernel", "products by hand", "derived", "moved by hand, GB", "derived, GB"]


def hand_rows() -> list[list[str]]:
    found = []
    for each in by_hand():
        (steps, moved), (own, less) = each.hand(), each.ours()
        found.append([each.kernel, str(steps), str(own), f"{moved / 1e9:.3f}", f"{less / 1e9:.3f}"])
    return found


# The layer


def layer_by_hand(shape: Shape) -> int:
    """The bytes that the layer's backward moves if the backward is arranged as in ``benchmarks.by_hand``, but
    with the rotation's transpose in one pass."""
    tokens, width, ffn = shape.tokens, shape.width, shape.ffn
    programs, places = accepted_programs(), calls(shape)
    own = [c for place, c in places.items() if place.endswith("_backward")]
    products = [(width, tokens, ffn), (2 * ffn, tokens, width), (width, tokens, width),
                (tokens, width, width), (3 * width, tokens, width)]  # fmt: skip
    kernels = sum(roofline(programs[c.operator], dict(c.sizes)).bytes for c in own)
    return kernels + sum(map(matmul, products)) + rotation(shape)


def rotation(shape: Shape) -> int:
    """The bytes of the pass that computes the rotation's transpose and sum(dz * z). The pass reads six
    tensors and writes three."""
    return 2 * 9 * shape.tokens * shape.width


def layer_derived(shape: Shape) -> int:
    """The bytes that the layer's backward moves if the backward of each module is derived separately
    ("module-local"). The sum counts two derived programs, the two matmuls between these programs, and the
    rotation's pass."""
    tokens, width = shape.tokens, shape.width
    sizes = layer_sizes(shape)
    programs = backwards(shape).values()
    counts = (ledger.count(d.program, None, all_sizes(d, sizes)).moved for d in programs)
    return sum(counts) + matmul((width, tokens, width)) + matmul((tokens, width, width)) + rotation(shape)


def layer_sizes(shape: Shape) -> dict[str, int]:
    widths = {"M": shape.tokens, "D": shape.width, "A": shape.width, "F": shape.ffn}
    return widths | {"H": 3 * shape.heads, "P": shape.pairs}


def layer_stack(shape: Shape) -> int:
    """The bytes per layer that the backward moves if a whole stack of layers is derived together ("whole
    stack"). The sum counts one program, and the pass before that program. The program spans from one layer's
    attention to the next layer's attention."""
    program, sizes = chains.between_attentions().program("layer"), layer_sizes(shape)
    wrt = [n for n in program.signature.inputs if n not in ("eps", "turned", "cos_sin")]
    made = derive(program, sizes, wrt=wrt, of=["out", "qkv"])
    return ledger.count(made.program, made.head, all_sizes(made, sizes)).moved


def layer_compiled(profile: Mapping[str, Any], width: str) -> int:
    """The bytes that ``torch.compile``'s backward moves, without attention. The count comes from the tensors
    of each kernel in the committed profile."""
    shares = (row.share for row in rows(profile["widths"][width], "torch.compile"))
    return sum(share.bytes or 0 for share in shares if share.group != ATTENTION)


def layer_rows() -> list[list[str]]:
    profile = json.loads((ROOT / "docs" / "layer_backward.json").read_text(encoding="utf-8"))
    found = []
    for width, shape in WIDTHS.items():
        # the bytes that it takes to read the weights and to write the weights' gradients
        weights = 2 * 2 * (3 * shape.ffn + 4 * shape.width) * shape.width
        count = {
            "`torch.compile`": layer_compiled(profile, width), "by hand": layer_by_hand(shape),
            "derived, module-local": layer_derived(shape), "derived, whole stack": layer_stack(shape),
        }  # fmt: skip
        hand = count["by hand"]
        for arm, moved in count.items():
            less, fewer = 1 - moved / hand, 1 - (moved - weights) / (hand - weights)
            widths = (moved - weights) / (2 * shape.tokens * shape.width)
            found.append([width, arm, f"{moved / 1e9:.3f}", f"{less:.1%}", f"{widths:.1f}", f"{fewer:.1%}"])
    return found


LAYER = ["width", "backward", "moved, GB", "less than by hand", "widths per token, without weights",
         "less than by hand, without weights"]  # fmt: skip


# The page


def page() -> str:
    date, versions = datetime.now(UTC).date().isoformat(), f"torch {torch.__version__}"
    return PAGE.format(
        where=f"{date}, Python {platform.python_version()}, {versions}, a CPU ({platform.machine()})",
        operators=markdown_table(OPERATORS, [row for name in operators() for row in operator(name)]),
        hands=markdown_table(HAND_TITLES, hand_rows()),
        layer=markdown_table(LAYER, layer_rows()),
    )


PAGE = """# Derived backwards, counted

{where}. Written by `python -m benchmarks.derived.ledger docs/derived_ledger.md`. Byte counts are
minimal: each step reads and writes each of its tensors once ([how a backward is derived](derive.md)).

## Every operator

The sizes are those of each spec's first case.

- *Form*: *alone* is the operator's backward by itself. *Behind a product, by X* begins with the matmul that
  gives the gradient of output X; that matmul has an inner size of 2,048.
- *Products*: the number of matmuls.
- *Without a product*: the tensors that `torch.compile` computes in a pass before the matmuls.
- *Stored*: the bytes per row of the forward's results that the backward reads.
- *Computed again*: the tensors of the forward that the backward computes again.
- *Moved*: the bytes that all steps together move.
- *Least*: the bytes if the whole backward read each input once and wrote each output once.
- *Error*: the largest error of a gradient against fp64 autograd of the spec's reference, over the gradient's
  RMS. Nothing is rounded.

{operators}
## Compared with the hand-authored backwards

Both backwards give the same gradients. The one by hand is an authored kernel, with plain matmuls and separate
passes around it.

{hands}
## A layer

The table counts the backward of the comparison's Transformer layer, without attention, on 16,384 tokens.

- *By hand*: people arranged accepted kernels (`benchmarks/by_hand/layer.py`); the rotation's transpose is one
  pass.
- `torch.compile`: the tensors of its kernels in [the profile](layer_backward.md) of an H100.
- *Without weights*: the bytes, minus one read of each weight and one write of its gradient, which every
  backward needs.
- *Widths per token*: the bytes per token, in units of a bf16 vector of the model's width.

{layer}"""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derived.ledger")
    parser.add_argument("page", type=Path)
    write_atomic(parser.parse_args(given).page, page())


if __name__ == "__main__":
    main()
