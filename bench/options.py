"""Flags that several benchmarks have, and their types, which raise ArgumentTypeError for an invalid text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gradwire.collectives.parsing import parse_size


def size(text: str) -> int:
    """Return the number of bytes or elements of a text such as 32M."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_from(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def number_from(least: float, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g}")
    return number


def names_of(known: Sequence[str], text: str) -> list[str]:
    """Return the names in a comma-separated text; for `all`, all known names."""
    names = list(known) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}, all")
    return names


def picture(text: str) -> Path:
    """Return the path of a picture to draw. Raises ArgumentTypeError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install '.[bench]' in a clone of gradwire")
    return Path(text)


def add_results(parser: argparse.ArgumentParser, drawn: str = "") -> None:
    """Add the flags of files with results. drawn: what a picture shows; no picture without it."""
    parser.add_argument("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    if drawn:
        parser.add_argument("--plot", type=picture, metavar="FILE.png", help=f"draw {drawn}")


def add_turns(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the flags of training in turns. steps: the default of the steps in one turn."""
    add, positive = parser.add_argument, partial(count_from, 1)
    add("--steps", type=positive, default=steps, help=f"steps in one turn (default {steps})")
    add("--rounds", type=positive, default=20, help="timed turns of each competitor (default 20)")
