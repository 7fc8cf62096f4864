"""Train a patched model under FSDP2 on several GPUs: ``python -m benchmarks.models.sharded --out FILE``.

A random Llama of about half a billion parameters trains under ``fully_shard``, one process per GPU, with and
without ``fused.patch``. Then the patched model trains on one GPU with the batches of all GPUs. FILE receives
the losses of every step. For the patched model, FILE also has the largest difference between a step's loss on
several GPUs and its loss on one GPU. FILE also has the tokens per second of the two sharded models, which are
timed interleaved in random order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.models.arms import FUSED, PACKAGES, PLAIN, RATE, model, text
from coda_agent import fused
from coda_agent.fused import ahead
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio

dist: Any = torch.distributed  # mypy finds almost no exports in this module
fully_shard: Any = torch.distributed.fsdp.fully_shard
SIZES = {"num_hidden_layers": 6, "vocab_size": 32768}  # with training.py's widths: 0.43 billion parameters
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WARM = 2  # the times of this many rounds at the start are not counted
ABSOLUTE, RELATIVE = 1e-2, 5e-2  # bounds on the difference of a step's two losses; the larger bound applies


class Sharded:
    """A model with its optimizer and its batches. If ``sharded`` is true, this process has one shard of the
    model, and other processes have the other shards. Otherwise this process has the whole model."""

    def __init__(self, asked: argparse.Namespace, name: str, where: str, *, sharded: bool):
        torch.manual_seed(0)
        self.asked, self.where = asked, where
        self.model: Any = made(asked, where)
        if name == FUSED:
            fused.patch(self.model)
        if sharded:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for layer in self.model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def text(self, step: int, rank: int) -> Tensor:
        """Token ids [sequences, length] for one rank."""
        seed, vocabulary = step * self.asked.world + rank, self.model.config.vocab_size
        return text(seed, self.asked.sequences, self.asked.length, vocabulary).to(self.where)

    def step(self, number: int, ranks: range) -> Tensor:
        """Train on the batches of these ranks, and return the mean loss of the batches."""
        losses = []
        for rank in ranks:
            ids = self.text(number, rank)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(ranks)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).float().mean()

    def timed(self, number: int, rank: int) -> float:
        """Train one step, and return its milliseconds."""
        wait(self.where)
        begun = time.perf_counter()
        self.step(number, range(rank, rank + 1))
        wait(self.where)
        return (time.perf_counter() - begun) * 1e3


def made(asked: argparse.Namespace, where: str) -> Any:
    with torch.device(where):
        return model("llama", **(SMALL if asked.small else SIZES))


def build(asked: argparse.Namespace) -> None:
    """Compile in parallel the programs that the patched model runs."""
    patched = made(asked, "meta")
    fused.patch(patched)
    ahead.build(ahead.called(ahead.training(patched, asked.sequences, asked.length)))


def wait(where: str) -> None:
    if where.startswith("cuda"):
        torch.cuda.synchronize()


def work(asked: argparse.Namespace) -> dict[str, Any]:
    """Do the work of one process. The process trains and times its shards of the plain and of the patched
    model. Then the first process also trains the whole patched model by itself, and returns all results. The
    other processes return an empty dict."""
    where = "cpu" if asked.cpu else f"cuda:{asked.rank}"
    if not asked.cpu:
        torch.cuda.set_device(where)
    store = dist.FileStore(str(asked.scratch / "store"), asked.world)
    dist.init_process_group(
        "gloo" if asked.cpu else "nccl", rank=asked.rank, world_size=asked.world, store=store
    )
    arms = {name: Sharded(asked, name, where, sharded=True) for name in (PLAIN, FUSED)}
    own = range(asked.rank, asked.rank + 1)
    losses = {}
    for name, arm in arms.items():
        mean = torch.stack([arm.step(number, own) for number in range(asked.steps)])
        dist.all_reduce(mean)
        losses[name] = (mean / asked.world).tolist()
        if asked.rank == 0:
            print(f"{name}: {losses[name][0]:.4f} to {losses[name][-1]:.4f}", flush=True)
    turns, times = random.Random(0), {name: list[float]() for name in arms}
    for number in range(WARM + asked.rounds):
        for name in turns.sample(list(arms), len(arms)):
            taken = arms[name].timed(number, asked.rank)
            times[name] += [taken] if number >= WARM else []
    dist.barrier()
    dist.destroy_process_group()
    if asked.rank:
        return {}
    parameters = sum(p.numel() for p in arms[FUSED].model.parameters())
    arms.clear()
    alone = Sharded(asked, FUSED, where, sharded=False)
    one = torch.stack([alone.step(n, range(asked.world)) for n in range(asked.steps)]).tolist()
    tokens, over = asked.world * asked.sequences * asked.length, ratio(times[PLAIN], times[FUSED])
    pairs = list(zip(losses[FUSED], one, strict=True))
    return {
        "parameters": parameters,
        "gpus": asked.world,
        "tokens": tokens,
        "losses": losses | {"one GPU": one},
        "apart": max(abs(a - b) for a, b in pairs),
        "within": all(abs(a - b) < max(ABSOLUTE, RELATIVE * b) for a, b in pairs),
        "milliseconds": times,
        "tokens_a_second": {name: round(tokens / sorted(t)[len(t) // 2] * 1e3) for name, t in times.items()},
        "speed_over_plain": over.to_dict(),
        "where": {} if asked.cpu else device(),
        "versions": {name: version(name) for name in PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.sharded")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world", type=int, default=2, help="GPUs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--cpu", action="store_true", help="use processes with gloo, without a GPU")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    asked = parser.parse_args(given)
    if asked.scratch:
        work(asked)
        return
    if not asked.cpu:
        build(asked)
    with tempfile.TemporaryDirectory() as scratch:
        asked.scratch = Path(scratch)
        line = [sys.executable, "-m", "benchmarks.models.sharded", *given, "--scratch", scratch]
        others = [
            subprocess.Popen([*line, "--rank", str(rank)], env=dict(os.environ))
            for rank in range(1, asked.world)
        ]
        try:
            found = work(asked)
            if any(other.wait(60) for other in others):
                raise SystemExit("another process failed")
        finally:
            for other in others:
                other.kill()
    write_atomic(asked.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k not in ("losses", "milliseconds")}), flush=True)


if __name__ == "__main__":
    main()
