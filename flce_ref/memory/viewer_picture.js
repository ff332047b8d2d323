// One picture of a timeline on a canvas: where every visible band lies, the drawing of it, and what lies at a point.
// A scene says what to draw: { timeline, view: [from, to] in events, top: bytes at the upper end of the axis or 0 for
// the highest visible state, shown(i), cursor: state, selected: allocation or -1, colours, style }.
// Lengths are device pixels, except those which the caller passes in.

const PAD = { left: 50, right: 10, top: 30, bottom: 34 };
const HEADROOM = 1.12;
const MOST_BANDS = 4000;
const LINE = 14;

const channels = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
const packed = (hex, shade) => {
  const [r, g, b] = channels(hex).map((value) => Math.round(value * shade));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
};
// Black or white, whichever contrasts more (relative luminance as WCAG defines it).
const inkOn = (hex) => {
  const [r, g, b] = channels(hex).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
};

// Multiples of 1, 2 or 5 times a power of ten, at most `most` + 1 of them.
function ticks(from, to, most, whole) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  let gap = power * [1, 2, 5, 10].find((k) => rough <= power * k);
  if (whole) gap = Math.max(1, Math.round(gap));
  const found = [];
  for (let k = Math.ceil(from / gap); k * gap <= to * (1 + 1e-9); k++) found.push(+(k * gap).toPrecision(10));
  return found;
}

class Picture {
  constructor(canvas, scene) {
    Object.assign(this, scene);
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
    this.canvas = canvas;
    this.ratio = ratio;
    this.left = Math.round(PAD.left * ratio);
    this.upper = Math.round(PAD.top * ratio);
    this.width = Math.max(1, canvas.width - this.left - Math.round(PAD.right * ratio));
    this.height = Math.max(1, canvas.height - this.upper - Math.round(PAD.bottom * ratio));
    this.states = this.fullestStates();
    const highest = this.top || this.states.reduce((most, state) => Math.max(most, this.timeline.live[state]), 0);
    this.axisTop = Math.max(1, highest) * HEADROOM;
    this.perByte = this.height / this.axisTop;
    this.layOut();
  }

  // ------------------------------------------------------------ layout

  // For each column the fullest state that falls into it; so no spike is ever lost.
  fullestStates() {
    const { view, width, timeline: { live, events } } = this;
    const states = new Int32Array(width), scale = (view[1] - view[0]) / width;
    for (let x = 0; x < width; x++) {
      let state = clamp(Math.floor(view[0] + x * scale), 0, events), best = state;
      const stop = clamp(Math.ceil(view[0] + (x + 1) * scale), state + 1, events + 1);
      if (scale > 1) for (; state < stop; state++) if (live[state] > live[best]) best = state;
      states[x] = best;
    }
    return states;
  }

  // First column whose state is not before `state`.
  columnOf(state) {
    let low = 0, high = this.width;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.states[middle] < state) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Allocations that are thick enough become bands of their own, the others are summed by category.
  layOut() {
    const bands = this.visibleBands();
    let least = 0.7;
    if (bands.length > MOST_BANDS) {
      least = Math.max(least, Float64Array.from(bands, ({ height }) => height).sort()[bands.length - MOST_BANDS - 1]);
    }
    this.bands = bands.filter((band) => band.height > least);
    const sums = new Map();
    for (const band of bands) {
      if (band.height > least) continue;
      const code = this.timeline.raw.c[band.i];
      if (!sums.has(code)) sums.set(code, { code, change: new Float64Array(this.width + 1) });
      sums.get(code).change[band.from] += band.height;
      sums.get(code).change[band.to] -= band.height;
    }
    this.sums = [...sums.values()].sort((a, b) => a.code - b.code);
  }

  visibleBands() {
    const { timeline, states } = this, bands = [];
    const first = states[0], last = states[states.length - 1];
    for (let i = 0; i < timeline.count && timeline.start[i] <= last; i++) {
      if (timeline.end[i] <= first || !this.shown(i)) continue;
      const from = this.columnOf(timeline.start[i]), to = this.columnOf(timeline.end[i]);
      if (from < to) bands.push({ i, from, to, height: timeline.bytes[i] * this.perByte });
    }
    return bands;
  }

  xOf(event) {
    return this.left + ((event - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  yOf(bytes) {
    return this.upper + this.height - bytes * this.perByte;
  }

  // The event under `x` in CSS pixels, with its fraction.
  eventAt(x) {
    return this.view[0] + ((x * this.ratio - this.left) / this.width) * (this.view[1] - this.view[0]);
  }

  // What lies at (x, y) in CSS pixels: null outside the plot, else { state, i: allocation or -1, sum: text }.
  at(x, y) {
    const column = Math.round(x * this.ratio) - this.left;
    if (column < 0 || column >= this.width) return null;
    const level = this.upper + this.height - y * this.ratio, hit = { state: this.states[column], i: -1, sum: "" };
    if (level < 0) return hit;
    let low = 0;
    for (const band of this.bands) {
      if (band.from > column || column >= band.to) continue;
      low += band.height;
      if (level < low) return { ...hit, i: band.i };
    }
    for (const { code, low, high } of this.sums) {
      if (level < low[column] || level >= high[column]) continue;
      const together = size((high[column] - low[column]) / this.perByte);
      return { ...hit, sum: "several small ones: " + this.timeline.categories[code] + ", together " + together };
    }
    return hit;
  }

  // ------------------------------------------------------------ drawing

  draw() {
    const context = (this.context = this.canvas.getContext("2d"));
    context.font = 12 * this.ratio + "px system-ui, sans-serif";
    this.drawBytes();
    this.drawEvents();
    this.drawBands();
    this.drawBackward();
    this.drawCursor();
    this.drawNames();
    this.drawPeak();
    this.drawSelection();
  }

  text(text, x, y, align, baseline = "alphabetic") {
    this.context.textAlign = align;
    this.context.textBaseline = baseline;
    this.context.fillText(text, x, y);
  }

  drawBytes() {
    const { context, ratio, left, style } = this, [unit, scale] = unitOf(this.axisTop);
    for (const value of ticks(0, this.axisTop / scale, 6, false)) {
      const y = this.yOf(value * scale);
      context.fillStyle = style.line;
      context.fillRect(left, Math.round(y), this.width, ratio);
      context.fillStyle = style.soft;
      this.text(String(value), left - 6 * ratio, y, "right", "middle");
    }
    this.text(unit, left - 6 * ratio, this.upper - 16 * ratio, "right");
  }

  drawEvents() {
    const { ratio, view } = this, below = this.upper + this.height;
    const most = Math.max(2, Math.floor(this.width / (75 * ratio)));
    // Wide states carry their number in the middle.
    const middle = view[1] - view[0] < 60 ? 0.5 : 0;
    this.context.fillStyle = this.style.soft;
    for (const value of ticks(view[0], view[1] - middle, most, true)) {
      this.text(number(value), this.xOf(value + middle), below + 15 * ratio, "center");
    }
    this.text("allocator event", this.left + this.width / 2, below + 30 * ratio, "center");
  }

  // The bands are axis-aligned, so they are written pixel by pixel: the time does not depend on how often they shift.
  drawBands() {
    const { width, height, timeline, colours } = this;
    const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const fills = colours.map((hex) => packed(hex, 1)), edges = colours.map((hex) => packed(hex, 0.68));
    const fillColumn = (x, low, high, code, edge) => {
      let y = Math.max(0, height - Math.round(high));
      const stop = height - Math.round(low);
      if (stop - y > 2) pixels[y++ * width + x] = edges[code];
      const colour = edge && stop - y > 2 ? edges[code] : fills[code];
      for (; y < stop; y++) pixels[y * width + x] = colour;
    };
    const level = new Float64Array(width);
    for (const band of this.bands) {
      const born = timeline.start[band.i] > this.states[0] && band.to - band.from > 3;
      band.low = level.slice(band.from, band.to);
      for (let x = band.from; x < band.to; x++) {
        level[x] += band.height;
        fillColumn(x, band.low[x - band.from], level[x], timeline.raw.c[band.i], born && x === band.from);
      }
    }
    for (const sum of this.sums) {
      sum.low = level.slice();
      for (let x = 0, thick = 0; x < width; x++) {
        thick += sum.change[x];
        level[x] += Math.max(0, thick);
        fillColumn(x, sum.low[x], level[x], sum.code, false);
      }
      sum.high = level.slice();
    }
    const buffer = document.createElement("canvas");
    buffer.width = width;
    buffer.height = height;
    buffer.getContext("2d").putImageData(image, 0, 0);
    this.context.drawImage(buffer, this.left, this.upper);
  }

  // A band carries its name wherever it lies still for long enough; the roomiest 60 places only.
  drawNames() {
    const places = [];
    for (const band of this.bands) {
      if (band.height < (LINE - 1) * this.ratio) continue;
      for (const [begin, length] of rests(band.low)) if (length > 30) places.push({ band, begin, length });
    }
    places.sort((a, b) => b.length * b.band.height - a.length * a.band.height);
    for (const { band, begin, length } of places.slice(0, 60)) {
      const lines = this.fittingName(band, length - 10 * this.ratio);
      const middle = this.upper + this.height - band.low[begin] - band.height / 2;
      if (!lines || middle < this.upper) continue;
      this.context.fillStyle = inkOn(this.colours[this.timeline.raw.c[band.i]]);
      lines.forEach((line, k) => {
        const y = middle + (k - (lines.length - 1) / 2) * LINE * this.ratio;
        this.text(line, this.left + band.from + begin + 6 * this.ratio, y, "left", "middle");
      });
    }
  }

  // Name and size on one line, else wrapped, else the name alone.
  fittingName(band, room) {
    const name = this.timeline.nameOf(band.i), bytes = size(this.timeline.bytes[band.i]);
    const fits = (line) => this.context.measureText(line).width <= room;
    const wrapped = [];
    for (const word of name.split(" ")) {
      const longer = wrapped.length ? wrapped[wrapped.length - 1] + " " + word : word;
      if (wrapped.length && fits(longer)) wrapped[wrapped.length - 1] = longer; else wrapped.push(word);
    }
    return [[name + ", " + bytes], [...wrapped, bytes], wrapped].find(
      (lines) => lines.length * LINE * this.ratio <= band.height + this.ratio && lines.every(fits));
  }

  drawBackward() {
    const { context, ratio, left, width, upper, timeline: { backward } } = this, x = this.xOf(backward);
    if (!backward || x < left || x > left + width) return;
    context.strokeStyle = context.fillStyle = this.style.soft;
    context.lineWidth = ratio;
    context.setLineDash([4 * ratio, 3 * ratio]);
    context.beginPath();
    context.moveTo(x, upper - 14 * ratio);
    context.lineTo(x, upper + this.height);
    context.stroke();
    context.setLineDash([]);
    if (x - left > 60 * ratio) this.text("forward", x - 4 * ratio, upper - 7 * ratio, "right");
    if (left + width - x > 65 * ratio) this.text("backward", x + 4 * ratio, upper - 7 * ratio, "left");
  }

  drawPeak() {
    const { context, ratio, left, width, timeline } = this, x = this.xOf(timeline.peak + 0.5);
    if (x < left || x > left + width) return;
    const y = this.yOf(timeline.top) - 4 * ratio, leftwards = x > left + width / 2;
    context.fillStyle = this.style.ink;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 5 * ratio, y - 8 * ratio);
    context.lineTo(x + 5 * ratio, y - 8 * ratio);
    context.fill();
    context.font = "bold " + context.font;
    // A rim in the colour of the background parts the text from what it is written over.
    context.strokeStyle = this.style.bg;
    context.lineWidth = 3 * ratio;
    context.lineJoin = "round";
    const text = "peak " + size(timeline.top), at = x + (leftwards ? -9 : 9) * ratio;
    context.textAlign = leftwards ? "right" : "left";
    context.strokeText(text, at, y - ratio);
    this.text(text, at, y - ratio, context.textAlign);
  }

  drawCursor() {
    const { context, ratio, upper, height } = this;
    const from = Math.max(this.left, this.xOf(this.cursor));
    const to = Math.min(this.left + this.width, this.xOf(this.cursor + 1));
    if (to < from) return;
    context.fillStyle = this.style.ink;
    context.globalAlpha = 0.6;
    context.fillRect(Math.round((from + to) / 2), upper, Math.max(1, ratio), height);
    context.globalAlpha = 0.12;
    context.fillRect(from, upper, to - from, height);
    context.globalAlpha = 1;
  }

  drawSelection() {
    const band = this.bands.find(({ i }) => i === this.selected);
    if (!band) return;
    const { context, ratio } = this, thick = 2 * ratio, columns = band.to - band.from;
    context.fillStyle = this.style.ink;
    for (let x = 0; x < columns; x++) {
      const y = this.upper + this.height - band.low[x], end = x < ratio || columns - x <= ratio;
      context.fillRect(this.left + band.from + x, y - band.height, 1, end ? Math.max(thick, band.height) : thick);
      context.fillRect(this.left + band.from + x, y - thick, 1, thick);
    }
  }
}

// The runs of equal values: [where it begins, how many there are].
function rests(values) {
  const runs = [];
  for (let begin = 0, x = 1; x <= values.length; x++) {
    if (x < values.length && values[x] === values[begin]) continue;
    runs.push([begin, x - begin]);
    begin = x;
  }
  return runs;
}
