"""The test that two ranks on this host reach each other: over gloo if it is used, over TCP, in shared memory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from gradwire.collectives import Communicator
from gradwire.collectives.environment import TORCH_BACKEND, TUNING, listening_ports, shared_memory_wanted
from gradwire.trainer.tools.check.machine import Finding

#: How long ranks wait for each other, and how long the test may take if kernels must be compiled first.
_EXCHANGE_S = 60.0
_DEADLINE_S = 150.0

_STEPS = ("gloo", "TCP", "shared memory")
_DO = {
    "gloo": "a firewall may block this host's own connections; if GLOO_SOCKET_IFNAME=lo works, the interface is the cause",
    "TCP": "a firewall may block this host's own connections; if COLLECTIVES_INTERFACE=lo works, the interface is the cause",
    "shared memory": "ranks of a host need one user and one PID namespace (docker: --pid=host, or one container for all ranks)",
}


def two_ranks(deadline_s: float = _DEADLINE_S) -> list[Finding]:
    """Start two ranks, and return the findings within deadline_s seconds."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    steps = _steps(environment)
    end = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), str(Path(folder) / "store")],
                env={"OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        return findings([_said(process, max(0.1, end - time.monotonic())) for process in processes], steps)


def _steps(environment: Mapping[str, str]) -> Sequence[str]:
    """Return what to test: not gloo where COLLECTIVES_PORTS is set, because the system chooses its ports."""
    return _STEPS if listening_ports(environment) is None else _STEPS[1:]


def _said(process: subprocess.Popen[str], timeout_s: float) -> tuple[dict[str, str], str]:
    """Return the results of a rank, by step, and how it ended; an empty text if it succeeded."""
    try:
        out, errors = process.communicate(timeout=timeout_s)
        last = (errors.strip().splitlines() or [""])[-1]
        ended = "" if process.returncode == 0 else f"a rank ended with exit code {process.returncode}: {last}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        ended = "it did not finish in time"
    results = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    return {step: text for result in results for step, text in result.items()}, ended


def findings(said: list[tuple[dict[str, str], str]], steps: Sequence[str] = _STEPS) -> list[Finding]:
    """Return a finding for each step that the ranks have tried. said: by rank, the result of each step, and how the rank
    ended."""
    found = []
    for step in steps:
        answers = [results.get(step) for results, _ in said]
        wrong = [answer for answer in answers if answer != "ok"]
        if not wrong:
            found.append(Finding("ok", f"two ranks over {step}: sums are right"))
        elif None in wrong:
            why = next((ended for _, ended in said if ended), "a rank reported nothing")
            found.append(Finding("failed", f"two ranks over {step}: {why}", _DO[step]))
            break  # later steps were not tried
        elif step == "shared memory":  # TCP replaces it, and is slower
            found.append(Finding("note", f"two ranks share no memory and use TCP: {wrong[0]}", _DO[step]))
        else:
            found.append(Finding("failed", f"two ranks over {step}: {wrong[0]}", _DO[step]))
            if step == "gloo":
                break  # the later steps need gloo
    return found


class _Warnings(logging.Handler):
    """Keeps the last warning, the reason why ranks share no memory."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _rank(rank: int, store: str) -> None:
    """Run one of the two ranks, and print its results."""
    os.environ[TUNING] = "0"  # a wrong file says nothing about links
    timeout, first = timedelta(seconds=_EXCHANGE_S), _steps(os.environ)[0]
    backend = "gloo" if first == "gloo" else TORCH_BACKEND
    try:
        dist.init_process_group(backend, store=FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
        numbers = torch.full((1000,), rank + 1.0, dtype=torch.float32, device="cpu")
        dist.all_reduce(numbers)
        _report(first, "ok" if numbers.eq(3).all() else "a wrong sum")
    except Exception as error:
        _report(first, _text(error))
        raise SystemExit(0) from None
    for step, link in (("TCP", "tcp"), ("shared memory", None)):
        try:
            _report(step, _try(step, rank, link))
        except Exception as error:
            _report(step, _text(error))
    dist.barrier()
    dist.destroy_process_group()


def _try(step: str, rank: int, link: str | None) -> str:
    if link is None and not shared_memory_wanted(os.environ):
        return "COLLECTIVES_SHARED_MEMORY=0 is set"
    warnings = _Warnings()
    logging.getLogger("gradwire").addHandler(warnings)
    with Communicator(timeout_s=_EXCHANGE_S, link=link) as communicator:
        numbers = torch.full((1000,), rank + 1.0, dtype=torch.float32, device="cpu")
        communicator.allreduce(numbers)
        if not numbers.eq(3).all():
            return "a wrong sum"
        routes = "; ".join(communicator.routes)
    return "ok" if step in routes else warnings.last or routes


def _report(step: str, text: str) -> None:
    print(json.dumps({step: text}), flush=True)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
