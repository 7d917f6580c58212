"""The flags of a collective's benchmark. Flags with the meaning of a flag of nccl-tests have its name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from gradwire.bench.options import count_from, picture, size
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.registry import make_codec

NOT_HERE = """\
nccl-tests' flags that are not here: -m, for a turn is one operation, and what launching many at once saves is not measured;
-z, for every operation is waited for; -t and -g, for a process is one rank with one device. allreduce and broadcast have an
in-place form only: out of place, the copy of the input is timed, too."""

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
OPS = ("sum", "average", "min", "max", "product")
NCCL_TESTS_NAMES = {"half": "float16", "float": "float32", "double": "float64", "avg": "average", "prod": "product"}


def _names(known: Sequence[str], text: str) -> list[str]:
    name = NCCL_TESTS_NAMES.get(text, text)
    if name != "all" and name not in known:
        also = [alias for alias, meant in NCCL_TESTS_NAMES.items() if meant in known]
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join([*known, *also])}, all")
    return list(known) if name == "all" else [name]


def _codecs(text: str) -> dict[str, tuple[Codec, bool]]:
    """Return, by names on the command line, pairs of a codec and whether it has error feedback."""
    chosen: dict[str, tuple[Codec, bool]] = {}
    for label in text.split(","):
        name, plus, feedback = label.partition("+")
        try:
            codec = make_codec(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if name == "none" or (plus and feedback != "ef"):
            raise argparse.ArgumentTypeError(f"{label!r} is not a codec, or a codec and +ef; none is always compared")
        if plus and not codec.takes_feedback:
            raise argparse.ArgumentTypeError(f"{label!r}: residuals of {name} would grow in every call: leave out +ef")
        chosen[label] = codec, bool(plus)
    return chosen


def size_range(min_bytes: int, max_bytes: int, step_bytes: int | None, step_factor: int) -> list[int]:
    """Return the sizes from `min_bytes` to at most `max_bytes`. If `step_bytes` is given, `step_factor` is ignored.

    Raises ValueError for an empty range, or a step that does not grow.
    """
    if not 1 <= min_bytes <= max_bytes:
        raise ValueError(f"no size from {min_bytes} to {max_bytes} bytes")
    if step_bytes is not None:
        if step_bytes < 1:
            raise ValueError(f"step of {step_bytes} bytes does not grow")
        return list(range(min_bytes, max_bytes + 1, step_bytes))
    if step_factor < 2:
        raise ValueError(f"step factor {step_factor} does not grow")
    sizes = [min_bytes]
    while sizes[-1] * step_factor <= max_bytes:
        sizes.append(sizes[-1] * step_factor)
    return sizes


def parse_arguments(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m gradwire.bench {name}",
        description=f"Time and check {name} with every algorithm, nccl-tests' way. Run under torchrun.",
        epilog=NOT_HERE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    smallest = "8" if name == "latency" else "1K"
    add("-b", "--minbytes", type=size, default=smallest, help=f"smallest size, e.g. 8, 4K, 32M (default {smallest})")
    add("-e", "--maxbytes", type=size, default="64M", help="largest size (default 64M)")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("-i", "--stepbytes", type=size, help="bytes from one size to the next")
    steps.add_argument(
        "-f",
        "--stepfactor",
        type=partial(count_from, 2),
        default=4,
        help="factor from one size to the next (default 4)",
    )
    add("-n", "--iters", type=partial(count_from, 1), default=20, help="timed turns of each competitor (default 20)")
    add("-w", "--warmup_iters", type=partial(count_from, 0), default=1, help="untimed turns before (default 1)")
    add("-c", "--check", type=partial(count_from, 0), default=1, help="checked turns; 0 checks nothing (default 1)")
    dtypes, ops = partial(_names, tuple(DTYPES)), partial(_names, OPS)
    add("-d", "--datatype", type=dtypes, default="float", help="torch's or nccl-tests' name, or all (default float)")
    add("-o", "--op", type=ops, default="sum", help="reduction: sum, avg, min, max, prod or all (default sum)")
    add("-r", "--root", type=partial(count_from, 0), default=0, help="root, of collectives that have one (default 0)")
    add(
        "--algorithm",
        type=lambda text: text.split(","),
        help="comma-separated names (default: auto and all that apply)",
    )
    if name == "allreduce":
        add(
            "--codec",
            type=_codecs,
            help="comma-separated names, with +ef for error feedback: these, no compression and torch.distributed on gaussian"
            " float32, with ratio and relative error; then #wrong is what differs from rank 0",
        )
    add(
        "--peers",
        action="store_true",
        help="MPI too, as an algorithm of that name: run under mpirun; needs pip install '.[peers]' in a clone of gradwire",
    )
    add(
        "--shared",
        action="store_true",
        help="in-place buffers from Communicator.empty(), for all that are compared",
    )
    add(
        "--backend",
        choices=("gloo", "nccl"),
        help="torch.distributed's backend (default: nccl if every rank has a GPU)",
    )
    add("-T", "--timeout", type=float, default=300.0, help="seconds that one collective may take (default 300)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--csv", type=Path, metavar="FILE", help="write rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw time and bus bandwidth over size")
    chosen = parser.parse_args(arguments)
    if name != "allreduce":
        chosen.codec = None
    elif chosen.codec:
        compressible = chosen.datatype == ["float32"] and set(chosen.op) <= {"sum", "average"}
        if not compressible or chosen.algorithm or chosen.peers or chosen.shared:
            parser.error("--codec goes with float, sum and avg, and without --algorithm, --peers, --shared")
    try:
        chosen.sizes = size_range(chosen.minbytes, chosen.maxbytes, chosen.stepbytes, chosen.stepfactor)
    except ValueError as error:
        parser.error(str(error))
    return chosen
