// The calculator's page: form → peaks.js → bars and one sentence. The state is in the address, after #, and only what
// differs from the start is there, so that a link stays short and an old one keeps its meaning.
(() => {
  const { models, gpus, dtypes, start } = JSON.parse(document.getElementById("calculator-data").textContent);
  const root = document.getElementById("calculator");
  const form = root.querySelector("form");
  const field = form.elements;
  const [said, bars, command] = [".said", ".bars", ".same code"].map((selector) => root.querySelector(selector));
  const own = { id: "", name: "my own V and D" };

  const gib = (bytes) => `${(bytes / 2 ** 30).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} GiB`;
  const count = (n) => n.toLocaleString("en");

  function element(tag, className, text = "") {
    const made = document.createElement(tag);
    made.className = className;
    made.textContent = text;
    return made;
  }

  function fill(select, choices) {
    select.replaceChildren(...choices.map(({ id, name }) => new Option(name, id)));
  }

  const modelOf = (v, d) => {
    const chosen = models.find((model) => model.id === field.model.value);
    const suits = (model) => model && model.v === v && model.d === d;
    return suits(chosen) ? chosen : (models.find(suits) ?? own);
  };

  // ---------------------------------------------------------------- state and address

  const NAMES = ["v", "d", "batch", "context", "dtype", "chunk", "gpu", "used"];

  function write(state) {
    for (const name of NAMES) field[name].value = state[name];
    field.model.value = state.model ?? "";
    field.model.value = modelOf(+state.v, +state.d).id;
  }

  function fromAddress() {
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const model = models.find(({ id }) => id === given.model);
    const state = { ...start, ...(model && { model: model.id, v: model.v, d: model.d }), ...given };
    for (const name of ["dtype", "gpu"])
      if (![...field[name].options].some((option) => option.value === state[name])) state[name] = start[name];
    return state;
  }

  function toAddress() {
    const parameters = new URLSearchParams();
    const model = field.model.value;
    if (model && model !== start.model) parameters.set("model", model);
    for (const name of NAMES) {
      const told = model ? ["v", "d"].includes(name) : false;
      if (!told && field[name].value !== String(start[name])) parameters.set(name, field[name].value);
    }
    const address = parameters.size ? `#${parameters}` : location.pathname + location.search;
    if (location.hash.slice(1) !== String(parameters)) history.replaceState(null, "", address);
  }

  // ---------------------------------------------------------------- what is shown

  // What can't be computed, in words; nothing if all is well.
  function complaint() {
    for (const input of form.querySelectorAll("input")) {
      const wrong = !input.checkValidity();
      if (wrong) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
      if (wrong) {
        const name = input.labels[0].textContent.trim();
        const [least, most] = [count(+input.min), count(+input.max)];
        return `${name} must be a ${input.step === "1" ? "whole " : ""}number from ${least} to ${most}.`;
      }
    }
    return "";
  }

  function bar(row, inputs, budget, scale) {
    const item = element("li", row.fits ? "fits" : "");
    const line = element("p", "");
    line.append(element("strong", "", row.name), element("span", "note", row.note));
    line.append(element("span", "bytes", gib(row.peak)));
    const drawn = element("div", "bar");
    drawn.setAttribute("aria-hidden", "true");
    for (const [name, bytes] of [["inputs", inputs], ["peak", row.peak]]) {
      drawn.append(element("span", name));
      drawn.lastChild.style.width = `${(100 * bytes) / scale}%`;
    }
    if (budget > 0 && budget < scale) {
      drawn.append(element("span", "limit"));
      drawn.lastChild.style.width = `${(100 * budget) / scale}%`;
    }
    const verdict = row.fits ? "fits" : "does not fit";
    const longest = row.longest ? `up to ${count(row.longest)} tokens fit` : "not one token fits";
    item.append(line, drawn, element("p", "note", `${gib(inputs + row.peak)} with the inputs: ${verdict}; ${longest}`));
    return item;
  }

  // Bars are moved rather than made anew where the same schedules are shown.
  function show(items) {
    if (items.length !== bars.children.length) return bars.replaceChildren(...items);
    items.forEach((item, at) => {
      const there = bars.children[at];
      there.className = item.className;
      const [old, fresh] = [there, item].map((one) => [...one.querySelectorAll(".bar > span")]);
      if (old.length === fresh.length) old.forEach((span, i) => (span.style.width = fresh[i].style.width));
      else there.querySelector(".bar").replaceChildren(...fresh);
      there.firstChild.replaceWith(item.firstChild);
      there.lastChild.replaceWith(item.lastChild);
    });
  }

  function update() {
    const wrong = complaint();
    root.classList.toggle("wrong", Boolean(wrong));
    if (wrong) {
      said.textContent = wrong;
      return bars.replaceChildren();
    }
    toAddress();
    const [v, d, batch, context, chunk] = ["v", "d", "batch", "context", "chunk"].map((name) => Number(field[name].value));
    const dtype = dtypes.find(({ id }) => id === field.dtype.value);
    const gpu = gpus.find(({ id }) => id === field.gpu.value);
    const head = { n: batch * context, d, v, bytes: dtype.bytes, dtype: dtype.id };
    const budget = gpu.mib * 2 ** 20 - field.used.value * 2 ** 30;
    const inputs = FlcePeaks.inputs(head);
    const rows = FlcePeaks.all(head, chunk).map((row) => ({
      ...row,
      fits: inputs + row.peak <= budget,
      longest: FlcePeaks.longest(head, chunk, row.id, budget),
    }));
    const scale = Math.max(...rows.map((row) => inputs + row.peak));
    show(rows.map((row) => bar(row, inputs, budget, scale)));

    const [naive, fused] = ["naive", "fused"].map((id) => rows.find((row) => row.id === id));
    const verdict = (row) => `${gib(row.peak)} above the inputs (${row.fits ? "fits" : "does not fit"})`;
    said.textContent =
      `${count(head.n)} tokens, ${count(v)} words: the logits alone take ${gib(head.n * v * dtype.bytes)}. ` +
      `One step of the head needs ${verdict(naive)} with plain PyTorch and ${verdict(fused)} fused, ` +
      `on ${gpu.name} with ${gib(Math.max(0, budget))} left.`;
    const sizes = field.model.value ? `--model ${field.model.value}` : `--vocab ${v} --hidden ${d}`;
    const pieces = chunk ? ` --chunk-size ${chunk}` : "";
    const left = Math.max(0, Math.floor(budget / 2 ** 20));
    command.textContent =
      `python -m flce_ref memory ${sizes} --tokens ${head.n} --dtype ${dtype.short} --schedule all${pieces} --budget ${left}MiB`;
  }

  // ---------------------------------------------------------------- what the reader does

  form.addEventListener("input", ({ target }) => {
    const model = target === field.model && models.find(({ id }) => id === target.value);
    if (model) [field.v.value, field.d.value] = [model.v, model.d];
    else if (target === field.v || target === field.d) field.model.value = modelOf(+field.v.value, +field.d.value).id;
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  field.reset.addEventListener("click", () => (write(start), update()));
  addEventListener("hashchange", () => (write(fromAddress()), update()));

  fill(field.model, [...models, own]);
  fill(field.dtype, dtypes);
  fill(field.gpu, gpus.map(({ id, name }) => ({ id, name })));
  write(fromAddress());
  update();
})();
