"""The package has one import name, gradwire: neither what lies beside a script nor a clone makes two of anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.programs import start

SCRIPT = """
import bench
import collectives
import trainer

import gradwire
from gradwire.trainer.__main__ import main

assert bench.OWN == collectives.OWN == trainer.OWN == "the user's"
assert gradwire.trainer is not trainer
assert main(["bench", "--help"]) == 0
assert main(["info"]) == 0
assert gradwire.collectives is not collectives
"""


@pytest.mark.wide
def test_a_users_modules_of_the_same_names_disturb_nothing(tmp_path: Path) -> None:
    """Run the commands, too, in an interpreter whose first folder also has another version's metadata, which info reads."""
    for path in ("bench/__init__.py", "collectives.py", "trainer.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text('OWN = "the user\'s"\n')
    metadata = tmp_path / "gradwire-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: gradwire\nVersion: 9.9\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start([sys.executable, "script.py"], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines() if len(line.split()) > 1}
    assert told["gradwire"] == "9.9"
    assert told["numba"][0].isdigit()
    assert told["ranks"] == "1"
    assert "torchrun --nproc-per-node 4 -m gradwire.bench COLLECTIVE" in said


def test_a_folder_of_the_clone_has_the_same_classes() -> None:
    same = "import collectives, gradwire; assert collectives.Communicator is gradwire.collectives.Communicator"
    subprocess.run([python(), "-c", same], cwd=ROOT, check=True, timeout=60)


def test_version_and_public_names_are_in_one_place() -> None:
    sources = [path for folder in ("bench", "collectives", "trainer") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    for name, folders in (("__version__", ("bench", "collectives", "trainer")), ("__all__", ("bench", "trainer"))):
        having = [path for path in sources if re.search(rf"^{name}\b", path.read_text(), re.MULTILINE)]
        assert not [path for path in having if path.relative_to(ROOT).parts[0] in folders], name
    assert 'version = { attr = "gradwire.__version__" }' in (ROOT / "pyproject.toml").read_text()
