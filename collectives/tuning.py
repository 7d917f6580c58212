"""How a Communicator measures its links and codecs, predicts the time of allreduces, and reads tuning files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.raw import Raw
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.probe import Probe
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.cost import CallCost, Costs, TuningError
from gradwire.collectives.schedules.selection import Measured, planned
from gradwire.collectives.schedules.topology import Machine, Topology
from gradwire.collectives.shared_tensors import SharedTensors
from gradwire.collectives.timed_calls import time_calls, time_codecs, time_rivals

_log = logging.getLogger("gradwire")


class Tuned(SharedTensors):
    """The ways to measure the links and codecs of ranks, and to predict and select by the measurement."""

    # Set by the Communicator
    topology: Topology
    global_ranks: tuple[int, ...]
    _machines: Sequence[Machine]
    _costs: Costs | None

    def tune(self) -> Costs:
        """Measure the links of these ranks, and let 'auto' select by the measurement from now on. A collective call, which
        takes half a second or more, and longer if ranks share cores. With COLLECTIVES_TUNING=1, making a Communicator
        over several hosts calls it, if gradwire's TCP link connects the hosts.

        The measurement includes the time of allreduces by each algorithm at a few sizes. At a few more sizes, it times the
        algorithms whose predictions differ by less than 25 %, if an allreduce is predicted to take at most 10 ms. These times
        correct the predictions, so 'auto' selects by them. Later calls do not change the selection: all calls of a size run the
        same algorithm until the next tune(), and runs with the same file of measurements give the same bits.
        """
        codecs = self._costs.codecs if self._costs is not None else ()
        costs = replace(self._probe().run(), codecs=codecs)
        self._choose_by(costs)  # which may change what the timed calls run
        costs = replace(costs, calls=self._timed_calls(costs))
        if "allreduce" not in self._engine.plans.by_hand:
            rivals = time_rivals(
                self, costs, [call.algorithm for call in costs.calls], self._engine.plans.segment_bytes
            )
            costs = costs.with_calls(rivals)
        self._choose_by(costs)
        if self.topology.rank == 0:
            for line in costs.slow():
                _log.warning("gradwire: %s", line)
        return costs

    def measure_codecs(self, codecs: Iterable[str | Codec], device: str = "cpu") -> Costs:
        """Measure how quickly these ranks encode and decode on a type of device, so that predict() can use the measurement.
        Also measure the links, unless that was done before. A collective call, which takes about a second. It does not change
        the selection of 'auto'.

        Raises ValueError if the group carries no CPU tensors, because links are measured with CPU tensors."""
        if self._engine.control_device != "cpu":
            raise ValueError(
                f"rank {self.topology.rank}: links are measured with CPU tensors, which this group does not carry"
            )
        wanted = dict.fromkeys([*map(make_codec, codecs), Raw()])
        links = self._costs or self._probe().run()
        if not links.calls or not all(links.measured("allreduce", name) for name in self._own_algorithms()):
            links = links.with_calls(self._timed_calls(links))
        coding = [codec for codec in wanted if codec.name != "none"]
        # Until they are timed, calls with these codecs are predicted without a correction.
        links = links.with_calls([CallCost("allreduce", codec.identity, ()) for codec in coding])
        costs = self._probe().run(links, list(wanted), device)
        if device == "cpu":
            plans = self._engine.plans
            costs = costs.with_calls(
                time_codecs(self, costs, coding, lambda numel, codec: plans.predict(costs, numel, 4, codec))
            )
        self._costs = costs
        return costs

    def predict(self, numel: int, itemsize: int = 4, compression: str | Codec | None = None) -> float:
        """Return the predicted seconds of an allreduce with algorithm='auto' of numel numbers of itemsize bytes; with a
        codec, of float32 numbers. The result is the same on all ranks. Raises KeyError for a codec or an algorithm that was
        not measured; see measure_codecs()."""
        if self._costs is None:
            raise KeyError("links were not measured")
        made = make_codec(compression) if compression is not None else None
        return self._engine.plans.predict(self._costs, numel, itemsize, made)

    def _timed_calls(self, costs: Costs) -> tuple[CallCost, ...]:
        names = planned("allreduce", self._engine.plans.algorithms("allreduce"), self.topology.hosts)
        return time_calls(self, costs, [*names, *self._own_algorithms()], self._engine.plans.segment_bytes)

    def _own_algorithms(self) -> list[str]:
        """Return the algorithms of the link's own that 'auto' may run: they have no Program to walk."""
        names = [rule.algorithm for rule in self._engine.plans.tables["allreduce"]]
        return [name for name in dict.fromkeys(names) if name not in PLANNERS["allreduce"]]

    def _probe(self) -> Probe:
        return Probe(self._engine, self.topology, self._machines)

    @property
    def measured(self) -> Measured | None:
        """Return the measurement of the links by which 'auto' selects algorithms, as a Measured; None without a
        measurement."""
        return self._engine.plans.measured

    @property
    def costs(self) -> Costs | None:
        """Return the measured costs of the links, the same on all ranks; None without a measurement."""
        return self._costs

    def _read(self, text: str | TuningError, source: str) -> Costs:
        """Return the costs of a tuning file, of these ranks among those that it was made for."""
        if isinstance(text, TuningError):
            raise text
        costs = Costs.from_json(text, source)
        members = self.global_ranks
        if costs.size != self.size and members and max(members) < costs.size:
            costs = costs.among(members)
        return costs.checked(
            source, self.topology.hosts, [self._machines[host[0]].description for host in self.topology.hosts]
        )

    def _choose_by(self, costs: Costs) -> None:
        self._costs = costs
        self._engine.choose_by(costs)


def text_of(tuning_file: str) -> str | TuningError:
    """Return the text of a tuning file, or why it cannot be read. All ranks compare it before any of them raises."""
    try:
        return Path(tuning_file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return TuningError(f"tuning file {tuning_file} cannot be read: {error}")


def compared(text: str | TuningError) -> str:
    """Return what ranks compare of a tuning file: a hash of its text, or that it cannot be read."""
    return (
        "a file that cannot be read"
        if isinstance(text, TuningError)
        else hashlib.sha256(text.encode()).hexdigest()[:12]
    )
