"""A defense's part of the page: sentences, its rows over the control grid, reconstructions, claims, costs."""

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
from ppbench.report.page.evaluations import DefenseSentence
from ppbench.report.page.sections import Section
from ppbench.report.page.sprites import Album, ImageArray

ClaimOutcome = Checked | Unchecked
"""The outcome of a claim."""
FULL_GALLERIES = 12
"""How many settings of a defense have all reconstructions shown; of others the boards show the worst case."""


@dataclass(frozen=True)
class Shot:
    """One row of a sprite: an attack's reconstructions, or originals (cell: ""). psnr: median in dB."""

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
class ReconstructionGallery:
    """The reconstructions of one setting. main: of the strongest unaware and aware attack; rest: others."""

    about: str
    name: str
    main: Sprite
    rest: Sprite | None


@dataclass(frozen=True)
class Profile:
    """A defense's part of the page: sentences, its rows on all boards, reconstructions, claims and costs."""

    defense: str
    anchor: str
    sentences: tuple[DefenseSentence, ...]
    rows: tuple[tuple[Section, Entry], ...]
    galleries: tuple[ReconstructionGallery, ...]
    outcomes: tuple[ClaimOutcome, ...]
    costs: tuple[CostRow, ...]

    @property
    def checked(self) -> tuple[Checked, ...]:
        """The claims that were checked."""
        return tuple(o for o in self.outcomes if isinstance(o, Checked))

    @property
    def unchecked(self) -> tuple[Unchecked, ...]:
        """The claims that could not be checked."""
        return tuple(o for o in self.outcomes if isinstance(o, Unchecked))

    def count(self, verdict: str) -> int:
        """Return how many claims have a verdict ("holds", "falls", "inconclusive")."""
        return sum(o.finding.verdict == verdict for o in self.checked)


def anchors(names: Iterable[str]) -> dict[str, str]:
    """Return an HTML id for each name, "defense-NAME"; a number distinguishes equal ones."""
    by_name: dict[str, str] = {}
    for name in sorted(names):
        stem = "defense-" + (re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "x")
        number, anchor = 2, stem
        while anchor in by_name.values():
            number, anchor = number + 1, f"{stem}-{number}"
        by_name[name] = anchor
    return by_name


def profiles(
    sections: Sequence[Section],
    all_sentences: Sequence[DefenseSentence],
    outcomes: Sequence[ClaimOutcome],
    costs: Sequence[CostRow],
    album: Album,
    known: Knowledge,
) -> list[Profile]:
    """Return one part for each defense on the boards, without controls, by name."""
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
            sentences=tuple(s for s in all_sentences if s.defense == name),
            rows=tuple(rows[name]),
            galleries=tuple(islice(_galleries(rows[name], album, known), FULL_GALLERIES)),
            outcomes=tuple(o for o in outcomes if o.defense == name),
            costs=tuple(row for row in costs if row.entry.defense.id == name),
        )
        for name in sorted(rows)
    ]


def _galleries(
    rows: Sequence[tuple[Section, Entry]], album: Album, known: Knowledge
) -> Iterator[ReconstructionGallery]:
    """Yield the reconstructions of the settings that have any."""
    for section, entry in rows:
        if section.question.inputs and modality_of(entry.sample.config).drawn:
            gallery = _gallery(section, entry, album, known)
            if gallery is not None:
                yield gallery


def _gallery(section: Section, entry: Entry, album: Album, known: Knowledge) -> ReconstructionGallery | None:
    complete = [r for r in entry.records if question_for(r).inputs and r.status == "complete"]
    sides = [best([r for r in complete if known.adaptive(r) == knows], "psnr_median") for knows in (False, True)]
    shown = [r for r in sides if r is not None]
    main = _sprite(shown, album, known)
    if main is None:
        return None
    rest = sorted((r for r in complete if r not in shown), key=lambda r: r.config.attack.id)
    return ReconstructionGallery(section.short, entry.name, main, _sprite(rest, album, known))


def _sprite(records: Sequence[Record], album: Album, known: Knowledge) -> Sprite | None:
    """Return a sprite of originals and each record's reconstructions; originals repeat where victims differ."""
    rows: list[ImageArray] = []
    shots: list[Shot] = []
    truth: ImageArray | None = None
    for record in records:
        images = album.of(record)
        if images is None:
            continue
        if truth is None or not np.array_equal(truth, images.truth):
            if rows and images.truth.shape[1:] != rows[0].shape[1:]:
                continue
            truth = images.truth
            rows.append(truth)
            shots.append(Shot("originals", False, None, ""))
        rows.append(images.guess)
        psnr = value(record, "psnr_median")
        shots.append(Shot(record.config.attack.id, known.adaptive(record), psnr, record.cell_id))
    uri = album.sprite(rows) if rows else None
    return None if uri is None else Sprite(uri, tuple(shots))
