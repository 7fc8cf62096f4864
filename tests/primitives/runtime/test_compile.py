"""Real compiles for sm_90a, which need no GPU, and the caches that keep their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from checkout import ROOT
from kernels import BACKWARD, NORM, QK_NORM, ROPE, kernel_names, signature, tensor, trace

from coda_agent.primitives.compiler.compile_error import CompileError, refusal
from coda_agent.primitives.compiler.cubin import Resources, deepest_stack
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES, operand_stages
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import compile as compiling
from coda_agent.primitives.runtime import precompile
from coda_agent.primitives.runtime.compile import report
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import cache_dir, write_atomic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Replace the user's cache by an empty one, so that the tests neither read nor change the user's
    cache."""
    path = tmp_path_factory.mktemp("coda-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_AGENT_CACHE", str(path))
        yield path


# A program with features that BACKWARD lacks: masks of three widths, scalars, selects, computed vectors and a
# second step.
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
    "k = h.columns / h.rows + exp(c)",
    "a = where(left > 0, tanh(left), minimum(right, c)) / h.columns * k",
    "g = gemm(a, q.mT) * per_row(rsqrt(e)) * (per_row(v) * 2) + per_column(b)",
    "o = g + r * g.columns + where(1, g, r)",
    "u = row_sums(join(g, exp(o / g.columns)) * (z + 1)) + e",
    "return {'e': e, 'a': a, 'o': o, 'u': u}",
)


def compiled(
    program: Program, schedules: tuple[Schedule, ...] = PROBES, **sizes: int
) -> dict[str, list[Resources]]:
    """Return the compile reports of all kernels, by the kernels' names."""
    found: dict[str, list[Resources]] = {}
    gemms = {gemm.name: gemm for gemm in lower(program).gemms}
    for resources in report(KernelSource(program), sizes, schedules):
        found.setdefault(resources.kernel, []).append(resources)
        if resources.schedule and resources.stages:
            schedule = Schedule.from_json(resources.schedule)
            counted = operand_stages(program, gemms[resources.kernel], schedule, sizes)
            assert resources.stages[0] == counted + schedule.deep  # a deep mainloop has one more stage
    assert list(found) == kernel_names(lower(program))
    return found


def check_gemm(configurations: list[Resources], schedules: tuple[Schedule, ...] = PROBES) -> None:
    assert [r.schedule for r in configurations] == [p.to_json() for p in schedules]
    for resources in configurations:
        assert 0 < resources.registers <= 255
        assert resources.hgmma > 0 and resources.tma_loads > 0 and resources.tma_stores > 0
        assert 0 < resources.seconds < compiling.COMPILE_SECONDS


def test_swiglu_backward(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, finish = compiled(BACKWARD.program, PROBES[:1]).values()
    check_gemm(step, PROBES[:1])
    assert [(r.spill_loads, r.spill_stores) for r in step] == [(0, 0)]
    (vector,) = finish
    assert vector.schedule is None and vector.hgmma == 0 and 0 < vector.registers < 64
    kept = list((own_cache / "resources").iterdir())
    assert len(kept) == 1

    def never(request: str) -> str:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_run_child", never)
    assert list(report(KernelSource(BACKWARD.program), {}, PROBES[:1])) == [*step, *finish]


def test_both_launches_of_a_split_step_are_reported() -> None:
    split = Schedule(128, 128, True, 2, 2, split=True)
    found = report(KernelSource(BACKWARD.program), {}, (split,))
    assert [r.schedule for r in found if r.hgmma] == [s.to_json() for s in split.launches]


def test_masks_scalars_selects_and_two_steps() -> None:
    first, second, *vectors = compiled(REST, PROBES[1:]).values()
    check_gemm(first, PROBES[1:])
    check_gemm(second, PROBES[1:])
    assert len(vectors) == 2 and all(r.registers > 0 for configurations in vectors for r in configurations)


# A program of two steps with the rest of the vocabulary. Its head statistics depend on vectors and scalars,
# and per_head repeats a statistic, vectors and an input tile. Its tiles and vectors have all three widths and
# many dtypes. It also has reductions of every kind, indices, comparisons and an fp8 operand.
WIDE = trace(
    signature(
        {
            "x": tensor("M, K"),
            "w": tensor("2*H*P, K"),
            "b": tensor("2*H*P", "fp16"),
            "alpha": tensor("", "fp32"),
            "gamma": tensor("2*P"),
            "freq": tensor("P", "fp32"),
            "cos_sin": tensor("M, 2*P"),
            "positions": tensor("M", "int32"),
            "target": tensor("M", "int64"),
            "half": tensor("M, H*P"),
            "wide": tensor("M, 4*H*P", "fp32"),
            "b_half": tensor("H*P"),
            "b_wide": tensor("4*H*P", "fp32"),
            "x8": tensor("M, K", "fp8_e4m3"),
            "w8": tensor("2*H*P, K", "fp8_e4m3"),
        },
        {
            "q": tensor("M, 2*H*P"),
            "rstd": tensor("M, H", "fp32"),
            "h": tensor("M, H*P", "fp32"),
            "sums": tensor("4*H*P", "fp32"),
            "largest": tensor("H*P"),
            "highest": tensor("2*H*P", "fp32"),
            "lse": tensor("M", "fp32"),
            "loss": tensor("M", "fp32"),
            "z": tensor("M, 2*H*P", "fp16"),
        },
        ("P",),
    ),
    "t = gemm(x, w.mT)",
    "rstd = rsqrt(head_sums(t * t * alpha * per_column(b) * per_row(positions), 2 * P) / (2 * P))",
    "left, right = pairs(t)",
    "c, s = pairs(per_head(cos_sin))",
    "h = left * c - right * s + half + per_column(b_half)",
    "lse = row_logsumexp(h)",
    "u = gemm(x8, w8.mT) * per_row(lse) * per_row(positions) * per_column(b)",
    "z = gelu(u) * alpha + t - abs(sin(u))",
    "d = join(z, column_index(z) == per_row(target)) + wide * per_column(b_wide)",
    "return {'q': rope(t * per_head(rstd) * per_head(gamma), positions, freq), 'rstd': rstd, 'h': h,"
    " 'sums': column_sums(d), 'largest': column_abs_max(h), 'highest': column_max(z), 'lse': lse, 'z': z,"
    " 'loss': row_logsumexp(z) - row_select(z, target) * alpha + row_abs_max(z)}",
)


def test_a_deep_mainloop_takes_stages_from_the_epilogue() -> None:
    usual, deep = (
        next(iter(compiled(BACKWARD.program, (Schedule(deep=deep),)).values()))[0] for deep in (False, True)
    )
    assert usual.stages and deep.stages
    assert deep.stages[0] == usual.stages[0] + 1
    assert all(1 <= less <= more for less, more in zip(deep.stages[1:], usual.stages[1:], strict=True))


def test_a_table_comes_through_tma_where_a_head_is_whole_stages() -> None:
    schedule = (Schedule(128, 160, True, 1, 2),)
    ((streamed,),) = compiled(ROPE.program, schedule, P=16).values()  # heads of 32 columns fill whole stages
    ((addressed,),) = compiled(ROPE.program, schedule, P=40).values()
    assert streamed.tma_loads > addressed.tma_loads == 2  # TMA loads only the two operands
    assert streamed.stages and streamed.stages[2] > 0 and addressed.stages and addressed.stages[2] == 0


def test_a_head_that_reads_a_table_may_be_several_tiles_wide() -> None:
    schedules = Schedule(64, 64, True, 2, 1), Schedule(128, 32, False, 1, 2)
    (configurations,) = compiled(ROPE.program, schedules, P=64).values()
    check_gemm(configurations, schedules)
    assert all(r.stages and r.stages[2] > 0 for r in configurations)  # the table comes through TMA


def test_the_rest_of_the_vocabulary() -> None:
    schedules = (Schedule(128, 128, True, 2, 1),)
    first, second, *vectors = compiled(WIDE, schedules, P=64, M=1).values()
    check_gemm(first, schedules)
    check_gemm(second, schedules)
    assert len(vectors) == 5  # one kernel for all vectors of one length that follow the same step
    assert all(r.registers > 0 and r.hgmma == 0 for configurations in vectors for r in configurations)


def test_tiles_that_heads_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiling,
        "_resources",
        lambda scratch, lowered, kernel, s, sizes: Resources(
            kernel.name, s and s.to_json(), 0, 0, None, *[0] * 6
        ),
    )
    monkeypatch.setattr(compiling, "_run_child", in_this_process)
    wanted = (Schedule(), Schedule(128, 192), Schedule(128, 208))
    reports = {p: report(KernelSource(QK_NORM.program), {"P": p}, wanted) for p in (64, 96, 40)}
    assert {p: [r.schedule["tile_n"] for r in found if r.schedule] for p, found in reports.items()} == {
        64: [128], 96: [192], 40: [],
    }  # fmt: skip
    (other,) = (r for r in report(KernelSource(QK_NORM.program), {"P": 96}, (Schedule(),)) if r.schedule)
    # the requested tile of 128 columns does not fit, so another tile was compiled
    assert other.schedule and other.schedule["tile_n"] % 192 == 0


def in_this_process(request: str) -> str:
    """Do the work of the compiler's child process in this process."""
    return json.dumps(compiling._answer(json.loads(request), Path()))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the compiler's process run a script instead of Python. Return the path at which a test writes this
    script."""
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
        report(KernelSource(NORM.program), {})
    words = str(caught.value)
    assert words.endswith("the reason") and len(words) <= 1500 and "noise" not in words
    assert not (cache_dir() / "resources").exists()


# The end of the compiler's output if a lowered line is wrong. One frame of the traceback is in the lowered
# text; the others are the compiler's own.
REFUSED = """Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/quack/gemm_base.py", line 415, in epilogue
    tRS_rAuxOuts = self.epi_visit_subtile(params, epi_loop_tensors, tRS_rD, tRS_rC)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/.cache/coda-agent/lowered/coda_lowered_2c2f00c8c941571e.py", line 39, in loop_body_0
    n12_1 = sigmoid(n3_1 / n11_1, n11_1)
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.11/site-packages/cutlass/_mlir_helpers/op.py", line 493, in wrapper
    res_or_list = opFunc(*args, **kwargs, loc=loc)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
QUOTED = """cutlass.base_dsl.common.DSLUserCodeError:
\x1b[91m\x1b[1merror:\x1b[0m TypeError in `__call__`: sigmoid() takes 1 positional argument
  \x1b[94m-->\x1b[0m /home/me/.cache/coda-agent/lowered/coda_lowered_2c2f00c8c941571e.py:39
   |
39 |             n12_1 = sigmoid(n3_1 / n11_1, n11_1)
"""


def test_a_refusal_is_its_reason_and_the_lowered_line_and_nothing_of_this_machine() -> None:
    plain = "TypeError: sigmoid() takes 1 positional argument; 2 // 1 and a/b/c stay"
    assert refusal(REFUSED + plain) == f"n12_1 = sigmoid(n3_1 / n11_1, n11_1)\n{plain}"
    words = refusal(REFUSED + QUOTED)
    assert words.splitlines()[1:3] == [
        "error: TypeError in `__call__`: sigmoid() takes 1 positional argument",
        "  --> coda_lowered_2c2f00c8c941571e.py:39",
    ]
    assert words.count("n12_1 = sigmoid(n3_1 / n11_1, n11_1)") == 1 and "/home" not in words
    # REFUSED ends after the traceback's frames, without an error message
    assert refusal(REFUSED).strip() and "/opt" not in refusal(REFUSED)
    assert refusal("ptxas /tmp/coda-compile-x/step.ptx, line 7; error: too much") == (
        "ptxas step.ptx, line 7; error: too much"
    )
    assert refusal("MemoryError") == "the compiler exceeded 16 GB of memory: MemoryError"


def test_a_compiler_that_crashes_is_an_error_not_our_end(stand_in: Path) -> None:
    play(stand_in, "os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(CompileError, match="died with status -11"):
        report(KernelSource(NORM.program), {})


def test_a_compiler_that_hangs_is_ended(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 1)
    play(stand_in, "time.sleep(60)")
    with pytest.raises(CompileError, match="did not finish in 1 s"):
        report(KernelSource(NORM.program), {})


def test_the_compilers_environment_is_ours(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's settings of the compilers must not change the report."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("QUACK_CACHE_DIR", "/elsewhere")
    seen = stand_in.parent / "seen"
    request = "json.loads(sys.stdin.readline())"
    noted = f"json.dump([sys.argv, dict(os.environ), {request}], open({str(seen)!r}, 'w'))"
    play(stand_in, f"{noted}\nprint([], flush=True)")
    assert report(KernelSource(NORM.program), {}) == ()
    arguments, environment, request = json.loads(seen.read_text())
    module, scratch = arguments[arguments.index("-m") + 1 :][:2]
    assert module == "coda_agent.primitives.runtime.compile" and Path(scratch).is_dir()
    settings = {k: v for k, v in environment.items() if k.startswith(("CUTE_DSL_", "QUACK_"))}
    assert settings == {
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "90",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": scratch,
    }
    assert Program.from_json(request["program"]) == NORM.program


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("ended", [OSError, KeyboardInterrupt])
def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, ended: type[BaseException]
) -> None:
    path = tmp_path / "deep" / "file"
    write_atomic(path, "first")

    def fail(*arguments: object) -> None:
        raise ended

    monkeypatch.setattr(*(os, "fsync", fail) if step == "fsync" else (Path, "replace", fail))
    with pytest.raises(ended):
        write_atomic(path, "second")
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_file_takes_no_directorys_place(tmp_path: Path) -> None:
    directory = tmp_path / "place"
    directory.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(directory, "text")
    assert list(tmp_path.iterdir()) == [directory] and not list(directory.iterdir())


def test_a_file_takes_no_pipes_place(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="a device or a pipe"):
        write_atomic(pipe, "text")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_lowered_text_is_imported_from_a_file_of_its_content() -> None:
    """If someone tampered with the file of a lowered text, the file is replaced. The test loads the module in
    a child process, because loading it imports the DSL."""
    lowered = lower(NORM.program)
    path = cache_dir() / "lowered" / f"{lowered.module}.py"
    write_atomic(path, "raise SystemExit('tampered')")
    code = (
        "import sys\nfrom coda_agent.primitives.lang.ir import Program\n"
        "from coda_agent.primitives.compiler.jit import load_module\n"
        "from coda_agent.primitives.compiler.lower import lower\n"
        "lowered = lower(Program.from_json(sys.stdin.read()))\n"
        "module = load_module(lowered)\nassert load_module(lowered) is module\n"
        "print([hasattr(module, k.name) for k in (*lowered.gemms, *lowered.vectors)], module.__file__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
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


SPILLING = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out, .param .u32 at)
{{
    .local .align 4 .b8 kept[{bytes}];
    .reg .b64 %a<4>;
    .reg .b32 %r<3>;
    ld.param.u64 %a1, [out];
    ld.param.u32 %r1, [at];
    mov.u64 %a2, kept;
    cvta.local.u64 %a2, %a2;
    cvt.u64.u32 %a3, %r1;
    add.u64 %a2, %a2, %a3;
    st.u32 [%a2], %r1;
    ld.u32 %r2, [%a2+4];
    cvta.to.global.u64 %a1, %a1;
    st.global.u32 [%a1], %r2;
    ret;
}}
"""


def test_the_deepest_stack_of_what_was_compiled(tmp_path: Path) -> None:
    assert deepest_stack(tmp_path) == 0
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for size in (64, 640):
        source = tmp_path / f"{size}.ptx"
        source.write_text(SPILLING.format(bytes=size))
        cubin = source.with_suffix(".cubin")
        subprocess.run([ptxas, "-arch=sm_90a", source, "-o", cubin], check=True)
    assert deepest_stack(tmp_path) == 640
    # the previous call deleted the cubins, so that only the next configuration's cubins count
    assert deepest_stack(tmp_path) == 0


def test_what_was_compiled_before_needs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Schedule(128, 160, True, 1, 2, evict_stores=True)
    other = chosen._replace(evict_loads=True)
    assert precompile.compile_all(KernelSource(NORM.program), NORM.sizes, [(0, chosen)]) == [True]
    # empty the table of compiled kernels, as in a new process, which knows only the files in the cache
    monkeypatch.setattr(precompile, "_compiled", {})
    asked = list[object]()

    def refuse(task: object, wanted: list[object]) -> list[bool]:
        asked.extend(wanted)
        return [False] * len(wanted)

    monkeypatch.setattr(workers, "run_all", refuse)
    both = [(0, chosen._replace(swizzle=2)), (0, other)]
    assert precompile.compile_all(KernelSource(NORM.program), NORM.sizes, both) == [True, False]
    assert len(asked) == 1
