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


def test_a_turn_is_compared_with_the_plain_one_of_its_round() -> None:
    """The second round is slower than the first, in all modes."""
    times = [(1.0, 1.5, 1.25), (10.0, 20.0, 10.0), (4.0, 10.0, 4.0)]
    taken = [{mode: {"ms": {"1K": ms}} for mode, ms in zip(MODES, each, strict=True)} for each in times]
    plain, key, checksum = compare(taken)
    assert (plain.over_plain, plain.least, plain.most) == (1.0, 1.0, 1.0)
    assert (key.case, key.mode, key.turns_ms) == ("1K", "key", [1.5, 20.0, 10.0])
    assert (key.over_plain, key.least, key.most) == (2.0, 1.5, 2.5)
    assert (checksum.over_plain, checksum.least, checksum.most) == (1.0, 1.0, 1.25)
