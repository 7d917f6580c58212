"""All codecs, by the names that users give."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from gradwire.collectives.compression.codec import Codec, MatrixCodec, Raw
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.parsing import check_name

#: The classes of codecs that encode any buffer, by name. This package registers its own codecs as other packages do.
CODECS: dict[str, type[Codec]] = {Raw.name: Raw}

_Registered = TypeVar("_Registered", bound=type[Codec])


def register_codec(codec: _Registered) -> _Registered:
    """Add a codec that can be used by name like those of this package. Returns the codec, so this function can be a decorator.

    codec: a frozen dataclass that derives from Codec. It has its own lower-case name, and a default for every setting. Every
    rank must register this class before the codec is used.

    Raises TypeError for anything else, ValueError for a name that is malformed or taken.
    """
    given: Any = codec  # mypy expects all attributes of a Codec
    is_codec = isinstance(given, type) and issubclass(given, Codec) and hasattr(given, "name") and is_dataclass(given)
    if not is_codec or any(field.name == "name" for field in fields(given)):
        raise TypeError(
            f"{codec!r} must be a dataclass that derives from Codec, with `name: ClassVar[str]`; put @register_codec above "
            "@dataclass(frozen=True)"
        )
    name = codec.name
    check_name("codec", name, (*CODECS, PowerSGD.name))
    try:
        made = codec()
    except TypeError as error:
        raise TypeError(f"codec {name!r}: it needs all methods, and a default for every setting ({error})") from error
    try:
        is_value = made == codec() and hash(made) == hash(codec())
    except TypeError:  # it has no hash
        is_value = False
    if not is_value:
        raise TypeError(
            f"codec {name!r} is not frozen: decorate it with @dataclass(frozen=True), so that equal settings make equal codecs"
        )
    CODECS[name] = codec
    return codec


def find_codec(codec: str | Codec | MatrixCodec) -> Codec | MatrixCodec:
    """Return the codec of a name, with its defaults; return a codec unchanged.

    Raises ValueError, which lists the names and says which one is near, for anything else.
    """
    if isinstance(codec, (Codec, MatrixCodec)):
        return codec
    known: dict[str, type[Codec] | type[MatrixCodec]] = {**CODECS, PowerSGD.name: PowerSGD}
    if not isinstance(codec, str):
        raise ValueError(f"a codec or its name ({', '.join(known)}) is needed, not {codec!r}")
    if codec not in known:
        meant = "".join(f" (did you mean {name!r}?)" for name in get_close_matches(codec.lower(), known, n=1))
        raise ValueError(f"no codec is called {codec!r}{meant}; known are {', '.join(known)}")
    return known[codec]()


def make_codec(codec: str | Codec) -> Codec:
    """Return a codec like find_codec. Also raises ValueError for a matrix codec, which cannot encode a single buffer."""
    made = find_codec(codec)
    if isinstance(made, MatrixCodec):
        raise ValueError(
            f"{made.name} compresses matrices, not buffers: it is for DistributedOptimizer(compression=) and ddp_comm_hook; "
            f"codecs of any buffer are {', '.join(CODECS)}"
        )
    return made
