"""Fake slots, which run tasks in this process and can be lost on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coda_agent.agent.fleet.executor import CPU, ExecutorLost, SlotLost
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.worker import Task

Act = Callable[[Task, Any, Progress], dict[str, Any]]


def in_process(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
    return task(argument)


@dataclass
class FakeSlot:
    name: str
    kind: str = CPU
    node: str = "here"
    act: Act = in_process
    lost: bool = False
    ran: list[Any] = field(default_factory=list)

    def run(self, task: Task, argument: Any, *, patience: float, progress: Progress) -> dict[str, Any]:
        self.ran.append(argument)
        if self.lost:
            raise SlotLost(self.name)
        return self.act(task, argument, progress)

    def close(self) -> None: ...


@dataclass
class FakeExecutor:
    made: list[FakeSlot]
    nodes: dict[str, str] = field(default_factory=dict)
    gone: str = ""

    def slots(self) -> Sequence[FakeSlot]:
        if self.gone:
            raise ExecutorLost(self.gone)
        return [slot for slot in self.made if not slot.lost]

    def refused(self) -> Mapping[str, str]:
        return self.nodes

    def close(self) -> None: ...
