"""The verbs, one a file, each of the same anatomy: check the arguments, choose the algorithm, describe the call, give a body.

The description is the same on all ranks and marks the operation's messages; the body runs when the operation's turn comes.
What a verb promises stands at the method of Communicator that has its name.
"""

from gradwire.collectives.verbs.allgather import allgather
from gradwire.collectives.verbs.allreduce import (
    allreduce,
    allreduce_compressed,
    grouped_allreduce,
    named_codec,
    prepare_allreduce,
)
from gradwire.collectives.verbs.alltoall import alltoall
from gradwire.collectives.verbs.barrier import barrier
from gradwire.collectives.verbs.broadcast import broadcast
from gradwire.collectives.verbs.gather import gather
from gradwire.collectives.verbs.recv import recv
from gradwire.collectives.verbs.reduce import reduce
from gradwire.collectives.verbs.reduce_scatter import reduce_scatter
from gradwire.collectives.verbs.scatter import scatter
from gradwire.collectives.verbs.send import send
from gradwire.collectives.verbs.shares import gather_shares, prepare_reduce_shares, reduce_shares, shares_of

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_compressed",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "gather_shares",
    "grouped_allreduce",
    "named_codec",
    "prepare_allreduce",
    "prepare_reduce_shares",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_shares",
    "scatter",
    "send",
    "shares_of",
]
