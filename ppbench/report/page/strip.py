"""The strip of pictures at the head of a page: originals, reconstructions, and a blind guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.metrics.modalities import modality_of
from ppbench.records.schema import Record
from ppbench.report.leak import Leak
from ppbench.report.page.overview import Overview
from ppbench.report.page.sprites import Album, ImageArray
from ppbench.report.page.standing import Standing
from ppbench.report.verdict.lines import decibels
from ppbench.report.worst import WorstCase, attack_of

MOST_DEFENSES = 8
"""How many defenses have pictures at the head of a page, with the undefended."""
TILE, COUNT = 64, 8
"""Least pixels per side of an image, and number of images: the first victims, not the best ones."""


@dataclass(frozen=True)
class StripLine:
    """One row of the strip. words: its label; figure: its median PSNR with interval, or ""."""

    words: str
    figure: str


@dataclass(frozen=True)
class Strip:
    """The pictures of one setting. setting: in words; uri: all rows in one PNG; lines: the label of each row."""

    setting: str
    uri: str
    lines: tuple[StripLine, ...]


def strips_of(table: Overview, album: Album) -> list[Strip]:
    """Return the pictures of an evaluation, if any: by attacker for one defense, else one line per defense."""
    rows = [row for row in table.rows if row.value.leak is not None]
    compared = [row.value for row in rows if row.value.entry.role == "compared"]
    if len(compared) == 1:
        words = ", ".join(word for word in (compared[0].entry.control, table.scene) if word)
        strip = strip_of(compared[0].entry.defense.id, words, compared[0].leak, album)
    else:
        strip = _compared(table.scene, rows, album)
    return [] if strip is None else [strip]


def _compared(setting: str, rows: Sequence[Standing], album: Album) -> Strip | None:
    """Return the originals above the worst case's reconstructions under each defense with the same victims."""
    pictures: list[ImageArray] = []
    lines: list[StripLine] = []
    for row in rows[:MOST_DEFENSES]:
        worst = row.value.worst
        images = None if worst is None or not modality_of(worst.config).drawn else _pictures(worst, album)
        if images is None or worst is None or (pictures and not np.array_equal(pictures[0], images[0])):
            continue
        if not pictures:
            pictures, lines = [images[0]], [StripLine("original", "")]
        name = row.value.entry.defense.id
        words = f"{name} {row.value.entry.control.replace(' = ', '=')}".strip()
        pictures.append(images[1])
        lines.append(StripLine(f"{'undefended' if name == 'none' else words} ({attack_of(worst)})", decibels(worst)))
    uri = album.sprite(pictures, TILE) if len(pictures) > 1 else None
    return None if uri is None else Strip(setting, uri, tuple(lines))


def strip_of(name: str, setting: str, leak: Leak | None, album: Album) -> Strip | None:
    """Return the pictures of a setting of the defense `name`; None without images or room for them."""
    if leak is None or leak.worst is None or not modality_of(leak.worst.config).drawn:
        return None
    whole = _pictures(leak.worst, album)
    if whole is None:
        return None
    truth, best, blind = whole
    rows, lines = [truth], [StripLine("original", "")]
    sides = [(f"attacker unaware of {name}", leak.unaware.worst)]
    sides += [(f"attacker aware of {name}", leak.worst)] if leak.worst.knows or leak.unaware.worst is None else []
    for who, case in sides:
        pictures = None if case is None else _pictures(case, album)
        if pictures is not None:
            rows.append(pictures[1] if case is not leak.worst else best)
            lines.append(StripLine(f"{who} ({attack_of(case)})", decibels(case)))
    if blind is not None:
        rows.append(np.repeat(blind, len(truth), axis=0))
        lines.append(StripLine("blind guess", "" if leak.blind is None else f"{leak.blind:.1f} dB"))
    uri = album.sprite(rows, TILE)
    return None if uri is None else Strip(setting, uri, tuple(lines))


def _pictures(case: WorstCase, album: Album) -> tuple[ImageArray, ImageArray, ImageArray | None] | None:
    """Return originals, their best reconstructions, both [n, C, H, W], and a blind guess; None without images."""
    truth: list[ImageArray] = []
    guess: list[ImageArray] = []
    blind: ImageArray | None = None
    winners: Sequence[Record] = case.winners or [case.leading] * len(case.victims)
    for score, record in list(zip(case.victims, winners, strict=True))[:COUNT]:
        images = album.of(record)
        if images is None:
            return None
        place = [victim.place for victim in record.victims].index(score.place)
        if place >= len(images.truth):  # the file may hold fewer images than the record has victims
            break
        truth.append(images.truth[place])
        guess.append(images.guess[place])
        blind = images.blind if blind is None else blind
    return (np.stack(truth), np.stack(guess), blind) if truth else None
