// The interactive view of timelines. Plain JavaScript on one canvas; called once for each root element.
// Data arrive as columns (see viewer.py). Names follow timeline.py: state i is what is alive after event i.
function flceMemoryViewer(root, data) {
  "use strict";
  const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const PAD = { left: 50, right: 10, top: 20, bottom: 34 };
  const MOST_BANDS = 4000;
  const SOURCES = { simulated: "simulated, without a GPU", recorded: "recorded on a GPU", snapshot: "read from a Memory Viz file" };

  const unitOf = (bytes) => UNITS.find(([, scale]) => bytes >= scale / 10) || UNITS[3];
  const number = (n) => n.toLocaleString("en-US");
  const size = (bytes) => {
    const [unit, scale] = unitOf(bytes);
    return (unit === "B" ? bytes : (bytes / scale).toFixed(2)) + " " + unit;
  };
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const element = (tag, className, parent) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    parent.append(node);
    return node;
  };

  // ------------------------------------------------------------ the data

  function decode(raw) {
    const count = raw.z.length;
    const bytes = new Float64Array(count), start = new Int32Array(count), end = new Int32Array(count);
    const live = new Float64Array(raw.n + 2);
    const allocated = new Int32Array(raw.n + 2).fill(-1), freed = new Int32Array(raw.n + 2).fill(-1);
    for (let i = 0, at = 0; i < count; i++) {
      at += raw.s[i];
      bytes[i] = raw.sizes[raw.z[i]];
      start[i] = at;
      end[i] = raw.d[i] ? at + raw.d[i] : raw.n + 1;
      live[at] += bytes[i];
      live[end[i]] -= bytes[i];
      if (at > 0) allocated[at] = i;
      if (end[i] <= raw.n) freed[end[i]] = i;
    }
    let peak = 0, given = 0;
    for (let i = 1; i <= raw.n; i++) live[i] += live[i - 1];
    for (let i = 1; i <= raw.n; i++) if (live[i] > live[peak]) peak = i;
    for (let i = 0; i < count && start[i] === 0; i++) {
      const category = data.categories[raw.c[i]];
      if (category === "input" || category === "weight") given += bytes[i];
    }
    return { raw, count, bytes, start, end, live, allocated, freed, peak, given, top: live[peak] };
  }

  const decoded = data.timelines.map(() => null);
  const timelineAt = (k) => (decoded[k] = decoded[k] || decode(data.timelines[k]));
  const stackOf = (i) => now.raw.stacks[now.raw.f[i]].map((j) => now.raw.frames[j]);
  const nameOf = (i) => {
    const label = now.raw.labels[now.raw.l[i]];
    if (label) return label;
    const stack = stackOf(i);
    if (stack.length) return stack[0];
    const category = data.categories[now.raw.c[i]];
    return category === "other" ? "unnamed" : category;
  };
  const lifeOf = (i) => {
    const from = now.start[i] === 0 ? "before the first event" : "event " + number(now.start[i]);
    return from + (now.end[i] > now.raw.n ? " to the end" : " to event " + number(now.end[i]));
  };
  const small = (i) => now.bytes[i] < now.top / 100;
  const aliveAt = (state) => {
    const alive = [];
    for (let i = 0; i < now.count; i++) if (now.start[i] <= state && state < now.end[i] && shown(i)) alive.push(i);
    return alive;
  };
  const shown = (i) => showSmall.checked || !small(i);

  // ------------------------------------------------------------ the page

  let now = timelineAt(0);
  let view = [0, now.raw.n + 1], cursor = now.peak, selected = -1, picture = null, queued = false;
  const several = data.timelines.length > 1;

  const bar = element("div", "fm-bar", root);
  const heading = element("h2", "", bar);
  const picker = several ? element("select", "", bar) : null;
  const button = (text, name, act) => {
    const node = element("button", "", bar);
    node.type = "button";
    node.textContent = text;
    node.title = name;
    node.setAttribute("aria-label", name);
    node.addEventListener("click", act);
    return node;
  };
  const check = (text, checked) => {
    const label = element("label", "", bar);
    const input = element("input", "", label);
    input.type = "checkbox";
    input.checked = checked;
    const caption = element("span", "", label);
    caption.textContent = text;
    input.addEventListener("change", () => { draw(); report(); });
    input.caption = caption;
    return input;
  };
  if (picker) {
    picker.setAttribute("aria-label", "timeline");
    data.timelines.forEach((raw, k) => (element("option", "", picker).textContent = raw.title || "timeline " + (k + 1)));
    picker.addEventListener("change", () => show(picker.selectedIndex));
  }
  button("◀", "previous event", () => step(-1));
  button("▶", "next event", () => step(1));
  button("▲ peak", "go to the peak", () => go(now.peak, true));
  button("+", "zoom in", () => zoom(0.5));
  button("−", "zoom out", () => zoom(2));
  button("reset", "show everything", () => setView(0, now.raw.n + 1));
  const showSmall = check("small", true);
  const sameScale = several ? check("same scale", true) : { checked: false };
  const fitHeight = check("fit height", false);

  const plot = element("div", "fm-plot", root);
  const canvas = element("canvas", "", plot);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-roledescription", "memory timeline");
  const tip = element("div", "fm-tip", plot);
  tip.hidden = true;
  const legend = element("ul", "fm-legend", root);
  const status = element("p", "fm-status", root);
  status.setAttribute("role", "status");
  status.setAttribute("aria-live", "polite");
  const list = element("ul", "fm-alive", root);
  list.tabIndex = 0;
  list.setAttribute("aria-label", "alive at the cursor, largest first");
  const help = element("p", "fm-help", root);
  help.innerHTML = "On the plot: <kbd>←</kbd> <kbd>→</kbd> step through events, <kbd>↑</kbd> <kbd>↓</kbd> choose a band, " +
    "<kbd>+</kbd> <kbd>−</kbd> <kbd>0</kbd> zoom, <kbd>Shift</kbd>+<kbd>←</kbd> <kbd>→</kbd> pan, <kbd>P</kbd> peak; " +
    "drag to pan; the wheel zooms once the plot has the focus.";
  const notes = element("ul", "fm-notes", root);

  // ------------------------------------------------------------ layout of the visible part

  // For each pixel column the fullest state that falls into it; so no spike is ever lost.
  function columns(width) {
    const states = new Int32Array(width), scale = (view[1] - view[0]) / width, last = now.raw.n;
    for (let x = 0; x < width; x++) {
      let a = clamp(Math.floor(view[0] + x * scale), 0, last), best = a;
      const b = clamp(Math.ceil(view[0] + (x + 1) * scale), a + 1, last + 1);
      if (scale > 1) for (; a < b; a++) if (now.live[a] > now.live[best]) best = a;
      states[x] = best;
    }
    return states;
  }

  // First column whose state is not before `state`.
  function columnOf(states, state) {
    let low = 0, high = states.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (states[middle] < state) low = middle + 1; else high = middle;
    }
    return low;
  }

  function visible(states, perByte) {
    const bands = [], sums = data.categories.map(() => null);
    const firstState = states[0], lastState = states[states.length - 1];
    for (let i = 0; i < now.count; i++) {
      if (now.start[i] > lastState) break;
      if (now.end[i] <= firstState || !shown(i)) continue;
      const from = columnOf(states, now.start[i]), to = columnOf(states, now.end[i]);
      if (from < to) bands.push({ i, from, to, height: now.bytes[i] * perByte });
    }
    let least = 0.7;
    if (bands.length > MOST_BANDS) least = Math.max(least, bands.map((b) => b.height).sort((a, b) => b - a)[MOST_BANDS]);
    const alone = [];
    for (const band of bands) {
      if (band.height > least) { alone.push(band); continue; }
      const code = now.raw.c[band.i];
      const sum = (sums[code] = sums[code] || { code, change: new Float64Array(states.length + 1), count: 0 });
      sum.change[band.from] += band.height;
      sum.change[band.to] -= band.height;
      sum.count++;
    }
    return { alone, sums: sums.filter(Boolean) };
  }

  // ------------------------------------------------------------ drawing

  const packed = (hex, shade) => {
    const [r, g, b] = [1, 3, 5].map((k) => Math.round(parseInt(hex.slice(k, k + 2), 16) * shade));
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  };
  const fills = data.colours.map((hex) => packed(hex, 1)), edges = data.colours.map((hex) => packed(hex, 0.68));
  const dark = (hex) => [1, 3, 5].reduce((sum, k, j) =>
    sum + parseInt(hex.slice(k, k + 2), 16) * [0.3, 0.59, 0.11][j], 0) < 128;

  function draw() {
    if (!queued) {
      queued = true;
      requestAnimationFrame(() => { queued = false; paint(); });
    }
  }

  function topOfScale(states) {
    if (fitHeight.checked) return Math.max(1, states.reduce((top, s) => Math.max(top, now.live[s]), 0)) * 1.06;
    const all = sameScale.checked ? data.timelines.map((_, k) => timelineAt(k).top) : [now.top];
    return Math.max(1, ...all) * 1.06;
  }

  function paint() {
    const ratio = window.devicePixelRatio || 1;
    const box = canvas.getBoundingClientRect();
    if (box.width < PAD.left + PAD.right + 20) return;
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
    const left = Math.round(PAD.left * ratio), top = Math.round(PAD.top * ratio);
    const width = canvas.width - left - Math.round(PAD.right * ratio);
    const height = canvas.height - top - Math.round(PAD.bottom * ratio);
    const states = columns(width), scaleTop = topOfScale(states), perByte = height / scaleTop;
    const { alone, sums } = visible(states, perByte);
    picture = { ratio, left, top, width, height, states, scaleTop, perByte, alone, sums, box };

    const context = canvas.getContext("2d");
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink"), soft = style.getPropertyValue("--soft");
    const line = style.getPropertyValue("--line");
    context.clearRect(0, 0, canvas.width, canvas.height);
    drawAxes(context, soft, line);
    const chosen = raster(context);
    drawNames(context, chosen.names);
    drawMarks(context, ink, soft);
    drawSelection(context, chosen.bottoms, ink);
  }

  // The bands are all axis-aligned, so they are written pixel by pixel: the time does not depend on how often they shift.
  function raster(context) {
    const { width, height, states, alone, sums } = picture;
    const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const level = new Float64Array(width), names = [];
    let bottoms = null;
    const column = (x, low, high, code, edge) => {
      let y = height - Math.round(high);
      const stop = height - Math.round(low);
      if (y >= stop) return;
      if (y < 0) y = 0;
      if (stop - y > 2) pixels[y++ * width + x] = edges[code];
      const colour = edge && stop - y > 2 ? edges[code] : fills[code];
      for (; y < stop; y++) pixels[y * width + x] = colour;
    };
    for (const band of alone) {
      const code = now.raw.c[band.i], born = now.start[band.i] > states[0] && band.to - band.from > 3;
      const keep = band.i === selected ? (bottoms = new Float64Array(band.to - band.from)) : null;
      let run = band.from, longest = 0, at = band.from;
      for (let x = band.from; x < band.to; x++) {
        const low = level[x];
        level[x] = low + band.height;
        column(x, low, level[x], code, born && x === band.from);
        if (keep) keep[x - band.from] = low;
        if (x > run && level[x - 1] !== level[x]) run = x;
        if (x - run > longest) { longest = x - run; at = run; }
      }
      if (band.height >= 13 * picture.ratio && longest > 30) names.push({ band, at, longest, low: level[at] - band.height });
    }
    sums.sort((a, b) => a.code - b.code);
    for (const sum of sums) {
      sum.low = new Float64Array(width);
      sum.high = new Float64Array(width);
      for (let x = 0, height = 0; x < width; x++) {
        height += sum.change[x];
        sum.low[x] = level[x];
        level[x] += Math.max(0, height);
        sum.high[x] = level[x];
        column(x, sum.low[x], level[x], sum.code, false);
      }
    }
    const buffer = document.createElement("canvas");
    buffer.width = width;
    buffer.height = height;
    buffer.getContext("2d").putImageData(image, 0, 0);
    context.drawImage(buffer, picture.left, picture.top);
    names.sort((a, b) => b.longest * b.band.height - a.longest * a.band.height);
    return { bottoms, names: names.slice(0, 60) };
  }

  function drawNames(context, names) {
    const { ratio, left, top, height } = picture;
    context.font = 12 * ratio + "px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { band, at, longest, low } of names) {
      const full = nameOf(band.i) + ", " + size(now.bytes[band.i]);
      const room = longest - 12 * ratio;
      const text = [full, nameOf(band.i)].find((t) => context.measureText(t).width <= room);
      const y = top + height - low - band.height / 2;
      if (!text || y < top + 6 * ratio) continue;
      context.fillStyle = dark(data.colours[now.raw.c[band.i]]) ? "#fff" : "#000";
      context.fillText(text, left + at + 6 * ratio, y);
    }
  }

  function ticks(from, to, most, whole) {
    const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
    let gap = power * [1, 2, 5, 10].find((k) => rough <= power * k);
    if (whole) gap = Math.max(1, Math.round(gap));
    const found = [];
    for (let k = Math.ceil(from / gap); k * gap <= to * (1 + 1e-9); k++) found.push(+(k * gap).toPrecision(10));
    return found;
  }

  function drawAxes(context, soft, line) {
    const { ratio, left, top, width, height, scaleTop } = picture;
    const [unit, scale] = unitOf(scaleTop);
    context.font = 12 * ratio + "px system-ui, sans-serif";
    context.fillStyle = soft;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(0, scaleTop / scale, 6, false)) {
      const y = top + height - value * scale * picture.perByte;
      context.fillText(String(value), left - 6 * ratio, y);
      context.fillStyle = line;
      context.fillRect(left, Math.round(y), width, ratio);
      context.fillStyle = soft;
    }
    context.textBaseline = "alphabetic";
    context.fillText(unit, left - 6 * ratio, top - 8 * ratio);
    context.textAlign = "center";
    const most = Math.max(2, Math.floor(width / (85 * ratio)));
    const middle = view[1] - view[0] < 60 ? 0.5 : 0;
    for (const value of ticks(view[0], view[1] - middle, most, true)) {
      const x = left + ((value + middle - view[0]) / (view[1] - view[0])) * width;
      context.fillText(number(value), x, top + height + 15 * ratio);
    }
    context.fillText("allocator event", left + width / 2, top + height + 30 * ratio);
  }

  const pixelOf = (event) => picture.left + ((event - view[0]) / (view[1] - view[0])) * picture.width;

  function drawMarks(context, ink, soft) {
    const { ratio, left, top, width, height } = picture;
    const inside = (x) => x >= left && x <= left + width;
    context.font = 12 * ratio + "px system-ui, sans-serif";
    const backward = now.raw.b;
    if (backward !== null && backward > 0) {
      const x = pixelOf(backward);
      context.fillStyle = soft;
      if (inside(x)) {
        context.strokeStyle = soft;
        context.lineWidth = ratio;
        context.setLineDash([4 * ratio, 3 * ratio]);
        context.strokeRect(x, top - 12 * ratio, 0, height + 12 * ratio);
        context.setLineDash([]);
        context.textAlign = "right";
        if (x - left > 60 * ratio) context.fillText("forward", x - 4 * ratio, top - 7 * ratio);
        context.textAlign = "left";
        if (left + width - x > 65 * ratio) context.fillText("backward", x + 4 * ratio, top - 7 * ratio);
      }
    }
    const peak = pixelOf(now.peak + 0.5);
    if (inside(peak)) {
      const y = top + height - now.top * picture.perByte - 2 * ratio;
      context.fillStyle = ink;
      context.beginPath();
      context.moveTo(peak, y);
      context.lineTo(peak - 5 * ratio, y - 8 * ratio);
      context.lineTo(peak + 5 * ratio, y - 8 * ratio);
      context.fill();
    }
    const a = Math.max(left, pixelOf(cursor)), b = Math.min(left + width, pixelOf(cursor + 1));
    if (b >= left && a <= left + width) {
      context.fillStyle = ink;
      const middle = Math.round((a + b) / 2);
      context.globalAlpha = 0.6;
      context.fillRect(middle, top, Math.max(1, ratio), height);
      context.globalAlpha = 0.12;
      context.fillRect(a, top, b - a, height);
      context.globalAlpha = 1;
    }
  }

  function drawSelection(context, bottoms, ink) {
    const band = picture.alone.find((b) => b.i === selected);
    if (!band || !bottoms) return;
    const { left, top, height, ratio } = picture;
    context.fillStyle = ink;
    const thick = 2 * ratio;
    for (let x = band.from; x < band.to; x++) {
      const low = bottoms[x - band.from], y = top + height - low;
      const edge = (x - band.from < ratio || band.to - x <= ratio) ? band.height : 0;
      context.fillRect(left + x, y - band.height, 1, Math.max(thick, edge));
      context.fillRect(left + x, y - thick, 1, thick);
    }
  }

  // ------------------------------------------------------------ what the reader is told

  function sentence() {
    const parts = ["Event " + number(cursor) + " of " + number(now.raw.n) + ": " + size(now.live[cursor]) + " alive" +
      (now.given ? ", " + size(now.live[cursor] - now.given) + " above the inputs" : "")];
    if (cursor === now.peak) parts.push("the peak");
    const born = now.allocated[cursor], died = now.freed[cursor];
    if (cursor > 0 && born >= 0) parts.push("allocates " + nameOf(born) + ", " + size(now.bytes[born]));
    if (cursor > 0 && died >= 0) parts.push("frees " + nameOf(died) + ", " + size(now.bytes[died]));
    if (now.raw.b) parts.push(cursor < now.raw.b ? "forward" : "backward");
    return parts.join("; ") + ".";
  }

  function report() {
    let text = sentence();
    if (selected >= 0) text += " Chosen: " + nameOf(selected) + ", " + size(now.bytes[selected]) + ", " + lifeOf(selected) + ".";
    status.textContent = text;
    canvas.setAttribute("aria-valuemin", "0");
    canvas.setAttribute("aria-valuemax", String(now.raw.n));
    canvas.setAttribute("aria-valuenow", String(cursor));
    canvas.setAttribute("aria-valuetext", text);
    fillList();
  }

  function fillList() {
    const alive = aliveAt(cursor).sort((a, b) => now.bytes[b] - now.bytes[a] || a - b);
    list.textContent = "";
    for (const i of alive.slice(0, 100)) {
      const row = element("li", i === selected ? "on" : "", list);
      element("i", "", row).style.background = data.colours[now.raw.c[i]];
      element("span", "", row).textContent = nameOf(i);
      element("small", "", row).textContent = lifeOf(i);
      element("em", "", row).textContent = size(now.bytes[i]);
      row.addEventListener("pointerenter", () => { selected = i; draw(); });
    }
    if (alive.length > 100) {
      const rest = alive.slice(100);
      const row = element("li", "", list);
      element("span", "", row).textContent = number(rest.length) + " smaller ones";
      element("em", "", row).textContent = size(rest.reduce((sum, i) => sum + now.bytes[i], 0));
    }
  }

  function showTip(x, y, i, sum) {
    tip.textContent = "";
    element("b", "", tip).textContent = sum || nameOf(i);
    if (i >= 0) {
      element("div", "", tip).textContent = size(now.bytes[i]) + " (" + number(now.bytes[i]) + " B), " +
        data.categories[now.raw.c[i]];
      element("div", "", tip).textContent = "alive from " + lifeOf(i);
    }
    element("div", "", tip).textContent = "at event " + number(cursor) + ": " + size(now.live[cursor]) + " alive";
    const stack = i >= 0 ? stackOf(i) : [], narrow = plot.clientWidth < 480, most = narrow ? 2 : 8;
    if (stack.length) {
      const lines = element("ol", "", tip);
      for (const frame of stack.slice(0, most)) element("li", "", lines).textContent = frame;
      if (stack.length > most) element("li", "", lines).textContent = "… " + (stack.length - most) + " more";
    }
    tip.hidden = false;
    const wide = tip.offsetWidth, tall = tip.offsetHeight;
    tip.style.left = clamp(x + 14 + wide > plot.clientWidth ? x - wide - 14 : x + 14, 0, Math.max(0, plot.clientWidth - wide)) + "px";
    // On a phone beside the pointer there is no room: above or below it, wherever more of the picture stays visible.
    const beside = narrow ? (y > plot.clientHeight / 2 ? y - tall - 24 : y + 24) : y - tall / 2;
    tip.style.top = clamp(beside, 0, Math.max(0, plot.clientHeight - tall)) + "px";
  }

  // What lies at a point of the canvas (CSS pixels): [allocation or -1, text for a sum].
  function at(x, y) {
    const { ratio, left, top, width, height, states, alone, sums } = picture;
    const column = Math.round(x * ratio) - left;
    if (column < 0 || column >= width) return null;
    const level = top + height - y * ratio;
    const hit = { state: states[column], i: -1, sum: "" };
    let low = 0;
    if (level < 0) return hit;
    for (const band of alone) {
      if (band.from > column || column >= band.to) continue;
      low += band.height;
      if (level < low) { hit.i = band.i; return hit; }
    }
    for (const sum of sums) {
      if (level >= sum.low[column] && level < sum.high[column]) {
        hit.sum = "several small ones: " + data.categories[sum.code] + ", together " +
          size((sum.high[column] - sum.low[column]) / picture.perByte);
      }
    }
    return hit;
  }

  // ------------------------------------------------------------ moving about

  function setView(from, to) {
    const all = now.raw.n + 1;
    const span = clamp(to - from, Math.min(4, all), all);
    const begin = clamp(from, 0, all - span);
    view = [begin, begin + span];
    draw();
  }
  function zoom(factor, around) {
    const centre = around === undefined ? clamp(cursor + 0.5, view[0], view[1]) : around;
    setView(centre - (centre - view[0]) * factor, centre + (view[1] - centre) * factor);
  }
  function pan(share) {
    const by = (view[1] - view[0]) * share;
    setView(view[0] + by, view[1] + by);
  }
  function go(state, announce) {
    cursor = clamp(state, 0, now.raw.n);
    const span = view[1] - view[0];
    if (cursor < view[0] || cursor + 1 > view[1]) setView(cursor + 0.5 - span / 2, cursor + 0.5 + span / 2);
    draw();
    if (announce) report();
  }
  function step(by) {
    go(cursor + by, false);
    const born = now.allocated[cursor];
    selected = cursor > 0 && born >= 0 && shown(born) ? born : -1;
    report();
    tipAtSelection();
  }
  function choose(by) {
    const alive = aliveAt(cursor);
    if (!alive.length) return;
    const at = alive.indexOf(selected);
    selected = alive[at < 0 ? (by > 0 ? 0 : alive.length - 1) : clamp(at + by, 0, alive.length - 1)];
    draw();
    report();
    tipAtSelection();
  }
  function tipAtSelection() {
    if (selected < 0) { tip.hidden = true; return; }
    paint();
    const { ratio, top, height, perByte } = picture;
    let low = 0;
    for (const i of aliveAt(cursor)) {
      if (i === selected) break;
      low += now.bytes[i];
    }
    const y = (top + height - (low + now.bytes[selected] / 2) * perByte) / ratio;
    showTip(pixelOf(cursor + 0.5) / ratio, y, selected, "");
  }
  function show(k) {
    now = timelineAt(k);
    cursor = now.peak;
    selected = -1;
    tip.hidden = true;
    view = [0, now.raw.n + 1];
    heading.textContent = several ? "" : now.raw.title;
    heading.hidden = several;
    canvas.setAttribute("aria-label", now.raw.alt);
    showSmall.caption.textContent = "small ones (< " + size(now.top / 100) + ")";
    legend.textContent = "";
    const used = new Set(now.raw.c.filter((_, i) => now.bytes[i] >= now.top / 400));
    data.categories.forEach((category, code) => {
      if (!used.has(code)) return;
      const entry = element("li", "", legend);
      element("i", "", entry).style.background = data.colours[code];
      entry.append(category);
    });
    notes.textContent = "";
    for (const note of [SOURCES[now.raw.source], ...now.raw.notes]) element("li", "", notes).textContent = note;
    report();
    draw();
  }

  const KEYS = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => choose(1), ArrowDown: () => choose(-1),
    PageUp: () => step(-Math.ceil(now.raw.n / 20)), PageDown: () => step(Math.ceil(now.raw.n / 20)),
    Home: () => go(0, true), End: () => go(now.raw.n, true), p: () => go(now.peak, true), P: () => go(now.peak, true),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(0, now.raw.n + 1),
    Escape: () => { selected = -1; tip.hidden = true; draw(); report(); },
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const turned = event.shiftKey && { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2) }[event.key];
    const act = turned || KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  // One pointer hovers or drags, two pinch.
  const pointers = new Map();
  let pinch = 0, dragged = false;
  const local = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const eventAt = (x) => view[0] + ((x * picture.ratio - picture.left) / picture.width) * (view[1] - view[0]);
  function hover(x, y) {
    const hit = picture && at(x, y);
    if (!hit) { tip.hidden = true; return; }
    cursor = hit.state;
    selected = hit.i;
    draw();
    report();
    if (hit.i >= 0 || hit.sum) showTip(x, y, hit.i, hit.sum); else tip.hidden = true;
  }
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, local(event)[0]);
    dragged = false;
    canvas.setPointerCapture(event.pointerId);
    if (pointers.size === 2) pinch = spreadOf();
  });
  const spreadOf = () => { const [a, b] = [...pointers.values()]; return Math.max(10, Math.abs(a - b)); };
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = local(event), before = pointers.get(event.pointerId);
    if (before === undefined) { status.setAttribute("aria-live", "off"); hover(x, y); return; }
    if (pointers.size === 2) {
      pointers.set(event.pointerId, x);
      const wide = spreadOf(), [a, b] = [...pointers.values()];
      zoom(pinch / wide, eventAt((a + b) / 2));
      pinch = wide;
      dragged = true;
    } else if (dragged || Math.abs(x - before) > 3) {
      dragged = true;
      tip.hidden = true;
      pointers.set(event.pointerId, x);
      pan(((before - x) * picture.ratio) / picture.width);
    }
  });
  const released = (event) => {
    const held = pointers.delete(event.pointerId);
    if (held && !dragged && event.type === "pointerup") hover(...local(event));
  };
  canvas.addEventListener("pointerup", released);
  canvas.addEventListener("pointercancel", released);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") tip.hidden = true; });
  canvas.addEventListener("focus", () => status.setAttribute("aria-live", "polite"));
  canvas.addEventListener("blur", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / canvas.clientWidth);
    else zoom(Math.exp(clamp(event.deltaY, -200, 200) * 0.002), eventAt(local(event)[0]));
  }, { passive: false });

  // ------------------------------------------------------------ theme and size of the surroundings

  const outer = () => { try { return window.parent.document; } catch { return document; } };
  function theme() {
    const page = outer(), html = page.documentElement, body = page.body;
    const said = html.dataset.theme || html.getAttribute("theme") ||
      (body && body.dataset.jpThemeLight ? (body.dataset.jpThemeLight === "true" ? "light" : "dark") : "");
    const wanted = said === "dark" || said === "light" ? said :
      window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    if (root.dataset.theme !== wanted) {
      root.dataset.theme = wanted;
      draw();
    }
  }
  const watcher = new MutationObserver(theme);
  for (const node of [outer().documentElement, outer().body]) {
    if (node) watcher.observe(node, { attributes: true, attributeFilter: ["data-theme", "theme", "data-jp-theme-light"] });
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);

  function fit() {
    draw();
    try {
      if (window.frameElement) window.frameElement.style.height = Math.ceil(root.getBoundingClientRect().height) + "px";
    } catch { /* another origin: the frame keeps the height it was given */ }
  }
  new ResizeObserver(fit).observe(root);

  theme();
  show(0);
}
