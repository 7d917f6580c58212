"""The names of the environment variables that the collective layer reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Prefix of the per-collective algorithm tables: COLLECTIVES_ALLREDUCE="recursive_doubling:0-16K;rsag:16K-max".
TABLE_PREFIX = "COLLECTIVES_"

#: Overrides what `topology.host_id` finds out.
HOST_ID = "COLLECTIVES_HOST_ID"

#: The network interfaces of gloo, separated by commas. torch reads it whenever it makes gloo.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

#: Variables that name the network interface at which this rank is reached: ours, and gloo's. The first that is set counts.
INTERFACE_VARIABLES = ("COLLECTIVES_INTERFACE", GLOO_INTERFACE)

#: The name of the link of Communicators that are made without one.
LINK = "COLLECTIVES_LINK"

#: The name under which torch.distributed knows the backend of gradwire.collectives.torch_backend.
TORCH_BACKEND = "gradwire"

#: "1" where torch.distributed makes every backend by the package torchcomms, if there is one.
TORCHCOMMS = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"

#: "True" where torchrun's agent keeps torch.distributed's store, and not rank 0: torchrun sets it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

#: The name of this run of the job: torchrun and `gradwire run` set it.
RUN_ID = "TORCHELASTIC_RUN_ID"

#: How 'auto' selects: 0, the default, by the table made by hand; 1 by a measurement when a Communicator over several hosts is
#: made; anything else is the name of a file from `gradwire tune --out`.
TUNING = "COLLECTIVES_TUNING"

#: If it is 0 on any rank, no rank uses shared memory.
SHARED_MEMORY = "COLLECTIVES_SHARED_MEMORY"

#: The ports on which gradwire may listen, as FIRST-LAST. Without it, the system chooses them.
PORTS = "COLLECTIVES_PORTS"

#: The number of ranks of this host: torchrun and `gradwire run` set it.
LOCAL_SIZE = "LOCAL_WORLD_SIZE"

#: A folder in which every rank writes files for `gradwire report`, which sets this variable.
REPORT = "COLLECTIVES_REPORT"


#: The file that holds the key of a job: with it, the connections of gradwire are encrypted.
KEY_FILE = "GRADWIRE_KEY_FILE"

#: "1" for a checksum of each message between hosts; the same on all ranks.
CHECKSUM = "COLLECTIVES_CHECKSUM"


def report_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for this rank's files for `gradwire report`; None without a report."""
    text = environment.get(REPORT)
    return Path(text) if text else None


def listening_ports(environment: Mapping[str, str]) -> range | None:
    """Return the ports on which gradwire may listen; None if the system chooses them.

    Raises ValueError unless COLLECTIVES_PORTS consists of two ports, the first one not above the last one.
    """
    if not (text := environment.get(PORTS)):
        return None
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16:
        return range(int(first), int(last) + 1)
    raise ValueError(f"{PORTS}={text!r} must be FIRST-LAST, two ports from 1 to 65535, such as 29600-29631")


def shared_memory_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether this rank may share memory with the others of its host: False for COLLECTIVES_SHARED_MEMORY=0.

    Raises ValueError for anything but 0 and 1.
    """
    text = environment.get(SHARED_MEMORY) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{SHARED_MEMORY}={text!r} must be 0 (ranks of a host use sockets) or 1")
    return text == "1"


def checksum_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether messages between hosts have checksums: True for COLLECTIVES_CHECKSUM=1. Raises ValueError for anything but
    0 and 1."""
    text = environment.get(CHECKSUM) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{CHECKSUM}={text!r} must be 0 or 1 (messages between hosts have checksums)")
    return text == "1"
