"""What is said where a package of an extra is not installed: how to install it from a clone, since no index has gradwire."""

import pytest

from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.programs import DEADLINE_S, start

#: Trains a model in an interpreter that cannot find some packages.
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {missing} else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
for name in [name for name in sys.modules if name.split(".")[0] in {missing}]:
    del sys.modules[name]
sys.argv = ["bench", "train", "--model", "{model}", "--device", "cpu", "--steps", "1"]
runpy.run_module("gradwire.bench", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("model", "missing", "status", "extra"),
    [
        ("bytes_gpt", {"matplotlib"}, 2, "bench"),
        ("bytes_gpt", {"matplotlib", "rich"}, 2, "bench"),
        ("digits_cnn", {"sklearn"}, 1, "train"),
    ],
)
def test_training(model: str, missing: set[str], status: int, extra: str) -> None:
    without = start([python(), "-c", WITHOUT.format(missing=missing, model=model)], ROOT)
    said, _ = without.communicate(timeout=DEADLINE_S)
    assert without.returncode == status
    last = said.splitlines()[-1]
    assert any(package in last for package in missing)
    assert last.endswith(f"pip install '.[{extra}]' in a clone of gradwire")
