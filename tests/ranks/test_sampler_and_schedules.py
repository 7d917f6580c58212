"""ElasticSampler divides what is left of an epoch; WarmupLR raises the rate to that of a larger batch."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import in_world, on_ranks


@in_world
def epoch(samples: int, shuffle: bool) -> tuple[list[int], list[int], list[int], dict[str, Any]]:
    """This rank's samples; those of the next epoch; those left after two batches of three; what it saves then."""
    sampler = hvd.elastic.ElasticSampler(range(samples), shuffle=shuffle, seed=3)
    loader = torch.utils.data.DataLoader(range(samples), batch_size=3, sampler=sampler)  # type: ignore[arg-type]
    first = [int(i) for numbers in loader for i in numbers]
    assert first == list(sampler)
    assert len(first) == len(sampler) == sampler.num_samples
    sampler.set_epoch(1)
    second = list(sampler)
    for number in range(2):
        assert sampler.get_indices(number, 3) == second[3 * number : 3 * number + 3]
        sampler.record_batch(number, 3)
    assert sampler.processed_indices == set(second[:6])
    saved = sampler.state_dict()
    sampler.record_indices(set().union(*hvd.allgather_object(sampler.processed_indices)))
    sampler.reset()
    return first, second, list(sampler), saved


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_are_divided(ranks: Worlds, shuffle: bool) -> None:
    firsts, seconds, rests, saved = zip(*ranks(3).run(epoch, 32, shuffle), strict=True)
    for shares in (firsts, seconds):
        assert [len(share) for share in shares] == [11] * 3  # one sample comes twice
        assert set().union(*shares) == set(range(32))
    assert (firsts == seconds) is not shuffle
    processed = set().union(*(share[:6] for share in seconds))
    assert len(processed) == 18
    assert set().union(*rests) == set(range(32)) - processed
    assert [len(rest) for rest in rests] == [5] * 3
    buffer = io.BytesIO()
    torch.save(saved[1], buffer)
    buffer.seek(0)
    assert torch.load(buffer) == {"epoch": 1, "processed_indices": set(seconds[1][:6])}
    loaded = ranks(2).run(resumed, saved[0])
    assert [len(share) for share in loaded] == [13] * 2
    assert set().union(*loaded) == set(range(32)) - set(seconds[0][:6])


@in_world
def resumed(state: dict[str, Any]) -> list[int]:
    sampler = hvd.elastic.ElasticSampler(range(32), seed=3)
    sampler.load_state_dict(state)
    assert sampler.epoch == state["epoch"]
    return list(sampler)


@on_ranks(3)
def test_fewer_samples_than_ranks() -> None:
    assert list(hvd.elastic.ElasticSampler([])) == []
    with pytest.raises(ValueError, match="batch_idx must be >= 0 and batch_size >= 1, not 0 and 0"):
        hvd.elastic.ElasticSampler([1]).record_batch(0, 0)
    assert list(hvd.elastic.ElasticSampler([7])) == [0]


WARM = [0.1 + 0.2 * min(step, 6) / 6 for step in range(9)]


@on_ranks(3)
@pytest.mark.parametrize(
    ("options", "decay", "expected"),
    [({}, None, WARM), ({}, 0.5, [*WARM[:7], 0.15, 0.15]), ({"factor": 0.5, "warmup_epochs": 0}, None, [0.05] * 9)],
)
def test_warm_up(options: dict[str, Any], decay: float | None, expected: list[float]) -> None:
    """From 0.1 in six steps to 0.1 * size(), with another scheduler at the same time; and by factors."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm_up = hvd.optimizers.WarmupLR(optimizer, 2, **{"warmup_epochs": 3, **options})
        after = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7], decay) if decay else None
        seen = []
        for _ in range(9):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
            warm_up.step()
            if after is not None:
                after.step()
    assert seen == pytest.approx(expected)


@on_ranks(2)
def test_a_warm_up_goes_on_from_a_checkpoint() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1)) for _ in range(2)]
    one, other = (hvd.optimizers.WarmupLR(optimizer, 5) for optimizer in optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps of the optimizer are left out
        for _ in range(4):
            one.step()
        other.load_state_dict(one.state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        for _ in range(40):
            one.step()
            other.step()
    assert one.get_last_lr() == other.get_last_lr() == pytest.approx([0.2])
    for arguments, match in (((0,), "steps_per_epoch"), ((1, -1.0), "warmup_epochs"), ((1, 1.0, 0.0), "factor")):
        with pytest.raises(ValueError, match=match):
            hvd.optimizers.WarmupLR(optimizers[0], *arguments)
