"""`ppbench.invert`: an attack on somebody's own gradient, who need not know what a federation is.

The gradient is put into the view of an undefended federation's server, which holds the weights and one upload, and the
question is asked as the bench asks it: nothing of an attack is done otherwise here. Equal weights, gradient and seed
give the guess of a bench's cell of one victim at initial weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.reading import readable
from ppbench.base.blame import guard
from ppbench.base.device import check_device
from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, moved
from ppbench.federation.evidence import at_truth
from ppbench.federation.messages import Model, Update
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot, Wire
from ppbench.metrics.image import match, psnr
from ppbench.nets.held import Held, explained, held
from ppbench.nets.net import NetSpec
from ppbench.questions.base import question_of
from ppbench.records.schema import Scalar
from ppbench.run.choice import built_for, make_attack, make_defense
from ppbench.run.handed import check_batch, one_hot_of, range_of, shape_of, whole
from ppbench.run.scene import attack_seed

THREAT = "server/1"
ASKED = (Slot(0, 0),)
MOST = 100_000
"""Examples in a batch, at most."""
Gradient = Sequence[Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Inverted:
    """What an attack made of a gradient.

    Attributes:
        x: the inputs that it found, [B, *shape] float32 on the CPU, not clipped, in no particular order.
        y: their labels [B] int64, in the order of `x`; None where the attack found nothing to go by.
        mismatch: share of the gradient's squared norm that `x` and `y` do not explain: 0 for all explained, 1 for what
            explains nothing, more for worse. None without `y`.
        evaluations: gradients that the attack computed.
        data_range: of an input's values.
    """

    x: Tensor
    y: Tensor | None
    mismatch: float | None
    evaluations: int
    data_range: tuple[float, float] = (0.0, 1.0)

    def psnr(self, truth: Tensor) -> list[float]:
        """Return how close `x` comes to the true inputs [B, *shape], in their order: dB, clipped, at most 100.

        Each is compared with the one found that the least squares assign to it; one that is not finite has 0 dB.
        UsageError: `truth` has another shape than `x`.
        """
        if truth.shape != self.x.shape:
            raise UsageError(f"The truth has shape {tuple(truth.shape)}; it must be {tuple(self.x.shape)}.")
        found = self.x[match(self.x, truth, self.data_range)]
        return [psnr(one, true, self.data_range) or 0.0 for one, true in zip(found, truth, strict=True)]


def invert(
    model: Module,
    gradient: Gradient,
    shape: Sequence[int],
    labels: Tensor | Sequence[int] | None = None,
    attack: str | Attack = "dlg",
    *,
    batch: int | None = None,
    seed: int = 0,
    device: str | None = None,
    data_range: tuple[float, float] = (0.0, 1.0),
    **parameters: Scalar,
) -> Inverted:
    """Return the inputs, and their labels, that an attack rebuilds from the gradient of a batch.

    Args:
        model: a network that answers by logits, with the weights at which the gradient was taken, each layer in the
            mode (`train`, `eval`) in which it was. It is left as it is.
        gradient: of the mean cross-entropy of the batch, as `torch.autograd.grad` gives it: one tensor a parameter that
            requires a gradient, in the order of `model.parameters()`; or tensors by the names of
            `model.named_parameters()`. Of a sum over the batch: divided by the batch's size first.
        shape: of one input, without the batch, as (3, 32, 32).
        labels: the batch's classes [B], where the attacker knows them.
        attack: a reconstruction attack by its name, as `ppbench list attacks` has them, or of `load_attack`.
        batch: examples in the batch; by default as many as `labels`, else 1.
        seed: of the attack's draws: one seed, one result.
        device: where it is computed, as torch names it; by default where the gradient lies.
        data_range: least and greatest value of an input, where searches begin (in its middle) and end.
        parameters: of the attack, as `budget=3000`.

    Raises UsageError, one sentence: any of these cannot be used, or the attack needs more than a gradient.
    """
    network, chosen = held(model, shape_of(shape)), _chosen(attack, parameters)
    asked = _asked(labels, batch, network.spec)
    plan = Plan(network.spec, 1, Local("gradient", batch=asked.batch), data_range=range_of(data_range))
    check_batch(plan, asked.batch)
    seen = _named(gradient, network)
    check_device(device or "cpu")
    place = torch.device(device) if device else next(iter(seen.values())).device
    view = view_of(plan, moved(network.spec.start, place), moved(seen, place))
    draws = attack_seed(Seeds(whole("seed", seed, 0, 2**63 - 1)), chosen.name, THREAT, "init", asked.batch)
    with guard("attacks", chosen.name), explained(network):
        _check_fit(chosen, view, asked)
        (guess,) = chosen.run(view, [asked], torch.Generator().manual_seed(draws))
        return _told(view, guess)


def view_of(plan: Plan, params: Params, gradient: Params) -> View:
    """Return what the server of an undefended federation sees of one upload, a gradient at `params`."""
    wire = Wire(keep=True)
    wire.post(0, 1, 0, SERVER, [0], Model(params))
    wire.post(0, 1, 0, 0, [SERVER], Update(gradient))
    return View(THREAT, SERVER, plan, make_defense("none"), tuple(wire.mail), ())


def _told(view: View, guess: Guess) -> Inverted:
    if guess.x is None:
        raise UsageError("The attack answered without inputs; take another.")
    mismatch = None
    if guess.y is not None:
        evidence = view.defense.evidence(view)[0]
        y = one_hot(guess.y, view.plan.spec.classes)[None].to(evidence.device)
        mismatch = at_truth(evidence, guess.x[None].to(evidence.device), y)
    return Inverted(guess.x, guess.y, mismatch, guess.evaluations, view.plan.data_range)


def _chosen(attack: str | Attack, parameters: Mapping[str, Scalar]) -> Attack:
    if isinstance(attack, str):
        return make_attack(attack, parameters)
    if not isinstance(attack, Attack):
        raise UsageError(f"The attack is {shown(attack, 60)}; give a name, as 'dlg', or what load_attack gives.")
    if parameters:
        raise UsageError(f"Parameter {next(iter(parameters))!r} is of an attack that is given whole; tell load_attack.")
    attack.check()
    return attack


def _check_fit(attack: Attack, view: View, asked: Challenge) -> None:
    """Refuse an attack that needs more than a gradient and weights, or another network (UsageError)."""
    obstacle = ""
    if not question_of(attack.kind).inputs:
        obstacle = f"answers another question ({attack.kind.replace('_', ' ')})"
    elif THREAT not in attack.threats:
        obstacle = f"is of a server that sends weights of its own ({attack.threats[0]})"
    elif not built_for(attack, view.defense.name):
        obstacle = f"is built for what {', '.join(sorted(attack.targets or ()))} sends"
    elif attack.needs_public:
        obstacle = "learns from public examples, which only an evaluation has"
    elif not attack.suits(view.plan):
        obstacle = f"has no use for a network such as {view.plan.spec.model!r}"
    elif not readable(attack, view, [asked]):
        obstacle = "reads more than one gradient"
    if obstacle:
        raise UsageError(f"Attack {attack.name!r} {obstacle}; take one that rebuilds inputs, as 'dlg', 'idlg' or 'ig'.")


def _named(gradient: Gradient, network: Held) -> Params:
    """Return somebody's gradient by our names of its parameters, float32; UsageError: it is none of this network."""
    start, theirs = network.spec.start, {own: name for name, own in network.names.items()}
    found = {theirs[own]: value for own, value in _by_name(gradient, tuple(theirs)).items()}
    for name, own in network.names.items():
        value, right = found[name], tuple(start[name].shape)
        if not isinstance(value, Tensor) or not value.is_floating_point() or tuple(value.shape) != right:
            told = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value, 60)
            raise UsageError(f"The gradient of {own!r} is {told}; it must be a tensor of floats of shape {right}.")
        if not bool(value.isfinite().all()):
            raise UsageError(f"The gradient of {own!r} holds a value that is not finite; nothing can be matched to it.")
    if not any(bool(value.any()) for value in found.values()):
        raise UsageError("The gradient is zero in all parameters; there is nothing to be found in it.")
    return {name: found[name].detach().float() for name in start}


def _by_name(gradient: Gradient, names: Sequence[str]) -> dict[str, Tensor]:
    if isinstance(gradient, Mapping):
        for name in gradient:
            if name not in names:
                raise unknown("trained parameter of the model", str(name), names)
        if missing := next((name for name in names if name not in gradient), None):
            raise UsageError(f"The gradient lacks {missing!r}; give one of each parameter that requires a gradient.")
        return dict(gradient)
    if isinstance(gradient, Tensor) or not isinstance(gradient, Iterable):
        raise UsageError(
            f"The gradient is a {type(gradient).__name__}; give a tensor for each parameter, in the order of "
            "model.parameters() or by name."
        )
    values = list(gradient)
    if len(values) != len(names):
        raise UsageError(f"The gradient has {len(values)} tensors; the model has {len(names)} trained parameters.")
    return dict(zip(names, values, strict=True))


def _asked(labels: Tensor | Sequence[int] | None, batch: int | None, spec: NetSpec) -> Challenge:
    """Return the question about a batch; UsageError: labels are no classes of the network, or not as many as it has."""
    if labels is None:
        return Challenge(ASKED, whole("batch", 1 if batch is None else batch, 1, MOST))
    y = one_hot_of(labels, spec.classes)
    if batch not in (None, len(y)):
        raise UsageError(f"batch={shown(batch)} cannot be used; there are {len(y)} labels.")
    return Challenge(ASKED, whole("batch", len(y), 1, MOST), y[None])
