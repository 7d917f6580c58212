"""Elastic jobs as `gradwire run` starts them: workers speak its contract and train nothing, and hosts are this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness import wide
from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.test_console import PRINTS, SSH, is_running

DEADLINE_S = 60.0

#: Is in one generation after the other, and leaves each when one of its ranks has gone or the launcher wants it; until it is
#: done.
WORKER = """
import os, pathlib, sys, time
from gradwire.trainer.world.generations import WORKER, Departure, generations_of

assert "RANK" not in os.environ
worker, generations, after = int(os.environ[WORKER]), generations_of(os.environ, 30), -1


def has_gone(other):
    try:
        return " Z " in pathlib.Path(f"/proc/{pathlib.Path(f'pid.{other}').read_text()}/stat").read_text()
    except OSError:
        return True


pathlib.Path(f"new.{worker}").write_text(str(os.getpid()))
pathlib.Path(f"new.{worker}").rename(f"pid.{worker}")
while pathlib.Path(f"hold.{worker}").exists():
    time.sleep(0.005)
generations.arrive(worker)
while True:
    generation = generations.await_generation(worker, after, time.monotonic() + 60)
    after = generation.number
    rank = generation.environment(worker)["RANK"]
    print(f"generation {after}: rank {rank} of {len(generation.workers)}, slot {os.environ['LOCAL_RANK']}")
    while not (gone := [other for other in generation.workers if has_gone(other)]):
        if pathlib.Path("done").exists():
            sys.exit()
        if generations.is_update_wanted(after):
            break
        time.sleep(0.005)
    if pathlib.Path("done").exists():
        sys.exit()
    generations.leave(worker, after, Departure(not gone, f"lost {gone}" if gone else "", tuple(gone)))
"""

#: Has an error of its own: while it is loaded, or in the first generation.
FAILS = """
import os, sys, time
from gradwire.trainer.world.generations import WORKER, generations_of

if sys.argv[1] == "generation":
    generations = generations_of(os.environ, 30)
    generations.arrive(int(os.environ[WORKER]))
    generations.await_generation(int(os.environ[WORKER]), -1, time.monotonic() + 60)
raise ValueError("the script's own")
"""

#: Runs a program that worker 1 does not survive: it is killed where the program makes its optimizer, before it trains, or at
#: its second commit.
KILLED = """
import os, runpy, signal, sys
import gradwire as hvd
from gradwire.trainer.world.generations import WORKER

owner, name, left = {"makes": (hvd, "DistributedOptimizer", 1), "trains": (hvd.elastic.TorchState, "commit", 2)}[sys.argv[1]]
call = getattr(owner, name)


def fatal(*args, **kwargs):
    global left
    left -= 1
    if left == 0 and os.environ[WORKER] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args, **kwargs)


setattr(owner, name, fatal)
variables = runpy.run_path(sys.argv[2])
ended = [parameter.sum().item() for parameter in variables["model"].parameters()]
print("ended:", hvd.size(), variables["state"].epoch, ended)
"""

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start launchers in a folder with the scripts and ssh, and leave no process behind."""
    for name, text in {
        "worker.py": WORKER,
        "fails.py": FAILS,
        "killed.py": KILLED,
        "prints.py": PRINTS,
        "ssh": SSH,
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RANK": "7",
    }
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, interpreter: str | None = None) -> subprocess.Popen[str]:
        command = [interpreter or python(), "-m", "gradwire", "run", *flags]
        piped = subprocess.PIPE
        started.append(
            subprocess.Popen(
                command, env={**os.environ, **environment}, text=True, stdout=piped, stderr=piped, errors="replace"
            )
        )
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()
    end = time.monotonic() + DEADLINE_S
    while any(is_running(int(path.read_text())) for path in tmp_path.glob("pid.*")):
        assert time.monotonic() < end, "a worker is left"
        time.sleep(0.01)


def pid_of(worker: int) -> int:
    return int(Path(f"pid.{worker}").read_text())


def told(launcher: subprocess.Popen[str]) -> list[str]:
    """Return what a launcher says until it has ended, without its name."""
    _, errors = launcher.communicate(timeout=DEADLINE_S)
    return [line.removeprefix("gradwire: ") for line in errors.splitlines() if line.startswith("gradwire: ")]


def next_told(launcher: subprocess.Popen[str]) -> str:
    """Return the next line that it says."""
    assert launcher.stderr is not None
    while (line := launcher.stderr.readline()) and not line.startswith("gradwire: "):
        pass
    return line.removeprefix("gradwire: ").rstrip()


def finish(launcher: subprocess.Popen[str]) -> str:
    """Let all workers finish, and return what they have printed."""
    Path("done").touch()
    output, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, errors
    return output


def test_others_go_on_without_a_killed_worker_and_then_with_a_new_one(launch: Launch) -> None:
    launcher = launch("--min-np", "2", "-np", "3", "worker.py")
    assert next_told(launcher) == "generation 0: 3 ranks"
    others = [pid_of(0), pid_of(2)]
    Path("hold.3").touch()
    os.kill(pid_of(1), signal.SIGKILL)
    assert next_told(launcher) == "generation 1: 2 ranks; worker 1 on host localhost was killed by SIGKILL (9)"
    Path("hold.3").unlink()
    assert next_told(launcher) == "generation 2: 3 ranks; worker 3 on host localhost joined as rank 2"
    assert [pid_of(0), pid_of(2)] == others
    output = finish(launcher)
    for line in (
        "[2]<stdout>: generation 0: rank 2 of 3, slot 2",
        "[2]<stdout>: generation 1: rank 1 of 2, slot 2",
        "[2]<stdout>: generation 2: rank 1 of 3, slot 2",
        "[3]<stdout>: generation 2: rank 2 of 3, slot 1",
    ):
        assert f"{line}\n" in output


def test_as_many_ranks_as_before_wait_for_a_new_one_which_gets_the_rank_of_the_lost(launch: Launch) -> None:
    """This one does not answer: the others say so, and it is killed."""
    launcher = launch("--min-np", "3", "-np", "3", "worker.py")
    assert next_told(launcher) == "generation 0: 3 ranks"
    os.kill(stopped := pid_of(1), signal.SIGSTOP)
    Path("pid.1").write_text("0")  # so that the others take it for lost
    lost = "worker 1 on host localhost was killed, since it did not answer"
    assert next_told(launcher) == f"2 of at least 3 ranks can continue: training waits for others; {lost}"
    assert next_told(launcher) == f"generation 1: 3 ranks; {lost}; worker 3 on host localhost joined as rank 1"
    assert not is_running(stopped)
    assert "[3]<stdout>: generation 1: rank 1 of 3, slot 1\n" in finish(launcher)


@pytest.mark.parametrize(
    ("where", "ends"),
    [("import", []), ("generation", ["generation 0: 2 ranks", "no rank survived"])],
)
def test_an_error_of_the_script_ends_the_job(launch: Launch, where: str, ends: list[str]) -> None:
    launcher = launch("--elastic", "-np", "2", "fails.py", where)
    error = "workers 0, 1 on host localhost ended with exit code 1: ValueError: the script's own"
    assert told(launcher) == [*ends[:1], error, *ends[1:]]
    assert launcher.returncode == 1


@pytest.mark.wide
@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize(("when", "lost"), [("makes", 3), ("trains", 1)])
def test_an_example_of_horovods_survives_a_kill(launch: Launch, when: str, lost: int) -> None:
    """Ranks that cannot go on, since they have not come to the decorated function, are started again; others stay. Commits are
    named after the process that has started a rank, which the tests' python is not."""
    program = ROOT / "tests" / "ranks" / "horovod_programs" / "elastic.py"
    launcher = launch("--min-np", "3", "-np", "3", "killed.py", when, str(program), interpreter=sys.executable)
    output, errors = launcher.communicate(
        timeout=3 * DEADLINE_S
    )  # three times the imports of torch by several processes
    assert launcher.returncode == 0, errors
    assert re.search("generation 1: 3 ranks;.* worker 1 on host localhost was killed by SIGKILL", errors), errors
    assert len(re.findall("joined as rank", errors)) == lost
    ended = [line.partition("ended: ")[2] for line in output.splitlines() if "ended: " in line]
    assert len(ended) == 3
    assert len(set(ended)) == 1
    assert ended[0].startswith("3 1 [")


def test_what_workers_print(launch: Launch, tmp_path: Path) -> None:
    """These never come to a generation, and finish."""
    launcher = launch("--elastic", "-np", "2", "--output-filename", "files", "prints.py", "text")
    output, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, errors
    for worker in range(2):
        assert f"[{worker}]<stdout>: [None, None, None, None, None, '1'] ['text']\n" in output
        assert f"[{worker}]<stderr>: no end of line\n" in errors
        assert (tmp_path / "files" / f"worker.{worker}" / "stdout").read_bytes().endswith(b"\n\xff\n\xc3\xa9\n")


def agents() -> list[int]:
    """Return the agents that run in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").samefile(Path.cwd()) and b"launcher/agent.py\0" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("whom", ["the launcher", *wide("the launcher by Ctrl-C", "an agent")])
def test_no_worker_outlives(launch: Launch, whom: str) -> None:
    """The fixture waits for the end of all. A host whose agent has ended is used again after a pause."""
    launcher = launch("-H", "localhost:1,127.0.0.2:1", "--elastic", "-x", "COLLECTIVES_INTERFACE=lo", "worker.py")
    assert next_told(launcher) == "generation 0: 2 ranks"
    if whom == "an agent":
        os.kill(agents()[0], signal.SIGKILL)
        line = next_told(launcher)
        lost = re.fullmatch(
            r"generation 1: 1 rank; host (\S+) was lost, and is tried again in 10 s: its agent has ended; "
            r"worker \d on host \1 was lost with its host",
            line,
        )
        assert lost is not None, line
        assert re.fullmatch(
            rf"generation 2: 2 ranks; worker 2 on host {lost[1]} joined as rank \d", next_told(launcher)
        )
        finish(launcher)
    elif whom == "the launcher":
        launcher.kill()
    else:
        launcher.send_signal(signal.SIGINT)
        assert told(launcher) == []
        assert launcher.returncode == 130


def test_hosts_come_and_go(launch: Launch, tmp_path: Path) -> None:
    """The last of the first hosts goes, too: others have what has been learnt by then. One that is unknown takes no part."""
    script, hosts = tmp_path / "discover", tmp_path / "hosts"
    script.write_text("#!/bin/sh\ncat hosts\n")
    script.chmod(0o755)

    def say(text: str) -> None:
        hosts.with_suffix(".new").write_text(text)
        hosts.with_suffix(".new").rename(hosts)

    say("127.0.0.2:1\n127.0.0.3\n")
    flags = ["--host-discovery-script", "./discover", "-np", "2", "--max-np", "3", "-x", "COLLECTIVES_INTERFACE=lo"]
    launcher = launch(*flags, "worker.py")
    assert next_told(launcher) == "generation 0: 2 ranks"
    say("127.0.0.2:1\n127.0.0.3\n127.0.0.4:4\n127.0.0.9:2\n")
    assert next_told(launcher) == "generation 1: 3 ranks; worker 2 on host 127.0.0.4 joined as rank 2"
    say("127.0.0.4:2\n127.0.0.9:2\n")
    unknown = "by ssh: ssh: Could not resolve hostname 127.0.0.9"
    awaited = {
        *("worker 0 left with host 127.0.0.2", "worker 1 left with host 127.0.0.3"),
        "worker 3 on host 127.0.0.4 joined as rank 1",
        f"host 127.0.0.9 was lost, and is tried again in 10 s: {unknown}",
    }
    while awaited:  # in one generation or two
        line = next_told(launcher)
        assert line, f"it has ended without {awaited}"
        awaited -= {*line.split("; ")}
    end = time.monotonic() + DEADLINE_S
    while is_running(pid_of(0)) or is_running(pid_of(1)):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert launcher.poll() is None
    assert "of 2, slot 1" in finish(launcher)
