"""What `gradwire` makes of its arguments, before anything is started."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.trainer.__main__ import main
from gradwire.trainer.launcher.fixed import rendezvous_of
from gradwire.trainer.launcher.hosts import Host, parse_hosts, place, read_hostfile
from gradwire.trainer.launcher.options import Elastic, parse_job
from gradwire.trainer.launcher.output import JobFailure, LastWords, cause_among, exit_status, failure_lines
from gradwire.trainer.launcher.reach import command_on

SCRIPT = ["train.py", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a:2,b:3", {"a": 2, "b": 3}),
        ("a", {"a": 1}),
        ("a:2, b, a:1", {"a": 3, "b": 1}),
        ("10.0.0.1:4", {"10.0.0.1": 4}),
        ("[fe80::1]:2,node-1.example.org:1", {"fe80::1": 2, "node-1.example.org": 1}),
    ],
)
def test_hosts(text: str, slots: dict[str, int]) -> None:
    assert parse_hosts(text) == slots


@pytest.mark.parametrize("text", ["", "a:0", "a:two", "a:2:3", "a,,b", "a b", "-oProxyCommand=x:1", "a:-1"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host: write HOST:SLOTS"):
        parse_hosts(text)


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two racks\na slots=2  # new\n\nb slots = 3\nc:4\nd\n")
    assert read_hostfile(file) == {"a": 2, "b": 3, "c": 4, "d": 1}
    file.write_text("a slots=2 max_slots=3\n")
    with pytest.raises(ValueError, match=rf"{file}: 'a:2 max_slots=3' is not a host"):
        read_hostfile(file)
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match="it contains no host"):
        read_hostfile(file)
    with pytest.raises(ValueError, match=r"cannot read the hosts in .*No such file"):
        read_hostfile(tmp_path / "nowhere")


def test_hosts_are_filled_in_turn() -> None:
    slots = {"a": 2, "localhost": 1, "b": 3, socket.gethostname(): 1}
    a, here, b = Host("a", 2, False), Host("localhost", 2, True), Host("b", 3, False)
    assert place(None, slots) == [a, here, b]
    assert place(3, slots) == [a, Host("localhost", 1, True)]
    assert place(1, slots) == [Host("a", 1, False)]
    with pytest.raises(ValueError, match="-np 8 is more than the 7 slots of a:2,localhost:1,b:3"):
        place(8, slots)


def test_what_ranks_run() -> None:
    assert parse_job(["-np", "2", *SCRIPT]).command == [sys.executable, *SCRIPT]
    assert parse_job(["-np", "2", "--", "train.py", "-np", "3"]).command == [sys.executable, "train.py", "-np", "3"]
    assert parse_job(["-np", "2", "python", *SCRIPT]).command == ["python", *SCRIPT]
    module = ["-m", "package", "--lr", "1"]
    assert parse_job(["-np", "2", *module]).command == [sys.executable, *module]
    assert parse_job(["-H", "localhost:3", *SCRIPT]).hosts == [Host("localhost", 3, True)]


def test_flags_that_set_variables() -> None:
    flags = "--timeline-filename t.json --fusion-threshold-mb 32 --no-stall-check --log-level debug -x A=b=c -x B"
    job = parse_job(["-np", "1", *flags.split(), *SCRIPT])
    assert job.settings == {
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_FUSION_THRESHOLD": str(32 * 1024 * 1024),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "debug",
        "A": "b=c",
    }
    assert job.names == ["B"]
    flags = "--stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 0 --network-interfaces eth1"
    assert parse_job(["-np", "1", *flags.split(), *SCRIPT]).settings == {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
        "GLOO_SOCKET_IFNAME": "eth1",
    }


def test_elastic_flags() -> None:
    """Whoever names hosts gives all their slots: what is not used at first can be later."""
    job = parse_job(["--min-np", "2", "-np", "3", "-H", "localhost:4,b:2", *SCRIPT])
    assert job.elastic == Elastic(min_ranks=2, ranks=3, max_ranks=3)
    assert job.hosts == [Host("localhost", 4, True), Host("b", 2, False)]
    assert parse_job(["-np", "2", *SCRIPT]).elastic is None
    assert parse_job(["-np", "2", "--elastic", *SCRIPT]).elastic == Elastic(1, 2, 2)
    assert parse_job(["-np", "2", "--max-num-proc", "4", "--reset-limit", "0", *SCRIPT]).elastic == Elastic(
        1, 2, 4, None, 0
    )
    found = parse_job(["--host-discovery-script", "d.sh", "--min", "2", *SCRIPT])
    assert (found.hosts, found.elastic) == ([], Elastic(2, None, None, Path("d.sh")))


def test_flags_without_a_meaning_share_one_notice() -> None:
    ignored = "--cycle-time-ms 3.5 --autotune --cache-capacity 0 --gloo"
    job = parse_job(["-np", "1", *ignored.split(), "train.py", "--autotune"])
    assert (
        job.notice
        == "gradwire: ignored, since they have no effect here: --cycle-time-ms, --autotune, --cache-capacity, --gloo"
    )
    assert job.command[1:] == ["train.py", "--autotune"]
    assert parse_job(["-np", "1", *SCRIPT]).notice is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train.py", "how many ranks? Give -np, or hosts"),
        ("-np 2", "no command is given"),
        ("-np 0 train.py", "must be a whole number from 1 on, not 0"),
        ("-np 5 -H a:2,b:2 train.py", "-np 5 is more than the 4 slots of a:2,b:2"),
        ("-H a:2 --hostfile f train.py", "give only one of them"),
        ("-np 2 --min-np 3 train.py", "-np 2 must be from --min-np 3 to --max-np 2"),
        ("-np 2 --max-np 1 train.py", "-np 2 must be from --min-np 1 to --max-np 1"),
        ("-H a:4 --min-np 3 --max-np 2 train.py", "--max-np 2 is less than --min-np 3"),
        ("-H a:2 --min-np 3 train.py", "--min-np 3 is more than the 2 slots of all hosts"),
        ("-np 2 -H a:2 --host-discovery-script ./d.sh train.py", "-H and --host-discovery-script both name hosts"),
        ("-np 2 --slots-per-host 2 train.py", "have the discovery script print host:slots"),
        ("-np 2 --mpi train.py", "write mpirun -n 4 python train.py"),
        ("-np 2 --config-file c.yaml train.py", "write its settings as flags"),
        ("-np 2 --bogus train.py", "--bogus"),
        ("-np 2 --start-timeout 0 train.py", "must be a whole number from 1 on, not 0"),
        ("-np 2 -p 70000 train.py", "must be a port from 1 to 65535, not 70000"),
        ("-np 2 -x 1A=3 train.py", "'1A' is not a name of a variable"),
    ],
)
def test_wrong_arguments(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_job(arguments.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_agents_of_several_hosts() -> None:
    """What goes to another host survives its shell; what is its own stays away."""
    job = parse_job(
        ["-H", "a:2,b:3", "-p", "2222", "-i", "key", "-x", "SPACED=it's two words", "-x", "WANDB_MODE", *SCRIPT]
    )
    environment = {
        "COLLECTIVES_INTERFACE": "eth0",
        "COLLECTIVES_HOST_ID": "mine",
        "NCCL_DEBUG": "INFO",
        "WANDB_MODE": "offline",
        "SECRET": "no",
        "PATH": "/a b:/bin",
    }
    agent = [sys.executable, "agent", *job.command]
    ssh = command_on(job.hosts[1], job, agent, environment)
    assert ssh[0] == "ssh"
    assert "BatchMode=yes" in ssh
    assert ssh[ssh.index("-p") + 1] == "2222"
    assert ssh[ssh.index("-i") + 1] == "key"
    assert ssh[-2] == "b"
    words = shlex.split(ssh[-1])
    assert words[:5] == ["cd", str(Path.cwd()), "&&", "exec", "env"]
    python = words.index(sys.executable)
    assert set(words[5:python]) == {
        "COLLECTIVES_INTERFACE=eth0",
        "NCCL_DEBUG=INFO",
        "PATH=/a b:/bin",
        "SPACED=it's two words",
        "WANDB_MODE=offline",
    }
    assert words[python:] == agent
    here = Host("localhost", 1, True)
    assert command_on(here, job, agent, environment) == agent
    for host in (here, job.hosts[1]):
        with pytest.raises(ValueError, match="-x WANDB_MODE: it is not set here"):
            command_on(host, job, agent, {})


def test_the_key_of_a_job_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_KEY_FILE", raising=False)
    assert parse_job(["-np", "2", *SCRIPT]).key is None
    drawn = parse_job(["--private", "-H", "a:1,b:1", *SCRIPT])
    assert drawn.key is not None
    assert drawn.key != parse_job(["--private", "-np", "2", *SCRIPT]).key
    drawn.key.write(tmp_path / "key")
    environment = {"GRADWIRE_KEY_FILE": str(tmp_path / "key"), "PATH": "/bin"}
    said = shlex.join(command_on(drawn.hosts[1], drawn, ["agent"], environment))
    assert "GRADWIRE" not in said
    assert drawn.key.to_text() not in said
    monkeypatch.setenv("GRADWIRE_KEY_FILE", str(tmp_path / "key"))
    assert parse_job(["-np", "2", *SCRIPT]).key == drawn.key
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(SystemExit):
        parse_job(["-np", "2", *SCRIPT])


def test_where_ranks_meet() -> None:
    """On the first host. Other hosts cannot use the name "localhost", so they get an address. One host needs no fixed port."""

    def met(*flags: str) -> tuple[str, int]:
        return rendezvous_of(parse_job([*flags, *SCRIPT]), {"COLLECTIVES_INTERFACE": "lo"})

    assert met("-H", "127.0.0.2:1,127.0.0.3:1") == ("127.0.0.2", 29500)
    assert met("-H", "localhost:1,127.0.0.3:1") == ("127.0.0.1", 29500)
    assert met("-H", "127.0.0.2:1,localhost:1", "--master-port", "77") == ("127.0.0.2", 77)
    assert met("-np", "2") == ("127.0.0.1", 0)
    ports = {met("-H", "127.0.0.2:2")[1] for _ in range(9)}
    assert len(ports) > 1
    assert min(ports) > 1024


def test_output_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["run", "-np", "1", "--output-filename", str(file), *SCRIPT]) == 2
    assert capsys.readouterr().err == f"gradwire: --output-filename {file}: File exists\n"


def heard(text: str) -> str:
    words = LastWords()
    for line in text.splitlines():
        words.read(line)
    return words.text


def test_last_words() -> None:
    traceback = "Traceback (most recent call last):\n  File x\n    f()\nValueError: boom\n"
    assert heard(traceback + "\nException ignored in: <x>\n") == "ValueError: boom"
    assert (
        heard(f"{traceback}\nDuring handling of the above:\n\n{traceback.replace('boom', 'again')}")
        == "ValueError: again"
    )
    assert heard("one\ntwo\n\n") == "two"
    assert heard("") == ""


def test_a_line_for_each_failure_and_the_cause_first() -> None:
    lost = JobFailure("a", 0, 1, "gradwire.collectives.errors.PeerLost: rank 0: lost rank 1")
    ended = JobFailure("b", 2, -15, "")
    cause = JobFailure("b", 1, 3, "ValueError: boom")
    assert failure_lines([lost, cause, ended]) == [
        "gradwire: rank 1 on host b ended with exit code 3: ValueError: boom",
        "gradwire: ranks 0, 2 ended because of that",
    ]
    assert exit_status([lost, cause, ended]) == 3
    assert failure_lines([JobFailure("b", 1, -9, "")]) == ["gradwire: rank 1 on host b was killed by SIGKILL (9)"]
    assert exit_status([JobFailure("b", 1, -9, "")]) == 137
    raised = JobFailure("b", 1, -15, "ValueError: boom")  # the launcher ended it after that
    assert exit_status([raised, ended]) == 1
    assert failure_lines([raised]) == ["gradwire: rank 1 on host b ended with exit code 1: ValueError: boom"]
    assert failure_lines([lost]) == [f"gradwire: rank 0 on host a ended with exit code 1: {lost.words}"]
    assert exit_status([JobFailure("c", None, None, "by ssh: no route")]) == 1
    assert failure_lines([JobFailure("c", None, None, "by ssh: no route")]) == ["gradwire: host c: by ssh: no route"]


def test_failures_that_are_alike_share_a_line() -> None:
    failures = [
        JobFailure(host, rank, 1, f"[rank{rank}]: ValueError: rank {rank}: every must be a whole number >= 1, not 0")
        for rank, host in enumerate("aabb")
    ]
    assert failure_lines(failures) == [
        "gradwire: ranks 0, 1 on host a and ranks 2, 3 on host b ended with exit code 1: "
        "ValueError: every must be a whole number >= 1, not 0"
    ]
    assert failure_lines(
        [*failures[:2], JobFailure("b", 2, 1, "KeyError: 3"), JobFailure("b", 3, 2, "KeyError: 3")]
    ) == [
        "gradwire: ranks 0, 1 on host a ended with exit code 1: ValueError: every must be a whole number >= 1, not 0",
        "gradwire: rank 2 on host b ended with exit code 1: KeyError: 3",
        "gradwire: rank 3 on host b ended with exit code 2: KeyError: 3",
    ]
    assert failure_lines(failures[3:]) == [
        f"gradwire: rank 3 on host b ended with exit code 1: {failures[3].words}"  # as it stands in its own output
    ]
    ended = JobFailure("b", 3, -15, failures[3].words)  # by the launcher, on its way out by the same error
    assert failure_lines([*failures[:3], ended]) == failure_lines(failures)
    lost = [JobFailure("a", rank, 1, f"PeerLost: rank {rank}: allreduce(): lost rank 2") for rank in range(2)]
    assert failure_lines(lost) == [
        "gradwire: ranks 0, 1 on host a ended with exit code 1: PeerLost: allreduce(): lost rank 2"
    ]
    unreached = [JobFailure(host, None, None, "by ssh: no route") for host in "cd"]
    assert failure_lines(unreached) == ["gradwire: host c: by ssh: no route", "gradwire: host d: by ssh: no route"]


def test_the_command_is_installed() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'gradwire = "{main.__module__}:{main.__name__}"' in project


def test_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    assert main(["--help"]) == 0
    assert "gradwire run -np 4" in capsys.readouterr().out
    assert main(["runn"]) == 2
    assert "there is no command 'runn'" in capsys.readouterr().err
    assert main(["bench", "nonsense"]) == 2
    assert "there is no benchmark 'nonsense'" in capsys.readouterr().err


WITHOUT_EXTRAS = """
import sys
sys.modules.update(matplotlib=None, rich=None)
from gradwire.trainer.__main__ import main
sys.exit(str([main([*command.split(), "--help"]) for command in sys.argv[1:]]))
"""


def test_only_some_benchmarks_need_more_than_gradwire() -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRAS, "bench", "bench private", "bench step", "bench rules", "simulate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    *errors, statuses = done.stderr.splitlines()
    assert statuses == "[0, 0, 0, 2, 2]"
    assert len(errors) == 2
    assert all("pip install '.[bench]' in a clone" in error for error in errors)


def test_info_and_precompile_are_those_of_collectives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr("gradwire.collectives.precompile.precompile", lambda: 3)
    assert main(["precompile"]) == 3
    assert main(["info", "--help"]) == 0
    assert "algorithm for each message size" in capsys.readouterr().out


def test_info_about_a_key_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("GRADWIRE_KEY_FILE", str(tmp_path / "none"))
    assert main(["info"]) == 1
    assert f"unusable: cannot read the key file {tmp_path / 'none'}" in capsys.readouterr().out


def test_the_cause_in_the_output_of_a_launcher() -> None:
    said = ["gradwire: worker 3 on host b was killed by SIGKILL (9)", "gradwire: worker 1 ended because of that"]
    assert cause_among(["step 7", *said]) == said[0]
    assert cause_among([line.replace("worker", "rank") for line in said]) == said[0].replace("worker", "rank")
