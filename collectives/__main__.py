"""What can be asked of the package from a shell.

gradwire info          what is found here, and which algorithm runs for which size; also under torchrun
gradwire precompile    compile all kernels for the CPU now, so that no first run has to
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os

import torch
import torch.distributed as dist

from gradwire.collectives.communicator import Communicator
from gradwire.collectives.environment import TABLE_PREFIX
from gradwire.collectives.notation import format_size
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.selection import Table
from gradwire.collectives.precompile import precompile
from gradwire.collectives.torch_internals import store_of_one


def _version(name: str) -> str:
    """Installed version of a package, or that it is not there. CuPy's wheels are named after the CUDA version."""
    wheels = importlib.metadata.packages_distributions().get(name, [name])
    try:
        return importlib.metadata.version(wheels[0])
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _range(table: Table) -> str:
    return ";".join(
        f"{rule.algorithm}:{format_size(rule.start)}-{'max' if rule.stop is None else format_size(rule.stop)}"
        for rule in table
    )


def _report(communicator: Communicator) -> str:
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    lines = [
        f"gradwire   {_version('gradwire')}",
        f"torch      {torch.__version__}, backends {', '.join(backends)}",
        f"numba      {_version('numba')}",
        f"cupy       {_version('cupy')}",
        f"GPUs       {', '.join(gpus) or 'none'}",
        f"ranks      {communicator.size}",
        *(f"host {i}     ranks {', '.join(map(str, host))}" for i, host in enumerate(communicator.topology.hosts)),
        *(f"link       rank {communicator.rank} to {route}" for route in communicator.routes),
        "",
        f"algorithm by message size in bytes ('auto'), for {communicator.size} ranks"
        f"{'; start this under torchrun for more' if communicator.size == 1 else ''}:",
    ]
    for collective, table in communicator.tables.items():
        variable = TABLE_PREFIX + collective.upper()
        source = f"from {variable}" if os.environ.get(variable) else f"built in; {variable} overrides"
        lines.append(f"  {collective:<15}{_range(table)}   ({source})")
    known = sorted({name for planners in PLANNERS.values() for name in planners})
    return "\n".join([*lines, "", f"algorithms known: {', '.join(known)}, shared, native"])


def _info() -> None:
    """Print the report of rank 0."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store_of_one(), rank=0, world_size=1)
    with Communicator() as communicator:
        if communicator.rank == 0:
            print(_report(communicator))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gradwire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["info", "precompile"])
    if parser.parse_args().command == "info":
        _info()
    else:
        raise SystemExit(precompile())


if __name__ == "__main__":
    main()
