// MathJax never breaks a formula inside a line of text. One that is wider than the column of a phone may break between
// its symbols: flce.css does it for the class set here.
addEventListener("load", async () => {
  await window.MathJax?.startup?.promise;
  for (const formula of document.querySelectorAll("mjx-container:not([display])"))
    if (formula.getBoundingClientRect().width > 250) formula.classList.add("long");
});
