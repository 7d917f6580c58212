"""Says in words in what calls differ, by the texts in which ranks tell each other what they call."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import torch

from gradwire.collectives.reduction import COMBINE

#: One argument: up to the next comma that is in no brackets.
_ARGUMENT = re.compile(r"(?:[^,\[(]|\[[^\]]*\]|\([^)]*\))+")
_TENSOR = re.compile(r"(\w+)(\[.*\])")

#: What is chosen by dtype, shape or codec: where these differ, it says nothing that it differs as well.
_FOLLOWS = "algorithm"


def differing(calls: Iterable[str]) -> list[str]:
    """Return what is not the same in all calls, such as ["dtype", "shape"]; ["the verb"] where they are of several."""
    distinct = list(dict.fromkeys(calls))
    if len({call.partition("(")[0] for call in distinct}) > 1:
        return ["the verb"]
    read = [_read(call) for call in distinct]
    names = dict.fromkeys(name for each in read for name in each)
    found = [name for name in names if len({tuple(each.get(name, ())) for each in read}) > 1]
    return [name for name in found if name != _FOLLOWS] or found


def _read(call: str) -> dict[str, list[str]]:
    """Return the arguments of a call such as 'allreduce(float32[6], sum, prescale=2.0, ring, int8(block=256))', by what they
    are."""
    read: dict[str, list[str]] = defaultdict(list)
    for argument in map(str.strip, _ARGUMENT.findall(call.partition("(")[2].removesuffix(")"))):
        if tensor := _TENSOR.fullmatch(argument):
            read["dtype"].append(tensor[1])
            read["shape"].append(tensor[2])
        elif isinstance(getattr(torch, argument, None), torch.dtype):
            read["dtype"].append(argument)
        elif argument == "splits":
            read["shape"].append(argument)
        elif argument in COMBINE:
            read["op"].append(argument)
        elif argument == "error feedback":
            read[argument].append(argument)
        elif argument.endswith(")"):
            read["codec"].append(argument)
        elif "=" in argument:
            read[argument.partition("=")[0]].append(argument)
        else:
            read[_FOLLOWS].append(argument)
    return read
