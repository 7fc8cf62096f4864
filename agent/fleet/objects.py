"""Share compiled objects between the nodes of a fleet, so that no node compiles what another node has
compiled.

Objects are files in QuACK's cache. The file name of an object is the hash of everything that the object was
compiled from. The driver's cache receives the objects of all nodes. Each piece of work has a label: the
spec's hash, or the operator's name. Before a node runs a piece, the driver looks for objects from earlier
pieces with the same label. It sends the node the objects that the node lacks. All slots (cores and GPUs) of
one machine share a cache, so they need not send objects to each other.
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
from coda_agent.verifier.worker import Lost, Task, WorkerError

NAME = re.compile(r"[0-9a-f]{32,64}\.(o|refused|tried)")  # an object, or a marker file without an object
PATIENCE = 120.0  # seconds that a slot may take to list, send or receive objects


def run_shared(
    pool: Pool, slot: Slot, label: str, task: Task, argument: Any, *, patience: float, progress: Progress
) -> dict[str, Any]:
    """Run a task like ``slot.run``. If the fleet has several nodes, first send the slot the objects of
    earlier work with the same ``label``, and afterwards fetch the objects that the task produced."""
    if len({use.slot.node for use in list(pool.uses.values())}) < 2:
        return slot.run(task, argument, patience=patience, progress=progress)
    known = pool.objects.get(label, frozenset())
    lacks = slot.run(lacking, sorted(known), patience=PATIENCE, progress=silent)["names"] if known else []
    asked = {"task": task, "argument": argument, "files": read(lacks)["files"]}
    told = slot.run(sharing, asked, patience=patience, progress=progress)
    with suppress(SlotLost, Lost, WorkerError):  # the answer is valid even if its objects cannot be fetched
        if new := lacking(told["made"])["names"]:
            write(slot.run(read, new, patience=PATIENCE, progress=silent)["files"])
        pool.objects[label] = pool.objects.get(label, frozenset()) | {*told["made"]}
    counted = {"given": len(lacks), "made": len(told["made"])}
    pool.record("objects", {"slot": slot.name, "label": label, **counted})
    return told["answer"]


def sharing(asked: dict[str, Any]) -> dict[str, Any]:
    """Store the objects that were sent, then run a task. The result has the task's ``answer``, and the names
    of the objects that the task produced (``made``)."""
    write(asked["files"])
    before = _names()
    answer = asked["task"](asked["argument"])
    return {"answer": answer, "made": sorted(_names() - before)}


def lacking(names: list[str]) -> dict[str, Any]:
    """The named objects that this machine lacks."""
    return {"names": sorted({*names} - _names()) if names else []}


def read(names: list[str]) -> dict[str, Any]:
    """The files of these objects, as zlib data in base64."""
    data = {name: zlib.compress((_folder() / name).read_bytes()) for name in names}
    return {"files": {name: base64.b64encode(each).decode() for name, each in data.items()}}


def write(files: dict[str, str]) -> None:
    for name, data in files.items():
        if not NAME.fullmatch(name):
            raise WorkerError(f"{name!r} is not an object's name")
        write_atomic(_folder() / name, zlib.decompress(base64.b64decode(data)))


def _names() -> set[str]:
    return {path.name for path in _folder().glob("*") if NAME.fullmatch(path.name)}


def _folder() -> Path:
    with _importing:
        import_quack()
        return objects()


_importing = threading.Lock()  # only one driver thread at a time may import QuACK
