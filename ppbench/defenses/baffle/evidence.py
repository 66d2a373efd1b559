"""Which of a view's messages tell of a client's gradient under BAFFLE."""

from __future__ import annotations

from collections import defaultdict

from ppbench.defenses.baffle.messages import Evaluate
from ppbench.federation.view import TARGET, Exchange, View
from ppbench.federation.wire import Slot


def answers(view: View) -> dict[Slot, list[Exchange]]:
    """Return all clients' answers by slot, oldest first; of colluders' views the target's, of one client's none."""
    found: dict[Slot, list[Exchange]] = defaultdict(list)
    for exchange in () if view.threat.startswith("client/") else view.exchanges():
        asked_about = exchange.slot.client == TARGET or not view.threat.startswith("collusion/")
        if asked_about and isinstance(exchange.asked, Evaluate):
            found[exchange.slot].append(exchange)
    return dict(found)
