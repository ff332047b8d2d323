"""The interactive viewer, in a real browser: hovered, zoomed, stepped by keyboard, read like a screen reader would."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_timeline import random_timeline

from flce_ref.__main__ import main
from flce_ref.memory import Allocation, Frame, Timeline, name_by_size
from flce_ref.memory.viewer import contents, frame_of, to_html, to_iframe

H200 = Path(__file__).parents[1] / "book/data/h200"


def h200(name: str) -> Timeline:
    timeline = Timeline.from_snapshot(H200 / f"snap_{name}.pickle")
    return name_by_size(timeline, tokens=8192, vocab_size=151552, hidden_size=2048)


# ---------------------------------------------------------------- the page as text


class Collector(HTMLParser):
    """The tags of a page, the text of its scripts, and the attributes of its frame."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.frame: dict[str, str | None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "iframe":
            self.frame = dict(attrs)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def collect(page: str) -> Collector:
    collector = Collector()
    collector.feed(page)
    return collector


def test_the_page_is_self_contained_and_always_the_same() -> None:
    page = to_html([h200("naive"), h200("flce")])
    assert page == to_html([h200("naive"), h200("flce")])
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|https?://(?!www\.w3\.org)""", page)


def test_the_frame_holds_exactly_the_page() -> None:
    timelines = [h200("chunked8")]
    frame = collect(to_iframe(timelines)).frame
    assert frame["srcdoc"] == to_html(timelines)
    assert frame["title"] == timelines[0].alt_text()
    assert timelines[0]._repr_html_() == to_iframe(timelines)


def test_one_small_timeline_takes_at_most_60_kb_and_three_little_more() -> None:
    assert len(to_iframe([h200("chunked8")]).encode()) < 60_000
    assert len(to_iframe([h200("naive"), h200("chunked8"), h200("flce")]).encode()) < 80_000


def test_no_label_can_leave_its_script_or_its_attribute() -> None:
    nasty = "</script><script>alert(1)</script><!-- ' \" & @SCRIPT@ \u2028"
    allocation = Allocation(512, 1, None, nasty, "logits", (Frame(nasty, 1, nasty),))
    timeline = Timeline(nasty, (allocation,), 1, None, "simulated", (nasty,))
    page = to_html([timeline])
    inner = collect(page)
    assert inner.tags.count("script") == 2
    data = json.loads(inner.scripts[0])["timelines"][0]
    assert (data["labels"], data["title"], data["notes"]) == ([nasty], nasty, [nasty])
    assert collect(to_iframe([timeline])).frame["srcdoc"] == page


def test_without_scripts_there_is_the_static_picture() -> None:
    page = to_html([h200("naive"), h200("flce")])
    fallback = re.search(r"<noscript>(.*)</noscript>", page, re.S)
    assert fallback
    assert fallback[1].count("<svg") == 2


@pytest.mark.parametrize(
    "path", sorted((H200.parents[1] / "figures").glob("*.timelines.json")), ids=lambda path: path.name.split(".")[0]
)
def test_the_books_stored_timelines_are_shown_by_the_present_viewer(path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored.keys() == contents([h200("naive")]).keys()
    assert stored["timelines"][0].keys() == contents([h200("naive")])["timelines"][0].keys()
    page = collect(str(collect(frame_of(stored)).frame["srcdoc"]))
    assert json.loads(page.scripts[0])["timelines"] == stored["timelines"]


def test_a_stored_timeline_gives_the_same_frame_but_for_the_picture() -> None:
    timelines = [h200("naive"), h200("flce")]
    stored = json.loads(json.dumps(contents(timelines)))
    assert frame_of(stored) == re.sub(
        "<noscript>.*</noscript>", "<noscript></noscript>", to_iframe(timelines), flags=re.S
    )


def test_nothing_to_show_is_refused() -> None:
    with pytest.raises(ValueError, match="timelines: got none"):
        to_html([])


# ---------------------------------------------------------------- the command


def test_view_writes_the_picture_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, page = tmp_path / "o.png", tmp_path / "o.html"
    assert main(["view", str(H200 / "snap_naive.pickle"), "--plot", str(plot), "--html", str(page)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "snap_naive.pickle" in page.read_text(encoding="utf-8")
    assert "peaks at 7.61 GiB, 6.94 GiB above the inputs" in capsys.readouterr().out


def test_view_reads_stored_timelines_and_names_by_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = tmp_path / "t.json"
    stored.write_text(Timeline.from_snapshot(H200 / "snap_flce.pickle").to_json(), encoding="utf-8")
    shape = ["--tokens", "8192", "--vocab", "151552", "--hidden", "2048"]
    assert main(["view", str(stored), "--html", str(tmp_path / "o.html"), *shape]) == 0
    assert "2 × dw 1.73 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--html", "{out}"], 1), ([], 2), (["--html", "{out}", "--tokens", "8"], 2), (["--plot", "{out}.nonsense"], 2)],
)
def test_view_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("hello")
    given = [argument.format(out=tmp_path / "o.html") for argument in arguments]
    try:
        code = main(["view", str(foreign), *given])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == status
    assert capsys.readouterr().err
    assert not (tmp_path / "o.html").exists()


# ---------------------------------------------------------------- in a browser


class Viewer:
    """One opened page; every error of its scripts is collected."""

    def __init__(
        self, browser: Any, path: Path, page: str, width: int = 1280, scheme: str = "light", touch: bool = False
    ) -> None:
        path.write_text(page, encoding="utf-8")
        size = {"width": width, "height": 900}
        self.page = browser.new_page(viewport=size, color_scheme=scheme, has_touch=touch, is_mobile=touch)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.requests: list[str] = []
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".fm-status:not(:empty)")
        self.settle()

    def settle(self) -> None:
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def at(self, event: float, share: float, n_events: int) -> tuple[float, float]:
        """Where an event (in full view) and a share of the height lie on the page; paddings as in viewer_picture.js."""
        box = self.page.locator("canvas").bounding_box()
        x = box["x"] + 50 + (event + 0.5) / (n_events + 1) * (box["width"] - 60)
        return x, box["y"] + 30 + (1 - share) * (box["height"] - 64)

    def hover(self, event: float, share: float, n_events: int) -> str:
        self.page.mouse.move(*self.at(event, share, n_events))
        self.settle()
        return self.tip()

    def press(self, *keys: str) -> str:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()
        return self.status()

    def tip(self) -> str:
        tip = self.page.locator(".fm-tip")
        return str(tip.inner_text()) if tip.is_visible() else ""

    def status(self) -> str:
        return str(self.page.locator(".fm-status").inner_text())

    def pixels(self) -> str:
        return str(self.page.evaluate("document.querySelector('canvas').toDataURL()"))

    def axis(self) -> list[int]:
        return [int(self.page.locator("canvas").get_attribute(f"aria-value{k}")) for k in ("min", "now", "max")]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Viewer]:
    viewer = Viewer(browser, tmp_path / "v.html", to_html([h200("naive")]))
    yield viewer
    assert viewer.errors == []
    assert [url for url in viewer.requests if not url.startswith("file:")] == []
    viewer.page.close()


def test_it_opens_at_the_peak(opened: Viewer) -> None:
    timeline = h200("naive")
    assert opened.axis() == [0, timeline.peak_event, timeline.n_events]
    assert opened.status().startswith("Event 9 of 16: 7.61 GiB alive, 6.94 GiB above the inputs; the peak;")
    rows = opened.page.locator(".fm-alive li span").all_inner_texts()
    assert rows[:4] == ["log-probabilities", "gradient of the log-probabilities", "dlogits", "linear_weight"]


def test_hovering_shows_size_lifetime_and_stack(opened: Viewer) -> None:
    # State 3 holds, above 0.67 GiB of inputs, the logits and then the log-probabilities; the axis ends at 1.12 × peak.
    tip = opened.hover(3, 0.5, 16)
    assert "log-probabilities" in tip
    assert "2.31 GiB (2,483,027,968 B)" in tip
    assert "alive from event 2 to event 11" in tip
    assert "cross_entropy (torch/nn/functional.py:3504)" in tip
    assert opened.status().startswith("Event 3 of 16")
    assert "logits" in opened.hover(3, 0.2, 16).splitlines()[0]
    assert "linear_weight" in opened.hover(3, 0.03, 16)
    assert opened.hover(3, 0.97, 16) == ""  # nothing lies there


def test_wheel_and_keys_zoom_and_dragging_pans(opened: Viewer) -> None:
    whole = opened.pixels()
    x, y = opened.at(2, 0.5, 16)
    opened.page.mouse.move(x, y)
    opened.page.mouse.wheel(0, -400)
    opened.settle()
    first = opened.status()
    opened.page.locator("canvas").focus()
    opened.page.mouse.wheel(0, -400)
    opened.settle()
    zoomed = opened.pixels()
    assert zoomed != whole
    assert first.startswith("Event 2 ")
    opened.page.mouse.move(x + 150, y)
    opened.page.mouse.move(x, y)
    opened.settle()
    assert opened.status().startswith("Event 2 ")  # what was under the pointer stayed there
    opened.page.mouse.down()
    opened.page.mouse.move(x - 300, y, steps=4)
    opened.page.mouse.up()
    opened.settle()
    assert opened.pixels() != zoomed
    opened.page.mouse.move(x, y + 1)
    opened.settle()
    event = int(re.match(r"Event (\d+)", opened.status())[1])  # type: ignore[index]
    assert event > 2  # dragged to the left: later events come into view
    opened.press("0")
    opened.page.mouse.move(x, y)
    opened.settle()
    assert opened.status().startswith("Event 2 ")


def test_every_event_can_be_reached_by_keyboard_alone(opened: Viewer) -> None:
    timeline = h200("naive")
    for _ in range(30):
        opened.page.keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    outline = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # the focus can be seen
    assert opened.press("Home").startswith("Event 0 of 16: 0.67 GiB alive")
    live = timeline.live_bytes()
    for event in range(1, timeline.n_events + 1):
        text = opened.press("ArrowRight")
        assert text.startswith(f"Event {event} of 16: {live[event] / 2**30:.2f} GiB alive")
        assert opened.page.locator("canvas").get_attribute("aria-valuetext") == text
    assert opened.press("ArrowRight").startswith("Event 16 ")  # there is no further one
    assert "allocates log-probabilities, 2.31 GiB; forward" in opened.press("Home", "ArrowRight", "ArrowRight")
    assert "frees logits, 2.31 GiB" in opened.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert opened.press("p").startswith("Event 9 ")


def test_bands_are_chosen_by_keyboard_and_described(opened: Viewer) -> None:
    opened.page.locator("canvas").focus()
    assert "Chosen: linear_weight, 592.00 MiB" not in opened.status()
    names = []
    for _ in range(12):
        text = opened.press("ArrowUp")
        names.append(re.search(r"Chosen: (.*?), \d", text)[1])  # type: ignore[index]
    assert "log-probabilities" in names
    assert names[-1] == names[-2]  # the top of the stack
    assert opened.tip()
    opened.press("Escape")
    assert opened.tip() == ""
    assert "Chosen" not in opened.status()


def test_small_allocations_can_be_hidden(opened: Viewer) -> None:
    before = opened.page.locator(".fm-alive li").count()
    opened.page.get_by_label("small ones").uncheck()
    opened.settle()
    sizes = opened.page.locator(".fm-alive li em").all_inner_texts()
    assert len(sizes) < before
    assert all(size.endswith("GiB") for size in sizes)


def test_live_text_is_announced_when_stepping_and_not_when_hovering(opened: Viewer) -> None:
    status = opened.page.locator("[role=status]")
    opened.hover(3, 0.5, 16)
    assert status.get_attribute("aria-live") == "off"
    opened.page.locator("canvas").focus()
    assert status.get_attribute("aria-live") == "polite"
    assert opened.page.locator("canvas").get_attribute("aria-label") == h200("naive").alt_text()
    unnamed = opened.page.locator("button:not([aria-label]), select:not([aria-label])").count()
    assert unnamed == 0


def test_several_timelines_share_a_scale_until_told_otherwise(browser: Any, tmp_path: Path) -> None:
    viewer = Viewer(browser, tmp_path / "v.html", to_html([h200("naive"), h200("flce")]))
    viewer.page.get_by_label("timeline", exact=True).select_option(index=1)
    viewer.settle()
    assert viewer.status().startswith("Event 19 of 26: 2.47 GiB alive")
    shared = viewer.hover(20, 0.5, 26)
    assert shared == ""  # on naive's scale the fused step stays below the middle
    viewer.page.get_by_label("same scale").uncheck()
    viewer.settle()
    assert "dw" in viewer.hover(20, 0.5, 26)
    assert viewer.errors == []
    viewer.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_and_the_theme_follows(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    viewer = Viewer(browser, tmp_path / "v.html", to_html([h200("chunked8"), h200("flce")]), width, scheme)
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width
    assert viewer.page.locator(".fm").get_attribute("data-theme") == scheme
    ground = [
        viewer.page.evaluate(f"getComputedStyle(document.querySelector('{e}')).backgroundColor")
        for e in ("html", ".fm")
    ]
    assert ground == (["rgb(20, 24, 30)"] * 2 if scheme == "dark" else ["rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"])
    box = viewer.page.locator("canvas").bounding_box()
    viewer.page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.75)
    viewer.settle()
    tip = viewer.page.locator(".fm-tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= width
    assert viewer.errors == []
    viewer.page.close()


def test_a_tap_reads_a_band_and_two_fingers_zoom(browser: Any, tmp_path: Path) -> None:
    viewer = Viewer(browser, tmp_path / "v.html", to_html([h200("naive")]), 390, touch=True)
    viewer.page.touchscreen.tap(*viewer.at(3, 0.5, 16))
    viewer.settle()
    assert "log-probabilities" in viewer.tip()
    assert "Tap a band" in viewer.page.locator(".fm-help").inner_text()
    assert viewer.page.get_by_label("zoom in").bounding_box()["height"] >= 40
    whole = viewer.pixels()
    x, y = viewer.at(3, 0.5, 16)
    touches = viewer.page.context.new_cdp_session(viewer.page)

    def fingers(kind: str, *at: float) -> None:
        points = [{"x": place, "y": y, "id": k} for k, place in enumerate(at)]
        touches.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", x - 20, x + 20)
    for apart in (30, 45, 60, 80):
        fingers("touchMove", x - apart, x + apart)
    fingers("touchEnd")
    viewer.settle()
    assert viewer.pixels() != whole
    viewer.page.touchscreen.tap(x, y)
    viewer.settle()
    assert viewer.status().startswith("Event 3 ")  # what lay between the fingers stayed there
    viewer.page.get_by_label("show everything").tap()
    viewer.page.touchscreen.tap(x, y)
    viewer.settle()
    assert viewer.status().startswith("Event 3 ")
    assert viewer.errors == []
    viewer.page.close()


@pytest.mark.parametrize("attributes", ["data-jp-theme-light=false", "class=plain"])
def test_in_a_notebook_the_theme_is_the_notebooks(browser: Any, tmp_path: Path, attributes: str) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><html><body {attributes}>{h200('naive')._repr_html_()}", encoding="utf-8")
    page = browser.new_page(color_scheme="light")
    page.goto(path.as_uri())
    inner = page.frames[1]
    inner.wait_for_selector(".fm-status:not(:empty)")
    dark = "jp-theme" in attributes
    assert inner.locator(".fm").get_attribute("data-theme") == ("dark" if dark else "light")
    background = inner.evaluate("getComputedStyle(document.querySelector('.fm')).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    page.close()


def test_inside_a_page_the_frame_takes_its_theme_and_its_own_height(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "book.html"
    path.write_text(
        f"<!doctype html><html data-theme='dark'><style>[data-theme=dark] body {{ background: #121212 }}</style><body>"
        f"{to_iframe([h200('naive')])}",
        encoding="utf-8",
    )
    page = browser.new_page(viewport={"width": 800, "height": 900}, color_scheme="light")
    page.goto(path.as_uri())
    inner = page.frames[1]
    inner.wait_for_selector(".fm-status:not(:empty)")
    root = inner.locator(".fm")
    assert root.get_attribute("data-theme") == "dark"
    background = "getComputedStyle(document.querySelector('.fm')).backgroundColor"
    assert inner.evaluate(background) == "rgb(18, 18, 18)"
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    inner.wait_for_selector(".fm[data-theme=light]")
    assert inner.evaluate(background) == "rgb(255, 255, 255)"
    page.wait_for_function(
        "document.querySelector('iframe').clientHeight >= "
        "document.querySelector('iframe').contentDocument.querySelector('.fm').clientHeight"
    )
    page.close()


def test_without_javascript_the_static_picture_is_there(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "v.html"
    path.write_text(to_html([h200("naive")]), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("svg").is_visible()
    context.close()


def test_a_hundred_thousand_events_open_in_two_seconds_and_stay_fluid(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "v.html"
    path.write_text(to_html([random_timeline(2, 100_000, keep=2000)]), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    session = page.context.new_cdp_session(page)
    # Processor time of the page's thread: wall-clock time would measure what else the machine is doing.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))

    page.goto(path.as_uri())
    page.wait_for_selector(".fm-status:not(:empty)")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    opened = seconds()
    frames = page.evaluate(
        """async () => {
            const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect(), seen = new Set();
            canvas.focus();
            for (let k = 0; k < 15; k++) {
                const clientX = box.left + 200 + 50 * k, clientY = box.top + 200;
                canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -60, clientX, clientY, cancelable: true}));
                canvas.dispatchEvent(new PointerEvent("pointermove", {pointerId: 1, clientX, clientY}));
                await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
                seen.add(canvas.toDataURL());
            }
            return seen.size;
        }"""
    )
    moved = seconds() - opened
    page.close()
    assert frames == 15  # each was drawn
    assert 0 < opened < 2  # 0.4 s on two cores of a busy machine without a GPU
    assert moved / frames < 0.15  # 0.05 s there
