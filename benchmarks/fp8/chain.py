"""Measure an MLP in fp8: ``python -m benchmarks.fp8.chain FILE [--widths 7B]``, on an H100.

The measured operations are up projection, SwiGLU, down projection, residual and RMSNorm. They map the
normalised rows of a residual stream to the normalised rows after the MLP. Our arm runs ``gemm_fp8_swiglu``
and ``gemm_fp8_residual_rmsnorm``. These kernels write fp8 with scales that the previous call computed, so our
arm also computes the scales for the next call. The other arms are PyTorch modules under ``torch.compile``.
One module is in bf16. The other modules use torchao's row-wise recipe, with weights quantised in advance. All
arms are timed interleaved in one process, from a cold L2. Our kernels add partial sums in fp32. By default
torchao's matmuls add partial sums less exactly, so torchao's recipe has a second arm, with fp32 sums.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from benchmarks.fp8.accuracy import END, program, rows
from coda_agent.comparison.layers.plain import rmsnorm
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gpu.benchmark import milliseconds, timed
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio
from coda_agent.verifier.timing import Arm

WIDTHS = {"1B": (2048, 5632), "7B": (4096, 11008), "70B": (8192, 28672)}  # widths of the model and of the FFN
TOKENS, ROUNDS, LONGEST = 16384, 40, 10.0
# The schedules to time, in place of a search. All these schedules have cooperative tiles, because fp32 sums
# leave a pingpong tile too few registers. At this number of rows, cooperative tiles were the fastest when the
# two accepted fp8 kernels were last tuned.
KNOWN = [
    *(Schedule(128, 192, False, 2, 1, group) for group in (8, 16, 32)),
    *(Schedule(128, 160, False, 2, 1, group) for group in (16, 32)),
    Schedule(128, 128, False, 1, 2, 8),
]
OURS, BF16, ROWWISE, EXACT = "fused", "bf16", "torchao, row-wise", "torchao, row-wise, fp32 sums"

Call = Callable[[], Any]


class PlainMlp(nn.Module):
    """The MLP in bf16. It maps normalised rows ``x`` and the residual ``stream``, each [tokens, D], to the
    normalised rows and the stream after the MLP."""

    def __init__(self, width: int, ffn: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)
        self.gamma = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.up(x).chunk(2, -1)
        stream = stream + self.down(silu(gate) * up)
        return rmsnorm(stream, self.gamma), stream


def by_torchao(mlp: PlainMlp, fast: bool) -> nn.Module:
    """A copy of the module with torchao's row-wise fp8 matmuls and quantised weights."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    made = PlainMlp(mlp.gamma.numel(), mlp.down.in_features).to(mlp.gamma)
    made.load_state_dict(mlp.state_dict())
    sums = Float8MMConfig(use_fast_accum=fast)
    quantize_(made, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), mm_config=sums))
    return made


class Fp8Mlp:
    """The MLP with our fp8 kernels. ``act`` and ``out`` are the scales of the activation and of the
    normalised output. Each call uses the scales from the previous call, and then replaces them."""

    def __init__(self, mlp: PlainMlp, x: Tensor, stream: Tensor):
        # rows of gate and up interleaved
        up = mlp.up.weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        self.up, self.down, self.gamma = rows(up), rows(mlp.down.weight), mlp.gamma.detach()
        self.x, self.stream = rows(x), stream
        self.act = self.out = torch.ones((), device=x.device)
        names = "swiglu", "residual_rmsnorm"
        self.expand, self.reduce = (Kernel(program(f"gemm_fp8_{n}"), known={0: KNOWN}) for n in names)
        for _ in range(2):  # twice, because a change of the scale ``act`` changes the scale ``out``
            self()

    def __call__(self) -> dict[str, Tensor]:
        up = self.expand(x=self.x[0], sx=self.x[1], w=self.up[0], sw=self.up[1], scale=self.act)
        rows_of_act = (1 / self.act).expand(TOKENS).contiguous()
        made = self.reduce(
            y=up["act"], sy=rows_of_act, w=self.down[0], sw=self.down[1], x=self.stream, gamma=self.gamma,
            scale=self.out,
        )  # fmt: skip
        factor = made["rstd"] / self.out
        self.act, self.out = END / up["amax"].amax(), END / made["amax"].amax()
        return made | {"factor": factor}


def arms(width: str) -> tuple[dict[str, Call], dict[str, float]]:
    """Each arm's call, and the RMS error of its normalised rows relative to the module in fp32."""
    d, ffn = WIDTHS[width]
    torch.manual_seed(0)
    with torch.device("cuda"):
        mlp = PlainMlp(d, ffn).bfloat16().requires_grad_(False)
        x, stream = torch.randn(TOKENS, d).bfloat16(), torch.randn(TOKENS, d).bfloat16()
        wide = PlainMlp(d, ffn).requires_grad_(False)
    wide.load_state_dict(mlp.state_dict())
    exact = wide(x.float(), stream.float())[0]
    del wide
    fused = Fp8Mlp(mlp, x, stream)
    calls: dict[str, Call] = {OURS: fused}
    for name, module in {BF16: mlp, ROWWISE: by_torchao(mlp, True), EXACT: by_torchao(mlp, False)}.items():
        compiled = torch.compile(module)
        calls[name] = partial(compiled, x, stream)
    made = fused()
    found = {OURS: made["hg"].float() * made["factor"][:, None]}
    found |= {name: calls[name]()[0].float() for name in (BF16, ROWWISE, EXACT)}
    size = exact.square().mean().sqrt()
    return calls, {name: float((got - exact).square().mean().sqrt() / size) for name, got in found.items()}


@torch.no_grad()
def measured(width: str) -> dict[str, Any]:
    """The samples of all arms in milliseconds, the errors of all arms, and the GPU's conditions."""
    calls, errors = arms(width)
    samples, conditions = timed([Arm(name, call) for name, call in calls.items()], ROUNDS, longest=LONGEST)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "where": device() | {"torchao": version("torchao")},
        "times": {name: milliseconds(s) for name, s in samples.items()},
        "errors": errors,
        "conditions": conditions,
    }


def table(found: Mapping[str, Any]) -> str:
    """A Markdown table: each arm's time over our arm's time, with a 95% interval, and its error in
    percent."""
    lines = [
        [width, name, ratio(samples, entry["times"][OURS]), f"{100 * entry['errors'][name]:.2f}"]
        for width, entry in found.items()
        for name, samples in entry["times"].items()
    ]
    return markdown_table(["width", "arm", "time over fused", "error, %"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--widths", default="7B")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for width in given.widths.split(","):
        found[width] = measured(width)
        write_atomic(given.file, json.dumps(found, indent=1))
        print(table({width: found[width]}), flush=True)


if __name__ == "__main__":
    main()
