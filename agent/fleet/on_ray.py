"""The executor of a Ray cluster. On each node whose software versions equal the driver's, the executor starts
one actor for each core, and one actor for each GPU.

Ray only provides the cores and GPUs. Ray never restarts an actor and never retries a task. A slot is the core
or the GPU of an actor. If a slot is lost, the result of its work is discarded, and the driver runs the work
again. An actor gives its work to a separate process. While that process works, the actor sends heartbeats
("beat"). At the end the actor sends the answer. The driver uses its own clock to time the heartbeats, so the
nodes' clocks do not matter.
"""

from __future__ import annotations

import base64
import logging
import os
import pickle
import queue
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coda_agent.agent.fleet.executor import (
    CPU,
    ExecutorLost,
    ProcessSlot,
    Slot,
    SlotLost,
    differing,
    environment,
    usable_gpus,
)
from coda_agent.verifier.gates import Failed, Progress
from coda_agent.verifier.gpu.visible import Gpu
from coda_agent.verifier.worker import Lost, Task, WorkerError

BEAT = 2.0  # seconds between two heartbeats of a slot
SILENT = 20.0  # seconds without a heartbeat after which a slot counts as lost
LOOK = 1.0  # seconds between two requests for the cluster's list of nodes
GONE = 10.0  # seconds without an answer after which the cluster's head counts as gone
FILES = 65_536  # limit of open files; with many actors, Ray's daemon needs more than the usual 1,024

GPU = "GPU"  # placeholder for a GPU slot's kind until its actor reports the GPU's name
Message = tuple[str, Any]  # kind ("beat", "progress", "answer", "failed", "lost" or "bug") and content


class Seat:
    """The actor of a slot, on the slot's node. Ray gives the actor one core or one GPU."""

    def __init__(self, name: str, needs_gpu: bool):
        self.gpu: Gpu | None = None
        if needs_gpu:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to 1 if an actor reserves no core
            found = usable_gpus()  # Ray has set CUDA_VISIBLE_DEVICES to the GPU of this actor
            if len(found) != 1:
                raise RuntimeError(
                    f"Ray leased one GPU here, but {len(found)} are usable: {[gpu.name for gpu in found]}"
                )
            self.gpu = found[0]
        self._slot = ProcessSlot(self.gpu.uuid if self.gpu else name, name, self.gpu)

    def identity(self) -> tuple[str, str]:
        """The slot's name and kind."""
        return self._slot.name, self._slot.kind

    def run(self, work: str, patience: float) -> Iterator[Message]:
        """Run a pickled task on its argument. Yield progress messages and heartbeats, then the result."""
        said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(work, patience, said), daemon=True)
        thread.start()
        while True:
            try:
                message = said.get(timeout=BEAT)
            except queue.Empty:
                message = ("beat", None)
            yield message
            if message[0] not in ("beat", "progress"):
                return

    def _run(self, work: str, patience: float, said: queue.SimpleQueue[Message]) -> None:
        try:
            task, argument = pickle.loads(base64.b64decode(work))
            answer = self._slot.run(
                task, argument, patience=patience, progress=lambda *words: said.put(("progress", words))
            )
            said.put(("answer", answer))
        except Lost as lost:
            said.put(("lost", (lost.code, lost.message)))
        except Failed as failed:
            said.put(("failed", (failed.code, failed.message, failed.line, failed.evidence)))
        except BaseException as error:
            said.put(("bug", f"{type(error).__name__}: {error}"))


class Porter:
    """An actor that reports a node's versions to the driver before the node may join."""

    def environment(self) -> dict[str, str]:
        return environment()


@dataclass
class RaySlot:
    """A slot on a node of the cluster, as the driver sees it."""

    name: str
    kind: str
    node: str
    actor: Any
    lost: bool = False

    def run(self, task: Task, argument: Any, *, patience: float, progress: Progress) -> dict[str, Any]:
        return self.answer(self.begin(task, argument, patience), progress)

    def close(self) -> None:
        with suppress(RayError):  # the actor may be alive, although it is silent
            ray.kill(self.actor)

    def begin(self, task: Task, argument: Any, patience: float) -> Any:
        """Start a piece of work; return the stream of its messages."""
        return self.actor.run.remote(base64.b64encode(pickle.dumps((task, argument))).decode(), patience)

    def answer(self, stream: Any, progress: Progress) -> dict[str, Any]:
        """Pass the progress messages to ``progress``, then return the answer. Raises SlotLost if the slot is
        lost before the answer arrives, even if the slot had finished the work."""
        try:
            for kind, told in self._messages(stream):
                match kind:
                    case "progress":
                        progress(*told)
                    case "answer":
                        return dict(told)
                    case "failed":
                        code, message, line, evidence = told
                        raise Failed(code, message, line, **evidence)
                    case "lost":
                        raise Lost(*told)
                    case "bug":
                        raise WorkerError(told)
            raise SlotLost("its process ended without an answer")
        except (RayError, SlotLost) as error:
            self.lost = True
            raise SlotLost(_first_line(error)) from None

    def _messages(self, stream: Any) -> Iterator[Message]:
        """Yield the messages of a piece of work. Raises SlotLost after ``SILENT`` seconds without a message;
        Ray itself may notice a lost node much later."""
        while True:
            ready, _ = ray.wait([stream], timeout=SILENT, fetch_local=False)
            if not ready:
                raise SlotLost(f"it sent no heartbeat for {SILENT:.0f} s")
            try:
                reference = next(stream)
            except StopIteration:
                return
            yield ray.get(reference, timeout=SILENT)


@dataclass
class _Node:
    """A node of the cluster, and how far the node has joined the fleet."""

    name: str
    cores: int
    gpus: int
    porter: Any
    answer: Any
    joined: bool = False
    waiting: list[tuple[RaySlot, Any]] = field(
        default_factory=list
    )  # slots whose actors are starting, each with the future result of ``identity``


class OnRay:
    """The slots of a Ray cluster. ``address``: the cluster's address; "auto" means the cluster that already
    runs on this machine, or else a new cluster of only this machine. ``gpus``: whether to use GPUs.
    ``cores``: whether to use cores."""

    def __init__(self, address: str, *, gpus: bool = True, cores: bool = True):
        _raise_limit()
        options: Any = {"namespace": "coda-agent", "log_to_driver": False, "logging_level": logging.ERROR}
        if address == "auto":
            ray.init(_running() or "local", **options)
        else:
            try:
                if "://" not in address and not _answers(address):
                    raise ConnectionError
                ray.init(address, **options)
            except ConnectionError:
                lost = f"no Ray cluster answers at {address}; start one: ray start --head"
                raise ExecutorLost(lost) from None
        self._gpus, self._cores = gpus, cores
        self._here = environment()
        self._nodes: dict[str, _Node] = {}
        self._refused: dict[str, str] = {}
        self._slots: dict[str, RaySlot] = {}
        self._looked = 0.0

    def slots(self) -> Sequence[Slot]:
        if time.monotonic() - self._looked >= LOOK:
            self._look()
            self._looked = time.monotonic()
        return [slot for slot in self._slots.values() if not slot.lost]

    def refused(self) -> Mapping[str, str]:
        return dict(self._refused)

    def close(self) -> None:
        ray.shutdown()

    def _look(self) -> None:
        alive = {node["NodeID"]: node for node in _nodes() if node["Alive"]}
        for identifier in self._nodes.keys() - alive.keys():
            gone = self._nodes.pop(identifier)
            self._slots = {name: slot for name, slot in self._slots.items() if slot.node != gone.name}
        for identifier, told in alive.items():
            if identifier not in self._nodes:
                self._nodes[identifier] = self._asked(identifier, told)
            self._follow(identifier, self._nodes[identifier])

    def _asked(self, identifier: str, told: Mapping[str, Any]) -> _Node:
        """Register a new node, and ask for its versions."""
        name = f"{told['NodeManagerHostname']}:{identifier[:8]}"
        resources = told["Resources"]
        porter: Any = ray.remote(Porter).options(num_cpus=0, **_on(identifier)).remote()
        cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        return _Node(name, cores, gpus, porter, porter.environment.remote())

    def _follow(self, identifier: str, node: _Node) -> None:
        """Admit a node once its versions are known and equal the driver's. Admit each of its slots once the
        slot's actor runs. Replace lost slots."""
        if not node.joined and _done(node.answer):
            node.joined = True
            try:
                told = ray.get(node.answer)
            except RayError as error:
                self._refused[node.name] = f"it did not report its versions: {_first_line(error)}"
                return
            if differs := differing(self._here, told):
                self._refused[node.name] = f"{differs}; install the same versions, and restart its Ray"
                return
            for core in range(node.cores if self._cores else 0):
                self._seat(identifier, node, RaySlot(f"{node.name}/{core}", CPU, node.name, None))
            for gpu in range(node.gpus if self._gpus else 0):
                self._seat(identifier, node, RaySlot(f"{node.name}/GPU {gpu}", GPU, node.name, None))
        for slot in [slot for slot in self._slots.values() if slot.lost and slot.node == node.name]:
            del self._slots[slot.name]
            slot.close()
            self._seat(identifier, node, slot)
        for slot, identity in list(node.waiting):
            if _done(identity):
                node.waiting.remove((slot, identity))
                try:
                    slot.name, slot.kind = ray.get(identity)
                    self._slots[slot.name] = slot
                except RayError as error:
                    self._refused[slot.name] = f"it did not start: {_last_line(error)}"

    def _seat(self, identifier: str, node: _Node, like: RaySlot) -> None:
        """Start the actor of a slot on a node."""
        # A GPU slot reserves no core, because it mostly waits for its GPU, and compiling needs the cores.
        needs_gpu = like.kind != CPU
        options = {"num_cpus": 0, "num_gpus": 1} if needs_gpu else {"num_cpus": 1}
        actor: Any = ray.remote(Seat).options(**options, **_on(identifier)).remote(like.name, needs_gpu)
        node.waiting.append((RaySlot(like.name, like.kind, node.name, actor), actor.identity.remote()))


def _running() -> str | None:
    """The address of the cluster that runs on this machine; None if no cluster answers."""
    if os.environ.get("RAY_ADDRESS"):
        return "auto"
    with suppress(OSError):
        address = canonicalize_bootstrap_address_or_die("auto")
        return address if _answers(address) else None
    return None


def _answers(address: str) -> bool:
    """Whether any program answers at an address HOST:PORT. Ray itself would try for minutes."""
    with suppress(OSError, ValueError):
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=2).close()
        return True
    return False


def _on(identifier: str) -> dict[str, Any]:
    """Options for an actor that runs only on the node ``identifier`` and is never restarted."""
    strategy = NodeAffinitySchedulingStrategy(node_id=identifier, soft=False)
    return {"scheduling_strategy": strategy, "max_restarts": 0, "max_task_retries": 0}


def _nodes() -> list[dict[str, Any]]:
    """The cluster's nodes. Raises ExecutorLost if the cluster's head does not answer within ``GONE`` seconds;
    Ray itself would wait for minutes."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(ray.nodes())
        except Exception as error:  # Ray's client may raise any error of its transport
            found.put(error)

    threading.Thread(target=ask, daemon=True).start()
    remedy = "resume the sweep on another cluster: coda-agent resume SWEEP --ray ADDRESS"
    try:
        answer = found.get(timeout=GONE)
    except queue.Empty:
        raise ExecutorLost(f"the cluster's head has not answered for {GONE:.0f} s; {remedy}") from None
    if isinstance(answer, Exception):
        raise ExecutorLost(f"the cluster's head is gone ({_first_line(answer)}); {remedy}") from None
    return answer


def _done(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _raise_limit() -> None:
    """Raise the limit of open files to ``FILES``, or as far as the system allows. Raylets (Ray's daemons)
    that this process starts inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
