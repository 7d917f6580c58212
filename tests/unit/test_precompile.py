"""All kernels can be compiled ahead."""

import re
from pathlib import Path

import pytest

from gradwire.collectives.kernels.cpu.library import KERNELS, is_kept
from gradwire.collectives.precompile import precompile


def test_precompiling_leaves_no_kernel_to_compile(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert precompile() == 0
    assert all(is_kept(module, name) for module, names in KERNELS.items() for name in names)
    told = capfd.readouterr().out.splitlines()
    assert told[-2] == "all kernels were compiled already"
    (folder,) = re.findall(r"saved in (.*); for another folder, set NUMBA_CACHE_DIR", told[-1])
    assert list(Path(folder).glob("*.o"))
