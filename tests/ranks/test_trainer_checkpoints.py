"""Checkpoints of a DistributedOptimizer with codecs: as good as never having stopped, and refused where they are not whole."""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.reducer.checkpoint_format import KEY
from gradwire.trainer.reducer.compression import Compressor
from tests.harness import Worlds, wide
from tests.ranks.ladder import HEIGHT, REMEMBERING, Ladder, optimizer_of, owed, train
from tests.ranks.test_trainer_accumulation import failing_hook
from tests.ranks.training import (
    assert_equal,
    assert_same_on_all_ranks,
    copies,
    distributed,
    in_world,
    on_ranks,
    through_a_file,
)


@on_ranks(2)
@pytest.mark.parametrize("name", ["onebit", "powersgd"])
def test_nothing_is_saved_while_gradients_are_exchanged(name: str) -> None:
    """Where a backward() fails when its first bucket is under way, nothing can be saved or loaded before it is caught up with."""
    first, last = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer = distributed([first, last], compression=name, bucket_bytes=1)
    before = optimizer.state_dict()
    with failing_hook(first):
        (first.tanh() * 5 + last).sum().backward()
    with pytest.raises(RuntimeError, match=r"rank \d.*being exchanged.*synchronize"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="being exchanged"):
        optimizer.load_state_dict(before)
    optimizer.synchronize()
    optimizer.zero_grad()
    assert optimizer.state_dict()["gradwire"]["step"] == 1


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "stop"),
    [("onebit", 0), ("onebit", 4), ("dgc", 1), ("powersgd", 4), ("int8, stochastic", 4), ("int4, after a warm-up", 4)]
    + [pytest.param(name, 4, marks=pytest.mark.wide) for name in ("qsgd", "topk", "threshold", "randomk")],
)
def test_a_loaded_state_continues_bit_for_bit(name: str, stop: int) -> None:
    """Into a new optimizer, and into one that has gone on elsewhere: the losses are those of a run that is not stopped."""
    compression = REMEMBERING.get(name, name)
    model = Ladder()
    optimizer = optimizer_of(model, compression)
    train(model, optimizer, range(stop))
    saved, weights = through_a_file([optimizer.state_dict(), model.state_dict()])
    straight = train(model, optimizer, range(stop, 7))
    optimizer.close()
    for has_gone_on in (False, True):
        other = Ladder(seed=5)
        optimizer = optimizer_of(other, compression)
        if has_gone_on:
            train(other, optimizer, range(50, 53))
        other.load_state_dict(weights)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved)
        assert train(other, optimizer, range(stop, 7)) == straight
        assert_equal(other.parameters(), model.parameters())
        optimizer.close()


@on_ranks(2)
def test_a_frozen_parameter_keeps_its_claim() -> None:
    runs = []
    for stopped in (False, True):
        model = Ladder()
        frozen = model.layers[0][0].weight
        optimizer = optimizer_of(model, "onebit")
        train(model, optimizer, range(2))
        frozen.requires_grad_(False)
        train(model, optimizer, range(2, 4))
        assert optimizer.state_dict()["gradwire"]["waiting"]
        if stopped:
            saved = through_a_file(optimizer.state_dict())
            optimizer.close()
            optimizer = optimizer_of(model, "onebit")
            optimizer.load_state_dict(saved)
        frozen.requires_grad_(True)
        train(model, optimizer, range(4, 7))
        runs.append(copies(model.parameters()))
        optimizer.close()
    assert_equal(*runs)


@in_world
def saved(compression: Compressor, op: str) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """Return this rank's state, and what is owed."""
    model = Ladder()
    optimizer = optimizer_of(model, compression, op=op)
    train(model, optimizer, range(3))
    state, debts = through_a_file(optimizer.state_dict()), owed(optimizer)
    optimizer.close()
    return state, debts


@in_world
def load(
    states: list[dict[str, Any]], compression: Compressor, op: str, with_also: bool
) -> tuple[dict[int, Tensor], list[str]]:
    """Load on another number of ranks, and train on; return what is owed, and what was warned of."""
    model = Ladder()
    optimizer = optimizer_of(model, compression, op=op)
    train(model, optimizer, range(10, 12))
    extra = states[hvd.size() + hvd.rank() :: hvd.size()] if with_also else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(states[hvd.rank() % len(states)], also=extra)
    debts = owed(optimizer)
    assert optimizer._rule.reducer.step == 3
    train(model, optimizer, range(3, 5))
    assert_same_on_all_ranks(model.parameters()) if op == hvd.Sum else None
    optimizer.close()
    return debts, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "before", "now", "op"),
    [
        ("onebit", 3, 2, hvd.Sum),
        ("threshold", 2, 3, hvd.Average),
        ("powersgd", 3, 2, hvd.Average),
    ],
)
def test_other_ranks_take_over_what_is_owed(ranks: Worlds, name: str, before: int, now: int, op: str) -> None:
    compression = REMEMBERING[name]
    parts = ranks(before).run(saved, compression, op)
    debts = parts[0][1]
    assert len(debts) == 2 * HEIGHT
    loaded = ranks(now).run(load, [state for state, _ in parts], compression, op, True)
    for found, _ in loaded:
        assert found.keys() == debts.keys()
        for index, debt in debts.items():
            assert debt.any()
            torch.testing.assert_close(found[index], debt, rtol=1e-5, atol=1e-6)
    messages, *others = [warned for _, warned in loaded]
    assert others == [[]] * (now - 1)
    assert len(messages) == 1
    assert f"saved on {before} ranks, loaded on {now}: the residuals of ranks {list(range(before))}" in messages[0]
    assert "lost" not in messages[0]


def test_what_nobody_loads_is_lost_with_a_warning(ranks: Worlds) -> None:
    """The mean is over the ranks that were loaded; the shard that rank 2 owned is gone."""
    states = [state for state, _ in ranks(3).run(saved, "onebit", hvd.Average)]
    loaded = ranks(2).run(load, states, "onebit", hvd.Average, False)
    for place, entry in enumerate(states[0][KEY]["buckets"]):
        if "tensors" not in entry:
            continue
        expected = torch.zeros(entry["numel"])
        for state in states[:2]:
            one = state[KEY]["buckets"][place]
            expected += one["tensors"]["worker"] / 2
            expected[one["shard_start"] :][: one["tensors"]["owner"].numel()] += one["tensors"]["owner"]
        for index, start in zip(entry["parameters"], entry["starts"], strict=True):
            for debts, _ in loaded:
                mine = debts[index]
                torch.testing.assert_close(mine.flatten(), expected[start : start + mine.numel()], rtol=1e-5, atol=1e-6)
    ((message,), nothing) = (warned for _, warned in loaded)
    assert nothing == []
    assert "are now shared by all; those of ranks [2], which no rank loaded, are lost" in message


@on_ranks(2)
def test_parts_that_do_not_belong_together_are_refused_everywhere() -> None:
    """All ranks fail alike, and the optimizer stays usable."""
    model = Ladder()
    optimizer = optimizer_of(model, "onebit")
    train(model, optimizer, range(3))
    mine = through_a_file(optimizer.state_dict())
    part = mine[KEY]
    plain = {key: value for key, value in mine.items() if key != KEY}
    (name, shape), *rest = part["parameters"]
    for wrong, on_both, said in (
        (plain, False, r"ranks \[1\] were given a state_dict without 'gradwire', the others one with it$"),
        ({**part, "step": 99}, False, "ranks 0 and 1 were given parts of different checkpoints: they differ in step$"),
        ({**part, "version": 7}, True, "rank 0 was given a 'gradwire' of version 7$"),
        ({**part, "op": hvd.Sum}, True, "saved with op='sum', not 'average'$"),
        (
            {**part, "parameters": [(name, shape[::-1]), *rest]},
            True,
            r"rank 0 was given a state that cannot be loaded \(ValueError: saved with.*the first that differs was",
        ),
        (
            {key: value for key, value in part.items() if key != "buckets"},
            False,
            r"rank 1 was given a state that cannot be loaded \(ValueError: 'gradwire' is damaged: buckets missing\)$",
        ),
    ):
        given = wrong if wrong is plain else {**mine, KEY: wrong}
        with pytest.raises(ValueError, match=f"load_state_dict: {said}"):
            optimizer.load_state_dict(given if on_both or hvd.rank() else mine)
    optimizer.load_state_dict(plain)
    optimizer.load_state_dict(mine)
    train(model, optimizer, range(2))
    assert_same_on_all_ranks(model.parameters())


def as_bytes(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


Damage = Callable[[dict[str, Any]], object]


def coded(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the buckets that a codec is for."""
    return [entry for entry in part["buckets"] if "tensors" in entry]


def convert(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """Return what changes a tensor of the first bucket that a codec is for."""
    return lambda part: coded(part)[0]["tensors"].update({name: change(coded(part)[0]["tensors"][name])})


def change(**values: Any) -> Damage:
    return lambda part: part.update(values)


def swap(name: str, one: int, other: int) -> Damage:
    def do(part: dict[str, Any]) -> None:
        items = part[name]
        items[one], items[other] = items[other], items[one]

    return do


def swap_buckets(part: dict[str, Any]) -> None:
    """Two parameters of one shape change places."""
    one, other = [entry for entry in coded(part) if part["parameters"][entry["parameters"][0]][1] == (80, 64)][:2]
    one["parameters"], other["parameters"] = other["parameters"], one["parameters"]


def empty(part: dict[str, Any]) -> None:
    coded(part)[0]["tensors"].clear()


#: What may be wrong with the part of onebit, and something that the message must name.
DAMAGES: list[tuple[Damage, str]] = [
    (convert("worker", Tensor.int), "worker has dtype torch.int32"),
    (convert("owner", Tensor.double), "owner has dtype torch.float64"),
    (convert("worker", lambda tensor: tensor[1:]), "worker has 5119 numbers, not 5120"),
    (convert("owner", lambda tensor: tensor.repeat(3)), r"owner has \d+ numbers"),
    (convert("worker", lambda tensor: tensor / 0), "worker has numbers that are not finite"),
    (convert("owner", lambda tensor: tensor + torch.inf), "owner has numbers that are not finite"),
    (convert("worker", lambda tensor: tensor.view(2, -1)), r"worker has shape \(2, 2560\)"),
    (lambda part: coded(part)[0]["tensors"].pop("owner"), "of worker and owner one is missing"),
    (empty, "'owner' of a bucket is missing"),
    (convert("worker", lambda tensor: 7), "tensors by name are needed"),
    (change(step=-1), "step is -1"),
    (change(step=1.5), "step is 1.5"),
    (change(rank=2), "rank is 2 of 2"),
    (change(predivide=float("nan")), "predivide is nan"),
    (swap("parameters", 0, 4), "the first that differs was"),
    (swap("order", 0, -1), "are not in order"),
    (swap_buckets, "are not in order"),
    (lambda part: part["buckets"].append(part["buckets"][0]), "are not those of order"),
    (lambda part: coded(part)[0].update(parameters=[99]), r"\[99\] are not parameters"),
    (lambda part: coded(part)[0].update(starts=[64]), "do not fit between starts"),
    (change(arrivals=[0, 0]), "are not different"),
    (change(waiting={0: {"residual": torch.ones(3)}}), "has 3 numbers, not 5120"),
    (change(waiting={0: {"residual": torch.full((5120,), torch.inf)}}), "not finite"),
    (lambda part: part.pop("waiting"), "waiting missing"),
]


@on_ranks(2)
@pytest.mark.parametrize("codec", ["onebit", *wide("topk")])
def test_a_damaged_part_is_refused_everywhere(codec: str) -> None:
    """It is rank 1's, or both ranks'; both refuse it, and have loaded nothing. Then the checkpoint itself is loaded."""
    model = Ladder()
    optimizer = optimizer_of(model, "onebit")
    train(model, optimizer, range(3))
    mine = through_a_file(optimizer.state_dict())
    mine["param_groups"][0]["lr"] = 7.0
    optimizer.close()
    optimizer = optimizer_of(model, codec)
    train(model, optimizer, range(2))
    before = as_bytes(optimizer.state_dict())
    for damage, message in DAMAGES:
        if damage is empty and codec == "topk":
            continue  # another codec cannot tell that from a bucket without error feedback
        for on_both in (False, True):
            wrong = through_a_file(mine)
            if hvd.rank() == 1 or on_both:
                damage(wrong[KEY])
            with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: load_state_dict: rank \d was given .*{message}"):
                optimizer.load_state_dict(wrong)
            assert as_bytes(optimizer.state_dict()) == before, message
    optimizer.load_state_dict(mine)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["lr"] == 7.0


@on_ranks(2)
def test_nothing_is_loaded_where_one_optimizer_refuses() -> None:
    model = Ladder()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), compression="onebit")
    train(model, optimizer, range(2))
    before = as_bytes(optimizer.state_dict())
    wrong = through_a_file(optimizer.state_dict())
    wrong["param_groups"][0]["lr"] = 7.0
    wrong[KEY]["step"] = 99
    if hvd.rank() == 1:
        wrong["param_groups"][0]["params"].pop()
    with pytest.raises(
        ValueError, match=r"rank 1 was given a state that cannot be loaded \(ValueError: loaded state dict contains"
    ):
        optimizer.load_state_dict(wrong)
    assert as_bytes(optimizer.state_dict()) == before
    train(model, optimizer, range(2))
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("onebit", "topk", None),
        ("onebit", "int8", "are now shared by all$"),
        ("onebit", "fp16", "^rank 0: saved with codecs, loaded without: the residuals are lost$"),
        ("int8", "none", None),
    ],
)
def test_another_codec_takes_over_what_is_owed(before: str, now: str, said: str | None) -> None:
    """Or, where it has no error feedback, the next gradients; without codecs, rank 0 warns that it is lost."""
    model = Ladder()
    optimizer = optimizer_of(model, before)
    train(model, optimizer, range(3))
    saved, debts = through_a_file(optimizer.state_dict()), owed(optimizer)
    optimizer.close()
    optimizer = optimizer_of(model, now)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    messages = [str(warning.message) for warning in caught if "saved" in str(warning.message)]
    takes_over = debts if now in ("topk", "int8") else {}
    assert len(messages) == (hvd.rank() == 0 and (said is not None or bool(takes_over)))
    if said is not None and messages:
        assert re.search(said, messages[0])
    found = owed(optimizer)
    for index, debt in takes_over.items():
        torch.testing.assert_close(found[index], debt, rtol=1e-5, atol=1e-6)
    assert takes_over or not any(debt.any() for debt in found.values())
    train(model, optimizer, range(1))
    assert now == "topk" or not any(debt.any() for debt in owed(optimizer).values())


@on_ranks(2)
def test_broadcast_optimizer_state() -> None:
    model = Ladder()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9), compression="onebit"
    )
    train(model, optimizer, range(2))
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.2
