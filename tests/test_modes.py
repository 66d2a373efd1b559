"""Networks are taken in the mode that each of their layers is in; what is frozen is constant."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import somebodys
import torch
import torch.nn.functional as F
import users_networks as users
from daily import all_but_nightly
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import ppbench
from ppbench.adversary.attack import Attack
from ppbench.base.errors import UsageError
from ppbench.federation.contract import plain_evidence
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Local, Plan
from ppbench.nets.model_object import HeldNetwork, held_network
from ppbench.nets.modes import drawing, run_module
from ppbench.nets.net import Net, _built, build, initial, net_spec
from ppbench.run.loop import load_attack
from ppbench.run.update_view import view_of

EXACT = 1e-10


def unexplained(case: users.Case, network: HeldNetwork) -> float:
    """Return the share of a user's gradient that our simulation at the true batch does not explain."""
    seen = dict(zip(network.names, case.gradient, strict=True))
    plan = Plan(network.spec, 1, Local("gradient", batch=len(case.x)))
    (evidence,) = plain_evidence(view_of(plan, network.spec.start, seen))
    return at_truth(evidence, case.x[None], torch.eye(network.spec.classes)[case.y][None])


# -- the whole kind ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "seed", all_but_nightly(range(2 * len(users.LAYERS)), range(len(users.LAYERS), 2 * len(users.LAYERS)))
)
def test_a_drawn_network_is_simulated_exactly_or_refused_truly(seed: int) -> None:
    """Layers, modes by layer, what is frozen, containers: every layer comes first twice. No third outcome."""
    case = users.case(seed)
    if case.refusal:
        with pytest.raises(UsageError, match=case.refusal):
            held_network(case.module, users.SHAPE)
    else:
        assert unexplained(case, held_network(case.module, users.SHAPE)) < EXACT, case.about


@pytest.mark.parametrize(
    ("kinds", "container", "frozen"),
    [
        ([("flag", False)], "written", "nothing"),
        pytest.param([("instance norm", False)], "sequential", "nothing", marks=pytest.mark.nightly),
        pytest.param(
            [("functional dropout", False), ("rrelu", False)], "nested", "the head's bias", marks=pytest.mark.nightly
        ),
        pytest.param([("spectral norm", True)], "sequential", "nothing", marks=pytest.mark.nightly),
        pytest.param([("drop path", False)], "auxiliary", "the head", marks=pytest.mark.nightly),
        pytest.param([("transformer", False)], "written", "nothing", marks=pytest.mark.nightly),
        pytest.param([], "sequential", "the head", marks=pytest.mark.nightly),
        ([], "sequential", "all but the middle"),
    ],
)
def test_it_is_inverted_as_the_same_network_by_formula(kinds: Any, container: str, frozen: str) -> None:
    """On e33b5cd: 8.6 dB at a layer with `if self.training`, refusals, `KeyError: 'head.bias'`."""
    if not kinds:
        kinds = [("drop path", False)]
    case = users.build(kinds, container, frozen, training=False, batch=1, seed=3)
    options: dict[str, Any] = {"labels": case.y, "attack": "dlg", "budget": 250, "restarts": 0}
    inversion = ppbench.invert(case.module, case.gradient, users.SHAPE, **options)
    plain = ppbench.invert(case.plain, case.plain_gradient(), users.SHAPE, **options)
    decibels, expected = (min(one.psnr(case.x)[0], 60) for one in (inversion, plain))
    assert decibels == pytest.approx(expected, abs=1)
    assert decibels > 40 or frozen != "nothing"


# -- what draws -------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """Dropout in its own forward, by a function, behind a norm of its own."""

    def __init__(self, p: float = 0.5, always: bool = False) -> None:
        super().__init__()
        self.norm, self.p, self.always = nn.BatchNorm1d(16), p, always

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(x), self.p, training=self.training or self.always)


class Net1(nn.Module):
    """A hidden layer, a block, a head."""

    def __init__(self, num_classes: int = 10, **options: Any) -> None:
        super().__init__()
        self.hidden, self.block, self.fc = nn.Linear(64, 16), Block(**options), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.block(self.hidden(x.flatten(1)))))
        return out


def refused(model: nn.Module) -> str:
    with pytest.raises(UsageError) as error:
        held_network(model, users.SHAPE)
    assert str(error.value).count("\n") == 0
    return str(error.value)


def test_the_sentence_names_the_layer_that_draws_and_what_to_do() -> None:
    right = "its layer block (Block) draws at random in each pass in training mode; put it into eval mode before"
    assert right in refused(Net1())
    model = Net1()
    model.block.training = False  # alone: its norm goes on in training mode
    assert build(held_network(model, users.SHAPE).spec).mixes
    assert not build(held_network(Net1().eval(), users.SHAPE).spec).mixes
    always = refused(Net1(always=True).eval())
    assert "block (Block) draws at random in each pass, in eval mode too; let it do so in training mode" in always


class Private(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.generator = nn.Linear(64, 10), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1) + torch.rand(1, generator=self.generator))
        return out


def test_draws_of_any_generator_are_seen_and_none_is_moved() -> None:
    numpys = users.Function(lambda x, t: x * float(np.random.rand()) if t else x)
    module, x = nn.Sequential(users.LayerDrop(), numpys, nn.RReLU()), torch.rand(2, users.WIDTH, 4, 4)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert drawing(module, x) == ["0", "1", "2"] and drawing(module.eval(), x) == []
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_draws_of_a_generator_of_ones_own_are_seen() -> None:
    assert "it answers equal inputs otherwise in each pass" in refused(Private())


def test_a_pass_leaves_buffers_and_the_users_module_alone() -> None:
    norm = users.HandNorm()
    out, written = run_module(norm, torch.rand(2, users.WIDTH, 4, 4))
    assert written == {"mean", "var"} and not norm.mean.any() and out.shape == (2, users.WIDTH, 4, 4)
    case = users.build([("batch norm by hand", True), ("old spectral norm", True)], "written", "nothing", True, 2, 0)
    before = {name: value.clone() for name, value in case.module.state_dict().items()}
    modes = [part.training for part in case.module.modules()]
    net = held_network(case.module, users.SHAPE).spec.net
    kept = {name: value.clone() for name, value in net.frozen.items()}
    net(initial(net.spec, 0), case.x)
    assert all(torch.equal(value, before[name]) for name, value in case.module.state_dict().items())
    assert [part.training for part in case.module.modules()] == modes
    assert all(torch.equal(value, kept[name]) for name, value in net.frozen.items())


@pytest.mark.parametrize("kind", ["batch norm by hand", "attention", "transformer", "old weight norm", "spectral norm"])
def test_it_can_be_attacked_twice_differentiated_and_mapped(kind: str) -> None:
    case = users.build([(kind, kind not in users.DRAWING)], "sequential", "nothing", False, 2, 0)
    net = held_network(case.module, users.SHAPE).spec.net
    params = initial(net.spec, 0)

    def length(params: dict[str, Tensor], x: Tensor) -> Tensor:
        slopes = grad(lambda p: F.cross_entropy(net(p, x), case.y))(params)
        return torch.stack([value.square().sum() for value in slopes.values()]).sum()

    x = torch.stack([case.x, 1 - case.x])
    many = vmap(grad(length, argnums=1), in_dims=(None, 0))(params, x)
    torch.testing.assert_close(many[1], grad(length, argnums=1)(params, x[1]), rtol=1e-3, atol=1e-6)
    each = {name: torch.stack([value, 2 * value]) for name, value in params.items()}
    assert vmap(net)(each, x).shape == (2, 2, users.CLASSES)


# -- by address -------------------------------------------------------------------------------------------------------
def by_address(name: str, **options: Any) -> Net:
    return build(net_spec(f"somebodys:{name}", users.SHAPE, 10, options))


def test_dropout_off_puts_exactly_what_draws_into_eval_mode() -> None:
    with pytest.raises(
        UsageError, match=r"its layer drop \(DropPath\) draws .* in training mode; take the option dropout"
    ):
        by_address("Paths")
    net = by_address("Paths", dropout="off")
    inner = net.module.features
    assert [inner.drop.training, inner.noise.training, inner.norm.training, inner.training] == [
        False,
        False,
        True,
        True,
    ]
    assert net.mixes and by_address("Paths", dropout="off", norms="running").mixes is False


def test_a_network_with_auxiliary_heads_answers_as_in_eval_mode_its_layers_do_not() -> None:
    _built.cache_clear()
    with torch.no_grad():  # as where an attack asks for it
        net = by_address("Auxiliary")
    assert net.mixes and not net.module.features.training and net.module.features.norm.training
    x, params = torch.rand(3, *users.SHAPE), initial(net.spec, 0)
    assert net(params, x).shape == (3, 10)
    assert "answers by tuple in training mode" in refused(somebodys.Auxiliary())
    assert held_network(somebodys.Auxiliary().eval(), users.SHAPE).spec.classes == 10


def test_what_is_frozen_is_the_same_in_every_process() -> None:
    """On e33b5cd it came of whatever was drawn before, so that workers computed cells of other names."""
    spec = net_spec("somebodys:Frozen", users.SHAPE, 10)
    first = build(spec).weights_sha256
    _built.cache_clear()
    torch.rand(7)
    assert build(spec).weights_sha256 == first and set(build(spec).frozen) == {"head.weight", "head.bias"}


def test_a_network_with_a_frozen_head_is_evaluated(tmp_path: Path) -> None:
    """On e33b5cd: exit 70."""
    done = ppbench.evaluate(
        defense="none", out=tmp_path, workers=1, model="somebodys:Frozen", clients=2, rounds=1, victims=2, candidates=8,
        stages=("init",), attacks=("idlg",), budget=30, attack_batch=(1,), tuning=0,
    )  # fmt: skip
    assert [record.error for record in done.records if record.status != "complete"] == []
    assert "idlg" in {record.config.attack.id for record in done.records}
    with pytest.raises(UsageError, match="Attack 'label_recovery' has no use for model 'somebodys:Frozen'"):
        ppbench.evaluate(defense="none", out=tmp_path, workers=1, model="somebodys:Frozen", attacks=("label_recovery",))


# -- what is frozen ---------------------------------------------------------------------------------------------------
def frozen(*names: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


X, Y = torch.rand(6, *users.SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


@pytest.mark.parametrize(
    ("defense", "names"),
    [
        pytest.param(defense, names, marks=pytest.mark.battery(defense, names))
        for defense in ["none", "spn", "fedpc", "baffle", "dp_sgd"]
        for names in [("5",), ("5.bias",), ("5.weight",), ("0", "3")]
    ],
)
def test_frozen_layers_stay_where_they_are_in_a_federation(defense: str, names: tuple[str, ...]) -> None:
    federation = ppbench.federate(ppbench.load_defense(defense), frozen(*names), [(X, Y), (X * 0.9, Y), (X * 0.8, Y)])
    net = federation.plan.net
    assert net.frozen_parameters and set(net.frozen_parameters).isdisjoint(net.names)
    before = net.weights_sha256
    federation.run(1)
    assert federation.outputs(X).isfinite().all() and net.weights_sha256 == before
    view, challenges = ppbench.probe(federation, [(X[:1], Y[:1])] * 3)
    attack: Attack = load_attack("label_recovery")
    assert attack.suits(federation.plan) is (names != ("5",))
    if attack.suits(federation.plan):
        assert attack.run(view, challenges, torch.Generator().manual_seed(0))[0].y is not None


@pytest.mark.parametrize("defense", ["pbpfl", "pbpfl_ext", "mpdp", "mp_cdp", "pile"])
@pytest.mark.parametrize("name", ["5.bias", "5.weight", "0.weight"])
def test_perturbing_defenses_refuse_what_is_frozen_by_name(defense: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"Layer '{name}' is frozen, so it cannot be perturbed exactly"):
        ppbench.federate(ppbench.load_defense(defense), frozen(name), [(X, Y), (X, Y), (X, Y)])


@pytest.mark.parametrize("defense", ["pbpfl", "pbpfl_ext", "mpdp", "mpdp_h", "mp_cdp", "mp_dp_naive", "pile"])
def test_perturbing_defenses_refuse_what_has_no_linear_head(defense: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 8), nn.Flatten())
    right = (
        "Model 'Sequential' has no linear head: its logits are not the output of an nn.Linear.* use one that ends in"
    )
    with pytest.raises(UsageError, match=right):
        ppbench.federate(ppbench.load_defense(defense), model, [(X, Y), (X, Y), (X, Y)])


def test_defenses_call_layers_by_the_users_names_and_name_no_option_of_the_command_line() -> None:
    def sentence(defense: str, *layers: nn.Module) -> str:
        model = nn.Sequential(nn.Flatten(), *layers)
        with pytest.raises(UsageError) as error:
            ppbench.federate(ppbench.load_defense(defense), model, [(X, Y), (X, Y), (X, Y)])
        assert "--" not in str(error.value) and "model." not in str(error.value)
        return str(error.value)

    biased = nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 4)
    for defense in ("mpdp", "mp_cdp"):
        words = sentence(defense, *biased)
        assert "has the parameter '3.bias', whose noise would not be Gaussian" in words
        assert words.endswith("use a network without biases, as nn.Linear(..., bias=False).")
    assert sentence("pbpfl", nn.Linear(64, 16), nn.Sigmoid(), biased[2]).startswith("Layer '2' (Sigmoid)")
    assert sentence("mpdp", nn.Linear(64, 16), nn.BatchNorm1d(16), biased[2]).startswith("Layer '2' (BatchNorm1d)")
    nested = nn.Sequential(OrderedDict(features=nn.Sequential(nn.Linear(64, 16), nn.Sigmoid()), head=biased[2]))
    assert sentence("mp_cdp", nested).startswith("Layer '1.features.1' (Sigmoid)")
    normed = nn.Linear(64, 16), nn.BatchNorm1d(16), biased[2]
    assert sentence("dp_sgd", *normed).endswith("use group norm, or norm.eval().")


def gradient_of(model: nn.Module, count: int = 1) -> list[Tensor]:
    return users.gradient_of(model, X[:count], Y[:count])


@pytest.mark.parametrize(
    ("attack", "names"),
    [
        pytest.param(attack, names, marks=pytest.mark.battery(attack, names))
        for attack in ["dlg", "idlg", "ig", "analytic", "spear", "peel", "feature_inversion", "closed_form"]
        for names in [("5",), ("5.bias",), ("5.weight",), ("0",), ("0.bias",), ("3.weight",), ("3.bias",), ("0", "3")]
    ],
)
def test_every_attack_computes_with_constants_or_is_refused(attack: str, names: tuple[str, ...]) -> None:
    """A frozen bias taken for none, or a frozen weight for one that was observed, would be a silent wrong answer."""
    model = frozen(*names)
    own = {"feature_inversion": {"joint_budget": 20, "inversion_budget": 20}, "closed_form": {}}
    options = own.get(attack, {"budget": 20})
    try:
        inversion = ppbench.invert(model, gradient_of(model), users.SHAPE, Y[:1], attack, **options)
    except UsageError as error:
        refusing = ("analytic", "spear", "peel", "feature_inversion", "closed_form")
        assert attack in refusing and "has no use for" in str(error)
        return
    assert inversion.x.isfinite().all()
    exact = {"peel": ("0", "3"), "closed_form": ("0", "3"), "feature_inversion": ("5",)}
    needs = {"analytic": ("0",), "spear": ("0",), **exact}.get(attack, ())
    assert not any(name.startswith(needs) for name in names if needs)


@pytest.mark.parametrize("names", [("3.bias",), ("5",), ("5.weight",), ("5.bias",)])
def test_a_first_layer_is_read_exactly_with_or_without_its_bias_or_the_heads(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*frozen(*names)[2:4], nn.ReLU(), nn.Linear(16, 4))
    model[3].load_state_dict(frozen()[5].state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            f"{int(name[0]) + 2}{name[1:]}" not in {*names, *(f"{n}.{p}" for n in names for p in ("weight", "bias"))}
        )
    inversion = ppbench.invert(model, gradient_of(model), users.SHAPE, attack="analytic")
    assert inversion.psnr(X[:1])[0] > 80 and inversion.mismatch is not None and inversion.mismatch < 1e-9


def test_labels_are_read_off_a_bias_alone() -> None:
    """BitFit: biases alone are trained; the gradient of the head's is exact."""
    model = frozen("0.weight", "3.weight", "5.weight")
    for place in range(4):
        gradient = users.gradient_of(model, X[place : place + 1], Y[place : place + 1])
        inversion = ppbench.invert(model, gradient, users.SHAPE, attack="idlg", budget=1)
        assert inversion.y is not None and inversion.y.tolist() == [int(Y[place])]


class Adapted(nn.Module):
    """LoRA around a layer, which is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.3 * torch.randn(4, base.in_features))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


@pytest.mark.parametrize("around", all_but_nightly(["the hidden layer", "the head", "both"], ["the head", "both"]))
def test_adapters_alone_give_their_input_away(around: str) -> None:
    torch.manual_seed(0)
    hidden: nn.Module = Adapted(nn.Linear(64, 32)) if around != "the head" else nn.Linear(64, 32).requires_grad_(False)
    head: nn.Module = (
        Adapted(nn.Linear(32, 4)) if around != "the hidden layer" else nn.Linear(32, 4).requires_grad_(False)
    )
    model = nn.Sequential(nn.Flatten(), hidden, nn.Tanh(), head)
    inversion = ppbench.invert(model, gradient_of(model), users.SHAPE, budget=300)
    assert inversion.y is not None and inversion.y.tolist() == [0]
    assert inversion.psnr(X[:1])[0] > 40 or around == "the head"


def test_a_network_with_nothing_to_train_is_refused() -> None:
    message = refused(frozen("0", "3", "5"))
    assert message == "Model 'Sequential' has no parameter that requires a gradient; leave one to be trained."
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        ppbench.federate(ppbench.load_defense("none"), frozen("0", "3", "5"), [(X, Y), (X, Y)])


class Tempered(nn.Module):
    """Logits over a temperature, which is 1 at first: the last linear layer's output looks like the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc, self.t = nn.Linear(64, 16), nn.Linear(16, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.body(x.flatten(1)))) / self.t
        return out


def test_a_last_layer_is_the_head_only_if_nothing_else_has_a_say_in_the_logits() -> None:
    """An adapter begins with 0, a temperature with 1, a hook doubles what the layer gives."""
    torch.manual_seed(0)
    adapted = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), Adapted(nn.Linear(16, 4)))
    nn.init.zeros_(adapted[3].up)
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4))
    hooked[3].register_forward_hook(lambda _, __, out: 2 * out)
    for model in (adapted, Tempered(), hooked):
        gradient = gradient_of(model)
        case = users.Case("", model, model, X[:1], Y[:1], gradient, "")
        assert unexplained(case, held_network(case.module, users.SHAPE)) < EXACT
        assert ppbench.invert(model, gradient, users.SHAPE, Y[:1], budget=250).psnr(X[:1])[0] > 40


# -- what forward passes do besides -----------------------------------------------------------------------------------
class Keeps(nn.Module):
    """Keeps activations, casts its input, and holds a constant in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.fc, self.kept, self.mix = (
            nn.Linear(64, 16),
            nn.Linear(16, 10),
            list[Tensor](),
            [torch.eye(64)],
        )

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.hidden(x.float().flatten(1) @ self.mix[0]))
        self.kept.append(self.last)
        out: Tensor = self.fc(self.last)
        return out


def test_activations_that_are_kept_casts_and_loose_constants_do_no_harm() -> None:
    torch.manual_seed(0)
    model = Keeps()
    gradient = users.gradient_of(model, X[:1], Y[:1])
    inversion = ppbench.invert(model, gradient, users.SHAPE, budget=150)
    assert inversion.psnr(X[:1])[0] > 40 and len(model.kept) == 1


def test_what_an_attack_cannot_compute_is_told() -> None:
    """Distances to anchors, whose gradient torch has no derivative of; a recurrent layer, which vmap does not take."""
    anchors = torch.rand(8, 16)
    distances = users.constant(lambda x: torch.cdist(x, anchors.to(x)))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), distances, nn.Linear(8, 4))
    with pytest.raises(
        UsageError, match="'Sequential' cannot be attacked so: its gradient has no derivative by the inp"
    ):
        ppbench.invert(model, gradient_of(model), users.SHAPE, attack="dlg", budget=5)
    assert ppbench.invert(model, gradient_of(model), users.SHAPE, Y[:1], "analytic").psnr(X[:1])[0] > 80
    case = users.build([("gru", False)], "sequential", "nothing", training=False, batch=1, seed=0)
    with pytest.raises(UsageError, match=r"torch.func.vmap does not take it .*; take an attack that does without"):
        ppbench.invert(case.module, case.gradient, users.SHAPE, attack="feature_inversion", inversion_budget=5)


class Moving(nn.Module):
    """In training mode, subtracts a mean that each pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.fc = nn.Linear(64, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(x.flatten(1)))
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        out: Tensor = self.fc(hidden - self.mean)
        return out


class Checkpointed(nn.Module):
    """Computes its hidden layer again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.fc = nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(checkpoint(self.hidden, x.flatten(1), use_reentrant=False)))
        return out


class Doubles(Checkpointed):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.hidden(x.flatten(1).mul_(2))))
        return out


def test_what_a_pass_leaves_computes_again_or_overwrites() -> None:
    assert "what it answers depends on what the pass before left in it; put it into eval mode" in refused(Moving())
    assert held_network(Moving().eval(), users.SHAPE).spec.classes == 4
    assert "it computes layers again in the backward pass (torch.utils.checkpoint)" in refused(Checkpointed())
    assert "is TorchScript; give the nn.Module" in refused(torch.jit.trace(frozen(), X[:1]))
    torch.manual_seed(0)
    model = Doubles()
    gradient = users.gradient_of(model, X[:1].clone(), Y[:1])
    assert ppbench.invert(model, gradient, users.SHAPE, Y[:1], budget=250).psnr(X[:1])[0] > 40


@pytest.mark.nightly
def test_wrappers_of_torch_are_seen_through_and_names_are_theirs() -> None:
    model = nn.DataParallel(frozen())
    named = dict(zip(dict(model.named_parameters()), gradient_of(model), strict=True))
    assert "module.0.weight" in named
    inversion = ppbench.invert(model, named, users.SHAPE, Y[:1], budget=20)
    assert torch.equal(inversion.x, ppbench.invert(model.module, gradient_of(model), users.SHAPE, Y[:1], budget=20).x)


def test_layers_that_only_look_like_ones_that_are_known_have_no_fast_form() -> None:
    class Halved(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    class Shifted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x - 0.5)
            return out

    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4)
    with pytest.raises(UsageError, match="has no use for"):
        ppbench.invert(Shifted(*layers), gradient_of(Shifted(*layers)), users.SHAPE, attack="analytic")
    halved = nn.Sequential(Halved(1, 8, 5, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4))
    assert ppbench.invert(halved, gradient_of(halved), users.SHAPE, Y[:1], budget=250).psnr(X[:1])[0] > 40
