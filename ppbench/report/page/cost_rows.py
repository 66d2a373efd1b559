"""The table of costs: one row a defense setting and federation, with what an audit says of the claimed epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.records.figure import best
from ppbench.records.schema import Metric, Record
from ppbench.records.times import ClientTime
from ppbench.report.frame import TRAINED, Key, frame_of, network
from ppbench.report.page.costs import Ratios, TimesOf, relative_costs
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.evaluations import ALONE


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
        suite = "" if config.suite == ALONE else f"{config.suite}: "
        about = f"{suite}{config.data.name}, {config.data.train} examples, {model}"
        return f"{about}, {fed.clients} clients, {fed.rounds} rounds, seed {config.seed}"


def costs(found: Sequence[Board], records: Sequence[Record], times: TimesOf) -> list[CostRow]:
    """Return one row a defense setting and federation; of each federation `none` first."""
    frame, entries = frame_of(records), dict[Key, Entry]()
    relative, trained = relative_costs(frame), frame.by(TRAINED)
    for board in found:
        for entry in board.entries:
            entries.setdefault(entry.key.only(TRAINED), entry)
    table = [
        CostRow(e, relative[e.sample.cell_id], times(e.sample), _bound(trained[key])) for key, e in entries.items()
    ]

    def order(row: CostRow) -> tuple[str, bool, str, float]:
        defense = row.entry.defense
        return row.setting, defense.id != "none", defense.id, _control(row.entry)

    return sorted(table, key=order)


def _bound(records: Sequence[Record]) -> Metric | None:
    """Return the largest lower bound on epsilon that audits of one training gave."""
    strongest = best(records, "epsilon_lower")
    return None if strongest is None else strongest.metric("epsilon_lower")


def _control(entry: Entry) -> float:
    return 0.0 if entry.defense.control is None else entry.defense.control.value
