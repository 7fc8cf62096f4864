"""Processes that run the real command and kill themselves just before or just after they commit a chosen
event to the journal.

One interpreter imports all modules, reads errands (see ``Errand``) and forks a process for each errand.
Stand-ins replace the author, the gates and the GPU. A stand-in logs each request with write(2), so that the
log survives a kill.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from authoring import (
    BROKEN,
    TOY_KERNEL,
    USAGE,
    Scripted,
    checked,
    fenced,
    measured,
    program_of,
)
from checkout import ROOT

from coda_agent.agent import providers, setup
from coda_agent.agent.providers import ProviderError, Question, ToolCall, Turn, Usage
from coda_agent.agent.run import runs
from coda_agent.agent.run.loop import STOPPED
from coda_agent.agent.storage import journal, kernel_files
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier import verify
from coda_agent.verifier.gates import identity
from coda_agent.verifier.report import Measured, Rejected, Unmeasured
from coda_agent.verifier.spec.model import Spec

MODEL = "claude-opus-5-5"
READ, WRITTEN = 1000, 500  # tokens that each request reserves
REFUSED = 3  # the turn whose first request is refused, in the cast ``Kernel``
VOID = "void/3/0"  # the key of the event that records the void measurement of attempt 3
FAILED = Usage(700, 30)  # the usage of a failed request of the cast ``Edit``


@dataclass(frozen=True)
class Errand:
    """A command, and the ``point`` at which its process is killed: "before KIND" or "after KIND", where KIND
    is a kind of event. With the default point, the process is not killed. ``cast``: the class in this module
    that supplies the stand-ins; ``kernels``: the folder used instead of generated_kernels/."""

    arguments: Sequence[str]
    cast: str
    runs: str
    log: str
    kernels: str = ""
    point: str = "its end"


class Cast(Protocol):
    """The stand-ins for the author, for the gates that need no GPU, and for the GPU's gates."""

    def author(self) -> providers.Provider: ...
    def check(self, spec: Spec, source: str) -> verify.Verdict: ...
    def measure(self, spec: Spec, kernel: KernelSource, keep: Any, kept: object) -> Measured | Unmeasured: ...


LOOKING = Turn("I look.", USAGE, "Ada via a script", "tool_use", (
    ToolCall("1", "check", {"source": BROKEN}),
    ToolCall("2", "propose_tip", {"lesson": "Give gemm two operands.", "failed": "trace/call", "fix": "two"}),
))  # fmt: skip


@dataclass
class Kernel:
    """A run whose third attempt is a correct kernel. The first measurement is void; the second counts."""

    note: Callable[[str], None]

    def author(self) -> providers.Provider:
        note = self.note

        class Refused(Scripted):
            def next_turn(self, question: Question) -> Turn:
                charge = question.meter.reserve(MODEL, READ, WRITTEN)
                if question.number == REFUSED:  # as by an overloaded server, so the request costs nothing
                    note("refused")
                    charge.settle(Usage())
                    question.meter.reserve(MODEL, READ, WRITTEN)
                turn = super().next_turn(question)
                note(f"asked {question.number}")
                return turn

        return Refused([LOOKING, fenced(BROKEN), "no code", fenced(TOY_KERNEL)])

    def check(self, spec: Spec, source: str) -> verify.Verdict:
        self.note("checked")
        if source == BROKEN:
            return verify.Verdict(Rejected(gate="trace", code="call", message="gemm takes two"), None)
        program = program_of(spec, source)
        return verify.Verdict(checked(spec, program), program)

    def measure(self, spec: Spec, kernel: KernelSource, keep: Any, kept: object) -> Measured | Unmeasured:
        self.note("proved")
        keep.save("numerics/large", {"seconds": 1.0})
        self.note("measured")
        if keep.void == VOID:
            return Unmeasured(reason="the GPU was at another power limit")
        return measured(spec, kernel.program)


@dataclass
class Edit:
    """A run that edits the lowered text of an accepted kernel, and edits the text again in a second round.
    Every request fails until the journal records that the run stopped. There is no GPU."""

    note: Callable[[str], None]

    def author(self) -> providers.Provider:
        note = self.note

        class Failing(Scripted):
            def next_turn(self, question: Question) -> Turn:
                charge = question.meter.reserve(MODEL, READ, WRITTEN)
                (name,) = runs.names()
                _, events = journal.glance(runs.runs_dir() / name / runs.JOURNAL)
                if STOPPED not in [event.kind for event in events]:
                    note("failed")
                    charge.settle(FAILED)
                    raise ProviderError("no answer", "ask again")
                note(f"asked {question.number}")
                return super().next_turn(question)

        return Failing([fenced("# an edit\n"), fenced("# another\n")])

    def check(self, spec: Spec, source: str) -> verify.Verdict:
        self.note("checked")
        program = program_of(spec, TOY_KERNEL)
        own = identity(spec, KernelSource(program, edited=source))
        report = checked(spec, program).model_copy(update={"identity": own})
        return verify.Verdict(report, program)

    def measure(self, spec: Spec, kernel: KernelSource, keep: Any, kept: object) -> Measured | Unmeasured:
        raise AssertionError("there is no GPU")


def kill_at(point: str) -> None:
    """Prepare to kill this process just before or just after it commits the first new event of a kind.
    ``point`` is "before KIND" or "after KIND"."""
    real = journal.Journal.once

    def once(
        self: journal.Journal, key: str, kind: str, produce: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        new = key not in [event.key for event in self.events()]

        def produced() -> dict[str, Any]:
            payload = produce()
            reached(new, f"before {kind}")
            return payload

        payload = real(self, key, kind, produced)
        reached(new, f"after {kind}")
        return payload

    def reached(new: bool, here: str) -> None:
        if new and here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    journal.Journal.once = once  # type: ignore[method-assign]


def _stand_in(cast: Cast, kernels: str) -> None:
    def make(name: str, **options: object) -> providers.Provider:
        return cast.author()

    def check(spec: Spec, source: str, **options: object) -> verify.Verdict:
        return cast.check(spec, source)

    def check_edited(spec: Spec, program: Program, source: str, **options: object) -> verify.Verdict:
        return cast.check(spec, source)

    providers.make = make
    verify.check, verify.check_edited = check, check_edited  # type: ignore[assignment]
    here = isinstance(cast, Kernel)
    setup.measurer = lambda gpu, options, watch: cast.measure if here else None
    kernel_files.KERNELS = Path(kernels)


def _perform(errand: Errand) -> None:
    from coda_agent.agent.cli import main

    os.environ["CODA_AGENT_RUNS"] = errand.runs
    log = Path(errand.log)

    def note(words: str) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{words}\n".encode())
        os.close(descriptor)

    said = os.open(log.with_name("said"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    _stand_in(Kernel(note) if errand.cast == "Kernel" else Edit(note), errand.kernels)
    kill_at(errand.point)
    sys.argv = ["coda-agent", *errand.arguments]
    main.main()


def _serve() -> None:
    """Fork a process for each errand read from stdin, and print the exit status of each process as a line.
    This function imports every module once, before it forks."""
    import torch  # lowering imports torch; the import starts no thread, so a fork is safe  # noqa: F401

    import coda_agent.verifier.measure  # noqa: F401
    from coda_agent.agent.artifacts import bundle_measuring  # noqa: F401
    from coda_agent.agent.cli import main  # noqa: F401
    from coda_agent.agent.reporting import (
        progress,  # noqa: F401
        render,  # noqa: F401
    )
    from coda_agent.agent.run import optimize  # noqa: F401

    gc.freeze()  # otherwise garbage collection in a child would copy this process's memory
    gc.disable()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                _perform(Errand(**json.loads(line)))
            except SystemExit as ended:
                sys.stdout.flush()
                os._exit(int(ended.code or 0))
            except BaseException:
                traceback.print_exc()
                os._exit(70)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@contextmanager
def processes() -> Iterator[Callable[[Errand], int]]:
    """Yield a function that runs an errand in its own process and returns the exit status: -9 if the process
    was killed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin and parent.stdout
        say, hear = parent.stdin, parent.stdout

        def run(errand: Errand) -> int:
            print(json.dumps(asdict(errand)), file=say, flush=True)
            return int(hear.readline())

        yield run
        say.close()
    assert parent.returncode == 0


if __name__ == "__main__":
    _serve()
