"""Runs a script of docs/integrations as it stands, and leaves what its rank had at the end for the test to read.

python -m torch.distributed.run ... run_integration.py FOLDER SCRIPT ARGUMENTS
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor


def define_what_torchvision_misses() -> torch.library.Library | None:
    """Let torchvision be imported beside a torch for CPUs.

    That of PyPI is built for CUDA, and cannot load its operators there. Its import fails at the first one that it
    describes; none is used here. Where torchvision is built for CPUs, it loads its own.
    """
    spec = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
        return None
    except OSError:
        pass
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    library = define_what_torchvision_misses()
    found = runpy.run_path(script, run_name="__main__")
    del library
    parameters = [parameter.detach() for parameter in found["model"].parameters()]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    stats = (found["hook"] if "hook" in found else found["optimizer"]).stats
    end = {
        "weights": torch.cat([tensor.flatten() for tensor in local]),
        "exchanges": stats.exchanges,
        "bytes_sent": stats.bytes_sent,
        "bytes_uncompressed": stats.bytes_uncompressed,
    }
    torch.save(end, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
