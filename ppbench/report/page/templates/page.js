"use strict";
// What happens when the page opens: tables are upgraded as they come near, links to cells find their row.
(() => {
  let cells = null;
  const openCells = () => {
    const source = document.querySelector("table.cells");
    if (!cells && source) cells = tables.allCells(source);
    return cells;
  };

  // Far tables are upgraded when one comes near them, so that a long page opens at once.
  const near = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        const source = target.querySelector("table");
        if (source.classList.contains("cells")) openCells();
        else tables.upgrade(source);
      }
    },
    { rootMargin: "600px" },
  );

  const find = async (cell) => {
    const table = openCells();
    document.getElementById("cells").scrollIntoView();
    const go = async () => {
      table.clearFilter(true);
      await table.scrollToRow(cell, "center", true);
      table.getRow(cell)?.getElement().classList.add("found");
    };
    if (table.initialized) await go();
    else table.on("tableBuilt", go);
  };

  const route = () => {
    const target = decodeURIComponent(location.hash.slice(1));
    if (/^c[0-9a-f]{32}$/.test(target)) find(target.slice(1)).catch(() => undefined);
  };

  document.addEventListener("click", (event) => {
    const open = document.querySelectorAll("details.menu[open]");
    for (const menu of open) if (!menu.contains(event.target) || event.target.closest("a")) menu.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
  addEventListener("hashchange", route);
  document.documentElement.classList.add("upgraded");
  document.querySelectorAll(".plain").forEach((plain) => near.observe(plain));
  route();
})();
