"""Checkpoints that version 0.2 wrote on two ranks are loaded, and nothing in them is lost or changed.

tests/data/checkpoints_of_0_2 has a file for each rank, after five steps of model_of(): the model's state_dict(), and that of the
optimizer or hook. Of the KVStore, there is the file of save_optimizer_states() after three pushes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import assert_same_on_all_ranks, on_ranks

FILES = Path(__file__).parents[1] / "data" / "checkpoints_of_0_2"


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def momentum(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=rate == 0.7)


def of_policy(model: nn.Module, codec: str) -> Any:
    policy = {"*bias": "none", "*": codec}
    return hvd.DistributedOptimizer(momentum(model), model.named_parameters(), policy=policy)


def sharded(model: nn.Module, **settings: str) -> Any:
    return hvd.DistributedOptimizer(adam(model), model.named_parameters(), rule=hvd.rules.Sharded(**settings))


def local(model: nn.Module) -> Any:
    rule = hvd.rules.LocalUpdates(2, momentum(model, 0.7), compression=hvd.ErrorFeedback("int4"), fragments=2)
    return hvd.DistributedOptimizer(momentum(model), model.named_parameters(), rule=rule)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "onebit": lambda model: of_policy(model, "onebit"),
    "powersgd": lambda model: of_policy(model, "powersgd"),
    "shards": sharded,
    "coded_shards": lambda model: sharded(model, parameter_compression="int8"),
    "local": local,
    "server": lambda model: hvd.servers.ParameterServer(adam(model), model.named_parameters()),
}


def saved(name: str) -> dict[str, Any]:
    """Return what this rank has saved."""
    found: dict[str, Any] = torch.load(FILES / f"{name}.rank{hvd.rank()}.pt", weights_only=True)
    return found


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from tensors(each)


def bits(state: Any) -> Counter[Any]:
    """Return how often a state holds each tensor, given by dtype, shape and bits."""
    return Counter((each.dtype, each.shape, each.contiguous().view(-1).numpy().tobytes()) for each in tensors(state))


def train(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model(
            torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        ).square().mean().backward()
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_holds_what_it_saved(name: str) -> None:
    model, files = model_of(), saved(name)
    model.load_state_dict(files["model"])
    optimizer = OPTIMIZERS[name](model)
    optimizer.load_state_dict(files["optimizer"])
    assert bits(optimizer.state_dict()) == bits(files["optimizer"])
    assert bits(model.state_dict()) == bits(files["model"])
    train(model, optimizer)
    if name != "local":
        assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on_ranks(2)
def test_a_hook_holds_what_it_saved() -> None:
    model, files = DistributedDataParallel(model_of()), saved("hook")
    model.module.load_state_dict(files["model"])
    hook = hvd.ddp_comm_hook("none", model.module.named_parameters(), policy={"*": hvd.ErrorFeedback("int4")})
    model.register_comm_hook(None, hook)  # type: ignore[arg-type]
    hook.load_state_dict(files["hook"])
    assert bits(hook.state_dict()) == bits(files["hook"])
    train(model, momentum(model))
    assert_same_on_all_ranks(model.parameters())
    assert hook.state_dict()["step"] == files["hook"]["step"] + 2
    hook.close()


def test_a_store_holds_what_it_saved(ranks: Worlds, tmp_path: Path) -> None:
    ranks(2).run(_through_a_store, str(tmp_path / "again"))
    again, before = (torch.load(path, weights_only=True) for path in (tmp_path / "again", FILES / "kvstore.pt"))
    assert bits(again) == bits(before)
    assert again["states"].keys() == before["states"].keys() == {"w", 7}


def _through_a_store(path: str) -> None:
    hvd.init()
    values = torch.load(FILES / "kvstore_values.pt", weights_only=True)
    store = hvd.servers.kvstore.create("dist_sync")
    store.init(list(values), list(values.values()))
    store.set_optimizer(functools.partial(torch.optim.Adam, lr=0.1))
    store.load_optimizer_states(str(FILES / "kvstore.pt"))
    store.save_optimizer_states(path)
    store.pushpull(list(values), list(values.values()), out=list(values.values()))
    assert all(value.isfinite().all() for value in values.values())
    store.close()
    hvd.shutdown()
