"""Membership inference by a classifier of outputs (Shokri et al. 2017), as Baluta et al. (CCS 2022) train it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.membership.base import MembershipAttack, MembershipQuestion, coins, log_probabilities
from ppbench.federation.bounds import InMemoryCount, NonNegative, PositiveInt, whole_number
from ppbench.federation.plan import Plan

Floats = NDArray[np.float64]
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
