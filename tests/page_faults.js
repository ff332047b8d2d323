// What is wrong with the page as it is shown now, one sentence each; test_pages.py evaluates this in the browser.
async () => {
  const name = (element) => [element.tagName.toLowerCase(), ...element.classList].join(".");
  const words = (element) => element.textContent.trim().replace(/\s+/g, " ").slice(0, 40);

  // Loaded and laid out, with everything unfolded that a reader may unfold.
  async function settled() {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    for (const fold of document.querySelectorAll(".toggle-hidden")) fold.classList.remove("toggle-hidden");
    for (const image of document.images) image.loading = "eager";
    const arrives = (image) => image.complete || new Promise((done) => (image.onload = image.onerror = done));
    await Promise.all([...document.images].map(arrives));
    await document.fonts.ready;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  }

  function* formulas() {
    for (const formula of document.querySelectorAll(".math"))
      if (!formula.querySelector("mjx-container")) yield `formula: not typeset: ${words(formula)}`;
  }

  function* images() {
    for (const image of document.images) {
      const file = image.currentSrc.slice(-60);
      if (!image.complete || !image.naturalWidth) yield `image: ${file} did not load`;
      if (!image.alt.trim()) yield `image: ${file} has no alternative text`;
    }
  }

  // What sticks out of the window and can't be scrolled into view within a box of its own.
  function* overflows() {
    const width = document.documentElement.clientWidth;
    const whole = document.documentElement.scrollWidth;
    if (whole > width) yield `overflow: the page is ${whole} wide`;

    function scrolls(element) {
      for (let box = element.parentElement; box && box !== document.body; box = box.parentElement) {
        const inside = box.getBoundingClientRect().right <= width + 1;
        if (inside && ["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return true;
      }
      return false;
    }

    for (const element of document.querySelectorAll("main article *")) {
      const box = element.getBoundingClientRect();
      if (!box.width || !box.height || box.right <= width + 1) continue;
      if (!element.checkVisibility({ visibilityProperty: true })) continue;
      if (element.closest("svg *, mjx-assistive-mml, mjx-container *") || scrolls(element)) continue;
      yield `overflow: ${name(element)} ends at ${Math.round(box.right)}: ${words(element)}`;
    }
  }

  // Text whose contrast to the background behind it is below the least that WCAG allows for large text.
  function* faintTexts() {
    const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);

    function background(element) {
      for (let box = element; box; box = box.parentElement) {
        const colour = channels(getComputedStyle(box).backgroundColor);
        if ((colour[3] ?? 1) > 0.5) return colour;
      }
      return [255, 255, 255];
    }

    const article = document.querySelector("main article") ?? document.body;
    const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const element = texts.currentNode.parentElement;
      if (!/[\p{L}\p{N}]/u.test(texts.currentNode.data)) continue;
      if (element.closest("svg, script, style, mjx-assistive-mml")) continue;
      if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
      const both = [channels(getComputedStyle(element).color), background(element)].map(luminance);
      const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
      if (contrast < 3) yield `faint, ${contrast.toFixed(1)}:1: ${name(element)}: ${words(element)}`;
    }
  }

  await settled();
  const few = (faults) => [...new Set(faults)].slice(0, 5);
  return [formulas, images, overflows, faintTexts].flatMap((faults) => few(faults()));
};
