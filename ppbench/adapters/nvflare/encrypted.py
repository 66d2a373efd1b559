"""HEModelEncryptor over some layers: the server sees each client's other layers in the clear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from nvflare.apis.filter import Filter
from torch import Tensor

from ppbench.adapters.nvflare.mechanism import FilteredChange, FilterState
from ppbench.adapters.nvflare.stock import NVFlareStock, matched
from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Round, Server
from ppbench.federation.evidence import Evidence
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot

ENCRYPTION_PURPOSE, BITS = "encrypted", 40
"""Fixed-point numbers of 40 fractional bits hold changes to 5e-13; CKKS at its default scale, 2^40, to some 1e-8."""


@node
class KeyHolder(FilterState):
    """A client's state. keys: shared with every other client."""

    filters: Tree
    keys: secagg.Keys


@node(name="ppbench.adapters.nvflare.encrypted.Sealed")
class EncryptedChange(FilteredChange):
    """Client to server. words: int64, the masked fixed-point change of the encrypted variables, times `steps`."""

    change: Params
    steps: Tensor
    meta: Tensor
    words: Tensor


@dataclass(frozen=True)
class Encrypted(NVFlareStock):
    """HEModelEncryptor (nvflare.app_opt.he, TenSEAL) over the layers that `encrypt_layers` matches; simulated here.

    Its documentation: "if string containing regular expression (e.g. "conv"), only matched variables are being
    encrypted". The simulation is exact: of each client the server sees the number of steps, the other variables, and
    uniform numbers for the encrypted ones (a test runs the real filter if TenSEAL is installed). The server also gets
    the aggregate of the encrypted variables, so the model. In NVFlare all clients hold the same secret key, so each can
    decrypt the aggregate and every other client's upload: a client that colludes with the server reveals all uploads.
    Bytes are counted as 8 per number, not as ciphertexts.
    """

    encrypt_layers: str = "^features"

    name: ClassVar[str] = "nvflare:stock/he_partial"
    stock: ClassVar[str] = "he_partial"
    epsilon_reason: ClassVar[str] = "encryption adds nothing, and the other variables are sent as they are"

    def filters(self) -> list[Filter]:
        """Return no filters: the encryption is simulated."""
        return []

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse an expression that matches no variable, as the filter does, or all of them."""
        super().check(plan)
        self.require(plan.clients >= 2, "encrypt_layers", "used with 2 clients or more, or the aggregate is an upload")
        matched(self, "encrypt_layers", plan)

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """As the base class; also draw a key pair."""
        return KeyHolder(super().init_client(ctx, params).filters, secagg.new_keys(ctx))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange public keys between all clients."""
        return secagg.exchange_keys(ctx, server, cohort, secagg.complete_graph(len(cohort)))

    def reply(self, ctx: Context, me: FilterState, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Agree on keys at set-up; then answer as the base class, with the encrypted variables masked (Overflow)."""
        if not isinstance(me, KeyHolder):
            raise ProtocolError(f"Client {ctx.party} has no keys.")
        if (setup_reply := secagg.setup_answer(ctx, me.keys, message, data)) is not None:
            return replace(me, keys=setup_reply[0]), setup_reply[1]
        kept, upload = super().reply(ctx, me, message, result, data)
        if not isinstance(upload, FilteredChange):
            raise ProtocolError(f"Client {ctx.party} has nothing to encrypt.")
        hidden = {n: upload.change[n] for n in matched(self, "encrypt_layers", ctx.plan)}
        flat = Layout.of(hidden).pack(hidden)
        ring = secagg.to_ring(flat.cpu() * int(upload.steps), BITS)
        words = ring + secagg.zero_sum(me.keys, ctx, ENCRYPTION_PURPOSE, len(ring))
        visible = {n: value for n, value in upload.change.items() if n not in hidden}
        sent = EncryptedChange(visible, upload.steps, upload.meta, words.to(flat.device))
        return KeyHolder(kept.filters, me.keys), sent

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """As the base class; also step on the mean of the encrypted variables, in which all masks cancel."""
        after = super().aggregate(ctx, server, uploads)
        for client, upload in uploads.items():
            if not isinstance(upload, EncryptedChange):
                raise ProtocolError(f"Client {client} sent {type(upload).__name__}, nothing encrypted.")
        if sum(int(upload.steps) > 0 for upload in uploads.values()) != ctx.plan.clients:
            return after
        hidden = {n: server.params[n] for n in matched(self, "encrypt_layers", ctx.plan)}
        layout, steps = Layout.of(hidden), sum(int(upload.steps) for upload in uploads.values())
        total = torch.stack([upload.words for upload in uploads.values()]).sum(0)
        mean = layout.unpack(secagg.from_ring(total, BITS) / steps)
        moved = {n: (value.double() + mean[n]).to(value.dtype) for n, value in hidden.items()}
        return replace(after, params={**after.params, **moved})

    def evidence(self, view: View) -> list[Evidence]:
        """As the base class; to an adversary that colludes with clients, of decrypted uploads."""
        if not view.threat.colludes:
            return super().evidence(view)
        opened = {(e.slot, e.round, e.step): self._opened(view, e) for e in view.exchanges()}
        mail = tuple(
            replace(m, message=opened.get((Slot(m.probe, m.sender), m.round, m.step)) or m.message) for m in view.mail
        )
        return super().evidence(replace(view, mail=mail))

    def _opened(self, view: View, exchange: Exchange) -> FilteredChange | None:
        """Return a decrypted upload: all other clients' keys remove its mask; None if the view lacks one's."""
        upload, ctx = exchange.answer, Context(view.plan, exchange.round, view.session(exchange), 0, torch.Generator())
        others = [client for client in range(view.plan.clients) if client != exchange.slot.client]
        states = {c: state for c in others if isinstance(state := view.state_at(exchange, c), KeyHolder)}
        if not isinstance(upload, EncryptedChange) or len(states) < len(others):
            return None
        ring = upload.words.cpu()
        for other, state in states.items():
            ring = ring + secagg.zero_sum(state.keys, replace(ctx, party=other), ENCRYPTION_PURPOSE, len(ring))
        params = exchange.request.params
        layout = Layout.of({n: params[n] for n in matched(self, "encrypt_layers", view.plan)})
        hidden = layout.unpack(secagg.from_ring(ring, BITS) / int(upload.steps))
        whole = {**hidden, **upload.change}
        return FilteredChange({name: whole[name] for name in params}, upload.steps, upload.meta)
