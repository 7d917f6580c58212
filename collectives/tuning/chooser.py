"""Choose the fastest algorithm for each verb and message size, by measured costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isqrt

from gradwire.collectives.parsing import format_size
from gradwire.collectives.schedules.algorithms import BETWEEN_HOSTS, PLANNERS
from gradwire.collectives.schedules.selection import Range, Table
from gradwire.collectives.tuning.cost_model import Costs
from gradwire.collectives.tuning.prediction import predict

#: Another algorithm replaces the usual one only if it takes at most this share of its time, so that the choice among nearly
#: equal algorithms does not change from run to run.
_WORTH_IT = 0.95

#: How many powers of two table() covers.
_SHOWN_POWERS = 27

_log = logging.getLogger("gradwire")


def planned(verb: str, names: Sequence[str], hosts: Sequence[Sequence[int]]) -> list[str]:
    """Return the verb's algorithms that have a planner and that differ from the others on these hosts."""
    nested = len(hosts) > 1 and any(len(host) > 1 for host in hosts)
    return [name for name in names if name in PLANNERS[verb] and (nested or name not in BETWEEN_HOSTS)]


class Chooser:
    """Chooses for every verb and power of two of bytes. All ranks have the same costs, so they make the same choices.

    algorithms: the algorithm names of each verb. segment_bytes: the maximum size of a segment. usual: returns the choice of the
    hand-made table. logs: whether this rank logs the choices.
    """

    def __init__(
        self,
        costs: Costs,
        algorithms: Mapping[str, Sequence[str]],
        segment_bytes: int,
        usual: Callable[[str, int], str],
        *,
        logs: bool = False,
    ) -> None:
        self.costs = costs
        self._segment_bytes = segment_bytes
        self._usual = usual
        self._logs = logs
        self._chosen: dict[tuple[str, int], str] = {}
        self._names = {
            verb: [
                *planned(verb, names, costs.hosts),
                *(name for name in names if name not in PLANNERS[verb] and costs.measured(verb, name)),
            ]
            for verb, names in algorithms.items()
        }

    def choose(self, verb: str, nbytes: int) -> str:
        """Return the algorithm for a message of nbytes."""
        key = verb, 1 << (((nbytes * nbytes) | 1).bit_length() // 2)  # the nearest power of two
        if key not in self._chosen:
            self._chosen[key] = self._decide(*key)
        return self._chosen[key]

    def table(self, verb: str) -> Table:
        """Return the choices for up to 64 MB as a table, to be shown."""
        # The least number whose nearest power of two is 2 ** power.
        starts = [isqrt(1 << (2 * power - 1)) + 1 if power else 0 for power in range(_SHOWN_POWERS)]
        chosen = [(start, self.choose(verb, 1 << power)) for power, start in enumerate(starts)]
        changes = [each for before, each in pairwise([(0, ""), *chosen]) if each[1] != before[1]]
        stops = [start for start, _ in changes[1:]]
        return tuple(Range(name, start, stop) for (start, name), stop in zip(changes, [*stops, None], strict=True))

    def ranked(self, verb: str, nbytes: int) -> list[tuple[float, str]]:
        """Return a verb's algorithms with their predicted seconds, the fastest first."""
        return sorted(
            (predict(self.costs, verb, name, nbytes, self._segment_bytes), name) for name in self._names[verb]
        )

    def _decide(self, verb: str, nbytes: int) -> str:
        names = self._names[verb]
        usual, why = self._usual(verb, nbytes), "the fastest"
        # An algorithm of the link's own, of which no calls were measured, is not among the names: it stays.
        if usual not in names or len(names) == 1:
            return usual
        ranked = self.ranked(verb, nbytes)
        # Where calls of this very size were timed, an algorithm without a time was predicted to be slower.
        ranked = [each for each in ranked if nbytes in dict(self.costs.measured(verb, each[1]))] or ranked
        chosen = ranked[0][1]
        if any(name == usual and ranked[0][0] > _WORTH_IT * seconds for seconds, name in ranked):
            chosen, why = usual, "the default, and none is much faster"
        if self._logs:
            best = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for seconds, name in ranked[:3])
            _log.debug("gradwire: %s of %s uses %s, %s (%s)", verb, format_size(nbytes), chosen, why, best)
        return chosen
