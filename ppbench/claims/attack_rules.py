"""Rules for claims about attacks: members, images, outputs, and the calibrated averaged performance (CAP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.base.errors import listed
from ppbench.base.registry import load_plugin, plugins
from ppbench.claims.case import (
    ClaimCase,
    ClaimFinding,
    ClaimVerdict,
    attacked_words,
    cell_names,
    figure_by_attack,
    finding_of,
    unreliable,
)
from ppbench.claims.claim import Claim
from ppbench.federation.threats import HONEST_SERVER, recorded_threat
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.cap import Cap, worst_caps
from ppbench.report.controls import above_chance, value
from ppbench.report.findings import members_fate, outputs_fate
from ppbench.report.frame import SERIES, SETTING, Key, frame_of, key_of
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import LEVEL_WORDS, Leak, leaks_of
from ppbench.report.rows import Sides, judged_leaks
from ppbench.report.words import STAGES, figure_text
from ppbench.report.worst import Measured, attack_of

# -- Rules for claims about attacks: when such a claim holds, falls, or is inconclusive --
# A claim of protection falls in any setting in which an attack succeeds; it holds only as far as attacks were tried.

IMAGES = {"psnr_median": (".1f", " dB"), "test_mse_mean": (".3g", "")}
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
    """The claimed attack success rate (ASR) holds if the strongest attack, among them one that knows the defense, is
    not above chance and below the undefended figure, although the delivered model reveals members: noise so large that
    nothing is memorized is no evidence for the defense. It falls if an attack lies above chance and above the claim.
    """
    mine, undefended = _cells_of_kind(case, "membership", "asr")
    sides, none = Sides.of(mine, "asr"), best(undefended, "asr")
    worst = sides.worst
    if worst is None:
        return "no membership attack was run"
    known = none if above_chance(none, "asr", len(undefended)) else None
    plain, strong = (figure_by_attack(case, r, "asr", ".1%") for r in (sides.plain, worst))
    delivered = best([r for r in case.mine if r.config.stage == "final"], "asr")
    beside, trained_on = f"undefended {_asr_words(none)}", worst.config.stage == "iterate"
    if trained_on and delivered is not None:
        beside += f"; the delivered model, which nothing masks: {_asr_words(delivered)}"
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


def _asr_words(record: Measured | None) -> str:
    return "not run" if record is None else figure_text(record, "asr", ".1%", "")


def pixels_stay_hidden(case: ClaimCase) -> ClaimFinding | str:
    """The claimed PSNR, or squared error, holds if, in every setting, no attack, among them one that knows the defense,
    recovers more of images than a blind guess. It falls if images are rebuilt or recognizable. Decibels as such depend
    on the images. The attacker is the server, unless the claim names others.
    """
    name, views = "psnr_median", case.claim.views or (HONEST_SERVER.name,)
    leaks = _leaks(case, views)
    here = [r for r in case.mine if question_for(r).inputs and key_of(r.config).only(SETTING) in leaks]
    sides = Sides.of(here, name)
    worst = sides.worst
    if worst is None:
        return f"no reconstruction of images was run of what {listed(views)} sees"
    shown = name if value(worst, case.claim.metric) is None else case.claim.metric
    form, unit = IMAGES[shown]
    scale = case.claim.scale if shown == case.claim.metric else 1.0
    none = leaks[key_of(worst.config).only(SETTING)].undefended
    plain, strong = (figure_by_attack(case, r, shown, form, unit) for r in (sides.plain, worst))
    about = _scene_words(worst, "not run" if none is None else figure_text(none.worst, shown, form, unit, scale))

    def finding(verdict: ClaimVerdict, reason: str, to: str = "", seen: Measured | None = worst) -> ClaimFinding:
        beside, harm = None if none is None else none.worst, (None if seen is None else value(seen, name)) or 0.0
        cells = cell_names(sides.plain, worst, beside)
        return ClaimFinding(verdict, to, f"{reason}; {about}", plain, strong, cells, harm)

    if bad := unreliable(case, worst.config.threat_model.id):
        return finding("inconclusive", bad)
    fallen = [leak for leak in leaks.values() if leak.falls]
    if fallen:
        top = max(fallen, key=lambda leak: value(leak.worst, name) or 0.0)
        levels = " and ".join(sorted({LEVEL_WORDS[leak.level] for leak in fallen}))
        to = scale * (value(top.worst, shown) or 0.0)
        return finding("falls", f"images are {levels}", f"to {to:{form}}{unit}", top.worst)
    if unsure := next((leak for leak in leaks.values() if leak.level == "undecided"), None):
        reason = "; ".join(one.words for one in unsure.qualifiers if one.code not in ("some_rebuilt", "untested"))
        return finding("inconclusive", reason or "neither that images are recognizable nor that they are not is shown")
    if sides.knowing is None:
        return finding("inconclusive", NO_AWARE_ATTACK)
    return finding("holds", "no attack tried sees more of images than a blind guess")


def _scene_words(worst: Measured, undefended: str) -> str:
    """Return what was attacked, on which weights, beside the undefended figure; and who saw it if not the server."""
    config, view = worst.config, worst.config.threat_model.id
    threat = recorded_threat(view)
    seen = "" if threat.lone_server else f"; seen by {threat.sees.partition(':')[0] or view} ({view})"
    return f"{attacked_words(config)}, {STAGES[config.stage].weights}; undefended {undefended}{seen}"


def _leaks(case: ClaimCase, views: Sequence[str]) -> dict[Key, Leak]:
    """Return the leaks of images to some views in the settings of a claim, each in its judged scene."""
    settings = {key_of(r.config).only(SETTING) for r in case.mine}
    failed = [r for r in case.everything if r.status == "failed" and key_of(r.config).only(SETTING) in settings]
    every = leaks_of([*case.mine, *case.none, *failed], Knowledge.of(case.everything))
    images = [r for r in case.mine if question_for(r).inputs and modality_of(r.config).decibels]
    seen = [key_of(r.config).only(SETTING) for r in images if r.config.threat_model.id in views]
    judged = judged_leaks({key: every[key] for key in seen})
    return {key: every[key] for key in seen if key in judged}


def outputs_stay_hidden(case: ClaimCase) -> ClaimFinding | str:
    """The claim that clients cannot read the true model's outputs falls if an attack reads them, completely or in part:
    more of its decisions than the best constant answer has.
    """
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
    figures += "" if numbers else _constant_answer(worst)
    reason = f"relative error of its outputs {figure_text(worst, 'output_error', '.2g')}"
    right = worst.utility.accuracy
    reason += "" if right is None else f"; the trained model's accuracy is {right:.1%}"

    def finding(verdict: ClaimVerdict, reason: str, to: str = "") -> ClaimFinding:
        read = value(worst, name) or 0.0
        return ClaimFinding(
            verdict, to, reason, plain, strong, cell_names(sides.plain, worst), -read if numbers else read
        )

    outcome = outputs_fate(worst, sides.tried)
    if outcome in ("falls", "part"):
        return finding("falls", f"in part; {reason}" if outcome == "part" else reason, f"to {figures}")
    if sides.knowing is None:
        return finding("inconclusive", NO_AWARE_ATTACK)
    if outcome == "stands":
        return finding("holds", f"no attack tried reads them; {reason}")
    return finding("inconclusive", f"the interval allows both; {reason}")


def _constant_answer(worst: Measured) -> str:
    """Return how often the best constant answer agrees with the model, as a figure to set beside an attack's."""
    read = worst.metric("agreement")
    return "" if read is None or read.chance is None else f" (by the best constant answer {read.chance:.1%})"


ACCURACY_TOLERANCE = 0.05
"""By how much the mean accuracy of our models may differ from the paper's for CAPs to compare."""
DISTANCE_FACTOR = 2.0
"""Up to how many times the claimed CAP ours by the paper's own attack and measure may be for CAPs to compare."""
LAWS = {"cap_reconstruction": "recon_raw/1", "cap_label": "label/1", "cap_tracing": "trace/1"}
"""The distance behind each claimed CAP."""
ATTACK = "dlg"
"""The attack behind a CAP where the claim names none: "Deep Leakage" (Fan et al., Sec. 4)."""
PAPER_METRICS = {
    "cap_reconstruction": "rmse_raw_mean",
    "cap_label": "label_accuracy",
    "cap_tracing": "tracing_accuracy",
}
"""The metric behind the paper's distance: error of images as the optimizer left them, else 1 minus a share of hits."""


def cells_with_distance(cells: Sequence[Record], law: str, batch: int | None) -> list[Record]:
    """Return the cells that have a distance, at one batch, from the server's view of initial weights."""
    some = [r for r in cells if question_for(r).distance(law) is not None and r.config.batch_size == batch]
    return [r for r in some if r.config.stage == "init" and recorded_threat(r.config.threat_model.id).lone_server]


def paper_grid(cells: Sequence[Record], claim: Claim, *, own: bool = True) -> list[Record]:
    """Return the cells at values of the paper's grid: the claim's, if it has one and `own`, else the defense's."""
    if not cells:
        return []
    grid = claim.grid if own and claim.grid else grid_of(cells[0].config.defense.id)
    return [r for r in cells if (c := r.config.defense.control) is None or not grid or c.value in grid]


def grid_of(defense: str) -> tuple[float, ...]:
    """Return the paper's grid of a defense, each value once; empty where none is known."""
    grids = load_plugin("defenses", defense).grids if defense in plugins("defenses") else {}
    return tuple(dict.fromkeys(grids.get("paper", ())))


def cap_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed CAP holds unless ours, of the worst cases over attacks of its kind, lies below it with its interval.
    Ours is the mean over those control values that were run and are in the paper's grid, of which there must be two. It
    is comparable only if the models are as good as the paper's, to 5 points on average, and if the paper's own attack
    and measure stay no more than twice as far from images as they did there, because a diverging optimizer gives errors
    larger than anything printed. Errors of images are not clipped, as in the paper; labels are compared as multisets,
    also those that come with images.
    """
    law, batch = LAWS[case.claim.metric], case.claim.batch
    cells = cells_with_distance(case.mine, law, batch)
    if not cells:
        kind = case.claim.metric.removeprefix("cap_")
        return f"no {kind} attack was run at batch {batch} from the server's view of initial weights"
    grid = case.claim.grid or grid_of(case.mine[0].config.defense.id)
    kept = paper_grid(cells, case.claim) if grid else []
    every = worst_caps([r for r in kept if r.config.defense.control is not None], law)
    known = [entry for entry in every if entry[1].value is not None]
    if not known:
        few, reason = _no_cap([cap for _, cap, _ in every], grid)
        return reason if few else ClaimFinding("inconclusive", "", reason, cells=cell_names(*kept))
    plain, _, _ = _lowest(worst_caps([r for r in kept if not r.config.attack.adaptive], law))
    worst, cap, cases = _lowest(known)
    assert cap is not None and cap.value is not None
    of_all = f"mean over {cap.n} of {len(grid)} values of the paper's grid"
    bad = unreliable(case, HONEST_SERVER.name) or _other_models(case, cases) or _other_distances(case)
    fell = (cap.value if cap.high is None else cap.high) < (case.claim.value or 0.0)
    if not bad and not fell and not any(r.config.attack.adaptive for r in kept):
        bad = NO_AWARE_ATTACK
    verdict: ClaimVerdict = "inconclusive" if bad else "falls" if fell else "holds"
    reason = f"{bad}; {of_all}" if bad else of_all
    return finding_of(verdict, f"{cap.value:.2f}", -cap.value, reason, worst, *cases, plain=plain)


def _other_models(case: ClaimCase, cases: Sequence[Measured]) -> str | None:
    """Return a clause if our models are not as good as the paper's at the same control values, else None."""
    printed: dict[object, float] = {}
    for claim in case.siblings:
        same = (claim.dataset, claim.model, claim.than) == (case.claim.dataset, case.claim.model, None)
        if claim.metric == "accuracy" and same and claim.value is not None and set(case.claim.when) <= set(claim.when):
            printed |= {v: claim.value for _, v in set(claim.when) - set(case.claim.when)}
    pairs = [
        (one.utility.accuracy, printed[control.value])
        for one in cases
        if (control := one.config.defense.control) is not None
        and control.value in printed
        and one.utility.accuracy is not None
    ]
    if not pairs:
        return None
    ours, theirs = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    if abs(ours - theirs) <= ACCURACY_TOLERANCE:
        return None
    return f"the models reach {ours:.1%} where the paper's reach {theirs:.1%}: CAPs of other models do not compare"


def _other_distances(case: ClaimCase) -> str | None:
    """Return a clause if the paper's own attack stays farther off here than there, else None; shares have one scale."""
    claimed = case.claim.value or 0.0
    if case.claim.metric != "cap_reconstruction" or not claimed:
        return None
    own = by_papers_attack(case, case.mine)
    if own is None:
        return f"{case.claim.attack or ATTACK} was not run at two values, so whether distances compare is not known"
    if own.cap <= DISTANCE_FACTOR * claimed:
        return None
    return f"the paper's attack and measure give {own.cap:.2f} here ({own.attack}): distances of another scale"


@dataclass(frozen=True)
class OwnCap:
    """A CAP by the paper's attack and distance. cap, accuracy: means over its values; attack: name, start, budget."""

    cap: float
    accuracy: float
    attack: str


def by_papers_attack(case: ClaimCase, cells: Sequence[Record]) -> OwnCap | None:
    """Return the CAP of some cells (the defense's, or its rival's) by the paper's own attack and distance.

    None where it was not run at two values of the paper's grid.
    """
    metric, attack = case.claim.metric, case.claim.attack or ATTACK
    some = cells_with_distance(cells, LAWS[metric], case.claim.batch)
    some = [r for r in some if attack in (r.config.attack.id, r.config.attack.follows)]
    for series in frame_of(paper_grid(some, case.claim, own=cells is case.mine)).by(SERIES).values():
        pairs = [(r.utility.accuracy, _distance(r, metric)) for r in series if r.status == "complete"]
        known = [(a, d) for a, d in pairs if a is not None and d is not None]
        if len(known) >= 2:
            cap, accuracy = (sum(one) / len(known) for one in ([a * d for a, d in known], [a for a, _ in known]))
            return OwnCap(cap, accuracy, f"{attack}{search_words(series[0])}")
    return None


def search_words(record: Record) -> str:
    """Return the start and the budget of a search in words: " from grey, 1,800 evaluations"."""
    parameters = record.config.attack.parameters
    start, budget = parameters.get("start"), parameters.get("budget")
    begun = "" if start is None else f" from {start}"
    return begun + (f", {budget:,} evaluations" if isinstance(budget, int) else "")


def _distance(record: Record, metric: str) -> float | None:
    figure = value(record, PAPER_METRICS[metric])
    return figure if figure is None or metric == "cap_reconstruction" else 1 - figure


def _no_cap(every: Sequence[Cap], grid: Sequence[float]) -> tuple[bool, str]:
    """Return whether too few values of the paper's grid were run for any of these CAPs, and why none has a value."""
    if not grid:
        return False, "the paper's grid is not known"
    most = max(every, key=lambda cap: cap.n, default=None)
    few = most is None or most.n < 2
    coverage = f"{0 if most is None else most.n} of {len(grid)} values of the paper's grid were run"
    return few, f"{coverage}; {'a CAP needs two' if most is None or most.n < 2 else most.reason}"


def lowest_cap(cells: Sequence[Record], law: str) -> tuple[str, Cap | None, list[Measured]]:
    """Return the lowest CAP of cells at several control values: in words, itself, and its worst cases."""
    return _lowest(worst_caps([r for r in cells if r.config.defense.control is not None], law))


def _lowest(some: Sequence[tuple[Key, Cap, list[Measured]]]) -> tuple[str, Cap | None, list[Measured]]:
    """Return the lowest of some CAPs: in words, itself, and its worst cases."""
    known = [(cap, cases) for _, cap, cases in some if cap.value is not None]
    if not known:
        return "not run", None, []
    cap, cases = min(known, key=lambda pair: pair[0].value or 0.0)
    ends = "" if cap.low is None else f" [{cap.low:.2f}, {cap.high:.2f}]"
    names = ", ".join(dict.fromkeys(attack_of(case) for case in cases))
    return f"{cap.value:.2f}{ends} ({names})", cap, cases


# -- The figure by the paper's own attack and measure: reported beside the worst case, never judged --

OWN_UNITS = {"psnr_median": (".1f", " dB"), "asr": (".1%", ""), "agreement": (".1%", "")}


def own_measure(case: ClaimCase) -> str:
    """Return our figure by the paper's attack and distance, with accuracy, start and budget, in words; or "".

    A CAP's distance is the SPN paper's: of the reconstruction as the optimizer left it, not clipped to the data's
    range; of labels as that attack optimized them; of tracing by its images.
    """
    claim = case.claim
    if claim.metric.startswith("cap_"):
        ours = _own_cap(case, case.mine)
        beside = _own_cap(case, case.rival) if case.rival else ""
        return f"{ours} beside {beside}" if ours and beside else ours
    if claim.metric not in OWN_UNITS or not claim.attack:
        return ""
    cells = [r for r in case.mine if r.config.attack.id == claim.attack and value(r, claim.metric) is not None]
    cells = [r for r in cells if r.config.stage in ("init", "iterate")] or cells
    if not cells:
        return f"{claim.attack} was not run"
    form, unit = OWN_UNITS[claim.metric]
    smallest = min(cells, key=lambda r: (r.config.batch_size, r.config.cell_id()))
    use = smallest.utility.accuracy
    return f"{figure_text(smallest, claim.metric, form, unit)} ({claim.attack}{search_words(smallest)}" + (
        ")" if use is None else f"; accuracy {use:.1%})"
    )


def _own_cap(case: ClaimCase, cells: Sequence[Record]) -> str:
    """Return "0.84 (dlg from grey, 1,800 evaluations, unclipped; accuracy 93.7%)"; "" where unknown."""
    own = by_papers_attack(case, cells)
    if own is None:
        return ""
    how = ", unclipped" if case.claim.metric == "cap_reconstruction" else ""
    return f"{own.cap:.2f} ({own.attack}{how}; accuracy {own.accuracy:.1%})"
