"""The figure by the paper's own attack and measure: reported beside the worst case, never judged."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record
from ppbench.report.claims.attack_rules import by_papers_attack, search_words
from ppbench.report.claims.case import ClaimCase
from ppbench.report.controls import value
from ppbench.report.verdict.lines import figure

UNITS = {"psnr_median": (".1f", " dB"), "asr": (".1%", ""), "agreement": (".1%", "")}


def own_measure(case: ClaimCase) -> str:
    """Return our figure by the paper's attack and distance, with accuracy, start and budget, in words; or "".

    A CAP's distance is the SPN paper's: of the reconstruction as the optimizer left it, not clipped to the data's
    range; of labels as that attack optimized them; of tracing by its images.
    """
    claim = case.claim
    if claim.metric.startswith("cap_"):
        ours = _cap(case, case.mine)
        beside = _cap(case, case.rival) if case.rival else ""
        return f"{ours} beside {beside}" if ours and beside else ours
    if claim.metric not in UNITS or not claim.attack:
        return ""
    cells = [r for r in case.mine if r.config.attack.id == claim.attack and value(r, claim.metric) is not None]
    cells = [r for r in cells if r.config.stage in ("init", "iterate")] or cells
    if not cells:
        return f"{claim.attack} was not run"
    form, unit = UNITS[claim.metric]
    smallest = min(cells, key=lambda r: (r.config.batch_size, r.config.cell_id()))
    use = smallest.utility.accuracy
    return f"{figure(smallest, claim.metric, form, unit)} ({claim.attack}{search_words(smallest)}" + (
        ")" if use is None else f"; accuracy {use:.1%})"
    )


def _cap(case: ClaimCase, cells: Sequence[Record]) -> str:
    """Return "0.84 (dlg from grey, 1,800 evaluations, unclipped; accuracy 93.7%)"; "" where unknown."""
    own = by_papers_attack(case, cells)
    if own is None:
        return ""
    how = ", unclipped" if case.claim.metric == "cap_reconstruction" else ""
    return f"{own.cap:.2f} ({own.attack}{how}; accuracy {own.accuracy:.1%})"
