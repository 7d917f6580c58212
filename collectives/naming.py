"""Names by which users choose what is plugged in."""

from __future__ import annotations

import re
from collections.abc import Iterable


def check_name(kind: str, name: object, taken: Iterable[str]) -> None:
    """Raise ValueError unless `name` is a word in lower case that nothing of this kind has yet."""
    article = "an" if kind[0] in "aeiou" else "a"
    if not isinstance(name, str) or re.fullmatch("[a-z][a-z0-9_]*", name) is None:
        raise ValueError(
            f"the name of {article} {kind} must be lower-case letters, digits and underscores, not {name!r}"
        )
    if name in taken:
        raise ValueError(f"{article} {kind} called {name!r} exists already; taken are {', '.join(taken)}")
