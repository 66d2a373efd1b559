"""Local training simulated: exact at the truth, images found through several steps and unknown orders, bad input."""

import itertools
from dataclasses import replace

import pytest
import torch
from observations import reached, seeded

from ppbench.adversary.victims import choose_victims
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.fedavg import CERTAIN, FedAvgInversion, LocalTraining, rounded, trained_evidence
from ppbench.attacks.reconstruction.search.problem import MappedObjective, SimulatedObjective
from ppbench.attacks.reconstruction.search.starts import groups
from ppbench.base.seeds import Seeds
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import at_truth
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Local

SGD, MOMENTUM, ADAM = Opt("sgd", lr=0.1), Opt("sgd", lr=0.02, momentum=0.9), Opt("adam", lr=5e-3)


@pytest.fixture
def probed(federate, plan):
    """Return a maker of the server's view of locally trained victims, and the truth."""

    def make(local, batch=1, count=4, threat="server/1", kind="local"):
        run = federate(NoDefense(), replace(plan, local=local))
        victims = choose_victims(run.shards, threat, batch, count, Seeds(0))
        return run.probe(victims.data, kind).view(threat, own=victims.own), victims

    return make


def labels_found(victims, guesses):
    """Return whether each guess has its unit's labels, as a multiset."""
    true = [sorted(victims.truth(unit).y.argmax(1).tolist()) for unit in victims.units]
    return [sorted(guess.y.tolist()) for guess in guesses] == true


@pytest.mark.parametrize("opt", [SGD, MOMENTUM])
@pytest.mark.parametrize(("epochs", "batch"), [(1, 1), (3, 2)])
def test_the_simulation_is_the_clients_own_training(probed, opt, epochs, batch):
    view, victims = probed(Local("delta", epochs=epochs, batch=16, opt=opt), batch)
    for evidence, plain in zip(trained_evidence(view), view.defense.evidence(view), strict=True):
        data = victims.data[evidence.unit[0]]
        assert at_truth(evidence, data.x[None], data.y[None]) < 1e-8
        assert epochs == 1 or at_truth(plain, data.x[None], data.y[None]) > 1e-4


@pytest.mark.parametrize("opt", [SGD, MOMENTUM])
def test_exactly_one_order_of_the_images_explains_several_local_batches(probed, opt):
    """Three images in batches of two, twice: one of nine ways to have one image left over in each epoch."""
    view, victims = probed(Local("delta", epochs=2, batch=2, opt=opt), batch=3)
    evidence = trained_evidence(view)[0]
    data = victims.data[evidence.unit[0]]
    residuals = []
    for alone in itertools.product(range(3), repeat=2):
        order = torch.stack([row for one in alone for row in (1 - torch.eye(3)[one], torch.eye(3)[one])])
        simulated = evidence.simulate(data.x[None].double(), data.y[None].double(), CERTAIN * order[None].double())
        residuals.append(float(evidence.discrepancy(simulated).detach() / evidence.scale()))
    assert sum(r < 1e-8 for r in residuals) == 1 and sum(r > 1e-6 for r in residuals) == 8


@pytest.mark.parametrize(("opt", "epochs"), [(SGD, 3), (MOMENTUM, 4)])
def test_images_that_several_steps_hide_from_dlg_are_found(probed, opt, epochs):
    view, victims = probed(Local("delta", epochs=epochs, batch=16, opt=opt), count=2)
    blind, _ = reached((view, victims), IDLG(restarts=0, budget=100))
    found, guesses = reached((view, victims), FedAvgInversion())
    assert max(blind) < 12 < 30 < min(found) and labels_found(victims, guesses)
    assert all(g.confidence is not None and g.confidence < 1e-8 for g in guesses)


def test_images_in_an_unknown_order_are_found_where_one_order_is_not_enough(probed):
    view, victims = probed(Local("delta", epochs=1, batch=1, opt=SGD), batch=2, count=4)
    found, guesses = reached((view, victims), FedAvgInversion(budget=200, restarts=0))
    assert sum(p > 25 for p in found) >= 3
    assert all(g.evaluations <= 208 for g in guesses)


def test_the_sum_of_several_clients_local_training_is_simulated(probed, federate, plan):
    local = Local("delta", epochs=3, batch=16, opt=SGD)
    view, victims = probed(local, count=3, threat="client/1")
    (evidence,) = trained_evidence(view)
    data = [victims.data[slot] for slot in evidence.unit]
    x, y = torch.stack([d.x for d in data]), torch.stack([d.y for d in data])
    (plain,) = view.defense.evidence(view)
    # not 0: the shards are unequal, and a client does not know by how much
    assert at_truth(evidence, x, y) < 0.02 < at_truth(plain, x, y)


def test_on_gradients_and_on_one_step_it_is_idlg(probed):
    for local, kind in ((Local(batch=16), "gradient"), (Local("delta", epochs=1, batch=16, opt=SGD), "local")):
        seen = probed(local, kind=kind, count=2)
        (a, one), (b, other) = (reached(seen, t(budget=600, restarts=1)) for t in (FedAvgInversion, IDLG))
        assert min(a) > 30
        assert a == b and [g.evaluations for g in one] == [g.evaluations for g in other]


def test_of_adam_only_signs_are_matched(probed):
    view, victims = probed(Local("delta", epochs=1, batch=16, opt=ADAM), count=2)
    for evidence in trained_evidence(view):
        data = victims.data[evidence.unit[0]]
        assert evidence.measure == "hinge"
        assert {float(v) for o in evidence.observed.values() for v in o.unique()} <= {-1.0, 0.0, 1.0}
        assert at_truth(evidence, data.x[None], data.y[None]) < 1e-6
    found, guesses = reached((view, victims), FedAvgInversion(budget=50, restarts=0))
    assert labels_found(victims, guesses) and sum(found) / len(found) > 9


@pytest.mark.parametrize("own", [False, True], ids=["one model", "models of their own"])
def test_all_victims_at_once_have_the_same_slopes_as_one_by_one(probed, own):
    view, _ = probed(Local("delta", epochs=2, batch=2, opt=MOMENTUM), batch=3, count=6)
    found = [replace(e, nuisance={"order": (1, 4, 3)}) for e in trained_evidence(view)]
    if own:
        params = [{n: v * (1 + 0.1 * i) for n, v in e.simulate.params.items()} for i, e in enumerate(found)]
        found = [replace(e, simulate=replace(e.simulate, params=p)) for e, p in zip(found, params, strict=True)]
    assert groups(found) == [[0, 1]]
    x, y = (torch.rand(2, 3, *shape, generator=seeded(1), dtype=torch.float64) for shape in ((1, 8, 8), (10,)))
    order, index = torch.randn(2, 12, generator=seeded(2), dtype=torch.float64), torch.tensor([1, 0])
    together, alone = (kind(found)(x, y, order, index) for kind in (MappedObjective, SimulatedObjective))
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert bool((a != 0).any())


def test_rounded_orders_put_each_image_in_one_step_of_each_epoch(probed):
    view, _ = probed(Local("delta", epochs=3, batch=2, opt=SGD), batch=5, count=5)
    (evidence,) = trained_evidence(view)[:1]
    logits = torch.randn(2, 1, 9, 5, generator=seeded())
    found = rounded(evidence.simulate, logits) / CERTAIN
    assert found.shape == logits.shape and set(found.unique().tolist()) == {0.0, 1.0}
    epochs = found.view(2, 3, 3, 5)
    assert bool((epochs.sum(2) == 1).all()) and epochs.sum(3)[0, 0].tolist() == [2, 2, 1]
    assert torch.equal(rounded(evidence.simulate, CERTAIN * found), CERTAIN * found)
    x, y = torch.rand(1, 5, 1, 8, 8), torch.eye(10)[None, :5]
    by_hand = LocalTraining.__call__(evidence.simulate, x, y, CERTAIN * torch.eye(5)[[0, 2, 4] * 3][None])
    assert all(bool(v.isfinite().all()) for v in by_hand.values())
