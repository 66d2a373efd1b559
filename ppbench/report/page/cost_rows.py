"""The table of costs: one row a defense setting and federation, with what an audit says of the claimed epsilon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.records.schema import Metric, Record
from ppbench.records.times import ClientTime
from ppbench.report.controls import best
from ppbench.report.page.boards import Board, Entry, network
from ppbench.report.page.costs import Ratios, TimesOf, relative_costs
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
        if record.metric("epsilon_lower") is not None:
            audited[_training(record)].append(record)
    strongest = {key: best(some, "epsilon_lower") for key, some in audited.items()}
    found = {key: record.metric("epsilon_lower") for key, record in strongest.items() if record is not None}
    return {key: metric for key, metric in found.items() if metric is not None}


def _control(entry: Entry) -> float:
    return 0.0 if entry.defense.control is None else entry.defense.control.value
