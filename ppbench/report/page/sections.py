"""What stands on the page for each board, in words."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from ppbench.questions.base import Question, question_of
from ppbench.records.figure import best
from ppbench.records.schema import Metric
from ppbench.report.cap import Cap
from ppbench.report.controls import rebuilt_share
from ppbench.report.frame import Key
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.evaluations import ALONE
from ppbench.report.worst import Measured

AUDITED = {"auc": "Average, AUC", "tpr_at_1pct_fpr": "Average, TPR at 1 % FPR", "epsilon_lower": "ε at least"}
"""Further figures of audits: each by the attack that is strongest in it, which may be another than the worst case."""


@dataclass(frozen=True)
class Chart:
    """One figure. svg: the drawing, None where the page has no place for it; caps: of a PPC the CAP of each line."""

    title: str
    svg: Markup | None
    caps: tuple[tuple[str, Cap], ...] = ()


@dataclass(frozen=True)
class Section:
    """One board with what is drawn for it.

    anchor: its place on the page; strips: data URIs by row, or None; tradeoff: all settings in one figure.
    """

    board: Board
    anchor: str
    strips: tuple[str | None, ...]
    tradeoff: Chart | None
    ppcs: tuple[Chart, ...]
    curves: tuple[Chart, ...]

    @property
    def question(self) -> Question:
        """What was asked."""
        return question_of(self.board.setting.kind)

    @property
    def short(self) -> str:
        """What the board is about in a few words, for links and rows: "Reconstruction, server/1, random weights"."""
        return words_of(self.board.setting)

    @property
    def group(self) -> str:
        """Suite, data and network: boards of one group stand together."""
        setting = self.board.setting
        public = f", {setting.public} public" if setting.public else ""
        return f"{setting.suite}: {setting.data}, {setting.train} examples{public}, {setting.network}"

    @property
    def menu(self) -> str:
        """The group in few words: the suite, or where nobody's suite asked the data and the network."""
        setting = self.board.setting
        return f"{setting.data}, {setting.network}" if setting.suite == ALONE else setting.suite

    @property
    def weights(self) -> str:
        """Which model is attacked."""
        return weights(self.board.setting)

    @property
    def batch(self) -> str:
        """What a probed client held and did, in words; "" where no client was probed."""
        return batch_of(self.board.setting)

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Metrics of the worst case, with their titles; of audits, those that some attack gave."""
        own = self.question.columns(self.board.headline)
        measured = {m.name for e in self.board.entries for r in e.records for m in r.metrics}
        return own + tuple(c for c in AUDITED.items() if self._audited and c[0] in measured and c not in own)

    @property
    def _audited(self) -> bool:
        return self.question.audits and self.board.setting.stage == "audit"

    def shown(self, entry: Entry, name: str) -> Measured | None:
        """Return what has the metric `name` stands in the row: of an audit's, the strongest in it."""
        return best(entry.records, name) if self._audited and name in AUDITED else entry.worst

    @property
    def utility(self) -> str:
        """What the column of the model's use is called."""
        numbers = [entry.sample.utility for entry in self.board.entries]
        return "Error" if any(u.accuracy is None and u.mse is not None for u in numbers) else "Accuracy"


def weights(setting: Key) -> str:
    """Return which model a board attacks, in words."""
    if setting.stage == "audit":
        return f"an audited training ({setting.canaries} canaries, {setting.references} reference runs)"
    if question_of(setting.kind).source == "model":
        return "the model that clients train on" if setting.stage == "iterate" else "the delivered model"
    return {"init": "random weights", "final": "trained weights"}.get(setting.stage, setting.stage)


def batch_of(setting: Key) -> str:
    """Return what a probed client held and did, in words; "" where no client was probed."""
    if question_of(setting.kind).source != "probe":
        return ""
    what = "" if setting.probe == "gradient" else ", local training"
    return f"batch {setting.batch}{what}" + (f", {setting.probe_rounds} rounds" if setting.probe_rounds > 1 else "")


def words_of(setting: Key) -> str:
    """Return a board in a few words: "Reconstruction, server/1, random weights, batch 1"."""
    words = setting.kind.capitalize(), setting.threat, weights(setting), batch_of(setting)
    return ", ".join(word for word in words if word)


def metric_of(record: Measured, name: str) -> Metric | None:
    """Return a metric, or the share of its victims that are rebuilt."""
    return rebuilt_share(record) if name == "share_rebuilt" else record.metric(name)


def about(setting: Key) -> str:
    """Return what a board attacks, in words: the adversary, the model and the batch."""
    batch = "" if question_of(setting.kind).source == "model" else f", batch {setting.batch}"
    return f"{setting.threat}, {weights(setting)}{batch}"
