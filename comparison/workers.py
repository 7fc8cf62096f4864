"""The workers of a comparison. Each session has a new one, which imports during an earlier session."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coda_agent.verifier.gpu.worker import Worker
from coda_agent.verifier.measure import SCORES

READY = 3  # early workers per environment, since imports take longer than a session with full caches
AHEAD = (*SCORES, "coda_agent.comparison.competitors.ahead")
# The early imports in the environment of CODA's own package. The oracle (the fp64 reference) needs dynamo.
# QuACK is left out, since it reads the path of its caches at import.
APART_AHEAD = ("coda_agent.comparison.session", "torch._inductor.compile_fx", "cutlass")


@dataclass
class Workers:
    """A new worker for each session, since a used worker holds memory. ``coming``: the environments of the
    next sessions (None is the current one); the first READY workers of each import during a session."""

    coming: Sequence[str | None] = ()
    ahead: dict[str | None, list[Worker]] = field(default_factory=dict)

    def take(self, python: str | None) -> Worker:
        """A worker that has begun its imports early, or a new one. The next workers begin their imports."""
        ready = self.ahead.get(python)
        taken = ready.pop(0) if ready else _start(python)
        self.begin()
        return taken

    def bare(self) -> Worker:
        """A worker without imports, which questions about the GPU do not need."""
        return Worker()

    def begin(self) -> None:
        """Start those of the next workers that are not running yet."""
        for python, wanted in Counter(self.coming).items():
            ready = self.ahead.setdefault(python, [])
            ready += [_start(python) for _ in range(min(wanted, READY) - len(ready))]

    def close(self) -> None:
        """Stop the workers that no session took."""
        for worker in itertools.chain(*self.ahead.values()):
            worker.close()


def _start(python: str | None) -> Worker:
    return Worker(python=python, ahead=APART_AHEAD) if python else Worker(ahead=AHEAD)
