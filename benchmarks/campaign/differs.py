"""Decide whether a mutant (a changed program) differs from its original by more than the error gate allows.
Both programs run in plain fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from random import Random

import torch
from torch import Tensor

from benchmarks.campaign import fp64
from benchmarks.campaign.draws import Draw, draws, fitted, long, made, small
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.verifier.numerics import error_gate, reference
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.model import Spec

AIMED = 24  # limit on the draws that aim at the thresholds in a mutant's conditions
INTEGERS = ("integers", "offsets")  # forms of init for inputs that are indices or row offsets
HIDDEN = 1e-4  # on inputs drawn by the spec's init, a difference by this share of an output's RMS counts
STEPS = 4  # a draw is rescaled at most this many times to come near a threshold


class CampaignDraw:
    """A draw with its true outputs. ``says``: whether the draw can prove a difference. For this, some true
    outputs must be finite, and the original program must pass the error gate on the draw."""

    def __init__(self, spec: Spec, program: Program, draw: Draw):
        self.spec, self.draw = spec, draw
        self.truth = reference.oracle(spec, draw.inputs, draw.sizes)
        self.yard = reference.yardstick(spec, draw.inputs, draw.sizes)
        self.says = any(bool(t.isfinite().any()) for t in self.truth.values()) and not self.differs(program)

    def differs(self, program: Program) -> bool:
        """Whether a program's outputs fail the error gate on this draw."""
        found = fp64.outputs(program, self.draw.inputs, self.draw.sizes)
        if "init" in self.draw.name and any(map(self._hidden, found.items())):
            return True
        got = {}
        for name, output in self.spec.outputs.items():
            # The truth replaces the output where the truth is not finite, because such values prove nothing.
            truth = self.truth[name]
            got[name] = torch.where(truth.isfinite(), found[name], truth).to(DTYPES[output.dtype])
        return any(not e.passed for e in error_gate.compare(self.spec, got, self.truth, self.yard))

    def _hidden(self, output: tuple[str, Tensor]) -> bool:
        """Whether an output differs from the truth by more than HIDDEN of its RMS."""
        name, value = output
        truth = self.truth[name]
        finite = truth.isfinite()
        return float((value - truth)[finite].norm()) > HIDDEN * float(truth[finite].norm())


class Judge:
    """Decides which mutants of a program differ from the program. All mutants are tested on the same draws,
    and then on draws that aim at the mutant's own conditions."""

    def __init__(self, spec: Spec, program: Program):
        self.spec, self.program = spec, program
        self._kept: list[CampaignDraw] = []
        self._more = (CampaignDraw(spec, program, draw) for draw in draws(spec, 0))

    def samples(self) -> Iterator[CampaignDraw]:
        """The draws on which the original program passes. A draw is created when it is first needed."""
        for index in count():
            while index >= len(self._kept):
                if (sample := next(self._more, None)) is None:
                    return
                if sample.says:
                    self._kept.append(sample)
            yield self._kept[index]

    @cached_property
    def scales(self) -> list[float]:
        """The largest magnitude of each node's values, on inputs drawn by the spec's own init."""
        draw = next(draws(self.spec, 0))
        found = fp64.values(self.program, draw.inputs, draw.sizes)
        return [float(v.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0 for v in found]

    def seen(self, *versions: Program) -> str:
        """The name of the first draw on which one of these programs differs; empty if no draw shows a
        difference."""
        for sample in self.samples():
            if any(sample.differs(version) for version in versions):
                return sample.draw.name
        return ""

    def sought(self, mutant: Program, aims: Sequence[tuple[int, float]], seed: int) -> str:
        """Search for a draw on which the mutant differs, among draws that aim at the mutant's conditions.
        Return the draw's name; empty if no draw shows a difference. ``aims``: pairs of a node of the original
        program and a number with which a condition compares the node's values. The draws bring the node's
        values near this number."""
        random = Random(seed)
        for k in range(AIMED if aims else 0):
            share = random.choice((0.0, 0.0, 0.5))
            sizes = small(self.spec, random) if k % 6 else long(self.spec, _any(self.spec, random), random)
            draw = made(self.spec, sizes, random, share, "init" if share == 0 else "scaled")
            if random.random() < 0.3:  # positive inputs, because sums grow if no terms cancel
                for name, values in draw.inputs.items():
                    draw = self._with(draw, name, values.double().abs())
            for node, value in dict(random.sample(aims, len(aims))).items():
                draw = self._aimed(draw, node, value, random)
            sample = CampaignDraw(self.spec, self.program, draw)
            if sample.says and sample.differs(mutant):
                return f"aimed {k}"
        return ""

    def _aimed(self, draw: Draw, node: int, value: float, random: Random) -> Draw:
        """Change a draw so that a node's values come near ``value``. To do so, scale or replace one of the
        inputs on which the node depends."""
        # Scaling target indices or offsets would have no meaning.
        names = [n for n in self._read(node) if self.spec.inputs[n].init.form not in INTEGERS]
        if not names:
            return draw
        name = random.choice(names)
        wanted = abs(value) * 10 ** random.uniform(-0.3, 1.0)
        for _ in range(STEPS):
            at = fp64.values(self.program, draw.inputs, draw.sizes)[node]
            size = float(at.abs().nan_to_num(0.0, 0.0, 0.0).mean())
            if not size or abs(size / (wanted or 1) - 1) < 0.1:
                break
            draw = self._with(draw, name, draw.inputs[name].double() * (wanted / size))
        if self._itself(node) and random.random() < 0.5:
            noise = torch.randn(draw.inputs[name].shape, dtype=torch.float64)
            draw = self._with(draw, name, value * (1 + noise * random.choice((0.0, 0.01, 0.2))))
        elif random.random() < 0.3:
            draw = self._with(draw, name, -draw.inputs[name].double())
        return draw

    def _itself(self, node: int) -> bool:
        """Whether a node is an input, or an input broadcast to a tile."""
        of = self.program.nodes[node]
        return of.op == "input" or (OPERATIONS[of.op].spread is not None and self._itself(of.args[0]))

    def _with(self, draw: Draw, name: str, values: Tensor) -> Draw:
        inputs = draw.inputs | {name: fitted(self.spec.inputs[name], draw.sizes, values)}
        return Draw(draw.name, draw.sizes, inputs)

    def _read(self, node: int) -> list[str]:
        """The names of the inputs on which a node depends."""
        seen, pending = set[int](), [node]
        while pending:
            index = pending.pop()
            if index not in seen:
                seen.add(index)
                pending += self.program.nodes[index].args
        inputs = [self.program.nodes[i] for i in sorted(seen) if self.program.nodes[i].op == "input"]
        return [str(n.attribute) for n in inputs]


def _any(spec: Spec, random: Random) -> str:
    return random.choice(list(spec.dims))
