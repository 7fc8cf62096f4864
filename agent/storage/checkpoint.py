"""Store a measurement's finished stages as files, so that an interrupted measurement can continue."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from coda_agent.agent.storage.gpu_lock import gpu_alone
from coda_agent.primitives.system.files import cache_dir, write_atomic

if TYPE_CHECKING:
    from coda_agent.verifier.measure import MeasureOptions
    from coda_agent.verifier.report import Identity
    from coda_agent.verifier.stages import Checkpoint

SAME = "gpu"  # the stage that records which GPU a measurement runs on


@dataclass
class FilePieces:
    """The finished stages of one measurement. Each stage has its own file, which is written atomically."""

    directory: Path

    @classmethod
    def of(cls, parent: Path, identity: Identity, options: MeasureOptions, *more: str) -> FilePieces:
        """The store for the stages of one measurement. The name of the store's folder contains a hash of
        everything that the stages depend on: the kernel's identity, the options, and ``more``."""
        made = [identity.program_hash, identity.lowered_hash, identity.spec_hash]
        what = json.dumps([*made, asdict(options), *more])
        return cls(parent / f"{identity.spec}-{hashlib.sha256(what.encode()).hexdigest()[:16]}")

    def load(self, piece: str) -> dict[str, Any] | None:
        """A stage's result; None if the file is missing or unreadable, so that the stage must run again."""
        try:
            found = json.loads(self._path(piece).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def save(self, piece: str, found: dict[str, Any]) -> None:
        write_atomic(self._path(piece), json.dumps(found))

    def known(self) -> dict[str, dict[str, Any]]:
        """The results of all stored stages, by the stage's name."""
        names = [unquote(path.stem) for path in self.directory.glob("*.json")]
        return {name: found for name in names if (found := self.load(name)) is not None}

    def written(self) -> list[datetime]:
        """The times at which the stages were stored, earliest first."""
        files = self.directory.glob("*.json")
        return sorted(datetime.fromtimestamp(path.stat().st_mtime) for path in files)

    def clear(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, piece: str) -> Path:
        # quoted, because a case's name may contain a slash
        return self.directory / f"{quote(piece, safe='')}.json"


@contextmanager
def resumed(
    options: MeasureOptions, again: bool, say: Callable[[str], object]
) -> Iterator[Callable[[Identity], Checkpoint]]:
    """Yield a function that takes a kernel's identity, and returns a store for the stages of the kernel's
    measurement. The function first locks the GPU against other coda-agent commands. The store has the
    finished stages of an interrupted measurement on this GPU; with ``again``, the stages are deleted
    first. If the block raises an exception, the stages are kept. Otherwise the stages are deleted after the
    block, because the next measurement draws its own inputs."""
    from coda_agent.verifier.gpu.telemetry import card
    from coda_agent.verifier.report import PROTOCOL

    kept: list[FilePieces] = []
    with ExitStack() as stack:

        def keep(identity: Identity) -> FilePieces:
            stack.enter_context(gpu_alone(say))
            versions = json.dumps(identity.versions, sort_keys=True)
            found = FilePieces.of(
                cache_dir() / "verifying", identity, options, str(PROTOCOL), versions, card()
            )
            if again:
                found.clear()
            elif times := found.written():
                say(
                    f"continuing with {len(times)} finished stage(s) of an interrupted measurement, "
                    f"started at {times[0]:%Y-%m-%d %H:%M}; --again starts over"
                )
            kept.append(found)
            return found

        yield keep
        for each in kept:
            each.clear()
