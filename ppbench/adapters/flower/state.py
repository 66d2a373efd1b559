"""What a strategy keeps between rounds, as `held` has it, with Flower's records."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ppbench.adapters import held
from ppbench.adapters.flower.records import Content, content, records
from ppbench.base.tree import Tree, node

WHERE = "the strategy"
_RECORDS = {cls.__name__: cls for cls in (ArrayRecord, ConfigRecord, MetricRecord)}


@node
class Recorded:
    """One of Flower's records. kind: its class; content: of a RecordDict that holds it."""

    kind: str
    content: Content


def kept(strategy: Any) -> Tree:
    """Return a tree of copies of all that a strategy holds and that is no code (ProtocolError: it cannot be copied)."""
    return held.kept(strategy, WHERE, _recorded)


def restored(fresh: Any, tree: Tree) -> Any:
    """Return a `fresh` strategy with what a tree of `kept` holds."""
    return held.restored(fresh, tree, WHERE, _record)


def _recorded(value: Any) -> Recorded | None:
    if isinstance(value, RecordDict):
        return Recorded("RecordDict", content(value))
    name = type(value).__name__
    return Recorded(name, content({"it": value})) if isinstance(value, _RECORDS.get(name, ())) else None


def _record(tree: Any) -> Any:
    if not isinstance(tree, Recorded):
        return None
    found = records(tree.content)
    return found if tree.kind == "RecordDict" else found["it"]
