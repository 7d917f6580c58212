"""Lets programs that import Horovod find this package."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

import gradwire
from gradwire.trainer.horovod import probes
from gradwire.trainer.horovod.run import run
from gradwire.trainer.world.process_sets import ProcessSet, global_process_set
from gradwire.trainer.world.world import add_process_set, init, remove_process_set

_log = logging.getLogger("gradwire")

VERSION = "0.28.1"
"""The version of Horovod whose interface this is: programs ask for it to know what they may call."""

#: Modules of horovod.torch from which programs import its names.
_OF_TORCH = ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm")


def alias_horovod() -> None:
    """Make `import horovod.torch as hvd` import this package from now on. Further calls do nothing.

    horovod.torch and its modules mpi_ops, compression, functions, optimizer and sync_batch_norm have all names of this package.
    horovod.torch.elastic with its modules sampler and state, and the modules elastic, exceptions, process_sets and util of
    horovod.common, have those names of Horovod's that apply here. horovod.run() starts ranks on this host. Importing any other
    part of Horovod raises ModuleNotFoundError. horovod.__version__ is the version of Horovod whose interface gradwire has.

    Raises RuntimeError if Horovod itself has been imported.
    """
    found = sys.modules.get("horovod.torch") or sys.modules.get("horovod")
    if getattr(found, "init", None) is init:
        return
    if found is not None:
        raise RuntimeError(
            f"Horovod itself has been imported, from {getattr(found, '__file__', None)}: call gradwire.alias_horovod() before "
            "anything imports it, at the beginning of the script"
        )
    ours = {name: getattr(gradwire, name) for name in (*gradwire.__all__, *probes.NAMES)}
    names_of_elastic = ("ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "TorchState", "run")
    elastic = {name: getattr(gradwire.elastic, name) for name in names_of_elastic}
    modules = {f"horovod.torch.{name}": ours for name in _OF_TORCH} | {
        "horovod": {"run": run},
        "horovod.torch": ours,
        "horovod.torch.elastic": elastic,
        "horovod.torch.elastic.sampler": {"ElasticSampler": elastic["ElasticSampler"]},
        "horovod.torch.elastic.state": {"TorchState": elastic["TorchState"]},
        "horovod.common": {},
        "horovod.common.elastic": {"ObjectState": elastic["ObjectState"]},
        "horovod.common.exceptions": {
            "HorovodInternalError": gradwire.HorovodInternalError,
            "HostsUpdatedInterrupt": elastic["HostsUpdatedInterrupt"],
        },
        "horovod.common.process_sets": {
            "ProcessSet": ProcessSet,
            "add_process_set": add_process_set,
            "global_process_set": global_process_set,
            "remove_process_set": remove_process_set,
        },
        "horovod.common.util": {
            "check_extension": check_extension,
            "extension_available": extension_available,
            "gloo_built": probes.gloo_built,
            "gpu_available": gpu_available,
            "mpi_built": probes.mpi_built,
            "nccl_built": probes.nccl_built,
            "num_rank_is_power_2": num_rank_is_power_2,
        },
    }
    for name in sorted(modules):  # a package before its modules
        module = ModuleType(name, f"What gradwire has for {name}.")
        is_package = any(other.startswith(f"{name}.") for other in modules)
        module.__spec__ = ModuleSpec(name, None, origin=gradwire.__file__, is_package=is_package)
        if is_package:
            module.__path__ = []
        vars(module).update(modules[name], __all__=sorted(modules[name]), __version__=VERSION)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    _log.info("gradwire: from here on, `import horovod.torch` finds gradwire")


def check_extension(name: str, *_: object) -> None:
    """Raise ImportError for a part of Horovod that this package lacks. name: such as "horovod.torch"."""
    if not extension_available(name.removeprefix("horovod.")):
        raise ImportError(f"{name} is not a part of gradwire; horovod.torch is")


def extension_available(name: str, verbose: bool = False) -> bool:
    """Return whether Horovod's part for a framework exists here: only for "torch"."""
    return name == "torch"


def gpu_available(name: str, verbose: bool = False) -> bool:
    """Return whether there is a GPU that the part of Horovod for a framework uses."""
    return extension_available(name) and torch.cuda.is_available()


def num_rank_is_power_2(ranks: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return ranks > 0 and ranks & (ranks - 1) == 0
