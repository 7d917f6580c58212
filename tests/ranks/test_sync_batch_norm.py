"""SyncBatchNorm on several ranks against torch's BatchNorm on the whole batch."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.ranks.training import STEPS, assert_close, assert_same_on_all_ranks, batch, on_ranks, share, take_steps

CASES: list[tuple[Callable[..., nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (nn.BatchNorm1d, (4,), {}),
    (nn.BatchNorm1d, (4, 3), {"affine": False}),
    (nn.BatchNorm2d, (4, 3, 2), {"momentum": None}),
    (nn.BatchNorm3d, (4, 2, 2, 2), {"track_running_stats": False, "eps": 1e-3}),
]


def run(layer: nn.Module, inputs: Tensor, weights: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The output and the gradient of the input; the gradients of weight and bias."""
    inputs = inputs.clone().requires_grad_()
    layer.zero_grad()
    output = layer(inputs)
    (output * weights).sum().backward()
    assert inputs.grad is not None
    return [output.detach(), inputs.grad], [p.grad for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("dtype", "split", "members"),
    [
        (torch.float32, [1, 8, 2], None),
        (torch.float64, [1, 8, 2], None),
        (torch.float64, [5, 0, 6], None),
        (torch.float64, [3, 4], [0, 2]),
    ],
)
@on_ranks(3)
def test_as_one_batch(dtype: torch.dtype, split: list[int], members: list[int] | None) -> None:
    """split: how many of the samples are each member's."""
    process_set = None if members is None else torch.distributed.new_group(members)
    rank = hvd.rank() if members is None else members.index(hvd.rank()) if hvd.rank() in members else None
    if rank is None:
        return
    mine = slice(sum(split[:rank]), sum(split[: rank + 1]))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    generator = torch.Generator().manual_seed(1)
    for kind, shape, options in CASES:
        whole = kind(shape[0], dtype=dtype, **options)
        for parameter in whole.parameters():
            nn.init.normal_(parameter, generator=generator)
        layer = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole), process_set)
        assert isinstance(layer, hvd.SyncBatchNorm)
        for training in (True, True, False):
            whole.train(training)
            layer.train(training)
            inputs = 3 * torch.randn(sum(split), *shape, dtype=dtype, generator=generator) + 5
            weights = torch.randn(inputs.shape, dtype=dtype, generator=generator)
            found, of_layer = run(layer, inputs[mine], weights[mine])
            if training:
                expected, of_whole = run(whole, inputs, weights)
                for gradient in of_layer:
                    hvd.allreduce_(gradient, op=hvd.Sum, process_set=process_set)
                assert_close(found, [each[mine] for each in expected], **tolerance)
                assert_close(of_layer, of_whole, **tolerance)
                assert_close(layer.buffers(), whole.buffers(), **tolerance)
            elif inputs[mine].numel():  # torch's own layer, with statistics of its own where none were tracked
                assert_close(found, run(whole, inputs[mine], weights[mine])[0], **tolerance)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3))


@on_ranks(2)
def test_a_model_trains_as_on_one_process() -> None:
    model = network()
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    converted = model[1][0]  # type: ignore[index]
    assert isinstance(converted, hvd.SyncBatchNorm)
    of_some = hvd.SyncBatchNorm.convert_sync_batchnorm(network(), torch.distributed.group.WORLD)
    assert of_some[1][0].process_set is torch.distributed.group.WORLD  # type: ignore[index]
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model)[1][0] is converted  # type: ignore[index]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    take_steps(model, optimizer, share, range(STEPS))
    assert_same_on_all_ranks(model.state_dict().values())
    optimizer.close()
    half = hvd.SyncBatchNorm(6).to(torch.bfloat16)
    output = half(share(0)[0].bfloat16().requires_grad_())
    output.sum().backward()
    assert output.dtype is torch.bfloat16
    alone = network()
    take_steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batch, range(STEPS))
    assert_close(model.state_dict().values(), alone.state_dict().values(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_refusals() -> None:
    layer = hvd.SyncBatchNorm(4)
    for wrong in (torch.zeros(4), torch.zeros(2, 3)):
        with pytest.raises(
            ValueError, match=r"rank \d: SyncBatchNorm\(4\) needs an input of shape \(batch, 4, \.\.\.\)"
        ):
            layer(wrong)
    with pytest.raises(ValueError, match="two values of each channel in training, over all ranks; there is 1"):
        layer(torch.zeros(1 - hvd.rank(), 4))


@on_ranks(2)
def test_a_copy_works_as_the_layer_does() -> None:
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(hvd.rank()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    expected = model(inputs)
    for twin in copies:
        assert torch.equal(twin(inputs), expected)


@on_ranks(2)
def test_a_copy_keeps_the_set_of_its_ranks() -> None:
    """A layer of a set other than the global one works where the set that was loaded with it is registered."""
    some = hvd.add_process_set([1])
    layers = pickle.dumps([hvd.SyncBatchNorm(4, process_set=some), hvd.SyncBatchNorm(4, process_set=some)])
    first, second = pickle.loads(layers)
    assert first.process_set is second.process_set
    assert (first.process_set.ranks, first.process_set.included()) == ([1], None)
    with pytest.raises(ValueError, match="is not registered"):
        first(torch.randn(5, 4))
    hvd.remove_process_set(some)
    hvd.add_process_set(first.process_set)
    if first.process_set.included():
        inputs = torch.randn(5, 4)
        assert_close([first(inputs)], [nn.BatchNorm1d(4)(inputs)])
    hvd.remove_process_set(first.process_set)
