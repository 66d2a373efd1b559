"""`ppbench.plot`: figures of the table of `ppbench.load(folder, level="worst")`, for notebooks and papers.

They are drawn in the style of the page (`report.page.figures`), on given axes or on new ones of pyplot, and show one
board at a time: rows of two boards may not be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import matplotlib
import numpy as np
import pandas
import seaborn
from matplotlib import pyplot
from matplotlib.axes import Axes
from numpy.typing import NDArray

from ppbench.base.errors import UsageError
from ppbench.report.columns import KEY, LOADED_WORST, unit_of
from ppbench.report.controls import CONTROLS
from ppbench.report.frame import BOARD
from ppbench.report.page.figures import INK, MARKERS, STYLE

_SHARED: Final = [
    column.name for column in KEY if column.name == "kind" or column.path.removeprefix("key.").split(".")[0] in BOARD
]
_ASKED: Final = ["kind", "threat_model", "stage", "batch_size"]


def accuracy_leakage(frame: pandas.DataFrame, metric: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw each setting's worst case over its accuracy; the best corner is below right.

    Each defense has a color, each setting a mark with both 95 % intervals and its control value; a line joins settings
    that differ only in that. The controls are black, chance is dotted.

    frame: of one board, from `load(folder, level="worst")`; metric: by default the one that the board is ranked by.
    Raises UsageError for another table, several boards, or no setting with both figures.
    """
    rows, about = _chosen(frame, metric)
    rows = rows[(rows["case"] == "worst") & rows["accuracy"].notna() & rows["value"].notna()]
    if rows.empty:
        raise UsageError(f"No row of the table has both an accuracy and the metric {about!r}; choose another metric.")
    axes = _axes(4.2) if ax is None else ax
    with matplotlib.rc_context(STYLE):
        looks = _looks(rows["defense"])
        for name, some in _series(rows):
            label: dict[str, Any] = {"label": name} if name not in axes.get_legend_handles_labels()[1] else {}
            ends: dict[str, Any] = {"xerr": _ends(some, "accuracy", "accuracy_"), "yerr": _ends(some, "value", "")}
            axes.errorbar(some["accuracy"], some["value"], **ends, **looks[name], **label, linestyle=":", linewidth=0.8)
            for x, y, value in some[["accuracy", "value", "control_value"]].itertuples(index=False):
                if not np.isnan(value):
                    axes.annotate(f"{value:g}", (x, y), (5, 4), textcoords="offset points", fontsize="small")
        _chance(rows, axes.axhline)
        axes.set(xlabel="accuracy", ylabel=_title(about, rows), title=_where(rows))
        if rows["higher_is_safer"].all():
            axes.invert_yaxis()
        axes.legend(title="defense", fontsize="small")
    return axes


def worst_case(frame: pandas.DataFrame, metric: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw each setting's worst case with its 95 % interval, the least leaking above.

    Filled: over all attacks; hollow: over unaware ones; chance is dotted. frame, metric, errors: as in
    `accuracy_leakage`.
    """
    rows, about = _chosen(frame, metric)
    rows = rows[rows["value"].notna()]
    if rows.empty:
        raise UsageError(f"No row of the table has the metric {about!r}; choose another metric.")
    safer = bool(rows["higher_is_safer"].all())
    worst = rows[rows["case"] == "worst"].sort_values(["value", "row"], ascending=[safer, True])
    places = {row: place for place, row in enumerate(worst["row"])}
    axes = _axes(1.2 + 0.24 * len(places)) if ax is None else ax
    with matplotlib.rc_context(STYLE):
        for name, look in _looks(worst["defense"]).items():
            for case, fill in (("plain", "none"), ("worst", look["color"])):
                some = rows[(rows["defense"] == name) & (rows["case"] == case)]
                ends: dict[str, Any] = {"xerr": _ends(some, "value", "")} if case == "worst" else {}
                at = [places[row] for row in some["row"]]
                axes.errorbar(some["value"], at, **ends, **look, linestyle="none", markerfacecolor=fill)
        _chance(rows, axes.axvline)
        axes.set_yticks([*places.values()], [*places])
        axes.set(xlabel=_title(about, rows), title=_where(rows))
        if safer:
            axes.invert_xaxis()
    return axes


def _chosen(frame: pandas.DataFrame, metric: str | None) -> tuple[pandas.DataFrame, str]:
    """Return the rows of a metric, missing numbers as NaN, and its name. UsageError: see `accuracy_leakage`."""
    needed = [column.name for column in LOADED_WORST]
    if lacking := [name for name in needed if name not in frame]:
        raise UsageError(f"The table has no column {lacking[0]!r}; give one of ppbench.load(folder, level='worst').")
    values = {name: frame[name].drop_duplicates().dropna().tolist() for name in _SHARED}
    several = [name for name in _SHARED if len(values[name]) > 1]
    if several:
        first = f"frame[frame[{several[0]!r}] == {values[several[0]][0]!r}]"
        raise UsageError(f"The table holds several boards, which differ in {', '.join(several)}; choose, as {first}.")
    ranked = frame.loc[frame["headline"].fillna(False), "metric"]
    if metric is None and ranked.empty:
        raise UsageError("No row of the table has the figure that its board is ranked by; name a metric.")
    about = str(ranked.iloc[0]) if metric is None else metric
    rows = frame[frame["metric"].eq(about).fillna(False)].copy()
    for name in ("accuracy", "accuracy_low", "accuracy_high", "value", "low", "high", "chance", "control_value"):
        rows[name] = rows[name].to_numpy(dtype=np.float64, na_value=np.nan)
    return rows, about


def _series(rows: pandas.DataFrame) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Yield each defense with its settings that differ only in the control value, in order of that."""
    others = []
    for text, control in zip(rows["parameters"], rows["control"], strict=True):
        others.append(json.dumps({name: value for name, value in json.loads(text).items() if name != control}))
    shared = ["defense", "role", "seed", "federation", "defense_version", "others"]
    for (name, *_), some in rows.assign(others=others).groupby(shared):
        yield str(name), some.sort_values("control_value")


def _axes(height: float) -> Axes:
    """Return new axes, `height` inches high."""
    # Outside of the context, which would reset the settings of the backend that pyplot starts here.
    figure = pyplot.figure(figsize=(6.0, height), layout="constrained", facecolor="white")
    with matplotlib.rc_context(STYLE):
        return figure.add_subplot()


def _looks(defenses: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return color and marker of each defense, by name, equal in all figures of one table; controls are black."""
    names = sorted(set(defenses))
    colors = seaborn.color_palette("colorblind").as_hex()
    return {
        name: {
            "color": INK if name in CONTROLS else colors[place % len(colors)],
            "marker": MARKERS[place % len(MARKERS)],
        }
        for place, name in enumerate(names)
    }


def _ends(rows: pandas.DataFrame, name: str, prefix: str) -> NDArray[np.float64]:
    """Return how far an interval reaches below and above the figure `name` [2, rows]; NaN without one."""
    ends = np.stack([rows[name] - rows[f"{prefix}low"], rows[f"{prefix}high"] - rows[name]])
    return np.abs(ends.astype(np.float64))


def _chance(rows: pandas.DataFrame, line: Callable[..., object]) -> None:
    """Draw the level of chance, if the board has a single one."""
    chance = rows["chance"].dropna().unique()
    if len(chance) == 1:
        line(float(chance[0]), color=INK, linewidth=0.8, linestyle=":")


def _title(metric: str, rows: pandas.DataFrame) -> str:
    unit = unit_of(metric)
    safer = "\nlower leaks more: axis reversed" if rows["higher_is_safer"].all() else ""
    return f"{metric} ({unit}){safer}" if unit else f"{metric}{safer}"


def _where(rows: pandas.DataFrame) -> str:
    """Return the board in words, in two lines."""
    data, network, kind, threat, stage, batch = rows[["dataset", "model", *_ASKED]].iloc[0]
    return f"{data}, {network}\n{kind}, {threat}, {stage}, batch {batch}"
