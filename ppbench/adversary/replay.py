"""The server's own use of what clients send, as evidence.

Whatever a defense does to an upload, and whatever its author says of it, the server must turn it into a change of the
model. So its own code is run again, from the state and the draws that it had when the round began, on one client's
messages; the change of the weights, through a server optimizer that steps by exactly what it is given, is the update
that this client sent. Nobody who writes a defense writes anything for it; it needs no truth and no client's secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ppbench.base.tree import Params, Tree, finite, leaves, tree_map
from ppbench.federation.contract import Defense, Server
from ppbench.federation.evidence import Evidence, Measure, Shared, as_gradient
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Context
from ppbench.federation.view import Begun, Exchange, View
from ppbench.federation.wire import SERVER, Slot

ALIKE = 1e-4
"""Relative distance up to which two updates, or a message and its copy, are the same: float32 sums in another order."""
OUTSIZED = 1e3
"""An update so many times the cohort's is a mask that only the sum takes off."""


Reading = tuple[Params, Measure]


@dataclass(frozen=True)
class Observed:
    """One round of one probe as its server saw it: what it had, and each client's messages by step, in order."""

    view: View
    begun: Begun
    exchanges: Sequence[Exchange]

    @property
    def cohort(self) -> list[int]:
        """The clients that answered."""
        return sorted({exchange.slot.client for exchange in self.exchanges})

    @property
    def probe(self) -> int:
        """The probe."""
        return self.exchanges[0].slot.probe

    @property
    def round(self) -> int:
        """The round."""
        return self.exchanges[0].round

    @property
    def steps(self) -> int:
        """How many steps the server took in the round."""
        states = (s for s in self.view.states if s.party == SERVER and (s.probe, s.round) == (self.probe, self.round))
        return 1 + max(state.step for state in states)

    def shares(self) -> list[float]:
        """Return the weights that the server gives to clients; equal ones where it has no say in that."""
        cohort = self.cohort
        try:
            return list(cast(Defense, self.view.defense).weights(self.begun.server, cohort))
        except Exception:  # noqa: BLE001 - a stranger's code; what it would have been then shows in the sum
            return [1 / len(cohort)] * len(cohort)

    def tried(self, cohort: Sequence[int], kept: Sequence[int] | None = None) -> Params | None:
        """Return `stepped`; None also where the protocol refuses such a cohort, or the change is no number.

        From weights in float64, which a small change does not vanish in; as they are where the server cannot use these.
        """
        for dtype in (torch.float64, None):
            try:
                change = self.stepped(cohort, cohort if kept is None else kept, dtype)
            except RuntimeError:
                continue
            return change if change is not None and finite(change) else None
        return None

    def stepped(self, cohort: Sequence[int], kept: Sequence[int], dtype: torch.dtype | None) -> Params | None:
        """Return the change of the weights, float64, when `cohort` alone takes part and others than `kept` send zeros.

        dtype: of the weights from which the server steps; None: theirs.

        None where the server asks a client what it did not ask it then (it would read the answers by other secrets), or
        goes on for more steps than it took then, as one that asks again who does not answer. A
        protocol may refuse such a cohort by any exception of its own: RuntimeError, with that as its cause.
        """
        server, plan = _fresh(self.begun.server, dtype), replace(self.view.plan, server_opt=Opt())
        generator = torch.Generator()
        generator.set_state(self.begun.draws.cpu())
        ctx = Context(plan, self.round, self.begun.session, SERVER, generator)
        told = {(e.step, e.slot.client): e for e in self.exchanges}
        coroutine = cast(Defense, self.view.defense).round(ctx, server, list(cohort))
        answers = None
        for step in range(self.steps + 1):
            try:
                request = coroutine.send(answers)  # type: ignore[arg-type]  # None starts a coroutine
            except StopIteration as stop:
                ends = {name: end.detach().double() for name, end in stop.value.params.items()}
                return {name: server.params[name].double() - end for name, end in ends.items()}
            except Exception as cause:  # a stranger's server may refuse in any way
                raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause
            known = {client: told.get((step, client)) for client in request.out}
            if not all(e is None or _same(request.out[client], e.request) for client, e in known.items()):
                return None
            answers = {
                client: e.answer if client in kept else tree_map(torch.zeros_like, e.answer)
                for client, e in known.items()
                if e is not None
            }
        return None


def replayed(view: View) -> list[Evidence]:
    """Return, to who sees the server's states, the gradients that its own code makes of clients' messages, of each
    client's and of the whole cohort's; of several rounds the first.

    A client's is what the server makes of it alone; where these do not add up to what it made of all together, what the
    client adds to a cohort that sends zeros, of unknown scale. Where zeros move the model too, by anybody alike, it is
    told a second time without that: noise of the server's own is then gone.
    """
    shared, found = Shared(view.plan), list[Evidence]()
    for observed in _rounds(view):
        params, divisor = shared.same(observed.begun.server.params), as_gradient(view.plan, observed.round)
        shares = observed.shares()
        total = observed.tried(observed.cohort)
        for client, readings in zip(observed.cohort, _readings(observed, total, shares), strict=True):
            for part, measure in readings:
                if total is None or _size(part) <= OUTSIZED * _size(total):
                    update = tree_map(lambda value, d=divisor: value / d, part)  # type: ignore[misc]
                    unit, simulate = (Slot(observed.probe, client),), shared.at(params)
                    found.append(Evidence(unit, update, simulate, params, measure=measure, channel="server"))
        if total is not None and len(shares) > 1:
            slots = tuple(Slot(observed.probe, client) for client in observed.cohort)
            update = tree_map(lambda value, d=divisor: value / d, total)  # type: ignore[misc]
            equal = max(shares) - min(shares) < 1e-12
            simulate = shared.at(params, () if equal else tuple(shares))
            found.append(Evidence(slots, update, simulate, params if equal else None, channel="server"))
    return found


def _rounds(view: View) -> Iterator[Observed]:
    """Yield the first round of each probe of which the server's beginning is known; in round robin turn by turn."""
    by_round: dict[tuple[int, int], list[Exchange]] = {}
    for exchange in view.exchanges():
        by_round.setdefault((exchange.slot.probe, exchange.round), []).append(exchange)
    seen = set[int]()
    for (probe, round_), exchanges in sorted(by_round.items()):
        begun = view.begun(probe, round_)
        if probe not in seen and begun is not None and isinstance(begun.server, Server):
            yield from (
                [Observed(view, begun, exchanges)]
                if view.plan.schedule == "parallel"
                else _turns(view, begun, exchanges)
            )
        seen.add(probe)


def _turns(view: View, begun: Begun, exchanges: Sequence[Exchange]) -> Iterator[Observed]:
    """Yield each client's turn, a round of its own that begins with the state that the server had then."""
    for client in sorted({exchange.slot.client for exchange in exchanges}):
        own = [exchange for exchange in exchanges if exchange.slot.client == client]
        first, state = own[0].step, view.state_at(own[0], SERVER)
        if isinstance(state, Server):
            yield Observed(view, replace(begun, server=state), [replace(e, step=e.step - first) for e in own])


def _readings(observed: Observed, total: Params | None, shares: Sequence[float]) -> list[list[Reading]]:
    """Return the ways to read each client's update, and how each may be compared; none where it cannot be told."""
    cohort = observed.cohort
    alone = [observed.tried([client]) for client in cohort]
    if total is None or _add_up(alone, shares, total):
        zeros = [observed.tried([client], []) for client in cohort]
        noisy = zeros[0] is not None and _size(zeros[0]) > 0 and all(_alike(zeros[0], zero) for zero in zeros)
        found: list[list[Reading]] = [[] if part is None else [(part, "squares")] for part in alone]
        for readings, zero in zip(found, zeros, strict=True):
            if noisy and zero is not None and readings:
                readings.append((_minus(readings[0][0], zero), "squares"))
        return found
    silent = observed.tried(cohort, [])
    added = [observed.tried(cohort, [client]) for client in cohort]
    return [[] if part is None or silent is None else [(_minus(part, silent), "cosine")] for part in added]


def _add_up(parts: Sequence[Params | None], shares: Sequence[float], total: Params) -> bool:
    """Return whether the weighted sum of single clients' updates is what all together gave."""
    told = [part for part in parts if part is not None]
    if len(told) < len(parts):
        return False
    mean = {n: sum((w * p[n] for w, p in zip(shares, told, strict=True)), torch.zeros(())) for n in total}
    return _alike(total, mean)


def _alike(one: Params, other: Params | None) -> bool:
    """Return whether a change of the weights is another one, up to rounding."""
    return other is not None and _size(_minus(one, other)) <= ALIKE * _size(one)


def _minus(one: Params, other: Params) -> Params:
    return {name: value - other[name] for name, value in one.items()}


def _fresh(server: Server, dtype: torch.dtype | None) -> Server:
    """Return the server's state with weights of `dtype`, and before the first step of another optimizer."""
    params = {name: value.to(dtype or value.dtype) for name, value in server.params.items()}
    return replace(server, params=params, opt=Opt().init(Layout.of(params).pack(params)))


def _same(message: Tree, told: Tree) -> bool:
    """Return whether a message is the one that was sent then, up to rounding."""
    mine, theirs = leaves(message), leaves(told)
    if type(message) is not type(told) or [m.shape for m in mine] != [t.shape for t in theirs]:
        return False
    pairs = [(m.double(), t.double()) for m, t in zip(mine, theirs, strict=True)]
    apart = sum(float((m - t).square().sum()) for m, t in pairs) ** 0.5
    return bool(apart <= ALIKE * sum(float(t.square().sum()) for _, t in pairs) ** 0.5)


def _size(update: Params) -> float:
    return float(torch.stack([value.double().norm() for value in update.values()]).norm())
