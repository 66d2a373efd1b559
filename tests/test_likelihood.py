"""The likelihood attack: precisions from the public law, masks, labels, and what it gains under noise."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
from observations import observation, reached, seeded, server_sees

from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.layers_left_out import explained, layers, masked
from ppbench.attacks.reconstruction.likelihood import CERTAIN, Likelihood, deviations, scaled
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.ppdl import PPDL
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence
from ppbench.federation.optim import Opt
from ppbench.federation.plain import plain_evidence
from ppbench.federation.plan import Data, Local, Noise, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec


def hand(noise: Noise | None, weight: dict[str, torch.Tensor] | None = None) -> Evidence:
    """Return evidence about two tensors of a network that is not there."""
    observed = {"a.weight": torch.tensor([[3.0, -4.0]]), "b.weight": torch.tensor([[1.0], [2.0]])}
    return Evidence((Slot(0, 0),), observed, lambda x, y: observed, weight=weight, noise=noise)


@pytest.mark.parametrize(("kind", "share"), [("gaussian", 0.5), ("laplace", 1.0)])
def test_the_discrepancy_is_the_negative_log_likelihood_up_to_its_constant(kind: str, share: float) -> None:
    evidence = hand(Noise(kind, 0.5, (("b.weight", 2.0),)))  # type: ignore[arg-type]
    guess = {"a.weight": torch.tensor([[2.0, 1.0]]), "b.weight": torch.tensor([[1.5], [-1.0]])}
    total = 0.0
    for name, std in (("a.weight", 0.5), ("b.weight", 2.0)):
        o, s = evidence.observed[name].double(), guess[name].double()
        laplace = torch.distributions.Laplace(s, std / math.sqrt(2))
        p = torch.distributions.Normal(s, std) if kind == "gaussian" else laplace
        total -= float((p.log_prob(o) - p.log_prob(s)).sum())
    assert float(Likelihood().matched(evidence).discrepancy(guess)) == pytest.approx(total)
    assert Likelihood().unit([evidence]).tolist() == [4 * share]


def test_the_unit_is_what_the_discrepancy_is_at_the_truth() -> None:
    """Many draws of each law: the mean of D over the unit is 1 within five standard errors (.01)."""
    g = seeded(1)
    for law in ("gaussian", "laplace"):
        truth, std = torch.randn(1, 200_000, generator=g), 0.3
        draws = torch.randn(truth.shape, generator=g)
        if law == "laplace":
            u = torch.rand(truth.shape, generator=g) - 0.5
            draws = -u.sign() * torch.log1p(-2 * u.abs()) / math.sqrt(2)
        evidence = Evidence((Slot(0, 0),), {"w": truth + std * draws}, lambda x, y: {}, noise=Noise(law, std))  # type: ignore[arg-type]
        attack = Likelihood()
        assert float(attack.matched(evidence).discrepancy({"w": truth}) / attack.unit([evidence])) == pytest.approx(
            1, abs=0.02
        )


def test_tensors_without_noise_share_a_small_deviation_and_nothing_is_divided_by_zero() -> None:
    evidence = hand(Noise("gaussian", 0.0, (("b.weight", 2.0),)))
    found = deviations(evidence, evidence.noise)  # type: ignore[arg-type]
    assert found["b.weight"] == 2.0
    assert found["a.weight"] == pytest.approx(CERTAIN * math.sqrt(25 / 2))
    silent = replace(evidence, observed={n: torch.zeros_like(v) for n, v in evidence.observed.items()})
    assert min(deviations(silent, Noise("gaussian", 0.0)).values()) > 0


def test_hidden_entries_stay_hidden_and_do_not_count() -> None:
    mask = {"a.weight": torch.tensor([[1.0, 0.0]]), "b.weight": torch.ones(())}
    evidence = hand(Noise("gaussian", 0.5), mask)
    weight = Likelihood().matched(evidence).weight
    assert weight is not None
    assert weight["a.weight"].tolist() == [[2.0, 0.0]]
    assert float(Likelihood().unit([evidence])) == 1.5


def test_a_mean_of_uploads_has_less_noise_in_every_tensor() -> None:
    law = scaled(Noise("laplace", 2.0, (("a", 4.0),)), 0.5)
    assert law == Noise("laplace", 1.0, (("a", 2.0),))
    assert (law.of("a"), law.of("b")) == (2.0, 1.0)


def test_what_a_sparse_message_holds_is_its_support(digits: Data) -> None:
    view, _ = server_sees(digits, PPDL(theta=0.2, sigma=1e-3))
    for evidence in Likelihood().evidence(view):
        assert evidence.noise == Noise("gaussian", 1e-3)
        assert evidence.weight is not None
        flat = torch.cat([v.flatten() for v in evidence.weight.values()])
        assert set(flat.unique().tolist()) == {0.0, 1.0}
        assert float(flat.mean()) == pytest.approx(0.2, abs=0.01)
        assert all(bool((evidence.observed[n][w == 0] == 0).all()) for n, w in evidence.weight.items())


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_under_noise_the_likelihood_beats_the_oblivious(law: str, digits: Data) -> None:
    """Noise of a hundredth of the gradient's root mean square, at which DLNet's images begin to blur."""
    view, _ = server_sees(digits, NoDefense(), count=4)
    flat = torch.cat([v.flatten() for e in plain_evidence(view) for v in e.observed.values()])
    scale = 0.01 * float(flat.square().mean().sqrt()) / (math.sqrt(2) if law == "laplace" else 1)
    seen = server_sees(digits, DP(scale, law), count=4)  # type: ignore[arg-type]
    aware, oblivious = (median(reached(seen, attack)[0]) for attack in (Likelihood(budget=300), IG()))
    assert aware > oblivious + 5
    assert aware > 20


def test_evaluations_include_trying_labels_and_the_path_ends_at_the_answer(digits: Data) -> None:
    seen = server_sees(digits, DP(1e-4), count=2)
    for budget in (60, 11, 10, 1):
        _, guesses = reached(seen, Likelihood(budget=budget))
        assert {g.evaluations for g in guesses} == {budget}
        assert all(g.path[-1][0] == budget and torch.equal(g.path[-1][1], g.x) for g in guesses)


# -- how well a guess explains ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def truth(digits: Data) -> Data:
    return Data(digits.x[:1], digits.y[:1])


@pytest.fixture(scope="module")
def case(truth: Data) -> Evidence:
    """An exact observation of one digit."""
    plan = Plan(net_spec("dlnet", (1, 8, 8), 10), 1)
    return observation(plan, initial(plan.spec, 1), truth.x, truth.y)


def test_the_truth_explains_all_layers_and_one_poisoned_layer_costs_one_layer(case: Evidence, truth: Data) -> None:
    exact = explained(case, truth.x, truth.y)
    assert exact == pytest.approx(math.log(1e-4))
    count = len(layers(case))
    poisoned = dict(case.observed)
    poisoned["head.weight"], poisoned["head.bias"] = (
        torch.randn(poisoned[n].shape, generator=seeded()) for n in ("head.weight", "head.bias")
    )
    found = explained(replace(case, observed=poisoned), truth.x, truth.y)
    assert found == pytest.approx(exact * (count - 1) / count, abs=0.1)


def test_hidden_layers_and_entries_do_not_count(case: Evidence, truth: Data) -> None:
    names = layers(case)
    wrong = dict(case.observed)
    wrong["head.weight"] = -wrong["head.weight"]
    wrong["head.bias"] = -wrong["head.bias"]
    seen = masked(replace(case, observed=wrong), names[:-1])
    assert explained(seen, truth.x, truth.y) == pytest.approx(math.log(1e-4))
    zeroed = {n: v * (torch.arange(v.numel()).view(v.shape) % 3 > 0) for n, v in case.observed.items()}
    assert explained(replace(case, observed=zeroed), truth.x, truth.y) == pytest.approx(math.log(1e-4))


def test_nothing_finite_explains_nothing(case: Evidence, truth: Data) -> None:
    bad = {n: v * torch.nan for n, v in case.observed.items()}
    assert explained(replace(case, observed=bad), truth.x, truth.y) == math.inf
    right = explained(case, truth.x, truth.y)
    assert explained(case, truth.x * torch.nan, truth.y) > right


def test_the_law_of_a_weight_change_is_divided_as_the_change_is(plan: Plan, digits: Data) -> None:
    """PPDL adds its noise to what it sends; a change over two epochs at rate .05 is taken for a tenth of a gradient."""
    for local, divisor in ((Local("gradient"), 1.0), (Local("delta", 2, 64, Opt("sgd", lr=0.05)), 0.1)):
        own = replace(plan, local=local)
        run = Federation(PPDL(sigma=1e-3), own, {c: Data(digits.x[c::4], digits.y[c::4]) for c in range(4)}, Seeds(0))
        run.start(initial(own.spec, 1))
        victims = {Slot(0, c): Data(digits.x[c : c + 1], digits.y[c : c + 1]) for c in range(4)}
        view = run.probe(victims, "gradient" if local.upload == "gradient" else "local").view("server/1")
        for evidence in Likelihood().evidence(view):
            assert evidence.noise.std == pytest.approx(1e-3 / divisor)
