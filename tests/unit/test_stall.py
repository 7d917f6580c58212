"""When a warning comes, and what it says; ranks that really wait are in tests/ranks/test_stall.py."""

import logging
import re
import time
from contextlib import closing

import pytest

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics.stall import Position, Stalls
from tests.harness import wait_until
from tests.unit.test_monitor import DEADLINE_S, channels

CALL, OTHER = "allreduce(float32[8], sum, ring)", "barrier(tree)"
CALLS = {3: OTHER, 4: CALL}
WAITS = Position(4, is_running=True, calls=CALLS)
BEFORE = Position(3, is_running=False, calls={3: OTHER})


def looked_at(positions: list[Position], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return at which of these positions, half a second apart, an only rank warns that is to do so after two seconds."""
    warned: list[int] = []
    with caplog.at_level(logging.WARNING, "gradwire"), closing(Channel(0, 1)) as channel:
        stalls = Stalls(channel, 2.0, lambda: None)
        for number, position in enumerate(positions):
            caplog.clear()
            assert stalls._look(position, 1000 + number / 2, 2.0) > 0
            warned += [number] * len(caplog.records)
    return warned


def test_a_wait_is_told_of_once_and_again_after_doubled_times(caplog: pytest.LogCaptureFixture) -> None:
    assert looked_at([WAITS] * 50, caplog) == [4, 8, 16, 32]


def test_the_next_wait_counts_from_its_own_start(caplog: pytest.LogCaptureFixture) -> None:
    after = Position(5, is_running=True, calls=CALLS)
    assert looked_at([WAITS] * 3 + [after] * 6, caplog) == [7]


def test_who_works_or_does_nothing_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    progress = [Position(number, is_running=True, calls={}) for number in range(50)]
    assert looked_at(progress, caplog) == []
    assert looked_at([BEFORE] * 50, caplog) == []
    messages = [Position(3, is_running=False, calls={}, message=("recv", frozenset([number]))) for number in range(50)]
    assert looked_at(messages, caplog) == []


def test_a_message_that_is_waited_for_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    waits = Position(3, is_running=False, calls={}, message=("recv(float32[1], src=0)", frozenset({0})))
    assert looked_at([waits] * 7, caplog) == [4]


def warning(position: Position, answers: dict[int, Position], *, ages: dict[int, float] | None = None) -> str:
    """Return what rank 0 of four says when these have answered, some of them not just now."""
    with closing(Channel(0, 4)) as channel:
        stalls = Stalls(channel, 2.0, lambda: None)
        now = time.monotonic()
        for rank, answer in answers.items():
            stalls._answers[rank] = now - (ages or {}).get(rank, 0.0), answer.to_news()
        return stalls._warning(position, 60.0, now)


def test_who_has_not_come_is_told_with_its_place_and_its_last_operation() -> None:
    said = warning(WAITS, {1: WAITS, 2: BEFORE, 3: Position(7, is_running=False, calls={7: CALL})})
    first, second = said.splitlines()
    assert re.fullmatch(
        rf"gradwire: rank 0 has waited 60\.0 s, since \d\d:\d\d:\d\d, in operation 4, {re.escape(CALL)}, for rank 2",
        first,
    )
    assert "rank 2 is at " in second
    assert "test_stall.py" in second
    assert second.endswith(f"the last operation that it finished is 3, {OTHER}")


def test_who_does_not_answer_is_told_with_what_it_last_answered() -> None:
    said = warning(WAITS, {1: BEFORE, 2: WAITS}, ages={1: 30.0})
    assert "for ranks 1, 3\n" in said
    assert re.search(r"rank 1 does not answer: .*; 30 s before, it was at .*test_stall\.py", said)
    assert re.search(r"rank 3 does not answer: [^;]*$", said)


def test_who_calls_something_else_is_told() -> None:
    other = Position(4, is_running=True, calls={4: OTHER})
    said = warning(WAITS, {1: WAITS, 2: other, 3: other})
    assert "; ranks 2, 3 called another operation\n" in said
    assert f"waits in operation 4, {OTHER}" in said


def test_where_all_have_come_the_network_is_to_blame() -> None:
    said = warning(WAITS, dict.fromkeys((1, 2, 3), WAITS))
    assert said.endswith("all ranks have begun it, so messages are slow or lost")


def test_of_many_ranks_some_are_told() -> None:
    with closing(Channel(0, 100)) as channel:
        lines = Stalls(channel, 2.0, lambda: None)._warning(WAITS, 60.0, time.monotonic()).splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[-1].strip() == "and 83 more ranks"


def test_a_rank_that_has_begun_nothing_says_so() -> None:
    assert Position(-1, is_running=False, calls={}).to_news()["text"].endswith("it has finished no operation")
    assert "waits in operation 0" in Position(0, is_running=True, calls={0: CALL}).to_news()["text"]


def test_everyone_answers_whoever_asks_and_the_one_that_asked_too() -> None:
    """Without warnings of their own, and also where several ask at once."""
    with channels(5) as all_watches:
        ranks = [Stalls(channel, None, lambda: BEFORE) for channel in all_watches]
        asked_at = ranks[0].ask()
        for channel in all_watches:
            assert channel.wait_for(lambda channel=channel: len(channel.posts.get("whereabouts", {})) == 5, DEADLINE_S)
        ranks[3].ask()
        wait_until(lambda: not any("does not" in text for text in ranks[0].answers(asked_at, set()).values()))
        assert set(ranks[0].answers(asked_at, {1, 2})) == {1, 2, 3, 4}


def test_of_a_rank_that_has_spoken_a_missing_answer_tells_nothing() -> None:
    with closing(Channel(0, 3)) as channel:
        assert set(Stalls(channel, None, lambda: None).answers(0.0, {1})) == {2}
