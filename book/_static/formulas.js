// Formulas are typeset in slices of a few milliseconds, from the top of the page, so that it can be scrolled meanwhile.
// MathJax never breaks a formula inside a line of text. One that is wider than the column of a phone may break between
// its symbols: flce.css does it for the class set here.
if (window.MathJax?.startup)
  MathJax.startup.promise = MathJax.startup.promise.then(async () => {
    let began = 0; // the first slice waits, too
    for (const formula of document.querySelectorAll(".math")) {
      if (performance.now() - began > 15) {
        await new Promise((done) => setTimeout(done));
        began = performance.now();
      }
      MathJax.typeset([formula]);
    }
    const inline = [...document.querySelectorAll("mjx-container:not([display])")];
    const wide = inline.map((formula) => formula.getBoundingClientRect().width > 250);
    inline.forEach((formula, at) => formula.classList.toggle("long", wide[at]));
  });
