"""compression="auto" on ranks: the same choice on all, the bits of the choice where it is named, and nothing lost by a change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import gradwire
import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.trainer.reducer.choice import WINDOW
from tests.harness import wide
from tests.ranks.ladder import BUCKET_BYTES, Ladder, optimizer_of, residuals_of, train
from tests.ranks.test_ddp_hook import ddp, exchanged, model_of, weights_of
from tests.ranks.test_ddp_hook import train as train_ddp
from tests.ranks.training import assert_close, assert_equal, assert_same_on_all_ranks, on_ranks, through_a_file

SLOW, FAST, TRIED = (1e-3, 1e-9), (1e-13, 1.0), (1e-15, 0.0)
"""Seconds that a byte takes on a link, and a codec: so far apart that no time of a real step decides anything; or all so short
that every candidate is tried."""
SETTLED = 3 + 4 * WINDOW
"""After so many steps nothing changes any more."""


@contextmanager
def described(seconds: tuple[float, float]) -> Iterator[None]:
    """Have all ranks believe that a byte takes so long between any two, and a codec."""
    byte_s, codec_s = seconds

    def predict(_: Communicator, numel: int, itemsize: int = 4, codec: Any = None) -> float:
        return byte_s * numel * itemsize if codec is None else byte_s * codec.wire_bytes(numel) + codec_s * numel

    with mock.patch.multiple(Communicator, measure_codecs=lambda *_: None, predict=predict):
        yield


def trained(compression: Any, steps: int = SETTLED, **options: Any) -> tuple[list[Tensor], hvd.DistributedOptimizer]:
    model = Ladder()
    optimizer = optimizer_of(model, compression, **options)
    train(model, optimizer, range(steps))
    return list(model.parameters()), optimizer


@on_ranks(2)
@pytest.mark.parametrize(("seconds", "best"), [(SLOW, "int8"), (FAST, "none")])
@pytest.mark.parametrize("options", [{}, {"rule": hvd.rules.Sharded()}], ids=str)
def test_a_choice_has_the_bits_and_the_buckets_of_what_was_chosen(
    seconds: tuple[float, float], best: str, options: Any
) -> None:
    with described(seconds):
        mine, chosen = trained("auto", 4, **options)
    named, fixed = trained(best, 4, **options)
    assert chosen.stats == fixed.stats
    assert (chosen.stats.ratio > 1.3) == (best == "int8")
    assert_equal(mine, named)
    chosen.close()
    fixed.close()


@on_ranks(2)
@pytest.mark.parametrize("rule", ["synchronous", *wide("next_forward")])
def test_what_is_measured_is_the_same_everywhere_and_changes_no_algorithm(rule: str) -> None:
    model = Ladder()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        compression="auto",
        allow=("int8", "fp16", "onebit"),
        bucket_bytes=BUCKET_BYTES,
        rule=hvd.rules.NextForward(model) if rule == "next_forward" else None,
    )
    communicator = optimizer.communicator
    assert communicator.measured is None
    assert communicator.costs is not None
    assert {each.identity.partition("(")[0] for each in communicator.costs.codecs} == {"none", "int8", "fp16", "onebit"}
    assert min(min(each[1:]) for each in communicator.costs.codecs) > 0
    train(model, optimizer, range(SETTLED))
    optimizer.settle()
    everyones = communicator.allgather_record(communicator.costs.to_json())
    assert all(theirs == everyones[0] for theirs in everyones)
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on_ranks(2)
@pytest.mark.parametrize("kind", [hvd.Average, hvd.Sum, "hook"])
def test_what_a_codec_owes_when_it_is_replaced_is_added_to_the_next_gradients(kind: str) -> None:
    """Whenever gradients are exchanged as they are, after the codec, all results are right in sum; the times of this run decide
    which of them stays. With op=Sum, the state goes through a checkpoint at one step."""
    weight = torch.nn.Parameter(torch.zeros(80, 64))

    def made() -> Any:
        if kind == "hook":
            return hvd.ddp_comm_hook("auto", allow=["onebit"])
        return hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), compression="auto", op=kind, allow=["onebit"]
        )

    with described(TRIED):
        exchange, missing, uncompressed = made(), torch.zeros_like(weight), []
        for step in range(SETTLED):
            everyones = [
                torch.randn(80, 64, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)
            ]
            before = exchange.stats
            if kind == "hook":
                [result] = exchanged(exchange, [[weight]], {weight: everyones[hvd.rank()]})
            else:
                exchange.zero_grad()
                (weight * everyones[hvd.rank()]).sum().backward()
                exchange.step()
                result = weight.grad
            missing += sum(everyones) / (1 if kind == hvd.Sum else 2) - result
            sent, of = (
                exchange.stats.bytes_sent - before.bytes_sent,
                exchange.stats.bytes_uncompressed - before.bytes_uncompressed,
            )
            uncompressed.append(sent == of)
            assert not uncompressed[-1] or missing.abs().max() < 1e-3, step
            if step == 4:
                assert missing.abs().max() > 0.1
    assert uncompressed.index(True, 4) > uncompressed.index(False)
    exchange.close()


@on_ranks(2)
@pytest.mark.parametrize("seconds", [SLOW, FAST], ids=["chosen again", "not chosen again"])
def test_training_goes_on_from_a_checkpoint_to_the_bit_where_the_choice_is_the_same(
    seconds: tuple[float, float],
) -> None:
    with described(SLOW):
        model = Ladder()
        optimizer = optimizer_of(model, "auto", allow=["topk"])
        train(model, optimizer, range(SETTLED))
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        debts = residuals_of(optimizer)
        losses = train(model, optimizer, range(SETTLED, SETTLED + 4))
    with described(seconds):
        again = Ladder(1)
        resumed = optimizer_of(again, "auto", allow=["topk"])
        train(again, resumed, range(2))
        again.load_state_dict(saved["model"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed.load_state_dict(saved["optimizer"])
        assert bool(caught) == (seconds == FAST and hvd.rank() == 0)
        found = residuals_of(resumed)
        assert_close(found, debts, rtol=0, atol=0.02 * max(float(debt.abs().max()) for debt in debts))
        assert (train(again, resumed, range(SETTLED, SETTLED + 4)) == losses) == (seconds == SLOW)
    assert_same_on_all_ranks(again.parameters())
    optimizer.close()
    resumed.close()


@on_ranks(2)
def test_rules_that_do_not_average_in_every_step_refuse_it() -> None:
    sgd = torch.optim.SGD(Ladder().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"rank \d: compression='auto' is for gradients .* not for AdaptiveSummation"):
        hvd.DistributedOptimizer(sgd, compression="auto", op=hvd.Adasum, allow=["fp16"])
    with pytest.raises(ValueError, match=r"allow is for compression='auto'"):
        hvd.DistributedOptimizer(sgd, compression="int8", allow=["int4"])
    with pytest.raises(ValueError, match=r"compression is auto of int8.*on rank 0; auto of int4.*on rank 1"):
        hvd.DistributedOptimizer(sgd, compression="auto", allow=[["int8", "int4"][hvd.rank()]])


# The DDP hook


@on_ranks(2, initialized=False)
def test_the_hook_chooses_while_no_matrices_are_exchanged() -> None:
    """A bucket whose operations depend on others comes before the first one that there is a choice for."""
    model = model_of()
    policy = {"4.weight": "powersgd", "[45].*": "none"}
    hook = gradwire.ddp_comm_hook("auto", model.named_parameters(), allow=["onebit"], policy=policy)
    with described(SLOW):
        train_ddp(ddp(model, hook), range(SETTLED + 4))
    assert hook.stats.ratio > 1
    hook.close()


@on_ranks(2, initialized=False)
@pytest.mark.parametrize(("seconds", "best"), [(SLOW, "onebit"), (FAST, "none")])
def test_the_hook_chooses_alike_and_goes_on_from_a_checkpoint(seconds: tuple[float, float], best: str) -> None:
    with described(seconds):
        hook = gradwire.ddp_comm_hook("auto", allow=["onebit"])
        model = ddp(model_of(), hook)
        losses = train_ddp(model, range(SETTLED))
        saved = through_a_file({"model": model.module.state_dict(), "hook": hook.state_dict()})
        losses += train_ddp(model, range(SETTLED, SETTLED + 4))
    fixed = gradwire.ddp_comm_hook(best)
    assert (hook.stats.ratio > 1) == (best == "onebit")
    assert train_ddp(ddp(model_of(), fixed), range(SETTLED + 4)) == losses
    fixed.close()
    with described(seconds):
        again_hook = gradwire.ddp_comm_hook("auto", allow=["onebit"])
        again_hook.load_state_dict(saved["hook"])
        again = ddp(model_of(1), again_hook)
        again.module.load_state_dict(saved["model"])
        assert train_ddp(again, range(SETTLED, SETTLED + 4)) == losses[SETTLED:]
    assert torch.equal(weights_of(model), weights_of(again))
    again_hook.close()
    hook.close()
