"""compression="auto" on ranks: the same choice on all, the bits of the choice where it is named, and nothing lost by a change."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.plan.cost import CallCost, CodecCost, Cores, Costs, LinkCost
from gradwire.trainer.reducer.choice import WINDOW, Choice
from gradwire.trainer.reducer.compression import encoding_of
from tests.harness import wide
from tests.ranks.ladder import BUCKET_BYTES, HEIGHT, Ladder, encoded, optimizer_of, owed, train
from tests.ranks.test_ddp_hook import PARAMETERS, ddp, exact, exchanged, gradients_of, model_of, weights_of
from tests.ranks.test_ddp_hook import train as train_ddp
from tests.ranks.training import assert_same_on_all_ranks, on_ranks, through_a_file

SLOW, FAST = (1e-3, 1e-9), (1e-13, 1.0)
"""Seconds that a byte takes on a link, and a codec: so far apart that no time of a real step decides anything."""
SETTLED = 3 + 4 * WINDOW
"""After so many steps nothing changes any more."""


@contextmanager
def described(seconds: tuple[float, float]) -> Iterator[None]:
    """Have all ranks believe that a byte takes so long between any two, and a codec."""
    byte_s, codec_s = seconds

    def measure(communicator: Communicator, codecs: Iterable[Codec], device: str = "cpu") -> None:
        size, hosts = communicator.size, communicator.topology.hosts
        link = LinkCost(1e-6, byte_s, 0.0, 0.0)
        whole = CallCost("allreduce", "shared", ((1, 1e-6 + byte_s), (1 << 20, 1e-6 + byte_s * (1 << 20))))
        coding = tuple(CodecCost(codec.identity, codec_s, codec_s) for codec in codecs)
        cores = (Cores(tuple(range(size)), size),)
        uplinks, slowness = (byte_s,) * len(hosts), (1.0,) * size
        communicator._costs = Costs(
            hosts,
            ("a host",) * len(hosts),
            link,
            link,
            uplinks,
            cores,
            slowness,
            0.0,
            0.0,
            codecs=coding,
            calls=(whole,),
        )

    with mock.patch.object(Communicator, "measure_codecs", measure):
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
    with described(seconds), mock.patch.object(Choice, "follow", return_value=False):
        mine, chosen = trained("auto", 4, **options)
    named, fixed = trained(best, 4, **options)
    assert len(encoded(chosen)) == (2 * HEIGHT if best == "int8" else 0)
    assert [bucket.items for bucket in chosen._rule.buckets] == [bucket.items for bucket in fixed._rule.buckets]
    assert all(torch.equal(a, b) for a, b in zip(mine, named, strict=True))
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
    communicator, planner = optimizer.communicator, optimizer._rule.reducer.planner
    assert communicator.measured is None
    assert communicator.costs is not None
    assert {each.identity.partition("(")[0] for each in communicator.costs.codecs} == {"none", "int8", "fp16", "onebit"}
    assert min(min(each[1:]) for each in communicator.costs.codecs) > 0
    told = []
    for step in range(0, SETTLED, 4):
        train(model, optimizer, range(step, step + 4))
        told.append([kind.identity for kind in planner.encodings])
    assert planner.choice.settled
    optimizer.settle()
    everyones = communicator.allgather_record([communicator.costs.to_json(), told])
    assert all(theirs == everyones[0] for theirs in everyones)
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


def change(choice: Choice, name: str) -> None:
    choice._everywhere = encoding_of(name)


@on_ranks(2)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_what_a_codec_owes_when_it_is_replaced_is_added_to_the_next_gradients(op: str) -> None:
    """The sum of all results, after the change, is that of all gradients; so it is where a checkpoint was loaded in between."""
    weight = torch.nn.Parameter(torch.zeros(80, 64))

    def made() -> hvd.DistributedOptimizer:
        sgd = torch.optim.SGD([weight], lr=1.0)
        return hvd.DistributedOptimizer(sgd, [("weight", weight)], "auto", op=op, allow=["onebit"])

    with described(SLOW), mock.patch.object(Choice, "follow", return_value=False):
        optimizer, total = made(), torch.zeros_like(weight)
        for step in range(7):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            gradient = torch.randn(80, 64, generator=generator)
            optimizer.zero_grad()
            (weight * gradient).sum().backward()
            if step == 4:
                change(optimizer._rule.reducer.planner.choice, "none")
                optimizer._rule.reducer.planner._is_stale = True
            optimizer.step()
            total += gradient
            if step == 4:
                assert all(debt.any() for debt in owed(optimizer).values())
                saved = through_a_file(optimizer.state_dict())
                optimizer.close()
                optimizer = made()
                change(optimizer._rule.reducer.planner.choice, "none")
                optimizer._rule.reducer.planner._is_stale = True
                optimizer._rule.start()
                optimizer.load_state_dict(saved)
    hvd_total = hvd.allreduce(total, op=op)
    torch.testing.assert_close(-weight.detach(), hvd_total, rtol=1e-4, atol=1e-4)
    assert not encoded(optimizer)
    optimizer.close()


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
        debts = owed(optimizer)
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
        found = owed(resumed)
        for index, debt in debts.items():
            torch.testing.assert_close(found[index], debt, rtol=1e-5, atol=1e-6)
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
    assert hook._choice is not None
    assert hook._choice.settled
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
    assert hook._choice is not None
    assert hook._choice.settled
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


@on_ranks(2, initialized=False)
def test_a_hook_that_changes_its_codec_loses_nothing() -> None:
    hook = gradwire.ddp_comm_hook("auto", allow=["onebit"])
    sums, wanted = ({parameter: torch.zeros(parameter.shape) for parameter in PARAMETERS} for _ in range(2))
    with described(SLOW), mock.patch.object(Choice, "follow", return_value=False):
        for step in range(8):
            if step == 6:
                assert hook._choice is not None
                change(hook._choice, "none")
            results = exchanged(hook, [PARAMETERS], gradients_of(dist.get_rank(), step))
            for parameter, result in zip(PARAMETERS, results, strict=True):
                sums[parameter] += result
                wanted[parameter] += exact(step)[parameter]
            missing = max((sums[parameter] - wanted[parameter]).abs().max() for parameter in PARAMETERS)
            assert (missing < 1e-4) == (step < 2 or step >= 6), step
    hook.close()
