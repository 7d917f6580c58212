"""gradwire's collective layer: move tensors between ranks with an algorithm of your choice.

from collectives import Communicator

with Communicator() as communicator:
    communicator.allreduce(tensor, "average")
"""

from collectives.communicator import Communicator
from collectives.errors import CollectiveError, CollectiveTimeout, Mismatch, PeerLost
from collectives.plan.topology import Topology
from collectives.run.work import Work

__all__ = ["CollectiveError", "CollectiveTimeout", "Communicator", "Mismatch", "PeerLost", "Topology", "Work"]
