"""The page's section of each board."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from ppbench.metrics.modality import modality_of
from ppbench.questions.base import Question, metric_specs, question_of
from ppbench.questions.membership import AUC, EPSILON_LOWER, TPR_1
from ppbench.records.figure import best
from ppbench.records.schema import Metric
from ppbench.report.cap import Cap
from ppbench.report.controls import rebuilt_share
from ppbench.report.entries import Board, Entry
from ppbench.report.frame import Key
from ppbench.report.titles import ALONE
from ppbench.report.words import STAGES
from ppbench.report.worst import Measured

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
        """The board in a few words, for links and rows: "Reconstruction, server/1, random weights"."""
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
    def weights(self) -> str:
        """The attacked model, in words."""
        return weights_words(self.board.setting)

    @property
    def batch(self) -> str:
        """The probed batch in words; "" where no client was probed."""
        return batch_of(self.board.setting)

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
    """Return a board in a few words: "Reconstruction, server/1, random weights, batch 1"."""
    words = setting.kind.capitalize(), setting.threat, weights_words(setting), batch_of(setting)
    return ", ".join(word for word in words if word)


def section_metric(record: Measured, name: str) -> Metric | None:
    """Return a metric of a record; "share_rebuilt" is the share of its victims that are rebuilt."""
    return rebuilt_share(record) if name == "share_rebuilt" else record.metric(name)


def board_target(setting: Key) -> str:
    """Return the target of a board in words: the adversary, the model and the batch."""
    batch = "" if question_of(setting.kind).source == "model" else f", batch {setting.batch}"
    return f"{setting.threat}, {weights_words(setting)}{batch}"
