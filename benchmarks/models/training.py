"""Measure the training of a Hugging Face model with fused parts: ``python -m benchmarks.models.training``.

``measure FILE [--model llama|qwen3] [--seconds N]``, on an H100, times a Llama or Qwen3 of about 1B
parameters. The arms are: the unpatched model, eager and under ``torch.compile``; the model with Liger's
kernels; and the model patched by ``fused.patch``, module-local and whole-stack, with and without
``torch.compile``. Two more eager arms, with and without the patch, recompute each layer in the backward. All
arms share one set of parameters and one optimizer, and are interleaved in random order. A step is forward,
backward and AdamW. Then the unpatched and the patched model each train for some steps, for several seeds; for
one seed, both start from the same parameters. FILE is written after each stage. ``draw FILE... PAGE`` makes a
page from files of different models, on any machine.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
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

from coda_agent import fused
from coda_agent.fused import ahead
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import MIN_ROUNDS, ratio

PLAIN, COMPILED, LIGER, FUSED, BOTH = (
    "transformers",
    "torch.compile",
    "Liger",
    "fused",
    "fused, torch.compile",
)
STACK, STACK_COMPILED = f"{FUSED}, whole stack", f"{FUSED}, whole stack, torch.compile"
AGAIN = ", recompute"
# most important first
ARMS = (COMPILED, BOTH, STACK_COMPILED, PLAIN, FUSED, STACK, LIGER, PLAIN + AGAIN, FUSED + AGAIN)
THEIRS = (PLAIN, COMPILED, LIGER)
BATCH, LENGTH = 4, 4096
SHORT = 1024  # tokens per sequence while losses are compared
ROUNDS, STEPS = 12, 200
SEEDS, WARM_UP = 4, 20  # seeds whose losses are compared; steps in which the learning rate rises to RATE
# no arm is created after the first of these fractions of the time, and no round starts after the second
PREPARING, TIMING = 0.65, 0.85
RATE = 1e-4
# Under torch.compile, PyTorch before 2.14 reports that it exports a model. Transformers' "sdpa" attention
# then makes a full mask, which excludes PyTorch's fast kernel. All arms register and use the same function
# under this name, for which transformers makes no mask.
CAUSAL = "causal"
PACKAGES = ("torch", "transformers", "liger-kernel", "nvidia-cutlass-dsl", "quack-kernels")
PARTED = 0.05  # largest difference between the losses of two arms that agree
RISEN = 0.5  # a loss that exceeds the lowest so far by more counts as risen
SAID = 300  # characters of an error that FILE stores

Step = Callable[[Tensor], Tensor]  # from token ids to the loss


class StepSizes(NamedTuple):
    """The number of sequences per step, their tokens in timed steps, and their tokens while losses are
    compared."""

    batch: int = BATCH
    length: int = LENGTH
    short: int = SHORT


USUAL = StepSizes()


class LossArm(NamedTuple):
    """A way to compute the loss. ``rotary``: the rotation function that the model's Python module must
    contain while the arm runs."""

    loss: Step
    rotary: Any


def model(kind: str, **changed: Any) -> Any:
    """A random causal model of about 1B parameters in bf16: a Llama with the sizes of Llama 3.2 1B, or a
    Qwen3 of the same width."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 2048,
        "num_attention_heads": 32 if kind == "llama" else 16,
        "num_key_value_heads": 8,
        "head_dim": 64 if kind == "llama" else 128,
        "intermediate_size": 8192 if kind == "llama" else 6144,
        "num_hidden_layers": 16 if kind == "llama" else 20,
        "vocab_size": 128256 if kind == "llama" else 151936,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    config, made = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    return made(config(**sizes | changed)).to(torch.bfloat16).train()


def sharing(source: nn.Module) -> Any:
    """A copy of a model that shares its parameters and buffers."""
    shared = [*source.parameters(), *source.buffers()]
    return copy.deepcopy(source, {id(t): t for t in shared})


def arm(name: str, source: nn.Module, kind: str) -> LossArm:
    """Create an arm that shares a model's parameters."""
    own, code = sharing(source), _code(kind)
    rotary = code.apply_rotary_pos_emb
    if name == LIGER:
        from liger_kernel import transformers as liger

        apply = {"llama": liger.apply_liger_kernel_to_llama, "qwen3": liger.apply_liger_kernel_to_qwen3}[kind]
        usual = dict(vars(code))
        apply(model=own)  # this also changes the Python module, for all models
        rotary = code.apply_rotary_pos_emb
        vars(code).update(usual)
    if name.startswith(FUSED):
        fused.patch(own, keep_reordered=True, stack=name in (STACK, STACK_COMPILED))
    if name.endswith(AGAIN):
        own.activation_checkpointing_enable()
    run = torch.compile(own) if name in (COMPILED, BOTH, STACK_COMPILED) else own
    return LossArm(lambda ids: run(input_ids=ids, labels=ids).loss, rotary)


def _code(kind: str) -> Any:
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    return {"llama": modeling_llama, "qwen3": modeling_qwen3}[kind]


class Trainer:
    """A trainer whose arms share one set of parameters and one optimizer."""

    def __init__(self, kind: str, where: str, **changed: Any):
        """``changed``: values of the model's config."""
        self.kind, self.where, self.changed = kind, where, changed
        source = self.source = self.made()
        self.optimizer = torch.optim.AdamW(source.parameters(), lr=RATE, fused=where == "cuda")
        self.vocabulary = source.config.vocab_size

    def made(self) -> Any:
        """A model with parameters of its own."""
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        with torch.device(self.where):
            return model(self.kind, attn_implementation=CAUSAL, **self.changed)

    def text(self, seed: int, batch: int = BATCH, length: int = LENGTH) -> Tensor:
        """Token ids [batch, length] in which each second token follows from the token before, so that a model
        can learn."""
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 512, (batch, length), generator=drawn)
        ids[:, 1::2] = (ids[:, ::2] * 7 + 3) % min(512, self.vocabulary)
        return ids.to(self.where)

    @contextmanager
    def running(self, each: LossArm) -> Iterator[None]:
        code = _code(self.kind)
        usual, code.apply_rotary_pos_emb = code.apply_rotary_pos_emb, each.rotary
        try:
            yield
        finally:
            code.apply_rotary_pos_emb = usual

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
        """Run a step; return the peak of bytes that PyTorch allocated on the GPU."""
        gc.collect()
        if self.where != "cuda":
            self.step(each, ids)
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step(each, ids)
        return torch.cuda.max_memory_allocated()

    def losses(self, each: LossArm, seed: int, steps: int, batch: int, length: int) -> list[float]:
        """Train from the parameters and on the text of this seed, and return the loss of each step."""
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
    """Measure everything for one model. ``out`` is written after each stage. ``changed``: values of the
    model's config."""
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
        """Whether less than this fraction of the time has passed."""
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
        except Exception as error:  # if another library fails, that is its arm's result
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
    # Compiled models would compile again for these lengths.
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
        "losses": {},  # of each seed, by arm
        "warm_up": WARM_UP,
    }


def _built(kind: str, sizes: StepSizes, **changed: Any) -> int:
    """Compile in parallel what the patched model runs; return the number of programs."""
    with torch.device("meta"):
        patched = model(kind, **changed)
    fused.patch(patched, stack=True)  # whole-stack mode runs all programs of module-local mode, and more
    steps = [ahead.training(patched, sizes.batch, length) for length in (sizes.length, sizes.short)]
    return len(ahead.build([bound for step in steps for bound in ahead.called(step)]))


def table(found: Mapping[str, Any]) -> str:
    """A table of tokens per second and peak memory by model and arm, and of the speed relative to the fastest
    arm that is not ours."""
    titles = [
        "model",
        "arm",
        "ms per step",
        "tokens per second",
        "peak, GiB",
        "speed over the best unfused arm",
    ]
    lines: list[list[object]] = []
    for kind, entry in found.items():
        medians = {name: statistics.median(each) for name, each in entry["times"].items()}
        best = min((n for n in medians if n in THEIRS), key=lambda n: medians[n])
        for name, each in entry["times"].items():
            taken, tokens = f"{medians[name]:.1f}", f"{entry['tokens'] / medians[name] * 1000:,.0f}"
            peak = f"{entry['peak'][name] / 2**30:.1f}"
            lines.append([kind, name, taken, tokens, peak, ratio(entry["times"][best], each)])
    return markdown_table(titles, lines)


def page(found: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    where = next(iter(found.values()))["where"]
    versions = next(iter(found.values()))["versions"]
    said = [f"{name} {number}" for name, number in versions.items()]
    dates = sorted({entry["date"][:10] for entry in found.values()})
    failures = [f"- {kind}, {n}: {why}" for kind, e in found.items() for n, why in e["failed"].items()]
    return PAGE.format(
        where=f"{where['gpu']}, {', '.join(said)}, {' and '.join(dates)}",
        sizes="; ".join(f"{kind} {e['parameters'] / 1e9:.2f} billion" for kind, e in found.items()),
        batch=BATCH,
        length=LENGTH,
        short=BATCH * SHORT,
        warm_up=", ".join(f"{kind}: {e['warm_up']}" for kind, e in found.items()),
        rate=RATE,
        risen=RISEN,
        parted=PARTED,
        rounds=" and ".join(sorted({str(len(t)) for e in found.values() for t in e["times"].values()})),
        table=table(found),
        losses=_losses(found),
        failures="\n".join(["Arms that did not run:", "", *failures, ""]) if failures else "",
    )


def _losses(found: Mapping[str, Any]) -> str:
    titles = [
        "model",
        "seed",
        "steps",
        "first loss",
        "last loss",
        "agree for",
        "largest difference until then",
    ]
    lines: list[list[object]] = []
    for kind, entry in found.items():
        for seed, runs in enumerate(zip(*entry["losses"].values(), strict=False)):
            first, second = (*runs, runs[0])[:2]
            apart = [abs(a - b) for a, b in zip(first, second, strict=True)]
            steps = next((i for i, each in enumerate(apart) if each > PARTED), len(apart))
            said = ", ".join(f"{n} {run[-1]:.4f}" for n, run in zip(entry["losses"], runs, strict=True))
            rises = ", ".join(f"{n} {_risen(run)}" for n, run in zip(entry["losses"], runs, strict=True))
            most = f"{max(apart[:steps], default=0.0):.4f}"
            lines.append([kind, seed, len(first), f"{first[0]:.4f}", said, f"{steps} steps", most, rises])
    return markdown_table([*titles, "risen steps"], lines)


def _risen(losses: Sequence[float]) -> int:
    """The number of steps whose loss is more than ``RISEN`` above the lowest before."""
    return sum(each > min(losses[: i + 1]) + RISEN for i, each in enumerate(losses))


PAGE = """# Training with fused parts

{where}. Drawn by `python -m benchmarks.models.training draw` from what `measure` wrote.

A step is forward, backward and AdamW of a Hugging Face model in bf16, on {batch} sequences of {length}
tokens. Parameters: {sizes}. All arms share one set of parameters and take turns in random order, for {rounds}
rounds. Times are medians; ratios have 95% intervals.

- Arms with *recompute* use activation checkpointing, without `torch.compile`.
- The other fused arms keep reordered weights from the forward to the backward (`keep_reordered=True`).
- All arms call PyTorch's causal attention without a mask. Otherwise, with PyTorch before 2.14, transformers
  would make a mask under `torch.compile`, and attention would lose its fast kernel.

{table}
Peak memory is the most that PyTorch allocated in a step, including parameters and optimizer.

## Losses

The unpatched and the fused model start from the same parameters, and train on the same {short:,} tokens per
step. Each seed has other parameters and another text. AdamW's learning rate rises to {rate} over the first
steps ({warm_up}). The two models agree until their losses differ by more than {parted}. Small differences
grow when a model begins to learn the rule of this text. A *risen* step has a loss that is more than {risen}
above the lowest loss before it.

{losses}
{failures}"""


def command(
    name: str,
    seconds: float,
    said: str,
    run: Callable[[str, float, Path], None],
    draw: Callable[[Mapping[str, Any]], str],
    given: Sequence[str] | None = None,
) -> None:
    """The command line of a benchmark of models. ``run`` measures one kind of model and writes a file;
    ``said`` is the help for its seconds. ``draw`` makes a page from the file."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
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
