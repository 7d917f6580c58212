"""A whole run of `gradwire check`."""

from __future__ import annotations

from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.programs import start


def test_all_that_is_needed_works_here() -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    check = start([python(), "-m", "gradwire", "check"], ROOT, **outer)
    said, _ = check.communicate(timeout=110)
    assert check.returncode == 0, said
    lines = said.splitlines()
    for beginning in (
        "ok      torch ",
        "ok      numba ",
        "ok      torchrun: rank 0 of 1, meets at 127.0.0.1:1",
        "ok      two ranks over gloo: sums are right",
        "ok      two ranks over TCP: sums are right",
        "ok      two ranks over shared memory: sums are right",
    ):
        assert any(line.startswith(beginning) for line in lines), said
    assert lines[-1] == "everything that gradwire needs works"
