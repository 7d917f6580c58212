"""What befalls the network between simulated hosts: links that are cut, and that come back, and strangers who knock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench.hosts import link_shape

_LOSE = "root blackhole"  # a queue that says it has sent what it drops

#: The commands that cut a host off. A dead wire can be seen at a port or not at all; the other end must do without a sign.
CUTS = {
    "its port is down": ("{switch} ip link set {port} down",),
    "its interface is down": ("{host} ip link set eth0 down",),
    "all packets are lost": (
        f"{{switch}} tc qdisc replace dev {{port}} {_LOSE}",
        f"{{host}} tc qdisc replace dev eth0 {_LOSE}",
    ),
}
CUTS_ONE_WAY = {
    "what it is sent is lost": (f"{{switch}} tc qdisc replace dev {{port}} {_LOSE}",),
    "what it sends is lost": (f"{{host}} tc qdisc replace dev eth0 {_LOSE}",),
}
_MEND = (
    "{switch} ip link set {port} up",
    "{host} ip link set eth0 up",
    "{switch} tc qdisc replace dev {port} {shape}",
    "{host} tc qdisc replace dev eth0 {shape}",
)
_SCRIPT_S = 30.0


@dataclass(frozen=True)
class Network:
    """The network of one world, for its ranks to disturb. switch, hosts: the processes that hold their namespaces; on the last
    host lives no rank. rate: of its links."""

    switch: int
    hosts: tuple[int, ...]
    rate: str

    def cut(self, host: int, way: str) -> None:
        """Cut a host off, for good; way: of CUTS or CUTS_ONE_WAY."""
        _run(self._script(host, (CUTS | CUTS_ONE_WAY)[way]))

    def mend(self, host: int) -> None:
        """Undo whatever has been done to the link of a host."""
        _run(self._script(host, _MEND))

    def flap(self, host: int, way: str, times: int, seconds: float) -> None:
        """Cut a host off, and go on in the background, as long as this thread lives: each outage takes so many seconds, and there
        is half of that between two."""
        cut, mend = self._script(host, CUTS[way]), self._script(host, _MEND)
        _run(cut)
        rest = [f"sleep {seconds}\n{mend}"] * times
        subprocess.Popen(_dying_with_us("sh", "-ec", f"\nsleep {seconds / 2}\n{cut}\n".join(rest)))

    def let_strangers_in(self, hosts: int) -> None:
        """Have a process of the last host knock at all ports of so many others, as long as this thread lives; return once it
        has."""
        inside = ("nsenter", "--target", str(self.hosts[-1]), "--net", "--")
        knocking = (sys.executable, "-m", "tests.soak.strangers", *map(str, self.hosts[:hosts]))
        strangers = subprocess.Popen(_dying_with_us(*inside, *knocking), stdout=subprocess.PIPE)
        assert strangers.stdout is not None
        if not strangers.stdout.readline():
            raise RuntimeError("the strangers have left")

    def _script(self, host: int, commands: Sequence[str]) -> str:
        inside = "nsenter --target {} --net"
        words = {"switch": inside.format(self.switch), "host": inside.format(self.hosts[host])}
        return "\n".join(c.format(port=f"port0.{host}", shape=link_shape(self.rate), **words) for c in commands)


def _run(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True, timeout=_SCRIPT_S)


def _dying_with_us(*command: str) -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", *command]
