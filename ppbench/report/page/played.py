"""A figure of who played which role how often in training: FedPC's pilots, who reveal their models."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import seaborn
from markupsafe import Markup
from matplotlib.figure import Figure

from ppbench.records.schema import Played, Record
from ppbench.report.frame import RUNS, Key, frame_of
from ppbench.report.page.figures import inline_svg, style

SHOWN = 30
"""Clients drawn; beyond, those with fewest examples are left out."""


@dataclass(frozen=True)
class RoleCounts:
    """How often each client played one role under one defense, by control value.

    Attributes:
        defense, role: of which.
        setting: data set and number of clients, in words.
        labels: control values, as "beta=0.2"; "" without one.
        counts: rounds by label and client.
        examples: by client.
    """

    defense: str
    role: str
    setting: str
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    examples: tuple[int, ...]

    @property
    def title(self) -> str:
        """What the figure shows, in words."""
        return f"{self.defense}, {self.setting}: rounds as {self.role}"


def role_counts(records: Sequence[Record]) -> list[RoleCounts]:
    """Return the counts of every training in `records` in which clients played roles, but for the last role.

    Roles share the rounds, so the last is what is left.
    """
    found: dict[Key, dict[str, tuple[Record, Played]]] = {}
    frame = frame_of(records)
    for record in sorted((r for r in frame if r.played is not None), key=lambda r: r.cell_id):
        key = frame.key(record)
        label = f"{key.control}={key.value:g}" if key.control else ""
        assert record.played is not None
        found.setdefault(key.only(RUNS), {}).setdefault(label, (record, record.played))
    return [counted for key in sorted(found, key=Key.text) for counted in _counts(found[key])]


def _counts(some: dict[str, tuple[Record, Played]]) -> list[RoleCounts]:
    labels = sorted(some, key=lambda label: float(label.partition("=")[2] or 0))
    record, first = some[labels[0]]
    config = record.config
    setting = f"{config.data.name}, {config.federation.clients} clients, {config.federation.rounds} rounds"
    rounds = [tuple(tuple(some[label][1].rounds[i]) for label in labels) for i in range(len(first.roles) - 1)]
    return [
        RoleCounts(config.defense.id, role, setting, tuple(labels), counts, tuple(first.examples))
        for role, counts in zip(first.roles, rounds, strict=False)
    ]


def played_svg(counted: RoleCounts) -> Markup:
    """Return the figure as SVG for pasting into HTML: bars by client, most examples first, one color a label."""
    order = sorted(range(len(counted.examples)), key=lambda c: (-counted.examples[c], c))[:SHOWN]
    width = 0.8 / len(counted.labels)
    with matplotlib.rc_context(style() | {"svg.hashsalt": f"ppbench {counted}"}):
        figure = Figure(figsize=(5.4, 3.0), layout="constrained")
        axes = figure.subplots()
        palette = seaborn.color_palette("colorblind")
        for index, (label, rounds) in enumerate(zip(counted.labels, counted.counts, strict=True)):
            places = [place + (index - (len(counted.labels) - 1) / 2) * width for place in range(len(order))]
            axes.bar(
                places, [rounds[c] for c in order], width, color=palette[index % len(palette)], label=label or None
            )
        axes.set_xticks(range(len(order)), [f"{c}\n({counted.examples[c]})" for c in order], fontsize=8)
        axes.set_xlabel("client (its examples)")
        axes.set_ylabel(f"rounds as {counted.role}")
        if any(counted.labels):
            figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return Markup(inline_svg(buffer.getvalue(), counted.title))
