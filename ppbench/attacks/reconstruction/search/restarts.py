"""Restarts and float64 where it is needed, around `match_gradients`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.search.lbfgs import Settings
from ppbench.attacks.reconstruction.search.matching import Matches, Prior, Starts, match_gradients
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

EXACT = 1e-4
"""Mismatch below which evidence is taken for exact: a float32 search that ends there was stopped by rounding."""

NEAR = 10.0
"""A search that ends within this factor of its stopping mismatch counts as done."""


@dataclass(frozen=True)
class Effort:
    """How hard to search.

    Attributes:
        budget: gradient evaluations a victim, in all.
        restarts: fresh starts for victims whose search ended short of `stop` with evaluations left.
        hopeless: value of the function that a search must have ended above to be worth another start.
        settings: of the optimizer.
        prior: penalty on the images, or None.
    """

    budget: int = 1800
    restarts: int = 0
    hopeless: float = 0.0
    settings: Settings = field(default_factory=Settings)
    prior: Prior | None = None


def search(
    evidences: Sequence[Evidence],
    draw: Callable[[], Starts],
    plan: Plan,
    effort: Effort,
    stop: Tensor,
    unit: Tensor | None = None,
) -> Matches:
    """Return the best match of V victims over all starts, chosen by the minimized function, never by the truth.

    Args:
        evidences: V usable pieces of evidence.
        draw: returns fresh starts for ALL victims, so that one victim's draws do not depend on another's fate.
        plan: the public plan.
        effort: budget, restarts, prior, optimizer settings.
        stop: [V] value of the function at which a victim is done.
        unit: [V] what the discrepancy is divided by; see `match_gradients`.
    """
    spent = torch.zeros(len(evidences), dtype=torch.int64)
    best: Matches | None = None
    rows = list(range(len(evidences)))
    for _ in range(1 + effort.restarts):
        starts = draw().at(rows)
        some = [evidences[i] for i in rows]
        scale = None if unit is None else unit[rows]
        found = _precise(some, starts, plan, effort, effort.budget - spent[rows], stop[rows], scale)
        spent[rows] += found.evaluations
        best = found if best is None else merged(best, rows, found, found.mismatch < best.mismatch[rows])
        again = (best.mismatch > (NEAR * stop).clamp(min=effort.hopeless)) & (spent < effort.budget)
        rows = [i for i, unfinished in enumerate(again.tolist()) if unfinished]
        if not rows:
            break
    assert best is not None  # the loop runs at least once
    return replace(best, evaluations=spent)


def _precise(
    evidences: Sequence[Evidence],
    starts: Starts,
    plan: Plan,
    effort: Effort,
    budget: Tensor,
    stop: Tensor,
    unit: Tensor | None,
) -> Matches:
    """Match, then go on in float64 for victims that float32 rounding stopped short of `stop`."""
    found = match_gradients(
        evidences, starts, plan, budget=budget, stop=stop, unit=unit, prior=effort.prior, settings=effort.settings
    )
    short = (found.mismatch > NEAR * stop) & (found.mismatch < EXACT) & (found.evaluations < budget)
    rows = [i for i, again in enumerate(short.tolist()) if again]
    if starts.x.dtype == torch.float64 or not rows:
        return found
    more = match_gradients(
        [evidences[i] for i in rows],
        found.ends.at(rows).to(torch.float64),
        plan,
        budget=budget[rows] - found.evaluations[rows],
        stop=stop[rows],
        unit=None if unit is None else unit[rows],
        prior=effort.prior,
        settings=effort.settings,
    )
    count = found.evaluations.clone()
    count[rows] += more.evaluations
    best = merged(found, rows, more, torch.ones(len(rows), dtype=torch.bool))
    return replace(best, evaluations=count)


def merged(old: Matches, rows: list[int], new: Matches, take: Tensor) -> Matches:
    """Return `old` with its victims `rows` replaced by those of `new` where `take` [len(rows)] holds."""
    chosen = torch.tensor(rows)[take]

    def put(a: Tensor, b: Tensor) -> Tensor:
        out = a.to(b.dtype).clone() if b.dtype == torch.float64 else a.clone()
        out[chosen] = b[take].to(out.dtype)
        return out

    ends = Starts(
        put(old.ends.x, new.ends.x),
        put(old.ends.y, new.ends.y),
        old.ends.joint,
        put(old.ends.extra, new.ends.extra),
    )
    reasons = list(old.reasons)
    for row, reason, ok in zip(rows, new.reasons, take.tolist(), strict=True):
        reasons[row] = reason if ok else reasons[row]
    return Matches(ends, put(old.mismatch, new.mismatch), put(old.evaluations, new.evaluations), tuple(reasons))
