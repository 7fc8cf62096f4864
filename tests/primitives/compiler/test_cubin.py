"""Test that a kernel's resources are counted correctly from the listings that CUDA's tools print."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.primitives.compiler import cubin

SASS = """
    LDL R1, [R2] ;
    STL [R2], R1 ;
    STL.64 [R2+0x8], R4 ;
    STL [R3], R1 ;
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
    UTMALDG.2D [UR8], [UR4] ;
    UTMALDG.2D [UR9], [UR4] ;
    UTMASTG.2D [UR16], [UR4] ;
"""


def test_each_instruction_is_counted_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = {"nvdisasm": SASS, "cuobjdump": "REG:168 STACK:24 SHARED:0"}
    monkeypatch.setattr(cubin, "tool", lambda name, *arguments: listings[name])
    found = cubin.inspect_cubin(Path("kernel.cubin"), "kernel", None, None, 1.234)
    assert (found.registers, found.stack, found.seconds) == (168, 24, 1.23)
    assert (found.spill_loads, found.spill_stores, found.hgmma) == (1, 3, 1)
    assert (found.tma_loads, found.tma_stores) == (2, 1)
