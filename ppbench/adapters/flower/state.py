"""Snapshots of a strategy between rounds, as in `held`, with Flower's records."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ppbench.adapters import held
from ppbench.adapters.flower.records import Content, content_tree, record_dict
from ppbench.base.tree import Tree, node

WHERE = "the strategy"
_RECORDS = {cls.__name__: cls for cls in (ArrayRecord, ConfigRecord, MetricRecord)}


@node
class Recorded:
    """One of Flower's records. kind: its class; content: of a RecordDict that holds it alone."""

    kind: str
    content: Content


def strategy_snapshot(strategy: Any) -> Tree:
    """Return a tree of copies of all that a strategy holds, except code (ProtocolError: a value cannot be copied)."""
    return held.snapshot(strategy, WHERE, _recorded)


def restored_strategy(fresh: Any, tree: Tree) -> Any:
    """Return the `fresh` strategy with the attributes of a snapshot."""
    return held.restored(fresh, tree, WHERE, _record)


def _recorded(value: Any) -> Recorded | None:
    if isinstance(value, RecordDict):
        return Recorded("RecordDict", content_tree(value))
    name = type(value).__name__
    return Recorded(name, content_tree({"it": value})) if isinstance(value, _RECORDS.get(name, ())) else None


def _record(tree: Any) -> Any:
    if not isinstance(tree, Recorded):
        return None
    restored = record_dict(tree.content)
    return restored if tree.kind == "RecordDict" else restored["it"]
