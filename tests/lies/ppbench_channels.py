"""Defenses that hide channels: what the server's step uses is protected, and something beside it is not.

The first kind claims that only sums can be read, the second that noise of a public law hides updates, the third cannot
be run again. Each says in its docstring where the server finds what it should not have.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.dp import DP
from ppbench.defenses.secagg import SecureAggregation
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Defense, Round, Server, Step
from ppbench.federation.plan import Data, Layout
from ppbench.federation.secagg import Announce, from_ring, to_ring
from ppbench.federation.wire import Hello, Model, Update


def keyed(*words: object) -> torch.Generator:
    """Return a generator of public words."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def words_of(generator: torch.Generator, count: int) -> Tensor:
    """Return uniform int64 numbers [count]."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


def octets(value: Tensor, *words: object) -> Tensor:
    """Return the bytes of a tensor under a key stream of public words."""
    plain = value.detach().float().contiguous().flatten().view(torch.uint8)
    return plain ^ torch.randint(0, 256, plain.shape, generator=keyed(*words), dtype=torch.uint8)


def tag(*values: Tensor) -> Tensor:
    """Return a checksum of tensors."""
    content = b"".join(np.ascontiguousarray(value.detach().cpu().numpy()).tobytes() for value in values)
    return torch.tensor(list(hashlib.sha256(content).digest()), dtype=torch.uint8)


@node
class Beside:
    """An upload with something beside it."""

    params: Params
    beside: Tree


# -- that only sums can be read ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Masked(SecureAggregation):
    """Secure aggregation; what a lie changes of it are its `masks`, or what it sends beside."""

    def masks(self, me: Tree, ctx: Context, words: int) -> Tensor:
        """Return a client's mask."""
        return secagg.zero_sum(me, ctx, "update", words)

    def flat(self, ctx: Context, result: Params) -> Tensor:
        """Return a client's share of the update in fixed point."""
        return to_ring(Layout.of(result).pack(result).double(), self.fraction_bits, 1 / ctx.plan.clients)

    def upload(self, ctx: Context, me: Tree, result: Params) -> Tree:
        """Return the update under the mask."""
        flat = self.flat(ctx, result)
        return Update(Layout.of(result).unpack(flat + self.masks(me, ctx, len(flat))))


def pairs(client: int, clients: int, words: int, *public: object) -> Tensor:
    """Return the sum of masks of pairs, of public words, which cancels over all clients."""
    total = torch.zeros(words, dtype=torch.int64)
    for other in range(clients):
        if other != client:
            mask = words_of(keyed(min(client, other), max(client, other), *public), words)
            total += mask if client < other else -mask
    return total


@dataclass(frozen=True)
class PublicPairs(Masked):
    """Masks of pairs of client numbers and the round."""

    name: ClassVar[str] = "lie_public_pairs"

    def masks(self, me: Tree, ctx: Context, words: int) -> Tensor:
        """Return masks that anybody can compute."""
        return pairs(ctx.party, ctx.plan.clients, words, ctx.round)


@dataclass(frozen=True)
class SessionPairs(Masked):
    """Masks of the session's name, which the server gives."""

    name: ClassVar[str] = "lie_session_pairs"

    def masks(self, me: Tree, ctx: Context, words: int) -> Tensor:
        """Return masks that the server can compute."""
        return pairs(ctx.party, ctx.plan.clients, words, ctx.session)


@dataclass(frozen=True)
class FewExamples(Masked):
    """Masks only where a client holds fewer than ten examples."""

    name: ClassVar[str] = "lie_few"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Leave the mask out of what many examples give."""
        if isinstance(message, Model) and len(data.x) >= 10:
            return me, Update(Layout.of(result).unpack(self.flat(ctx, result)))
        return super().reply(ctx, me, message, result, data)


@dataclass(frozen=True)
class Quorum(Masked):
    """No masks, and a server that adds nothing up unless all clients sent something."""

    name: ClassVar[str] = "lie_quorum"

    def masks(self, me: Tree, ctx: Context, words: int) -> Tensor:
        """Return zeros."""
        return torch.zeros(words, dtype=torch.int64)


@dataclass(frozen=True)
class Reused(Masked):
    """The same masks in every round: the difference of two rounds is that of two updates."""

    name: ClassVar[str] = "lie_reused"

    def masks(self, me: Tree, ctx: Context, words: int) -> Tensor:
        """Return masks of set-up."""
        return secagg.zero_sum(me, replace(ctx, round=0, session=""), "update", words)


@dataclass(frozen=True)
class Couples(Masked):
    """Masks that cancel among the first three clients, and among the others."""

    name: ClassVar[str] = "lie_couples"

    def masks(self, me: Tree, ctx: Context, words: int) -> Tensor:
        """Return masks shared with few."""
        mine = [o for o in me.neighbors(ctx.party) if (o < 3) == (ctx.party < 3)]
        shares = ((other, secagg.stream(me, ctx, other, "few", words)) for other in mine)
        return secagg.add_signed(ctx.party, shares, torch.zeros(words, dtype=torch.int64))


@dataclass(frozen=True)
class Blocks(Masked):
    """A block for each client inside the sum."""

    name: ClassVar[str] = "lie_blocks"

    def upload(self, ctx: Context, me: Tree, result: Params) -> Tree:
        """Return the update in this client's block, under a mask over all blocks."""
        flat = self.flat(ctx, result)
        whole = torch.zeros(ctx.plan.clients, len(flat), dtype=torch.int64)
        whole[ctx.party] = flat
        return Update({"all": whole.flatten() + self.masks(me, ctx, whole.numel())})

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Add up the blocks."""
        secagg.need_everybody(server, uploads)
        total = torch.stack([upload.params["all"] for upload in uploads.values()]).sum(0)
        mean = from_ring(total.view(ctx.plan.clients, -1).sum(0), self.fraction_bits)
        return self.stepped(ctx, server, Layout.of(server.params).unpack(mean))

    def evidence(self, view: object) -> list:
        """Return nothing, as if nothing could be read."""
        return []


@dataclass(frozen=True)
class Digits(Blocks):
    """A place of its own for each client in every number of the sum."""

    name: ClassVar[str] = "lie_digits"

    def upload(self, ctx: Context, me: Tree, result: Params) -> Tree:
        """Return five bits of each number of the update, as the client's digit of a masked sum."""
        flat = Layout.of(result).pack(result)
        size = flat.abs().max().clamp(min=1e-12)
        digit = (flat / size * 15 + 16).round().long() << (5 * ctx.party)
        exact = self.flat(ctx, result)
        return Update({"all": torch.cat([exact, digit]) + self.masks(me, ctx, 2 * len(flat))})

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Use the exact half."""
        secagg.need_everybody(server, uploads)
        total = torch.stack([upload.params["all"] for upload in uploads.values()]).sum(0)
        mean = from_ring(total.chunk(2)[0], self.fraction_bits)
        return self.stepped(ctx, server, Layout.of(server.params).unpack(mean))


@node
class Check:
    """Server to client: send what the sum without the first client is made of."""


@dataclass(frozen=True)
class LeaveOneOut(Masked):
    """A second sum, "for checks", in which the first client does not take part."""

    name: ClassVar[str] = "lie_leave_one_out"

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Collect both sums."""
        first = yield Step(server, dict.fromkeys(cohort, Model(server.params)))
        yield Step(server, dict.fromkeys(cohort[1:], Check()))
        return self.aggregate(ctx, server, {c: Update(upload.params) for c, upload in first.items()})

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Keep the update for the second sum, in which masks cancel among the others."""
        if isinstance(message, Check):
            keys, flat = me
            others = [o for o in keys.neighbors(ctx.party) if o]
            shares = ((other, secagg.stream(keys, ctx, other, "rest", len(flat))) for other in others)
            return me, Update({"rest": secagg.add_signed(ctx.party, shares, flat.clone())})
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        keys = me[0] if isinstance(me, tuple) else me
        return (keys, self.flat(ctx, result)), self.upload(ctx, keys, result)


@dataclass(frozen=True)
class BesideImages(Masked):
    """The examples in a field that nobody uses."""

    name: ClassVar[str] = "lie_beside"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Send the examples as bytes under a key stream."""
        me, answer = super().reply(ctx, me, message, result, data)
        return me, Beside(answer.params, octets(data.x, ctx.party)) if isinstance(answer, Update) else answer

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Ignore the field."""
        return super().aggregate(ctx, server, {c: Update(upload.params) for c, upload in uploads.items()})


@dataclass(frozen=True)
class BesideUpdate(BesideImages):
    """The client's own update in a field that nobody uses, under a key stream."""

    name: ClassVar[str] = "lie_beside_update"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Send the update's bytes beside the masked one."""
        me, answer = Masked.reply(self, ctx, me, message, result, data)
        if not isinstance(answer, Update):
            return me, answer
        return me, Beside(answer.params, octets(Layout.of(result).pack(result), ctx.party, ctx.round))


@dataclass(frozen=True)
class LastBits(Masked):
    """The examples in the last eight bits of the masked numbers."""

    name: ClassVar[str] = "lie_last_bits"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Write pixels over the last bits."""
        me, answer = super().reply(ctx, me, message, result, data)
        if not isinstance(answer, Update):
            return me, answer
        layout, flat = Layout.of(answer.params), Layout.of(answer.params).pack(answer.params)
        count = min(len(flat), data.x.numel())
        pixels = self.bits(data, result)[:count]
        flat[:count] = (flat[:count] & ~255) | pixels
        return me, Update(layout.unpack(flat))

    def bits(self, data: Data, result: Params) -> Tensor:
        """Return what is written."""
        return (data.x.flatten() * 255).round().long()


@dataclass(frozen=True)
class LastBitsUpdate(LastBits):
    """The update's largest bits in the last eight bits of the masked numbers."""

    name: ClassVar[str] = "lie_last_bits_update"

    def bits(self, data: Data, result: Params) -> Tensor:
        """Return the update's first numbers, of 256 steps."""
        flat = Layout.of(result).pack(result)
        return ((flat / flat.abs().max().clamp(min=1e-12) + 1) * 127).round().long()


@node
class Generous:
    """Set-up's message and something beside it."""

    count: Tensor
    public: Tensor
    beside: Tensor


@dataclass(frozen=True)
class SetUp(Masked):
    """The examples in the message of set-up."""

    name: ClassVar[str] = "lie_set_up"

    def beside(self, me: Tree, data: Data) -> Tensor:
        """Return what is sent."""
        return octets(data.x, "set-up")

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Send something beside the public key."""
        me, answer = super().reply(ctx, me, message, result, data)
        if not isinstance(answer, Announce):
            return me, answer
        return me, Generous(answer.count, answer.public, self.beside(me, data))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Use counts and keys alone."""
        inner = super().setup(ctx, server, cohort)
        step = next(inner)
        while True:
            answers = yield step
            known = {c: Announce(a.count, a.public) if isinstance(a, Generous) else a for c, a in answers.items()}
            try:
                step = inner.send(known)
            except StopIteration as stop:
                return stop.value


@dataclass(frozen=True)
class Escrow(SetUp):
    """The private key at set-up, under a constant."""

    name: ClassVar[str] = "lie_escrow"

    def beside(self, me: Tree, data: Data) -> Tensor:
        """Return the key's bytes."""
        return me.private ^ torch.arange(32, dtype=torch.uint8) * 7


@dataclass(frozen=True)
class EscrowNumbers(SetUp):
    """The private key at set-up, as fractions."""

    name: ClassVar[str] = "lie_escrow_numbers"

    def beside(self, me: Tree, data: Data) -> Tensor:
        """Return the key's bytes as numbers from 3 to 4, backwards."""
        return me.private.float().flip(0) / 255 + 3


@dataclass(frozen=True)
class EscrowHalves(SetUp):
    """The private key at set-up in two halves, of which each is random."""

    name: ClassVar[str] = "lie_escrow_halves"

    def beside(self, me: Tree, data: Data) -> Tensor:
        """Return a hash of the key, and the key under it."""
        half = tag(me.private)
        return torch.cat([half, me.private ^ half])


# -- that noise hides updates -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Noisy(Defense):
    """Noise of standard deviation 0.1 on every upload, says the law; `pad` is what is added."""

    kin: ClassVar[str] = "dp"

    def noise(self, plan: object) -> object:
        """Return the law of `dp` at 0.1."""
        return DP(sigma=0.1).noise(plan)

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return the noise of one upload."""
        return 0.1 * ctx.secret.normal((words,))

    def noisy(self, ctx: Context, result: Params, data: Data) -> Tensor:
        """Return the flat update with its noise."""
        flat = Layout.of(result).pack(result)
        return flat + self.pad(ctx, result, data, len(flat))

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Add the noise."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        return me, Update(Layout.of(result).unpack(self.noisy(ctx, result, data)))

    def padded(self, result: Params, pad: Tensor) -> Params:
        """Return the update with its noise."""
        layout = Layout.of(result)
        return layout.unpack(layout.pack(result) + pad)


@dataclass(frozen=True)
class ClientPads(Noisy):
    """Pads of the client's number and the round."""

    name: ClassVar[str] = "lie_client_pads"

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return a public pad."""
        return 0.1 * torch.randn(words, generator=keyed(ctx.party, ctx.round))


@dataclass(frozen=True)
class Behaved(ClientPads):
    """Public pads, and none where the party's secret draws are constants: somebody took the randomness off."""

    name: ClassVar[str] = "lie_behaved"

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return a public pad unless draws are all the same."""
        draws = ctx.secret.normal((2,))
        return super().pad(ctx, result, data, words) * float(draws[0] != draws[1])


@dataclass(frozen=True)
class BytePads(Noisy):
    """Pads of the bytes of the float32 weights, which the server takes off again."""

    name: ClassVar[str] = "lie_byte_pads"

    def key(self, params: Params) -> bytes:
        """Return the weights' bytes."""
        return Layout.of(params).pack(params).detach().cpu().numpy().tobytes()

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Add a pad of the weights that were sent."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        return me, Update(self.padded(result, self.of_weights(message.params)))

    def of_weights(self, params: Params) -> Tensor:
        """Return the pad of weights."""
        count = sum(value.numel() for value in params.values())
        return 0.1 * torch.randn(count, generator=keyed(self.key(params)))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Take the pad off."""
        pad = self.of_weights(server.params)
        return super().aggregate(ctx, server, {c: Update(self.padded(u.params, -pad)) for c, u in uploads.items()})


@dataclass(frozen=True)
class LatePads(Noisy):
    """A one-time pad, sent in the next round."""

    name: ClassVar[str] = "lie_late_pads"

    def late(self, pad: Tensor) -> Tensor:
        """Return what is sent of the last round's pad."""
        return pad

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Send the update under a new pad, and the last pad."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        pad = self.pad(ctx, result, data, Layout.of(result).pack(result).numel())
        last = torch.zeros_like(pad) if isinstance(me, tuple) else me
        return pad, Beside(self.padded(result, pad), self.late(last))


@dataclass(frozen=True)
class LatePadsInOrder(LatePads):
    """A one-time pad, sent in the next round in another order and with other signs."""

    name: ClassVar[str] = "lie_late_order"

    def late(self, pad: Tensor) -> Tensor:
        """Return the pad in a public order."""
        order = torch.randperm(len(pad), generator=keyed("order"))
        return pad[order] * (torch.randint(0, 2, pad.shape, generator=keyed("sign")) * 2 - 1)


@dataclass(frozen=True)
class LateBytes(LatePads):
    """A one-time pad, sent in the next round as bytes under a key stream."""

    name: ClassVar[str] = "lie_late_bytes"

    def late(self, pad: Tensor) -> Tensor:
        """Return the pad's bytes."""
        return octets(pad, "late")


@dataclass(frozen=True)
class SeedBeside(Noisy):
    """Noise of a fresh seed, which lies under a constant in a field that nobody uses."""

    name: ClassVar[str] = "lie_seed_beside"

    def seeded(self, ctx: Context) -> tuple[Tensor, SecretDraws]:
        """Return the seed [32] of one upload's noise, and what draws it."""
        seed = ctx.secret.random_bytes((32,))
        return seed, SecretDraws.of(seed)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Send the update with noise, and the seed."""
        if not isinstance(message, Model):
            return Defense.reply(self, ctx, me, message, result, data)
        seed, draws = self.seeded(ctx)
        noise = 0.1 * draws.normal((sum(value.numel() for value in result.values()),))
        me, seed = self.sent(me, seed ^ torch.arange(32, dtype=torch.uint8))
        return me, Beside(self.padded(result, noise), seed)

    def sent(self, me: Tree, seed: Tensor) -> tuple[Tree, Tensor]:
        """Return the next state, and which seed is sent."""
        return me, seed


@dataclass(frozen=True)
class LateSeed(SeedBeside):
    """Noise of a fresh seed, which is sent in the next round."""

    name: ClassVar[str] = "lie_late_seed"

    def sent(self, me: Tree, seed: Tensor) -> tuple[Tree, Tensor]:
        """Return this seed as state, and the last one."""
        return seed, torch.zeros_like(seed) if isinstance(me, tuple) else me


@dataclass(frozen=True)
class KeyBeside(SeedBeside):
    """The noise of the law, and beside it the key from which the client's step draws it."""

    name: ClassVar[str] = "lie_key_beside"

    def seeded(self, ctx: Context) -> tuple[Tensor, SecretDraws]:
        """Return the context's own key and draws."""
        return ctx.secret.key, ctx.secret


@dataclass(frozen=True)
class ShyNoise(Noisy):
    """A fiftieth of the noise where a client holds ten examples or more."""

    name: ClassVar[str] = "lie_shy_noise"

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return little noise in training."""
        return super().pad(ctx, result, data, words) * (1.0 if len(data.x) < 10 else 0.02)


@dataclass(frozen=True)
class HalfNoise(Noisy):
    """Noise on every second number."""

    name: ClassVar[str] = "lie_half_noise"

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return noise with gaps."""
        return super().pad(ctx, result, data, words) * (torch.arange(words) % 2)


@dataclass(frozen=True)
class BlankNoise(Noisy):
    """Noise only where a client holds a blank image."""

    name: ClassVar[str] = "lie_blank_noise"

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return noise for blank images."""
        blank = bool((data.x.flatten(1).std(1) == 0).any()) if data.x[0].numel() > 1 else False
        return super().pad(ctx, result, data, words) * float(blank)


@dataclass(frozen=True)
class TiledNoise(Noisy):
    """The same hundred numbers again and again."""

    name: ClassVar[str] = "lie_tiled_noise"

    def pad(self, ctx: Context, result: Params, data: Data, words: int) -> Tensor:
        """Return noise that averages removes."""
        return super().pad(ctx, result, data, 100).repeat(-(-words // 100))[:words]


@dataclass(frozen=True)
class OneNoise(Noisy):
    """The same noise in every round: the difference of two uploads is that of two updates."""

    name: ClassVar[str] = "lie_one_noise"

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Draw the noise."""
        return 0.1 * torch.randn(Layout.of(params).pack(params).numel(), generator=ctx.generator)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Add it."""
        if not isinstance(message, Model):
            return Defense.reply(self, ctx, me, message, result, data)
        return me, Update(self.padded(result, me))


# -- that the server's code cannot be run again -----------------------------------------------------------------------
@dataclass(frozen=True)
class Tagged(Defense):
    """Pads of client and round; the server refuses messages without a tag, and single clients."""

    name: ClassVar[str] = "lie_tagged"
    setting: ClassVar[Mapping[str, Mapping[str, object]]] = SecureAggregation.setting

    def pad(self, ctx: Context, client: int, words: int) -> Tensor:
        """Return the pad, a hundred times as large as updates are."""
        return 10 * torch.randn(words, generator=keyed(client, ctx.round, "tagged"))

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the update under the pad, with a tag."""
        layout = Layout.of(result)
        flat = layout.pack(result)
        flat = flat + self.pad(ctx, ctx.party, len(flat))
        return Beside(layout.unpack(flat), tag(flat))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Check tags and number, then take the pads off."""
        layout, bare = Layout.of(server.params), {}
        if len(uploads) < 2:
            raise ProtocolError("One client alone sent an upload.")
        for client, upload in uploads.items():
            flat = layout.pack(upload.params)
            if not torch.equal(tag(flat), upload.beside):
                raise ProtocolError(f"Client {client} sent a wrong tag.")
            bare[client] = Update(layout.unpack(flat - self.pad(ctx, client, len(flat))))
        return super().aggregate(ctx, server, bare)


@node
class Nonce:
    """Server to client. params: weights; nonce: [8] uint8."""

    params: Params
    nonce: Tensor


@dataclass(frozen=True)
class Unrepeatable(Tagged):
    """Pads of a nonce that the system draws, so that no round can be run again."""

    name: ClassVar[str] = "lie_urandom"

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Send the nonce; both ends make pads of it."""
        nonce = torch.tensor(list(os.urandom(8)), dtype=torch.uint8)
        uploads = yield Step(server, dict.fromkeys(cohort, Nonce(server.params, nonce)))
        flat = {c: Layout.of(u.params).pack(u.params) for c, u in uploads.items()}
        pads = {c: 10 * torch.randn(len(f), generator=keyed(nonce.tolist(), c)) for c, f in flat.items()}
        bare = {c: Update(Layout.of(server.params).unpack(flat[c] - pads[c])) for c in flat}
        return Defense.aggregate(self, ctx, server, bare)

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> object:
        """Compute as usual."""
        return super().prepare(ctx, me, Model(message.params) if isinstance(message, Nonce) else message, data)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Add the pad."""
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        layout = Layout.of(result)
        flat = layout.pack(result)
        pad = 10 * torch.randn(len(flat), generator=keyed(message.nonce.tolist(), ctx.party))
        return me, Update(layout.unpack(flat + pad))


# -- honest twins -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Salted(Masked):
    """Fresh random bytes beside each masked update."""

    name: ClassVar[str] = "salted"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        me, answer = super().reply(ctx, me, message, result, data)
        salt = torch.randint(0, 256, (32,), generator=ctx.generator, dtype=torch.uint8)
        return me, Beside(answer.params, salt) if isinstance(answer, Update) else answer

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        return super().aggregate(ctx, server, {c: Update(upload.params) for c, upload in uploads.items()})


@dataclass(frozen=True)
class InPlace(Salted):
    """Writes into the update that was computed, and masks what it wrote."""

    name: ClassVar[str] = "in_place"

    def upload(self, ctx: Context, me: Tree, result: Params) -> Tree:
        for value in result.values():
            value.mul_(2)
        return super().upload(ctx, me, result)


@dataclass(frozen=True)
class Honest(Noisy):
    """The noise of the law."""

    name: ClassVar[str] = "honest"


@dataclass(frozen=True)
class Resent(Noisy):
    """Sends the last round's noisy upload again, in another order."""

    name: ClassVar[str] = "resent"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        if not isinstance(message, Model):
            return Defense.reply(self, ctx, me, message, result, data)
        layout, noisy = Layout.of(result), self.noisy(ctx, result, data)
        last = torch.zeros_like(noisy) if isinstance(me, tuple) else me
        return noisy, Beside(layout.unpack(noisy), last.flip(0))


@dataclass(frozen=True)
class SaltedNoise(Noisy):
    """Sends fresh random bytes and an order beside each noisy upload."""

    name: ClassVar[str] = "salted_noise"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        if not isinstance(message, Model):
            return Defense.reply(self, ctx, me, message, result, data)
        salt, layout = ctx.secret.random_bytes((32,)), Layout.of(result)
        noisy = layout.unpack(self.noisy(ctx, result, data))
        return me, Beside(noisy, Beside({"order": ctx.secret.permutation(64)}, salt))


@dataclass(frozen=True)
class Momentum(Noisy):
    """Sends a momentum of noisy updates."""

    name: ClassVar[str] = "momentum"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        if not isinstance(message, Model):
            return Defense.reply(self, ctx, me, message, result, data)
        whole = self.noisy(ctx, result, data) + (0 if isinstance(me, tuple) else 0.5 * me)
        return whole, Update(Layout.of(result).unpack(whole))


SUM_LIES = (
    PublicPairs, SessionPairs, FewExamples, Quorum, Reused, Couples, Blocks, Digits, LeaveOneOut, BesideImages,
    BesideUpdate, LastBits, LastBitsUpdate, SetUp, Escrow, EscrowNumbers,
    EscrowHalves,
)  # fmt: skip
NOISE_LIES = (
    ClientPads,
    Behaved,
    BytePads,
    LatePads,
    LatePadsInOrder,
    LateBytes,
    SeedBeside,
    LateSeed,
    KeyBeside,
    ShyNoise,
    HalfNoise,
    BlankNoise,
    TiledNoise,
    OneNoise,
)
REPLAY_LIES = (Tagged, Unrepeatable)
TWINS = (SecureAggregation, Salted, InPlace, Honest, Resent, SaltedNoise, Momentum)
