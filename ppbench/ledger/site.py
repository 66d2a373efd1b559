"""The ledger as a static site: each row's worst case, who moved it when, and its transcript to fetch.

Any host serves the folder. It holds no picture and no figure of a single victim: of those who fetch a transcript nobody
may learn from the page what only the truth tells. Links to rows stay: an id is the digest of what was published.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, listing, make_folder, write_atomic
from ppbench.ledger.book import Entry, counted, entries
from ppbench.ledger.form import ABOUT, About, Truth, parsed, row_of
from ppbench.ledger.judge import ALPHA, floor_of, level_of
from ppbench.ledger.transcript import about_of, checked
from ppbench.questions.base import question_for, question_of
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import LEVEL_WORDS, SEVERITY, Leak, leak_of
from ppbench.report.worst import worst_case

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = "ppbench.ledger/1"


@dataclass(frozen=True)
class Figure:
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
class Row:
    """One transcript. level: how far inputs leak, in words; qualifiers: what must be said with it.

    spent: whether its victims are too few for the level at which the next submission would be judged.
    """

    id: str
    title: str
    defense: str
    bytes: int
    level: str
    severity: int
    qualifiers: tuple[str, ...]
    figures: tuple[Figure, ...]
    tries: int
    next_level: float
    spent: bool
    history: tuple[Entry, ...]


def build(transcripts: Path, truth: Path, out: Path) -> list[Row]:
    """Write the site into `out`: index.html, ledger.json, transcripts/ID/FILE; return its rows, the worst first.

    Raises UsageError: a transcript was altered, or its truth is not in `truth`.
    """
    every = _abouts(transcripts)
    found = rows(every, truth)
    make_folder(out / "transcripts")
    for about in every:
        home = make_folder(out / "transcripts" / about.id)
        for name in about.files:
            write_atomic(home / name, checked(transcripts / about.id, about, name))
        write_atomic(home / ABOUT, (transcripts / about.id / ABOUT).read_bytes())
    write_atomic(out / "index.html", _page(found).encode())
    told = {"schema": SCHEMA, "rows": [asdict(row) | {"history": _told(row)} for row in found]}
    write_atomic(out / "ledger.json", (json.dumps(told, indent=1, sort_keys=True) + "\n").encode())
    return found


def _told(row: Row) -> list[dict[str, object]]:
    return [entry.model_dump(mode="json", exclude={"cell", "guesses", "p"}) for entry in row.history]


def rounded(value: float) -> float:
    """Return a figure as anybody may know it: to a tenth, of a share to a hundredth."""
    return round(value, 1 if abs(value) > 1 else 2)


def _abouts(transcripts: Path) -> list[About]:
    if kind_of(transcripts) != "folder":
        raise UsageError(f"{transcripts} is no folder of transcripts; give the --out of `ppbench publish`.")
    homes = [home for home in listing(transcripts) if kind_of(home / ABOUT) == "file"]
    found = [about_of(home) for home in homes]
    for home, about in zip(homes, found, strict=True):
        if home.name != about.id:
            raise UsageError(f"{home} holds the transcript {about.id}; a folder has the name of what lies in it.")
    if not found:
        raise UsageError(f"There is no transcript in {transcripts}; give the --out of `ppbench publish`.")
    return found


def rows(every: Sequence[About], truth: Path) -> list[Row]:
    """Return what stands in each row, the worst first."""
    book = entries(truth)
    records = counted(truth, book)
    by_row: dict[str, list[Record]] = {}
    for record in records:
        by_row.setdefault(row_of(record.config), []).append(record)
    known, store = Knowledge.of(records), Store(truth)
    found, undefended = [], dict[str, Leak | None]()
    for about in sorted(every, key=lambda a: a.defense.id != "none"):
        told = parsed(Truth, truth / "truth" / f"{about.id}.json")
        mine = by_row[row_of(store.load(told.cell).config)]
        where = str((about.model, about.federation, about.threat, about.stage, about.batch))
        leak = leak_of(mine, vouched=known.vouches(mine), none=undefended.get(where))
        if about.defense.id == "none":
            undefended[where] = leak
        found.append(_row(about, mine, leak, [e for e in book if e.transcript == about.id]))
    return sorted(found, key=lambda row: (-row.severity, row.title))


def _row(about: About, mine: Sequence[Record], leak: Leak | None, told: Sequence[Entry]) -> Row:
    level = level_of(len(told) + 1)
    return Row(
        id=about.id,
        title=about.title,
        defense=about.defense.id,
        bytes=sum(file.bytes for file in about.files.values()),
        level="" if leak is None else LEVEL_WORDS[leak.level],
        severity=-1 if leak is None else SEVERITY[leak.level],
        qualifiers=() if leak is None else tuple(q.words for q in leak.qualifiers),
        figures=tuple(_figures(mine, about.kinds)),
        tries=len(told),
        next_level=level,
        spent=min(floor_of(record) for record in mine) > level,
        history=tuple(_public(entry) for entry in told if entry.moved),
    )


def _public(entry: Entry) -> Entry:
    before = None if entry.before is None else rounded(entry.before)
    return entry.model_copy(update={"before": before, "after": rounded(entry.after)})


def _figures(mine: Sequence[Record], kinds: Sequence[str]) -> list[Figure]:
    found = []
    for kind in sorted(kinds, key=lambda kind: question_of(kind).order):
        some = [r for r in mine if r.config.attack.kind == kind and r.status == "complete"]
        if not some:
            continue
        question = question_for(some[0])
        name = question.headline(some[0].config)
        worst = worst_case(some, name)
        metric = None if worst is None else worst.metric(name)
        if worst is not None and metric is not None and metric.value is not None:
            found.append(Figure(question.title, name, rounded(metric.value), worst.name))
    return found


def _page(found: Sequence[Row]) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    moves = sorted((e for row in found for e in row.history), key=lambda e: e.day, reverse=True)
    page = environment.get_template("ledger.html.j2")
    return page.render(rows=found, moves=moves, alpha=ALPHA)
