"""What the parties of PBPFL can say about a victim's gradient: the server exactly, and a listener exactly too."""

from __future__ import annotations

from collections.abc import Callable

from ppbench.base.tree import Params
from ppbench.defenses.evidence import Shared, cohorts
from ppbench.defenses.pbpfl.perturbation import Perturbed, Surrogates
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View

Recover = Callable[[Plan, Server, Surrogates], Params]


def exchanges(view: View) -> list[Exchange]:
    """Return the view's uploads of surrogates, or none for a client: it sees its own only."""
    if view.threat.startswith("client/"):
        return []
    return [e for e in view.exchanges() if isinstance(e.asked, Perturbed) and isinstance(e.answer, Surrogates)]


def gradient_evidence(view: View, recover: Recover) -> list[Evidence]:
    """Return one exact piece of evidence a victim: the recovered gradient at the true weights for the server.

    Who has no secrets takes the first surrogate, which is the plain gradient of the squared loss at the perturbed
    weights: a perturbed network is a network.
    """
    shared, found = Shared(view.plan), []
    for exchange in exchanges(view):
        server = view.state_at(exchange)
        if server is None:
            params, observed, channel = exchange.asked.params, exchange.answer.g, "g"
        else:
            params, observed, channel = server.params, recover(view.plan, server, exchange.answer), "recovered"
        found.append(Evidence((exchange.slot,), observed, shared.at(params), params, channel=channel))
    return found


def whole_cohorts(view: View) -> list[list[Exchange]]:
    """Return the uploads of surrogates of every probe in which all clients took part."""
    return cohorts(exchanges(view), view.plan.clients)
