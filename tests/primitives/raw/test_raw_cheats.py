"""Every cheat in edited CuTeDSL is compiled or refused as its field ``ends`` says. Cheats that only a GPU can
detect compile. The honest text, which the cheats change, gets the verdict "checked"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cheats.corpus import Cheat, Contained
from cheats.raw import THEMES
from cheats.raw.compiler import SMALL
from cheats.raw.games import FINISH_KERNEL, GAMES, HONEST, STALE, changed
from cheats.raw.language import BOMBS, LIMIT
from cheats.raw.twin import TWIN
from checkout import PYTHONPATH, ROOT

from coda_agent.primitives import raw
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.runtime.compile import _child, _environment
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.report import Checked, Rejected
from coda_agent.verifier.verify import check_edited

pytestmark = pytest.mark.slow

CHEATS = {f"{theme}: {cheat.name}": cheat for theme, cheats in THEMES.items() for cheat in cheats}
TOLD = {name: cheat for name, cheat in CHEATS.items() if cheat not in GAMES}

Compile = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Yield a function that compiles a text. One process compiles all texts, so anything that a text leaves
    behind would affect the next text."""
    # also start the child process of the compile gate, so that it imports its modules while the process below
    # starts
    _child()
    scratch = tmp_path_factory.mktemp("scratch")
    environment = _environment() | {
        "CUTE_DSL_DUMP_DIR": str(scratch),
        "PYTHONPATH": PYTHONPATH,
    }
    command = [sys.executable, "-W", "ignore", "-m", "cheats.raw.compiler", str(scratch)]
    process = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    asked, said = process.stdin, process.stdout

    def compiled(text: str, kernel: str, *, checked: bool = True, seconds: float = 60.0) -> dict[str, Any]:
        work = {"program": TWIN.program.to_json(), "text": text, "kernel": kernel}
        print(json.dumps(work | {"checked": checked, "seconds": seconds}), file=asked, flush=True)
        found: dict[str, Any] = json.loads(said.readline())
        left = {kind: found.pop(kind) for kind in ("children", "files", "descriptors")}
        assert not any(left.values()), left
        return found

    with process:
        yield compiled


@pytest.mark.parametrize("name", TOLD)
def test_a_cheat(name: str, compiling: Compile) -> None:
    cheat = TOLD[name]
    seconds = LIMIT if cheat in BOMBS or cheat.name == "no end" else 60.0
    found = compiling(cheat.source, FINISH_KERNEL, checked=not cheat.taken_over, seconds=seconds)
    if isinstance(cheat.ends, Contained):
        assert "cubin" in found, found
        return
    assert cheat.ends.gate == "compile" and found.get("code") in cheat.ends.codes, found
    assert cheat.ends.says in found["message"], found
    assert found["message"].isprintable() and (found["line"] or 0) <= cheat.source.count("\n")


@pytest.mark.parametrize("changes", HONEST.values(), ids=HONEST)
def test_an_honest_launch_compiles(changes: dict[str, str], compiling: Compile) -> None:
    edit = TWIN.cheat("", "", changes, Contained())
    assert "cubin" in compiling(edit.source, FINISH_KERNEL)


@pytest.mark.parametrize("cheat", GAMES, ids=lambda cheat: cheat.name)
def test_a_game_compiles_and_is_left_to_a_gpu(cheat: Cheat, compiling: Compile) -> None:
    assert "cubin" in compiling(cheat.source, changed(cheat))
    assert not isinstance(cheat.ends, Contained) and cheat.ends.gate in ("numerics", "stability", "benchmark")


def test_the_honest_twin_is_checked_and_a_refusal_is_the_compile_gates(
    compiling: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.verifier.verify.PROBES", (SMALL,))
    report, program = check_edited(TWIN.spec, TWIN.program, TWIN.source)
    assert isinstance(report, Checked) and program == TWIN.program, report
    assert report.identity.raw and not report.gates[-1].findings
    # the first check has already interpreted this program, so the second check need not repeat it
    monkeypatch.setattr("coda_agent.verifier.verify._interpret", lambda *program: None)
    cheat = CHEATS["host: a second launch"]
    report, program = check_edited(TWIN.spec, TWIN.program, cheat.source)
    assert isinstance(report, Rejected) and program is None
    assert not isinstance(cheat.ends, Contained)
    assert (report.gate, report.code) == (cheat.ends.gate, *cheat.ends.codes)


def wanted(text: str) -> raw.Wanted:
    lowered = KernelSource(TWIN.program, edited=text).lowered
    return raw.Wanted(lowered, lowered.vectors[0], None, {})


@pytest.mark.parametrize(
    "change", [lambda text: text + "\n", lambda text: text + "\0", lambda text: "# once more\n" + text]
)
def test_two_texts_never_share_an_object(change: Callable[[str], str]) -> None:
    assert wanted(change(TWIN.source)).path().parent != wanted(TWIN.source).path().parent


@pytest.mark.parametrize("cheat", (*STALE, *GAMES), ids=lambda cheat: cheat.name)
def test_the_twins_object_is_not_served(
    cheat: Cheat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("coda_agent.primitives.system.workers.run_all", lambda *given: [False])
    write_atomic(wanted(TWIN.source).path(), b"kept")
    with pytest.raises(CompileError, match="not a 64-bit"):
        raw.load(wanted(TWIN.source))
    with pytest.raises(CompileError, match="does not compile"):
        raw.load(wanted(cheat.source))


REPLACED: dict[str, Callable[[Path], object]] = {
    "nothing": Path.touch,
    "garbage": lambda path: path.write_bytes(b"x" * 4096),
    "a library": lambda path: path.write_bytes(Path(torch._C.__file__).read_bytes()),
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to(sys.executable),
    "a pipe": os.mkfifo,
    "a hole of a terabyte": lambda path: path.open("wb").truncate(1 << 40),
}


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_a_cache_file_that_was_replaced_is_not_loaded(
    change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    path = wanted(TWIN.source).path()
    path.parent.mkdir(parents=True)
    change(path)
    with pytest.raises(CompileError) as caught:
        raw.load(wanted(TWIN.source))
    assert caught.value.code in ("object", "no_object")


def test_the_corpus_is_as_large_as_was_promised() -> None:
    cheats = [cheat for theme in THEMES.values() for cheat in theme]
    assert len(CHEATS) == len(cheats) >= 100, "a name is used twice"
    sources = [TWIN.source, *(cheat.source for cheat in cheats)]
    assert len(set(sources)) == len(sources), "a cheat that is another"
    page = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    assert f"{len(cheats)} edits of lowered CuTeDSL" in page
    assert f"{len(GAMES)} that only a GPU can detect" in page
