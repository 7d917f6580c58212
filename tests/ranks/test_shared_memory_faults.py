"""A thousand ranks that are killed, stopped or give up at random points of an exchange in shared memory.

Every trial is a host of its own: a few processes that exchange as fast as they can, of which one is hit at a random moment. The
others must notice, in time; then nothing may be left of them. A trial has no process group, so that there can be a thousand;
that Communicators behave likewise is shown by test_shared_memory.py and test_failures.py on fewer.
"""

import os
import random
import secrets
import signal
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gradwire.collectives.errors import LinkError
from gradwire.collectives.kernels import cpu_arithmetic, cpu_kernels
from gradwire.collectives.link.base import Request
from gradwire.collectives.link.shared_memory.group import LocalGroup
from gradwire.collectives.link.shared_memory.messages import SharedMemory, SharedMemoryTransport
from gradwire.collectives.link.shared_memory.segment import Segment
from tests.harness import Worlds, wide

TRIALS, IN_A_TEST, AT_A_TIME = 1000, 40, 16
SIZES = (2, 3, 4)
FAULTS = ("killed", "stopped", "gives up")
TIMEOUT_S = 1.0  # of an operation
LONGEST_S = 0.03  # before the victim is hit
REQUEST = Request("allreduce", "shared", torch.float32, "cpu", numel=0)
NOTICED, TIMED_OUT, UNHARMED, WRONG = 40, 41, 42, 43  # exit codes
DEADLINE_S = 20.0  # for a trial, on a machine where AT_A_TIME of them run


class GivesUpError(Exception):
    """What a rank raises in the middle of its work."""


@dataclass(frozen=True)
class Trial:
    fault: str
    victim: int
    pids: list[int]
    segment: Segment


def exchange(group: LocalGroup, shared: SharedMemory, rank: int, give_up: bool, seed: int) -> None:
    """Reduce and send for as long as it goes. Raises LinkError, GivesUpError."""
    transport = SharedMemoryTransport(group, rank, group.size)
    same, own = random.Random(seed), random.Random()
    number = 0
    while True:
        number += 1
        numel = same.choice((1, 1000, 5000, 60_000))
        deadline = time.monotonic() + TIMEOUT_S
        tensor = shared.empty((numel,), torch.float32) if own.random() < 0.5 else torch.empty(numel)
        assert tensor is not None
        tensor.fill_(rank + 1)
        if give_up and own.random() < 0.1:
            raise GivesUpError
        if same.random() < 0.7:
            shared.collective(replace(REQUEST, numel=numel)).run(tensor, tensor, number, deadline)
            expected = group.size * (group.size + 1) / 2
        else:
            received = torch.empty(numel)
            before, after = (rank - 1) % group.size, (rank + 1) % group.size
            for pending in transport.post([(after, tensor)], [(before, received)], number):
                for message in pending:
                    message.wait(deadline)
            tensor, expected = received, float(before + 1)
        if not torch.equal(tensor, torch.full_like(tensor, expected)):
            os._exit(WRONG)


def live(name: str, maker: int, descriptor: int, rank: int, pids: list[int], give_up: bool, seed: int) -> int:
    kernels = cpu_kernels()
    assert not isinstance(kernels, str)
    nbytes = LocalGroup.segment_bytes(kernels, len(pids))
    segment = Segment.open(maker, descriptor, name, nbytes)
    group = LocalGroup(kernels, segment, name, pids, range(len(pids)), rank, everyone=True)
    for other in range(len(pids)):
        if other != rank:
            group.watch(other)
    shared = SharedMemory(group)
    try:
        exchange(group, shared, rank, give_up, seed)
    except LinkError as error:
        group.abort()
        shared.close()
        group.close()
        return TIMED_OUT if error.timed_out else NOTICED
    except GivesUpError:
        group.abort()
        time.sleep(2 * TIMEOUT_S)  # it is not the end of its process that the others notice
        return UNHARMED
    return WRONG


def begin(random_: random.Random) -> Trial:
    kernels = cpu_kernels()
    assert not isinstance(kernels, str)
    size, fault, seed = random_.choice(SIZES), random_.choice(FAULTS), random_.getrandbits(32)
    victim = random_.randrange(size)
    name = f"gradwire-{secrets.token_hex(16)}"
    segment = Segment.create(name, LocalGroup.segment_bytes(kernels, size))
    assert segment.descriptor is not None
    maker, pids, gates = os.getpid(), [], []
    for rank in range(size):
        gate, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = WRONG
            try:
                os.close(ours)
                for _, others in gates:
                    os.close(others)
                everyone = [int(text) for text in os.read(gate, 1000).split()]
                gives_up = fault == "gives up" and rank == victim
                code = live(name, maker, segment.descriptor, rank, everyone, gives_up, seed)
            finally:
                os._exit(code)
        pids.append(pid)
        gates.append((gate, ours))
    for gate, ours in gates:
        os.write(ours, " ".join(map(str, pids)).encode())
        os.close(gate)
        os.close(ours)
    return Trial(fault, victim, pids, segment)


def end(trial: Trial) -> list[str]:
    """What was wrong with it. Nothing of it is left then."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE_S
    awaited = {rank: pid for rank, pid in enumerate(trial.pids) if trial.fault != "stopped" or rank != trial.victim}
    while awaited and time.monotonic() < deadline:
        for rank, pid in list(awaited.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del awaited[rank]
        time.sleep(0.001)
    for pid in {*awaited.values(), *([trial.pids[trial.victim]] if trial.fault == "stopped" else [])}:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    trial.segment.close()
    expected = dict.fromkeys(range(len(trial.pids)), NOTICED)
    expected |= {"killed": {trial.victim: -signal.SIGKILL}, "gives up": {trial.victim: UNHARMED}}.get(trial.fault, {})
    if trial.fault == "stopped":
        del expected[trial.victim]
    if trial.fault == "stopped":  # the first whose time is up gives up, which the others notice
        codes = {rank: NOTICED if code == TIMED_OUT else code for rank, code in codes.items()}
    return [] if codes == expected else [f"rank {trial.victim} of {len(trial.pids)} {trial.fault}: exit codes {codes}"]


def many(trials: int, seed: int) -> tuple[list[str], int]:
    """The complaints, and how many trials there were. AT_A_TIME of them run at the same time."""
    random_ = random.Random(seed)
    cpu_arithmetic(torch.float32)  # once, for all that are forked from here
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    complaints: list[str] = []
    running: deque[Trial] = deque()
    for _ in range(trials):
        trial = begin(random_)
        running.append(trial)
        time.sleep(random_.random() * LONGEST_S)
        number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.get(trial.fault)
        if number is not None:
            os.kill(trial.pids[trial.victim], number)
        if len(running) == AT_A_TIME:
            complaints += end(running.popleft())
    for trial in running:
        complaints += end(trial)
    if (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) != before:
        complaints.append("files are left")
    if "memfd:gradwire" in Path("/proc/self/maps").read_text():
        complaints.append("memory is left")
    return complaints, trials


@pytest.mark.parametrize("seed", [0, *wide(*range(1, TRIALS // IN_A_TEST))])
def test_a_thousand_faults(ranks: Worlds, seed: int) -> None:
    assert ranks(1).run(many, IN_A_TEST, seed) == [([], IN_A_TEST)]
