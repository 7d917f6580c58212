"""A rank that ends, stops, or cannot connect while ranks meet: the others know which, at once where they can."""

import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.control.channel import Channel
from gradwire.collectives.errors import LinkError
from gradwire.collectives.transports import Membership
from gradwire.trainer.world.jobs import OneJob
from gradwire.trainer.world.launch import Launch, read_launch
from gradwire.trainer.world.meeting import _reach
from gradwire.trainer.world.world import start_torch_distributed
from tests.harness import EXCHANGE_TIMEOUT_S, World, wide_rows
from tests.interpreter import python
from tests.pages import ROOT
from tests.ports import unused_port
from tests.ranks.programs import start
from tests.soak.faults import KILLED, STOPPED
from tests.soak.meetings import (
    COMMUNICATOR,
    INIT,
    NO_DESCRIPTORS,
    NO_THREADS,
    RAISES,
    MeetingFault,
    come_together,
    is_known_at_once,
    prepare_init,
)
from tests.soak.ranks import failed_at_file, report_file
from tests.soak.verdict import judge_meeting

DEADLINE_S = 60.0
AFTER = 1_000_000  # more calls than a rank makes: it fails when the ranks have met


def judged(world: World, directory: Path, fault: MeetingFault) -> list[str]:
    """Run a fault, and return what was wrong with what the others were told."""
    world.start(come_together, fault, directory)
    outcomes = world.collect(DEADLINE_S, ranks=fault.survivors)
    if fault.kind != STOPPED:
        outcomes += world.collect(DEADLINE_S, ranks=[fault.victim])
    reports = {r: pickle.loads(p.read_bytes()) for r in fault.survivors if (p := report_file(directory, r)).exists()}
    failed_at = float(failed_at_file(directory).read_text())
    arrived = is_known_at_once(fault, directory)
    return [str(finding) for finding in judge_meeting(fault, outcomes, reports, failed_at, arrived)]


@pytest.mark.parametrize(
    ("kind", "position", "place", "victim"),
    [
        (KILLED, 150, INIT, 0),
        (KILLED, 150, COMMUNICATOR, 2),
        (STOPPED, 250, INIT, 0),
        (NO_THREADS, 10, COMMUNICATOR, 0),
        (RAISES, 10, COMMUNICATOR, 1),
        (NO_DESCRIPTORS, 220, INIT, 0),
        *wide_rows(
            (KILLED, AFTER, INIT, 2),
            (KILLED, AFTER, COMMUNICATOR, 0),
            (STOPPED, 250, COMMUNICATOR, 2),
            (NO_THREADS, 10, INIT, 2),
            (RAISES, 250, INIT, 2),
            (NO_DESCRIPTORS, 150, COMMUNICATOR, 2),
        ),
    ],
)
def test_who_fails_while_ranks_meet_is_named(
    failing_world: Callable[[int], World], tmp_path: Path, kind: str, position: int, place: str, victim: int
) -> None:
    """A rank is killed only once it has arrived: before, the others cannot know of it but by their deadline, as of one that has
    stopped. The soak draws the rank, the place and the moment."""
    fault = MeetingFault(0, "shared_memory", victim, 3, victim, kind, place, position)
    assert judged(failing_world(3), tmp_path, fault) == []


def meet_again() -> None:
    """Fail on rank 1 in the last moment of the first meeting, when rank 0 has met."""
    exchange, here = Channel.exchange, dist.get_rank()

    def fail(channel: Channel, topic: str, *arguments: Any, **options: Any) -> list[Any]:
        records = exchange(channel, topic, *arguments, **options)
        if here == 1 and topic == "met":
            raise LinkError(None, timed_out=False, detail="too late")
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "exchange", fail)
        with pytest.raises(CollectiveError):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as again:
        assert again.allgather_record(here) == [0, 1]


def test_ranks_meet_again_after_a_meeting_that_has_failed_on_some_of_them(
    failing_world: Callable[[int], World],
) -> None:
    failing_world(2).run(meet_again)


def with_interface(
    place: str, culprits: tuple[int, ...], variable: str, interface: str, directory: Path
) -> tuple[str, str, tuple[int, ...]]:
    """Meet as ranks on different machines do, some of which are told to use a wrong interface; return the error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("gradwire.trainer.world.meeting", "gradwire.collectives.control.attempt"):
            patch.setattr(f"{module}.machine_id", lambda: f"machine {rank}")
        if rank in culprits:
            patch.setenv(variable, interface)
        else:
            patch.setattr("gradwire.collectives.control.own_address._loopback", lambda *_: "")
        if place == INIT:
            prepare_init("interfaces", rank, size, directory)
        try:
            hvd.init(timeout_s=EXCHANGE_TIMEOUT_S) if place == INIT else Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
        except CollectiveError as error:
            return type(error).__name__, str(error), error.ranks
    raise AssertionError("the ranks met")


@pytest.mark.parametrize(
    ("place", "culprits", "variable", "interface"),
    [
        (INIT, (0,), "COLLECTIVES_INTERFACE", "lo"),
        (COMMUNICATOR, (1,), "COLLECTIVES_INTERFACE", "lo"),
        (INIT, (0, 1), "GLOO_SOCKET_IFNAME", "lo"),
        (COMMUNICATOR, (0,), "GLOO_SOCKET_IFNAME", "eth99"),
        (INIT, (1,), "COLLECTIVES_INTERFACE", "eth99"),
    ],
)
def test_a_wrong_interface_is_found_before_anyone_waits_for_it(
    failing_world: Callable[[int], World],
    tmp_path: Path,
    place: str,
    culprits: tuple[int, ...],
    variable: str,
    interface: str,
) -> None:
    """Not by the deadline, which would be a CollectiveTimeout. Where several ranks have one, a rank may name any of them."""
    said = f"{variable}=lo names a loopback interface, which other hosts do not"
    if interface != "lo":
        said = f"{variable}='eth99' names no interface with an address"
    for kind, text, named in failing_world(2).run(with_interface, place, culprits, variable, interface, tmp_path):
        assert kind == "CollectiveError", text
        assert named, text
        assert set(named) <= set(culprits), text
        for part in (said, f"on host {socket.gethostname()}", "interfaces here are ", "lo (127.0.0.1)"):
            assert part in text


JOB = """
import os, sys, time
from pathlib import Path
import gradwire as hvd
job, folder = sys.argv[1], Path(sys.argv[2])
place = ["A0", "B1", "A1", "B0"].index(job + os.environ["RANK"])
(folder / str(place)).touch()
ready_by = time.monotonic() + 60
while len(list(folder.iterdir())) < 4 and time.monotonic() < ready_by:  # importing takes longer than the coordinator waits
    time.sleep(0.01)
time.sleep(0.2 * place)  # they arrive in this order, within the second that the coordinator waits
hvd.init(timeout_s=30)
print("job", hvd.broadcast_object(job, 0), "of", job, flush=True)
"""


def test_two_jobs_at_one_port(tmp_path: Path) -> None:
    """Rank 1 of the second job comes before that of the first: nothing but the commands tells them apart, which is enough for the
    ranks of the first to find each other; those of the second are told whose port it is."""
    port = str(unused_port())
    started = {}
    for rank, job in ((0, "A"), (1, "B"), (1, "A"), (0, "B")):
        meeting = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started[rank, job] = start([python(), "-c", JOB, job, str(tmp_path)], ROOT, **meeting)
    said = {who: process.communicate(timeout=DEADLINE_S)[0] for who, process in started.items()}
    everything = "\n".join(f"rank {rank} of job {job}: {text}" for (rank, job), text in said.items())
    assert not re.search("job (A of B|B of A)", everything), everything
    winners = {job for (_, job), process in started.items() if process.returncode == 0}
    assert len(winners) == 1, everything
    for (_, job), text in said.items():
        if job not in winners:
            assert "CollectiveError" in text
            assert f"is a stranger to the job that meets at 127.0.0.1:{port}" in text


def test_a_process_that_cannot_be_told_apart_stops_all() -> None:
    """Two processes that claim one rank before all have arrived, both like rank 0's."""
    admission = OneJob(card(0), "node:1")
    verdict = admission.judge(card(1, pid=11), {0: card(0), 1: card(1, pid=12)}, is_complete=False)
    assert verdict.fatal is not None
    assert verdict.fatal.ranks == (1,)
    for pid in ("process 11", "process 12"):
        assert pid in verdict.fatal.why


def test_who_is_less_like_rank_0_is_turned_away() -> None:
    admission, mine, theirs = OneJob(card(0), "node:1"), card(1, pid=11), card(1, pid=12, command=["other.py"])
    assert admission.judge(theirs, {0: card(0), 1: mine}, is_complete=False).refused
    first = admission.judge(mine, {0: card(0), 1: theirs}, is_complete=False)
    assert (first.refused, set(first.evicted or {})) == (None, {1})
    rank_0 = admission.judge(card(0, pid=13, command=["other.py"]), {0: card(0), 1: theirs}, is_complete=False)
    assert (bool(rank_0.refused), set(rank_0.evicted or {})) == (True, {1})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runs": {"SLURM_JOB_ID": "8"}}, "its SLURM_JOB_ID is 8, and not 7"),
        ({"launcher": [5, 2]}, "another torchrun has started it"),
    ],
)
def test_a_stranger_is_known_at_once(given: dict[str, Any], said: str) -> None:
    first = card(0, runs={"SLURM_JOB_ID": "7"}, by_agent=True, launcher=[5, 1])
    stranger = card(1, **{"runs": {}, "by_agent": True, "launcher": [5, 1]} | given)
    assert said in (OneJob(first, "node:1").judge(stranger, {0: first}, is_complete=False).refused or "")


def test_only_what_proves_nothing_waits_for_rivals() -> None:
    """A run's id proves that processes belong together, and so does torchrun's agent on one host."""
    for proof in ({"runs": {"SLURM_JOB_ID": "7"}}, {"by_agent": True, "launcher": [5, 1]}):
        assert OneJob(card(0, **proof), "").settle_s({0: card(0, **proof), 1: card(1, **proof)}) == 0
    assert OneJob(card(0), "").settle_s({0: card(0), 1: card(1)}) > 0


def card(rank: int, pid: int = 0, **identity: Any) -> dict[str, Any]:
    defaults = {"runs": {}, "by_agent": False, "node": "", "launcher": None, "command": ["train.py"], "environment": ""}
    return {"rank": rank, "machine": "m", "identity": {**defaults, "process": ["host", pid or 1 + rank, 0], **identity}}


def keep_no_meeting(directory: Path) -> None:
    """Rank 0 is done before rank 1 is, and keeps nothing of the meeting."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prepare_init("keeps nothing", rank, size, directory)
    make_group = dist.init_process_group

    def make_group_late(*args: Any, **kwargs: Any) -> None:
        make_group(*args, **kwargs)
        time.sleep(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", make_group_late)
        start_torch_distributed(read_launch(os.environ), EXCHANGE_TIMEOUT_S)
    dist.barrier()


def test_who_leaves_first_is_missed_by_nobody(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    failing_world(2).run(keep_no_meeting, tmp_path)


def fail_after_the_group(directory: Path) -> None:
    """Do not find the other rank, once torch.distributed is initialized."""
    prepare_init("fails", dist.get_rank(), dist.get_world_size(), directory)

    def fails(*_: Any) -> None:
        raise LinkError(None, timed_out=False, detail="its own")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "everyones", fails)
        with pytest.raises(CollectiveError, match="its own"):
            start_torch_distributed(read_launch(os.environ), EXCHANGE_TIMEOUT_S)
    assert not dist.is_initialized()


def test_a_meeting_that_fails_leaves_no_group(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    failing_world(2).run(fail_after_the_group, tmp_path)


def test_a_store_that_has_ended_is_not_waited_for() -> None:
    """Rank 0 has ended between this rank's first sight of it and its connection to the store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        thread = threading.Thread(target=lambda: (server.accept()[0].close(), server.close()))
        thread.start()
        with pytest.raises(LinkError, match="the process that listened there, that of rank 0, has ended") as caught:
            _reach(Launch("torchrun", 1, 2, None, None), "127.0.0.1", port, time.monotonic() + DEADLINE_S)
        thread.join()
    assert caught.value.ended
    assert caught.value.awaited == {0}


def come_twice(place: str, wrong: tuple[int, ...], directory: Path) -> tuple[str, str, tuple[int, ...]]:
    """Come with a wrong setting of some ranks, return the error, and come again without it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if place == INIT:
        prepare_init("withdraws", rank, size, directory)
    timeout_s = EXCHANGE_TIMEOUT_S
    with pytest.MonkeyPatch.context() as patch:
        if rank in wrong:
            patch.setenv("COLLECTIVES_SHARED_MEMORY", "perhaps")
        with pytest.raises((ValueError, CollectiveError)) as caught:
            hvd.init(timeout_s=timeout_s) if place == INIT else Communicator(timeout_s=timeout_s)
    if place == INIT:
        hvd.init(timeout_s=timeout_s)
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
        hvd.shutdown()
    else:
        with Communicator(timeout_s=timeout_s) as communicator:
            communicator.allreduce(total := torch.ones(2))
    assert total.tolist() == [size] * 2
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "ranks", ())


@pytest.mark.parametrize("place", [INIT, COMMUNICATOR])
def test_a_rank_that_raises_before_it_meets_the_others_is_named_and_all_may_try_again(
    failing_world: Callable[[int], World], tmp_path: Path, place: str
) -> None:
    """Each rank counts its attempts to make a Communicator, so those of all ranks must stay equal."""
    first, culprit, third = failing_world(3).run(come_twice, place, (1,), tmp_path)
    assert culprit[0] == "ValueError"
    for kind, text, ranks in (first, third):
        assert (kind, ranks) == ("CollectiveError", (1,)), text
        assert "rank 1 raised ValueError" in text
