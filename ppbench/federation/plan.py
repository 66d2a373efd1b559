"""The public description of a federation, known to every party and adversary; examples, and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.base.autodiff import towards
from ppbench.base.errors import UsageError
from ppbench.base.secret_draws import NO_SECRETS, SecretDraws
from ppbench.base.tree import Params, Tree, node
from ppbench.base.vocabulary import Vocabulary
from ppbench.nets.net import LOSSES, HeldSpec, LossName, Net, NetSpec, OwnLoss, build, initial

# -- Optimizers as pure functions on one flat parameter vector: few kernels, however many layers --
# `torch.optim` does not map over clients, is not differentiable, and its state cannot be part of a client's state.


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters inside a flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(params: Params) -> Layout:
        """Return the layout of `params`."""
        return Layout(tuple(params), tuple(tuple(p.shape) for p in params.values()))

    def pack(self, params: Params) -> Tensor:
        """Return `params` as one vector [P], in the layout's order."""
        return torch.cat([params[name].reshape(-1) for name in self.names])

    def unpack(self, flat: Tensor) -> Params:
        """Return views of `flat` [P] by name."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts: Sequence[Tensor] = flat.split(sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}


@dataclass(frozen=True)
class Opt:
    """SGD (with momentum) or Adam (eps 1e-8), as in torch; from each round in `decay_at` on, times `decay`."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    decay_at: tuple[int, ...] = ()
    decay: float = 0.5

    def rate(self, round_: int) -> float:
        """Return the learning rate of round `round_` (the first is 1)."""
        return self.lr * self.decay ** sum(round_ >= start for start in self.decay_at)

    def reach(self, steps: int) -> float:
        """Return how far `steps` equal gradients move the weights under SGD, in units of one times the rate."""
        return sum(self.momentum**s for t in range(steps) for s in range(steps - t))

    def init(self, flat: Tensor) -> Tree:
        """Return the state before the first step."""
        zero = torch.zeros_like(flat)
        if self.name == "adam":
            return {"m": zero, "v": zero.clone(), "t": torch.zeros((), dtype=flat.dtype, device=flat.device)}
        return {"m": zero} if self.momentum else ()

    def step(self, flat: Tensor, gradient: Tensor, state: Tree, lr: float | Tensor) -> tuple[Tensor, Tree]:
        """Return parameters and state after one step; nothing is changed in place."""
        if self.name == "adam":
            b1, b2 = self.betas
            t = state["t"] + 1
            m = torch.lerp(gradient, state["m"], b1)
            v = torch.addcmul(state["v"] * b2, gradient, gradient, value=1 - b2)
            scale = (1 - b2**t).sqrt() / (1 - b1**t)
            return flat - lr * scale * (m / (v.sqrt() + 1e-8 * (1 - b2**t).sqrt())), {"m": m, "v": v, "t": t}
        if self.momentum:
            m = state["m"] * self.momentum + gradient
            return flat - lr * m, {"m": m}
        return flat - lr * gradient, state


@node
class Data:
    """One party's examples, in separate storage (never a slice of the data set).

    x: [N, *shape] float32 in the data's range; y: [N, C] float32, one-hot, or [N, 1] numbers, or [N, 1, H, W] masks, or
    of texts that are their own targets x.
    """

    x: Tensor
    y: Tensor


@node
class Batch:
    """The batches of one client's round, stacked. x: [T, B, *shape]; y: [T, B, C]; w: [T, B] weights, 0 for padding."""

    x: Tensor
    y: Tensor
    w: Tensor


@dataclass(frozen=True)
class Noise:
    """A public law of noise. std: of one coordinate of the upload; tensors: (parameter, std) if it differs."""

    law: Literal["gaussian", "laplace"]
    std: float
    tensors: tuple[tuple[str, float], ...] = ()

    def of(self, name: str) -> float:
        """Return the standard deviation of one coordinate of the parameter `name`."""
        return dict(self.tensors).get(name, self.std)


@dataclass(frozen=True)
class Local:
    """A client's local training in a round.

    upload: "gradient" (FedSGD: the gradient of one batch) or "delta" (FedAvg: start minus end of local epochs). batch:
    examples per batch. opt: the local optimizer; its state is new each round.
    """

    upload: Literal["gradient", "delta"] = "delta"
    epochs: int = 1
    batch: int = 32
    opt: Opt = field(default_factory=lambda: Opt("adam", lr=1e-3))

    def steps(self, count: int) -> list[slice]:
        """Return the places of the examples of each local step, for a client with `count` of them in order."""
        size = min(self.batch, count)
        return [slice(i, min(i + size, count)) for _ in range(self.epochs) for i in range(0, count, size)]

    @property
    def copies(self) -> int:
        """Least number of model-sized arrays in a step: a gradient; for "delta" also its vector, weights, moments."""
        return 1 if self.upload == "gradient" else 3 + (2 if self.opt.name == "adam" else int(self.opt.momentum > 0))


@dataclass(frozen=True)
class Columns:
    """The public encoding of table rows: numbers first, then one-hot groups.

    numbers: count of standardized numeric features.  categories: width of each one-hot group.
    """

    numbers: int
    categories: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.numbers < 0 or any(width < 1 for width in self.categories):
            raise UsageError(f"The columns {self} cannot be: numbers are 0 or more, a category's features 1 or more.")

    @property
    def width(self) -> int:
        """Number of features of a row."""
        return self.numbers + sum(self.categories)

    def split(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the numbers [..., numbers] and the one-hot groups [..., width] of rows x [..., features]."""
        numbers, *groups = x.split((self.numbers, *self.categories), -1)
        return numbers, groups

    def rounded(self, x: Tensor) -> Tensor:
        """Return rows x [..., features] with each group made one-hot: its largest entry 1, the others 0."""
        numbers, groups = self.split(x)
        return torch.cat([numbers, *(one_hot(g.argmax(-1), g.shape[-1]).to(x) for g in groups)], -1)


SHARPNESS = 0.1
"""Share of the squared distance of two embeddings over which a vector's share of a token falls by e, see `nearness`.

Six letters, one each, `idlg`, 60 evaluations: 96 % of tokens; at 1/16, where shares have less slope, 83 %."""


@dataclass(frozen=True)
class Plan:
    """Everything public about a federation.

    server_opt: the server's step on the aggregated update; FedAvg is SGD with learning rate 1. schedule: "parallel", or
    "round_robin": clients one after another, a server step after each (SPN, Alg. 4). data_range: of an input's values.
    columns: of table rows; None for other inputs, or if the encoding is unknown. sample: clients drawn at random in
    each round; 0: all take part. kind: the modality of inputs, "" where their shape and the loss say it. vocabulary: of
    texts; None of other inputs.
    """

    spec: NetSpec
    clients: int
    local: Local = field(default_factory=Local)
    loss: LossName | OwnLoss = "cross_entropy"
    server_opt: Opt = field(default_factory=Opt)
    schedule: Literal["parallel", "round_robin"] = "parallel"
    data_range: tuple[float, float] = (0.0, 1.0)
    columns: Columns | None = None
    sample: int = 0
    kind: str = ""
    vocabulary: Vocabulary | None = None

    @property
    def net(self) -> Net:
        """The network, built once per process."""
        return build(self.spec)

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss [B] of logits [B, C] against y [B, C], for clients and attackers alike.

        Of texts that are their own targets, logits [B, L, V] against token numbers y [B, L].
        """
        if isinstance(self.loss, OwnLoss):
            return self.loss.function(logits, y)
        return LOSSES[self.loss](logits, y)

    @property
    def loss_name(self) -> str:
        """The name of the loss; one given as an object has its own."""
        return self.loss.name if isinstance(self.loss, OwnLoss) else self.loss

    @property
    def next_token(self) -> bool:
        """Whether a text is its own target: each token is predicted from those before it."""
        return self.loss_name == "next_token"

    def target_weights(self, counts: Tensor) -> Tensor:
        """Return the weight [B] that each target has in the mean loss of a batch of texts with `counts` [B] of them."""
        by_tokens = isinstance(self.loss, OwnLoss)
        return (1 / counts.sum()).expand(len(counts)) if by_tokens else 1 / (counts * len(counts))

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one example's target."""
        if self.net.pixelwise:
            return (1, *self.spec.shape[1:])
        return self.spec.shape if self.next_token else (self.spec.classes,)

    @property
    def by_softmax(self) -> bool:
        """Whether the loss compares softmax(logits) with classes."""
        return self.loss.classes if isinstance(self.loss, OwnLoss) else self.loss == "cross_entropy"

    def stepped(
        self, opt: Opt, layout: Layout, flat: Tensor, gradient: Tensor, state: Tree, lr: float | Tensor
    ) -> tuple[Tensor, Tree]:
        """Return flat parameters and state after a step of `opt`; running statistics move by their own share."""
        end, state = opt.step(flat, gradient, state, lr)
        moving = build(self.spec).statistics
        if not moving:
            return end, state
        sizes = [torch.Size(shape).numel() for shape in layout.shapes]
        shares = torch.cat([flat.new_full((n,), moving.get(k, 0.0)) for k, n in zip(layout.names, sizes, strict=True)])
        return torch.where(shares > 0, flat - shares * gradient, end), state

    def training_pass(self, params: Params, x: Tensor) -> tuple[Tensor, Params]:
        """Return outputs [B, C] of x [B, *shape], and the batch statistics of the tracked norms (`Net.statistics`)."""
        return self.net.with_statistics(params, x)

    def token_table(self, params: Params | None) -> Tensor:
        """Return the embeddings [V, D] of a network of texts, frozen or in `params`; None: of an untrained one."""
        name = self.net.embedding
        known = self.net.frozen | (initial(self.spec, 0) if params is None else params)
        return known[name].detach()

    def of_vectors(self, reach: float = 1.0) -> Plan:
        """Return a plan of texts as one whose inputs are vectors [L, D] within `reach`; any other plan as it is."""
        if self.vocabulary is None or not self.net.embedding:
            return self
        spec, start = self.spec, initial(self.spec, 0)
        shape = (*spec.shape, self.token_table(start).shape[1])
        vectors = HeldSpec(spec.model, shape, spec.classes, spec.options, net=self.net, start=start)
        return replace(self, spec=vectors, data_range=(-reach, reach), kind="", vocabulary=None)

    def nearness(self, params: Params, x: Tensor) -> Tensor:
        """Return the tokens, as shares [B, L, V], that vectors x [B, L, D] in the place of embeddings are as targets.

        Where a text is its own target, a search over vectors moves the targets too: softmax of -d^2 / t over the
        embeddings, at distance d. t is `SHARPNESS` of the mean squared distance of two embeddings, so that a vector
        that has come to an embedding counts as its token alone, and one that has not has a slope. Padding is among
        them, whose share is no target: so a search can end a text.
        """
        table = (self.net.frozen | params)[self.net.embedding][: self.spec.classes].detach().to(x)
        size = table.square().sum(1)
        spread = 2 * (size.mean() - table.mean(0).square().sum())
        return ((2 * x @ table.T - size) / (SHARPNESS * spread)).softmax(-1)

    def objective(self, params: Params, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Return the weighted mean loss (scalar) of x [B, *shape], y [B, C] with weights w [B].

        Its gradient by running statistics is these minus the batch's, which move them without a say of the weights.
        """
        if self.next_token and x.dim() > 2:
            y = self.nearness(params, x)
        shares = self.loss.shares(y) if isinstance(self.loss, OwnLoss) else None
        total = (w if shares is None else w * shares).sum()
        outputs, batch = self.training_pass(params, x)
        mean = (w * self.example_loss(outputs, y)).sum() / total.clamp(min=1e-12)
        return mean + sum(towards(params[name], value) for name, value in batch.items() if name in params)


@dataclass(frozen=True)
class Context:
    """All that a party has in one step besides its state.

    round: 0 at set-up. session: unique to each round and each fork (probes, observed rounds); masks must derive from
    it, or a fork's would be those of the real round. It does not reveal whether a round is a probe, even compared with
    earlier sessions. party: client index, or SERVER. Draws for this party in this step only: secret, of all that it
    must not give away (noise, masks, keys, private parameters, secret samples); generator, of what is public, since its
    state follows from enough of its numbers. A context that was made without `secret` cannot draw secrets.
    """

    plan: Plan
    round: int
    session: str
    party: int
    generator: torch.Generator
    secret: SecretDraws = NO_SECRETS


def all_at_once(data: Data) -> Batch:
    """Return all of `data` as one batch."""
    return Batch(data.x[None], data.y[None], torch.ones(1, len(data.x), dtype=data.x.dtype, device=data.x.device))


def gather(data: Data, index: Tensor, weight: Tensor) -> Batch:
    """Return the batches that `index` [T, B] selects, with weights [T, B]; channels-last images stay so."""
    device = data.x.device
    index, weight = index.to(device), weight.to(device, data.x.dtype)
    if data.x.dim() == 4 and data.x.is_contiguous(memory_format=torch.channels_last):
        x = data.x.permute(0, 2, 3, 1)[index].permute(0, 1, 4, 2, 3)
    else:
        x = data.x[index]
    return Batch(x, data.y[index], weight)


def shuffled(data: Data, local: Local, generator: torch.Generator) -> Batch:
    """Return batches of `local.epochs` shuffled epochs, the last padded with weight 0; "gradient": a random batch."""
    count, size = len(data.x), min(local.batch, len(data.x))
    if local.upload == "gradient":
        return gather(data, torch.randperm(count, generator=generator)[None, :size], torch.ones(1, size))
    steps = -(-count // size)
    weight = (torch.arange(steps * size) < count).float().view(steps, size)
    orders = [torch.randperm(count, generator=generator) for _ in range(local.epochs)]
    index = torch.stack([torch.cat([o, o[: steps * size - count]]).view(steps, size) for o in orders]).flatten(0, 1)
    return gather(data, index, weight.repeat(local.epochs, 1))


def poisson(data: Data, steps: int, rate: float, secret: SecretDraws) -> Batch:
    """Return `steps` Poisson samples, each example in with probability `rate`, as 0/1 weights over padded batches."""
    count = len(data.x)
    chosen = secret.bernoulli(rate, (steps, count))
    size = max(1, int(chosen.sum(1).max()))
    index = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :size]
    return gather(data, index, chosen.gather(1, index).float())
