"""The strip of pictures at the head of a page: originals, what attackers made of them, and a blind guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.metrics.modalities import modality_of
from ppbench.records.schema import Record
from ppbench.report.leak import Leak
from ppbench.report.page.overview import Overview
from ppbench.report.page.sprites import Album, Floats
from ppbench.report.page.standing import Standing
from ppbench.report.verdict.lines import decibels
from ppbench.report.worst import WorstCase, attack_of

MOST = 8
"""Defenses whose pictures stand at the head of a page, with the undefended."""
TILE, COUNT = 64, 8
"""Pixels a side of an image, at least, and how many there are: the first victims of the list, not the best."""


@dataclass(frozen=True)
class Line:
    """One row of the strip. words: what it is; figure: its median PSNR with interval, or "" for none."""

    words: str
    figure: str


@dataclass(frozen=True)
class Strip:
    """The pictures of one setting. setting: in words; uri: all rows in one PNG; lines: what each is."""

    setting: str
    uri: str
    lines: tuple[Line, ...]


def strips_of(table: Overview, album: Album) -> list[Strip]:
    """Return the pictures of an evaluation: of its one defense by attacker, of several a line each, or none."""
    rows = [row for row in table.rows if row.value.leak is not None]
    compared = [row.value for row in rows if row.value.entry.role == "compared"]
    if len(compared) == 1:
        words = ", ".join(word for word in (compared[0].entry.control, table.scene) if word)
        found = strip_of(compared[0].entry.defense.id, words, compared[0].leak, album)
    else:
        found = _compared(table.scene, rows, album)
    return [] if found is None else [found]


def _compared(setting: str, rows: Sequence[Standing], album: Album) -> Strip | None:
    """Return the originals above what the worst case made of them under each defense that has the same victims."""
    pictures: list[Floats] = []
    lines: list[Line] = []
    for row in rows[:MOST]:
        worst = row.value.worst
        found = None if worst is None or not modality_of(worst.config).drawn else _pictures(worst, album)
        if found is None or worst is None or (pictures and not np.array_equal(pictures[0], found[0])):
            continue
        if not pictures:
            pictures, lines = [found[0]], [Line("original", "")]
        name = row.value.entry.defense.id
        words = f"{name} {row.value.entry.control.replace(' = ', '=')}".strip()
        pictures.append(found[1])
        lines.append(Line(f"{'undefended' if name == 'none' else words} ({attack_of(worst)})", decibels(worst)))
    uri = album.sprite(pictures, TILE) if len(pictures) > 1 else None
    return None if uri is None else Strip(setting, uri, tuple(lines))


def strip_of(name: str, setting: str, leak: Leak | None, album: Album) -> Strip | None:
    """Return the pictures of a setting of the defense `name`; None without images, or without place for them."""
    if leak is None or leak.worst is None or not modality_of(leak.worst.config).drawn:
        return None
    whole = _pictures(leak.worst, album)
    if whole is None:
        return None
    truth, best, blind = whole
    rows, lines = [truth], [Line("original", "")]
    sides = [(f"attacker unaware of {name}", leak.unaware.worst)]
    sides += [(f"attacker aware of {name}", leak.worst)] if leak.worst.knows or leak.unaware.worst is None else []
    for who, case in sides:
        found = None if case is None else _pictures(case, album)
        if found is not None:
            rows.append(found[1] if case is not leak.worst else best)
            lines.append(Line(f"{who} ({attack_of(case)})", decibels(case)))
    if blind is not None:
        rows.append(np.repeat(blind, len(truth), axis=0))
        lines.append(Line("blind guess", "" if leak.blind is None else f"{leak.blind:.1f} dB"))
    uri = album.sprite(rows, TILE)
    return None if uri is None else Strip(setting, uri, tuple(lines))


def _pictures(case: WorstCase, album: Album) -> tuple[Floats, Floats, Floats | None] | None:
    """Return the first originals, what the attack that is best on each made of it, [n, C, H, W], and a blind guess."""
    truth: list[Floats] = []
    guess: list[Floats] = []
    blind: Floats | None = None
    winners: Sequence[Record] = case.winners or [case.leading] * len(case.victims)
    for score, record in list(zip(case.victims, winners, strict=True))[:COUNT]:
        images = album.of(record)
        if images is None:
            return None
        place = [victim.place for victim in record.victims].index(score.place)
        if place >= len(images.truth):  # a file of fewer images than the record has victims: it may come from anyone
            break
        truth.append(images.truth[place])
        guess.append(images.guess[place])
        blind = images.blind if blind is None else blind
    return (np.stack(truth), np.stack(guess), blind) if truth else None
