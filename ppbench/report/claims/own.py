"""The figure by the paper's own attack and measure: to be read beside the worst case, never judged."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record
from ppbench.report.claims.attacks import LAWS, asked, paper_grid
from ppbench.report.claims.case import Case
from ppbench.report.controls import value
from ppbench.report.frame import SERIES, frame_of
from ppbench.report.verdict.lines import figure

ATTACK = "dlg"
"""What a CAP's distances are of where the claim names no attack: "Deep Leakage" (Fan et al., Sec. 4)."""
CAPS = {
    "cap_reconstruction": ("rmse_raw_mean", ", unclipped"),
    "cap_label": ("label_accuracy", ""),
    "cap_tracing": ("tracing_accuracy", ""),
}
"""Of which figure the paper takes a distance, and what is to be said of it."""
UNITS = {"psnr_median": (".1f", " dB"), "asr": (".1%", ""), "agreement": (".1%", "")}


def own_measure(case: Case) -> str:
    """Return our figure by the paper's attack and its distance, with the accuracy that goes into it; "" for none.

    A CAP's distance is taken as the SPN paper takes it: of the reconstruction as the optimizer left it, not clipped to
    the data's range; of labels as that attack optimized them; of tracing by its images. Its start is told.
    """
    claim = case.claim
    if claim.metric.startswith("cap_"):
        told = _cap(case, case.mine)
        beside = _cap(case, case.rival) if case.rival else ""
        return f"{told} beside {beside}" if told and beside else told
    if claim.metric not in UNITS or not claim.attack:
        return ""
    cells = [r for r in case.mine if r.config.attack.id == claim.attack and value(r, claim.metric) is not None]
    cells = [r for r in cells if r.config.stage in ("init", "iterate")] or cells
    if not cells:
        return f"{claim.attack} was not run"
    form, unit = UNITS[claim.metric]
    smallest = min(cells, key=lambda r: (r.config.batch_size, r.config.cell_id()))
    use = smallest.utility.accuracy
    return f"{figure(smallest, claim.metric, form, unit)} ({claim.attack}" + (
        ")" if use is None else f"; accuracy {use:.1%})"
    )


def _cap(case: Case, cells: Sequence[Record]) -> str:
    """Return a CAP by the paper's attack, "0.84 (dlg, accuracy 93.7%)"; "" where it was not run at two values."""
    metric, attack = case.claim.metric, case.claim.attack or ATTACK
    name, how = CAPS[metric]
    some = asked(cells, LAWS[metric], case.claim.batch)
    some = [r for r in some if attack in (r.config.attack.id, r.config.attack.follows)]
    for series in frame_of(paper_grid(some, case.claim, own=cells is case.mine)).by(SERIES).values():
        pairs = [(r.utility.accuracy, _distance(r, name)) for r in series if r.status == "complete"]
        known = [(a, d) for a, d in pairs if a is not None and d is not None]
        if len(known) >= 2:
            mean = sum(a * d for a, d in known) / len(known)
            start = series[0].config.attack.parameters.get("start")
            begun = "" if start is None else f" from {start}"
            return f"{mean:.2f} ({attack}{begun}{how}; accuracy {sum(a for a, _ in known) / len(known):.1%})"
    return ""


def _distance(record: Record, name: str) -> float | None:
    found = value(record, name)
    return found if found is None or name == CAPS["cap_reconstruction"][0] else 1 - found
