"""The flags of `gradwire run`, which are those of horovodrun, and the job that they describe."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from gradwire.collectives.control.key import Key, key_from
from gradwire.trainer.launcher.hosts import Host, parse_hosts, place, read_hostfile

DESCRIPTION = """\
Start a training script on several processes, on this host and, by ssh, on other hosts.

gradwire run -np 4 train.py --lr 0.1            four ranks on this host
gradwire run -np 4 -H a:2,b:2 train.py          two ranks on each of two hosts; ssh must need no password
gradwire run -np 2 -m gradwire.bench train
gradwire run --min-np 2 -np 4 train.py          elastic: continues with at least two ranks, and replaces lost ranks

Every host needs the same folder, the same script and the same Python, at the same paths. The other hosts get the environment
variables that begin with COLLECTIVES_, GLOO_, HOROVOD_ or NCCL_ (except COLLECTIVES_HOST_ID), PATH, PYTHONPATH,
LD_LIBRARY_PATH, VIRTUAL_ENV, OMP_NUM_THREADS, and those named by -x.
"""

#: Flags of horovodrun that have no effect here: flags without a value, and flags with one.
_SWITCHES = """
--autotune --no-autotune --disable-cache --gloo --hierarchical-allgather --no-hierarchical-allgather --hierarchical-allreduce
--no-hierarchical-allreduce --mpi-threads-disable --no-mpi-threads-disable --tcp
"""
_VALUES = """
--autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --autotune-log-file --autotune-steps-per-sample
--autotune-warmup-samples --binding-args --cache-capacity --cycle-time-ms --gloo-timeout-seconds --num-nccl-streams
--thread-affinity
"""

#: Flags of horovodrun that are not supported, and what to do instead.
_MPI = "to start ranks by MPI, write mpirun -n 4 python train.py: gradwire.init() works under mpirun too"
_SLOTS = "have the discovery script print host:slots; a host without a number has one slot"
_REFUSED = {
    **dict.fromkeys(("--mpi", "--mpi-args", "--jsrun"), _MPI),
    **dict.fromkeys(("--slots-per-host", "--slots"), _SLOTS),
    "--blacklist-cooldown-range": "a lost host is used again after 10 seconds; each further loss doubles this pause, up to 120 s",
    "--config-file": "write its settings as flags",
}


@dataclass(frozen=True)
class Elastic:
    """Describes how the number of ranks may change while a job runs.

    min_ranks: fewer ranks wait for others. ranks: the number at the start. max_ranks: the launcher starts no more than
    these. For both, None means the number of slots. discovery_script: prints the hosts; None if they do not change.
    reset_limit: how many generations may follow the first; None: any number. timeout_s: how long ranks wait for the next
    generation.
    """

    min_ranks: int = 1
    ranks: int | None = None
    max_ranks: int | None = None
    discovery_script: Path | None = None
    reset_limit: int | None = None
    timeout_s: int = 600


@dataclass(frozen=True)
class Job:
    """Describes a job: the command of every rank, the hosts, and how to connect to them.

    settings: environment variables for all ranks. names: the names of further variables that other hosts get.
    master_port: the rendezvous port; None: the default port. elastic: None if the number of ranks is fixed. key: with which the
    connections of the ranks are encrypted, or None.
    """

    command: list[str]
    hosts: list[Host]
    settings: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    master_port: int | None = None
    start_timeout_s: int = 30
    output_folder: Path | None = None
    verbose: bool = False
    notice: str | None = None
    elastic: Elastic | None = None
    key: Key | None = None


def parse_job(arguments: list[str]) -> Job:
    """Return the job that the arguments of `gradwire run` describe. If they are wrong, exit with status 2 and a message."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    if not command or command[0].startswith("-"):
        unknown = f"there is no flag {command[0]}" if command else "no command is given"
        parser.error(f"{unknown}: gradwire run -np 4 train.py")
    try:
        elastic = _elastic(flags)
        hosts = _hosts(flags, elastic)
        settings = _settings(flags)
        key = key_from({**os.environ, **settings}) or (Key.made() if flags.private else None)
    except ValueError as error:
        parser.error(str(error))
    ignored = ", ".join(flags.without_meaning)
    return Job(
        command=_full_command(command, is_module=flags.module),
        hosts=hosts,
        settings=settings,
        names=[entry for entry in flags.export if "=" not in entry],
        ssh_port=flags.ssh_port,
        ssh_identity_file=flags.ssh_identity_file,
        master_port=flags.master_port,
        start_timeout_s=flags.start_timeout,
        output_folder=flags.output_filename,
        verbose=flags.verbose,
        notice=f"gradwire: ignored, since they have no effect here: {ignored}" if ignored else None,
        elastic=elastic,
        key=key,
    )


def _elastic(flags: argparse.Namespace) -> Elastic | None:
    """Return how the number of ranks may change; None if no flag of elastic jobs is given. Raises ValueError."""
    given = (flags.min_np, flags.max_np, flags.host_discovery_script, flags.reset_limit, flags.elastic_timeout)
    if not flags.elastic and all(value is None for value in given):
        return None
    least, ranks, most = flags.min_np or 1, flags.num_proc, flags.max_np or flags.num_proc
    if ranks is not None and not least <= ranks <= most:
        raise ValueError(f"-np {ranks} must be from --min-np {least} to --max-np {most}")
    if most is not None and most < least:
        raise ValueError(f"--max-np {most} is less than --min-np {least}")
    script = flags.host_discovery_script
    timeout_s = Elastic.timeout_s if flags.elastic_timeout is None else flags.elastic_timeout
    return Elastic(least, ranks, most, script, flags.reset_limit, timeout_s)


def _hosts(flags: argparse.Namespace, elastic: Elastic | None) -> list[Host]:
    """Return the hosts that flags name, each with its ranks, or in an elastic job with all its slots. Return no hosts if there
    is a discovery script. Raises ValueError."""
    named = {"-H": flags.hosts, "--hostfile": flags.hostfile, "--host-discovery-script": flags.host_discovery_script}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both name hosts: give only one of them")
    if given == ["--host-discovery-script"]:
        return []
    if flags.hosts is not None:
        slots = parse_hosts(flags.hosts)
    elif flags.hostfile is not None:
        slots = read_hostfile(flags.hostfile)
    elif flags.num_proc is None:
        raise ValueError("how many ranks? Give -np, or hosts with their slots: -np 4, -H a:2,b:2")
    else:
        slots = {"localhost": flags.num_proc}
    hosts = place(flags.num_proc, slots)
    if elastic is None:
        return hosts
    if elastic.min_ranks > (total := sum(slots.values())):
        raise ValueError(f"--min-np {elastic.min_ranks} is more than the {total} slots of all hosts")
    return place(None, slots)


def _full_command(command: list[str], *, is_module: bool) -> list[str]:
    """Return the command of a rank. This Python runs a .py file or a module; anything else is a command already."""
    if is_module:
        return [sys.executable, "-m", *command]
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _settings(flags: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the flags set: those whose destination is a variable, and those of -x."""
    settings = {name: str(value) for name, value in vars(flags).items() if name.isupper() and value is not None}
    given = dict(entry.split("=", 1) for entry in flags.export if "=" in entry)
    if wrong := next((name for name in given if not name.isidentifier()), None):
        raise ValueError(f"-x {wrong}=...: {wrong!r} is not a name of a variable")
    return settings | given


class _WithoutMeaning(argparse.Action):
    """Collects the flags that have no effect."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        assert isinstance(namespace, argparse.Namespace)
        namespace.without_meaning = [*namespace.without_meaning, option_string]


class _UnsupportedFlag(argparse.Action):
    """Exits with the reason why a flag is not supported."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        assert option_string is not None
        parser.error(f"{option_string} is not supported: {_REFUSED[option_string]}")


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a function that converts the value of a flag to a whole number, or to a port if `most` is given."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            wanted = f"a whole number from {least} on" if most is None else f"a port from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text}")
        return int(text)

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire run",
        usage="gradwire run -np N [-H a:2,b:2 | --hostfile FILE] [flags] train.py ...",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, number, port, hidden = parser.add_argument, _whole(1), _whole(1, 65535), argparse.SUPPRESS
    add("-np", "--num-proc", type=number, metavar="N", help="number of ranks (default: all slots of the hosts)")
    add("-H", "--hosts", metavar="a:2,b:2", help="hosts, each with its maximum number of ranks")
    a_file = "a file with the hosts, one per line: 'a slots=2'"
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help=a_file)
    add("-m", "--module", action="store_true", help="run a Python module")
    add("-p", "--ssh-port", type=port, metavar="PORT", help="ssh's port on all hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")
    add("-x", "--export", action="append", default=[], metavar="NAME[=VALUE]", help="pass a variable to all hosts")
    ports = "rendezvous port of a job on several hosts (29500), or of an elastic job (a free port of this host)"
    add("--master-port", type=port, metavar="PORT", help=ports)
    answer = "seconds in which every other host must answer by ssh (30)"
    add("--start-timeout", type=number, default=30, metavar="S", help=answer)
    encrypts = "encrypt the connections of the ranks, with a new key or that of GRADWIRE_KEY_FILE"
    add("--private", action="store_true", help=encrypts)
    folder = "also write the output of ranks: stdout and stderr in DIR/rank.0, ..."
    add("--output-filename", type=Path, metavar="DIR", help=folder)
    add("--verbose", action="store_true", help="print the commands, and the output of agents and ssh")

    def sets(flag: str, variable: str, metavar: str, help: str, convert: Callable[[str], object] = str) -> None:
        add(flag, dest=variable, type=convert, metavar=metavar, help=help)

    def switch(flag: str, variable: str, value: str | None, help: str) -> None:
        add(flag, dest=variable, action="store_const", const=value, help=help)

    stall, cycles, megabytes = "HOROVOD_STALL", "HOROVOD_TIMELINE_MARK_CYCLES", lambda text: _whole(0)(text) << 20
    sets(
        "--network-interfaces", "GLOO_SOCKET_IFNAME", "NAME", "the network interface between hosts (GLOO_SOCKET_IFNAME)"
    )
    sets("--timeline-filename", "HOROVOD_TIMELINE", "FILE", "record a timeline (HOROVOD_TIMELINE)")
    switch("--timeline-mark-cycles", cycles, "1", "mark the start of each exchange")
    switch("--no-timeline-mark-cycles", cycles, None, hidden)
    sets("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", "MB", "the size of buckets", megabytes)
    switch("--no-stall-check", f"{stall}_CHECK_DISABLE", "1", "do not warn about ranks that wait for a long time")
    switch("--stall-check", f"{stall}_CHECK_DISABLE", None, hidden)
    late, never = (
        "seconds after which a wait logs a warning",
        "seconds after which a wait raises an error; 0: only at its timeout",
    )
    sets("--stall-check-warning-time-seconds", f"{stall}_CHECK_TIME_SECONDS", "S", late, number)
    sets("--stall-check-shutdown-time-seconds", f"{stall}_SHUTDOWN_TIME_SECONDS", "S", never, _whole(0))
    levels = ["trace", "debug", "info", "warning", "error", "fatal"]
    said = f"one of {', '.join(levels)}"
    add("--log-level", dest="HOROVOD_LOG_LEVEL", type=str.lower, choices=levels, metavar="LEVEL", help=said)

    about = "When ranks are lost, the others continue. Any of these flags makes a job elastic."
    add = parser.add_argument_group("elastic jobs", about).add_argument
    least, most = ("--min-np", "--min-num-proc", "--min"), ("--max-np", "--max-num-proc", "--max")
    add("--elastic", action="store_true", help="the same as --min-np 1")
    add(*least, type=number, metavar="N", help="the least number of ranks that continue (1)")
    add(*most, type=number, metavar="N", help="the largest number of ranks (default: -np)")
    script = "a program that prints a line 'a' or 'a:2' for each host; it runs every second"
    add("--host-discovery-script", type=Path, metavar="FILE", help=script)
    add("--reset-limit", type=_whole(0), metavar="N", help="how often the ranks may change (default: any number)")
    again = f"seconds in which --min-np ranks must be available again ({Elastic.timeout_s})"
    add("--elastic-timeout", type=number, metavar="S", help=again)

    add = parser.add_argument
    add("command", nargs=argparse.REMAINDER, help=hidden)
    parser.set_defaults(without_meaning=[])
    add(*_SWITCHES.split(), nargs=0, dest="without_meaning", action=_WithoutMeaning, help=hidden)
    add(*_VALUES.split(), dest="without_meaning", action=_WithoutMeaning, help=hidden)
    add(*_REFUSED, nargs="?", dest="refused", action=_UnsupportedFlag, help=hidden)
    return parser
