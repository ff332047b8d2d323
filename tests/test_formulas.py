"""Formulas are typeset when the book is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("quickjs", reason="needs quickjs-ng")
pytest.importorskip("sphinx", reason="needs Sphinx")
sys.path.insert(0, str(Path(__file__).parents[1] / "book" / "_ext"))
import formulas


@pytest.fixture(scope="module")
def typeset() -> formulas.Typesetter:
    return formulas.typesetter()


def test_a_formula_becomes_boxes_and_mathml(typeset: formulas.Typesetter) -> None:
    html = typeset(r"\frac{a}{b} < \text{Größe}", display=True)
    assert html.startswith("<mjx-container") and html.endswith("</mjx-container>") and 'display="true"' in html
    assert "<mjx-frac" in html and "<mfrac><mi>a</mi><mi>b</mi></mfrac>" in html
    assert "<mo>&lt;</mo>" in html and "Größe" in html
    assert 'display="true"' not in typeset("a", display=False)


def test_a_long_formula_in_a_line_may_break(typeset: formulas.Typesetter) -> None:
    assert 'class="MathJax long"' in typeset("+".join("abcdefghijklm"), display=False)
    assert 'class="MathJax"' in typeset("a+b", display=False)
    assert 'class="MathJax"' in typeset("+".join("abcdefghijklm"), display=True)


@pytest.mark.parametrize(
    ("tex", "words"),
    [(r"\frac{a}", "argument"), ("{a", "brace"), (r"\nosuchmacro", "nosuchmacro"), (r"a_b_c", "script")],
)
def test_what_cannot_be_read_is_an_error(typeset: formulas.Typesetter, tex: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){words}"):
        typeset(tex, display=False)


def test_every_box_has_a_rule(typeset: formulas.Typesetter) -> None:
    sheet = typeset.style_sheet()
    assert "mjx-mfrac" in sheet and ".mjx-c1D451" in sheet and 'url("fonts/MathJax_Main-Regular.woff")' in sheet


@pytest.mark.parametrize(
    ("tex", "lines"),
    [
        ("a = b", "a = b"),
        (r"a \\ b", r"\begin{split}a \\ b\end{split}"),
        ("a\n\nb", r"\begin{aligned}a\\b\end{aligned}"),
    ],
)
def test_lines_of_an_equation(tex: str, lines: str) -> None:
    assert formulas.aligned(tex) == lines
