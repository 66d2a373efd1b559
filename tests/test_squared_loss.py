"""Reconstruction where the loss is the squared one or the head has no bias: start labels, DLG and iDLG."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.dlg import DLG, IDLG
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.messages import Model, Update
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Slot
from ppbench.nets.net import Option, initial, net_spec

SLOT = Slot(0, 0)
LOSSES = ("cross_entropy", "squared")


def plan_of(model: str, options: dict[str, Option], loss: str, classes: int = 10) -> Plan:
    return Plan(net_spec(model, (1, 8, 8), classes, options), 1, Local("gradient"), loss=loss)


def victim(plan: Plan, x: Tensor, y: Tensor, params: Params | None = None, known: bool = True) -> Victim:
    """A victim whose gradient was observed; `known`: the attacker takes it for one at these public weights."""
    params = initial(plan.spec, 0) if params is None else params
    simulate = simulation(plan, params)
    observed = {n: g.detach() for n, g in simulate(x[None], y[None]).items()}
    evidence = Evidence((SLOT,), observed, simulate, params if known else None)
    return Victim(evidence, Challenge((SLOT,), len(x)), plan, torch.Generator().manual_seed(0))


def seen(plan: Plan, x: Tensor, y: Tensor) -> View:
    """A server's view of one upload a probe, each the gradient of one example."""
    params, mail = initial(plan.spec, 0), []
    simulate = simulation(plan, params)
    for i in range(len(x)):
        update = {n: g.detach() for n, g in simulate(x[i][None, None], y[i][None, None]).items()}
        mail += [Envelope(i, 1, 0, SERVER, 0, 0, Model(params)), Envelope(i, 1, 0, 0, SERVER, 0, Update(update))]
    return View("server/1", SERVER, plan, NoDefense(), tuple(mail), ())


def psnr(guess: Tensor, truth: Tensor) -> float:
    return float(-10 * torch.log10(((guess.clamp(0, 1) - truth) ** 2).mean().clamp(min=1e-12)))


# -- labels before the search ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "no-bias"])
@pytest.mark.parametrize("batch", [1, 3])
def test_start_labels_are_inferred(digits: Data, loss: str, options: dict[str, Option], batch: int) -> None:
    plan = plan_of("mlp", options, loss)
    for first in range(0, 30, batch):
        x, y = digits.x[first : first + batch], digits.y[first : first + batch]
        found = victim(plan, x, y).labels("inferred")
        assert found is not None
        assert found.dtype == torch.float32
        assert sorted(found.argmax(1).tolist()) == sorted(y.argmax(1).tolist())
        assert victim(plan, x, y).labels("joint") is None


@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "no-bias"])
def test_an_update_at_unknown_weights_tells_one_label_under_cross_entropy_only(
    digits: Data, options: dict[str, Option]
) -> None:
    plan = plan_of("mlp", options, "cross_entropy")
    for i in range(10):
        found = victim(plan, digits.x[i : i + 1], digits.y[i : i + 1], known=False).labels("inferred")
        assert found is not None and torch.equal(found, digits.y[i : i + 1])
    assert victim(plan, digits.x[:3], digits.y[:3], known=False).labels("inferred") is None
    plan = plan_of("mlp", options, "squared")
    assert victim(plan, digits.x[:1], digits.y[:1], known=False).labels("inferred") is None


def test_a_hidden_head_tells_nothing(digits: Data) -> None:
    whole = victim(plan_of("mlp", {}, "cross_entropy"), digits.x[:1], digits.y[:1])
    assert whole.evidence is not None
    rest = {n: g for n, g in whole.evidence.observed.items() if not n.startswith("head.")}
    for params in (whole.evidence.params, None):
        evidence = Evidence((SLOT,), rest, whole.evidence.simulate, params)
        assert Victim(evidence, whole.challenge, whole.plan, whole.generator).labels("inferred") is None


def test_the_target_of_a_regression_is_not_taken_for_a_class(digits: Data) -> None:
    plan = plan_of("mlp", {}, "squared", classes=1)
    asked = victim(plan, digits.x[:1], torch.full((1, 1), 0.3))
    assert asked.labels("inferred") is None
    granted = Victim(asked.evidence, Challenge((SLOT,), 1, y=torch.full((1, 1, 1), 0.3)), plan, asked.generator)
    assert granted.labels("inferred").tolist() == [[pytest.approx(0.3)]]


# -- the searches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("attack", [DLG(budget=600), IDLG(budget=600)], ids=["dlg", "idlg"])
@pytest.mark.parametrize(
    ("model", "options"),
    [("dlnet", {}), ("mlp", {"bias": False, "activation": "sigmoid"})],
    ids=["dlnet", "mlp-no-bias"],
)
def test_planted_leak(digits: Data, model: str, options: dict[str, Option], attack: DLG, loss: str) -> None:
    plan, x, y = plan_of(model, options, loss), digits.x[:3], digits.y[:3]
    asked = [Challenge((Slot(i, 0),), 1) for i in range(3)]
    guesses = attack.run(seen(plan, x, y), asked, torch.Generator().manual_seed(0))
    assert [int(g.y) for g in guesses] == y.argmax(1).tolist()
    assert all(psnr(g.x[0], x[i]) > 40 for i, g in enumerate(guesses))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("model", "options"),
    [("cnn", {"widths": 4, "bias": False}), ("densenet", {"growth": 2, "blocks": 2, "layers": 1})],
    ids=["cnn", "densenet"],
)
def test_networks_beyond_the_fast_path_are_searched_too(
    digits: Data, model: str, options: dict[str, Option], loss: str
) -> None:
    plan, x, y = plan_of(model, options, loss), digits.x[:2], digits.y[:2]
    asked = [Challenge((Slot(i, 0),), 1) for i in range(2)]
    for attack in (DLG(budget=30, restarts=0), IDLG(budget=30, restarts=0)):
        guesses = attack.run(seen(plan, x, y), asked, torch.Generator().manual_seed(0))
        assert all(bool(g.x.isfinite().all()) and 0 < g.evaluations <= 30 for g in guesses)
        assert all(g.confidence is not None and g.confidence < 0.5 for g in guesses), "the mismatch must fall"
