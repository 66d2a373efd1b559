"""`ppbench compare` must find what was planted, say nothing of what is as it was, and never trust a changed control."""

from __future__ import annotations

import dataclasses
import html
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from markdown_it import MarkdownIt

from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.base.errors import UsageError
from ppbench.commands.compare import compare as command
from ppbench.defenses.dp import DP
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.labels import LabelScore
from ppbench.questions.membership import MemberScore
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import Record, Victim
from ppbench.records.sources import CODE
from ppbench.records.store import Store
from ppbench.report.cap import caps
from ppbench.report.compare import machine, report
from ppbench.report.compare.join import facts_of, join, where_of
from ppbench.report.compare.judge import Row, holm, judged
from ppbench.report.compare.outcome import Comparison, compare
from ppbench.report.compare.paired import Level, bootstrapped, change, mcnemar, mid_p, same, unpaired, with_luck
from ppbench.report.compare.rows import rows_of
from ppbench.report.compare.samples import RULES, Rule, Sample, counts, rules_for, sample_of, statistic
from ppbench.run import evaluation
from ppbench.run.evaluation import evaluate

REAL = {
    "defense": "dp",
    "grid": (0.01,),
    "model": "mlp",
    "clients": 3,
    "train": 60,
    "rounds": 1,
    "victims": 12,
    "attack_batch": (1,),
    "attacks": ("dlg", "analytic"),
    "settings": {"dlg.budget": 40, "dlg.restarts": 0},
    "stages": ("init",),
    "tuning": 0,
}


# -- real evaluations ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def no_boards() -> Iterator[None]:
    """Let evaluations write records alone: a comparison reads nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "write_board", lambda store: [])
        yield


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baseline") / "out"
    assert evaluate(**REAL, out=out, workers=1).reliable
    return out


@pytest.fixture(scope="module")
def half_noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same defense at the same parameters, whose code adds half the noise."""
    whole = DP.local_gradient

    def halved(self: DP, *given: Any) -> Any:
        return whole(dataclasses.replace(self, sigma=self.sigma / 2), *given)

    out = tmp_path_factory.mktemp("half") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DP, "local_gradient", halved)
        evaluate(**REAL, out=out, workers=1)
    return out


@pytest.fixture(scope="module")
def weak_attack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same attack at the same version and parameters, whose code stops after one step."""
    whole = DLG.run

    def short(self: DLG, *given: Any) -> Any:
        return whole(dataclasses.replace(self, budget=1), *given)

    out = tmp_path_factory.mktemp("weak") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DLG, "run", short)
        evaluate(**REAL, out=out, workers=1)
    return out


def test_half_the_noise_is_a_regression_and_in_the_worst_case_too(baseline: Path, half_noise: Path) -> None:
    found = compare(baseline, half_noise)
    assert found.exit_code == 1 and "REGRESSION" in found.verdict and "dp" in found.verdict
    worse = {row.where.attack: row for row in found.regressions if row.metric == "psnr_median"}
    assert {"analytic", "worst case of 2 attacks"} <= set(worse)
    gained = worse["analytic"].change
    assert gained is not None and 4 < gained.low <= gained.worse <= gained.high < 9, "half the noise is 6 dB"
    assert all(row.status == "ok" for row in found.rows if row.where.defense in ("none", "full_noise"))
    back = compare(half_noise, baseline)
    assert back.exit_code == 0 and any(row.metric == "psnr_median" for row in back.of("improved"))


def test_an_identical_rerun_has_nothing_to_report(baseline: Path, tmp_path: Path) -> None:
    again = evaluate(**REAL, out=tmp_path / "again", workers=1).out
    found = compare(baseline, again)
    assert found.exit_code == 0 and not found.faults and {row.status for row in found.rows} == {"ok"}
    assert {row.where.defense for row in found.rows} == {"none", "full_noise", "dp"}


def test_an_attack_that_got_weaker_is_a_harness_fault_and_no_verdict_on_the_defense(
    baseline: Path, weak_attack: Path
) -> None:
    found = compare(baseline, weak_attack)
    assert found.exit_code == 3 and any("weaker" in fault and "dlg" in fault for fault in found.faults)
    assert not found.regressions and not [r for r in found.of("improved", "ok") if r.where.defense == "dp"]
    assert "nothing is concluded" in found.verdict
    assert any("stronger" in note for note in compare(weak_attack, baseline).notes)


def test_a_missing_cell_is_named_and_a_new_one_listed(baseline: Path, tmp_path: Path) -> None:
    less = shutil.copytree(baseline, tmp_path / "less")
    victim = next(r for r in Store(less).load_all() if r.config.defense.id == "dp" and r.config.attack.id == "dlg")
    (less / "records" / f"{victim.cell_id}.json").unlink()
    found = compare(baseline, less)
    assert found.exit_code == 4 and [row.where.attack for row in found.of("missing")] == ["dlg"]
    assert "MISSING" in found.verdict and "not in NEW" in report.told(found.of("missing")[0])
    more = compare(less, baseline)
    assert more.exit_code == 0 and [row.where.attack for row in more.of("new")] == ["dlg"]


def test_another_seed_asks_about_others_and_is_incomparable(baseline: Path, tmp_path: Path) -> None:
    other = evaluate(**REAL, seed=1, out=tmp_path / "other", workers=1).out
    found = compare(baseline, other)
    assert found.exit_code == 3 and not found.faults and len(found.of("incomparable")) == len(found.rows)
    assert all("seed is 0, NEW has 1" in row.note for row in found.rows)


def test_figures_are_those_of_the_records(baseline: Path, half_noise: Path) -> None:
    pairs = join(Store(baseline).load_all(), Store(half_noise).load_all()).pairs
    assert len(pairs) == 6
    for pair in pairs:
        for rule in rules_for(pair.base[0]):
            found = change(pair.base, pair.new, rule, "key")
            for level, record in ((found.base, pair.base[0]), (found.new, pair.new[0])):
                metric = record.metric(rule.metric)
                assert metric is not None and metric.value is not None
                if metric.name != "psnr_median" or pair.where.defense != "none":  # exact copies are alike
                    assert level == pytest.approx(metric.value, rel=1e-9)


# -- records made by hand --------------------------------------------------------------------------------------------
def asked(record: Record, **changes: object) -> Record:
    """Return a record with its questions named, changed, and its metrics made again."""
    new = record.model_copy(update={"asked": "a1b2", **changes})
    metrics = aggregate(new.victims, classes=new.config.model.classes, seed=new.config.seed, delta=new.privacy.delta)
    return new.model_copy(update={"metrics": metrics})


def configured(record: Record, part: str | None = None, **changes: object) -> Record:
    """Return a record with another configuration: fields of `part`, or of the whole, changed."""
    config = record.config
    inner = changes if part is None else {part: getattr(config, part).model_copy(update=changes)}
    new = config.model_copy(update=inner)
    return record.model_copy(update={"config": new, "cell_id": new.cell_id()})


@pytest.fixture
def cell(fabricate: Callable[..., Record]) -> Callable[..., Record]:
    def make(defense: str = "dp", value: float | None = 0.1, share: float = 10.0, **more: Any) -> Record:
        return asked(fabricate(defense, value, more.pop("attack", "dlg"), more.pop("kind", "reconstruction"), share,
                               control="sigma", n=more.pop("n", 24), **more))  # fmt: skip

    return make


@pytest.fixture
def controls(cell: Callable[..., Record]) -> list[Record]:
    return [cell("none", None, 30.0), cell("full_noise", None, 5.0)]


def written(folder: Path, *records: Record) -> Path:
    store = Store(folder)
    for record in records:
        store.save(record)
    return folder


def versus(tmp_path: Path, base: list[Record], new: list[Record]) -> Comparison:
    return compare(written(tmp_path / "base", *base), written(tmp_path / "new", *new))


def test_a_dropped_mask_is_found(cell: Callable[..., Record], controls: list[Record], tmp_path: Path) -> None:
    """A server that reads sums alone, and the same protocol when its masks are gone."""
    base, new = (cell("pbpfl_ext", 10.0, share, error=error) for share, error in ((7.0, 0.9), (35.0, 0.02)))
    found = versus(tmp_path, [*controls, base], [*controls, new])
    assert found.exit_code == 1
    assert {row.metric for row in found.regressions} == {"psnr_median", "share_above_20db"}


CHANGED: dict[str, Callable[[Record], Record]] = {
    "attack.version": lambda r: configured(r, "attack", version="2"),
    "attack.parameters.budget": lambda r: configured(r, "attack", parameters={"budget": 9}),
    "threat_model.id": lambda r: configured(r, "threat_model", id="server/2"),
    "suite_digest": lambda r: configured(r, suite_digest="ffff"),
    "suite ": lambda r: configured(r, suite="evaluate/2"),
    "data.sha256": lambda r: configured(r, "data", sha256="1" * 64),
    "model.id": lambda r: configured(r, "model", id="lenet"),
    "federation.rounds": lambda r: configured(r, "federation", rounds=7),
    "asked": lambda r: r.model_copy(update={"asked": "other"}),
    "asked is absent in NEW": lambda r: r.model_copy(update={"asked": None}),
    "victims": lambda r: configured(r, victims=99),
    "seed": lambda r: configured(r, seed=5),
}


@pytest.mark.parametrize("key", CHANGED)
def test_what_differs_makes_a_row_incomparable_and_is_named(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path, key: str
) -> None:
    base = cell()
    found = versus(tmp_path, [*controls, base], [*controls, CHANGED[key](base)])
    row = next(row for row in found.rows if row.where.defense == "dp")
    assert found.exit_code == 3 and row.status == "incomparable" and key in row.note, row.note


def test_the_version_of_a_defense_may_differ_and_is_named(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    found = versus(tmp_path, [*controls, cell()], [*controls, configured(cell(), "defense", version="2")])
    rows = [row for row in found.rows if row.where.defense == "dp"]
    assert found.exit_code == 0 and rows and all("version 1 -> 2" in row.note for row in rows)


def test_one_folder_with_two_versions_of_a_defense_is_refused(cell: Callable[..., Record]) -> None:
    with pytest.raises(UsageError, match=r"NEW holds 'dp' in versions '(1|2)' and '(1|2)'"):
        join([cell()], [cell(), configured(cell(), "defense", version="2")])


def test_what_is_left_over_meets_the_cell_that_differs_least(cell: Callable[..., Record]) -> None:
    base = cell()
    near = configured(base, "attack", version="2")
    far = configured(configured(configured(base, "attack", version="3"), "model", id="x"), victims=7)
    left = {row.status: row for row in join([base], [far, near]).left}
    assert set(left) == {"incomparable", "new"} and 'version is "1", NEW has "2"' in left["incomparable"].reason


def test_cells_that_failed_are_missing_and_those_that_had_failed_are_not_judged(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    good, bad = cell(), cell(status="failed")
    found = versus(tmp_path, [*controls, good], [*controls, bad])
    assert found.exit_code == 4 and "failed in NEW: it broke" in found.of("missing")[0].note
    back = compare(tmp_path / "new", tmp_path / "base")
    assert back.exit_code == 3 and back.of("unjudged")[0].note == "failed in BASELINE"
    assert "UNDECIDABLE: dp: none of its 1 rows was judged" in back.verdict and "1 unjudged" in back.verdict


def test_a_baseline_in_which_nothing_can_be_judged_is_never_green(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    alone = versus(tmp_path / "alone", controls, controls)
    assert alone.exit_code == 3 and "Nothing was judged" in alone.verdict
    broken = [cell("none", None, status="failed"), controls[1], cell()]
    found = versus(tmp_path / "none", broken, [*controls, cell()])
    assert found.exit_code == 3 and "none: none of its 1 rows was judged" in found.verdict
    half = versus(tmp_path / "half", [*controls, cell(), cell(value=0.2, status="failed")], [*controls, cell()])
    assert half.exit_code == 0 and "1 unjudged" in half.verdict, "the other point was judged; the verdict counts this"


def test_a_seed_that_had_failed_is_told_in_every_row(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    lost = cell(seed=2, status="failed")
    attacks = [cell(seed=seed, attack=attack) for seed in (0, 1) for attack in ("dlg", "ig")]
    pair = next(p for p in join([*attacks, lost], attacks).pairs if p.where.attack == "dlg")
    assert pair.seeds == (0, 1) and pair.note == "seed 2 failed in BASELINE: not judged"
    rows = rows_of(join([*attacks, lost], [*attacks, cell(seed=2)]))
    noted = {row.where.attack for row in rows if "seed 2 failed in BASELINE" in row.note}
    assert noted == {"dlg", "worst case of 2 attacks"}


def test_seeds_are_pooled_and_a_missing_one_is_named(cell: Callable[..., Record]) -> None:
    base = [cell(seed=seed) for seed in (0, 1, 2)]
    joined = join(base, base)
    assert len(joined.pairs) == 1 and joined.pairs[0].seeds == (0, 1, 2)
    assert "seed 2 is not in NEW" in join(base, base[:2]).left[0].reason
    extra = join(base[:2], base)
    assert extra.pairs[0].seeds == (0, 1) and extra.left[0].status == "new"
    shifted = [asked(r, victims=[v.model_copy(update={"psnr": v.psnr + 3}) for v in r.victims]) for r in base]
    found = change(base, shifted, RULES[0], "key")
    assert found.worse == pytest.approx(3) and found.n == 72 and "3 seeds" in found.method


def test_oracles_are_left_out(cell: Callable[..., Record]) -> None:
    oracle = configured(cell(), "attack", oracle=True)
    assert join([oracle], []) == join([], [oracle]) == join([], [])


def test_a_stronger_attack_that_is_only_in_new_is_no_regression_of_the_defense(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    base = [*controls, cell(), cell(attack="ig", share=11.0)]
    found = versus(tmp_path, base, [*base, cell(attack="gifd", share=40.0)])
    assert found.exit_code == 0 and [row.where.attack for row in found.of("new")] == ["gifd"]
    assert any(row.where.attack == "worst case of 2 attacks" for row in found.rows)


def test_noise_that_can_be_read_is_a_harness_fault(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    loud = [controls[0], cell("full_noise", None, 40.0)]
    found = versus(tmp_path, [*controls, cell()], [*loud, cell()])
    assert found.exit_code == 3 and any("full_noise" in fault for fault in found.faults)
    alone = compare(written(tmp_path / "b", cell()), written(tmp_path / "n", cell()))
    assert alone.exit_code == 3 and alone.faults, "without controls nothing is vouched for"


def trained(record: Record, accuracy: float, n: int = 10_000) -> Record:
    half = 2 * (accuracy * (1 - accuracy) / n) ** 0.5
    utility = dict(accuracy=accuracy, low=accuracy - half, high=accuracy + half, n=n)
    return record.model_copy(update={"utility": record.utility.model_copy(update=utility)})


def test_accuracy_that_falls_is_a_regression_of_the_defense_and_a_fault_of_the_undefended_model(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    base = [*(trained(r, 0.95) for r in controls), trained(cell(), 0.95)]
    found = versus(tmp_path, base, [*base[:2], trained(cell(), 0.90)])
    assert found.exit_code == 1 and [row.metric for row in found.regressions] == ["accuracy"]
    fault = versus(tmp_path / "two", base, [trained(base[0], 0.90), *base[1:]])
    assert fault.exit_code == 3 and "Training of the undefended model got worse" in fault.faults[0]


def test_the_claimed_epsilon_is_compared_as_stated(
    fabricate: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    def at(epsilon: float | None) -> Record:
        made = fabricate("dp_sgd", 1.0, "dlg", "reconstruction", 9.0, control="noise", epsilon=epsilon, n=24)
        return asked(made)

    base = [*controls, at(2.0)]
    for place, (epsilon, code) in enumerate(((2.2, 0), (2.3, 1), (1.0, 0), (None, 1))):
        found = versus(tmp_path / str(place), base, [*controls, at(epsilon)])
        assert found.exit_code == code, epsilon
        assert [row.metric for row in found.regressions] == ["epsilon_claimed"] * code
    assert "no guarantee in NEW" in found.regressions[0].note


def test_cap_is_that_of_the_board_and_falls_with_the_distance(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    def grid(errors: tuple[float, float]) -> list[Record]:
        return [*controls, *(cell(value=v, error=e) for v, e in zip((0.1, 0.2), errors, strict=True))]

    base, new = grid((0.5, 0.8)), grid((0.5, 0.4))
    found = versus(tmp_path, base, new)
    row = next(row for row in found.rows if row.metric == "cap")
    assert row.where.value is None and row.change is not None and row.status == "regression"
    for level, records in ((row.change.base, base), (row.change.new, new)):
        told = [cap.main.value for cap in caps(records).values() if cap.main.value is not None]
        assert told and told == pytest.approx([level] * len(told))
    assert not [r for r in rows_of(join(base, new[:-1])) if r.metric == "cap"], "half a grid has no CAP"


# -- statistics ------------------------------------------------------------------------------------------------------
def rule(name: str) -> Rule:
    return next(r for r in RULES if r.metric == name)


def test_mcnemar_gives_the_published_figures() -> None:
    """Airway hyper-responsiveness before and after transplantation (Fagerland, Lydersen and Laake 2013, Table 2)."""
    assert mid_p(1, 7) == pytest.approx(0.0391, abs=5e-5) and mid_p(0, 0) == 1 and mid_p(3, 3) == pytest.approx(0.84375)
    base, new = np.zeros(21), np.zeros(21)
    base[:1], new[1:8] = 1, 1
    units = np.arange(21)
    sample = Sample(base, new, np.full(21, 1 / 21), units, 0 * units, base > 1, 0 * units, 1e-5)
    found = mcnemar(sample, safer=False)
    assert (found.worse, found.low, found.high) == (pytest.approx(6 / 21), pytest.approx(0.0134, abs=1e-4),
                                                   pytest.approx(0.5084, abs=1e-4))  # fmt: skip
    mirrored = mcnemar(sample, safer=True)
    assert (mirrored.worse, mirrored.low, mirrored.high) == (-found.worse, -found.high, -found.low)


def test_holm_gives_the_textbook_figures() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def members(generator: np.random.Generator, shift: float, canaries: bool = False, n: int = 600) -> list[Victim]:
    found: list[Victim] = []
    for index in range(n):
        member = index % 2 == 0
        score = round(float(generator.normal(shift * member)), 1)  # ties
        family = "blank" if canaries and index % 3 == 0 else "average"
        silent = canaries and abs(score) < 0.5
        half = index // 2 % 2 if index < n - 40 else 0  # halves of unequal size
        decision = None if silent else score > shift / 2
        found.append(MemberScore(index=index, half=half, member=member, score=score, decision=decision, family=family))
    return found


@pytest.mark.parametrize("canaries", [False, True])
def test_membership_statistics_are_those_of_the_records(cell: Callable[..., Record], canaries: bool) -> None:
    generator = np.random.default_rng(3)
    shape = cell(kind="membership", share=0.5, n=None)
    base, new = (asked(shape, victims=members(generator, shift, canaries)) for shift in (0.5, 1.5))
    judged = []
    for one in rules_for(base):
        metric = base.metric(one.metric)
        if metric is None or metric.value is None:
            continue
        judged.append(one.metric)
        found = change([base], [new], one, "key")
        after = new.metric(one.metric)
        assert after is not None and after.value is not None
        assert (found.base, found.new) == (pytest.approx(metric.value), pytest.approx(after.value)), one
        assert found.low <= found.worse <= found.high or found.worse == pytest.approx(found.high)
    plain = {"asr", "auc", "tpr_at_1pct_fpr"}
    audit = {"auc", "tpr_at_1pct_fpr", "canary_auc", "epsilon_lower"}
    assert set(judged) - {"canary_tpr_at_1pct_fpr"} == (audit if canaries else plain)


def test_resamples_keep_strata_and_are_those_of_numpy(cell: Callable[..., Record]) -> None:
    generator = np.random.default_rng(0)
    record = asked(cell(kind="membership", share=0.5, n=None), victims=members(generator, 1.0))
    sample = sample_of(record, record, rule("auc"))
    drawn = counts(sample, 50, np.random.default_rng(1))
    assert (drawn[0] == 1).all() and drawn.shape == (51, 600)
    for stratum in range(4):
        places = sample.stratum == stratum
        assert (drawn[:, places].sum(axis=1) == places.sum()).all()
    values = generator.normal(size=600)
    medians = statistic(sample, values, "median", drawn)
    wanted = [np.median(np.repeat(values, row.astype(int))) for row in drawn]
    np.testing.assert_allclose(medians, wanted)


def test_victims_of_one_batch_are_drawn_together(cell: Callable[..., Record]) -> None:
    def labels(hits: int) -> list[Victim]:
        return [LabelScore(probe=i // 8, client=0, index=i % 8, label=i < hits) for i in range(96)]

    base, new = (asked(cell(kind="label", share=0.5), victims=labels(hits)) for hits in (16, 48))
    together = change([base], [new], rule("label_accuracy"), "key")
    assert "units" in together.method and together.worse == pytest.approx(1 / 3)
    alone = [asked(r, victims=[v.model_copy(update={"probe": v.probe * 8 + v.index, "index": 0}) for v in r.victims])
             for r in (base, new)]  # fmt: skip
    apart = change(alone[:1], alone[1:], rule("label_accuracy"), "key")
    assert "McNemar" in apart.method and apart.high - apart.low < 0.6 * (together.high - together.low)


def test_a_row_is_resampled_by_what_it_is_about_alone(cell: Callable[..., Record]) -> None:
    generator = np.random.default_rng(5)
    record = cell(n=30)
    moved = [v.model_copy(update={"psnr": v.psnr + float(generator.normal())}) for v in record.victims]
    new = asked(record, victims=moved)
    one, two, other = (change([record], [new], RULES[0], key) for key in ("a", "a", "b"))
    assert one == two and one.worse == other.worse and one.low != other.low
    backward = asked(record, victims=moved[::-1])
    assert change([record], [backward], RULES[0], "a") == one, "victims are lined up by what they are, not by place"


def test_few_victims_cannot_be_significant_beyond_an_exact_test(cell: Callable[..., Record]) -> None:
    record = cell(n=4)
    new = asked(record, victims=[v.model_copy(update={"psnr": v.psnr + 9}) for v in record.victims])
    found = change([record], [new], RULES[0], "key")
    assert found.worse == found.low == found.high == 9 and found.p == 2.0**-3


def test_exact_copies_are_alike_whatever_their_decibels(cell: Callable[..., Record]) -> None:
    base, new = (cell("none", None, share) for share in (90.0, 61.0))
    assert change([base], [new], RULES[0], "key").certain


def test_independent_intervals_add_in_quadrature() -> None:
    base, new = [Level(0.9, 0.88, 0.92, 500)], [Level(0.8, 0.77, 0.83, 500)]
    found = unpaired(base, new, safer=True)
    assert (found.worse, found.low, found.high) == (
        pytest.approx(0.1), pytest.approx(0.1 - (0.02**2 + 0.03**2) ** 0.5), pytest.approx(0.1 + 1300**0.5 / 1000)
    )  # fmt: skip
    assert found.p < 0.001 and unpaired(base, base, safer=True).p == 1
    assert unpaired(base, new, safer=False).worse == pytest.approx(-0.1)


def test_two_trainings_of_one_defense_differ_too(cell: Callable[..., Record]) -> None:
    """What a model's victims share is no evidence about the defense, however many they are; seeds are."""
    base, new = (asked(cell(kind="membership", share=share, n=5000)) for share in (0.55, 0.58))
    bare = change([base], [new], rule("asr"), "key")
    assert bare.p < 1e-9 and bare.low > 0.02
    one, many = (with_luck(bare, 0.02, seeds) for seeds in (1, 100))
    assert one.p > 0.2 and one.low < 0 < one.worse == bare.worse and "luck of training" in one.method
    assert bare.p <= many.p < 1e-9 and many.low > 0.02
    assert with_luck(bare, 0.0, 1) == bare and with_luck(same(0.5, 9), 0.02, 1) == same(0.5, 9)
    rows = [row for row in rows_of(join([base], [new])) if row.metric == "asr"]
    undecided_row = judged(rows)[0]
    assert undecided_row.status == "inconclusive" and undecided_row.needed is None
    assert "more seeds" in report.told(undecided_row)
    init = [configured(r, stage="init") for r in (base, new)]
    assert judged([r for r in rows_of(join(init[:1], init[1:])) if r.metric == "asr"])[0].status == "regression"


def undecided(generator: np.random.Generator, n: int, worse: float) -> Sample:
    base = generator.normal(15, 4, size=n)
    units = np.arange(n)
    new = base + worse + generator.normal(0, 2, size=n)
    return Sample(base, new, np.full(n, 1 / n), units, 0 * units, base > 99, 0 * units, 1e-5)


def test_the_number_that_would_decide_does(cell: Callable[..., Record]) -> None:
    record, generator = cell(), np.random.default_rng(2)

    def verdict(n: int, worse: float) -> Row:
        found = bootstrapped([undecided(generator, n, worse)], RULES[0], "key")
        row = Row(where_of(record.config), "psnr_median", "all", "ok", found, 0.5, "", record)
        return judged([row])[0]

    few = [verdict(20, 0.0) for _ in range(20)]
    asking = sorted(row.needed for row in few if row.status == "inconclusive" and row.needed)
    middle = asking[len(asking) // 2]
    enough = [verdict(4 * middle, 0.0).status for _ in range(10)]
    assert enough.count("ok") >= 8 and [row.status for row in few].count("ok") <= 8


def shifted(record: Record, gain: float) -> Record:
    """Return a record whose every victim gained decibels, each its own number."""
    victims = [v.model_copy(update={"psnr": v.psnr + gain * (1 + i / 100)}) for i, v in enumerate(record.victims)]
    return asked(record, victims=victims)


def test_a_dozen_victims_decide_headlines_however_many_rows_there_are(cell: Callable[..., Record]) -> None:
    """With 12 victims no p is below 2^-11, which Holm's correction over more than 102 rows lifts above .05."""
    attacks = ("dlg", "ig", "idlg", "gifd", "analytic")
    base = [cell(value=v / 100, attack=attack, n=12) for v in range(1, 31) for attack in attacks]
    rows = judged(rows_of(join(base, [shifted(r, 3.0) for r in base])))
    some = [row for row in rows if row.metric == "psnr_median"]
    worst = [row for row in some if row.where.attack == "worst case of 5 attacks"]
    assert len(worst) == 30 and {row.status for row in worst} == {"regression"} and all(r.headline for r in worst)
    single = [row for row in some if row not in worst]
    assert len(single) == 150 < single[0].family and {row.status for row in single} == {"inconclusive"}
    assert not any(row.blind or row.headline for row in single), "their point's headline stands for them"


def test_headlines_are_worst_cases_and_the_best_attack_of_other_kinds(
    cell: Callable[..., Record], controls: list[Record]
) -> None:
    lone = cell(value=0.2)
    pair = [cell(attack=attack, share=share) for attack, share in (("dlg", 10.0), ("ig", 20.0))]
    members = [cell(attack=a, kind="membership", share=s, n=400) for a, s in (("mia_a", 0.55), ("mia_b", 0.6))]
    base = [trained(r, 0.9) for r in (*controls, lone, *pair, *members)]
    stronger = cell(attack="mia_a", kind="membership", share=0.9, n=400)
    for new in (base, [*base[:-2], trained(stronger, 0.9), base[-1]]):
        heads = {
            (row.where.value, row.where.attack, row.metric)
            for row in rows_of(join(base, new))
            if row.headline and row.where.defense == "dp"
        }
        images = {"psnr_median", "share_above_20db"}
        assert heads == {
            *((0.2, "dlg", metric) for metric in images),
            *((0.1, "worst case of 2 attacks", metric) for metric in images),
            *((value, "", "accuracy") for value in (0.1, 0.2)),
            (0.1, "mia_b", "asr"),
        }, "NEW has no say in it"


def test_too_few_victims_are_never_green_where_they_look_worse(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    base = cell(n=4)
    found = versus(tmp_path, [*controls, base], [*controls, shifted(base, 9.0)])
    row = next(row for row in found.rows if row.blind)
    assert found.exit_code == 3 and not found.faults and row.status == "inconclusive" and row.needed is not None
    assert "4 victims are too few" in found.verdict and f"it takes {row.needed}" in found.verdict
    assert "too few victims for 2 rows" in report.told(row) and "undecidable" in report.markdown(found)
    assert ElementTree.fromstring(machine.junit(found)).findall(".//testsuite[@name='undecidable']//error")
    assert any(line.startswith("::error title=ppbench%3A undecidable") for line in machine.workflow_commands(found))
    assert json.loads(machine.as_json(found))["doubts"] == list(found.doubts)
    for n, code in ((row.needed - 1, 3), (row.needed, 1)):
        base = cell(n=n)
        again = versus(tmp_path / str(n), [*controls, base], [*controls, shifted(base, 9.0)])
        assert again.exit_code == code, "as many as it says are enough, one less is not"
    better = versus(tmp_path / "better", [*controls, shifted(cell(n=4), 9.0)], [*controls, cell(n=4)])
    assert better.exit_code == 0 and any(row.blind for row in better.rows), "it does not look worse"


def test_facts_cover_every_field_of_a_configuration_but_these(cell: Callable[..., Record]) -> None:
    """A field that comes later must be decided upon: is it what a row is about, or must it be equal?"""
    config = cell().config
    about = {"defense", "stage", "batch_size", "probe", "probe_rounds", "role", "seed"}
    ignored = {"perceptual"}
    stated = {name.partition(".")[0] for name, _ in facts_of(config)} - {"schema"} | {"schema_"}
    assert set(type(config).model_fields) == stated | about | ignored


# -- what comes out --------------------------------------------------------------------------------------------------
EVIL = "<img src=x onerror=alert(1)>|@all `x`\n::error::\x1b[31m\x00"


@pytest.fixture
def evil(cell: Callable[..., Record], controls: list[Record], tmp_path: Path) -> Comparison:
    base, new = (configured(cell(share=share), "defense", id=EVIL) for share in (10.0, 30.0))
    gone = configured(cell(), "defense", id=EVIL + "2")
    return versus(tmp_path, [*controls, base, gone], [*controls, new])


def test_names_of_others_do_nothing_in_any_output(evil: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    page = report.markdown(evil)
    assert "<img" not in page and "@all" not in page and "\\|" in page and "\x1b" not in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 6 for line in table)
    root = ElementTree.fromstring(machine.junit(evil))
    assert root.findall(".//failure") and "<img src=x" in root.findall(".//testcase")[0].get("classname", "")
    lines = machine.workflow_commands(evil)
    assert lines and all(line.startswith(("::error ", "::notice ")) and "\n" not in line for line in lines)
    assert all(line.count("::") == 2 or "%3A%3A" in line or "::error::" in line[8:] for line in lines)
    assert any("records/" in line and ".json" in line for line in lines)
    report.print_report(evil)
    assert "\x1b[31m" not in capsys.readouterr().out
    assert json.loads(machine.as_json(evil))["exit_code"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "@octocat",
        "https://evil.example/x",
        "www.evil.example",
        "a@b.example",
        "#12",
        "&#64;x",
        "a_b *c* `x`",
        "GH-1 <b>",
    ],
)
def test_markdown_shows_names_as_they_are_and_links_nothing(text: str) -> None:
    """Rendered, the comments that break links and mentions are gone, and what is left is the text itself."""
    page = MarkdownIt("commonmark", {"html": True}).render(report.markdown_text(text))
    assert page.startswith("<p>") and html.unescape(page.strip()[3:-4].replace("<!-- -->", "")) == text
    for linked in ("@o", "@b", "://", "www.", "#12", "GH-1"):
        assert linked not in page, "GitHub would make a link or a mention of it"


@pytest.mark.parametrize(("content", "told"), [('["a1", "b2"]', 1), ('["a1"]', 0), ("{", 0), ("7", 0), (None, 0)])
def test_cells_of_several_states_of_the_code_are_told(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path, content: str | None, told: int
) -> None:
    for name in ("base", "new"):
        written(tmp_path / name, *controls, cell())
    if content is not None:
        (tmp_path / "new" / CODE).write_text(content)
    found = compare(tmp_path / "base", tmp_path / "new")
    assert found.exit_code == 0 and len(found.warnings) == told
    lines = [line for line in machine.workflow_commands(found) if line.startswith("::warning ")]
    assert len(lines) == told and all("several states of the code" in line for line in lines)
    assert ("several states of the code" in report.markdown(found)) == bool(told)


def test_the_command_writes_what_is_asked_for(
    baseline: Path,
    half_noise: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    page, xml = tmp_path / "page.md", tmp_path / "junit.xml"
    with pytest.raises(typer.Exit) as stop:
        command(baseline, half_noise, markdown=page, junit=xml, github=True)
    assert stop.value.exit_code == 1
    out = capsys.readouterr().out
    assert "REGRESSION" in out and "::error file=" in out
    assert summary.read_text() == "before\n" + page.read_text() and "### regression" in page.read_text()
    suite = next(s for s in ElementTree.parse(xml).getroot() if s.get("name") == "dp")
    assert int(suite.get("failures", 0)) == len(compare(baseline, half_noise).regressions)
    with pytest.raises(typer.Exit):
        command(baseline, half_noise, json_=True)
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 1 and {row["status"] for row in told["rows"]} >= {"ok", "regression"}
    command(baseline, baseline)
    assert "No regression was found" in capsys.readouterr().out
    with pytest.raises(UsageError, match="give one of them"):
        command(baseline, baseline, github=True, json_=True)
    with pytest.raises(UsageError, match="no folder"):
        command(baseline, baseline, junit=tmp_path / "nowhere" / "x.xml")


def test_folders_that_cannot_be_compared_are_refused(
    cell: Callable[..., Record], controls: list[Record], tmp_path: Path
) -> None:
    good = written(tmp_path / "good", *controls, cell())
    with pytest.raises(UsageError, match=r"BASELINE: .* is no folder"):
        compare(tmp_path / "nowhere", good)
    empty = tmp_path / "empty"
    Store(empty).prepare()
    with pytest.raises(UsageError, match=r"NEW: .* holds no records"):
        compare(good, empty)
    path = next((good / "records").glob("*.json"))
    path.write_text(path.read_text()[:100])
    with pytest.raises(UsageError, match=r"not a whole record.*ppbench verify"):
        compare(good, good)


def test_victims_that_differ_are_no_pair(cell: Callable[..., Record]) -> None:
    one = cell()
    other = asked(one, victims=[v.model_copy(update={"client": 3}) for v in one.victims])
    with pytest.raises(ValueError, match="other victims"):
        sample_of(one, other, RULES[0])
    assert isinstance(one.victims[0], ImageScore)
