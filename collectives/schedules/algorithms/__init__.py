"""The planners: one algorithm a file, each a pure function from a Place to a Schedule.

PLANNERS lists all algorithms, by collective and name. To add an algorithm, write its file and name it here, or call
register_algorithm() from other code.
"""

from __future__ import annotations

from functools import partial

from gradwire.collectives.parsing import check_name
from gradwire.collectives.schedules.algorithms import direct, hierarchical, recursive_doubling, ring, rsag, tree
from gradwire.collectives.schedules.schedule import Planner

#: The algorithms that hierarchical may use between hosts, by the name of the combination.
BETWEEN_HOSTS: dict[str, Planner] = {
    "hierarchical": ring.allreduce,
    "hierarchical(rsag)": rsag.allreduce,
    "hierarchical(recursive_doubling)": recursive_doubling.allreduce,
    "hierarchical(direct)": direct.allreduce,
}

PLANNERS: dict[str, dict[str, Planner]] = {
    "allreduce": {
        "ring": ring.allreduce,
        "rsag": rsag.allreduce,
        "recursive_doubling": recursive_doubling.allreduce,
        "tree": tree.allreduce,
        "direct": direct.allreduce,
        **{name: partial(hierarchical.allreduce, inner=inner) for name, inner in BETWEEN_HOSTS.items()},
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

#: The collectives that have a root, so that a rank may finish before others have begun.
ROOTED = ("broadcast", "reduce", "gather", "scatter")

#: Allreduces that are, to the bit, the reduce_scatter and then the allgather of the same name.
IN_HALVES = ("ring", "rsag", "direct")

#: Names that have another meaning in `algorithm=`.
RESERVED = ("auto", "one_shot", "two_shot")

#: Algorithms that the links of this repository run by themselves, so that planners need other names.
_OF_LINKS = ("native", "shared")


def register_algorithm(collective: str, name: str, planner: Planner) -> None:
    """Add an algorithm that Communicators made from now on can select by name. First check its planner with check_algorithm().

    planner: a function from a Place (a rank, the world size, the root and the ranks of each host) to the Schedule (the messages
    and reductions) of that rank. Every rank must register the same planner. Ranks compare only the names, so planners that
    send different messages need different names.

    Raises ValueError for an unknown collective, and for a name that is malformed or taken; TypeError for a planner that cannot
    be called.
    """
    if collective not in PLANNERS:
        raise ValueError(f"no collective is called {collective!r}; known are {', '.join(PLANNERS)}")
    check_name(f"{collective} algorithm", name, (*PLANNERS[collective], *RESERVED, *_OF_LINKS))
    if not callable(planner):
        raise TypeError(
            f"{collective} algorithm {name!r}: a function from a Place to a Schedule is needed, not {planner!r}"
        )
    PLANNERS[collective][name] = planner
