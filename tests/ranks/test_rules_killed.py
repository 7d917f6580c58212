"""Every update rule, and ranks that are killed: in the middle of an exchange, and all of them at once, to begin again."""

import hashlib
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator, PeerLost
from tests.harness import World, Worlds, meet, wait_until
from tests.ranks.training import assert_survived, network, spy, train

STEPS, SAVED, KILLED = 9, 5, 7
DEADLINE_S = 100.0  # for a world, whose operations have longer
FAR_S = 300.0  # so that what ends sooner was told


def synchronous(model: nn.Module, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def local(
    model: nn.Module, *, momentum: float = 0.0, bucket_bytes: int | None = None, **settings: Any
) -> hvd.DistributedOptimizer:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=momentum)
    return synchronous(model, bucket_bytes=bucket_bytes, rule=hvd.rules.LocalUpdates(outer=outer, **settings))


def server(model: nn.Module, **options: Any) -> hvd.servers.ParameterServer:
    return hvd.servers.ParameterServer(torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


RESUMED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "synchronous, int4 with error feedback": (synchronous, {"compression": hvd.ErrorFeedback("int4")}),
    "sharded states": (synchronous, {"rule": hvd.rules.Sharded()}),
    "local updates, momentum": (local, {"every": 4, "warmup_steps": 3, "momentum": 0.9}),
    "local updates, late fragments": (local, {"every": 6, "fragments": 2, "delay": 2, "compression": "onebit"}),
    "parameter server": (server, {}),
}


def train_by_all_rules(directory: Path, stop: int, *, resume: bool) -> dict[str, str]:
    """Train by each rule to step `stop`, from the beginning or from what was saved; save at step SAVED where it is passed.

    Return a hash of the parameters by rule; or, short of the last step, be killed.
    """
    hvd.init(timeout_s=FAR_S)
    hashes, optimizers = {}, []
    for number, (rule, (make, options)) in enumerate(RESUMED.items()):
        model = network(700)
        optimizers.append(make(model, **options))
        file = directory / f"{number}-{hvd.rank()}"
        if resume:
            saved = torch.load(file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizers[-1].load_state_dict(saved["optimizer"])
        else:
            train(model, optimizers[-1], range(SAVED))
            torch.save({"model": model.state_dict(), "optimizer": optimizers[-1].state_dict()}, file)
        train(model, optimizers[-1], range(SAVED, stop))
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        hashes[rule] = hashlib.sha256(parameters).hexdigest()
    if stop < STEPS:
        meet("all have come so far")
        os.kill(os.getpid(), signal.SIGKILL)
    for optimizer in optimizers:
        optimizer.close()
    hvd.shutdown()
    return hashes


def test_all_are_killed_and_go_on_bit_for_bit(
    ranks: Worlds, failing_world: Callable[[int], World], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = ranks(2).run(train_by_all_rules, whole, STEPS, resume=False)
    world = failing_world(2)
    world.start(train_by_all_rules, killed, KILLED, resume=False)
    exit_codes = [outcome.exit_code for outcome in world.collect(DEADLINE_S)]
    assert exit_codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert failing_world(2).run(train_by_all_rules, killed, STEPS, resume=True) == expected


def die_at(number: int) -> Callable[..., None]:
    """Return what ends this process when it is called for the given time, from 1 on."""
    calls = iter(range(1, number + 1))

    def count(*_: object) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


VICTIM = 1
COLLECTIVE: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "synchronous, int4 with error feedback": (
        synchronous,
        {"compression": hvd.ErrorFeedback("int4"), "bucket_bytes": 1024},
        2,
    ),
    "sharded states, which ranks gather": (synchronous, {"rule": hvd.rules.Sharded()}, 1),
    "local updates, chunktopk": (local, {"every": 2, "compression": "chunktopk", "bucket_bytes": 1024}, 2),
    "local updates, late": (local, {"every": 4, "delay": 2, "bucket_bytes": 1024}, 2),
}
"""By what is said of a rule: how it is made, and in which of its exchanges the victim ends, one bucket being exchanged."""


def lose_one_in_an_exchange(rule: str) -> tuple[int, ...]:
    """Train, until the victim ends between two buckets of an exchange; return whom the error names."""
    hvd.init(timeout_s=FAR_S)
    model = network(700)
    make, options, number = COLLECTIVE[rule]
    optimizer = make(model, **options)
    meet("all have an optimizer")
    if hvd.rank() == VICTIM and "rule" in options:
        optimizer.communicator.gather_shares = die_at(number)  # no allreduce, which spy() sees
    elif hvd.rank() == VICTIM:
        spy(optimizer, die_at(number))
    with pytest.raises(PeerLost) as caught:
        train(model, optimizer, range(STEPS))
    optimizer.close()
    hvd.shutdown()
    return caught.value.ranks


@pytest.mark.parametrize("rule", COLLECTIVE)
def test_one_is_killed_in_an_exchange_of_all(failing_world: Callable[[int], World], rule: str) -> None:
    world = failing_world(3)
    world.start(lose_one_in_an_exchange, rule)
    assert assert_survived(world, [VICTIM], DEADLINE_S) == [(VICTIM,)] * 2


def die_in_the_push() -> None:
    """Have this rank end when it has said that gradients come, and has not sent them."""
    send, end = Communicator.send, die_at(2)

    def counted(*args: Any, **options: Any) -> Any:
        end()
        return send(*args, **options)

    Communicator.send = counted  # type: ignore[method-assign]


PUSHED: dict[str, tuple[dict[str, Any], int, type[Exception] | None]] = {
    "a quorum is left": ({"quorum": 3, "staleness": 1, "servers": [0]}, 3, None),
    "all are the quorum": ({"servers": [0]}, 3, hvd.servers.QuorumLost),
    "it serves": ({"quorum": 1, "staleness": 1, "servers": [0, 2]}, 2, PeerLost),
}
"""The options of a parameter server, the victim, and the error of the others, if one is due. By the bound of the staleness, they
wait for the victim until it is known to be lost."""


def lose_one_in_a_push(options: dict[str, Any], victim: int, error: type[Exception] | None) -> object:
    """Train until the victim ends in the middle of a push, and on without it, or until an error says so; return whom the report
    or the error names.

    All meet after the first step, in which nobody can wait for ever: after two, a late rank may wait for a quorum that does not
    come, since the others have made theirs and wait here.
    """
    hvd.init(timeout_s=FAR_S)
    model = network(700)
    optimizer = server(model, **options)
    train(model, optimizer, range(1))
    meet("all have come so far")
    if hvd.rank() == victim:
        die_in_the_push()
    with nullcontext() if error is None else pytest.raises(error) as caught:
        train(model, optimizer, range(1, STEPS))
    if caught is None:
        wait_until(lambda: optimizer.report().lost)  # a rank may have pushed all before the news of the loss
    named: object = optimizer.report().lost if caught is None else vars(caught.value)["ranks"]
    if caught is not None:
        with pytest.raises(CollectiveError, match="broken by an earlier failure"):
            optimizer.step()
    optimizer.close()
    hvd.shutdown()
    return named


@pytest.mark.parametrize("case", PUSHED)
def test_one_is_killed_in_a_push(failing_world: Callable[[int], World], case: str) -> None:
    options, victim, error = PUSHED[case]
    world = failing_world(4)
    world.start(lose_one_in_a_push, options, victim, error)
    assert assert_survived(world, [victim], DEADLINE_S) == [(victim,)] * 3
