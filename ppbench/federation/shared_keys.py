"""Keys that each client shares with the server and with nobody else, for defenses that subclass `KeyedDefense`.

X25519 at set-up over an open link, as `secagg` does between clients. The keys lie in `Server.own` and in the clients'
states, so a view has them where its threat model has those: "server/1" all, "client/1" its own, a listener none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, node
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Defense, Round, Server, Step
from ppbench.federation.plan import Data


@node
class Offer:
    """Server to client at set-up, in the place of `Hello`. public: [32] uint8, the server's X25519 public key."""

    public: Tensor


@node
class SharedKeys:
    """A party's keys. private: [32] uint8. shared: uint8, [32] of a client, [N, 32] of the server; 0 before set-up."""

    private: Tensor
    shared: Tensor


@dataclass(frozen=True)
class KeyedDefense(Defense):
    """A defense whose clients each share a key with the server.

    Override `upload`, which hides by `stream(ctx, me, ctx.party, ...)`, and `decoded`, which undoes it by `stream(ctx,
    server.own, client, ...)`; where `decode`, which needs no key, gives no update, also `evidence` for "client/1".
    Further state goes into a `@node` with a field `keys`, which holds what the default `init_server` or `init_client`
    returns.
    """

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the server's state with a key pair of its own."""
        keys = SharedKeys(secagg.new_private(ctx), torch.zeros(ctx.plan.clients, 32, dtype=torch.uint8))
        return replace(super().init_server(ctx, params), own=keys)

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return a client's key pair."""
        return SharedKeys(secagg.new_private(ctx), torch.zeros(32, dtype=torch.uint8))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Send everybody the server's public key; collect theirs and their numbers of examples (ProtocolError)."""
        keys = keys_of(server.own)
        answers = yield Step(server, dict.fromkeys(cohort, Offer(secagg.public_of(keys.private))))
        counts, public = secagg.announced_keys(cohort, answers)
        shared = torch.stack([secagg.shared_secret(keys.private, key, f"Client {c}") for c, key in enumerate(public)])
        own = _with_keys(server.own, replace(keys, shared=shared.to(keys.private.device)))
        return replace(server, counts=counts, own=own)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Agree on the key at set-up; then answer as usual."""
        if not isinstance(message, Offer):
            return super().reply(ctx, me, message, result, data)
        keys = keys_of(me)
        shared = secagg.shared_secret(keys.private, message.public, "The server").to(keys.private.device)
        return _with_keys(me, replace(keys, shared=shared)), secagg.announce(keys.private, len(data.x))

    def stream(self, ctx: Context, state: Tree, client: int, purpose: str, words: int) -> Tensor:
        """Return uniform int64 [words], on the CPU, that only the server and `client` can derive in this round.

        Their `argsort()` is a random order. Session, round and `purpose` are part of the derivation; the first words do
        not depend on `words`. `state` is the client's state, or the server's own (`Server.own`).
        """
        shared = keys_of(state).shared
        key = shared if shared.dim() == 1 else shared[client]
        return secagg.expand_secret(key, f"ppbench|server|{ctx.session}|{ctx.round}|{client}|{purpose}", words)


def keys_of(state: Tree) -> SharedKeys:
    """Return the keys in a client's state or the server's own: the state itself, or its field `keys`."""
    return state if isinstance(state, SharedKeys) else state.keys


def _with_keys(state: Tree, keys: SharedKeys) -> Tree:
    return keys if isinstance(state, SharedKeys) else replace(state, keys=keys)
