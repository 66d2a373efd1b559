"""Audits: who is in which run, what canaries are, what attacks see and are asked, and one audit from end to end."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from honest import HONEST, Blankness
from thief import answered_by

from ppbench.adversary import isolated_worker as inside
from ppbench.adversary.isolation import isolated_guesses
from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_candidates
from ppbench.attacks.membership.references import LiRA
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Data
from ppbench.questions.membership import MemberScore, auc_deviation, families_differ, score_members
from ppbench.records.figure import aggregate
from ppbench.report.controls import BELIED
from ppbench.run.audit.population import AVERAGE, canaries, level_sizes, needs_level, populate
from ppbench.run.audit.runs import PointAudit, Refused
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import Point, resolve
from ppbench.run.task import make_task
from ppbench.verification import verify

SMALL = dict(
    defense="none", model="mlp", model_options={"hidden": 8}, train=200, public=0.5, clients=4, rounds=2, canaries=10,
    candidates=40, references=4, stages=("audit",), attacks=("mia_loss",), schedule="parallel",
)  # fmt: skip


def config(**options):
    return configure(**{**SMALL, **options})


CANARY_FAMILIES = ("mislabelled", "blank", "out_of_distribution")


def population(**options):
    return populate(resolve(config(**options)))


def rows(*parts: torch.Tensor) -> list[bytes]:
    return [bytes(row.contiguous().numpy().tobytes()) for part in parts for row in part.flatten(1)]


@pytest.fixture
def repeated(tmp_path):
    """Return the options of texts of which each stands five times in the file, in both parts, and 40 others once."""
    mails = [(f"meet me at {i} in room {i % 7}", "work") for i in range(30)] * 5
    mails += [(f"you won {i} euros", "spam") for i in range(30)] * 5
    mails += [(f"number {i} of one", "work" if i % 2 else "spam") for i in range(40)]
    (tmp_path / "mail.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in mails))
    return dict(
        dataset=f"text:{tmp_path / 'mail.csv'}?length=8", model="transformer", model_options={}, train=None, public=0.0
    )


def test_a_duplicate_of_what_is_trained_on_is_no_candidate_that_is_left_out(repeated):
    """Such records counted as non-members, and members seemed to be hidden."""
    experiment = resolve(config(**repeated))
    totals, task = populate(experiment), experiment.task
    average = torch.tensor([family == AVERAGE for family in totals.candidates.family])
    trained = {*rows(*(data.x for data in totals.shards(0).values()))}
    out = rows(totals.candidates.x[average & ~totals.keep[0]])
    assert len(out) > 5 and not trained & {*out}
    candidates = choose_candidates(task.shards, task.test, 40, Seeds(0))
    trained = {*rows(*(shard.x for shard in task.shards.values()))}
    assert len(candidates.x) > 3 and not trained & {*rows(candidates.x[~candidates.member])}
    assert (
        "test examples are training examples too: accuracy counts them, questions about members pass"
        in experiment.notes[-1]
    )
    assert resolve(config()).notes == ()
    with pytest.raises(UsageError, match="two test examples that no client trains on"):
        choose_candidates(task.shards, task.shards[1], 4, Seeds(0))


# -- who is in which run ---------------------------------------------------------------------------------------------
def test_coins_are_balanced_but_those_of_the_targets_canaries_which_are_independent():
    totals = population(references=8)
    kinds, keep = totals.candidates.family, totals.keep
    assert keep.shape == (9, 80 + 30) and torch.equal(keep[0], totals.candidates.member)
    assert (keep[1:].sum(0) == 4).all(), "each candidate is in exactly half of the references"
    for family in (AVERAGE, *CANARY_FAMILIES):
        mine = torch.tensor([kind == family for kind in kinds])
        assert mine.sum() == (80 if family == AVERAGE else 10)
        assert (keep[1:, mine].sum(1) * 2 == mine.sum()).all()
        assert family != AVERAGE or int(keep[0, mine].sum()) * 2 == int(mine.sum())
        for member in (False, True):
            halves = totals.candidates.half[mine & (keep[0] == member)]
            assert abs(int(halves.sum()) * 2 - len(halves)) <= 1


def test_how_many_canaries_are_members_differs_from_seed_to_seed():
    counts = [int(population(seed=seed, canaries=20).keep[0].sum()) - 40 for seed in range(12)]
    assert len(set(counts)) > 3 and 20 < sum(counts) / 12 < 40  # binomial of 60 coins


def test_places_and_references_tell_nothing_of_the_target():
    totals = population(references=16, candidates=48)
    member = totals.keep[0]
    first = torch.arange(len(member)) < len(member) / 2
    assert 0.3 < float((first == member).float().mean()) < 0.7
    assert 0.3 < float((totals.candidates.half.bool() == member).float().mean()) < 0.7
    agreement = (totals.keep[1:] == member).float().mean(1)
    assert ((agreement > 0.3) & (agreement < 0.7)).all()
    assert len(set(totals.candidates.family[:20])) > 1


def test_kept_candidates_are_trained_on_by_clients_other_than_the_first_and_no_others_are():
    for public in (0.0, 0.5):
        totals = population(public=public, candidates=20)
        task = make_task(config(public=public, candidates=20))
        for run in range(5):
            shards = totals.shards(run)
            kept = rows(*(shards[c].x for c in range(1, 4)))
            inside, outside = rows(totals.candidates.x[totals.keep[run]]), rows(totals.candidates.x[~totals.keep[run]])
            assert set(inside) <= set(kept) and not set(outside) & set(kept) | set(inside) & set(rows(shards[0].x))
            assert set(rows(totals.others.x)) & set(kept + rows(shards[0].x)) == set()
            assert len(kept) == len(set(kept)), "nobody holds a record twice"
        for client, shard in totals.shards(0).items():
            average = torch.tensor([kind == AVERAGE for kind in totals.candidates.family])
            mine = rows(totals.candidates.x[average & (totals.owner == client)])
            assert set(mine) <= set(rows(task.shards[client].x)), "average candidates stay with their owner"
            own = set(rows(task.shards[client].x)) & set(rows(shard.x))
            assert len(own | set(mine)) >= len(task.shards[client].x) - 8 and not own & set(rows(totals.others.x))


def test_references_use_public_records_alone_or_the_same_base():
    task = make_task(config())
    shared = population()
    public = set(rows(task.public.x))
    assert shared.public and [len(d.x) for d in shared.auxiliary.values()] == [len(d.x) for d in shared.base.values()]
    assert all(set(rows(data.x)) <= public for data in shared.auxiliary.values())
    question = shared.candidates.x
    holders = [[set(rows(question)) & set(rows(shared.shards(run)[c].x)) for c in range(4)] for run in (1, 3)]
    assert not holders[0][0] | holders[1][0], "the adversary holds no candidate"
    moved = sum(len(holders[0][a] & holders[1][b]) for a in range(4) for b in range(4) if a != b)
    assert moved > 5, "candidates are dealt out anew: who owns them is unknown"
    alone = population(public=0.0)
    assert not alone.public and alone.auxiliary is alone.base
    scarce = [len(d.x) for d in population(public=0.06, train=1000).auxiliary.values()]
    assert sum(scarce) <= int(0.06 * 1437) and min(scarce)


@pytest.mark.parametrize("public", [0.0, 0.5])
def test_shards_stay_as_level_as_they_were_in_every_run(public):
    result = replace(population(public=public, train=400, candidates=60), level=True)
    for run in range(5):
        sizes = [len(shard.x) for shard in result.shards(run).values()]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 70
    uneven = replace(population(partition="imbalanced", train=600, candidates=40, public=0.0, canaries=4), level=True)
    shares = [len(shard.x) / uneven.sizes[client] for client, shard in uneven.shards(0).items()]
    assert max(shares) - min(shares) < 0.02


def test_one_coin_adds_one_record_and_changes_nothing_else():
    totals = population(train=400, candidates=60, canaries=20)
    before = {client: rows(shard.x) for client, shard in totals.shards(0).items()}
    for place in (0, 7, 50):
        keep = totals.keep.clone()
        keep[0, place] = ~keep[0, place]
        after = {client: rows(shard.x) for client, shard in replace(totals, keep=keep).shards(0).items()}
        changed = [sorted(set(before[c]) ^ set(after[c])) for c in before]
        assert [len(rows) for rows in changed].count(1) == 1 and sum(map(len, changed)) == 1


def test_shards_are_levelled_for_defenses_that_need_it_by_one_share_or_all_there_is():
    plan, sizes = make_task(config()).plan, [40, 40, 40, 40]
    level = {
        name: needs_level(load_plugin("defenses", name)(), plan, sizes) for name in ("none", "dp_sgd", "fedpc", "mpdp")
    }
    assert level == {"none": False, "dp_sgd": False, "fedpc": False, "mpdp": True}
    assert level_sizes({0: 10, 1: 10}, {0: 10, 1: 6}, {0: 0, 1: 3}) == {0: 9, 1: 9}
    assert level_sizes({0: 10, 1: 11}, {0: 10, 1: 7}, {0: 0, 1: 9}) == {0: 10, 1: 11}
    assert level_sizes({0: 10, 1: 10}, {0: 10, 1: 1}, {0: 0, 1: 30}) == {0: 10, 1: 31}, "too many canaries to be level"


# -- canaries --------------------------------------------------------------------------------------------------------
def test_canaries_of_images_are_wrong_blank_or_noise():
    task = make_task(config())
    made, kinds, used = canaries(task, 60, Seeds(3))
    assert kinds == tuple(name for name in CANARY_FAMILIES for _ in range(60)) and len(used.unique()) == 60
    wrong, blank, noise = (Data(made.x[i : i + 60], made.y[i : i + 60]) for i in (0, 60, 120))
    assert torch.equal(wrong.x, task.test.x[used]) and (wrong.y.argmax(1) != task.test.y[used].argmax(1)).all()
    quarters = blank.x.unflatten(2, (2, 4)).unflatten(4, (2, 4))
    assert (quarters == quarters[:, :, :, :1, :, :1]).all() and len(quarters[:, 0, :, 0, :, 0].unique()) == 240
    assert noise.x.min() >= 0 and noise.x.max() <= 1 and abs(float(noise.x.var()) - 1 / 12) < 0.01
    assert (made.y.sum(1) == 1).all() and len(blank.y.argmax(1).unique()) > 5
    clients = rows(*(shard.x for shard in task.shards.values()))
    assert not set(rows(made.x)) & set(clients)


def test_canaries_of_tables_lie_within_the_range_of_each_column(tmp_path):
    generator = torch.Generator().manual_seed(0)
    columns = torch.rand(120, 5, generator=generator) * torch.tensor([1.0, 10, 100, 1, 1]) + torch.arange(5)
    text = "\n".join([",".join([*(f"{v:.4f}" for v in row), str(i % 3)]) for i, row in enumerate(columns.tolist())])
    (tmp_path / "t.csv").write_text("a,b,c,d,e,y\n" + text + "\n")
    few = dict(train=None, public=0.0, clients=2, candidates=8, canaries=8)
    task = make_task(config(dataset=f"csv:{tmp_path / 't.csv'}?target=y", **few))
    made, _, _ = canaries(task, 8, Seeds(0))
    low, high = task.test.x.amin(0), task.test.x.amax(0)
    assert (made.x >= low - 1e-4).all() and (made.x <= high + 1e-4).all()
    shares, noise = ((x - low) / (high - low) for x in (made.x[8:16], made.x[16:]))
    assert (shares[:, 0] - shares[:, 1]).abs().max() < 1e-3, "five columns in four blocks: the first two go together"
    assert len((shares[:, 1:] * 1e4).round().unique()) > 24 and (noise.std(1) > 0.05).all()
    assert (noise[:, 0] - noise[:, 1]).abs().max() > 0.1


def test_canaries_of_texts_are_wrong_planted_or_of_random_tokens():
    task = make_task(configure(defense="none", dataset="letters", canaries=40, train=200, clients=2))
    made, kinds, used = canaries(task, 40, Seeds(3))
    again, _, _ = canaries(task, 40, Seeds(3))
    assert list(dict.fromkeys(kinds)) == ["mislabelled", "planted", "out_of_distribution"] and len(kinds) == 120
    assert torch.equal(made.x, again.x) and torch.equal(made.x, made.x.round()) and made.x.max() < 200
    wrong, planted, noise = (Data(made.x[i : i + 40], made.y[i : i + 40]) for i in (0, 40, 80))
    assert torch.equal(wrong.x, task.test.x[used]) and (wrong.y.argmax(1) != task.test.y[used].argmax(1)).all()
    words = task.plan.vocabulary.words
    for before, after in zip(wrong.x.int().tolist(), planted.x.int().tolist(), strict=True):
        changed = [(words[a], words[b]) for a, b in zip(before, after, strict=True) if a != b]
        assert len(changed) > 1 and all(
            a.isdigit() == b.isdigit() and a[0].isupper() == b[0].isupper() for a, b in changed
        )
    assert (noise.x > 0).all() and len(noise.x.unique()) > 100 and len(planted.y.argmax(1).unique()) == 4
    clients = rows(*(shard.x for shard in task.shards.values()))
    assert not set(rows(planted.x, noise.x)) & set(clients)


@pytest.mark.parametrize("model", ["transformer", "gpt"])
def test_planted_texts_are_found_in_a_model_that_learned_them_by_heart_alone(model, tmp_path):
    few = dict(train=40, clients=2, rounds=25, batch_size=16, canaries=20, candidates=6, references=0, decay_at=())
    options = dict(dataset="letters", model=model, stages=("audit",), schedule="parallel", model_options={"width": 32})
    experiment = resolve(configure(defense="none", attacks=("mia_loss",), **options, **few))
    attack, areas = load_plugin("attacks", "mia_loss")(), []
    for forgotten in (False, True):
        audit = PointAudit.of(experiment, Point(NoDefense()), tmp_path / str(forgotten))
        if forgotten:  # the same truth, but nothing of it in the training
            audit.__dict__["population"] = replace(audit.population, keep=torch.zeros_like(audit.population.keep))
        audit.complete()
        guesses = attack.run(audit.view("client/1"), audit.challenges(), torch.Generator().manual_seed(0))
        scored = score_members(audit.candidates, guesses).victims
        areas.append({m.name: m.value for m in aggregate(scored, classes=4, seed=0)})
    known, unknown = areas
    assert {"auc_planted", "auc_mislabelled", "auc_out_of_distribution"} < set(known)
    assert known["canary_auc"] > 0.8 and known["auc_planted"] > 0.75 and abs(unknown["canary_auc"] - 0.5) < 0.15


# -- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options,sentence",
    [
        ({"references": 5}, "even number up to 1024"),
        ({"references": 1026}, "even number up to 1024"),
        ({"canaries": 360}, "has 360"),
        ({"clients": 1}, "at least 2 clients"),
        ({"train": 4}, "4 or more records"),
        ({"public": 0.002, "train": 1400}, "larger --public"),
        ({"public": 0.99}, "that are not public"),
        ({"public": 0.999, "train": None}, "partitioned over 4 clients"),
        ({"attacks": ("ig",), "tuning": 500, "stages": ("init",)}, r"tuning=500.*360 test examples"),
    ],
)
def test_bad_numbers_are_one_sentence_before_anything_is_written(options, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        evaluate(config(**options), out=tmp_path / "o", workers=1)
    assert not (tmp_path / "o").exists()


# -- what attacks see ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    audit = PointAudit.of(resolve(config(rounds=3)), Point(NoDefense()), tmp_path_factory.mktemp("cache"))
    audit.complete()
    return audit


def test_views_and_challenges_reach_neither_membership_nor_others_data(audited):
    result = audited.population
    others = [result.base[c].x for c in range(1, 4)]
    secrets = [*others, result.keep[:1].float(), result.owner[None].float(), result.candidates.half[None].float()]
    for threat in ("server/1", "client/1", "eavesdropper/1"):
        view = audited.view(threat)
        assert leaks(view, [*secrets, result.candidates.x]) == []
        assert bool(leaks(view, [result.base[0].x])) == (threat == "client/1"), "its own data is its own"
    tracing, owners = audited.tracing()
    assert torch.equal(owners, result.owner[result.keep[0]])
    for challenge in (*audited.challenges(), tracing):
        assert leaks(challenge, [*secrets, owners[None].float()]) == []


def test_challenges_tell_the_known_half_and_the_references(audited):
    result, truth = audited.population, audited.candidates
    for half, challenge in enumerate(audited.challenges()):
        unknown = truth.half == half
        assert (challenge.known[unknown] == -1).all()
        assert torch.equal(challenge.known[~unknown].bool(), truth.member[~unknown])
        references = challenge.references
        assert torch.equal(references.keep, result.keep[1:])
        count = len(truth.x)
        assert references.outputs.shape == (4, 2, count, 10) and references.outputs.dtype == torch.float64
        assert references.population.shape == (4, len(result.others.x), 10)
        assert references.x.shape[0] == references.labels.shape[0] == len(result.others.x)


def test_the_server_sees_all_rounds_and_a_client_the_delivered_model(audited):
    server, client = audited.view("server/1"), audited.view("client/1")
    assert {(e.slot.probe, e.round) for e in server.exchanges()} == {(-1, t) for t in (1, 2, 3)}
    assert all(server.state_at(e) is not None for e in server.exchanges())
    assert len(client.mail) == 1 and client.party == 0
    (_, own), target = client.data[0], audited.restore()
    assert torch.equal(own.x, audited.population.shards(0)[0].x)
    assert all(torch.equal(client.mail[0].message.params[n], v) for n, v in target.parties.server.params.items())
    last = server.mail[-1].message.params
    assert all(torch.equal(last[n], v) for n, v in client.mail[0].message.params.items())
    with pytest.raises(Refused, match="collusion/1"):
        audited.view("collusion/1")


def test_the_references_answer_what_their_models_say(audited):
    alone = audited.start(2)
    assert alone.run(3)
    references, dropped = audited.references
    assert dropped == 0
    own = alone.outputs(audited.population.candidates.x)
    assert torch.allclose(references.outputs[1, 0], own, atol=2e-3)
    assert not torch.allclose(references.outputs[0, 0], own, atol=2e-3)
    mirrored = alone.outputs(audited.population.candidates.x.flip(-1))
    assert torch.allclose(references.outputs[1, 1], mirrored, atol=2e-3)


def test_a_reference_that_diverges_is_left_out_with_its_complement(audited, monkeypatch):
    answers = audited.answers()
    answers["finished"][2] = False
    monkeypatch.setattr(PointAudit, "answers", lambda self: answers)
    again = replace(audited)
    references, dropped = again.references
    assert dropped == 2 and torch.equal(references.keep, audited.population.keep[1:3])
    assert {flag.code for flag in again.flags()} == {"references_public", "references_diverged"}
    answers["finished"][0] = False
    assert replace(audited).references == (None, 4)
    assert replace(audited).challenges()[0].references is None


def test_an_audit_attack_that_knows_files_alone_guesses_the_same(audited, monkeypatch):
    """Read here by what a process of its own runs: such processes are the contracts'."""

    def ask(target, words, read, work, seconds, device):
        inside.main(*words)
        return 0

    monkeypatch.setattr(inside, "_settle", lambda: None)
    attack, view, challenges = LiRA(), audited.view("client/1"), audited.challenges()
    here = attack.run(view, challenges, torch.Generator().manual_seed(5))
    with answered_by(ask):
        there = isolated_guesses(attack, view, challenges, 5)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.score, other.score) and torch.equal(one.decision, other.decision)


# -- from end to end -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def overfit(tmp_path_factory):
    options = dict(
        defense="none", model="mlp", stages=("audit",), attacks=("mia_loss",), clients=3, rounds=30, train=150,
        candidates=30, canaries=70, references=2, schedule="parallel", lr=0.02, decay_at=(),
    )  # fmt: skip
    out = tmp_path_factory.mktemp("audit") / "out"
    return options, evaluate(**options, out=out, workers=1)


def test_an_audit_finds_canaries_of_an_overfit_model_and_none_in_noise(overfit):
    _, result = overfit
    records = {r.config.defense.id: r for r in result.records}
    assert sorted(records) == ["full_noise", "none"] and all(r.status == "complete" for r in result.records)
    none, noise = records["none"], records["full_noise"]
    assert none.metric("canary_auc").value > 0.7 and none.metric("canary_auc").low > 0.6
    area = noise.metric("canary_auc")
    assert abs(area.value - 0.5) < area.high - area.low, "left once in ten thousand seeds"
    assert none.metric("canary_tpr_at_1pct_fpr").value is not None, "the portfolio's 70 canaries support 1 %"
    assert sum(v.family == "blank" for v in none.victims) == 70 and none.config.audit.canaries == 70
    assert {flag.code for flag in none.flags} == {"references_same_base"}
    assert none.utility.accuracy > 0.6 > 0.3 > noise.utility.accuracy


def test_an_audit_is_the_same_again_and_on_two_workers(overfit, forked, tmp_path):
    options, first = overfit
    options = {**options, "rounds": 2, "canaries": 10}
    one = evaluate(**options, out=tmp_path / "a", workers=1)
    two = evaluate(**options, out=tmp_path / "b", workers=2)
    assert [r.model_dump() for r in one.records] == [r.model_dump() for r in two.records]
    again = evaluate(**options, out=tmp_path / "a", workers=1)
    assert again.computed == 0 and first.computed == 2
    assert verify(first.out) == []


def test_a_refused_or_diverged_audit_leaves_cells_that_say_so(tmp_path, monkeypatch):
    true = PointAudit.start

    def refusing(self, run):
        if self.point.defense.name == "none":
            raise Refused("The audit cannot train none: so it is.")
        return true(self, run)

    monkeypatch.setattr(PointAudit, "start", refusing)
    options = dict(
        defense="dp", grid=(1.0,), clients=3, train=100, model="mlp", candidates=20, canaries=4, stages=("audit",),
        attacks=("mia_loss",), rounds=3, optimizer="sgd", lr=1e30,
    )  # fmt: skip
    result = evaluate(**options, out=tmp_path / "o", workers=1)
    records = {r.config.defense.id: r.status for r in result.records}
    assert records == {"none": "failed", "full_noise": "complete", "dp": "diverged"} and not result.reliable


# -- canaries that are noticed ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seeds", "honest"), [([0], HONEST[::3]), pytest.param(range(10), HONEST, marks=pytest.mark.nightly)]
)
def test_a_defense_that_protects_who_holds_a_canary_is_found_out_and_no_honest_one_is(tmp_path, seeds, honest):
    for number in seeds:
        for defense in (NoDefense, *honest, Blankness):
            options = config(canaries=12, clients=6, references=0, public=0.0, seed=number)
            one = PointAudit.of(resolve(options), Point(defense()), tmp_path / f"{defense.name}-{number}")
            one.complete()
            expected = ["audit_noticed"] if defense is Blankness else []
            assert [flag.code for flag in one.noticed] == expected, (defense.name, number)


class Refuses(Blankness):
    """As its parent, and no update can be prescribed to it: it insists on logits of all classes."""

    name: ClassVar[str] = "refuses"

    def local_gradient(self, plan, params, batch, own, noise):
        if plan.net(params, batch.x).shape[-1] != plan.spec.classes:
            raise ValueError("this is not the network of the federation")
        return super().local_gradient(plan, params, batch, own, noise)


def test_a_defense_that_refuses_the_comparison_with_canaries_does_not_escape_it(tmp_path):
    one = PointAudit.of(resolve(config(canaries=12, clients=6, references=0, public=0.0)), Point(Refuses()), tmp_path)
    one.complete()
    (flag,) = one.noticed
    assert flag.code == "not_replayable" and flag.code in BELIED
    assert flag.detail.startswith("cannot be replayed: its clients fail with and without canaries")


def test_families_of_canaries_that_differ_are_told():
    def scores(**shifts):
        draws = torch.Generator().manual_seed(0)
        return [
            MemberScore(
                index=i, half=i % 2, member=i % 4 < 2, decision=True, family=family,
                score=float(torch.randn((), generator=draws)) + shift * (i % 4 < 2),
            )
            for family, shift in shifts.items()
            for i in range(80)
        ]  # fmt: skip

    (flag,) = families_differ(scores(blank=0.0, mislabelled=2.0, average=9.0))
    assert flag.code == "families_differ" and flag.severity == "info" and "AUC of mislabelled canaries" in flag.detail
    assert families_differ(scores(blank=1.0, mislabelled=1.0, average=9.0)) == ()
    assert families_differ(scores(average=9.0)) == () == families_differ(scores(blank=3.0))
    assert auc_deviation(0.5, 40, 40) == pytest.approx((81 / (12 * 40 * 40)) ** 0.5, rel=0.02), "Mann and Whitney's"
