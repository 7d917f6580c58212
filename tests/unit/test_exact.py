"""The rows of parameters that stand for their product."""

from itertools import combinations, product

from tests.ranks.exact import cover


def test_few_rows_hold_every_two_values_that_can_meet() -> None:
    parameters = (range(3), "abcdefghij", "vwxyz", (True, False))
    rows = cover(*parameters, clash=lambda one, other: (one, other) == ("b", "w"))
    met = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    places = [[(place, value) for value in values] for place, values in enumerate(parameters)]
    pairs = {pair for one, other in combinations(places, 2) for pair in product(one, other)}
    assert pairs - met == {((1, "b"), (2, "w"))}
    assert len(rows) < 60 < len([*product(*parameters)]) / 4
    assert cover("ab", "x") == [("a", "x"), ("b", "x")]
