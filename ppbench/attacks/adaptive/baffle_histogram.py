"""The test by which BAFFLE's paper argues that loss differences reveal nothing, used as an attack.

App. D compares the histogram of the differences on real inputs with that on noise inputs. The histogram holds the
K numbers without their directions, but the leak is in which direction gave which number. So the two histograms look
alike while `baffle_labels` reads every label off the same K numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.adaptive.baffle_sketch import DirectionMap, Equations, sketches
from ppbench.attacks.label.recovery import read_labels
from ppbench.federation.bounds import InMemoryCount
from ppbench.federation.evidence import simulation
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

EXACT_UP_TO = 50  # samples up to which the exact law of the statistic is used


def histogram_test(real: Tensor, noise: Tensor) -> Any:
    """Return the Kolmogorov-Smirnov `statistic` and `pvalue` of differences [K] on real and [K'] on noise inputs."""
    method = "exact" if min(len(real), len(noise)) <= EXACT_UP_TO else "asymp"
    return stats.ks_2samp(real.double().cpu().numpy(), noise.double().cpu().numpy(), method=method)


def most_alike(plan: Plan, rounds: Sequence[Equations], labels: Tensor, generator: torch.Generator) -> int | None:
    """Return the row of `labels` [M, B] that gives noise inputs the most similar histogram; None if not finite."""
    total = torch.zeros(len(labels), dtype=torch.float64)
    for r in rounds:
        own = DirectionMap(int(torch.randint(2**31, (), generator=generator)), r.z.entries, r.z.count)
        simulate, layout, columns = simulation(plan, r.params), Layout.of(r.params), []
        for candidate in labels:
            x = torch.randn(len(candidate), *plan.spec.shape, generator=generator).to(r.s.device)
            part = simulate(x[None], one_hot(candidate, plan.spec.classes).to(x)[None])
            columns.append(layout.pack(part).detach())
        simulated = own(torch.stack(columns, 1))
        if not bool(simulated.isfinite().all() & r.s.isfinite().all()):
            return None
        total += torch.tensor([histogram_test(r.s, column).statistic for column in simulated.T], dtype=torch.float64)
    return int(total.argmin())


@dataclass(frozen=True)
class BaffleHistogram(Attack):
    """Guesses the labels under which noise inputs give the most similar histogram; it cannot see the leak.

    For one example every class is a candidate; for more, as many random multisets as `candidates`. On other defenses
    the labels are read as by `label_recovery`.
    """

    candidates: InMemoryCount = 20

    name: ClassVar[str] = "baffle_histogram"
    kind: ClassVar[Kind] = "label"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"baffle"})
    reference: ClassVar[str] = "the comparison of Feng et al. 2023, App. D, taken for an attack"

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes of whole images."""
        return super().suits(plan) and not plan.net.pixelwise

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the labels [U * B] int64 of every challenge, as a sorted multiset. Granted labels are not used."""
        by_unit = {sketch.unit: sketch for sketch in sketches(view)}
        plain = {e.unit: e for e in view.defense.evidence(view)}
        classes, guesses = view.plan.spec.classes, []
        for challenge in challenges:
            count, sketch, best = len(challenge.unit) * challenge.batch, by_unit.get(challenge.unit), None
            labels = torch.arange(classes)[:, None]
            if count > 1:
                labels = torch.randint(0, classes, (self.candidates, count), generator=generator).sort().values
            if sketch is not None and bool(sketch.rounds[0].s.any()):
                best = most_alike(view.plan, sketch.rounds, labels, generator)
            y = read_labels(plain.get(challenge.unit), view.plan, count, generator) if best is None else labels[best]
            guesses.append(Guess(y=y, evaluations=len(labels)))
        return guesses
