"""Look at the built site in a real browser: `make docs-check`, or `python -m tests.browser build/site --pictures DIR`.

Each page is opened at the width of a phone and of a desk. Errors in the console, requests that fail, links and anchors that
lead nowhere, and pages that must be scrolled sideways are printed, and end the script with status 1. It needs playwright, and
Chromium: the one that is installed, or playwright's own (`playwright install chromium`).
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urldefrag

from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = {"phone": (390, 844), "desk": (1366, 900)}
LOOK = """() => ({
    links: [...document.querySelectorAll('a[href]')].map(link => link.href),
    ids: [...document.querySelectorAll('[id]')].map(element => element.id),
    pictures: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
    over: document.documentElement.scrollWidth - window.innerWidth,
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and does not say so."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this host and yield its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def listen(page: Page, address: str, faults: list[str]) -> None:
    """Note what goes wrong on a page from now on."""

    def said(text: str) -> None:
        faults.append(f"{page.url.removeprefix(address) or 'first page'}: {text}")

    page.on("console", lambda message: said(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said(str(error)))
    page.on("requestfailed", lambda request: said(f"{request.url} failed"))
    page.on("response", lambda response: said(f"{response.url}: {response.status}") if response.status >= 400 else None)
    page.on("request", lambda request: None if request.url.startswith((address, "data:")) else said(request.url))


def look(browser: Browser, address: str, names: list[str], width: str, pictures: Path | None) -> list[str]:
    """Open all pages at one width. Return what is wrong with them."""
    faults: list[str] = []
    across, down = WIDTHS[width]
    page = browser.new_page(viewport={"width": across, "height": down})
    listen(page, address, faults)
    ids: dict[str, set[str]] = {}
    links: dict[str, set[str]] = {}
    for name in names:
        url = address + name.removesuffix("index.html")
        page.goto(url, wait_until="networkidle")  # what is still loading when the page is left would count as failed
        seen = page.evaluate(LOOK)
        ids[url] = set(seen["ids"])
        links[url] = {link for link in seen["links"] if link.startswith(address)}
        faults += [f"{name}: no picture {each}" for each in seen["pictures"]]
        if seen["over"] > 0:
            faults.append(f"{name}: {seen['over']} pixels too wide for a {width}")
        if pictures is not None:
            page.screenshot(path=pictures / f"{width}-{name.replace('/', '-')}.png", full_page=True)
    for source, targets in links.items():
        for link in sorted(targets):
            target, anchor = urldefrag(link)
            known = ids.get(target)
            if known is None and page.request.head(target).status != 200:
                faults.append(f"{source.removeprefix(address)}: nothing at {link}")
            elif known is not None and anchor and unquote(anchor) not in known:
                faults.append(f"{source.removeprefix(address)}: no anchor {link}")
    page.close()
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that `make docs` has made")
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each page at each width")
    chosen = parser.parse_args()
    if chosen.pictures:
        chosen.pictures.mkdir(parents=True, exist_ok=True)
    names = sorted(
        str(path.relative_to(chosen.site)) for path in chosen.site.rglob("*.html") if path.name != "404.html"
    )
    installed = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with served(chosen.site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        faults = [fault for width in WIDTHS for fault in look(browser, address, names, width, chosen.pictures)]
        browser.close()
    print("\n".join(faults) or f"{len(names)} pages are well at {' and '.join(WIDTHS)} width")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
