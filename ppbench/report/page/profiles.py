"""A defense's part of the page: what was found, its rows over the control grid, reconstructions, claims, costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ppbench.metrics.modalities import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.claims import Checked, Unchecked
from ppbench.report.controls import value
from ppbench.report.knowing import Knowledge
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import Entry
from ppbench.report.page.evaluations import Said
from ppbench.report.page.sections import Section
from ppbench.report.page.sprites import Album, Floats

Outcome = Checked | Unchecked
"""What became of a claim."""
FIRST = 12
"""Settings of a defense whose reconstructions are shown in full; of the others the boards show the worst case."""


@dataclass(frozen=True)
class Shot:
    """One row of a sprite: an attack's reconstructions, or the originals. cell: "" for these; psnr: median in dB."""

    name: str
    knows: bool
    psnr: float | None
    cell: str


@dataclass(frozen=True)
class Sprite:
    """Rows of images in one PNG, as a data URI."""

    uri: str
    shots: tuple[Shot, ...]


@dataclass(frozen=True)
class Gallery:
    """What attacks made of one setting. main: the strongest plain one and the strongest that knows; rest: others."""

    about: str
    name: str
    main: Sprite
    rest: Sprite | None


@dataclass(frozen=True)
class Profile:
    """A defense's part of the page: what was found, its rows on all boards, reconstructions, claims and costs."""

    defense: str
    anchor: str
    sentences: tuple[Said, ...]
    rows: tuple[tuple[Section, Entry], ...]
    galleries: tuple[Gallery, ...]
    outcomes: tuple[Outcome, ...]
    costs: tuple[CostRow, ...]

    @property
    def checked(self) -> tuple[Checked, ...]:
        """The claims that the records say something about."""
        return tuple(o for o in self.outcomes if isinstance(o, Checked))

    @property
    def unchecked(self) -> tuple[Unchecked, ...]:
        """The claims that they say nothing about."""
        return tuple(o for o in self.outcomes if isinstance(o, Unchecked))

    def count(self, verdict: str) -> int:
        """Return how many claims have a verdict ("holds", "falls", "cannot be told")."""
        return sum(o.finding.verdict == verdict for o in self.checked)


def anchors(names: Iterable[str]) -> dict[str, str]:
    """Return an id for each name, "defense-NAME", that addresses take; a number tells look-alikes apart."""
    found: dict[str, str] = {}
    for name in sorted(names):
        stem = "defense-" + (re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "x")
        number, anchor = 2, stem
        while anchor in found.values():
            number, anchor = number + 1, f"{stem}-{number}"
        found[name] = anchor
    return found


def profiles(
    sections: Sequence[Section],
    said: Sequence[Said],
    outcomes: Sequence[Outcome],
    costs: Sequence[CostRow],
    album: Album,
    known: Knowledge,
) -> list[Profile]:
    """Return one part for each defense on the boards but the controls, by name."""
    rows: dict[str, list[tuple[Section, Entry]]] = {}
    for section in sections:
        for entry in sorted(section.board.entries, key=lambda e: (e.differs, e.key.value or 0.0)):
            if entry.role == "compared":
                rows.setdefault(entry.defense.id, []).append((section, entry))
    places = anchors(rows)
    return [
        Profile(
            defense=name,
            anchor=places[name],
            sentences=tuple(s for s in said if s.defense == name),
            rows=tuple(rows[name]),
            galleries=tuple(islice(_galleries(rows[name], album, known), FIRST)),
            outcomes=tuple(o for o in outcomes if o.defense == name),
            costs=tuple(row for row in costs if row.entry.defense.id == name),
        )
        for name in sorted(rows)
    ]


def _galleries(rows: Sequence[tuple[Section, Entry]], album: Album, known: Knowledge) -> Iterator[Gallery]:
    """Yield the reconstructions of the settings that have any."""
    for section, entry in rows:
        if section.question.inputs and modality_of(entry.sample.config).drawn:
            found = _gallery(section, entry, album, known)
            if found is not None:
                yield found


def _gallery(section: Section, entry: Entry, album: Album, known: Knowledge) -> Gallery | None:
    told = [r for r in entry.records if question_for(r).inputs and r.status == "complete"]
    sides = [best([r for r in told if known.adaptive(r) == knows], "psnr_median") for knows in (False, True)]
    shown = [r for r in sides if r is not None]
    main = _sprite(shown, album, known)
    if main is None:
        return None
    rest = sorted((r for r in told if r not in shown), key=lambda r: r.config.attack.id)
    return Gallery(section.short, entry.name, main, _sprite(rest, album, known))


def _sprite(records: Sequence[Record], album: Album, known: Knowledge) -> Sprite | None:
    """Return the originals above each record's reconstructions; above its own where it asked about other victims."""
    rows: list[Floats] = []
    shots: list[Shot] = []
    truth: Floats | None = None
    for record in records:
        found = album.of(record)
        if found is None:
            continue
        if truth is None or not np.array_equal(truth, found.truth):
            if rows and found.truth.shape[1:] != rows[0].shape[1:]:
                continue
            truth = found.truth
            rows.append(truth)
            shots.append(Shot("originals", False, None, ""))
        rows.append(found.guess)
        psnr = value(record, "psnr_median")
        shots.append(Shot(record.config.attack.id, known.adaptive(record), psnr, record.cell_id))
    uri = album.sprite(rows) if rows else None
    return None if uri is None else Sprite(uri, tuple(shots))
