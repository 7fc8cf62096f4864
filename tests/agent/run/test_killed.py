"""Processes are killed at every event of a journal, and the real command resumes the run. The processes and
the SIGKILLs are real. An answered request is never sent again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from authoring import (
    HEADER,
    USAGE,
    accepted_run,
    coda_agent,
    measured,
    write_toy,
)
from checkout import PYTHONPATH
from killing import FAILED, READ, REFUSED, VOID, WRITTEN, Errand, processes

from coda_agent.agent.artifacts import accept, bundle
from coda_agent.agent.cli.exit_codes import OK
from coda_agent.agent.run import budget, runs
from coda_agent.agent.run.loop import result_of
from coda_agent.agent.storage.journal import Event, glance
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gates import identity
from coda_agent.verifier.report import Accepted, Measured, Rejected

pytestmark = pytest.mark.slow

# Points in a request at which a process is killed. The list of a point names the ledger events that the
# killed process has added.
RESERVING: dict[str, list[str]] = {"before reserved": [], "after reserved": ["reserved"]}
SETTLING = {"before settled": ["reserved"], "after settled": ["reserved", "settled"]}
NOTHING: dict[str, list[str]] = {}
RESERVED = READ + WRITTEN


def events(name: str) -> list[Event]:
    return glance(runs.runs_dir() / name / runs.JOURNAL)[1]


def keys(name: str) -> list[str]:
    return [event.key for event in events(name)]


def kept(name: str) -> list[str]:
    """Return the keys of the run's events, without those of ledger events."""
    return [key for key in keys(name) if not key.startswith(("reserved/", "settled/"))]


@pytest.fixture(scope="module")
def process() -> Iterator[Callable[[Errand], int]]:
    with processes() as run:
        yield run


@dataclass
class Kills:
    """Kills the processes of one run, one after the other. ``done`` lists the events that the run must have
    by now."""

    run: str
    process: Callable[[Errand], int]
    errand: Errand
    done: list[str]

    def around(self, event: str, ledger: Mapping[str, Sequence[str]] = NOTHING, *given: str) -> None:
        """Kill a process at each point in ``ledger``, then just before and just after the commit of
        ``event``. Check after each kill that the journal holds the right events."""
        kind = event.partition("/")[0]
        errand = replace(self.errand, arguments=given or self.errand.arguments)
        for point, left in ledger.items():
            before = keys(self.run)
            assert self.process(replace(errand, point=point)) == -signal.SIGKILL
            assert [key.partition("/")[0] for key in keys(self.run)[len(before) :]] == left
            assert kept(self.run) == self.done
        for point, now in (("before", self.done), ("after", [*self.done, event])):
            assert self.process(replace(errand, point=f"{point} {kind}")) == -signal.SIGKILL
            assert kept(self.run) == now
        self.done.append(event)

    def end(self, *given: str) -> int:
        return self.process(replace(self.errand, arguments=given or self.errand.arguments))


def spent(name: str) -> budget.Spent:
    return budget.spent(events(name))


def test_a_kernel_killed_at_every_event(
    runs_home: Path, tmp_path: Path, process: Callable[[Errand], int]
) -> None:
    """The run has tool calls, a refused request, three attempts, a void measurement and a valid
    measurement."""
    started, log = runs.start(write_toy(tmp_path), HEADER), tmp_path / "log"
    started.journal.close()
    errand = Errand(["resume", started.name], "Kernel", str(runs_home), str(log))
    kills = Kills(started.name, process, errand, [])
    for event in (
        "prompt", "answer/1", "draft/1.1", "tip/1.2", "answer/2", "report/1", "answer/3", "report/2",
        "answer/4", "report/3", "piece/3.0/numerics/large", VOID, "piece/3.1/numerics/large", "measurement/3",
    ):  # fmt: skip
        ledger = RESERVING if event.startswith("answer/") else NOTHING
        kills.around(event, RESERVING | SETTLING if event == f"answer/{REFUSED}" else ledger)
    assert kills.end() == OK
    # Two processes logged each step. The first process was killed before it committed the step; the second
    # process committed the step and was then killed. No later process repeated the step.
    steps = [["asked 1"], ["checked"], ["asked 2"], ["checked"]]
    steps += [["refused"], ["refused", "asked 3"]]  # a refusal is no answer, so the request is sent again
    steps += [["asked 4"], ["checked"]]
    # Until a measurement ends, only its pieces are recorded. So a killed measurement is repeated, but no
    # request is sent again. After a void measurement, the next measurement starts without recorded pieces.
    steps += 2 * [["proved"], ["proved", "measured"]]
    assert log.read_text().splitlines() == [said for step in steps for said in 2 * step]
    outcome = result_of(*runs.look(started.name))
    assert outcome is not None and isinstance(outcome.report, Accepted)
    assert outcome.authorship.attempts == 3 and outcome.usage.input_tokens == 4 * USAGE.input_tokens
    # In each of the 4 turns, 2 processes were killed between a reservation and its answer, so that 2
    # reservations stay charged. For the refused request, 1 more stays charged: its process was killed before
    # it settled the reservation.
    lost, answered = (4 * 2 + 1) * RESERVED, 4 * USAGE.total
    found = spent(started.name)
    assert (found.uncertain_tokens, found.tokens) == (lost, lost + answered)


@pytest.fixture
def optimizing(runs_home: Path, tmp_path: Path) -> tuple[str, Path]:
    """Return the name of a run that edits an accepted kernel in two rounds, and the folder of this kernel."""
    spec, kernels = write_toy(tmp_path), tmp_path / "kernels"
    before = accepted_run(spec)
    with runs.reopen(before).journal as journal:
        outcome = result_of(*runs.look(before))
        assert outcome is not None
        kernels.mkdir()
        accept.accept(outcome, journal, kernels, tmp_path)
    shutil.rmtree(runs_home / before)
    header = HEADER | {"optimizes": "toy", "improve": 2, "directory": str(tmp_path / "hands")}
    started = runs.start(spec, header)
    started.journal.close()
    return started.name, kernels


def results(name: str, attempt: int, path: Path) -> list[str]:
    """Write a made-up measurement of an attempt to ``path``; return the arguments of the command that imports
    the measurement. The first attempt is fast, and the second attempt is no faster."""
    seen, spec = runs.look(name)
    judged = next(e.payload for e in seen.events() if e.key == f"report/{attempt}")
    program = Program.from_json(judged["program"], spec.signature())
    own = identity(spec, KernelSource(program, edited=judged.get("raw") or None))
    found: Measured | Rejected = measured(spec, program).model_copy(update={"identity": own})
    if attempt > 1:
        found = Rejected(gate="decision", code="no_faster", message="no case is faster beyond doubt")
    one = bundle.KernelResult(
        run=name, attempt=attempt, identity=own, measurement=found.model_dump(mode="json")
    )
    path.write_text(bundle.BundleResults(results=(one,)).model_dump_json())
    return ["import", str(path)]


def the_command(point: str, *arguments: str) -> int:
    """Run the real command, without a fake author, in another process. The process kills itself at ``point``.
    Return the exit status of the process."""
    code = "import killing, sys; killing.kill_at(sys.argv.pop(1)); "
    code += "from coda_agent.agent.cli.main import main; main()"
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", code, point, *arguments]
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode


def test_an_edit_killed_at_every_event(
    optimizing: tuple[str, Path], runs_home: Path, tmp_path: Path, process: Callable[[Errand], int]
) -> None:
    """The run records the kernel to edit (event ``base``). A failed request, an attempt, an improvement round
    and two imported measurements follow. At the end, the real command resumes the run without stand-ins."""
    (name, kernels), log, hands = optimizing, tmp_path / "log", tmp_path / "hands"
    errand = Errand(["resume", name, "--no-gpu"], "Edit", str(runs_home), str(log), str(kernels))
    kills = Kills(name, process, errand, [])
    kills.around("base")
    kills.around("prompt")
    kills.around("stopped/1", RESERVING | SETTLING)
    for attempt in (1, 2):
        kills.around(f"answer/{attempt}", RESERVING)
        kills.around(f"report/{attempt}")
        assert kills.end() == OK and kept(name) == kills.done  # the attempt awaits its measurement
        imports = results(name, attempt, tmp_path / "results.json")
        kills.around(f"measurement/{attempt}", NOTHING, *imports)
        assert kills.end(*imports) == OK and kept(name) == kills.done
    steps = ["failed"] * 4 + ["asked 1", "checked", "asked 2", "checked"]
    assert log.read_text().splitlines() == [*steps[:4], *(step for step in steps[4:] for _ in "12")]
    # The last answer comes from a file. The test removes the file before the run continues.
    hands.mkdir()
    (hands / "answer-3.md").write_text("no code\n<!-- end -->")
    assert the_command("after answer", *errand.arguments) == -signal.SIGKILL
    assert kept(name) == [*kills.done, "answer/3"]
    shutil.rmtree(hands)
    done = coda_agent(*errand.arguments)
    assert done.returncode == OK and "attempt 3: rejected" in done.stdout, done.stderr
    assert kept(name) == [*kills.done, "answer/3", "report/3"] and not hands.exists()
    outcome = result_of(*runs.look(name))
    assert outcome is not None and isinstance(outcome.report, Accepted)
    assert outcome.kernel is not None and outcome.kernel.edited == "# an edit\n"
    # Two reservations stay charged for the failed request, and two for each of the two answers. Three more
    # processes settled the cost of the failed request before they were killed, so this cost is charged three
    # times.
    lost, paid = (2 + 2 + 2) * RESERVED, 3 * FAILED.total + 2 * USAGE.total
    assert (spent(name).uncertain_tokens, spent(name).tokens) == (lost, lost + paid)
