"""What is computed, beside the same by other means: torch's optimizers, loops over examples or thresholds, counting."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from protocols import rand
from torch.nn.functional import linear

import ppbench
from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Candidates
from ppbench.attacks.labels import LabelRecovery
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves
from ppbench.defenses.dp import DP
from ppbench.defenses.dp_sgd import DPSGD
from ppbench.defenses.mpdp.accounting import calibrate
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.perturbation import multiply
from ppbench.defenses.pbpfl.protocol import PBPFLExt
from ppbench.defenses.spn import SPN
from ppbench.federation.contract import Context
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Batch, Data, Layout, Local, Opt, Plan, shuffled
from ppbench.federation.view import Exchange, StateRecord, View
from ppbench.federation.wire import SERVER, Slot
from ppbench.metrics.membership import Half, operating_point
from ppbench.nets.channels import channels_of
from ppbench.nets.net import initial, net_spec
from ppbench.questions.membership import score_members
from ppbench.run.cells import cells, groups
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.group import run_group
from ppbench.run.task import make_task
from ppbench.run.train import figures_of, home_of

OPTIMIZERS = {
    "plain": (Opt(lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (Opt(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adam": (Opt("adam", 0.01, betas=(0.8, 0.95)), lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_servers_steps_are_those_of_torch(plan, shards, name):
    """Over several rounds: what an optimizer remembers is kept between them."""
    opt, make = OPTIMIZERS[name]
    plan = replace(plan, local=Local("gradient", batch=48), server_opt=opt)
    run = Federation(NoDefense(), plan, shards, Seeds(0))
    run.start(initial(plan.spec, 1))
    assert run.run(5)
    params = {n: value.clone().requires_grad_() for n, value in initial(plan.spec, 1).items()}
    torchs, total = make(params.values()), sum(len(shard.x) for shard in shards.values())
    for _ in range(5):
        torchs.zero_grad()
        for shard in shards.values():
            loss = plan.objective(params, shard.x, shard.y, torch.ones(len(shard.x)))
            (loss * len(shard.x) / total).backward()
        torchs.step()
    for n, value in params.items():
        torch.testing.assert_close(run.parties.server.params[n], value.detach(), rtol=1e-3, atol=2e-5)


def test_each_example_is_clipped_by_itself_and_noise_is_added_to_their_sum(plan, digits):
    defense, params = DPSGD(noise_multiplier=1.5, clip=0.2), initial(plan.spec, 0)
    layout = Layout.of(params)
    batch = Batch(digits.x[:6], digits.y[:6], torch.tensor([1.0, 1, 0, 1, 1, 1]))
    noise = {n: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for n, p in params.items()}
    total = 1.5 * 0.2 * layout.pack(noise)
    for x, y, weight in zip(batch.x, batch.y, batch.w, strict=True):
        unknown = {n: p.clone().requires_grad_() for n, p in params.items()}
        loss = plan.example_loss(plan.net(unknown, x[None]), y[None])[0]
        one = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(unknown.values()))])
        assert float(one.norm()) > 0.2  # or clipping would be no matter
        total = total + weight * one * 0.2 / one.norm()
    result = layout.pack(defense.local_gradient(plan, params, batch, (), noise))
    torch.testing.assert_close(result, total / plan.local.batch, rtol=1e-4, atol=1e-6)


def test_every_epoch_takes_each_example_once():
    data = Data(torch.arange(40.0)[:, None], torch.ones(40, 1))
    batches = shuffled(data, Local(epochs=3, batch=16), torch.Generator().manual_seed(0))
    assert batches.x.shape == (9, 16, 1) and float(batches.w.sum()) == 3 * 40
    for x, w in zip(batches.x.view(3, -1), batches.w.view(3, -1), strict=True):
        assert sorted(x[w > 0].tolist()) == data.x[:, 0].tolist()


@pytest.mark.parametrize("defense", [DP(0.1), DP(0.1, "laplace"), DPSGD()])
def test_every_local_step_has_noise_of_its_own(plan, defense):
    ctx = Context(plan, 1, "real", 0, torch.Generator(), Seeds(0).secret("party"))
    for leaf in leaves(defense.draw(ctx, initial(plan.spec, 0), 3)):
        assert len({tuple(step.flatten().tolist()) for step in leaf}) == 3


@pytest.mark.parametrize("defense", [DP(0.1), DP(0.1, "laplace"), DPSGD(2.0, clip=0.3)])
def test_attackers_are_told_noise_of_the_size_that_is_added(plan, digits, defense):
    plan, params = replace(plan, local=Local("gradient", batch=16)), initial(plan.spec, 0)
    layout = Layout.of(params)
    batch = Batch(digits.x[:16], digits.y[:16], torch.ones(16))
    drawn = defense.draw(Context(plan, 1, "real", 0, torch.Generator(), Seeds(0).secret("party")), params, 4)
    none = {n: torch.zeros_like(p) for n, p in params.items()}
    clean = layout.pack(defense.local_gradient(plan, params, batch, (), none))
    steps = [{n: v[t] for n, v in drawn.items()} for t in range(4)]
    noise = [layout.pack(defense.local_gradient(plan, params, batch, (), step)) - clean for step in steps]
    assert float(torch.stack(noise).detach().std()) == pytest.approx(defense.noise(plan).std, rel=0.02)


def test_a_secret_head_is_trained_and_its_code_stays(federate):
    run = federate(SPN(alpha2=0.1))
    before = run.parties.clients[1]
    assert run.run(2)
    after = run.parties.clients[1]
    assert torch.equal(before.code, after.code)
    assert all(not torch.equal(before.head[n], after.head[n]) for n in before.head)


def test_the_accountant_counts_every_local_step(plan):
    """Nine steps in a round of training cost what nine rounds of one step do, at the same rate and noise."""
    defense, local = DPSGD(noise_multiplier=1.0), Local("delta", epochs=1, batch=16)
    steps, single = replace(plan, local=local), replace(plan, local=replace(local, upload="gradient"))
    assert defense.guarantee(steps, 140, 2) == defense.guarantee(single, 140, 18)
    assert defense.guarantee(steps, 140, 2)[0] > defense.guarantee(single, 140, 2)[0]


def test_the_epsilon_on_record_is_of_the_weakest_client(federate, shards):
    run = federate(DPSGD(noise_multiplier=1.0))
    assert run.run(1)
    each = [run.defense.guarantee(run.plan, len(shard.x), 1)[0] for shard in shards.values()]
    task = make_task(configure(defense="dp_sgd", clients=4, train=80))
    assert len(set(each)) > 1
    assert figures_of(run, task, [(1, 0.5)], True, None).privacy.epsilon == max(each)


def test_a_probe_moves_no_party_and_derives_from_a_session_of_its_own(federate, digits, monkeypatch):
    result, whole = [], NoDefense.upload

    def upload(self, ctx, *values):  # notes what masks would derive from
        result.append((ctx.session, ctx.round))
        return whole(self, ctx, *values)

    monkeypatch.setattr(NoDefense, "upload", upload)
    run = federate(NoDefense())
    first, real = (run.seeds.token("session", "real", number) for number in (1, 2))
    others = [run.seeds.token("session", name, 2) for name in ("probe-0", "probe-1", "observed")]
    assert run.run(1) and set(result) == {(first, 1)}
    result.clear()
    before = [leaf.clone() for leaf in leaves((run.parties.server, run.parties.clients))]
    run.probe({Slot(probe, client): Data(digits.x[:2], digits.y[:2]) for probe in (0, 1) for client in range(4)})
    run.observe()
    assert set(result) == {(session, 2) for session in others}
    assert all(re.fullmatch("[0-9a-f]{16}", session) for session in (first, real, *others)), "no name tells a probe"
    assert len({first, real, *others}) == 5, "nor does remembering one"
    after = leaves((run.parties.server, run.parties.clients))
    assert len(before) > 4 and all(map(torch.equal, before, after))
    assert run.run(2) and result[-1] == (real, 2)


@pytest.mark.parametrize("seed", range(5))
def test_an_operating_point_is_the_best_of_all_thresholds_that_keep_the_rate(seed):
    rng = np.random.default_rng(seed)
    member, score = np.arange(120) % 2 == 0, rng.integers(0, 30, 120).astype(float)
    for rate in (0.02, 0.1, 0.25):
        cuts = [(score >= cut) for cut in (*np.unique(score), np.inf)]
        points = [(float(cut[member].mean()), float(cut[~member].mean())) for cut in cuts]
        true, false = operating_point(Half(member, score, member), rate)
        assert (true, false) in points and false <= rate
        assert true == max(one for one, other in points if other <= rate)


def test_candidates_are_scored_by_the_answer_to_the_question_that_hid_them():
    member, half = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 1, 1])
    candidates = Candidates(torch.zeros(4, 2), torch.zeros(4, 2), member, half)
    answers = [Guess(score=torch.full((4,), float(h)), decision=torch.full((4,), h == 1)) for h in (0, 1)]
    results = {score.index: score for score in score_members(candidates, answers).victims}
    assert [(results[i].half, results[i].score, results[i].decision) for i in range(4)] == [
        (0, 0.0, False), (0, 0.0, False), (1, 1.0, True), (1, 1.0, True)
    ]  # fmt: skip


def test_secrets_are_those_of_the_step_that_is_looked_at(plan):
    marks = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]  # probe, round, step
    states = tuple(StateRecord(*mark, SERVER, str(mark)) for mark in marks)
    view = View("server/1", SERVER, plan, NoDefense(), (), states)
    for mark in marks:
        assert view.state_at(Exchange(Slot(mark[0], 2), (), (), *mark[1:])) == str(mark)


def test_trainings_of_two_seeds_never_share_a_place(tmp_path):
    configs = [resolve(configure(defense="dp", grid=(0.1, 0.2), clients=2, train=40, seed=seed)) for seed in (0, 1)]
    homes = {home_of(one, point, tmp_path) for one in configs for point in one.points}
    assert len(homes) == sum(len(one.points) for one in configs)


def test_an_attack_that_learned_from_clients_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    def taught(self, data):
        raise UsageError(f"taught by {len(data)} clients")

    monkeypatch.setattr(LabelRecovery, "check_held", taught)
    small = dict(clients=2, train=40, rounds=1)
    with pytest.raises(UsageError, match="taught by 2 clients"):
        ppbench.evaluate(defense="none", attacks=("label_recovery",), **small, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_theorem_begins_at_81_clients():
    """With 70 picks all its bounds on n hold on both sides."""
    assert not calibrate(3.0, 1e-5, 81, "n_out", 70).violated
    assert len(calibrate(3.0, 1e-5, 80, "n_out", 70).violated) == 1


def test_what_is_refused_would_have_been_wrong():
    """Hidden scales commute with relu; taken for such a layer, tanh gives other outputs."""
    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"})
    params, result = {n: v.double() for n, v in initial(spec, 0).items()}, channels_of(spec)
    hidden = multiply(params, result.multipliers(rand(result.count, seed=1) + 0.5), torch.float64)
    x = 4 * rand(5, 64)

    def outputs(p, bent):
        first, second = ([p[f"{layer}.weight"], p[f"{layer}.bias"]] for layer in ("features.1", "head"))
        return linear(bent(linear(x, *first)), *second)

    torch.testing.assert_close(outputs(hidden, torch.relu), outputs(params, torch.relu))
    assert float((outputs(hidden, torch.tanh) - outputs(params, torch.tanh)).abs().max()) > 1e-2


def test_one_client_with_masks_of_another_session_spoils_everything(shards, digits):
    """A ring mask that does not cancel leaves no trace of the gradient at all."""
    plan = Plan(net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"}), 4, Local("gradient", batch=4), loss="squared")
    run = Federation(PBPFLExt(), plan, shards, Seeds(0))
    run.start(initial(plan.spec, 1))
    batch = Data(digits.x[:4], digits.y[:4])
    mail = run.probe({Slot(probe, client): batch for probe in (0, 1) for client in range(4)}).mail
    sent = {(letter.probe, letter.sender): letter.message for letter in mail if letter.receiver == SERVER}
    whole, mixed = (run.defense.total([sent[odd if c == 2 else 0, c] for c in range(4)]) for odd in (0, 1))
    assert max(float(g.abs().max()) for g in whole.g.values()) < 1e3
    assert min(float(g.abs().median()) for g in mixed.g.values()) > 1e3


def test_no_two_cells_of_an_attack_start_from_the_same_draws(tmp_path, monkeypatch):
    """But for the control values of a defense, which are compared on the same starts."""
    options: dict[str, Any] = {"clients": 2, "train": 60, "rounds": 1, "victims": 2, "attack_batch": (1, 2)}
    options |= {"stages": ("init", "final"), "threats": ("server/1", "eavesdropper/1")}
    seen, whole = [], LabelRecovery.run

    def run(self, view, challenges, generator):  # notes what it draws from
        seen.append((view.threat.name, challenges[0].batch, generator.initial_seed()))
        return whole(self, view, challenges, generator)

    monkeypatch.setattr(LabelRecovery, "run", run)
    experiment = resolve(configure(**options, defense="none", attacks=("label_recovery",)))
    for group in groups(experiment):
        run_group(experiment, group, tmp_path, [cell.id for cell in cells(experiment, group)])
    views = 2 * 2 * 2  # stages, threats, batches
    assert len(seen) == 2 * views and len({draws for *_, draws in seen}) == len(set(seen)) == views
