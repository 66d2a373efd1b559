"""What an active server reads: evidence about its target alone, and which recovered images are plausible."""

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

RANGE_SLACK = 0.25
"""How far pixels of a recovered image may lie outside the data range, in units of it; noise lies farther somewhere."""
SAME_IMAGE = 1e-3
"""Root mean squared distance, in units of the data range, below which two bins hold the same image."""


def of_targets(view: View) -> list[Evidence]:
    """Return the defense's evidence; from a cohort where only the target has a gradient, the target's."""
    readable: list[Evidence] = []
    for evidence in view.defense.evidence(view):
        if len(evidence.unit) == 1:
            readable.append(evidence)
        elif any(slot.client == TARGET for slot in evidence.unit):
            readable += _of_target(view, evidence)
    return readable


def server_of(view: View, slot: Slot) -> Server | None:
    """Return the server's own state in a slot's probe, with the weights sent to its target; None if there is none."""
    states = (s.state for s in view.states if s.probe == slot.probe and s.party == SERVER)
    return next((state for state in states if isinstance(state, Server)), None)


def _of_target(view: View, evidence: Evidence) -> list[Evidence]:
    """Return evidence about a cohort as evidence about the target alone: divided by its share of the examples."""
    target = next(slot for slot in evidence.unit if slot.client == TARGET)
    server = server_of(view, target)
    if server is None:
        return []
    counts = server.counts[[slot.client for slot in evidence.unit]].double()
    share = float(server.counts[TARGET] / counts.sum())
    observed = {name: value / share for name, value in evidence.observed.items()}
    return [replace(evidence, unit=(target,), observed=observed, simulate=simulation(view.plan, server.params))]


def plausible_images(images: Tensor, plan: Plan) -> Tensor:
    """Return those of images [N, *shape] that lie near the data range; of two alike only the first."""
    low, high = plan.data_range
    slack, flat = RANGE_SLACK * (high - low), images.flatten(1)
    inside = flat.isfinite().all(1) & (flat >= low - slack).all(1) & (flat <= high + slack).all(1)
    kept: list[Tensor] = []
    for image in flat[inside]:
        distances = [float((image - other).square().mean().sqrt()) for other in kept]
        if min(distances, default=high - low) > SAME_IMAGE * (high - low):
            kept.append(image)
    return torch.stack(kept).view(-1, *images.shape[1:]) if kept else images[:0]
