"""Sweeps on a real Ray cluster, with these faults: a second driver, a killed driver, a killed head of the
cluster, and a provider that refuses every request. In one sweep, fifteen requests at once reserve the whole
budget. No request is paid for twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from authoring import BROKEN, TOY_KERNEL, fenced, write_toy
from checkout import ROOT
from fake_messages import COUNTED, MODEL, USAGE, FakeMessages, answer, status
from waiting import eventually

from coda_agent.agent.fleet import sweep
from coda_agent.agent.reporting import sweep_view
from coda_agent.agent.run import history, runs
from coda_agent.agent.storage.journal import JournalError

pytestmark = pytest.mark.slow
KEY = "sk-ant-fake-of-the-driver-alone"
PATIENCE = 240.0
SMALL = 80 << 20
AUTHOR = ("--provider", "anthropic", "--model", MODEL, "--no-gpu")


@contextmanager
def cluster(cores: int) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": SMALL, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(cores):
            made.add_node(num_cpus=1, object_store_memory=SMALL, wait=False)
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Any]:
    """Return the cluster that the tests share. No test kills a node of this cluster."""
    with pytest.MonkeyPatch.context() as patch:
        # A fixed version replaces the hash of the checkout's files, so that a file may be edited meanwhile.
        patch.setenv("CODA_AGENT_VERSION", "as tested")
        with cluster(1) as made:
            yield made


@contextmanager
def driving(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a process, and kill this process at the end. Only this process has the key."""
    line = [sys.executable, "-m", "coda_agent.agent.cli.main", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "ANTHROPIC_API_KEY": KEY}
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_driver_and_head_are_killed_and_a_new_cluster_ends_the_sweep(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("CODA_AGENT_VERSION", "as tested")  # see ``lasting``
    toy, said = write_toy(tmp_path), ""
    logs = []
    with FakeMessages(*[answer(fenced(TOY_KERNEL))] * 9) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        with cluster(1) as first:
            logs.append(Path(first.head_node.get_session_dir_path()))
            with driving("sweep", toy, "--candidates", 2, *AUTHOR, "--ray", first.address) as driver:
                assert eventually(lambda: _answered() == 2, PATIENCE)
                name = _the_sweep()
                with pytest.raises(JournalError, match="in use by another process"):
                    sweep.reopen(name)
                driver.send_signal(signal.SIGKILL)
            before = _joined(name)
            with driving("resume", name, "--no-gpu", "--ray", first.address) as driver:
                assert eventually(lambda: _joined(name) > before, PATIENCE)
                first.head_node.kill_gcs_server(check_alive=False)
                for node in first.worker_nodes:  # otherwise pieces may end before the lost head is noticed
                    node.kill_all_processes(check_alive=False, allow_graceful=False)
                out, errors = driver.communicate(timeout=PATIENCE)
            said += out + errors
            assert driver.returncode == 3 and "--ray ADDRESS" in errors and name in errors
        second = request.getfixturevalue("lasting")  # starts only now, after the first cluster has ended
        logs.append(Path(second.head_node.get_session_dir_path()))
        with driving("resume", name, "--no-gpu", "--ray", second.address) as driver:
            out, errors = driver.communicate(timeout=PATIENCE)
        said += out + errors
        assert driver.returncode == 0, errors
        assert len(api.requests) == 2
    assert {history.past_of(run).status for run in runs.names()} == {"checked"} and len(runs.names()) == 2
    told = sweep_view.as_dict(name)
    assert told["compiled"] == 1 and {slot["kind"] for slot in told["slots"]} == {"CPU"}
    _expect_no_key(said, runs.runs_dir(), *logs)


def test_a_lost_node_leaves_the_json_alone(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray prints on standard output when it loses a node."""
    monkeypatch.setenv("CODA_AGENT_VERSION", "as tested")
    lost = threading.Event()

    def late(handler: Any) -> None:
        lost.wait(PATIENCE)
        answer(fenced(TOY_KERNEL))(handler)

    with FakeMessages(late) as api, cluster(2) as made:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        with driving("sweep", write_toy(tmp_path), *AUTHOR, "--json", "--ray", made.address) as driver:
            assert eventually(lambda: len(runs.names()) == 1 and _joined(_the_sweep()) == 2, PATIENCE)
            made.remove_node(min(made.worker_nodes, key=id), allow_graceful=False)
            lost.set()
            out, errors = driver.communicate(timeout=PATIENCE)
    assert json.loads(out)["statuses"] == {"checked": 1} and "Raylet is terminated" in errors


def test_a_provider_that_refuses_everyone_costs_nothing(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: Any
) -> None:
    monkeypatch.setenv("CODA_AGENT_VERSION", "as tested")
    limited = status(429, "rate_limit_error", "slow down")
    with FakeMessages(*[limited] * 500) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        more = (*AUTHOR, "--candidates", 3, "--budget-seconds", 8, "--ray", lasting.address)
        with driving("sweep", write_toy(tmp_path), *more) as driver:
            _, errors = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 3 and f"coda-agent resume {_the_sweep()}" in errors
        assert len(api.requests) >= 3
    stopped = [e.payload["stopped"] for e in sweep.read(_the_sweep())[1] if e.kind == "ended"]
    assert len(stopped) == 3 and all("seconds used" in why for why in stopped)
    assert all(history.past_of(name).spent.tokens == 0 for name in runs.names())


def test_a_budget_that_fifteen_requests_under_way_reach(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: Any
) -> None:
    """The budget has room for the reservations of 15 requests at once. These requests use less than they
    reserve, so the rest of the budget has room for two more requests, and then for one more. After the budget
    is doubled, every run ends."""
    monkeypatch.setenv("CODA_AGENT_VERSION", "as tested")
    runs_at_once, more, most = 15, 3, 1024
    together = threading.Barrier(runs_at_once, timeout=PATIENCE)
    wrong, right = answer(fenced(BROKEN)), answer(fenced(TOY_KERNEL))

    def waiting(handler: Any) -> None:
        together.wait()
        wrong(handler)

    used = USAGE["input_tokens"] + USAGE["cache_creation_input_tokens"] + USAGE["cache_read_input_tokens"] + 7
    budget = runs_at_once * (COUNTED + most)
    with FakeMessages(*[waiting] * runs_at_once, *[wrong] * more) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        many = ("--candidates", runs_at_once, "--at-once", runs_at_once, "--ray", lasting.address)
        limits = ("--max-tokens", most, "--budget-tokens", budget)
        with driving("sweep", write_toy(tmp_path), *AUTHOR, *many, *limits) as driver:
            _, errors = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 3 and len(api.requests) == runs_at_once + more, errors
        assert _tokens() == used * (runs_at_once + more) <= budget
        api.script.extend([right] * runs_at_once)
        larger = ("--budget-tokens", 2 * budget, "--no-gpu", "--ray", lasting.address)
        with driving("resume", _the_sweep(), *larger) as driver:
            _, errors = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0, errors
        assert len(api.requests) == 2 * runs_at_once + more and not api.script
    assert [history.past_of(name).status for name in runs.names()] == ["checked"] * runs_at_once
    assert _tokens() == used * (2 * runs_at_once + more)
    assert sweep_view.as_dict(_the_sweep())["compiled"] == 1


def _tokens() -> int:
    return sum(history.past_of(name).spent.tokens for name in runs.names())


def _the_sweep() -> str:
    (found,) = (path.name for path in runs.runs_dir().iterdir() if path.name.startswith("sweep-"))
    return found


def _answered() -> int:
    return sum(history.past_of(name).attempts for name in runs.names())


def _joined(name: str) -> int:
    return sum(event.kind == "joined" for event in sweep.read(name)[1])


def _expect_no_key(said: str, *directories: Path) -> None:
    assert KEY not in said
    for path in (path for directory in directories for path in directory.rglob("*")):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
