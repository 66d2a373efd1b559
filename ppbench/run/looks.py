"""Look before asking: where the undefended model stands, a search of its defended like is taken to tell nothing.

The quick portfolio (`--attack quick`, the default) searches defended uploads of a stage and a batch size only once
those of `none` were searched there and fell, or may have. What is read off without a search, labels and members, is
asked everywhere, and so is all of the first answer: the smallest batch at the first stage. The limit: a defense may
leak more than none at all, as `ppdl` does on trained MNIST networks (18.4 dB where `none` gives 11.8; there none falls
too, so it is asked). Where the undefended model stands that goes unseen; `--attack standard` and `all` ask every cell.
"""

from __future__ import annotations

from dataclasses import replace

from ppbench.questions.base import question_of
from ppbench.records.store import Store
from ppbench.report.unasked import undefended_stands
from ppbench.run.cells import Cell, Group, cells
from ppbench.run.experiment import Experiment


def looks(experiment: Experiment) -> bool:
    """Return whether an evaluation looks before it asks."""
    return "quick" in experiment.config.attacks


def searches(cell: Cell) -> bool:
    """Return whether a cell searches for inputs, or follows one that does."""
    return question_of(cell.attack.kind).inputs or cell.follows is not None


def foremost(experiment: Experiment, group: Group) -> bool:
    """Return whether a group is of the first answer: the smallest batch at the first stage, or the delivered model."""
    config = experiment.config
    if group.records:
        return group.stage == "final"
    first = "init" if "init" in config.stages else "final"
    return (group.stage, group.batch) == (first, min(config.attack_batch))


def gate_of(experiment: Experiment, group: Group) -> frozenset[str]:
    """Return the names of the cells of `none` that decide whether a group is searched; none where it always is."""
    names = [point.defense.name for point in experiment.points]
    probed = not group.records and group.stage != "audit"
    if not looks(experiment) or not probed or foremost(experiment, group) or names[group.point] == "none":
        return frozenset()
    beside = replace(group, point=names.index("none"), role="")
    return frozenset(cell.id for cell in cells(experiment, beside) if searches(cell))


def idle(experiment: Experiment, group: Group) -> bool:
    """Return whether searching a group says what another does: noise is the same at every stage and batch size."""
    alone = experiment.points[group.point].defense.name == "full_noise" != experiment.config.defense
    return looks(experiment) and alone and not group.records and not foremost(experiment, group)


def stands(store: Store, gate: frozenset[str]) -> bool:
    """Return whether the undefended model stood in the cells `gate`, all of which have ended; False for no cells."""
    return undefended_stands([store.load(cell) for cell in sorted(gate) if store.has(cell)])
