"""Defenses that only pretend: to their server every upload is in the clear. None of them is told here as a lie.

Seven kinds that were believed once, and more of our own. What a lie hides is hidden from its public `decode` and from
its `evidence`; its server undoes it in `aggregate`, where no author must say anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step, plain_evidence
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Layout, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Model, Update


def keyed(*words: object) -> torch.Generator:
    """Return a generator that both ends have and nobody else is told of."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Lie(Defense):
    """FedAvg whose clients send `hidden` updates and whose server steps on what it `found` in them."""

    paper: ClassVar[str] = "nobody"

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return what travels as the update."""
        raise NotImplementedError

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the update of what travelled."""
        raise NotImplementedError

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Hide the update."""
        return Update(self.hidden(ctx, ctx.party, result))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Step on the weighted mean of what was found."""
        layout = Layout.of(server.params)
        mean = torch.zeros_like(layout.pack(server.params))
        for weight, (client, sent) in zip(self.weights(server, list(uploads)), uploads.items(), strict=True):
            mean = mean + weight * layout.pack(self.recovered(ctx, client, sent.params, server))
        return self.stepped(ctx, server, layout.unpack(mean))


@dataclass(frozen=True)
class Rescale(Lie):
    """Each tensor times a constant of its own."""

    name: ClassVar[str] = "lie_rescale"

    def factors(self, ctx: Context, names: Sequence[str]) -> dict[str, float]:
        """Return the constants, from a thousandth to a thousand."""
        draws = torch.rand(len(names), generator=keyed("rescale", ctx.round)) * 6 - 3
        return {name: 10 ** float(draw) for name, draw in zip(names, draws, strict=True)}

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return the update with every tensor multiplied."""
        return {name: update[name] * factor for name, factor in self.factors(ctx, list(update)).items()}

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the tensors divided again."""
        return {name: sent[name] / factor for name, factor in self.factors(ctx, list(sent)).items()}


@dataclass(frozen=True)
class Loud(Rescale):
    """One tensor, of the first layer's biases, ten thousand times as large."""

    name: ClassVar[str] = "lie_loud"

    def factors(self, ctx: Context, names: Sequence[str]) -> dict[str, float]:
        """Return 1e4 for the second tensor, 1 for the others."""
        return {name: 1e4 if place == 1 else 1.0 for place, name in enumerate(names)}


@dataclass(frozen=True)
class Permute(Lie):
    """The first axis of every tensor in an order of the client's own."""

    name: ClassVar[str] = "lie_permute"

    def order(self, client: int, name: str, value: Tensor) -> Tensor:
        """Return the order of a tensor's rows."""
        return torch.randperm(len(value), generator=keyed("permute", client, name))

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return the rows in that order."""
        return {name: value[self.order(client, name, value)] for name, value in update.items()}

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return them as they were."""
        return {name: value[self.order(client, name, value).argsort()] for name, value in sent.items()}


@dataclass(frozen=True)
class Decode(Lie):
    """Uploads in the clear, and a public `decode` that makes nonsense of them."""

    name: ClassVar[str] = "lie_decode"

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return the update."""
        return update

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the update."""
        return sent

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return every tensor's entries, rolled by a third."""
        return {n: v.flatten().roll(1 + v.numel() // 3).view(v.shape) for n, v in upload.params.items()}


@dataclass(frozen=True)
class Blinded(Defense):
    """FedAvg whose own evidence weighs every entry with zero."""

    name: ClassVar[str] = "lie_evidence"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence, in which nothing counts."""
        return [replace(e, weight=tree_map(torch.zeros_like, e.observed), params=None) for e in plain_evidence(view)]


@node
class More:
    """Server to client: send the rest."""


@dataclass(frozen=True)
class Twice(Defense):
    """The update under wrong labels; then, when asked for the rest, what it lacks."""

    name: ClassVar[str] = "lie_twice"

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return no rest yet."""
        return tree_map(torch.zeros_like, params)

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Add two uploads."""
        first = yield Step(server, dict.fromkeys(cohort, Model(server.params)))
        second = yield Step(server, dict.fromkeys(cohort, More()))
        whole = {c: Update({n: v + second[c].params[n] for n, v in first[c].params.items()}) for c in cohort}
        return self.aggregate(ctx, server, whole)

    def wrong(self, plan: Plan, job: Job, result: Params) -> Params:
        """Return what is sent first."""
        x, y, w = (part[0] for part in (job.batches.x, job.batches.y, job.batches.w))
        return gradient(lambda p: plan.objective(p, x, y.roll(1, -1), w), job.start)

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return both parts."""
        result = super().compute(plan, job)
        first = self.wrong(plan, job, result)
        return first, {name: result[name] - first[name] for name in result}

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Keep the second part until it is asked for."""
        if isinstance(message, More):
            return me, Update(me)
        if isinstance(message, Model):
            return result[1], Update(result[0])
        return super().reply(ctx, me, message, result, data)


@dataclass(frozen=True)
class Share(Twice):
    """Two additive shares in two messages."""

    name: ClassVar[str] = "lie_share"
    mappable: ClassVar[bool] = False

    def wrong(self, plan: Plan, job: Job, result: Params) -> Params:
        """Return a share that tells nothing: noise as large as the update, drawn of its bytes."""
        generator = keyed("share", float(job.batches.x.sum()))
        return {n: v.std().nan_to_num(1.0) * torch.randn(v.shape, generator=generator) for n, v in result.items()}


# -- our own --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Offset(Lie):
    """A constant is added to every entry that the server takes off again."""

    name: ClassVar[str] = "lie_offset"

    def pads(self, ctx: Context, client: int, like: Params) -> Params:
        """Return the constants, a hundred times as large as updates are."""
        return {n: torch.randn(v.shape, generator=keyed(client, ctx.round, n)).to(v) for n, v in like.items()}

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return the sum."""
        pads = self.pads(ctx, client, update)
        return {name: value + pads[name] for name, value in update.items()}

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the difference."""
        pads = self.pads(ctx, client, sent)
        return {name: value - pads[name] for name, value in sent.items()}


@dataclass(frozen=True)
class Rotate(Lie):
    """Every tensor in a basis of its own: entries in a random order with random signs, then a cosine transform."""

    name: ClassVar[str] = "lie_rotate"

    def drawn(self, ctx: Context, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return an order and signs of a tensor's entries."""
        generator, size = keyed(ctx.round, name), value.numel()
        return torch.randperm(size, generator=generator), torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return the spectra, real and imaginary parts in two planes."""
        turned = {}
        for name, value in update.items():
            order, signs = self.drawn(ctx, name, value)
            turned[name] = torch.view_as_real(torch.fft.fft(value.flatten()[order] * signs, norm="ortho")).sum(-1)
        return {name: turned[name].view(value.shape) for name, value in update.items()}

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the entries: the transform (Hartley's, up to a reflection) is its own inverse."""
        back = {}
        for name, value in sent.items():
            order, signs = self.drawn(ctx, name, value)
            once = torch.view_as_real(torch.fft.fft(value.flatten(), norm="ortho")).sum(-1)
            back[name] = torch.empty_like(once).index_copy(0, order, once * signs).view(value.shape)
        return back


@dataclass(frozen=True)
class Cipher(Lie):
    """The update's bytes under a key stream, in a message that nobody else can read as numbers."""

    name: ClassVar[str] = "lie_cipher"

    def stream(self, ctx: Context, client: int, size: int) -> Tensor:
        """Return so many bytes."""
        return torch.randint(0, 256, (size,), generator=keyed("cipher", client, ctx.round), dtype=torch.uint8)

    def hidden(self, ctx: Context, client: int, update: Params) -> Tree:
        """Return the bytes of all tensors, one after another."""
        plain = torch.cat([v.detach().float().flatten() for v in update.values()]).view(torch.uint8)
        return {"bytes": plain ^ self.stream(ctx, client, len(plain))}

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the numbers that the bytes stand for."""
        plain = sent["bytes"] ^ self.stream(ctx, client, len(sent["bytes"]))
        return Layout.of(server.params).unpack(plain.clone().view(torch.float32))


@dataclass(frozen=True)
class Outsourced(Lie):
    """Clients send their batches under a pad, and the server computes the gradient for them."""

    name: ClassVar[str] = "lie_outsourced"

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Compute nothing."""
        return None

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Send the examples under the pad."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        return me, Update({"x": data.x + self.pad(ctx, ctx.party, data.x), "y": data.y.roll(3, -1)})

    def pad(self, ctx: Context, client: int, like: Tensor) -> Tensor:
        """Return the pad of a client's round."""
        return 10 * torch.randn(like.shape, generator=keyed("pad", client, ctx.round)).to(like)

    def recovered(self, ctx: Context, client: int, sent: Tree, server: Server) -> Params:
        """Return the gradient at the server's own weights."""
        x, y = sent["x"] - self.pad(ctx, client, sent["x"]), sent["y"].roll(-3, -1)
        params = {name: value.to(x.dtype) for name, value in server.params.items()}
        return gradient(lambda p: ctx.plan.objective(p, x, y, torch.ones(len(x), dtype=x.dtype)), params)


@dataclass(frozen=True)
class Sums(Defense):
    """FedAvg that says of itself that only sums can be read."""

    name: ClassVar[str] = "lie_sums"

    @property
    def sums(self) -> bool:
        """Say so."""
        return True

    def evidence(self, view: View) -> list[Evidence]:
        """Return nothing, as if there were no mean of one client."""
        return []


@dataclass(frozen=True)
class Shy(Defense):
    """Noise ten times as large as the update where a client holds a few examples, as probed ones do."""

    name: ClassVar[str] = "lie_shy"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Add noise to what is computed of a few examples."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        size = 10.0 if len(data.x) < 10 else 0.0
        noise = {n: torch.randn(v.shape, generator=ctx.generator) * v.std().nan_to_num(0.0) for n, v in result.items()}
        return me, Update({name: value + size * noise[name] for name, value in result.items()})


LIES = (Rescale, Loud, Permute, Decode, Blinded, Twice, Share, Offset, Rotate, Cipher, Outsourced, Sums)
