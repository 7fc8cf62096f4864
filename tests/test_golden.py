"""Evidence must not change after the measurement that it describes. Reports and recordings are bound to
specs, programs, texts and files. The test compares the hashes of all of these with ``golden.json``.

After adding a kernel, run ``PYTHONPATH=tests/support python tests/test_golden.py``, which rewrites
``golden.json`` with the kernel's hashes. A person reviews the change.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from authoring import KERNELS, RECORDINGS, SPECS
from checkout import ROOT

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import DEVICE
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.loading import load

GOLDEN = Path(__file__).parent / "golden.json"
RESULTS = ROOT / "docs" / "comparison"


def computed() -> dict[str, dict[str, str]]:
    """Return hashes by group and name. They are the hashes of specs, of programs, of lowered or edited texts,
    and of the bytes of whole files."""
    specs = {p.stem: load(p, check=False) for p in sorted(SPECS.glob("*.yaml"))}
    golden = {
        "spec": {name: spec.hash for name, spec in specs.items()},
        "operator": {name: spec.operator_hash for name, spec in specs.items()},
        "program": {},
        "lowered": {},
    }
    for path in sorted(KERNELS.glob("*.program.json")):
        stem = path.name.removesuffix(".program.json")
        name = stem.removesuffix(".raw")
        program = Program.from_json(path.read_text(), specs[name].signature())
        kernel = KernelSource(program, edited=(KERNELS / f"{stem}.py").read_text() if stem != name else None)
        golden["program"][stem], golden["lowered"][stem] = program.hash, kernel.lowered.hash
    folders = {"kernels": KERNELS, "device": DEVICE, "recordings": RECORDINGS, "comparison": RESULTS}
    for group, folder in folders.items():
        files = sorted(p for p in folder.iterdir() if p.suffix in (".py", ".json", ".jsonl"))
        golden[group] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    return golden


def test_no_evidence_has_moved() -> None:
    known, found = json.loads(GOLDEN.read_text()), computed()
    assert known.keys() == found.keys()
    assert {group: dict(known[group].items() ^ found[group].items()) for group in known} == dict.fromkeys(
        known, {}
    )


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(computed(), indent=1, sort_keys=True) + "\n")
