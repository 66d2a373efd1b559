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
    document.querySelector("#cells details").open = true;
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
    const target = tables.place();
    const board = boards.find((one) => one.id === target);
    if (board) {
      show(board);
      board.scrollIntoView();
    }
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
  // One board at a time, chosen by what it is about; its address stays in the URL. Print shows all.
  const boards = [...document.querySelectorAll("section.board")], box = document.getElementById("boards");
  const traits = { group: "Task", question: "Question", threat: "Adversary", weights: "Model", batch: "Batch" };
  const chosen = {};
  const show = (board) => {
    for (const name of Object.keys(chosen)) chosen[name].value = board.dataset[name];
    for (const one of boards) one.classList.toggle("other", one !== board);
  };
  const nearest = (changed) => {
    const score = (board) =>
      Object.keys(chosen).reduce((sum, name) => sum + (board.dataset[name] === chosen[name].value ? (name === changed ? 99 : 1) : 0), 0);
    return boards.reduce((best, board) => (score(board) > score(best) ? board : best));
  };
  if (box && boards.length > 1) {
    for (const [name, title] of Object.entries(traits)) {
      const values = [...new Set(boards.map((board) => board.dataset[name]))];
      if (values.length < 2) continue;
      const label = document.createElement("label"), select = document.createElement("select");
      for (const value of values) select.append(new Option(value || "none", value));
      select.addEventListener("change", () => {
        const board = nearest(name);
        show(board);
        tables.address(board.id);
      });
      chosen[name] = select;
      label.append(`${title} `, select);
      box.append(label);
    }
    box.hidden = false;
    show(boards[0]);
  }

  const dialog = document.querySelector("dialog.zoomed");
  for (const image of document.querySelectorAll("img.zoom, img.strip, .sprite img")) {
    const enlarge = () => {
      const large = dialog.querySelector("img");
      large.src = image.src;
      large.alt = image.alt;
      dialog.showModal();
    };
    image.tabIndex = 0;
    image.setAttribute("role", "button");
    image.addEventListener("click", enlarge);
    image.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      enlarge();
    });
  }
  // A row opens: its pictures, and of each cell what leaderboard.csv says, with the file of its record.
  const panel = document.querySelector("dialog.opened");
  const line = (kind, words) => {
    const row = document.createElement("tr");
    for (const word of words) row.append(Object.assign(document.createElement(kind), { textContent: word ?? "" }));
    return row;
  };
  const openRow = (button) => {
    const { columns, rows } = JSON.parse(document.getElementById("cell-data").textContent);
    const wanted = new Set(button.dataset.cells.split(" ")), last = columns.length - 1;
    const some = rows.filter((row) => wanted.has(row[last]));
    const told = columns.map((_, index) => index).filter((index) => some.some((row) => row[index] !== null && row[index] !== ""));
    panel.querySelector("h3").textContent = button.dataset.about;
    const picture = button.closest("tr, .tabulator-row").querySelector("img.strip"), image = panel.querySelector("img");
    image.hidden = !picture;
    if (picture) Object.assign(image, { src: picture.src, alt: picture.alt });
    const shown = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : value);
    panel.querySelector("table").replaceChildren(
      line("th", [...told.map((index) => columns[index].title), "Record"]),
      ...some.map((row) => line("td", [...told.map((index) => shown(row[index])), `records/${row[last]}.json`])),
    );
    panel.showModal();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.open");
    if (button) openRow(button);
  });
  document.querySelectorAll("button.open").forEach((button) => (button.hidden = false));
  panel.querySelector("button").addEventListener("click", () => panel.close());

  dialog.querySelector("button").addEventListener("click", () => dialog.close());

  for (const button of document.querySelectorAll("button.copy:not(.open)")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", () =>
      navigator.clipboard.writeText(button.parentElement.querySelector(".command").textContent).then(() => (button.textContent = "Copied"), () => undefined),
    );
  }

  // Settings that lose more accuracy than the reader accepts are folded: none before he says how much, for they may leak.
  for (const limit of document.querySelectorAll(".limit")) {
    const input = limit.querySelector("input"), told = document.querySelector("output.folded");
    const fold = () => {
      const most = input.value === "" ? Infinity : Number(input.value);
      const rows = [...document.querySelectorAll("table.glance tr[data-loss]")].filter((row) => row.dataset.loss !== "");
      for (const row of rows) row.classList.toggle("beyond", Number(row.dataset.loss) > most + 1e-9);
      const hidden = rows.filter((row) => row.classList.contains("beyond")).length;
      told.textContent = hidden ? `${hidden} folded` : "";
    };
    limit.hidden = !document.querySelector('table.glance tr[data-loss]:not([data-loss=""])');
    input.addEventListener("input", fold);
  }
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("main details:not([open])")];
    for (const one of folded) one.open = true;
  });
  addEventListener("afterprint", () => folded.splice(0).forEach((one) => (one.open = false)));

  addEventListener("hashchange", route);
  document.documentElement.classList.add("upgraded");
  document.querySelectorAll(".plain").forEach((plain) => near.observe(plain));
  route();
})();
