"""Scripts that end without close(), by themselves or by an error, in the interpreter's own way."""

import re
import signal
import subprocess
import textwrap
from pathlib import Path

from tests.interpreter import FINALIZE, python
from tests.ranks.programs import ended, start

RAISED = r"lost rank 1: rank 1 raised ValueError: the script's own at .*script\.py:\d+, <module>"

IMPORTS = """
    import os
    import signal
    import sys
    import threading
    import time
    import torch
    import torch.distributed as dist
    from gradwire.collectives import Communicator

    rank, path, *arguments = int(sys.argv[1]), *sys.argv[2:]
"""

JOINS = (
    IMPORTS
    + """
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
"""
)

#: Where rank 0 keeps the store.
MEETS = (
    IMPORTS
    + """
    port = dist.FileStore(path, 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(port.get("port")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
)

ENDS = """
    comm = Communicator(timeout_s=3)
    for work in [comm.allreduce(torch.ones(1 << 20), async_op=True) for _ in range(8)]:
        work.wait()
"""

STORE_STOPS = """
    comm = Communicator(timeout_s=1)
    comm.allreduce(torch.ones(1))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.allreduce(torch.ones(1))
"""

STORE_STOPS_AT_ONCE = """
    from gradwire.collectives.control.channel import Channel
    from gradwire.collectives.transports.registry import LINKS

    def stop(*_, **__):
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 0 and arguments == ["exchange"]:
        Channel.exchange = stop
    elif rank == 0:
        LINKS["process_group"] = stop
    Communicator(timeout_s=1, link="process_group")
"""

WAITS_FOR_ANOTHER_HOST = """
    from gradwire.collectives.transports.process_group import _GlooPending

    class Work:
        def wait(self, timeout):
            began.set()
            threading.Event().wait()

    began = threading.Event()
    assert not _GlooPending(Work(), 1, None).is_done()  # only a thread of its own learns when it is
    began.wait()
"""

OUTLIVES = """
    sys.excepthook = lambda kind, error, trace: print("the former hook saw", kind.__name__, file=sys.stderr)
    comm = Communicator(timeout_s=60)
    comm.barrier()

    def outlive():
        while not os.path.exists(path + ".heard"):
            time.sleep(0.01)

    if rank == 1:
        threading.Thread(target=outlive).start()
        raise ValueError("the script's own")
    try:
        comm.barrier()
    except RuntimeError as error:
        print(error, file=sys.stderr)
    open(path + ".heard", "w").close()
"""

LEAVES = """
    import gradwire as hvd

    hvd.init(timeout_s=60)
    optimizers = []
    for _ in range(4):
        parameter = torch.nn.Parameter(torch.ones(10))
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0)))
        parameter.sum().backward()
    if rank == 1:
        if arguments == ["raise"]:
            raise ValueError("the script's own")
        if arguments == ["exit"]:
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGINT)
    parameter.sum().backward()
"""


FORKS = """
    import gc
    import gradwire as hvd

    comm, closed = Communicator(timeout_s=10), Communicator(timeout_s=10)
    closed.close()
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
    works = [comm.allreduce(torch.ones(1 << 20), async_op=True) for _ in range(8)]

    def end(ending):
        if ending == "raise":
            raise ValueError("the child's own")
        if ending == "close":
            comm.close()
            hvd.shutdown()
        if ending == "collect":
            for name in ("comm", "closed", "works"):
                del globals()[name]
            gc.collect()

    children = {}
    endings = {"return": 0, "collect": 0} if rank == 0 else {"raise": 1, "close": 0}
    for ending in endings:
        if (child := os.fork()) == 0:
            end(ending)
            sys.exit(0)
        children[child] = ending
    for work in works:
        work.wait()
    deadline, statuses = time.monotonic() + 15, {}
    while len(statuses) < len(children) and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            statuses[children[child]] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    for child in children:
        if children[child] not in statuses:
            os.kill(child, signal.SIGKILL)
    assert statuses == endings, statuses
    comm.barrier()
    hvd.barrier()
    hvd.shutdown()
    comm.close()
"""


def begin(script: str, directory: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two ranks of a script, whose arguments are its rank, a file for a store, and these."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    commands = [[python(), str(path), str(rank), str(directory / "store"), *arguments] for rank in range(2)]
    return [start(command, directory, **{FINALIZE: "yes"}) for command in commands]


def begin_each(script: str, directory: Path, *arguments: str) -> list[list[subprocess.Popen[str]]]:
    """Start two ranks of a script for each argument, all at the same time, since the ranks mostly wait for deadlines."""
    for argument in arguments:
        (directory / argument).mkdir()
    return [begin(script, directory / argument, argument) for argument in arguments]


def run(script: str, directory: Path, *arguments: str) -> tuple[tuple[int, ...], list[str]]:
    """Return the exit codes of two ranks of a script, and what they say."""
    codes, said = zip(*map(ended, begin(script, directory, *arguments)), strict=True)
    return codes, list(said)


def of_the_survivor(ranks: list[subprocess.Popen[str]]) -> str:
    """What rank 1 says, whose script ends by an error while rank 0 is stopped."""
    stopped, survivor = ranks
    try:
        code, said = ended(survivor)
    finally:
        stopped.kill()
        stopped.communicate()
    assert code == 1, said
    assert "terminate" not in said
    return said


def test_a_script_ends_in_silence(tmp_path: Path) -> None:
    """Without close(); one that raises is among those that leave training."""
    assert run(JOINS + ENDS, tmp_path) == ((0, 0), ["", ""])


def test_a_survivor_of_the_store_ends_in_order(tmp_path: Path) -> None:
    """The store that rank 0 keeps answers nobody while that rank is stopped."""
    said = of_the_survivor(begin(MEETS + STORE_STOPS, tmp_path))
    assert "CollectiveTimeout: rank 1: " in said
    assert "waiting for rank 0" in said


def test_a_store_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """It stops while a Communicator is made: when the ranks tell each other what they are, or when they connect."""
    for ranks in begin_each(MEETS + STORE_STOPS_AT_ONCE, tmp_path, "exchange", "link"):
        error = of_the_survivor(ranks)
        assert "CollectiveTimeout: rank 1: making a Communicator: not done after 1 s waiting for rank 0: " in error


def test_a_wait_for_another_host_holds_up_nobody(tmp_path: Path) -> None:
    """It is a queue's, for a message of the process group, while messages in shared memory are still to be moved."""
    codes, errors = run(IMPORTS + WAITS_FOR_ANOTHER_HOST, tmp_path)
    assert codes == (0, 0), errors


def test_a_rank_that_leaves_training_is_heard_of(tmp_path: Path) -> None:
    """It has several Communicators, and it is the last one that the other rank waits in."""
    endings = {
        "raise": (1, RAISED),
        "interrupt": (-signal.SIGINT, "lost rank 1: rank 1 raised KeyboardInterrupt at "),
        "exit": (3, "lost rank 1: left at or before this operation"),
    }
    all_ranks = begin_each(JOINS + LEAVES, tmp_path, *endings)
    for ranks, (code, said) in zip(all_ranks, endings.values(), strict=True):
        codes, errors = zip(*map(ended, ranks), strict=True)
        assert codes == (1, code), errors
        assert re.search(f"PeerLost: rank 0: .*{said}", errors[0]), errors


def test_an_exception_is_heard_of_while_other_threads_still_run(tmp_path: Path) -> None:
    """The interpreter waits for them before it ends; here, until the other rank has heard."""
    codes, (survivor, leaver) = run(JOINS + OUTLIVES, tmp_path)
    assert codes == (0, 1), survivor + leaver
    assert re.search(RAISED, survivor), survivor
    assert "the former hook saw ValueError" in leaver


def test_a_forked_child_ends(tmp_path: Path) -> None:
    """However it ends, while the ranks that it was forked from go on."""
    codes, errors = run(MEETS + FORKS, tmp_path)
    assert codes == (0, 0), errors
