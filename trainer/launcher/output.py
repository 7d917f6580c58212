"""The output of ranks: printed with the number of the rank, optionally written to files, and kept for error messages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO

from gradwire.trainer.launcher.failure import LastWords

_OF_A_RANK = re.compile(rb"\[(\d+)\]<(stdout|stderr)>: (.*)", re.DOTALL)


class Output:
    """Prints the lines of ranks. folder: gets the files NAME.NUMBER/stdout and NAME.NUMBER/stderr of each rank; None:
    no files. digits: the minimum number of digits of NUMBER, so that folders sort.

    Raises ValueError if the folder cannot be made.
    """

    def __init__(self, folder: Path | None, digits: int, name: str = "rank") -> None:
        self._folder = folder
        self._digits = digits
        self._name = name
        self._words: dict[int, LastWords] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--output-filename {folder}: {error.strerror}") from error

    def take(self, line: bytes) -> bool:
        """Print a line of an agent if a rank printed it. Return whether a rank did."""
        if (match := _OF_A_RANK.fullmatch(line)) is None:
            return False
        number, stream, text = int(match[1]), match[2].decode(), match[3]
        to = sys.stdout if stream == "stdout" else sys.stderr
        to.buffer.write(line + b"\n")  # unchanged, in any encoding
        to.buffer.flush()
        if stream == "stderr":
            self._words.setdefault(number, LastWords()).read(text.decode(errors="replace"))
        if self._folder is not None:
            self._file(self._folder, number, stream).write(text + b"\n")
        return True

    def words(self, number: int) -> str:
        """Return the last words of a rank (see LastWords)."""
        return self._words.get(number, LastWords()).text

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _file(self, folder: Path, number: int, stream: str) -> BinaryIO:
        if (number, stream) not in self._files:
            path = folder / f"{self._name}.{number:0{self._digits}}" / stream
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[number, stream] = path.open("wb", buffering=0)
        return self._files[number, stream]


def say(text: str) -> None:
    """Print a line of the launcher's own."""
    print(f"gradwire: {text}", file=sys.stderr, flush=True)
