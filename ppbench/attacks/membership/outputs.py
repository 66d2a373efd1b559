"""Membership inference from what a model computes of a record: loss, modified entropy, outputs, gradients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.model_queries import (
    PROBABILITY_FLOOR,
    AuditAttack,
    MembershipAttack,
    MembershipQuestion,
    coins,
    log_probabilities,
)
from ppbench.attacks.membership.updates import RIDGE, example_gradients, update_coefficients
from ppbench.base.tree import Params
from ppbench.federation.bounds import Fraction, InMemoryCount, NonNegative, PositiveInt, whole_number
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.metrics.intervals import Floats

# -- Membership inference by the loss: a record the model was trained on has a smaller one (Yeom et al. 2018) --


@dataclass(frozen=True)
class LossThreshold(MembershipAttack):
    """A record is a member if its loss under the last model received is small."""

    name: ClassVar[str] = "mia_loss"
    next_token: ClassVar[bool] = True
    reference: ClassVar[str] = "Yeom et al., Privacy Risk in Machine Learning, CSF 2018"

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return minus the plan's loss [Q] of each record, of texts by the likelihoods of their tokens."""
        return mean_likelihood(signal, signal.shape[-1]) if plan.next_token else -plan.example_loss(signal, labels)


# -- Membership inference by the least likely tokens of a text (Shi et al., ICLR 2024) --


def mean_likelihood(likelihoods: Tensor, least: Tensor | int) -> Tensor:
    """Return the mean [Q] of the `least` lowest of `token_likelihoods` [Q, L - 1], [Q, 1]; 0 of a text without any.

    NaN where one is.
    """
    lowest = likelihoods.sort(-1).values
    chosen = (torch.arange(lowest.shape[-1]) < least) & (lowest < torch.inf)
    mean = torch.where(chosen, lowest, 0.0).sum(-1) / chosen.sum(-1).clamp(min=1)
    return torch.where(likelihoods.isnan().any(-1), torch.nan, mean)


@dataclass(frozen=True)
class MinK(MembershipAttack):
    """A text is a member if its least likely tokens are likely: a new text has a few that surprise the model.

    The score is the mean log-likelihood of the `share` of a text's tokens that are the least likely, at least one.
    """

    name: ClassVar[str] = "mia_min_k"
    next_token: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Shi et al., Detecting Pretraining Data from Large Language Models, ICLR 2024, Min-20% Prob"
    )

    share: Fraction = 0.2

    def suits(self, plan: Plan) -> bool:
        """Return whether texts are their own targets: then each token has a likelihood."""
        return plan.next_token

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return the mean log-likelihood [Q] of the least likely tokens; 0 of a text that predicts none."""
        count = (signal < torch.inf).sum(-1)
        return mean_likelihood(signal, (self.share * count).ceil().clamp(min=1)[:, None])


# -- Membership inference by the modified prediction entropy of Song and Mittal (USENIX Security 2021) --


def log_complement(log_p: Tensor) -> Tensor:
    """Return log(1 - p) for log p [Q, C], precise where p rounds to 1: there it is summed from the other classes."""
    p = log_p.exp()
    rest = log_p.scatter(-1, log_p.argmax(-1, keepdim=True), -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(p > 0.5, rest, (-p).log1p())


def modified_entropy(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return Mentr = -(1 - p_y) log p_y - sum_{j != y} p_j log(1 - p_j), [Q] float64, in nats, for [Q, C], C > 1.

    0 for a confident right prediction, unbounded for a confident wrong one; the plain entropy is small for both (Song
    and Mittal 2021, Sec. 3.2).
    """
    log_q, label = log_complement(log_p), labels.argmax(-1, keepdim=True)
    own = -(log_q.exp() * log_p).gather(-1, label)[:, 0]
    others = (-log_p.exp() * log_q).scatter(-1, label, 0.0)
    return own + others.sort(-1).values.sum(-1)  # sorted: rounding must not separate labels where all p are equal


@dataclass(frozen=True)
class ModifiedEntropy(MembershipAttack):
    """A record is a member if the modified entropy of its prediction is small.

    A network with one output predicts no distribution: the score is minus the loss, as in `mia_loss`.
    """

    name: ClassVar[str] = "mia_mentr"
    reference: ClassVar[str] = (
        "Song and Mittal, Systematic Evaluation of Privacy Risks of Machine Learning Models, USENIX Security 2021"
    )

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return minus the modified entropy [Q] of each record; minus its loss if the network has one output."""
        if plan.spec.classes == 1:
            return -plan.example_loss(signal, labels)
        scores = -modified_entropy(log_probabilities(plan, signal), labels)
        return torch.where(signal.isfinite().all(-1), scores, torch.nan)


# -- Membership inference by a classifier of outputs (Shokri et al. 2017), as Baluta et al. (CCS 2022) train it --

NetworkSeeds = Annotated[int, whole_number(3, 1000)]
LARGEST_FEATURE = 1e30
"""Features are clipped to this size: the square of a larger one, in their variance, might overflow."""
MOST_DEVIATIONS = 10.0
"""Standardized features are clipped to this many deviations: one diverged record must not saturate the classifier."""


def signals(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the features [Q, F] float64 of each record that depend on the model, from its outputs [Q, C].

    C > 1, F = C + 4: sorted probabilities; that of the label; loss; whether no class is likelier; phi = log p_y - log
    sum_{j != y} p_j (Carlini et al. 2022). One output, F = 3: the output, its distance to the target, the loss.
    """
    loss = plan.example_loss(outputs, labels)[:, None]
    if plan.spec.classes == 1:
        return torch.cat([outputs, (outputs - labels).abs(), loss], -1)
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True)
    own = log_p.gather(-1, label)
    others = log_p.scatter(-1, label, -torch.inf)
    right = (own >= log_p.max(-1, keepdim=True).values).double()
    phi = own - others.logsumexp(-1, keepdim=True)
    return torch.cat([log_p.exp().sort(-1).values, own.exp(), loss, right, phi], -1)


@dataclass(frozen=True)
class OutputClassifier(MembershipAttack):
    """A network of one hidden layer separates members from others by the model's outputs on them.

    Features are `signals` and the one-hot label (the target, with one output), standardized on the known half. A
    record is a member if the mean probability over the seeds is at least 0.5. If nothing can be learned (one class
    known, no finite outputs, or the same outputs for all), every score is 0.5 and each decision random. Records without
    finite outputs get the smallest score of the others.

    Attributes:
        hidden: units of the hidden layer (ReLU).
        decay: the penalty decay / 2 ||w||^2 beside the MEAN log loss.
        seeds: networks whose probabilities are averaged; they differ in their initial weights.
        steps: L-BFGS iterations, at most. Full batches: the order of the candidates does not matter.
    """

    name: ClassVar[str] = "mia_nn"
    reference: ClassVar[str] = (
        "Shokri et al., Membership Inference Attacks against Machine Learning Models, S&P 2017; "
        "Baluta et al., Membership Inference Attacks and Generalization: A Causal Perspective, CCS 2022"
    )

    hidden: InMemoryCount = 64
    decay: NonNegative = 1e-2
    seeds: NetworkSeeds = 3
    steps: PositiveInt = 200

    def suits(self, plan: Plan) -> bool:
        """Return whether outputs are a few numbers per example, not maps."""
        return not plan.net.pixelwise

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return the mean probability [Q] of membership, and whether it is at least 0.5."""
        features = signals(plan, signal, question.labels)
        usable = features.isfinite().all(-1) & signal.isfinite().all(-1)
        return self.classified(torch.cat([features, question.labels], -1), usable, question, generator)

    def classified(
        self, features: Tensor, usable: Tensor, question: MembershipQuestion, generator: torch.Generator
    ) -> Guess:
        """Return the guess of networks trained on the known half of features [Q, F], labels last; else random."""
        unlabelled = features[:, : features.shape[1] - question.labels.shape[1]]
        fit = question.is_known & usable
        member = question.known[fit] == 1
        scores = torch.full((len(features),), 0.5, dtype=torch.float64)
        if not member.any() or member.all() or bool((unlabelled[fit] == unlabelled[fit][0]).all()):
            return Guess(score=scores, decision=coins(len(scores), generator))
        features = features.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)
        draws = torch.randint(2**31, (self.seeds,), generator=generator).tolist()
        likely = self._probability(features[fit].numpy(), member.numpy(), features[usable].numpy(), draws)
        scores[usable] = torch.from_numpy(likely)
        scores[~usable] = scores[usable].min()
        return Guess(score=scores, decision=scores >= 0.5)

    def _probability(self, known: Floats, member: NDArray[np.bool_], unknown: Floats, seeds: list[int]) -> Floats:
        """Return the mean probability [A] of membership of `unknown` [A, F], learned from `known` [K, F]."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(known)
        inputs, queries = (scaler.transform(part).clip(-MOST_DEVIATIONS, MOST_DEVIATIONS) for part in (known, unknown))
        total: Floats = np.zeros(len(unknown))
        for seed in seeds:
            net = MLPClassifier(
                (self.hidden,),
                solver="lbfgs",
                alpha=self.decay * len(known),  # scikit-learn divides its penalty by the number of examples
                max_iter=self.steps,
                random_state=seed,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # stopping early is intended
                total += net.fit(inputs, member).predict_proba(queries)[:, 1]
        return total / len(seeds)


# -- White-box membership inference (Nasr, Shokri and Houmansadr, S&P 2019): a classifier of gradients over rounds --
# The server has the model of every round. For each candidate it computes what a training step would: the norm of
# each layer's gradient, the last layer's gradient, the loss and the outputs; and how well the candidate's gradient
# explains the uploads. A small network learns from candidates of known membership to recognize members.


def evenly_spaced(items: Sequence[View], count: int) -> list[View]:
    """Return `count` of `items`, evenly spaced, the last one included; all if there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[round((k + 1) * len(items) / count) - 1] for k in range(count)]


def gradient_signals(gradients: Params, labels: Tensor) -> Tensor:
    """Return the log gradient norms of each tensor and of the last matrix's rows, [q, tensors + rows] float32.

    Takes leaves [q, *parameter] and labels [q, C]. The last matrix is the last with one row per class. The label's row
    comes first, then the others in ascending order: the class itself is no sign of membership.
    """
    norms = [value.flatten(1).norm(dim=1, keepdim=True) for value in gradients.values()]
    matrices = [value for value in gradients.values() if value.dim() > 2 and value.shape[1] == labels.shape[1]]
    if matrices:
        rows, label = matrices[-1].flatten(2).norm(dim=2), labels.argmax(-1, keepdim=True)
        others = rows.scatter(-1, label, -torch.inf).sort(-1).values[:, 1:]
        norms += [rows.gather(-1, label), others]
    return (torch.cat(norms, 1) + PROBABILITY_FLOOR).log()


def round_signals(plan: Plan, evidence: Evidence, x: Tensor, labels: Tensor) -> Tensor:
    """Return candidates' features [Q, F] float64, on CPU, at one model: `gradient_signals` and `signals` of outputs."""
    like = max(evidence.observed.values(), key=torch.numel)
    x, hot = x.to(like.device, torch.float32), labels.to(like.device, torch.float32)
    parts = [gradient_signals(leaves, hot[part]).double().cpu() for part, leaves in example_gradients(evidence, x, hot)]
    features = torch.cat(parts)
    if evidence.params is None:
        return features
    with torch.no_grad():
        outputs = plan.net({name: value.to(x) for name, value in evidence.params.items()}, x).double().cpu()
    return torch.cat([features, signals(plan, outputs, labels)], 1)


@dataclass(frozen=True)
class WhiteBox(AuditAttack):
    """A network of one hidden layer separates members from others by gradients and outputs at several rounds' models.

    Each feature is averaged over the rounds: concatenated, there are more features than known records, and the
    classifier learns noise (AUC 0.73 instead of 0.81 on a digits MLP with 100 known records). Another feature is how
    much of the uploads of ALL rounds a candidate explains (`mia_update_cosine`), which alone has 0.85 there: features
    of the model help if it has overfitted. Scores are probabilities; each half has its own classifier.

    rounds: number of models, evenly spaced, the last one included; the other parameters are those of `mia_nn`.
    """

    name: ClassVar[str] = "mia_whitebox"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = "Nasr, Shokri and Houmansadr, Comprehensive Privacy Analysis of Deep Learning, S&P 2019"

    rounds: PositiveInt = 5
    hidden: InMemoryCount = 64
    decay: NonNegative = 0.1
    seeds: NetworkSeeds = 3
    steps: PositiveInt = 100

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the features [Q, F] float64 of candidates; F = 0 if no upload can be read.

        A round without outputs (of unknown weights) counts only if no round has any. A feature that is not finite for
        any candidate is dropped.
        """
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        assert view.plan.net  # built here: under vmap its initialization could not draw
        x, labels, tables = challenge.x, challenge.labels.double().cpu(), []
        for part in evenly_spaced(view.by_round(), self.rounds):
            readable = [e for e in view.defense.evidence(part) if not e.nuisance]
            tables += [round_signals(view.plan, e, x, labels) for e in readable[:1]]
        most = max((table.shape[1] for table in tables), default=0)
        means = [torch.stack([table for table in tables if table.shape[1] == most]).nanmean(0)] if tables else []
        explained = update_coefficients(view, x, labels, RIDGE).nanmean(0)
        best = explained.nan_to_num(nan=-torch.inf).max(0).values[:, None]
        features = torch.cat([*means, best], 1)
        return features[:, features.isfinite().any(0)]

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return the mean probability [Q] of membership, and whether it is at least 0.5."""
        classifier = OutputClassifier(self.hidden, self.decay, self.seeds, self.steps)
        usable = signal.isfinite().all(1) & (signal.shape[1] > 0)
        return classifier.classified(torch.cat([signal, question.labels], 1), usable, question, generator)
