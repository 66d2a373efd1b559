"""Secure aggregation alone: FedAvg whose clients mask their updates by keys of all pairs, or of some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, NonNegativeInt
from ppbench.federation.contract import Context, Round, Server, others_evidence
from ppbench.federation.evidence import Evidence, Shared, as_gradients
from ppbench.federation.plan import Layout
from ppbench.federation.secagg import PairedDefense, cohort_evidence, cohorts, others_masks
from ppbench.federation.threats import TARGET
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Update

UPDATE_MASKS = "update"


@dataclass(frozen=True)
class SecureAggregation(PairedDefense):
    """Clients send N_k / N times their update in fixed point plus pairwise masks; the server reads the sum of all.

    No client drops out, so keys are not secret-shared as in Bonawitz et al. fraction_bits: 40 represent values below
    4e6 to 5e-13.
    """

    fraction_bits: Bits = 40

    name: ClassVar[str] = "secagg"
    version: ClassVar[str] = "3"
    paper: ClassVar[str] = (
        "Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017"
    )
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: {"schedule": "parallel"} for name in ("quick", "paper")}
    epsilon_reason: ClassVar[str] = "there is no noise; the server reads the exact sum of the cohort's updates"
    tracks: ClassVar[bool] = True
    sums = True

    def upload(self, ctx: Context, me: secagg.PairKeys, result: Params) -> Tree:
        """Return N_k / N times the update in fixed point, masked, int64 (Overflow)."""
        return Update(secagg.hide(me, ctx, UPDATE_MASKS, result, self.fraction_bits, me.share(ctx.party)))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Sum in the ring, where masks cancel, and step on the mean (ProtocolError: a missing or malformed upload)."""
        secagg.need_everybody(server, uploads)
        like = {name: value.shape for name, value in server.params.items()}
        for client, upload in uploads.items():
            if not isinstance(upload, Update) or {n: v.shape for n, v in upload.params.items()} != like:
                raise ProtocolError(f"Client {client} sent an upload that is no masked update of the model.")
        return self.stepped(ctx, server, self.total([upload.params for upload in uploads.values()]))

    def total(self, uploads: Sequence[Params]) -> Params:
        """Return the N_k-weighted mean update, float64, from all masked uploads."""
        return secagg.sum_of_masked(uploads, self.fraction_bits)

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of whole cohorts' means (server), client 0's update (colluders), the others' mean (clients).

        A listener gets none.
        """
        if not view.threat.sees_uploads:
            return others_evidence(view, partial(self._own, view), _weights(view))
        uploads, shared = list(view.first_uploads().values()), Shared(view.plan)
        if view.threat.colludes:
            bare = [(e, self._bare(view, e)) for e in uploads if e.slot.client == TARGET]
            return [
                shared.mean((e.slot,), update, e.request.params, [1.0], "update")
                for e, update in bare
                if update is not None
            ]
        pieces = []
        for unit in cohorts(uploads, view.plan.clients):
            server = view.state_at(unit[0])
            if server is not None:
                mean = as_gradients(view.plan, unit[0].round, self.total([e.answer.params for e in unit]))
                pieces.append(cohort_evidence(shared, mean, unit, server))
        return pieces

    def _own(self, view: View, exchange: Exchange, params: Params) -> Params:
        """Return N times what a curious client added to the mean: its upload less its own mask."""
        client, layout = exchange.slot.client, Layout.of(exchange.answer.params)
        flat = layout.pack(exchange.answer.params)
        ctx = Context(view.plan, exchange.round, view.session(exchange), client, torch.Generator())
        state = view.state_at(exchange, client)
        assert state is not None  # a view of clients has their states
        mask = secagg.zero_sum(state, ctx, UPDATE_MASKS, len(flat))
        bare = secagg.from_ring(flat.cpu() - mask, self.fraction_bits) * view.plan.clients
        return layout.unpack(bare.to(flat.device))

    def _bare(self, view: View, exchange: Exchange) -> Params | None:
        """Return the unmasked update of one upload, by the keys of all other clients; None if the view lacks some."""
        layout = Layout.of(exchange.answer.params)
        flat, everybody = layout.pack(exchange.answer.params), range(view.plan.clients)
        masks = others_masks(view, exchange, everybody, lambda state: state, UPDATE_MASKS, len(flat))
        server = view.state_at(exchange)
        if masks is None or server is None:
            return None
        share = float(server.counts[exchange.slot.client]) / float(server.counts.sum())
        bare = secagg.from_ring(flat.cpu() + masks, self.fraction_bits)
        return as_gradients(view.plan, exchange.round, layout.unpack(bare.to(flat.device)), share)


def _weights(view: View) -> list[float]:
    """Return N times each client's share of all examples; those that curious clients do not know are equal."""
    shares: dict[int, float] = {}
    for record in view.states:
        shares |= record.state.known_shares(record.party)
    size = view.plan.clients
    rest = (1 - sum(shares.values())) / max(1, size - len(shares))
    return [shares.get(client, rest) * size for client in range(size)]


@dataclass(frozen=True)
class SparseSecureAggregation(SecureAggregation):
    """Secure aggregation in which each client shares keys with a few others: work per client grows with log N, not N.

    neighbors: of each client, an even number (or all others). 0: the fewest with which an adversary that corrupts a
    third of the clients before the graph is drawn surrounds an honest one with probability below 2^-40, by N / 3^D.
    The server draws the graph, so it must be honest in that; the keys of all its neighbors unmask a client.
    """

    neighbors: NonNegativeInt = 0

    name: ClassVar[str] = "secagg_plus"
    paper: ClassVar[str] = "Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020"

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Draw the graph and exchange keys along it; no client learns of others than its neighbors."""
        neighbors = secagg.ring_neighbors(len(cohort), self.degree(len(cohort)), ctx.secret)
        return secagg.exchange_neighbor_keys(server, cohort, neighbors)

    def degree(self, clients: int) -> int:
        """Return the number of neighbors of each of `clients` clients, at most all others."""
        return min(clients - 1, self.neighbors or math.ceil((40 + math.log2(clients)) / math.log2(3)))
