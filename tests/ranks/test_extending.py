"""docs/extending.md and its link as they stand: what they add can be used by name, and what cannot be added is refused."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import gradwire as hvd
from gradwire.collectives import Communicator, register_algorithm, register_codec, register_link
from gradwire.collectives.compression import CODECS, Codec, Int8
from gradwire.collectives.environment import LINK
from gradwire.collectives.errors import CollectiveError
from gradwire.collectives.schedules.algorithms import PLANNERS, ring
from gradwire.collectives.transports import Membership, Transport
from gradwire.collectives.transports.process_group import ProcessGroupTransport
from gradwire.collectives.transports.registry import LINKS
from gradwire.collectives.transports.routing import auto
from gradwire.collectives.transports.shared_memory.group import LocalGroup
from tests.harness import EXCHANGE_TIMEOUT_S
from tests.ranks.exact import SEVERAL_SEGMENTS, contribution, reduced
from tests.ranks.training import assert_same_on_all_ranks, on_ranks

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LINK_EXAMPLE = DOCS / "extending.md", DOCS / "examples" / "files_link.py"


@functools.cache
def examples() -> dict[str, Any]:
    """Run the page's blocks and its link, once in a process, each as a module of its own, and return all that they define."""
    defined: dict[str, Any] = {}
    for block in (*re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL), LINK_EXAMPLE.read_text()):
        names: dict[str, Any] = {"__name__": __name__}  # dataclasses look for their module
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
        defined |= names
    return defined


@on_ranks(2, initialized=False)
def test_the_codec_of_the_page_refuses_settings_and_is_bound_as_it_says() -> None:
    hundredths = examples()["Hundredths"]
    for levels in (0, 128):
        with pytest.raises(ValueError, match=f"hundredths: levels must be from 1 to 127, .* not {levels}"):
            hundredths(levels=levels)
    wire, loud = torch.zeros(7, dtype=torch.uint8), torch.tensor([1.0, -1.0, 0.5])
    out = torch.empty_like(loud)
    most = hundredths(levels=127)
    most.encode(loud, wire)
    most.decode(wire, out)
    assert torch.allclose(out, loud, atol=1 / 127)
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        said = "'hundredths' does not support the algorithm 'ring'; allowed are auto, two_shot$"
        with pytest.raises(ValueError, match=said):
            comm.allreduce(torch.ones(64), compression="hundredths", algorithm="ring")


@on_ranks(1, 3)
def test_the_codec_of_the_page_in_training() -> None:
    """It needs error feedback, which therefore keeps the sum of all steps right, and is saved."""
    examples()
    weights = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), compression="hundredths")
    gradient = torch.linspace(-1.0, 1.0, weights.numel()).view_as(weights)
    for _ in range(20):
        optimizer.zero_grad()
        (weights * gradient * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    mean = (hvd.size() + 1) / 2
    assert torch.allclose(weights, -20 * mean * gradient, atol=0.1)
    assert any("worker" in bucket["tensors"] for bucket in optimizer.state_dict()["gradwire"]["buckets"])
    assert_same_on_all_ranks([weights])


@on_ranks(1, 3, initialized=False)
def test_the_link_and_the_algorithm_of_the_page() -> None:
    """By every way to name it, for every algorithm of allreduce, and for every verb's messages."""
    examples()
    assert "star" in PLANNERS["allreduce"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LINK, "files")
        by_environment = Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=200)
    by_argument = Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=200, link="files")
    for comm in (by_environment, by_argument):
        with comm:
            assert not comm.shares_memory
            assert comm.algorithms("allreduce") == tuple(PLANNERS["allreduce"]), "it does nothing by itself"
            for algorithm in (*PLANNERS["allreduce"], "auto"):
                tensor = contribution(comm.rank, comm.size, SEVERAL_SEGMENTS, torch.float32)
                comm.allreduce(tensor, algorithm=algorithm)
                assert torch.equal(tensor, reduced(comm.size, SEVERAL_SEGMENTS, torch.float32))
            assert comm.allgather_object(comm.rank) == list(range(comm.size))
            comm.barrier()


@on_ranks(3, initialized=False)
def test_ranks_that_name_different_links() -> None:
    examples()
    rank = dist.get_rank()
    said = f"rank {rank}: .*link='files', segment_bytes=None on rank 0; link='process_group', .* on ranks 1, 2"
    with pytest.raises(ValueError, match=said):
        Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="files" if rank == 0 else "process_group")
    with pytest.raises(ValueError, match="no link is called 'fils'; known are auto, process_group, tcp, files"):
        Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="fils")
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        comm.barrier()


@on_ranks(2, initialized=False)
def test_a_link_that_returns_no_transport() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LINKS, "hollow", lambda membership, timeout_s: None)
        with pytest.raises(TypeError, match=f"rank {dist.get_rank()}: link 'hollow' returned None; a Transport is"):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="hollow")


@contextmanager
def nothing_stays_connected() -> Iterator[None]:
    """What is made inside leaves no thread alive but the Monitor's, which ranks that have met keep."""
    Communicator(timeout_s=EXCHANGE_TIMEOUT_S).close()
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(EXCHANGE_TIMEOUT_S)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(("ranks_off", "size_off"), [(1, 0), (0, 1)])
@on_ranks(2, initialized=False)
def test_a_link_that_returns_a_transport_of_others(ranks_off: int, size_off: int) -> None:
    closed = []

    class Strange(ProcessGroupTransport):
        def close(self) -> None:
            super().close()
            closed.append(self)

    def strange(membership: Membership, timeout_s: float) -> Transport:
        transport = Strange(membership, timeout_s)
        transport.connect(time.monotonic() + timeout_s)
        transport.rank += ranks_off
        transport.size += size_off
        return transport

    here = dist.get_rank()
    said = rf"rank {here}: link 'strange' .* rank {here + ranks_off} of {2 + size_off}; .* rank {here} of 2 is needed"
    with pytest.MonkeyPatch.context() as patch, nothing_stays_connected():
        patch.setitem(LINKS, "strange", strange)
        with pytest.raises(ValueError, match=said):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="strange")
    assert len(closed) == 1


@pytest.mark.parametrize(
    "where",
    [
        "gradwire.collectives.communicator.default_segment_bytes",
        "gradwire.collectives.communicator.Engine",
        "gradwire.collectives.transports.routing.join_host",
        "gradwire.collectives.transports.routing.RoutingTransport",
    ],
)
@on_ranks(2, initialized=False)
def test_what_fails_midway_stays_not_connected(where: str) -> None:
    """After the link has connected the ranks; and inside the link `auto`, at each of its steps."""
    open_ones: list[object] = []
    with pytest.MonkeyPatch.context() as patch, nothing_stays_connected():
        for kind in (ProcessGroupTransport, LocalGroup):
            made, close = kind.__init__, kind.close

            def noted(self: Any, *arguments: Any, made: Any = made, **options: Any) -> None:
                made(self, *arguments, **options)
                open_ones.append(self)

            def ended(self: Any, close: Any = close) -> None:
                close(self)
                if self in open_ones:
                    open_ones.remove(self)

            patch.setattr(kind, "__init__", noted)
            patch.setattr(kind, "close", ended)

        def fail(*arguments: Any, **options: Any) -> None:
            raise MemoryError("no room")

        patch.setattr(where, fail)
        with pytest.raises((MemoryError, CollectiveError), match="no room"):  # of this rank, or as another reports it
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
        assert not open_ones


@on_ranks(2)
def test_the_rule_of_the_page() -> None:
    """Ranks go their own ways for two steps, then on from the mean; so do those that have loaded a checkpoint."""
    local_sgd = examples()["local_sgd"]
    weight, added = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = local_sgd([weight], 2)
    optimizer.add_param_group({"params": [added]})
    mine, mean = 1.0 + hvd.rank(), (hvd.size() + 1) / 2
    seen = []
    for step in range(6):
        if step == 3:
            saved = optimizer.state_dict()
            optimizer.close()
            optimizer = local_sgd([weight], 2)
            optimizer.add_param_group({"params": [added]})
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        ((weight + 2 * added).sum() * mine).backward()
        optimizer.step()
        assert torch.equal(added, 2 * weight)
        seen += weight[:1].tolist()
    alone, together = -mine / 2, -mean
    assert seen == [alone, together, together + alone, 2 * together, 2 * together + alone, 3 * together]
    optimizer.step(lambda: weight.sum() * mine)
    assert optimizer.communication_wait_s == 0.0
    optimizer.close()
    without_the_rule = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.25))
    without_the_rule.close()
    optimizer = local_sgd([weight], 2)
    optimizer.load_state_dict(without_the_rule.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.state_dict()["gradwire_local_sgd"] == 0
    optimizer.close()


@dataclass(frozen=True)
class Nameless(Int8):
    name: ClassVar[str] = "No Name"


@dataclass(frozen=True)
class Needy(Int8):
    name: ClassVar[str] = "needy"
    depth: int = 0

    def __init__(self, depth: int) -> None:
        object.__setattr__(self, "depth", depth)


class TooEarly(Codec):
    """Has been given to register_codec by the inner of two decorators."""

    name: ClassVar[str] = "too_early"


class WritesOnly(Codec):
    def wire_bytes(self, numel: int) -> int:
        return numel

    def _encode(self, *args: Any) -> None:
        """Write nothing."""


@dataclass(frozen=True)
class Half(WritesOnly):
    name: ClassVar[str] = "half"


@dataclass
class Thawed(WritesOnly):
    name: ClassVar[str] = "thawed"

    def _decode(self, *args: Any) -> None:
        """Read nothing."""


@dataclass(frozen=True)
class Anonymous(Codec):
    levels: int = 1


@dataclass(frozen=True)
class NamedByASetting(Codec):
    name: str = "a_setting"  # type: ignore[misc]


_ALGORITHM = functools.partial(register_algorithm, "allreduce")


@pytest.mark.parametrize(
    ("register", "arguments", "error"),
    [
        (register_link, ("auto", auto), ValueError),
        (register_link, ("My Link", auto), ValueError),
        (register_link, ("mine", "auto"), TypeError),
        (register_codec, (Int8,), ValueError),
        (register_codec, (Nameless,), ValueError),
        *((register_codec, (kind,), TypeError) for kind in (Needy, TooEarly, Thawed, Half)),
        *((register_codec, (kind,), TypeError) for kind in (Anonymous, NamedByASetting, Codec, "int8")),
        (register_algorithm, ("dance", "star", ring.allreduce), ValueError),
        *((_ALGORITHM, (name, ring.allreduce), ValueError) for name in ("ring", "auto", "my ring")),
        (_ALGORITHM, ("star", "ring"), TypeError),
    ],
)
def test_what_cannot_be_registered(
    register: Callable[..., object], arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    before = {**LINKS}, {**CODECS}, {**PLANNERS["allreduce"]}
    given = arguments[0]
    named = given if isinstance(given, str) else rf"{getattr(given, 'name', '-')}|{given.__name__}"
    with pytest.raises(error, match=named):
        register(*arguments)
    assert before == (LINKS, CODECS, PLANNERS["allreduce"])
