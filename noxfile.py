"""`make matrix`: gradwire, installed as from an index, on every Python and with the oldest and newest packages that it claims.

What follows on the command line is installed in place of what a session asks for: make matrix ARGS="torch==2.13.0".
PIP_EXTRA_INDEX_URL names an index that has torch for CPUs alone; the builds on PyPI bring CUDA, which makes each of the
twelve environments 5 GB. NOX_DEFAULT_VENV_BACKEND=uv, where uv is installed, keeps on the disk once what they share.
docs/reference/versions.md has what has passed.
"""

import re
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["matrix"]
nox.options.error_on_missing_interpreters = False  # they are listed as skipped

PACKAGES = ("torch", "numpy", "numba")

#: The first versions that a Python has builds of, where those that pyproject.toml claims are older than that Python.
FIRST = {
    "3.13": {"numpy": "2.1.0", "numba": "0.61.0"},
    "3.14": {"numpy": "2.3.2", "numba": "0.63.0"},
    "3.15": {"torch": "2.15.0", "numpy": "2.5.2", "numba": "0.68.0"},
}


def claimed() -> dict[str, str]:
    """Return the oldest version of each package that pyproject.toml claims to run with."""
    project = Path(__file__).with_name("pyproject.toml").read_text()
    return {package: re.findall(rf'"{package}>=([\d.]+)"', project)[0] for package in PACKAGES}


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
@nox.parametrize("versions", ["oldest", "newest"])
def matrix(session: nox.Session, versions: str) -> None:
    """Run tests/smoke.py on two ranks."""
    wanted = dict.fromkeys(PACKAGES, "")
    if versions == "oldest":
        wanted = {package: f"=={version}" for package, version in claimed().items()}
        wanted |= {package: f"=={version}" for package, version in FIRST.get(str(session.python), {}).items()}
    given = {re.match(r"[\w-]+", requirement)[0]: requirement for requirement in session.posargs}
    requirements = [given.pop(package, package + version) for package, version in wanted.items()] + [*given.values()]
    session.install(*requirements, ".")
    smoke = Path("tests/smoke.py").resolve()
    session.chdir(session.create_tmp())  # so that what is installed is imported, and not what lies here
    session.run("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(smoke))
