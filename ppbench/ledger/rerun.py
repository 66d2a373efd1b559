"""Recompute random cells of a submission, unpredictable for the submitter, and compare them record by record.

Only this detects forged answers and accuracies that are consistent with everything else. One seed gives one result on
one machine, so every score must agree bit for bit. Another processor or version of torch rounds sums differently, and
a search may take another path: there `untolerated_difference` decides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ppbench.questions.base import question_for
from ppbench.records.salt import keep_salt
from ppbench.records.schema import Record, Strict
from ppbench.records.store import Store
from ppbench.report.compare.paired import change
from ppbench.report.compare.samples import rules_for
from ppbench.run.evaluation import compute
from ppbench.run.executors import check_workers, default_workers, make_executor
from ppbench.run.recheck import EPSILON_TOLERANCE
from ppbench.run.schedule import PlannedCells, Progress

RERUN_SHARE = 0.1
RERUN_LEVEL = 0.05
"""Probability of a false alarm, over all compared cells and all of their rules."""
TOLERANCE_WORDS = (
    "same questions, status and bytes sent; epsilon to 1e-6; accuracy within the other's 95 % interval; by each rule "
    "of `ppbench compare` no change shown, victim by victim, at level 0.05 over all rules and cells"
)
NOT_COMPARED = frozenset({"environment", "cost", "cell_id", "config"})
"""Fields of a record that are not compared directly: memory depends on the machine, the name on the configuration."""


@dataclass(frozen=True)
class DrawnCells:
    """Cells to recompute. seed: of the draw; all: number of cells drawn from."""

    cells: tuple[str, ...]
    seed: int
    all: int


def draw_cells(records: Sequence[Record], share: float, seed: int) -> DrawnCells:
    """Draw a share of the cells with plugins of other packages, and of the other cells, at least one each.

    Drawn are the names with the smallest SHA-256 of seed and name: reproducible, but unpredictable without the seed.
    """
    theirs = [r.cell_id for r in records if r.config.defense.code or r.config.attack.code]
    others = sorted({r.cell_id for r in records} - {*theirs})
    chosen = list[str]()
    for some in (theirs, others):
        ranked = sorted(some, key=lambda cell: hashlib.sha256(f"{seed}/{cell}".encode()).digest())
        chosen += ranked[: math.ceil(share * len(some) - 1e-9) or bool(some)]
    return DrawnCells(tuple(sorted(chosen)), seed, len(records))


def recompute(
    planned: Sequence[PlannedCells], cells: Sequence[str], out: Path, salt: str, workers: int | None, progress: Progress
) -> Store:
    """Compute these cells of `planned`, with their trainings, into the new folder `out`; return its store.

    Raises UsageError: a wrong number of workers, or the folder cannot be written.
    """
    check_workers(workers)
    due, chosen = list[PlannedCells](), {*cells}
    for one in planned:
        kept = tuple(cell for cell in one.cells if cell.id in chosen)
        due += [replace(one, cells=kept, gate=frozenset())] if kept else []
    store = Store(out)
    store.prepare()
    keep_salt(out, salt)
    count = workers or default_workers(due[0].experiment.config.device if due else "cpu")
    executor = make_executor("inline" if count == 1 else "local", count, partial(progress.advance, "training"))
    compute(due, due, store, executor, progress, strict=False)
    return store


def first_difference(record: Record, again: Record) -> str:
    """Return the first difference between a record and its recomputation on this machine, "" for none."""
    for place, (one, two) in enumerate(zip(record.victims, again.victims, strict=False)):
        if type(one) is not type(two) or one != two:
            return f"victim {place}: {_field(one, two)}"
    fields = [name for name in Record.model_fields if name not in NOT_COMPARED]
    for name in fields:
        if getattr(record, name) != getattr(again, name):
            return _words(name, getattr(record, name), getattr(again, name))
    costs = (one.cost.model_copy(update={"memory_peak": None}) for one in (record, again))
    return "" if len({*map(str, costs)}) == 1 else "cost differs from what was computed again"


def _field(one: Strict, two: Strict) -> str:
    """Return the first field in which two scores differ, with both values."""
    names = [name for name in type(one).model_fields if getattr(one, name) != getattr(two, name, None)]
    return _words(names[0], getattr(one, names[0]), getattr(two, names[0], None)) if names else "another kind of score"


def _words(name: str, one: object, two: object) -> str:
    short = isinstance(one, str | float | int | bool | None) and isinstance(two, str | float | int | bool | None)
    return f"{name} is {one}, computed again {two}" if short else f"{name} differs from what was computed again"


def untolerated_difference(record: Record, again: Record, cells: int = 1) -> str:
    """Return a difference that another machine does not explain, "" for none; cells: number compared. See
    `TOLERANCE_WORDS`."""
    for name in ("status", "asked"):
        if getattr(record, name) != getattr(again, name):
            return _words(name, getattr(record, name), getattr(again, name))
    sent = [(r.cost.bytes_up, r.cost.bytes_down, r.cost.bytes_setup) for r in (record, again)]
    if sent[0] != sent[1]:
        return _words("bytes", *sent)
    return next(_untolerated(record, again, RERUN_LEVEL / max(1, cells)), "")


def _untolerated(record: Record, again: Record, level: float) -> Iterator[str]:
    one, two = record.privacy.epsilon, again.privacy.epsilon
    if (one is None) != (two is None) or (
        one is not None and not math.isclose(one, two or 0.0, rel_tol=EPSILON_TOLERANCE)
    ):
        yield _words("epsilon", one, two)
    for name in ("accuracy", "mse", "dice"):
        (stated, *_), (value, low, high) = record.utility.figure(name), again.utility.figure(name)
        if (stated is None) != (value is None):
            yield _words(name, stated, value)
        elif stated is not None and low is not None and high is not None and not low <= stated <= high:
            yield f"{name} is {stated:.6g}, computed again {value:.6g} [{low:.6g}, {high:.6g}]"
    yield from _scores(record, again, level)


def _scores(record: Record, again: Record, level: float) -> Iterator[str]:
    """Yield significant changes between the scores of two cells, by the rules and statistics of compare."""
    if [(v.place, v.truth) for v in record.victims] != [(v.place, v.truth) for v in again.victims]:
        yield "its victims are others than those computed again"
        return
    if record.victims == again.victims:
        return
    rules = [rule for rule in rules_for(record) if (m := record.metric(rule.metric)) and m.value is not None]
    for rule in rules:
        effect = change([record], [again], rule, record.cell_id)
        if not effect.certain and effect.p < level / len(rules):
            test = f"p = {effect.p:.2g}, n = {effect.n}"
            yield f"{rule.name} is {effect.base:.6g}, computed again {effect.new:.6g} ({test})"
    if not rules:
        yield f"scores of {question_for(record).name} differ, and no rule says by how much they may"
