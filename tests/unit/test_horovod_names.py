"""Every name of Horovod's package for PyTorch is here, takes its arguments in Horovod's order, answers as programs expect,
and stands in the guide; programs that import Horovod find the trainer, after alias_horovod()."""

import inspect
import logging
import re
import sys
import textwrap
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import gradwire
import gradwire as hvd
from gradwire.collectives.schedules.topology import Topology
from gradwire.trainer.horovod import probes
from gradwire.trainer.horovod.alias import check_extension, num_rank_is_power_2
from gradwire.trainer.world.world import current_world
from tests.pages import ROOT

VALUES = ("average", "name", "op", "prescale_factor", "postscale_factor", "process_set")
COMPRESSED = ("average", "name", "compression", "op", "prescale_factor", "postscale_factor", "process_set")
SCATTERED = ("name", "op", "process_set", "prescale_factor", "postscale_factor")

#: The positional arguments of Horovod 0.28.1, from its documentation; None of what is not called.
NAMES: dict[str, tuple[str, ...] | None] = {
    "init": ("comm", "process_sets"),
    **dict.fromkeys(("shutdown", "is_initialized", "is_homogeneous"), ()),
    **dict.fromkeys(("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"), ()),
    **dict.fromkeys(("mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled"), ()),
    **dict.fromkeys(("nccl_built", "cuda_built", "rocm_built", "ddl_built", "ccl_built"), ()),
    "ProcessSet": ("ranks_or_comm",),
    "global_process_set": None,
    "add_process_set": ("process_set",),
    "remove_process_set": ("process_set",),
    "allreduce": ("tensor", *COMPRESSED),
    **dict.fromkeys(("allreduce_", "allreduce_async", "allreduce_async_"), ("tensor", *VALUES)),
    "grouped_allreduce": ("tensors", *COMPRESSED),
    **dict.fromkeys([f"grouped_allreduce{more}" for more in ("_", "_async", "_async_")], ("tensors", *VALUES)),
    "sparse_allreduce_async": ("tensor", "name", "op", "process_set"),
    **dict.fromkeys(("allgather", "allgather_async"), ("tensor", "name", "process_set")),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), ("tensors", "name", "process_set")),
    **dict.fromkeys(
        [f"broadcast{more}" for more in ("", "_", "_async", "_async_")], ("tensor", "root_rank", "name", "process_set")
    ),
    **dict.fromkeys(("alltoall", "alltoall_async"), ("tensor", "splits", "name", "process_set")),
    "reducescatter": ("tensor", "name", "compression", *SCATTERED[1:]),
    "reducescatter_async": ("tensor", *SCATTERED),
    "grouped_reducescatter": ("tensors", "name", "compression", *SCATTERED[1:]),
    "grouped_reducescatter_async": ("tensors", *SCATTERED),
    "barrier": ("process_set",),
    "join": ("device",),
    **dict.fromkeys(("poll", "synchronize"), ("handle",)),
    **dict.fromkeys(("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression")),
    "DistributedOptimizer": (
        *("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op"),
        *("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set"),
    ),
    "SyncBatchNorm": ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    "broadcast_parameters": ("params", "root_rank", "process_set"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model", "process_set"),
    "broadcast_object": ("obj", "root_rank", "name", "process_set"),
    "allgather_object": ("obj", "name", "process_set"),
    "start_timeline": ("file_path", "mark_cycles"),
    "stop_timeline": (),
    "HorovodInternalError": None,
    "elastic": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_takes_its_arguments_in_horovods_order(name: str) -> None:
    found = getattr(gradwire, name)
    expected = NAMES[name]
    if expected is not None:
        taken = tuple(inspect.signature(found).parameters)
        assert taken[: len(expected)] == expected
        more = list(inspect.signature(found).parameters.values())[len(expected) :]
        assert all(parameter.default is not parameter.empty for parameter in more if parameter.kind < 3), more


def test_the_guide_has_each_name_once() -> None:
    text = (ROOT / "docs/guides/from-horovod.md").read_text()
    table = text.split("## Every name")[1].split("##")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(NAMES)
    assert set(NAMES) - {"elastic"} <= {*gradwire.__all__, *probes.NAMES}


def test_probes(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [name for name in probes.NAMES if name != "is_homogeneous"]
    assert len(asked) == 10
    built = {
        "gloo_built": dist.is_gloo_available(),
        "gloo_enabled": True,
        "nccl_built": dist.is_nccl_available(),
        "cuda_built": torch.version.cuda is not None,
        "rocm_built": torch.version.hip is not None,
    }
    assert {name: getattr(hvd, name)() for name in asked} == {name: built.get(name, False) for name in asked}
    for hosts, alike in [("a", True), ("aabb", True), ("abab", True), ("aab", False)]:
        monkeypatch.setattr(current_world(), "hosts", Topology.from_host_ids(0, hosts).hosts)
        assert hvd.is_homogeneous() is alike
    hvd.shutdown()
    assert not hvd.gloo_enabled()


def test_before_init() -> None:
    sgd = torch.optim.SGD([torch.zeros(1)])
    more = [lambda: hvd.add_process_set([0]), lambda: hvd.DistributedOptimizer(sgd)]
    for function in (hvd.rank, hvd.size, hvd.local_rank, hvd.is_homogeneous, *more):
        with pytest.raises(ValueError, match=r"call hvd\.init\(\) first") as caught:
            function()
        assert isinstance(caught.value, RuntimeError)


THIRD_PARTY = """
    import importlib.util

    import gradwire

    assert importlib.util.find_spec("horovod") is None
    gradwire.alias_horovod()
    gradwire.alias_horovod()

    import horovod
    import horovod.torch
    import horovod.torch as hvd
    import horovod.torch.mpi_ops as mpi_ops
    from horovod.common.exceptions import HorovodInternalError
    from horovod.common.process_sets import global_process_set
    from horovod.common.util import check_extension, gpu_available, num_rank_is_power_2
    from horovod.torch import Compression, DistributedOptimizer
    from horovod.torch.compression import Compression as Other
    from horovod.torch.functions import broadcast_object
    from horovod.torch.mpi_ops import Average, allreduce_async_, rank, size, synchronize

    check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    assert hvd is horovod.torch and mpi_ops is hvd.mpi_ops and mpi_ops.allreduce is gradwire.allreduce
    assert set(gradwire.__all__) <= set(vars(hvd)) and set(gradwire.__all__) <= set(hvd.__all__)
    assert DistributedOptimizer is gradwire.DistributedOptimizer and Other is Compression is gradwire.Compression
    assert HorovodInternalError is gradwire.HorovodInternalError
    assert global_process_set is gradwire.global_process_set
    assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28)
    assert importlib.util.find_spec("horovod.torch") is not None
    from horovod import run
    assert callable(run)
    try:
        import horovod.run.runner
    except ImportError as error:  # ignite then imports the function
        assert isinstance(error, ModuleNotFoundError)
    try:
        import horovod.tensorflow
    except ModuleNotFoundError as error:
        assert error.name == "horovod.tensorflow"
    else:
        raise AssertionError("there is no such part")
    import torch

    hvd.init()
    assert (rank(), size()) == (0, 1)
    assert synchronize(allreduce_async_(torch.ones(2), op=Average)).tolist() == [1, 1]
    hvd.shutdown()
"""


def test_third_party_code(caplog: pytest.LogCaptureFixture) -> None:
    with patch.dict(sys.modules), caplog.at_level(logging.INFO):
        exec(textwrap.dedent(THIRD_PARTY), {"__file__": ""})
    assert caplog.text.count("from here on, `import horovod.torch` finds gradwire") == 1


def test_after_horovod_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    horovod = ModuleType("horovod")
    horovod.__file__ = "/somewhere/horovod/__init__.py"
    monkeypatch.setitem(sys.modules, "horovod", horovod)
    with pytest.raises(
        RuntimeError, match=r"Horovod itself has been imported, from /somewhere/horovod.*call gradwire\.alias"
    ):
        gradwire.alias_horovod()
    assert not hasattr(horovod, "torch")


def test_parts_that_are_not_here() -> None:
    check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "", "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.tensorflow is not a part of gradwire; horovod\.torch is"):
        check_extension("horovod.tensorflow")
    assert [ranks for ranks in range(10) if num_rank_is_power_2(ranks)] == [1, 2, 4, 8]
