// Wide tables scroll inside a box that the theme makes: the keyboard must reach it (axe: scrollable-region-focusable).
const reachable = () => document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((box) => { box.tabIndex = 0; });
new MutationObserver(reachable).observe(document.body, { childList: true, subtree: true });
reachable();
// On a phone a row of a board is a card (site.css), so each cell carries the title of its column.
const cards = () => document.querySelectorAll("article table").forEach((table) => {
  const titles = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  if (!titles.includes("Defense and setting")) return;
  table.dataset.cards = "";
  table.querySelectorAll("tbody tr").forEach((row) => [...row.cells].forEach((cell, place) => {
    if (cell.dataset.title) return;
    cell.dataset.title = titles[place];
    if (cell.textContent) cell.innerHTML = `<span>${cell.innerHTML}</span>`; // one box beside the title
  }));
});
cards();
