"""Compiles kernels ahead of their first use, such as when an image for a cluster is built."""

from __future__ import annotations

import sys
import time

import torch

from gradwire.collectives.compression.codec import NUMBERS, rehearse
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.registry import CODECS, find_codec
from gradwire.collectives.kernels import LINKS, cpu_cache


def precompile() -> int:
    """Compile all kernels that are not on the disk yet, and print how many and the folder: those of the CPU, and for the GPUs of
    this computer, those of codecs with default settings.

    Returns the exit status: 1 if kernels cannot be compiled or saved.
    """
    try:
        import numba

        from gradwire.collectives.kernels.cpu.library import KERNELS, code_of, is_kept
    except ImportError as error:
        print(f"cannot compile: {error}: pip install numba", file=sys.stderr)
        return 1
    modules = [
        module for module in KERNELS if sys.platform == "linux" or module not in LINKS
    ]  # elsewhere gloo is the link
    missing = [(module, name) for module in modules for name in KERNELS[module] if not is_kept(module, name)]
    begun = time.monotonic()
    for number, (module, name) in enumerate(missing, 1):
        print(f"{number}/{len(missing)} {name}", file=sys.stderr, flush=True)
        code_of(module, name, quiet=True)
    if missing:
        print(f"compiled {len(missing)} kernels in {time.monotonic() - begun:.0f} s with Numba {numba.__version__}")
    else:
        print("all kernels were compiled already")
    for index in range(torch.cuda.device_count()):
        precompile_codecs(torch.device("cuda", index))
    folder = cpu_cache()
    if folder is None:
        print("they cannot be saved, so every process will compile them again", file=sys.stderr)
        return 1
    print(f"saved in {folder}; for another folder, set NUMBA_CACHE_DIR here and in every later run")
    return 0


def precompile_codecs(device: torch.device) -> None:
    """Launch the kernels of all codecs with default settings on a GPU, so that they are compiled and saved."""
    begun = time.monotonic()
    for name in (*CODECS, PowerSGD.name):
        print(f"{device} {name}", file=sys.stderr, flush=True)
        for dtype in NUMBERS[1:]:  # those of float32, too
            for with_feedback in (False, True):
                rehearse(find_codec(name), device, with_feedback=with_feedback, dtype=dtype)
    torch.cuda.synchronize(device)
    print(f"codecs are ready on {torch.cuda.get_device_name(device)}, in {time.monotonic() - begun:.0f} s")
