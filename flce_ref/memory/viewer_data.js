// Timelines, decoded from the columns that viewer.py writes. Names follow timeline.py: state k is what is alive after
// event k; allocation i is alive in the states start[i] … end[i] - 1.

const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

const unitOf = (bytes) => UNITS.find(([, scale]) => bytes >= scale / 10) || UNITS[3];
const { format: number } = new Intl.NumberFormat("en-US");
const size = (bytes) => {
  const [unit, scale] = unitOf(bytes);
  return (unit === "B" ? bytes : (bytes / scale).toFixed(2)) + " " + unit;
};
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

class Timeline {
  constructor(raw, categories) {
    this.raw = raw;
    this.categories = categories;
    this.events = raw.n;
    this.backward = raw.b;
    this.count = raw.z.length;
    this.bytes = Float64Array.from(raw.z, (k) => raw.sizes[k]);
    this.start = new Int32Array(this.count);
    this.end = new Int32Array(this.count);
    this.live = new Float64Array(raw.n + 2);
    // What each event allocates and frees; -1 is nothing.
    this.allocated = new Int32Array(raw.n + 2).fill(-1);
    this.freed = new Int32Array(raw.n + 2).fill(-1);
    this.readLives();
    this.countLive();
  }

  readLives() {
    const { raw, bytes, start, end, live } = this;
    for (let i = 0, at = 0; i < this.count; i++) {
      at += raw.s[i];
      start[i] = at;
      end[i] = raw.d[i] ? at + raw.d[i] : raw.n + 1;
      live[at] += bytes[i];
      live[end[i]] -= bytes[i];
      if (at > 0) this.allocated[at] = i;
      if (end[i] <= raw.n) this.freed[end[i]] = i;
    }
  }

  countLive() {
    const { live } = this;
    this.peak = 0;
    for (let k = 1; k <= this.events; k++) {
      live[k] += live[k - 1];
      if (live[k] > live[this.peak]) this.peak = k;
    }
    this.top = live[this.peak];
    this.given = 0;
    for (let i = 0; i < this.count && this.start[i] === 0; i++) {
      if (["input", "weight"].includes(this.categoryOf(i))) this.given += this.bytes[i];
    }
  }

  categoryOf(i) {
    return this.categories[this.raw.c[i]];
  }

  stackOf(i) {
    return this.raw.stacks[this.raw.f[i]].map((k) => this.raw.frames[k]);
  }

  nameOf(i) {
    const label = this.raw.labels[this.raw.l[i]];
    if (label) return label;
    const innermost = this.raw.stacks[this.raw.f[i]][0];
    if (innermost !== undefined) return this.raw.frames[innermost];
    return this.categoryOf(i) === "other" ? "unnamed" : this.categoryOf(i);
  }

  lifeOf(i) {
    const from = this.start[i] === 0 ? "before the first event" : "event " + number(this.start[i]);
    return from + (this.end[i] > this.events ? " to the end" : " to event " + number(this.end[i]));
  }

  isSmall(i) {
    return this.bytes[i] < this.top / 100;
  }

  // Oldest first, as they are stacked.
  aliveAt(state) {
    const alive = [];
    for (let i = 0; i < this.count && this.start[i] <= state; i++) if (state < this.end[i]) alive.push(i);
    return alive;
  }

  sentenceAt(state) {
    const allocates = state > 0 ? this.allocated[state] : -1, frees = state > 0 ? this.freed[state] : -1;
    const parts = ["Event " + number(state) + " of " + number(this.events) + ": " + size(this.live[state]) + " alive" +
      (this.given ? ", " + size(this.live[state] - this.given) + " above the inputs" : "")];
    if (state === this.peak) parts.push("the peak");
    if (allocates >= 0) parts.push("allocates " + this.nameOf(allocates) + ", " + size(this.bytes[allocates]));
    if (frees >= 0) parts.push("frees " + this.nameOf(frees) + ", " + size(this.bytes[frees]));
    if (this.backward) parts.push(state < this.backward ? "forward" : "backward");
    return parts.join("; ") + ".";
  }
}
