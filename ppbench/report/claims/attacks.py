"""Rules for claims about attacks: each says when such a claim holds, falls, or cannot be told.

A claim of protection falls in any setting in which an attack succeeds; it holds only as far as attacks were tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.errors import listed
from ppbench.metrics.modalities import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.claims.case import Case, Finding, Verdict, cells_of, told, unreliable
from ppbench.report.controls import above_chance, value
from ppbench.report.frame import SETTING, frame_of
from ppbench.report.leak import WORDS, leak_of
from ppbench.report.verdict.lines import Sides, figure
from ppbench.report.verdict.verdict import members_fate, outputs_fate
from ppbench.report.worst import Measured

IMAGES = {"psnr_median": (".1f", " dB"), "test_mse_mean": (".3f", "")}
"""Figures of reconstructed images that papers print; the verdict is the same of all: whether images are seen."""
UNKNOWN = "no attack that knows the defense was run"


def _asked(case: Case, kind: str, metric: str) -> tuple[list[Record], list[Record]]:
    """Return the defense's and the undefended cells of a kind, by a client, of what clients train on if asked there."""
    mine = [r for r in case.mine if r.config.attack.kind == kind and value(r, metric) is not None]
    mine = [r for r in mine if r.config.threat_model.id == "client/1"] or mine
    mine = [r for r in mine if r.config.stage == "iterate"] or mine
    where = {(r.config.stage, r.config.threat_model.id) for r in mine}
    return mine, [
        r for r in case.none if r.config.attack.kind == kind and (r.config.stage, r.config.threat_model.id) in where
    ]


def members_stay_hidden(case: Case) -> Finding | str:
    """The claimed ASR holds where the strongest attack, one that knows the defense among them, is not above chance and
    below the undefended figure, though the delivered model gives members away: noise so large that nothing is
    memorized says nothing about hiding. It falls where one lies above chance and above the claim.
    """
    mine, undefended = _asked(case, "membership", "asr")
    sides, none = Sides.of(mine, "asr"), best(undefended, "asr")
    worst = sides.worst
    if worst is None:
        return "no membership attack was run"
    known = none if above_chance(none, "asr", len(undefended)) else None
    plain, strong = (told(case, r, "asr", ".1%") for r in (sides.plain, worst))
    delivered = best([r for r in case.mine if r.config.stage == "final"], "asr")
    beside, trained_on = f"undefended {_bare(none, 'asr')}", worst.config.stage == "iterate"
    if trained_on and delivered is not None:
        beside += f"; the delivered model, which nothing masks: {_bare(delivered, 'asr')}"
    cells = cells_of(sides.plain, worst, none, delivered)

    def found(verdict: Verdict, reason: str, to: str = "") -> Finding:
        return Finding(verdict, to, f"{reason}; {beside}", plain, strong, cells, asr)

    outcome, asr = members_fate(worst, sides.tried, known), value(worst, "asr") or 0.0
    if known is None:
        return found("cannot be told", "the undefended model is not shown to give members away")
    if bad := unreliable(case, worst.config.threat_model.id):
        return found("cannot be told", bad)
    if outcome == "falls" and asr > (case.claim.value or 0.5):
        return found("falls", "above chance at Bonferroni's level over the cells tried", f"to {asr:.1%}")
    if sides.knowing is None:
        return found("cannot be told", UNKNOWN)
    if trained_on and not above_chance(delivered, "asr", 1):
        return found("cannot be told", "the delivered model is not shown to give members away either")
    if outcome == "stands":
        return found("holds", "the strongest attack is not above chance, and below the undefended figure")
    return found("cannot be told", "the strongest attack is neither above chance nor below the undefended figure")


def _bare(record: Measured | None, name: str, form: str = ".1%", unit: str = "") -> str:
    return "not run" if record is None else figure(record, name, form, unit)


def pixels_stay_hidden(case: Case) -> Finding | str:
    """The claimed PSNR, or squared error, holds where, in every setting, attacks that know the defense among them see
    no more of images than a blind guess; it falls where images are rebuilt, or recognizable. Decibels as such depend on
    the images. It is the server who looks, unless the claim speaks of others.
    """
    name, views = "psnr_median", case.claim.views or ("server/1",)
    here = _looked_at(case.mine, views)
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
    plain, strong = (told(case, r, shown, form, unit) for r in (sides.plain, worst))
    about = f"batch {batch}, {'random' if stage == 'init' else 'trained'} weights; undefended "
    about += _bare(None if none is None else none.worst, shown, form, unit)
    about += "" if view == "server/1" else f"; seen by {view}"

    def found(verdict: Verdict, reason: str, to: str = "", seen: Measured | None = worst) -> Finding:
        beside, harm = None if none is None else none.worst, (None if seen is None else value(seen, name)) or 0.0
        cells = cells_of(sides.plain, worst, beside)
        return Finding(verdict, to, f"{reason}; {about}", plain, strong, cells, harm)

    if bad := unreliable(case, view):
        return found("cannot be told", bad)
    settings = frame_of(here).by(SETTING).items()
    told_of = (leak_of(row, vouched=True, none=undefended[key.threat]) for key, row in settings)
    leaks = [leak for leak in told_of if leak is not None]
    fallen = [leak for leak in leaks if leak.falls]
    if fallen:
        top = max(fallen, key=lambda leak: value(leak.worst, name) or 0.0)
        levels = " and ".join(sorted({WORDS[leak.level] for leak in fallen}))
        return found("falls", f"images are {levels}", f"to {value(top.worst, shown):{form}}{unit}", top.worst)
    if unsure := next((leak for leak in leaks if leak.level == "undecided"), None):
        reason = "; ".join(one.words for one in unsure.qualifiers if one.code != "some_rebuilt")
        return found("cannot be told", reason or "neither that images are recognizable nor that they are not is shown")
    if sides.knowing is None:
        return found("cannot be told", UNKNOWN)
    return found("holds", "no attack tried sees more of images than a blind guess")


def _images(records: Sequence[Record], views: Sequence[str]) -> list[Record]:
    return [r for r in records if question_for(r).inputs and r.config.threat_model.id in views]


def _looked_at(records: Sequence[Record], views: Sequence[str]) -> list[Record]:
    """Return the reconstructions of images that some see, of random weights if these were attacked, at the smallest
    batch.
    """
    known = [r for r in _images(records, views) if modality_of(r.config).decibels]
    known = [r for r in known if value(r, "psnr_median") is not None]
    known = [r for r in known if r.config.stage == "init"] or known
    smallest = min((r.config.batch_size for r in known), default=1)
    return [r for r in known if r.config.batch_size == smallest]


def outputs_stay_hidden(case: Case) -> Finding | str:
    """That clients cannot tell the true model's outputs falls where an attack reads them, all or in part."""
    mine, _ = _asked(case, "extraction", "output_error")
    mine = [r for r in mine if r.config.stage == "iterate"]
    numbers = bool(mine) and mine[0].config.model.classes == 1
    name, form = ("output_error", ".2g") if numbers else ("agreement", ".1%")
    sides = Sides.of(mine, name)
    worst = sides.worst
    if worst is None:
        return "no extraction attack was run on what clients train on"
    plain, strong = (told(case, r, name, form) for r in (sides.plain, worst))
    figures = f"{value(worst, name):{form}}"
    figures = f"relative error {figures}" if numbers else f"{figures} of decisions read"
    reason = f"relative error of its outputs {figure(worst, 'output_error', '.2g')}"

    def found(verdict: Verdict, reason: str, to: str = "") -> Finding:
        read = value(worst, name) or 0.0
        return Finding(verdict, to, reason, plain, strong, cells_of(sides.plain, worst), -read if numbers else read)

    outcome = outputs_fate(worst, sides.tried)
    if outcome in ("falls", "part"):
        return found("falls", reason, f"to {figures}")
    if sides.knowing is None:
        return found("cannot be told", UNKNOWN)
    if outcome == "stands":
        return found("holds", f"no attack tried reads them; {reason}")
    return found("cannot be told", f"the interval allows both; {reason}")
