"""`ppbench audit`: members of a finished model's training data, with controls, limits, and a report for people."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import ppbench
from ppbench import commands as cli
from ppbench.adversary.victims import choose_candidates
from ppbench.base.errors import UsageError
from ppbench.federation.plan import Data
from ppbench.federation.threats import CURIOUS_CLIENT
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import TargetModel
from ppbench.questions.membership import ASR, TPR_1
from ppbench.records.figure import aggregate
from ppbench.records.schema import Metric
from ppbench.report.page.finished_model import AttackResult, Limit, audit_html, limit_outcome
from ppbench.run import model_audit
from ppbench.run.experiment import make_attack
from ppbench.run.model_audit import AuditOrder, audited, membership_attacks, without_duplicates
from ppbench.run.scene import attack_seed
from ppbench.task.member_sets import MemberSet, open_member_sets
from ppbench.task.user_data import open_dataset

SIZE = 240
DATA = Path(os.environ.get("PPBENCH_TEST_DATA", "")) / "cifar10"


def network(width=128, shape=(1, 8, 8), classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, classes))


def trained(x, y, seed=0, epochs=60, net=None):
    """Train as a plain user of torch does."""
    torch.manual_seed(seed)
    net = network() if net is None else net
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    return net


@pytest.fixture(scope="module")
def sets():
    """Digits of which a fifth has a random label, so that a network has something to remember."""
    data = open_dataset("digits", seed=0)
    x, y = data.train.x, data.train.y.clone()
    draws = torch.Generator().manual_seed(3)
    wrong = torch.rand(len(y), generator=draws) < 0.2
    y[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=draws)
    order = torch.randperm(len(x), generator=draws)
    x, y = x[order], y[order]
    return (x[:SIZE], y[:SIZE]), (x[SIZE : 2 * SIZE], y[SIZE : 2 * SIZE])


@pytest.fixture(scope="module")
def model(sets):
    return trained(*sets[0])


@pytest.fixture(scope="module")
def plain(model, sets):
    return ppbench.audit(model, *sets, max_asr=0.55, max_tpr=0.9)


@pytest.fixture(scope="module")
def referenced(model, sets):
    return ppbench.audit(model, *sets, train=partial(trained, epochs=30), references=4, candidates=100)


def named_check(result, name):
    return {check.name: check for check in result.checks}[name]


# -- figures -----------------------------------------------------------------------------------------------------------
def bench_figures(net, members, others, count):
    """Return what the bench's own cells of a delivered model compute: its federation, view, candidates and question."""
    stranger = members[0][:1].clone(), members[1][:1]
    fed = ppbench.federate(ppbench.load_defense("none"), net, [stranger, members], loss="cross_entropy")
    view = fed.release(CURIOUS_CLIENT).view(CURIOUS_CLIENT)
    classes = view.plan.spec.classes
    test = Data(others[0], one_hot(others[1], classes).float())
    draw = partial(choose_candidates, fed.shards, test, count, fed.seeds, CURIOUS_CLIENT)
    inquiry = question_of("membership").of_model(TargetModel(test, count, fed.outputs, draw))
    figures = {}
    for name in ("mia_loss", "mia_mentr", "mia_nn"):
        draws = torch.Generator().manual_seed(attack_seed(fed.seeds, name, CURIOUS_CLIENT, "final", 1))
        guesses = make_attack(name).run(view, inquiry.challenges, draws)
        figures[name] = aggregate(inquiry.score(guesses).victims, classes=classes, seed=fed.seeds.master)
    return figures


def test_the_figures_are_those_of_the_benchs_own_cells(model, sets, plain):
    figures = bench_figures(model, *sets, 5000)
    for name, metrics in figures.items():
        (own,) = [attack for attack in plain.attacks if attack.name == name]
        assert list(own.metrics) == metrics
    assert plain.strongest().metric("asr").value > 0.6  # what is compared is not all guessing


@pytest.mark.skipif(not DATA.is_dir(), reason="PPBENCH_TEST_DATA names no folder with cifar10/")
def test_on_photographs_too_the_figures_are_those_of_the_bench_and_the_controls_hold():
    """A small convolutional network of bare torch that has learned 400 photographs of CIFAR-10 by heart."""
    own, others = open_member_sets(f"parquet:{DATA}/train.parquet", f"parquet:{DATA}/test.parquet", 0)
    sets = (own.x[:400], own.y[:400]), (others.x[:400], others.y[:400])
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten())
    net = trained(*sets[0], epochs=25, net=nn.Sequential(pooled, nn.Linear(32 * 6 * 6, 10)))
    result = ppbench.audit(net, *sets, max_asr=0.7)
    for name, metrics in bench_figures(net, *sets, 5000).items():
        (own_attack,) = [attack for attack in result.attacks if attack.name == name]
        assert list(own_attack.metrics) == metrics
    assert all(check.ok for check in result.checks), result.checks
    assert result.exit_code == 1 and result.verdict.startswith("OVER THE LIMIT") and all(e.png for e in result.exposed)


def by_index(result, name):
    (attack,) = [attack for attack in result.attacks if attack.name == name]
    return torch.tensor([score.score for score in sorted(attack.scores, key=lambda s: s.index)], dtype=torch.float64)


def test_reference_attacks_compute_the_published_formulas_and_find_more(model, sets):
    """RMIA (eq. of Zarifzadeh et al. 2024) and LiRA (Carlini et al. 2022, online), written down anew for rows of a
    table, with all outputs made here."""
    members, others = ((x.flatten(1), y) for x, y in sets)
    kept = []

    def train(x, y, seed):
        kept.append((x, trained(x, y, seed, 30).eval()))
        return kept[-1][1]

    result = ppbench.audit(model, members, others, train=train, references=4)
    sources = {row.name: i for i, row in enumerate(result.rows)}
    pairs = [("members", members), ("nonmembers", others)]
    x = torch.stack([own[0][k] for kind, own in pairs for k in range(SIZE) if f"{kind} {k}" in sources])
    y = torch.stack([own[1][k] for kind, own in pairs for k in range(SIZE) if f"{kind} {k}" in sources])
    place = [sources[f"{kind} {k}"] for kind, _ in pairs for k in range(SIZE) if f"{kind} {k}" in sources]
    count = 2 * (SIZE - SIZE // 5)
    assert len(place) == count  # a fifth of the non-members is RMIA's population
    keep = torch.stack([(x[:, None] == part[None]).all(2).any(1) for part, _ in kept[:4]])
    assert keep.sum(0).tolist() == [2] * count  # each in half of the reference models
    nets = [net for _, net in kept[:4]]

    def log_p(net, x, y):
        with torch.no_grad():
            return net(x).double().log_softmax(1).gather(1, y[:, None])[:, 0]

    p, out = log_p(model.eval(), x, y).exp(), torch.stack([log_p(net, x, y).exp() for net in nets])
    mean_in, mean_out = (
        torch.stack([out[keep[:, q] == side, q].mean() for q in range(count)]) for side in (True, False)
    )
    apart = [k for k in range(SIZE) if f"nonmembers {k}" not in sources]
    z, z_y = others[0][apart], others[1][apart]
    population = log_p(model, z, z_y).exp() / torch.stack([log_p(net, z, z_y).exp() for net in nets]).mean(0)
    ratio = p / ((mean_in + mean_out) / 2)
    rmia = (ratio[:, None] / population[None] >= 1).double().mean(1)
    errors = (by_index(result, "mia_rmia")[place] - rmia).abs()  # rounding may turn one comparison of many
    assert errors.mean() < 1e-3 and errors.max() < 2 / len(z)

    def phi(p):
        return (p / (1 - p)).log()

    scores, target = torch.zeros(count, dtype=torch.float64), phi(p)
    own = [phi(out)[:, q] for q in range(count)]
    pooled = [torch.stack([own[q][keep[:, q] == side].var(unbiased=True) for q in range(count)]) for side in (1, 0)]
    for side, sign in ((1, 1), (0, -1)):  # variances shrunk to the pooled one by the weight of four runs
        mean = torch.stack([own[q][keep[:, q] == side].mean() for q in range(count)])
        variance = (4 * pooled[1 - side].mean() + pooled[1 - side]) / 5
        scores += sign * -((target - mean).square() / variance + variance.log()) / 2
    assert (by_index(result, "mia_lira")[place] - scores).abs().max() < 1e-5 * scores.abs().max()
    assert {a.name for a in result.attacks} > {"mia_lira", "mia_lira_offline", "mia_rmia", "mia_rmia_offline"}


def test_reference_models_find_more_and_the_report_says_what_was_left_out(plain, referenced):
    assert referenced.strongest().name not in {attack.name for attack in plain.attacks} or referenced.is_found
    assert "lower bound" in plain.remark and "--train" in plain.remark and not referenced.remark
    assert all(check.ok for check in referenced.checks), referenced.checks
    assert "trained without them" in named_check(referenced, "blind").aim


def test_sets_that_are_sorted_by_class_are_no_trap(model, sets):
    """RMIA's population is drawn at random: the last of files sorted by class would be the last classes."""
    members, others = ((x[order], y[order]) for x, y in sets for order in [y.argsort(stable=True)])
    result = ppbench.audit(model, members, others, train=partial(trained, epochs=2), references=2)
    assert named_check(result, "inputs").ok and {row.label for row in result.rows if not row.member} == set(
        "0123456789"
    )


def test_one_seed_gives_one_result(model, sets):
    one, again, other = (ppbench.audit(model, *sets, candidates=20, seed=seed) for seed in (0, 0, 1))
    assert again.figures() == one.figures() and again.table() == one.table() and other.rows != one.rows


# -- controls: each must be able to fail -------------------------------------------------------------------------------
def test_a_network_that_has_its_data_by_heart_falls_and_the_controls_hold(plain):
    assert all(check.ok for check in plain.checks), plain.checks
    assert plain.is_found and plain.exit_code == 1 and "OVER THE LIMIT" in repr(plain)
    assert [judged.status for judged in plain.judged] == ["over", "within"]


def test_non_members_of_another_source_are_a_trap_and_nothing_is_concluded(model, sets):
    members, (x, y) = sets
    brighter = (x + 0.06).clamp(0, 1), y
    result = ppbench.audit(model, members, brighter, max_asr=0.99, candidates=100)
    assert not named_check(result, "inputs").ok and result.exit_code == 3
    assert "AUC 0.9" in result.verdict or "AUC 1.0" in result.verdict
    assert (
        result.verdict.startswith("Nothing is concluded") and "Take non-members from the same source" in result.verdict
    )


def test_other_classes_among_the_non_members_are_a_trap_too(sets):
    (x, y), (x_other, y_other) = sets
    few = y_other < 5
    subject = MemberSet(x, y, ()), MemberSet(x_other[few], y_other[few], ())
    own, others = (Data(part.x, one_hot(part.y, 10).float()) for part in subject)
    candidates = choose_candidates({0: own, 1: own}, others, 400, model_seeds())
    assert not model_audit.check_inputs(candidates, 0).ok


def model_seeds():
    from ppbench.base.seeds import Seeds

    return Seeds(0)


def test_halves_of_one_source_are_no_trap(sets):
    """The false alarms of six draws of two random halves: none, at one in two hundred each."""
    (x, y), _ = sets
    for seed in range(6):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        own, others = (Data(x[part], one_hot(y[part], 10).float()) for part in order.split(SIZE // 2))
        candidates = choose_candidates({0: own, 1: own}, others, SIZE // 2, model_seeds())
        assert model_audit.check_inputs(candidates, seed).ok, seed


def test_a_model_that_does_not_know_its_task_concludes_nothing(model, sets):
    """As where inputs are not normalized as in training, or weights are of another network."""
    torch.manual_seed(9)
    result = ppbench.audit(network(), *sets, max_asr=0.9, candidates=20)
    assert not named_check(result, "learned").ok and result.exit_code == 3 and "right" in result.verdict


def test_attacks_that_could_not_see_membership_conclude_nothing(model, sets, monkeypatch):
    class Deaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).detach() + 0 * self.inner[3].bias

    monkeypatch.setattr(model_audit, "EPOCHS", 3)
    result = ppbench.audit(Deaf(), *sets, candidates=20)
    assert not named_check(result, "planted").ok and result.exit_code == 3


def test_a_training_function_that_always_takes_the_members_is_found_out(model, sets):
    members, _ = sets

    def cheat(x, y, seed):
        return trained(*members, seed, 150)

    result = ppbench.audit(model, *sets, train=cheat, references=2)
    assert not named_check(result, "blind").ok and "something else than membership" in result.verdict


# -- limits ------------------------------------------------------------------------------------------------------------
def figure(name, value, low, high, n, reason=None):
    method = "Clopper-Pearson"
    return Metric(
        name=name, value=value, low=low, high=high, method=method, n=n, higher_is_safer=False, chance=0.5, reason=reason
    )


def result_of(*metrics, name="mia_loss"):
    return AttackResult(name, "", False, metrics, ())


@pytest.mark.parametrize(
    ("ends", "status"),
    [((0.61, 0.66), "over"), ((0.52, 0.59), "within"), ((0.56, 0.62), "undecided"), ((0.45, 0.6), "within")],
)
def test_a_limit_is_judged_on_the_interval(ends, status):
    low, high = ends
    judged = limit_outcome(Limit(ASR, 0.6), [result_of(figure("asr", (low + high) / 2, low, high, 800))])
    assert judged.status == status and "60.0 %" in judged.sentence


def test_no_limit_is_kept_for_want_of_examples():
    from ppbench.metrics.intervals import clopper_pearson

    for n in (20, 60, 200):
        ends = clopper_pearson(n / 2, n)
        judged = limit_outcome(Limit(ASR, 0.55), [result_of(figure("asr", 0.5, ends.low, ends.high, n))])
        assert judged.status == "undecided" and "no outcome could pass with so few examples" in judged.sentence
        needed = int(judged.sentence.split("about ")[1].split()[0])
        assert clopper_pearson(needed, 2 * needed).high <= 0.5505 and 150 < needed < 250
    unmeasured = figure("tpr_at_1pct_fpr", None, None, None, 40, "20 non-members a half, FPR 1.0% needs 100")
    judged = limit_outcome(Limit(TPR_1, 0.05), [result_of(unmeasured)])
    assert judged.status == "undecided" and "20 non-members" in judged.sentence


def test_of_several_attacks_the_worst_counts_and_their_number_widens_what_accuses():
    calm, bad = figure("asr", 0.5, 0.47, 0.53, 800), figure("asr", 0.64, 0.605, 0.67, 800)
    attacks = [result_of(calm), result_of(bad, name="mia_nn")]
    assert limit_outcome(Limit(ASR, 0.6), attacks[1:]).status == "over"
    assert limit_outcome(Limit(ASR, 0.6), attacks).status == "undecided"  # the larger of two passes 0.605 more easily
    assert limit_outcome(Limit(ASR, 0.7), attacks).status == "within"


@pytest.mark.parametrize(("option", "value"), [("max_asr", 0.5), ("max_asr", 1.0), ("max_tpr", 0.01), ("max_tpr", 2)])
def test_a_limit_that_nothing_could_keep_or_break_is_refused(model, sets, option, value):
    with pytest.raises(UsageError, match="must lie between guessing"):
        ppbench.audit(model, *sets, **{option: value})


def test_with_ten_members_a_limit_is_undecided(model, sets):
    (x, y), (x_other, y_other) = sets
    result = ppbench.audit(model, (x[:10], y[:10]), (x_other[:10], y_other[:10]), max_asr=0.6, max_tpr=0.1)
    assert result.exit_code == 3 and {judged.status for judged in result.judged} == {"undecided"}


# -- input -------------------------------------------------------------------------------------------------------------
def test_non_members_that_are_members_are_dropped_and_counted(model, sets):
    members, (x, y) = sets
    mixed = torch.cat([x, members[0][:30]]), torch.cat([y, members[1][:30]])
    result = ppbench.audit(model, members, mixed, candidates=50)
    assert (
        result.subject.duplicates == 30 and result.subject.other_count == SIZE + 30 and result.subject.candidates == 50
    )
    assert "30 non-members were dropped" in audit_html(result)
    with pytest.raises(UsageError, match="All of the non-members are among the members"):
        ppbench.audit(model, members, members)


def test_duplicates_are_found_by_input_alone():
    own, others = MemberSet(torch.rand(20, 3), torch.zeros(20).long(), ("a",) * 20), torch.rand(20, 3)
    others[3] = own.x[5]
    kept, dropped = without_duplicates(own, MemberSet(others, torch.ones(20).long(), tuple(map(str, range(20)))))
    assert dropped == 1 and len(kept.y) == 19 and "3" not in kept.names and kept.names[3] == "4"


class Tuple(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x), x.mean()


class Unsteady(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) / (x.flatten(1)[:, :1] != 0.25)  # infinite for one of seventeen grey levels


def test_what_cannot_be_used_is_refused_in_one_sentence(model, sets):
    members, others = sets
    x, y = members
    cases = [
        (dict(model=Tuple(model)), "output=0"),
        (dict(model=lambda x: x), "torch.nn.Module"),
        (dict(model=network(shape=(1, 4, 4))), "cannot be run on inputs of shape"),
        (dict(members=(x, y + 8)), "have the label 17"),
        (dict(members=(x, y - 1)), "have the label -1"),
        (dict(members=(x, y[:9])), "give a pair"),
        (dict(members=x), "give a pair"),
        (dict(members=(x * torch.nan, y)), "not finite"),
        (dict(members=(x[:9], y[:9])), "an audit needs 10 of each"),
        (dict(nonmembers=(x[:, :, :4], y)), "must be alike"),
        (dict(references=4), "give --train"),
        (dict(train=trained, references=3), "even number"),
        (dict(train="nets:train"), "give a function"),
        (dict(candidates=3), "candidates=3"),
        (dict(device="abacus"), "abacus"),
    ]
    for change, words in cases:
        arguments = {"model": model, "members": members, "nonmembers": others, **change}
        with pytest.raises(UsageError, match=words):
            ppbench.audit(**arguments)


def test_answers_that_are_not_finite_and_trainings_that_fail_are_refused(model, sets):
    (x, y), others = sets
    spoilt = x.clone()
    spoilt[:20, 0, 0, 0] = 0.25
    with pytest.raises(UsageError, match="by NaN or infinity"):
        ppbench.audit(Unsteady(model), (spoilt, y), others)

    def fails(x, y):
        raise RuntimeError("no such optimizer")

    def another(x, y):
        return network(classes=3)

    for train, words in ((fails, "no such optimizer"), (another, "3 classes"), (lambda x, y: 3, "trained nn.Module")):
        with pytest.raises(UsageError, match=words):
            ppbench.audit(model, (x, y), others, train=train, references=2)


def test_parts_of_answers_wrapped_frozen_and_training_networks_are_taken_as_they_are_in_use(model, sets):
    dropping = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(1), model).train()
    dropping[1].running_var.fill_(1 - 1e-5)
    frozen = nn.DataParallel(Tuple(dropping).requires_grad_(False))
    result = ppbench.audit(frozen, *sets, output=0, candidates=100)
    plainly = ppbench.audit(model, *sets, candidates=100)
    assert [a.metric("asr").value for a in result.attacks] == [a.metric("asr").value for a in plainly.attacks]
    assert dropping.training and not any(p.requires_grad for p in dropping.parameters())


def test_attacks_on_what_a_defense_sends_or_that_need_references_are_left_out():
    names = {attack.name for attack in membership_attacks(False)}
    assert names == {"mia_loss", "mia_mentr", "mia_min_k", "mia_nn", "mia_stack"}
    assert {attack.name for attack in membership_attacks(True)} - names == {
        *("mia_lira", "mia_lira_offline", "mia_rmia", "mia_rmia_offline"),
    }


# -- files: sources, the command, the report ---------------------------------------------------------------------------
def test_folders_number_their_classes_together(tmp_path):
    for kind, classes in (("in", "abc"), ("out", "ac")):
        for name in classes:
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            for k in range(2):
                Image.fromarray(np.full((28, 28), ord(name) + k, np.uint8)).save(folder / f"{k}.png")
    own, others = open_member_sets(str(tmp_path / "in"), f"imagefolder:{tmp_path / 'out'}", 0)
    assert own.x.shape == (6, 1, 28, 28) and own.y.tolist() == [0, 0, 1, 1, 2, 2] and others.y.tolist() == [0, 0, 2, 2]
    assert others.names == ("a/0.png", "a/1.png", "c/0.png", "c/1.png") and others.classes == ("a", "b", "c")
    assert torch.allclose(own.x[0].max() * 255, torch.tensor(float(ord("a"))))


def test_tables_are_encoded_as_one_by_the_members(tmp_path):
    (tmp_path / "in.csv").write_text("age,job,y\n20,nurse,no\n40,cook,yes\n30,nurse,yes\n")
    (tmp_path / "out.csv").write_text("age,job,y\n50,cook,no\n30,pilot,no\n")
    own, others = open_member_sets(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), 0)
    assert own.y.tolist() == [0, 1, 1] and others.y.tolist() == [0, 0] and own.classes == ("no", "yes")
    assert own.x.mean(0)[0].abs() < 1e-6 and others.x[0, 0] == pytest.approx(20 / np.std([20, 40, 30]))
    assert others.x[1, 1:].tolist() == [0, 0]  # a category that no member has
    assert others.words[0] == "age: 50; job: cook; y: no" and others.names == ("row 0", "row 1")
    (tmp_path / "other.csv").write_text("job,age,y\ncook,50,no\n")
    with pytest.raises(UsageError, match="other columns"):
        open_member_sets(str(tmp_path / "in.csv"), str(tmp_path / "other.csv"), 0)


def test_sources_of_two_kinds_and_files_without_tensors_are_refused(tmp_path):
    save_file({"x": torch.rand(3, 4)}, tmp_path / "a.safetensors")
    (tmp_path / "a.csv").write_text("a,y\n1,2\n")
    for words, message in (
        ((str(tmp_path / "a.safetensors"), str(tmp_path / "a.csv")), "give both in one form"),
        ((str(tmp_path / "a.safetensors"),) * 2, "no 'y'"),
        ((str(tmp_path / "b.safetensors"),) * 2, "does not exist"),
        ((str(tmp_path / "b.pt"),) * 2, "cannot be read"),
        (("nothing",) * 2, "no data set named 'nothing'"),
    ):
        with pytest.raises(UsageError, match=message):
            open_member_sets(*words, 0)


CODE = """
import torch
from torch import nn
def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
def broken():
    raise ValueError("no weights today")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory, model, sets):
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_code.py").write_text(CODE)
    for name, (x, y) in zip(("in", "out"), sets, strict=True):
        save_file({"x": x.contiguous(), "y": y.contiguous()}, folder / f"{name}.safetensors")
    save_file(model.state_dict(), folder / "net.safetensors")
    torch.save(model, folder / "pickled.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, folder / "state.pt")
    save_file({k: v for k, v in model.state_dict().items() if k != "3.bias"}, folder / "part.safetensors")
    save_file(network(32).state_dict(), folder / "narrow.safetensors")
    return folder


WORDS = {
    "model": "my_code:network",
    "weights": "net.safetensors",
    "members": "in.safetensors",
    "nonmembers": "out.safetensors",
}


def command(home, **words):
    options = [word for name, value in {**WORDS, **words}.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = subprocess.run(
        [sys.executable, "-m", "ppbench", "audit", *options], cwd=home, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_writes_a_report_and_its_exit_code_is_the_gate(home, plain):
    code, out, err = command(home, max_asr="0.55", max_tpr="0.9", out="report")
    assert code == 1 and out.startswith("OVER THE LIMIT") and "lower bound" in out, err
    figures = json.loads((home / "report" / "audit.json").read_text())
    assert figures["attacks"] == plain.figures()["attacks"] and figures["exit_code"] == 1
    rows = list(csv.DictReader((home / "report" / "scores.csv").open()))
    assert len(rows) == 2 * SIZE and {row["set"] for row in rows} == {"member", "non-member"}
    right = np.mean([row["set"] == row["mia_nn_decision"] for row in rows])
    (asr,) = [m["value"] for m in figures["attacks"]["mia_nn"] if m["name"] == "asr"]
    assert right == pytest.approx(asr)
    page = (home / "report" / "audit.html").read_text()
    assert page.count("data:image/png") == 12 and "<script" not in page and "http" not in page.split("</style>")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"weights": "pickled.pt"}, "holds other things than tensors"),
        ({"weights": "part.safetensors"}, "lacks the tensor '3.bias'"),
        ({"weights": "narrow.safetensors"}, "(32, 64)"),
        ({"weights": "in.safetensors"}, "lacks the tensor"),
        ({"weights": "nothing.safetensors"}, "nothing.safetensors"),
        ({"model": "my_code:broken"}, "no weights today"),
        ({"model": "my_code:missing"}, "missing"),
        ({"model": "my_code:torch"}, "my_code:torch"),
        ({"nonmembers": "in.safetensors"}, "All of the non-members are among the members"),
        ({"train": "train"}, "MODULE:FUNCTION"),
        ({"train": "my_code:nothing"}, "--train"),
        ({"references": "4"}, "give --train"),
        ({"max_asr": "0.4"}, "between guessing"),
    ],
)
def test_the_command_refuses_wrong_input_in_one_sentence(home, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    options = [word for name, value in {**WORDS, **words}.items() for word in (f"--{name.replace('_', '-')}", value)]
    monkeypatch.setattr(sys, "argv", ["ppbench", "audit", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    text = capsys.readouterr().err
    assert stop.value.code == 2 and message in text and "Traceback" not in text
    assert not (home / "ppbench-audit").exists()


def test_state_dicts_of_wrapped_networks_are_read(home):
    from ppbench.nets.model_object import module_with_weights

    made = module_with_weights("n", network, home / "state.pt", (1, 8, 8), 10)
    expected = module_with_weights("n", network, home / "net.safetensors", (1, 8, 8), 10)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in made.state_dict().items())


def test_names_of_files_are_escaped_in_the_report(plain):
    bad = "<img src=x onerror=alert(1)>"
    rows = tuple(replace(one, name=bad, values=bad) for one in plain.exposed)
    page = audit_html(replace(plain, exposed=rows, subject=replace(plain.subject, members=bad, model=bad)))
    assert bad not in page and "&lt;img src=x" in page


def test_the_report_never_says_hidden_and_shows_nobody_where_a_control_failed(plain):
    failed = replace(plain.checks[0], ok=False, sentence="The model knows nothing.")
    page = audit_html(replace(plain, checks=(failed, *plain.checks[1:])))
    assert "data:image" not in page and "Nothing is concluded. The model knows nothing." in page
    assert "is hidden" not in page and "are hidden: only that" in page
    calm = replace(
        plain,
        limits=(),
        attacks=tuple(
            result_of(
                *(
                    m.model_copy(update={"low": 0.4, "high": 0.523} if m.name in ("asr", "auc") else {})
                    for m in a.metrics
                ),
                name=a.name,
            )
            for a in plain.attacks
        ),
    )
    assert "beats guessing beyond 52.3 %" in calm.verdict and calm.exit_code == 0
    assert "<main>" in plain._repr_html_() and "<!doctype" not in plain._repr_html_()


def test_an_audit_of_rows_shows_their_values(model, sets):
    members, others = (
        MemberSet(
            x[:60].flatten(1), y[:60], tuple(f"row {k}" for k in range(60)), tuple(f"age: {k}" for k in range(60))
        )
        for x, y in sets
    )
    result = audited(model, members, others, ("m", "a", "b"), AuditOrder())
    assert all(one.values.startswith("age: ") and one.png is None for one in result.exposed)
