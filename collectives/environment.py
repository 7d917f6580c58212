"""The names of the environment variables that the collective layer reads, all when a Communicator is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Prefix of the per-collective algorithm tables: COLLECTIVES_ALLREDUCE="recursive_doubling:0-16K;rsag:16K-max".
TABLE_PREFIX = "COLLECTIVES_"

#: Overrides what `topology.host_id` finds out.
HOST_ID = "COLLECTIVES_HOST_ID"

#: Name the network interface through which this rank is reached, the first that is set: ours, and gloo's own.
INTERFACE_VARIABLES = ("COLLECTIVES_INTERFACE", "GLOO_SOCKET_IFNAME")

#: The name of the link where a Communicator is not given one.
LINK = "COLLECTIVES_LINK"

#: The name under which torch.distributed knows the backend of gradwire.collectives.torch_backend.
TORCH_BACKEND = "gradwire"

#: "1" where torch.distributed makes every backend by the package torchcomms, if there is one.
TORCHCOMMS = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"

#: "True" where torchrun's agent keeps torch.distributed's store, and not rank 0: torchrun sets it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

#: How 'auto' knows what links cost: 0, as without it, takes the table made by hand, 1 measures them when a Communicator between
#: hosts is made, anything else is the name of a file that `gradwire tune --out` has written.
TUNING = "COLLECTIVES_TUNING"

#: Set to 0 on any rank, all ranks do without shared memory.
SHARED_MEMORY = "COLLECTIVES_SHARED_MEMORY"

#: A folder in which every rank leaves what `gradwire report`, which sets it, makes a page of.
REPORT = "COLLECTIVES_REPORT"


def report_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for what this rank leaves for `gradwire report`; None where there is no report."""
    text = environment.get(REPORT)
    return Path(text) if text else None


def shared_memory_wanted(environment: Mapping[str, str]) -> bool:
    """Whether this rank is to share memory with the others of its host: unless COLLECTIVES_SHARED_MEMORY=0.

    Raises ValueError for anything but 0 and 1.
    """
    text = environment.get(SHARED_MEMORY) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{SHARED_MEMORY}={text!r} must be 0 (ranks of a host use sockets) or 1")
    return text == "1"
