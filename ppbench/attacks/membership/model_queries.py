"""What membership attacks share: the model that is queried, signals of its outputs, thresholds and random decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, References
from ppbench.adversary.victims import augmentations
from ppbench.base.errors import UsageError
from ppbench.base.tree import Tree, leaves
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.metrics.modality import modality_in
from ppbench.nets.net import LOGITS_AT_ONCE, token_losses


def logit_gap(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return phi = log p_y - log sum_{j != y} p_j, [..., Q] float64 (Carlini et al. 2022); other losses: -log loss.

    Takes outputs [..., Q, C] float64 and one-hot labels [Q, C], or targets [Q, 1]. With softmax phi is
    z_y - logsumexp_{j != y} z_j, computed from the logits: p_y / (1 - p_y) would round to infinity. Over training runs
    it is nearly Gaussian. Under the squared loss outputs are no logits, and probabilities made of them are clipped:
    minus the log of the loss separates members far better (digits MLP, 16 references, TPR of canaries at 1 % FPR: 0.55
    against 0.16).
    """
    if plan.spec.classes == 1 or plan.loss != "cross_entropy":
        return -plan.example_loss(outputs, labels).clamp(min=PROBABILITY_FLOOR).log()
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True).expand(*log_p.shape[:-1], 1)
    return (log_p.gather(-1, label) - log_p.scatter(-1, label, -torch.inf).logsumexp(-1, keepdim=True))[..., 0]


def log_likelihood(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log p(y | x, model) [..., Q] float64, shapes as in `logit_gap`; for a single output minus its loss.

    Of texts that are their own targets the mean over tokens, so that long ones are no less likely.
    """
    if plan.spec.classes == 1 or plan.next_token:
        return -plan.example_loss(outputs, labels)
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True).expand(*log_p.shape[:-1], 1)
    return log_p.gather(-1, label)[..., 0]


def references_of(attack: str, challenge: Challenge) -> References:
    """Return the challenge's reference runs; UsageError if it has none."""
    if challenge.references is None:
        raise UsageError(f"Attack {attack!r} was given no reference runs; it must run in an audit with references.")
    return challenge.references


def target_outputs(view: View, x: Tensor, count: int) -> Tensor:
    """Return the outputs [A, Q, C] float64 of the last model received on augmentations of x; NaN without a model."""
    copies = augmentations(x, count if modality_in(view.plan).smooth else 1)
    outputs: Tensor = model_outputs(view, copies.flatten(0, 1)).unflatten(0, copies.shape[:2])
    return outputs


QUERY_CHUNK = 512
PROBABILITY_FLOOR = 1e-12
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


def client_outputs(view: View, message: Tree, x: Tensor) -> Tensor:
    """Return the outputs [Q, C] float64, on CPU, that the defense's client computes on x, in the message's dtype."""
    like = max((leaf for leaf in leaves(message) if leaf.is_floating_point()), key=torch.numel)
    with torch.no_grad():
        parts = [view.defense.predict(view.plan, message, part.to(like)) for part in x.split(QUERY_CHUNK)]
    return torch.cat(parts).double().cpu()


def model_outputs(view: View, x: Tensor) -> Tensor:
    """Return the outputs [Q, C] float64, on CPU, of the last model that the attacker received; NaN without one.

    [Q, L, V] where it answers every token.
    """
    message = last_model(view)
    if message is None:
        each = view.plan.spec.shape if view.plan.next_token else ()
        return torch.full((len(x), *each, view.plan.spec.classes), torch.nan, dtype=torch.float64)
    return client_outputs(view, message, x)


def token_likelihoods(view: View, x: Tensor) -> Tensor:
    """Return log p of each token but the first of texts x [Q, L] under the last model received, [Q, L - 1] float64.

    inf at padding; NaN without a model. Texts are passed a few at a time (`LOGITS_AT_ONCE`).
    """
    message, (length,) = last_model(view), view.plan.spec.shape
    if message is None:
        return torch.full((len(x), length - 1), torch.nan, dtype=torch.float64)
    parts = list[Tensor]()
    for texts in x.split(max(1, LOGITS_AT_ONCE // (length * view.plan.spec.classes))):
        losses, weights = token_losses(client_outputs(view, message, texts), texts.double().cpu())
        parts.append((-losses).masked_fill(weights == 0, torch.inf))
    return torch.cat(parts)


def log_probabilities(plan: Plan, outputs: Tensor) -> Tensor:
    """Return log p [Q, C] float64 of outputs [Q, C]: log-softmax under cross-entropy.

    Under the squared loss outputs estimate one-hot targets: p is the outputs clipped to [1e-12, 1], over their sum.
    """
    if plan.loss == "cross_entropy":
        return outputs.log_softmax(-1)
    clipped = outputs.clamp(PROBABILITY_FLOOR, 1)
    return (clipped / clipped.sum(-1, keepdim=True)).log()


def finite_scores(scores: Tensor) -> Tensor:
    """Return scores [Q] with those that are not finite replaced by the smallest finite one; by 0 if there is none."""
    finite = scores[scores.isfinite()]
    return torch.where(scores.isfinite(), scores, finite.min() if len(finite) else torch.zeros_like(scores))


def best_threshold(scores: Tensor, member: Tensor) -> float | None:
    """Return the threshold t for which `score >= t` best separates members [K] bool by finite scores [K], or None.

    Best by balanced accuracy; of equals the middle one. Thresholds lie halfway between distinct scores, or at -inf.
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
    """Return [count] bool, fair coins: the decisions of an attacker that knows nothing."""
    return torch.randint(0, 2, (count,), generator=generator) == 1


@dataclass(frozen=True)
class MembershipQuestion:
    """A membership challenge on CPU: one-hot labels [Q, C] float64, known [Q] int8 (1 member, 0 not, -1 unknown)."""

    labels: Tensor
    known: Tensor

    @property
    def is_known(self) -> Tensor:
        """[Q] bool: candidates whose membership the attacker knows."""
        return self.known >= 0

    @property
    def members(self) -> Tensor:
        """[K] bool: the memberships of the known candidates, in their order."""
        return self.known[self.is_known] == 1


def membership_question(attack: str, challenge: Challenge) -> MembershipQuestion:
    """Return labels and known memberships of a challenge to the attack named `attack`; UsageError if it lacks any."""
    if challenge.x is None or challenge.labels is None or challenge.known is None:
        raise UsageError(
            f"Attack {attack!r} was given a challenge without candidates, labels or known members; a "
            "membership challenge must have all three."
        )
    return MembershipQuestion(challenge.labels.double().cpu(), challenge.known.cpu())


def same_question(one: Challenge, other: Challenge) -> bool:
    """Return whether two challenges to `MembershipAttack` differ at most in the known memberships."""
    assert one.x is not None and other.x is not None and one.labels is not None and other.labels is not None
    same = one.references is other.references and one.x.shape == other.x.shape
    return same and torch.equal(one.x, other.x) and torch.equal(one.labels, other.labels)


@dataclass(frozen=True)
class MembershipAttack(Attack):
    """Decides on every candidate by its `signal`, calibrated on the half of the candidates whose membership is known.

    A subclass overrides `scores` to make one number of the signal, whose threshold is fitted on the known half, or
    `answer` to decide otherwise.
    """

    kind: ClassVar[Kind] = "membership"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the signal of candidates [Q, ...] float64, on CPU, NaN for none.

        Default: the model's outputs, of texts that are their own targets the likelihood of each token.
        """
        assert challenge.x is not None  # `run` has checked
        return (token_likelihoods if view.plan.next_token else model_outputs)(view, challenge.x)

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return the scores [Q] float64, higher is member, from the signal and labels [Q, C]. Default: the signal."""
        return signal

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return finite scores [Q] float64, and decisions [Q] bool by the known half's threshold, else random."""
        scores = finite_scores(self.scores(plan, signal, question.labels))
        threshold = best_threshold(scores[question.is_known], question.members)
        decision = coins(len(scores), generator) if threshold is None else scores >= threshold
        return Guess(score=scores, decision=decision)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score [Q] float64 and decision [Q] bool per challenge; UsageError for an incomplete challenge."""
        guesses, signal = [], torch.zeros(0)
        for number, challenge in enumerate(challenges):
            question = membership_question(self.name, challenge)
            if not number or not same_question(challenges[number - 1], challenge):  # else the candidates' other half
                signal = self.signal(view, challenge)
            guesses.append(self.answer(view.plan, signal, question, generator))
        return guesses


@dataclass(frozen=True)
class AuditAttack(MembershipAttack):
    """A membership attack that needs an audit; its signal is the scores."""

    standard: ClassVar[bool] = False

    def suits(self, plan: Plan) -> bool:
        """Return whether outputs are a few numbers per example, not maps."""
        return not plan.net.pixelwise
