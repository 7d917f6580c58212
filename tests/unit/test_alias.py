"""Programs that import Horovod find the trainer, after alias_horovod()."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import gradwire
from gradwire.trainer.horovod.alias import check_extension, num_rank_is_power_2

ROOT = Path(__file__).parents[2]

THIRD_PARTY = """
    import importlib.util
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
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
    assert set(gradwire.__all__) <= set(vars(hvd)) and hvd.__all__ == sorted(gradwire.__all__)
    assert DistributedOptimizer is gradwire.DistributedOptimizer and Other is Compression is gradwire.Compression
    assert HorovodInternalError is gradwire.HorovodInternalError
    assert global_process_set is gradwire.global_process_set
    assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28)
    assert importlib.util.find_spec("horovod.torch") is not None
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
    print("done")
"""


def test_third_party_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(THIRD_PARTY.replace("__file__", "''"))],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("from here on, `import horovod.torch` finds gradwire") == 1
    assert done.stdout.endswith("done\n")


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
