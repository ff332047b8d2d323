"""The book's sources: no page forgotten, no figure without alternative text, no page that calls another host."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from test_notebooks import MACHINE_PATH

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "book").glob("*.md"))

yaml = pytest.importorskip("yaml")
sys.path.insert(0, str(ROOT / "book" / "_ext"))
offline_pages = pytest.importorskip("offline_pages", reason="needs Sphinx")
measured = pytest.importorskip("measured", reason="needs Sphinx")
heads_table = pytest.importorskip("heads_table", reason="needs Sphinx")

FIGURE = re.compile(r"^(?P<fence>`{3,}|:{3,})\{(?:figure|image)\}.*?^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)
MARKDOWN_IMAGE_WITHOUT_TEXT = re.compile(r"!\[\s*\]\(")
DRAWN = re.compile(r"^`{3,}\{drawn\} (?P<name>\S+)\n(?P<body>.*?)^`{3,}\s*$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"by `python (\S+\.py)")
HTML_IMAGE = re.compile(r"<img\b[^>]*>")


def files_in_toc(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node[key] for key in ("root", "file") if key in node]
        return own + [name for value in node.values() for name in files_in_toc(value)]
    if isinstance(node, list):
        return [name for value in node for name in files_in_toc(value)]
    return []


def images_without_text(page: str) -> list[str]:
    """The images of a MyST page that say nothing to a reader who can't see them."""
    figures = [match.group() for match in FIGURE.finditer(page)]
    silent = [figure for figure in figures if not re.search(r"^\s*:?alt: *\S", figure, re.MULTILINE)]
    silent += MARKDOWN_IMAGE_WITHOUT_TEXT.findall(page)
    silent += [image for image in HTML_IMAGE.findall(page) if not re.search(r"""\balt=["'][^"']""", image)]
    return silent


def figures_without_origin(page: str) -> list[str]:
    """The drawn figures of a page that don't link what they were drawn from or name no script that is there."""
    silent = []
    for name, body in DRAWN.findall(page):
        scripts = COMMAND.findall(body)
        data = re.search(r"^Data: .*\]\((?:data/|\.\./notebooks/)", body, re.MULTILINE)
        is_sketch = "A drawing without data" in body
        if not (data or is_sketch) or not scripts or not all((ROOT / script).is_file() for script in scripts):
            silent.append(name)
    return silent


def test_every_page_and_lab_is_in_the_table_of_contents_once() -> None:
    listed = files_in_toc(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    there = [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in there)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_figure_links_its_data_and_the_command_that_draws_it(path: Path) -> None:
    assert not figures_without_origin(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("caption", "silent"),
    [
        ("Data: [a.json](data/a.json) · drawn by `python book/figures/make_figures.py x`", []),
        ("Data: [a.json](data/a.json)", ["x"]),
        ("Data: a.json · drawn by `python book/figures/make_figures.py x`", ["x"]),
        ("Data: [a.json](data/a.json) · drawn by `python book/figures/nowhere.py x`", ["x"]),
    ],
)
def test_a_figure_without_origin_is_found(caption: str, silent: list[str]) -> None:
    assert (
        figures_without_origin(f"text\n\n```{{drawn}} x\n:name: fig-x\n\nWhat it shows.\n\n{caption}\n```\n") == silent
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_image_has_alternative_text(path: Path) -> None:
    assert images_without_text(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "book/data/h200").iterdir()), ids=lambda path: path.name)
def test_every_measured_file_says_where_it_came_from(path: Path) -> None:
    if path.name == measured.SESSION:
        assert {name for name in measured._read(path)["files"] if not path.with_name(name).exists()} == set()
    else:
        about, circumstances = measured.origin(path)
        assert about
        assert "torch" in circumstances


GPU_RUN = {
    "what": "Times",
    "command": "python a.py",
    "measured": "2026-12-01",
    "device": "H200",
    "versions": {"torch": "2"},
}
NESTED_RUN = {
    "what": "Times.",
    "provenance": {"date": "2026-12-01T01:02:03", "command": "python a.py", "gpu": {"name": "H200"}, "torch": "2"},
}


@pytest.mark.parametrize("document", [GPU_RUN, NESTED_RUN])
def test_the_origin_of_a_data_file_is_read_from_it(tmp_path: Path, document: dict[str, object]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "a_more.json").write_text("[]", encoding="utf-8")
    assert measured.origin(tmp_path / "a.json") == ("Times. Made by `python a.py`.", "2026-12-01, H200, torch 2")
    assert measured.origin(tmp_path / "a_more.json") == ("Belongs to a.json.", "2026-12-01, H200, torch 2")


@pytest.mark.parametrize("missing", GPU_RUN)
def test_a_data_file_without_an_origin_is_refused(tmp_path: Path, missing: str) -> None:
    document = {key: value for key, value in GPU_RUN.items() if key != missing}
    (tmp_path / "a.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(LookupError):
        measured.origin(tmp_path / "a.json")


def test_the_readme_says_what_its_picture_shows() -> None:
    text = (ROOT / "book/figures/readme.txt").read_text(encoding="utf-8").strip()
    assert f'alt="{text}"' in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_front_page_says_what_its_picture_shows() -> None:
    text = (ROOT / "book/figures/readme.txt").read_text(encoding="utf-8").strip()
    page = (ROOT / "book/index.md").read_text(encoding="utf-8")
    assert page.count(f":alt: {text}\n") == page.count("```{image}") == 2  # light and dark


def test_the_heads_of_the_front_page_are_those_of_the_simulator_nearly() -> None:
    simulated = json.loads((ROOT / "book/data/simulated/context.json").read_text(encoding="utf-8"))
    peaks = {row["schedule"]: row["step_peak_bytes"] / 2**30 for row in simulated["peaks"] if row["tokens"] == 2**17}
    *_, ratio, logits, naive, fused, _ = heads_table.rows()[simulated["model"]].split("|")
    assert (ratio.strip(), logits.strip()) == ("74", "37.0")
    assert float(naive) == pytest.approx(peaks["naive"], abs=0.051)
    assert float(fused) == pytest.approx(peaks["fused"], abs=0.051)


@pytest.mark.parametrize("path", [*PAGES, *ROOT.glob("*.md")], ids=lambda path: path.stem)
def test_no_page_names_a_path_of_the_machine_it_was_written_on(path: Path) -> None:
    assert MACHINE_PATH.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("page", "silent"),
    [
        ("```{figure} a.png\n:alt: a falling line\n\nCaption.\n```\n", 0),
        ("```{figure} a.png\n\nCaption.\n```\n", 1),
        (":::{figure} a.png\n---\nalt: a falling line\n---\n:::\n", 0),
        (":::{figure} a.png\n:alt:\n:::\n", 1),
        ("![](a.png) ![a falling line](a.png)\n", 1),
        ('<img src="a.png"> <img src="a.png" alt="a falling line">', 1),
    ],
)
def test_an_image_without_text_is_found(page: str, silent: int) -> None:
    assert len(images_without_text(page)) == silent


@pytest.mark.parametrize(
    ("text", "suffix", "addresses"),
    [
        ('<a href="https://example.org">read on</a><script src="_static/a.js"></script>', ".html", []),
        ('<script src="https://example.org/a.js"></script>', ".html", ["https://example.org/a.js"]),
        ('<img src="//example.org/a.png">', ".html", ["//example.org/a.png"]),
        ('<img srcset="a.png 1x, https://example.org/b.png 2x">', ".html", ["https://example.org/b.png"]),
        ('<link rel="stylesheet" href="https://example.org/a.css">', ".html", ["https://example.org/a.css"]),
        ('<link rel="canonical" href="https://example.org/">', ".html", []),
        ("<style>@import 'https://example.org/a.css';</style>", ".html", ["https://example.org/a.css"]),
        ("<script>import('https://example.org/a.js')</script>", ".html", ["https://example.org/a.js"]),
        ('<p style="background: url(https://example.org/a.png)">', ".html", ["https://example.org/a.png"]),
        ("@font-face { src: url('https://example.org/a.woff') }", ".css", ["https://example.org/a.woff"]),
        ("@font-face { src: url('../fonts/a.woff') }", ".css", []),
    ],
)
def test_what_a_browser_would_fetch_from_another_host_is_found(text: str, suffix: str, addresses: list[str]) -> None:
    assert offline_pages.foreign_requests(text, suffix) == addresses
