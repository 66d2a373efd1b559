"""PPC figures as Vega-Lite 6 specifications in JSON; matplotlib draws the same data for print and for files.

Colors of text and axes are the page's, set where the chart is drawn, so that a dark page has light ones. Names of
defenses and attacks are data and titles, never expressions. Specifications hold their data: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import seaborn
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from ppbench.report.cap_series import PpcPoint
from ppbench.report.page.figures import LABELS, REGIONS, Line, Ppc

Spec = dict[str, Any]
PALETTE: tuple[str, ...] = tuple(seaborn.color_palette("colorblind").as_hex())


def ppc_spec(ppc: Ppc) -> Markup:
    """Return the figure of a privacy-preserving characteristic as JSON that may stand inside a script element.

    x: log10(ratio + 1) where every point's ratio is known, with regions green (ratio < 1), white and red (> 10); else
    the control values, evenly spaced. Accuracy on the left axis, distances on the right, 95 % intervals as bars.
    """
    points = [point for line in ppc.lines for point in line.points]
    known = [place for point in points if (place := point.x()) is not None]
    by_ratio = len(known) == len(points)
    domain = _domain(known) if by_ratio else None
    x = _x(ppc, domain, [f"{value:g}" for value in sorted({point.control for point in points})])
    layers = [*([_regions(domain)] if domain else []), _accuracy(points, ppc, x), _distances(ppc, x)]
    about = f"{ppc.title}: accuracy and distance over {ppc.control}"
    return json_of(
        {
            "description": about,
            "title": ppc.title,
            "width": "container",
            "height": 230,
            "layer": layers,
            "resolve": {"scale": {"y": "independent"}},
        }
    )


def _domain(known: Sequence[float]) -> tuple[float, float]:
    low, high = min(known), max(known)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def _x(ppc: Ppc, domain: tuple[float, float] | None, labels: Sequence[str]) -> Spec:
    if domain is not None:
        scale = {"domain": list(domain), "nice": False, "zero": False}
        title = "log10(r + 1), r = gradient / perturbation"
        return {"field": "x", "type": "quantitative", "title": title, "scale": scale, "axis": {"tickCount": 6}}
    scale = {"type": "point", "padding": 0.4, "domain": list(labels)}
    return {"field": "at", "type": "ordinal", "title": ppc.control[:60], "scale": scale, "axis": {"labelAngle": 0}}


def _regions(domain: tuple[float, float]) -> Spec:
    """Return the colored regions, cut to what is shown."""
    low, high = domain
    values = [
        {"from": max(start, low), "to": min(stop, high), "color": color}
        for color, start, stop in REGIONS
        if color is not None and stop > low and start < high
    ]
    ends = {"field": "from", "type": "quantitative", "scale": {"domain": list(domain)}}
    return {
        "data": {"values": values},
        "mark": {"type": "rect", "opacity": 0.13},
        "encoding": {"x": ends, "x2": {"field": "to"}, "color": {"field": "color", "type": "nominal", "scale": None}},
    }


def _value(point: PpcPoint, value: float, low: float | None, high: float | None) -> Spec:
    told = "none" if low is None or high is None else f"{low:.3f} to {high:.3f}"
    ratio = "not known" if point.ratio is None else f"{point.ratio:.3g}"
    x = point.x()
    ends = {} if low is None or high is None else {"low": low, "high": high}
    return {
        "at": f"{point.control:g}",
        "y": value,
        "interval": told,
        "ratio": ratio,
        **({"x": x} if x else {"x": 0}),
        **ends,
    }


def _tooltip(ppc: Ppc, title: str, attack: bool) -> list[Spec]:
    first = [{"field": "line", "title": "attack"}] if attack else []
    rest = [("at", ppc.control[:60]), ("y", title), ("interval", "95 % interval"), ("ratio", "gradient / perturbation")]
    return first + [
        {"field": name, "title": words, **({"format": ".3f", "type": "quantitative"} if name == "y" else {})}
        for name, words in rest
    ]


def _accuracy(points: Sequence[PpcPoint], ppc: Ppc, x: Spec) -> Spec:
    one_each = {point.control: point for point in reversed(points)}
    shown = sorted(one_each.values(), key=lambda point: point.control)
    values = [_value(p, p.accuracy, p.accuracy_low, p.accuracy_high) for p in shown]
    y = {"type": "quantitative", "title": "accuracy (thick line)", "scale": {"domain": [0, 1.02], "nice": False}}
    tooltip = _tooltip(ppc, "accuracy", attack=False)
    return {
        "data": {"values": values},
        "layer": [
            _whisker({"x": x, "y": y | {"field": "low"}}, {"style": "ink-line"}),
            {
                "mark": {
                    "type": "line",
                    "style": "ink-line",
                    "strokeWidth": 3,
                    "point": {"style": "ink-point", "size": 24},
                },
                "encoding": {"x": x, "y": y | {"field": "y"}, "tooltip": tooltip},
            },
        ],
    }


def _whisker(encoding: Spec, mark: Spec) -> Spec:
    return {
        "transform": [{"filter": "isValid(datum.low)"}],
        "mark": {"type": "rule", "strokeWidth": 1.5} | mark,
        "encoding": encoding | {"y2": {"field": "high"}},
    }


def _distances(ppc: Ppc, x: Spec) -> Spec:
    names = [_label(line) for line in ppc.lines]
    values = [
        {"line": name, "knows": line.adaptive} | _value(p, p.distance.value, p.distance.low, p.distance.high)
        for name, line in zip(names, ppc.lines, strict=True)
        for p in sorted(line.points, key=lambda p: p.control)
    ]
    every = [p.distance for line in ppc.lines for p in line.points]
    top = 1.05 * max([1.0, *(d.value for d in every), *(d.high for d in every if d.high is not None)])
    y = {
        "type": "quantitative",
        "title": LABELS[ppc.distance],
        "scale": {"domain": [0, top], "nice": False},
        "axis": {"orient": "right", "grid": False},
    }
    color = color_of(names, legend={"title": None, "orient": "bottom", "columns": 2, "labelLimit": 190})
    picked = {"condition": {"param": "pick", "value": 1}, "value": 0.12}
    dash = {"field": "knows", "type": "nominal", "legend": None}
    encoding = {"x": x, "y": y | {"field": "y"}, "color": color, "opacity": picked}
    return {
        "data": {"values": values},
        "layer": [
            {
                "params": [{"name": "pick", "select": {"type": "point", "fields": ["line"]}, "bind": "legend"}],
                "mark": {"type": "line", "strokeWidth": 1.8, "point": {"size": 45}},
                "encoding": encoding
                | {
                    "strokeDash": dash | {"scale": {"domain": [True, False], "range": [[1, 0], [5, 3]]}},
                    "tooltip": _tooltip(ppc, LABELS[ppc.distance], attack=True),
                },
            },
            _whisker({"x": x, "y": y | {"field": "low"}, "color": color, "opacity": picked}, {}),
        ],
    }


def _label(line: Line) -> str:
    return f"{line.attack[:60]} ({'adaptive' if line.adaptive else 'plain'})"


def color_of(names: Sequence[str], legend: Spec | None, shift: int = 1) -> Spec:
    """Return the color of lines in the order of `names`; PPC figures begin with the second, as in print."""
    colors = [PALETTE[(index + shift) % len(PALETTE)] for index in range(len(names))]
    return {"field": "line", "type": "nominal", "scale": {"domain": list(names), "range": colors}, "legend": legend}


def json_of(spec: Spec) -> Markup:
    """Return a specification as JSON that may stand inside a script element."""
    return htmlsafe_json_dumps(spec, separators=(",", ":"), allow_nan=False)
