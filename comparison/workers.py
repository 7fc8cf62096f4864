"""The workers of a comparison's sittings: a fresh one for each, whose imports are done while another sits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coda_agent.verifier.gpu.worker import Worker
from coda_agent.verifier.measure import SCORES

READY = 3  # workers of an environment at their imports: these take longer than a sitting that finds caches
AHEAD = (*SCORES, "coda_agent.comparison.competitors.ahead")
# Of what is in the environment of CODA's own package, too: the oracle needs dynamo. Not QuACK, which reads
# where its caches are when it is imported.
APART_AHEAD = ("coda_agent.comparison.session", "torch._inductor.compile_fx", "cutlass")


@dataclass
class Workers:
    """A fresh one for each sitting: another's memory would be missed. While one sits, the first READY of each
    environment that are ``coming`` (sittings by environment; None is this one) do their imports."""

    coming: Sequence[str | None] = ()
    ahead: dict[str | None, list[Worker]] = field(default_factory=dict)

    def take(self, python: str | None) -> Worker:
        """One whose imports are done, where there is; others begin theirs."""
        ready = self.ahead.get(python)
        taken = ready.pop(0) if ready else _started(python)
        self.begin()
        return taken

    def bare(self) -> Worker:
        """One without imports, which to ask after the GPU takes none of."""
        return Worker()

    def begin(self) -> None:
        """Start those that are coming and not ahead yet."""
        for python, wanted in Counter(self.coming).items():
            ready = self.ahead.setdefault(python, [])
            ready += [_started(python) for _ in range(min(wanted, READY) - len(ready))]

    def close(self) -> None:
        """End those that nobody took."""
        for worker in itertools.chain(*self.ahead.values()):
            worker.close()


def _started(python: str | None) -> Worker:
    return Worker(python=python, ahead=APART_AHEAD) if python else Worker(ahead=AHEAD)
