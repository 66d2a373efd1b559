"""The white-box attack: gradients and outputs at several rounds' models, hand-made trainings of single gradients."""

from dataclasses import replace

import pytest
import torch
from observations import CHANCE, deviations, letters, seeded, told
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.update_cosine import rounds_of
from ppbench.attacks.membership.whitebox import WhiteBox, gradient_signals, round_signals, spread
from ppbench.base.autodiff import gradient
from ppbench.defenses.none import NoDefense
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plain import plain_evidence
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.nets.net import initial, net_spec
from ppbench.testing.scene import digits
from ppbench.testing.worlds import POISONS, written

COUNT, CLIENTS = 160, 2
SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32"})
QUICK = WhiteBox(hidden=8, steps=50)
PLAN = Plan(SPEC, CLIENTS, Local("gradient", batch=COUNT))


def trained(rounds: int, seed: int = 0, frozen: bool = False) -> tuple[View, Challenge, Tensor]:
    """Return a server's view of FedSGD on mislabelled digits, a challenge and who was a member.

    frozen: the uploads are gradients of other records, and the model never learns.
    """
    g = seeded(seed)
    every = digits().x[torch.randperm(len(digits().x), generator=g)]
    y = torch.nn.functional.one_hot(torch.randint(0, 10, (len(every),), generator=g), 10).float()
    x, labels, member = every[:COUNT], y[:COUNT], torch.rand(COUNT, generator=g) < 0.5
    owner = torch.randint(0, CLIENTS, (COUNT,), generator=g)
    params, opt, mail = initial(SPEC, seed), Opt("adam", lr=0.01), []
    layout = Layout.of(params)
    flat = layout.pack(params)
    state = opt.init(flat)
    for number in range(1, rounds + 1):
        updates = []
        for client in range(CLIENTS):
            own = (member & (owner == client)).nonzero()[:, 0]
            own = own + COUNT if frozen else own
            update = gradient(lambda p, o=own: PLAN.objective(p, every[o], y[o], torch.ones(len(o))), params)
            updates.append({n: v.detach() for n, v in update.items()})
            mail += letters(number, client, params, updates[-1])
        if not frozen:
            mean = torch.stack([layout.pack(u) for u in updates]).mean(0)
            flat, state = opt.step(flat, mean, state, opt.lr)
            params = {n: v.clone() for n, v in layout.unpack(flat).items()}
    view = View("server/1", SERVER, PLAN, NoDefense(), tuple(mail), ())
    return view, Challenge((), 1, x=x, labels=labels, known=told(member)), member


@pytest.fixture(scope="module")
def leaky() -> tuple[View, Challenge, Tensor]:
    return trained(60)


def ask(view: View, challenge: Challenge, seed: int = 0, attack: WhiteBox | None = None) -> Guess:
    (guess,) = (attack or WhiteBox()).run(view, [challenge], seeded(seed))
    assert guess.score.dtype == torch.float64
    assert bool(guess.score.isfinite().all())
    assert guess.decision.dtype == torch.bool
    return guess


def test_planted_leak_an_overfit_model(leaky):
    view, challenge, member = leaky
    guess, asked = ask(view, challenge), challenge.known == -1
    assert roc_auc_score(member[asked], guess.score[asked]) > 0.9
    assert float((guess.decision == member)[asked].double().mean()) > 0.8


def test_the_models_alone_betray_members_too(leaky):
    """Uploads replaced by noise: what is left are gradients and outputs at the overfit models."""
    view, challenge, member = leaky
    g = seeded(1)
    noise = written(view, lambda t: torch.randn(t.shape, generator=g))
    asked, guess = challenge.known == -1, ask(noise, challenge, attack=QUICK)
    assert roc_auc_score(member[asked], guess.score[asked]) > 0.8


def test_null_a_model_that_never_saw_them():
    areas = []
    for seed in range(3):
        view, challenge, member = trained(3, seed, frozen=True)
        asked = challenge.known == -1
        areas.append(deviations(member[asked], ask(view, challenge, attack=QUICK).score[asked]))
    assert max(map(abs, areas)) < CHANCE


def test_gradient_signals_are_norms_with_the_labels_row_first():
    g = seeded(0)
    leaves = {"a": torch.randn(2, 5, 3, generator=g), "head": torch.randn(2, 4, 6, generator=g), "b": torch.randn(2, 4)}
    labels = torch.eye(4)[[2, 0]]
    found = gradient_signals(leaves, labels).exp()
    assert found.shape == (2, 3 + 4)
    assert torch.allclose(found[:, 0], leaves["a"].flatten(1).norm(dim=1))
    rows = leaves["head"].norm(dim=2)
    assert torch.allclose(found[:, 3], torch.stack([rows[0, 2], rows[1, 0]]))
    assert torch.allclose(found[0, 4:], rows[0, [0, 1, 3]].sort().values)


def test_round_signals_hold_outputs_where_weights_are_known(leaky):
    view, challenge, _ = leaky
    evidence = plain_evidence(rounds_of(view)[-1])[0]
    labels = challenge.labels.double()
    whole = round_signals(PLAN, evidence, challenge.x, labels)
    bare = round_signals(PLAN, replace(evidence, params=None), challenge.x, labels)
    assert torch.equal(whole[:, : bare.shape[1]], bare)
    outputs = PLAN.net(evidence.params, challenge.x).double()
    assert torch.allclose(whole[:, bare.shape[1] :][:, 10], outputs.softmax(-1)[labels == 1], atol=1e-6)


def test_rounds_are_spread_evenly_and_end_with_the_last():
    items = list(range(1, 41))
    assert spread(items, 5) == [8, 16, 24, 32, 40]
    assert spread(items[:3], 5) == [1, 2, 3]
    assert spread(items, 1) == [40]


@pytest.mark.parametrize("case", ["no mail", "nan models", "one class"])
def test_where_nothing_can_be_learned_decisions_are_coins(case, leaky):
    view, challenge, _ = leaky
    if case == "one class":
        challenge = replace(challenge, known=challenge.known.clamp(max=0))
    else:
        view = written(replace(view, mail=view.mail[: 8 * (case != "no mail")]), POISONS["nan"], by_server=True)
    first, again, other = (ask(view, challenge, seed, QUICK) for seed in (1, 1, 2))
    assert len(first.score.unique()) == 1
    assert torch.equal(first.decision, again.decision)
    assert not torch.equal(first.decision, other.decision)


def test_a_bad_record_scores_lowest_and_one_seed_gives_one_guess(leaky):
    view, challenge, member = leaky
    view = replace(view, mail=view.mail[-8:])
    x = challenge.x.clone()
    x[3] = torch.nan
    broken = replace(challenge, x=x)
    first, again = ask(view, broken, 4, QUICK), ask(view, broken, 4, QUICK)
    assert torch.equal(first.score, again.score)
    assert first.score[3] == first.score.min()
    sound = (challenge.known == -1) & (torch.arange(COUNT) != 3)
    assert roc_auc_score(member[sound], first.score[sound]) > 0.85
