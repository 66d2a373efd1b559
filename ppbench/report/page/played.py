"""A figure of how often each client played a role in training, such as FedPC's pilots, who reveal their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import seaborn
from matplotlib.figure import Figure

from ppbench.base.errors import count_of
from ppbench.records.schema import Played, Record
from ppbench.report.frame import RUNS, Key, frame_of

SHOWN_CLIENTS = 30
"""Largest number of clients drawn; those with fewest examples are left out."""


@dataclass(frozen=True)
class RoleCounts:
    """How often each client played a role under a defense: counts by label (a control value, "beta=0.2") and client."""

    title: str
    role: str
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    examples: tuple[int, ...]

    @property
    def label(self) -> str:
        """The text for screen readers."""
        return self.title

    def draw(self) -> Figure:
        """Return the figure: bars by client, most examples first, one color a label."""
        order = sorted(range(len(self.examples)), key=lambda c: (-self.examples[c], c))[:SHOWN_CLIENTS]
        many, width = len(self.labels), 0.8 / len(self.labels)
        figure = Figure(figsize=(5.4, 3.0), layout="constrained")
        axes, palette = figure.subplots(), seaborn.color_palette("colorblind")
        for index, (label, rounds) in enumerate(zip(self.labels, self.counts, strict=True)):
            places, color = [at + (index - (many - 1) / 2) * width for at in range(len(order))], palette[index % 10]
            axes.bar(places, [rounds[c] for c in order], width, color=color, label=label or None)
        axes.set_xticks(range(len(order)), [f"{c}\n({self.examples[c]})" for c in order], fontsize=8)
        axes.set_xlabel("client (its examples)")
        axes.set_ylabel(f"rounds as {self.role}")
        if any(self.labels):
            figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        return figure


def role_counts(records: Sequence[Record]) -> list[RoleCounts]:
    """Return the counts of every training in which clients played roles, without the last role, which is the rest."""
    trainings: dict[Key, dict[str, tuple[Record, Played]]] = {}
    frame = frame_of(records)
    for record in sorted(frame, key=lambda r: r.cell_id):
        if record.played is not None:
            key = frame.key(record)
            label = f"{key.control}={key.value:g}" if key.control else ""
            trainings.setdefault(key.only(RUNS), {}).setdefault(label, (record, record.played))
    return [counted for key in sorted(trainings, key=Key.text) for counted in _counts(trainings[key])]


def _counts(some: dict[str, tuple[Record, Played]]) -> list[RoleCounts]:
    labels = tuple(sorted(some, key=lambda label: float(label.partition("=")[2] or 0)))
    record, first = some[labels[0]]
    fed, about = record.config.federation, f"{record.config.defense.id}, {record.config.data.name}"
    figures = []
    for index, role in enumerate(first.roles[:-1]):
        title = f"{about}, {count_of(fed.clients, 'client')}, {count_of(fed.rounds, 'round')}: rounds as {role}"
        counts = tuple(tuple(some[label][1].rounds[index]) for label in labels)
        figures.append(RoleCounts(title, role, labels, counts, tuple(first.examples)))
    return figures
