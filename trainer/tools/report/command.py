"""The command `gradwire report`: runs a training command unchanged, and then writes the page."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from gradwire.collectives.environment import REPORT
from gradwire.trainer.launcher.output import cause_among
from gradwire.trainer.tools.report.measured import read
from gradwire.trainer.tools.report.page import page

DESCRIPTION = """\
Run a training command, and write one page about its steps, stragglers, bytes and operations.

gradwire report -np 2 train.py                                flags of `gradwire run`, and a script
gradwire report -- torchrun --nproc-per-node 2 train.py       any other command
gradwire report --out monday.html -- sh job.sh

The page is written even if the command fails. The exit status is that of the command.
"""

#: How much of the end of the command's stderr is kept, in bytes, and shown, in lines.
_KEPT_BYTES, _SHOWN_LINES = 1 << 16, 120
#: How long to wait until processes that the command has left behind close stderr.
_LEFT_OPEN_S = 5.0


def report(arguments: Sequence[str]) -> int:
    """Run the command in the arguments, write the page, and return the exit status of the command, as a shell has it.

    Raises ValueError if the page could not be written, before the command is started, or if the command cannot be
    started.
    """
    parser = argparse.ArgumentParser(
        prog="gradwire report",
        usage="gradwire report [--out report.html] [--] COMMAND, or -np N [flags of gradwire run] train.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (report.html)")
    own = (
        2
        if arguments[:1] == ["--out"]
        else int(bool(arguments) and arguments[0].startswith(("--out=", "-h", "--help")))
    )
    out: Path = parser.parse_args(arguments[:own]).out
    given = list(arguments[own:])
    command = given[1:] if given[:1] == ["--"] else given
    if not command:
        parser.error("no command is given: gradwire report -np 2 train.py, or gradwire report -- torchrun ... train.py")
    if command[0].startswith("-"):
        command = [sys.executable, "-m", "gradwire", "run", *command]
    elif command[0].endswith(".py"):
        command = [sys.executable, *command]
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: give the name of the file to write, such as {out / 'report.html'}")
    try:
        folder = tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.absolute().parent)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from error
    with folder:
        began_s, start = datetime.now().astimezone(), time.monotonic()
        exit_code, stderr = _run(command, {**os.environ, REPORT: folder.name})
        facts = [f"{began_s:%Y-%m-%d %H:%M %Z}", f"{time.monotonic() - start:,.1f} s", *_commit()]
        facts.append("succeeded" if exit_code == 0 else "failed")
        last_lines = stderr.splitlines()[-_SHOWN_LINES:]
        text = page(
            shlex.join(["gradwire", "report", *given]),
            facts,
            exit_code,
            cause_among(last_lines),
            "\n".join(last_lines),
            read(Path(folder.name)),
        )
    beside = out.with_name(f"{out.name}.part")
    try:
        beside.write_text(text, "utf-8", "replace")
        beside.replace(out)
        print(f"gradwire: wrote {out}", file=sys.stderr)
    except OSError as error:  # such as a full disk; the command's exit status is still returned
        print(f"gradwire: cannot write {out}: {error.strerror}", file=sys.stderr)
    return 128 - exit_code if exit_code < 0 else exit_code


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command, and pass its stderr on. Return its exit code, negative for a signal, and the end of its stderr."""
    try:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    except OSError as error:
        raise ValueError(f"cannot start {command[0]}: {error.strerror}") from error
    assert process.stderr is not None
    kept = bytearray()
    reader = threading.Thread(target=_pass_on, args=(process.stderr, kept), name="gradwire.stderr", daemon=True)
    reader.start()

    def hand_on(number: int, frame: object) -> None:
        if number == signal.SIGTERM:  # the terminal sends Ctrl-C to the command too
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        exit_code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    reader.join(_LEFT_OPEN_S)
    return exit_code, kept.decode(errors="replace")


def _pass_on(stream: IO[bytes], kept: bytearray) -> None:
    """Copy a stream to stderr as it arrives, and keep the end of it."""
    while piece := os.read(stream.fileno(), 1 << 16):
        with suppress(OSError):  # stderr is closed, and the command must not block
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
        kept += piece
        del kept[:-_KEPT_BYTES]


def _commit() -> list[str]:
    """Return the commit of this folder, as one text; nothing outside of a repository."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=30)
        return [f"commit {done.stdout.strip()}"] if done.returncode == 0 else []
    return []
