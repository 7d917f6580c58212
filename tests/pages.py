"""The pages of the documentation, and the Python in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
README, TRAIN, EXTENDING = "README.md", "docs/examples/train.py", "docs/extending.md"
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[str]:
    """Return a page's blocks of Python but for those titled "fragment"."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
