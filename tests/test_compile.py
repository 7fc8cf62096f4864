"""Real compiles for sm_90a, which need no GPU, and what keeps their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import BACKWARD, NORM, kernel_names, signature, tensor, trace

from primitives import compile as compiling
from primitives.compile import PROBES, CompileError, Resources, cache_dir, report
from primitives.files import write_atomic
from primitives.ir import Program
from primitives.lower import lower


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing is read from a cache of the user's or left in one."""
    path = tmp_path_factory.mktemp("coda-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_AGENT_CACHE", str(path))
        yield path


# What the backward lacks: masks of three widths, scalars, selects, computed vectors and a second step.
REST = trace(
    signature(
        {
            "x": tensor("M, K"),
            "w": tensor("2*F, K"),
            "q": tensor("N, F"),
            "v": tensor("M"),
            "b": tensor("N", "fp32"),
            "r": tensor("M, N"),
            "z": tensor("M, 2*N"),
        },
        {"e": tensor("M", "fp32"), "a": tensor("M, F"), "o": tensor("M, N"), "u": tensor("M", "fp32")},
        c=0.5,
    ),
    "h = gemm(x, w.mT)",
    "left, right = pairs(h)",
    "e = row_sums(exp(h * c)) + row_sums(exp(left))",
    "k = where(h.columns > h.rows, 1, 2) + maximum(1, h.rows) + exp(c)",
    "a = where(left > 0, tanh(left), minimum(right, c)) / h.columns * k",
    "g = gemm(a, q.mT) * per_row(rsqrt(e)) * (per_row(v) * 2) + per_column(b)",
    "o = g + r * g.columns + where(1, g, r)",
    "u = row_sums(join(g, exp(o / g.columns)) * (z + 1)) + e",
    "return {'e': e, 'a': a, 'o': o, 'u': u}",
)


def compiled(program: Program) -> dict[str, list[Resources]]:
    """Reports by kernel, of every kernel."""
    found: dict[str, list[Resources]] = {}
    for resources in report(program):
        found.setdefault(resources.kernel, []).append(resources)
    assert list(found) == kernel_names(lower(program))
    return found


def check_gemm(configurations: list[Resources]) -> None:
    assert [r.schedule for r in configurations] == [p.to_json() for p in PROBES]
    for resources in configurations:
        assert 0 < resources.registers <= 255
        assert resources.hgmma > 0 and resources.tma_loads > 0 and resources.tma_stores > 0
        assert 0 < resources.seconds < compiling.COMPILE_SECONDS


def test_swiglu_backward(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, finish = compiled(BACKWARD.program).values()
    check_gemm(step)
    assert [(r.spill_loads, r.spill_stores) for r in step] == [(0, 0), (0, 0)]
    (vector,) = finish
    assert vector.schedule is None and vector.hgmma == 0 and 0 < vector.registers < 64
    kept = list((own_cache / "resources").iterdir())
    assert len(kept) == 1

    def never(request: str) -> str:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_run_child", never)
    assert list(report(BACKWARD.program)) == [*step, *finish]


def test_masks_scalars_selects_and_two_steps() -> None:
    first, second, *vectors = compiled(REST).values()
    check_gemm(first)
    check_gemm(second)
    assert len(vectors) == 2 and all(r.registers > 0 for configurations in vectors for r in configurations)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An interpreter that plays the compiler's process: a script, told what to do."""
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    yield script


def play(script: Path, body: str) -> None:
    script.write_text(f"#!{sys.base_prefix}/bin/python3\nimport json, os, signal, sys, time\n{body}\n")
    script.chmod(0o755)


def test_the_compilers_words_are_kept_short(stand_in: Path) -> None:
    play(stand_in, "print('Warning: noise', file=sys.stderr)\nsys.exit('x' * 9000 + chr(10) + 'the reason')")
    with pytest.raises(CompileError) as caught:
        report(NORM.program)
    words = str(caught.value)
    assert words.endswith("the reason") and len(words) <= 1500 and "noise" not in words
    assert not (cache_dir() / "resources").exists()


def test_a_compiler_that_crashes_is_an_error_not_our_end(stand_in: Path) -> None:
    play(stand_in, "os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(CompileError, match="died with status -11"):
        report(NORM.program)


def test_a_compiler_that_hangs_is_ended(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 1)
    play(stand_in, "time.sleep(60)")
    with pytest.raises(CompileError, match="did not finish in 1 s"):
        report(NORM.program)


def test_the_compilers_environment_is_ours(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's settings of the compilers must not change what is reported."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("QUACK_CACHE_DIR", "/elsewhere")
    seen = stand_in.parent / "seen"
    play(
        stand_in,
        f"json.dump([sys.argv, dict(os.environ), json.load(sys.stdin)], open({str(seen)!r}, 'w'))\nprint([])",
    )
    assert report(NORM.program) == ()
    arguments, environment, request = json.loads(seen.read_text())
    assert arguments[1:3] == ["-m", "primitives.compile"] and not Path(arguments[3]).exists()
    settings = {k: v for k, v in environment.items() if k.startswith(("CUTE_DSL_", "QUACK_"))}
    assert settings == {
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "90",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": arguments[3],
    }
    assert Program.from_json(request["program"]) == NORM.program


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_atomic(path, "first")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        write_atomic(path, "second")
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_lowered_text_is_imported_from_a_file_of_its_content() -> None:
    """In a process of its own: it imports the DSL. A file that was tampered with is written again."""
    lowered = lower(NORM.program)
    path = cache_dir() / "lowered" / f"{lowered.module}.py"
    write_atomic(path, "raise SystemExit('tampered')")
    code = (
        "import sys\nfrom primitives.compile import load_module\nfrom primitives.ir import Program\n"
        "from primitives.lower import lower\nlowered = lower(Program.from_json(sys.stdin.read()))\n"
        "module = load_module(lowered)\nassert load_module(lowered) is module\n"
        "print([hasattr(module, k.name) for k in (*lowered.gemms, *lowered.vectors)], module.__file__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=NORM.program.to_json(),
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert done.stdout == f"[True, True] {path}\n"
    assert path.read_text() == lowered.text
