"""Read a kernel's hardware counters: ``python -m benchmarks.counters NAME --ncu [--case CASE] [--raw FILE]``.

The command runs on an H100 with Nsight Compute. ``--ncu`` first compiles everything, then profiles, and
writes the export that ``coda-agent show --counters`` reads. The export is NAME.counters.csv in
generated_kernels/. With ``--raw FILE``, the kernel's edited code in FILE is profiled, and the export is
NAME.raw.counters.csv in the folder of FILE.

Without ``--ncu``, the module is the program that ncu profiles. It launches an accepted kernel ``--times``
times (default 3), on normal inputs at a case of its spec (default: the first case). The kernel runs on the
schedules with which its report measured that case. ``--compile-only`` compiles the kernel but launches
nothing; ``--metrics`` prints the metrics to request from ncu.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coda_agent.agent.show import report_schedules, sibling
from coda_agent.agent.show.counters import heading, wanted
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.files import KERNELS, ROOT, SPECS, write_atomic
from coda_agent.verifier.loading import load

OURS = "regex:coda_(lowered|edited)"  # matches the names of all our kernels, lowered or edited
LISTED = re.compile(r'^"?([a-z0-9]+__[a-z0-9_]+)', re.MULTILINE)  # a metric in the output of --query-metrics
FEWEST = 100  # output with fewer metrics than this is an error message instead of a list


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description="On an H100.")
    parser.add_argument("name", nargs="?", help="an accepted kernel")
    parser.add_argument("--case", help="a case of its spec; by default the first")
    parser.add_argument("--times", type=int, default=3, help="launches")
    parser.add_argument("--raw", type=Path, help="its edited text, such as NAME.raw.py")
    parser.add_argument("--ncu", action="store_true", help="profile it with ncu and write the export")
    parser.add_argument("--compile-only", action="store_true", help="launch nothing")
    parser.add_argument("--metrics", action="store_true", help="print the metrics for ncu, and run nothing")
    arguments = parser.parse_args(given)
    name, case, raw = arguments.name, arguments.case, arguments.raw
    if arguments.metrics:
        print(",".join(wanted(available(ncu()))))
    elif not name:
        parser.error("NAME is missing: give an accepted kernel's name, such as gemm_swiglu_bwd")
    elif arguments.ncu:
        print(f"wrote {profile(name, case, arguments.times, raw)}")
    else:
        launch(name, case, 0 if arguments.compile_only else arguments.times, raw)


def ncu() -> str | None:
    """The path of Nsight Compute's command, from PATH or from a CUDA toolkit; None if neither has the
    command."""
    there = sorted(Path("/usr/local").glob("cuda*/bin/ncu"))
    return shutil.which("ncu") or (str(there[-1]) if there else None)


def available(command: str | None) -> set[str]:
    """The names of the metrics that this GPU has, without suffixes. The names are needed because ncu stops at
    an unknown metric. The set is empty if ncu is missing or lists no metrics."""
    if command is None:
        return set()
    said = subprocess.run([command, "--query-metrics"], capture_output=True, text=True).stdout
    found = set(LISTED.findall(said))
    return found if len(found) >= FEWEST else set()


def profile(name: str, case: str | None, times: int, raw: Path | None) -> Path:
    """Profile a kernel, and return the export's path. Raises SystemExit if ncu is missing or the profiled
    program fails."""
    command = ncu()
    if command is None:
        raise SystemExit("ncu not found: install Nsight Compute, which CUDA toolkits include")
    path = sibling(raw, "raw.counters.csv") if raw else KERNELS / f"{name}.counters.csv"
    child = [sys.executable, "-m", "benchmarks.counters", name, "--times", str(times)]
    child += ["--case", case] if case else []
    child += ["--raw", str(raw.resolve())] if raw else []
    _said([*child, "--compile-only"])  # without ncu, because compilers under ncu hang or take very long
    asked = ["--clock-control", "none", "--csv", "--page", "raw", "-k", OURS]
    said = _said([command, *asked, "--metrics", ",".join(wanted(available(command))), *child])
    if '"ID",' not in said:
        raise SystemExit(f"ncu profiled no kernel; its output: {said.strip()[-2000:]}")
    write_atomic(path, said)
    return path


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stdout.strip()[-2000:]}")
    return done.stdout


def launch(name: str, case: str | None, times: int, raw: Path | None) -> None:
    """Compile a kernel and launch it ``times`` times. Raises SystemExit if the kernel or case does not exist,
    or if the kernel's report did not measure the case."""
    path = KERNELS / f"{name}.program.json"
    if not path.exists():
        raise SystemExit(f"{path}: no such kernel; accepted kernels are in {path.parent}")
    spec = load(SPECS / f"{name}.yaml", check=False)
    chosen = next((c for c in spec.cases if case in (None, c.name)), None)
    if chosen is None:
        raise SystemExit(f"--case {case}: {name} has the cases {', '.join(c.name for c in spec.cases)}")
    own = sibling(raw, "raw.program.json") if raw else path
    path = own if own.exists() else path
    program = Program.from_json(path.read_text(encoding="utf-8"), spec.signature())
    schedules = report_schedules(path, program, chosen.name)
    if not schedules:
        raise SystemExit(f"{path.name}: its report has no schedules at {chosen.name}; verify it again")

    import torch

    from coda_agent.primitives.runtime.executable import Plan
    from coda_agent.verifier.numerics.inputs import draw

    source = KernelSource(program, schedules, raw.read_text(encoding="utf-8") if raw else None)
    plan = Plan(source, chosen.sizes)
    inputs, outputs = draw(spec, chosen.sizes, 0, device="cuda"), plan.outputs()
    for _ in range(times):
        plan.run(inputs, outputs)
    torch.cuda.synchronize()
    print(heading(name, chosen.name, chosen.sizes, schedules, plan.lowered.hash[:12] if raw else ""))


if __name__ == "__main__":
    main()
