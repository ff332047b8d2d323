"""Print the built book: ``python book/print_pdf.py`` turns ``_build/html`` into ``_build/flce.pdf``.

The labs are run once more, for figures as vectors. The pages become one document, in the order of ``_toc.yml``, whose
links lead to its own pages; Chromium prints it twice, since the table of contents can only be filled in when every
chapter has its page.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import yaml
from lab_figures import vector_figures, with_vectors
from playwright.sync_api import sync_playwright
from pypdf import PdfReader

ROOT = Path(__file__).parents[1]
BUILT = Path(os.environ.get("BOOK_HTML", ROOT / "_build" / "html")).resolve()
OUT = Path(os.environ.get("BOOK_PDF", ROOT / "_build" / "flce.pdf"))
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
INTERACTIVE = {"book/calculator"}  # nothing is left of it on paper

STYLE = """
@page { size: A4; margin: 18mm 18mm 20mm; }
html { font-size: 10.5pt; }
body { color: #111; background: #fff; font-size: 1rem; padding: 0; }
article, .front { max-width: none; }
article { break-before: page; }
h1, h2, h3, h4 { break-after: avoid; }
h1 { margin-top: 0; font-size: 2rem; }
h2 { font-size: 1.5rem; }
h3 { font-size: 1.2rem; }
figure, img, table, .admonition-title { break-inside: avoid; }
div.cell_input, div.cell_output, mjx-container[display="true"] { break-inside: avoid; }
img { max-height: 225mm; }
pre { white-space: pre-wrap !important; overflow-wrap: anywhere; font-size: .82em; line-height: 1.35; }
div.cell_output, div.highlight, mjx-container[display="true"] { overflow: visible !important; }
.headerlink, .only-dark, details.interactive, .copybtn, .sd-btn { display: none !important; }
.front { break-after: page; }
.front h1 { font-size: 2.8rem; margin-top: 70mm; }
.contents { break-before: page; }
.contents p { display: flex; gap: .5em; margin: .15rem 0; }
.contents p::after { content: attr(data-page); margin-left: auto; font-variant-numeric: tabular-nums; }
.contents p.lab { margin-left: 1.5em; }
.contents .part { font-weight: bold; margin-top: .8rem; }
"""


@dataclass(frozen=True)
class Page:
    """A page of the book as it goes into the document; a part's first page names the part."""

    name: str
    title: str
    part: str
    body: str

    @property
    def anchor(self) -> str:
        return anchor_of(self.name, "")


def anchor_of(name: str, anchor: str) -> str:
    """An id of one page, unique in the whole document."""
    return f"{name.replace('/', '-')}--{anchor}"


def order() -> list[tuple[str, str]]:
    """Every page with the part that it opens, or ""."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    found = [(toc["root"], "")]
    for part in toc["parts"]:
        caption = part["caption"]
        for chapter in part["chapters"]:
            for entry in (chapter, *chapter.get("sections", [])):
                if entry["file"] not in INTERACTIVE:
                    found.append((entry["file"], caption))
                    caption = ""
    return found


def read(name: str, part: str, names: set[str]) -> Page:
    """The article of a built page; ids are made unique, links lead into the document or, else, are text."""
    text = (BUILT / f"{name}.html").read_text(encoding="utf-8")
    body = text[text.index("<article") : text.index("</article>") + len("</article>")]
    body = re.sub(r"<(script|style|iframe|form|noscript)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'<a class="headerlink".*?</a>', "", body)
    body = body.replace('loading="lazy"', "").replace("<details", "<details open").replace('src="../', 'src="')
    body = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{anchor_of(name, found[1])}"', body)

    def link(found: re.Match[str]) -> str:
        address, _, anchor = found[1].partition("#")
        if re.match(r"[a-z]+:", address):
            return found[0]
        path = (BUILT / name).parent / address if address else BUILT / f"{name}.html"
        target = os.path.relpath(path, BUILT).removesuffix(".html")
        return f'href="#{anchor_of(target, anchor)}"' if target in names else ""

    body = re.sub(r'\bhref="([^"]*)"', link, body)
    title = re.sub(r"<[^>]+>", "", re.search(r"<h1>(.*?)</h1>", body, re.DOTALL)[1]).strip()  # type: ignore[index]
    return Page(name, title, part, f'<div id="{anchor_of(name, "")}">{body}</div>')


def with_vector_figures(page: Page) -> Page:
    """A lab's page with figures that can be enlarged; any other as it is."""
    if not page.name.startswith("notebooks/"):
        return page
    print(f"running {page.name} for its figures", file=sys.stderr, flush=True)
    return replace(page, body=with_vectors(page.body, vector_figures(ROOT / f"{page.name}.ipynb")))


def document(pages: list[Page], numbers: dict[str, int]) -> str:
    """The whole book as one HTML page; ``numbers`` are the printed pages of chapters and labs, by title."""
    entries = []
    for page in pages:
        entries += [f'<p class="part">{escape(page.part)}</p>'] if page.part else []
        kind = ' class="lab"' if page.name.startswith("notebooks/") else ""
        number = numbers.get(page.name, 0)
        entries.append(f'<p{kind} data-page="{number or "000"}"><a href="#{page.anchor}">{page.title}</a></p>')
    head = pages[0].title
    return f"""<!doctype html>
<html lang="en" data-theme="light" data-mode="light"><head><meta charset="utf-8"><title>{head}</title>
<link rel="stylesheet" href="_static/book.css"><style>{STYLE}</style></head>
<body><div class="front"><h1>{head}</h1><p>The flce-ref contributors</p></div>
<nav class="contents"><h1>Contents</h1>{"".join(entries)}</nav>
<main class="bd-content">{"".join(page.body for page in pages)}</main></body></html>"""


def printed(browser: Any, text: str) -> Path:
    """Print one document; it stands among the built files meanwhile, so that it finds pictures and fonts."""
    source = BUILT / "print.html"
    source.write_text(text, encoding="utf-8")
    page = browser.new_page(color_scheme="light")
    try:
        page.goto(source.as_uri())
        page.evaluate("document.fonts.ready.then(() => null)")
        foot = '<div style="width:100%;text-align:center;font-size:8pt"><span class="pageNumber"></span></div>'
        page.pdf(path=str(OUT), prefer_css_page_size=True, print_background=True, outline=True, tagged=True,
                 display_header_footer=True, header_template="<span></span>", footer_template=foot)  # fmt: skip
    finally:
        page.close()
        source.unlink()
    return OUT


def page_numbers(pdf: Path, pages: list[Page]) -> dict[str, int]:
    """Where each page of the book begins in print, from the outline: its top entries are the headings of level one."""
    reader = PdfReader(pdf)
    tops = [entry for entry in reader.outline if not isinstance(entry, list)][2:]  # after title and contents
    if len(tops) != len(pages):
        raise RuntimeError(
            f"{len(tops)} headings of level one in {pdf.name}, expected one for each of {len(pages)} pages"
        )
    return {page.name: (reader.get_destination_page_number(top) or 0) + 1 for page, top in zip(pages, tops)}


def main() -> int:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None or not BUILT.is_dir():
        print(f"print_pdf.py: needs {'chromium' if path is None else f'the built book in {BUILT}'}", file=sys.stderr)
        return 1
    entries = order()
    names = {name for name, _ in entries}
    pages = [with_vector_figures(read(name, part, names)) for name, part in entries]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        numbers = page_numbers(printed(browser, document(pages, {})), pages)
        again = page_numbers(printed(browser, document(pages, numbers)), pages)
        browser.close()
    if again != numbers:
        raise RuntimeError("the pages moved when the contents were filled in")
    print(f"{OUT}: {len(PdfReader(OUT).pages)} pages, {OUT.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
