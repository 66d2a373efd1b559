"""Gated searches: where the undefended model withstands a search, its defended versions are not searched.

The quick portfolio (`--attack quick`, the default) searches defended uploads of a stage and a batch size only if those
of `none` fell there, or may have. Questions without a search, labels and members, are asked everywhere, and so are all
questions of the first answer: the smallest batch at the first stage. The limit: a defense may leak more than none at
all, as `ppdl` does on trained MNIST networks (18.4 dB where `none` gives 11.8; there `none` falls too, so the search
runs). Where the undefended model withstands, such a leak goes unseen; `--attack standard` and `all` run every cell.
"""

from __future__ import annotations

from dataclasses import replace

from ppbench.questions.base import question_of
from ppbench.records.store import Store
from ppbench.report.unasked import undefended_stands
from ppbench.run.cells import Cell, CellGroup, cells
from ppbench.run.experiment import Experiment


def gates_searches(experiment: Experiment) -> bool:
    """Return whether an evaluation gates its searches."""
    return "quick" in experiment.config.attacks


def searches(cell: Cell) -> bool:
    """Return whether a cell searches for inputs, or follows one that does."""
    return question_of(cell.attack.kind).inputs or cell.follows is not None


def in_first_answer(experiment: Experiment, group: CellGroup) -> bool:
    """Return whether a group belongs to the first answer: the smallest batch at the first stage, or the final model."""
    config = experiment.config
    if group.records:
        return group.stage == "final"
    first = "init" if "init" in config.stages else "final"
    return (group.stage, group.batch) == (first, min(config.attack_batch))


def gate_of(experiment: Experiment, group: CellGroup) -> frozenset[str]:
    """Return the names of the cells of `none` that decide whether a group is searched; empty if it always is."""
    names = [point.defense.name for point in experiment.points]
    probed = not group.records and group.stage != "audit"
    if (
        not gates_searches(experiment)
        or not probed
        or in_first_answer(experiment, group)
        or names[group.point] == "none"
    ):
        return frozenset()
    beside = replace(group, point=names.index("none"), role="")
    return frozenset(cell.id for cell in cells(experiment, beside) if searches(cell))


def is_redundant(experiment: Experiment, group: CellGroup) -> bool:
    """Return whether searching a group repeats another: pure noise is the same at every stage and batch size."""
    alone = experiment.points[group.point].defense.name == "full_noise" != experiment.config.defense
    return gates_searches(experiment) and alone and not group.records and not in_first_answer(experiment, group)


def gate_withstood(store: Store, gate: frozenset[str]) -> bool:
    """Return whether the undefended model withstood the cells `gate`, which have all ended; False for no cells."""
    return undefended_stands([store.load(cell) for cell in sorted(gate) if store.has(cell)])
