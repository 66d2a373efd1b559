"""A verdict that no result could change is none: over all registered claims, and each rule from end to end."""

from dataclasses import replace
from itertools import permutations

import pytest
from reseeding import reseeded

from ppbench.base.registry import load_all
from ppbench.claims.case import NETWORK_FAMILIES
from ppbench.claims.check import Checked, check_claims
from ppbench.claims.claim import Claim, Rival, claims_of
from ppbench.claims.rules import RIVALS, RULES

pytestmark = pytest.mark.nightly

KINDS = {
    "asr": "membership", "agreement": "extraction", "psnr_median": "reconstruction", "test_mse_mean": "reconstruction",
    "cap_reconstruction": "reconstruction", "cap_label": "label", "cap_tracing": "tracing",
}  # fmt: skip
"""Metrics of claims about attacks, by the kind of attack."""
FOUND = {"reconstruction": (60.0, 5.0), "label": (1.0, 0.1), "tracing": (1.0, 0.1), "extraction": (1.0, 0.1)}
"""What attacks of a kind find where all leaks, and where nothing does: decibels, or shares of hits."""


def claims():
    known = load_all("defenses")
    results = [(name, claim) for name in known for claim in claims_of(name) if claim.metric in KINDS]
    judged = [(n, c) for n, c in results if c.than is None or c.than.defense in known]
    return dict.fromkeys((n, replace(c, apart="", baseline=False)) for n, c in judged)  # whatever was run


def planted(make, name, claim, at, noise=0.0):
    """Return records that meet a claim's premise, of which attacks find the share `at` of what can be found.

    noise: the same of what is not the defense's but its rival's.
    """
    kind = KINDS[claim.metric]
    plugins = load_all("defenses")
    steps = claim.steps or 1
    about = dict(
        dataset=f"parquet:{claim.dataset}" if claim.dataset else "digits",
        model=claim.model or NETWORK_FAMILIES.get(claim.family, ("mlp",))[0],
        options=dict(claim.options),
        clients=claim.clients or 10,
        batch=claim.batch or (1 if steps == 1 else 128 * steps),
        probe="gradient" if steps == 1 else "local",
    )
    if claim.views:
        about["threat"] = claim.views[0]
    stages = ("iterate", "final") if kind == "membership" else ("iterate",) if kind == "extraction" else ("init",)

    def cell(defense, value, attack, level, **more):
        top, bottom = FOUND.get(kind, (0.9, 0.5))
        share = bottom + level * (top - bottom)
        final = bottom + 1.0 * (top - bottom)  # which no mask is on
        return [
            make(defense, value, attack, kind, final if stage == "final" and defense == name else share, stage=stage,
                 error=1.0 - 0.99 * level, **about, **more)
            for stage in stages
        ]  # fmt: skip

    result = cell("none", None, "dlg", 1.0)
    result += cell("full_noise", None, "dlg", 0.0) if kind != "extraction" else []
    if kind == "tracing":  # its controls are those of the reconstructions that it goes by
        result += [
            make(d, None, "dlg", "reconstruction", db, **about) for d, db in (("none", 60.0), ("full_noise", 5.0))
        ]
    sides = [(name, claim.when, at)] + ([(claim.than.defense, claim.than.when, noise)] if claim.than else [])
    for defense, when, level in sides:
        plugin = plugins[defense]
        fixed = {k: v[0] if isinstance(v, tuple) else v for k, v in when}
        control = plugin.control or "kappa"
        grid = (defense == name and claim.grid) or plugin.grids.get("paper", (1.0,))
        values = [fixed.pop(control)] if control in fixed else list(grid)
        if not plugin.control:
            values = [None]
        for value in values:
            more = {"parameters": fixed, "control": control}
            result += cell(defense, value, "dlg", level, **more)
            result += cell(defense, value, "knowing", level, adaptive=True, **more)
    return result


def verdict(name, claim, records):
    (judgment,) = check_claims({name: [claim]}, records, [])
    assert isinstance(judgment, Checked), judgment
    assert judgment.finding.verdict != "outside the premise", judgment.finding
    return judgment.finding


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_no_registered_claim_falls_where_all_attacks_fail_nor_holds_where_all_leaks(at, fabricate):
    """Replacing every attack by total failure leaves no "falls", and by total success no "holds"."""
    fields = {"falls": 0, "holds": 0, "inconclusive": 0}
    every = claims()
    for name, claim in every:
        judgment = verdict(name, claim, planted(fabricate, name, claim, at))
        assert judgment.least and judgment.most, (name, claim)
        fields[judgment.verdict] += 1
    assert sum(fields.values()) == len(every) >= 100
    assert fields["holds" if at else "falls"] == 0, fields
    assert fields["falls" if at else "holds"] > 0, "and verdicts are still given"


CAP = Claim("cap_reconstruction", 0.5, "digits", "mlp", 1, "Table 8", grid=(1.0, 10.0))
ONE = {
    "cap_reconstruction": CAP,
    "cap_label": replace(CAP, metric="cap_label"),
    "cap_tracing": replace(CAP, metric="cap_tracing"),
    "psnr_median": Claim("psnr_median", 9.2, "digits", "mlp", None, "Table 2"),
    "test_mse_mean": Claim("test_mse_mean", 0.9, "digits", "mlp", None, "Table 2"),
    "asr": Claim("asr", 0.5, "digits", "mlp", None, "Table 4"),
    "agreement": Claim("agreement", None, "", "", None, "Lemma 3"),
}
RIVAL = Rival("dp", 0.2)
WORSE = ("holds", "inconclusive", "falls")
LEVELS = (0.0, 0.1, 0.11, 0.12, 0.2, 0.3, 0.5, 1.0)


@pytest.mark.parametrize("metric", [m for m in RULES if m in KINDS])
def test_each_rule_goes_one_way_from_end_to_end_and_the_ends_are_as_they_must_be(metric, fabricate):
    """Cells in which more leaks never make a verdict better; a CAP, a bracket, is told or not by its ends alone."""
    values = [verdict("pbpfl", ONE[metric], planted(fabricate, "pbpfl", ONE[metric], at)) for at in LEVELS]
    places = [WORSE.index(value.verdict) for value in values]
    assert places == sorted(places) and (places[0], places[-1]) == (0, 2), values
    assert 1 in places or metric.startswith("cap_") or metric == "asr"
    assert len({(value.least, value.most) for value in values}) == 1, "the ends do not depend on what was found"


@pytest.mark.parametrize("metric", ["cap_reconstruction", "cap_label", "cap_tracing"])
@pytest.mark.parametrize(
    ("value", "at", "words"),
    [
        (0.0, 0.0, "it would hold even if all leaked"),  # a claim of 0
        (0.0, 1.0, "it would hold even if all leaked"),
        (0.99, 0.0, "it would fall even if nothing leaked"),  # above accuracy times the distance of noise
        (0.99, 1.0, "it would fall even if nothing leaked"),
    ],
)
def test_a_claim_beyond_what_could_have_come_out_cannot_be_told_and_both_ends_are(metric, value, at, words, fabricate):
    claim = replace(ONE[metric], value=value)
    judgment = verdict("pbpfl", claim, planted(fabricate, "pbpfl", claim, at))
    assert judgment.verdict == "inconclusive" and judgment.reason.startswith(words) and not judgment.to
    assert judgment.least.startswith("0.0") and float(judgment.most[:4]) > 0.7


def test_without_the_controls_nothing_says_what_could_have_come_out(fabricate):
    records = planted(fabricate, "pbpfl", CAP, 1.0)
    for gone in ("none", "full_noise"):
        some = [r for r in records if r.config.defense.id != gone]
        assert verdict("pbpfl", CAP, some).verdict == "inconclusive", gone
    other = [fabricate("full_noise", None, "dlg", "reconstruction", 5.0, batch=8)]
    judgment = verdict("pbpfl", CAP, [r for r in records if r.config.defense.id != "full_noise"] + other)
    assert judgment.most == "not known", "of another batch of victims they say nothing"


def test_models_of_another_accuracy_than_the_papers_have_no_cap_to_compare(fabricate):
    records = planted(fabricate, "pbpfl", CAP, 1.0)
    printed = [
        replace(CAP, metric="accuracy", value=accuracy, when=(("kappa", kappa),))
        for kappa, accuracy in ((1.0, 0.60), (10.0, 0.70), (5.0, 0.95))
    ]
    (judgment, *_) = check_claims({"pbpfl": [CAP, *printed]}, records, [])
    assert judgment.finding.verdict == "inconclusive"
    assert judgment.finding.reason.startswith("the models reach 95.0% where the paper's reach 65.0%")
    near = [replace(claim, value=0.93) for claim in printed]
    assert check_claims({"pbpfl": [CAP, *near]}, records, [])[0].finding.verdict == "falls"


@pytest.mark.parametrize("levels", [(0.0, 0.02, 0.05), (0.5, 0.7, 1.0), (0.0, 0.3, 1.0)])
@pytest.mark.parametrize(
    "claim",
    [
        *(ONE[m] for m in RULES if m in KINDS),
        *(replace(ONE[m], than=RIVAL) for m in RIVALS if m in KINDS and RIVALS[m].gathered == "worst"),
    ],
    ids=lambda claim: f"{claim.metric}{'' if claim.than is None else ' than dp'}",
)
def test_of_three_seeds_the_one_that_leaks_most_is_told_whatever_its_place(claim, levels, fabricate):
    """Each scale has its own direction: distances, decibels, shares, differences."""
    noise = {} if claim.than is None else {"noise": 0.5}
    made = [planted(fabricate, "pbpfl", claim, level, **noise) for level in levels]
    alone = verdict("pbpfl", claim, made[-1])
    for order in permutations(range(3)):
        judgment = verdict("pbpfl", claim, [r for seed, place in enumerate(order) for r in reseeded(made[place], seed)])
        assert (judgment.verdict, judgment.to) == (alone.verdict, alone.to), order
        assert judgment.worst.partition(" (")[0] == alone.worst.partition(" (")[0], "but for which of equal cells"


@pytest.mark.parametrize("metric", [m for m in RIVALS if RIVALS[m].gathered == "pooled"])
def test_seeds_are_pooled_where_two_defenses_are_compared(metric, fabricate):
    """One seed of three in which more leaks does not decide; three in which as much leaks tell as one, and more."""
    claim = replace(ONE[metric], than=RIVAL)
    low, high = (planted(fabricate, "pbpfl", claim, level, noise=0.5) for level in (0.0, 1.0))
    assert verdict("pbpfl", claim, high).verdict == "falls"
    mixed = verdict("pbpfl", claim, [*reseeded(low, 0), *reseeded(low, 1), *reseeded(high, 2)])
    assert mixed.verdict != "falls" and len(mixed.cells) >= 6
    assert verdict("pbpfl", claim, [*reseeded(high, 0), *reseeded(high, 1), *reseeded(high, 2)]).verdict == "falls"
