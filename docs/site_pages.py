"""A hook of MkDocs: the first page of the site is README.md, and the last CHANGELOG.md, so that neither is written twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/, with its links as seen from inside."""
    for source, page in (("README.md", "index.md"), ("CHANGELOG.md", "changelog.md")):
        text = "---\nhide: [navigation]\n---\n" + re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text.replace("](CHANGELOG.md)", "](changelog.md)")))
    files.append(File.generated(config, "LICENSE", abs_src_path=str(ROOT / "LICENSE")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to README.md lead to the first page."""
    return re.sub(r"\]\(\.\./((?:\.\./)*)README\.md", r"](\1index.md", markdown)
