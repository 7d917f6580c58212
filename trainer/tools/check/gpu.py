"""The test of the GPUs, in a separate process: a driver can hang, and the end of the process frees its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.trainer.tools.check.finding import Finding

_DEADLINE_S = 60.0
_CUPY = "pip install 'gradwire[cuda12]' or 'gradwire[cuda13]', according to torch.version.cuda"


def gpus(deadline_s: float = _DEADLINE_S) -> list[Finding]:
    """Return the findings about GPUs and CuPy, within deadline_s seconds."""
    if torch.version.cuda is None:
        if Path("/dev/nvidia0").exists():
            return [
                Finding("note", "there is a GPU, but torch is built without CUDA", "install torch with CUDA to use it")
            ]
        return [Finding("ok", "no GPU, and torch is built without CUDA: tensors are on the CPU")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired:
        return [Finding("failed", f"CUDA does not answer within {deadline_s:g} s", "look at nvidia-smi and dmesg")]
    try:
        return [Finding(**found) for found in json.loads(done.stdout.splitlines()[-1])]
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Finding("failed", f"CUDA: {last}", "look at nvidia-smi and dmesg")]


def _look() -> list[Finding]:
    if not torch.cuda.is_available():
        return [
            Finding("note", f"torch is built for CUDA {torch.version.cuda}, but sees no GPU: tensors are on the CPU")
        ]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    torch.ones(1, device="cuda", dtype=torch.float32).add_(1).item()
    found = [Finding("ok", f"{len(names)} GPUs: {', '.join(names)}")]
    if not dist.is_nccl_available():
        found.append(
            Finding("failed", "this torch has no NCCL, which joins GPUs", "install a build of torch that has it")
        )
    return [*found, _cupy()]


def _cupy() -> Finding:
    try:
        import cupy

        assert int(cupy.arange(3).sum()) == 3
    except Exception as error:  # a missing package, or libraries that do not fit the driver
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding("note", f"CuPy does not work, so codecs do not run on the GPU: {said}", _CUPY)
    return Finding("ok", f"CuPy {cupy.__version__}")


if __name__ == "__main__":
    print(json.dumps([vars(found) for found in _look()]))
