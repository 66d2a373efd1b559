"""The common base of TP-SMC, HybridAlpha and PILE: clients encrypt numbers, and the server decrypts only their sum.

A scheme defines the pads and who can remove them; a defense what is encrypted and what a sum means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params, Tree, node
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, between
from ppbench.federation.contract import Ciphering, Context, Round, Server, Step, paillier
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Data, Plan
from ppbench.federation.secagg import cohorts
from ppbench.federation.threats import TARGET
from ppbench.federation.view import Exchange, View

# -- Simulated ciphertexts, with exactly as many bytes as the real scheme's --
# No round encrypts anything: a number in a ciphertext is a fixed-point number modulo 2^64 plus a pad, known only to
# those who could decrypt it in the real scheme. So every view equals the real one, and sums are exact. Real
# encryption is timed separately (`run/cost.py`), by the counts of a `Ciphering`.

WORD_BYTES = 8
"""Bytes of a padded number: a slot of 64 bits, in which sums of fixed-point numbers do not overflow."""


@node(name="ppbench.defenses.encrypted.ciphertexts.Ciphertext")
class Ciphertext:
    """Padded numbers in ciphertexts. words: [P] int64; rest: uint8 zeros, the ciphertexts' further bytes."""

    words: Tensor
    rest: Tensor


def ciphertext_of(words: Tensor, form: Ciphering) -> Ciphertext:
    """Return padded numbers [P] int64 as a `Ciphertext` of the scheme's size."""
    rest = form.nbytes(len(words)) - WORD_BYTES * len(words)
    return Ciphertext(words, torch.zeros(rest, dtype=torch.uint8, device=words.device))


def ciphertext_words(client: int, message: Tree, count: int) -> Tensor:
    """Return the padded numbers [count] int64 of a client's message, on the CPU (ProtocolError: other content)."""
    if not isinstance(message, Ciphertext) or (message.words.dtype, message.words.shape) != (torch.int64, (count,)):
        raise ProtocolError(f"Client {client} sent no ciphertexts of {count} numbers.")
    return message.words.cpu()


@dataclass(frozen=True)
class EncryptedSums(secagg.PairedDefense):
    """Clients encrypt their share of the mean; the server reads the cohort's sum, but no upload.

    honest: trusted share of the clients, t = ceil(honest N) of them, at least 2. fraction_bits: of fixed-point numbers;
    40 represent values below 4e6 to 5e-13.
    """

    honest: Annotated[float, between(1e-3, 1)] = 0.5
    fraction_bits: Bits = 40

    version: ClassVar[str] = "2"
    sums = True

    def trusted(self, plan: Plan) -> int:
        """Return t, the least number of honest clients."""
        return max(2, math.ceil(self.honest * plan.clients))

    def values(self, plan: Plan) -> int:
        """Return the count of numbers that a client encrypts. Default: one per parameter."""
        return plan.net.parameter_count

    # -- the scheme ----------------------------------------------------------------------------------------------
    def ciphering(self, plan: Plan) -> Ciphering:
        """Return the encryption of a round."""
        raise NotImplementedError

    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the decrypted sum [values] int64 of a cohort's uploads; None: the adversary cannot decrypt it."""
        raise NotImplementedError

    def pad(self, ctx: Context, states: Mapping[int, Tree], words: int) -> Tensor | None:
        """Return the pad [words] int64 of `ctx.party`'s upload from clients' `states`; None: they do not suffice."""
        raise NotImplementedError

    # -- what is encrypted ---------------------------------------------------------------------------------------
    def encoded(self, ctx: Context, keys: secagg.PairKeys, result: Tree) -> Tensor:
        """Return what a client encrypts: its share of the mean in fixed point, [values] int64."""
        raise NotImplementedError

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the update, float64, from `words` [values] int64 that are `share` times it."""
        raise NotImplementedError

    def applied(self, ctx: Context, server: Server, total: Tensor) -> Server:
        """Return the server's state after a step on the decrypted sum [values] int64."""
        device = next(iter(server.params.values())).device
        mean = self.read(ctx.plan, server, total.to(device), 1.0)
        return self.stepped(ctx, server, mean)

    # -- what a view opens ---------------------------------------------------------------------------------------
    def uploads(self, view: View) -> list[list[Exchange]]:
        """Return the first encrypted uploads of each whole cohort, in the order of clients."""
        whole = cohorts(view.first_uploads(Ciphertext).values(), view.plan.clients)
        return [sorted(unit, key=lambda e: e.slot.client) for unit in whole]

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of each whole cohort's mean; for colluders see `opened`."""
        if view.threat.colludes:
            return self.opened(view)
        shared, pieces = Shared(view.plan), []
        for unit in self.uploads(view):
            total = self.total(view, unit)
            piece = None if total is None else self.piece(view, shared, unit, unit, total)
            pieces += [] if piece is None else [piece]
        return pieces

    def opened(self, view: View, members: Sequence[int] | None = None) -> list[Evidence]:
        """Return what the server and `members` (default: all whose states it has) can decrypt of client 0's uploads.

        Enough members decrypt the upload itself. Fewer know the sum of all other clients, client 0 among them: the
        total less their own uploads; then the unit has all of these clients.
        """
        shared, pieces = Shared(view.plan), []
        for unit in self.uploads(view):
            everybody = {e.slot.client: view.state_at(e, e.slot.client) for e in unit}
            states = {c: s for c, s in everybody.items() if s is not None and (members is None or c in members)}
            target, words = unit[TARGET], self._bare(view, unit[TARGET], states)
            summed: Sequence[Exchange] = [target]
            if words is None:
                summed = [e for e in unit if e.slot.client not in states]
                words = self._rest(view, unit, states)
            piece = None if words is None else self.piece(view, shared, unit, summed, words)
            pieces += [] if piece is None else [piece]
        return pieces

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], summed: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """Return evidence from the words [values] int64 of the sum over `summed`, exchanges of the cohort `unit`."""
        server = view.state_at(unit[0])
        if server is None:
            return None
        all_weights = self.weights(server, [e.slot.client for e in unit])
        weights = [w for e, w in zip(unit, all_weights, strict=True) if e in summed]
        device = next(iter(server.params.values())).device
        scale = sum(weights) * as_gradient(view.plan, unit[0].round)
        observed = self.read(view.plan, server, words.to(device), scale)
        slots = tuple(e.slot for e in summed)
        return shared.mean(slots, observed, server.params, [w / sum(weights) for w in weights], "sum")

    def _bare(self, view: View, exchange: Exchange, states: Mapping[int, Tree]) -> Tensor | None:
        """Return the words [values] int64 of one upload; None: clients with `states` cannot decrypt it."""
        client, words = (
            exchange.slot.client,
            ciphertext_words(exchange.slot.client, exchange.answer, self.values(view.plan)),
        )
        ctx = Context(view.plan, exchange.round, view.session(exchange), client, torch.Generator())
        pad = self.pad(ctx, states, len(words))
        return None if pad is None else words - pad

    def _rest(self, view: View, unit: Sequence[Exchange], states: Mapping[int, Tree]) -> Tensor | None:
        """Return the sum of a cohort less the uploads of clients with `states`, [values] int64."""
        total = self.total(view, unit)
        for exchange in unit:
            if total is not None and exchange.slot.client in states:
                own = self._bare(view, exchange, states)
                total = None if own is None else total - own
        return total


# -- Shamir's secret sharing of clients' private keys: a threshold of clients can decrypt everything --
# A key of 32 bytes is 16 numbers below 2^16, each the value at 0 of a random polynomial modulo 2^16 + 1 of degree
# threshold - 1; client c gets its value at c + 1 (Shamir 1979). Fewer shares than the threshold reveal nothing.

PRIME = 2**16 + 1
LIMBS = 16


def split_key(private: Tensor, clients: int, threshold: int, secret: SecretDraws) -> Tensor:
    """Return the shares [N, 16] int64 of a key [32] uint8 for `clients` clients; `threshold` of them restore it."""
    limbs = private.cpu().contiguous().view(torch.int16).to(torch.int64) % 2**16
    higher = secret.integers(0, PRIME, (threshold - 1, LIMBS))
    values = torch.zeros(clients, LIMBS, dtype=torch.int64)
    points = torch.arange(1, clients + 1)[:, None]
    for coefficient in (*higher.flip(0), limbs):  # Horner's rule
        values = (values * points + coefficient) % PRIME
    return values


def joined_key(shares: Mapping[int, Tensor]) -> Tensor:
    """Return the key [32] uint8 from at least `threshold` clients' shares [16]."""
    total = torch.zeros(LIMBS, dtype=torch.int64)
    for client, share in shares.items():
        weight = 1
        for other in shares:
            if other != client:
                weight = weight * (other + 1) * pow(other - client, -1, PRIME) % PRIME
        total = (total + weight * share) % PRIME
    low = total % 2**16
    return torch.where(low < 2**15, low, low - 2**16).to(torch.int16).view(torch.uint8)


# -- Threshold Paillier between clients: the server adds ciphertexts, and a threshold of clients decrypts the sum --
# Each party can read exactly what it could in the real scheme. A client pads its numbers with one stream per
# decryptor, from their common key; a partial decryption is the sum of the decryptor's streams of all clients, which
# decrypts only the sum of all ciphertexts. Private keys are Shamir-shared between clients, so that any `threshold`
# of them can decrypt every ciphertext, like the holders of as many key shares of Paillier; a smaller coalition lacks
# an honest decryptor's streams, and learns only the honest clients' sum, the total less its own uploads.

THRESHOLD_PADS = "threshold"
SHARE_PADS = "shares"


@node(name="ppbench.defenses.encrypted.threshold.Member")
class Member:
    """A client's state. keys: its own and the shared ones; shares: [N, 16] int64, its shares of every client's key."""

    keys: secagg.PairKeys
    shares: Tensor


@node(name="ppbench.defenses.encrypted.threshold.Deal")
class Deal:
    """Shares encrypted for their receivers. shares: [N, 16] int64, by receiver (upwards) or by sender (downwards)."""

    shares: Tensor


@node(name="ppbench.defenses.encrypted.threshold.Decrypt")
class Decrypt:
    """Server to decryptor: the sum of all ciphertexts."""

    total: Ciphertext


@node(name="ppbench.defenses.encrypted.threshold.Partial")
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
        return Member(secagg.new_keys(ctx), torch.zeros(0, LIMBS, dtype=torch.int64))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange public keys between all clients (each also with itself), then relay the shares of private keys."""
        everybody = torch.ones(len(cohort), len(cohort), dtype=torch.bool)
        server = yield from secagg.exchange_keys(server, cohort, everybody)
        dealt = yield Step(server, dict.fromkeys(cohort, Deal(torch.zeros(0, LIMBS, dtype=torch.int64))))
        for client, answer in dealt.items():
            if not isinstance(answer, Deal) or answer.shares.shape != (len(cohort), LIMBS):
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
            return replace(me, shares=(message.shares - pads) % PRIME), None
        if isinstance(message, Decrypt):
            part = _streams(me.keys, ctx, range(ctx.plan.clients), len(message.total.words))
            return me, Partial(ciphertext_of(part, self.ciphering(ctx.plan)))
        return me, self.upload(ctx, me, result)

    def _dealt(self, ctx: Context, me: Member) -> Tensor:
        """Return the shares of the client's private key, each encrypted for its receiver: [N, 16] int64."""
        threshold = self.threshold(ctx.plan)
        own = split_key(me.keys.private, ctx.plan.clients, threshold, ctx.secret)
        return (own + _pads(me.keys, ctx, sent=True)) % PRIME

    # -- a round -------------------------------------------------------------------------------------------------
    def upload(self, ctx: Context, me: Member, result: Tree) -> Ciphertext:
        """Return the client's encrypted share of the mean (Overflow)."""
        own = self.encoded(ctx, me.keys, result)
        pads = _streams(me.keys, ctx, range(self.threshold(ctx.plan)), len(own))
        return ciphertext_of(own + pads, self.ciphering(ctx.plan))

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
    return joined_key({member: state.shares[client] for member, state in states.items()})


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


def _streams(keys: secagg.PairKeys, ctx: Context, others: Sequence[int], words: int) -> Tensor:
    """Return the sum [words] int64 of the streams that `ctx.party` shares with each of `others`."""
    streams = (secagg.stream(keys, ctx, other, THRESHOLD_PADS, words) for other in others)
    return sum(streams, torch.zeros(words, dtype=torch.int64))


def _pads(keys: secagg.PairKeys, ctx: Context, sent: bool = False) -> Tensor:
    """Return the pads of shares [N, 16] int64 between `ctx.party` and every client, different for each direction."""
    streams = []
    for other in range(ctx.plan.clients):
        sender, receiver = (ctx.party, other) if sent else (other, ctx.party)
        streams.append(secagg.stream(keys, ctx, other, f"{SHARE_PADS}-{sender}-{receiver}", LIMBS))
    return torch.stack(streams) % PRIME
