"""Training goes on from the newest commit: after a rank was killed under torchrun, without a host's memory, on fewer ranks."""

from __future__ import annotations

import os
import re
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradwire as hvd
from gradwire.trainer.elastic import watcher
from gradwire.trainer.elastic.commits import Commits
from gradwire.trainer.elastic.memory import Agent, NamedMemory
from gradwire.trainer.world.world import current_world
from tests.harness import World, Worlds
from tests.ranks.programs import DEADLINE_S, ended, start
from tests.ranks.training import assert_equal, copies, in_world, on_ranks

SCRIPT = """
import os, signal, sys
import torch
import gradwire as hvd

hvd.init()
torch.manual_seed(1 + hvd.rank())
data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
coded = {"0.weight": hvd.ErrorFeedback("int8")}
optimizer = hvd.DistributedOptimizer(adamw, model.named_parameters(), policy=coded)


@hvd.elastic.run(max_failures=2)
def train(state):
    while state.epoch < 2:
        for number in range(len(state.sampler) // 4):
            chosen = state.sampler.get_indices(number, 4)
            optimizer.zero_grad()
            (model(data[chosen]) - data[chosen].sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            state.batch += 1
            state.sampler.record_batch(number, 4)
            if sys.argv[1] == "raise" and state.batch == 3 and hvd.rank() == 1:
                raise ValueError("there is no third batch")
            state.commit()
            if sys.argv[1] == "kill" and state.batch == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                if hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


sampler = hvd.elastic.ElasticSampler(data, seed=3)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(state.batch), lambda: print(f"reset at {resets}\\n", end="", flush=True)])
train(state)
hvd.shutdown()
"""


#: Runs torchrun and ends without finalizing its interpreter. Twice, the finalization did not return after the agent had ended
#: the job; only the main thread was left, in a garbage collection. torchrun does not load gradwire: its exit is not tested.
TORCHRUN = """
import os, sys, traceback
from torch.distributed.run import main
try:
    main()
    status = 0
except Exception:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


#: Ranks are started up to three times in a row, which is slow while other tests use the processors.
STARTS_S = 2 * DEADLINE_S


def torchrun(folder: Path, ending: str) -> tuple[int, str]:
    """Run the script under torchrun's own agent; return its exit status and output."""
    (folder / "train.py").write_text(SCRIPT)
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "9"]
    command = [sys.executable, "-c", TORCHRUN, *flags, "train.py", ending]
    launcher = start(command, folder)
    status, output = ended(launcher, STARTS_S)
    deadline = time.monotonic() + 10
    while left := list(watcher.FOLDER.glob(f"gradwire-elastic.*.{launcher.pid}.*")):
        assert time.monotonic() < deadline, f"{left} are left of a job that has ended:\n{output}"
        time.sleep(0.05)
    return status, output


def run_in_world(folder: Path, ending: str, restarts: int | None = None) -> list[Any]:
    """Run the script on this rank, and return what it ends with. restarts: how often the process that has forked all ranks has
    started them again, as an agent would; None where it would not."""
    agent = None if restarts is None else Agent(os.getppid(), watcher.started_at(os.getppid()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["train.py", ending])
        patched.setattr(sys.modules["gradwire.trainer.elastic.run"], "find_agent", lambda: agent)
        patched.setattr(Agent, "watch", lambda self: None)
        patched.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        patched.chdir(folder)
        ended = runpy.run_path("train.py")
    if agent is not None:
        watcher.remove(agent.prefix)
    return [ended["state"].batch, ended["resets"], *copies(ended["model"].parameters())]


def test_a_killed_rank_costs_no_bit(ranks: Worlds, failing_world: Callable[[int], World], tmp_path: Path) -> None:
    """Weights, state of the optimizer, residuals, dropout's random numbers and the order of samples are those of one run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    whole = ranks(2).run(run_in_world, tmp_path, "whole")  # nobody would start these again: they commit to themselves
    killed = failing_world(2)
    killed.start(run_in_world, tmp_path, "kill", 0)
    assert "returned" not in [outcome.status for outcome in killed.collect(DEADLINE_S)]
    again = failing_world(2).run(run_in_world, tmp_path, "kill", 1)
    for (batches, resets, *weights), (expected_batches, no_resets, *expected) in zip(again, whole, strict=True):
        assert batches == expected_batches == 10
        assert (resets, no_resets) in (([6], []), ([7], []))
        assert_equal(weights, expected)


@pytest.mark.wide
@pytest.mark.timeout(STARTS_S + 20)
def test_torchrun_starts_ranks_again_after_one_was_killed(tmp_path: Path) -> None:
    status, output = torchrun(tmp_path, "kill")
    assert status == 0, output
    resumes = r"^gradwire: training resumes from commit [78] on 2 ranks, from the memory of each host, after"
    assert len(re.findall(resumes, output, re.M)) == 1
    assert output.count("reset at [6]") + output.count("reset at [7]") == 2


@pytest.mark.wide
@pytest.mark.timeout(STARTS_S + 20)
def test_a_failure_that_comes_back_ends_the_job(tmp_path: Path) -> None:
    status, output = torchrun(tmp_path, "raise")
    assert status != 0
    assert re.search(
        r"ranks have failed 2 times since commit 3, and are not started again: .*ValueError: there is no third batch",
        output,
    ), output
    assert output.count("reset at [2]") == 2  # the second time, the ranks do not begin


def memory_of(host: int) -> NamedMemory:
    """Return what one of two hosts would keep: files that live as long as the process that has forked all ranks."""
    parent = os.getppid()
    return NamedMemory(Agent(parent, watcher.started_at(parent)), 77_000 + host)


def trained(state: hvd.elastic.TorchState, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        state.optimizer.zero_grad()
        state.model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        state.optimizer.step()
        state.step += 1


def built(seed: int, samples: int = 24) -> hvd.elastic.TorchState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    policy = {"0.weight": hvd.ErrorFeedback("int8")}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(adamw, model.named_parameters(), policy=policy)
    return hvd.elastic.TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(range(samples), seed=3), step=0)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other)) if isinstance(one, list) else bool(one == other)


@on_ranks(4)
def test_a_host_that_has_lost_its_memory_has_it_from_the_next() -> None:
    """Two hosts of two ranks, which are ranks 0 and 1, and after the loss ranks 2 and 3."""
    state = built(1)
    hvd.broadcast_parameters(state.model.state_dict(), 0)
    state.begin(memory_of(hvd.rank() // 2))
    for _ in range(3):
        trained(state, 2)
        state.commit()
    state.commits.settle()
    memory = memory_of(1 - hvd.rank() // 2)
    hvd.barrier()
    if hvd.rank() == 0:
        watcher.remove(memory.path("").name)  # of the other host, which now holds nothing
    hvd.barrier()
    again = built(2)
    again.begin(memory)
    restored, faults = again.commits.restore()
    assert restored is not None
    assert (restored.number, faults) == (3, [])
    assert restored.source == (
        "the memory of each host, the state of ranks 0, 1 and the shared state for the host of rank 0 from that of another host"
    )
    again.take(restored)
    assert again.step == 6
    assert same(again.model.state_dict(), state.model.state_dict())  # with each rank's own statistics of BatchNorm
    assert same(again.optimizer.state_dict(), state.optimizer.state_dict())
    trained(again, 1)
    again.commit()
    trained(again, 1)
    again.commit()
    again.commits.settle()
    assert memory.names() == [f"{rank}.{slot}" for rank in range(4) for slot in (0, 1)]
    hvd.barrier()
    watcher.remove(memory.path("").name)


@in_world
def committed() -> Any:
    """Commit in the middle of an epoch; return the samples that this rank has processed."""
    state = built(1)
    hvd.broadcast_parameters(state.model.state_dict(), 0)
    state.begin(memory_of(5))
    trained(state, 3)
    state.sampler.record_batch(0, 3)
    state.commit()
    state.commits.settle()
    return state.sampler.get_indices(0, 3)


@in_world
def went_on() -> tuple[list[int], bool, list[str], list[str]]:
    """Go on as other ranks; return this rank's samples, whether replicas are equal, warnings, and the slots at the end."""
    state = built(2 + hvd.rank())
    memory = memory_of(5)
    state.begin(memory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.restore()
    left = list(state.sampler)
    for _ in range(2):
        trained(state, 1)
        state.commit()
    trained(state, 1)
    state.commit()
    flat = torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])
    every = hvd.allgather(flat).view(hvd.size(), -1)
    assert state.step == 6
    hvd.barrier()
    names = memory.names()
    hvd.barrier()
    watcher.remove(memory.path("").name)
    return left, bool((every == every[0]).all()), [str(each.message) for each in caught], names


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_other_ranks_go_on(ranks: Worlds, before: int, after: int) -> None:
    processed = set().union(*ranks(before).run(committed))
    left, equal, said, names = zip(*ranks(after).run(went_on), strict=True)
    assert len(processed) == 3 * before
    assert set().union(*left) == set(range(24)) - processed
    assert all(equal)
    assert f"saved on {before} ranks, loaded on {after}: the residuals of ranks" in said[0][0]
    assert "are lost" not in said[0][0]
    assert set(map(tuple, names)) == {tuple(f"{rank}.{slot}" for rank in range(after) for slot in (0, 1))}


@on_ranks(2)
def test_local_updates_go_on_with_what_each_rank_has() -> None:
    """Whose ranks hold different parameters, of which none may be another's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    local = hvd.DistributedOptimizer(sgd, rule=hvd.rules.LocalUpdates(every=4))
    state = hvd.elastic.TorchState(model, local, step=0, history=[])
    with pytest.raises(RuntimeError, match="there is no commit to restore"):
        state.restore()
    trained(state, 6)
    state.commit()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    trained(state, 2)
    state.history = ["later"]
    ended = [parameter.detach().clone() for parameter in model.parameters()]
    state.restore()
    assert state.step == 6
    assert state.history == []
    assert all(map(torch.equal, model.parameters(), kept))
    trained(state, 2)
    assert all(map(torch.equal, model.parameters(), ended))


def commits_once(state: hvd.elastic.TorchState, steps: int) -> None:
    trained(state, steps)
    state.commit()


@on_ranks(2)
def test_the_last_commit_is_complete_when_the_function_returns() -> None:
    state = built(seed=0)
    finished: list[Commits] = []
    finish = Commits._finish

    def late(commits: Commits, *args: Any) -> bool:
        time.sleep(0.2)
        wanted = finish(commits, *args)
        finished.append(commits)
        return wanted

    for steps in (1, 2):  # the second call finds a state that has begun
        with mock.patch.object(Commits, "_finish", late):
            hvd.elastic.run(commits_once)(state, steps)
        assert len(finished) == state.commits._number


@on_ranks(1)
def test_hosts_that_change_interrupt_at_a_commit() -> None:
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        state.step = 5
        state.on_hosts_updated()
        state.commit()

    with pytest.raises(SystemExit, match="has announced other hosts"):
        train(state)
    state.check_host_updates()
    state.step = 6
    state.restore()
    assert state.step == 5
    assert current_world().size == 1
    for values, said in (({"commit": 1}, "'commit' already"), ({"step": object()}, "of type object")):
        with pytest.raises((ValueError, TypeError), match=said):
            hvd.elastic.ObjectState(**values).save()
