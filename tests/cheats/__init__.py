"""The corpus of cheats, by theme: see README.md."""

from __future__ import annotations

from cheats import (
    blind,
    contract,
    documents,
    eights,
    graphs,
    grouped,
    heads,
    landmarks,
    mathematics,
    sandbox,
    takeover,
)

THEMES = {
    "sandbox": sandbox.CHEATS,
    "takeover": takeover.CHEATS,
    "contract": contract.CHEATS,
    "graphs": graphs.CHEATS,
    "documents": documents.CHEATS,
    "mathematics": mathematics.CHEATS,
    "eights": eights.CHEATS,
    "heads": heads.CHEATS,
    "grouped": grouped.CHEATS,
    "blind": blind.CHEATS,
    "landmarks": landmarks.CHEATS,
}
PROGRAMS = (*THEMES["graphs"], *THEMES["documents"])  # JSON that bypasses the tracer
