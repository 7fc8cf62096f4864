"""A fleet on a real Ray cluster, and the faults that the fleet survives. All nodes run on this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fleet_tasks
import pytest
import worker_tasks
from checkout import ROOT, SUPPORT
from small_disk import mounted
from waiting import eventually

from coda_agent.agent.fleet import on_ray
from coda_agent.agent.fleet.executor import ExecutorLost, SlotLost
from coda_agent.agent.fleet.objects import run_shared
from coda_agent.agent.fleet.on_ray import OnRay
from coda_agent.agent.fleet.pool import Pool
from coda_agent.verifier.gates import silent
from coda_agent.verifier.worker import Lost

pytestmark = pytest.mark.slow
PATIENCE = 120.0  # seconds for a process to start on a busy machine
SMALL = 80 << 20  # bytes; about the smallest object store that Ray accepts
HEALTH = {  # with Ray's default values, the cluster would notice a lost node only after 15 s
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


class Fleet:
    """A cluster, and the driver's executor and pool. The head node of the cluster has no slots."""

    def __init__(self, directory: Path) -> None:
        from ray.cluster_utils import Cluster

        self.directory = directory
        self.cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": SMALL,
                "include_dashboard": False,
                "_system_config": HEALTH,
            },
        )
        self.nodes = {name: self.add(name) for name in ("a", "b")}
        self.executor = OnRay(self.cluster.address)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pool = Pool(self.executor, lambda kind, told: self.events.append((kind, told)))

    def add(self, name: str, cores: int = 1, gpus: int = 0, **environment: str) -> Any:
        """Add a node with ``cores`` cores. Its processes find the node's name in the environment variable
        TEST_NODE."""
        known = {"TEST_NODE": name, "CODA_AGENT_CACHE": str(self.directory / name)} | environment
        known = {"QUACK_CACHE_DIR": str(self.directory / name / "quack")} | known
        return self.cluster.add_node(
            num_cpus=cores, num_gpus=gpus, object_store_memory=SMALL, env_vars=known, wait=False
        )

    def lose(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def here(self, *names: str) -> None:
        """Wait until exactly these nodes have slots in the pool."""
        wanted = {self.nodes[name].node_id[:8] for name in names}

        def all_here() -> bool:
            return {use.slot.node[-8:] for use in self.pool.uses.values()} == wanted

        assert eventually(all_here, PATIENCE), (wanted, [*self.pool.uses], self.pool.refusals)

    def run(self, piece: str, task: Callable[[Any], dict[str, Any]], argument: Any) -> dict[str, Any]:
        return self.pool.run(piece, task, argument, patience=PATIENCE)

    def slot(self, name: str) -> Any:
        """Return the slot of a node that has one core."""
        identifier = self.nodes[name].node_id
        return next(use.slot for use in self.pool.uses.values() if use.slot.node.endswith(identifier[:8]))

    def told(self, kind: str, after: int = 0) -> list[dict[str, Any]]:
        return [payload for name, payload in self.events[after:] if name == kind]

    def close(self) -> None:
        self.pool.close()
        self.executor.close()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    before = os.environ.get("PYTHONPATH", "")
    # A fixed version replaces the hash of the checkout's files, so that a file may be edited during the test.
    os.environ["CODA_AGENT_VERSION"] = "as tested"
    os.environ["PYTHONPATH"] = os.pathsep.join([before, str(SUPPORT)])
    os.environ["ANTHROPIC_API_KEY"] = (
        "sk-ant-fake-of-the-cluster"  # as if somebody had started Ray's processes with a key
    )
    made = Fleet(tmp_path_factory.mktemp("nodes"))
    try:
        made.here("a", "b")
        yield made
    finally:
        made.close()
        os.environ["PYTHONPATH"] = before
        del os.environ["ANTHROPIC_API_KEY"], os.environ["CODA_AGENT_VERSION"]


def test_pieces_see_neither_keys_nor_gpus_that_are_not_theirs(fleet: Fleet) -> None:
    seen = fleet.run("r check", fleet_tasks.surroundings, None)
    assert seen["gpus"] == "" and seen["secrets"] == []
    path = os.pathsep.join([str(SUPPORT / "fake_nvml"), os.environ["PYTHONPATH"]])
    fleet.nodes["gpu"] = fleet.add("gpu", cores=0, gpus=1, PYTHONPATH=path)
    assert eventually(lambda: bool(fleet.pool.gpus), PATIENCE)
    with fleet.pool.lease(True, "r measure") as slot:
        seen = slot.run(fleet_tasks.surroundings, None, patience=PATIENCE, progress=silent)
    assert slot.name == "GPU-12ab" == seen["gpus"] and fleet.pool.kind == "NVIDIA H100 80GB HBM3"
    fleet.lose("gpu")
    fleet.here("a", "b")


def test_a_killed_worker_costs_one_piece_and_its_slot_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    before = len(fleet.events)
    marker = str(tmp_path / "killed")
    assert fleet.run("k check", fleet_tasks.kill_seat_once, marker) == {"marker": marker}
    assert [e["outcome"] for e in fleet.told("lease", before)] == ["void", "done"]
    fleet.here("a", "b")


def test_a_closed_slot_ends_its_work_and_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(SlotLost), fleet.pool.lease(False, "c check") as slot:
        never = str(tmp_path / "never")
        slot.run(fleet_tasks.wait_for, never, patience=PATIENCE, progress=lambda *_: slot.close())
    fleet.here("a", "b")


def test_objects_that_one_node_compiled_are_not_compiled_on_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quack import cache

    monkeypatch.setattr(cache, "CACHE_DIR", str(fleet.directory / "driver"))
    folder = ROOT / "generated_kernels"
    asked = {"program": (folder / "gemm_rmsnorm.program.json").read_text()}
    asked["spec"] = (ROOT / "specs" / "gemm_rmsnorm.yaml").read_text()
    before, found = len(fleet.events), []
    for name in ("a", "b", "a"):
        slot = fleet.slot(name)
        more: dict[str, Any] = {"patience": PATIENCE, "progress": silent}
        found.append(run_shared(fleet.pool, slot, "spec", fleet_tasks.tune_toy, asked, **more))
    assert [(each["node"], each["compiled"]) for each in found] == [("a", 2), ("b", 0), ("a", 0)]
    assert all(each["right"] == [True, True] for each in found)
    counted = [(e["made"], e["given"]) for e in fleet.told("objects", before)]
    assert counted == [(2, 0), (0, 2), (0, 0)]


def test_a_hung_piece_is_killed_and_its_node_stays(fleet: Fleet) -> None:
    before = len(fleet.events)
    with pytest.raises(Lost) as lost:
        fleet.pool.run("h compile", worker_tasks.hang, None, patience=8.0)
    assert lost.value.code == "hung"
    assert len(fleet.told("lease", before)) == 2 and len(fleet.pool.uses) == 2


def test_a_removed_node_costs_the_pieces_on_it(fleet: Fleet, tmp_path: Path) -> None:
    """Each of two nodes runs one piece. After one node has left, the other node finishes both pieces. Then a
    new node joins."""
    go, before = tmp_path / "go", len(fleet.events)
    answers: list[dict[str, Any]] = []
    heard: list[str] = []

    def run(name: str) -> None:
        said = lambda gate, words: heard.append(words)  # noqa: E731
        found = fleet.pool.run(name, fleet_tasks.wait_for, str(go), patience=PATIENCE, progress=said)
        answers.append(found)

    threads = [threading.Thread(target=run, args=(f"{n} check",)) for n in range(2)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: {*heard} == {"a", "b"}, PATIENCE)
    fleet.lose("b")
    assert eventually(lambda: bool(fleet.told("left", before)), PATIENCE)
    go.touch()
    for thread in threads:
        thread.join(PATIENCE)
    assert [found["node"] for found in answers] == ["a", "a"]
    assert sorted(e["outcome"] for e in fleet.told("lease", before)) == ["done", "done", "void"]
    fleet.nodes["c"] = fleet.add("c")
    fleet.here("a", "c")


def test_an_answer_that_is_lost_with_its_node_is_computed_again(fleet: Fleet) -> None:
    slot = fleet.slot("c")
    stream = slot.begin(fleet_tasks.large, 5 << 20, PATIENCE)  # the answer is too large for a message
    time.sleep(10)
    fleet.lose("c")
    with pytest.raises(SlotLost):
        slot.answer(stream, silent)
    assert slot.lost
    assert len(fleet.run("o check", fleet_tasks.large, 5 << 20)["text"]) == 5 << 20


def test_a_node_with_other_versions_does_not_join(fleet: Fleet) -> None:
    fleet.nodes["old"] = fleet.add("old", CODA_AGENT_VERSION="0123")
    assert eventually(lambda: bool(fleet.pool.refusals), PATIENCE)
    (why,) = fleet.pool.refusals.values()
    assert why.startswith("coda-agent is 0123 there and ") and "restart its Ray" in why
    assert fleet.told("refused")[0]["reason"] == why
    fleet.lose("old")


def test_a_node_whose_disk_is_full_leaves_and_its_piece_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []

    def fill() -> None:
        answers.append(fleet.run("r check", fleet_tasks.fill_cache, 1 << 20))

    with mounted(tmp_path / "disk", 64 << 10) as disk, ExitStack() as busy:
        cache = disk if os.path.ismount(disk) else Path("/dev/full")
        fleet.nodes["full"] = fleet.add("full", CODA_AGENT_CACHE=str(cache))
        fleet.here("a", "full")
        assert busy.enter_context(fleet.pool.lease(False, "s check")) is fleet.slot("a")
        thread = threading.Thread(target=fill)
        thread.start()
        assert eventually(lambda: "r check" in fleet.pool._suspects, PATIENCE)
        busy.close()
        thread.join(PATIENCE)
        (why,) = fleet.pool.left_out.values()
        assert "No space left" in why or "cannot be written" in why
        fleet.lose("full")
    assert [answer["node"] for answer in answers] == ["a"]
    fleet.here("a")


def test_a_clock_that_is_an_hour_ahead_changes_no_record(fleet: Fleet) -> None:
    path = os.pathsep.join([str(SUPPORT / "hour_ahead"), os.environ["PYTHONPATH"]])
    fleet.nodes["ahead"] = fleet.add("ahead", PYTHONPATH=path)
    fleet.here("a", "ahead")
    before, began = len(fleet.events), time.monotonic()
    seen = fleet.slot("ahead").run(fleet_tasks.surroundings, None, patience=PATIENCE, progress=silent)
    assert seen["node"] == "ahead" and seen["clock"] > time.time() + 3000
    for number in range(2):
        fleet.run(f"{number} check", fleet_tasks.surroundings, None)
    took = time.monotonic() - began
    assert all(0 <= e["seconds"] <= took for e in fleet.told("lease", before))


def test_a_lost_head_is_said_within_seconds(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test kills the head of the module's cluster, so it has to be the last test that uses the
    cluster."""
    monkeypatch.setattr(on_ray, "GONE", 5.0)
    fleet.cluster.head_node.kill_gcs_server(check_alive=False)
    assert eventually(lambda: bool(fleet.pool._closed), PATIENCE)
    assert "--ray ADDRESS" in fleet.pool._closed


def test_auto_ignores_the_address_of_a_dead_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray records the address of its last cluster. If the product did not check whether this cluster still
    runs, Ray would try to reach the dead address for minutes."""
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    with socket.create_server(("", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert on_ray._running() is not None
    assert on_ray._running() is None
    with pytest.raises(ExecutorLost, match=f"no Ray cluster answers at {address}; start one"):
        OnRay(address)
