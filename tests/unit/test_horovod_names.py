"""Every name of Horovod's package for PyTorch is here, takes its arguments in Horovod's order, and stands in the guide."""

from __future__ import annotations

import inspect
import re

import pytest

import gradwire
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
    **dict.fromkeys(
        ("grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"), ("tensors", *VALUES)
    ),
    "sparse_allreduce_async": ("tensor", "name", "op", "process_set"),
    **dict.fromkeys(("allgather", "allgather_async"), ("tensor", "name", "process_set")),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), ("tensors", "name", "process_set")),
    **dict.fromkeys(
        ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
        ("tensor", "root_rank", "name", "process_set"),
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
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "num_groups",
        "groups",
        "sparse_as_dense",
        "process_set",
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
    named = [
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(NAMES)
    assert set(NAMES) - {"elastic"} <= set(gradwire.__all__)
