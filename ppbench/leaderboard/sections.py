"""What stands on the page for each board, in words and drawings, and the table of costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ppbench.adversary.attack import RECORD_KINDS
from ppbench.controls import NEAR, best, rebuilt_share
from ppbench.leaderboard.boards import Board, Entry, Setting, adaptive, network
from ppbench.leaderboard.costs import Ratios, TimesOf, relative_costs
from ppbench.leaderboard.curves import curve_svg, curves
from ppbench.leaderboard.figures import Line, Ppc, ppc_svg
from ppbench.leaderboard.series import caps
from ppbench.metrics.cap import DISTANCE_OF_KIND, Cap, ppc_point, series_key
from ppbench.records.schema import Metric, Record
from ppbench.records.times import ClientTime

TITLES = {
    "reconstruction": "Reconstruction and label recovery",
    "membership": "Membership inference",
    "extraction": "Extraction of the true model's outputs",
    "tracing": "Tracing",
}
# The figures of a worst case, by a board's headline; boards of images have a table of their own.
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "psnr_median": (),
    "rmse_mean": (("rmse_mean", "Relative error"), ("share_rebuilt", f"Within {NEAR:.0%}")),
    "auc": (
        *(("auc", "AUC"), ("asr", "ASR")),
        *(("tpr_at_1pct_fpr", "TPR at 1 % FPR"), ("tpr_at_0.1pct_fpr", "TPR at 0.1 % FPR")),
    ),
    "canary_auc": (("canary_auc", "Canaries, AUC"), ("canary_tpr_at_1pct_fpr", "Canaries, TPR at 1 % FPR")),
    "agreement": (("agreement", "Decisions read"), ("output_error", "Relative error")),
    "output_error": (("output_error", "Relative error"),),
    "tracing_accuracy": (("tracing_accuracy", "Traced to the owner"),),
}

AUDITED = (
    *(("auc", "Average, AUC"), ("tpr_at_1pct_fpr", "Average, TPR at 1 % FPR")),
    ("epsilon_lower", "ε at least"),
)
"""Further figures of audits: each by the attack that is strongest in it, which may be another than the worst case."""


@dataclass(frozen=True)
class Drawing:
    """A PPC figure of one board: the SVG, and each line's attack with its CAP."""

    defense: str
    svg: Markup
    caps: tuple[tuple[str, Cap], ...]


@dataclass(frozen=True)
class Section:
    """One board with what is drawn for it. strips: data URIs by row, None where a row has no images.

    curves: budget or ROC curves, each with its title.
    """

    board: Board
    strips: tuple[str | None, ...]
    drawings: tuple[Drawing, ...]
    curves: tuple[tuple[str, Markup], ...] = ()

    @property
    def title(self) -> str:
        """What the board is about."""
        return TITLES[self.board.setting.kind]

    @property
    def weights(self) -> str:
        """Which model is attacked."""
        return weights(self.board.setting)

    @property
    def probes(self) -> bool:
        """Whether batches of victims were probed; else records were asked about."""
        return self.board.setting.kind not in RECORD_KINDS

    @property
    def batch(self) -> str:
        """What a probed client held and did, in words; "" where no client was probed."""
        setting = self.board.setting
        if not self.probes:
            return ""
        what = "" if setting.probe == "gradient" else ", local training"
        return f"batch {setting.batch}{what}" + (f", {setting.probe_rounds} rounds" if setting.probe_rounds > 1 else "")

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Metrics of the worst case, with their titles; of audits, those that some attack gave."""
        own, given = (
            COLUMNS[self.board.headline],
            {m.name for e in self.board.entries for r in e.records for m in r.metrics},
        )
        return own + tuple(c for c in AUDITED if self._audited and c[0] in given and c not in own)

    @property
    def _audited(self) -> bool:
        return self.board.setting.kind == "membership" and self.board.setting.stage == "audit"

    def shown(self, entry: Entry, name: str) -> Record | None:
        """Return the record whose metric `name` stands in the row: of an audit's, the strongest in it."""
        return best(entry.records, name) if self._audited and name in dict(AUDITED) else entry.worst

    @property
    def utility(self) -> str:
        """What the column of the model's use is called."""
        numbers = [entry.sample.utility for entry in self.board.entries]
        return "Error" if any(u.accuracy is None and u.mse is not None for u in numbers) else "Accuracy"


def weights(setting: Setting) -> str:
    """Return which model a board attacks, in words."""
    if setting.stage == "audit":
        return "an audited training"
    if setting.kind in RECORD_KINDS:
        return "the model that clients train on" if setting.stage == "iterate" else "the delivered model"
    return {"init": "random weights", "final": "trained weights"}.get(setting.stage, setting.stage)


def metric_of(record: Record, name: str) -> Metric | None:
    """Return a record's metric, or the share of its victims that are rebuilt."""
    return rebuilt_share(record) if name == "share_rebuilt" else record.metric(name)


@dataclass(frozen=True)
class CostRow:
    """What one defense setting costs a client: in itself (the entry's), and beside `none` of the same federation.

    bound: the largest lower bound on epsilon that an audit of the setting gave, to stand beside a claimed epsilon.
    """

    entry: Entry
    ratios: Ratios
    time: ClientTime | None
    bound: Metric | None = None

    @property
    def refuted(self) -> bool:
        """Whether the audit refutes the claimed epsilon; its delta is the claimed one."""
        claimed, bound = self.entry.sample.privacy.epsilon, None if self.bound is None else self.bound.value
        return claimed is not None and bound is not None and bound > claimed

    @property
    def setting(self) -> str:
        """Data, network and federation in words."""
        config = self.entry.sample.config
        fed, model = config.federation, network(config.model.id, config.model.options)
        about = f"{config.data.name}, {config.data.train} examples, {model}"
        return f"{about}, {fed.clients} clients, {fed.rounds} rounds, seed {config.seed}"


def drawn_curves(board: Board) -> tuple[tuple[str, Markup], ...]:
    """Return the board's budget or ROC curves, each with its title."""
    return tuple((c.title, Markup(curve_svg(c, inline=True))) for c in curves(board, about(board.setting)))


def about(setting: Setting) -> str:
    """Return what a board attacks, in words: the adversary, the model and the batch."""
    batch = "" if setting.kind in RECORD_KINDS else f", batch {setting.batch}"
    return f"{setting.threat}, {weights(setting)}{batch}"


def figures(board: Board, records: Sequence[Record]) -> list[Ppc]:
    """Return the PPC figures of a board: one a defense and distance, with at least two control values."""
    lines: dict[tuple[str, str, str], dict[tuple[str, bool], list[Record]]] = defaultdict(dict)
    for entry in board.entries:
        for record in entry.records:
            attack, control = record.config.attack, entry.defense.control
            if ppc_point(record) is None or control is None:
                continue
            key = (entry.defense.id, control.name, DISTANCE_OF_KIND[attack.kind])
            name = _line_name(record)
            lines[key].setdefault((name, adaptive(record, records)), []).append(record)
    found = []
    for (defense, control_name, distance), attacks in sorted(lines.items()):
        drawn = []
        for (name, knows), members in sorted(attacks.items()):
            points = tuple(point for r in members if (point := ppc_point(r)) is not None)
            drawn.append(Line(name, knows, points))
        if len({point.control for line in drawn for point in line.points}) > 1:
            batch = "" if board.setting.kind in RECORD_KINDS else f"batch {board.setting.batch}, "
            title = f"{defense}, {batch}{weights(board.setting)}"
            found.append(Ppc(title, control_name, distance, tuple(drawn)))  # type: ignore[arg-type]
    return found


def _line_name(record: Record) -> str:
    """Return what a line of a figure is called: the attack, whose images it uses, and the victims' role."""
    attack, role = record.config.attack, record.config.role
    name = attack.id if attack.follows is None else f"{attack.id} after {attack.follows}"
    return f"{name} ({role})" if role else name


def drawings(board: Board, records: Sequence[Record]) -> tuple[Drawing, ...]:
    """Return the board's figures, each with the CAP of every attack on it; none of what a model is delivered for."""
    if board.setting.intended:
        return ()
    series, drawn = caps(records), []
    for ppc in figures(board, records):
        cap_of: dict[str, tuple[str, Cap]] = {}
        for entry in board.entries:
            for record in entry.records:
                config = record.config
                same = DISTANCE_OF_KIND[config.attack.kind] == ppc.distance and config.defense.control is not None
                if same and ppc.title.startswith(f"{config.defense.id}, "):
                    key = series_key(config)
                    cap_of[key] = (_line_name(record), series[key].main)
        svg = Markup(ppc_svg(ppc, inline=True))
        drawn.append(Drawing(ppc.title.split(",")[0], svg, tuple(sorted(cap_of.values(), key=lambda c: c[0]))))
    return tuple(drawn)


def costs(found: Sequence[Board], records: Sequence[Record], times: TimesOf) -> list[CostRow]:
    """Return one row a defense setting and federation; of each federation `none` first."""
    relative, entries = relative_costs(records), dict[str, Entry]()
    for board in found:
        for entry in board.entries:
            entries.setdefault(_training(entry.sample), entry)
    bounds = _bounds(records)
    table = [
        CostRow(e, relative[e.sample.cell_id], times(e.sample), bounds.get(_training(e.sample)))
        for e in entries.values()
    ]

    def order(row: CostRow) -> tuple[str, bool, str, float]:
        defense = row.entry.defense
        return row.setting, defense.id != "none", defense.id, _control(row.entry)

    return sorted(table, key=order)


def _training(record: Record) -> str:
    """Return what the cells of one training share: suite, seed, data, network, federation and defense."""
    config = record.config
    parts = config.data, config.model, config.federation, config.defense
    return f"{config.suite} {config.seed} " + "".join(part.model_dump_json() for part in parts)


def _bounds(records: Sequence[Record]) -> dict[str, Metric]:
    """Return the largest lower bound on epsilon that audits of each training gave."""
    audited: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        audited[_training(record)].append(record)
    strongest = {key: best(some, "epsilon_lower") for key, some in audited.items()}
    found = {key: record.metric("epsilon_lower") for key, record in strongest.items() if record is not None}
    return {key: metric for key, metric in found.items() if metric is not None}


def _control(entry: Entry) -> float:
    return 0.0 if entry.defense.control is None else entry.defense.control.value
