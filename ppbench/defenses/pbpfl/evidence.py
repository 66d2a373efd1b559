"""Which of a view's messages tell of a client's gradient under PBPFL and MP-DP: single uploads, and whole cohorts."""

from __future__ import annotations

from ppbench.defenses.evidence import cohorts
from ppbench.defenses.pbpfl.perturbation import Perturbed, Surrogates
from ppbench.federation.view import Exchange, View


def exchanges(view: View) -> list[Exchange]:
    """Return the view's uploads of surrogates, or none for a client: it sees its own only."""
    if view.threat.startswith("client/"):
        return []
    return [e for e in view.exchanges() if isinstance(e.asked, Perturbed) and isinstance(e.answer, Surrogates)]


def whole_cohorts(view: View) -> list[list[Exchange]]:
    """Return the uploads of surrogates of every probe in which all clients took part."""
    return cohorts(exchanges(view), view.plan.clients)
