"""What an attacker who takes BAFFLE's estimates for gradients knows of a victim: a noisy gradient at public weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ppbench.base.tree import Params
from ppbench.defenses.baffle.messages import Evaluate
from ppbench.defenses.evidence import Shared, cohort_evidence, cohorts
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import TARGET, Exchange, View
from ppbench.federation.wire import Slot

Estimate = Callable[[Sequence[Exchange]], Params]


def answers(view: View) -> dict[Slot, list[Exchange]]:
    """Return the answers of all clients that `view` is about, oldest first, by slot; of colluders' views the target's.

    A single client's view has its own only: none.
    """
    found: dict[Slot, list[Exchange]] = defaultdict(list)
    for exchange in () if view.threat.startswith("client/") else view.exchanges():
        asked_about = exchange.slot.client == TARGET or not view.threat.startswith("collusion/")
        if asked_about and isinstance(exchange.asked, Evaluate):
            found[exchange.slot].append(exchange)
    return dict(found)


def estimated_evidence(view: View, estimate: Estimate) -> list[Evidence]:
    """Return one piece of evidence a client: the estimate from its first answer, taken for the exact gradient."""
    shared = Shared(view.plan)
    first = [some[0] for some in answers(view).values()]
    return [
        Evidence((e.slot,), estimate([e]), shared.at(e.asked.params), e.asked.params, channel="estimate") for e in first
    ]


def summed_evidence(view: View, estimate: Estimate) -> list[Evidence]:
    """Return one piece of evidence a whole cohort, the estimate of its mean gradient, to who has the server's state."""
    first = (some[0] for some in answers(view).values())
    shared, found = Shared(view.plan), []
    for unit in cohorts(first, view.plan.clients):
        server = view.state_at(unit[0])
        if server is not None:
            found.append(cohort_evidence(shared, estimate(unit), unit, server))
    return found
