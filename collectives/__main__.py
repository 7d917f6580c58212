"""Print, measure or compile what collectives use."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gradwire.collectives.communicator import Communicator
from gradwire.collectives.control.attempt import Attempt
from gradwire.collectives.control.key import Key, UnusableKey, key_of_process
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.environment import KEY_FILE, TABLE_PREFIX, TUNING
from gradwire.collectives.parsing import format_size
from gradwire.collectives.precompile import precompile
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.selection import Table
from gradwire.collectives.schedules.topology import host_id
from gradwire.collectives.tuning.cost_model import TuningError

_COMMANDS = {
    "info": "print versions, links, and the algorithm for each message size; under a launcher, those of all ranks",
    "tune": "measure the links between the ranks of a launcher, and write a file for COLLECTIVES_TUNING=FILE",
    "keygen": "write a new key to a file, with which gradwire encrypts its connections: GRADWIRE_KEY_FILE=FILE on all hosts",
    "precompile": "compile the kernels now instead of in the first run",
}

#: How long the ranks of a command may take to find each other.
_MEETING_S = 300.0


def _version(name: str) -> str:
    """Return the installed version of a package, or that it is not there. CuPy's wheels are named after the CUDA version."""
    wheels = importlib.metadata.packages_distributions().get(name, [name])
    try:
        return importlib.metadata.version(wheels[0])
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _range(table: Table) -> str:
    return ";".join(
        f"{rule.algorithm}:{format_size(rule.start)}-{'max' if rule.stop is None else format_size(rule.stop)}"
        for rule in table
    )


def _report(communicator: Communicator) -> str:
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    lines = [
        f"gradwire   {_version('gradwire')}",
        f"torch      {torch.__version__}, backends {', '.join(backends)}",
        f"numba      {_version('numba')}",
        f"cupy       {_version('cupy')}",
        f"GPUs       {', '.join(gpus) or 'none'}",
        f"ranks      {communicator.size}",
        *(f"host {i}     ranks {', '.join(map(str, host))}" for i, host in enumerate(communicator.topology.hosts)),
        f"key        {_key()}",
        *(f"link       rank {communicator.rank} to {route}" for route in communicator.routes),
        "",
        *_costs(communicator),
        "",
        f"algorithm by message size in bytes ('auto'), for {communicator.size} ranks"
        f"{'; start it under a launcher for more ranks' if communicator.size == 1 else ''}:",
    ]
    measured = communicator.measured
    for collective, table in communicator.tables.items():
        variable = TABLE_PREFIX + collective.upper()
        source = f"built in; {variable} overrides"
        if os.environ.get(variable):
            source = f"from {variable}"
        elif measured is not None:
            table, source = measured.table(collective), f"by the measured links; {variable} overrides"
        lines.append(f"  {collective:<15}{_range(table)}   ({source})")
    known = sorted({name for planners in PLANNERS.values() for name in planners})
    return "\n".join([*lines, "", f"algorithms known: {', '.join(known)}, shared, native"])


def _key() -> str:
    """Return whether connections are encrypted, as text."""
    try:
        if key_of_process() is None:
            return f"none: connections between hosts are not encrypted, see {KEY_FILE}"
    except UnusableKey as error:
        return f"unusable: {error}"
    return "connections between hosts are encrypted"


def _costs(communicator: Communicator) -> list[str]:
    """Return the measured links as lines to print."""
    costs = communicator.costs
    if costs is None:
        return [
            f"links      not measured; {TUNING}=1 measures them, and `gradwire tune --out FILE` saves a measurement"
        ]
    if costs.size == 1:
        return ["links      none: there is one rank"]
    if len(costs.hosts) == 1:
        link, rates, which = costs.inside, [costs.inside.byte_cpu_s], "inside the host"
    else:
        link, rates, which = costs.between, list(costs.uplinks), "between hosts, by host"
    rate = ", ".join(f"{1e-6 / byte_s:.0f}" for byte_s in rates if byte_s > 0) or "unknown"
    latency = f"{1e6 * link.latency_s:.0f} us" if link.latency_s >= 1e-6 else "below 1 us"
    return [f"links      {latency} a message, {rate} MB/s {which}", *costs.slow()]


def _tune(out: Path) -> None:
    os.environ[TUNING] = "0"  # the file that it names may be the one to be replaced
    with _communicator() as communicator:
        costs = communicator.tune()
        if communicator.rank == 0:
            out.write_text(costs.to_json())
            alone = "; for more ranks, start gradwire tune under a launcher" if communicator.size == 1 else ""
            saved = f"saved in {out}; to use it, copy it to every host and set {TUNING}={out}{alone}"
            print("\n".join([*_costs(communicator), saved]))


def _make_key(path: Path) -> None:
    try:
        Key.made().write(path)
    except OSError as error:
        raise SystemExit(f"gradwire keygen: {path}: {error.strerror}. Name a new file in a folder of yours") from None
    print(f"{path}: copy it to all hosts of one job, and set {KEY_FILE} there")


def _info() -> int:
    """Print the report of rank 0, and return the exit status: 1 if the key cannot be used."""
    with _communicator() as communicator:
        if communicator.rank == 0:
            print(_report(communicator))
    try:
        key_of_process()
    except UnusableKey:  # as the report says
        return 1
    return 0


def _communicator() -> Communicator:
    """Return a Communicator of the ranks that torchrun has started; without torchrun, of this process."""
    if "RANK" not in os.environ:
        return Communicator(Membership.alone(("cpu",), (0,)))
    store, rank, size = next(rendezvous("env://"))
    membership = Attempt(store, "gradwire", rank, tuple(range(size))).meet(("cpu",), host_id(), _MEETING_S)
    try:
        return Communicator(membership)
    finally:
        membership.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="gradwire", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == "tune":
            command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
        if name == "keygen":
            command.add_argument(
                "file", type=Path, metavar="FILE", help="a new file, which only you will be able to read"
            )
    flags = parser.parse_args()
    try:
        if flags.command == "tune":
            _tune(flags.out)
        elif flags.command == "keygen":
            _make_key(flags.file)
        else:
            raise SystemExit(_info() if flags.command == "info" else precompile())
    except TuningError as error:
        print(f"gradwire {flags.command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except UnusableKey as error:  # of several ranks, which do not meet
        raise SystemExit(f"gradwire {flags.command}: {error}") from None


if __name__ == "__main__":
    main()
