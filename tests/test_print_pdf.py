"""The printed book has every page once, and its links lead into itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
lab_figures = pytest.importorskip("lab_figures", reason="needs nbclient")
print_pdf = pytest.importorskip("print_pdf", reason="needs playwright, pypdf and PyYAML")


def test_pages_come_in_the_order_of_the_contents() -> None:
    entries = print_pdf.order()
    names = [name for name, _ in entries]
    assert names[0] == "book/index" and len(set(names)) == len(names)
    assert names.index("book/05-fusing") + 1 == names.index("notebooks/05_fusing")
    assert [part for _, part in entries if part] == ["In a hurry", "The book", "Appendices"]


def test_links_lead_to_one_place_in_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(print_pdf, "BUILT", tmp_path)
    (tmp_path / "book").mkdir()
    (tmp_path / "book/a.html").write_text(
        '<body><article><h1>1. <em>A</em><a class="headerlink" href="#x">#</a></h1><p id="x">'
        '<a href="#x">1</a><a href="b.html">2</a><a href="../notebooks/c.html#y">3</a><a href="https://x.org">4</a>'
        '<a href="gone.html">5</a><img src="../_images/i.svg"><iframe>i</iframe><script>s</script></article></body>',
        encoding="utf-8",
    )
    page = print_pdf.read("book/a", "", {"book/a", "book/b", "notebooks/c"})
    assert page.title == "1. A"
    hrefs = re.findall(r'href="([^"]*)"', page.body)
    assert hrefs == ["#book-a--x", "#book-b--", "#notebooks-c--y", "https://x.org"]
    assert 'id="book-a--x"' in page.body and f'id="{page.anchor}"' in page.body
    assert "headerlink" not in page.body and "iframe" not in page.body and 'src="_images/i.svg"' in page.body
    assert 'data-page="7"' in print_pdf.document([page], {"book/a": 7})


def test_a_labs_figures_are_drawn_again_as_vectors(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [
        "import matplotlib.pyplot as plt",
        "plt.plot([1, 2]); plt.show()",
        "print('none')",
        "plt.figure(); plt.plot([3]);",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(notebook, tmp_path / "lab.ipynb")
    figures = lab_figures.vector_figures(tmp_path / "lab.ipynb")
    assert len(figures) == 2 and all(figure.rstrip().endswith("</svg>") for figure in figures)
    page = '<img alt="a" src="_images/a.png"><img src="_images/b.png" alt="b"><img src="_images/c.svg">'
    shown = lab_figures.with_vectors(page, ["<svg>1</svg>", "<svg>2</svg>"])
    assert shown == (
        '<img alt="a" src="data:image/svg+xml;base64,PHN2Zz4xPC9zdmc+">'
        '<img src="data:image/svg+xml;base64,PHN2Zz4yPC9zdmc+" alt="b"><img src="_images/c.svg">'
    )
    with pytest.raises(ValueError, match="2 pictures, the lab draws 1"):
        lab_figures.with_vectors(page, ["<svg/>"])
