"""What an adversary can say from FedPC's messages: who was pilot, signs of steps, and plain evidence."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ppbench.base.tree import Params
from ppbench.defenses.fedpc.messages import Ledger, Masked, Ternary, Weights, peeled
from ppbench.defenses.fedpc.parameters import Parameters
from ppbench.defenses.fedpc.ternary import encoded
from ppbench.federation.cohort import cohort_evidence
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.messages import Model
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER, Slot


def uploads(view: View) -> list[Exchange]:
    """Return the answers to commands in `view`, in order of time; without masks where all other senders pool keys."""
    return [_bare(view, e) for e in view.exchanges() if isinstance(e.answer, Weights | Ternary | Masked)]


def _bare(view: View, exchange: Exchange) -> Exchange:
    trits = peeled(view, exchange) if isinstance(exchange.answer, Masked) else None
    if trits is None:
        return exchange
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    return replace(exchange, answer=Ternary(encoded(trits, defense.packing, defense.padded)))


def pilots(view: View) -> dict[tuple[int, int], int]:
    """Return the pilot by (probe, round), as far as `view` shows it: a client knows of itself only."""
    return {(e.slot.probe, e.round): e.slot.client for e in uploads(view) if isinstance(e.answer, Weights)}


def model_of(view: View, probe: int, round_: int) -> Params | None:
    """Return the model P^{t-1} that round t began with, from the mail of `view`, or None where it shows none."""
    sent = (
        letter.message.params
        for letter in view.mail
        if (letter.probe, letter.round, letter.sender) == (probe, round_, SERVER) and isinstance(letter.message, Model)
    )
    return next(sent, None)


def before(view: View, exchange: Exchange) -> Params | None:
    """Return the model P^{t-2}, `{}` in round 1; None where `view` does not show it: a listener who came later."""
    if exchange.round == 1:
        return {}
    server = view.state_at(exchange, SERVER)
    if isinstance(server, Server) and isinstance(server.own, Ledger):
        return server.own.before
    return model_of(view, exchange.slot.probe, exchange.round - 1)


def signs(view: View, exchange: Exchange) -> Params | None:
    """Return what an upload tells of the sign of each of the client's P^{t-1} - Q^t: -1, 1, or 0 for unknown; float32.

    After one plain step it is the sign of the gradient. A pilot tells all; a ternary sender those of the entries that
    are not 0, exactly: T = sign(Q - P) in round 1 and T = sign(Q - P) sign(P^{t-1} - P^{t-2}) later. None where the
    view lacks the models that it takes, or the ternaries are masked.
    """
    last, older = model_of(view, exchange.slot.probe, exchange.round), before(view, exchange)
    if last is None or isinstance(exchange.answer, Masked):
        return None
    read = view.defense.decode(exchange.answer, last)
    if isinstance(exchange.answer, Weights):
        return {name: value.sign() for name, value in read.items()}
    if older is None:
        return None
    if not older:
        return {name: -value for name, value in read.items()}
    return {name: -value * (last[name] - older[name]).sign() for name, value in read.items()}


def evidence(view: View) -> list[Evidence]:
    """Return one piece of evidence a slot, of an attacker who takes uploads for gradients at the broadcast model.

    - A pilot (in its first round as one): P - Q over the plan's nominal learning rate and epochs.
    - A ternary sender: the surrogate that the server uses, -beta T (P^{t-1} - P^{t-2}), over the same; else -alpha0 T.
    - Masked ternaries: the N_k-weighted mean of the surrogates of all their senders, about all of them together.
    - To a client: the change of the model in a round in which it was no pilot, about all others together.
    """
    shared = Shared(view.plan)
    if not view.threat.sees_uploads:
        return _seen_by_client(view, shared)
    best: dict[Slot, Exchange] = {}
    hidden: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    for exchange in uploads(view):
        if isinstance(exchange.answer, Masked):
            hidden[exchange.slot.probe, exchange.round].append(exchange)
        elif exchange.slot not in best or _rank(view, exchange) > _rank(view, best[exchange.slot]):
            best[exchange.slot] = exchange
    found = [piece for exchange in best.values() if (piece := _piece(view, exchange, shared)) is not None]
    return found + [piece for unit in hidden.values() if (piece := _sum_piece(view, unit, shared)) is not None]


def _rank(view: View, exchange: Exchange) -> int:
    """Return how much an upload tells: 2 a model, 1 a ternary vector with a last step, 0 one without."""
    return 2 if isinstance(exchange.answer, Weights) else int(bool(before(view, exchange)))


def nominal(plan: Plan, round_: int) -> float:
    """Return what a weight change of round `round_` is divided by to be taken for a gradient: rate times epochs."""
    return plan.local.opt.rate(round_) if plan.local.upload == "gradient" else as_gradient(plan, round_)


def _piece(view: View, exchange: Exchange, shared: Shared) -> Evidence | None:
    last, older = model_of(view, exchange.slot.probe, exchange.round), before(view, exchange)
    if last is None:
        return None
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    divisor, change = nominal(view.plan, exchange.round), defense.decode(exchange.answer, last)
    if isinstance(exchange.answer, Ternary):
        if older is None:
            return None
        reach = Layout.of(last).unpack(defense.reach(last, older).to(next(iter(last.values())).dtype))
        change = {name: -value * reach[name] for name, value in change.items()}
    observed = {name: value / divisor for name, value in change.items()}
    if isinstance(exchange.answer, Ternary):
        return Evidence((exchange.slot,), observed, shared.at(last), last, channel="ternary")
    std = defense.pilot_sigma * defense.pilot_clip / divisor
    noise = Noise("gaussian", std) if std else None
    return Evidence((exchange.slot,), observed, shared.at(last), last, noise=noise, channel="pilot")


def _sum_piece(view: View, unit: list[Exchange], shared: Shared) -> Evidence | None:
    server = view.state_at(unit[0], SERVER)
    if server is None or len(unit) < int(unit[0].asked.senders.sum()):  # masks cancel in the sum of all senders only
        return None
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    counts = server.counts[[e.slot.client for e in unit]].double()
    votes = defense.votes(server, {e.slot.client: e.answer for e in unit})
    mean = -defense.reach(server.params, server.own.before) * votes / counts.sum() / nominal(view.plan, unit[0].round)
    return cohort_evidence(shared, Layout.of(server.params).unpack(mean), unit, server)


def _seen_by_client(view: View, shared: Shared) -> list[Evidence]:
    found = []
    own = set(pilots(view))
    for probe, _ in view.data:
        others = tuple(Slot(probe, c) for c in range(view.plan.clients) if not view.inside(c))
        rounds = sorted({e.round for e in uploads(view) if e.slot.probe == probe} - {r for p, r in own if p == probe})
        pairs = ((model_of(view, probe, r), model_of(view, probe, r + 1), r) for r in rounds)
        first = next(((a, b, r) for a, b, r in pairs if a is not None and b is not None), None)
        if first is None or not others:
            continue
        last, new, round_ = first
        observed = {n: (last[n].double() - new[n].double()) / nominal(view.plan, round_) for n in last}
        found.append(Evidence(others, observed, shared.at(last), last, channel="aggregate"))
    return found
