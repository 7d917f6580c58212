"""The script that prints the hosts of an elastic job, which the launcher runs repeatedly."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from gradwire.trainer.launcher.hosts import Host, parse_hosts, place

#: The pause between two runs of the script, and the longest time that a run may take.
_AGAIN_S, _LONGEST_S = 1.0, 60.0


class Discovery:
    """Runs the script repeatedly. Raises ValueError if the script cannot be started."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._since = -_AGAIN_S
        self._complaint = ""
        self._start()

    def look(self) -> dict[str, Host] | None:
        """Return the hosts by name if a run of the script has ended since the last call. If the run failed, print why and
        return None."""
        try:
            return self._look(time.monotonic())
        except ValueError as error:
            if str(error) != self._complaint:
                print(f"gradwire: {error}; the hosts stay as they are", file=sys.stderr, flush=True)
            self._complaint = str(error)
            return None

    def close(self) -> None:
        """End the script."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._output.close()

    def _look(self, now: float) -> dict[str, Host] | None:
        if self._process is None:
            if now >= self._since + _AGAIN_S:
                self._start()
        elif self._process.poll() is not None:
            exit_code, self._process, self._since = self._process.returncode, None, now
            with self._output:
                return self._read(exit_code)
        elif now >= self._since + _LONGEST_S:
            self._process.kill()
        return None

    def _start(self) -> None:
        self._since = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [str(self._script.absolute())]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._output, start_new_session=True
            )
        except OSError as error:
            self._output.close()
            raise ValueError(f"--host-discovery-script {self._script}: {error.strerror}") from error

    def _read(self, exit_code: int) -> dict[str, Host]:
        named = f"--host-discovery-script {self._script}"
        if exit_code != 0:
            raise ValueError(f"{named} ended with exit code {exit_code}")
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        try:
            found = {host.name: host for host in place(None, parse_hosts(",".join(lines)))} if lines else {}
        except ValueError as error:
            raise ValueError(f"{named}: {error}") from None
        self._complaint = ""
        return found
