"""What membership attacks share: whose model is queried, what its outputs say of a record, thresholds and coins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, References
from ppbench.adversary.augment import augmentations
from ppbench.base.errors import UsageError
from ppbench.base.tree import Tree, leaves
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER


def logit_gap(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return phi = log p_y - log sum_{j != y} p_j, [..., Q] float64 (Carlini et al. 2022); of squares minus log loss.

    With softmax this is z_y - logsumexp_{j != y} z_j, taken from the logits: p_y / (1 - p_y) would round to infinity.
    Over training runs it is nearly Gaussian. Under the squared loss outputs are no logits, and probabilities made of
    them are clipped: minus the log of the loss is told apart far better (digits MLP, 16 references, TPR of canaries at
    1 % FPR: .55 against .16). Of outputs [..., Q, C] float64 and one-hot labels [Q, C], or targets [Q, 1].
    """
    if plan.spec.classes == 1 or plan.loss != "cross_entropy":
        return -plan.example_loss(outputs, labels).clamp(min=FLOOR).log()
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True).expand(*log_p.shape[:-1], 1)
    return (log_p.gather(-1, label) - log_p.scatter(-1, label, -torch.inf).logsumexp(-1, keepdim=True))[..., 0]


def log_likelihood(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log p(y | x, model) [..., Q] float64, shapes as in `logit_gap`; of a single output minus its loss."""
    if plan.spec.classes == 1:
        return -plan.example_loss(outputs, labels)
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True).expand(*log_p.shape[:-1], 1)
    return log_p.gather(-1, label)[..., 0]


def references_of(attack: str, challenge: Challenge) -> References:
    """Return the challenge's reference runs; raises UsageError where it has none."""
    if challenge.references is None:
        raise UsageError(
            f"Attack {attack!r} was given no reference runs; it must be asked in an audit with references."
        )
    return challenge.references


def target_outputs(view: View, x: Tensor, count: int) -> Tensor:
    """Return the outputs [A, Q, C] float64 of the last model held on the augmentations of x; NaN for no model."""
    copies = augmentations(x, count)
    outputs: Tensor = model_outputs(view, copies.flatten(0, 1)).unflatten(0, copies.shape[:2])
    return outputs


CHUNK = 512
FLOOR = 1e-12
"""Smallest probability read from an output of a net trained with the squared loss."""


def last_model(view: View) -> Tree | None:
    """Return the last message from the server with as many numbers as the network has parameters, or None."""
    for letter in reversed(view.mail):
        if letter.sender != SERVER or letter.message is None:
            continue
        if view.party not in (None, SERVER, letter.receiver):
            continue
        numbers = (leaf.numel() for leaf in leaves(letter.message) if leaf.is_floating_point())  # ciphertexts are none
        if sum(numbers) >= view.plan.net.parameter_count:
            return letter.message
    return None


def query(view: View, message: Tree, x: Tensor) -> Tensor:
    """Return the outputs [Q, C] float64, on CPU, that the defense's client computes on x, in the message's dtype."""
    like = max((leaf for leaf in leaves(message) if leaf.is_floating_point()), key=torch.numel)
    with torch.no_grad():
        parts = [view.defense.predict(view.plan, message, some.to(like)) for some in x.split(CHUNK)]
    return torch.cat(parts).double().cpu()


def model_outputs(view: View, x: Tensor) -> Tensor:
    """Return the outputs [Q, C] float64, on CPU, of the last model that the adversary holds; NaN for none."""
    message = last_model(view)
    if message is None:
        return torch.full((len(x), view.plan.spec.classes), torch.nan, dtype=torch.float64)
    return query(view, message, x)


def log_probabilities(plan: Plan, outputs: Tensor) -> Tensor:
    """Return log p [Q, C] float64 of outputs [Q, C]: log-softmax under cross-entropy.

    Under the squared loss outputs estimate one-hot targets: p is the outputs clipped to [1e-12, 1], over their sum.
    """
    if plan.loss == "cross_entropy":
        return outputs.log_softmax(-1)
    clipped = outputs.clamp(FLOOR, 1)
    return (clipped / clipped.sum(-1, keepdim=True)).log()


def finite_scores(scores: Tensor) -> Tensor:
    """Return scores [Q] with those that are not finite replaced by the smallest finite one; by 0 if there is none."""
    finite = scores[scores.isfinite()]
    return torch.where(scores.isfinite(), scores, finite.min() if len(finite) else torch.zeros_like(scores))


def best_threshold(scores: Tensor, member: Tensor) -> float | None:
    """Return the threshold t for which `score >= t` separates members [K] bool best by finite scores [K], or None.

    Best by balanced accuracy, of equals the middle one; thresholds lie halfway between distinct scores, or at -inf.
    """
    values = scores.unique()
    if len(values) < 2 or member.all() or not member.any():
        return None
    cuts = torch.cat([values.new_tensor([-torch.inf]), (values[1:] + values[:-1]) / 2])
    inside = (scores[member][:, None] >= cuts).double().mean(0)
    outside = (scores[~member][:, None] < cuts).double().mean(0)
    balanced = (inside + outside) / 2
    best = (balanced == balanced.max()).nonzero()[:, 0]
    return float(cuts[best[len(best) // 2]])


def coins(count: int, generator: torch.Generator) -> Tensor:
    """Return [count] bool, fair coins: the decisions of an attacker who knows nothing."""
    return torch.randint(0, 2, (count,), generator=generator) == 1


@dataclass(frozen=True)
class Asked:
    """A membership challenge on CPU: one-hot labels [Q, C] float64, known [Q] int8 (1 member, 0 not, -1 asked)."""

    labels: Tensor
    known: Tensor

    @property
    def told(self) -> Tensor:
        """[Q] bool: whose membership the adversary knows."""
        return self.known >= 0

    @property
    def members(self) -> Tensor:
        """[K] bool: the memberships of those, in their order."""
        return self.known[self.told] == 1


def asked_of(attack: str, challenge: Challenge) -> Asked:
    """Return labels and known memberships of a challenge to the attack called `attack`; UsageError if it lacks any."""
    if challenge.x is None or challenge.labels is None or challenge.known is None:
        raise UsageError(
            f"Attack {attack!r} was given a challenge without candidates, labels or known members; a "
            "membership challenge must have all three."
        )
    return Asked(challenge.labels.double().cpu(), challenge.known.cpu())


def same_question(one: Challenge, other: Challenge) -> bool:
    """Return whether two challenges to `MembershipAttack` differ in what is known alone."""
    assert one.x is not None and other.x is not None and one.labels is not None and other.labels is not None
    same = one.references is other.references and one.x.shape == other.x.shape
    return same and torch.equal(one.x, other.x) and torch.equal(one.labels, other.labels)


@dataclass(frozen=True)
class MembershipAttack(Attack):
    """Decides on every candidate by its `signal`, in the light of the half of the candidates whose membership is known.

    A subclass says in `scores` how that is told as one number, whose threshold is then fitted on the known half, or in
    `answer` what else is made of it.
    """

    kind: ClassVar[Kind] = "membership"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return what the view says of candidates [Q, ...] float64, on CPU, NaN for nothing; default: outputs."""
        assert challenge.x is not None  # `run` has checked
        return model_outputs(view, challenge.x)

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return the scores [Q] float64, higher is member, from the signal and labels [Q, C]. Default: the signal."""
        return signal

    def answer(self, plan: Plan, signal: Tensor, asked: Asked, generator: torch.Generator) -> Guess:
        """Return finite scores [Q] float64, and decisions [Q] bool by the known half's threshold, or coins."""
        scores = finite_scores(self.scores(plan, signal, asked.labels))
        threshold = best_threshold(scores[asked.told], asked.members)
        decision = coins(len(scores), generator) if threshold is None else scores >= threshold
        return Guess(score=scores, decision=decision)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score [Q] float64 and decision [Q] bool a challenge; UsageError where it lacks what is needed."""
        guesses, signal = [], torch.zeros(0)
        for number, challenge in enumerate(challenges):
            asked = asked_of(self.name, challenge)
            if not number or not same_question(challenges[number - 1], challenge):  # else the candidates' other half
                signal = self.signal(view, challenge)
            guesses.append(self.answer(view.plan, signal, asked, generator))
        return guesses


@dataclass(frozen=True)
class AuditAttack(MembershipAttack):
    """A membership attack that needs an audit; its signal is the scores."""

    standard: ClassVar[bool] = False

    def suits(self, plan: Plan) -> bool:
        """Return whether outputs are a few numbers an example, not maps."""
        return not plan.net.pixelwise
