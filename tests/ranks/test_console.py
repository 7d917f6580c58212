"""Jobs that `gradwire run` starts: here, and by an ssh that has these hosts on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.trainer.__main__ import main
from tests.harness import wide, wide_rows
from tests.interpreter import python
from tests.pages import ROOT
from tests.ports import unused_port

DEADLINE_S = 60.0
INTERPRETER = sys.executable

#: Adds up ranks, on whatever hosts they are.
SUMS = """
import torch
import gradwire as hvd

hvd.init(timeout_s=40)
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total.item()}")
hvd.barrier()
exec(open("prints.py").read())
"""

#: Prints what a rank is given.
PRINTS = """
import os, sys

names = ("RANK", "WORLD_SIZE", "HOROVOD_TIMELINE", "COLLECTIVES_LINK", "LEFT_HERE", "OMP_NUM_THREADS")
print([os.environ.get(name) for name in names], sys.argv[1:])
if sys.argv[1:]:
    sys.stdout.buffer.write(b"\\xff\\r\\xc3\\xa9\\n")
sys.stderr.write("no end of line")
"""

#: Rank 1 fails, the others sleep, or all fail; none loads torch.
FAILS = """
import os, pathlib, signal, sys, time

if sys.argv[1] == "raise on all":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who is first ends nobody else
    pathlib.Path("ignores" + os.environ["RANK"]).touch()
    while not all(pathlib.Path(f"ignores{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    raise ValueError(f"rank {os.environ['RANK']}: the script's own")
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("the script's own")
    os.kill(os.getpid(), 9)
time.sleep(100)
"""

#: Each rank leaves its process id, and stays.
STAYS = """
import os, pathlib, sys, time

path = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(100)
"""

#: Takes ssh's flags, and gives the command nothing of this environment. Host .9 is unknown, host .8 never answers, and the
#: key of host .7 is unknown.
SSH = """#!/bin/sh
while [ $# -gt 0 ]; do case "$1" in -o|-p|-i) shift 2;; *) break;; esac; done
case "$1" in
*.9) printf "ssh: Could not resolve hostname $1" >&2; exit 255;;
*.8) exec sleep 100;;
*.7) echo "Host key verification failed." >&2; exit 255;;
esac
shift
exec env -i sh -c "$*"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts and ssh, this process's own."""
    for name, text in {"sums.py": SUMS, "prints.py": PRINTS, "fails.py": FAILS, "stays.py": STAYS, "ssh": SSH}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def test_on_this_host(folder: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the agent by an interpreter, which imports what an agent imports."""
    monkeypatch.setattr(sys, "executable", INTERPRETER)
    files = folder / "files"
    flags = ["-np", "2", "--output-filename", str(files), "--timeline-filename", "a b.json"]
    status = main(["run", *flags, "prints.py", "--lr", "0.1"])
    out, errors = capfdbinary.readouterr()
    assert status == 0, errors
    for rank in range(2):
        line = f"['{rank}', '2', 'a b.json', None, None, '1'] ['--lr', '0.1']"
        for text in (line.encode(), b"\xff", b"\xc3\xa9"):  # whatever its encoding
            assert b"[%d]<stdout>: %s\n" % (rank, text) in out
        assert b"[%d]<stderr>: no end of line\n" % rank in errors
        assert (files / f"rank.{rank}" / "stdout").read_bytes() == line.encode() + b"\n\xff\n\xc3\xa9\n"
        assert (files / f"rank.{rank}" / "stderr").read_text() == "no end of line\n"


def test_on_two_hosts(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_LINK", "tcp")
    monkeypatch.setenv("LEFT_HERE", "yes")
    flags = ["-H", "127.0.0.2:1,127.0.0.3:2", "-p", "22", "--master-port", str(unused_port()), "--start-timeout", "90"]
    status = main(["run", *flags, "--timeline-filename", "it's $HOME.json", "sums.py"])
    out, errors = capsys.readouterr()
    assert status == 0, errors
    for rank in range(3):
        assert f"[{rank}]<stdout>: rank {rank} of 3: 6.0\n" in out
        assert f"""[{rank}]<stdout>: ['{rank}', '3', "it's $HOME.json", 'tcp', None, '1'] []\n""" in out


@pytest.mark.parametrize(
    ("how", "status", "who"),
    [
        ("raise", 1, "rank 1 on host localhost ended with exit code 1: ValueError: the script's own"),
        *wide_rows(
            ("raise on all", 1, "ranks 0, 1 on host localhost ended with exit code 1: ValueError: the script's own"),
            ("kill", 137, "rank 1 on host localhost was killed by SIGKILL (9)"),
        ),
    ],
)
def test_ranks_fail(folder: Path, capsys: pytest.CaptureFixture[str], how: str, status: int, who: str) -> None:
    assert main(["run", "-np", "2", "fails.py", how]) == status
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradwire:")]
    others = [] if "on all" in how else ["gradwire: rank 0 ended because of that"]
    assert told == [f"gradwire: {who}", *others]


def test_an_unknown_host_ends_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert main(["run", "-H", "localhost:1,127.0.0.9:1", "stays.py", str(folder)]) == 1
    assert time.monotonic() - start < 30  # the start timeout
    assert capsys.readouterr().err == "gradwire: host 127.0.0.9: by ssh: ssh: Could not resolve hostname 127.0.0.9\n"
    assert not (folder / "0").exists()


def test_a_host_whose_key_is_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-H", "127.0.0.7:1", "stays.py"]) == 1
    assert "`ssh 127.0.0.7`" in capsys.readouterr().err


def test_a_host_that_never_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-H", "127.0.0.8:1", "--start-timeout", "1", "stays.py"]) == 1
    assert capsys.readouterr().err == "gradwire: host 127.0.0.8: did not start within 1 s\n"


def test_a_command_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "1", "./nowhere.sh"]) == 127
    reason = "cannot start ./nowhere.sh: No such file or directory"
    assert capsys.readouterr().err.endswith(f"gradwire: rank 0 on host localhost ended with exit code 127: {reason}\n")


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [*wide(signal.SIGINT), signal.SIGKILL])
def test_no_rank_outlives_the_launcher(folder: Path, number: signal.Signals) -> None:
    """It is told to end all, or gone itself before it can."""
    end = time.monotonic() + DEADLINE_S
    flags = ["-H", "localhost:1,127.0.0.2:1", "--master-port", str(unused_port()), "-x", "COLLECTIVES_INTERFACE=lo"]
    launcher = subprocess.Popen([python(), "-m", "gradwire", "run", *flags, "stays.py", str(folder)])
    try:
        files = [folder / str(rank) for rank in range(2)]
        while not all(file.exists() for file in files):
            assert launcher.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        launcher.send_signal(number)
        status = launcher.wait(DEADLINE_S)
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        while any(is_running(int(file.read_text())) for file in files):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.wait()
