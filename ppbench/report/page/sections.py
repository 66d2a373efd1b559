"""Sections of the page: one of each board, and the table of all cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ppbench.metrics.modality import modality_of
from ppbench.metrics.spec import DB
from ppbench.questions.base import Question, metric_specs, question_for, question_of
from ppbench.questions.membership import AUC, EPSILON_LOWER, TPR_1
from ppbench.records.figure import best
from ppbench.records.schema import Metric, Record
from ppbench.report.cap import Cap
from ppbench.report.columns import COLUMN_METRICS, OTHER_HEADLINE, Row, unit_of
from ppbench.report.controls import nothing_to_read, rebuilt_share, value
from ppbench.report.entries import Board, Entry
from ppbench.report.frame import Key
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import foreign_metrics, tuned_text
from ppbench.report.words import ALONE, STAGES
from ppbench.report.worst import Measured

# -- The section of each board --

AUDITED = {
    **{spec.name: f"Average, {spec.title}" for spec in (AUC, TPR_1)},
    EPSILON_LOWER.name: EPSILON_LOWER.title,
}
"""Further figures of audits: each by its own strongest attack, which may not be the worst case."""


@dataclass(frozen=True)
class Chart:
    """One figure. svg: None where the page has no room for it; caps: for a PPC, the CAP of each line."""

    title: str
    svg: Markup | None
    caps: tuple[tuple[str, Cap], ...] = ()


@dataclass(frozen=True)
class Section:
    """One board with its figures.

    anchor: its id on the page; strips: data URIs by row, or None; tradeoff: all settings in one figure.
    """

    board: Board
    anchor: str
    strips: tuple[str | None, ...]
    tradeoff: Chart | None
    ppcs: tuple[Chart, ...]
    curves: tuple[Chart, ...]

    @property
    def question(self) -> Question:
        """The board's question."""
        return question_of(self.board.setting.kind)

    @property
    def measure(self) -> str:
        """The name of the board's headline metric."""
        if self.question.inputs:
            return modality_of(self.board.entries[0].sample.config).figure
        spec = metric_specs().get(self.board.headline)
        return "" if spec is None else spec.title

    @property
    def short(self) -> str:
        """The board in a few words, for links and rows: "Reconstruction, server/1, initial weights"."""
        return board_title(self.board.setting)

    @property
    def group(self) -> str:
        """Suite, data and network: boards of one group stand together."""
        setting = self.board.setting
        public = f", {setting.public} public" if setting.public else ""
        return f"{setting.suite}: {setting.data}, {setting.train} examples{public}, {setting.network}"

    @property
    def menu(self) -> str:
        """The group in few words: the suite, or outside suites the data and the network."""
        setting = self.board.setting
        return f"{setting.data}, {setting.network}" if setting.suite == ALONE else setting.suite

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Metrics of the worst case with titles, plus those in `AUDITED` that an audit has."""
        own = self.question.columns(self.board.headline)
        measured = {m.name for e in self.board.entries for r in e.records for m in r.metrics}
        return own + tuple(c for c in AUDITED.items() if self._audited and c[0] in measured and c not in own)

    @property
    def _audited(self) -> bool:
        return self.question.audits and self.board.setting.stage == "audit"

    def shown(self, entry: Entry, name: str) -> Measured | None:
        """Return the source of the metric `name` in a row: the worst case, for `AUDITED` ones the strongest cell."""
        return best(entry.records, name) if self._audited and name in AUDITED else entry.worst

    @property
    def utility(self) -> str:
        """The title of the utility column: "Accuracy" or "Error"."""
        numbers = [entry.sample.utility for entry in self.board.entries]
        return "Error" if any(u.accuracy is None and u.mse is not None for u in numbers) else "Accuracy"


def weights_words(setting: Key) -> str:
    """Return the model that a board attacks, in words."""
    if setting.stage == "audit":
        audit = setting.audit
        canaries, references = (None, None) if audit is None else (audit.canaries, audit.references)
        return f"an audited training ({canaries} canaries, {references} reference runs)"
    if question_of(setting.kind).source == "model":
        return "the model that clients train on" if setting.stage == "iterate" else "the delivered model"
    return STAGES[setting.stage].weights


def batch_of(setting: Key) -> str:
    """Return the probed batch in words; "" where no client was probed."""
    if question_of(setting.kind).source != "probe":
        return ""
    probe, rounds = setting.probing.probe, setting.probing.probe_rounds
    what = "" if probe == "gradient" else ", local training"
    return f"batch {setting.batch}{what}" + (f", {rounds} rounds" if rounds > 1 else "")


def board_title(setting: Key) -> str:
    """Return a board in a few words: "Reconstruction, server/1, initial weights, batch 1"."""
    words = setting.kind.capitalize(), setting.threat, weights_words(setting), batch_of(setting)
    return ", ".join(word for word in words if word)


def section_metric(record: Measured, name: str) -> Metric | None:
    """Return a metric of a record; "share_rebuilt" is the share of its victims that are rebuilt."""
    return rebuilt_share(record) if name == "share_rebuilt" else record.metric(name)


def board_target(setting: Key) -> str:
    """Return the target of a board in words: the adversary, the model and the batch."""
    batch = "" if question_of(setting.kind).source == "model" else f", batch {setting.batch}"
    return f"{setting.threat}, {weights_words(setting)}{batch}"


# -- The table of all cells: the first as a plain table, and all as JSON for the page's script --

PLAIN_ROWS = 200
"""Rows of the plain table, for print and pages without scripts; leaderboard.csv has them all."""
Field = str | float | None
CellFigure = tuple[str, str, int]
"""Name, title and decimals."""
CELL_ORDER = (
    *("accuracy", "mse", "psnr_median", "psnr_p95", "psnr_worst_decile", "rmse_mean", "ssim_mean", "test_mse_mean"),
    *("lpips_mean", "feat_mse_mean", "evaluations_per_broken", "label_accuracy", "asr", "auc", "canary_auc"),
    *("canary_tpr_at_1pct_fpr", "epsilon_lower", "agreement", "output_error", "tracing_accuracy"),
    *("cap", OTHER_HEADLINE),
)
"""Order of the figures; those of further metrics follow."""


@dataclass(frozen=True)
class PageColumn:
    """One column. kind: "text", "number" or "cell"; digits: decimals of a number, -1 for all."""

    title: str
    kind: str
    of: Callable[[Row, Record], Field]
    digits: int = -1


@dataclass(frozen=True)
class Cells:
    """All cells. plain: the first rows, each with its cell id and texts by column; data: all rows, as JSON."""

    columns: tuple[PageColumn, ...]
    plain: tuple[tuple[str, tuple[str, ...]], ...]
    data: Markup
    total: int


def cell_table(table: Sequence[Row], records: Sequence[Record], known: Knowledge) -> Cells:
    """Return the table of `records`; table: their rows in the order of the CSV; known: which attacks know a defense."""
    from jinja2.utils import htmlsafe_json_dumps  # here: `ppbench.plot` draws sections without jinja2

    by_id = {record.cell_id: record for record in records}
    columns = _columns(table, records, known)
    lines = [[column.of(row, by_id[str(row["cell_id"])]) for column in columns] for row in table]
    plain = tuple(
        (str(row["cell_id"]), tuple(_text(value, column) for value, column in zip(line, columns, strict=True)))
        for row, line in list(zip(table, lines, strict=True))[:PLAIN_ROWS]
    )
    head = [{"title": c.title, "kind": c.kind, "digits": c.digits} for c in columns]
    data = htmlsafe_json_dumps({"columns": head, "rows": lines}, separators=(",", ":"), allow_nan=False)
    return Cells(columns, plain, data, len(table))


def _columns(table: Sequence[Row], records: Sequence[Record], known: Knowledge) -> tuple[PageColumn, ...]:
    """Return the columns, without constant suites and seeds, and without figures that no cell has."""

    def field(title: str, name: str, kind: str = "text") -> PageColumn:
        return PageColumn(title, kind, lambda row, _: row[name])

    def several(column: PageColumn, name: str) -> list[PageColumn]:
        return [column] if len({row[name] for row in table}) > 1 else []

    figures = [f for f in _suiting(cell_figures(), records) if any(row[f[0]] is not None for row in table)]
    figures += [(spec.name, spec.head, spec.digits) for spec in foreign_metrics(records) if spec.head]
    return (
        *several(field("Suite", "suite"), "suite"),
        field("Defense", "defense"),
        PageColumn("Control", "text", lambda row, _: row["control"] or ""),
        field("Value", "control_value", "number"),
        PageColumn("Attack", "text", lambda _, record: _attack(record)),
        PageColumn("Knows", "text", lambda row, record: _knows(row, known.adaptive(record))),
        field("Threat", "threat_model"),
        PageColumn("Data", "text", lambda row, _: f"{row['dataset']}, {row['model']}"),
        field("Stage", "stage"),
        field("Batch", "batch_size", "number"),
        *several(field("Seed", "seed", "number"), "seed"),
        field("n", "n", "number"),
        PageColumn("Status", "text", lambda _, record: "not applicable" if nothing_to_read(record) else record.status),
        *(PageColumn(title, "number", _figure(name), digits) for name, title, digits in figures),
        field("Claimed", "claimed"),
        PageColumn("Remarks", "text", lambda _, record: _remarks(record)),
        field("Cell", "cell_id", "cell"),
    )


def _suiting(figures: Sequence[CellFigure], records: Sequence[Record]) -> list[CellFigure]:
    """Return the figures that suit the inputs of `records`, with titles in the words of their modalities."""
    kinds = [modality_of(record.config) for record in records if question_for(record).inputs]
    titles = {
        OTHER_HEADLINE: " / ".join(sorted({kind.parts_right for kind in kinds if OTHER_HEADLINE in kind.readers}))
    }
    some = figures if any(kind.psnr_shown for kind in kinds) else [f for f in figures if unit_of(f[0]) != DB]
    return [(name, titles.get(name) or title, digits) for name, title, digits in some]


def cell_figures() -> list[CellFigure]:
    """Return name, title and decimals of the figures of the CSV that the page shows, where some cell has them."""
    shown = [("cap", "CAP", 3)]
    for spec in COLUMN_METRICS.values():
        if spec.head and "" in spec.columns:
            shown.append((spec.name, spec.head, spec.digits))
            shown += [(f"{spec.name}_chance", "by chance", spec.digits)] if "_chance" in spec.columns else []
    place = {name: number for number, name in enumerate(CELL_ORDER)}
    return sorted(shown, key=lambda figure: place.get(figure[0].removesuffix("_chance"), len(place)))


def _attack(record: Record) -> str:
    attack = record.config.attack
    return attack.id if attack.follows is None else f"{attack.id} after {attack.follows}"


def _knows(row: Row, adaptive: bool) -> str:
    return "oracle" if row["oracle"] else "adaptive" if adaptive else ""


def _figure(name: str) -> Callable[[Row, Record], Field]:
    def figure(row: Row, record: Record) -> Field:
        number = row[name] if name in row else value(record, name)
        return float(f"{number:.6g}") if isinstance(number, int | float) else None

    return figure


def _remarks(record: Record) -> str:
    """Return the remarks on a cell: the victims' role, why it failed, its tuning and its flags."""
    tuned = tuned_text(record)
    words = [record.config.role, record.reason or ""]
    words.append(f"tuned on {record.config.tuning} other images: {tuned}" if tuned else "")
    words += [f"{flag.code.replace('_', ' ')}: {flag.detail}" for flag in record.flags]
    return "; ".join(word for word in words if word)


def _text(value: Field, column: PageColumn) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:g}" if column.digits < 0 else f"{value:.{column.digits}f}"
