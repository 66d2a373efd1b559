"""Threshold Paillier between clients: the server adds ciphertexts up, and a threshold of clients decrypts the sum.

What each party can read is what it could of the real scheme's messages, by other means. A client pads its numbers with
one stream for each decryptor, from the key that both agree on; a partial decryption is the decryptor's streams of all
clients, which only the sum of all ciphertexts is bared by. Private keys are Shamir-shared between clients, so that any
coalition of `threshold` of them opens every single ciphertext, as the holders of so many key shares of Paillier do; a
smaller one lacks an honest decryptor's streams, and learns the honest clients' sum, which is the total less its own.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree, node
from ppbench.defenses.encrypted import shares
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, sealed, words_of
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, between
from ppbench.federation.ciphering import Ciphering, paillier
from ppbench.federation.contract import Context, Round, Server, Step
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View

PURPOSE = "threshold"
DEALT = "shares"


@node
class Member:
    """A client's state. keys: its own and those agreed on; shares: [N, 16] int64, its shares of every client's key."""

    keys: secagg.Keys
    shares: Tensor


@node
class Deal:
    """Shares on their way, encrypted for who they are for. shares: [N, 16] int64, by receiver up and by sender down."""

    shares: Tensor


@node
class Decrypt:
    """Server to decryptor: the sum of all ciphertexts."""

    total: Ciphertext


@node
class Partial:
    """Decryptor to server: its part of the decryption, in the form of ciphertexts."""

    part: Ciphertext


@dataclass(frozen=True)
class ThresholdDefense(secagg.PairedDefense):
    """Clients encrypt under threshold Paillier, so that the server reads the sum of the cohort and no upload.

    honest: share of the clients that the scheme trusts in, t = ceil(honest N) of them, at least 2; N - t + 1 decrypt.
    key_bits: of Paillier's modulus. fraction_bits: of fixed-point numbers.
    """

    honest: Annotated[float, between(1e-3, 1)] = 0.5
    key_bits: Literal[2048, 3072] = 2048
    fraction_bits: Bits = 40

    @property
    def sums(self) -> bool:
        """Return that only sums can be read."""
        return True

    def trusted(self, plan: Plan) -> int:
        """Return t, how many clients at least are honest."""
        return max(2, math.ceil(self.honest * plan.clients))

    def threshold(self, plan: Plan) -> int:
        """Return how many clients decrypt: N - t + 1, so that those who are not honest are one too few."""
        return plan.clients - self.trusted(plan) + 1

    def values(self, plan: Plan) -> int:
        """Return how many numbers a client encrypts. Default: one a parameter."""
        return plan.net.parameter_count

    def ciphering(self, plan: Plan) -> Ciphering:
        """Return what is encrypted in a round."""
        return paillier(self.key_bits, plan.clients, self.threshold(plan), self.values(plan))

    def encoded(self, ctx: Context, keys: secagg.Keys, result: Tree) -> Tensor:
        """Return what a client encrypts of what it computed, its share of the mean in fixed point: [values] int64."""
        raise NotImplementedError

    def applied(self, ctx: Context, server: Server, total: Tensor) -> Server:
        """Return the server's state after a step on the decrypted sum [values] int64."""
        raise NotImplementedError

    # -- set-up --------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Tree) -> Tree:
        """Draw a key pair."""
        return Member(secagg.new_keys(ctx), torch.zeros(0, shares.LIMBS, dtype=torch.int64))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange keys, everybody with everybody and itself, then pass on the shares of keys that clients deal."""
        everybody = torch.ones(len(cohort), len(cohort), dtype=torch.bool)
        server = yield from _announced(ctx, server, cohort, everybody)
        dealt = yield Step(server, dict.fromkeys(cohort, Deal(torch.zeros(0, shares.LIMBS, dtype=torch.int64))))
        for client, answer in dealt.items():
            if not isinstance(answer, Deal) or answer.shares.shape != (len(cohort), shares.LIMBS):
                raise ProtocolError(f"Client {client} dealt no shares of its key for {len(cohort)} clients.")
        table = torch.stack([dealt[client].shares for client in sorted(dealt)], 1)
        yield Step(server, {client: Deal(table[client]) for client in cohort})
        return server

    def reply(self, ctx: Context, me: Member, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Answer at set-up; encrypt what was computed; decrypt in part what the server added up."""
        if answer := secagg.answered(ctx, me.keys, message, data):
            return replace(me, keys=answer[0]), answer[1]
        if isinstance(message, Deal):
            if not len(message.shares):
                return me, Deal(self._dealt(ctx, me))
            pads = _pads(me.keys, ctx)
            return replace(me, shares=(message.shares - pads) % shares.PRIME), None
        if isinstance(message, Decrypt):
            return me, Partial(sealed(self._partial(ctx, me, message.total), self.ciphering(ctx.plan)))
        return me, self.upload(ctx, me, result)

    def _dealt(self, ctx: Context, me: Member) -> Tensor:
        """Return the shares of one's private key, each encrypted for who gets it: [N, 16] int64."""
        threshold = self.threshold(ctx.plan)
        own = shares.shared_out(me.keys.private, ctx.plan.clients, threshold, ctx.generator)
        return (own + _pads(me.keys, ctx, sent=True)) % shares.PRIME

    # -- a round -------------------------------------------------------------------------------------------------
    def upload(self, ctx: Context, me: Member, result: Tree) -> Ciphertext:
        """Return the encrypted share of what was computed (Overflow)."""
        own = self.encoded(ctx, me.keys, result)
        return sealed(own + _streams(me.keys, ctx, range(self.threshold(ctx.plan)), len(own)), self.ciphering(ctx.plan))

    def _partial(self, ctx: Context, me: Member, total: Ciphertext) -> Tensor:
        """Return one decryptor's streams of all clients [values] int64: what the sum is bared by, and nothing else."""
        return _streams(me.keys, ctx, range(ctx.plan.clients), len(total.words))

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Broadcast, add the ciphertexts up, have the first clients decrypt the sum, and step on it."""
        server, message = self.broadcast(ctx, server)
        uploads = yield Step(server, dict.fromkeys(cohort, message))
        secagg.need_everybody(server, uploads)
        count = self.values(ctx.plan)
        total = torch.stack([words_of(client, upload, count) for client, upload in uploads.items()]).sum(0)
        request = Decrypt(sealed(total, self.ciphering(ctx.plan)))
        parts = yield Step(server, dict.fromkeys(range(self.threshold(ctx.plan)), request))
        return self.applied(ctx, server, bared(total, parts, self.threshold(ctx.plan)))

    # -- what a view opens ---------------------------------------------------------------------------------------
    def opener(self, view: View, states: Mapping[int, Member]) -> Opener:
        """Return what a coalition with the server can decrypt, from the states that it has."""
        return Opener(view, states, self.threshold(view.plan))


@dataclass(frozen=True)
class Opener:
    """What the server and a coalition of clients with `states` can read of single ciphertexts."""

    view: View
    states: Mapping[int, Member]
    threshold: int

    def pad(self, client: int, ctx: Context, words: int) -> Tensor | None:
        """Return what a client padded its ciphertexts with in a round, or None: it is hidden from the coalition.

        A member's own streams are known to it; of others every private key is, to as many members as the threshold.
        """
        if client in self.states:
            return _streams(self.states[client].keys, ctx, range(self.threshold), words)
        if len(self.states) < self.threshold:
            return None
        private = [self._private(c) for c in (client, *range(self.threshold))]
        keys = torch.stack([secagg.agreed(private[0], secagg.public_of(p), "A decryptor") for p in private[1:]])
        return _streams(replace(next(iter(self.states.values())).keys, shared=keys), ctx, range(self.threshold), words)

    def _private(self, client: int) -> Tensor:
        return shares.joined({member: state.shares[client] for member, state in self.states.items()})


def bared(total: Tensor, parts: Mapping[int, Tree], threshold: int) -> Tensor:
    """Return the sum [values] int64 from that of the ciphertexts and all partial decryptions (ProtocolError)."""
    if len(parts) < threshold:
        raise ProtocolError(f"{len(parts)} of {threshold} clients decrypted; the sum cannot be read.")
    for client, part in parts.items():
        if not isinstance(part, Partial):
            raise ProtocolError(f"Client {client} answered with {type(part).__name__}, not with its part of a decryption.")
        total = total - words_of(client, part.part, len(total))
    return total


def _announced(
    ctx: Context, server: Server, cohort: Sequence[int], graph: Tensor
) -> Generator[Step, Mapping[int, Tree], Server]:
    return (yield from secagg.setup(ctx, server, cohort, graph))


def _streams(keys: secagg.Keys, ctx: Context, others: Sequence[int], words: int) -> Tensor:
    """Return the sum [words] int64 of what `ctx.party` derives with each of `others`."""
    total = torch.zeros(words, dtype=torch.int64)
    for other in others:
        total = total + secagg.stream(keys, ctx, other, PURPOSE, words)
    return total


def _pads(keys: secagg.Keys, ctx: Context, sent: bool = False) -> Tensor:
    """Return what encrypts shares [N, 16] int64 between `ctx.party` and every client, other ones each way."""
    found = []
    for other in range(ctx.plan.clients):
        sender, receiver = (ctx.party, other) if sent else (other, ctx.party)
        found.append(secagg.stream(keys, ctx, other, f"{DEALT}-{sender}-{receiver}", shares.LIMBS))
    return torch.stack(found) % shares.PRIME
