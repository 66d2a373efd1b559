"""Twelve honest defenses, each the same to whoever looks, and five that protect what is measured alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, tree_map
from ppbench.federation.contract import Context, Defense, Job, Server
from ppbench.federation.plan import Batch, Data, Layout, Plan
from ppbench.federation.wire import Model, Update


@dataclass(frozen=True)
class Flat(Defense):
    """FedAvg whose clients send a function of their flat update [P] and of a state of theirs [S, P], zeros at first."""

    states: ClassVar[int] = 0

    def sent(self, ctx: Context, me: Tensor, update: Tensor, layout: Layout, data: Data) -> tuple[Tensor, Tensor]:
        """Return the next state and what is sent, both flat."""
        raise NotImplementedError

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return zeros."""
        return torch.zeros(self.states, len(Layout.of(params).pack(params)))

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Params, data: Data) -> tuple[Tree, Tree | None]:
        """Send what `sent` makes of the update."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        layout = Layout.of(result)
        me, flat = self.sent(ctx, me, layout.pack(result), layout, data)
        return me, Update(layout.unpack(flat))


def clipped(update: Tensor, bound: float) -> Tensor:
    return update * (bound / update.norm().clamp(min=1e-30)).clamp(max=1.0)


def gaussian(ctx: Context, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=ctx.generator).to(like)


class Clip(Flat):
    name: ClassVar[str] = "clip"

    def sent(self, ctx, me, update, layout, data):
        return me, clipped(update, 0.5)


class ClipNoise(Flat):
    name: ClassVar[str] = "clip_noise"

    def sent(self, ctx, me, update, layout, data):
        return me, clipped(update, 0.5) + 1e-4 * gaussian(ctx, update)


class Clamp(Flat):
    """Each entry is clipped by itself."""

    name: ClassVar[str] = "clamp"

    def sent(self, ctx, me, update, layout, data):
        return me, update.clamp(-0.02, 0.02)


class QSGD(Flat):
    name: ClassVar[str] = "qsgd"

    def sent(self, ctx, me, update, layout, data):
        size, levels = update.norm().clamp(min=1e-30), 16
        draws = torch.rand(update.shape, generator=ctx.generator).to(update)
        return me, update.sign() * size * (levels * update.abs() / size + draws).floor() / levels


class Sketch(Flat):
    """A count sketch of a quarter of the entries, with public hashes."""

    name: ClassVar[str] = "sketch"

    def sent(self, ctx, me, update, layout, data):
        public, size = torch.Generator().manual_seed(5), len(update)
        bucket = torch.randint(0, size // 4, (size,), generator=public)
        sign = torch.randint(0, 2, (size,), generator=public) * 2.0 - 1
        table = torch.zeros(size // 4).to(update).index_add(0, bucket, sign * update)
        return me, sign * table[bucket]


class TopK(Flat):
    """A tenth of the entries; the rest waits for the next round."""

    name: ClassVar[str] = "top_k"
    states: ClassVar[int] = 1

    def sent(self, ctx, me, update, layout, data):
        whole = update + me[0]
        kept = whole * (whole.abs() >= whole.abs().topk(len(whole) // 10).values.min())
        return (whole - kept)[None], kept


class LayerDropout(Flat):
    name: ClassVar[str] = "layer_dropout"

    def sent(self, ctx, me, update, layout, data):
        parts = layout.unpack(update)
        coins = torch.rand(len(parts), generator=ctx.generator) > 0.3
        kept = {name: value * coin for (name, value), coin in zip(parts.items(), coins, strict=True)}
        return me, layout.pack(kept)


class Momentum(Flat):
    name: ClassVar[str] = "momentum"
    states: ClassVar[int] = 1

    def sent(self, ctx, me, update, layout, data):
        velocity = 0.9 * me[0] + update
        return velocity[None], velocity


class Adaptive(Flat):
    """Adam of the client's own, over rounds."""

    name: ClassVar[str] = "adam"
    states: ClassVar[int] = 2

    def sent(self, ctx, me, update, layout, data):
        first, second = 0.9 * me[0] + 0.1 * update, 0.99 * me[1] + 0.01 * update**2
        return torch.stack([first, second]), 0.01 * first / (second.sqrt() + 1e-8)


class Sign(Flat):
    name: ClassVar[str] = "sign"

    def sent(self, ctx, me, update, layout, data):
        return me, update.sign() * update.abs().mean()


class FederatedDropout(Flat):
    """Half of each tensor's rows are left out."""

    name: ClassVar[str] = "federated_dropout"

    def sent(self, ctx, me, update, layout, data):
        parts = layout.unpack(update)
        rows = {n: torch.rand(len(v), generator=ctx.generator) < 0.5 for n, v in parts.items()}
        return me, layout.pack({n: v * rows[n].view(-1, *[1] * (v.dim() - 1)) for n, v in parts.items()})


@dataclass(frozen=True)
class FedProx(Defense):
    """Local steps are pulled back to the weights that were received."""

    name: ClassVar[str] = "fed_prox"

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Keep the weights that were received."""
        job = super().prepare(ctx, me, message, data)
        return job and Job(job.start, job.batches, job.lr, message.params, job.noise)

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Add the pull."""
        slope = super().local_gradient(plan, params, batch, own, noise)
        return {name: value + 0.1 * (params[name] - own[name]) for name, value in slope.items()}


@dataclass(frozen=True)
class Mixup(Defense):
    """Clients train on blends of two examples."""

    name: ClassVar[str] = "mixup"

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Blend each example with another one."""
        order = torch.randperm(len(data.x), generator=ctx.generator)
        share = 0.3 * torch.rand(1, generator=ctx.generator)
        x, y = (part + share * (part[order] - part) for part in (data.x, data.y))
        return super().prepare(ctx, me, message, Data(x, y))


@dataclass(frozen=True)
class DeltaCoding(Defense):
    """Clients send what differs from their update of the round before, which both ends keep."""

    name: ClassVar[str] = "delta_coding"

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return no update."""
        return tree_map(torch.zeros_like, params)

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Keep an update of each client."""
        kept = {n: torch.zeros(ctx.plan.clients, *value.shape) for n, value in params.items()}
        return replace(super().init_server(ctx, params), own=kept)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Params, data: Data) -> tuple[Tree, Tree | None]:
        """Send the difference."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        return result, Update({name: value - me[name] for name, value in result.items()})

    def decoded(self, ctx: Context, server: Server, client: int, upload: Tree) -> Params:
        """Add it to the last update."""
        return {name: value + server.own[name][client] for name, value in upload.params.items()}

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Step, and keep the updates."""
        kept = {name: value.clone() for name, value in server.own.items()}
        for client, upload in uploads.items():
            for name, value in self.decoded(ctx, server, client, upload).items():
                kept[name][client] = value
        return replace(super().aggregate(ctx, server, uploads), own=kept)


HONEST = (
    *(Clip, ClipNoise, Clamp, QSGD, Sketch, TopK, LayerDropout, Momentum, Adaptive, Sign, FederatedDropout),
    *(FedProx, Mixup, DeltaCoding),
)


# -- protected where they are measured alone --------------------------------------------------------------------------
class ByCount(Flat):
    """Noise on uploads of few examples."""

    name: ClassVar[str] = "by_count"

    def sent(self, ctx, me, update, layout, data):
        return me, update + (len(data.x) < 10) * update.std() * 10 * gaussian(ctx, update)


class ByKind(Flat):
    """Noise on gradients, none on what local training gives."""

    name: ClassVar[str] = "by_kind"

    def sent(self, ctx, me, update, layout, data):
        return me, update + (ctx.plan.local.upload == "gradient") * update.std() * 10 * gaussian(ctx, update)


class Fainter(Flat):
    """Noise of 2 % in training, and twenty times as much on few examples."""

    name: ClassVar[str] = "fainter"

    def sent(self, ctx, me, update, layout, data):
        share = 0.4 if len(data.x) < 10 else 0.02
        return me, update + share * update.std() * gaussian(ctx, update)


class EverySecond(Flat):
    """Noise in odd rounds: the probes of a fresh model are in round 1."""

    name: ClassVar[str] = "every_second"

    def sent(self, ctx, me, update, layout, data):
        return me, update + (ctx.round % 2) * update.std() * 10 * gaussian(ctx, update)


@dataclass(frozen=True)
class BySteps(Defense):
    """Noise on the gradients of batches of few examples."""

    name: ClassVar[str] = "by_steps"

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return noise of every step."""
        return {n: torch.randn(steps, *v.shape, generator=ctx.generator) for n, v in params.items()}

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Add it where few examples count."""
        slope = super().local_gradient(plan, params, batch, own, ())
        few = (batch.w.sum() < 5).to(slope["head.weight"])
        return {name: value + few * 10 * value.std() * noise[name] for name, value in slope.items()}


DISHONEST = (ByCount, ByKind, Fainter, EverySecond, BySteps)


class Blankness(Flat):
    """Noise where a client holds an image whose quarters are even, as canaries are and digits are not."""

    name: ClassVar[str] = "blankness"

    def sent(self, ctx, me, update, layout, data):
        half = data.x.shape[-1] // 2
        parts = [data.x[..., a, b] for a in (slice(half), slice(half, None)) for b in (slice(half), slice(half, None))]
        even = torch.stack([part.flatten(1).std(1) < 1e-6 for part in parts]).all(0)
        levels = torch.stack([part.flatten(1).mean(1) for part in parts])
        blank = bool((even & (levels.std(0) > 0.01)).any())
        return me, update + blank * 3 * update.std() * gaussian(ctx, update)
