"""Check that `bench predicted` compares the selected choice with the best one by times of the same turns."""

from dataclasses import replace

from gradwire.bench.predicted import PredictedRow, codec_over_best, codec_pays_from, measured_twice, over_best

K = 1 << 10

#: 'auto' selected ring, whose second time is longer than its first. Tree has only a first time, which was longer than ring's.
ROWS = [
    PredictedRow(K, "ring", "none", seconds=1.5, predicted_s=1.0, chosen=True, first_s=1.0),
    PredictedRow(K, "rsag", "none", seconds=1.2, predicted_s=1.1, chosen=False, first_s=1.1),
    PredictedRow(K, "tree", "none", seconds=1.15, predicted_s=1.0, chosen=False),
    PredictedRow(K, "auto", "int8", seconds=0.6, predicted_s=0.5, chosen=True, first_s=0.6),
    PredictedRow(K, "auto", "int4", seconds=0.5, predicted_s=0.6, chosen=False, first_s=0.7),
]


def test_the_selected_and_the_best_choices_are_compared_by_their_second_measurement() -> None:
    assert over_best(ROWS) == [(K, 1.5 / 1.2)]
    assert codec_over_best(ROWS) == [(K, 0.6 / 0.5)]
    assert measured_twice(ROWS) == [1.5, 1.2 / 1.1, 1.0, 0.7 / 0.5]


def test_an_older_file_compares_all() -> None:
    older = [replace(row, first_s=None) for row in ROWS]
    assert over_best(older) == [(K, 1.5 / 1.15)]
    assert measured_twice(older) == []


def test_a_codec_pays_from_the_size_after_the_last_at_which_it_was_slower() -> None:
    slower = [
        replace(row, nbytes=K // 2, seconds=2.0) if row.codec != "none" else replace(row, nbytes=K // 2) for row in ROWS
    ]
    assert codec_pays_from([*slower, *ROWS], "int8") == K
    assert codec_pays_from(slower, "int8") is None
