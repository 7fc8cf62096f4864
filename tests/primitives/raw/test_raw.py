"""Raw CuTeDSL: a confined child process compiles an edited text to an object file. Only this object file is
loaded."""

from __future__ import annotations

import base64
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import kernels
import pytest

from coda_agent.primitives import raw
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.jit import load_module
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import device_source, editable
from coda_agent.primitives.compiler.lowered import Lowered, VectorKernel
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.raw import child
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.runtime import compile as compiling
from coda_agent.primitives.runtime.compile import compile_gemm, report
from coda_agent.primitives.runtime.precompile import compile_all
from coda_agent.primitives.runtime.sass import disassemble
from coda_agent.primitives.system.files import write_atomic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_workers")]

# this program has sums of rows and of columns, so it also has vector kernels
PROGRAM = kernels.BACKWARD.program
SIZES = {dim: 256 for dim in PROGRAM.signature.dims}
ONE = PROBES[:1]
LOOP = "        for i in cutlass.range("


def edited(old: str = "", new: str = "") -> str:
    text = editable(PROGRAM)
    assert old in text
    return text.replace(old, new, 1)


def refused(text: str) -> CompileError:
    with pytest.raises(CompileError) as caught:
        report(KernelSource(PROGRAM, edited=text), SIZES, ONE)
    return caught.value


def line_of(text: str, words: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if words in line)


@pytest.fixture(scope="module")
def built() -> Lowered:
    """Compile the program's own text as if it were an author's edit; return the lowered program."""
    lowered = KernelSource(PROGRAM, edited=editable(PROGRAM)).lowered
    found = report(KernelSource(PROGRAM, edited=lowered.text), SIZES, ONE)
    assert [r.kernel for r in found] == raw.names(lowered)
    assert found[0].hgmma and found[0].stages and all(r.registers for r in found)
    return lowered


def test_the_same_text_takes_the_same_resources(built: Lowered) -> None:
    own, again = (report(KernelSource(PROGRAM, edited=text), SIZES, ONE) for text in ("", built.text))
    kept = ("schedule", "registers", "stack", "stages", "spill_loads", "hgmma", "tma_loads", "tma_stores")
    for mine, edit in zip(own, again, strict=True):
        assert [getattr(mine, name) for name in kept] == [getattr(edit, name) for name in kept]


def test_only_the_object_is_loaded(built: Lowered) -> None:
    (kernel,) = built.gemms
    assert callable(compile_gemm(built, kernel, ONE[0], SIZES))
    assert built.module not in sys.modules
    with pytest.raises(ValueError, match="nothing imports it but a confined compiler"):
        load_module(built)


def test_tuning_compiles_it_in_confinement_too(built: Lowered) -> None:
    wide = ONE[0]._replace(swizzle=2, evict_loads=True)
    assert compile_all(KernelSource(PROGRAM, edited=built.text), SIZES, [(0, wide)]) == [True]
    assert raw.Wanted(built, built.gemms[0], wide, SIZES).path().exists()
    wrong = KernelSource(PROGRAM, edited=built.text.replace(LOOP, LOOP + "nowhere, "))
    assert compile_all(wrong, SIZES, [(0, wide)]) == [False]


def test_another_text_is_another_object(built: Lowered) -> None:
    other = KernelSource(PROGRAM, edited=built.text + "\n").lowered
    paths = [raw.Wanted(each, each.gemms[0], ONE[0], SIZES).path() for each in (built, other)]
    assert paths[0].exists() and not paths[1].exists()
    again = raw.Wanted(built, built.gemms[0], ONE[0]._replace(swizzle=2), SIZES)
    assert again.path() == paths[0]  # the swizzle is an argument of the launch, not part of the object


def test_an_objects_name_is_one_of_ours_to_the_end(
    built: Lowered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = raw.packed(built)
    name = next(name for name in given if name.endswith(".json"))
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    for changed in (f"{name}.json", f"{name}/../../../x.json", f"{name}\n", f"x/{name}"):
        with pytest.raises(CompileError, match="is not an object's name"):
            raw.unpack(built, {changed: given[name]})
    assert not list(tmp_path.rglob("*"))


def test_an_edits_hash_holds_the_device_code_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of an edited text covers every device module that the text imports, even if the original text
    does not import it. Other modules do not change the hash."""
    text = edited("import cutlass\n", "import cutlass\nfrom primitives.device.softplus import softplus\n")

    def hash_of(text: str) -> str:
        return KernelSource(PROGRAM, edited=text).lowered.hash

    before, plain = hash_of(text), hash_of(editable(PROGRAM))
    usual = device_source

    def changed(name: str) -> str:
        monkeypatch.setattr(
            "coda_agent.primitives.compiler.lower.device_source",
            lambda m: usual(m) + ("# more\n" if m == name else ""),
        )
        return hash_of(text)

    assert changed("softplus") != before and hash_of(editable(PROGRAM)) == plain
    assert changed("mainloop") != before and changed("heads") == before


def test_an_object_is_for_heads_of_one_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The path of an object depends on the width of heads, even if this width occurs only in the kernel
    itself or only in an argument. So an object that was compiled for another width is never loaded."""
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("coda_agent.primitives.system.workers.run_all", lambda *given: [False])
    program = kernels.ROPE.program
    lowered = KernelSource(program, edited=editable(program)).lowered
    (kernel,) = lowered.gemms
    period = kernel.periods[0]
    vector = VectorKernel(0, "Finish", 0, (replace(kernel.arguments[0], period=period),))
    alone = replace(kernel, name="Alone", arguments=())
    for each, schedule in ((kernel, ONE[0]), (alone, ONE[0]), (vector, None)):
        narrow, wide = (
            raw.Wanted(lowered, each, schedule, {d: size for d in program.signature.dims})
            for size in (32, 64)
        )
        assert narrow.path() == replace(narrow, sizes={**narrow.sizes, "M": 999}).path()
        write_atomic(narrow.path(), b"kept")
        with pytest.raises(CompileError, match="not a 64-bit"):
            raw.load(narrow)
        with pytest.raises(CompileError, match="does not compile"):
            raw.load(wide)


@pytest.mark.parametrize("layers", [(), ("seccomp",), ("landlock",), ("seccomp", "limits")])
def test_one_wall_is_not_enough(layers: tuple[str, ...]) -> None:
    missing = child.LAYERS.difference(layers)
    with pytest.raises(RawError, match=f"lacks {', '.join(missing)}") as caught:
        child.demand(layers, missing)
    assert caught.value.code == "weak_jail"
    child.demand(("limits", "seccomp", "landlock"), ())


def test_what_a_compiler_says_in_colours_is_plain(tmp_path: Path) -> None:
    def coloured() -> dict[str, object]:
        raise ValueError("\x1b[91m\x1b[1merror\x1b[0m: a \x1b[38;5;9mtype\x1b[K\x1b]0;title\x07\nnext\x00")

    found = child.refusal(child.run(coloured, tmp_path), "")
    assert found is not None and found.message == "ValueError: error: a type?]0;title?\nnext?"

    def painted() -> dict[str, object]:
        raise ValueError("first" + "\x1b[1m" * child.MOST_WORDS + "last")

    found = child.refusal(child.run(painted, tmp_path), "")
    assert found is not None and found.message == "ValueError: firstlast"
    forged = {"code": "\x1b[1mx", "message": "\x1b[2J" * 1000 + "words", "line": None}
    found = child.refusal(forged, "")
    assert found is not None and (found.code, found.message) == ("x", "words")


def test_another_machine_need_not_run_the_text(
    built: Lowered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = raw.packed(built)
    wanted = raw.Wanted(built, built.gemms[0], ONE[0], SIZES)
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("coda_agent.primitives.system.workers.run_all", lambda *given: [False])
    with pytest.raises(CompileError, match="does not compile: its compiler died"):
        raw.load(wanted)
    raw.unpack(built, given)
    assert callable(raw.load(wanted))


def test_a_kernel_that_does_not_compile_says_why(built: Lowered) -> None:
    broken = replace(built, text=f"{built.text}print(1)\n", hash="0" * 64)
    with pytest.raises(CompileError, match="Step0: the edited text does not compile: a module holds only"):
        raw.load(raw.Wanted(broken, built.gemms[0], ONE[0], SIZES))


@pytest.mark.parametrize("suffix", [".o", ".json"])
def test_what_another_machine_sends_is_looked_at(
    built: Lowered, suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = raw.packed(built)
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    name = next(name for name in given if name.endswith(suffix))
    forged = base64.b64encode(zlib.compress(b"{}")).decode()
    for changed in ({name: forged}, {name: "no base64"}, {name: given[name][:-8]}, {"../x.o": given[name]}):
        with pytest.raises(CompileError):
            raw.unpack(built, changed)
    assert not list(tmp_path.rglob("*.*"))


def test_an_object_that_was_changed_is_not_loaded(
    built: Lowered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = raw.Wanted(built, built.gemms[0], ONE[0], SIZES)
    data = bytearray(wanted.path().read_bytes())
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    wanted.path().parent.mkdir(parents=True)
    wanted.path().write_bytes(data.replace(b"TVMFFIEnvGetStream", b"system\0FFIEnvGetSt"))
    with pytest.raises(CompileError, match="system"):
        raw.load(wanted)


@pytest.mark.parametrize(
    ("old", "new", "code", "place", "words"),
    [
        (
            "import cutlass\n",
            "import os\nimport cutlass\n",
            "vocabulary",
            "import os",
            "os cannot be imported",
        ),
        (
            LOOP,
            f"        accumulator + place\n{LOOP}",
            "compiler",
            "accumulator + place",
            "unsupported operand",
        ),
        (LOOP, f"        raise SystemExit\n{LOOP}", None, "raise SystemExit", ""),
    ],
)
def test_a_refusal_names_the_line_and_the_reason(
    old: str, new: str, code: str | None, place: str, words: str
) -> None:
    text = edited(old, new)
    error = refused(text)
    assert words in str(error) and "Traceback" not in str(error)
    assert error.line == line_of(text, place)
    if code:
        assert error.code == code


def test_a_refused_edit_costs_no_new_compiler(built: Lowered) -> None:
    """After a refused edit, only the confined child that tried to compile the edit ends. The compiler process
    continues, and its scratch folder is empty."""
    refused(edited(LOOP, f"        raise SystemExit\n{LOOP}"))
    compiler = compiling._running
    assert compiler is not None
    refused(edited(LOOP, f"        raise ValueError\n{LOOP}"))
    report(KernelSource(PROGRAM), SIZES, (ONE[0]._replace(swizzle=4),))
    assert (
        compiling._running is compiler
        and compiler.usable()
        and not any(Path(compiler.scratch.name).iterdir())
    )


def test_arguments_keep_their_order() -> None:
    lines = editable(PROGRAM).splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip() == "_epi_ops = (") + 1
    lines[start], lines[start + 1] = lines[start + 1], lines[start]
    error = refused("\n".join(lines) + "\n")
    assert error.code == "arguments" and "in this order" in str(error)


def test_a_compile_without_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(child, "SECONDS", 1.0)
    with pytest.raises(RawError, match="did not end within 1 s"):
        child.run(_forever, tmp_path)


def _forever() -> dict[str, object]:
    while True:
        pass


def test_its_machine_code_stands_beside_its_lines(built: Lowered) -> None:
    """A listing assigns machine code to the lines of an edited text too, although a confined child compiles
    this text."""
    text = built.text.replace(LOOP, f"        # nothing\n{LOOP}")
    step, *vectors = disassemble(KernelSource(PROGRAM, {0: ONE[0]}, edited=text), SIZES)
    lines = step.lines()
    assert step.kernel == "Step0" and len(vectors) == len(built.vectors)
    assert all(line > line_of(text, "# nothing") for line, counts in lines.items() if counts["MUFU"])
    assert step.total()["HGMMA"] and any(counts["MUFU"] for counts in lines.values())
