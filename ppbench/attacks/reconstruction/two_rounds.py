"""Two rounds of one batch: a client that holds it for two rounds sends two updates of the same data, at two models.

Minimize D_1(x, y) / D_1(0) + D_2(x, y) / D_2(0) over images x, where D_r is the distance of the simulated from the
observed update of round r, and D_r(0) that of an all-zero simulation. Labels and optimizer are those of iDLG.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.federation.evidence import Evidence, joint_evidence
from ppbench.federation.view import View


@dataclass(frozen=True)
class TwoRounds(IDLG):
    """iDLG on the updates of two rounds in which a client holds the same batch: one image must explain both.

    Of more rounds the first two count. Labels are read off the mean of both updates, whose noises are independent. One
    evaluation is that of both gradients.
    """

    name: ClassVar[str] = "two_rounds"
    version: ClassVar[str] = "1"
    standard: ClassVar[bool] = False
    probe_rounds: ClassVar[int] = 2
    reads_alone: ClassVar[bool] = True
    reference: ClassVar[str] = "ppbench: two updates of one batch, matched at once"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence of both rounds as one for each unit; none about units that were seen in one round."""
        rounds = view.by_round()[: self.probe_rounds]
        if len(rounds) < self.probe_rounds:
            return []
        return joint_evidence([part.defense.evidence(part) for part in rounds])
