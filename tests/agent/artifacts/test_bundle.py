"""A bundle carries kernels to a machine with a GPU, and a results file carries the measurements back. Damaged
bundles, and results of other kernels, are refused.

Fakes replace ``verifier.measure.measure`` and the GPU workers, because these tests have no GPU. All other
code of the product is real.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from authoring import (
    HEADER,
    QUACK,
    TOY_KERNEL,
    TWICE,
    Notes,
    Scripted,
    accepted_run,
    fenced,
    make_run,
    measured,
    program_of,
    slow,
    write_toy,
)
from commanding import Command

from coda_agent.agent.artifacts import bundle, bundle_measuring
from coda_agent.agent.artifacts.accept import accept
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop, result_of
from coda_agent.agent.storage.journal import JournalError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier.baselines.quack import MATMUL, OWN_TUNER
from coda_agent.verifier.gpu import visible
from coda_agent.verifier.incumbent import Incumbent, Known
from coda_agent.verifier.measure import DEFAULT_ARMS, MeasureOptions
from coda_agent.verifier.report import Accepted, Measured, QuackTuned, Rejected, Unmeasured
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.stages import Checkpoint

pytestmark = pytest.mark.usefixtures("runs_home")


class Cut(Exception):
    """Raised to simulate the loss of the measuring machine."""


class Gpu:
    """A fake of the machine with the GPU. It measures the cases that are not in the checkpoint, and can raise
    ``Cut`` before a case or after a measurement."""

    def __init__(self) -> None:
        self.cases: list[str] = []
        self.arms: list[tuple[str, ...]] = []
        self.kernels: list[KernelSource] = []
        self.known: list[Mapping[str, Known]] = []
        self.kept: list[Incumbent | None] = []
        self.quack: list[Mapping[str, QuackTuned]] = []
        self.ahead: list[Any] = []
        self.cut_before = ""  # raise Cut before this case
        self.cut_at = 0  # raise Cut at the end of the measurement with this number, from 1
        self.verdict: Callable[[Spec, Program], Measured | Rejected | Unmeasured] = measured

    def measure(
        self,
        spec: Spec,
        kernel: KernelSource,
        options: MeasureOptions,
        *,
        progress: Any,
        keep: Checkpoint,
        known: Mapping[str, Known],
        kept: Incumbent | None,
        quack: Mapping[str, QuackTuned],
        ahead: Any,
    ) -> Measured | Rejected | Unmeasured:
        self.ahead.append(ahead)
        self.kernels.append(kernel)
        self.known.append(known)
        self.quack.append(quack)
        self.kept.append(kept)
        self.arms.append(options.arms)
        for case in spec.cases:
            progress("benchmark", f"case {case.name}")
            if keep.load(case.name) is None:
                if case.name == self.cut_before:
                    raise Cut
                self.cases.append(case.name)
                keep.save(case.name, {"case": case.name})
            assert keep.load(case.name) == {"case": case.name}
        if len(self.kernels) == self.cut_at:
            raise Cut
        return self.verdict(spec, kernel.program)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the workers by fakes, which are numbered from 0. Return a list that receives the number of each
    closed worker. The product starts one worker in advance for each entry of a bundle."""
    closed: list[int] = []
    started = (SimpleNamespace(close=partial(closed.append, number)) for number in itertools.count())
    monkeypatch.setattr("coda_agent.verifier.stages.start_workers", lambda: [next(started)])
    return closed


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> Gpu:
    made = Gpu()
    monkeypatch.setattr("coda_agent.verifier.measure.measure", made.measure)
    return made


@pytest.fixture
def packed(spec: Path, tmp_path: Path) -> tuple[str, Path]:
    """Return the name of a checked run and the path of its bundle."""
    name = make_run(spec)
    bundle.pack([name], tmp_path / "bundle.json")
    return name, tmp_path / "bundle.json"


def measure(path: Path, out: Path | None = None, arms: Sequence[str] = DEFAULT_ARMS) -> Path:
    out = out or path.with_name("results.json")
    options = MeasureOptions(tuple(arms), rounds=8)
    bundle_measuring.measure(
        path, bundle.read(path), out, options, progress=lambda name: lambda gate, words: None
    )
    return out


def stands(name: str) -> str:
    run = runs.reopen(name)
    with run.journal:
        outcome = result_of(run.journal, run.spec)
    assert outcome is not None
    return outcome.report.status


def edit(path: Path, change: Callable[[Any], None]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def entry_of(data: Any) -> Any:
    return data["entries"][0]


# from the authoring machine to the measuring machine and back


def test_the_stand_in_is_called_as_the_real_one_is() -> None:
    from coda_agent.verifier.measure import measure as real

    assert set(inspect.signature(Gpu().measure).parameters) == set(inspect.signature(real).parameters)


def test_there_and_back(packed: tuple[str, Path], gpu: Gpu) -> None:
    name, path = packed
    assert stands(name) == "checked"
    results = measure(path)
    assert gpu.cases == ["large", "wide", "ragged"]
    ((taken, found),) = [*bundle.take(results)]
    assert (taken, found.status) == (name, "measured")
    run = runs.reopen(name)
    with run.journal:
        outcome = result_of(run.journal, run.spec)
    assert outcome is not None and isinstance(outcome.report, Accepted)
    assert outcome.report.timings[0].ratios["torch.compile"].estimate == 1.3
    assert outcome.kernel == gpu.kernels[0] == KernelSource(program_of(run.spec, TOY_KERNEL))
    assert gpu.kept == [None]


def test_importing_twice_changes_nothing(packed: tuple[str, Path], gpu: Gpu) -> None:
    name, path = packed
    results = measure(path)
    first = [*bundle.take(results)]
    run = runs.reopen(name)
    with run.journal:
        events = run.journal.events()
    assert [*bundle.take(results)] == first
    run = runs.reopen(name)
    with run.journal:
        assert run.journal.events() == events


def test_a_rejection_is_fed_back(packed: tuple[str, Path], gpu: Gpu) -> None:
    name, path = packed
    gpu.verdict = lambda spec, program: slow(spec)
    ((_, found),) = [*bundle.take(measure(path))]
    assert isinstance(found, Rejected) and found.code == "slow" and stands(name) == "rejected"
    run, provider = runs.reopen(name), Scripted(["", "no code", fenced(TOY_KERNEL)])
    with run.journal:
        Loop(run.journal, run.spec, assembly.task_of(run), provider, Notes(), attempts=2).run()
    assert "reason `slow`" in provider.asked[0][1][-1].text


def test_several_runs_in_one_bundle(spec: Path, tmp_path: Path, gpu: Gpu) -> None:
    names = [make_run(spec), make_run(spec, TWICE)]
    made = bundle.pack(names, tmp_path / "bundle.json")
    assert [e.run for e in made.entries] == names
    taken = [*bundle.take(measure(tmp_path / "bundle.json"))]
    assert [name for name, _ in taken] == names
    assert [stands(name) for name in names] == ["accepted", "accepted"]
    assert gpu.cases == ["large", "wide", "ragged"] * 2  # each case is measured for both kernels


def test_no_source_travels(spec: Path, tmp_path: Path, gpu: Gpu) -> None:
    marked = TOY_KERNEL.replace("The row scale", "S3CRET words of the author; the row scale")
    marked = marked.replace("gemm(a, b)", "h0used").replace(
        "    return", "    h0used = gemm(a, b)\n    return"
    )
    name = make_run(spec, marked)
    bundle.pack([name], tmp_path / "bundle.json")
    text = (tmp_path / "bundle.json").read_text()
    assert not any(word in text for word in ("S3CRET", "h0used", "def toy", "primitives", "secret project"))
    assert not any(word in measure(tmp_path / "bundle.json").read_text() for word in ("S3CRET", "h0used"))


# only a kernel that awaits measurement can be packed


def test_only_a_checked_kernel_is_packed(packed: tuple[str, Path], spec: Path, gpu: Gpu) -> None:
    name, path = packed
    [*bundle.take(measure(path))]
    fresh = runs.start(spec, HEADER)
    fresh.journal.close()
    rejected = make_run(spec, found=slow(fresh.spec))
    for other in (name, fresh.name, rejected):
        with pytest.raises(InvalidInput, match=f"run {other} awaits no measurement"):
            bundle.pack([other], path.with_name("other.json"))
    assert not path.with_name("other.json").exists()
    with pytest.raises(JournalError, match="there is no run 'nothing'"):
        bundle.pack(["nothing"], path.with_name("other.json"))


# bundles that the measuring machine refuses


@pytest.mark.parametrize(
    ("what", "field"), [("spec", "spec_hash"), ("program", "program_hash"), ("lowered text", "lowered_hash")]
)
def test_other_versions_are_named(packed: tuple[str, Path], gpu: Gpu, what: str, field: str) -> None:
    _, path = packed
    versions = {"quack-kernels": "0.6.6", "nvidia-cutlass-dsl": "4.9.0"}
    edit(path, lambda data: entry_of(data)["identity"].update({field: "0" * 64, "versions": versions}))
    with pytest.raises(InvalidInput, match=f"the {what} differs from what was checked") as caught:
        measure(path)
    assert "quack-kernels 0.6.6" in str(caught.value) and "nvidia-cutlass-dsl 4.9.0" in str(caught.value)
    assert not gpu.kernels and not path.with_name("results.json").exists()


def test_a_spec_or_program_that_was_swapped(packed: tuple[str, Path], spec: Path, gpu: Gpu) -> None:
    _, path = packed
    loaded = runs.start(spec, HEADER)
    loaded.journal.close()
    other = program_of(loaded.spec, TWICE).to_json()
    original = path.read_text()
    edit(path, lambda data: entry_of(data).update(program=other))
    with pytest.raises(InvalidInput, match="the program differs"):
        measure(path)
    path.write_text(original)
    easier = spec.read_text().replace("speedup: 1.1", "speedup: 0.5")
    edit(path, lambda data: entry_of(data).update(spec_text=easier))
    with pytest.raises(InvalidInput, match="the spec differs"):
        measure(path)
    assert not gpu.kernels


@pytest.mark.parametrize(
    "program",
    [
        "",
        "[]",
        "import os",
        '{"format": 1}',
        '{"format": 99, "nodes": [], "outputs": {}, "schedule": {}, "signature": {}}',
        "[" * 100_000,
        '{"format": NaN}',
    ],
)
def test_a_program_that_no_tracer_wrote(packed: tuple[str, Path], gpu: Gpu, program: str) -> None:
    name, path = packed
    edit(path, lambda data: entry_of(data).update(program=program))
    with pytest.raises(InvalidInput, match=f"bundle.json: run {name}: its program cannot be used: "):
        measure(path)
    assert not gpu.kernels


def test_a_node_that_no_tracer_wrote(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed

    def plant(data: Any) -> None:
        program = json.loads(entry_of(data)["program"])
        program["nodes"][0] = ["input", [], "a; import os"]
        entry_of(data)["program"] = json.dumps(program)

    with pytest.raises(InvalidInput, match="its program cannot be used"):
        measure(edit(path, plant))


@pytest.mark.parametrize(("text", "words"), [("", "a spec is a mapping"), ("a: [", "not a YAML mapping")])
def test_a_spec_that_is_none(packed: tuple[str, Path], text: str, words: str) -> None:
    name, path = packed
    edit(path, lambda data: entry_of(data).update(spec_text=text))
    with pytest.raises(InvalidInput, match=f"bundle.json: run {name}: line 1 of its spec: .*{words}"):
        measure(path)


HOSTILE = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"coda_agent_bundle": 1, "entries": ["\xff"]}',
    "nested": b"[" * 200_000,
    "a list": b"[]",
    "null": b"null",
    "a number": b"1" * 5000,
    "no entries": b'{"coda_agent_bundle": 1}',
    "an unknown key": b'{"coda_agent_bundle": 1, "entries": [], "shell": "rm"}',
    "an entry of a wrong type": b'{"coda_agent_bundle": 1, "entries": [1]}',
    "another kind": b'{"coda_agent_journal": 1, "header": {}}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("kind", ["bundle", "results"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / f"{kind}.json"
    if kind == "results":
        content = content.replace(b"bundle", b"results").replace(b"entries", b"results")
    path.write_bytes(content)
    words = f"{kind}.json: this is not a {kind} file of coda-agent: "
    with pytest.raises(InvalidInput, match=words) as caught:
        measure(path) if kind == "bundle" else [*bundle.take(path)]
    assert len(str(caught.value)) < 400 + len(str(path)) and "\n" not in str(caught.value)


def test_another_format_says_so(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed
    edit(path, lambda data: data.update(coda_agent_bundle=2))
    with pytest.raises(InvalidInput, match="format 2, but this version reads 1"):
        measure(path)


def test_files_that_are_not_there(packed: tuple[str, Path], tmp_path: Path, gpu: Gpu) -> None:
    name, path = packed
    with pytest.raises(InvalidInput, match="nothing.json: No such file"):
        measure(tmp_path / "nothing.json")
    with pytest.raises(InvalidInput, match="nothing.json: No such file"):
        [*bundle.take(tmp_path / "nothing.json")]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="give a writable path"):
        bundle.pack([name], tmp_path / "file" / "bundle.json")
    with pytest.raises(InvalidInput, match=r"Is a directory"):
        [*bundle.take(tmp_path)]


# a measurement that was cut off


def cut_off(path: Path, gpu: Gpu, before: str = "ragged", **options: Any) -> None:
    """Measure until ``Cut`` is raised before the case ``before``."""
    gpu.cut_before = before
    with pytest.raises(Cut):
        measure(path, **options)
    gpu.cut_before = ""
    assert not path.with_name("results.json").exists()


def test_finished_cases_are_not_measured_again(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed
    cut_off(path, gpu, "wide")
    assert gpu.cases == ["large"]
    measure(path)
    assert gpu.cases == ["large", "wide", "ragged"]
    measure(path)  # after a complete measurement, the next one starts from the beginning
    assert gpu.cases == ["large", "wide", "ragged"] * 2
    assert not list(path.parent.glob("*.partial"))


def test_another_gpu_measures_an_unfinished_entry_from_the_start(
    packed: tuple[str, Path], spec: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = packed
    bundle.pack([name, make_run(spec, TWICE)], path)
    for uuid in ("GPU-1", "GPU-2"):
        found = [visible.Gpu(uuid, "an H100", (9, 0))]
        monkeypatch.setattr(bundle_measuring, "visible_gpus", lambda found=found: found)
        gpu.cut_at = 2 if uuid == "GPU-1" else 0
        with suppress(Cut):
            measure(path)
    assert gpu.cases == ["large", "wide", "ragged"] * 3  # the finished entry once, the other one twice
    assert len(gpu.kernels) == 3


def test_what_is_done_of_a_bundle_can_be_taken_home(
    packed: tuple[str, Path], spec: Path, gpu: Gpu, ended: list[int]
) -> None:
    """If the measurement of the second entry is cut off, the result of the first entry can be imported. While
    an entry is measured, the worker of the next entry already runs. Even after an error, all workers are
    closed."""
    name, path = packed
    bundle.pack([name, make_run(spec, TWICE)], path)
    gpu.cut_at = 2
    with pytest.raises(Cut):
        measure(path)
    assert all(len(workers) == 1 for workers in gpu.ahead) and len(gpu.ahead) == 2
    assert sorted(set(ended)) == [0, 1]
    assert [taken for taken, _ in bundle.take(path.with_name("results.json"))] == [name]


def test_what_was_taken_home_is_what_a_resumed_bundle_says(
    packed: tuple[str, Path], spec: Path, gpu: Gpu, ended: list[int]
) -> None:
    """If a measurement is resumed, it keeps the results of finished entries, including the dates. It also
    closes the workers that it has started for these entries."""
    name, path = packed
    thrice = TWICE.replace("2 *", "3 *")
    bundle.pack([name, make_run(spec, TWICE), make_run(spec, thrice)], path)

    def verdict(spec: Spec, program: Program) -> Measured:
        when = f"2026-11-20T12:00:0{len(gpu.kernels)}+00:00"
        return measured(spec, program).model_copy(update={"date": when})

    gpu.verdict, gpu.cut_at = verdict, 3
    with pytest.raises(Cut):
        measure(path)
    taken = [*bundle.take(path.with_name("results.json"))]
    assert measure(path) and len(gpu.kernels) == 4
    assert {*ended} == {*range(6)}  # three workers for each of the two calls
    assert [*bundle.take(path.with_name("results.json"))][:2] == taken


def test_a_void_entry_is_measured_again_where_a_bundle_goes_on(
    packed: tuple[str, Path], spec: Path, gpu: Gpu
) -> None:
    name, path = packed
    bundle.pack([name, make_run(spec, TWICE)], path)

    def verdict(spec: Spec, program: Program) -> Measured | Unmeasured:
        return Unmeasured(reason="it rained") if len(gpu.kernels) == 1 else measured(spec, program)

    gpu.verdict, gpu.cut_at = verdict, 2
    with pytest.raises(Cut):
        measure(path)
    assert isinstance([*bundle.take(path.with_name("results.json"))][0][1], Unmeasured)
    gpu.cases.clear()
    assert isinstance([*bundle.take(measure(path))][0][1], Measured)
    assert gpu.cases == ["large", "wide", "ragged"]  # of the first entry; the second entry's were finished


def test_what_was_kept_stands_for_no_other_arms(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed
    cut_off(path, gpu, arms=(*DEFAULT_ARMS, "QuACK library"))
    cut_off(path, gpu, arms=(*DEFAULT_ARMS, "torch.compile max-autotune"))  # the same number of arms
    assert gpu.cases == ["large", "wide"] * 2


def test_what_was_kept_stands_for_no_other_sizes(packed: tuple[str, Path], spec: Path, gpu: Gpu) -> None:
    """After the size of one case changes, all cases are measured again, although the case's name, the program
    and the lowered text stay the same."""
    _, path = packed
    cut_off(path, gpu)
    spec.write_text(spec.read_text().replace("M: 2048", "M: 8192"))
    bundle.pack([make_run(spec)], path)
    measure(path)
    assert gpu.cases == ["large", "wide", "large", "wide", "ragged"]


def test_a_kept_case_that_cannot_be_read_is_measured_again(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed
    cut_off(path, gpu)
    (kept,) = path.with_name("results.json.partial").rglob("wide.json")
    kept.write_text("[]")  # as if another version had written the file
    measure(path)
    assert gpu.cases == ["large", "wide", "wide", "ragged"]


def test_a_cases_name_is_no_path(tmp_path: Path, gpu: Gpu) -> None:
    spec = write_toy(tmp_path, "name: wide", 'name: "../../8/16"')
    bundle.pack([make_run(spec)], tmp_path / "bundle.json")
    cut_off(tmp_path / "bundle.json", gpu)
    assert gpu.cases == ["large", "../../8/16"]
    kept = [path for path in tmp_path.rglob("*.json") if path.name != "bundle.json"]  # and the GPU
    assert len(kept) == 3 and len({path.parent for path in kept}) == 1
    assert kept[0].parent.parent == tmp_path / "results.json.partial"
    measure(tmp_path / "bundle.json")
    assert gpu.cases == ["large", "../../8/16", "ragged"]


# The bundle contains the schedules that were fastest in an earlier measurement, so tuning times only these.


@pytest.fixture
def accepted_before(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Accept a kernel; return the path of its report."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    monkeypatch.setattr("coda_agent.agent.storage.kernel_files.KERNELS", kernels)
    run = runs.reopen(accepted_run(spec))
    with run.journal:
        outcome = result_of(run.journal, run.spec)
        assert outcome is not None
        accept(outcome, run.journal, kernels, kernels)
    return kernels / "toy.report.json"


def known_of(path: Path, gpu: Gpu) -> Mapping[str, Known]:
    measure(path)
    return gpu.known[-1]


def test_what_won_before_is_raced_again(accepted_before: Path, spec: Path, tmp_path: Path, gpu: Gpu) -> None:
    bundle.pack([make_run(spec)], tmp_path / "bundle.json")
    won = [Schedule(256, 128, False), Schedule(swizzle=16)]
    assert known_of(tmp_path / "bundle.json", gpu) == {"large": {0: won}, "wide": {0: won}}


def test_what_another_program_won_with_is_not(
    accepted_before: Path, spec: Path, tmp_path: Path, gpu: Gpu
) -> None:
    bundle.pack([make_run(spec, TWICE)], tmp_path / "bundle.json")
    assert known_of(tmp_path / "bundle.json", gpu) == {}


@pytest.mark.parametrize("text", ["", "{}", '{"status": "accepted"}', "[]"])
def test_a_report_of_another_version_is_passed_over(
    accepted_before: Path, spec: Path, tmp_path: Path, gpu: Gpu, text: str
) -> None:
    accepted_before.write_text(text)
    bundle.pack([make_run(spec)], tmp_path / "bundle.json")
    assert known_of(tmp_path / "bundle.json", gpu) == {}


@pytest.mark.parametrize(
    "known",
    [{"large": {"0": [{"tile_m": 7}]}}, {"large": {"zero": [{}]}}, {"large": {"0": [{"shell": "rm"}]}}],
)
def test_a_schedule_that_is_none(packed: tuple[str, Path], gpu: Gpu, known: Any) -> None:
    name, path = packed
    edit(path, lambda data: entry_of(data).update(known=known))
    with pytest.raises(
        InvalidInput, match=f"run {name}: a known schedule cannot be used: .*; bundle the run again"
    ):
        measure(path)


def test_what_quack_won_with_before_is_raced_again(
    accepted_before: Path, spec: Path, tmp_path: Path, gpu: Gpu
) -> None:
    """The bundle contains the fastest schedules of QuACK's kernels for the spec, although the kernel in the
    bundle differs from the accepted kernel."""
    bundle.pack([make_run(spec, TWICE)], tmp_path / "bundle.json")
    assert known_of(tmp_path / "bundle.json", gpu) == {}
    tuned = QuackTuned(
        gpu="NVIDIA H100 80GB HBM3", version=version("quack-kernels"), arms={OWN_TUNER: (QUACK,)}
    )
    assert gpu.quack == [{"large": tuned, "wide": tuned}]


HOSTILE_QUACK: list[tuple[dict[str, Any], str]] = [
    ({"QuACK": [[{}]]}, "'QuACK' is not an arm of QuACK's"),
    ({MATMUL: [[{"tile_m": 128, "shell": 1}]]}, "have no field 'shell'"),
    ({MATMUL: [[{"tile_m": 128.0}]]}, "valid"),
    ({MATMUL: [[{"tile_m": "128"}]]}, "valid"),
    ({MATMUL: [[{"tile_m": [128]}]]}, "valid"),
    ({MATMUL: [[]]}, "at least 1 item"),
    ({MATMUL: [7]}, "valid"),
]


@pytest.mark.parametrize(("arms", "words"), HOSTILE_QUACK)
def test_a_schedule_that_is_none_of_quacks(
    packed: tuple[str, Path], gpu: Gpu, arms: dict[str, Any], words: str
) -> None:
    _, path = packed
    quack = {"large": {"gpu": "a GPU", "version": "1", "arms": arms}}
    edit(path, lambda data: entry_of(data).update(quack=quack))
    with pytest.raises(InvalidInput, match=words) as refused:
        measure(path)
    assert "again" in str(refused.value) and not gpu.kernels


# results that the authoring machine refuses


def test_a_result_of_another_kernel(packed: tuple[str, Path], spec: Path, gpu: Gpu, tmp_path: Path) -> None:
    name, path = packed
    other = make_run(spec, TWICE)
    bundle.pack([other], tmp_path / "other.json")
    results = measure(tmp_path / "other.json", tmp_path / "other-results.json")
    edit(results, lambda data: data["results"][0].update(run=name))
    with pytest.raises(InvalidInput, match=f"run {name}, attempt 1: the measurement is of a different"):
        [*bundle.take(results)]
    # Another kernel's measurement is refused even if the result states the identity of this run's kernel.
    identity = json.loads(path.read_text())["entries"][0]["identity"]
    edit(results, lambda data: data["results"][0].update(identity=identity))
    with pytest.raises(InvalidInput, match="the measurement is of a different kernel"):
        [*bundle.take(results)]
    assert stands(name) == "checked"


def test_a_result_of_another_attempt(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed
    results = edit(measure(path), lambda data: data["results"][0].update(attempt=2))
    with pytest.raises(InvalidInput, match="attempt 2: the measurement is of a different kernel"):
        [*bundle.take(results)]


def test_a_second_measurement_does_not_replace_the_first(packed: tuple[str, Path], gpu: Gpu) -> None:
    name, path = packed
    gpu.verdict = lambda spec, program: slow(spec)
    [*bundle.take(measure(path))]
    gpu.verdict = measured
    with pytest.raises(InvalidInput, match="attempt 1 already has a different measurement, which stays"):
        [*bundle.take(measure(path))]
    assert stands(name) == "rejected"


def test_an_unknown_run(packed: tuple[str, Path], gpu: Gpu) -> None:
    _, path = packed
    results = edit(measure(path), lambda data: data["results"][0].update(run="../../elsewhere"))
    with pytest.raises(JournalError, match="there is no run 'elsewhere'"):
        [*bundle.take(results)]


def test_a_refused_result_keeps_no_other_from_its_run(
    packed: tuple[str, Path], spec: Path, gpu: Gpu, command: Command
) -> None:
    name, path = packed
    bundle.pack([make_run(spec, TWICE), name], path)
    results = edit(measure(path), lambda data: data["results"][0].update(run="elsewhere"))
    done = command("import", results)
    assert done.status == 3 and f"{name}: measured" in done.out and "no run 'elsewhere'" in done.err


@pytest.mark.parametrize(
    "measurement",
    [{}, {"status": "accepted"}, {"status": "measured"}, {"status": "rejected", "gate": 1}, {"status": []}],
)
def test_a_measurement_that_is_none(packed: tuple[str, Path], gpu: Gpu, measurement: dict[str, Any]) -> None:
    name, path = packed
    results = edit(measure(path), lambda data: data["results"][0].update(measurement=measurement))
    with pytest.raises(InvalidInput, match=f"results.json: run {name}: .*; measure again"):
        [*bundle.take(results)]
    assert stands(name) == "checked"
