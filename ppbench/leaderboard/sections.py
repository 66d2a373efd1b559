"""What stands on the page for each board, in words and drawings, and the table of costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ppbench.adversary.attack import RECORD_KINDS
from ppbench.controls import NEAR, rebuilt_share
from ppbench.leaderboard.boards import Board, Entry, Setting, adaptive, network
from ppbench.leaderboard.costs import Ratios, TimesOf, relative_costs
from ppbench.leaderboard.figures import Line, Ppc, ppc_svg
from ppbench.leaderboard.table import caps
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
    "agreement": (("agreement", "Decisions read"), ("output_error", "Relative error")),
    "output_error": (("output_error", "Relative error"),),
    "tracing_accuracy": (("tracing_accuracy", "Traced to the owner"),),
}


@dataclass(frozen=True)
class Drawing:
    """A PPC figure of one board: the SVG, and each line's attack with its CAP."""

    defense: str
    svg: Markup
    caps: tuple[tuple[str, Cap], ...]


@dataclass(frozen=True)
class Section:
    """One board with what is drawn for it. strips: data URIs by row, None where a row has no images."""

    board: Board
    strips: tuple[str | None, ...]
    drawings: tuple[Drawing, ...]

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
        """Metrics of the worst case, with their titles."""
        return COLUMNS[self.board.headline]

    @property
    def utility(self) -> str:
        """What the column of the model's use is called."""
        numbers = [entry.sample.utility for entry in self.board.entries]
        return "Error" if any(u.accuracy is None and u.mse is not None for u in numbers) else "Accuracy"


def weights(setting: Setting) -> str:
    """Return which model a board attacks, in words."""
    if setting.kind in RECORD_KINDS:
        return "the model that clients train on" if setting.stage == "iterate" else "the delivered model"
    return {"init": "random weights", "final": "trained weights"}.get(setting.stage, setting.stage)


def metric_of(record: Record, name: str) -> Metric | None:
    """Return a record's metric, or the share of its victims that are rebuilt."""
    return rebuilt_share(record) if name == "share_rebuilt" else record.metric(name)


@dataclass(frozen=True)
class CostRow:
    """What one defense setting costs a client: in itself (the entry's), and beside `none` of the same federation."""

    entry: Entry
    ratios: Ratios
    time: ClientTime | None

    @property
    def setting(self) -> str:
        """Data, network and federation in words."""
        config = self.entry.sample.config
        fed, model = config.federation, network(config.model.id, config.model.options)
        about = f"{config.data.name}, {config.data.train} examples, {model}"
        return f"{about}, {fed.clients} clients, {fed.rounds} rounds, seed {config.seed}"


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
            config = entry.sample.config
            about = config.data, config.model, config.federation, entry.defense
            key = f"{config.suite} {config.seed} " + "".join(part.model_dump_json() for part in about)
            entries.setdefault(key, entry)
    table = [CostRow(e, relative[e.sample.cell_id], times(e.sample)) for e in entries.values()]

    def order(row: CostRow) -> tuple[str, bool, str, float]:
        defense = row.entry.defense
        return row.setting, defense.id != "none", defense.id, _control(row.entry)

    return sorted(table, key=order)


def _control(entry: Entry) -> float:
    return 0.0 if entry.defense.control is None else entry.defense.control.value
