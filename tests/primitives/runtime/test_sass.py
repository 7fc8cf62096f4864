"""Machine code beside the lowered text: parsing the output of nvdisasm, one real compile, and the display."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from operators import of_spec
from rich.console import Console

from coda_agent.agent.show import sass as shown
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import sass
from coda_agent.primitives.runtime.compile import report
from coda_agent.primitives.runtime.sass import LOWERED, Instruction, Listing, disassemble, parse

pytestmark = pytest.mark.slow

BACKWARD, SIZES = of_spec("gemm_swiglu_bwd"), {"D": 64, "F": 64}
TEXT = """\
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS"
.text.kernel_cutlass_kernel_coda_lowered_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_7:
	//## File "/cache/lowered/coda_lowered_1.py", line 27
        /*0010*/                   FFMA R23, R118, R185, R23 ;
        /*0020*/              @!P2 BRA `(.L_x_7) ;
	//## File "/venv/lib/python3.11/site-packages/quack/gemm_sm90.py", line 511
        /*0030*/              @UP0 UTMALDG.2D [UR8], [UR4] ;
	//## File "/cache/lowered/coda_lowered_1.py", line 27
        /*0040*/                   MUFU.EX2 R4, R4 ;
        /*0050*/                   STL.64 [R1+0x8], R4 ;
        /*0060*/                   NOP ;
        /*0070*/                   NOP ;
"""


def test_instructions_have_an_address_a_kind_and_a_place() -> None:
    found = list(parse(TEXT, "/cache/lowered/coda_lowered_1.py"))
    assert found == [
        Instruction(0x00, "LDC R1, c[0x0][0x28]", "?", 0),
        Instruction(0x10, "FFMA R23, R118, R185, R23", LOWERED, 27),
        Instruction(0x20, "@!P2 BRA 0x0010", LOWERED, 27),
        Instruction(0x30, "@UP0 UTMALDG.2D [UR8], [UR4]", "quack/gemm_sm90.py", 511),
        Instruction(0x40, "MUFU.EX2 R4, R4", LOWERED, 27),
        Instruction(0x50, "STL.64 [R1+0x8], R4", LOWERED, 27),
    ]
    assert [i.kind for i in found] == ["other", "FP32", "other", "TMA", "MUFU", "spill"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def listings() -> tuple[Listing, ...]:
    return disassemble(KernelSource(BACKWARD), SIZES)


def test_a_real_compile(listings: tuple[Listing, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    listing, finish = listings
    assert listing.schedule == PROBES[0] and listing.kernel == lower(BACKWARD).gemms[0].name
    text = dict(enumerate(lower(BACKWARD).text.splitlines(), 1))
    assert listing.source.items() <= text.items()
    assert next(iter(listing.source.values())).startswith(f"class {listing.kernel}(")
    lines = listing.lines()
    assert lines.keys() <= listing.source.keys()
    # A thread holds 128 accumulators of a 128x128 tile, which are 64 pairs. For each pair, a line that calls
    # sigmoid computes one exponential and one reciprocal: 128 MUFU instructions.
    of_sigmoid = [lines[number]["MUFU"] for number, line in listing.source.items() if "= sigmoid(" in line]
    assert of_sigmoid == [128, 128]
    (product,) = (number for number, line in listing.source.items() if "n5_0 = (" in line)
    assert lines[product] == Counter(FP32=64)
    assert (
        finish.schedule is None and finish.total()["global"] and finish.lines().keys() <= finish.source.keys()
    )
    # The counts equal those of the resource report, because line info changes no instruction.
    resources, _ = report(KernelSource(BACKWARD), SIZES, PROBES[:1])
    opcodes = Counter(word.partition(".")[0] for i in listing.instructions for word in i.text.split()[:2])
    assert (opcodes["HGMMA"], opcodes["UTMALDG"], opcodes["UTMASTG"]) == (
        resources.hgmma, resources.tma_loads, resources.tma_stores,
    )  # fmt: skip
    assert listing.elsewhere()["quack/sm90_utils.py"]["HGMMA"] > 0
    whole = sum(lines.values(), Counter()) + sum(listing.elsewhere().values(), Counter())
    assert whole == listing.total() and whole.total() == len(listing.instructions)

    monkeypatch.setattr(sass, "_run_child", lambda request: pytest.fail("compiled again"))
    assert disassemble(KernelSource(BACKWARD), SIZES) == listings


@pytest.mark.usefixtures("own_cache")
def test_both_launches_of_a_split_step_are_read() -> None:
    split = Schedule(128, 128, True, 2, 2, split=True)
    program = of_spec("gemm_rmsnorm", "    return {'y': gemm(x, w.mT) * per_row(rstd)}")
    first, second = disassemble(KernelSource(program, {0: split}), {})
    assert [first.schedule, second.schedule] == list(split.launches)
    assert [first.part, second.part] == [(1, 2), (2, 2)]
    assert first.source == second.source and first.lines() and second.lines()
    # Each launch waits for the previous kernel on the stream by programmatic dependent launch. The first
    # launch waits earlier in its code than the second.
    waits = [[i.address for i in each.instructions if "ACQBULK" in i.text] for each in (first, second)]
    assert len(waits[0]) == len(waits[1]) == 1 and waits[0] < waits[1]


@pytest.mark.usefixtures("own_cache")
def test_the_schedule_in_a_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(request: str) -> str:
        asked.append(json.loads(request))
        return "[]"

    monkeypatch.setattr(sass, "_run_child", compiled)
    own = Schedule(128, 192)
    disassemble(KernelSource(BACKWARD._replace(schedule={0: own})), SIZES)
    assert asked[0]["schedules"] == {"0": own.to_json()}


@pytest.mark.usefixtures("own_cache")
def test_a_refusal_has_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "COMPILE_SECONDS", 0.1)
    with pytest.raises(CompileError, match=r"did not finish in 0\.1 s"):
        disassemble(KernelSource(BACKWARD, {0: Schedule(128, 128)}), SIZES)


LISTING = Listing(
    "Step0_0123456789ab",
    Schedule(128, 192),
    {12: "class Step0_0123456789ab(FusedGemm):", 13: "    @cute.jit", 27: "        n2_0 = sigmoid(t0[i])"},
    tuple(parse(TEXT, "/cache/lowered/coda_lowered_1.py")),
)


def printed(*listings: Listing, full: bool) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(*shown.tables(listings or [LISTING], full=full), sep="\n")
    return out.getvalue()


def test_tables_have_the_code_on_request() -> None:
    assert "n2_0 = sigmoid(t0[i])" in printed(full=False) and "UTMALDG" not in printed(full=False)
    text = printed(full=True)
    assert "27 n2_0 = sigmoid(t0[i])\n    000010  FFMA R23, R118, R185, R23\n    000020  @!P2 BRA" in text
    assert "quack/gemm_sm90.py:511\n    000030  @UP0 UTMALDG.2D [UR8], [UR4]" in text


SPLIT = Schedule(128, 192, True, 2, 2, split=True)
BOTH = [replace(LISTING, schedule=each, part=(n, 2)) for n, each in enumerate(SPLIT.launches, 1)]


def test_the_launches_of_a_split_step_have_a_heading_each() -> None:
    headings = [
        "Step0, part 1 of 2, 128x192 pingpong split 2x2",
        "Step0, part 2 of 2, 128x192 pingpong split 1x2",
    ]
    text = printed(*BOTH, full=True)
    assert [f"instructions of {heading}" in text for heading in headings] == [True, True]
    assert text.count("27 n2_0 = sigmoid(t0[i])\n    000010  FFMA") == 2
    assert [each["part"] for each in shown.as_dict([LISTING, *BOTH])] == [[1, 1], [1, 2], [2, 2]]


def test_json_has_the_same() -> None:
    (data,) = json.loads(json.dumps(shown.as_dict([LISTING])))
    assert data["total"]["MUFU"] == 1 and data["schedule"]["tile_n"] == 192 and data["instructions"] is None
    assert data["lines"][-1]["counts"] == {"FP32": 1, "MUFU": 1, "spill": 1, "other": 1}
    (data,) = shown.as_dict([LISTING], full=True)
    assert data["instructions"][3]["file"] == "quack/gemm_sm90.py"
    assert data["instructions"][4] == {
        "address": 0x40, "text": "MUFU.EX2 R4, R4", "kind": "MUFU", "file": None, "line": 27,
    }  # fmt: skip
