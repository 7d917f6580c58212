"""An extension of griffe, which reads the docstrings for the site: what is said of each argument begins a line of its own.

The docstrings say "dtype: of the result. root: the rank that sends." in running text, which is short in the sources but hard to
find a word in on a wide page.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function


class Arguments(Extension):
    """Makes a list of what a docstring says of the arguments."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Called for each class, when its members are known."""
        names = [parameter.name for parameter in cls.parameters] if "__init__" in cls.members else list(cls.attributes)
        self._rewrite(cls, names)

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Called for each function and method."""
        self._rewrite(func, [parameter.name for parameter in func.parameters])

    def _rewrite(self, described: Class | Function, names: list[str]) -> None:
        if described.docstring is not None:
            described.docstring.value = "\n\n".join(
                as_list(paragraph, names) for paragraph in described.docstring.value.split("\n\n")
            )


def as_list(paragraph: str, names: list[str]) -> str:
    """Return a paragraph as a list, an entry for each argument of which it says something; as it is, if of none."""
    paragraph = re.sub(r"<([A-Z]+)>", r"&lt;\1&gt;", paragraph)  # COLLECTIVES_<VERB> is no tag of HTML
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "$."
    pieces = re.split(rf"(?:^|(?<=[.)]\s))((?:(?:{known})(?:, )?)+): ", paragraph)
    if len(pieces) == 1 or paragraph.lstrip().startswith(("- ", "* ")):
        return paragraph
    before, *rest = pieces
    entries = [f"- `{name}`: {' '.join(text.split())}" for name, text in zip(rest[::2], rest[1::2], strict=True)]
    return "\n".join([*([before.strip(), ""] if before.strip() else []), *entries])
