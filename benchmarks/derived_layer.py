"""The layer with a derived backward: ``python -m benchmarks.derived_layer --out FILE [--widths 1B,7B,70B]``.

On an H100. The comparison's layer in four arms that take turns: its backward arranged by hand, the same with
the rotation's transpose in one pass (``fused.rotation``), the backward derived from the forward
(``primitives.derive``) with that pass, and the plain layer under ``torch.compile``. Tables go to stdout, and
all samples to FILE after each width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.layer_profile.bench import Backward, on_known_schedules
from coda_agent.comparison.competitors import COMPILE, PROGRAM
from coda_agent.comparison.interleaved import compiled
from coda_agent.comparison.layers import variant
from coda_agent.comparison.layers.errors import relative, results
from coda_agent.comparison.layers.fused import Attended, Fused, Saved, Stream, unrotated
from coda_agent.comparison.layers.layer import Gradients
from coda_agent.comparison.layers.session import LayerSeats
from coda_agent.comparison.layers.shape import Shape, draw
from coda_agent.comparison.rows import LayerRow
from coda_agent.fused.rotation import rotated_back
from coda_agent.primitives.derive import Derived, chains, derive
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.gpu.benchmark import milliseconds, timed
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio
from coda_agent.verifier.timing import Arm

ONE_PASS, DERIVED = "by hand, one-pass rotation", "derived"
ROUNDS, LONGEST, SEED = 40, 10.0, 20

Call = Callable[..., dict[str, Tensor]]


class OnePass(Fused):
    """The backward by hand, with the rotation's transpose in one kernel."""

    def _attention_backward(self, attended: Attended, da: Tensor) -> tuple[Tensor, Tensor]:
        dz, sums = self.turned_back(attended, da, torch.ones(len(da), device=da.device))
        return dz, sums / self.shape.width

    def turned_back(self, attended: Attended, da: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """dz * rstd of q, k and v side by side, and the row sums of dz * z."""
        dq, dk, dv = torch.autograd.grad(attended.mixed, attended.heads, self.shape.apart(da))
        q, k = attended.qk.tensor_split(2, 1)
        return rotated_back((dq, dk, dv), (q, k, attended.v), self.table, rstd)


class Kept(NamedTuple):
    """What the derived backward reads: the hand-arranged one's, and act."""

    saved: Saved
    act: Tensor


class ByDerivation(OnePass):
    """The backward of both halves as derived programs; ``mlp`` and ``projection`` run them."""

    mlp: Call
    projection: Call

    def train(self, stream: Stream) -> tuple[Stream, Any]:
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
        of_row = sums * kept.rstd.square() * (-0.5 / width)
        mixing = self.projection(
            tile=dzs, row=of_row, d_stream=dh1, out=kept.x, gamma_in=weights.attention_norm, w_qkv=weights.qkv
        )
        return {
            "x": mixing["d_out"], "attention_norm": mixing["d_gamma_in"].type_as(dzs), "out": out,
            "qkv": mixing["d_w_qkv"], "ffn_norm": ffn["d_gamma"].type_as(dzs),
            "gate_up": ffn["d_w_up"], "down": ffn["d_w_down"],
        }  # fmt: skip


def backwards(shape: Shape) -> dict[str, Derived]:
    """The derived backwards of the layer's two chains that begin with a norm. The stream goes on beside the
    projection, so that its gradient is added there."""
    sizes = {"M": shape.tokens, "D": shape.width, "F": shape.ffn, "H": 3 * shape.heads, "P": shape.pairs}
    inner = chains.attention_in()
    beside = inner._replace(
        outputs=inner.outputs | {"stream": "M, D"},
        body=lambda out, **others: inner.body(out=out, **others) | {"stream": out},
    )
    return {
        "mlp": derive(chains.mlp().program("mlp"), sizes, of=("out",)),
        "projection": derive(beside.program("attention_in"), sizes, of=("qkv", "stream")),
    }


def by_derivation(
    layer: ByDerivation, programs: Mapping[str, Derived], made: Callable[[Program], Call]
) -> None:
    """Give the layer its derived programs, as ``made`` makes them callable."""
    mlp, projection = (programs[name].program for name in ("mlp", "projection"))
    head = programs["projection"].head
    assert mlp and projection and head
    kinds = {len(t.shape): name for name, t in head.signature.outputs.items()}
    layer.mlp, run = made(mlp), made(projection)

    def project(tile: Tensor, row: Tensor, **others: Tensor) -> dict[str, Tensor]:
        return run(**{kinds[2]: tile, kinds[1]: row}, **others)

    layer.projection = project


def measured(width: str) -> dict[str, Any]:
    """All arms of one width: samples in milliseconds, and how far their results are from the first's."""
    begun = time.monotonic()
    row = LayerRow(width, True)
    if row.kernels is None:
        raise LookupError(row.absent(PROGRAM))
    kernels = {call: on_known_schedules(call, k, width) for call, k in row.kernels.items()}
    seats = LayerSeats(row.shape, (PROGRAM, COMPILE), kernels, ROUNDS, True)
    compiled([seats])
    drawn, runner = draw(row.shape, SEED), seats.runner()
    layers = {name: variant(name, row.shape, drawn, runner) for name in (PROGRAM, COMPILE)}
    layers[ONE_PASS] = OnePass(row.shape, drawn.weights, drawn.next_norm, runner, unrotated)
    derived = ByDerivation(row.shape, drawn.weights, drawn.next_norm, runner, unrotated)
    made: list[Kernel] = []

    def kernel(program: Program) -> Kernel:
        made.append(Kernel(program))
        return made[-1]

    by_derivation(derived, backwards(row.shape), kernel)
    layers[DERIVED] = derived
    arms = []
    for name, layer in layers.items():
        stream = layer.start(drawn.x)
        layer.forward(stream)
        backward = Backward(layer, stream, drawn.dout)
        backward.ready()
        backward()
        print(f"{time.monotonic() - begun:6.1f} s  {width}: {name} is ready", flush=True)
        arms += [
            Arm(f"{name}: forward", partial(layer.forward, stream)),
            Arm(f"{name}: forward and backward", partial(layer.step, stream, drawn.dout)),
            Arm(f"{name}: backward", backward, backward.ready),
        ]
    exact = results(layers[PROGRAM], drawn)
    agreement = {n: relative(results(layer, drawn), exact) for n, layer in layers.items() if n != PROGRAM}
    samples, conditions = timed(arms, ROUNDS, longest=LONGEST)
    schedules = [
        {str(step): s.to_json() for step, s in plan.schedules.items()}
        for kernel in made
        for plan in kernel._plans.values()
    ]
    return {
        "times": {n: milliseconds(s) for n, s in samples.items()},
        "conditions": conditions,
        "agreement": agreement,
        "schedules": schedules,
        "seconds": round(time.monotonic() - begun, 1),
    }


def table(width: str, found: Mapping[str, Any]) -> str:
    """A width's medians, and each arm's time over the derived one's with its interval."""
    lines = ["| width | pass | arm | ms | over derived |", "|---|---|---|---|---|"]
    for name, samples in found["times"].items():
        arm, _, part = name.rpartition(": ")
        over = ratio(samples, found["times"][f"{DERIVED}: {part}"])
        gain = f"{over.estimate:.3f} [{over.low:.3f}, {over.high:.3f}]"
        lines.append(f"| {width} | {part} | {arm} | {statistics.median(samples):.3f} | {gain} |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derived_layer")
    parser.add_argument("--widths", default="1B,7B,70B")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "where": device()}
    for width in arguments.widths.split(","):
        found[width] = measured(width)
        write_atomic(arguments.out, json.dumps(found, indent=1))
        print(table(width, found[width]), flush=True)
        worst = {n: max(each.items(), key=lambda e: e[1]) for n, each in found[width]["agreement"].items()}
        print(worst, found[width]["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
