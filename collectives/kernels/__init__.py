"""The kernels: `reference` in plain torch, `cpu` and `cuda` compiled. Each package is loaded when a process first needs it."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from gradwire.collectives.kernels import layout

#: The modules of cpu with the kernels of each compiled link.
_MEMORY, _TCP, _PROGRAMS = ("shared_memory", "waits", "messages"), ("tcp",), ("execute_program",)
LINKS = (*_MEMORY, *_TCP, *_PROGRAMS)


@cache
def cpu_kernels() -> ModuleType | str:
    """Return a module with the kernels of links in shared memory, compiled or loaded from the disk, and the constants of layout;
    or a text why they cannot be used."""
    return _link(*_MEMORY)


@cache
def cpu_sockets() -> ModuleType | str:
    """Return a module as cpu_kernels() with the kernels of TCP. Those of cpu_programs() are compiled or loaded, too."""
    programs = _link(*_PROGRAMS)
    return programs if isinstance(programs, str) else _link(*_TCP)


@cache
def cpu_programs() -> ModuleType:
    """Return a module as cpu_kernels() with the kernel that runs programs. cpu_sockets() must have returned a module."""
    return cast(ModuleType, _link(*_PROGRAMS))


def compiles_links() -> bool:
    """Return whether any kernel of the links must be compiled first, which takes up to a minute. Once they are loaded, no file is
    looked for."""
    if cpu_kernels.cache_info().currsize and cpu_sockets.cache_info().currsize:
        return False
    try:
        from gradwire.collectives.kernels.cpu.library import KERNELS, is_kept

        modules = LINKS if sys.platform == "linux" else ()
        return not all(is_kept(module, name) for module in modules for name in KERNELS[module])
    except ImportError:
        return False


def _link(*modules: str) -> ModuleType | str:
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        from gradwire.collectives.kernels.cpu.library import KERNELS, kernel

        made = ModuleType("kernels")
        vars(made).update(vars(layout))
        vars(made).update({name: kernel(module, name).call for module in modules for name in KERNELS[module]})
    except ImportError as error:
        return f"{error}: pip install numba"
    return made


@cache
def cpu_arithmetic(dtype: torch.dtype) -> Any:
    """Return the C function that reduces a dtype, compiled or loaded from the disk."""
    from gradwire.collectives.kernels.cpu.library import kernel

    return kernel("arithmetic", f"reduce_{str(dtype).removeprefix('torch.')}")


@cache
def cpu_or_reference() -> ModuleType:
    """Return the compiled functions of reference.memory, for tensors on the CPU; without Numba, reference.memory, which does the
    same more slowly."""
    try:
        return _cpu()
    except ImportError:
        from gradwire.collectives.kernels.reference import memory

        return memory


@cache
def _cpu() -> ModuleType:
    """Return cpu.entries. Raises ImportError if kernels can be neither loaded from the disk nor compiled."""
    entries = import_module("gradwire.collectives.kernels.cpu.entries")
    entries.kernel("waits", "publish")  # a small one
    return entries


def cpu_cache() -> Path | None:
    """Return the folder in which compiled kernels are kept; None, with a warning, if no folder is writable."""
    from gradwire.collectives.kernels.cpu.library import kernel_folder

    return kernel_folder()


@cache
def kernels_for(device: torch.device) -> ModuleType:
    """Return a module, or an object like one, with the functions of reference.quantize, reference.sparse and reference.matrices
    for tensors on a device.

    Raises ImportError, which names the package to install, if a package is missing.
    """
    if device.type == "cpu":
        try:
            return _cpu()
        except ImportError as error:
            raise ImportError(f"codecs cannot encode tensors on cpu: {error}: pip install numba") from error
    if device.type == "cuda":
        from gradwire.collectives.kernels.cuda.kernels import cuda_kernels

        kernels = cuda_kernels(device)
        if isinstance(kernels, str):
            raise ImportError(f"codecs cannot encode tensors on cuda: {kernels}")
        return cast(ModuleType, kernels)
    raise ValueError(f"codecs encode tensors on cpu and cuda, not on {device.type}")
