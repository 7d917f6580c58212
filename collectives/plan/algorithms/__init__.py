"""The planners: one algorithm a file, each a pure function from a Place to a Schedule.

PLANNERS is the whole list of what can be chosen, by collective and name. To add an algorithm, write its file and name it here.
"""

from __future__ import annotations

from collectives.plan.algorithms import direct, hierarchical, recursive_doubling, ring, rsag, tree
from collectives.plan.schedule import Planner

PLANNERS: dict[str, dict[str, Planner]] = {
    "allreduce": {
        "ring": ring.allreduce,
        "rsag": rsag.allreduce,
        "recursive_doubling": recursive_doubling.allreduce,
        "tree": tree.allreduce,
        "direct": direct.allreduce,
        "hierarchical": hierarchical.allreduce,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "rsag": rsag.reduce_scatter,
        "direct": direct.reduce_scatter,
    },
    "allgather": {"ring": ring.allgather, "rsag": rsag.allgather, "direct": direct.allgather},
    "broadcast": {"tree": tree.broadcast, "rsag": rsag.broadcast, "direct": direct.broadcast},
    "reduce": {"tree": tree.reduce_to_root, "direct": direct.reduce_to_root},
    "gather": {"direct": direct.gather},
    "scatter": {"direct": direct.scatter},
    "alltoall": {"direct": direct.alltoall},
    "barrier": {"recursive_doubling": recursive_doubling.allreduce, "tree": tree.allreduce},
}
