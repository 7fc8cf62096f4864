"""A port to another architecture replaces one value, ``TARGET``. Schedules, gates, compilers and the roofline
depend on this value."""

from __future__ import annotations

import os
import subprocess
import sys

from checkout import PYTHONPATH, ROOT

# The program of a child process, which replaces TARGET before any other module reads it. The invented GPU has
# smaller tiles and no clusters.
OTHER = """
import importlib.util, sys
from pathlib import Path

place = importlib.util.spec_from_file_location("coda_agent.primitives.target", Path("primitives/target.py"))
target = sys.modules[place.name] = importlib.util.module_from_spec(place)
place.loader.exec_module(target)
usual = target.TARGET
target.TARGET = usual._replace(
    machine=usual.machine._replace(name="a GPU", memory=target.Ceiling(1e12, "B/s", "made up")),
    capability=(12, 0),
    architecture="sm_120a",
    environment={"QUACK_ARCH": "120", "CUTE_DSL_ARCH": "sm_120a"},
    block_bytes=99 << 10,
    large_tiles=frozenset([(128, 64, False)]),
    small_tiles=frozenset([(64, 64, False)]),
    clusters=((1, 1),),
    probes=((128, 64, False, 1, 1),),
)

from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import candidates, probes
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.system import subprocesses
from coda_agent.verifier import verify
from coda_agent.verifier.loading import load

spec = load(Path("specs/gemm_swiglu.yaml"))
text = Path("generated_kernels/gemm_swiglu.program.json").read_text()
program = Program.from_json(text, spec.signature())
(step,), sizes = lower(program).gemms, {"M": 64, "D": 4096, "F": 64}
found = candidates(step, sizes)
assert {schedule[:5] for schedule in found} == {(128, 64, False, 1, 1), (64, 64, False, 1, 1)}, found
assert probes(program, step, sizes) == [Schedule()] == [Schedule(128, 64, False, 1, 1)]
assert verify.check_program(spec, program) is None
assert roofline(program, sizes).machine.name == "a GPU"
assert subprocesses.environment()["CUTE_DSL_ARCH"] == "sm_120a"
"""


def test_another_architecture_is_one_value() -> None:
    line, env = [sys.executable, "-c", OTHER], os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
