"""The board of a folder: CSV, HTML and figures, all derived from its records and rebuilt from them at any time.

And its summary, a short page with one table, in Markdown or as one HTML file.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.base.errors import UsageError, count_of, listed
from ppbench.base.files import locked, write_atomic
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import missing_sentences
from ppbench.records.run_files import Origin, origin_of, soundness_of, time_of
from ppbench.records.schema import Metric, Record
from ppbench.records.store import Store
from ppbench.report.compare.report import markdown_text
from ppbench.report.controls import check_harness
from ppbench.report.frame import frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import boards_of, csv_text, defense_sentences, judged_evaluations, tolerant, worst_csv
from ppbench.report.page.headline import Answer, answer_of, costs_alone
from ppbench.report.page.overview import (
    BEST_RULE,
    CHOICE_RULE,
    Overview,
    Standing,
    choices_of,
    distinct_words,
    guarantee_words,
    least_order,
    parameter_words,
    sends_nothing,
    stated_epsilon,
)
from ppbench.report.page.profiles import Album, ImagesOf, PaperClaims, Sprite, TextSample, text_lines, text_samples
from ppbench.report.setting import Setting
from ppbench.report.worst import Measured

if TYPE_CHECKING:
    from ppbench.report.page.html import Introduction, Page

WORST_CASE = "worst_case.csv"


def up_to_date(store: Store, claims: PaperClaims) -> bool:
    """Return whether the written tables are those of the records; False while a record cannot be read."""
    worst = store.out / WORST_CASE
    if not store.csv_path.is_file() or not store.html_path.is_file() or not worst.is_file():
        return False
    with loaded_records(store) as (records, problems):
        sound = check_harness(tolerant(soundness_of, problems)(store)).ok is not False
        if problems:
            return False
        frame = frame_of(records)
        all_boards = boards_of(frame, claims.words, sound)
        if store.csv_path.read_text(encoding="utf-8") != csv_text(frame, claims.words, all_boards):
            return False
        return worst.read_text(encoding="utf-8") == worst_csv(all_boards)


@contextmanager
def loaded_records(store: Store) -> Iterator[tuple[list[Record], list[str]]]:
    """Yield the readable records, with the garbage collector paused (there are millions of objects), and problems."""
    gc.disable()
    try:
        records, problems = store.readable()
        gc.freeze()
        gc.enable()
        yield records, problems + missing_sentences(records)
    finally:
        gc.unfreeze()
        gc.enable()


@dataclass(frozen=True)
class Written:
    """A written board. paths: page and tables; problems: what could not be read and is missing, in sentences."""

    paths: tuple[Path, ...]
    figures: tuple[Path, ...]
    problems: tuple[str, ...]


def write_board(store: Store, claims: PaperClaims) -> list[Path]:
    """Write the board of a folder and return its files, see `rebuild`; warns of what cannot be read."""
    written = rebuild(store, claims)
    for problem in written.problems:
        warnings.warn(problem, stacklevel=2)
    return [*written.paths, *written.figures]


def rebuild(store: Store, claims: PaperClaims) -> Written:
    """Write leaderboard.csv, worst_case.csv, leaderboard.html and figures/ of a folder from its records.

    Unreadable files are left out; UsageError where no record can be read, or nothing written.
    """
    with locked(store.out, "writing its board"), loaded_records(store) as (records, problems):
        if not records and problems:
            raise UsageError(f"{store.out} holds no record that can be read: {problems[0]}")
        if not records:
            raise UsageError(f"{store.out} holds no records; run ppbench evaluate --out {store.out} first.")
        store.sweep()
        return _write(store, records, problems, claims)


def _write(store: Store, records: Sequence[Record], problems: list[str], claims: PaperClaims) -> Written:
    # Drawing takes a second to import, which a run that finds its board up to date need not wait for.
    from ppbench.report.page.html import write_figures

    records = frame_of(records)
    page = page_of(store, records, problems, claims)
    assert page.boards is not None
    drawn = write_figures(store.out / "figures", page.boards, Knowledge.of(records))  # first: the page reuses these
    write_atomic(store.html_path, page.html().encode())
    worst = store.out / WORST_CASE
    write_atomic(worst, worst_csv(page.boards).encode())
    table = csv_text(records, claims.words, page.boards)
    write_atomic(store.csv_path, table.encode())  # last: it marks the board as complete
    return Written((store.html_path, store.csv_path, worst), tuple(drawn), tuple(problems))


def page_of(store: Store, records: Sequence[Record], problems: list[str], claims: PaperClaims) -> Page:
    """Return the page of a folder's readable records, not drawn yet; `problems`, to which it adds, stand on it."""
    from ppbench.report.page.html import Page

    harness = check_harness(tolerant(soundness_of, problems)(store))
    sound = harness.ok is not False  # where it is unknown, the controls count alone, and the page says so
    records = frame_of(records)
    evaluations = judged_evaluations(records, sound)
    return Page(
        records,
        harness=harness,
        claims=claims.words,
        images=store.images,
        times=partial(time_of, store.files),
        sound=sound,
        sentences=defense_sentences(evaluations),
        outcomes=claims.outcomes(records) if sound else (),
        boards=boards_of(records, claims.words, sound),
        evaluations=evaluations,
        problems=problems,
        bare=store.bare,
        origin=tolerant(origin_of, problems)(store) or Origin(),
    )


# -- the summary: one table, each defense at its best usable setting, and what to choose ------------------------------
Lines = tuple[str, ...]
"""A cell of a table: its figure, and lines of less weight below it; () where nothing was asked or measured."""
NAME_TITLE = "Defense and setting"
ORIGINS_HEADING = "Where the defenses come from"
COSTS_WORDS = "What a client pays, in bytes, memory and time, at one setting each"
NO_FIGURE = "\u2013"
BAR, BAR_END_DB, BAR_MARKS = 12, 60.0, ("█", "░")
"""Characters of a bar, the decibels at its end, and its marks, full and empty."""
BARS_NOTE = f"Bars end at {BAR_END_DB:.0f} dB."


@dataclass(frozen=True)
class SummaryRow:
    """One row. rank, verdict: in words."""

    setting: Setting
    verdict: str
    rank: str = ""


SummaryColumn = tuple[str, Callable[[SummaryRow], Lines]]
"""A title, and the function that returns a row's cell."""


@dataclass(frozen=True)
class SummaryTable:
    """A table over all evaluations of a board. titles: of its columns; groups: for each evaluation what tells it from
    the others, "" where there is one, and its rows of cells.
    """

    titles: tuple[str, ...]
    groups: tuple[tuple[str, tuple[tuple[Lines, ...], ...]], ...]

    @property
    def has_bars(self) -> bool:
        """Whether a leak is drawn as a bar, as decibels are."""
        lines = (line for _, rows in self.groups for row in rows for cell in row for line in cell)
        return any(line.startswith(BAR_MARKS) for line in lines)

    def pairs(self, row: tuple[Lines, ...]) -> list[tuple[str, Lines]]:
        """Return a row's cells with their titles."""
        return list(zip(self.titles, row, strict=True))


@dataclass(frozen=True)
class BoardSummary:
    """A board on a short page.

    title: its name; answer: its answer; costly: whether it compares costs alone; choices: what to choose, each with the
    evaluations that it is of; best, every: the table of best settings, and that of all; facts, commands: how it was
    made, by name; reasons: why no epsilon holds, by defense; origins: the defenses of the table with their papers;
    links: by defense the address of a page about its paper, for Markdown; costs: name of the page with bytes, memory
    and time, beside this one; priced: the defenses on it; pictures: of each evaluation with kept victims; picture:
    address of a file with all of them (`labelled_png`), for Markdown, "" for none; texts: what was read of a text;
    problems: what could not be read, in sentences.
    """

    title: str
    answer: Answer
    choices: tuple[tuple[str, str], ...]
    best: SummaryTable
    every: SummaryTable
    facts: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[tuple[str, str], ...] = ()
    origins: tuple[Introduction, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    costs: str = ""
    priced: tuple[str, ...] = ()
    pictures: tuple[Sprite, ...] = ()
    picture: str = ""
    texts: tuple[TextSample, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def costly(self) -> bool:
        """Whether nothing was attacked, so that only costs are compared."""
        return costs_alone(self.answer.tables)

    @property
    def defenses(self) -> list[str]:
        """The names of the defenses that are compared."""
        return _defenses(self.answer.tables)

    @property
    def about(self) -> str:
        """Data, network and federation of the first evaluation, and how many others there are."""
        tables = self.answer.every
        more = f", and {count_of(len(tables) - 1, 'further evaluation')}" if len(tables) > 1 else ""
        return (tables[0].about if tables else "Controls only") + more

    @property
    def settings(self) -> int:
        """The number of settings, the undefended one included."""
        return sum(len(rows) for _, rows in self.every.groups)

    @property
    def reasons_heading(self) -> str:
        """The heading of the list of reasons."""
        return f"Why no epsilon holds for {count_of(len({name for name, _ in self.reasons}), 'defense')}"

    @property
    def folded(self) -> bool:
        """Whether there are more settings than the table of the best shows."""
        return self.settings > sum(len(rows) for _, rows in self.best.groups)

    @property
    def notes(self) -> tuple[str, ...]:
        """How the table is read, in sentences."""
        without = () if self.best.has_bars else (BARS_NOTE,)
        shown = [note for title, note in READING_NOTES if title in self.best.titles and note not in without]
        return COST_NOTES if self.costly else (BEST_RULE, *shown, f"{NO_FIGURE}: not attacked, or not measured.")

    def markdown(self) -> str:
        """Return the page in Markdown as GitHub and MkDocs show it."""
        lines = [f"# {markdown_text(self.title)}", "", f"**{markdown_text(self.answer.headline.words)}**", ""]
        lines += [markdown_text(f"{self.about}. {self.answer.trust.sentence}"), ""]
        parts = [self._markdown_choices(), [f"## {self.heading}", "", *_markdown_table(self.best, self.links), ""]]
        if self.picture:
            words = markdown_text(". ".join(strip.words for strip in self.pictures))
            parts[0] += [f"![{words}]({self.picture})", ""]
        parts[0] += text_lines(self.texts)
        lines += chain.from_iterable(parts[::-1] if self.costly else parts)
        if self.priced:
            rows = listed([f"[{markdown_text(name)}]({self.costs}.md#{row_anchor(name)})" for name in self.priced])
            lines += [f"{COSTS_WORDS}: {rows}.", ""]
        lines += [markdown_text(" ".join(self.notes)), ""]
        if self.folded:
            head = f'<details markdown="1"><summary>All {self.settings} settings</summary>'
            lines += [head, "", *_markdown_table(self.every), "", "</details>", ""]
        if self.reasons:
            head = f'<details markdown="1"><summary>{self.reasons_heading}</summary>'
            lines += [head, "", *(f"- {markdown_text(f'{name}: {reason}')}" for name, reason in self.reasons)]
            lines += ["", "</details>", ""]
        lines += self._markdown_origins()
        if self.facts or self.commands:
            lines += ["## How it was made", ""]
            lines += [f"- {markdown_text(name)}: {markdown_text(fact)}" for name, fact in self.facts.items()]
            lines += [f"- {markdown_text(name)}: `{command}`" for name, command in self.commands.items()]
        return "\n".join(lines).rstrip() + "\n"

    def _markdown_choices(self) -> list[str]:
        """Return the lines on what to choose."""
        lines = ["## If you must choose", ""]
        for about, words in self.choices:
            lines += [f"{f'*{markdown_text(about)}*: ' if about else ''}{markdown_text(words)}", ""]
        return lines if self.costly else [*lines, markdown_text(CHOICE_RULE), ""]

    def _markdown_origins(self) -> list[str]:
        """Return the lines on where the defenses come from."""
        if not self.origins:
            return []
        lines = [f"## {ORIGINS_HEADING}", ""]
        for one in self.origins:
            paper = f", [paper]({one.link})" if one.link else ""
            page = f", [its claims beside our records]({self.links[one.name]})" if one.name in self.links else ""
            lines.append(f"- {markdown_text(f'{one.name}: {one.paper}')}{paper}{page}")
        return [*lines, ""]

    @property
    def heading(self) -> str:
        """The heading of the table."""
        if self.costly:
            return "What a client pays"
        if any(row.value.usable for table in self.answer.tables for row in table.compared):
            return "Each defense at its best usable setting"
        return "Each defense at the setting that leaks least; none is known to be usable"

    def html(self) -> str:
        """Return the page as one HTML file, which asks nothing of a network and runs no script."""
        from ppbench.report.page.html import template

        words = dict(origins_heading=ORIGINS_HEADING, costs_words=COSTS_WORDS)
        return template("summary").render(board=self, row_anchor=row_anchor, **words)


def row_anchor(defense: str) -> str:
    """Return the name of the place of a defense's first row on a page."""
    return re.sub(r"[^\w-]+", "-", defense)


def _markdown_table(table: SummaryTable, pages: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines of a table.

    pages: addresses that the names of defenses lead to; with it a link can lead to a defense's first row.
    """
    lines = [list(table.titles), ["---"] * len(table.titles)]
    seen: set[str] = set()
    for about, rows in table.groups:
        lines += [[f"**{markdown_text(about)}**", *[""] * (len(table.titles) - 1)]] if about else []
        for row in rows:
            name = next(cell[0] for title, cell in table.pairs(row) if title == NAME_TITLE)
            place = "" if pages is None or name in seen else f'<a id="{row_anchor(name)}"></a>'
            seen.add(name)
            lines.append([_markdown_cell(*pair, place, (pages or {}).get(name, "")) for pair in table.pairs(row)])
    return [f"| {' | '.join(line)} |" for line in lines]


def _markdown_cell(title: str, cell: Lines, place: str, page: str) -> str:
    """Return a cell; of a name with an anchor `place`, linked to `page` unless that is ""."""
    lines = [markdown_text(line) for line in cell] or [NO_FIGURE]
    if title != NAME_TITLE:
        return "<br>".join(lines)
    name = f"**{lines[0]}**"
    return "<br>".join([place + (f"[{name}]({page})" if page else name), *lines[1:]])


def summary_of(store: Store, title: str, images: ImagesOf | None = None) -> BoardSummary:
    """Return the summary of a folder's or an archive's readable records. UsageError: no record can be read.

    images: of a record, None for those that the store keeps.
    """
    from ppbench.report.page.html import introduction_of, strips_of

    with loaded_records(store) as (records, problems):
        if not records:
            raise UsageError(f"{store.out} holds no records; give the --out of an evaluation.")
        harness, frame = check_harness(tolerant(soundness_of, problems)(store)), frame_of(records)
        answer = answer_of(frame, harness, tolerant(partial(time_of, store.files), problems))
        album = Album(tolerant(images or store.images, problems))
        pictures = tuple(strip for table in answer.every for strip in strips_of(table, album))
    best = [[SummaryRow(r.value, _verdict(r), _rank_words(r.rank)) for r in _ordered(table)] for table in answer.every]
    every = [[SummaryRow(v, v.verdict) for r in table.rows for v in r.by_control] for table in answer.every]
    words = distinct_words(answer.every)
    columns = COST_COLUMNS if costs_alone(answer.tables) else SUMMARY_COLUMNS
    shown, whole = _table((RANK_COLUMN, *columns), words, best), _table(columns, words, every)
    choices = tuple(choices_of(answer.tables))
    return BoardSummary(
        title, answer, choices, shown, whole,
        reasons=_reasons(answer.tables),
        origins=tuple(one for name in _defenses(answer.tables) if (one := introduction_of(name)).paper),
        pictures=pictures,
        texts=tuple(text_samples([*zip(answer.every, words, strict=True)])),
        problems=tuple(problems),
    )  # fmt: skip


def _defenses(tables: Sequence[Overview]) -> list[str]:
    """Return the names of the defenses that are compared, in alphabetical order."""
    return sorted({row.value.entry.defense.id for table in tables for row in table.compared})


def _reasons(tables: Sequence[Overview]) -> tuple[tuple[str, str], ...]:
    """Return why no epsilon holds, by defense, each reason once."""
    settings = [v for table in tables for row in table.compared for v in row.grid if not sends_nothing(v)]
    stated = [(v.entry.defense.id, v.entry.sample.privacy.reason) for v in settings if stated_epsilon(v) is None]
    return tuple(sorted({(name, reason) for name, reason in stated if reason}))


def _ordered(table: Overview) -> list[Standing]:
    """Return the rows: the undefended model, by rank, then the usable ones, each as they leak; of costs by name."""
    if not table.questions:
        return list(table.rows)
    return sorted(table.rows, key=_row_place)


def _row_place(row: Standing) -> tuple[object, ...]:
    none, useless = row.value.entry.defense.id != "none", row.value.usable is False
    return none, row.rank is None, row.rank or (), useless, least_order(row.value)


def _verdict(row: Standing) -> str:
    """Return a row's verdict; of the undefended model, its setting's."""
    return row.verdict if row.value.entry.role == "compared" else row.value.verdict


def _rank_words(rank: tuple[int, int] | None) -> str:
    return "" if rank is None else "-".join(dict.fromkeys(map(str, rank)))


def _table(
    columns: Sequence[SummaryColumn], words: Sequence[str], groups: Sequence[Sequence[SummaryRow]]
) -> SummaryTable:
    """Return a table without the columns that would be empty."""
    cells = [[[cell(row) for _, cell in columns] for row in rows] for rows in groups]
    shown = [k for k in range(len(columns)) if any(any(row[k]) for rows in cells for row in rows)]
    titles = tuple(columns[k][0] for k in shown)
    kept = tuple(tuple(tuple(row[k] for k in shown) for row in rows) for rows in cells)
    return SummaryTable(titles, tuple(zip(words, kept, strict=True)))


# -- cells of the summary ----------------------------------------------------------------------------------------------
def _name(row: SummaryRow) -> Lines:
    name = row.setting.entry.defense.id
    return ("undefended",) if name == "none" else tuple(filter(None, (name, parameter_words(row.setting))))


def _accuracy(row: SummaryRow) -> Lines:
    """Return accuracy and points, or the squared error; and whether the model is usable where it is not."""
    v = row.setting
    if v.accuracy is None:
        return () if v.mse is None else (f"MSE {v.mse:.3g}",)
    points = () if v.loss is None else (f"{round(v.loss, 1) + 0.0:+.1f} points",)
    return (f"{v.accuracy:.1%}{v.counted}", *points, *(("not usable",) if v.usable is False else ()))


def _leak(row: SummaryRow) -> Lines:
    """Return the verdict, and the worst case with its bar, its interval, and a blind guess."""
    v, verdict = row.setting, row.verdict
    if sends_nothing(v):
        return ("not applicable: nothing is sent",)
    metric = v.metric
    if metric is None or metric.value is None:
        return (verdict, *_outputs(v))
    modality = modality_of(v.entry.sample.config)
    if not modality.decibels:
        return verdict, modality.brief(metric.value) + _interval(metric, 100)
    filled = round(BAR * min(max(metric.value / BAR_END_DB, 0.0), 1.0))
    blind = () if v.leak is None or v.leak.blind is None else (f"blind guess {v.leak.blind:.1f}",)
    full, rest = BAR_MARKS
    return verdict, full * filled + rest * (BAR - filled), f"{metric.value:.1f} dB{_interval(metric)}", *blind


def _outputs(setting: Setting) -> Lines:
    """Return the share of a model's decisions that are read, or the error of its outputs."""
    shares = _share(setting.outputs, "agreement")
    if shares:
        return (f"{shares[0]} of decisions read{''.join(f' {line}' for line in shares[1:])}",)
    error = None if setting.outputs is None else setting.outputs.metric("output_error")
    return () if error is None or error.value is None else (f"outputs to {error.value:.2%}",)


def _interval(metric: Metric, factor: float = 1.0) -> str:
    """Return " [17.2, 19.7]", the ends times `factor`; "" without an interval."""
    if metric.low is None or metric.high is None:
        return ""
    return f" [{factor * metric.low:.1f}, {factor * metric.high:.1f}]"


def _share(record: Measured | None, name: str) -> Lines:
    """Return a share and its interval, in percent."""
    metric = None if record is None else record.metric(name)
    if metric is None or metric.value is None:
        return ()
    ends = () if metric.low is None or metric.high is None else (f"[{100 * metric.low:.0f}, {100 * metric.high:.0f}]",)
    return (f"{metric.value:.0%}", *ends)


def _members(row: SummaryRow) -> Lines:
    """Return how often members of the training and of a batch are told right, and how many canaries are found."""
    pairs = (
        ("", _share(row.setting.members, "asr")),
        ("of a batch ", _share(row.setting.batch, "batch_asr")),
        ("canaries ", _share(row.setting.canaries, "canary_tpr_at_1pct_fpr")),
    )
    return tuple(f"{head}{' '.join(lines)}" for head, lines in pairs if lines)


def _epsilon(row: SummaryRow) -> Lines:
    """Return the stated epsilon with its delta, or that it is no guarantee, or that there is none."""
    words = guarantee_words(row.setting).removeprefix("epsilon ")
    if not words and row.setting.entry.role == "compared":
        return ("not applicable" if sends_nothing(row.setting) else "none",)
    return tuple(re.split(r" at (?=delta)| \((?=epsilon)", words.removesuffix(")"))) if words else ()


def _ratio(name: str) -> Callable[[SummaryRow], Lines]:
    """Return the cell of a ratio to the undefended client, over all seeds."""
    return lambda row: _span_of([None if v.cost is None else getattr(v.cost.ratios, name) for v in row.setting.values])


def _span_of(values: Sequence[float | None]) -> Lines:
    """Return "17.2x", over seeds "13.3 to 18.8x"; small ratios as "1/138"; () where one is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return ()
    return (" to ".join(dict.fromkeys(map(_ratio_words, (min(known), max(known))))),)


def _ratio_words(ratio: float) -> str:
    return "none" if ratio == 0 else f"1/{1 / ratio:,.0f}" if ratio < 0.01 else f"{ratio:.2f}x"


def _time(row: SummaryRow) -> Lines:
    return _span_of([None if v.cost is None or v.cost.time is None else v.cost.time.ratio for v in row.setting.values])


def _encryption(row: SummaryRow) -> Lines:
    """Return what encryption adds to a round, by the seed shown."""
    cost = row.setting.shown.cost
    return () if cost is None or not cost.encryption else (cost.encryption.removeprefix("encryption adds "),)


def _bytes(name: str, ratio: str = "") -> Callable[[SummaryRow], Lines]:
    """Return the cell of bytes of a client, of the seed shown; ratio: to the undefended client, shown below them."""

    def cell(row: SummaryRow) -> Lines:
        from ppbench.report.page.html import byte_size

        amount = getattr(row.setting.entry.sample.cost, name)
        return () if amount is None else (byte_size(amount), *(_ratio(ratio)(row) if ratio else ()))

    return cell


RANK_COLUMN: SummaryColumn = ("Rank", lambda row: (row.rank,) if row.rank else ())
SUMMARY_COLUMNS: tuple[SummaryColumn, ...] = (
    (NAME_TITLE, _name),
    ("Accuracy", _accuracy),
    ("Leak, worst case", _leak),
    ("Re-identified", lambda row: _share(row.setting.reidentified, "reidentified")),
    ("Labels", lambda row: _share(row.setting.labels, "label_accuracy")),
    ("Members", _members),
    ("Epsilon", _epsilon),
    ("Upload", _ratio("up")),
    ("Time", _time),
)
COST_COLUMNS: tuple[SummaryColumn, ...] = (
    (NAME_TITLE, _name),
    ("Upload", _bytes("bytes_up", "up")),
    ("Download", _bytes("bytes_down", "down")),
    ("Set-up", _bytes("bytes_setup")),
    ("Peak memory", _bytes("memory_peak", "memory")),
    ("Time", _time),
    ("Encryption adds", _encryption),
    ("Epsilon", _epsilon),
)
READING_NOTES = (
    (
        "Accuracy",
        "Accuracy is the mean over seeds, in points beside the undefended model; leaks are of the seed that leaks "
        "most, with 95% intervals.",
    ),
    (
        "Rank",
        "Rows whose intervals overlap share ranks; rows that are not usable, or that no attack is shown to know, have "
        "none.",
    ),
    ("Leak, worst case", BARS_NOTE),
    ("Members", "Members: share of right membership decisions, chance 50%."),
    ("Epsilon", "No guarantee: at such an epsilon an attacker at even odds may be right 99.995% of the time."),
    ("Upload", "Upload and time: relative to an undefended client."),
)
"""Sentences on columns, shown with them."""
COST_NOTES = (
    "Bytes are of one client in one round; the set-up counts once. Below them, and as the time, stands the ratio to an "
    "undefended client, over all seeds.",
    "Nothing is ranked by cost: it says nothing about privacy.",
)
"""How the tables are read, in sentences."""
