"""gradwire's collective layer: move tensors between ranks with an algorithm of your choice.

from gradwire.collectives import Communicator

with Communicator() as communicator:
    communicator.allreduce(tensor, "average")
"""

from gradwire.collectives.communicator import Communicator
from gradwire.collectives.compression.registry import register_codec
from gradwire.collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    Mismatch,
    PeerJoined,
    PeerLost,
    ReplicasDiffer,
)
from gradwire.collectives.link.registry import register_link
from gradwire.collectives.plan.algorithms import register_algorithm
from gradwire.collectives.plan.check import ScheduleError, check_algorithm
from gradwire.collectives.plan.topology import Topology
from gradwire.collectives.run.prepared import PreparedOperation
from gradwire.collectives.run.work import Work

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Mismatch",
    "PeerJoined",
    "PeerLost",
    "PreparedOperation",
    "ReplicasDiffer",
    "ScheduleError",
    "Topology",
    "Work",
    "check_algorithm",
    "register_algorithm",
    "register_codec",
    "register_link",
]
