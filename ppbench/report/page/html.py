"""The leaderboard as ONE self-contained HTML file: no network requests, readable without JavaScript.

Everything is derived from records, their artifacts and the given sentences. Every string is escaped; the only raw parts
are style sheets, scripts (allowed only by their digests), our own drawings, and JSON without a `<`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import seaborn
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from ppbench.base.errors import UsageError, count_of
from ppbench.base.files import kind_of, make_folder, read_regular, write_atomic
from ppbench.base.registry import load_plugin, plugins, summary
from ppbench.metrics.epsilon import epsilon_words
from ppbench.metrics.modality import IMAGE, Modality, modality_of
from ppbench.records.figure import grouped
from ppbench.records.run_files import Origin
from ppbench.records.schema import USUAL_PROBE, Metric, Played, Record, Utility
from ppbench.records.store import PICTURED
from ppbench.report.cap import Cap, caps
from ppbench.report.controls import Check, nothing_to_read, statuses_of
from ppbench.report.costs import TimesOf, cost_rows
from ppbench.report.entries import Board
from ppbench.report.frame import RUNS, Frame, Key, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import LEVEL_WORDS, Leak
from ppbench.report.learning import USABLE
from ppbench.report.page.boards import (
    Claims,
    DefenseSentence,
    JudgedEvaluation,
    boards_of,
    judged_evaluations,
    no_claims,
    standalone_sentences,
    table_rows,
    tolerant,
)
from ppbench.report.page.curves import curves, line_caps, ppcs, tradeoff_of
from ppbench.report.page.figures import Picture, Plot, svg_of
from ppbench.report.page.headline import answer_from, costs_alone
from ppbench.report.page.overview import CHOICE_RULE, Overview, Standing, choices_of, control_words
from ppbench.report.page.profiles import Album, ClaimOutcome, ImageArray, ImagesOf, Shot, Sprite, profiles
from ppbench.report.page.sections import (
    Chart,
    Section,
    batch_of,
    board_target,
    cell_table,
    section_metric,
    weights_words,
)
from ppbench.report.words import ALONE, capitalized, decibels
from ppbench.report.worst import WorstCase, attack_of, cell_of

# -- A short introduction of a defense, with its paper --

_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Introduction:
    """A defense in a line. words: its own first sentence, "" where it is not installed here; paper: citation, or "";
    link: address of the paper, or "".
    """

    name: str
    words: str
    paper: str
    link: str


def introduction_of(name: str) -> Introduction:
    """Return the introduction of the defense `name`."""
    known = plugins("defenses").get(name)
    if known is None:
        return Introduction(name, "", "", "")
    try:
        paper = str(getattr(load_plugin("defenses", name), "paper", ""))
    except UsageError:  # its records stay readable where it cannot be imported
        paper = ""
    match = _ARXIV.search(paper)
    return Introduction(name, summary(known), paper, f"https://arxiv.org/abs/{match[1]}" if match else "")


# -- A figure of how often each client played a role in training, such as FedPC's pilots, who reveal their models --

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


# -- The strip of pictures at the head of a page: originals, reconstructions, and a blind guess --

MOST_DEFENSES = 8
"""How many defenses have pictures at the head of a page, with the undefended."""
TILE = 64
"""Least pixels per side of an image."""


@dataclass(frozen=True)
class CaseImages:
    """Images of a worst case. truth, best: originals and their best reconstructions, [n, C, H, W]; blind: a guess
    [1, C, H, W], or None; cells: the names of the cells that they are of.
    """

    truth: ImageArray
    best: ImageArray
    blind: ImageArray | None
    cells: frozenset[str]


class _Strip:
    """Originals, and below them what was made of them, row by row; `leak` has the median of the blind guess."""

    def __init__(self, first: CaseImages, leak: Leak) -> None:
        self._first, self._leak, self._cells = first, leak, first.cells
        self._rows, self._shots = [first.truth], [Shot("original")]

    def is_of(self, images: CaseImages) -> bool:
        """Return whether `images` have the same originals."""
        return np.array_equal(self._first.truth, images.truth)

    def add(self, name: str, case: WorstCase, images: CaseImages) -> None:
        self._rows.append(images.best)
        self._shots.append(Shot(f"{name} ({attack_of(case)})", decibels(case)))
        self._cells |= images.cells

    def sprite(self, setting: str, album: Album) -> Sprite | None:
        """Return the picture, a blind guess in its last row; None without room."""
        blind = self._leak.blind
        if self._first.blind is not None:
            self._rows.append(np.repeat(self._first.blind, len(self._first.truth), axis=0))
            self._shots.append(Shot("blind guess", "" if blind is None else f"{blind:.1f} dB"))
        uri = album.sprite(self._rows, TILE)
        return None if uri is None else Sprite(uri, tuple(self._shots), setting, self._cells)


def strips_of(table: Overview, album: Album) -> list[Sprite]:
    """Return the pictures of an evaluation, if any: by attacker for one defense, else one line per defense."""
    rows = [row for row in table.rows if row.value.leak is not None]
    compared = [row.value for row in rows if row.value.entry.role == "compared"]
    if len(compared) == 1:
        words = ", ".join(word for word in (compared[0].entry.control, table.scene) if word)
        strip = strip_of(compared[0].entry.defense.id, words, compared[0].leak, album)
    else:
        strip = _compared(table, rows, album)
    return [] if strip is None else [strip]


def _compared(table: Overview, rows: Sequence[Standing], album: Album) -> Sprite | None:
    """Return the originals above the worst case's reconstructions under each defense with the same victims."""
    strip, seed = None, _commonest_seed(rows)
    for row in rows[:MOST_DEFENSES]:
        leak = next((v.leak for v in row.value.values if v.entry.key.seed == seed), None)
        images = _pictures(None if leak is None else leak.worst, album)
        if leak is None or leak.worst is None or images is None:
            continue
        strip = strip or _Strip(images, leak)
        if strip.is_of(images):
            name = row.value.entry.defense.id
            words = "undefended" if name == "none" else f"{name} {control_words(row.value)}".strip()
            strip.add(words, leak.worst, images)
    setting = table.scene if table.seeds == 1 else f"{table.scene}, seed {seed}"
    return None if strip is None else strip.sprite(setting, album)


def _commonest_seed(rows: Sequence[Standing]) -> int | None:
    """Return the seed at which most settings leak most, of equals the least: other seeds have other victims."""
    count = Counter(row.value.shown.entry.key.seed for row in rows)
    return min(count, key=lambda seed: (-count[seed], seed or 0), default=None)


def strip_of(name: str, setting: str, leak: Leak | None, album: Album) -> Sprite | None:
    """Return the pictures of a setting of the defense `name`; None without images or room for them."""
    worst = None if leak is None else leak.worst
    whole = _pictures(worst, album)
    if leak is None or worst is None or whole is None:
        return None
    strip, unaware = _Strip(whole, leak), leak.unaware.worst
    images = whole if unaware is worst else _pictures(unaware, album)
    if unaware is not None and images is not None:
        strip.add(f"attacker unaware of {name}", unaware, images)
    if leak.aware or unaware is None:
        strip.add(f"attacker aware of {name}", worst, whole)
    return strip.sprite(setting, album)


def _pictures(case: WorstCase | None, album: Album) -> CaseImages | None:
    """Return the images of the first victims, each by the attack that rebuilt it best; None without images."""
    if case is None or not modality_of(case.config).drawn:
        return None
    truth: list[ImageArray] = []
    guess: list[ImageArray] = []
    blind: ImageArray | None = None
    cells: set[str] = set()
    winners: Sequence[Record] = case.winners or [case.leading] * len(case.victims)
    for score, record in list(zip(case.victims, winners, strict=True))[:PICTURED]:
        images = album.of(record)
        if images is None:
            return None
        place = [victim.place for victim in record.victims].index(score.place)
        if place >= len(images.truth):  # the file may hold fewer images than the record has victims
            break
        truth.append(images.truth[place])
        guess.append(images.guess[place])
        cells.add(record.cell_id)
        blind = images.blind if blind is None else blind
    return CaseImages(np.stack(truth), np.stack(guess), blind, frozenset(cells)) if truth else None


# -- The figures of boards: on the page, as long as there is room, and in a folder --

FIGURE_BUDGET = 8_000_000
"""Largest number of characters of figures on a page; further ones are named, and are only in figures/."""
FIGURE_LIST = "figures.json"
"""File with the names of the figures that a board wrote: a later one removes only these."""
FIGURE_FILE = re.compile(r"[a-z0-9-]+\.(?:svg|png)")
"""Names of figures in figures/."""
PNG_HEAD = 400
"""Number of bytes at the head of a PNG that include its label."""


class Drawings:
    """The figures of a page, drawn in order up to `FIGURE_BUDGET` characters."""

    def __init__(self) -> None:
        self._left = FIGURE_BUDGET

    def chart(self, plot: Plot, caps: tuple[tuple[str, Cap], ...] = ()) -> Chart:
        """Return a figure for the page; caps: of its lines."""
        svg = svg_of(plot, inline=True) if self._left > 0 else ""
        self._left -= len(svg)
        return Chart(plot.title, Markup(svg) or None, caps)


def write_figures(folder: Path, boards: Sequence[Board], known: Knowledge) -> list[Path]:
    """Write all boards' figures as SVG, and as PNG those whose label there differs; remove those of earlier boards.

    Only files named in `FIGURE_LIST` are removed, no folders or links: other pictures are the user's.
    """
    make_folder(folder)
    plots = _by_name([named for board in boards for named in _named(board, known)])
    names = [f"{name}{end}" for name in plots for end in (".svg", ".png")]
    before = _listed(folder)
    _list(folder, {*before, *names})  # first: after a kill, files of this board are known as ours
    for name, plot in plots.items():
        vector, dots, picture = folder / f"{name}.svg", folder / f"{name}.png", Picture(plot)
        write_atomic(vector, svg_of(plot).encode())
        if kind_of(dots, follow=False) != "file" or picture.label.encode() not in read_regular(dots)[:PNG_HEAD]:
            write_atomic(dots, picture.png())
    for name in before.difference(names):
        if kind_of(folder / name, follow=False) == "file":
            (folder / name).unlink()
    _list(folder, {*names})
    return [folder / name for name in names]


def _by_name(named: Sequence[tuple[str, Plot]]) -> dict[str, Plot]:
    """Return figures by the names of their files, from the words that name them."""
    uses: Counter[str] = Counter()
    plots = {}
    for words, plot in named:
        name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
        uses[name] += 1  # words of two boards may be equal
        plots[name if uses[name] == 1 else f"{name}-{uses[name]}"] = plot
    return plots


def _listed(folder: Path) -> set[str]:
    """Return the names of the figures that an earlier board wrote; empty where unknown."""
    try:
        names = json.loads(read_regular(folder / FIGURE_LIST))
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, RecursionError) as cause:
        warnings.warn(
            f"{folder / FIGURE_LIST} cannot be read ({cause}), so figures of earlier boards stay.", stacklevel=2
        )
        return set()
    return {name for name in names if isinstance(name, str) and FIGURE_FILE.fullmatch(name)}


def _list(folder: Path, names: set[str]) -> None:
    write_atomic(folder / FIGURE_LIST, (json.dumps(sorted(names), indent=1) + "\n").encode())


def _named(board: Board, known: Knowledge) -> Iterator[tuple[str, Plot]]:
    """Yield a board's figures with words that name their files."""
    setting = board.setting
    probing = setting.probing
    probed = "" if probing == USUAL_PROBE else f"{probing.probe} {probing.probe_rounds}"
    suite = "" if setting.suite == ALONE else setting.suite
    where = f"{suite} {setting.data} {setting.train}"
    if (figure := tradeoff_of(board)) is not None and not setting.intended:
        yield f"tradeoff {where} {setting.network} {figure.title} {probed}", figure
    for ppc in ppcs(board, known):
        yield f"ppc {where} {setting.network} {setting.threat} {ppc.title} {probed} {ppc.distance}", ppc
    for curve in curves(board, board_target(setting)):
        yield f"{curve.title} {where} {setting.network} {probed}", curve


# -- The page's template: its functions, formats of figures, scripts and style sheets --
# Third-party builds are in `vendor/` with their digests. The page's content security policy allows scripts only by
# their digests.

PAGE_TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"
SCRIPT, STYLE = VENDOR / "tabulator.min.js", VENDOR / "tabulator_simple.min.css"
OWN_SCRIPTS = (PAGE_TEMPLATES / "tables.js", PAGE_TEMPLATES / "page.js")
_MAP = re.compile(r"^//# sourceMappingURL=.*$|/\*# sourceMappingURL=.*?\*/", re.MULTILINE)


@dataclass(frozen=True)
class Assets:
    """Scripts and style of a page. scripts: in the order in which they run; digests: of each, as in the policy."""

    scripts: tuple[Markup, ...]
    digests: tuple[str, ...]
    style: Markup

    @property
    def policy(self) -> Markup:
        """The content security policy: no request, and no script but these."""
        allowed = " ".join(f"'{digest}'" for digest in self.digests)
        start = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        return Markup(f"{start}; script-src {allowed}; base-uri 'none'; form-action 'none'")


def script_digest(script: str) -> str:
    """Return the source expression of a content security policy that allows `script`, e.g. "sha256-...="."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@lru_cache(maxsize=1)
def assets() -> Assets:
    """Return scripts and style of a page, without source maps; ValueError where a script would end its own element."""
    script, style = (_MAP.sub("", path.read_text(encoding="utf-8")).strip() for path in (SCRIPT, STYLE))
    scripts = (script, "\n".join(path.read_text(encoding="utf-8") for path in OWN_SCRIPTS))
    if any(re.search(r"</script|<!--", one, re.IGNORECASE) for one in scripts):
        raise ValueError("a script holds '</script' or '<!--' and cannot stand inside a page")
    own = (PAGE_TEMPLATES / "page.css").read_text(encoding="utf-8")
    return Assets(tuple(map(Markup, scripts)), tuple(map(script_digest, scripts)), Markup(f"{style}\n{own}"))


@lru_cache(maxsize=2)
def template(name: str = "page") -> Template:
    """Return a template, "page" or "summary", with its functions and assets, compiled once per process."""
    environment = Environment(
        loader=FileSystemLoader(PAGE_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        form.__name__: form for form in (number, percent, byte_size, span, error, seconds, capitalized, epsilon_words)
    }
    environment.globals |= {
        "assets": assets(),
        "attack_of": attack_of,
        "batch_of": batch_of,
        "cell_of": cell_of,
        "choices_of": choices_of,
        "choice_rule": CHOICE_RULE,
        "metric_of": section_metric,
        "not_applicable": nothing_to_read,
        "words": LEVEL_WORDS,
        "usable_points": USABLE,
        "weights_words": weights_words,
    }
    return environment.get_template(f"{name}.html.j2")


# -- figures as the page shows them ----------------------------------------------------------------------------------
def number(value: float | None, digits: int = 2) -> str:
    """Return a figure with `digits` decimals, "n/a" for null, scientific from a million on."""
    if value is None:
        return "n/a"
    return f"{value:.2e}" if abs(value) >= 1e6 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage with one decimal, "n/a" for null."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def error(value: float | None) -> str:
    """Return a relative error as a percentage, from 10 on as a factor: "1.2 %", "98 times"; "n/a" for null."""
    if value is None:
        return "n/a"
    return f"{100 * value:.1f} %" if value < 10 else f"{value:.3g} times"


def span(estimate: Metric | Utility, factor: float = 1.0) -> str:
    """Return the interval of a figure, times `factor`, with one decimal: "17.2–19.7"; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{factor * estimate.low:.1f}–{factor * estimate.high:.1f}"  # noqa: RUF001 - a range takes an en dash


def byte_size(value: float | None) -> str:
    """Return bytes in B, kB, MB or GB (powers of 1000)."""
    if value is None:
        return "n/a"
    units = (
        f"{value / factor:.1f} {unit}" for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= factor
    )
    return next(units, f"{value:.0f} B")


def seconds(value: float) -> str:
    """Return a time in s, ms or µs with three digits."""
    unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if value >= pair[1]), ("µs", 1e-6))
    return f"{value / factor:.3g} {unit}"


NAMED_FILES = 12
"""How many unreadable files the head of the page names; further ones are folded."""


@dataclass(frozen=True)
class Page:
    """The leaderboard's page.

    records: every cell; harness: check of the self-test, None where unknown; claims: returns the claim for a record;
    images, times: return a record's reconstructions and times; sound: whether the self-test passed, else nothing is
    ranked; sentences, outcomes: of verdicts and of claims; boards, evaluations: of `records`, computed if None;
    problems: sentences on unreadable files, to which images and times add; bare: whether the folder is an accepted
    baseline, which keeps no reconstructions; origin: command, day, commit.
    """

    records: Sequence[Record]
    harness: Check | None = None
    claims: Claims = no_claims
    images: ImagesOf = lambda _: None
    times: TimesOf = lambda _: None
    sound: bool = True
    sentences: Sequence[DefenseSentence] = ()
    outcomes: Sequence[ClaimOutcome] = ()
    boards: Sequence[Board] | None = None
    evaluations: Sequence[JudgedEvaluation] | None = None
    problems: list[str] = field(default_factory=list)
    bare: bool = False
    origin: Origin = field(default_factory=Origin)

    def html(self) -> str:
        """Return the page."""
        frame = frame_of(self.records)
        known = Knowledge.of(frame)
        boards = boards_of(frame, self.claims, self.sound) if self.boards is None else self.boards
        album = Album(tolerant(self.images, self.problems))
        sections = list(_sections(boards, frame, known, album))
        table = cost_rows(boards, frame, tolerant(self.times, self.problems))
        parts = profiles(sections, self.sentences, self.outcomes, table, album, known)
        evaluations = judged_evaluations(frame, self.sound) if self.evaluations is None else self.evaluations
        answer = answer_from(boards, evaluations, table, self.harness)
        settings = sorted({f"{r.config.data.name}, {r.config.model.id}" for r in frame})
        return template().render(
            knows=known.adaptive,
            verdict=standalone_sentences(self.sentences) if len(parts) == 1 else [],
            named_files=NAMED_FILES,
            glance=answer.every,
            headline=answer.headline,
            trust=answer.trust,
            costs_first=costs_alone(answer.tables),
            strips=[strip for one in answer.every for strip in strips_of(one, album)],
            origin=self.origin,
            abouts=[introduction_of(part.defense) for part in parts],
            problems=self.problems,
            bare=self.bare,
            sections=sections,
            groups=list(grouped(sections, lambda section: section.group).items()),
            profiles=parts,
            anchor={part.defense: part.anchor for part in parts},
            played=[(counted.title, Markup(svg_of(counted, inline=True))) for counted in role_counts(frame)],
            costs=table,
            several=len({row.setting for row in table}) > 1,
            cells=cell_table(table_rows(frame, self.claims), frame, known),
            refused=album.refused,
            statuses=statuses_of(frame),
            kinds=_kinds(frame),
            settings=settings,
            title=_title([part.defense for part in parts], settings),
            environments=sorted({_environment(record) for record in frame}),
        )


def _kinds(records: Sequence[Record]) -> list[Modality]:
    """Return the kinds of data, for the glossary; images where there is no record."""
    return list(dict.fromkeys(modality_of(record.config) for record in records)) or [IMAGE]


def _title(defenses: Sequence[str], settings: Sequence[str]) -> str:
    """Return the page's title, for tabs and bookmarks."""
    what = "controls" if not defenses else defenses[0] if len(defenses) == 1 else f"{len(defenses)} defenses"
    where = settings[0] if len(settings) == 1 else f"{len(settings)} tasks"
    return f"{what} on {where} - ppbench"


def _sections(boards: Sequence[Board], records: Frame, known: Knowledge, album: Album) -> Iterator[Section]:
    """Yield the boards with their images and figures."""
    series, drawings = caps(records), Drawings()
    for index, board in enumerate(boards, start=1):
        lines = line_caps(board, series)
        delivered = board.setting.intended  # the model is meant to answer the question
        yield Section(
            board,
            f"b{index}",
            tuple(album.strip(None if entry.worst is None else entry.worst.leading) for entry in board.entries),
            None if delivered or (figure := tradeoff_of(board)) is None else drawings.chart(figure),
            tuple(
                drawings.chart(ppc, tuple(sorted(lines[ppc.defense, ppc.distance].items())))
                for ppc in ([] if delivered else ppcs(board, known))
            ),
            tuple(drawings.chart(curve) for curve in curves(board, board_target(board.setting))),
        )


def _environment(record: Record) -> str:
    where = record.environment
    return f"ppbench {where.ppbench}, Python {where.python}, torch {where.torch}, {where.device}, {where.dtype}"
