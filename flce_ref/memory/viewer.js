// The interactive view of timelines: controls, the picture, and what is said about it in words.
// `data` is what viewer.py writes: { categories, colours, timelines }.

const SOURCES = { simulated: "simulated, without a GPU", recorded: "recorded on a GPU", snapshot: "read from a Memory Viz file" };
const MOST_ROWS = 100;
const HELP = '<span class="fm-keys">On the plot: <kbd>←</kbd> <kbd>→</kbd> step through events, <kbd>↑</kbd> <kbd>↓</kbd> ' +
  "choose a band, <kbd>+</kbd> <kbd>−</kbd> <kbd>0</kbd> zoom, <kbd>Shift</kbd>+<kbd>←</kbd> <kbd>→</kbd> pan, <kbd>P</kbd> " +
  "peak; drag to pan; the wheel zooms once the plot has the focus.</span>" +
  '<span class="fm-touch">Tap a band to read it, pinch to zoom, drag to pan.</span>';

function element(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

class Viewer {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.timelines = data.timelines.map((raw) => new Timeline(raw, data.categories));
    this.several = this.timelines.length > 1;
    this.buildBar();
    this.buildPlot();
    this.buildWords();
    this.listenToKeys();
    this.listenToPointers();
    this.followTheme();
    this.show(0);
    new ResizeObserver(() => this.fit()).observe(root);
  }

  // ------------------------------------------------------------ the page

  buildBar() {
    const bar = element("div", "fm-bar", this.root);
    this.heading = element("h2", "", bar);
    this.heading.hidden = this.several;
    const picker = this.several && element("select", "", bar);
    if (picker) {
      picker.setAttribute("aria-label", "timeline");
      this.timelines.forEach(({ raw }, k) => element("option", "", picker, raw.title || "timeline " + (k + 1)));
      picker.addEventListener("change", () => this.show(picker.selectedIndex));
    }
    const button = (text, name, act) => {
      const node = element("button", "", bar, text);
      node.type = "button";
      node.title = name;
      node.setAttribute("aria-label", name);
      node.addEventListener("click", act);
    };
    button("◀", "previous event", () => this.step(-1));
    button("▶", "next event", () => this.step(1));
    button("▲ peak", "go to the peak", () => this.go(this.now.peak));
    button("+", "zoom in", () => this.zoom(0.5));
    button("−", "zoom out", () => this.zoom(2));
    button("reset", "show everything", () => this.showAll());
    const check = (text, checked) => {
      const label = element("label", "", bar), box = element("input", "", label);
      box.type = "checkbox";
      box.checked = checked;
      box.addEventListener("change", () => { this.draw(); this.report(); });
      return [box, element("span", "", label, text)];
    };
    [this.showSmall, this.smallCaption] = check("", true);
    if (this.several) [this.sameScale] = check("same scale", true);
    [this.fitHeight] = check("fit height", false);
  }

  buildPlot() {
    this.plot = element("div", "fm-plot", this.root);
    this.canvas = element("canvas", "", this.plot);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "slider");
    this.canvas.setAttribute("aria-roledescription", "memory timeline");
    this.tip = element("div", "fm-tip", this.plot);
    this.tip.hidden = true;
  }

  buildWords() {
    this.legend = element("ul", "fm-legend", this.root);
    this.status = element("p", "fm-status", this.root);
    this.status.setAttribute("role", "status");
    this.status.setAttribute("aria-live", "polite");
    this.list = element("ul", "fm-alive", this.root);
    this.list.tabIndex = 0;
    this.list.setAttribute("aria-label", "alive at the cursor, largest first");
    element("p", "fm-help", this.root).innerHTML = HELP;
    this.notes = element("ul", "fm-notes", this.root);
  }

  show(index) {
    const now = (this.now = this.timelines[index]);
    this.cursor = now.peak;
    this.selected = -1;
    this.tip.hidden = true;
    this.view = [0, now.events + 1];
    this.heading.textContent = now.raw.title;
    this.canvas.setAttribute("aria-label", now.raw.alt);
    this.smallCaption.textContent = "small ones (< " + size(now.top / 100) + ")";
    this.legend.textContent = "";
    const seen = new Set(now.raw.c.filter((_, i) => now.bytes[i] >= now.top / 400));
    this.data.categories.forEach((category, code) => {
      if (!seen.has(code)) return;
      const entry = element("li", "", this.legend);
      element("i", "", entry).style.background = this.data.colours[code];
      entry.append(category);
    });
    this.notes.textContent = "";
    for (const note of [SOURCES[now.raw.source], ...now.raw.notes]) element("li", "", this.notes, note);
    this.report();
    this.draw();
  }

  // ------------------------------------------------------------ drawing

  draw() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => {
      this.queued = false;
      this.paint();
    });
  }

  paint() {
    const style = getComputedStyle(this.root), tops = this.several && this.sameScale.checked ? this.timelines : [this.now];
    this.picture = new Picture(this.canvas, {
      timeline: this.now, view: this.view, cursor: this.cursor, selected: this.selected, colours: this.data.colours,
      shown: (i) => this.shown(i), top: this.fitHeight.checked ? 0 : Math.max(...tops.map(({ top }) => top)),
      style: Object.fromEntries(["bg", "ink", "soft", "line"].map((name) => [name, style.getPropertyValue("--" + name)])),
    });
    this.picture.draw();
  }

  shown(i) {
    return this.showSmall.checked || !this.now.isSmall(i);
  }

  alive() {
    return this.now.aliveAt(this.cursor).filter((i) => this.shown(i));
  }

  // ------------------------------------------------------------ what the reader is told

  report() {
    const { now, selected, canvas } = this;
    let text = now.sentenceAt(this.cursor);
    if (selected >= 0) text += " Chosen: " + [now.nameOf(selected), size(now.bytes[selected]), now.lifeOf(selected)].join(", ") + ".";
    this.status.textContent = text;
    canvas.setAttribute("aria-valuemin", "0");
    canvas.setAttribute("aria-valuemax", String(now.events));
    canvas.setAttribute("aria-valuenow", String(this.cursor));
    canvas.setAttribute("aria-valuetext", text);
    this.fillList();
  }

  fillList() {
    const { now, list } = this, alive = this.alive().sort((a, b) => now.bytes[b] - now.bytes[a] || a - b);
    list.textContent = "";
    for (const i of alive.slice(0, MOST_ROWS)) {
      const row = element("li", i === this.selected ? "on" : "", list);
      element("i", "", row).style.background = this.data.colours[now.raw.c[i]];
      element("span", "", row, now.nameOf(i));
      element("small", "", row, now.lifeOf(i));
      element("em", "", row, size(now.bytes[i]));
      row.addEventListener("pointerenter", () => { this.selected = i; this.draw(); });
    }
    const rest = alive.slice(MOST_ROWS);
    if (!rest.length) return;
    const row = element("li", "", list);
    element("span", "", row, number(rest.length) + " smaller ones");
    element("em", "", row, size(rest.reduce((sum, i) => sum + now.bytes[i], 0)));
  }

  showTip(x, y, i, sum) {
    const { now, tip } = this, narrow = this.plot.clientWidth < 480;
    tip.textContent = "";
    element("b", "", tip, sum || now.nameOf(i));
    if (i >= 0) {
      element("div", "", tip, size(now.bytes[i]) + " (" + number(now.bytes[i]) + " B), " + now.categoryOf(i));
      element("div", "", tip, "alive from " + now.lifeOf(i));
    }
    element("div", "", tip, "at event " + number(this.cursor) + ": " + size(now.live[this.cursor]) + " alive");
    const stack = i >= 0 ? now.stackOf(i) : [], most = narrow ? 2 : 8;
    if (stack.length) {
      const lines = element("ol", "", tip);
      for (const frame of stack.slice(0, most)) element("li", "", lines, frame);
      if (stack.length > most) element("li", "", lines, "… " + (stack.length - most) + " more");
    }
    this.placeTip(x, y, narrow);
  }

  // Beside the pointer; on a phone, where there is no room, above or below it.
  placeTip(x, y, narrow) {
    const { tip, plot } = this;
    tip.hidden = false;
    const wide = tip.offsetWidth, tall = tip.offsetHeight;
    const across = x + 14 + wide > plot.clientWidth ? x - wide - 14 : x + 14;
    const down = !narrow ? y - tall / 2 : y > plot.clientHeight / 2 ? y - tall - 24 : y + 24;
    tip.style.left = clamp(across, 0, Math.max(0, plot.clientWidth - wide)) + "px";
    tip.style.top = clamp(down, 0, Math.max(0, plot.clientHeight - tall)) + "px";
  }

  tipAtSelection() {
    if (this.selected < 0) {
      this.tip.hidden = true;
      return;
    }
    this.paint();
    const { picture, now, selected } = this, alive = this.alive();
    const below = alive.slice(0, alive.indexOf(selected)).reduce((sum, i) => sum + now.bytes[i], 0);
    const x = picture.xOf(this.cursor + 0.5), y = picture.yOf(below + now.bytes[selected] / 2);
    this.showTip(x / picture.ratio, y / picture.ratio, selected, "");
  }

  // ------------------------------------------------------------ moving about

  setView(from, to) {
    const all = this.now.events + 1;
    const span = clamp(to - from, Math.min(4, all), all), begin = clamp(from, 0, all - span);
    this.view = [begin, begin + span];
    this.draw();
  }

  showAll() {
    this.setView(0, this.now.events + 1);
  }

  zoom(factor, around = clamp(this.cursor + 0.5, ...this.view)) {
    const [from, to] = this.view;
    this.setView(around - (around - from) * factor, around + (to - around) * factor);
  }

  pan(share) {
    const [from, to] = this.view, by = (to - from) * share;
    this.setView(from + by, to + by);
  }

  go(state) {
    this.cursor = clamp(state, 0, this.now.events);
    const [from, to] = this.view, middle = this.cursor + 0.5, half = (to - from) / 2;
    if (this.cursor < from || this.cursor + 1 > to) this.setView(middle - half, middle + half);
    this.draw();
    this.report();
  }

  step(by) {
    this.go(this.cursor + by);
    const born = this.cursor > 0 ? this.now.allocated[this.cursor] : -1;
    this.select(born >= 0 && this.shown(born) ? born : -1);
  }

  // The band above (by = 1) or below (by = -1) the chosen one in the stack at the cursor.
  choose(by) {
    const alive = this.alive(), at = alive.indexOf(this.selected);
    if (!alive.length) return;
    this.select(alive[at >= 0 ? clamp(at + by, 0, alive.length - 1) : by > 0 ? 0 : alive.length - 1]);
  }

  select(i) {
    this.selected = i;
    this.draw();
    this.report();
    this.tipAtSelection();
  }

  hover(x, y) {
    const hit = this.picture && this.picture.at(x, y);
    if (hit) {
      this.cursor = hit.state;
      this.selected = hit.i;
      this.draw();
      this.report();
    }
    if (hit && (hit.i >= 0 || hit.sum)) this.showTip(x, y, hit.i, hit.sum);
    else this.tip.hidden = true;
  }

  // ------------------------------------------------------------ keys and pointers

  listenToKeys() {
    const page = () => Math.ceil(this.now.events / 20);
    const acts = {
      ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1), ArrowUp: () => this.choose(1), ArrowDown: () => this.choose(-1),
      "Shift+ArrowLeft": () => this.pan(-0.2), "Shift+ArrowRight": () => this.pan(0.2),
      PageUp: () => this.step(-page()), PageDown: () => this.step(page()), Home: () => this.go(0), End: () => this.go(this.now.events),
      p: () => this.go(this.now.peak), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.showAll(), Escape: () => this.select(-1),
    };
    this.canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const shifted = event.shiftKey && event.key.startsWith("Arrow") ? "Shift+" : "";
      const act = acts[shifted + event.key] || acts[event.key.toLowerCase()];
      if (!act) return;
      event.preventDefault();
      act();
    });
    this.canvas.addEventListener("focus", () => this.status.setAttribute("aria-live", "polite"));
    this.canvas.addEventListener("blur", () => { this.tip.hidden = true; });
  }

  // A free pointer hovers, a pressed one drags, two pressed ones pinch; a tap reads what it hits.
  listenToPointers() {
    const { canvas } = this, pressed = new Map();
    let dragged = false, apart = 0;
    const local = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const span = () => Math.max(10, Math.abs([...pressed.values()].reduce((a, b) => a - b)));
    const middle = () => [...pressed.values()].reduce((a, b) => a + b) / pressed.size;
    canvas.addEventListener("pointerdown", (event) => {
      pressed.set(event.pointerId, local(event)[0]);
      dragged = pressed.size > 1;
      apart = span();
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = local(event), before = pressed.get(event.pointerId);
      if (before === undefined) {
        this.status.setAttribute("aria-live", "off");
        this.hover(x, y);
      } else if (dragged || Math.abs(x - before) > 3) {
        dragged = true;
        this.tip.hidden = true;
        pressed.set(event.pointerId, x);
        if (pressed.size === 1) this.pan(((before - x) * this.picture.ratio) / this.picture.width);
        else this.zoom(apart / span(), this.picture.eventAt(middle()));
        apart = span();
      }
    });
    const release = (event) => {
      if (pressed.delete(event.pointerId) && !dragged && event.type === "pointerup") this.hover(...local(event));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => {
      // The page scrolls on under a plot that nobody has clicked.
      if (document.activeElement !== canvas && !event.ctrlKey) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / canvas.clientWidth);
      else this.zoom(Math.exp(clamp(event.deltaY, -200, 200) * 0.002), this.picture.eventAt(local(event)[0]));
    }, { passive: false });
  }

  // ------------------------------------------------------------ theme and size of the surroundings

  // The page around the frame says its theme (the book and Colab on <html>, JupyterLab on <body>); else the system does.
  followTheme() {
    const system = window.matchMedia("(prefers-color-scheme: dark)");
    const { documentElement: html, body } = surroundings();
    const update = () => {
      const jupyter = { true: "light", false: "dark" }[body && body.dataset.jpThemeLight];
      const said = [html.dataset.theme, html.getAttribute("theme"), jupyter].find((name) => name === "light" || name === "dark");
      this.root.dataset.theme = said || (system.matches ? "dark" : "light");
      // A page that says its theme also lends its background, unless that is transparent.
      const ground = said && body ? getComputedStyle(body).backgroundColor : "";
      this.root.style.setProperty("--bg", ground.startsWith("rgb(") ? ground : "");
      this.draw();
    };
    const watcher = new MutationObserver(update);
    const attributeFilter = ["data-theme", "theme", "data-jp-theme-light"];
    for (const node of [html, body]) if (node) watcher.observe(node, { attributes: true, attributeFilter });
    system.addEventListener("change", update);
    update();
  }

  fit() {
    this.draw();
    // From another origin the frame cannot be seen, and keeps the height that it was given.
    const frame = surroundings() !== document && window.frameElement;
    if (frame) frame.style.height = Math.ceil(this.root.getBoundingClientRect().height) + "px";
  }
}

function surroundings() {
  try {
    return window.parent.document;
  } catch {
    return document;
  }
}
