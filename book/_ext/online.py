"""Sphinx extension: what the book needs where it is published, and leaves out where it doesn't know that it is.

The repository and the branch are those of the build (``notebooks/stamp.py`` finds them), so that a fork's book points
to the fork. Known, they give buttons to the source, to an edit and to an issue, canonical addresses, ``sitemap.xml``
and a picture for whoever shares a link; unknown, no page has a link that leads nowhere. ``BOOK_URL`` names the address
of the pages where it is not that of GitHub Pages. Every page says in a sentence what it is about, and ``404.html``
looks for what the reader may have meant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))

import stamp

PARTS = Path(__file__).parent / "online"
ABOUT = "The loss and the gradients of a language model's head without its logits: derived, measured, and as code."
LONGEST = 200  # characters of a description: more is cut off where a link is shown


def know_the_repository(app: Sphinx, config: Config) -> None:
    where = stamp.origin(pages=config.html_baseurl or os.environ.get("BOOK_URL"))
    if where is None:
        return
    config.html_baseurl = f"{where.pages}/"
    # Of a pull request the build service tells the branch it is to be merged into, too; an edit starts from there.
    branch = (
        os.environ.get("GITHUB_BASE_REF") or os.environ.get("GITHUB_REF_NAME") or stamp._git("branch", "--show-current")
    )
    config.html_theme_options |= {
        "repository_url": f"https://github.com/{where.repository}",
        "repository_branch": branch or "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
    }


# ---------------------------------------------------------------- what a page says of itself


def described(doctree: nodes.document | None) -> str:
    """The beginning of the first paragraph that can be read without its formulas, as plain text."""
    if doctree is None:
        return ABOUT
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split()).removeprefix("Question. ")
        plain = not any(paragraph.findall(nodes.math)) and not any(paragraph.findall(nodes.raw))
        if plain and len(text) > 50 and not isinstance(paragraph.parent, nodes.list_item):
            return shortened(text)
    return ABOUT


def shortened(text: str) -> str:
    """At most ``LONGEST`` characters, ending with a sentence if there is one to end with, else with a word."""
    if len(text) <= LONGEST:
        return text
    cut = text[:LONGEST]
    end = max(cut.rfind(mark) for mark in (". ", "? ", "! "))
    return cut[: end + 1] if end > LONGEST // 4 else cut.rsplit(" ", 1)[0].rstrip(",;:") + " …"


def card_of(pagename: str) -> str:
    return f"_static/cards/{pagename.replace('/', '-')}.png"


def describe(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add what search engines and those who show a link read."""
    about, base = described(doctree), app.config.html_baseurl
    title = title_of(app, pagename) or app.config.html_title
    properties = {
        "og:type": "article" if doctree else "website",
        "og:site_name": app.config.html_title,
        "og:title": title,
        "og:description": about,
    }
    if base:
        properties["og:url"] = base + app.builder.get_target_uri(pagename)
    if base and doctree:
        properties |= {"og:image": base + card_of(pagename), "og:image:width": "1200", "og:image:height": "630"}
        properties["og:image:alt"] = f"{title}. {about}"
    lines = [f'<meta name="description" content="{escape(about)}">']
    lines += [f'<meta property="{name}" content="{escape(value)}">' for name, value in properties.items()]
    lines += ['<meta name="twitter:card" content="summary_large_image">'] if base and doctree else []
    if pagename == "404" and base:  # it is shown in the place of any address
        lines.append(f'<base href="{escape(urlsplit(base).path)}">')
    tags = "\n".join(lines) + "\n"
    context["metatags"] = context.get("metatags", "") + tags
    if pagename == app.config.root_doc:
        app.env.flce_front = tags
    if doctree and base:
        app.env.flce_cards = {**getattr(app.env, "flce_cards", {}), pagename: (title, about)}


def title_of(app: Sphinx, pagename: str) -> str:
    title = app.env.titles.get(pagename)
    return title.astext() if title else ""


# ---------------------------------------------------------------- files beside the pages


def not_found(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    pages = [[app.builder.get_target_uri(name), title_of(app, name)] for name in sorted(app.env.found_docs)]
    script = (PARTS / "not_found.js").read_text(encoding="utf-8")
    body = (
        (PARTS / "not_found.html")
        .read_text(encoding="utf-8")
        .replace("@FRONT@", app.builder.get_target_uri("book/index"))
    )
    known = json.dumps(pages, ensure_ascii=False).replace("<", "\\u003c")
    body += f'<script type="application/json" id="pages">{known}</script>\n<script>\n{script}</script>\n'
    yield "404", {"title": "Not found", "body": body}, "page.html"


def write_files(app: Sphinx, exception: Exception | None) -> None:
    base = app.config.html_baseurl
    if exception is not None or app.builder.name != "html" or not base:
        return
    addresses = [base + app.builder.get_target_uri(name) for name in sorted(app.env.found_docs)]
    entries = "".join(f"<url><loc>{escape(address)}</loc></url>\n" for address in addresses)
    sitemap = f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{entries}</urlset>\n'
    Path(app.outdir, "sitemap.xml").write_text(sitemap, encoding="utf-8")
    Path(app.outdir, ".nojekyll").touch()  # GitHub Pages leaves out folders like _static otherwise
    front = Path(app.outdir, "index.html")  # it sends the reader on, but a link to it may be shared, too
    text = front.read_text(encoding="utf-8")
    if "og:title" not in text:
        front.write_text(getattr(app.env, "flce_front", "") + text, encoding="utf-8")
    from share_cards import draw  # needs matplotlib

    for pagename, (title, about) in getattr(app.env, "flce_cards", {}).items():
        draw(Path(app.outdir, card_of(pagename)), title, about, app.config.html_title)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", know_the_repository, priority=100)
    app.connect("html-page-context", describe)
    app.connect("html-collect-pages", not_found)
    app.connect("build-finished", write_files, priority=700)  # after the front page is written
    return {"parallel_read_safe": True, "parallel_write_safe": False}
