"""Compiles all kernels for the CPU ahead of their first use, such as when an image for a cluster is built."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.compression.rehearsal import rehearse
from gradwire.collectives.kernels import cpu_arithmetic, cpu_cache, cpu_kernels, cpu_sockets
from gradwire.collectives.kernels.first_use import FIRST_USE
from gradwire.collectives.kernels.reference.copying import SUMS

#: A part's name, and the function that compiles it.
Part: TypeAlias = tuple[str, Callable[[], object]]


def precompile() -> int:
    """Compile all kernels that are not on the disk yet, and print how many and the folder.

    Returns the exit status: 1 if kernels cannot be compiled or saved.
    """
    try:
        import numba
    except ImportError as error:
        print(f"cannot compile: {error}: pip install numba", file=sys.stderr)
        return 1
    FIRST_USE.reports = False
    begun, before = time.monotonic(), len(FIRST_USE.compiled)
    for compile_part in _shown(_parts()):
        compile_part()
    number = len(FIRST_USE.compiled) - before
    if number:
        print(f"compiled {number} kernels in {time.monotonic() - begun:.0f} s with Numba {numba.__version__}")
    else:
        print("all kernels were compiled already")
    folder = cpu_cache()
    if folder is None:
        print("they cannot be saved, so every process will compile them again", file=sys.stderr)
        return 1
    print(f"saved in {folder}; for another folder, set NUMBA_CACHE_DIR here and in every later run")
    return 0


def _parts() -> list[Part]:
    """Return all kernels for the CPU."""
    from gradwire.collectives.kernels.cpu.arithmetic import DTYPES
    from gradwire.collectives.kernels.cpu.copying import add_pieces
    from gradwire.collectives.kernels.cpu.hashing import hash_words

    links: list[Part] = []
    if sys.platform == "linux":  # elsewhere the process group is the link
        links = [("shared memory", cpu_kernels), ("TCP", cpu_sockets)]
        links += [(f"sums of {str(dtype).removeprefix('torch.')}", partial(cpu_arithmetic, dtype)) for dtype in DTYPES]
    links.append(("hashes", partial(hash_words, torch.zeros(1, dtype=torch.int64, device="cpu"))))
    links.append(("copies", partial(add_pieces, torch.zeros(SUMS, dtype=torch.int64, device="cpu"), [])))
    device = torch.device("cpu")
    codecs: list[Codec | MatrixCodec] = [*(codec() for codec in CODECS.values()), PowerSGD()]
    return links + [(f"codec {codec.name}", partial(rehearse, codec, device, with_feedback=True)) for codec in codecs]


def _shown(parts: Sequence[Part]) -> Iterator[Callable[[], object]]:
    """Yield the function that compiles each part, and show the progress, with rich if it is installed, else in plain lines."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        for number, (name, compile_part) in enumerate(parts, 1):
            print(f"{number}/{len(parts)} {name}", file=sys.stderr, flush=True)
            yield compile_part
        return
    columns = BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(parts))
        for name, compile_part in parts:
            bar.update(task, description=name)
            yield compile_part
            bar.advance(task)
