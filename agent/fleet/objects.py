"""Share compiled objects between the nodes of a fleet, so that no node compiles what another has compiled.

Objects are files in QuACK's cache, and a file's name is the hash of everything that it was compiled from. The
driver's own cache also gets the objects of all nodes. Before a piece that compiles, its node gets the objects
that earlier pieces with the same label made, unless it has them. Slots on one machine share its cache, so
nothing is sent there.
"""

from __future__ import annotations

import base64
import re
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from coda_agent.agent.fleet.executor import Slot, SlotLost
from coda_agent.agent.fleet.pool import Pool
from coda_agent.primitives.compiler.jit import import_quack, objects
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.gates import Progress, silent
from coda_agent.verifier.gpu.worker import Lost, Task, WorkerError

NAME = re.compile(r"[0-9a-f]{32,64}\.(o|refused|tried)")  # an object, or a note on one
PATIENCE = 120.0  # seconds for objects to be sent


def run_shared(
    pool: Pool, slot: Slot, label: str, task: Task, argument: Any, *, patience: float, progress: Progress
) -> dict[str, Any]:
    """Run a piece on a slot as ``slot.run`` does. If the fleet has several nodes, the objects of earlier
    pieces with this label are sent to the slot before, and new ones are fetched after."""
    if len({use.slot.node for use in list(pool.uses.values())}) < 2:
        return slot.run(task, argument, patience=patience, progress=progress)
    known = pool.objects.get(label, frozenset())
    lacks = slot.run(lacking, sorted(known), patience=PATIENCE, progress=silent)["names"] if known else []
    asked = {"task": task, "argument": argument, "files": read(lacks)["files"]}
    told = slot.run(sharing, asked, patience=patience, progress=progress)
    with suppress(SlotLost, Lost, WorkerError):  # the answer counts, with or without its objects
        if new := lacking(told["made"])["names"]:
            write(slot.run(read, new, patience=PATIENCE, progress=silent)["files"])
        pool.objects[label] = pool.objects.get(label, frozenset()) | {*told["made"]}
    counted = {"given": len(lacks), "made": len(told["made"])}
    pool.record("objects", {"slot": slot.name, "label": label, **counted})
    return told["answer"]


def sharing(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a piece with the objects that were sent. The answer also names the objects that it made."""
    write(asked["files"])
    before = _names()
    answer = asked["task"](asked["argument"])
    return {"answer": answer, "made": sorted(_names() - before)}


def lacking(names: list[str]) -> dict[str, Any]:
    """The objects among ``names`` that this machine lacks."""
    return {"names": sorted({*names} - _names()) if names else []}


def read(names: list[str]) -> dict[str, Any]:
    """The files of these objects, as zlib data in base64."""
    data = {name: zlib.compress((_folder() / name).read_bytes()) for name in names}
    return {"files": {name: base64.b64encode(each).decode() for name, each in data.items()}}


def write(files: dict[str, str]) -> None:
    for name, data in files.items():
        if not NAME.fullmatch(name):
            raise WorkerError(f"{name!r} is no object's name")
        write_atomic(_folder() / name, zlib.decompress(base64.b64decode(data)))


def _names() -> set[str]:
    return {path.name for path in _folder().glob("*") if NAME.fullmatch(path.name)}


def _folder() -> Path:
    with _importing:
        import_quack()
        return objects()


_importing = threading.Lock()  # the driver's threads would import QuACK at once
