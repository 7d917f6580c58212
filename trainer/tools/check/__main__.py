"""Test whether this host can train, and print a line per test, with a remedy below each problem.

gradwire check                 test this host
gradwire check --listen        wait for the test of another host
gradwire check --host NAME     test this host, then the network to another host, on which --listen runs
gradwire check --hosts A,B,C   measure the networks between all pairs of hosts, which `gradwire run` must reach by ssh
torchrun ... -m gradwire check --hosts
                               the same, started on each host

The exit status is 0 if no test failed. Every wait has a deadline.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from gradwire.collectives.control.key import Key, key_from
from gradwire.collectives.environment import listening_ports
from gradwire.collectives.errors import LinkError
from gradwire.trainer.tools.check.links import links, listen
from gradwire.trainer.tools.check.machine import Finding, machine
from gradwire.trainer.tools.check.pairs import all_pairs, start_on
from gradwire.trainer.tools.check.ranks import two_ranks
from gradwire.trainer.world.launch import ALONE, read_launch

_LISTEN_S = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the tests that the arguments select, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="gradwire check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--host", help="the other host, on which `gradwire check --listen` runs")
    what.add_argument(
        "--hosts",
        nargs="?",
        const="",
        help="the hosts, separated by commas; none for those that a launcher has started",
    )
    what.add_argument("--listen", action="store_true", help=f"wait for another host, for {_LISTEN_S:g} s at most")
    parser.add_argument("--port", type=int, default=29500, help="the rendezvous port of a job (29500)")
    flags = parser.parse_args(arguments)
    if not 0 < flags.port < 1 << 16:
        parser.error(f"--port must be from 1 to 65535, not {flags.port}")
    try:
        listening_ports(os.environ)  # raises ValueError before any test
        key = key_from(os.environ)
        if flags.hosts:
            return start_on(flags.hosts, flags.port, key)
    except (ValueError, LinkError) as error:
        parser.error(str(error))
    if flags.hosts is not None:
        if read_launch(os.environ) is ALONE:
            parser.error(
                "--hosts without names measures between the ranks of a launcher, and there is none: give --hosts a,b,c"
            )
        found = all_pairs(flags.port, key)
    else:
        found = listen(flags.port, key, _LISTEN_S) if flags.listen else _checks(flags.host, flags.port, key)
    failed = 0
    for finding in found:
        print(finding, flush=True)
        failed += finding.state == "failed"
    if not flags.listen and flags.hosts is None:
        print(f"{failed} failed" if failed else "everything that gradwire needs works")
    return 1 if failed else 0


def _checks(host: str | None, port: int, key: Key | None) -> Iterator[Finding]:
    yield from machine(os.environ, host)
    yield from two_ranks()
    if host is not None:
        yield from links(host, port, key)


if __name__ == "__main__":
    sys.exit(main())
