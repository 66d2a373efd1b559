"""Threshold Paillier between clients: the server adds ciphertexts up, and a threshold of clients decrypts the sum.

What each party can read is what it could of the real scheme's messages, by other means. A client pads its numbers with
one stream for each decryptor, from the key that both agree on; a partial decryption is the decryptor's streams of all
clients, which only the sum of all ciphertexts is bared by. Private keys are Shamir-shared between clients, so that any
coalition of `threshold` of them opens every single ciphertext, as the holders of so many key shares of Paillier do; a
smaller one lacks an honest decryptor's streams, and learns the honest clients' sum, which is the total less its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree, node
from ppbench.defenses.encrypted import shares
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, sealed, words_of
from ppbench.defenses.encrypted.sums import EncryptedSums
from ppbench.federation import secagg
from ppbench.federation.ciphering import Ciphering, paillier
from ppbench.federation.contract import Context, Round, Server, Step
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import Exchange, View

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
class ThresholdDefense(EncryptedSums):
    """Clients encrypt under threshold Paillier: N - t + 1 of them decrypt, one more than may be dishonest.

    key_bits: of Paillier's modulus.
    """

    key_bits: Literal[2048, 3072] = 2048

    def threshold(self, plan: Plan) -> int:
        """Return how many clients decrypt: N - t + 1, so that those who are not honest are one too few."""
        return plan.clients - self.trusted(plan) + 1

    def ciphering(self, plan: Plan) -> Ciphering:
        """Return what is encrypted in a round."""
        return paillier(self.key_bits, plan.clients, self.threshold(plan), self.values(plan))

    # -- set-up --------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Tree) -> Tree:
        """Draw a key pair."""
        return Member(secagg.new_keys(ctx), torch.zeros(0, shares.LIMBS, dtype=torch.int64))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange keys, everybody with everybody and itself, then pass on the shares of keys that clients deal."""
        everybody = torch.ones(len(cohort), len(cohort), dtype=torch.bool)
        server = yield from secagg.setup(ctx, server, cohort, everybody)
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
    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the sum from all ciphertexts and partial decryptions, which who hears everything has as well."""
        count, first = self.values(view.plan), unit[0]
        parts = {
            e.slot.client: e.answer
            for e in view.exchanges()
            if isinstance(e.answer, Partial) and (e.slot.probe, e.round) == (first.slot.probe, first.round)
        }
        if len(parts) < self.threshold(view.plan):
            return None
        words = torch.stack([words_of(e.slot.client, e.answer, count) for e in unit]).sum(0)
        return bared(words, parts, self.threshold(view.plan))

    def pad(self, ctx: Context, states: Mapping[int, Member], words: int) -> Tensor | None:
        """Return what a client padded its ciphertexts with: its own is known to it, every one to enough members.

        As many as the threshold join their shares of every private key, and derive all streams.
        """
        threshold = self.threshold(ctx.plan)
        if ctx.party in states:
            return _streams(states[ctx.party].keys, ctx, range(threshold), words)
        if len(states) < threshold:
            return None
        own = _private(states, ctx.party)
        deciders = [secagg.public_of(_private(states, decider)) for decider in range(threshold)]
        keys = torch.stack([secagg.agreed(own, public, "A decryptor") for public in deciders])
        return _streams(replace(next(iter(states.values())).keys, shared=keys), ctx, range(threshold), words)


def _private(states: Mapping[int, Member], client: int) -> Tensor:
    """Return a client's private key [32] uint8 from the shares of as many members as the threshold."""
    return shares.joined({member: state.shares[client] for member, state in states.items()})


def bared(total: Tensor, parts: Mapping[int, Tree], threshold: int) -> Tensor:
    """Return the sum [values] int64 from that of the ciphertexts and all partial decryptions (ProtocolError)."""
    if len(parts) < threshold:
        raise ProtocolError(f"{len(parts)} of {threshold} clients decrypted; the sum cannot be read.")
    for client, part in parts.items():
        if not isinstance(part, Partial):
            raise ProtocolError(
                f"Client {client} answered with {type(part).__name__}, not with its part of a decryption."
            )
        total = total - words_of(client, part.part, len(total))
    return total


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
