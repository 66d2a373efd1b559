"""Reconstruction where the loss is the squared one or the head has no bias: start labels, DLG and iDLG."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from observations import ask, observation, psnr, seeded, updates, uploads
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.dlg import DLG, IDLG
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Local, Plan
from ppbench.nets.net import Option, initial, net_spec

LOSSES = ("cross_entropy", "squared")


def plan_of(model: str, options: dict[str, Option], loss: str, classes: int = 10) -> Plan:
    return Plan(net_spec(model, (1, 8, 8), classes, options), 1, Local("gradient"), loss=loss)


def victim(plan: Plan, x: Tensor, y: Tensor, known: bool = True) -> Victim:
    """A victim whose gradient was observed; `known`: the attacker takes it for one at these public weights."""
    evidence = observation(plan, initial(plan.spec, 0), x, y)
    return Victim(evidence if known else replace(evidence, params=None), ask(1, len(x))[0], plan, seeded())


def attacked(attack: DLG, plan: Plan, x: Tensor, y: Tensor) -> list[Guess]:
    """Return the guesses from the gradients of single examples."""
    params = initial(plan.spec, 0)
    observed = updates(simulation(plan, params), x[:, None], y[:, None])
    return attack.run(uploads(plan, params, observed), ask(len(x)), seeded())


# -- labels before the search ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "no-bias"])
@pytest.mark.parametrize("batch", [1, 3])
def test_start_labels_are_inferred(digits, loss, options, batch):
    plan = plan_of("mlp", options, loss)
    for first in range(0, 30, batch):
        x, y = digits.x[first : first + batch], digits.y[first : first + batch]
        found = victim(plan, x, y).labels("inferred")
        assert found is not None
        assert found.dtype == torch.float32
        assert sorted(found.argmax(1).tolist()) == sorted(y.argmax(1).tolist())
        assert victim(plan, x, y).labels("joint") is None


@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "no-bias"])
def test_an_update_at_unknown_weights_tells_one_label_under_cross_entropy_only(digits, options):
    plan = plan_of("mlp", options, "cross_entropy")
    for i in range(10):
        found = victim(plan, digits.x[i : i + 1], digits.y[i : i + 1], known=False).labels("inferred")
        assert found is not None and torch.equal(found, digits.y[i : i + 1])
    assert victim(plan, digits.x[:3], digits.y[:3], known=False).labels("inferred") is None
    plan = plan_of("mlp", options, "squared")
    assert victim(plan, digits.x[:1], digits.y[:1], known=False).labels("inferred") is None


def test_a_hidden_head_tells_nothing(digits):
    for known in (True, False):
        whole = victim(plan_of("mlp", {}, "cross_entropy"), digits.x[:1], digits.y[:1], known)
        rest = {n: g for n, g in whole.evidence.observed.items() if not n.startswith("head.")}
        assert replace(whole, evidence=replace(whole.evidence, observed=rest)).labels("inferred") is None


def test_the_target_of_a_regression_is_not_taken_for_a_class(digits):
    plan = plan_of("mlp", {}, "squared", classes=1)
    asked = victim(plan, digits.x[:1], torch.full((1, 1), 0.3))
    assert asked.labels("inferred") is None
    granted = replace(asked, challenge=ask(1, 1, torch.full((1, 1, 1), 0.3))[0])
    assert granted.labels("inferred").tolist() == [[pytest.approx(0.3)]]


# -- the searches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("attack", [DLG(budget=600), IDLG(budget=600)], ids=["dlg", "idlg"])
@pytest.mark.parametrize(
    ("model", "options"),
    [("dlnet", {}), ("mlp", {"bias": False, "activation": "sigmoid"})],
    ids=["dlnet", "mlp-no-bias"],
)
def test_planted_leak(digits, model, options, attack, loss):
    x, y = digits.x[:3], digits.y[:3]
    guesses = attacked(attack, plan_of(model, options, loss), x, y)
    assert [int(g.y) for g in guesses] == y.argmax(1).tolist()
    assert all(psnr(g.x[0], x[i]) > 40 for i, g in enumerate(guesses))
