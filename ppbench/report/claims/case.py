"""A claim beside the records of one evaluation, and what they say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.federation.claim import Claim
from ppbench.records.schema import Record
from ppbench.report.controls import check_controls
from ppbench.report.verdict.lines import by, figure, labels_of
from ppbench.report.worst import Measured, WorstCase, attack_of, cell_of

Verdict = Literal["falls", "cannot be told", "holds", "identity", "outside the premise"]
"""What becomes of a claim. "identity": the trainings are one to rounding, so that nothing was put to the test;
"outside the premise": what was run is not what the claim is about.
"""


@dataclass(frozen=True)
class Case:
    """A claim beside one evaluation: the defense's cells at its parameters, the undefended model's, and all.

    rival: cells of the defense than which it is claimed to be better; siblings: all claims about the defense.
    """

    claim: Claim
    mine: Sequence[Record]
    none: Sequence[Record]
    everything: Sequence[Record]
    rival: Sequence[Record] = ()
    siblings: Sequence[Claim] = ()

    @property
    def undefended(self) -> Record | None:
        """One of the undefended cells, for what all of them share."""
        return next(iter(self.none), None)


@dataclass(frozen=True)
class Finding:
    """What an evaluation says about a claim.

    to: what it falls to, "" where the verdict says it all; reason: the rule, with its figures; plain, worst: figures of
    the strongest attack that does not know the defense, and of all; cells: names of the cells that they are from; harm:
    how bad the figure is for the claim, on a scale of the rule and the verdict, greater is worse, by default none;
    least, most: what `worst` would be in the same setting if all leaked (or the model were useless), and if nothing did
    (or nothing were lost), "" where the rule has no such ends; own: the figure by the paper's own attack and measure.
    """

    verdict: Verdict
    to: str
    reason: str
    plain: str = ""
    worst: str = ""
    cells: tuple[str, ...] = ()
    harm: float = -math.inf
    least: str = ""
    most: str = ""
    own: str = ""


Judge = Callable[[Case], Finding | str]
"""Returns why the claim cannot be checked, as a clause, where the cells that it is about were not run."""


def decided(fell: bool, to: str, harm: float, reason: str, figures: str, *records: Measured | None) -> Finding:
    """Return that a claim falls to `to`, or that it holds; told: our figures, which are those of `records`."""
    verdict: Verdict = "falls" if fell else "holds"
    return Finding(verdict, f"to {to}" if fell else "", reason, "", figures, cells_of(*records), harm)


def unreliable(case: Case, threat: str) -> str | None:
    """Return what a control says against the attacks of one adversary in this evaluation, a clause, or None."""
    scope = [r for r in case.everything if r.config.threat_model.id == threat]
    bad = next((check.sentence for check in check_controls(scope) if check.ok is not True), None)
    return None if bad is None else f"a control speaks against the attacks: {bad.rstrip('.')}"


def told(case: Case, record: Measured | None, name: str, form: str, unit: str = "") -> str:
    """Return "71.0% [66.3, 75.4] (unmask_regression, kappa=10)"; the control value where there are several."""
    if record is None:
        return "not run"
    label = labels_of(case.mine)
    control = label.get(cell_of(record).cell_id, "") if len(set(label.values())) > 1 else ""
    return f"{figure(record, name, form, unit)} ({by(attack_of(record), control)})"


def cells_of(*records: Measured | None) -> tuple[str, ...]:
    """Return the names of the cells that are there, each once; of a worst case all that are best on some victim."""
    groups = [r.cells if isinstance(r, WorstCase) else (r,) for r in records if r is not None]
    return tuple(dict.fromkeys(cell.cell_id for cells in groups for cell in cells))
