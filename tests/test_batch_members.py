"""Members of a batch: the default question that an undefended upload loses; the sentences come out either way."""

import numpy as np
import pytest
import torch

from ppbench.adversary.attack import Challenge
from ppbench.adversary.victims import beside, choose_victims
from ppbench.attacks.membership import updates as upload
from ppbench.attacks.membership.updates import RIDGES, UploadMembers
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.questions.base import question_of
from ppbench.questions.membership import BatchMembers, BatchScore
from ppbench.records.figure import Terms
from ppbench.report.controls import Check, check_controls
from ppbench.report.page.headline import answer_of
from ppbench.report.verdict import verdicts
from ppbench.run.cells import cells, groups
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.testing.record_attacks import _batch_scores
from ppbench.testing.small_federation import Duel, all_digits, seeded

QUESTION = BatchMembers()


def decisions(defense, batch=4, count=24):
    duel = Duel(UploadMembers(), defense)
    return {m.name: m for m in QUESTION.metrics(_batch_scores(duel, duel.probe(count, batch)), Terms(10, 0))}


@pytest.mark.parametrize("batch", [1, 8])
def test_an_undefended_upload_loses_by_far(batch):
    right = decisions(NoDefense(), batch)
    assert set(right) == {"batch_asr", "batch_auc"}
    assert right["batch_asr"].low > 0.7 and right["batch_auc"].value > 0.95 and right["batch_asr"].chance == 0.5


def test_noise_hides_them_and_little_noise_does_not():
    assert decisions(DP(sigma=1e-4))["batch_auc"].value > 0.95
    assert decisions(DP(sigma=1.0))["batch_asr"].low < 0.5


def test_the_ridge_is_chosen_by_the_known_half_alone():
    """Columns that tell the asked half alone are as good as any other to who knows the other half."""
    g, member = seeded(0), torch.arange(200) % 2 == 0
    known = torch.where(torch.arange(200) < 100, member.to(torch.int8), torch.tensor(-1, dtype=torch.int8))
    signal = torch.rand(200, len(RIDGES), generator=g, dtype=torch.float64)
    signal[100:, 1] += member[100:]  # of the asked half: must not be chosen for it
    signal[:100, 3] += member[:100]
    question = upload.MembershipQuestion(torch.zeros(200, 10, dtype=torch.float64), known)
    guess = UploadMembers().answer(None, signal, question, seeded(1))
    assert torch.equal(guess.score, signal[:, 3])


def test_candidates_are_victims_and_as_many_others_in_an_order_that_tells_nothing():
    data = all_digits()
    shards = {c: type(data)(data.x[50 * c : 50 * c + 50], data.y[50 * c : 50 * c + 50]) for c in range(3)}
    test = type(data)(data.x[400:], data.y[400:])
    victims = choose_victims(shards, "server/1", 4, 24, Seeds(0))
    made, again = (beside(victims, test, Seeds(0)) for _ in range(2))
    assert int(made.member.sum()) == 24 and len(made.x) == 48 and made.digest() == again.digest()
    truth = {tuple(row) for unit in victims.units for row in victims.truth(unit).x.flatten(1).tolist()}
    assert [tuple(row) in truth for row in made.x.flatten(1).tolist()] == made.member.tolist()
    twice = type(data)(torch.cat([victims.truth(u).x for u in victims.units] + [test.x[:9]]), torch.cat(
        [victims.truth(u).y for u in victims.units] + [test.y[:9]]))  # fmt: skip
    few = beside(victims, twice, Seeds(0))  # a victim's record is one of the batch, whatever part it stands in
    assert [tuple(row) in truth for row in few.x.flatten(1).tolist()] == few.member.tolist() and len(few.x) == 18
    for half in (0, 1):
        assert int(made.member[made.half == half].sum()) == 12
    places = made.member.nonzero().flatten().double()
    assert abs(float(places.mean()) - 23.5) < 6


def test_every_group_of_probes_of_the_default_asks_it():
    experiment = resolve(configure(defense="spn", stages=("init", "final")))
    for group in groups(experiment):
        kinds = {cell.attack.kind for cell in cells(experiment, group)}
        assert ("batch_membership" in kinds) is (not group.records)


def scores(share, n=40):
    """Return scores of which `share` are right."""
    rng = np.random.default_rng(0)
    right = np.arange(n) // 4 < round(share * n / 4)
    for i in range(n):
        member = bool(i % 2)
        score = float(member == right[i]) + 1e-3 * rng.random()
        yield BatchScore(index=i, half=i % 4 // 2, member=member, score=score, decision=member == right[i])


@pytest.mark.parametrize(
    ("mine", "none", "fate", "words"),
    [
        (1.0, 1.0, "falls", "An upload reveals who was in a batch of 1 (mia_upload"),
        (0.5, 1.0, "stands", "does not reveal who was in a batch of 1 to an unaware attack ("),
        (0.5, 0.5, "undecided", "Whether an upload reveals who was in a batch of 1 is undecided ("),
        (0.6, None, "undecided", "is undecided (mia_upload, sigma=0.1: ASR at most 60% [43, 75], chance 50%)."),
    ],
)
def test_sentences_come_out_either_way(fabricate, mine, none, fate, words):
    kind = "batch_membership"
    records = [fabricate("dp", 0.1, "mia_upload", kind, scores=list(scores(mine)), control="sigma", stage="init")]
    if none is not None:
        records.append(fabricate("none", None, "mia_upload", kind, scores=list(scores(none)), stage="init"))
    (verdict,) = [v for v in verdicts("dp", records) if v.question == "members"]
    assert verdict.fate == fate and words in verdict.sentence, verdict.sentence
    (control, _) = check_controls(records)
    assert control.ok is (None if none is None else none == 1.0), "the undefended must be found where only it was asked"


def test_a_view_without_uploads_gives_coins(monkeypatch):
    duel = Duel(UploadMembers(), NoDefense())
    world = duel.probe(24, 4)
    bare = world.seen(type(world.view)(**{**vars(world.view), "mail": ()}))
    first, other = (bare.answers(duel.attack, seed)[0] for seed in (1, 2))
    assert len(first.score.unique()) == 1 and not torch.equal(first.decision, other.decision)
    assert question_of("batch_membership").malformed(first, Challenge((), 1, x=world.challenges[0].x), None)


def test_at_a_glance_stands_who_was_in_a_batch_of_the_same_scene(fabricate):
    images = [
        fabricate("none", None, "dlg", "reconstruction", 35.0),
        fabricate("full_noise", None, "dlg", "reconstruction", 6.0),
        fabricate("dp", 0.1, "dlg", "reconstruction", 8.0, control="sigma"),
    ]
    records = [
        fabricate(name, value, "mia_upload", "batch_membership", scores=scores(share), batch=batch, **about)
        for name, value, share, batch, about in (
            ("none", None, 1.0, 1, {}),
            ("dp", 0.1, 0.7, 1, {"control": "sigma"}),
            ("dp", 0.1, 1.0, 8, {"control": "sigma"}),
        )
    ]  # fmt: skip
    (table,) = answer_of([*images, *records], Check("harness", True, "")).tables
    shares = {row.value.entry.defense.id: row.value.batch.metric("batch_asr").value for row in table.rows}
    assert table.has_column("batch") and shares == {"none": 1.0, "dp": 0.7}, "of batches of one, not of eight"
