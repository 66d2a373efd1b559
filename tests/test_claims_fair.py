"""Objections of the papers' authors to verdicts: which attacks, which end, which length of training, whose view."""

import csv
import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ppbench.claims.check import Checked, check_claims
from ppbench.claims.claim import Claim, Rival, claims_of
from ppbench.claims.cost_rules import Benchmark
from ppbench.questions.base import question_for
from ppbench.records.store import Store
from ppbench.report.cap import worst_caps
from ppbench.report.compare.paired import change, rules_for, sample_of
from ppbench.report.worst import worst_case

LABEL = Claim("cap_label", 0.4, "digits", "mlp", 1, "Table 8", grid=(1.0, 10.0))
GRID = (1.0, 10.0)


def judge(claim, records, name="pbpfl"):
    (verdict,) = check_claims({name: [claim]}, records, [])
    assert isinstance(verdict, Checked), verdict
    return verdict


def images(make, defense, value, attack, hits, n=12, raw=None, db=5.0, **more):
    """Return a reconstruction whose labels are right in `hits` of n victims; raw: errors that nothing clips."""
    own = dict(kind="image", client=0, index=0, psnr=db, ssim=None, confidence=None, at_truth=None, evaluations=1)
    scores = [own | dict(probe=i, rmse=0.6, rmse_raw=raw[i] if raw else 0.6, label=i < hits) for i in range(n)]
    return make(defense, value, attack, "reconstruction", scores=scores, **more)


def labels(make, mine=1, named=1, rival=1, rivals=1):
    """Return controls and grids of two defenses: right ones of 12 labels, by attacks on labels and of images."""
    of_kind = partial(make, kind="label")
    recovered = [
        of_kind("none", None, "label_recovery", share=1.0),
        of_kind("full_noise", None, "label_recovery", share=0.0),
    ]
    recovered += [make("none", None, "dlg", "reconstruction", 60.0), images(make, "full_noise", None, "dlg", 3)]
    sides = (("pbpfl", "kappa", GRID, mine, named), ("dp", "sigma", (0.1, 0.01), rival, rivals))
    for defense, control, values, alone, beside in sides:
        for value in values:
            recovered.append(of_kind(defense, value, "label_recovery", share=alone / 12, control=control))
            recovered.append(images(make, defense, value, "knowing", beside, adaptive=True, control=control))
    return recovered


def test_labels_that_come_with_images_are_read_too(fabricate):
    """Who tries all attacks has the labels of an image search that knows the defense, whatever label attacks find."""
    assert judge(LABEL, labels(fabricate, mine=1, named=1)).finding.verdict == "holds"
    recovered = judge(LABEL, labels(fabricate, mine=1, named=12)).finding
    assert (recovered.verdict, recovered.to[:7]) == ("falls", "to 0.00") and "knowing" in recovered.worst
    assert judge(LABEL, labels(fabricate, mine=12, named=1)).finding.verdict == "falls"


def test_two_defenses_whose_labels_are_all_read_by_some_attack_are_no_farther_from_the_truth_than_one_another(
    fabricate,
):
    better = replace(LABEL, than=Rival("dp", 0.3))
    artefact = labels(fabricate, mine=12, named=1, rival=1, rivals=12)
    finding = judge(better, artefact).finding
    assert finding.verdict == "inconclusive" and "difference +0.00 [+0.00, +0.00]" in finding.reason
    assert judge(better, labels(fabricate, 12, 1, 1, 1)).finding.verdict == "falls"
    assert judge(better, labels(fabricate, 1, 1, 1, 12)).finding.verdict == "holds"


def test_the_end_at_which_nothing_leaks_is_chance_and_not_the_luck_of_a_few_victims(fabricate):
    """Noise lost no label of twelve by luck: .95 accuracy times .9, not 1, is what a claim could have reached."""
    recovered = judge(replace(LABEL, value=0.9), labels(fabricate, mine=12)).finding
    assert recovered.most.startswith("0.85") or recovered.most.startswith("0.86")
    assert recovered.verdict == "inconclusive" and recovered.reason.startswith("it would fall even if nothing leaked")


def test_a_cap_of_images_is_of_errors_that_nothing_clips_each_victims_smallest(fabricate):
    some = [
        images(fabricate, "pbpfl", value, attack, 0, n=2, raw=raw, adaptive=attack == "knowing")
        for value in GRID
        for attack, raw in (("dlg", (0.2, 90.0)), ("knowing", (30.0, 0.4)))
    ]
    ((_, cap, cases),) = worst_caps(some, "recon_raw/1")
    assert cap.value == pytest.approx(0.95 * 0.3) and cap.distance == "recon_raw/1"
    assert [sorted(v.rmse_raw for v in case.victims) for case in cases] == [[0.2, 0.4]] * 2
    assert worst_case(some[:2], "rmse_raw_mean").metric("rmse_raw_mean").value == pytest.approx(0.3)


@pytest.mark.parametrize(("epochs", "verdict"), [(300, "holds"), (8, "outside the premise")])
def test_that_a_model_is_better_is_said_of_trainings_as_long_as_the_papers(epochs, verdict, fabricate):
    """The faster learner is ahead early in training; of the paper's 300 epochs 8 say nothing."""
    better = Claim("accuracy", 0.9, "digits", "mlp", None, "Table 11", epochs=300, than=Rival("dp", 0.8))
    data = dict(train=6400 // epochs, test=1000, name="digits", sha256="0" * 64)
    made = partial(fabricate, attack="dlg", kind="reconstruction", data=data)
    records = [made(d, v, accuracy=a) for d, v, a in (("none", None, 0.95), ("pbpfl", 1.0, 0.9), ("dp", 1.0, 0.6))]
    assert judge(better, records).finding.verdict == verdict


def test_images_of_one_batch_are_traced_by_one_reconstruction_and_drawn_together(fabricate):
    for batch, units in ((1, 40), (4, 10)):
        one, two = (fabricate(d, None, "tracing", "tracing", 0.5, n=40, batch=batch) for d in ("none", "full_noise"))
        (rule,) = rules_for(one)
        assert len(sample_of(one, two, rule).stratum) == units
    audit = dict(references=2, canaries=0)
    known = question_for(one)
    assert known.together(one.victims[3], one.config.model_copy(update={"audit": audit})) == one.victims[3].unit


def test_that_noise_larger_than_the_gradient_defeats_reconstruction_falls_where_it_does_not(fabricate):
    (claim,) = [c for c in claims_of("spn") if c.source.startswith("Theorem 2.2")]
    about = dict(model="dlnet", control="alpha2")
    made = partial(fabricate, kind="reconstruction", **about)
    base = [made("none", None, "dlg", share=60.0), made("full_noise", None, "dlg", share=5.0)]
    for db, verdict in ((50.0, "falls"), (5.0, "holds")):
        mine = [made("spn", 0.5, "dlg", share=5.0), made("spn", 0.5, "adaptive_spn", share=db, adaptive=True)]
        assert judge(claim, base + mine, "spn").finding.verdict == verdict
    few = [made("spn", 0.1, "dlg", share=50.0)]
    assert not isinstance(check_claims({"spn": [claim]}, base + few, [])[0], Checked), (
        "smaller perturbations are another claim"
    )


# -- whose view, which variants, which end ---------------------------------------------------------------------------
def test_a_claim_of_what_another_sees_falls_by_what_he_sees(fabricate):
    """Masks hide from the server what who colludes with all other clients sees; the claim says of whom it speaks."""
    made = partial(fabricate, kind="reconstruction")
    records = []
    for threat, db in (("server/1", 5.0), ("collusion/1", 30.0)):
        seen = partial(made, threat=threat)
        records += [seen("none", None, "dlg", share=60.0), seen("full_noise", None, "dlg", share=5.0)]
        records += [seen("pbpfl", 10.0, "dlg", share=5.0), seen("pbpfl", 10.0, "knowing", share=db, adaptive=True)]
    claim = Claim("psnr_median", None, "digits", "mlp", None, "Appendix D", note="hidden")
    assert judge(claim, records).finding.verdict == "holds"
    result = judge(replace(claim, views=("server/1", "collusion/1")), records).finding
    assert result.verdict == "falls" and result.reason.endswith(
        "seen by the server and all clients but client 0 (collusion/1)"
    )
    alone = [r for r in records if r.config.threat_model.id == "server/1"]
    unseen = check_claims({"pbpfl": [replace(claim, views=("collusion/1",))]}, alone, [])[0]
    assert unseen.reason == "no reconstruction of images was run of what collusion/1 sees"
    less = replace(claim, views=("server/1", "collusion/1"), than=Rival("none"))
    assert judge(less, records).finding.worst == "31.00 beside 59.00 (knowing)"
    assert "seen by collusion/1" in judge(less, records).finding.reason


def searched(make, defense, value, attack, decibels):
    """Return a search that rebuilds each victim at its decibels."""
    made = images(make, defense, value, attack, 0, n=len(decibels), adaptive=True)
    victims = [v.model_copy(update={"psnr": float(db)}) for v, db in zip(made.victims, decibels, strict=True)]
    return made.model_copy(update={"victims": victims})


@pytest.mark.parametrize(("step", "verdict"), [(0.0, "inconclusive"), (-6.0, "holds"), (6.0, "falls")])
@pytest.mark.parametrize("more", ["mine", "theirs"])
def test_who_was_searched_more_often_is_not_therefore_told_to_leak_more(fabricate, step, verdict, more):
    """Each answer is what can be seen, but for luck: by the worst cases alone two equals would be told apart."""
    draws = np.random.default_rng(0).normal(14, 2, (4, 24))
    mine, theirs = (draws[:3], draws[3:]) if more == "mine" else (draws[:1], draws[1:])
    records = [searched(fabricate, end, None, "ig", [db] * 24) for end, db in (("none", 60.0), ("full_noise", 5.0))]
    records += [searched(fabricate, "pbpfl", 1.0, f"search_{i}", some + step) for i, some in enumerate(mine)]
    records += [searched(fabricate, "dp", 0.1, f"search_{i}", some) for i, some in enumerate(theirs)]
    claim = Claim("psnr_median", 6.0, "digits", "mlp", None, "Table 2", than=Rival("dp"))
    finding = judge(claim, records).finding
    assert finding.verdict == verdict and finding.reason.startswith("difference"), finding
    if step == 0:
        one, other = (
            worst_case([r for r in records if r.config.defense.id == d], "psnr_median") for d in ("dp", "pbpfl")
        )
        rule = next(rule for rule in question_for(one).all_rules if rule.metric == "psnr_median")
        plain = change([one], [other], rule, "")
        assert plain.low > 0 or plain.high < 0


def test_who_reads_sums_is_asked_about_whole_cohorts_and_both_are_compared_on_those_in_common(fabricate):
    """Of five clients 24 victims are 25 for who reads their sum."""
    records = [searched(fabricate, end, None, "ig", [db] * 25) for end, db in (("none", 60.0), ("full_noise", 5.0))]
    records += [searched(fabricate, "pbpfl", 1.0, "ig", [7.0] * 24), searched(fabricate, "dp", 0.1, "ig", [20.0] * 25)]
    claim = Claim("psnr_median", 6.0, "digits", "mlp", None, "Table 2", than=Rival("dp"))
    finding = judge(claim, records).finding
    assert finding.verdict == "holds" and finding.reason.endswith("on the 24 that both share"), finding
    others = [v.model_copy(update={"probe": v.probe + 100}) for v in records[-1].victims]
    mixed = judge(claim, [*records[:-1], records[-1].model_copy(update={"victims": others})]).finding
    assert mixed.verdict == "inconclusive" and "different victims" in mixed.reason, mixed


def test_a_variant_that_was_timed_for_other_numbers_of_clients_alone_leaves_it_open(fabricate):
    def timed(defense, variant, clients, ratio):
        figures = {"clients": float(clients), "server_ratio": ratio, "client_ratio": ratio}
        return Benchmark(defense, f"resnet56 {variant}{clients} clients upload a batch", figures, "m", "d")

    light = [timed("mpdp", "scalar ", n, 3.0) for n in (5, 100)] + [timed("tp_smc", "", n, 50.0) for n in (5, 100)]
    heavy = timed("mpdp", "vector ", 5, 60.0)
    server = Claim("server_cost_ratio", 1.3, "", "resnet56", None, "Table 1", clients=100, than=Rival("tp_smc", 30.0))

    def judged(claim, *benchmarks):
        (verdict,) = check_claims({"mpdp": [claim]}, [fabricate("mpdp", 3.0, "dlg", "reconstruction")], benchmarks)
        return verdict.finding

    assert judged(server, *light).verdict == "holds"
    verdict = judged(server, *light, heavy)
    assert (verdict.verdict, verdict.worst) == ("inconclusive", "3 to 3 beside 50 to 50")
    assert verdict.reason.endswith("resnet56 vector was not timed with 100 clients")
    client = judged(replace(server, metric="client_cost_ratio"), *light, heavy)
    assert (client.verdict, client.worst) == ("inconclusive", "3 to 60 beside 50 to 50"), "one client's are of any"
    assert client.reason.endswith("it depends on what is timed: resnet56 scalar, resnet56 vector beside resnet56")
    assert judged(replace(server, than=None), *light, heavy).verdict == "not comparable"


def test_an_untaught_model_errs_as_one_that_noise_trained_not_as_training_was_first_looked_at(fabricate):
    error = Claim("mse", 0.06, "rows", "mlp", None, "Table 1", undefended=0.06, needs=())
    made = partial(
        fabricate, attack="mia_loss", kind="membership", accuracy=None, classes=1, shape=(16,), dataset="rows"
    )
    records = [made("none", None, mse=0.06), made("pbpfl", 1.0, mse=0.061), made("full_noise", None, mse=0.14)]
    for record, last in zip(records, (0.06, 0.061, 0.14), strict=True):
        curve = [(20, 0.14 if last == 0.14 else 0.1), (40, last)]
        object.__setattr__(record, "utility", record.utility.model_copy(update={"curve": curve}))
    assert judge(error, records).finding.least.startswith("0.1400")


# -- the committed pages -----------------------------------------------------------------------------------------------
ROOT = Path(__file__).parents[1]
ARCHIVES = sorted((ROOT / "leaderboards" / "results").glob("*/records.zip"))
ENDS = re.compile(r"could have been [^;]*;|\(by the best constant answer [^)]*\)")
"""What a page computes as if all, or nothing, had leaked, and what a constant answers: in no record."""


def with_ends(form, *ends):
    return None if None in ends else form.format(*ends)


def measured(archive):
    """Return what an archive holds, as pages print it: decibels and shares with their intervals, and bytes."""
    store, texts = Store(archive), set()
    for record in store.load_all():
        use, cost = record.utility, record.cost
        for m in record.metrics:
            texts.add(with_ends("{:.1f} dB [{:.1f}, {:.1f}]", m.value, m.low, m.high))
        shares = [(m.value, m.low, m.high) for m in record.metrics] + [(use.accuracy, use.low, use.high)]
        texts |= {with_ends("{:.1%} [{:.1f}, {:.1f}]", v, *(100 * e for e in ends)) for v, *ends in shares if ends[0]}
        texts |= {f"{up:.0f} B" for up in (cost.bytes_up, cost.bytes_up + cost.bytes_down, cost.memory_peak or 0)}
    for row in csv.DictReader(io.StringIO(store.files.read("worst_case.csv").decode())):
        ends = [row.get(f"worst_psnr_median{end}") for end in ("", "_low", "_high")]
        texts.add(with_ends("{:.1f} dB [{:.1f}, {:.1f}]", *map(float, ends)) if all(ends) else None)
    return texts


@pytest.mark.skipif(not ARCHIVES, reason="no board is here")
def test_no_figure_of_a_papers_page_differs_from_the_archives():
    """Read from records and worst_case.csv, without any code of the claims."""
    known, checked = set().union(*map(measured, ARCHIVES)), 0
    for page in sorted((ROOT / "docs" / "claims").glob("*.md")):
        text = ENDS.sub("", page.read_text(encoding="utf-8").replace("\\", ""))
        printed = re.findall(r"[\d.]+ dB \[[\d., ]+\]|[\d.]+% \[[\d., ]+\]|\b\d{2,} B\b", text)
        assert not [one for one in printed if one not in known], page.name
        checked += len(printed)
    assert checked > 40
