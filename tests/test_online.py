"""A published book points to the repository it was built from; one built elsewhere points to none."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "book" / "_ext"), str(ROOT / "notebooks")]
online = pytest.importorskip("online", reason="needs Sphinx")
nodes = pytest.importorskip("docutils.nodes")
utils = pytest.importorskip("docutils.utils")

import share_cards  # noqa: E402
import stamp  # noqa: E402

FORK = stamp.Origin("someone/Fork", "c0ffee", "https://someone.github.io/Fork")


def config(base: str = "") -> SimpleNamespace:
    return SimpleNamespace(html_baseurl=base, html_theme_options={}, html_title="The book", root_doc="book/index")


def application(base: str, outdir: Path) -> SimpleNamespace:
    builder = SimpleNamespace(name="html", get_target_uri=lambda name: f"{name}.html")
    titles = {"book/a": nodes.title("", "A <b> & c"), "book/index": nodes.title("", "The front")}
    env = SimpleNamespace(titles=titles, found_docs={*titles})
    return SimpleNamespace(config=config(base), builder=builder, env=env, outdir=str(outdir))


def page(*paragraphs: Any) -> Any:
    document = utils.new_document("page")
    document += nodes.section("", nodes.title("", "t"), *paragraphs)
    return document


@pytest.mark.parametrize(
    ("variables", "branch"),
    [
        ({"GITHUB_REF_NAME": "main"}, "main"),
        ({"GITHUB_REF_NAME": "7/merge", "GITHUB_BASE_REF": "stable"}, "stable"),
        ({}, "here"),
    ],
)
def test_buttons_lead_to_the_repository_of_the_build(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], branch: str
) -> None:
    for name in ("GITHUB_REF_NAME", "GITHUB_BASE_REF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stamp, "_git", lambda *_: "here")
    monkeypatch.setattr(stamp, "origin", lambda pages: FORK)
    known = config()
    online.know_the_repository(None, known)
    options = known.html_theme_options
    assert (options["repository_url"], options["repository_branch"]) == ("https://github.com/someone/Fork", branch)
    assert known.html_baseurl == "https://someone.github.io/Fork/"


def test_a_build_of_no_repository_has_no_buttons_and_no_addresses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stamp, "origin", lambda pages: None)
    unknown = config()
    online.know_the_repository(None, unknown)
    assert unknown.html_theme_options == {} and unknown.html_baseurl == ""
    context: dict[str, str] = {}
    online.describe(application("", tmp_path), "book/a", "page.html", context, page())
    assert "og:title" in context["metatags"] and "http" not in context["metatags"]
    online.write_files(application("", tmp_path), None)
    assert list(tmp_path.iterdir()) == []


def test_a_published_page_says_what_it_is_and_has_a_picture(tmp_path: Path) -> None:
    app, context = application("https://x.org/f/", tmp_path), {}
    text = "A sentence of more than fifty characters, <so> that it counts."
    online.describe(app, "book/a", "page.html", context, page(nodes.paragraph("", text)))
    tags = context["metatags"]
    assert 'property="og:title" content="A &lt;b&gt; &amp; c"' in tags
    assert 'name="description" content="A sentence of more than fifty characters, &lt;so&gt; that it counts."' in tags
    assert 'property="og:url" content="https://x.org/f/book/a.html"' in tags
    (tmp_path / "index.html").write_text("front", encoding="utf-8")
    online.write_files(app, None)
    assert (tmp_path / "_static/cards/book-a.png").read_bytes()[16:24] == bytes([0, 0, 4, 176, 0, 0, 2, 118])
    locations = [url.text for url in ET.parse(tmp_path / "sitemap.xml").iter() if url.tag.endswith("}loc")]
    assert locations == ["https://x.org/f/book/a.html", "https://x.org/f/book/index.html"]


def test_what_is_found_nowhere_is_found_from_anywhere(tmp_path: Path) -> None:
    context: dict[str, str] = {}
    online.describe(application("https://x.org/f/", tmp_path), "404", "page.html", context, None)
    assert '<base href="/f/">' in context["metatags"]
    ((name, told, _),) = online.not_found(application("", tmp_path))
    assert name == "404" and '["book/a.html", "A \\u003cb> & c"]' in told["body"]


@pytest.mark.parametrize(
    ("paragraphs", "about"),
    [
        ([nodes.paragraph("", "Short.")], online.ABOUT),
        ([nodes.paragraph("", "", nodes.math("", "x" * 60))], online.ABOUT),
        ([nodes.paragraph("", "Question. " + "a" * 60)], "a" * 60),
        ([nodes.paragraph("", "One sentence of more than enough length to end with it, all told. " + "b " * 99)],
         "One sentence of more than enough length to end with it, all told."),
        ([nodes.paragraph("", "word " * 60)], "word " * 39 + "word …"),
    ],
)  # fmt: skip
def test_a_page_is_described_by_its_first_readable_sentence(paragraphs: list[Any], about: str) -> None:
    assert online.described(page(*paragraphs)) == about


def test_a_long_title_stays_on_the_card(tmp_path: Path) -> None:
    share_cards.draw(tmp_path / "a.png", "many words " * 20, "$ and more words " * 40, "The book")
    assert (tmp_path / "a.png").stat().st_size < 100_000
