"""Judge one candidate (a mutant or a rewrite) with the verifier. The result is one line of the campaign's
results."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

from benchmarks.campaign.differs import Judge
from benchmarks.campaign.graph import original
from benchmarks.campaign.mutations.mutate import ProgramMutant, mutant
from benchmarks.campaign.rewrites.rewrite import rewritten
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.numerics.reference import MISTAKES
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import check_program

INAPPLICABLE = "does not apply"
# If the verifier accepts a mutant and no draw shows a difference, a second search follows. The second search
# tries this many times as many draws that aim at the mutant's conditions. If it finds no difference either,
# the mutant counts as equivalent.
MORE = 3
Result = dict[str, Any]


class CampaignTask(NamedTuple):
    """The identity of a candidate. ``group``: "mutants" or "rewrites"."""

    group: str
    name: str
    kind: str
    seed: int


def judged(task: CampaignTask) -> Result:
    """Create a candidate, and check it both in fp64 and with the verifier."""
    made = _mutant(task) if task.group == "mutants" else _rewrite(task)
    return {**task._asdict(), **made}


def applies(task: CampaignTask) -> bool:
    """Whether the candidate's kind applies to the program, so that the candidate can be created."""
    return (made_mutant(task) if task.group == "mutants" else rewritten(*task[1:])) is not None


def made_mutant(task: CampaignTask) -> ProgramMutant | None:
    judge = judge_of(task.name)
    return mutant(judge.spec, judge.program, judge.scales, task.kind, task.seed)


@functools.lru_cache(maxsize=4)
def judge_of(name: str) -> Judge:
    """The judge that compares mutants with an accepted program."""
    return Judge(*original(name))


def _mutant(task: CampaignTask) -> Result:
    if (made := made_mutant(task)) is None:
        return {"verdict": INAPPLICABLE}
    judge = judge_of(task.name)
    started = time.monotonic()
    shown = _shown(judge, made, 1)
    sought = time.monotonic()
    result = verdict(judge.spec, made.program)
    verified = time.monotonic()
    if not shown and result["verdict"] == "accepted":
        shown = _shown(judge, made, MORE)
    seconds = {"fp64": sought - started + time.monotonic() - verified, "verifier": verified - sought}
    return {**result, "words": made.words, "differs": shown, "seconds": seconds}


def _shown(judge: Judge, made: ProgramMutant, times: int) -> str:
    """The name of a draw on which the mutant differs from the accepted program; empty if no draw shows a
    difference."""
    found = judge.seen(made.program, *made.frozen) if times == 1 else ""
    for k in range(times):
        found = found or judge.sought(made.program, made.aims, made.seed + 1000 * k)
    return found


def _rewrite(task: CampaignTask) -> Result:
    if (made := rewritten(*task[1:])) is None:
        return {"verdict": INAPPLICABLE}
    judge = judge_of(task.name)
    started = time.monotonic()
    result = verdict(judge.spec, made.program)
    seconds = {"verifier": time.monotonic() - started}
    differs = judge.seen(made.program)
    return {**result, "words": made.words, "differs": differs, "seconds": seconds}


def verdict(spec: Spec, program: Program) -> Result:
    """The verifier's verdict on a program, and the reason for the verdict."""
    try:
        program.check()
        rejected = check_program(spec, program)
    except ProgramError as error:
        return {"verdict": f"trace: {error.code}", "reason": error.message[:400]}
    except MISTAKES as error:  # a bug of the verifier becomes a line of the table
        return {"verdict": "crashed", "reason": f"{type(error).__name__}: {error}"[-400:]}
    if rejected is None:
        return {"verdict": "accepted", "reason": ""}
    verdict = f"{rejected.gate}: {rejected.code}"
    return {"verdict": verdict, "reason": rejected.message[:400]}
