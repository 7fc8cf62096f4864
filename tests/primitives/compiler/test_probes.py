"""Tests of the schedules on which a program is tried. Stages are counted as in QuACK, and all gates use the
same schedules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from authoring import KERNELS, SPECS, resources
from checkout import ROOT
from kernels import EXAMPLES, QK_NORM, ROPE, signature, source, tensor, trace

from coda_agent.agent.artifacts import bundle
from coda_agent.primitives.compiler import probe_schedules
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable, lower
from coda_agent.primitives.compiler.lowered import subtile
from coda_agent.primitives.compiler.probe_schedules import PROBES, choices, fits, operand_stages, probes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_lines
from coda_agent.primitives.lang.schedule import TILES, Schedule
from coda_agent.primitives.runtime.compile import report
from coda_agent.verifier.gates import Failed, Gates, silent
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions, _Session
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.stages import StageRunner
from coda_agent.verifier.verify import compile_gate

pytestmark = pytest.mark.slow

PINGPONG, COOPERATIVE = PROBES


def crowd(loads: int, stores: int, shape: str, dtype: str = "bf16") -> tuple[Any, tuple[str, ...]]:
    """Return the signature and the lines of a kernel that loads and stores many tiles. ``loads`` and
    ``stores`` are the numbers of tiles. The ``shape`` of a tile is [M, N] or [M, 2*N]."""
    read = {f"i{k}": tensor(shape, dtype) for k in range(loads)}
    made = {f"o{k}": tensor(shape, dtype) for k in range(stores)}
    given = {"x": tensor("M, K"), "w": tensor("N, K")} | read
    returned = ", ".join(f"'{name}': d * i{k % loads} + {k}" for k, name in enumerate(made))
    wide = "join(t, t)" if "2*N" in shape else "t"
    sums = " + ".join(["0 * t" if wide == "t" else "d * 0", *read])
    return signature(given, made), (
        "t = gemm(x, w.mT)",
        f"d = {wide}",
        f"d = d + {sums}",
        f"return {{{returned}}}",
    )


def crowded(*what: Any) -> Program:
    declared, lines = crowd(*what)
    return trace(declared, *lines)


GATED = trace(
    signature(
        {"x": tensor("M, K"), "w": tensor("2*F, K"), "z": tensor("M, 4*F"), "y": tensor("M, 4*F")},
        {"a": tensor("M, 4*F"), "b": tensor("M, 4*F"), "c": tensor("M, F")},
    ),
    "t = gemm(x, w.mT)",
    "e, f = pairs(t)",
    "a, b = pairs(z)",
    "c, d = pairs(y)",
    "return {'a': join(a * t, b * t), 'b': join(c * t, d * t), 'c': e * f}",
)
# The epilogues of these programs leave no room for the cooperative tile 256x128.
ROOMY = {
    "two double loads, two double and a half-width store": GATED,
    "three double loads, two double stores": crowded(3, 2, "M, 2*N"),
    "three and three double": crowded(3, 3, "M, 2*N"),
    "six and six": crowded(6, 6, "M, N"),
    "four and four in fp32": crowded(4, 4, "M, N", "fp32"),
}
FULL = crowd(6, 6, "M, 2*N")
EIGHT = trace(
    signature(
        {"x": tensor("M, K"), "w": tensor("N, K"), "r": tensor("M, N")}, {"q": tensor("M, N", "fp8_e4m3")}
    ),
    "return {'q': gemm(x, w.mT) + r}",
)
# This script runs in a separate process, because it imports the DSL. It stops each compilation as soon as
# QuACK has computed the number of stages, and reports this number.
COUNT = """
import json, sys
from primitives.device.mainloop import FusedGemm
from coda_agent.primitives.lang.ir import Program, Schedule
from coda_agent.primitives.compiler.jit import compile_kernel
from coda_agent.primitives.compiler.lower import editable, lower

class Counted(BaseException):
    pass

usual = FusedGemm._compute_stages

def counted(self, *arguments, **more):
    subtile = arguments[1]
    try:
        raise Counted(usual(self, *arguments, **more)[0], *subtile)
    except ValueError as error:
        raise Counted(int(str(error).split("for ")[1].split()[0]), *subtile)

FusedGemm._compute_stages = counted
found = []
for text, sizes, step, fields in json.load(sys.stdin):
    lowered = lower(Program.from_json(text))
    try:
        compile_kernel(lowered, lowered.gemms[step], Schedule(*fields), sizes)
    except Counted as error:
        found.append(error.args)
print(json.dumps(found))
"""


def test_stages_of_operands_are_counted_as_quack_does(tmp_path: Path) -> None:
    examples = [(e.program, e.sizes) for e in EXAMPLES.values()]
    examples += [(QK_NORM.program, {"P": 64}), *((ROPE.program, {"P": pairs}) for pairs in (16, 40, 64))]
    examples += [(program, {}) for program in (*ROOMY.values(), trace(FULL[0], *FULL[1]))]
    examples += 4 * [(EIGHT, {})]
    asked: list[tuple[str, dict[str, int], int, tuple[object, ...]]] = []
    counted = []
    for number, (program, sizes) in enumerate(examples):
        for gemm in lower(program).gemms:
            for tile in sorted(TILES)[number % 4 :: 4]:  # each program gets a quarter of the tiles
                schedule = Schedule(*tile)
                if gemm.admits(schedule, sizes):
                    asked.append((program.to_json(), sizes, gemm.step, tile))
                    stages = operand_stages(program, gemm, schedule, sizes)
                    counted.append([stages, *subtile(schedule, gemm.d)])
    environment = os.environ | {
        "QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a",
        "PYTHONPATH": str(ROOT / "src"), "CODA_AGENT_CACHE": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT],
        input=json.dumps(asked),
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert json.loads(done.stdout) == counted and len(counted) > 50
    assert min(counted)[0] < 2 < max(counted)[0]
    assert {tuple(c[1:]) for c in counted} == {(128, 32), (128, 16), (64, 16), (64, 32), (64, 64)}


@pytest.mark.parametrize(
    ("schedule", "others"), [(PINGPONG, 3), (COOPERATIVE, 7)], ids=["pingpong", "cooperative"]
)
def test_a_sum_of_columns_keeps_a_row_from_each_warp_but_the_first(schedule: Schedule, others: int) -> None:
    declared = signature({"x": tensor("M, K"), "w": tensor("N, K")}, {"s": tensor("N", "fp32")})
    program = trace(declared, "return {'s': column_sums(gemm(x, w.mT))}")
    (gemm,) = lower(program).gemms
    shares = probe_schedules._shares(probe_schedules._resources(program, gemm), schedule, {})
    assert [(kind, size) for _, kind, size in shares] == [("once", others * schedule.tile_n * 4)]


@pytest.mark.parametrize("name", ROOMY)
def test_a_program_is_tried_on_the_schedules_that_leave_it_room(name: str) -> None:
    program = ROOMY[name]
    (gemm,) = lower(program).gemms
    assert probes(program, gemm, {}) == [PINGPONG] and choices(program, [gemm], {}) == [{0: PINGPONG}]
    assert not fits(program, gemm, COOPERATIVE, {})


def test_where_no_probe_fits_the_first_candidate_that_does_is_taken() -> None:
    loads = crowded(9, 1, "M, N", "fp32")
    (gemm,) = lower(loads).gemms
    (found,) = probes(loads, gemm, {}, [COOPERATIVE])
    assert found.pingpong and fits(loads, gemm, found, {})
    assert (
        probes(QK_NORM.program, lower(QK_NORM.program).gemms[0], {"P": 40}) == []
    )  # no tile holds whole heads of 80 columns


def test_a_step_that_fits_one_schedule_leaves_the_other_steps_theirs() -> None:
    first, lines = crowd(3, 3, "M, 2*N")
    both = signature(first.inputs | {"u": tensor("P, 2*N")}, first.outputs | {"v": tensor("M, P")})
    program = trace(both, *lines[:-1], "o = d * i0", "v = gemm(o, u.mT)", lines[-1][:-1] + ", 'v': v}")
    gemms = lower(program).gemms
    assert choices(program, gemms, {}) == [{0: PINGPONG, 1: PINGPONG}, {0: PINGPONG, 1: COOPERATIVE}]


def test_the_compile_gate_tells_which_schedule_it_left_out() -> None:
    figures: dict[str, Any] = {}
    kernel = KernelSource(ROOMY["three double loads, two double stores"])
    compile_gate(crowded_spec(), kernel, PROBES, figures)
    assert [(k["tile"], k["pingpong"]) for k in figures["kernels"]] == [("128x128", True)]
    assert "not compiled for 256x128" in figures["findings"][0]


def crowded_spec() -> Spec:
    """Return a spec without static dims. Any such spec would do."""
    return load(SPECS / "gemm_rmsnorm.yaml", check=False)


def test_a_program_that_no_tile_has_room_for_is_refused_in_words_for_its_author() -> None:
    declared, text = FULL
    program, lines = trace_lines(source(declared, *text), declared)
    with pytest.raises(CompileError, match="return fewer tiles") as refused:
        report(KernelSource(program), {})
    words = str(refused.value)
    assert "\n" not in words and "reads 6 tiles (i0, i1, i2, i3, i4, i5) and stores 6 tiles (o0," in words
    with pytest.raises(Failed, match="split the work over two kernels") as failed:
        compile_gate(crowded_spec(), KernelSource(program), PROBES, {}, lines)
    assert (failed.value.code, failed.value.line) == ("shared_memory", 7)


def test_each_set_of_static_dims_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load(SPECS / "gemm_qk_norm_rope.yaml", check=False)
    text = (KERNELS / "gemm_qk_norm_rope.program.json").read_text()
    program = Program.from_json(text, spec.signature())
    asked = []

    def compiled(program: Program, sizes: dict[str, int], *_: object) -> object:
        asked.append(dict(sizes))
        return resources(program)

    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", compiled)
    figures: dict[str, Any] = {}
    compile_gate(spec, KernelSource(program), PROBES, figures)
    assert asked == [{"P": 32}, {"P": 64}] and [k["static"] for k in figures["kernels"]] == asked
    asked.clear()
    compile_gate(crowded_spec(), KernelSource(GATED), PROBES, figures)
    assert asked == [{}] and "static" not in figures["kernels"][0]


def test_the_gates_of_a_gpu_try_what_the_compile_gate_does() -> None:
    spec, program = load(SPECS / "gemm_rmsnorm.yaml", check=False), ROOMY["six and six"]
    stages = StageRunner(processes=3, progress=silent, keep=None, ahead=[])
    session = _Session(spec, KernelSource(program), MeasureOptions(), Gates(silent), stages, {}, None)
    assert all(job.schedules == ({0: PINGPONG},) for job in session._small())
    tuned = [{0: COOPERATIVE}, {0: Schedule(128, 160)}]
    assert all(job.schedules == ({0: Schedule(128, 160)},) for job in session._small(tuned))


def test_a_bundle_holds_objects_of_what_is_tried_there(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[int, Schedule]] = []
    monkeypatch.setattr(
        "coda_agent.primitives.runtime.precompile.compile_all", lambda *given: wanted.extend(given[2])
    )
    monkeypatch.setattr("coda_agent.primitives.raw.packed", lambda lowered: {})
    spec = load(SPECS / "gemm_rmsnorm.yaml", check=False)
    bundle._objects(spec, KernelSource(ROOMY["six and six"], edited="# edited"), None)
    assert (0, PINGPONG) in wanted and (0, COOPERATIVE) not in wanted


def test_a_bundle_holds_objects_of_all_that_the_kernel_before_may_be_tuned_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An edit is timed on all schedules to which its incumbent may be tuned. These include schedules that the
    incumbent's report does not name."""
    wanted: list[tuple[int, Schedule]] = []
    monkeypatch.setattr(
        "coda_agent.primitives.runtime.precompile.compile_all", lambda *given: wanted.extend(given[2])
    )
    monkeypatch.setattr("coda_agent.primitives.raw.packed", lambda lowered: {})
    spec = load(SPECS / "gemm_relu2.yaml", check=False)
    text = (KERNELS / "gemm_relu2.program.json").read_text()
    known = [Schedule(128, 128, True, 1, 2), Schedule(192, 128, True, 1, 2), Schedule(128, 256, False, 2, 1)]
    cases = {case.name: {0: known} for case in spec.cases if case.bench}
    program = Program.from_json(text, spec.signature())
    said: list[str] = []
    kept = Incumbent(KernelSource(program), {}, cases)
    edited = KernelSource(program, edited=editable(program))
    bundle._objects(spec, edited, kept, lambda gate, words: said.append(words))
    assert [words.partition(":")[0] for words in said] == [f"gemm_relu2, case {c.name}" for c in spec.cases]
    schedules = {schedule for _, schedule in wanted}
    assert {*known} <= schedules
    assert any(s.split for s in schedules) and any(s.tile_m == s.tile_n == 64 for s in schedules)
    wanted.clear()
    # If the incumbent is itself an edit, the new edit is timed only on the incumbent's schedules.
    bundle._objects(spec, edited, Incumbent(edited, {}, cases))
    assert not any(schedule.split for _, schedule in wanted)
