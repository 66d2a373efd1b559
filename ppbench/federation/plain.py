"""The evidence of an attacker that takes every upload for an undefended one: the default of `Defense.evidence`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppbench.base.tree import Params, tree_map
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.messages import Model
from ppbench.federation.plan import Context
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER, Slot


def plain_evidence(view: View) -> list[Evidence]:
    """Return evidence for an attacker that takes every update for the undefended gradient of one batch.

    Server and eavesdropper use each client's first upload; a weight change, divided by the learning rate and the
    epochs, is taken for a gradient. A client sees only the others' mean, as the difference of two broadcasts.
    """
    if not view.threat.sees_uploads:
        return _difference_evidence(view)
    shared, by_slot = Shared(view.plan), dict[Slot, Evidence]()
    for exchange in view.exchanges():
        if not isinstance(exchange.request, Model) or exchange.slot in by_slot:
            continue
        params, divisor = shared.same(exchange.request.params), as_gradient(view.plan, exchange.round)
        change = _update(view, exchange, params)
        if not _fits(change, params):  # only the server can decode it
            continue
        observed = change if divisor == 1 else tree_map(lambda value, d=divisor: value / d, change)  # type: ignore[misc]
        by_slot[exchange.slot] = Evidence((exchange.slot,), observed, shared.at(params), params)
    return list(by_slot.values())


def _update(view: View, exchange: Exchange, params: Params) -> Params:
    """Return the decoded update of an upload; the server decodes with its secrets of that step."""
    server = view.state_at(exchange) if view.party == SERVER else None
    if server is None:
        return view.defense.decode(exchange.answer, params)
    ctx = Context(view.plan, exchange.round, view.session(exchange), SERVER, torch.Generator())
    return view.defense.decoded(ctx, server, exchange.slot.client, exchange.answer)


def _fits(update: Params, like: Params) -> bool:
    """Return whether an update has the model's names and shapes."""
    return update.keys() == like.keys() and all(update[name].shape == value.shape for name, value in like.items())


def client_observations(view: View) -> Iterator[tuple[tuple[Slot, ...], list[Exchange], Params, Params]]:
    """Yield by probe what curious clients saw of a round: all others' slots, their own uploads, two models in a row."""
    first = {exchange.slot: exchange for exchange in reversed(list(view.exchanges()))}
    for probe, _ in view.data:
        sent = [m.params for m in view.broadcasts(probe) if isinstance(m, Model)]
        inside = [Slot(probe, c) for c in range(view.plan.clients) if view.inside(c)]
        own_uploads = [first[slot] for slot in inside if slot in first]
        others = tuple(Slot(probe, c) for c in range(view.plan.clients) if not view.inside(c))
        if len(sent) > 1 and own_uploads and len(own_uploads) == len(inside) and others:
            yield others, own_uploads, sent[0], sent[1]


def _difference_evidence(view: View) -> list[Evidence]:
    """Return the others' mean gradient (weights 1/N: their N_k are secret) from two broadcasts and own uploads."""
    opt, shared, pieces = view.plan.server_opt, Shared(view.plan), []
    if opt.name != "sgd" or opt.momentum:
        return []
    for others, own_uploads, first, second in client_observations(view):
        own_updates = [view.defense.decode(e.answer, first) for e in own_uploads]
        size, divisor = len(others) + len(own_uploads), len(others) * as_gradient(view.plan, own_uploads[0].round)
        total = {n: (first[n].double() - second[n].double()) / opt.lr * size for n in first}
        observed = {n: (total[n] - sum(update[n].double() for update in own_updates)) / divisor for n in first}
        pieces.append(Evidence(others, observed, shared.at(first), first, channel="aggregate"))
    return pieces
