"""A defense's part of the page: sentences, its rows over the control grid, reconstructions, claims, costs."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, islice
from textwrap import wrap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best, grouped
from ppbench.records.schema import Record
from ppbench.records.store import CellImages
from ppbench.report.compare.report import markdown_text
from ppbench.report.controls import value
from ppbench.report.costs import CostRow
from ppbench.report.entries import Entry
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import Leak
from ppbench.report.page.boards import Claims, DefenseSentence
from ppbench.report.page.overview import Overview, setting_words
from ppbench.report.page.sections import Section
from ppbench.report.words import capitalized

# -- Reconstructed images as sprites: one PNG with one column per victim, originals above reconstructions --

SPRITE_COLUMNS = 10
"""Images in a row: the first victims, not the best ones."""
SPRITE_BUDGET = 6_000_000
"""Largest number of bytes of sprites on a page; further images are only beside the records."""
ImagesOf = Callable[[Record], CellImages | None]
"""Returns a record's reconstructions, as `Store.images` does."""
_TILE, _GAP = 32, 2
ImageArray = NDArray[np.float32]


class Album:
    """The images of a page, in order up to `budget` bytes of PNG. refused: number of sprites left out."""

    def __init__(self, images: ImagesOf, budget: int = SPRITE_BUDGET) -> None:
        self._images, self.left, self.refused = images, budget, 0

    def of(self, record: Record | None) -> CellImages | None:
        """Return a record's images; None where it has none (tables, labels) or no room is left."""
        if record is None:
            return None
        if self.left <= 0:
            self.refused += 1
            return None
        images = self._images(record)
        return None if images is None or images.guess.ndim != 4 or not len(images.guess) else images

    def sprite(self, rows: Sequence[ImageArray], tile: int = _TILE) -> str | None:
        """Return a data URI of rows of images [n, C, H, W], None without room; tile: pixels per image, at least."""
        png = sprite(rows, tile)
        if len(png) > self.left:
            self.refused, self.left = self.refused + 1, 0
            return None
        self.left -= len(png)
        return "data:image/png;base64," + base64.b64encode(png).decode()

    def strip(self, record: Record | None) -> str | None:
        """Return a record's originals above its reconstructions as a data URI, or None."""
        images = self.of(record)
        return None if images is None else self.sprite((images.truth, images.guess))


def sprite(rows: Sequence[ImageArray], tile: int = _TILE) -> bytes:
    """Return a PNG with one row of up to SPRITE_COLUMNS images for each of `rows` [n, C, H, W], and transparent gaps.

    tile: size of an image to which pixels are enlarged, about.
    """
    scale = max(1, round(tile / max(rows[0].shape[2:])))
    height, width = rows[0].shape[2] * scale, rows[0].shape[3] * scale
    count = min(max(map(len, rows)), SPRITE_COLUMNS)
    canvas = np.zeros((len(rows) * (height + _GAP) - _GAP, count * (width + _GAP) - _GAP, 4), dtype=np.uint8)
    for row, images in enumerate(rows):
        top = row * (height + _GAP)
        for index in range(min(count, len(images))):
            start = index * (width + _GAP)
            canvas[top : top + height, start : start + width] = _tile(images[index], scale)
    buffer = io.BytesIO()
    Image.fromarray(canvas, "RGBA").save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _tile(image: ImageArray, scale: int) -> NDArray[np.uint8]:
    """Return one image [C, H, W] as RGBA [H * scale, W * scale, 4]; a checkerboard if it is not finite."""
    if not np.isfinite(image).all():
        rows, columns = np.indices(image.shape[1:])
        grey = np.where((rows + columns) % 2, 110, 150)[..., None].repeat(3, axis=2)
    else:
        channels = image if len(image) == 3 else image.mean(axis=0, keepdims=True).repeat(3, axis=0)
        grey = np.rint(channels.clip(0, 1) * 255).transpose(1, 2, 0)
    opaque = np.concatenate([grey, np.full((*grey.shape[:2], 1), 255)], axis=2).astype(np.uint8)
    return np.asarray(opaque.repeat(scale, axis=0).repeat(scale, axis=1))


class ClaimOutcome(Protocol):
    """A paper's claim as `ppbench.claims` judged it; the templates read more of it."""

    @property
    def defense(self) -> str:
        """The defense's name."""

    @property
    def verdict(self) -> str:
        """Such as "holds" or "falls"; "" where it could not be checked."""


@dataclass(frozen=True)
class PaperClaims:
    """What a board shows of papers' claims.

    words: returns the claim for a record's very setting, "" without one; outcomes: returns those of all claims about
    the defenses in some records.
    """

    words: Claims
    outcomes: Callable[[Sequence[Record]], Sequence[ClaimOutcome]]


FULL_GALLERIES = 12
"""How many settings of a defense have all reconstructions shown; of others the boards show the worst case."""


@dataclass(frozen=True)
class Shot:
    """One row of a sprite. name: in words; figure: its median PSNR with the unit, or ""; cell: whose reconstructions
    it shows, "" where no link leads there.
    """

    name: str
    figure: str = ""
    knows: bool = False
    cell: str = ""


@dataclass(frozen=True)
class Sprite:
    """Rows of images in one PNG, as a data URI. setting: in words, at the head of a page; cells: names of the cells
    whose images are at the head of a page.
    """

    uri: str
    shots: tuple[Shot, ...]
    setting: str = ""
    cells: frozenset[str] = frozenset()

    @property
    def words(self) -> str:
        """What is seen, without intervals, for who does not see it."""
        rows = "; ".join(" ".join([shot.name, *shot.figure.split(" [")[:1]]).strip() for shot in self.shots)
        return f"The first victims of the list, {self.setting}; rows from above: {rows}"


LABEL_WIDTH, LABEL_SIZE = 250, 13
"""Pixels of the column of labels in a picture, and of its letters."""


def labelled_png(strips: Sequence[Sprite]) -> bytes:
    """Return sprites below one another as a PNG on white, each below its setting, each row beside its label.

    For places that show a picture and no page around it, as README.md.
    """
    font = ImageFont.load_default(LABEL_SIZE)
    images = [Image.open(io.BytesIO(base64.b64decode(one.uri.partition(",")[2]))) for one in strips]
    line = LABEL_SIZE + 5
    tops = list(accumulate((image.height + 2 * line for image in images), initial=0))
    canvas = Image.new("RGB", (LABEL_WIDTH + max(image.width for image in images), tops[-1]), "white")
    pen = ImageDraw.Draw(canvas)
    for strip, image, top in zip(strips, images, tops, strict=False):
        pen.text((0, top + 3), strip.setting, "black", font)
        canvas.paste(image, (LABEL_WIDTH, top + line), image)
        height = (image.height + _GAP) / len(strip.shots)
        for row, shot in enumerate(strip.shots):
            words = [*wrap(shot.name, LABEL_WIDTH // 8), *([shot.figure] if shot.figure else [])]
            middle = top + line + (row + 0.5) * height
            pen.multiline_text((0, middle), "\n".join(words), "black", font, anchor="lm", spacing=2)
    buffer, few = io.BytesIO(), canvas.quantize(256, dither=Image.Dither.NONE)
    few.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


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
    texts: tuple[TextTable, ...]
    outcomes: tuple[ClaimOutcome, ...]
    costs: tuple[CostRow, ...]

    @property
    def checked(self) -> tuple[ClaimOutcome, ...]:
        """The claims that were checked."""
        return tuple(o for o in self.outcomes if o.verdict)

    @property
    def unchecked(self) -> tuple[ClaimOutcome, ...]:
        """The claims that could not be checked."""
        return tuple(o for o in self.outcomes if not o.verdict)

    def count(self, verdict: str) -> int:
        """Return how many claims have a verdict ("holds", "falls", "inconclusive")."""
        return sum(o.verdict == verdict for o in self.outcomes)


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
    pairs = [
        (section, entry)
        for section in sections
        for entry in sorted(section.board.entries, key=lambda e: (e.differs, e.key.value or 0.0))
    ]
    rows = grouped((pair for pair in pairs if pair[1].role == "compared"), lambda pair: pair[1].defense.id)
    places = anchors(rows)
    return [
        Profile(
            defense=name,
            anchor=places[name],
            sentences=tuple(s for s in all_sentences if s.defense == name),
            rows=tuple(rows[name]),
            galleries=tuple(islice(_galleries(rows[name], album, known), FULL_GALLERIES)),
            texts=tuple(table for section, entry in rows[name] for table in text_tables(section.short, entry, known)),
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
            shots.append(Shot("originals"))
        rows.append(images.guess)
        psnr = value(record, "psnr_median")
        figure = "n/a dB" if psnr is None else f"{psnr:.1f} dB"
        shots.append(Shot(record.config.attack.id, figure, known.adaptive(record), record.cell_id))
    uri = album.sprite(rows) if rows else None
    return None if uri is None else Sprite(uri, tuple(shots))


# -- Texts of a page: originals and what the best attack read, the tokens that agree marked --

SHOWN_TEXTS = 5
"""Texts of a setting: the first victims, not the best ones."""
LEAST_MARKED = 4
"""Characters from which on a piece that both texts share is marked."""


@dataclass(frozen=True)
class MarkedText:
    """A reconstructed text in pieces, each with whether the original has it. share: of tokens in place."""

    original: str
    pieces: tuple[tuple[str, bool], ...]
    share: float | None


@dataclass(frozen=True)
class TextTable:
    """The texts of one setting, by an attacker unaware of the defense or aware of it."""

    name: str
    attack: str
    is_aware: bool
    texts: tuple[MarkedText, ...]


@dataclass(frozen=True)
class TextSample:
    """What the worst case read of the first victim under each setting. scene: batch size and model.

    readings: by the name of a setting, with what tells its evaluation from others.
    """

    scene: str
    original: str
    readings: tuple[tuple[str, MarkedText], ...]


def text_samples(tables: Sequence[tuple[Overview, str]]) -> list[TextSample]:
    """Return the samples of evaluations, of the settings that their tables show; none where inputs are no texts.

    tables: with what tells each from the others. Evaluations that attack the same text share a sample.
    """
    samples = dict[tuple[str, str], list[tuple[str, MarkedText]]]()
    for table, about in tables:
        original = ""
        for row in table.rows:
            text = _first_text(row.value.shown.leak)
            if text is None or text.original != (original := original or text.original):  # other seeds' victims differ
                continue
            name = setting_words(row.value) if row.value.entry.role == "compared" else "undefended"
            readings = samples.setdefault((table.scene, original), [])
            readings.append((f"{about}: {name}" if about else name, text))
    return [
        TextSample(capitalized(scene), original, tuple(readings)) for (scene, original), readings in samples.items()
    ]


def _first_text(leak: Leak | None) -> MarkedText | None:
    victims = () if leak is None or leak.worst is None else leak.worst.victims
    return next((marked(victim) for victim in victims if getattr(victim, "text", None)), None)


def text_lines(samples: Sequence[TextSample]) -> list[str]:
    """Return the samples as lines of Markdown, what a reading shares with its original in bold."""
    lines = list[str]()
    for sample in samples:
        lines += [markdown_text(f"{sample.scene}; the first victim: {sample.original}"), ""]
        lines += ["| Setting | What was read | Tokens in place |", "| --- | --- | --- |"]
        for name, text in sample.readings:
            words = "".join(_bold(piece) if hit else markdown_text(piece) for piece, hit in text.pieces)
            share = "-" if text.share is None else f"{text.share:.0%}"
            lines.append(f"| {markdown_text(name)} | {words} | {share} |")
        lines.append("")
    return lines


def _bold(piece: str) -> str:
    """Return a piece in bold; Markdown takes no mark of bold beside a space."""
    inside = piece.strip()
    before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
    return f"{before}**{markdown_text(inside)}**{after}" if inside else piece


def text_tables(section: str, entry: Entry, known: Knowledge) -> list[TextTable]:
    """Return the texts of a setting by its best unaware and its best aware attack; none where inputs are no texts."""
    records = [r for r in entry.records if r.status == "complete" and any(getattr(v, "text", None) for v in r.victims)]
    tables = []
    for aware in (False, True):
        record = best([r for r in records if known.adaptive(r) == aware], "reconstruction_accuracy")
        if record is not None:
            texts = tuple(marked(victim) for victim in record.victims[:SHOWN_TEXTS])
            tables.append(TextTable(f"{section}, {entry.name}", record.config.attack.id, aware, texts))
    return tables


def marked(score: object) -> MarkedText:
    """Return the text of a score with what it shares with the original."""
    text = getattr(score, "text")  # noqa: B009 - a record's score may be of any question
    matcher = SequenceMatcher(None, text.guess, text.truth, autojunk=False)
    return MarkedText(text.truth, tuple(_pieces(text.guess, matcher)), getattr(score, "accuracy", None))


def _pieces(guess: str, matcher: SequenceMatcher[str]) -> Sequence[tuple[str, bool]]:
    pieces, end = list[tuple[str, bool]](), 0
    for block in matcher.get_matching_blocks():
        if block.size >= LEAST_MARKED:
            pieces += [(guess[end : block.a], False), (guess[block.a : block.a + block.size], True)]
            end = block.a + block.size
    return [piece for piece in (*pieces, (guess[end:], False)) if piece[0]]
