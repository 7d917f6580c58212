"""What names the ranks of a process set."""

import sys
from types import SimpleNamespace

import pytest
import torch

import gradwire as hvd
from gradwire.trainer.world.process_sets import ranks_of


class Comm:
    """A communicator as mpi4py has it, which is its own group."""

    def __init__(self, processes: list[int]) -> None:
        self.processes = processes

    def Get_group(self) -> "Comm":  # noqa: N802
        return self

    def Get_size(self) -> int:  # noqa: N802
        return len(self.processes)

    @staticmethod
    def Translate_ranks(group: "Comm", ranks: list[int], other: "Comm") -> list[int]:  # noqa: N802
        return [other.processes.index(group.processes[rank]) for rank in ranks]


def test_an_mpi4py_communicator_names_ranks_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(Comm=Comm, Group=Comm, COMM_WORLD=Comm([70, 71, 72, 73]))
    with pytest.raises(ValueError, match="or an mpi4py communicator, not"):
        ranks_of(Comm([73, 71]))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert ranks_of(Comm([73, 71])) == [3, 1]
    assert hvd.ProcessSet(Comm([73, 71])).ranks == [1, 3]  # type: ignore[arg-type]
    hvd.init(comm=Comm([70]))
    assert hvd.size() == 1
    hvd.shutdown()


def test_any_iterable_of_whole_numbers() -> None:
    for ranks in ([2, 0], (2, 0), {0, 2}, range(0, 4, 2), iter([0, 2]), torch.tensor([2, 0])):
        assert hvd.ProcessSet(ranks).ranks == [0, 2]
    assert repr(hvd.ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1])"
    for wrong in ([0.5], "01", 7, [None]):
        with pytest.raises(ValueError, match="ranks must be whole numbers in a list"):
            hvd.ProcessSet(wrong)  # type: ignore[arg-type]
