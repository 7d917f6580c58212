"""Scripts that end without close(), by themselves or by an error, in the interpreter's own way."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DEADLINE_S = 30.0

SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    from collectives import Communicator

    rank, path, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    comm = Communicator(timeout_s=3)
    works = [comm.allreduce(torch.ones(1 << 20), async_op=True) for _ in range(8)]
    works[0].wait()
    if ending == "raise" and rank == 1:
        raise ValueError("the script's own")
    for work in works:
        work.wait()
"""


@pytest.mark.parametrize(
    ("ending", "codes", "texts"),
    [
        ("raise", (1, 1), ("PeerLost: rank 0: .*lost rank 1", "ValueError: the script's own")),
        ("return", (0, 0), ("", "")),
    ],
)
def test_a_script_ends(tmp_path: Path, ending: str, codes: tuple[int, int], texts: tuple[str, str]) -> None:
    """No hang, no crash, no noise."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), ending],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=DEADLINE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert tuple(process.returncode for process in processes) == codes, "".join(errors)
    for text, error in zip(texts, errors, strict=True):
        assert re.search(text, error) if text else not error, "".join(errors)
