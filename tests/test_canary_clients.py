"""Canary clients: the estimate of a client's epsilon, what is planted, what leaks nothing, and what stays as it was."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ppbench.attacks.membership.audits import CanaryClientAudit
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin, plugins
from ppbench.base.tree import Tree
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Context, Defense, Server
from ppbench.federation.drive import Straight
from ppbench.federation.plan import Layout
from ppbench.federation.wire import Update
from ppbench.metrics.epsilon import client_epsilon, deviation_near_one, gdp_epsilon, two_gaussians
from ppbench.questions.membership import Clients, score_clients
from ppbench.records.figure import Terms
from ppbench.run import evaluation
from ppbench.run.audit.runs import PointAudit, Refused, takes_canaries
from ppbench.run.config import configure
from ppbench.run.experiment import Point, resolve

ROUNDS, DELTA = 4, 1e-5
SMALL = dict(
    defense="none", model="mlp", model_options={"hidden": 128}, train=120, clients=4, rounds=ROUNDS, canaries=0,
    candidates=8, canary_clients=60, stages=("audit",), attacks=("audit_canary_clients",), schedule="parallel",
    upload="gradient", optimizer="sgd", lr=0.1, decay_at=(),
)  # fmt: skip


@dataclass(frozen=True)
class ServerNoise(Defense):
    """Clients clip, the server adds noise of `multiplier` times the clipping norm to the sum."""

    multiplier: float = 1.0
    clip: float = 1.0
    name: ClassVar[str] = "server_noise"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        layout = Layout.of(result)
        flat = layout.pack(result)
        return Update(layout.unpack(flat * min(1.0, self.clip / float(flat.norm()))))

    def stepped(self, ctx: Context, server: Server, update: Tree) -> Server:
        std = self.multiplier * self.clip / ctx.plan.clients
        noisy = {n: v + std * torch.randn(v.shape, generator=ctx.generator) for n, v in update.items()}
        return super().stepped(ctx, server, noisy)


def audit(tmp_path, defense: Defense, **options) -> PointAudit:
    return PointAudit.of(resolve(configure(**{**SMALL, **options})), Point(defense), tmp_path)


def figures(tmp_path, defense: Defense, **options) -> Mapping[str, float]:
    """Return the estimates from one training, without the rest of an evaluation."""
    one = audit(tmp_path, defense, **options)
    fed = one.start(0)
    assert fed.run(one.experiment.config.rounds)
    (guess,) = CanaryClientAudit().run(fed.release().view("client/1"), [one.clients.challenge()], torch.Generator())
    scored = score_clients(one.clients.inside, guess).victims
    return {m.name: m for m in Clients().metrics(scored, Terms(10, 0, DELTA))}


# -- the metric --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mu", [0.1, 0.5, 2.0, 10.0])
def test_of_equal_spread_epsilon_is_that_of_a_gaussian_mechanism(mu):
    for delta in (1e-5, 1e-3):
        assert two_gaussians(mu, 1.0, delta) == pytest.approx(gdp_epsilon(mu, delta), rel=1e-3)
    assert two_gaussians(mu, 1.2) > two_gaussians(mu, 1.0) < two_gaussians(mu, 0.8)


def test_equal_laws_differ_by_nothing_and_nonsense_is_refused():
    assert two_gaussians(0.0, 1.0) == 0.0
    for bad in ((0.0, 0.0, 1e-5), (0.0, 1.0, 0.0), (float("nan"), 1.0, 1e-5)):
        with pytest.raises(ValueError, match="out of range"):
            two_gaussians(*bad)
    assert client_epsilon(np.zeros(9)).value is None


def test_no_more_spread_is_used_than_is_there():
    draws = np.random.default_rng(0).standard_normal(100)
    assert (
        deviation_near_one(draws) == 1.0
        and deviation_near_one(2 * draws) < 2
        and 0.4 < deviation_near_one(0.4 * draws) < 1
    )


# -- a canary client ---------------------------------------------------------------------------------------------------
def test_its_gradient_is_its_direction_in_batches_of_any_kind(tmp_path):
    one = audit(tmp_path, NoDefense())
    plan, params = one.experiment.task.plan, one.experiment.task.params
    direction = {name: torch.randn_like(value) for name, value in params.items()}
    x, y = torch.rand(3, *plan.spec.shape), torch.zeros(3, 10)
    straight = Straight.of(plan, direction)
    result = torch.func.grad(lambda p: straight.objective(p, x, y, torch.tensor([1.0, 1.0, 0.0])))(params)
    clipped = load_plugin("defenses", "dp_sgd")(noise_multiplier=0.0)
    total = clipped.clipped_sum(straight, params, SimpleNamespace(x=x, y=y, w=torch.ones(3)))
    norm = Layout.of(params).pack(direction).norm()
    for name, value in direction.items():
        assert torch.allclose(result[name], value) and torch.allclose(total[name], 3 * value / norm, atol=1e-5)


def test_those_whose_clients_upload_more_than_a_gradient_are_refused(tmp_path):
    task = audit(tmp_path, NoDefense()).experiment.task
    takes = {name for name in plugins("defenses") if takes_canaries(load_plugin("defenses", name)(), task.plan, 30, 2)}
    assert {"none", "full_noise", "dp", "dp_sgd", "ppdl"} <= takes
    assert not takes & {"spn", "pbpfl", "pbpfl_ext", "mpdp", "mpdp_h", "fedpc", "baffle", "central"}
    with pytest.raises(Refused, match="none can upload a direction"):
        audit(tmp_path, load_plugin("defenses", "spn")()).start(0)
    with pytest.raises(Refused, match="--canary-clients"):
        _ = audit(tmp_path, NoDefense(), canary_clients=0, attacks=("mia_loss",)).clients


# -- planted, null, undefended -----------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_noise_at_the_server_is_estimated_near_what_it_guarantees(tmp_path):
    """Of ROUNDS rounds with noise multiplier z: a Gaussian mechanism of sensitivity over noise sqrt(ROUNDS) / z."""
    for multiplier, luck in ((1.0, 2.8), (4.0, 1.8)):
        result = figures(tmp_path, ServerNoise(multiplier), canary_clients=100)
        estimate, true = result["client_epsilon"], gdp_epsilon(ROUNDS**0.5 / multiplier, DELTA)
        assert abs(estimate.value - true) < luck and estimate.low <= estimate.value <= estimate.high
        assert result["client_epsilon_null"].value < 1.6


def test_pure_noise_gives_about_nothing_and_no_defense_much(tmp_path):
    noise, none = (figures(tmp_path, load_plugin("defenses", name)()) for name in ("full_noise", "none"))
    assert noise["client_epsilon"].value < 1.6 and noise["client_epsilon"].low < 0.6
    assert none["client_epsilon"].low > 50 and none["client_epsilon_null"].value < 1.6


# -- the audit around it -----------------------------------------------------------------------------------------------
def evaluated(out, **options):
    with patch.object(evaluation, "write_board"):
        return evaluation.evaluate(**{**SMALL, **options}, out=out, workers=1)


@pytest.mark.nightly
def test_one_seed_one_result_and_the_sentence_claims_no_bound(tmp_path):
    once, again = (evaluated(tmp_path / folder, rounds=2, canary_clients=20).records for folder in "ab")
    assert [r.model_dump_json() for r in once] == [r.model_dump_json() for r in again] and len(once) == 2
    records = {r.config.defense.id: r for r in once}
    assert records["none"].metric("client_epsilon").value > 10 > records["full_noise"].metric("client_epsilon").value
    assert records["none"].config.audit.canary_clients == 20 and "canary_clients" in {
        f.code for f in records["none"].flags
    }
    (sentence,) = Clients().sentences("none", once)
    assert "An estimate, no bound." in sentence and "absent canaries give" in sentence


def test_an_audit_without_them_is_what_it_was(tmp_path):
    off = dict(canary_clients=0, attacks=("mia_loss",), rounds=1)
    one = audit(tmp_path, NoDefense(), **off)
    fed, plain = one.start(0), one.start(0)
    assert fed.plan is one.experiment.task.plan and not fed.canaries and "clients" not in vars(one)
    with patch.object(Straight, "of", side_effect=AssertionError):
        assert fed.run(1) and plain.run(1)
    (record, _) = evaluated(tmp_path / "out", **off).records
    assert "canary_clients" not in record.config.model_dump(mode="json")["audit"]
    with pytest.raises(UsageError, match="--canary-clients"):
        evaluated(tmp_path / "none", canary_clients=0)


def test_other_clients_compute_what_they_did(tmp_path):
    """The first round's uploads of the clients that hold data are bit for bit those of the audit without canaries."""
    results = []
    for count in (0, 12):
        options = dict(canary_clients=count, attacks=("mia_loss",))
        fed = audit(tmp_path, NoDefense(), **options).start(0)
        fed.wire.keep = True
        assert fed.run(1)
        results.append([m.message for m in fed.wire.mail if m.round == 1 and 0 <= m.sender < 4])
    for alone, beside in zip(*results, strict=True):
        assert all(torch.equal(value, beside.params[name]) for name, value in alone.params.items())


def test_the_attack_needs_directions(tmp_path):
    one = audit(tmp_path, NoDefense())
    view, words = one.start(0).release().view("client/1"), one.clients.challenge()
    (guess,) = CanaryClientAudit().run(view, [words], torch.Generator())
    assert torch.equal(guess.score, torch.zeros(120, dtype=torch.float64)), "the model has not moved yet"
    with pytest.raises(UsageError, match="needs directions"):
        CanaryClientAudit().run(view, [replace(words, extra={})], torch.Generator())
    with pytest.raises(ValueError, match="finite score"):
        score_clients(one.clients.inside, replace(guess, score=guess.score * torch.nan))
