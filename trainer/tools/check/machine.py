"""The tests of this machine: torch, Numba, its name, its interface, its launcher, its limits, its GPUs."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from gradwire.collectives.control.asking import look_up
from gradwire.collectives.control.own_address import interface_of, own_address
from gradwire.collectives.environment import GLOO_INTERFACE
from gradwire.collectives.errors import LinkError
from gradwire.collectives.kernels import cpu_cache, cpu_kernels, cpu_sockets
from gradwire.trainer.world.launch import ALONE, meeting_point, read_launch, slurm_hint

_NAME_S = 5.0
#: Fewer open files are too few: a rank has some connections to each other rank, and files of its data loaders.
_FEW_FILES = 1024
#: The limit of the test of the GPUs. It is in another process: a driver can hang, and the end of the process frees its memory.
_GPUS_S = 60.0


@dataclass(frozen=True)
class Finding:
    """Holds the result of one test, as text, and the remedy for a problem.

    state: "note" if training works, but slower or not in every situation.
    """

    state: Literal["ok", "note", "failed"]
    what: str
    do: str | None = None

    def __str__(self) -> str:
        return f"{self.state:<7} {self.what}" + (f"\n        -> {self.do}" if self.do else "")


def machine(environment: Mapping[str, str], peer: str | None = None) -> Iterator[Finding]:
    """Run one test after the other. peer: the other host, if the network to one is to be tested."""
    yield _torch()
    yield _numba()
    yield own_name(environment, peer)
    yield interface(environment, peer)
    yield launcher(environment)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from gpus()


def _torch() -> Finding:
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    what = f"torch {torch.__version__}, backends {', '.join(backends) or 'none'}"
    if "gloo" not in backends:
        return Finding(
            "failed", f"{what}: gradwire needs gloo", "install a build of torch that has gloo, as PyPI's have"
        )
    return Finding("ok", what)


def _numba() -> Finding:
    for kernels in (cpu_kernels(), cpu_sockets()):
        if isinstance(kernels, str):
            return Finding("note", f"no compiled kernels, so ranks use gloo: {kernels}")
    what = f"numba {importlib.metadata.version('numba')}"
    if (folder := cpu_cache()) is None:
        do = "set NUMBA_CACHE_DIR to a writable folder"
        return Finding("note", f"{what} cannot save its kernels, so each start compiles for some seconds", do)
    return Finding("ok", f"{what}, saves its kernels in {folder}")


def own_name(environment: Mapping[str, str], peer: str | None = None) -> Finding:
    """Return whether this host's name resolves to an address that other hosts can use, as a gloo group that the script makes
    itself expects. peer: see machine()."""
    name, deadline = socket.gethostname(), time.monotonic() + _NAME_S
    do = f'only for an init_process_group("gloo") of your own on several hosts: {_gloo_interface(peer, deadline)}'
    try:
        addresses = sorted(set(look_up(name, deadline)))
    except (LinkError, OSError, UnicodeError) as error:
        return Finding("note", f"this host's name, {name}, does not resolve: {error}", do)
    what = f"this host's name, {name}, resolves to {', '.join(addresses)}"
    if environment.get(GLOO_INTERFACE):
        return Finding("ok", f"{what}; {GLOO_INTERFACE}={environment[GLOO_INTERFACE]} takes precedence")
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        return Finding("note", f"{what}, which other hosts do not reach", do)
    return Finding("ok", what)


def interface(environment: Mapping[str, str], peer: str | None = None) -> Finding:
    """Return which address of this host the other ranks use. peer: see machine()."""
    try:
        address = own_address(environment, time.monotonic() + _NAME_S, peer)
    except LinkError as error:
        return Finding("failed", str(error), "write its address, or add it to /etc/hosts")
    except ValueError as error:
        return Finding("failed", str(error), "correct or unset that variable")
    named = interface_of(address)
    what = f"ranks here are reached at {address}" + (f", interface {named}" if named else "")
    if ipaddress.ip_address(address).is_loopback:
        do = "for more than one host: connect this one to a network, or name an interface in COLLECTIVES_INTERFACE"
        return Finding("note", f"{what}, but from this host only", do)
    return Finding("ok", what)


def launcher(environment: Mapping[str, str]) -> Finding:
    """Return which launcher's variables are set, and whether they are complete."""
    try:
        launch = read_launch(environment)
        if launch is not ALONE:
            address, port = meeting_point(environment, launch)
            return Finding("ok", f"{launch.launcher}: rank {launch.rank} of {launch.size}, meets at {address}:{port}")
    except ValueError as error:
        return Finding("failed", str(error), "unset these variables, or start with a launcher that sets all of them")
    if hint := slurm_hint(environment, "train.py"):
        return Finding("note", hint)
    if stray := [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT") if name in environment]:
        return Finding(
            "note", f"{', '.join(stray)} {'are' if stray[1:] else 'is'} set, but RANK is not: nothing reads them"
        )
    return Finding("ok", "not started by a launcher: a script would be a world of one rank")


def open_files(limit: int) -> Finding:
    """Return whether a process may open enough files. limit: the soft limit."""
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        return Finding("note", f"a process may open {limit} files, too few for many ranks", "ulimit -n 65536")
    return Finding("ok", f"a process may open {'any number of' if limit == resource.RLIM_INFINITY else limit} files")


def _gloo_interface(peer: str | None, deadline: float) -> str:
    """Return how to name the interface that other hosts reach in gloo's variable. peer: see machine()."""
    with suppress(LinkError):
        address = own_address({}, deadline, peer)
        if (name := interface_of(address)) is not None and not ipaddress.ip_address(address).is_loopback:
            return f"export {GLOO_INTERFACE}={name}"
    return f"export {GLOO_INTERFACE}=... with the interface that the other hosts reach"


def gpus(deadline_s: float = _GPUS_S) -> list[Finding]:
    """Return the findings about GPUs and CuPy, within deadline_s seconds."""
    if torch.version.cuda is None:
        if Path("/dev/nvidia0").exists():
            return [
                Finding("note", "there is a GPU, but torch is built without CUDA", "install torch with CUDA to use it")
            ]
        return [Finding("ok", "no GPU, and torch is built without CUDA: tensors are on the CPU")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired:
        return [Finding("failed", f"CUDA does not answer within {deadline_s:g} s", "look at nvidia-smi and dmesg")]
    try:
        return [Finding(**found) for found in json.loads(done.stdout.splitlines()[-1])]
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Finding("failed", f"CUDA: {last}", "look at nvidia-smi and dmesg")]


def look_at_gpus() -> list[Finding]:
    """Return the findings about GPUs and CuPy. A driver may hang or end the process."""
    if not torch.cuda.is_available():
        return [
            Finding("note", f"torch is built for CUDA {torch.version.cuda}, but sees no GPU: tensors are on the CPU")
        ]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    torch.ones(1, device="cuda", dtype=torch.float32).add_(1).item()
    found = [Finding("ok", f"{len(names)} GPUs: {', '.join(names)}")]
    if not dist.is_nccl_available():
        found.append(
            Finding("note", "this torch has no NCCL, so CUDA tensors are exchanged through the memory of the host")
        )
    return [*found, _cupy()]


def _cupy() -> Finding:
    try:
        import cupy

        assert int(cupy.arange(3).sum()) == 3
    except Exception as error:  # a missing package, or libraries that do not fit the driver
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding(
            "note",
            f"CuPy does not work, so codecs are run by PyTorch's operations on the GPU, slower: {said}",
            "pip install 'gradwire[cuda12]' or 'gradwire[cuda13]', according to torch.version.cuda",
        )
    return Finding("ok", f"CuPy {cupy.__version__}")


if __name__ == "__main__":  # the other process of gpus()
    print(json.dumps([vars(found) for found in look_at_gpus()]))
