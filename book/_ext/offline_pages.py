"""Sphinx extension: no page makes a request to another host.

After the build every HTML and CSS file is searched for what a browser would fetch by itself (scripts, style sheets,
images, frames, fonts); a foreign address among them is a warning, and so an error under ``-W``. Links to click are no
concern here.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

# The attribute that makes a browser fetch, by element. <a href> is a link to click and is not here.
FETCHING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "embed": "src",
    "source": "src",
    "audio": "src",
    "video": "src",
    "track": "src",
    "object": "data",
    "link": "href",
}
NOT_FETCHED_LINK_RELATIONS = {"canonical", "author", "license", "prev", "next", "index", "search"}
FOREIGN_ADDRESS = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
FOREIGN_IN_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s;]+)""", re.IGNORECASE)
FOREIGN_IN_SCRIPT = re.compile(r"""(?:\bimport\s*\(?|\bfrom|\bfetch\s*\()\s*["'`]((?:https?:)?//[^"'`]+)""")


class FetchedAddresses(HTMLParser):
    """Collects the foreign addresses that a browser would request while it shows one page."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        values = {name: value or "" for name, value in attrs}
        if tag == "link" and set(values.get("rel", "").split()) & NOT_FETCHED_LINK_RELATIONS:
            return
        candidates = [values.get(FETCHING.get(tag, ""), "")]
        candidates += [part.split()[0] for part in values.get("srcset", "").split(",") if part.split()]
        self.foreign += [address for address in candidates if FOREIGN_ADDRESS.match(address)]
        self.foreign += FOREIGN_IN_CSS.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.foreign += FOREIGN_IN_CSS.findall(data)
        elif self._inside == "script":
            self.foreign += FOREIGN_IN_SCRIPT.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def foreign_requests(text: str, suffix: str) -> list[str]:
    """Addresses on other hosts that a browser fetches by itself for this ``.html`` or ``.css`` text."""
    if suffix == ".css":
        return FOREIGN_IN_CSS.findall(text)
    parser = FetchedAddresses()
    parser.feed(text)
    return parser.foreign


def warn_of_foreign_requests(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    outdir = Path(app.outdir)
    for path in sorted(outdir.rglob("*")):
        if path.suffix in {".html", ".css"}:
            for address in sorted(set(foreign_requests(path.read_text(encoding="utf-8"), path.suffix))):
                logger.warning("%s makes the browser request %s", path.relative_to(outdir), address)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", warn_of_foreign_requests, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
