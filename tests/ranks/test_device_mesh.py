"""A dimension of a torch DeviceMesh as the ranks that take part, and torch's parallelism inside of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire as hvd
from gradwire.trainer.world.world import current_world
from tests.harness import wide_rows
from tests.pages import ROOT
from tests.ranks.programs import launch_text
from tests.ranks.training import (
    BATCH,
    assert_same_on_all_ranks,
    batch,
    copies,
    distributed,
    loss_of,
    on_ranks,
    perceptron,
)


def mesh_of(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@on_ranks(4)
def test_the_verbs_run_along_a_dimension() -> None:
    """Call verbs in a mesh: ranks 0 and 2 are one group along the first dimension, 0 and 1 along the second."""
    mesh, mine = mesh_of("dp", "tp"), torch.tensor([float(hvd.rank())])
    columns, rows = [hvd.rank() % 2, hvd.rank() % 2 + 2], [hvd.rank() // 2 * 2, hvd.rank() // 2 * 2 + 1]
    for name, members in (("dp", columns), ("tp", rows)):
        assert hvd.allgather(mine, process_set=mesh[name]).tolist() == members
        assert hvd.allreduce(mine, op=hvd.Sum, process_set=mesh[name]).item() == sum(members)
        assert hvd.broadcast_object(hvd.rank(), members[1], process_set=mesh[name]) == members[1]
    communicators = len(current_world().communicators)
    hvd.barrier(process_set=mesh["dp"])  # of which each time another object is made
    hvd.barrier(process_set=mesh.get_group("dp"))
    assert len(current_world().communicators) == communicators


@on_ranks(4)
def test_a_dimension_must_be_named_and_have_this_rank() -> None:
    mesh, model = mesh_of("dp", "tp"), nn.Linear(1, 1)
    said = rf"rank {hvd.rank()}: process_set is a DeviceMesh of 2 dimensions: 'dp', 'tp'; name .*, as in mesh\['dp'\]"
    for call in (
        lambda: hvd.barrier(process_set=mesh),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), process_set=mesh),
        lambda: distributed(model.parameters(), rule=hvd.rules.LocalUpdates(every=2, inner=mesh)),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match="is a DeviceMesh of 2 dimensions; name"):
        hvd.barrier(process_set=init_device_mesh("cpu", (2, 2)))
    some = DeviceMesh("cpu", [1, 3])
    if hvd.rank() in (1, 3):
        assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=some).tolist() == [1, 3]
    else:
        with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: this process is not part of DeviceMesh"):
            hvd.barrier(process_set=some)


@on_ranks(4)
def test_inner_ranks_are_those_along_a_dimension() -> None:
    """Average gradients inside of two hosts' worth of ranks, and parameters between."""
    mesh = mesh_of("hosts", "inside")
    model = perceptron().double()
    optimizer = distributed(model.parameters(), lr=0.1, rule=hvd.rules.LocalUpdates(every=2, inner=mesh["inside"]))
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        place = hvd.rank() * BATCH // 4
        loss_of(model, (inputs[place:][:6].double(), targets[place:][:6].double())).backward()
        optimizer.step()
        inside = hvd.allgather_object(copies(model.parameters()), process_set=mesh["inside"])
        assert all(torch.equal(one, other) for one, other in zip(*inside, strict=True))
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


def weights_alone(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights after one process has trained on the whole batches of the examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        inputs = torch.randn(32, 8, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("example", "files"),
    wide_rows(("tensor_parallel", {"": "weights.pt"}), ("pipeline", {"0.": "stage0.pt", "1.": "stage1.pt"})),
)
def test_an_example_has_the_weights_of_one_process(tmp_path: Path, example: str, files: dict[str, str]) -> None:
    """Average gradients along a dimension whose ranks have the same part of a model, in a program of under 60 lines."""
    script = (ROOT / f"docs/examples/{example}.py").read_text()
    assert len(script.splitlines()) < 60
    assert "loss " in launch_text(script, tmp_path, processes=4)
    torch.manual_seed(0)
    first, second = nn.Linear(8, 32), nn.Linear(32, 8)
    layers = [nn.Sequential(first, nn.Tanh()), second] if example == "pipeline" else [first, nn.Tanh(), second]
    expected = weights_alone(nn.Sequential(*layers).double())
    found = {
        f"{prefix}{name}": value
        for prefix, file in files.items()
        for name, value in torch.load(tmp_path / file, weights_only=True).items()
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
