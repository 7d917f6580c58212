"""What ranks print: passed on with the number of the rank in front, kept in files where that is wanted, and remembered."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO

from gradwire.trainer.cli.failure import LastWords

_OF_A_RANK = re.compile(rb"\[(\d+)\]<(stdout|stderr)>: (.*)", re.DOTALL)


class Output:
    """Passes on the lines of ranks. folder: where each gets files, NAME.NUMBER/stdout and stderr; None: nowhere.
    digits: that numbers have at least, so that folders sort.

    Raises ValueError where the folder cannot be made.
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
        """Pass on a line that an agent has written, if a rank has printed it; return whether one has."""
        if (match := _OF_A_RANK.fullmatch(line)) is None:
            return False
        number, stream, text = int(match[1]), match[2].decode(), match[3]
        to = sys.stdout if stream == "stdout" else sys.stderr
        to.buffer.write(line + b"\n")  # as it came, whatever the encoding
        to.buffer.flush()
        if stream == "stderr":
            self._words.setdefault(number, LastWords()).hear(text.decode(errors="replace"))
        if self._folder is not None:
            self._file(self._folder, number, stream).write(text + b"\n")
        return True

    def words(self, number: int) -> str:
        """Return what a rank said last."""
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
