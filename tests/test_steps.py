"""Images of many local steps by rank alone, whatever number and rates; and what FedPC's theorems are judged by."""

from dataclasses import replace

import pytest
import torch
from observations import scored, seeded
from protocols import started

from ppbench.adversary.victims import choose_victims
from ppbench.attacks.adaptive.fedpc import AdaptiveFedPC, images_from_signs, known_signs
from ppbench.attacks.reconstruction.analytic import first_layer
from ppbench.attacks.reconstruction.directions import PublicLayer
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion, inputs_by_rank, sums_gradients
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.claims import case as premise
from ppbench.claims.check import check_claims
from ppbench.claims.claim import Claim, Rival
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.nets.net import net_spec

SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "200"})
PLAN = Plan(SPEC, 3, Local("delta", 2, 1, Opt("sgd", 0.05, momentum=0.9)))
MANY = FedPC(batch_sizes="1", epochs="2,3")  # 8 or 12 steps on four images, at rates of .025 to .1


def mixed(shares, m=120, k=4, seed=0):
    """Return a change [m, D + 1] of k inputs, their columns zero in given shares, and the inputs."""
    g = torch.Generator().manual_seed(seed)
    inputs = torch.rand(k, 30, generator=g, dtype=torch.float64)
    delta = torch.randn(m, k, generator=g, dtype=torch.float64)
    for i, share in enumerate(shares):
        delta[torch.randperm(m, generator=g)[: int(share * m)], i] = 0.0
    return delta @ torch.cat([inputs, torch.ones(k, 1, dtype=torch.float64)], 1), inputs


def layer_question(change, count=4):
    layer = PublicLayer(
        torch.zeros(len(change), change.shape[1] - 1).double(), torch.zeros(len(change)).double(), 0.0, 1.0
    )
    return inputs_by_rank(change, layer, count, seeded())


def test_inputs_are_told_apart_by_zeros_alone():
    """The layer's weights, here zero, take no part: nothing needs to be known of which units fire."""
    change, inputs = mixed([0.6, 0.5, 0.4, 0.3])
    result = layer_question(change)
    assert torch.cdist(inputs, result).amin(1).max() < 1e-6
    assert torch.cdist(inputs, layer_question(change * 1e-3)).amin(1).max() < 1e-6  # at any scale


def test_what_no_zeros_or_no_rank_tell_apart_is_not_told():
    dense, _ = mixed([0.0, 0.0, 0.0, 0.0])
    assert layer_question(dense) is None
    change, _ = mixed([0.6, 0.5, 0.4, 0.3])
    noise = torch.randn(change.shape, generator=seeded(), dtype=torch.float64)
    assert layer_question(change + 0.1 * noise) is None and layer_question(noise) is None
    assert layer_question(change, count=3) is None  # more inputs than examples
    shifted = torch.cat([change[:, :-1] + 5 * change[:, -1:], change[:, -1:]], 1)  # inputs in [5, 6], not [0, 1]
    assert layer_question(shifted) is None


@pytest.fixture(scope="module")
def probed(deal):
    """Return a maker of (view, victims in a role, federation) of four images and many steps."""

    def make(defense, role=""):
        run = started(defense, PLAN, deal([24] * 3))
        victims = choose_victims(run.shards, "server/1", 4, 12, Seeds(0), roles=len(defense.roles))
        transcript = run.probe(victims.data, "local", 2)
        if role:
            victims = victims.playing(role, transcript.roles(), 12)
        return transcript.view("server/1"), victims, run

    return make


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["none", "phong"])
def test_many_undefended_steps_give_the_batch_away(probed, name):
    view, victims, _ = probed(load_plugin("defenses", name)())
    guesses = FedAvgInversion(budget=1, restarts=0).run(view, victims.challenges(), seeded())
    guess = [value for value, _ in scored(victims, guesses)]
    assert sum(value > 60 for value in guess) >= 0.6 * len(guess), guess
    assert sum(g.evaluations == 1 for g in guesses) >= 2


@pytest.mark.nightly
def test_a_pilots_secret_number_and_rate_of_steps_hide_no_image(probed):
    view, victims, run = probed(MANY, "pilot")
    assert MANY.fewest_steps(4, 32, 1) == 8
    assert len({(float(c.rate), int(c.epochs)) for c in run.parties.clients}) > 1
    guesses = [value for value, _ in scored(victims, AdaptiveFedPC().run(view, victims.challenges(), seeded()))]
    assert len(guesses) == 12 and sum(value > 60 for value in guesses) >= 8, guesses
    blurred = replace(MANY, pilot_clip=1.0, pilot_sigma=0.01)  # noise leaves no rank
    view, victims, _ = probed(blurred, "pilot")
    guesses = [value for value, _ in scored(victims, AdaptiveFedPC().run(view, victims.challenges(), seeded()))]
    assert max(guesses) < 40


def test_ternaries_of_many_steps_tell_coarse_images_of_each_class(probed):
    """Mean correlation with the victims .62; .18 and .24 of filters by other classes' cotangents: digits are alike."""
    view, victims, _ = probed(MANY, "ternary")
    result, layer = known_signs(view, MANY), first_layer(view.plan)

    def correlation(shift):
        results = []
        for (slot,) in victims.units:
            data = victims.data[slot]
            labels = (data.y.argmax(1) + shift) % 10
            guess = images_from_signs(result[slot], layer, labels, view.plan, seeded())
            assert guess.x.shape == data.x.shape and float(guess.x.min()) >= 0
            pairs = torch.stack([guess.x.flatten(1), data.x.flatten(1)], 1)
            results += [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]
        return sum(results) / len(results)

    assert correlation(0) > 0.45 > correlation(5) + 0.1


def test_only_sgd_in_front_of_a_relu_is_linear_in_its_inputs():
    assert sums_gradients(PLAN)
    assert not sums_gradients(replace(PLAN, local=replace(PLAN.local, opt=Opt("adam", 0.01))))
    assert not sums_gradients(replace(PLAN, spec=net_spec("mlp", (1, 8, 8), 10, {"activation": "sigmoid"})))
    assert not sums_gradients(replace(PLAN, spec=net_spec("cnn", (1, 8, 8), 10)))


def test_steps_of_fedpc_are_the_fewest_that_its_menus_leave(fabricate):
    """By the plan's own batch of 32 and one epoch a victim of 16 images would make one step."""
    about = dict(probe="local", batch=16)
    cell = fabricate("fedpc", 0.2, "dlg", "reconstruction", 20.0, control="beta", **about)
    assert premise.batches_and_steps(cell.config) == (1, 1)  # 128 at once
    small = fabricate("fedpc", 0.2, "dlg", "reconstruction", 20.0, control="beta",
                      parameters={"batch_sizes": "2,1", "epochs": "3,2", "of_old": 1}, **about)  # fmt: skip
    assert premise.batches_and_steps(small.config) == (8, 2 * 8)
    assert premise.batches_and_steps(small.config.model_copy(update={"probe": "gradient"})) == (1, 1)
    plain = fabricate("phong", None, "dlg", "reconstruction", 20.0, **about)
    fed = plain.config.federation.model_copy(update={"batch": 2, "local_epochs": 3})
    assert premise.batches_and_steps(plain.config.model_copy(update={"federation": fed})) == (8, 24)


def test_one_image_in_many_steps_is_one_mini_batch(fabricate):
    """A theorem about updates of many mini-batches is about different ones."""
    parameters = {"batch_sizes": "1", "epochs": "8"}
    cell = fabricate("fedpc", 0.2, "dlg", "reconstruction", 20.0, control="beta", probe="local", batch=1,
                     parameters=parameters)  # fmt: skip
    claim = Claim("psnr_median", None, "", "", None, "Theorem 3", steps=8, needs=("steps",))
    assert premise.unmet_needs(claim, cell.config) == ("1 mini-batch attacked, not 8 or more",)
    assert premise.attacked_words(cell.config) == "batch 1 in 8 or more steps"


def test_roles_stand_beside_a_defense_without_on_the_victims_of_both(fabricate):
    """FedPC's pilots and ternary senders are slots of the same cohorts that weight transmission is asked about."""

    def cells(defense, decibels, places, role="", **more):
        made = fabricate(defense, None, "adaptive" if role else "dlg", "reconstruction", decibels,
                         adaptive=bool(role), **more)  # fmt: skip
        config = made.config.model_copy(update={"role": role})
        victims = [v.model_copy(update={"probe": p, "client": c, "index": 0})
                   for v, (p, c) in zip(made.victims, places, strict=False)]  # fmt: skip
        return made.model_copy(update={"config": config, "cell_id": config.cell_id(), "victims": victims})

    every = [(p, c) for p in range(4) for c in range(3)]
    pilots = [(p, p % 3) for p in range(12)]
    others = [(p, c) for p in range(6) for c in range(3) if c != p % 3]
    around = [cells("none", 60.0, every), cells("full_noise", 5.0, every), cells("phong", 30.0, every)]
    claim = Claim("psnr_median", None, "", "", None, "Sec. 5.2.2", than=Rival("phong"))
    for pilot, ternary, verdict in ((20.0, 8.0, "holds"), (40.0, 50.0, "falls"), (60.0, 8.0, "inconclusive")):
        mine = [cells("fedpc", pilot, pilots, "pilot", control="beta"),
                cells("fedpc", ternary, others, "ternary", control="beta")]  # fmt: skip
        (judgment,) = check_claims({"fedpc": [claim]}, [*around, *mine], [])
        assert "on the 12 that both share" in judgment.finding.reason, judgment.finding
        assert judgment.finding.verdict == verdict, judgment.finding
