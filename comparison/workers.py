"""The workers of a comparison. Each session has a new worker, which has imported its modules during an
earlier session."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coda_agent.verifier.stages import SCORES
from coda_agent.verifier.worker import Worker

READY = 3  # workers to start early per environment, because imports may take longer than a session
AHEAD = (*SCORES, "coda_agent.comparison.competitors.ahead")
# Early imports in the environment of CODA's own package. The oracle (the fp64 reference) needs dynamo. QuACK
# is left out, because it reads its cache path at import.
APART_AHEAD = ("coda_agent.comparison.session", "torch._inductor.compile_fx", "cutlass")


@dataclass
class Workers:
    """Give each session a new worker, because a used worker holds memory. ``coming``: for each of the next
    sessions, its environment's Python interpreter; None means the current environment. Up to READY workers
    for each environment import their modules while an earlier session runs."""

    coming: Sequence[str | None] = ()
    ahead: dict[str | None, list[Worker]] = field(default_factory=dict)

    def take(self, python: str | None) -> Worker:
        """Return a worker that has already started its imports, or a new worker if none has. Also start
        workers for the next sessions."""
        ready = self.ahead.get(python)
        taken = ready.pop(0) if ready else _start(python)
        self.begin()
        return taken

    def bare(self) -> Worker:
        """A worker without imports, for questions about the GPU."""
        return Worker()

    def begin(self) -> None:
        """Start the workers that the next sessions need and that do not run yet."""
        for python, wanted in Counter(self.coming).items():
            ready = self.ahead.setdefault(python, [])
            ready += [_start(python) for _ in range(min(wanted, READY) - len(ready))]

    def close(self) -> None:
        """Stop the workers that no session took."""
        for worker in itertools.chain(*self.ahead.values()):
            worker.close()


def _start(python: str | None) -> Worker:
    return Worker(python=python, ahead=APART_AHEAD) if python else Worker(ahead=AHEAD)
