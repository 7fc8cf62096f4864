"""The page of the training benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.models.arms import BATCH, LENGTH, RATE, SHORT, THEIRS
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.statistics import ratio

PARTED = 0.05  # two losses agree if they differ by at most this
RISEN = 0.5  # a loss counts as risen if it exceeds the lowest earlier loss by more than this


def table(found: Mapping[str, Any]) -> str:
    """A table by model and arm: tokens per second, peak memory, and the speed relative to the fastest arm
    that is not ours."""
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
    """The number of steps whose loss is more than ``RISEN`` above the lowest earlier loss."""
    return sum(each > min(losses[: i + 1]) + RISEN for i, each in enumerate(losses))


PAGE = """# Training with fused parts

{where}. Drawn by `python -m benchmarks.models.training draw` from what `measure` wrote.

A step is forward, backward and AdamW of a Hugging Face model in bf16, on {batch} sequences of {length}
tokens. Parameters: {sizes}. All arms share one set of parameters and take turns in random order, for {rounds}
rounds. Times are medians; ratios have 95% intervals.

- Arms with *recompute* use activation checkpointing, without `torch.compile`.
- The other fused arms keep reordered weights from the forward to the backward (`keep_reordered=True`).
- In [*whole stack* mode](fused.md#whole-stack-mode) a layer also prepares the next layer's norm.
- All arms call PyTorch's causal attention without a mask. With PyTorch before 2.14, transformers would
  otherwise make a mask under `torch.compile`, and attention would lose its fast kernel.

{table}
Peak memory is the most that PyTorch allocated in a step, including parameters and optimizer.

## Losses

The unpatched and the fused model start from the same parameters, and train on the same {short:,} tokens per
step. Each seed has other parameters and another text. AdamW's learning rate rises to {rate} over the first
steps ({warm_up}). *Agree for* counts the steps before the losses of the two models differ by more than
{parted}. A *risen* step has a loss that is more than {risen} above the lowest loss before it.

{losses}
{failures}"""
