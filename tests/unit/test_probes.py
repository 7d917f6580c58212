"""What Horovod's programs ask about, in a world of one process, and the errors that they catch."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import gradwire as hvd
from gradwire.collectives import CollectiveTimeout, Mismatch, PeerLost
from gradwire.collectives.plan.topology import Topology
from gradwire.trainer.world.world import current_world

PROBES = [name for name in hvd.__all__ if name.endswith(("_built", "_enabled", "_supported"))]


@pytest.fixture
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_built() -> None:
    assert len(PROBES) == 10
    assert {name for name in PROBES if getattr(hvd, name)() is True} == {
        name
        for name, answer in {
            "gloo_built": dist.is_gloo_available(),
            "nccl_built": dist.is_nccl_available(),
            "cuda_built": torch.version.cuda is not None,
            "rocm_built": torch.version.hip is not None,
        }.items()
        if answer
    }
    assert {getattr(hvd, name)() for name in PROBES} <= {True, False}


def test_enabled(world: None) -> None:
    assert hvd.gloo_enabled()
    hvd.shutdown()
    assert not hvd.gloo_enabled()


def test_homogeneous(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hvd.is_homogeneous()
    for hosts, alike in [("aabb", True), ("abab", True), ("aab", False)]:
        monkeypatch.setattr(current_world(), "hosts", Topology.from_host_ids(0, hosts).hosts)
        assert hvd.is_homogeneous() is alike


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_before_init(error: type[Exception]) -> None:
    for function in (hvd.rank, hvd.size, hvd.local_rank, hvd.is_homogeneous, lambda: hvd.add_process_set([0])):
        with pytest.raises(error, match=r"call hvd\.init\(\) first"):
            function()


def test_what_the_engine_raises_is_what_programs_catch() -> None:
    lost = PeerLost([1], rank=0, operation="allreduce", has_left=False)
    late = CollectiveTimeout(3.0, [1], rank=0, operation="allreduce")
    apart = Mismatch({0: "allreduce", 1: "barrier"}, rank=0, operation="allreduce")
    for error in (lost, late, apart):
        assert isinstance(error, hvd.HorovodInternalError)
        assert isinstance(error, RuntimeError)
    assert str(hvd.HorovodInternalError("a program's own")) == "a program's own"
    with pytest.raises(RuntimeError):
        raise hvd.HorovodInternalError
