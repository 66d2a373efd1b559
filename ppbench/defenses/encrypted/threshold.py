"""Threshold Paillier between clients: the server adds ciphertexts, and a threshold of clients decrypts the sum.

Each party can read exactly what it could in the real scheme. A client pads its numbers with one stream per decryptor,
from their common key; a partial decryption is the sum of the decryptor's streams of all clients, which decrypts only
the sum of all ciphertexts. Private keys are Shamir-shared between clients, so that any `threshold` of them can decrypt
every ciphertext, like the holders of as many key shares of Paillier; a smaller coalition lacks an honest decryptor's
streams, and learns only the honest clients' sum, the total less its own uploads.
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
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, ciphertext_of, ciphertext_words
from ppbench.defenses.encrypted.sums import EncryptedSums
from ppbench.federation import secagg
from ppbench.federation.ciphering import Ciphering, paillier
from ppbench.federation.contract import Context, Round, Server, Step
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import Exchange, View

THRESHOLD_PADS = "threshold"
SHARE_PADS = "shares"


@node
class Member:
    """A client's state. keys: its own and the shared ones; shares: [N, 16] int64, its shares of every client's key."""

    keys: secagg.Keys
    shares: Tensor


@node
class Deal:
    """Shares encrypted for their receivers. shares: [N, 16] int64, by receiver (upwards) or by sender (downwards)."""

    shares: Tensor


@node
class Decrypt:
    """Server to decryptor: the sum of all ciphertexts."""

    total: Ciphertext


@node
class Partial:
    """Decryptor to server: its partial decryption, as ciphertexts."""

    part: Ciphertext


@dataclass(frozen=True)
class ThresholdDefense(EncryptedSums):
    """Clients encrypt under threshold Paillier; N - t + 1 of them decrypt, one more than may be dishonest.

    key_bits: of Paillier's modulus.
    """

    key_bits: Literal[2048, 3072] = 2048

    def threshold(self, plan: Plan) -> int:
        """Return the number of decryptors: N - t + 1, one more than may be dishonest."""
        return plan.clients - self.trusted(plan) + 1

    def ciphering(self, plan: Plan) -> Ciphering:
        """Return the encryption of a round."""
        return paillier(self.key_bits, plan.clients, self.threshold(plan), self.values(plan))

    # -- set-up --------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Tree) -> Tree:
        """Draw a key pair."""
        return Member(secagg.new_keys(ctx), torch.zeros(0, shares.LIMBS, dtype=torch.int64))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange public keys between all clients (each also with itself), then relay the shares of private keys."""
        everybody = torch.ones(len(cohort), len(cohort), dtype=torch.bool)
        server = yield from secagg.exchange_keys(ctx, server, cohort, everybody)
        dealt = yield Step(server, dict.fromkeys(cohort, Deal(torch.zeros(0, shares.LIMBS, dtype=torch.int64))))
        for client, answer in dealt.items():
            if not isinstance(answer, Deal) or answer.shares.shape != (len(cohort), shares.LIMBS):
                raise ProtocolError(f"Client {client} dealt no shares of its key for {len(cohort)} clients.")
        table = torch.stack([dealt[client].shares for client in sorted(dealt)], 1)
        yield Step(server, {client: Deal(table[client]) for client in cohort})
        return server

    def reply(self, ctx: Context, me: Member, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Answer set-up messages, upload the encrypted result, or partially decrypt the server's sum."""
        if answer := secagg.setup_answer(ctx, me.keys, message, data):
            return replace(me, keys=answer[0]), answer[1]
        if isinstance(message, Deal):
            if not len(message.shares):
                return me, Deal(self._dealt(ctx, me))
            pads = _pads(me.keys, ctx)
            return replace(me, shares=(message.shares - pads) % shares.PRIME), None
        if isinstance(message, Decrypt):
            return me, Partial(ciphertext_of(self._partial(ctx, me, message.total), self.ciphering(ctx.plan)))
        return me, self.upload(ctx, me, result)

    def _dealt(self, ctx: Context, me: Member) -> Tensor:
        """Return the shares of the client's private key, each encrypted for its receiver: [N, 16] int64."""
        threshold = self.threshold(ctx.plan)
        own = shares.split_key(me.keys.private, ctx.plan.clients, threshold, ctx.generator)
        return (own + _pads(me.keys, ctx, sent=True)) % shares.PRIME

    # -- a round -------------------------------------------------------------------------------------------------
    def upload(self, ctx: Context, me: Member, result: Tree) -> Ciphertext:
        """Return the client's encrypted share of the mean (Overflow)."""
        own = self.encoded(ctx, me.keys, result)
        return ciphertext_of(
            own + _streams(me.keys, ctx, range(self.threshold(ctx.plan)), len(own)), self.ciphering(ctx.plan)
        )

    def _partial(self, ctx: Context, me: Member, total: Ciphertext) -> Tensor:
        """Return the sum of one decryptor's streams of all clients, [values] int64."""
        return _streams(me.keys, ctx, range(ctx.plan.clients), len(total.words))

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Broadcast, add the ciphertexts, let the first clients decrypt the sum, and step on it."""
        server, message = self.broadcast(ctx, server)
        uploads = yield Step(server, dict.fromkeys(cohort, message))
        secagg.need_everybody(server, uploads)
        count = self.values(ctx.plan)
        total = torch.stack([ciphertext_words(client, upload, count) for client, upload in uploads.items()]).sum(0)
        request = Decrypt(ciphertext_of(total, self.ciphering(ctx.plan)))
        parts = yield Step(server, dict.fromkeys(range(self.threshold(ctx.plan)), request))
        return self.applied(ctx, server, decrypted_sum(total, parts, self.threshold(ctx.plan)))

    # -- what a view opens ---------------------------------------------------------------------------------------
    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the sum from all ciphertexts and partial decryptions, which an eavesdropper has too."""
        count, first = self.values(view.plan), unit[0]
        parts = {
            e.slot.client: e.answer
            for e in view.exchanges()
            if isinstance(e.answer, Partial) and (e.slot.probe, e.round) == (first.slot.probe, first.round)
        }
        if len(parts) < self.threshold(view.plan):
            return None
        words = torch.stack([ciphertext_words(e.slot.client, e.answer, count) for e in unit]).sum(0)
        return decrypted_sum(words, parts, self.threshold(view.plan))

    def pad(self, ctx: Context, states: Mapping[int, Member], words: int) -> Tensor | None:
        """Return the pad of `ctx.party`: known to itself, and to at least `threshold` members.

        The latter join their shares of every private key, and derive all streams.
        """
        threshold = self.threshold(ctx.plan)
        if ctx.party in states:
            return _streams(states[ctx.party].keys, ctx, range(threshold), words)
        if len(states) < threshold:
            return None
        own = _private(states, ctx.party)
        deciders = [secagg.public_of(_private(states, decider)) for decider in range(threshold)]
        keys = torch.stack([secagg.shared_secret(own, public, "A decryptor") for public in deciders])
        return _streams(replace(next(iter(states.values())).keys, shared=keys), ctx, range(threshold), words)


def _private(states: Mapping[int, Member], client: int) -> Tensor:
    """Return a client's private key [32] uint8 from the shares of at least `threshold` members."""
    return shares.joined_key({member: state.shares[client] for member, state in states.items()})


def decrypted_sum(total: Tensor, parts: Mapping[int, Tree], threshold: int) -> Tensor:
    """Return the sum [values] int64 from the ciphertexts' sum and all partial decryptions (ProtocolError)."""
    if len(parts) < threshold:
        raise ProtocolError(f"{len(parts)} of {threshold} clients decrypted; the sum cannot be read.")
    for client, part in parts.items():
        if not isinstance(part, Partial):
            raise ProtocolError(
                f"Client {client} answered with {type(part).__name__}, not with its part of a decryption."
            )
        total = total - ciphertext_words(client, part.part, len(total))
    return total


def _streams(keys: secagg.Keys, ctx: Context, others: Sequence[int], words: int) -> Tensor:
    """Return the sum [words] int64 of the streams that `ctx.party` shares with each of `others`."""
    total = torch.zeros(words, dtype=torch.int64)
    for other in others:
        total = total + secagg.stream(keys, ctx, other, THRESHOLD_PADS, words)
    return total


def _pads(keys: secagg.Keys, ctx: Context, sent: bool = False) -> Tensor:
    """Return the pads of shares [N, 16] int64 between `ctx.party` and every client, different for each direction."""
    streams = []
    for other in range(ctx.plan.clients):
        sender, receiver = (ctx.party, other) if sent else (other, ctx.party)
        streams.append(secagg.stream(keys, ctx, other, f"{SHARE_PADS}-{sender}-{receiver}", shares.LIMBS))
    return torch.stack(streams) % shares.PRIME
