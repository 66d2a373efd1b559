"use strict";
// Tabulator upgrades the plain tables: sorting, a filter in each head, first columns that stay. Cells are made of the
// plain table's own nodes or of text, never of strings read as HTML. The plain tables stay for print.
const tables = (() => {
  const MANY = 60; // rows from which on only those in view are drawn
  const FEW = 10; // the same in a defense's part of the page
  const SHORT = 8; // rows below which nobody needs a filter
  const narrow = () => innerWidth < 700;

  // What is looked at stays in the address, behind the place: "#b1&f={...}", as a file may change nothing else of it.
  const place_ = () => decodeURIComponent(location.hash.slice(1).split("&f=")[0]);
  const read = () => {
    try {
      return JSON.parse(decodeURIComponent(location.hash.split("&f=")[1] ?? "{}")) ?? {};
    } catch {
      return {}; // an address that somebody cut short: nothing is filtered
    }
  };
  const filters = read();
  const address = (place) => {
    const kept = Object.keys(filters).length ? `&f=${encodeURIComponent(JSON.stringify(filters))}` : "";
    history.replaceState(null, "", `#${place}${kept}`);
  };

  // "12" is looked for as text; "<3", ">= 0.5" and "10..20" compare figures.
  const passes = (wanted, text, value) => {
    const word = wanted.trim().toLowerCase();
    if (!word) return true;
    const compare = /^(<=|>=|<|>|=)\s*(-?[\d.]+(?:e-?\d+)?)$/.exec(word);
    const range = /^(-?[\d.]+)\s*\.\.\s*(-?[\d.]+)$/.exec(word);
    if (typeof value !== "number" && (compare || range)) return false;
    if (compare) {
      const limit = Number(compare[2]);
      return { "<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit, "=": value === limit }[compare[1]];
    }
    if (range) return value >= Number(range[1]) && value <= Number(range[2]);
    return word.split(/\s+/).every((part) => text.toLowerCase().includes(part));
  };

  const sorter = (a, b, _rowA, _rowB, _column, direction) => {
    if (a === null || b === null) return (a === null) === (b === null) ? 0 : ((a === null) === (direction === "asc") ? 1 : -1);
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  };

  // Short titles break at their spaces: figures are narrower than what they are called.
  const titled = (title) => () => {
    const button = document.createElement("button"), words = title.split(" ");
    button.type = "button";
    const half = title.length > 9 && words.length > 1 ? Math.ceil(words.length / 2) : words.length;
    button.append(words.slice(0, half).join(" "));
    if (half < words.length) button.append(document.createElement("br"), words.slice(half).join(" "));
    return button;
  };

  const column = (title, field, more) => ({
    title, field, sorter, headerWordWrap: true, titleFormatter: titled(title), headerFilter: "input", minWidth: 64,
    headerFilterParams: { elementAttributes: { "aria-label": `Filter ${title}` } },
    ...more,
  });

  const options = (rows, within = MANY) => ({
    layout: "fitDataFill",
    ...(rows > within ? { height: within < MANY ? "min(60vh, 620px)" : "min(78vh, 900px)" } : { renderVertical: "basic" }),
    columnHeaderSortMulti: true,
    headerSortClickElement: "header",
    headerFilterLiveFilterDelay: 120,
    placeholder: "No row passes the filters.",
  });

  const place = (plain, name) => {
    const tools = document.createElement("div"), box = document.createElement("div");
    tools.className = "tools";
    const search = document.createElement("input");
    search.type = "search";
    search.placeholder = "Filter rows";
    search.setAttribute("aria-label", `Filter rows: ${name}`);
    const count = document.createElement("output");
    tools.append(search, count);
    box.className = "upgraded-table";
    plain.before(tools, box);
    return { box, search, count };
  };

  const finish = (table, plain, { search, count }, total, text) => {
    const name = plain.getAttribute("aria-label");
    const known = filters[name] ?? {};
    const keep = () => {
      const own = Object.fromEntries(table.getHeaderFilters().map((one) => [one.field, String(one.value)]));
      if (search.value) own[""] = search.value;
      if (Object.keys(own).length) filters[name] = own;
      else delete filters[name];
      address(place_());
    };
    const whole = () => table.setFilter((data) => passes(search.value, text(data), null));
    search.addEventListener("input", whole);
    const tell = (rows) => (count.textContent = rows === total ? `${total} rows` : `${rows} of ${total} rows`);
    table.on("dataFiltered", (_filters, rows) => tell(rows.length));
    table.on("tableBuilt", () => {
      plain.classList.add("replaced");
      // Tabulator's groups of columns have a role and attributes that ARIA does not know.
      for (const group of table.element.querySelectorAll('[role="columngroup"]'))
        for (const name of ["role", "aria-sort", "aria-title"]) group.removeAttribute(name);
      table.element.querySelector(".tabulator-tableholder")?.setAttribute("role", "rowgroup");
      table.element.querySelector(".tabulator-table")?.setAttribute("role", "presentation");
      tell(total);
      for (const [field, value] of Object.entries(known)) {
        if (field && table.getColumn(field)) table.setHeaderFilterValue(field, String(value));
        else if (!field) {
          search.value = String(value);
          whole();
        }
      }
      table.on("dataFiltered", keep);
    });
    return table;
  };

  const heads = (source) => {
    const leaves = [...source.tHead.rows[source.tHead.rows.length - 1].cells];
    const groups = source.tHead.rows.length > 1 ? [...source.tHead.rows[0].cells] : [];
    return { leaves, groups };
  };

  // The columns of a plain table, grouped as its head groups them; what stands up to the key column stays in place.
  const columns = (source) => {
    const { leaves, groups } = heads(source);
    const key = leaves.findIndex((head) => head.classList.contains("key"));
    const made = leaves.map((head, index) =>
      column(head.textContent.trim(), `c${index}`, {
        frozen: index <= key && !narrow(),
        variableHeight: true,
        headerSort: "col" in head.dataset,
        visible: [...source.tBodies[0].rows].some((row) => row.cells[index]?.childNodes.length),
        headerFilter: "col" in head.dataset && source.tBodies[0].rows.length >= SHORT ? "input" : false,
        formatter: (cell) => copied(cell.getData().row.cells[index]),
        headerFilterFunc: (wanted, value, data) => passes(wanted, data.row.cells[index].textContent, asShown(data.row.cells[index], value)),
        cssClass: [head.classList.contains("first") ? "first" : "", head.classList.contains("key") ? "key" : ""].join(" ").trim(),
        ...(index === key ? { minWidth: narrow() ? 120 : 150, maxWidth: source.closest(".board") ? 185 : 300 } : { maxWidth: 420 }),
      }),
    );
    if (!groups.length) return made;
    const grouped = [];
    let at = 0;
    for (const head of groups) {
      const some = made.slice(at, (at += head.colSpan));
      if (head.textContent.trim()) grouped.push({ title: head.textContent.trim(), columns: some });
      else grouped.push(...some);
    }
    return grouped;
  };

  const copied = (cell) => {
    const box = document.createElement("div");
    if (!cell) return box;
    box.className = cell.className;
    box.append(...[...cell.childNodes].map((node) => node.cloneNode(true)));
    return box;
  };

  const value = (cell) => {
    if (!("v" in cell.dataset)) return cell.textContent.trim();
    return cell.dataset.v === "" ? null : Number(cell.dataset.v);
  };

  // Filters take figures as they are shown: 96.7 where the cell says "96.7 %".
  const asShown = (cell, found) => (typeof found === "number" && /^-?[\d.]+ %/.test(cell.textContent.trim()) ? 100 * found : found);

  const upgrade = (source) => {
    const plain = source.parentElement, rows = [...source.tBodies[0].rows];
    const data = rows.map((row) => {
      const found = { row, text: row.textContent };
      [...row.cells].forEach((cell, index) => (found[`c${index}`] = value(cell)));
      return found;
    });
    const parts = place(plain, source.dataset.name);
    parts.search.hidden = rows.length < SHORT;
    const table = new Tabulator(parts.box, {
      ...options(rows.length, source.closest(".defense") ? FEW : MANY),
      data,
      columns: columns(source),
      rowFormatter: (row) => row.getElement().classList.toggle("control", row.getData().row.classList.contains("control")),
    });
    return finish(table, plain, parts, rows.length, (found) => found.text);
  };

  const shown = (value, { digits }) => {
    if (value === null || typeof value === "string") return value ?? "";
    return digits < 0 ? String(value) : Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toFixed(digits);
  };

  const allCells = (source) => {
    const { columns: heads, rows } = JSON.parse(document.getElementById("cell-data").textContent);
    const last = heads.length - 1, plain = source.parentElement, parts = place(plain, "All cells");
    const first = heads.findIndex((head) => head.title === "Defense");
    const text = (data) => heads.map((head, index) => shown(data[`c${index}`], head)).join(" ");
    const made = heads.map((head, index) =>
      column(head.title, `c${index}`, {
        frozen: index <= first && !narrow(),
        formatter: (cell) => {
          const box = document.createElement(head.kind === "cell" ? "code" : "span");
          box.textContent = head.kind === "cell" ? cell.getValue().slice(0, 8) : shown(cell.getValue(), head);
          if (typeof cell.getValue() === "string") box.title = cell.getValue();
          return box;
        },
        headerFilterFunc: (wanted, value) => passes(wanted, shown(value, head), value),
        maxWidth: 260,
      }),
    );
    const data = rows.map((row) => Object.fromEntries([["id", row[last]], ...row.map((v, index) => [`c${index}`, v])]));
    const table = new Tabulator(parts.box, { ...options(MANY + 1), data, columns: made });
    return finish(table, plain, parts, rows.length, text);
  };

  return { upgrade, allCells, address, place: place_ };
})();
