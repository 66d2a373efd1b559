"""Attacks that read a linear layer behind the features: SPN's public head, and PRECODE's encoder.

SPN (Fan et al. 2020) perturbs the backbone's gradient by a secret head. The public head's gradient is unchanged, and
the total cotangent at the features is an unknown: of linear systems (`closed_form`), else of the search in
`feature_inversion`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.dp import AdaptiveDP
from ppbench.attacks.adaptive.inversion import exact_first, is_affordable
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.closed_form import SMALL, ClosedForm
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.feature_inversion import FeatureInversion
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.search.starts import posed
from ppbench.base.tree import Params
from ppbench.defenses.representation import ENCODER, BottleneckGradient, Precode
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.channels import has_kinks
from ppbench.nets.net import OwnLoss, net_spec


@dataclass(frozen=True)
class AdaptiveSPN(FeatureInversion):
    """Linear systems, else feature inversion, by what SPN leaves exact: the public head's gradient."""

    name: ClassVar[str] = "adaptive_spn"
    version: ClassVar[str] = "6"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"spn"})
    contains: ClassVar[str] = "feature_inversion"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with weight on the public head alone: the part that SPN leaves exact."""
        return [
            replace(e, weight={n: torch.full_like(v, float(n.startswith("head."))) for n, v in e.observed.items()})
            for e in super().evidence(view)
        ]

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: by linear systems where these are exact, else as `feature_inversion`."""
        guesses, attack = dict[int, Guess](), ClosedForm(largest_batch=SMALL)
        budget = self.inversion_budget + self.joint_budget
        if attack.suits(view.plan):
            answers = attack.answer(view.defense.evidence(view), view.plan, challenges, generator)
            guesses = {i: guess for i, guess in enumerate(answers) if is_affordable(guess, budget)}
        left = [i for i in range(len(challenges)) if i not in guesses]
        searched = super().run(view, [challenges[i] for i in left], generator) if left else []
        guesses |= dict(zip(left, searched, strict=True))
        return [guesses[i] for i in range(len(challenges))]


# -- PRECODE: whatever is drawn behind the encoder, its gradient is that of a linear layer --


@dataclass(frozen=True)
class AdaptivePrecode(AdaptiveDP):
    """The network up to PRECODE's encoder, read as a network whose head is the encoder; no sample enters.

    The gradient by the encoder's bias is the cotangent of its output, exactly, whatever the sample was. So that of one
    example is the gradient of output times known cotangent: by linear systems, else by a search. Of batches, whose
    cotangents are not known one by one, samples are searched with the examples and their labels.
    """

    name: ClassVar[str] = "adaptive_precode"
    version: ClassVar[str] = "2"
    targets: ClassVar[frozenset[str] | None] = frozenset({"precode"})
    reference: ClassVar[str] = (
        "this project; without the bottleneck and what follows: Scheliga et al., 2022 (arXiv 2208.04767), and "
        "Balunovic et al., ICLR 2022"
    )

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; labels are read off the head's bias."""
        plan, defense, evidence = view.plan, view.defense, self.evidence(view)
        if not isinstance(defense, Precode):
            return super().run(view, challenges, generator)
        several = any(len(challenge.unit) * challenge.batch > 1 for challenge in challenges)
        if several or not plan.net.head_bias or plan.spec.classes == 1:
            pieces = [with_draws(e, defense, challenges) for e in evidence]
            return DLG(budget=self.budget).answer(pieces, plan, challenges, generator)
        known = {e.unit: e for e in evidence}
        inner = plan_of_encoder(plan, defense)
        shared = Shared(inner)
        pieces = [encoder_evidence(e, shared) for e in evidence]
        with_cotangents = [replace(c, y=cotangent(known.get(c.unit))) for c in challenges]
        search = (IG if has_kinks(plan.net) else DLG)(budget=self.budget)
        guesses = exact_first(
            pieces,
            inner,
            with_cotangents,
            lambda left: search.answer(left, inner, with_cotangents, generator),
            self.budget,
        )
        labels = [guessed_labels(victim) for victim in posed(evidence, plan, challenges, generator)]
        return [replace(guess, y=label) for guess, label in zip(guesses, labels, strict=True)]


def with_draws(evidence: Evidence, defense: Precode, challenges: Sequence[Challenge]) -> Evidence:
    """Return evidence with the draws of PRECODE's samples as unknowns."""
    batch = next((c.batch for c in challenges if c.unit == evidence.unit), 1)
    return replace(evidence, params=None, nuisance={"draws": (len(evidence.unit), batch, defense.size)})


def plan_of_encoder(plan: Plan, defense: Precode) -> Plan:
    """Return the plan of the network up to PRECODE's encoder, whose loss is output [B, 2 size] times a cotangent."""
    spec = net_spec(plan.spec.model, plan.spec.shape, 2 * defense.size, dict(plan.spec.options))
    return replace(plan, spec=spec, loss=OwnLoss("known cotangents", lambda output, y: (output * y).sum(-1)))


def encoder_evidence(evidence: Evidence, shared: Shared) -> Evidence:
    """Return the part of evidence that no sample enters, with PRECODE's encoder for the head."""
    simulate = evidence.simulate
    assert isinstance(simulate, BottleneckGradient)  # of `Precode.evidence`
    weights, observed = (_up_to_encoder(tree) for tree in (simulate.params, evidence.observed))
    params = shared.same(weights)
    return replace(evidence, observed=observed, simulate=shared.at(params), params=params)


def _up_to_encoder(tree: Params) -> Params:
    kept = {name: value for name, value in tree.items() if not name.startswith(("bottleneck.", "head."))}
    return kept | {f"head.{end}": tree[f"{ENCODER}.{end}"] for end in ("weight", "bias")}


def cotangent(evidence: Evidence | None) -> Tensor | None:
    """Return the cotangent [1, 1, 2 size] of the encoder's output for one example: the gradient by its bias."""
    return None if evidence is None else evidence.observed[f"{ENCODER}.bias"][None, None]
