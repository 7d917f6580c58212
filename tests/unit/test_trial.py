"""Trials of algorithms: a good prediction stays, a wrong one is replaced by what calls show, and near equals do not change."""

from __future__ import annotations

import pytest

from gradwire.collectives.schedules.trial import COUNTED, REPETITIONS, SKIPPED, Trial

RANKED = [(1.0, "ring"), (1.2, "rsag"), (1.4, "tree"), (1.6, "direct"), (9.0, "star")]


def tried(taken: dict[str, float], choice: str = "ring") -> tuple[Trial, list[str]]:
    """Return a trial at its end, and the choices in the order of first use. taken: seconds of a call by choice."""
    trial, used = Trial(RANKED, choice), [choice]
    while not trial.settled:
        used = trial._tried.copy()
        for turn in range(SKIPPED + COUNTED):
            for place in range(len(used)):
                name = used[(place + turn) % len(used)]  # no choice is always the first, or that of one bucket
                assert trial.choice == name
                medians = trial.note(1e3 if turn < SKIPPED else taken[name])
                is_last = turn == SKIPPED + COUNTED - 1 and place == len(used) - 1
                assert (medians is not None) == is_last
        assert medians == [taken[name] for name in used]  # the first calls after a change do not count
        trial.judge(medians)
    return trial, used


@pytest.mark.parametrize(
    ("taken", "used", "stays"),
    [
        ({"ring": 1.09}, ["ring"], "ring"),
        ({"ring": 1.095, "rsag": 1.0}, ["ring", "rsag"], "rsag"),  # a rival's prediction is as close
        ({"ring": 2.0, "rsag": 1.5, "tree": 3.0}, ["ring", "rsag", "tree"], "rsag"),
        ({"ring": 2.0, "rsag": 1.91, "tree": 3.0}, ["ring", "rsag", "tree"], "ring"),
        ({"ring": 0.5}, ["ring"], "ring"),  # it is faster than predicted, and no rival is predicted to come near
        ({"ring": 0.65, "rsag": 0.3}, ["ring", "rsag"], "rsag"),
    ],
)
def test_what_calls_take_decides(taken: dict[str, float], used: list[str], stays: str) -> None:
    trial, were_used = tried(taken)
    assert (were_used, trial.choice) == (used, stays)
    assert trial.note(5.0) is None  # nothing is compared any more
    assert not trial._calls, "it keeps the times of all later calls"


def test_the_default_may_be_the_first_choice_and_one_choice_is_no_trial() -> None:
    trial, used = tried({"tree": 3.0, "ring": 4.0, "rsag": 2.0}, choice="tree")
    assert (used, trial.choice) == (["tree", "ring", "rsag"], "rsag")
    assert Trial(RANKED[:1], "ring").settled


def test_short_calls_are_repeated_and_have_more_rivals() -> None:
    long, some, short = (Trial([(s * seconds, name) for seconds, name in RANKED], "ring") for s in (3e-3, 2e-3, 1e-6))
    assert (long.repetitions, some.repetitions, short.repetitions) == (0, 2, REPETITIONS)
    assert long.judge([6e-3]).endswith("now in turns: ring, rsag, tree")
    assert short.judge([2e-6]).endswith("now in turns: ring, rsag, tree, direct")


@pytest.mark.parametrize(
    ("taken", "again", "stays"),
    [
        ([2.0, 1.5, 1.4, 3.0], [2.0, 1.4, 1.5], "rsag"),  # the tree was only lucky
        ([2.0, 1.5, 1.4, 3.0], [1.3, 1.4, 1.35], "ring"),
        ([2.0, 1.8, 3.0, 3.0], [2.0, 1.95], "ring"),  # one rival is nearly as fast as the first choice
        ([2.0, 1.4, 1.8, 3.0], None, "rsag"),  # nothing is nearly as fast
        ([2.06, 2.0, 2.02, 3.0], None, "ring"),  # nothing is much faster
    ],
)
def test_choices_nearly_as_fast_as_a_rival_are_tried_once_more_before_it_replaces_the_first(
    taken: list[float], again: list[float] | None, stays: str
) -> None:
    trial = Trial([(1e-6 * each, name) for each, name in RANKED], "ring")
    assert trial.judge([2e-6]).endswith("now in turns: ring, rsag, tree, direct")
    outcome = trial.judge([1e-6 * each for each in taken])
    assert trial.settled is (again is None)
    if again is not None:
        assert outcome.endswith(f"again in turns: {', '.join(trial._tried)}")
        assert trial._tried == ["ring", "rsag", "tree"][: len(again)]
        assert trial.choice == "ring"
        trial.judge([1e-6 * each for each in again])
    assert (trial.settled, trial.choice) == (True, stays)


def test_a_finding_is_said_in_words() -> None:
    trial = Trial([(1e-3, "ring"), (2e-3, "rsag")], "ring", "allreduce of 1M")
    found = "allreduce of 1M: ring takes 2 ms (1 predicted)"
    assert trial.judge([2e-3]) == f"{found}; now in turns: ring, rsag"
    assert trial.judge([2e-3, 1e-3]) == f"{found}, rsag takes 1 ms (2 predicted); rsag stays"
