"""A hook of MkDocs: the first page of the site is README.md, and pages that stand beside it are pages of the site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/, with its links as seen from inside."""
    for source, page in _PAGES.items():
        text = "---\nhide: [navigation]\n---\n" + re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        for other, its_page in _PAGES.items():
            text = re.sub(rf"\]\({re.escape(other)}(?=[)#])", f"]({its_page}", text)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "LICENSE", abs_src_path=str(ROOT / "LICENSE")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to what lies outside of docs/ lead to its pages."""
    for source, page in _PAGES.items():
        markdown = re.sub(rf"\]\(\.\./((?:\.\./)*){re.escape(source)}", rf"](\1{page}", markdown)
    return markdown
