"""Rules for claims about attacks: when such a claim holds, falls, or is inconclusive.

A claim of protection falls in any setting in which an attack succeeds; it holds only as far as attacks were tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.errors import listed
from ppbench.federation.threats import HONEST_SERVER, recorded_threat
from ppbench.metrics.modalities import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.claims.case import ClaimCase, ClaimFinding, ClaimVerdict, cell_names, figure_by_attack, unreliable
from ppbench.report.controls import above_chance, value
from ppbench.report.frame import SETTING, frame_of
from ppbench.report.leak import LEVEL_WORDS, leak_of
from ppbench.report.verdict.lines import Sides, figure
from ppbench.report.verdict.verdict import members_fate, outputs_fate
from ppbench.report.worst import Measured

IMAGES = {"psnr_median": (".1f", " dB"), "test_mse_mean": (".3f", "")}
"""Figures of reconstructed images that papers print, with form and unit; one verdict judges them all."""
NO_AWARE_ATTACK = "no attack that knows the defense was run"


def _cells_of_kind(case: ClaimCase, kind: str, metric: str) -> tuple[list[Record], list[Record]]:
    """Return the defense's and the undefended cells of a kind, preferring a client's, on what clients train on."""
    mine = [r for r in case.mine if r.config.attack.kind == kind and value(r, metric) is not None]
    mine = [r for r in mine if recorded_threat(r.config.threat_model.id).lone_client] or mine
    mine = [r for r in mine if r.config.stage == "iterate"] or mine
    where = {(r.config.stage, r.config.threat_model.id) for r in mine}
    return mine, [
        r for r in case.none if r.config.attack.kind == kind and (r.config.stage, r.config.threat_model.id) in where
    ]


def members_stay_hidden(case: ClaimCase) -> ClaimFinding | str:
    """The claimed ASR holds where the strongest attack, one that knows the defense among them, is not above chance and
    below the undefended figure, though the delivered model gives members away: noise so large that nothing is
    memorized says nothing about hiding. It falls where an attack lies above chance and above the claim.
    """
    mine, undefended = _cells_of_kind(case, "membership", "asr")
    sides, none = Sides.of(mine, "asr"), best(undefended, "asr")
    worst = sides.worst
    if worst is None:
        return "no membership attack was run"
    known = none if above_chance(none, "asr", len(undefended)) else None
    plain, strong = (figure_by_attack(case, r, "asr", ".1%") for r in (sides.plain, worst))
    delivered = best([r for r in case.mine if r.config.stage == "final"], "asr")
    beside, trained_on = f"undefended {_figure_or_not_run(none, 'asr')}", worst.config.stage == "iterate"
    if trained_on and delivered is not None:
        beside += f"; the delivered model, which nothing masks: {_figure_or_not_run(delivered, 'asr')}"
    cells = cell_names(sides.plain, worst, none, delivered)

    def finding(verdict: ClaimVerdict, reason: str, to: str = "") -> ClaimFinding:
        return ClaimFinding(verdict, to, f"{reason}; {beside}", plain, strong, cells, asr)

    outcome, asr = members_fate(worst, sides.tried, known), value(worst, "asr") or 0.0
    if known is None:
        return finding("inconclusive", "the undefended model is not shown to give members away")
    if bad := unreliable(case, worst.config.threat_model.id):
        return finding("inconclusive", bad)
    if outcome == "falls" and asr > (case.claim.value or 0.5):
        return finding("falls", "above chance at Bonferroni's level over the cells tried", f"to {asr:.1%}")
    if sides.knowing is None:
        return finding("inconclusive", NO_AWARE_ATTACK)
    if trained_on and not above_chance(delivered, "asr", 1):
        return finding("inconclusive", "the delivered model is not shown to give members away either")
    if outcome == "stands":
        return finding("holds", "the strongest attack is not above chance, and below the undefended figure")
    return finding("inconclusive", "the strongest attack is neither above chance nor below the undefended figure")


def _figure_or_not_run(record: Measured | None, name: str, form: str = ".1%", unit: str = "") -> str:
    return "not run" if record is None else figure(record, name, form, unit)


def pixels_stay_hidden(case: ClaimCase) -> ClaimFinding | str:
    """The claimed PSNR, or squared error, holds where, in every setting, attacks that know the defense among them see
    no more of images than a blind guess; it falls where images are rebuilt, or recognizable. Decibels as such depend on
    the images. The attacker is the server, unless the claim names others.
    """
    name, views = "psnr_median", case.claim.views or (HONEST_SERVER.name,)
    here = _smallest_batch(case.mine, views)
    sides = Sides.of(here, name)
    worst = sides.worst
    if worst is None:
        return f"no reconstruction of images was run of what {listed(views)} sees"
    shown = name if value(worst, case.claim.metric) is None else case.claim.metric
    form, unit = IMAGES[shown]
    stage, batch, view = worst.config.stage, worst.config.batch_size, worst.config.threat_model.id
    alike = [r for r in case.none if (r.config.stage, r.config.batch_size) == (stage, batch)]
    undefended = {view: leak_of(_images(alike, [view]), vouched=True) for view in views}
    none = undefended[view]
    plain, strong = (figure_by_attack(case, r, shown, form, unit) for r in (sides.plain, worst))
    about = f"batch {batch}, {'random' if stage == 'init' else 'trained'} weights; undefended "
    about += _figure_or_not_run(None if none is None else none.worst, shown, form, unit)
    about += "" if recorded_threat(view).lone_server else f"; seen by {view}"

    def finding(verdict: ClaimVerdict, reason: str, to: str = "", seen: Measured | None = worst) -> ClaimFinding:
        beside, harm = None if none is None else none.worst, (None if seen is None else value(seen, name)) or 0.0
        cells = cell_names(sides.plain, worst, beside)
        return ClaimFinding(verdict, to, f"{reason}; {about}", plain, strong, cells, harm)

    if bad := unreliable(case, view):
        return finding("inconclusive", bad)
    settings = frame_of(here).by(SETTING).items()
    by_setting = (leak_of(row, vouched=True, none=undefended[key.threat]) for key, row in settings)
    leaks = [leak for leak in by_setting if leak is not None]
    fallen = [leak for leak in leaks if leak.falls]
    if fallen:
        top = max(fallen, key=lambda leak: value(leak.worst, name) or 0.0)
        levels = " and ".join(sorted({LEVEL_WORDS[leak.level] for leak in fallen}))
        return finding("falls", f"images are {levels}", f"to {value(top.worst, shown):{form}}{unit}", top.worst)
    if unsure := next((leak for leak in leaks if leak.level == "undecided"), None):
        reason = "; ".join(one.words for one in unsure.qualifiers if one.code != "some_rebuilt")
        return finding("inconclusive", reason or "neither that images are recognizable nor that they are not is shown")
    if sides.knowing is None:
        return finding("inconclusive", NO_AWARE_ATTACK)
    return finding("holds", "no attack tried sees more of images than a blind guess")


def _images(records: Sequence[Record], views: Sequence[str]) -> list[Record]:
    return [r for r in records if question_for(r).inputs and r.config.threat_model.id in views]


def _smallest_batch(records: Sequence[Record], views: Sequence[str]) -> list[Record]:
    """Return the reconstructions of images from some views, at the smallest batch; those of random weights if any."""
    known = [r for r in _images(records, views) if modality_of(r.config).decibels]
    known = [r for r in known if value(r, "psnr_median") is not None]
    known = [r for r in known if r.config.stage == "init"] or known
    smallest = min((r.config.batch_size for r in known), default=1)
    return [r for r in known if r.config.batch_size == smallest]


def outputs_stay_hidden(case: ClaimCase) -> ClaimFinding | str:
    """That the true model's outputs stay hidden from clients falls where an attack reads them, all or in part."""
    mine, _ = _cells_of_kind(case, "extraction", "output_error")
    mine = [r for r in mine if r.config.stage == "iterate"]
    numbers = bool(mine) and mine[0].config.model.classes == 1
    name, form = ("output_error", ".2g") if numbers else ("agreement", ".1%")
    sides = Sides.of(mine, name)
    worst = sides.worst
    if worst is None:
        return "no extraction attack was run on what clients train on"
    plain, strong = (figure_by_attack(case, r, name, form) for r in (sides.plain, worst))
    figures = f"{value(worst, name):{form}}"
    figures = f"relative error {figures}" if numbers else f"{figures} of decisions read"
    reason = f"relative error of its outputs {figure(worst, 'output_error', '.2g')}"

    def finding(verdict: ClaimVerdict, reason: str, to: str = "") -> ClaimFinding:
        read = value(worst, name) or 0.0
        return ClaimFinding(
            verdict, to, reason, plain, strong, cell_names(sides.plain, worst), -read if numbers else read
        )

    outcome = outputs_fate(worst, sides.tried)
    if outcome in ("falls", "part"):
        return finding("falls", reason, f"to {figures}")
    if sides.knowing is None:
        return finding("inconclusive", NO_AWARE_ATTACK)
    if outcome == "stands":
        return finding("holds", f"no attack tried reads them; {reason}")
    return finding("inconclusive", f"the interval allows both; {reason}")
