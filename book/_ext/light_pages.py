"""Sphinx extension: after the build every page is made to load less, and to load it without holding up what is read.

The theme sends more than two megabytes with each page. Here its style sheets become one, without the rules that no
page of the book uses; of its icon font the icons remain that some page shows, and the second, scripted copy of all
icons goes; scripts wait until the page is there, and those of the search are on the search page; images say their
size, so that nothing moves when they arrive, and those further down load when they are reached. And the arrows of the
sidebar get a name, which the theme forgot.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import struct
from pathlib import Path

from sphinx.application import Sphinx

SHEET = "_static/book.css"
ICON_FONTS = (("Font Awesome 6 Free", 900, "fa-solid-900.ttf"), ("Font Awesome 6 Brands", 400, "fa-brands-400.ttf"))

STYLE_LINK = re.compile(r'\s*<link\b(?=[^>]*rel="stylesheet")[^>]*href="([^"?]+)[^"]*"[^>]*>')
SCRIPT = re.compile(r'<script\b([^>]*)\bsrc="([^"]+)"([^>]*)></script>')
PRELOAD = re.compile(r'\s*<link rel="preload"[^>]*as="script"[^>]*>')
IMAGE = re.compile(r'<img\b[^>]*?\bsrc="([^":]+)"[^>]*>')
CLASS = re.compile(r"\.(-?[A-Za-z_](?:[\w-]|\\.)*)")
WORD = re.compile(r"[A-Za-z_-][\w-]*")
# Comments and strings are passed over when a style sheet is cut into rules.
CSS_PIECE = re.compile(r"""/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|url\([^"')]*\)|[{};]""", re.DOTALL)

# On every page but the search page these have nothing to do.
SEARCH_SCRIPTS = ("searchtools.js", "language_data.js", "searchindex.js")


# ---------------------------------------------------------------- style sheets


def rules(css: str) -> list[tuple[str, str]]:
    """The top-level rules as (prelude, body): ``("a, b", "color: red")``; the body of ``@import …;`` is empty."""
    found, depth, start, opened = [], 0, 0, 0
    for piece in CSS_PIECE.finditer(css):
        mark = piece.group()
        if mark == "{":
            depth += 1
            opened = piece.start() if depth == 1 else opened
        elif mark == "}":
            depth -= 1
            if depth == 0:
                found.append((css[start:opened], css[opened + 1 : piece.start()]))
                start = piece.end()
        elif mark == ";" and depth == 0:
            found.append((css[start : piece.end()], ""))
            start = piece.end()
    return [(re.sub(r"/\*.*?\*/", "", prelude, flags=re.DOTALL).strip(), body) for prelude, body in found]


def purged(css: str, used: set[str]) -> str:
    """The rules of a style sheet some selector of which names only classes that occur among the words ``used``."""
    kept = []
    for prelude, body in rules(css):
        if not body:
            kept.append(prelude if prelude.startswith("@") else "")
        elif prelude.startswith(("@media", "@supports", "@layer")):
            inside = purged(body, used)
            kept.append(f"{prelude}{{{inside}}}" if inside else "")
        elif prelude.startswith("@"):
            kept.append(f"{prelude}{{{body}}}")
        else:
            selectors = [one for one in _selectors(prelude) if _classes(one) <= used]
            kept.append(f"{','.join(selectors)}{{{body.strip()}}}" if selectors else "")
    return "\n".join(filter(None, kept))


def _selectors(prelude: str) -> list[str]:
    """The selectors between commas, but not between those inside of :is(…)."""
    found, depth = [""], 0
    for piece in re.split(r"([(),])", prelude):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "," and depth == 0:
            found.append("")
        else:
            found[-1] += piece
    return [one.strip() for one in found]


def _classes(selector: str) -> set[str]:
    """The classes that an element must have; what stands in :not(…) and :is(…) does not count."""
    return {
        name.replace("\\", "")
        for name in CLASS.findall(re.sub(r":[\w-]+\([^()]*(?:\([^()]*\)[^()]*)*\)", "", selector))
    }


def one_sheet(outdir: Path, links: list[str], used: set[str]) -> str:
    """The style sheets (paths relative to ``outdir``) as one that stands in ``_static``, purged, icons inlined."""
    pieces = []
    for link in links:
        css = (outdir / link).read_text(encoding="utf-8").lstrip("\ufeff")
        imported = re.findall(r'@import "([^"]+)";', css)
        css = re.sub(r'@import "[^"]+";', "", css)
        pieces += [(outdir / link).parent.joinpath(one).read_text(encoding="utf-8") for one in imported]
        folder = Path(link).parent.relative_to("_static").as_posix()
        css = re.sub(r"""url\((["']?)(?!["'#/]|[a-z]+:)""", rf"url(\1{folder}/" if folder != "." else r"url(\1", css)
        css = re.sub(r"@font-face\{[^}]*Font Awesome[^}]*\}", "", css)
        pieces.append(re.sub(r"/\*# sourceMappingURL=.*?\*/|@charset [^;]*;", "", css))
    css = purged("\n".join(pieces), used)
    shown = {int(code, 16) for code in re.findall(r"\\(f[0-9a-f]{3})\b", css)}
    shown |= {ord(character) for character in css if "\ue000" <= character <= "\uf8ff"}
    faces = [
        f'@font-face{{font-family:"{family}";font-style:normal;font-weight:{weight};font-display:block;'
        f"src:url(data:font/woff;base64,{icon_font(outdir / '_static/vendor/fontawesome/webfonts' / file, shown)}) "
        f"format('woff')}}"
        for family, weight, file in ICON_FONTS
    ]
    return "\n".join([*faces, css, ""])


def icon_font(font: Path, codes: set[int]) -> str:
    """The glyphs of these code points as a WOFF font in base64."""
    from fontTools import subset

    options = subset.Options(flavor="woff", hinting=False, layout_features=[], notdef_outline=True)
    with subset.load_font(str(font), options) as loaded:
        cutter = subset.Subsetter(options)
        cutter.populate(unicodes=codes)
        cutter.subset(loaded)
        loaded["head"].modified = loaded["head"].created  # the same bytes on every day
        loaded.recalcTimestamp = False
        written = io.BytesIO()
        subset.save_font(loaded, written, options)
    return base64.b64encode(written.getvalue()).decode()


# ---------------------------------------------------------------- pages


def image_size(path: Path) -> tuple[int, int] | None:
    """Width and height of a PNG or SVG file in pixels; None of any other."""
    head = path.read_bytes()[:2000]
    if head.startswith(b"\x89PNG"):
        return struct.unpack(">II", head[16:24])
    sizes = re.search(rb'<svg\b[^>]*viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ([\d.]+)"', head)
    return (round(float(sizes[1])), round(float(sizes[2]))) if sizes else None


def lightened(page: str, path: Path, outdir: Path, sheet: str) -> str:
    """One page; ``sheet`` is the address of the style sheet relative to ``outdir``."""
    links = STYLE_LINK.findall(page)
    if links and SHEET not in links[0]:
        prefix = links[0].partition("_static/")[0]
        page = STYLE_LINK.sub("", page)
        page = page.replace("</title>", f'</title>\n<link rel="stylesheet" href="{prefix}{sheet}">', 1)
    page = PRELOAD.sub("", page)
    is_search = path.name == "search.html"

    def script(found: re.Match[str]) -> str:
        name = found[2].partition("?")[0].rpartition("/")[2]
        if name == "fontawesome.js" or (name in SEARCH_SCRIPTS and not is_search):
            return ""
        waits = is_search or name == "documentation_options.js" or re.search(r"\b(defer|async)\b", found[1] + found[3])
        return found[0] if waits else found[0].replace("<script", "<script defer", 1)

    page = SCRIPT.sub(script, page)
    seen: list[str] = []

    def image(found: re.Match[str]) -> str:
        seen.append(found[1])
        size = image_size((path.parent / found[1]).resolve())
        added = (
            f'width="{size[0]}" height="{size[1]}" ' if size and not re.search(r"\b(width|height)=", found[0]) else ""
        )
        added += 'loading="lazy" ' if len(seen) > 1 and "loading=" not in found[0] else ""
        return found[0].replace("<img ", f"<img {added}", 1)

    page = page.replace(
        '<summary><span class="toctree-toggle"', '<summary aria-label="Sections"><span class="toctree-toggle"'
    )
    page = page.replace('<div role="list" class="citation-list">', '<div class="citation-list">')  # no list items in it
    page = page.replace("<iframe ", '<iframe loading="lazy" ')  # the viewers, folded
    return IMAGE.sub(image, page)


def links_of(sheet: Path) -> list[str]:
    """The style sheets that the sheet of an earlier build was made of, from its first line."""
    return sheet.read_text(encoding="utf-8").split("\n")[0].split()[1:-1] if sheet.is_file() else []


def lighten(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.name != "html":
        return
    outdir = Path(app.outdir)
    pages = {
        path: path.read_text(encoding="utf-8") for path in sorted(outdir.rglob("*.html")) if "_static" not in path.parts
    }
    fresh = {path: text for path, text in pages.items() if SHEET not in text}
    scripts = [
        path.read_text(encoding="utf-8") for path in outdir.glob("_static/**/*.js") if path.name != "fontawesome.js"
    ]
    used = {word for text in (*pages.values(), *scripts) for word in WORD.findall(text)}
    links = links_of(outdir / SHEET)
    for path, text in fresh.items():
        for link in STYLE_LINK.findall(text):
            relative = (path.parent / link).resolve().relative_to(outdir.resolve()).as_posix()
            if relative not in links:
                links.append(relative)
    css = f"/* {' '.join(links)} */\n{one_sheet(outdir, links, used)}"
    (outdir / SHEET).write_text(css, encoding="utf-8")
    sheet = f"{SHEET}?v={hashlib.sha256(css.encode()).hexdigest()[:8]}"
    for path, text in fresh.items():
        path.write_text(lightened(text, path, outdir, sheet), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", lighten, priority=600)  # after the theme, which writes a style sheet then
    return {"parallel_read_safe": True, "parallel_write_safe": True}
