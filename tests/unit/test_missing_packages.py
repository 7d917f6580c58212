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
    ("model", "missing"),
    [("bytes_gpt", {"matplotlib"}), ("bytes_gpt", {"matplotlib", "rich"}), ("digits_cnn", {"sklearn"})],
)
def test_training(model: str, missing: set[str]) -> None:
    without = start([python(), "-c", WITHOUT.format(missing=missing, model=model)], ROOT)
    said, _ = without.communicate(timeout=DEADLINE_S)
    assert without.returncode == 1
    last = said.splitlines()[-1]
    assert all(package in last for package in missing)
    assert last.endswith("pip install '.[train]' in a clone of gradwire")
