"""What a server that acts reads: of a cohort its target alone, from the weights that it was sent; and which images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.threats import TARGET
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot

SLACK = 0.25
"""How far out of the data range, in units of it, what a bin shows may lie: noise lies farther in some pixel."""
TWICE = 1e-3
"""Root mean squared distance, in units of the data range, below which two bins show one image."""


def of_targets(view: View) -> list[Evidence]:
    """Return what the defense makes of uploads; of a cohort in which one client alone has a gradient, that one's."""
    found: list[Evidence] = []
    for evidence in view.defense.evidence(view):
        if len(evidence.unit) == 1:
            found.append(evidence)
        elif any(slot.client == TARGET for slot in evidence.unit):
            found += _of_target(view, evidence)
    return found


def server_of(view: View, slot: Slot) -> Server | None:
    """Return the server's own state in a probe, with the weights that its target was sent; None where it has none."""
    found = (s.state for s in view.states if s.probe == slot.probe and s.party == SERVER)
    return next((state for state in found if isinstance(state, Server)), None)


def _of_target(view: View, evidence: Evidence) -> list[Evidence]:
    """Return evidence about a cohort as evidence about the target alone: over its share of the examples."""
    target = next(slot for slot in evidence.unit if slot.client == TARGET)
    server = server_of(view, target)
    if server is None:
        return []
    counts = server.counts[[slot.client for slot in evidence.unit]].double()
    share = float(server.counts[TARGET] / counts.sum())
    observed = {name: value / share for name, value in evidence.observed.items()}
    return [replace(evidence, unit=(target,), observed=observed, simulate=simulation(view.plan, server.params))]


def plausible(images: Tensor, plan: Plan) -> Tensor:
    """Return those of images [N, *shape] that lie near the data range, each once; of two alike the first."""
    low, high = plan.data_range
    slack, flat = SLACK * (high - low), images.flatten(1)
    inside = flat.isfinite().all(1) & (flat >= low - slack).all(1) & (flat <= high + slack).all(1)
    kept: list[Tensor] = []
    for image in flat[inside]:
        apart = [float((image - other).square().mean().sqrt()) for other in kept]
        if min(apart, default=high - low) > TWICE * (high - low):
            kept.append(image)
    return torch.stack(kept).view(-1, *images.shape[1:]) if kept else images[:0]
