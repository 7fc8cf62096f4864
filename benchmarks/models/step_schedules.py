"""Choose schedules inside a training step: ``python -m benchmarks.models.step_schedules FILE``.

``coda-agent tune`` times one kernel alone. In a training step the GPU is at its power limit and its caches
are in use, so another schedule can be faster. This command runs on an H100, and trains the patched model of
``benchmarks.models.training`` (``--model llama|qwen3``). Each trial uses different schedules, and the
profiler gives every kernel's time. A first round of trials tries tiles. A second round tries each kernel's
two fastest tiles with other rasterisation groups. FILE receives all times. Tiles that already have times in
FILE are not timed again. The fastest schedules go into this machine's tables, which ``fused`` reads;
``fused/tuned`` has the tables of an H100.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import arms, training
from coda_agent import fused
from coda_agent.fused import ahead, launching, schedules
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.tune import leaders
from coda_agent.primitives.system.files import read_json, write_atomic

TILES = [
    Schedule(256, 128, False, 1, 2),
    Schedule(256, 128, False, 2, 1, 16, evict_stores=True, deep=True),
    Schedule(128, 256, False, 2, 1),
    Schedule(128, 256, False, 1, 2, evict_stores=True, deep=True),
    Schedule(256, 192, False, 2, 1),
    Schedule(192, 128, True, 1, 2, evict_stores=True, deep=True),
    Schedule(128, 192, True, 2, 1, evict_stores=True, deep=True),
    Schedule(128, 160, True, 2, 1, evict_stores=True, deep=True),
    Schedule(128, 128, True, 1, 2),
]
LEADERS, GROUPS = 2, (2, 4, 16, 32)
HEATING = 3  # training steps with a trial's schedules before the profiled step

Place = tuple[str, int, tuple[int, ...]]  # a program's name, a step's number, and the step's ``products``
Choice = Mapping[Place, Schedule]
Times = dict[Place, dict[Schedule, float]]  # microseconds


class TrainingStep:
    """A training step of the patched model. ``times``: the fastest time of each kernel with each schedule."""

    def __init__(self, kind: str, times: Times):
        self.trainer = training.Trainer(kind, "cuda")
        with torch.device("meta"):
            model = arms.model(kind)
        fused.patch(model)
        self.bounds = ahead.called(ahead.training(model, arms.BATCH, arms.LENGTH))
        self.times, self.gpu = times, torch.cuda.get_device_name()
        self.texts = [self.trainer.text(seed) for seed in range(HEATING)]
        self.arm = arms.arm(arms.FUSED, self.trainer.source, kind)

    def places(self) -> Iterator[tuple[Place, str]]:
        """The place and the name of each kernel of the step."""
        for bound in self.bounds:
            shapes = schedules.products(bound.program, bound.sizes)
            for kernel in lower(bound.program).gemms:
                yield (bound.program.signature.name, kernel.step, shapes[kernel.step]), kernel.name

    def use(self, choice: Choice) -> Choice:
        """Write schedules into this machine's tables, and compile the programs with these schedules. Return
        the schedules that the step will use. If a schedule of ``choice`` does not fit, or the compiler
        refuses it, the step uses another schedule."""
        for place, schedule in choice.items():
            name, step, shape = place
            schedules.keep(name, [schedules.TunedStep(self.gpu, name, step, shape, schedule)])
        launching.choose_again()
        used, refused = dict[Place, Schedule](), set[Place]()
        built = ((each, step) for each in ahead.build(self.bounds) for step in each.schedules)
        for (place, _), (each, step) in zip(self.places(), built, strict=True):
            used[place] = each.schedules[step]
            refused |= {place} if step in each.refused else set()
        if not refused:
            return used
        known = {p: s for p, s in self.best().items() if p in refused and s != used[p]}
        if not known:
            raise SystemExit(f"no schedule compiles for {sorted(refused)}")
        return self.use(used | known)

    def best(self) -> dict[Place, Schedule]:
        return {place: min(rows, key=rows.__getitem__) for place, rows in self.times.items() if rows}

    def measure(self, choice: Choice) -> None:
        """Run training steps with these schedules, and add the kernels' times to ``times``."""
        used = self.use(choice)
        for text in self.texts:
            self.trainer.step(self.arm, text)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.trainer.step(self.arm, self.texts[0])
            self.trainer.settle()
        taken = defaultdict[str, list[float]](list)
        for event in seen.events():
            if event.device_type.name == "CUDA":
                taken[event.name].append(event.time_range.elapsed_us())
        for place, kernel in self.places():
            found = [each for name, times in taken.items() if kernel in name for each in times]
            rows = self.times.setdefault(place, {})
            if found:
                rows[used[place]] = min(statistics.median(found), rows.get(used[place], float("inf")))


def trials(step: TrainingStep) -> Iterator[Choice]:
    """The schedules to try: first each tile in all kernels, then the fastest tiles of each kernel with other
    rasterisation groups."""
    places = [place for place, _ in step.places()]
    yield {}
    for tile in TILES:
        if any(tile not in step.times[place] for place in places):
            yield dict.fromkeys(places, tile)
    ranked = {place: sorted(times, key=times.__getitem__) for place, times in step.times.items() if times}
    for rank in range(LEADERS):
        for group in GROUPS:
            yield {
                place: leaders(found, LEADERS)[: rank + 1][-1]._replace(swizzle=group)
                for place, found in ranked.items()
            }


def read(path: Path) -> Times:
    found: Times = {}
    for row in (read_json(path) or {"times": ()})["times"]:
        place = row["kernel"], row["step"], tuple(row["shape"])
        found.setdefault(place, {})[Schedule.from_json(row["schedule"])] = row["microseconds"]
    return found


def write(path: Path, step: TrainingStep) -> None:
    rows = [
        {"kernel": name, "step": number, "shape": shape, "schedule": s.to_json(), "microseconds": round(t, 1)}
        for (name, number, shape), found in step.times.items()
        for s, t in sorted(found.items(), key=lambda row: row[1])
    ]
    write_atomic(path, json.dumps({"gpu": step.gpu, "times": rows}, indent=1) + "\n")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.step_schedules")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--seconds", type=float, default=400.0, help="after this time, no trial starts")
    asked = parser.parse_args(given)
    begun = time.monotonic()
    step = TrainingStep(asked.model, read(asked.file))
    try:
        for choice in trials(step):
            if time.monotonic() - begun > asked.seconds:
                break
            step.measure(choice)
            write(asked.file, step)
            print(f"{time.monotonic() - begun:6.1f} s  {len(step.times)} kernels timed", flush=True)
    finally:
        step.use(step.best())


if __name__ == "__main__":
    main()
