"""Evidence from FedPC's messages: who was pilot, signs of steps, and the plain evidence."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ppbench.base.tree import Params
from ppbench.defenses.fedpc.messages import Ledger, Masked, Ternary, Weights, unmasked_ternary
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


def command_answers(view: View) -> list[Exchange]:
    """Return the answers to commands in `view`, in order of time; unmasked if the view has all other senders' keys."""
    return [_bare(view, e) for e in view.exchanges() if isinstance(e.answer, Weights | Ternary | Masked)]


def _bare(view: View, exchange: Exchange) -> Exchange:
    trits = unmasked_ternary(view, exchange) if isinstance(exchange.answer, Masked) else None
    if trits is None:
        return exchange
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    return replace(exchange, answer=Ternary(encoded(trits, defense.packing, defense.padded)))


def pilots(view: View) -> dict[tuple[int, int], int]:
    """Return the pilot by (probe, round), as far as `view` shows it: a client knows only of itself."""
    return {(e.slot.probe, e.round): e.slot.client for e in command_answers(view) if isinstance(e.answer, Weights)}


def round_model(view: View, probe: int, round_: int) -> Params | None:
    """Return the model P^{t-1} with which round t began, from the mail of `view`, or None if it has none."""
    models = (
        envelope.message.params
        for envelope in view.mail
        if (envelope.probe, envelope.round, envelope.sender) == (probe, round_, SERVER)
        and isinstance(envelope.message, Model)
    )
    return next(models, None)


def previous_model(view: View, exchange: Exchange) -> Params | None:
    """Return the model P^{t-2}, `{}` in round 1; None if `view` has none: an eavesdropper that came later."""
    if exchange.round == 1:
        return {}
    server = view.state_at(exchange, SERVER)
    if isinstance(server, Server) and isinstance(server.own, Ledger):
        return server.own.before
    return round_model(view, exchange.slot.probe, exchange.round - 1)


def step_signs(view: View, exchange: Exchange) -> Params | None:
    """Return the signs of a client's P^{t-1} - Q^t that an upload reveals: -1, 1, or 0 for unknown; float32.

    After one plain step these are the gradient's signs. A pilot reveals all; a ternary sender those of the nonzero
    entries: T = sign(Q - P) in round 1 and T = sign(Q - P) sign(P^{t-1} - P^{t-2}) later. None if the view lacks the
    models, or the ternaries are masked.
    """
    last, older = round_model(view, exchange.slot.probe, exchange.round), previous_model(view, exchange)
    if last is None or isinstance(exchange.answer, Masked):
        return None
    change = view.defense.decode(exchange.answer, last)
    if isinstance(exchange.answer, Weights):
        return {name: value.sign() for name, value in change.items()}
    if older is None:
        return None
    if not older:
        return {name: -value for name, value in change.items()}
    return {name: -value * (last[name] - older[name]).sign() for name, value in change.items()}


def fedpc_evidence(view: View) -> list[Evidence]:
    """Return one piece of evidence per slot, for an attacker that takes uploads for gradients at the broadcast model.

    - A pilot (in its first round as one): P - Q, divided by the plan's nominal learning rate and epochs.
    - A ternary sender: the server's surrogate, -beta T (P^{t-1} - P^{t-2}), in round 1 -alpha0 T, over the same.
    - Masked ternaries: the N_k-weighted mean of the surrogates of all their senders, about all of them together.
    - For a client: the change of the model in a round in which it was no pilot, about all others together.
    """
    shared = Shared(view.plan)
    if not view.threat.sees_uploads:
        return _client_evidence(view, shared)
    best: dict[Slot, Exchange] = {}
    hidden: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    for exchange in command_answers(view):
        if isinstance(exchange.answer, Masked):
            hidden[exchange.slot.probe, exchange.round].append(exchange)
        elif exchange.slot not in best or _rank(view, exchange) > _rank(view, best[exchange.slot]):
            best[exchange.slot] = exchange
    pieces = [piece for exchange in best.values() if (piece := _piece(view, exchange, shared)) is not None]
    return pieces + [piece for unit in hidden.values() if (piece := _sum_piece(view, unit, shared)) is not None]


def _rank(view: View, exchange: Exchange) -> int:
    """Return the rank of an upload's information: 2 a model, 1 a ternary vector with a last step, 0 one without."""
    return 2 if isinstance(exchange.answer, Weights) else int(bool(previous_model(view, exchange)))


def nominal_divisor(plan: Plan, round_: int) -> float:
    """Return the divisor that turns a weight change of round `round_` into a gradient: rate times epochs."""
    return plan.local.opt.rate(round_) if plan.local.upload == "gradient" else as_gradient(plan, round_)


def _piece(view: View, exchange: Exchange, shared: Shared) -> Evidence | None:
    last, older = round_model(view, exchange.slot.probe, exchange.round), previous_model(view, exchange)
    if last is None:
        return None
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    divisor, change = nominal_divisor(view.plan, exchange.round), defense.decode(exchange.answer, last)
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
    if server is None or len(unit) < int(unit[0].request.senders.sum()):  # masks cancel in the sum of all senders only
        return None
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    counts = server.counts[[e.slot.client for e in unit]].double()
    votes = defense.votes(server, {e.slot.client: e.answer for e in unit})
    mean = (
        -defense.reach(server.params, server.own.before)
        * votes
        / counts.sum()
        / nominal_divisor(view.plan, unit[0].round)
    )
    return cohort_evidence(shared, Layout.of(server.params).unpack(mean), unit, server)


def _client_evidence(view: View, shared: Shared) -> list[Evidence]:
    pieces: list[Evidence] = []
    own = set(pilots(view))
    for probe, _ in view.data:
        others = tuple(Slot(probe, c) for c in range(view.plan.clients) if not view.inside(c))
        rounds = sorted(
            {e.round for e in command_answers(view) if e.slot.probe == probe} - {r for p, r in own if p == probe}
        )
        pairs = ((round_model(view, probe, r), round_model(view, probe, r + 1), r) for r in rounds)
        first = next(((a, b, r) for a, b, r in pairs if a is not None and b is not None), None)
        if first is None or not others:
            continue
        last, new, round_ = first
        observed = {n: (last[n].double() - new[n].double()) / nominal_divisor(view.plan, round_) for n in last}
        pieces.append(Evidence(others, observed, shared.at(last), last, channel="aggregate"))
    return pieces
