"""Exposure of planted secrets: ranks and ties, planted leak and null, what forms differ in, and bad input."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.victims import SECRET_FORMS, PlantedSecret, planted_secrets, secrets_digest
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.defenses.none import NoDefense
from ppbench.metrics.text import FACT
from ppbench.questions.exposure import Exposure, SecretScore, bits, chance_bits, score_secrets
from ppbench.records.figure import Terms
from ppbench.report.verdict import verdicts
from ppbench.run import evaluation
from ppbench.run.audit.population import populate
from ppbench.run.audit.runs import PointAudit, Refused
from ppbench.run.config import configure
from ppbench.run.experiment import Point, resolve

SMALL = dict(
    dataset="letters", model_options={"width": 32}, train=40, clients=2, rounds=25, batch_size=16, canaries=24,
    candidates=6, decay_at=(), schedule="parallel", stages=("audit",), attacks=("exposure",),
)  # fmt: skip
KINDS = {
    "encoder": {"model": "transformer", "loss": "cross_entropy"},
    "decoder": {"model": "gpt", "loss": "next_token"},
}


def experiment(**options):
    return resolve(configure(**{"defense": "none", **SMALL, **KINDS["encoder"], **options}))


def planted(count=8, member=lambda i: i % 2 == 0, forms=4):
    """Return secrets of two tokens whose own form is the first of four."""
    x = torch.arange(2.0 * forms).reshape(forms, 2)
    return [PlantedSecret(i, x, torch.ones(forms, 1), 0, member(i)) for i in range(count)]


def guesses(rank, count=8, forms=4):
    """Return answers that give the own form this rank, 1 being the first."""
    others = [value for value in range(forms, 0, -1) if value != forms + 1 - rank]
    return [Guess(score=torch.tensor([forms + 1 - rank, *others]).double())] * count


def metrics(scores):
    return {metric.name: metric for metric in Exposure().metrics(scores, Terms(4, 0))}


# -- found ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rank", "exposure", "first"), [(1, 2.0, 1.0), (2, 1.0, 0.0), (4, 0.0, 0.0)])
def test_exposure_is_the_logarithm_of_the_forms_less_that_of_the_rank(rank, exposure, first):
    result = metrics(score_secrets(planted(), guesses(rank)).victims)
    assert result["exposure"].value == result["exposure_absent"].value == exposure
    assert result["secrets_first"].value == first and result["secrets_first"].n == 4


def test_equal_scores_have_the_mean_of_their_ranks():
    scored = score_secrets(planted(1), [Guess(score=torch.tensor([1.0, 1, 1, 2]))]).victims
    assert scored[0].rank == 3.0 and scored[0].bits == 2 - math.log2(3)


def test_members_alone_count_and_absent_canaries_are_the_control():
    inside, absent = guesses(1, 1)[0], guesses(4, 1)[0]
    scores = score_secrets(planted(), [inside if i % 2 == 0 else absent for i in range(8)]).victims
    result = metrics(scores)
    assert (result["exposure"].value, result["exposure_absent"].value) == (2.0, 0.0)
    assert Exposure().blind(scores, None) == (1.0, 4, 0.5) and {s.canary for s in scores if s.member} == {True}


@given(st.integers(2, 2000))
def test_chance_is_the_mean_over_all_ranks_and_tends_to_one_over_the_logarithm_of_two(forms):
    assert 0.5 <= chance_bits(forms) < 1 / math.log(2) and bits(1, forms) == math.log2(forms)
    if forms > 1000:
        assert abs(chance_bits(forms) - 1 / math.log(2)) < 0.01


def test_random_scores_are_at_chance_and_the_blind_share_is_a_fair_coin():
    draws = torch.Generator().manual_seed(0)
    secrets = planted(400, member=lambda i: True, forms=64)
    scores = score_secrets(secrets, [Guess(score=torch.rand(64, generator=draws)) for _ in secrets]).victims
    share, count, chance = Exposure().blind(scores, None)
    result = metrics(scores)["exposure"]
    assert result.low < result.chance < result.high and abs(share - chance) < 3 * 0.5 / count**0.5


def test_forms_differ_in_names_and_numbers_alone_and_their_order_tells_nothing():
    task = experiment().task
    candidates = populate(experiment()).candidates
    secrets = planted_secrets(candidates, task.plan, Seeds(1))
    words = task.plan.vocabulary.words
    assert len(secrets) == candidates.family.count("planted") and len({s.place for s in secrets}) > 10
    for secret in secrets:
        own = secret.forms[secret.place]
        assert torch.equal(own, candidates.x[secret.index]) and len(secret.forms) == SECRET_FORMS
        assert bool(candidates.member[secret.index]) == secret.member
        for form in secret.forms:
            for place in (form != own).nonzero()[:, 0].tolist():
                one, two = words[int(form[place])], words[int(own[place])]
                assert one.isdigit() == two.isdigit() and one[0].isupper() == two[0].isupper()
        assert FACT.search(task.plan.vocabulary.text(own.int().tolist()))
    again = planted_secrets(candidates, task.plan, Seeds(1))
    assert secrets_digest(again) == secrets_digest(secrets) != secrets_digest(secrets[1:])


def test_the_own_form_is_drawn_as_the_others():
    """The digits and names of planted texts have the law of those of their forms, token by token."""
    task = experiment(canaries=60).task
    secrets = planted_secrets(populate(experiment(canaries=60)).candidates, task.plan, Seeds(2))
    shares = []
    for secret in secrets:
        own, others = secret.forms[secret.place], secret.forms
        drawn = (others != own).any(0).nonzero()[:, 0]
        shares += [float((others[:, k] < own[k]).double().mean()) for k in drawn.tolist()]
    assert abs(np.mean(shares) - 0.5) < 4 * (1 / 12) ** 0.5 / len(shares) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_planted_leak_secrets_of_texts_that_were_learned_by_heart_are_exposed_and_no_others(kind, tmp_path):
    options, attack = experiment(**KINDS[kind]), load_plugin("attacks", "exposure")()
    figures = []
    for forgotten in (False, True):
        audit = PointAudit.of(options, Point(NoDefense()), tmp_path / str(forgotten))
        if forgotten:  # the same truth, but nothing of it in the training
            audit.__dict__["population"] = replace(audit.population, keep=torch.zeros_like(audit.population.keep))
        audit.complete()
        inquiry = Exposure().of_audit(audit)
        answers = attack.run(audit.view("client/1"), inquiry.challenges, torch.Generator().manual_seed(0))
        assert not [fault for a, c in zip(answers, inquiry.challenges, strict=True)
                    for fault in Exposure().malformed(a, c, audit.experiment.task.plan)]  # fmt: skip
        figures.append(metrics(inquiry.score(answers).victims))
    learned, null = figures
    assert learned["exposure"].low > 2.5 and learned["secrets_first"].low > 0.05
    assert learned["exposure_absent"].low < learned["exposure_absent"].chance + 0.5
    assert null["exposure"].low < null["exposure"].chance < null["exposure"].high + 0.5


def test_an_evaluation_says_by_how_many_bits_and_noise_exposes_nothing(tmp_path):
    made = evaluation.evaluate(**{**SMALL, **KINDS["decoder"], "defense": "dp", "grid": (1e-3,)}, out=tmp_path / "out",
                               workers=1)  # fmt: skip
    records = {record.config.defense.id: record for record in made.records}
    assert records["dp"].metric("exposure").low > 2 * records["dp"].metric("exposure").chance
    assert records["full_noise"].metric("exposure").low < records["full_noise"].metric("exposure").chance
    (dp,), (none,) = ([v for v in verdicts(name, made.records) if v.question == "secrets"] for name in ("dp", "none"))
    assert dp.fate == none.fate == "falls" and "exposes its names and numbers by" in dp.sentence
    assert "of 8 bits" in dp.sentence and "undefended" in dp.sentence and "undefended" not in none.sentence
    assert [one["gives"] for one in made.answer.as_dict()["settings"]] == [["secrets"]]
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    assert "Training on a text exposes" in page and "<dt>Exposure</dt>" in page


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("score", [None, torch.ones(3), torch.tensor([1.0, torch.nan, 0, 0])])
def test_answers_without_a_finite_score_for_every_form_are_refused(score):
    with pytest.raises(ValueError, match="finite score for every form"):
        score_secrets(planted(1), [Guess(score=score)])
    assert list(Exposure().malformed(Guess(score=score), planted(1)[0].challenge(), None))


def test_an_attacker_without_a_model_ranks_at_random(tmp_path):
    view = SimpleNamespace(plan=experiment().task.plan, mail=(), party=None)
    attack = load_plugin("attacks", "exposure")()
    secrets = planted_secrets(populate(experiment()).candidates, view.plan, Seeds(0))
    answers = attack.run(view, [secret.challenge() for secret in secrets], torch.Generator())
    assert {score.rank for score in score_secrets(secrets, answers).victims} == {(SECRET_FORMS + 1) / 2}
    with pytest.raises(UsageError, match="without forms or targets"):
        attack.run(view, [Challenge((), 1)], torch.Generator())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(canaries=0), "add --canaries 80"),
        (dict(stages=("final",)), "add --stage audit"),
        (dict(dataset="digits", model="mlp", model_options={}, train=200), "'exposure' has no use for"),
    ],
)
def test_an_evaluation_without_planted_secrets_is_refused_in_a_sentence(options, words, tmp_path):
    configuration = {"defense": "none", **SMALL, **KINDS["encoder"], **options}
    with pytest.raises(UsageError, match=words):
        evaluation.evaluate(**configuration, out=tmp_path / "out", workers=1)


def test_an_audit_whose_canaries_hold_no_secret_says_so(tmp_path):
    audit = PointAudit.of(experiment(), Point(NoDefense()), tmp_path)
    blank = replace(audit.population.candidates, x=torch.zeros_like(audit.population.candidates.x))
    audit.__dict__["population"] = replace(audit.population, candidates=blank)
    with pytest.raises(Refused, match="No canary of this audit holds a name or a number"):
        audit.secrets()


def test_absent_canaries_alone_have_no_exposure():
    scores = [SecretScore(index=0, rank=1.0, forms=4, member=False)]
    assert metrics(scores)["exposure"].value is None and Exposure().blind(scores, None) is None
    assert Exposure().judged(scores[0], "exposure") == 2.0
