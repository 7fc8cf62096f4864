"""One kernel for Nsight Compute to count: ``python -m benchmarks.counters NAME [--case CASE] [--raw FILE]``.

On an H100, under ``ncu`` (docs/performance.md has the command). Launches an accepted kernel N times (3 unless
said otherwise) on normal inputs at a case of its spec (the first), with the schedules that its report
measured that case with. ``--raw``: an edited text to run in its place. ``--metrics`` prints the metrics to
ask ncu for, joined by commas, and runs nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from agent.show import tuned
from agent.show.counters import wanted
from primitives.ir import Program
from verifier.spec import load

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.counters", description="On an H100, under ncu."
    )
    parser.add_argument("name", nargs="?", help="an accepted kernel")
    parser.add_argument("--case", help="of its spec; the first unless said otherwise")
    parser.add_argument("--times", type=int, default=3, help="launches")
    parser.add_argument("--raw", type=Path, help="an edited text of it, such as NAME.raw.py")
    parser.add_argument("--metrics", action="store_true", help="print what to ask ncu for, and run nothing")
    arguments = parser.parse_args()
    if arguments.metrics:
        print(",".join(wanted()))
    elif arguments.name:
        launch(arguments.name, arguments.case, arguments.times, arguments.raw)
    else:
        parser.error("NAME: give an accepted kernel's, such as gemm_swiglu_bwd")


def launch(name: str, case: str | None, times: int, raw: Path | None) -> None:
    """SystemExit where there is no such kernel or case, or the report has not measured it."""
    path = ROOT / "generated_kernels" / f"{name}.program.json"
    if not path.exists():
        raise SystemExit(f"{path}: there is no such kernel; accepted ones are in {path.parent}")
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    chosen = next((c for c in spec.cases if case in (None, c.name)), None)
    if chosen is None:
        raise SystemExit(f"--case {case}: {name} has the cases {', '.join(c.name for c in spec.cases)}")
    program = Program.from_json(path.read_text(encoding="utf-8"), spec.signature())
    schedules = tuned(path, program, chosen.name)
    if not schedules:
        raise SystemExit(
            f"{name}.report.json: no schedules of this program at {chosen.name}; verify it again"
        )

    import torch

    from primitives.launch import Plan
    from verifier.inputs import draw

    plan = Plan(program, chosen.sizes, schedules, raw=raw.read_text(encoding="utf-8") if raw else "")
    inputs, outputs = draw(spec, chosen.sizes, 0, device="cuda"), plan.outputs()
    for _ in range(times):
        plan.run(inputs, outputs)
    torch.cuda.synchronize()
    sizes = ", ".join(f"{dim} {size}" for dim, size in chosen.sizes.items())
    print(f"# {name} at {chosen.name}: {sizes}")  # agent.show.counters reads the case from it


if __name__ == "__main__":
    main()
