"""Running statistics of batch norms: they move, travel and are read as where frameworks send a whole state dict."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ppbench
import ppbench.run.invert as inversion
from ppbench.adversary.victims import own_batches
from ppbench.attacks.reconstruction.fedavg import trained_evidence
from ppbench.attacks.reconstruction.search.problem import MappedObjective, SimulatedObjective
from ppbench.base.autodiff import gradient, towards
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence, at_truth
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.threats import threat_model
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.net import build, initial, net_spec

SHAPE = (1, 8, 8)
EXACT = 1e-8
STATISTICS = ("1.running_mean", "1.running_var")


def network(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(6) if norm is None else norm
    return nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), middle, nn.Sigmoid(), nn.Flatten(), nn.Linear(96, 10))


torch.manual_seed(1)
X, Y = torch.rand(8, *SHAPE), torch.tensor([3, 1, 0, 2, 5, 7, 9, 4])
TRAINING: dict[str, Any] = {
    "upload": "delta",
    "optimizer": "sgd",
    "lr": 0.1,
    "local_epochs": 1,
    "batch_size": 4,
    "schedule": "parallel",
    "decay_at": (),
}


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 1, size: int = 8, **options: float) -> nn.Module:
    """Return a copy after `steps` steps of plain torch, the batches in order."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), **{"lr": 0.1, **options})
    batches = list(zip(x.split(size), y.split(size), strict=True))
    for step in range(steps):
        optimizer.zero_grad()
        images, labels = batches[step % len(batches)]
        cross_entropy(own(images), labels).backward()
        optimizer.step()
    return own


def pair(model: nn.Module, end: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return copy.deepcopy(model.state_dict()), end.state_dict()


def rows(y: Tensor) -> Tensor:
    return torch.eye(10)[y]


# -- what a step does -------------------------------------------------------------------------------------------------
def test_a_term_moves_a_value_without_a_say_of_what_its_target_depends_on() -> None:
    weight, value, x = torch.tensor(2.0), torch.tensor(5.0), torch.tensor(3.0)

    def steps(x: Tensor) -> Tensor:
        """Two steps: the second slope by x has the first in it."""
        tree = {"weight": weight, "value": value}
        for _ in range(2):
            slopes = gradient(lambda p: p["weight"] ** 2 + towards(p["value"], p["weight"] * x), tree)
            tree = {name: tree[name] - 0.5 * slopes[name] for name in tree}
        return torch.stack([tree["weight"], tree["value"]])

    ends, slopes = steps(x), torch.func.jacrev(steps)(x)
    assert ends.tolist() == [0.0, 0.5 * (0.5 * 5 + 0.5 * 6) + 0.0]
    assert slopes.tolist() == [0.0, 0.5 * 0.5 * 2]
    mapped = torch.func.vmap(steps)(torch.stack([x, x + 1]))
    assert torch.equal(mapped[0], ends) and mapped[1, 1] == 3.25


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_a_round_averages_state_dicts_as_plain_torch(backend: Any, options: dict[str, float]) -> None:
    """Two clients, three epochs of one batch each, so that no shuffle counts; the outputs are those of eval mode."""
    model, parts = network(), [(X[:4], Y[:4]), (X[4:], Y[4:])]
    settings = {**TRAINING, **options, "local_epochs": 3, "backend": backend}
    federation = ppbench.federate(ppbench.load_defense("none"), model, parts, norms="tracked", **settings)
    federation.run(1)
    ends = [trained(model, x, y, 3, **options).state_dict() for x, y in parts]
    mean = {n: torch.stack([end[n].double() for end in ends]).mean(0) for n in ends[0]}
    net, params = federation.plan.net, federation.parties.server.params
    assert {net.own_name(name) for name in params} == {*mean} - {"1.num_batches_tracked"}
    for name, value in params.items():
        torch.testing.assert_close(value.double(), mean[net.own_name(name)], rtol=1e-4, atol=1e-6)
    own = copy.deepcopy(model)
    own.load_state_dict(mean)
    torch.testing.assert_close(federation.outputs(X), own.eval()(X).double(), rtol=1e-4, atol=1e-5)
    assert federation.wire.up == 2 * sum(4 * value.numel() for value in params.values()) + federation.setup_up


def test_without_the_option_nothing_of_it_travels_and_the_weights_move_alike() -> None:
    """Statistics that stay at the client (SiloBN) change no upload: what they add to the view is all that they add."""
    ends = []
    for norms in ("batch", "tracked"):
        fed = ppbench.federate(ppbench.load_defense("none"), network(), [(X, Y)], norms=norms, **TRAINING)
        fed.run(2)
        ends.append(fed.parties.server.params)
    assert len(ends[1]) == len(ends[0]) + 2
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_adam_moves_them_by_the_norms_momentum() -> None:
    settings = {**TRAINING, "optimizer": "adam", "batch_size": 8}
    fed = ppbench.federate(ppbench.load_defense("none"), network(), [(X, Y)], norms="tracked", **settings)
    fed.run(1)
    model = network()
    model(X)
    for name in STATISTICS:
        torch.testing.assert_close(fed.parties.server.params[f"features.{name}"], model.state_dict()[name])


# -- what a view shows ------------------------------------------------------------------------------------------------
def federation_of(defense: Any, clients: int = 2, upload: Any = "gradient") -> Federation:
    """Return a federation of a small residual network of the bench, whose norms are tracked."""
    spec = net_spec("resnet20", (1, 8, 8), 10, {"norm": "tracked"})
    plan = Plan(spec, clients, Local(upload, batch=4, opt=Opt("sgd", 0.1)), server_opt=Opt("sgd", 0.1))
    plan = plan if upload == "gradient" else replace(plan, server_opt=Opt())
    shards = {c: Data(X[4 * c : 4 * c + 4], rows(Y[4 * c : 4 * c + 4])) for c in range(clients)}
    fed = Federation(defense, plan, shards, Seeds(0))
    fed.start(initial(spec, 0))
    return fed


def evidence_of(fed: Federation, threat: str, upload: Any) -> Evidence:
    victims = {Slot(0, client): shard for client, shard in fed.shards.items()}
    transcript = fed.probe(victims, "local" if upload == "delta" else "gradient")
    view = transcript.view(threat, own=own_batches(threat_model(threat), victims))
    return view.defense.evidence(view)[-1]


@pytest.mark.parametrize("upload", ["gradient", "delta"])
@pytest.mark.parametrize(
    ("defense", "threat"),
    [("none", "server/1"), ("none", "client/1"), ("secagg", "server/1"), ("secagg", "collusion/1")],
)
def test_the_truth_explains_what_each_party_sees(defense: str, threat: str, upload: Any) -> None:
    fed = federation_of(ppbench.load_defense(defense), 2, upload)
    piece = evidence_of(fed, threat, upload)
    x, y = (torch.stack([getattr(fed.shards[slot.client], part) for slot in piece.unit]) for part in ("x", "y"))
    assert len(piece.statistics) == len(fed.plan.net.statistics) > 0
    assert at_truth(piece, x, y) < 1e-6
    assert at_truth(piece, 1 - x, y) > 1e-2
    apart = replace(piece, observed={n: o + (n in piece.statistics) for n, o in piece.observed.items()})
    assert at_truth(apart, x, y) > 1e-2  # they are compared


def test_noise_that_makes_a_variance_negative_leaves_outputs_finite() -> None:
    noisy = ppbench.load_defense("dp", sigma=50.0)
    fed = ppbench.federate(noisy, network(), [(X, Y)], norms="tracked", **{**TRAINING, "batch_size": 8})
    fed.run(1)
    assert min(float(v.min()) for n, v in fed.parties.server.params.items() if n.endswith("var")) < 0
    assert bool(fed.outputs(X).isfinite().all())


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (4, 0.0), (4, 0.9)])
def test_the_truth_explains_both_state_dicts(steps: int, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, views = network(), list[View]()
    end = trained(model, X, Y, steps, size=8 if steps == 1 else 4, momentum=momentum)
    original = inversion.view_of
    monkeypatch.setattr(inversion, "view_of", lambda *a: views.append(original(*a)) or views[-1])
    options: dict[str, Any] = {"planted": False, "budget": 2}
    if steps > 1:
        own = {"momentum": momentum} if momentum else {}
        options |= {"training": {"lr": 0.1, "local_epochs": 2, "batch_size": 4, **own}}
    else:
        options |= {"attack": "ig"}
    ppbench.invert(model, pair(model, end), SHAPE, Y, **options)
    (piece,) = trained_evidence(views[0])
    assert at_truth(piece, X[None], rows(Y)[None]) < EXACT and [*piece.statistics] == [
        f"features.{n}" for n in STATISTICS
    ]


def test_victims_that_are_searched_together_are_compared_as_each_alone() -> None:
    fed = federation_of(ppbench.load_defense("none"))
    view = fed.probe({Slot(0, client): shard for client, shard in fed.shards.items()}, "gradient").view("server/1")
    pieces = [replace(e, observed={n: v.double() for n, v in e.observed.items()}) for e in view.defense.evidence(view)]
    x, y = torch.rand(2, 4, *SHAPE).double(), torch.stack([shard.y for shard in fed.shards.values()]).double()
    guess = x, y, torch.zeros(2, 0).double(), torch.arange(2)
    objectives = MappedObjective(pieces, torch.float64), SimulatedObjective(pieces)
    for one, other in zip(*(objective(*guess) for objective in objectives), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


# -- what an attack makes of them -------------------------------------------------------------------------------------
class Leaking(nn.Module):
    """Its gradient says how often each class comes; mean and variance of its inputs, pixel by pixel, say the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc = nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10)
        self.fc.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x.flatten(1)))


def test_a_planted_leak_is_found_with_the_statistics_alone(digits: Data) -> None:
    model, x = Leaking(), digits.x[:1].repeat(2, 1, 1, 1) + torch.tensor([0.0, 0.02]).view(2, 1, 1, 1)
    update = pair(model, trained(model, x, Y[:2]))
    options: dict[str, Any] = {"attack": "idlg", "planted": False, "budget": 60}
    seen = ppbench.invert(model, update, SHAPE, Y[:2], **options)
    blind = ppbench.invert(model, update, SHAPE, Y[:2], statistics=False, **options)
    assert min(seen.psnr(x)) > 25 and max(blind.psnr(x)) < 15


def test_a_variance_far_off_does_not_drown_what_else_is_seen() -> None:
    """Rough images, where searches begin, have many times the variance of an edge filter's channel on smooth ones."""
    rest = {"weight": torch.ones(2)}

    def left(**errors: float) -> float:
        names = [f"norm.{name}" for name in ("running_mean", "running_var")]
        observed = {**rest, **{name: torch.zeros(3) for name in names}}
        known = {name: torch.full((2, 3), 2.0) for name in names}
        piece = Evidence((Slot(0, 0),), observed, lambda: rest, statistics=known)
        changed = {name: torch.full((3,), errors.get(name.removeprefix("norm.running_"), 0.0)) for name in names}
        return float(piece.discrepancy({**rest, **changed}))

    away = {"near": left(var=0.005), "far": left(var=500.0), "mean": left(mean=0.005)}
    assert left() == 0 and away["near"] == pytest.approx(away["mean"], rel=1e-3)
    assert left(mean=500.0) == pytest.approx(1e10 * away["mean"], rel=1e-3)
    assert away["far"] < 1e6 * away["near"]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(6).eval(),
        nn.BatchNorm2d(6, momentum=None),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.GroupNorm(2, 6),
    ],
)
def test_what_does_not_move_by_a_share_is_no_part_of_it(norm: nn.Module) -> None:
    model = network(norm)
    update = pair(model, trained(model, X, Y))
    options: dict[str, Any] = {"attack": "idlg", "planted": False, "budget": 3}
    answers = [ppbench.invert(model, update, SHAPE, Y, statistics=use, **options) for use in (True, False)]
    assert torch.equal(answers[0].x, answers[1].x) and answers[0].mismatch == answers[1].mismatch


def test_statistics_that_were_not_sent_are_no_part_of_it() -> None:
    model = network()
    before, after = pair(model, trained(model, X, Y))
    kept = {**after, **{name: before[name] for name in STATISTICS}}
    options: dict[str, Any] = {"attack": "idlg", "planted": False, "budget": 3}
    missing = {n: v for n, v in after.items() if n not in STATISTICS}
    expected = ppbench.invert(model, (before, after), SHAPE, Y, statistics=False, **options)
    for end in (kept, missing):
        assert torch.equal(ppbench.invert(model, (before, end), SHAPE, Y, **options).x, expected.x)
    assert not torch.equal(ppbench.invert(model, (before, after), SHAPE, Y, **options).x, expected.x)


def test_norms_that_stay_with_their_client_are_unknown() -> None:
    """FedBN: neither state dict has them, as if a gradient by name lacked them; what one dict lacks is a mistake."""
    model = network()
    sent = [{n: v for n, v in end.items() if not n.startswith("1.")} for end in pair(model, trained(model, X, Y))]
    options: dict[str, Any] = {"attack": "idlg", "planted": False, "budget": 3}
    one = ppbench.invert(model, tuple(sent), SHAPE, Y, **options)
    other = ppbench.invert(model, {n: v - sent[1][n] for n, v in sent[0].items()}, SHAPE, Y, **options)
    assert one.unseen == other.unseen == ("1.weight", "1.bias")
    torch.testing.assert_close(one.x, other.x, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"one lacks '1\.weight'"):
        ppbench.invert(model, (pair(model, model)[0], sent[1]), SHAPE, Y, **options)


def test_a_factor_of_the_gradient_is_none_of_the_statistics() -> None:
    """The rate is unknown; the planted control, a client of the bench, sends statistics too."""
    model = network()
    ends = [trained(model, X[:2], Y[:2], lr=lr) for lr in (0.1, 0.4)]
    options: dict[str, Any] = {"attack": "ig", "budget": 12}
    one, other = (ppbench.invert(model, pair(model, end), SHAPE, Y[:2], **options) for end in ends)
    assert one.scale == pytest.approx(0.1, rel=1e-3) and other.scale == pytest.approx(0.4, rel=1e-3)
    torch.testing.assert_close(one.x, other.x, rtol=0, atol=0.05)
    assert one.planted is not None


# -- refusals ---------------------------------------------------------------------------------------------------------
class Twice(nn.Module):
    """Passes one norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(torch.tanh(self.norm(x.flatten(1)))))


def refused(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments, **options)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_what_cannot_be_done_is_refused_in_a_sentence() -> None:
    none, spn, parts = ppbench.load_defense("none"), ppbench.load_defense("spn", alpha2=0.1), [(X, Y)]
    sentence = refused(ppbench.federate, spn, network(), parts, norms="tracked")
    assert "Defense 'spn' cannot be used with running statistics" in sentence
    assert "no batch norm" in refused(ppbench.federate, none, network(nn.Identity()), parts, norms="tracked")
    assert "it must be 'batch' or 'tracked'" in refused(ppbench.federate, none, network(), parts, norms="running")
    fed = ppbench.federate(none, Twice(), parts, norms="tracked", **TRAINING)
    assert "passes its norm 'norm' twice" in refused(fed.run, 1)
    spec = net_spec("somebodys:LeNet", (1, 8, 8), 10, {"norms": "tracked"})
    assert "it has no batch norm that moves" in refused(build, spec)
    model = network()
    update = pair(model, trained(model, X, Y))
    assert "statistics='no' cannot be used" in refused(ppbench.invert, model, update, SHAPE, Y, statistics="no")
