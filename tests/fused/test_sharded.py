"""Tests of FSDP2 on two gloo processes: a patched model trains, saves and loads like an unpatched model on
one process.

The test runs this file as a script. The script imports modules once, and then forks into the two processes.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import torch.distributed
import torch.distributed.checkpoint
from layer_parts import loss_of
from small_models import own_operators, tokens, trained
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from coda_agent import fused

WORLD, STEPS = 2, 3
dist: Any = torch.distributed  # Any, because mypy finds almost no exports in torch.distributed
dcp: Any = torch.distributed.checkpoint
fully_shard: Any = torch.distributed.fsdp.fully_shard
LAYERS = ["attention_in_rotated", "block_swiglu"] * 2 + ["summed_loss"]


def sharded(patched_first: bool, seed: int = 0, stack: bool = False, **more: Any) -> Any:
    model = small_models.model("Llama", seed=seed)
    if patched_first:
        fused.patch(model, stack=stack)
    for layer in model.model.layers:
        fully_shard(layer, **more)
    fully_shard(model, **more)
    if not patched_first:
        assert {row.part for row in fused.patch(model) if row.runs != "fused"} == {"attention"}
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, ranks: range) -> float:
    """Take one optimizer step over the batches of ``ranks``; return the mean loss."""
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for rank in ranks:
        ids = tokens(2, 12, 10 + number * WORLD + rank)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / len(ranks)).backward()
        losses.append(float(loss.detach()))
    optimizer.step()
    return sum(losses) / len(losses)


def work(rank: int, folder: Path, patched_first: bool) -> None:
    """Run the checks of one process: train a model, save it, load it into a new model, compare the two."""
    model = sharded(patched_first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        step(model, optimizer, number, range(rank, rank + 1))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = sharded(patched_first, seed=5)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    ids = tokens()
    losses = [m(input_ids=ids, labels=ids, use_cache=False).loss.detach() for m in (model, other)]
    assert torch.equal(*losses)


def in_bf16() -> None:
    """Check a model whose parameters are stored in fp32 and gathered in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(True, mp_policy=policy)
    seen: dict[str, Any] = {}
    ran = own_operators(lambda: seen.update(trained(model, tokens(), use_cache=False)))
    assert [each for each in ran if "backward" not in each] == LAYERS
    plain = small_models.model("Llama")
    usual, exact = trained(copy.deepcopy(plain).bfloat16(), tokens()), trained(plain.double(), tokens())
    for name in exact.keys() - {"loss"}:
        found = seen[name].full_tensor()
        assert found.dtype == torch.float32
        assert loss_of(found, exact[name]) < 1.5 * loss_of(usual[name], exact[name]), name


def whole_stack() -> None:
    """Check that a layer computes the first part of the next layer's norm only if FSDP gathers the weights
    of all layers together. Otherwise each layer computes its own norm."""
    plain = trained(small_models.model("Llama"), tokens(), use_cache=False)
    together, apart = small_models.model("Llama"), sharded(True, stack=True)
    fused.patch(fully_shard(together), stack=True)
    for model, wanted in ((together, 1), (apart, 0)):
        ran = own_operators(partial(trained, model, tokens(), use_cache=False))
        assert ran.count("block_swiglu_next_norm") == wanted
        found: dict[str, Any] = trained(model, tokens(), use_cache=False)
        for name in plain.keys() - {"loss"}:
            assert loss_of(found[name].full_tensor(), plain[name]) < 1e-5, name
    (row,) = (row for row in fused.patch(apart, stack=True) if "next layer" in row.part)
    assert row.why == "FSDP shards the next layer separately"


def both(folder: Path) -> None:
    """Fork, and run all checks in both processes. The parent process waits for its child."""
    child = os.fork()
    rank = 0 if child else 1
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
    # if a module returns a view, FSDP2 warns, and this line turns the warning into an error
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    for patched_first in (True, False):
        work(rank, folder / str(patched_first), patched_first)
    in_bf16()
    whole_stack()
    dist.destroy_process_group()
    if child:
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_two_processes_train_save_and_load_as_one(tmp_path: Path) -> None:
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=told, check=True, timeout=240)
    plain = small_models.model("Llama")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = [step(plain, optimizer, number, range(WORLD)) for number in range(STEPS)]
    assert losses[-1] < losses[0]
    for patched_first in (True, False):  # one process reads what two processes wrote
        whole = small_models.model("Llama", seed=7)
        state = {"model": whole.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / str(patched_first), no_dist=True)
        for name, parameter in plain.named_parameters():
            assert torch.allclose(state["model"][name], parameter.detach(), atol=2e-4), name
        expected = float(trained(plain, tokens())["loss"])
        assert float(trained(whole, tokens())["loss"]) == pytest.approx(expected, abs=1e-3)


if __name__ == "__main__":
    both(Path(sys.argv[1]))
