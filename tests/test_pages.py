"""The built book in a real browser: every page, on a wide screen and on a phone, in the light and in the dark theme.

``make pages`` builds the book and runs this; another build is tested with ``BOOK_HTML=…/_build/html pytest -m pages``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from pages_server import COMPRESSED, compressed, served

ROOT = Path(__file__).parent.parent
BOOK = Path(os.environ.get("BOOK_HTML", ROOT / "_build" / "html")).resolve()
PAGES = sorted(path for part in ("book", "notebooks") for path in (BOOK / part).rglob("*.html"))
PAGES += [path for path in (BOOK / "search.html", BOOK / "genindex.html") if path.exists()]
NOT_BUILT = f"NO PAGE IS TESTED: no book in {BOOK}; make pages builds it"
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
LOCAL = ("file:", "data:", "blob:", "about:")
LINKS = {"a": ["href"], "link": ["href"], "img": ["src"], "script": ["src"], "iframe": ["src"]}
HEAVIEST = 1_500_000  # bytes of a page's first visit, text compressed as GitHub Pages does, every picture scrolled to

axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python")
AXE = axe.AXE_FILE_PATH.read_text(encoding="utf-8")
CONTRAST = ["color-contrast", "link-in-text-block"]
FAULTS = (ROOT / "tests" / "page_faults.js").read_text(encoding="utf-8")

pytestmark = pytest.mark.pages


class Anchors(HTMLParser):
    """Where the links of a page lead, which files it is made of, and what others may link to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values.get("id", ""), values.get("name", "")}
        self.links |= {values.get(name, "") for name in LINKS.get(tag, ())}


class Opened:
    """One page in the browser, and everything that it asked for or complained of."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.page = browser.new_page()
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"not there: {request.url}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.page.goto(path.as_uri())
        self.page.add_style_tag(content="* { transition: none !important }")  # colours change at once with the theme

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def faults(self, width: int, scheme: str) -> list[str]:
        """What is wrong with the page when it is shown so."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        found = self.page.evaluate(FAULTS)
        theme = self.page.locator("html").get_attribute("data-theme")
        return found if theme in (scheme, None) else [*found, f"the theme is {theme}"]

    def barriers(self, schemes: dict[str, list[str] | None], left_out: str) -> list[str]:
        """What axe finds serious or critical, by all of its rules (None) or some, without the elements ``left_out``."""
        self.page.set_viewport_size({"width": 1280, "height": 900})
        # axe looks for what lies behind a text where it was at first: nothing may move because it comes near.
        self.page.add_style_tag(content="section { content-visibility: visible !important }")
        self.page.eval_on_selector_all(left_out, "elements => elements.forEach(element => element.remove())")
        self.page.evaluate(AXE)
        found = []
        for scheme, rules in schemes.items():
            self.page.emulate_media(color_scheme=scheme)
            options = {"resultTypes": ["violations"]} | (
                {"runOnly": {"type": "rule", "values": rules}} if rules else {}
            )
            violations = self.page.evaluate("options => axe.run(options)", options)["violations"]
            found += [
                f"{scheme}: {violation['id']}: {violation['help']}: {node['html'][:100]}"
                for violation in violations
                if violation["impact"] in ("serious", "critical")
                for node in violation["nodes"][:3]
            ]
        return found

    def weight(self) -> int:
        """Bytes of everything that the page has loaded, each file once."""
        files = {Path(unquote(urlsplit(url).path)) for url in self.requested if url.startswith("file:")}
        there = [file for file in files if file.is_file()]
        return sum(
            len(compressed(file, file.stat().st_mtime)) if file.suffix in COMPRESSED else file.stat().st_size
            for file in there
        )

    def complained(self) -> list[str]:
        foreign = [url for url in self.requested if not url.startswith(LOCAL)]
        return [f"asks another host: {url}" for url in foreign] + [f"complains: {text}" for text in self.complaints]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    opened: list[Opened] = []

    def open_one(path: Path) -> Opened:
        opened.append(Opened(browser, path))
        return opened[-1]

    yield open_one
    for one in opened:
        one.page.close()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(BOOK).with_suffix("").as_posix())
def test_page_is_whole_and_fits_every_screen(path: Path, open_page: Any) -> None:
    opened = open_page(path)
    found = [
        f"{width} px, {scheme}: {fault}"
        for width in WIDTHS
        for scheme in SCHEMES
        for fault in opened.faults(width, scheme)
    ]
    found += opened.complained()
    if (weight := opened.weight()) > HEAVIEST:
        found.append(f"it weighs {weight:,} bytes")
    # Of a formula a screen reader gets MathML, the viewer in the frames has tests of its own, and code is coloured the
    # same on every page: all three are looked at once, below, for they take most of the time.
    found += opened.barriers({"light": None, "dark": CONTRAST}, "mjx-container, iframe, .highlight pre")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["book/05-fusing", "notebooks/05_fusing"])
def test_code_and_formulas_can_be_read_by_everyone(name: str, open_page: Any) -> None:
    opened = open_page(BOOK / f"{name}.html" if PAGES else pytest.skip(NOT_BUILT))
    assert opened.faults(1280, "light") == []
    assert opened.barriers({"light": None, "dark": CONTRAST}, "iframe") == []


def test_an_address_without_a_page_leads_to_one(browser: Any) -> None:
    text = (BOOK / "404.html").read_text(encoding="utf-8") if PAGES else pytest.skip(NOT_BUILT)
    base = re.search(r'<base href="([^"]*)/">', text)
    prefix, depth = (base[1], "some/where/") if base else ("", "")  # without a base it holds for one folder only
    page = browser.new_page()
    with served(BOOK, prefix=prefix) as address:
        failed: list[str] = []
        page.on("requestfailed", lambda request: failed.append(request.url))
        answer = page.goto(f"{address}/{depth}the-spikes.html".replace("spikes", "gradients"))
        assert answer.status == 404
        page.get_by_role("link", name="The gradient", exact=False).first.wait_for()
        page.goto(f"{address}/{depth}05-fusing-old.html")
        page.locator("#near-list a", has_text="Fusing").first.click()
        assert page.url.endswith("/book/05-fusing.html") and not failed
    page.close()


def test_the_front_page_leads_into_the_book() -> None:
    text = (BOOK / "index.html").read_text(encoding="utf-8") if PAGES else pytest.skip(NOT_BUILT)
    assert re.search(r'http-equiv="Refresh" content="0; url=book/index.html"', text)


def broken_links(pages: dict[Path, Anchors], root: Path) -> list[str]:
    """What these pages link to or are made of that is nowhere, and the anchors that the page linked to lacks."""
    broken = []
    for path, page in pages.items():
        for link in page.links - {""}:
            if re.match(r"[a-z]+:|//", link):
                continue
            address, anchor = (unquote(part) for part in urldefrag(re.sub(r"\?[^#]*", "", link)))
            target = (path.parent / address).resolve() if address else path
            state = re.fullmatch(r"\w+=.*", anchor)  # what the calculator shows
            if not target.is_file() or (target in pages and not state and anchor not in pages[target].ids):
                broken.append(f"{link} on {path.relative_to(root)}")
    return sorted(broken)


def test_every_link_image_and_file_of_a_page_is_there() -> None:
    others = [path for path in (BOOK / "index.html", BOOK / "404.html") if path.exists()]
    pages = {path: Anchors(path.read_text(encoding="utf-8")) for path in (*PAGES, *others)}
    broken = broken_links(pages, BOOK)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ('<a href="b.html#there">b</a> <a href="b.html?x=1#there">b</a> <a href="#own" id="own">here</a>', []),
        ('<a href="b.html#model=x">b</a> <a href="https://example.org/nowhere">there</a>', []),
        ('<a href="c.html">c</a>', ["c.html on a.html"]),
        ('<a href="b.html#nowhere">b</a>', ["b.html#nowhere on a.html"]),
        ('<a href="b.html?x=1#nowhere">b</a>', ["b.html?x=1#nowhere on a.html"]),
        ('<img src="b.png" alt="b">', ["b.png on a.html"]),
        ('<script src="b.js?v=1"></script>', ["b.js?v=1 on a.html"]),
        ('<link rel="stylesheet" href="b.css">', ["b.css on a.html"]),
    ],
)
def test_what_is_linked_and_not_there_is_found(tmp_path: Path, body: str, broken: list[str]) -> None:
    for name, text in (("a.html", body), ("b.html", '<p id="there">')):
        (tmp_path / name).write_text(text, encoding="utf-8")
    pages = {path: Anchors(path.read_text(encoding="utf-8")) for path in sorted(tmp_path.iterdir())}
    assert broken_links(pages, tmp_path) == broken


GOOD = "<html lang=en><body><main><article><p>text</p>{}</article></main></body></html>"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", ""),
        (f'<img alt="a dot" src="{PIXEL}">', ""),
        ('<div style="overflow-x: auto"><div style="width: 900px">wide</div></div>', ""),
        ('<div style="width: 900px">wide</div>', "overflow"),
        ('<div style="overflow: hidden"><div style="width: 900px">cut off</div></div>', "overflow"),
        ('<img alt="a dot" src="nowhere.png">', "did not load"),
        (f'<img src="{PIXEL}">', "no alternative text"),
        ('<p style="color: #ccc">hardly there</p>', "faint"),
        ('<script src="nowhere.js"></script>', "not there"),
        ("<script>throw new Error('broken script')</script>", "broken script"),
        ("<script>console.error('unhappy')</script>", "unhappy"),
        ('<script src="http://127.0.0.1:9/a.js"></script>', "http://127.0.0.1:9/a.js"),
        ('<span class="math">x</span>', "not typeset"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(open_page: Any, tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!doctype html>" + GOOD.replace("{}", body), encoding="utf-8")
    opened = open_page(path)
    found = [*opened.faults(390, "light"), *opened.complained()]
    assert found == [] if not words else any(words in fault for fault in found)
