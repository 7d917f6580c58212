"""What `bench private` gives to the ranks of a turn, and what it makes of their times."""

from pathlib import Path

from gradwire.bench.private.run import MODES, compare, planned
from gradwire.collectives.control.key import key_from
from gradwire.collectives.environment import checksum_wanted
from tests.unit.test_private import KEY


def test_only_the_ranks_of_one_mode_have_a_key_and_only_those_of_another_checksums(tmp_path: Path) -> None:
    """Whatever this process has: the settings of a turn come after its environment."""
    KEY.write(path := tmp_path / "key")
    inherited = {"GRADWIRE_KEY_FILE": str(path), "COLLECTIVES_CHECKSUM": "1"}
    for mode in MODES:
        for rank in planned(mode, path, "10gbit"):
            environment = inherited | rank.environment
            assert key_from(environment) == (KEY if mode == "key" else None)
            assert checksum_wanted(environment) == (mode == "checksum")


def test_a_mode_is_compared_with_plain_by_medians_of_the_rounds() -> None:
    """One turn that something has disturbed, of eight, does not matter."""
    times = [(1.0, 1.5, 1.0), (1.0, 1.5, 8.0), *6 * [(1.0, 1.5, 1.0)]]
    taken = [{mode: {"ms": {"1K": ms}} for mode, ms in zip(MODES, each, strict=True)} for each in times]
    plain, key, checksum = compare(taken)
    assert (plain.over_plain, plain.interval) == (1.0, None)
    assert (key.case, key.mode, key.turns_ms) == ("1K", "key", 8 * [1.5])
    assert (key.over_plain, key.interval) == (1.5, (1.5, 1.5))
    assert (checksum.over_plain, checksum.interval) == (1.0, (1.0, 1.0))
    assert compare(taken[:7])[1].interval is None
