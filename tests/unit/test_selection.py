"""Tables of algorithms by size: what is written is what runs, and what makes no sense is refused by name."""

import pytest

from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.selection import Range, choose, default_table, overrides, parse_table
from gradwire.collectives.plan.topology import Topology

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
