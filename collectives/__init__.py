"""gradwire's collective layer: move tensors between ranks with an algorithm of your choice.

from gradwire.collectives import Communicator

with Communicator() as communicator:
    communicator.allreduce(tensor, "average")
"""

from gradwire.collectives.communicator import Communicator
from gradwire.collectives.compression.registry import register_codec
from gradwire.collectives.engine.prepared import PreparedOperation
from gradwire.collectives.engine.work import Work
from gradwire.collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    Mismatch,
    PeerJoined,
    PeerLost,
    ReplicasDiffer,
)
from gradwire.collectives.schedules.algorithms import register_algorithm
from gradwire.collectives.schedules.check import ScheduleError, check_algorithm
from gradwire.collectives.schedules.topology import Topology
from gradwire.collectives.transports.registry import register_link

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
