"""Tables of algorithms by size: what is written is what runs, and what makes no sense is refused by name; and ranks by host."""

from dataclasses import replace

import pytest

from gradwire.collectives.compression.dense import Float16
from gradwire.collectives.engine.schedule_cache import ScheduleCache, legal_algorithms
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.selection import (
    Range,
    choose,
    default_table,
    overrides,
    parse_table,
)
from gradwire.collectives.schedules.topology import Topology, host_id
from gradwire.collectives.tuning.chooser import Chooser
from gradwire.collectives.tuning.cost_model import Cores, Costs, LinkCost

NAMES = ("ring", "rsag", "native")
ONE_HOST = Topology(0, ((0, 1, 2, 3),))
TWO_RANKS = Topology(0, ((0,), (1,)))
ONE_RANK_A_HOST = Topology(0, ((0,), (1,), (2,)))
SHARED_HOSTS = Topology(0, ((0, 1), (2,)))


def test_a_table_chooses_by_size_and_a_bound_belongs_to_the_upper_range() -> None:
    table = parse_table("ring:0-16K; rsag:16K-1M;native:1M-max", NAMES, "X")
    sizes = [0, 1, (16 << 10) - 1, 16 << 10, (1 << 20) - 1, 1 << 20, 1 << 40]
    assert [choose(table, size) for size in sizes] == ["ring", "ring", "ring", "rsag", "rsag", "native", "native"]
    assert parse_table("ring", NAMES, "X") == (Range("ring", 0, None),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rign:0-max", "'rign'; known are ring, rsag, native"),
        ("ring:0-16K;rsag:32K-max", "without gap or overlap"),
        ("ring:0-16K;rsag:8K-max", "without gap or overlap"),
        ("ring:1-max", "without gap or overlap"),
        ("ring:0-16K", "without gap or overlap"),
        (";", "without gap or overlap"),
        ("ring:16K", "needs a range"),
        ("ring:0-16X;rsag:16X-max", "COLLECTIVES_ALLREDUCE=.*'16X'"),
        ("ring:0-5;rsag:5-", "COLLECTIVES_ALLREDUCE='ring:0-5;rsag:5-': in 'rsag:5-', size ''"),
        ("ring:-5;rsag:5-max", "COLLECTIVES_ALLREDUCE=.*in 'ring:-5', size ''"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_table(text, NAMES, "COLLECTIVES_ALLREDUCE")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("topology", [ONE_HOST, TWO_RANKS, ONE_RANK_A_HOST, SHARED_HOSTS])
@pytest.mark.parametrize("collective", list(PLANNERS))
def test_default_tables_name_what_exists_and_cover_every_size(collective: str, topology: Topology, quick: bool) -> None:
    table = default_table(collective, topology, quick=quick)
    assert {rule.algorithm for rule in table} <= PLANNERS[collective].keys()
    assert table[0].start == 0
    assert table[-1].stop is None
    assert [rule.stop for rule in table[:-1]] == [rule.start for rule in table[1:]]


def test_the_environment_overrides_only_what_it_names() -> None:
    allowed = {"allreduce": ("ring", "rsag"), "broadcast": ("tree", "rsag")}
    tables = overrides(allowed, {"COLLECTIVES_ALLREDUCE": "ring:0-1K;rsag:1K-max", "COLLECTIVES_BROADCAST": ""})
    assert tables == {"allreduce": (Range("ring", 0, 1024), Range("rsag", 1024, None))}
    with pytest.raises(ValueError, match=r"COLLECTIVES_BROADCAST='ring'.*known are tree, rsag"):
        overrides(allowed, {"COLLECTIVES_BROADCAST": "ring"})


def test_a_link_may_prefer_another_algorithm_for_cuda_tensors() -> None:
    names = legal_algorithms({"allreduce": ("native",)})
    tables = {"allreduce": parse_table("ring", names["allreduce"], "X")}
    schedules = ScheduleCache(ONE_RANK_A_HOST, names, tables, 1 << 20, preferred_on_gpu={"allreduce": "native"})
    assert schedules.choose("allreduce", "auto", 64, on_gpu=False) == "ring"
    assert schedules.choose("allreduce", "auto", 64, on_gpu=True) == "native"
    assert schedules.choose("allreduce", "rsag", 64, on_gpu=True) == "rsag"
    assert schedules.choose_for_codec(Float16(), "auto", 64, with_feedback=False, on_gpu=True) == "native"
    shares = schedules.shares(8, 4, on_gpu=True)
    assert (shares.algorithm, [span.length for (span,) in shares.spans]) == ("native", [2, 2, 4])
    assert schedules.shares(8, 4).algorithm == "ring"
    schedules.by_hand = frozenset({"allreduce"})
    assert schedules.choose("allreduce", "auto", 64, on_gpu=True) == "ring"


def test_hosts_are_found_from_what_ranks_report() -> None:
    topology = Topology.from_host_ids(3, ["b", "a", "b", "a", "c"])
    assert topology.hosts == ((0, 2), (1, 3), (4,))
    assert (topology.local_rank, topology.local_size) == (1, 2)
    last = Topology.from_host_ids(4, ["b", "a", "b", "a", "c"])
    assert (last.local_rank, last.local_size) == (0, 1)


def test_the_host_id_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_id()
    assert found
    monkeypatch.setenv("COLLECTIVES_HOST_ID", "rack7")
    assert host_id() == "rack7" != found


EIGHT = tuple((rank,) for rank in range(8))


def costs(hosts: tuple[tuple[int, ...], ...], byte_s: float = 8e-9) -> Costs:
    size = sum(map(len, hosts))
    near, far = LinkCost(1e-7, 0.0, 1e-6, 1e-11), LinkCost(1e-4, byte_s, 1e-6, 1e-11)
    machines, cores = ("a machine",) * len(hosts), (Cores(tuple(range(size)), size),)
    return Costs(hosts, machines, near, far, (byte_s,) * len(hosts), cores, (1.0,) * size, 1e-6, 1e-11)


def measured(costs: Costs, usual: str = "tree") -> Chooser:
    return Chooser(costs, {"allreduce": tuple(PLANNERS["allreduce"])}, 64 << 10, lambda verb, nbytes: usual)


def test_measured_links_choose_few_rounds_for_small_messages_and_few_bytes_for_large_ones() -> None:
    eight = measured(costs(EIGHT, 1e-8))
    assert eight.choose("allreduce", 64) in ("recursive_doubling", "direct")
    assert eight.choose("allreduce", 64 << 20) in ("ring", "rsag", "direct")  # of which none sends more bytes
    table = eight.table("allreduce")  # as it is shown
    assert (table[0].start, table[-1].stop) == (0, None)
    assert len({rule.algorithm for rule in table}) > 1
    near = [size + more for rule in table for size in (rule.start, 64, 1000) for more in (-1, 0, 1) if size + more >= 0]
    for nbytes in (*near, *(3**power for power in range(17))):
        assert choose(table, nbytes) == eight.choose("allreduce", nbytes), nbytes


def test_a_link_keeps_an_algorithm_of_its_own_that_was_not_measured() -> None:
    chooses = Chooser(costs(((0, 1),)), {"barrier": ("tree", "shared")}, 1 << 20, lambda *_: "shared")
    assert chooses.choose("barrier", 1) == "shared"


def test_interleaved_ranks_that_share_an_uplink_cross_it_once() -> None:
    interleaved = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert measured(costs(interleaved)).choose("allreduce", 64 << 20).startswith("hierarchical")


@pytest.mark.parametrize("host", [0, 4, 7])
def test_a_host_on_a_slow_link_is_a_leaf_of_the_tree(host: int) -> None:
    eight = costs(EIGHT)
    slow = replace(eight, uplinks=tuple(10 * each if rank == host else each for rank, each in enumerate(eight.uplinks)))
    seconds = {name: taken for taken, name in measured(slow, "ring").ranked("allreduce", 64 << 20)}
    assert measured(slow, "ring").choose("allreduce", 64 << 20) == min(seconds, key=seconds.__getitem__) == "tree"
    assert seconds["ring"] > 1.4 * seconds["tree"]


def test_near_equals_leave_what_is_usual() -> None:
    for usual in ("rsag", "ring", "direct"):  # the same exchange between two
        assert measured(costs(((0,), (1,))), usual).choose("allreduce", 1 << 20) == usual
