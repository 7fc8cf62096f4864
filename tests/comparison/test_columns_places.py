"""Tests of the processes in which the compared libraries run: upstream CODA's environment and tuner, and the
CUDA toolkit with which FlashInfer builds. The last tests cover work and memory that the timing of an arm does
not include."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from checkout import ROOT
from test_columns_libraries import case

from coda_agent.comparison.competitors import (
    APART_AUTOTUNE,
    AUTOTUNED,
    COLUMNS,
    UPSTREAM,
    apart,
    flashinfer,
    toolkit,
    tuner,
    upstream,
)
from coda_agent.comparison.competitors.entry import Prepared
from coda_agent.comparison.options import Effort
from coda_agent.verifier.baselines import quack_epilogue
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import OUR_SEARCH
from coda_agent.verifier.baselines.quack_epilogue import fused

ITEM = 2  # bytes of bf16


# ── The arms that --quick leaves out, and the packages that upstream CODA's figures depend on ─────────────


def test_what_a_quick_look_leaves_out_stands_in_its_help_and_in_the_docs() -> None:
    words = dict.fromkeys((MAX_AUTOTUNE, APART_AUTOTUNE), "max-autotune")
    words[OUR_SEARCH] = "QuACK with our search"
    assert set(AUTOTUNED) == set(words)
    (option,) = get_type_hints(Effort, include_extras=True)["quick"].__metadata__
    docs = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    (line,) = (line for line in docs.splitlines() if line.startswith("coda-agent compare --quick"))
    for said in (option.help, line):
        assert all(word in said for word in words.values()) and "CODA's own package" in said


def test_figures_of_upstreams_are_of_the_versions_that_it_pins() -> None:
    """If the version of QuACK or CuTeDSL in upstream CODA's environment changes, upstream CODA's figures are
    stale."""
    (column,) = (column for column in COLUMNS if column.name == UPSTREAM)
    assert set(column.packages) == {"coda-kernels", *tuner.PINNED}


# ── Upstream CODA's process ───────────────────────────────────────────────────────────────────────────────


def test_a_worker_of_another_environment_says_which_package_is_not_the_pinned_one() -> None:
    installed = version("quack-kernels")
    with pytest.raises(RuntimeError, match=f"quack-kernels 0.6.1, but its worker found {installed}") as said:
        upstream.ENTRIES["gemm_swiglu"].build(case("gemm_swiglu")[1])
    assert "coda-agent compare --install" in str(said.value)


def test_the_pinned_versions_pass_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "PINNED", {"torch": version("torch")})
    tuner.check()
    monkeypatch.setattr(tuner, "PINNED", {"no-such-package": "1.0"})
    with pytest.raises(RuntimeError, match=r"needs no-such-package 1\.0, but its worker found missing"):
        tuner.check()


class Event:
    """Stands in for torch.cuda.Event. The time in milliseconds is ``Event.calls``, which fake kernels
    advance."""

    calls = 0

    def __init__(self, enable_timing: bool):
        self.at = 0

    def record(self) -> None:
        self.at = Event.calls

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


class Graph:
    replayed = 0

    def replay(self) -> None:
        Event.calls += Graph.replayed


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace CUDA's events and graphs. The replay of a fake graph takes as long as the calls between the
    last two synchronisations."""
    Event.calls = 0
    mark = [0]

    def synchronize() -> None:
        mark[0], Graph.replayed = Event.calls, Event.calls - mark[0]

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    yield


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("sets", "milliseconds", "calls"),
    [(1, 1, 30), (4, 1, 30), (16, 1, 26), (32, 1, 42), (1, 10, 15), (4, 50, 6), (1, 500, 6)],
)
def test_a_race_is_thirty_calls_of_long_ones_fewer_and_goes_round_the_sets(
    sets: int, milliseconds: int, calls: int
) -> None:
    seen: list[int] = []

    def kernel(number: int, *, out: int, config: str) -> None:
        assert out == -number and config == "tile"
        seen.append(number)
        Event.calls += milliseconds

    numbers = range(sets)
    given = [(n,) for n in numbers], [{"out": -n} for n in numbers], {"config": "tile"}
    assert tuner.time_configs(kernel, *given, quantiles=(0.5, 0.2, 0.8)) == [milliseconds] * 3
    # two more calls come first, to measure how long a call takes
    assert len(seen) == 2 + calls and set(seen) == set(numbers)
    assert tuner.time_configs(kernel, *given) == milliseconds


@pytest.fixture
def quacks(no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return QuACK's module ``autotuner``, patched by ``tuner.shorten``. Progress reports are discarded."""
    from quack import autotuner
    from quack.bench import bench_utils
    from quack.cache import async_compile

    for owner, name in (
        (autotuner, "_bench_cuda_graph_l2_rotate"),
        (autotuner.Autotuner, "_bench"),
        (autotuner.Autotuner, "__call__"),
        (autotuner.Autotuner, "check_disk_cache"),
        (async_compile.CompilePool, "poll"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that monkeypatch restores the attribute
    assert autotuner._bench_cuda_graph_l2_rotate is bench_utils._bench_cuda_graph_l2_rotate
    monkeypatch.setattr(autotuner, "_gpu_warmup", lambda: None)
    monkeypatch.setenv("QUACK_CACHE_AUTOTUNING", "1")
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "report", lambda gate, words: None)
    tuner.shorten(autotuner, async_compile)
    yield autotuner


def tuned(quacks: Any, kernel: Callable[..., None], configs: Iterable[int]) -> Any:
    """Return a new tuner of ``kernel``, as a new process would create it."""
    made = [quacks.AutotuneConfig(config=n) for n in configs]
    return quacks.autotune(configs=made, cache_results=False)(kernel)


def test_quacks_own_tuner_races_so_says_so_and_keeps_what_it_chose(
    quacks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(tuner, "report", lambda gate, words: heard.append(words))
    calls: list[int] = []

    def _kernel(x: torch.Tensor, config: int) -> None:
        calls.append(config)
        Event.calls += config

    first, x = tuned(quacks, _kernel, (3, 1, 2)), torch.zeros(4)
    first(x)
    assert first.best_config.kwargs == {"config": 1} and first.given is None
    assert heard == [f"kernel, try {n}" for n in range(1, 7)]  # 3 in the first round, 3 in the final round
    calls.clear()
    # a new tuner, as in a new process, reads the first tuner's choice from disk
    tuned(quacks, _kernel, (3, 1, 2))(x)
    assert calls == [1]


def test_the_fastest_few_are_raced_again_in_full_and_one_of_them_is_chosen(quacks: Any) -> None:
    """A schedule that runs after a pause, on a cool GPU, seems too fast in the first round. The final round
    corrects this error."""
    calls: Counter[int] = Counter()

    def _kernel(x: torch.Tensor, config: int) -> None:
        calls[config] += 1
        cool = config == 15 and calls[config] <= 32
        Event.calls += 1 if cool else config

    chosen, x = tuned(quacks, _kernel, range(15, 3, -1)), torch.zeros(4)
    chosen(x)
    assert chosen.best_config.kwargs == {"config": 4}
    again = sorted(config for config, count in calls.items() if count > 250)
    assert again == [4, 5, 6, 7, 8, 9, 10, 15] and len(again) == tuner.FINALISTS
    assert max(calls[config] for config in range(11, 15)) <= 32


@pytest.mark.parametrize(("milliseconds", "finalists"), [(2, 8), (15, 5), (100, 3)])
def test_a_final_of_long_calls_has_fewer(quacks: Any, milliseconds: int, finalists: int) -> None:
    calls: Counter[int] = Counter()

    def _kernel(x: torch.Tensor, config: int) -> None:
        calls[config] += 1
        Event.calls += milliseconds

    tuned(quacks, _kernel, range(12))(torch.zeros(4))
    assert sum(count > 200 for count in calls.values()) == finalists


def test_without_room_for_a_final_the_first_race_decides(
    quacks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rooms = quacks._clone_l2_rotate_inputs, iter([True, False])

    def cloned(*given: Any) -> Any:
        if next(rooms):
            return whole(*given)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(quacks, "_clone_l2_rotate_inputs", cloned)
    calls: Counter[int] = Counter()

    def _kernel(x: torch.Tensor, config: int) -> None:
        calls[config] += 1
        Event.calls += config

    chosen = tuned(quacks, _kernel, (3, 1, 2))
    chosen(torch.zeros(4))
    assert chosen.best_config.kwargs == {"config": 1} and max(calls.values()) <= 33


def test_waiting_for_compilers_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(tuner, "report", lambda gate, words: heard.append(words))
    poll = tuner._reporting(lambda pool, sha: (sha, None))
    assert poll(None, "a") == ("a", None) and not heard
    monkeypatch.setattr(tuner, "SECONDS", -1.0)
    assert poll(None, "b") == ("b", None) and heard == ["compiling"]


def test_every_cell_of_upstreams_says_how_it_was_tuned() -> None:
    assert all(entry.note.endswith(upstream.TUNED) for entry in upstream.ENTRIES.values())
    assert f"at most {tuner.TIMED} times" in upstream.TUNED


def test_what_its_tuner_keeps_is_of_this_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert tuner.cache_folder() == tmp_path / "upstream" / "NVIDIA-H100-80GB-HBM3-20-calls-8-finalists"


# ── The toolkit that FlashInfer builds with ───────────────────────────────────────────────────────────────


def touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install fake toolkits below ``tmp_path``: a wrapper nvcc in ``bin``, two complete toolkits, and a
    toolkit without a runtime library. Return ``tmp_path``."""
    root = tmp_path / "local"
    touched(root / "bin" / "nvcc", root / "cuda-13.2" / "bin" / "nvcc")
    for name in ("cuda-12.9", "cuda-13.0"):
        touched(root / name / "bin" / "nvcc", root / name / "lib64" / "libcudart.so")
    monkeypatch.setattr(toolkit, "TOOLKITS", root)
    monkeypatch.setattr(toolkit, "DRIVERS", (tmp_path / "driver",))
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH", "FLASHINFER_CUDA_ARCH_LIST"):
        os.environ.pop(name, None)
    return tmp_path


def test_the_newest_toolkit_that_can_be_linked_with_is_taken(system: Path) -> None:
    touched(system / "local" / "cuda-13.0" / "lib64" / "stubs" / "libcuda.so")
    toolkit.prepare.__wrapped__()
    home = system / "local" / "cuda-13.0"
    assert os.environ["CUDA_HOME"] == str(home)
    assert os.environ["LIBRARY_PATH"] == str(home / "lib64" / "stubs")
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    # this folder has ninja
    assert os.environ["PATH"].split(os.pathsep)[-1] == str(Path(sys.executable).parent)


def test_a_toolkit_of_the_users_is_kept_if_it_is_whole(system: Path) -> None:
    os.environ["CUDA_HOME"] = str(system / "local" / "cuda-12.9")
    os.environ["LIBRARY_PATH"] = "/theirs"
    toolkit.prepare.__wrapped__()
    assert os.environ["CUDA_HOME"].endswith("cuda-12.9") and os.environ["LIBRARY_PATH"] == "/theirs"
    os.environ["CUDA_HOME"] = str(system / "local")
    toolkit.prepare.__wrapped__()
    assert os.environ["CUDA_HOME"].endswith("cuda-13.0")


def test_a_driver_that_left_its_numbered_name_alone_can_be_linked_with(system: Path) -> None:
    touched(system / "driver" / "libcuda.so.1")
    for _ in range(2):  # the second time, the link already exists
        toolkit.prepare.__wrapped__()
    link = system / "cache" / "libcuda" / "libcuda.so"
    assert os.environ["LIBRARY_PATH"].split(os.pathsep)[0] == str(link.parent)
    assert link.resolve() == (system / "driver" / "libcuda.so.1").resolve()


def test_a_failed_build_is_told_by_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["Ninja build failed. Ninja output:", *("[1/2] nvcc " + "-I/include " * 200 for _ in range(2))]
    lines += ["/usr/bin/ld: cannot find -lcudart", "collect2: error: ld returned 1 exit status"]
    said = "\n".join([*lines, "ninja: build stopped: subcommand failed.", ""])

    def fails(words: str) -> Callable[..., Prepared]:
        def call() -> None:
            raise RuntimeError(words)

        return lambda g: Prepared(call, dict)

    monkeypatch.setattr(flashinfer, "prepare", lambda: None)
    _, given = case("gemm_swiglu")
    with pytest.raises(RuntimeError) as caught:
        flashinfer._entry(fails(said)).build(given)
    (told,) = str(caught.value).splitlines()
    words = "/usr/bin/ld: cannot find -lcudart | collect2: error: ld returned 1 exit status"
    assert told == f"its build failed: {words}"
    assert len(toolkit.last_words("x" * 1000)) == toolkit.WORDS
    with pytest.raises(RuntimeError, match="^CUDA error: of another kind$"):
        flashinfer._entry(fails("CUDA error: of another kind")).build(given)


# ── Work and memory outside the timing ────────────────────────────────────────────────────────────────────


def test_operands_in_a_librarys_own_layout_are_no_memory_of_a_call() -> None:
    _, given = case("gemm_rmsnorm_rope")
    prepared = apart.entry("default", backend="eager")["gemm_rmsnorm_rope"].build(given)
    w, table = given.inputs["w"], given.inputs["cos_sin"]
    assert prepared.arranged_bytes == w.numel() * ITEM + table.numel() * table.element_size()
    _, given = case("gemm_swiglu_bwd")
    prepared = apart.entry("default", backend="eager")["gemm_swiglu_bwd"].build(given)
    assert prepared.arranged_bytes == given.inputs["z"].numel() * ITEM


def test_a_finishing_pass_is_compiled_for_each_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Callable[..., Any]] = []

    def under_compile(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
        assert mode == "default"
        made.append(function)
        return function

    monkeypatch.setattr("coda_agent.verifier.baselines.pytorch.under_compile", under_compile)
    quack_epilogue._compile.cache_clear()

    def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
        return x * by

    for rows in (4, 4, 6, 4):
        assert fused(scaled)(torch.ones(rows), 3).tolist() == [3.0] * rows
    assert len(made) == 2
    fused(scaled)(torch.ones(4), 5)
    assert len(made) == 3
    quack_epilogue._compile.cache_clear()


def test_a_pass_for_more_shapes_than_a_code_object_keeps_stays_static() -> None:
    """The test uses twelve shapes, because PyTorch keeps only eight compiled results of one code object. By
    default, PyTorch would compile the second shape with dynamic sizes."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(inputs[0].shape)
        return graph.forward

    from coda_agent.verifier.baselines import pytorch

    step: Any = pytorch.under_compile
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pytorch, "under_compile", lambda f, mode: step(f, mode, backend))
        quack_epilogue._compile.cache_clear()
        for rows in (*range(2, 14), 2):
            assert fused(_doubled)(torch.ones(rows)).sum() == 2 * rows
        quack_epilogue._compile.cache_clear()
    assert seen == [torch.Size([rows]) for rows in range(2, 14)]
    assert all(type(size) is int for shape in seen for size in shape)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2
