// The pages whose address or title has most words of the address that was asked for.
(() => {
  const pages = JSON.parse(document.getElementById("pages").textContent);
  const words = (text) => new Set(text.toLowerCase().match(/[\p{L}\p{N}]{2,}/gu) ?? []);
  const common = new Set(["html", "book", "notebooks", "the", "404", "and"]);
  const asked = [...words(decodeURI(location.pathname))].filter((word) => !common.has(word));
  const near = pages
    .map(([address, title]) => [asked.filter((word) => words(`${address} ${title}`).has(word)).length, address, title])
    .filter(([shared]) => shared)
    .sort(([a], [b]) => b - a)
    .slice(0, 4);
  document.getElementById("near").hidden = !near.length;
  for (const [, address, title] of near) {
    const link = Object.assign(document.createElement("a"), { href: address, textContent: title });
    document.getElementById("near-list").appendChild(document.createElement("li")).append(link);
  }
})();
