"""What the network between hosts carries, with a key and without one: everything that crosses the switch is recorded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.bench.hosts import Cluster, HostsError, check_machine, plan_ranks
from gradwire.collectives import Communicator
from gradwire.collectives.control.key import Key
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds, wide_rows
from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.exact import contribution, on_host, reduced
from tests.ranks.training import on_ranks

DEADLINE_S = 60.0
WINDOW_BYTES = 16
#: A deadline that no test waits for.
LONG_S = 1000.0
#: What the names of a meeting and its token are in these jobs.
NAME, TOKEN = "a-name-of-the-meeting", "a-token-of-the-meeting-which-is-secret"
ARGUMENT = "--an-argument-of-the-command-that-nobody-else-is-to-read"

#: Broadcasts and sums known numbers, between hosts and by each of their verbs, and sends them as control records.
PROGRAM = f"""
import json, os, secrets, sys
texts = [{NAME!r}, {TOKEN!r}]
secrets.token_hex = lambda nbytes: texts.pop(0) if texts else nbytes * "5"
import torch
import gradwire as hvd
from gradwire.collectives import Communicator

hvd.init(timeout_s=30)
numbers = torch.frombuffer(bytearray(open("numbers", "rb").read()), dtype=torch.float32)
communicator = Communicator(timeout_s=30)
for algorithm in ("recursive_doubling", "ring"):
    landed = numbers.clone() if hvd.rank() == 0 else torch.zeros_like(numbers)
    communicator.allreduce(landed, algorithm=algorithm)
    assert torch.equal(landed, numbers)
coded = torch.full((1000,), 1.0 + hvd.rank())
communicator.allreduce(coded, compression="int8")
assert coded.tolist() == 1000 * [hvd.size() * (hvd.size() + 1) / 2]
communicator.post("a topic", numbers[:64].tolist())
communicator.allgather_record("a record that nobody else is to read")
if hvd.rank() == 0:
    print("; ".join(communicator.routes))
communicator.close()
if "GRADWIRE_KEY_FILE" in os.environ:
    for link, algorithm in (("auto", "native"), ("process_group", "auto")):
        try:
            with Communicator(link=link, timeout_s=30) as refused:
                refused.allreduce(torch.ones(1), algorithm=algorithm)
            raise SystemExit("gloo was used")
        except (ValueError, hvd.CollectiveError):
            pass
hvd.shutdown()
"""
KNOWN = {
    "token": TOKEN.encode(),
    "command line": ARGUMENT.encode(),
    "record": b"a record that nobody else is to read",
}


@contextmanager
def recorded(cluster: Cluster, path: Path) -> Iterator[None]:
    """Record what crosses the switch to a file."""
    command = cluster.switch.enter([python(), str(ROOT / "tests" / "capture.py"), str(path)])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def output_of(cluster: Cluster, hosts: int, folder: Path, environment: dict[str, str]) -> str:
    """Return what the ranks of a job print, one on each host."""
    common = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []
        for rank in plan_ranks(hosts, hosts, ""):
            command = cluster.hosts[rank.host].enter(["env", "--chdir", str(folder), python(), "program.py", ARGUMENT])
            variables = common | rank.environment | environment
            started.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
            stack.callback(started[-1].kill)
        printed = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * hosts
    return "".join(printed)


def windows(content: bytes) -> np.ndarray:
    """Return the pieces of WINDOW_BYTES bytes that begin at each byte, as pairs of words."""
    pieces = np.lib.stride_tricks.sliding_window_view(np.frombuffer(content, dtype=np.uint8), WINDOW_BYTES)
    return np.ascontiguousarray(pieces).view([("first", "<u8"), ("second", "<u8")]).ravel()


def found_in(heard: bytes, secrets: dict[str, bytes]) -> set[str]:
    """Return the names of the secrets of which any piece of WINDOW_BYTES bytes was heard."""
    every = np.unique(windows(heard))
    return {name for name, secret in secrets.items() if np.isin(windows(secret), every).any()}


@pytest.mark.parametrize("hosts", [2, *wide_rows((4,))])
def test_who_listens_to_the_network_reads_nothing(hosts: int, tmp_path: Path) -> None:
    """Without a key, the same program shows everything."""
    (tmp_path / "program.py").write_text(PROGRAM)
    numbers = np.random.default_rng(7).standard_normal(1 << 14, dtype=np.float32).tobytes()
    (tmp_path / "numbers").write_bytes(numbers)
    key = Key.made()
    key.write(tmp_path / "key")
    secrets = KNOWN | {"numbers": numbers, "key": key.secret, "key in digits": key.to_text().encode()}
    found: list[set[str]] = []
    routes: list[str] = []
    try:
        check_machine()
        with Cluster(hosts, "10gbit") as cluster:
            for environment in ({}, {"GRADWIRE_KEY_FILE": "key"}):
                heard = tmp_path / f"heard.{len(found)}"
                with recorded(cluster, heard):
                    routes.append(output_of(cluster, hosts, tmp_path, environment))
                found.append(found_in(heard.read_bytes(), secrets))
    except HostsError as error:
        pytest.skip(str(error))
    assert found[0] == {*KNOWN, "numbers"}
    assert found[1] == set()
    assert "encrypted TCP" not in routes[0]
    assert "encrypted TCP" in routes[1]


def made(link: str | None = None) -> Communicator:
    return Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link=link)


@on_ranks(3, initialized=False)
def test_checksums() -> None:
    """All ranks have them, or all raise."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVES_CHECKSUM", "1")
        with made("tcp") as communicator:
            assert any("TCP with checksums" in route for route in communicator.routes)
            for numel in (0, 1, 1000, 1 << 18):
                mine = contribution(rank, size, numel, torch.float32)
                communicator.allreduce(mine)
                assert torch.equal(mine, reduced(size, numel, torch.float32))
        if rank == 0:
            patch.delenv("COLLECTIVES_CHECKSUM")
        with pytest.raises(ValueError, match="COLLECTIVES_CHECKSUM=1 on ranks 1, 2"):
            made("tcp")
        patch.setenv("COLLECTIVES_CHECKSUM", "crc")
        with pytest.raises(ValueError, match="must be 0 or 1"):
            made()
    with made("tcp") as communicator:
        assert not any("checksums" in route for route in communicator.routes)


def with_a_key_too_late(path: str, _: str) -> None:
    """Ranks that have met without it do not take plaintext for encrypted."""
    made().close()
    hvd.init(timeout_s=EXCHANGE_TIMEOUT_S)
    with pytest.raises(ValueError, match="joined without this key"):
        hvd.init(key_file=path)
    hvd.shutdown()
    os.environ["GRADWIRE_KEY_FILE"] = path
    with pytest.raises(ValueError, match="have met without the key"):
        made()


def with_a_key_of_init(path: str, another: str) -> None:
    """It is that of the process, also for what is made without init(), and after shutdown()."""
    hvd.init(key_file=path, timeout_s=EXCHANGE_TIMEOUT_S)
    hvd.init(key_file=path)
    assert_encrypted()
    hvd.shutdown()
    assert_encrypted()
    with pytest.raises(ValueError, match="another key"):
        hvd.init(key_file=another)


def beside_gloo_between_hosts(path: str, _: str) -> None:
    """All that connects ranks refuses the group over which DDP and the script would send in clear, on all of them."""
    os.environ["GRADWIRE_KEY_FILE"] = path
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, hvd.ddp_comm_hook("int8"))
    with on_host(f"host {dist.get_rank()}"):
        for connect in (lambda: model(torch.ones(2)).sum().backward(), made, hvd.init):
            with pytest.raises(ValueError, match=r'gloo between 2 hosts.*init_process_group\("gradwire"\)'):
                connect()
        group = dist.new_group(backend="gradwire")
        with Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S) as communicator:
            assert any("encrypted TCP" in route for route in communicator.routes)
    assert not hvd.is_initialized()


def assert_encrypted() -> None:
    for group in (None, dist.new_group(backend="gradwire")):
        with Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S, link="tcp") as communicator:
            assert any("encrypted TCP" in route for route in communicator.routes)


def who_differ(keys: list[str], port: int, serves: bool) -> list[tuple[int, ...]]:
    """Return whom the errors name when ranks meet: first those of a process group, then those of init(). A rank that cannot read
    its key raises ValueError. serves: whether rank 0 serves the store of init()."""
    rank = dist.get_rank()
    os.environ.pop("GRADWIRE_KEY_FILE", None)
    if keys[rank]:
        os.environ["GRADWIRE_KEY_FILE"] = keys[rank]
    place = {"RANK": str(rank), "WORLD_SIZE": str(len(keys)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    named: list[tuple[int, ...]] = []
    can_read = not keys[rank] or os.access(keys[rank], os.R_OK)
    for meet in (Communicator, partial(hvd.init, key_file=keys[rank] or None)):
        with pytest.raises(hvd.CollectiveError if can_read else ValueError) as caught:
            meet(timeout_s=LONG_S)
        if isinstance(caught.value, hvd.CollectiveError):
            assert type(caught.value) is hvd.CollectiveError  # no deadline has passed, and no rank is lost
            assert caught.value.__cause__ is None  # it says all
            named.append(caught.value.ranks)
        del caught  # its traceback holds the store
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.pop("GRADWIRE_KEY_FILE", None)
        os.environ |= place | {"TORCHELASTIC_USE_AGENT_STORE": str(not serves), "TORCHELASTIC_RUN_ID": str(port)}
    return named


@pytest.mark.parametrize(
    ("keys", "odd", "serves"),
    [
        (("key", "key", ""), 2, False),
        (("", "key", "key"), 0, False),
        (("key", "another", "key"), 1, False),
        (("", "key", ""), 1, False),
        (("key", "key", "missing"), 2, False),
        (("missing", "key", "key"), 0, False),
        (("missing", "key", "key"), 0, True),
    ],
    ids=[
        "no key",
        "rank 0 has no key",
        "another key",
        "others have no key",
        "no file",
        "rank 0 has no file",
        "rank 0 has no file, and serves the store",
    ],
)
def test_all_ranks_learn_soon_whose_key_differs(
    failing_world: Callable[[int], World], tmp_path: Path, keys: tuple[str, ...], odd: int, serves: bool
) -> None:
    for name in {*keys} - {"", "missing"}:
        Key.made().write(tmp_path / name)
    world = failing_world(len(keys))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if serves:
        del store  # the port is free then
    for named in world.run(who_differ, [key and str(tmp_path / key) for key in keys], port, serves):
        assert all(odd in ranks for ranks in named), named


@pytest.mark.parametrize("function", [with_a_key_too_late, with_a_key_of_init, beside_gloo_between_hosts])
def test_a_process_has_one_key(ranks: Worlds, tmp_path: Path, function: Callable[[str, str], None]) -> None:
    paths = [tmp_path / "key", tmp_path / "another"]
    for path in paths:
        Key.made().write(path)
    world = ranks.fresh(2)
    world.run(function, *map(str, paths))
    world.close()
