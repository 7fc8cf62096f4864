"""Measure decoding with fused parts: ``python -m benchmarks.models.serving``.

``measure FILE [--model llama|qwen3] [--seconds N]`` runs on an H100. It measures the time of one decoding
step for 1, 16 and 128 sequences. Like ``generate``, a step runs one forward over a static cache, and then
chooses the most likely token of each sequence. There are five arms. Two arms run eagerly: the unpatched
model, and the model patched by ``fused.patch``. Two more arms replay these models from CUDA graphs. The fifth
arm is the unpatched model under ``torch.compile``, in the mode that uses CUDA graphs. All arms share one set
of parameters, and are interleaved in random order. The host time of a call is the time until the call
returns, on an idle GPU. ``draw FILE PAGE`` makes a page from FILE, on any machine.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models.arms import model, sharing
from benchmarks.models.training import SAID, command
from coda_agent import fused
from coda_agent.fused import ahead
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio

PLAIN, COMPILED, FUSED = "transformers", "torch.compile, reduce-overhead", "fused"
GRAPH = ", CUDA graph"
# torch.compile comes first, because it frees cuBLAS's workspaces, to which earlier graphs would still write
ARMS = (COMPILED, PLAIN, PLAIN + GRAPH, FUSED, FUSED + GRAPH)
BATCHES = (1, 16, 128)
PROMPT, TOKENS = 512, 16  # tokens in the cache before a round, and tokens that a round adds
ROUNDS = 12
FARTHEST = 0.1  # limit on the relative error of an arm's first logits, compared with the unpatched model's
PACKAGES = ("torch", "transformers", "nvidia-cutlass-dsl", "quack-kernels")


class Decoder:
    """Greedy decoding of several sequences over a static cache that contains a random prompt. ``run`` is the
    model to call."""

    def __init__(self, run: Callable[..., Any], config: Any, batch: int, where: str):
        from transformers import StaticCache

        self.run, self.length = run, PROMPT + TOKENS
        cache: Any = StaticCache(config=config, max_cache_len=self.length)
        heads, width = config.num_key_value_heads, config.head_dim
        cache.early_initialization(batch, heads, width, torch.bfloat16, torch.device(where))
        drawn = torch.Generator(where).manual_seed(0)
        for layer in cache.layers:
            layer.keys.normal_(generator=drawn)
            layer.values.normal_(generator=drawn)
        self.first = torch.arange(batch, device=where)[:, None]
        self.tokens, self.places = self.first.clone(), torch.arange(self.length, device=where)
        self.cache, self.position = cache, torch.zeros(1, 1, dtype=torch.int64, device=where)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens after the prompt."""
        self.tokens.copy_(self.first)
        self.position.fill_(PROMPT)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)

    def logits(self) -> Tensor:
        """The logits of each sequence's next token, [batch, vocabulary]; the cache grows by one token."""
        mask = (self.places <= self.position).expand(len(self.tokens), 1, 1, -1)
        found = self.run(
            input_ids=self.tokens,
            position_ids=self.position,
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits[:, -1]

    def step(self) -> None:
        """Append the most likely token to each sequence, and keep the step's logits in ``last``. Each replay
        of a CUDA graph overwrites these logits."""
        self.last = self.logits()
        self.tokens.copy_(self.last.argmax(-1, keepdim=True))
        self.position.add_(1)


class TokenArm(NamedTuple):
    """A way to compute the next tokens. ``step`` computes one token per sequence, on the state of
    ``decoder``."""

    decoder: Decoder
    step: Callable[[], Any]


def arm(name: str, source: nn.Module, batch: int, where: str, contexts: ExitStack) -> TokenArm:
    """Create an arm that shares a model's parameters, and run the arm until everything is compiled. A patched
    model's weights are frozen until the ``contexts`` end."""
    own = sharing(source)
    if name.startswith(FUSED):
        fused.patch(own)
        contexts.enter_context(fused.frozen(own))
    run = torch.compile(own, mode="reduce-overhead", dynamic=False) if name == COMPILED else own
    decoder = Decoder(run, own.config, batch, where)

    def compiled() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        decoder.step()

    step = compiled if name == COMPILED else decoder.step
    for _ in range(3):  # in its first calls, torch.compile compiles, warms up and records
        step()
    return TokenArm(decoder, _recorded(step) if name.endswith(GRAPH) else step)


def _recorded(step: Callable[[], Any]) -> Callable[[], Any]:
    """A function that replays a step from a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Timer:
    """A timer for arms on the GPU, or on the CPU if the machine has no GPU."""

    def __init__(self, where: str):
        self.settle = torch.cuda.synchronize if where == "cuda" else lambda: None

    def token(self, each: TokenArm) -> float:
        """Run one round, and return the milliseconds per token."""
        each.decoder.reset()
        self.settle()
        start = time.perf_counter()
        for _ in range(TOKENS):
            each.step()
        self.settle()
        return (time.perf_counter() - start) / TOKENS * 1e3

    def host(self, each: TokenArm) -> float:
        """Run one step on an idle GPU, and return the microseconds until the call returns."""
        each.decoder.reset()
        self.settle()
        start = time.perf_counter()
        each.step()
        taken = (time.perf_counter() - start) * 1e6
        self.settle()
        return taken


def measure(
    kind: str,
    seconds: float,
    out: Path,
    where: str = "cuda",
    batches: Sequence[int] = BATCHES,
    **changed: Any,
) -> None:
    """Measure all arms of one model at each batch size. ``out`` is written after each batch size.
    ``changed``: new values for entries of the model's config."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    begun = time.monotonic()
    with torch.device(where):
        source = model(kind, **changed).eval()
    found[kind] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "where": device() if where == "cuda" else {"gpu": "none"},
        "versions": {name: version(name) for name in PACKAGES},
        "parameters": sum(p.numel() for p in source.parameters()),
        "batches": {},
    }
    if where == "cuda":
        print(f"{_built(kind, batches, **changed)} programs are built", flush=True)
    for batch in batches:
        if time.monotonic() - begun > seconds:
            break
        found[kind]["batches"][str(batch)] = _batch(source, batch, where)
        write_atomic(out, json.dumps(found, indent=1))
        print(f"{time.monotonic() - begun:6.1f} s\n{table(found)}", flush=True)


@torch.no_grad()
def _batch(source: nn.Module, batch: int, where: str) -> dict[str, Any]:
    """Measure all arms for this number of sequences."""
    with ExitStack() as contexts:
        return _measured(source, batch, where, contexts)


def _measured(source: nn.Module, batch: int, where: str, contexts: ExitStack) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": {}, "host": {}, "apart": {}, "failed": {}}
    exact = Decoder(sharing(source), source.config, batch, where).logits().float()
    arms: dict[str, TokenArm] = {}
    for name in ARMS:
        try:
            made = arm(name, source, batch, where, contexts)
            made.decoder.reset()
            made.step()
            apart = float((made.decoder.last.float() - exact).norm() / exact.norm())
            entry["apart"][name] = apart
            if not apart < FARTHEST:
                raise ValueError(f"its logits are {apart:.3f} from the model's")
            arms[name] = made
        except Exception as error:  # if a library fails, its arm's result is the failure
            traceback.print_exc()
            entry["failed"][name] = f"{type(error).__name__}: {error}"[:SAID]
    timer = Timer(where)
    entry["token"], entry["host"] = {n: [] for n in arms}, {n: [] for n in arms}
    for number in range(ROUNDS + 1):
        for name in random.sample(list(arms), len(arms)):
            taken = timer.token(arms[name]), timer.host(arms[name])
            if number:  # the first round heats the GPU
                entry["token"][name].append(taken[0])
                entry["host"][name].append(taken[1])
    del arms
    torch._dynamo.reset()
    gc.collect()
    return entry


def _built(kind: str, batches: Sequence[int], **changed: Any) -> int:
    """Compile in parallel the programs that the patched model runs for one token; return their number."""
    with torch.device("meta"):
        patched = model(kind, **changed)
    fused.patch(patched)
    calls = [ahead.inference(patched, batch, 1) for batch in batches]
    return len(ahead.build([bound for call in calls for bound in ahead.called(call)]))


def table(found: Mapping[str, Any]) -> str:
    """A table with milliseconds per token, host microseconds per call, and the speed relative to
    ``torch.compile``."""
    titles = ["model", "sequences", "arm", "ms per token", "host, us per call", "speed over torch.compile"]
    lines: list[list[object]] = []
    for kind, entry in found.items():
        for batch, times in entry["batches"].items():
            for name, each in times["token"].items():
                taken, host = statistics.median(each), statistics.median(times["host"][name])
                over = ratio(times["token"].get(COMPILED, each), each)
                lines.append([kind, batch, name, f"{taken:.3f}", f"{host:.0f}", over])
    return markdown_table(titles, lines)


def page(found: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    first = next(iter(found.values()))
    said = [f"{name} {number}" for name, number in first["versions"].items()]
    dates = sorted({entry["date"][:10] for entry in found.values()})
    failures = [
        f"- {kind}, {batch} sequences, {name}: {why}"
        for kind, entry in found.items()
        for batch, times in entry["batches"].items()
        for name, why in times["failed"].items()
    ]
    apart = [a for e in found.values() for times in e["batches"].values() for a in times["apart"].values()]
    return PAGE.format(
        where=f"{first['where']['gpu']}, {', '.join(said)}, {' and '.join(dates)}",
        sizes="; ".join(f"{kind} {e['parameters'] / 1e9:.2f} billion" for kind, e in found.items()),
        prompt=PROMPT,
        tokens=TOKENS,
        rounds=ROUNDS,
        table=table(found),
        apart=max(apart),
        failures="\n".join(["Arms that did not run:", "", *failures, ""]) if failures else "",
    )


PAGE = """# Decoding with fused parts

{where}. Drawn by `python -m benchmarks.models.serving draw` from what `measure` wrote.

Each call computes the next token of a Hugging Face model in bf16, over a static cache of {prompt} tokens.
Parameters: {sizes}. A round computes {tokens} tokens. All arms share one set of parameters and take turns in
random order, for {rounds} rounds. Times are medians; ratios have 95% intervals. The host time is that of one
call, on an idle GPU. The fused arms reorder each weight once, as inside [`fused.frozen`](fused.md).

{table}
The relative difference between the logits of any arm and the unpatched model's is at most {apart:.3f}.

{failures}"""


def main(given: Sequence[str] | None = None) -> None:
    command("serving", 150.0, "after this time, no further batch size starts", measure, page, given)


if __name__ == "__main__":
    main()
