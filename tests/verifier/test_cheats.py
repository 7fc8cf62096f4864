"""Every cheat in tests/cheats gets the verdict that it declares, and every honest twin of a cheat is
Checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cheats import PROGRAMS, THEMES
from cheats.child import TAKEN_OVER, nothing_left
from cheats.corpus import Cheat, Contained, Twin
from checkout import ROOT

from coda_agent.primitives.lang.signature import EIGHTS
from coda_agent.verifier.report import Checked, Rejected
from coda_agent.verifier.sandbox import jail
from coda_agent.verifier.verify import Verdict, check

pytestmark = pytest.mark.slow

CHEATS = {f"{theme}: {cheat.name}": cheat for theme, cheats in THEMES.items() for cheat in cheats}
TWINS = {
    cheat.twin.name + (", sent" if cheat.taken_over else ""): (cheat.twin, cheat.taken_over)
    for cheat in CHEATS.values()
}


@pytest.fixture(autouse=True)
def quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """Assert that a check leaves nothing behind and writes nothing to stdout or stderr."""
    with nothing_left(tmp_path, monkeypatch):
        yield
    assert capfd.readouterr() == ("", "")


def verdict(twin: Twin, source: str, taken_over: bool, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    if taken_over:
        monkeypatch.setattr(jail, "BOOT", TAKEN_OVER)
    return check(twin.spec, source)


@pytest.mark.usefixtures("some_runs", "told_resources")
@pytest.mark.parametrize(("twin", "sent"), TWINS.values(), ids=TWINS)
def test_an_honest_twin_is_checked(twin: Twin, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    report, program = verdict(twin, twin.sent if sent else twin.source, sent, monkeypatch)
    assert isinstance(report, Checked), report
    assert program == twin.program


# If a cheat is contained, its program is the program of its honest twin.
@pytest.mark.usefixtures("interpreted_once", "told_resources")
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_cheat(cheat: Cheat, monkeypatch: pytest.MonkeyPatch) -> None:
    report, program = verdict(cheat.twin, cheat.source, cheat.taken_over, monkeypatch)
    if isinstance(cheat.ends, Contained):
        assert isinstance(report, Checked), report
        assert program == cheat.twin.program
        return
    assert isinstance(report, Rejected) and program is None, report
    assert report.gate == cheat.ends.gate and report.code in cheat.ends.codes, report
    assert cheat.ends.says in report.message


def test_the_corpus_is_as_large_as_was_promised() -> None:
    cheats = [cheat for theme in THEMES.values() for cheat in theme]
    assert len(CHEATS) == len(cheats), "a name is used twice"
    assert len(cheats) >= 60 and len(PROGRAMS) >= 20
    honest = {cheat.twin.sent if cheat.taken_over else cheat.twin.source for cheat in cheats}
    sources = [cheat.source for cheat in cheats]
    assert not honest & set(sources), "a cheat that is its twin"
    assert len(set(sources)) == len(sources), "a cheat that is another"
    page = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    assert f"{len(cheats)} hostile candidates" in page


def test_experts_fp8_outputs_and_packed_heads_have_their_share() -> None:
    cheats = [cheat for theme in THEMES.values() for cheat in theme if _modern(cheat.twin)]
    assert len(cheats) >= 20 and len({cheat.twin.name for cheat in cheats}) >= 10


def _modern(twin: Twin) -> bool:
    return (
        any(i.init.offsets is not None for i in twin.spec.inputs.values())
        or any(o.dtype in EIGHTS for o in twin.spec.outputs.values())
        or any(n.op == "column_range" for n in twin.program.nodes)
    )
