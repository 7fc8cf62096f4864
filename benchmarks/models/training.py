"""Measure the training of a Hugging Face model with fused parts: ``python -m benchmarks.models.training``.

``measure FILE [--model llama|qwen3] [--seconds N]`` runs on an H100, and times training steps of a Llama or
Qwen3 of about 1B parameters. The arms are: the unpatched model, eager and under ``torch.compile``; the model
with Liger's kernels; and the model patched by ``fused.patch``, module-local and whole-stack, with and without
``torch.compile``. Two more eager arms, with and without the patch, recompute each layer in the backward. All
arms share one set of parameters and one optimizer, and are interleaved in random order. A step is forward,
backward and AdamW.

Then the losses are compared. For each of several seeds, the unpatched and the patched model train for some
steps. Both models start from the same parameters, which depend on the seed. FILE is written after each stage.
``draw FILE... PAGE`` makes a page from files of different models, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models.arms import (
    ARMS,
    BATCH,
    FUSED,
    LENGTH,
    PACKAGES,
    PLAIN,
    RATE,
    SHORT,
    LossArm,
    arm,
    code,
    model,
    text,
)
from benchmarks.models.training_page import page, table
from coda_agent import fused
from coda_agent.fused import ahead
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import MIN_ROUNDS

ROUNDS, STEPS = 12, 200
SEEDS, WARM_UP = 4, 20  # seeds whose losses are compared; steps in which the learning rate rises to RATE
# fractions of the time limit: after PREPARING no arm is created, and after TIMING no further round starts
PREPARING, TIMING = 0.65, 0.85
# Under torch.compile, PyTorch before 2.14 reports that it exports a model. Transformers' "sdpa" attention
# then makes a full mask, and PyTorch cannot use its fast kernel with a mask. For an attention function with
# the name below, transformers makes no mask. So all arms use the function of "sdpa" under this name.
CAUSAL = "causal"
SAID = 300  # characters of an error that FILE stores


class StepSizes(NamedTuple):
    """The sizes of a step. ``batch``: the number of sequences. ``length``: the tokens per sequence in timed
    steps. ``short``: the tokens per sequence while losses are compared."""

    batch: int = BATCH
    length: int = LENGTH
    short: int = SHORT


USUAL = StepSizes()


class Trainer:
    """A trainer whose arms share one set of parameters and one optimizer."""

    def __init__(self, kind: str, where: str, **changed: Any):
        """``changed``: new values for entries of the model's config."""
        self.kind, self.where, self.changed = kind, where, changed
        source = self.source = self.made()
        self.optimizer = torch.optim.AdamW(source.parameters(), lr=RATE, fused=where == "cuda")

    def made(self) -> Any:
        """A new model with its own parameters."""
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        with torch.device(self.where):
            return model(self.kind, attn_implementation=CAUSAL, **self.changed)

    def text(self, seed: int, batch: int = BATCH, length: int = LENGTH) -> Tensor:
        return text(seed, batch, length, self.source.config.vocab_size).to(self.where)

    @contextmanager
    def running(self, each: LossArm) -> Iterator[None]:
        module = code(self.kind)
        usual, module.apply_rotary_pos_emb = module.apply_rotary_pos_emb, each.rotary
        try:
            yield
        finally:
            module.apply_rotary_pos_emb = usual

    def step(self, each: LossArm, ids: Tensor) -> Tensor:
        """Run forward, backward and the optimizer's step, and return the loss."""
        with self.running(each):
            loss = each.loss(ids)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def settle(self) -> None:
        """Wait for the GPU."""
        if self.where == "cuda":
            torch.cuda.synchronize()

    def timed(self, each: LossArm, ids: Tensor) -> float:
        """Run a step, and return its milliseconds."""
        self.settle()
        start = time.perf_counter()
        self.step(each, ids)
        self.settle()
        return (time.perf_counter() - start) * 1e3

    def peak(self, each: LossArm, ids: Tensor) -> int:
        """Run a step; return the most bytes that PyTorch had allocated on the GPU at any time."""
        gc.collect()
        if self.where != "cuda":
            self.step(each, ids)
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step(each, ids)
        return torch.cuda.max_memory_allocated()

    def losses(self, each: LossArm, seed: int, steps: int, batch: int, length: int) -> list[float]:
        """Train on this seed's text, starting from this seed's parameters. Return the loss of each step."""
        torch.manual_seed(seed)
        self.source.load_state_dict(self.made().state_dict())
        self.optimizer.state.clear()
        found = list[Tensor]()
        for number in range(steps):
            self.optimizer.param_groups[0]["lr"] = RATE * min(1.0, (number + 1) / WARM_UP)
            found.append(self.step(each, self.text(seed * steps + number, batch, length)))
        return torch.stack(found).float().tolist()


def measure(
    kind: str, seconds: float, out: Path, where: str = "cuda", sizes: StepSizes = USUAL, **changed: Any
) -> None:
    """Measure the times, the peak memory and the losses of one model's arms. ``out`` is written after each
    stage. ``changed``: new values for entries of the model's config."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    begun = time.monotonic()
    trainer = Trainer(kind, where, **changed)
    source = trainer.source
    entry = found[kind] = _entry(source, where, sizes)

    def keep(said: str = "") -> None:
        write_atomic(out, json.dumps(found, indent=1))
        if said:
            print(f"{time.monotonic() - begun:6.1f} s  {kind}: {said}", flush=True)

    def left(share: float = 1.0) -> bool:
        """Whether less than this fraction of the time limit has passed."""
        return time.monotonic() - begun < share * seconds

    if where == "cuda":
        keep(f"{_built(kind, sizes, **changed)} programs are built")
    arms: dict[str, LossArm] = {}
    for name in ARMS:
        if not left(PREPARING):
            entry["failed"][name] = "there was no time for it"
            continue
        try:
            made = arm(name, source, kind)
            for seed in range(2):
                trainer.step(made, trainer.text(seed, sizes.batch, sizes.length))
            entry["peak"][name] = trainer.peak(made, trainer.text(2, sizes.batch, sizes.length))
            arms[name] = made
        except Exception as error:  # if a library fails, its arm's result is the failure
            traceback.print_exc()
            entry["failed"][name] = f"{type(error).__name__}: {error}"[:SAID]
            trainer.optimizer.zero_grad(set_to_none=True)
        keep(f"{name} is ready")
    if not arms:
        raise ValueError("no arm ran")
    entry["times"] = {name: [] for name in arms}
    for number in range(ROUNDS + 1):
        if number > MIN_ROUNDS and not left(TIMING):
            break
        for name in random.sample(list(arms), len(arms)):
            taken = trainer.timed(arms[name], trainer.text(number, sizes.batch, sizes.length))
            entry["times"][name] += [taken] if number else []  # the first round heats the GPU
        keep()
    keep(f"{number} rounds of times")
    print(table({kind: entry}), flush=True)
    # Only eager arms are compared, because compiled models would compile again for the shorter sequences.
    compared = [name for name in (PLAIN, FUSED) if name in arms]
    for seed in range(SEEDS):
        for name in compared:
            if left():
                lost = trainer.losses(arms[name], seed, STEPS, sizes.batch, sizes.short)
                entry["losses"].setdefault(name, []).append(lost)
                keep(f"losses of {name}, seed {seed}")


def _entry(source: nn.Module, where: str, sizes: StepSizes) -> dict[str, Any]:
    """Return a model's record before anything is measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "where": device() if where == "cuda" else {"gpu": "none"},
        "versions": {name: version(name) for name in PACKAGES},
        "parameters": sum(p.numel() for p in source.parameters()),
        "tokens": sizes.batch * sizes.length,
        "times": {},
        "peak": {},
        "failed": {},
        "losses": {},  # by arm, the losses of each seed
        "warm_up": WARM_UP,
    }


def _built(kind: str, sizes: StepSizes, **changed: Any) -> int:
    """Compile in parallel the programs that the patched model runs; return their number."""
    with torch.device("meta"):
        patched = model(kind, **changed)
    fused.patch(patched, stack=True)  # whole-stack mode runs all programs of module-local mode, and more
    steps = [ahead.training(patched, sizes.batch, length) for length in (sizes.length, sizes.short)]
    return len(ahead.build([bound for step in steps for bound in ahead.called(step)]))


def command(
    name: str,
    seconds: float,
    said: str,
    run: Callable[[str, float, Path], None],
    draw: Callable[[Mapping[str, Any]], str],
    given: Sequence[str] | None = None,
) -> None:
    """Run the command line of a benchmark of models. ``run`` measures one kind of model and writes a file.
    ``seconds`` is the default of the option ``--seconds``, and ``said`` its help text. ``draw`` makes a page
    from the files."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.models.{name}")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("file", type=Path)
    measuring.add_argument("--model", choices=("llama", "qwen3"), default="llama")
    measuring.add_argument("--seconds", type=float, default=seconds, help=said)
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path, nargs="+")
    drawing.add_argument("page", type=Path)
    arguments = parser.parse_args(given)
    if arguments.command == "measure":
        run(arguments.model, arguments.seconds, arguments.file)
    else:
        read = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.file]
        write_atomic(arguments.page, draw({kind: entry for each in read for kind, entry in each.items()}))


def main(given: Sequence[str] | None = None) -> None:
    command("training", 500.0, "time limit", measure, page, given)


if __name__ == "__main__":
    main()
