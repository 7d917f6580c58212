"""The verbs, one a file, each of the same anatomy: check the arguments, choose the algorithm, describe the call, give a body.

The description is the same on all ranks and marks the operation's messages; the body runs when the operation's turn comes.
What a verb promises stands at the method of Communicator that has its name.
"""

from collectives.verbs.allgather import allgather
from collectives.verbs.allreduce import (
    allreduce,
    allreduce_compressed,
    grouped_allreduce,
    named_codec,
    prepare_allreduce,
)
from collectives.verbs.alltoall import alltoall
from collectives.verbs.barrier import barrier
from collectives.verbs.broadcast import broadcast
from collectives.verbs.gather import gather
from collectives.verbs.recv import recv
from collectives.verbs.reduce import reduce
from collectives.verbs.reduce_scatter import reduce_scatter
from collectives.verbs.scatter import scatter
from collectives.verbs.send import send
from collectives.verbs.shares import gather_shares, prepare_reduce_shares, reduce_shares, shares_of

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
