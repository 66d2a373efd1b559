"""Deep leakage from gradients (Zhu, Liu and Han, NeurIPS 2019) and iDLG (Zhao, Mopuri and Bilen, 2020).

Minimize sum_p ||grad_p loss(net(x), softmax(q)) - g*_p||^2 over images x and label logits q. The plain loop is
in benchmarks/bench_dlg.py, the oracle of this module's tests; the paper's start and label are "normal" and "joint". See
also `search.starts` (random starts), `search.problem` (the minimized function) and `search.lbfgs` (the optimizer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings, minimize
from ppbench.attacks.reconstruction.search.priors import Penalty
from ppbench.attacks.reconstruction.search.problem import Pixels, Problem, objective
from ppbench.attacks.reconstruction.search.starts import (
    ImageSearch,
    Label,
    PosedVictim,
    Starts,
    draw,
    simulation_groups,
)
from ppbench.federation.bounds import InMemoryCount, NonNegative, NonNegativeInt, OpenShare, Positive, PositiveInt
from ppbench.federation.evidence import Evidence, joint_evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

EXACT_MISMATCH = 1e-4
"""Mismatch below which evidence counts as exact: a float32 search that ends there was stopped by rounding."""
NEAR_STOP = 10.0
"""A search that ends within this factor of its stopping mismatch counts as done."""


@dataclass(frozen=True)
class Matches:
    """The ends of the searches for V victims: images (not clipped), labels and nuisance unknowns.

    mismatch: [V] float64, the minimized function: by default the discrepancy relative to that of an all-zero
    simulation, plus the prior, if any.  evaluations: [V] int64 gradient evaluations.
    """

    ends: Starts
    mismatch: Tensor
    evaluations: Tensor

    def merged(self, rows: Sequence[int], other: Matches, take: Tensor | None = None) -> Matches:
        """Return these with the victims `rows` replaced by `other`, all or where `take`; evaluations add up."""
        index = torch.tensor(rows)
        take = torch.ones(len(rows), dtype=torch.bool) if take is None else take

        def put(old: Tensor, new: Tensor) -> Tensor:
            old = old.to(new.dtype) if new.dtype == torch.float64 else old
            return old.index_copy(0, index[take].to(old.device), new[take.to(new.device)].to(old.dtype))

        a, b = self.ends, other.ends
        ends = Starts(put(a.x, b.x), put(a.y, b.y), a.joint, put(a.extra, b.extra))
        evaluations = self.evaluations.index_add(0, index, other.evaluations)
        return Matches(ends, put(self.mismatch, other.mismatch), evaluations)


def match_gradients(
    evidences: Sequence[Evidence],
    starts: Starts,
    plan: Plan,
    *,
    budget: Tensor,
    stop: Tensor,
    unit: Tensor | None = None,
    prior: Penalty | None = None,
    settings: LBFGSSettings | None = None,
) -> Matches:
    """Minimize D / unit + prior for V victims with L-BFGS.

    Args:
        evidences: V usable pieces of evidence (see `usable`); those that share `simulate` run in one batch.
        starts: the start points, and whether labels are unknown.
        plan: the public plan.
        budget, stop: [V] gradient evaluations allowed, and the value at which a victim is done.
        unit: [V] divisors of D; None for `Evidence.scale()`: the function is then the relative mismatch.
        prior: penalty on the images, added as it is.
        settings: of the optimizer.
    """
    if unit is None:
        unit = torch.stack([e.scale().double() for e in evidences])
    z, space = starts.rows(starts.x.flatten(1)), Pixels(tuple(starts.x.shape[1:]), *plan.data_range)
    loss, counts = torch.zeros(len(z), dtype=torch.float64), torch.zeros(len(z), dtype=torch.int64)
    for rows in simulation_groups(evidences):
        matching = objective([evidences[i] for i in rows], plan, starts.x.shape[1], z.dtype)
        problem = Problem(space, matching, unit[rows].to(z), starts.at(rows), penalty=prior)
        minima = minimize(problem, z[rows], budget=budget[rows], stop=stop[rows].double(), settings=settings)
        z[rows], loss[rows], counts[rows] = minima.z, minima.loss, minima.evaluations
    x, tail = z[:, : space.size].view_as(starts.x), z[:, space.size :]
    return Matches(starts.moved(x, tail, torch.arange(len(z), device=z.device)), loss, counts)


@dataclass(frozen=True)
class DLG(ImageSearch):
    """Deep leakage from gradients: match the gradient over images and soft labels with L-BFGS.

    Attributes (and those of `ImageSearch`; a failure with a budget below 1800 says nothing about a defense):
        stop: mismatch at which a victim is done: relative to that of an all-zero simulation, or, with `absolute`,
            the plain squared distance of the gradients (the loss in the DLG papers).
        restarts: fresh starts for a victim whose search ended with a mismatch above `hopeless` and evaluations left;
            the smallest mismatch counts. With `hopeless` 0.9, noise, which no start explains, costs no restarts; with 0
            all unfinished victims get restarts.
        patience: evaluations within which the mismatch must fall by the share `progress`, else the search has stalled.
            On trained models joint searches are slow before they succeed.
        dtype: of the search. A float32 search that rounding stops short of `stop` continues in float64.
        history: pairs that L-BFGS keeps.
        slots: victims evaluated together, at most (see `LBFGSSettings`).

    Not in the quick portfolio: it made none of the rows that fall worse (`docs/benchmarks.md`), at a fifth of the time.
    """

    name: ClassVar[str] = "dlg"
    next_token: ClassVar[bool] = True
    version: ClassVar[str] = "2"
    quick: ClassVar[bool | Literal["unaware", "foreign"]] = False
    reference: ClassVar[str] = "Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019"

    label: Label = "joint"
    budget: PositiveInt = 1800
    stop: Positive = 1e-10
    absolute: bool = False
    restarts: NonNegativeInt = 2
    hopeless: NonNegative = 0.9
    patience: NonNegativeInt = 100
    progress: OpenShare = 0.01
    dtype: Literal["float32", "float64"] = "float32"
    history: InMemoryCount = 150
    slots: InMemoryCount = 32

    @property
    def settings(self) -> LBFGSSettings:
        """The optimizer's settings."""
        return LBFGSSettings(self.history, self.slots, self.patience, self.progress)

    def prior(self, evidence: Evidence, plan: Plan) -> Penalty | None:
        """Return the penalty on images in a search that explains `evidence`. Default: none."""
        return None

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `search_batches`."""
        scale = torch.stack([victim.evidence.scale() for victim in victims if victim.evidence is not None])
        best = self.matched(victims, self.stop / scale if self.absolute else torch.full_like(scale, self.stop))
        return [
            Guess(x=x.float(), y=y, confidence=mismatch if math.isfinite(mismatch) else None, evaluations=count)
            for x, y, mismatch, count in zip(
                best.ends.x, best.ends.labels.argmax(-1), best.mismatch.tolist(), best.evaluations.tolist(), strict=True
            )
        ]

    def matched(self, victims: Sequence[PosedVictim], stop: Tensor) -> Matches:
        """Return the best match of each of V victims over all starts, by the minimized function, never by the truth.

        A victim is done at a mismatch of `stop` [V]. Starts are drawn for ALL victims each time, so that the draws of
        one do not depend on the others' results.
        """
        dtype, rows = torch.float64 if self.dtype == "float64" else torch.float32, list(range(len(victims)))
        best: Matches | None = None
        for _ in range(1 + self.restarts):
            starts = draw(victims, self.start, self.label, dtype).at(rows)
            budget = torch.full((len(rows),), self.budget) - (0 if best is None else best.evaluations[rows])
            matches = self.precise([victims[i] for i in rows], starts, budget, stop[rows])
            best = matches if best is None else best.merged(rows, matches, matches.mismatch < best.mismatch[rows])
            again = (best.mismatch > (NEAR_STOP * stop).clamp(min=self.hopeless)) & (best.evaluations < self.budget)
            rows = [i for i, unfinished in enumerate(again.tolist()) if unfinished]
            if not rows:
                break
        assert best is not None  # the loop runs at least once
        return best

    def precise(self, victims: Sequence[PosedVictim], starts: Starts, budget: Tensor, stop: Tensor) -> Matches:
        """Return the matches from given starts, continued in float64 where rounding stopped them short of `stop`."""
        evidences, plan = [victim.evidence for victim in victims if victim.evidence is not None], victims[0].plan
        match = partial(match_gradients, plan=plan, prior=self.prior(evidences[0], plan), settings=self.settings)
        matches = match(evidences, starts, budget=budget, stop=stop)
        short = (
            (matches.mismatch > NEAR_STOP * stop) & (matches.mismatch < EXACT_MISMATCH) & (matches.evaluations < budget)
        )
        rows = [i for i, again in enumerate(short.tolist()) if again]
        if starts.x.dtype == torch.float64 or not rows:
            return matches
        ends, left = matches.ends.at(rows).to(torch.float64), budget[rows] - matches.evaluations[rows]
        return matches.merged(rows, match([evidences[i] for i in rows], ends, budget=left, stop=stop[rows]))


@dataclass(frozen=True)
class IDLG(DLG):
    """Improved DLG: labels are read off the head's gradient first, then the images are searched.

    Not in the quick portfolio, where `adaptive_server` does the same on what the server itself reads.
    """

    name: ClassVar[str] = "idlg"
    version: ClassVar[str] = "2"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Zhao, Mopuri and Bilen, iDLG: Improved Deep Leakage from Gradients, 2020"

    label: Label = "inferred"


@dataclass(frozen=True)
class TwoRounds(IDLG):
    """iDLG on the updates of two rounds in which a client holds the same batch: one image must explain both.

    Minimizes D_1(x, y) / D_1(0) + D_2(x, y) / D_2(0) over images x: D_r is the distance of the simulated from the
    observed update of round r, D_r(0) that of an all-zero simulation. Of more rounds the first two count. Labels are
    read off the mean of both updates, whose noises are independent. One evaluation is that of both gradients.
    """

    name: ClassVar[str] = "two_rounds"
    version: ClassVar[str] = "1"
    standard: ClassVar[bool] = False
    probe_rounds: ClassVar[int] = 2
    reads_alone: ClassVar[bool] = True
    reference: ClassVar[str] = "ppbench: two updates of one batch, matched at once"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence of both rounds as one for each unit; none about units that were seen in one round."""
        rounds = view.by_round()[: self.probe_rounds]
        if len(rounds) < self.probe_rounds:
            return []
        return joint_evidence([part.defense.evidence(part) for part in rounds])
