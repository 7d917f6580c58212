"""Arguments that a KVStore refuses, after which it goes on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as hvd
from gradwire.collectives import CollectiveError
from tests.ranks.training import on_ranks


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("no step today")


def only_of_vectors(tensors: list[Tensor]) -> torch.optim.Optimizer:
    if tensors[0].ndim > 1:
        raise ArithmeticError("not today")
    return torch.optim.SGD(tensors, lr=1.0)


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    """The errors of one rank are errors on all, where all make the call."""
    rank = hvd.rank()
    for options in (
        {"type": "dist"},
        {"servers": []},
        {"servers": [2]},
        {"servers": [rank]},
        {"type": "dist_async" if rank else "dist_sync"},
    ):
        with pytest.raises(ValueError, match=f"^rank {rank}: "):
            hvd.servers.KVStore(**{"type": "dist_sync", **options})
    kv = hvd.servers.KVStore("dist_sync")
    w, n = torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(KeyError):
        kv.pull("w", w)
    kv.init(["w", 1], [w, n])
    with pytest.raises(KeyError, match=f"rank {rank}: key '1'.*known are 'w', 1"):
        kv.push("1", w)
    for key, value, error in (
        ("w", w, ValueError),
        (["x", "x"], [w, w], ValueError),
        (["x", "y"], [w], ValueError),
        (["x"], w, ValueError),
        ("x", [w], TypeError),
        (1.5, w, TypeError),
        (True, w, TypeError),
        ("x", torch.zeros(2 + rank), ValueError),
        ("x" if rank else "y", w, ValueError),
        ("w" if rank else "x", w, ValueError),
        ("x", torch.zeros(2, device="meta") if rank else torch.zeros(2), NotImplementedError if rank else ValueError),
    ):
        with pytest.raises(error):
            kv.init(key, value)
    for value, error in (
        (torch.zeros(3), ValueError),
        (w.double(), ValueError),
        ([w, n], ValueError),
        ([], TypeError),
        (1.0, TypeError),
    ):
        for use in (kv.push, kv.pull, functools.partial(kv.pushpull, value=w, out=value)):
            with pytest.raises(error):
                use("w") if isinstance(use, functools.partial) else use("w", value)  # type: ignore[arg-type]
    optimizers: list[Any] = [
        torch.optim.SGD([w], lr=1.0),
        "sgd",
        lambda tensors: None,
        lambda: None,
        lambda tensors: torch.optim.SGD([w]),
    ]
    for optimizer in optimizers:
        with pytest.raises(TypeError):
            kv.set_optimizer(optimizer)
    with pytest.raises(ValueError, match=r"key 1 has dtype torch\.int64"):
        kv.set_optimizer(torch.optim.SGD)
    codecs: list[Any] = [
        {},
        "2bit",
        {"type": "1bit"},
        {"type": ["topk"]} if rank == 0 else {"type": "topk"},
        {"type": "topk", "ratio": "much"},
        {"type": "topk", "ratio": 0.5 if rank else [0.5]},
        {"type": "2bit", "threshold": 0},
        {"type": "2bit", "threshold": 1 + rank},
        {"type": "2bit" if rank else "none"},
    ]
    for params in codecs:
        with pytest.raises(ValueError, match=f"^rank {rank}: "):
            kv.set_gradient_compression(params)
    for params, settings in (
        ({"type": "2bit", "ratio": 1}, "threshold"),
        ({"type": "int8", "ratio": 1}, "block, stochastic"),
    ):
        with pytest.raises(ValueError, match=f"has no setting 'ratio'; it has {settings}$"):
            kv.set_gradient_compression(params)
    with pytest.raises(ValueError, match="capability"):
        kv.is_capable("flight")
    kv.pushpull("w", torch.ones(2, 2), out=w)  # it goes on after all that
    assert (w == hvd.size()).all()
    kv.close()


@on_ranks(2)
def test_an_optimizer_that_cannot_be_or_fails_is_replaced() -> None:
    kv, w = hvd.servers.KVStore("dist_sync", servers=[0]), torch.full((2, 2), 2.0)
    kv.init("w", w)
    for optimizer in (
        functools.partial(torch.optim.SGD, lr=0.1 * (1 + hvd.rank())),
        only_of_vectors,  # which only rank 0, the server, would have seen
    ):
        with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: "):
            kv.set_optimizer(optimizer)
    kv.set_optimizer(Broken)
    with pytest.raises(ValueError, match=r"key 'n' has dtype torch\.int64"):
        kv.init("n", torch.zeros(3, dtype=torch.int64))
    kv.push("w", w)
    with pytest.raises(CollectiveError, match=r"pull of key 'w'.*no step today"):
        kv.pull("w", w)
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    kv.pushpull("w", torch.ones(2, 2), out=w)
    assert (w == 0).all()
    hvd.barrier()
    kv.close()
