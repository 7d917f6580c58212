"""`gradwire bench codec`: the time of encoding and decoding, compared with a copy and with torch's own operations.

For each codec, a copy, our four operations, and torch's for the same codec take turns (see `gradwire.bench.timing`).
Times are the processor time of this process on one core, or the time of a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.bench.codec.turns import CODECS, COPIED_BYTES, CodecInputs, CodecRow, measure
from gradwire.bench.options import count_from, names_of, picture, size
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import Protocol

#: Torch's operations need whole blocks. The largest are the chunks of chunktopk.
MULTIPLE = 4096
DEFAULT_ELEMENTS = {"cpu": 16 << 20, "cuda": 128 << 20}

NOTES = """\
GB/s: 1e9 bytes of float32 a second. moved: bytes that the operation has to read and write, per element; of copy: its
rate of moving them, over that of a copy. torch/ours: time of torch's own operations for the same codec over ours;
plain/ours: as expressions do them, which allocate, instead of with temporaries kept from call to call. error:
relative, in L2, against float64. encode_ef: with error feedback. decode_add: added to what is there."""


def element_count(text: str) -> int:
    count = size(text)
    if count < MULTIPLE or count % MULTIPLE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive multiple of {MULTIPLE}")
    return count


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench codec",
        description="Time and check encoding and decoding, beside a copy and torch's own operations, on one core or GPU.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=tuple(DEFAULT_ELEMENTS), default="cpu", help="where to encode (default cpu)")
    add(
        "-n",
        "--elements",
        type=element_count,
        help=f"a multiple of {MULTIPLE} (default 16M; on a GPU 128M)",
    )
    add("--codec", type=partial(names_of, tuple(CODECS)), default="all", help="comma-separated; default all")
    add("--iters", type=partial(count_from, 1), default=10, help="timed turns of each competitor (default 10)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw the rates, ours and torch's")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    chosen.elements = chosen.elements or DEFAULT_ELEMENTS[chosen.device]
    return chosen


def format_header(meta: dict[str, Any]) -> list[str]:
    return [
        f"# codec: {meta['elements']} elements, {4 * meta['elements'] / 1e6:.0f} MB of float32, on {meta['where']},"
        f" {meta['iters']} interleaved turns",
        f"# {meta['device']}, torch {meta['torch']}",
        *(f"# {line}" for line in NOTES.splitlines()),
        "#",
        "#                             wire  moved                    torch   plain        error",
        "# codec           operation  (B/el) (B/el)    GB/s of copy   /ours   /ours  gaussian  laplace  #wrong",
    ]


def format_rows(rows: Sequence[CodecRow]) -> list[str]:
    return [
        f"  {row.codec:15} {row.operation:10} {row.wire_bytes:6.3f} {row.moved_bytes:6.2f} {row.rate_GBps:7.2f}"
        f" {row.of_copy:7.3f} {row.torch_over_ours:7.2f} {row.plain_over_ours:7.2f}"
        f" {row.relative_error_gaussian:9.5f} {row.relative_error_laplace:8.5f} {row.wrong:3}"
        + (f" (torch: {row.torch_wrong})" if row.torch_wrong else "")
        for row in rows
    ]


def run(chosen: argparse.Namespace) -> list[CodecRow]:
    device = torch.device(chosen.device)
    meta = {
        **software_and_machine(device),
        "where": "one core" if device.type == "cpu" else "one GPU",
        "elements": chosen.elements,
        "iters": chosen.iters,
        "time": f"median over interleaved turns, {'processor' if device.type == 'cpu' else 'GPU'} time",
    }
    print("\n".join(format_header(meta)), flush=True)
    numbers = CodecInputs(chosen.elements, device)
    rows: list[CodecRow] = []
    copies_s: list[float] = []
    for name in chosen.codec:
        measured, copy_s = measure(name, numbers, Protocol(chosen.iters, warmup_iters=1))
        print("\n".join(format_rows(measured)), flush=True)
        rows += measured
        copies_s.append(copy_s)
    meta["copy_GBps"] = 4 * chosen.elements / float(np.median(copies_s)) / 1e9
    wrong = sum(row.wrong + row.torch_wrong for row in rows)
    print(f"# Copy                 : {meta['copy_GBps']:.2f} GB/s of float32, {COPIED_BYTES} bytes moved per element")
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    write_json(chosen.json, meta, rows)
    if chosen.plot:
        from gradwire.bench.codec.plot import draw

        draw(rows, meta, chosen.plot)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if any result, ours or torch's, is outside its codec's bound."""
    chosen = parse_arguments(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = run(chosen)
    finally:
        torch.set_num_threads(threads)
    return 1 if any(row.wrong or row.torch_wrong for row in rows) else 0
