"""Arguments that a KVStore refuses."""

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
    rank = hvd.rank()
    for make, said in (
        (lambda: hvd.KVStore("dist"), "type must be one of 'local', 'device', 'dist_sync'"),  # type: ignore[arg-type]
        (lambda: hvd.KVStore("dist_sync", servers=[]), "servers must be"),
        (lambda: hvd.KVStore("dist_sync", servers=[2]), "servers must be ranks from 0 to 1"),
        (lambda: hvd.KVStore("dist_sync", servers=[rank]), r"servers is \[0\] on rank 0; \[1\] on rank 1"),
        (lambda: hvd.KVStore("dist_async" if rank else "dist_sync"), "asynchronous is False on rank 0; True on rank 1"),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    kv = hvd.KVStore("dist_sync")
    w, n = torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(KeyError, match=r"key 'w' was never given to init.*; known are none"):
        kv.pull("w", w)
    kv.init(["w", 1], [w, n])
    with pytest.raises(KeyError, match=r"key '1' was never given to init.*; known are 'w', 1"):
        kv.push("1", w)
    for key, value, error, said in (
        ("w", w, ValueError, "key 'w' has been given to init.* before"),
        (["x", "x"], [w, w], ValueError, "'x' is given twice"),
        (["x", "y"], [w], ValueError, "a list as long as that of the keys, 2, not 1"),
        (["x"], w, ValueError, "not Tensor"),
        ("x", [w], TypeError, "must be a tensor"),
        (1.5, w, TypeError, "a key must be an int or a str, not 1.5"),
        (True, w, TypeError, "a key must be an int or a str"),
        ("x", torch.zeros(2 + rank), ValueError, r"differ between ranks: .*\[2\].* on rank 0; .*\[3\].* on rank 1"),
        ("x" if rank else "y", w, ValueError, "differ between ranks"),
    ):
        with pytest.raises(error, match=said):
            kv.init(key, value)
    with pytest.raises(ValueError, match="'w' has been given" if rank else "because rank 1 cannot.*'w' has been"):
        kv.init("w" if rank else "x", w)
    for key, value, error, said in (
        ("w", torch.zeros(3), ValueError, r"shape \[2, 2\] and dtype torch.float32, as init.*not \[3\]"),
        ("w", w.double(), ValueError, "not .* torch.float64"),
        ("w", [w, n], ValueError, "not .* torch.int64"),
        ("w", [], TypeError, "a tensor or a list of tensors"),
        ("w", 1.0, TypeError, "a tensor or a list of tensors"),
    ):
        with pytest.raises(error, match=said):
            kv.push(key, value)
        with pytest.raises(error, match=said):
            kv.pull(key, value)
        with pytest.raises(error, match=said):
            kv.pushpull(key, w, out=value)
    for optimizer, said in (
        (torch.optim.SGD([w], lr=1.0), "a function that makes an optimizer of a list of tensors"),
        ("sgd", "functools.partial"),
        (lambda tensors: None, "returned None"),
        (lambda: None, "raised TypeError"),
        (lambda tensors: torch.optim.SGD([w]), "an optimizer of other tensors"),
    ):
        with pytest.raises(TypeError, match=said):
            kv.set_optimizer(optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key 1 has dtype torch\.int64"):
        kv.set_optimizer(torch.optim.SGD)
    with pytest.raises(NotImplementedError if rank else ValueError, match="meta" if rank else "because rank 1"):
        kv.init("x", torch.zeros(2, device="meta") if rank else torch.zeros(2))
    for params, said in (
        ({}, "one of '2bit', .*'topk'"),
        ("2bit", "one of '2bit'"),
        ({"type": "1bit"}, "one of '2bit', .*'topk'"),
        (
            {"type": ["topk"]} if rank == 0 else {"type": "topk"},
            "rank 0.*one of '2bit'" if rank == 0 else "because rank 0",
        ),
        ({"type": "topk", "ratio": "much"}, r"rank \d: gradient compression by .*much"),
        ({"type": "topk", "ratio": 0.5 if rank else [0.5]}, "because rank 0" if rank else r"rank 0: .*\[0\.5\]"),
        ({"type": "2bit", "ratio": 1}, "has no setting 'ratio'; it has threshold"),
        ({"type": "2bit", "threshold": 0}, "threshold must be a finite number > 0"),
        ({"type": "2bit", "threshold": 1 + rank}, "differ between ranks"),
        ({"type": "2bit" if rank else "none"}, "" if rank == 0 else "because rank 0 cannot"),
    ):
        with pytest.raises(ValueError, match=said):
            kv.set_gradient_compression(params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'optimizer'"):
        kv.is_capable("flight")
    kv.pushpull("w", torch.ones(2, 2), out=w)  # it goes on after all that
    assert (w == hvd.size()).all()

    floating = hvd.KVStore("dist_sync", servers=[0])
    floating.init("w", w)
    with pytest.raises(ValueError, match=r"differ between ranks: SGD .*0\.1.* on rank 0; SGD .*0\.2.* on rank 1"):
        floating.set_optimizer(functools.partial(torch.optim.SGD, lr=0.1 * (1 + rank)))
    with pytest.raises(ValueError, match=r"no optimizer of key 'w', of shape \[2, 2\].*not today"):
        floating.set_optimizer(only_of_vectors)  # which only rank 0, the server, would have seen
    floating.set_optimizer(Broken)
    with pytest.raises(ValueError, match=r"key 'n' has dtype torch\.int64"):
        floating.init("n", n)
    floating.push("w", w)
    with pytest.raises(CollectiveError, match=r"pull of key 'w'.*no step today"):
        floating.pull("w", w)
    floating.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    floating.pushpull("w", torch.ones(2, 2), out=w)
    assert (w == 0).all()
    hvd.barrier()
    kv.close()
    floating.close()
