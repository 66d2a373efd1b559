"use strict";
// Vega-Lite draws the figures when they come into view. Without scripts, in print, and where drawing fails, the page's
// own drawings stand. Expressions are interpreted (ast), so that the page needs no unsafe-eval.
const charts = (() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const theme = () => {
    const ink = color("--ink"), soft = color("--soft"), line = color("--line");
    const axis = { labelColor: soft, titleColor: ink, domainColor: soft, tickColor: soft, gridColor: line };
    return {
      background: null,
      font: "system-ui, sans-serif",
      view: { stroke: null },
      axis: { ...axis, titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 12 },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 11, symbolOpacity: 1 },
      title: { color: ink, fontSize: 13, fontWeight: 600, anchor: "start" },
      style: { "ink-line": { stroke: ink, color: ink }, "ink-point": { stroke: ink, fill: ink } },
      aria: true,
    };
  };

  // Panels of fixed width: as many side by side as fit, narrower where not even one does. Rows are concatenated by hand:
  // a wrapped "concat" comes out with no size in Vega-Lite 6.4.
  const fitted = (spec, room) => {
    if (!spec.hconcat) return spec;
    const { hconcat: panels, ...rest } = spec;
    const axes = 70, panel = Math.min(spec.usermeta.panel, Math.max(150, room - axes));
    const columns = Math.max(1, Math.min(panels.length, Math.floor(room / (panel + axes))));
    const narrow = (part) => {
      if ("width" in part) part.width = panel;
      for (const inner of [...(part.vconcat ?? []), ...(part.layer ?? [])]) narrow(inner);
      for (const { legend } of [part.encoding?.color ?? {}, part.encoding?.strokeDash ?? {}]) {
        if (legend) Object.assign(legend, { columns: Math.min(legend.columns, columns), labelLimit: room - 60 });
      }
    };
    panels.forEach(narrow);
    const rows = [];
    while (panels.length) rows.push({ hconcat: panels.splice(0, columns), resolve: spec.resolve });
    return { ...rest, vconcat: rows };
  };

  const draw = async (figure) => {
    figure.drawing?.finalize();
    let place = figure.querySelector(":scope > .live");
    if (!place) {
      place = document.createElement("div");
      place.className = "live";
      figure.prepend(place);
    }
    const spec = fitted(JSON.parse(figure.querySelector("script").textContent), figure.clientWidth - 26);
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    try {
      figure.classList.add("drawn");
      const options = { ast: true, actions: false, renderer: "svg", config: theme(), tooltip: { theme: dark ? "dark" : "light" } };
      figure.drawing = (await vegaEmbed(place, spec, options)).view;
    } catch (error) {
      figure.classList.remove("drawn");
      place.remove();
      console.error(error);
    }
  };

  const start = () => {
    const figures = [...document.querySelectorAll("figure.chart")];
    const seen = new IntersectionObserver(
      (entries) => {
        for (const { isIntersecting, target } of entries) {
          if (!isIntersecting) continue;
          seen.unobserve(target);
          draw(target);
        }
      },
      { rootMargin: "300px" },
    );
    figures.forEach((figure) => seen.observe(figure));
    const again = () => figures.filter((figure) => figure.drawing).forEach(draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    let width = innerWidth, timer;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(timer);
      timer = setTimeout(again, 150);
    });
  };
  return { start };
})();
