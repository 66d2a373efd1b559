"""The worst case over attacks, victim by victim; settings tuned on other victims; CAP and PPC."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppbench.adversary.attack import Attack, Guess
from ppbench.base.errors import UsageError
from ppbench.defenses.none import NoDefense
from ppbench.federation.engine import Federation
from ppbench.federation.threats import HONEST_SERVER
from ppbench.records.figure import best
from ppbench.records.schema import Metric
from ppbench.report.cap import cap_value, corrected_accuracy, distance_of, ppc_point, record_distance, series_cap
from ppbench.report.page.boards import boards_of, no_claims
from ppbench.report.worst import worst_case
from ppbench.run.cells import CellGroup
from ppbench.run.config import configure
from ppbench.run.experiment import resolve, select_attacks
from ppbench.run.group import FIRST_TUNING_PROBE, rehearse, tune
from ppbench.run.task import make_task


def changed(record, **decibels):
    """Return the record with other PSNR for some victims, named v0, v1, ..."""
    victims = list(record.victims)
    for name, db in decibels.items():
        victims[int(name[1:])] = victims[int(name[1:])].model_copy(update={"psnr": db})
    return record.model_copy(update={"victims": victims})


def test_each_victim_counts_by_the_attack_that_hurts_it_most(fabricate):
    one = changed(fabricate("spn", 0.1, "dlg", "reconstruction", 10.0), v0=40.0)
    two = changed(fabricate("spn", 0.1, "ig", "reconstruction", 20.0, adaptive=True), v0=5.0, v1=None)
    result = worst_case([one, two], "psnr_median")
    assert [v.psnr for v in result.victims[:3]] == [40.0, 11.0, 22.0]
    assert (result.name, result.attack, result.attacks) == ("portfolio (ig)", "ig", ("ig", "dlg"))
    assert result.knows and result.leading is two and result.config is two.config
    assert result.metric("psnr_max").value == 40.0
    for record in (one, two):
        assert result.metric("psnr_median").value >= record.metric("psnr_median").value
    assert worst_case([two, one], "psnr_median") == result  # whatever the order


def test_an_attack_that_is_best_on_every_victim_is_the_worst_case_as_it_is(fabricate):
    weak, strong = (fabricate("spn", 0.1, a, "reconstruction", db) for a, db in (("dlg", 10.0), ("ig", 20.0)))
    result = worst_case([weak, strong], "psnr_median")
    assert result.leading is strong and result.alone and result.name == "ig"
    assert result.metric("psnr_median") is strong.metric("psnr_median")
    assert worst_case([weak], "psnr_median").leading is weak
    assert worst_case([], "psnr_median") is None


def test_the_strongest_of_several_is_no_oracle_and_no_broken_cell_and_table_rows_go_by_their_error(fabricate):
    sound = fabricate("spn", 0.1, "dlg", "reconstruction", 10.0)
    oracle = fabricate("spn", 0.1, "ig", "reconstruction", 50.0)
    attack = oracle.config.attack.model_copy(update={"oracle": True})
    oracle = oracle.model_copy(update={"config": oracle.config.model_copy(update={"attack": attack})})
    broken = fabricate("spn", 0.1, "gifd", "reconstruction", 50.0, status="failed")
    assert worst_case([sound, oracle, broken], "psnr_median").leading is sound
    assert best([sound, oracle], "psnr_median") is sound and best([oracle], "psnr_median") is None
    near = fabricate("dp", 0.1, "analytic", "reconstruction", 5.0, error=0.01, shape=(16,))
    far = fabricate("dp", 0.1, "dlg", "reconstruction", 45.0, error=0.4, shape=(16,))
    assert worst_case([far, near], "rmse_mean").leading is near, "table rows go by their error"


@pytest.mark.parametrize(("knowing", "flagged"), [(10.0, True), (19.5, False), (30.0, False)])
def test_attacks_that_know_more_and_find_less_are_flagged(fabricate, knowing, flagged):
    records = [
        fabricate("spn", 0.1, "dlg", "reconstruction", 20.0),
        fabricate("spn", 0.1, "adaptive_spn", "reconstruction", knowing, adaptive=True),
    ]
    (board,) = boards_of(records, no_claims)
    assert ("knows more, finds less" in {b.text for b in board.entries[0].badges}) == flagged


@dataclass(frozen=True)
class Told(Attack):
    """Answers what it is told: the truth of the victims `seen`, times `gain`."""

    name = "told"
    kind = "reconstruction"
    gain: float = 0.0

    def variants(self):
        return [replace(self, gain=gain) for gain in (0.0, 0.5, 1.0, -1.0)]

    def run(self, view, challenges, generator):
        if self.gain < 0:
            raise ZeroDivisionError("planted")
        return [Guess(x=self.gain * ANSWERS[c.unit]) for c in challenges]


ANSWERS = {}
GROUP = CellGroup(0, "init", HONEST_SERVER, 2, False)


@pytest.fixture
def prepared():
    """Return a task, a federation of it and the rehearsal before an attack, which moves nothing."""
    task = make_task(configure(defense="none", clients=3, train=60))
    federation = Federation(NoDefense(), task.plan, task.shards, task.seeds)
    federation.start(task.params)
    before = [leaf.clone() for leaf in federation.parties.server.params.values()]
    trial = rehearse(federation, resolve(configure(defense="none", clients=3, train=60, tuning=4)), GROUP)
    assert all(map(torch.equal, before, federation.parties.server.params.values()))
    return task, trial


def test_the_variant_that_is_best_on_the_tuning_victims_is_chosen(prepared):
    task, trial = prepared
    ANSWERS.update({unit: trial.victims.truth(unit).x for unit in trial.victims.units})
    with pytest.warns(UserWarning, match="attack 'told' failed on tuning victims: ZeroDivisionError: planted"):
        attack, choice = tune(Told(), trial, task, ("told",))
    assert attack == Told(gain=1.0) and choice.chosen == 2
    assert choice.variants == [{"gain": g} for g in (0.0, 0.5, 1.0, -1.0)]
    assert choice.scores[2] == 100.0 and choice.scores[0] < choice.scores[1] < 100.0
    assert choice.scores[3] == 0.0  # a variant that fails is never the best


def test_tuning_victims_are_no_clients_data_and_their_probes_are_other_ones(prepared):
    task, trial = prepared
    slots = [slot for unit in trial.victims.units for slot in unit]
    assert all(slot.probe >= FIRST_TUNING_PROBE for slot in slots) and len(slots) == 2
    rows = {row.numpy().tobytes() for shard in task.shards.values() for row in shard.x}
    mine = torch.cat([trial.victims.truth(unit).x for unit in trial.victims.units])
    assert not rows & {row.numpy().tobytes() for row in mine}


def test_public_examples_are_held_by_no_client_and_known_to_every_view():
    task = make_task(configure(defense="none", clients=3, public=0.5))
    rows = {row.numpy().tobytes() for shard in task.shards.values() for row in shard.x}
    sizes = len(task.public.x), sum(len(shard.x) for shard in task.shards.values())
    assert sizes[0] == sum(sizes) // 2
    assert not any(row.numpy().tobytes() in rows for row in task.public.x)
    assert make_task(configure(defense="none", clients=3)).public is None


def test_attacks_that_learn_from_public_examples_need_some():
    with pytest.raises(UsageError, match=r"'gifd' learns from public examples; set some apart, as --public 0.5"):
        select_attacks(configure(defense="none", attacks=("gifd",)))
    for share, expected in ((0.0, False), (0.5, True)):
        names = {attack.name for attack in select_attacks(configure(defense="none", attacks=("all",), public=share))}
        assert ("gifd" in names) == expected and "ig" in names
    (own,) = select_attacks(
        configure(defense="none", attacks=("gifd",), settings={"gifd.generator": "mine.safetensors"})
    )
    assert not own.needs_public


def test_audits_and_references_are_asked_for_before_attacks_that_need_them():
    with pytest.raises(UsageError, match="'mia_lira' is asked in audits; add --stage audit"):
        select_attacks(configure(defense="none", attacks=("mia_lira",)))
    with pytest.raises(UsageError, match="'mia_lira' learns from reference runs; add --references 16"):
        select_attacks(configure(defense="none", attacks=("mia_lira",), stages=("audit",)))
    quick = {attack.name for attack in select_attacks(configure(defense="spn"))}
    audit = {attack.name for attack in select_attacks(configure(defense="spn", stages=("audit",), references=4))}
    assert {"mia_lira", "mia_rmia", "mia_update_cosine", "tracing_cosine", "mia_loss"} <= audit, "by default, too"
    alone = {attack.name for attack in select_attacks(configure(defense="spn", stages=("audit",)))}
    assert "mia_lira" not in alone and "mia_whitebox" in alone, "nothing to learn from without references"
    whole = {attack.name for attack in select_attacks(configure("portfolio", defense="spn"))}
    standard = {attack.name for attack in select_attacks(configure(defense="spn", attacks=("standard",)))}
    assert {"ig", "adaptive_spn", "adaptive_server"} <= quick < standard < whole and standard - quick == {
        "dlg",
        "ig_masked",
    }
    for defense, own in (("fedpc", "adaptive_fedpc"), ("baffle", "baffle_sketch"), ("none", "fedavg_inversion")):
        assert own in {attack.name for attack in select_attacks(configure(defense=defense))}, "dlg's heirs are no dlg"
    assert {"likelihood", "gifd", "mia_lira", "tracing_cosine"} <= whole - quick


def test_one_budget_for_all_that_search_unless_one_is_named():
    settings = {"dlg.budget": 7}
    results = {a.name: a for a in select_attacks(configure("portfolio", defense="dp", budget=50, settings=settings))}
    assert (
        results["dlg"].budget == 7
        and results["ig"].budget == results["gifd"].budget == results["adaptive_dp"].budget == 50
    )


# -- CAP and PPC: the paper's equation, versioned distances, grids with holes -----------------------------------------
KINDS = {"reconstruction": "rmse_mean", "label": "label_accuracy", "membership": "asr", "tracing": "tracing_accuracy"}
KINDS |= {"extraction": "agreement"}


@pytest.fixture(scope="module")
def record(fabricate):
    def made(value=0.1, accuracy=0.5, figure=1.0, kind="reconstruction", status="complete", ratio=None):
        """Return a cell with one figure, which and the accuracy lie within .1, and a ratio."""
        ends = (None, None) if figure is None else (figure - 0.1, figure + 0.1)
        about = dict(method="m", n=1, higher_is_safer=True, reason=None if figure is not None else "r")
        metrics = [
            Metric(name=KINDS[kind], value=figure, low=ends[0], high=ends[1], **about),
            Metric(name="ratio_median", value=ratio, **about),
        ]
        cell = fabricate("dp", value, "a", kind, control="sigma", status=status, stage="init")
        ends = (None, None) if accuracy is None else (accuracy - 0.1, accuracy + 0.1)
        use = cell.utility.model_copy(update={"accuracy": accuracy, "low": ends[0], "high": ends[1], "chance": 0.1})
        return cell.model_copy(update={"metrics": metrics, "utility": use})

    return made


def test_the_papers_equation_and_accuracies_corrected_for_chance():
    assert cap_value([0.5, 0.5], [1, 0]) == 0.25
    assert corrected_accuracy(0.1, 0.1, 0.7) == 0 and corrected_accuracy(0.8, 0.1, 0.7) == 1
    with pytest.raises(ValueError, match="CAP needs"):
        cap_value([], [])
    with pytest.raises(ValueError, match="not above chance"):
        corrected_accuracy(0.1, 0.1, 0.1)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9), st.randoms())
def test_cap_with_a_bounded_distance_is_bounded_by_the_mean_accuracy(pairs, random):
    accuracy, distance = zip(*pairs, strict=True)
    value = cap_value(accuracy, distance)
    assert 0 <= value <= math.fsum(accuracy) / len(pairs) + 1e-12
    random.shuffle(pairs)
    assert cap_value(*zip(*pairs, strict=True)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("kind", "figure", "name", "expected"),
    [
        ("reconstruction", 1.4, "recon/1", 1.4),
        ("label", 0.3, "label/1", 0.7),
        ("tracing", 0.1, "trace/1", 0.9),
        ("membership", 0.75, "mia/1", 0.5),
        ("membership", 0.4, "mia/1", 1.0),
        ("extraction", 0.85, "output/1", 0.15),
    ],
)
def test_distances_by_kind(record, kind, figure, name, expected):
    decibels = record_distance(record(kind=kind, figure=figure))
    assert decibels.name == name and decibels.value == pytest.approx(expected)
    assert decibels.low <= decibels.value <= decibels.high


def test_cap_of_a_series_with_its_bracket_and_correction(record):
    result = series_cap([record(0.1, 0.5, 1.0), record(0.2, 0.4, 0.5)], 0.7)
    assert result.value == pytest.approx((0.5 + 0.2) / 2) and result.n == 2 and result.distance == "recon/1"
    assert result.low == pytest.approx((0.4 * 0.9 + 0.3 * 0.4) / 2)
    assert result.corrected == pytest.approx((0.4 / 0.6 + 0.3 / 0.6 * 0.5) / 2)
    assert result.low < result.value < result.high
    assert series_cap([record(0.1), record(0.2)], None).corrected is None


def test_a_diverged_setting_is_worth_nothing_and_a_failed_one_refuses_the_cap(record):
    good = record(0.1, 0.5, 1.0)
    assert series_cap([good, record(0.2, None, None, status="diverged")], 0.7).value == pytest.approx(0.25)
    refused = series_cap([good, record(0.2, 0.5, 1.0, status="failed")], 0.7)
    assert refused.value is None and "1 of 2 settings" in refused.reason
    for no_grid in ([record()], [record(None), record(None)]):
        assert series_cap(no_grid, 0.7).value is None


def test_ppc_point_carries_the_ratio_where_it_is_known_and_there_is_none_without_a_distance(record):
    null = Metric(name="asr", value=None, method="none", n=0, higher_is_safer=False, reason="r")
    assert distance_of(null, "mia/1") is None and ppc_point(record(figure=None)) is None
    assert ppc_point(record(ratio=9.0)).x() == pytest.approx(1)
    assert ppc_point(record()).x() is None
    assert ppc_point(record(status="failed")) is None and ppc_point(record(accuracy=None)) is None
