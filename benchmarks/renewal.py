"""Renew reports: repeat the numerics and stability gates of accepted kernels under the current protocol.

`python -m benchmarks.renewal measure --out DIR` on an H100 checks every kernel and edited text whose report
has an earlier protocol, with the schedules that the report timed; `apply DIR` merges the results into the
reports. Protocol 5 times kernels as protocol 4 does, so their timings remain valid.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.gpu.worker import WorkerError
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import proved
from coda_agent.verifier.report import PROTOCOL, Accepted, Gate, Rejected

KERNELS, SPECS = Path("generated_kernels"), Path("specs")
DEVICE = ("gpu", "torch", "cuda")
SHARES = 3  # processes at once, since most of the time is imports and compiles; each process may need 25 GB


def stems() -> list[str]:
    """The names of kernels and edited texts whose report is older than the current protocol."""
    reports = sorted(KERNELS.glob("*.report.json"))
    old = [p for p in reports if Accepted.model_validate_json(p.read_text()).protocol < PROTOCOL]
    return [path.name.removesuffix(".report.json") for path in old]


def prove(stem: str) -> dict[str, object]:
    """Run the numerics and stability gates of one kernel, and return the result as JSON data."""
    name, _, edited = stem.partition(".")
    spec = load(SPECS / f"{name}.yaml", check=False)
    report = Accepted.model_validate_json((KERNELS / f"{stem}.report.json").read_text())
    program = Program.from_json((KERNELS / f"{stem}.program.json").read_text(), spec.signature())
    text = (KERNELS / f"{stem}.py").read_text() if edited else None
    start = time.monotonic()
    found = proved(spec, KernelSource(program, edited=text), report.timings)
    told = {"lowered_hash": report.identity.lowered_hash, "seconds": round(time.monotonic() - start, 1)}
    told |= {"protocol": PROTOCOL, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if isinstance(found, Rejected):
        return told | {"rejected": found.model_dump(mode="json")}
    gates, seeds = found
    facts = {key: str(value) for key, value in device().items() if key in DEVICE}
    told |= {"gates": [gate.model_dump(mode="json") for gate in gates], "seeds": seeds, "device": facts}
    return told


def measure(out: Path, names: Sequence[str], seconds: float) -> None:
    """Check kernels one after another until the time is up, and write one file per kernel. Kernels that have
    a file are skipped."""
    end = time.monotonic() + seconds
    for stem in names:
        path = out / f"{stem}.json"
        if path.exists() or time.monotonic() > end:
            continue
        try:
            found = prove(stem)
        except WorkerError as error:  # a failure of ours, not of the kernel, so the other kernels continue
            print(f"{stem}: {error}", flush=True)
            continue
        path.write_text(json.dumps(found, indent=1))
        said = found.get("rejected", {"message": "passed"})
        print(f"{stem}: {found['seconds']} s: {said['message']}", flush=True)  # type: ignore[index]


def spread(out: Path, seconds: float) -> int:
    """Check all kernels in several processes; return the number of failures."""
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    names, command = stems(), [sys.executable, "-m", "benchmarks.renewal", "measure", "--out", str(out)]
    shares = [names[i::SHARES] for i in range(SHARES)]
    running = [
        subprocess.Popen([*command, "--seconds", str(seconds), "--only", *share]) for share in shares if share
    ]
    failed = sum(process.wait() != 0 for process in running)
    for path in out.glob("*.json"):  # kernels that ran out of memory with three processes are retried alone
        if json.loads(path.read_text()).get("rejected", {}).get("code") == "out_of_memory":
            path.unlink()
    return failed + subprocess.call([*command, "--seconds", str(end - time.monotonic()), "--only", *names])


def apply(found: Path) -> None:
    """Put renewed gates into the reports and set the reports' protocol to the current one. Print rejected
    kernels."""
    for path in sorted(found.glob("*.json")):
        told, place = json.loads(path.read_text()), KERNELS / f"{path.stem}.report.json"
        report = Accepted.model_validate_json(place.read_text())
        if told["lowered_hash"] != report.identity.lowered_hash:
            sys.exit(f"{path}: checked another text than the one in {place}; measure again")
        if "rejected" in told:
            print(f"{path.stem}: rejected: {told['rejected']['message']}")
            continue
        gates = {gate["gate"]: Gate.model_validate(gate) for gate in told["gates"]}
        kept = {k: seed for k, seed in report.seeds.items() if k.partition("/")[0] not in (*gates, "hidden")}
        renewed = report.model_copy(
            update={
                "protocol": told["protocol"],
                "gates": tuple(gates.get(gate.gate, gate) for gate in report.gates),
                "seeds": kept | told["seeds"],
                "renewed": {"date": told["date"], **told["device"]},
            }
        )
        write_atomic(place, renewed.model_dump_json(indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--seconds", type=float, default=3600.0)
    measuring.add_argument("--only", nargs="*")
    applying = commands.add_parser("apply")
    applying.add_argument("found", type=Path)
    given = parser.parse_args()
    if given.command == "apply":
        apply(given.found)
    elif given.only is not None:
        measure(given.out, given.only, given.seconds)
    else:
        sys.exit(spread(given.out, given.seconds))


if __name__ == "__main__":
    main()
