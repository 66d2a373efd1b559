"""The evidence of an attacker who takes every upload for an undefended one: the default of `Defense.evidence`."""

from __future__ import annotations

import torch

from ppbench.base.tree import Params, tree_map
from ppbench.federation.evidence import Evidence, Simulate, as_gradient, simulation
from ppbench.federation.messages import Model
from ppbench.federation.plan import Context
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER, Slot, session_of


def plain_evidence(view: View) -> list[Evidence]:
    """Return evidence for an attacker who takes every update for the undefended gradient of one batch.

    Server and eavesdropper see each client's upload; of several rounds the first, since an exact gradient needs no
    second. Where clients train locally, their weight change over the learning rate and the epochs is taken for it. A
    client sees the aggregate only, as the difference of two broadcasts (server optimizer plain SGD): one piece of
    evidence about all other clients together.
    """
    if view.threat.startswith("client/"):
        return _difference_evidence(view)
    shared: list[tuple[Params, Simulate]] = []  # one a model, not one a probe: attacks batch by identity
    found: dict[Slot, Evidence] = {}
    for exchange in view.exchanges():
        if not isinstance(exchange.asked, Model) or exchange.slot in found:
            continue
        asked = exchange.asked.params
        known = (pair for pair in shared if all(torch.equal(pair[0][n], v) for n, v in asked.items()))
        params, simulate = next(known, (asked, None))
        if simulate is None:
            simulate = simulation(view.plan, params)
            shared.append((params, simulate))
        change, divisor = _update(view, exchange, params), as_gradient(view.plan, exchange.round)
        observed = change if divisor == 1 else tree_map(lambda value, d=divisor: value / d, change)  # type: ignore[misc]
        found[exchange.slot] = Evidence((exchange.slot,), observed, simulate, params)
    return list(found.values())


def _update(view: View, exchange: Exchange, params: Params) -> Params:
    """Return the update that an upload stands for: to the server what it decodes with its secrets of that step."""
    server = view.state_at(exchange) if view.party == SERVER else None
    if server is None:
        return view.defense.decode(exchange.answer, params)
    ctx = Context(view.plan, exchange.round, session_of(exchange.slot.probe), SERVER, torch.Generator())
    return view.defense.decoded(ctx, server, exchange.slot.client, exchange.answer)


def _difference_evidence(view: View) -> list[Evidence]:
    """Return the mean gradient of the other clients, from two broadcasts and the adversary's own batch.

    Its own share is what it uploaded itself, as its mail has it. The weights are those of equal shards (1/N): a client
    is not told the others' N_k.
    """
    opt, found = view.plan.server_opt, []
    if opt.name != "sgd" or opt.momentum:
        return []
    uploads = [(e.slot, e) for e in view.exchanges()]
    for probe, _ in view.data:
        sent = [m for m in view.broadcasts(probe) if isinstance(m, Model)]
        mine = next((e for slot, e in uploads if slot == Slot(probe, view.party or 0)), None)
        others = tuple(Slot(probe, c) for c in range(view.plan.clients) if c != view.party)
        if len(sent) < 2 or mine is None or not others:
            continue
        first, second = sent[0].params, sent[1].params
        own = view.defense.decode(mine.answer, first)
        size, divisor = len(others) + 1, len(others) * as_gradient(view.plan, mine.round)
        observed = {
            n: ((first[n].double() - second[n].double()) / opt.lr * size - own[n].double()) / divisor for n in first
        }
        found.append(Evidence(others, observed, simulation(view.plan, first), first, channel="aggregate"))
    return found
