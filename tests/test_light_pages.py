"""What is taken out of the built pages is what nobody needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "book" / "_ext"))
light_pages = pytest.importorskip("light_pages", reason="needs Sphinx")


@pytest.mark.parametrize(
    ("css", "kept"),
    [
        (".a{x:1}.b{x:2}", ".a{x:1}"),
        (".a.b{x:1}.b .a,.a>p{x:2}", ".a>p{x:2}"),
        ("p{x:1}[data-x='}']{x:2}", "p{x:1}\n[data-x='}']{x:2}"),
        ("/* } */ .a{x:1}", ".a{x:1}"),
        (".a:not(.b){x:1}.a:is(.b,.c:not(.d)),.b{x:2}", ".a:not(.b){x:1}\n.a:is(.b,.c:not(.d)){x:2}"),
        ("@media print{.b{x:1}}@media all{.a{x:1}.b{x:2}}", "@media all{.a{x:1}}"),
        ("@font-face{font-family:b}@import 'b.css';", "@font-face{font-family:b}\n@import 'b.css';"),
        (".a{background:url(data:image/svg+xml;x{.b})}", ".a{background:url(data:image/svg+xml;x{.b})}"),
        (r".a\:b{x:1}", ""),
    ],
)
def test_rules_for_classes_that_do_not_occur_go(css: str, kept: str) -> None:
    assert light_pages.purged(css, {"a", "p"}) == kept


def test_a_page_loads_one_sheet_and_waits_for_no_script(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text('<svg xmlns="x" width="9pt" viewBox="0 0 640 480"></svg>', encoding="utf-8")
    page = (
        '<title>t</title>\n<link href="../_static/a.css?digest=1" rel="stylesheet" />'
        '<link rel="icon" href="../_static/i.svg"/><script defer src="../_static/fontawesome.js?d"></script>'
        '<script src="../_static/documentation_options.js"></script><script src="../_static/b.js"></script>'
        '<script src="../searchindex.js"></script><img alt="x" src="a.svg"><img alt="y" src="a.svg" width="3">'
    )
    light = light_pages.lightened(page, tmp_path / "page.html", tmp_path, "_static/book.css?v=1")
    assert light == (
        '<title>t</title>\n<link rel="stylesheet" href="../_static/book.css?v=1">'
        '<link rel="icon" href="../_static/i.svg"/>'
        '<script src="../_static/documentation_options.js"></script><script defer src="../_static/b.js"></script>'
        '<img width="640" height="480" alt="x" src="a.svg"><img loading="lazy" alt="y" src="a.svg" width="3">'
    )
    assert "searchindex.js" in light_pages.lightened(page, tmp_path / "search.html", tmp_path, "_static/book.css")


def test_addresses_in_a_sheet_hold_where_the_one_sheet_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_static/styles").mkdir(parents=True)
    (tmp_path / "_static/basic.css").write_text(".a{x:url(f.png)}", encoding="utf-8")
    css = '@import "../basic.css";\n.a{x:url("../g.png");y:url("data:z")}.b{x:1}/*# sourceMappingURL=a.map */'
    (tmp_path / "_static/styles/theme.css").write_text(css, encoding="utf-8")
    monkeypatch.setattr(light_pages, "icon_font", lambda font, codes: "")
    sheet = light_pages.one_sheet(tmp_path, ["_static/styles/theme.css"], {"a"})
    assert sheet.split("\n")[2:] == [".a{x:url(f.png)}", '.a{x:url("styles/../g.png");y:url("data:z")}', ""]
