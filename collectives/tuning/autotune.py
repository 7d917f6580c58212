"""Measure the links and codecs of a Communicator's ranks, predict the time of its allreduces, and let 'auto' choose by it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradwire.collectives.compression.codec import Codec, Raw
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.tuning.call_benchmark import time_algorithms, time_codecs
from gradwire.collectives.tuning.chooser import Chooser, planned
from gradwire.collectives.tuning.codec_benchmark import codec_costs
from gradwire.collectives.tuning.cost_model import Costs, TuningError
from gradwire.collectives.tuning.link_benchmark import measure_links
from gradwire.collectives.tuning.prediction import predict_auto, predict_coded

if TYPE_CHECKING:
    from gradwire.collectives.communicator import Communicator

_log = logging.getLogger("gradwire")


class TuningFile:
    """The file that COLLECTIVES_TUNING names, as this rank reads it.

    content: a hash of its text, or the words that it cannot be read. All ranks compare this before any of them raises.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._error: Exception | None = None
        try:
            self._text = Path(name).read_text()
            self.content = hashlib.sha256(self._text.encode()).hexdigest()[:12]
        except (OSError, UnicodeDecodeError) as error:
            self._error = error
            self.content = "a file that cannot be read"

    def apply(self, communicator: Communicator, engine: Engine) -> None:
        """Let 'auto' choose by the costs in the file, of these ranks among those that it was made for. Raises TuningError if the
        file cannot be used."""
        if self._error is not None:
            raise TuningError(f"tuning file {self._name} cannot be read: {self._error}")
        costs, members, hosts = (
            Costs.from_json(self._text, self._name),
            communicator.global_ranks,
            engine.schedules.topology.hosts,
        )
        if costs.size != communicator.size and members and max(members) < costs.size:
            costs = costs.among(members)
        costs.check(self._name, hosts, [communicator.machines[host[0]].description for host in hosts])
        _choose_by(communicator, engine, costs)


def tune(communicator: Communicator, engine: Engine) -> Costs:
    """See Communicator.tune()."""
    codecs = communicator.costs.codecs if communicator.costs is not None else ()
    costs = replace(measure_links(engine, communicator.topology, communicator.machines), codecs=codecs)
    _choose_by(communicator, engine, costs)  # which may change what the timed calls run
    costs = time_algorithms(communicator, costs, _timed_algorithms(engine))
    _choose_by(communicator, engine, costs)
    if communicator.rank == 0:
        for line in costs.slow():
            _log.warning("gradwire: %s", line)
    return costs


def measure_codecs(communicator: Communicator, engine: Engine, codecs: Iterable[str | Codec], device: str) -> Costs:
    """See Communicator.measure_codecs()."""
    if engine.control_device != "cpu":
        raise ValueError(f"rank {engine.rank}: links are measured with CPU tensors, which this group does not carry")
    wanted = dict.fromkeys([*map(make_codec, codecs), Raw()])
    costs = communicator.costs or measure_links(engine, communicator.topology, communicator.machines)
    names = _timed_algorithms(engine)
    if not all(costs.measured("allreduce", name) for name in names):
        costs = time_algorithms(communicator, costs, names)
    coding = [codec for codec in wanted if codec.name != "none"]
    # Until they are timed, calls with these codecs are predicted without a correction.
    costs = costs.without_times([codec.identity for codec in coding])
    speeds = {
        speed.identity: speed for speed in (*costs.codecs, *codec_costs(engine, list(wanted), torch.device(device)))
    }
    costs = replace(costs, codecs=tuple(speeds.values()))
    if device == "cpu":
        costs = time_codecs(communicator, costs, coding, lambda *call: predict_coded(engine.schedules, *call))
    communicator.costs = costs
    return costs


def predict(costs: Costs | None, engine: Engine, numel: int, itemsize: int, compression: str | Codec | None) -> float:
    """See Communicator.predict()."""
    if costs is None:
        raise KeyError("links were not measured")
    if compression is None:
        return predict_auto(engine.schedules, costs, numel * itemsize, itemsize)
    return predict_coded(engine.schedules, costs, numel, make_codec(compression))


def _timed_algorithms(engine: Engine) -> list[str]:
    """Return the algorithms of allreduce to time: those with a planner, and those of the link's own that 'auto' may run."""
    schedules = engine.schedules
    usual = dict.fromkeys(rule.algorithm for rule in schedules.tables["allreduce"])
    own = [name for name in usual if name not in PLANNERS["allreduce"]]
    return [*planned("allreduce", schedules.algorithms("allreduce"), schedules.topology.hosts), *own]


def _choose_by(communicator: Communicator, engine: Engine, costs: Costs) -> None:
    schedules = engine.schedules
    names = {verb: schedules.algorithms(verb) for verb in schedules.tables}
    chooser = Chooser(costs, names, schedules.segment_bytes, schedules.usual, logs=engine.rank == 0)
    communicator.costs, communicator.measured = costs, chooser
    engine.choose_by(chooser.choose, costs.place(engine.rank))
