"""The admission of processes to a job. Ranks of two jobs may connect to the same port, and must not become one world."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

from gradwire.collectives.control.channel import Failure
from gradwire.collectives.control.coordinator import Admission, Card, Verdict
from gradwire.trainer.world.launch import SLURM, Launch, launching_process, started_at

_log = logging.getLogger("gradwire")

#: How long rank 0 waits, once all ranks have arrived, for another process that claims one of the ranks, if nothing proves that
#: all belong to one job. Processes that start at the same time take about equally long to load Python and torch.
_SETTLE_S = 1.0

#: Variables by which launchers and schedulers distinguish jobs.
_RUN_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID")

#: The first characters of the names of variables that may differ between ranks of one job.
_OF_A_RANK = re.compile(
    "_|GRADWIRE_WORKER|RANK|LOCAL_|GROUP_|ROLE_|TORCHELASTIC_|OMPI_|PMI|PRTE_|MPI_|HYDRA_|HYDI_|SLURM_|HOROVOD_|COLLECTIVES_|GLOO_|NCCL_|"
    "CUDA_VISIBLE|OMP_|SSH_|TERM|SHLVL|PWD|OLDPWD"
)


def identity_of(environment: Mapping[str, str], launch: Launch) -> dict[str, Any]:
    """Return a record that identifies this process, and the job that it belongs to."""
    runs = {name: environment[name] for name in _RUN_IDS if environment.get(name, "none") != "none"}
    if launch.launcher == SLURM and "SLURM_STEP_ID" in environment:
        runs["SLURM_STEP_ID"] = environment["SLURM_STEP_ID"]
    common = {name: value for name, value in environment.items() if not _OF_A_RANK.match(name)}
    return {
        "runs": runs,
        "by_agent": "TORCHELASTIC_RUN_ID" in environment,
        "node": environment.get("GROUP_RANK", ""),
        "launcher": launching_process(launch.variable),
        "command": sys.orig_argv[1:],
        "environment": hashlib.sha256(repr(sorted(common.items())).encode()).hexdigest(),
        "process": [socket.gethostname(), os.getpid(), started_at("self")],
    }


class OneJob(Admission):
    """Admits the processes of rank 0's job. card: that of rank 0. place: the address and port that ranks connect to."""

    def __init__(self, card: Card, place: str) -> None:
        self._card = card
        self._place = place

    def judge(self, arriving: Card, members: Mapping[int, Card], *, is_complete: bool) -> Verdict:
        """See Admission. Of two processes that claim the same rank, the later one is refused if the world is complete.
        Otherwise, if the rank is 0, the later one is refused, and ranks that were started like it and unlike rank 0 are evicted.
        If the rank is another, the one that was started in another way than rank 0 is refused or evicted; if both or neither
        were, all ranks fail."""
        rank = arriving["rank"]
        if reason := _stranger(arriving, self._card):
            return Verdict(self._refusal(arriving, reason))
        if rank not in members:
            return Verdict("its world has begun", again=True) if is_complete else Verdict()
        holder = members[rank]
        claimed = f"{_named(holder)} has arrived as rank {rank} before it"
        if is_complete:
            _log.warning("gradwire: %s", self._refusal(arriving, claimed))
            return Verdict(self._refusal(arriving, claimed))
        if rank == 0:
            astray = {
                r: card for r, card in members.items() if r and _unlike(card, holder) and not _unlike(card, arriving)
            }
            evicted = {r: self._refusal(card, f"it is like {_named(arriving)}") for r, card in astray.items()}
            return Verdict(self._refusal(arriving, claimed), evicted=evicted)
        if _unlike(holder, self._card) and not _unlike(arriving, self._card):
            return Verdict(evicted={rank: self._refusal(holder, f"{_named(arriving)} is rank {rank}")})
        if _unlike(arriving, self._card) and not _unlike(holder, self._card):
            return Verdict(self._refusal(arriving, claimed))
        both = f"{_named(holder)} and {_named(arriving)}"
        why = f"two processes have arrived at {self._place} as rank {rank}: {both}; give each job a MASTER_PORT of its own"
        return Verdict(why, fatal=Failure((rank,), why))

    def settle_s(self, members: Mapping[int, Card]) -> float:
        """See Admission."""
        return 0.0 if all(_together(card, self._card) for card in members.values()) else _SETTLE_S

    def _refusal(self, card: Card, reason: str) -> str:
        job = f"the job that meets at {self._place}, whose rank 0 is {_named(self._card)}"
        return f"{_named(card)} is a stranger to {job}: {reason}; give each job a MASTER_PORT of its own"


def _named(card: Card) -> str:
    host, pid, _ = card["identity"]["process"]
    command = " ".join(card["identity"]["command"])
    return f"process {pid} on host {host} ({command if len(command) < 100 else command[:97] + '...'})"


def _stranger(card: Card, first: Card) -> str:
    """Return a text that proves that two processes are not of the same job; empty if nothing proves it."""
    theirs, ours = card["identity"], first["identity"]
    for name in theirs["runs"].keys() & ours["runs"].keys():
        if theirs["runs"][name] != ours["runs"][name]:
            return f"its {name} is {theirs['runs'][name]}, and not {ours['runs'][name]}"
    same_node = card["machine"] == first["machine"] and theirs["node"] == ours["node"]
    if theirs["by_agent"] and ours["by_agent"] and same_node and None not in (theirs["launcher"], ours["launcher"]):
        return "" if theirs["launcher"] == ours["launcher"] else "another torchrun has started it"
    return ""


def _together(card: Card, first: Card) -> bool:
    """Return whether something proves that two processes are of one job. _stranger() must have found no proof against it."""
    theirs, ours = card["identity"], first["identity"]
    if theirs["process"] == ours["process"] or theirs["runs"].keys() & ours["runs"].keys():
        return True
    by_one_agent = theirs["by_agent"] and ours["by_agent"] and card["machine"] == first["machine"]
    return by_one_agent and theirs["launcher"] is not None and theirs["launcher"] == ours["launcher"]


def _unlike(card: Card, first: Card) -> bool:
    """Return whether two processes were started in different ways. This can also be true of ranks of one job."""
    theirs, ours = card["identity"], first["identity"]
    if theirs["command"] != ours["command"]:
        return True
    here = card["machine"] == first["machine"]
    return here and [theirs["launcher"], theirs["environment"]] != [ours["launcher"], ours["environment"]]
