"""Measure the layer with a derived backward: ``python -m benchmarks.derived.layer``.

``measure FILE [--widths 1B,7B,70B]`` runs on an H100. It times four arms of the comparison's layer,
interleaved. The first arm has a backward arranged by hand. The second arm has the same backward, but computes
the rotation's transpose in one pass (``fused.pointwise.rotation``). The third arm uses that pass and a
backward derived from the forward (``primitives.derive``). The fourth arm is the plain layer under
``torch.compile``. After each width, the samples of that width are added to FILE. ``draw FILE PAGE`` makes a
page from FILE, on any machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.by_hand import measuring as by_hand
from benchmarks.by_hand.layer import Attended, HandArranged, ResidualStream, Saved, unrotated
from benchmarks.layer_profile.bench import Backward
from coda_agent.comparison.competitors import COMPILE, PROGRAM
from coda_agent.comparison.layers.errors import relative, results
from coda_agent.comparison.layers.layer import Gradients
from coda_agent.comparison.layers.shape import WIDTHS, Shape, draw
from coda_agent.fused.pointwise.rotation import rotated_back
from coda_agent.primitives.derive import Derived, chains, derive
from coda_agent.primitives.derive.chains import Chain
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import schedules_json
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gpu.benchmark import milliseconds, timed
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio
from coda_agent.verifier.timing import Arm

ONE_PASS, DERIVED = "by hand, one-pass rotation", "derived"
ATTENTION = "attention"
ROUNDS, LONGEST, SEED = 40, 10.0, 20
PASSES = ("forward", "backward", "forward and backward")

Call = Callable[..., dict[str, Tensor]]


class OnePass(HandArranged):
    """The layer with the backward arranged by hand, but with the rotation's transpose in one kernel."""

    def _attention_backward(self, attended: Attended, da: Tensor) -> tuple[Tensor, Tensor]:
        dz, sums = self.turned_back(attended, da, torch.ones(len(da), device=da.device))
        return dz, sums / self.shape.width

    def turned_back(self, attended: Attended, da: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Return dz * rstd, and the row sums of dz * z. Here z is q, k and v before the rotation, side by
        side, and dz is the gradient of z."""
        dq, dk, dv = torch.autograd.grad(attended.mixed, attended.heads, self.shape.apart(da))
        q, k = attended.qk.tensor_split(2, 1)
        return rotated_back((dq, dk, dv), (q, k, attended.v), self.table, rstd)


class Kept(NamedTuple):
    """The tensors that the derived backward reads. ``saved``: the tensors that the hand-arranged backward
    also reads. ``act``: the activation."""

    saved: Saved
    act: Tensor


class ByDerivation(OnePass):
    """The layer with two derived backward programs: ``mlp`` for the MLP, and ``projection`` for the
    projection to queries, keys and values."""

    mlp: Call
    projection: Call

    def train(self, stream: ResidualStream) -> tuple[ResidualStream, Any]:
        attended = self._attend(stream, training=True)
        h1 = self._project(attended.a, stream)
        ffn = self._expand(h1)
        saved = Saved(stream.h, stream.rstd, attended, h1.h, h1.rstd, ffn["preact"])
        return self._reduce(ffn["act"], h1), Kept(saved, ffn["act"])

    def backward(self, saved: Any, dout: Tensor) -> Gradients:
        kept, act = saved
        weights, width = self.weights, self.shape.width
        ffn = self.mlp(
            d_out=dout, h=kept.h1, gamma=weights.ffn_norm, w_up=weights.gate_up, w_down=weights.down,
            rstd=kept.rstd1, z=kept.z, act=act,
        )  # fmt: skip
        dh1 = ffn["d_h"]
        out = dh1.mT @ kept.attended.a
        dzs, sums = self.turned_back(kept.attended, dh1 @ weights.out, kept.rstd)
        of_row = -sums * kept.rstd.square() / width
        mixing = self.projection(
            tile=dzs, row=of_row, d_stream=dh1, out=kept.x, gamma_in=weights.attention_norm, w_qkv=weights.qkv
        )
        return {
            "x": mixing["d_out"], "attention_norm": mixing["d_gamma_in"].type_as(dzs), "out": out,
            "qkv": mixing["d_w_qkv"], "ffn_norm": ffn["d_gamma"].type_as(dzs),
            "gate_up": ffn["d_w_up"], "down": ffn["d_w_down"],
        }  # fmt: skip


def beside_stream(rotates: bool) -> Chain:
    """A chain that normalises and projects the residual stream, and also returns the stream itself."""
    inner = chains.attention_in(rotates=rotates)
    return inner._replace(
        outputs=inner.outputs | {"stream": "M, D"},
        body=lambda out, **others: inner.body(out=out, **others) | {"stream": out},
    )


def backwards(shape: Shape) -> dict[str, Derived]:
    """Derive a backward for each of the layer's two operator chains that begin with a norm. The residual
    stream continues past the projection, so the projection's backward adds the stream's gradient."""
    sizes = {"M": shape.tokens, "D": shape.width, "F": shape.ffn, "H": 3 * shape.heads, "P": shape.pairs}
    mlp, projection = chains.mlp().program("mlp"), beside_stream(rotates=True).program("attention_in")
    return {
        "mlp": derive(mlp, sizes, wrt=("h", "gamma", "w_up", "w_down"), of=("out",)),
        "projection": derive(projection, sizes, wrt=("out", "gamma_in", "w_qkv"), of=("qkv", "stream")),
    }


def by_derivation(
    layer: ByDerivation, programs: Mapping[str, Derived], made: Callable[[Program], Call]
) -> None:
    """Give the layer its derived programs. ``made`` turns a program into a function."""
    mlp, projection = (programs[name].program for name in ("mlp", "projection"))
    head = programs["projection"].head
    assert mlp and projection and head
    kinds = {len(t.shape): name for name, t in head.signature.outputs.items()}
    layer.mlp, run = made(mlp), made(projection)

    def project(tile: Tensor, row: Tensor, **others: Tensor) -> dict[str, Tensor]:
        return run(**{kinds[2]: tile, kinds[1]: row}, **others)

    layer.projection = project


def measured(width: str) -> dict[str, Any]:
    """Measure all arms at one width. Return each arm's samples in milliseconds, and the error of each arm's
    results relative to the results of the hand-arranged layer."""
    begun = time.monotonic()
    shape, runner = WIDTHS[width], by_hand.compiled(by_hand.known_kernels(width))
    drawn = draw(shape, SEED)
    layers = {name: by_hand.variant(name, shape, drawn, runner) for name in (PROGRAM, COMPILE)}
    layers[ONE_PASS] = OnePass(shape, drawn.weights, drawn.next_norm, runner, unrotated)
    derived = ByDerivation(shape, drawn.weights, drawn.next_norm, runner, unrotated)
    made: list[Kernel] = []

    def kernel(program: Program) -> Kernel:
        made.append(Kernel(program))
        return made[-1]

    by_derivation(derived, backwards(shape), kernel)
    layers[DERIVED] = derived
    arms = list[Arm]()
    for name, layer in layers.items():
        stream = layer.start(drawn.x)
        layer.forward(stream)
        backward = Backward(layer, stream, drawn.dout)
        backward.ready()
        backward()
        print(f"{time.monotonic() - begun:6.1f} s  {width}: {name} is ready", flush=True)
        arms += backward.arms(name)
    arms.append(Arm(ATTENTION, attention(shape)))
    exact = results(layers[PROGRAM], drawn)
    agreement = {n: relative(results(layer, drawn), exact) for n, layer in layers.items() if n != PROGRAM}
    samples, conditions = timed(arms, ROUNDS, longest=LONGEST)
    schedules = [schedules_json(plan.schedules) for kernel in made for plan in kernel._plans.values()]
    return {
        "times": {n: milliseconds(s) for n, s in samples.items()},
        "conditions": conditions,
        "agreement": agreement,
        "schedules": schedules,
        "seconds": round(time.monotonic() - begun, 1),
    }


def attention(shape: Shape) -> Callable[[], object]:
    """A function that runs only the layer's attention, forward and backward."""
    drawn = (torch.randn(shape.tokens, shape.width, device="cuda").bfloat16() for _ in range(3))
    q, k, v = (shape.apart(t).requires_grad_() for t in drawn)
    gradient = torch.randn_like(q)

    def call() -> object:
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(mixed, (q, k, v), gradient)

    return call


def measure(widths: Sequence[str], out: Path) -> None:
    """Measure the widths in turn, and write ``out`` after each width."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for width in widths:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        found[width] = {"date": date, "where": device(), **measured(width)}
        write_atomic(out, json.dumps(found, indent=1))
        print(table({width: found[width]}), flush=True)


def table(found: Mapping[str, Any]) -> str:
    """A table by width and pass: the median of each arm, and two ratios. The ratios are the times of
    ``torch.compile`` and of the hand-arranged layer, each divided by the derived arm's time."""
    arms = (COMPILE, PROGRAM, ONE_PASS, DERIVED)
    titles = ["width", "pass", *(f"{arm}, ms" for arm in ("torch.compile", "by hand", ONE_PASS, DERIVED))]
    titles += ["`torch.compile` over derived", "by hand over derived"]
    lines: list[list[object]] = []
    for width, entry in found.items():
        for part in PASSES:
            samples = [entry["times"][f"{arm}: {part}"] for arm in arms]
            medians = [f"{statistics.median(each):.3f}" for each in samples]
            lines.append([width, part, *medians, *(ratio(each, samples[-1]) for each in samples[:2])])
    return markdown_table(titles, lines)


def without_attention(found: Mapping[str, Any]) -> str:
    """A table of the time that forward and backward take together, minus the time of attention. Attention is
    the same in all arms."""
    lines = []
    for width, entry in found.items():
        times = {n: statistics.median(samples) for n, samples in entry["times"].items()}
        alone = times[ATTENTION]
        theirs, ours = (times[f"{arm}: {PASSES[-1]}"] - alone for arm in (COMPILE, DERIVED))
        lines.append([width, *(f"{each:.3f}" for each in (alone, theirs, ours, theirs / ours))])
    titles = ["width", "attention, ms", "rest of torch.compile, ms", "rest of derived, ms", "ratio"]
    return markdown_table(titles, lines)


def page(found: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    where = next(iter(found.values()))["where"]
    dates = sorted({entry["date"][:10] for entry in found.values()})
    versions = ", ".join(f"{key} {where[key]}" for key in ("torch", "cuda"))
    errors = [
        [width, arm, name, f"{error:.4f}"]
        for width, entry in found.items()
        for arm, each in entry["agreement"].items()
        for name, error in [max(each.items(), key=lambda item: item[1])]
    ]
    return PAGE.format(
        where=f"{where['gpu']}, {versions}, {' and '.join(dates)}",
        times=table(found),
        rest=without_attention(found),
        errors=markdown_table(["width", "arm", "result", "error"], errors),
    )


PAGE = """# A layer with a derived backward

{where}. Drawn by `python -m benchmarks.derived.layer draw` from what `measure` wrote.

The Transformer layer of [the comparison](comparison.md) runs on 16,384 tokens. Four arms take turns in one
process, from a cold L2:

- *torch.compile*: the plain layer under `torch.compile`.
- *By hand*: people arranged the backward from accepted kernels.
- *By hand, one-pass rotation*: the same, but one Triton kernel (`fused/pointwise/rotation.py`) computes the
  rotation's transpose together with the row sums that the norm before it needs. Inductor makes two kernels.
- *Derived*: `primitives/derive` derives the backward from the forward, as two programs: one of four matmuls
  for the MLP, and one of two for the projection. They were tuned for this measurement; no model edited them.

The last three arms have the same forward. The table has medians in milliseconds, and ratios with 95%
intervals: above 1, the derived backward is faster.

The measured programs compute the gradients of the norms' weights in the weight-gradient matmuls. Derivation
now compares all bytes at 16,384 tokens, and computes them in the data-gradient matmuls instead. That moves
2%, 3% and 6% fewer bytes at 1B, 7B and 70B; it has not been measured yet.

{times}
## Without attention

All arms run the same attention. This table has the medians of forward and backward together, minus the
median of attention by itself:

{rest}
## Agreement

For each arm, the table has the output or gradient that differs most from that of the layer arranged by hand:
the error's RMS over the RMS of the result. Rounding to bf16 alone causes about 0.002.

{errors}"""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derived.layer")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    measuring.add_argument("--widths", default="1B,7B,70B")
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("page", type=Path)
    arguments = parser.parse_args(given)
    if arguments.command == "measure":
        measure(arguments.widths.split(","), arguments.file)
    else:
        found = json.loads(arguments.file.read_text(encoding="utf-8"))
        write_atomic(arguments.page, page(found))


if __name__ == "__main__":
    main()
