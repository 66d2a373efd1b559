"""A claim beside the records of one evaluation, and the finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.federation.claim import Claim
from ppbench.records.schema import Record
from ppbench.report.controls import check_controls
from ppbench.report.verdict.lines import attack_at, figure, setting_labels
from ppbench.report.worst import Measured, WorstCase, attack_of, cell_of

ClaimVerdict = Literal["falls", "inconclusive", "holds", "identity", "outside the premise"]
"""The outcome of a claim. "identity": both trainings are equal to rounding, so that nothing was tested; "outside the
premise": our setting is not the claim's.
"""


@dataclass(frozen=True)
class ClaimCase:
    """A claim beside one evaluation: the defense's cells at its parameters, the undefended model's, and all.

    rival: cells of the defense that it is compared with; siblings: all claims about the defense.
    """

    claim: Claim
    mine: Sequence[Record]
    none: Sequence[Record]
    everything: Sequence[Record]
    rival: Sequence[Record] = ()
    siblings: Sequence[Claim] = ()

    @property
    def undefended(self) -> Record | None:
        """One of the undefended cells, for figures that all of them share; None without any."""
        return next(iter(self.none), None)


@dataclass(frozen=True)
class ClaimFinding:
    """The finding of an evaluation about a claim.

    to: the figure it falls to, or ""; reason: the rule with its figures; plain, worst: figures of the strongest unaware
    attack, and of all; cells: names of the cells behind them; harm: how bad the figure is for the claim, larger is
    worse, comparable within a rule and verdict; least, most: what `worst` would be in the same setting if all leaked
    (or the model were useless), and if nothing did (or nothing were lost), "" where the rule has no such ends; own: the
    figure by the paper's own attack and measure.
    """

    verdict: ClaimVerdict
    to: str
    reason: str
    plain: str = ""
    worst: str = ""
    cells: tuple[str, ...] = ()
    harm: float = -math.inf
    least: str = ""
    most: str = ""
    own: str = ""


Judge = Callable[[ClaimCase], ClaimFinding | str]
"""Judges a case. Returns a clause on why the claim cannot be checked where its cells were not run."""


def verdict_of(fell: bool, to: str, harm: float, reason: str, figures: str, *records: Measured | None) -> ClaimFinding:
    """Return the finding that a claim falls to `to`, or holds; figures: ours, those of `records`."""
    verdict: ClaimVerdict = "falls" if fell else "holds"
    return ClaimFinding(verdict, f"to {to}" if fell else "", reason, "", figures, cell_names(*records), harm)


def unreliable(case: ClaimCase, threat: str) -> str | None:
    """Return a clause if a control speaks against one adversary's attacks in this evaluation, else None."""
    scope = [r for r in case.everything if r.config.threat_model.id == threat]
    bad = next((check.sentence for check in check_controls(scope) if check.ok is not True), None)
    return None if bad is None else f"a control speaks against the attacks: {bad.rstrip('.')}"


def figure_by_attack(case: ClaimCase, record: Measured | None, name: str, form: str, unit: str = "") -> str:
    """Return "71.0% [66.3, 75.4] (unmask_regression, kappa=10)", with the control value where there are several."""
    if record is None:
        return "not run"
    label = setting_labels(case.mine)
    control = label.get(cell_of(record).cell_id, "") if len(set(label.values())) > 1 else ""
    return f"{figure(record, name, form, unit)} ({attack_at(attack_of(record), control)})"


def cell_names(*records: Measured | None) -> tuple[str, ...]:
    """Return the names of the given cells, each once; of a worst case, of all that are best on some victim."""
    groups = [r.cells if isinstance(r, WorstCase) else (r,) for r in records if r is not None]
    return tuple(dict.fromkeys(cell.cell_id for cells in groups for cell in cells))
