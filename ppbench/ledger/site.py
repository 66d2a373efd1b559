"""The ledger as a static site: each row's worst case, who moved it when, and its transcript to download.

Any host serves the folder. It holds no picture and no figure of a single victim: readers of a transcript must not learn
the truth from the page. Links to rows stay valid: an id is the digest of the published content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, listing, make_folder, write_atomic
from ppbench.ledger.form import (
    ABOUT,
    BookEntry,
    TranscriptInfo,
    Truth,
    counting_records,
    parse_json,
    read_book,
    row_key,
)
from ppbench.ledger.score import LEDGER_ALPHA, floor_of, try_level
from ppbench.ledger.transcript import read_checked, read_info
from ppbench.questions.base import question_for, question_of
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.frame import Key, key_of
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import LEVEL_WORDS, SEVERITY, SIBLING, Leak, leak_of
from ppbench.report.worst import worst_case

LEDGER_TEMPLATES = Path(__file__).parent / "templates"
LEDGER_SCHEMA = "ppbench.ledger/1"


@dataclass(frozen=True)
class SiteFigure:
    """A row's worst case in one question. value: to a tenth of a decibel, or a hundredth of a share; by: the attack."""

    question: str
    metric: str
    value: float
    by: str

    @property
    def words(self) -> str:
        """The figure, for people."""
        if self.metric == "psnr_median":
            return f"median PSNR {self.value:.1f} dB"
        return f"{self.metric.replace('_', ' ')} {self.value:g}"


@dataclass(frozen=True)
class SiteRow:
    """One transcript. level: how far inputs leak, in words; qualifiers: statements that belong to it.

    spent: whether its victims are too few for the level at which the next submission would be judged.
    """

    id: str
    title: str
    defense: str
    bytes: int
    level: str
    severity: int
    qualifiers: tuple[str, ...]
    figures: tuple[SiteFigure, ...]
    tries: int
    next_level: float
    spent: bool
    history: tuple[BookEntry, ...]


def build_site(transcripts: Path, truth: Path, out: Path) -> list[SiteRow]:
    """Write the site into `out`: index.html, ledger.json, transcripts/ID/FILE; return its rows, the worst first.

    Raises UsageError: a transcript was altered, or its truth is not in `truth`.
    """
    every = _abouts(transcripts)
    table = site_rows(every, truth)
    make_folder(out / "transcripts")
    for about in every:
        home = make_folder(out / "transcripts" / about.id)
        for name in about.files:
            write_atomic(home / name, read_checked(transcripts / about.id, about, name))
        write_atomic(home / ABOUT, (transcripts / about.id / ABOUT).read_bytes())
    write_atomic(out / "index.html", _page(table).encode())
    content = {"schema": LEDGER_SCHEMA, "rows": [asdict(row) | {"history": _public_history(row)} for row in table]}
    write_atomic(out / "ledger.json", (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    return table


def _public_history(row: SiteRow) -> list[dict[str, object]]:
    return [entry.model_dump(mode="json", exclude={"cell", "guesses", "p"}) for entry in row.history]


def public_value(value: float) -> float:
    """Return a figure rounded for publication: to a tenth, a share to a hundredth."""
    return round(value, 1 if abs(value) > 1 else 2)


def _abouts(transcripts: Path) -> list[TranscriptInfo]:
    if kind_of(transcripts) != "folder":
        raise UsageError(f"{transcripts} is no folder of transcripts; give the --out of `ppbench publish`.")
    homes = [home for home in listing(transcripts) if kind_of(home / ABOUT) == "file"]
    abouts = [read_info(home) for home in homes]
    for home, about in zip(homes, abouts, strict=True):
        if home.name != about.id:
            raise UsageError(f"{home} holds the transcript {about.id}; a folder has the name of what lies in it.")
    if not abouts:
        raise UsageError(f"There is no transcript in {transcripts}; give the --out of `ppbench publish`.")
    return abouts


def site_rows(every: Sequence[TranscriptInfo], truth: Path) -> list[SiteRow]:
    """Return the rows of the site, the worst first."""
    book = read_book(truth)
    records = counting_records(truth, book)
    by_row: dict[str, list[Record]] = {}
    for record in records:
        by_row.setdefault(row_key(record.config), []).append(record)
    known, store = Knowledge.of(records), Store(truth)
    table, undefended = [], dict[Key, Leak | None]()
    place = [name for name in SIBLING if name != "auxiliary"]  # answers to one transcript use different further data
    for about in sorted(every, key=lambda a: a.defense.id != "none"):
        stated = parse_json(Truth, truth / "truth" / f"{about.id}.json")
        config = store.load(stated.cell).config
        mine, where = by_row[row_key(config)], key_of(config).only(place)
        leak = leak_of(mine, vouched=known.vouches(mine), none=undefended.get(where), aware=known.adaptive)
        if about.defense.id == "none":
            undefended[where] = leak
        table.append(_row(about, mine, leak, [e for e in book if e.transcript == about.id]))
    return sorted(table, key=lambda row: (-row.severity, row.title))


def _row(about: TranscriptInfo, mine: Sequence[Record], leak: Leak | None, history: Sequence[BookEntry]) -> SiteRow:
    level = try_level(len(history) + 1)
    return SiteRow(
        id=about.id,
        title=about.title,
        defense=about.defense.id,
        bytes=sum(file.bytes for file in about.files.values()),
        level="" if leak is None else LEVEL_WORDS[leak.level],
        severity=-1 if leak is None else SEVERITY[leak.level],
        qualifiers=() if leak is None else tuple(q.words for q in leak.qualifiers),
        figures=tuple(_figures(mine, about.kinds)),
        tries=len(history),
        next_level=level,
        spent=min(floor_of(record) for record in mine) > level,
        history=tuple(_public(entry) for entry in history if entry.moved),
    )


def _public(entry: BookEntry) -> BookEntry:
    before = None if entry.before is None else public_value(entry.before)
    return entry.model_copy(update={"before": before, "after": public_value(entry.after)})


def _figures(mine: Sequence[Record], kinds: Sequence[str]) -> list[SiteFigure]:
    figures = []
    for kind in sorted(kinds, key=lambda kind: question_of(kind).order):
        some = [r for r in mine if r.config.attack.kind == kind and r.status == "complete"]
        if not some:
            continue
        question = question_for(some[0])
        name = question.headline(some[0].config)
        worst = worst_case(some, name)
        metric = None if worst is None else worst.metric(name)
        if worst is not None and metric is not None and metric.value is not None:
            figures.append(SiteFigure(question.title, name, public_value(metric.value), worst.name))
    return figures


def _page(table: Sequence[SiteRow]) -> str:
    environment = Environment(
        loader=FileSystemLoader(LEDGER_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    moves = sorted((e for row in table for e in row.history), key=lambda e: e.day, reverse=True)
    page = environment.get_template("ledger.html.j2")
    return page.render(rows=table, moves=moves, alpha=LEDGER_ALPHA)
