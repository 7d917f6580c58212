"""What a commit is made of: trees as bytes, slots of which one is whole, and which commit is the newest that all hold."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import gradwire as hvd
from gradwire.collectives import CollectiveTimeout
from gradwire.collectives.kernels.reference.memory import SUMS, add_pieces
from gradwire.trainer.elastic import watcher
from gradwire.trainer.elastic.commits import Commits
from gradwire.trainer.elastic.kinds import kind_of
from gradwire.trainer.elastic.memory import Agent, Memory, NamedMemory, Unfinished, open_own
from gradwire.trainer.elastic.parts import Part, newest, takers
from gradwire.trainer.trees import ALIGNMENT_BYTES, decode, encode, flatten, unflatten
from tests.interpreter import FINALIZE, python

LAYOUT = encode({"part": [1, 2, 3]})


@pytest.fixture
def memory() -> Iterator[NamedMemory]:
    agent = Agent(os.getpid(), watcher.started_at(os.getpid()))
    made = NamedMemory(agent, uuid.uuid4().int % 2**40)
    yield made
    watcher.remove(made.path("").name)


def filled(memory: NamedMemory, name: str, number: int, numel: int = 1000) -> None:
    slot = memory.slot(name)
    slot.begin(LAYOUT, numel).fill_(number)
    slot.complete()


def reopened(memory: NamedMemory) -> NamedMemory:
    """What a process that comes later finds."""
    later = object.__new__(NamedMemory)
    vars(later).update(vars(memory), _slots={})
    return later


def test_a_tree_comes_back_as_it_was() -> None:
    tree = {
        "numbers": [1, -2.5, float("inf"), True, None, "text", (1, (2,)), {3, 4}],
        0: {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5), "half": torch.arange(5).bfloat16()},
        "strided": torch.arange(6.0).view(2, 3).t(),
        "flags": torch.tensor([True, False, True]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    found = flatten(tree, "state")
    data, sums = torch.empty(found.nbytes, dtype=torch.uint8), torch.zeros(SUMS, dtype=torch.int64)
    middle = found.nbytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    for start, stop in ((0, middle), (middle, found.nbytes)):
        add_pieces(sums, [*chain.from_iterable(found.pieces(start, stop))], data[start:stop])
    back = unflatten(found.layout, data)
    tensors = {name: back[0][name] for name in back[0]} | {
        name: back[name] for name in ("strided", "flags", "conjugate")
    }
    expected = tree[0] | {name: tree[name] for name in ("strided", "flags", "conjugate")}  # type: ignore[operator]
    assert back["numbers"] == tree["numbers"]
    assert list(back) == list(tree)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert [tensor.dtype for tensor in tensors.values()] == [tensor.dtype for tensor in expected.values()]


class Point(NamedTuple):
    x: int
    y: torch.Tensor


def through_a_tree(value: Any) -> Any:
    """Return what a commit makes of a value."""
    found = flatten(value, "state")
    data, sums = torch.empty(found.nbytes, dtype=torch.uint8), torch.zeros(SUMS, dtype=torch.int64)
    add_pieces(sums, [*chain.from_iterable(found.pieces(0, found.nbytes))], data)
    return unflatten(decode(encode(found.layout)), data)


def test_containers_keep_their_types() -> None:
    ordered = OrderedDict(b=1, a=[2])
    vars(ordered)["_metadata"] = OrderedDict({"": {"version": 3}})
    values: list[Any] = [
        ordered,
        Counter({30: 2, 10: 1}),
        defaultdict(list, {"x": [1]}),
        defaultdict(None, {1: 2}),
        frozenset({1, 2}),
        torch.Size([2, 3]),
        (1, Counter("aab")),
        {"tensor": 1, "attributes": {"named": 2}},
    ]
    back = through_a_tree(values)
    assert back == values
    assert [*map(type, back)] == [*map(type, values)]
    assert vars(back[0]) == vars(ordered)
    assert back[2]["new"] == []
    point = through_a_tree([Point(1, torch.ones(2))])[0]
    assert isinstance(point, Point)
    assert (point.x, point.y.tolist()) == (1, [1, 1])


class Versioned(nn.Module):
    """Loads what version 1 had saved in another unit."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "count"] = state[prefix + "count"] * 100
        super()._load_from_state_dict(state, prefix, metadata, *args)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("are_replicas", [False, True])
def test_models_and_schedulers_take_back_what_they_gave(are_replicas: bool) -> None:
    model = Versioned()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], gamma=0.5)
    for value in (model, optimizer, scheduler):
        keeper = kind_of(value)
        shared, own = map(through_a_tree, keeper.captured(are_replicas=are_replicas))
        keeper.take(shared, own, [], is_same_size=True)
    assert model.count.item() == 1
    rates = []
    for epoch in range(1, 4):
        optimizer.step()
        scheduler.step(epoch)  # this form needs the Counter
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.25, 0.125]


class Odd(dict[str, int]):
    pass


class Phase(str, Enum):
    WARM_UP = "warm-up"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Odd(a=1), r"state\['a'\]\[0\] is of type Odd"),
        (namedtuple("Local", "x")(1), "is of type Local"),
        (Phase.WARM_UP, "is of type Phase"),
        (object(), r"state\['a'\]\[0\] is of type object"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    ],
)
def test_a_value_of_another_kind_is_refused(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        flatten({"a": [value]}, "state")


def test_who_is_killed_in_a_commit_leaves_the_one_before(memory: NamedMemory) -> None:
    filled(memory, "0.0", 1)
    filled(memory, "0.1", 2)
    memory.slot("0.0").begin(LAYOUT, 5000)[:100] = 3  # and no more: it grows, and is not completed
    later = reopened(memory)
    assert later.names() == ["0.0", "0.1"]
    with pytest.raises(Unfinished):
        later.slot("0.0").read()
    record, data = later.slot("0.1").read()
    assert record == {"part": [1, 2, 3]}
    assert data.tolist() == [2] * 1000


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(700)
        file.write(b"\xff")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_flip, "checksum"),
        (lambda path: os.truncate(path, 400), "truncated"),
        (lambda path: path.write_bytes(b"x" * 900), "not a commit"),
        (lambda path: shutil.copy(path.with_name(path.name[:-1] + "1"), path), "checksum"),  # which is of another name
    ],
)
def test_a_damaged_commit_is_refused(memory: NamedMemory, damage: Any, said: str) -> None:
    filled(memory, "0.0", 1)
    filled(memory, "0.1", 1)
    damage(memory.path("0.0"))
    with pytest.raises(ValueError, match=said):
        reopened(memory).slot("0.0").read()


@pytest.mark.parametrize("fault", ["mode", "owner", "link", "symlink"])
def test_what_others_could_have_written_is_refused(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    os.close(open_own(path))
    assert path.stat().st_mode & 0o777 == 0o600
    if fault == "mode":
        path.chmod(0o660)
    elif fault == "owner":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    elif fault == "link":
        path.with_name("other").hardlink_to(path)
    else:
        path.with_name("other").symlink_to(path)
        path = path.with_name("other")
    with pytest.raises(OSError, match="symbolic links" if fault == "symlink" else "must be of user"):
        open_own(path)


def test_memory_that_is_short_leaves_the_commit_before(memory: NamedMemory) -> None:
    hvd.init()
    commits = Commits(memory)
    commits.write({}, {"at": torch.tensor(1)})
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "full")):
        for _ in range(2):
            with pytest.raises(OSError, match="The previous commit is still valid"):
                commits.write({}, {"at": torch.zeros(10_000)})
    restored, faults = Commits(reopened(memory)).restore()
    assert restored is not None
    assert (restored.own, faults) == ({"at": torch.tensor(1)}, [])
    hvd.shutdown()


def test_a_file_is_as_large_as_its_commits(memory: NamedMemory) -> None:
    """So that the shares of ranks that come back fit in the memory that the others have given back."""
    for number, numel in enumerate((100_000, 1000, 200_000)):
        filled(memory, "0.0", number, numel)
        assert numel <= memory.path("0.0").stat().st_size < 1.1 * numel + 10_000
        if number == 0:
            reader = reopened(memory).slot("0.0")
        assert reader.read()[1].tolist() == [number] * numel


def test_a_wish_to_stop_is_not_lost_between_commits() -> None:
    hvd.init()
    wishes = [True]
    commits = Commits(Memory(), lambda: bool(wishes) and wishes.pop())
    for _ in range(3):
        commits.write({}, {})
    assert commits.update_is_due
    assert commits.ask_for_update()
    hvd.shutdown()
    commits.end()


def test_a_commit_that_does_not_end_is_not_waited_for() -> None:
    ends = threading.Event()
    hvd.init(timeout_s=0.2)
    commits = Commits(Memory(), lambda: ends.wait(20))
    commits.write({}, {})
    with pytest.raises(CollectiveTimeout, match="rank 0: commit: not done after 1 s"):
        commits.settle()
    ends.set()
    hvd.shutdown()
    commits.end()


def test_nothing_outlives_the_process_that_launches() -> None:
    """A watcher waits for its end; and what is left where that was killed, too, goes with the next job of the user."""
    launcher = subprocess.Popen(["sleep", "100"])
    ended = Agent(launcher.pid, watcher.started_at(launcher.pid))
    memory = NamedMemory(ended, 1)
    filled(memory, "0.0", 1)
    command = [sys.executable, "-IS", watcher.__file__, str(ended.pid), str(ended.start), ended.prefix]
    watching = subprocess.Popen(command)
    launcher.kill()
    assert watching.wait(20) == 0  # while nobody has reaped the launcher
    assert not memory.path("0.0").exists()
    filled(reopened(memory), "0.0", 1)
    launcher.wait()
    Agent(os.getpid(), watcher.started_at(os.getpid())).watch()
    assert not memory.path("0.0").exists()


LEAVING = """
import atexit, sys, time
import gradwire

class Slow:
    def __del__(self):
        time.sleep(60)  # longer than the test waits

gradwire.slow = Slow()  # which the interpreter frees in its teardown
atexit.register(print, "registered before")
sys.modules["gradwire.trainer.elastic.run"]._leave_soon()
atexit.register(print, "registered after")
atexit.register(sys.stderr.close)
print("a rank is lost", file=sys.stderr)
sys.exit(0)
"""


def test_a_rank_that_is_started_again_ends_without_freeing_its_objects() -> None:
    command = [python(), "-c", LEAVING]
    environment = {**os.environ, FINALIZE: "yes", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    said = "registered after\nregistered before\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, said, "a rank is lost\n")


def test_a_rank_that_nothing_starts_again_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    before = threading.active_count()
    sys.modules["gradwire.trainer.elastic.run"]._leave_soon()
    assert threading.active_count() == before


def part(commit: tuple[int, int, int], rank: int, start: int = 0, stop: int = 0) -> Part:
    return Part(*commit, rank, start, stop, 128, f"{rank}.0")


def host(commit: tuple[int, int, int], *own: int, replicas: tuple[int, ...] = ()) -> list[Part]:
    """Two ranks that share what all have in common, and what they keep for others."""
    shares = [part(commit, rank, 64 * place, 64 * place + 64) for place, rank in enumerate(own)]
    return [*shares, *(part(commit, rank) for rank in replicas)]


OLD, NEW = (1, 7, 4), (1, 8, 4)
EARLIER = host(OLD, 0, 1, replicas=(2, 3)), host(OLD, 2, 3, replicas=(0, 1))


@pytest.mark.parametrize(
    ("later", "commit", "whole"),
    [
        ((host(NEW, 0, 1, replicas=(2, 3)), host(NEW, 2, 3, replicas=(0, 1))), NEW, (0, 1)),
        ((host(NEW, 0, 1, replicas=(2, 3)), []), NEW, (0,)),
        ((host(NEW, 0, 1, replicas=(2,)), host(NEW, 2)), OLD, (0, 1)),
        ((host(NEW, 0), host(NEW, 2, 3)), OLD, (0, 1)),
        ((host((2, 8, 4), 0, 1), host(NEW, 2, 3)), OLD, (0, 1)),  # ranks that went different ways
    ],
)
def test_the_newest_commit_that_is_held_whole(
    later: tuple[list[Part], list[Part]], commit: tuple[int, int, int], whole: tuple[int, ...]
) -> None:
    found, lacks = newest([old + new for old, new in zip(EARLIER, later, strict=True)])
    assert found is not None
    assert (found.commit, found.whole) == (commit, whole)
    assert bool(lacks) is (commit == OLD)


def test_nothing_is_restored_of_which_a_part_is_lost() -> None:
    said = "commit 7 is incomplete, so it is not used: no host has the state of ranks 2, 3"
    assert newest([host(OLD, 0, 1), []]) == (None, [said])


@pytest.mark.parametrize(("size", "now"), [(4, 4), (4, 3), (3, 4), (2, 7), (5, 1)])
def test_every_rank_goes_on_with_a_part_and_every_part_with_a_rank(size: int, now: int) -> None:
    by_part = [takers(saved, size, now) for saved in range(size)]
    assert all(by_part)
    assert set().union(*by_part) == set(range(now))
    assert all(rank in by_part[rank % size] for rank in range(now))
