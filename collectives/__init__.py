"""gradwire's collective layer: move tensors between ranks with an algorithm of your choice.

from collectives import Communicator

with Communicator() as communicator:
    communicator.allreduce(tensor, "average")
"""

from collectives.communicator import Communicator
from collectives.compression.registry import register_codec
from collectives.errors import CollectiveError, CollectiveTimeout, Mismatch, PeerLost, ReplicasDiffer
from collectives.link.registry import register_link
from collectives.plan.algorithms import register_algorithm
from collectives.plan.check import ScheduleError, check_algorithm
from collectives.plan.topology import Topology
from collectives.run.prepared import PreparedOperation
from collectives.run.work import Work

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Mismatch",
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
