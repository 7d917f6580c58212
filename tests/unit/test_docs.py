"""README and docs lead where they say: links, anchors, examples, and where to go next."""

import inspect
import json
import pkgutil
import re
import runpy
from collections import defaultdict

import pytest

import gradwire
from gradwire import collectives, elastic, optimizers, reports, rules, servers
from gradwire.bench.__main__ import COLLECTIVES, MODULES
from tests.pages import EXTENDING, PAGES, README, ROOT, TRAIN, prose, python_blocks

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
#: Read on a phone and beside code, the README must be short.
README_LINES, README_COLUMNS = 130, 120


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: str) -> None:
    here = ROOT / page
    for target in LINK.findall(re.sub(r"`[^`]*`", "", prose(here.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (here.parent / path).resolve() if path else here
        assert there.is_file(), f"{page}: nothing at {target}"
        assert there.is_relative_to(ROOT), f"{page}: {target} is outside of the repository"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{page}: no heading for {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")], ids=str)
def test_every_page_says_where_to_go_next(page: str) -> None:
    last = (ROOT / page).read_text().rstrip().split("\n\n")[-1]
    assert last.startswith("**Where to go next:** "), page
    assert LINK.search(last), page


def test_python_is_run_or_called_a_fragment() -> None:
    """tests/ranks/test_guides.py runs every block that is not titled "fragment", but those of extending.md, which has its own."""
    for page in PAGES:
        fences = re.findall(r"^ *```(.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert set(fences) <= {"python", 'python title="fragment"', "diff"}, page
    assert EXTENDING in PAGES
    assert len(python_blocks(EXTENDING)) >= 3


@pytest.mark.parametrize("folder", ["examples", "integrations"])
def test_a_page_lists_every_file_of_its_folder(folder: str) -> None:
    page = ROOT / "docs" / folder / "README.md"
    files = {path.name for path in page.parent.iterdir() if path.is_file()}
    assert files - {page.name} - set(LINK.findall(page.read_text())) == set()


def test_the_script_of_the_readme_is_the_file() -> None:
    (block,) = python_blocks(README)
    assert block == (ROOT / TRAIN).read_text()


def test_every_figure_is_that_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    used = set(runpy.run_path(str(ROOT / "docs" / "training_steps.py"))["TITLES"])
    kept = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "figures").iterdir()}
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert text == figures["filled"](text), f"{page}: run docs/figures.py"
        for mark in figures["MARK"].finditer(text):
            if mark[2] in ("predictions", "failures", "published"):  # whose runs are files of their own
                continue
            used |= set(mark[3].split()[: 1 if mark[2] in ("ratio", "gap") else None])
    commits: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in kept.values():
        (benchmark,) = {*COLLECTIVES, *MODULES}.intersection(run["command"].split())
        commits[run["meta"]["device"], benchmark].add(run["meta"]["commit"])
    assert all(len(each) == 1 for each in commits.values()), f"runs of one benchmark and machine differ: {commits}"
    assert figures["RUNS"].keys() == used
    assert used - figures["ON_GPU"] <= kept.keys() <= used


def test_the_reference_has_every_public_name_and_only_members_that_exist() -> None:
    """Which members it shows, the pages list: those that a user calls."""
    assert "members: false" in (ROOT / "mkdocs.yml").read_text()
    documented = []
    for page in ("trainer", "collectives", "codecs"):
        text = (ROOT / f"docs/reference/{page}.md").read_text()
        for path, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", text, flags=re.MULTILINE):
            documented.append(described := pkgutil.resolve_name(path))
            if members := re.search(r"members:\s+\[([^]]+)\]", options):
                sources = [
                    inspect.getsource(kind) for kind in described.__mro__ if kind.__module__.startswith("gradwire.")
                ]
                for member in re.findall(r"\w+", members[1]):
                    assert any(re.search(rf"\b{member}\b", source) for source in sources), f"{path} has no {member}"
    for module in (gradwire, collectives, elastic, optimizers, reports, rules, servers):
        for name, value in vars(module).items():
            if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
                assert value in documented, f"{module.__name__}.{name} is in no page of docs/reference"


def test_the_readme_is_short_and_narrow() -> None:
    lines = (ROOT / README).read_text().splitlines()
    assert len(lines) <= README_LINES
    assert max(map(len, lines)) <= README_COLUMNS
