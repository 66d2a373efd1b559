"""Budget and ROC curves as Vega-Lite 6 specifications in JSON, see `charts`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from ppbench.questions.image_metrics import BROKEN_DB
from ppbench.report.page.charts import PALETTE, Spec, color_of, json_of
from ppbench.report.page.curves import Budget, BudgetLine, Curve, RocLine, Rocs

DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
PANEL = 215
"""Pixels that a panel of budget curves is wide, axes left out; the page puts as many side by side as fit."""
ROC = 330
"""The same of a panel of ROC curves."""


def curve_spec(curve: Curve) -> Markup:
    """Return budget or ROC curves as JSON that may stand inside a script element."""
    return json_of(_budget(curve) if isinstance(curve, Budget) else _rocs(curve))


def _lines(names: Sequence[str], legend: Spec) -> Spec:
    """Return the colors of lines, and dashes where there are more lines than colors, in one legend."""
    color = color_of(names, legend, shift=0)
    if len(names) <= len(PALETTE):
        return {"color": color}
    dashes = [DASHES[index // len(PALETTE) % len(DASHES)] for index in range(len(names))]
    scale = {"domain": list(names), "range": dashes}
    return {"color": color, "strokeDash": {"field": "line", "type": "nominal", "scale": scale, "legend": legend}}


def _budget(budget: Budget) -> Spec:
    """Return a panel for each defense setting: the share above 20 dB over the median PSNR, one line an attack."""
    names = sorted({line.attack for _, lines in budget.panels for line in lines})
    every = [line for _, lines in budget.panels for line in lines]
    top = max(25.0, 1.05 * max(max(line.decibels) for line in every))
    domain = [min(line.marks[0] for line in every), max(line.marks[-1] for line in every)]
    encoding = {
        "x": {
            "field": "mark", "type": "quantitative", "title": "gradient evaluations a batch",
            "scale": {"type": "log", "domain": domain, "nice": False}, "axis": {"tickCount": 4, "format": "~s"},
        },
        **_lines(names, {"title": None, "orient": "bottom", "columns": 4}),
        "tooltip": [{"field": f, "title": t} for f, t in (("line", "attack"), ("mark", "evaluations"),
                                                          ("share", "above 20 dB"), ("db", "median PSNR, dB"))],
    }  # fmt: skip
    panels = [_panel(title, lines, encoding, top) for title, lines in budget.panels]
    return {
        "description": f"{budget.title}: share of victims above 20 dB and median PSNR",
        "usermeta": {"panel": PANEL},
        "hconcat": panels,
        "resolve": {"legend": {"color": "shared"}},
    }


def _panel(title: str, lines: Sequence[BudgetLine], encoding: Spec, top: float) -> Spec:
    values = [
        {"line": line.attack, "mark": mark, "share": round(share, 4), "db": round(decibels, 2)}
        for line in lines
        for mark, share, decibels in zip(line.marks, line.share, line.decibels, strict=True)
    ]

    def unit(field: str, about: str, high: float) -> Spec:
        y = {"field": field, "type": "quantitative", "title": about, "scale": {"domain": [0, high], "nice": False}}
        marks: Spec = {"type": "line", "interpolate": "step-after", "point": {"size": 12}, "strokeWidth": 1.6}
        return {"width": PANEL, "height": 110, "mark": marks, "encoding": encoding | {"y": y}}

    decibels = unit("db", "median PSNR, dB", top)
    mark = {
        "data": {"values": [{"db": BROKEN_DB}]},
        "mark": {"type": "rule", "strokeDash": [2, 2], "style": "ink-line"},
        "encoding": {"y": {"field": "db", "type": "quantitative"}},
    }
    low = {key: decibels[key] for key in ("width", "height")} | {
        "layer": [{key: decibels[key] for key in ("mark", "encoding")}, mark]
    }
    return {
        "title": title[:48],
        "data": {"values": values},
        "vconcat": [unit("share", "above 20 dB", 1.03), low],
        "spacing": 6,
    }


def _rocs(rocs: Rocs) -> Spec:
    """Return a panel for average records and one for canaries, on logarithmic scales with chance."""
    panels = [p for p in (("average records", rocs.average), ("canaries", rocs.canaries)) if p[1]]
    return {
        "description": f"{rocs.title}: ROC curves, log scales",
        "usermeta": {"panel": ROC},
        "hconcat": [_roc_panel(title, lines) for title, lines in panels],
        "resolve": {"scale": {"color": "independent"}},
    }


def _roc_panel(title: str, lines: Sequence[RocLine]) -> Spec:
    floor = 0.5 / max(max(line.others, line.members) for line in lines)
    names = [f"{line.name[:70]} (n = {line.members} + {line.others})" for line in lines]
    values = [
        {"line": name, "fpr": fpr, "tpr": tpr}
        for name, line in zip(names, lines, strict=True)
        for fpr, tpr in _corners(line, floor)
    ]

    def rate(field: str, about: str) -> Spec:
        scale = {"type": "log", "domain": [floor, 1], "nice": False}
        return {
            "field": field,
            "type": "quantitative",
            "title": about,
            "scale": scale,
            "axis": {"tickCount": 4, "format": "~g"},
        }

    axes = {"x": rate("fpr", "false-positive rate"), "y": rate("tpr", "true-positive rate")}
    drawn = _lines(names, {"title": None, "orient": "bottom", "columns": 1, "labelLimit": ROC})
    tooltip = [{"field": "line", "title": "row"}, *({"field": f, "format": ".3g"} for f in ("fpr", "tpr"))]
    return {
        "title": title,
        "width": ROC,
        "height": 260,
        "layer": [
            {
                "data": {"values": [{"fpr": floor, "tpr": floor}, {"fpr": 1, "tpr": 1}]},
                "mark": {"type": "line", "strokeDash": [2, 3], "strokeWidth": 1, "style": "ink-line"},
                "encoding": axes,
            },
            {
                "data": {"values": values},
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6, "point": "transparent"},
                "encoding": axes | drawn | {"tooltip": tooltip},
            },
        ],
    }


def _corners(line: RocLine, floor: float) -> list[tuple[float, float]]:
    """Return the points at which the staircase turns, at least `floor` each: the others change nothing of it."""
    shown: list[tuple[float, float]] = []
    for fpr, tpr in zip(line.fpr, line.tpr, strict=True):
        point = (_significant(max(fpr, floor)), _significant(max(tpr, floor)))
        while len(shown) > 1 and (shown[-2][0] == shown[-1][0] == point[0] or shown[-2][1] == shown[-1][1] == point[1]):
            shown.pop()
        shown.append(point)
    return shown


def _significant(value: float) -> float:
    return round(value, 4 - math.floor(math.log10(value))) if value else 0.0
