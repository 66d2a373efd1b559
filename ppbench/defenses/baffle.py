"""BAFFLE: clients train by forward passes alone and send loss differences (Feng et al. 2023)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from ppbench.base.errors import Overflow, ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, node
from ppbench.federation import secagg
from ppbench.federation.bounds import NonNegativeInt, OpenShare, between, whole_number
from ppbench.federation.contract import Context, Job, Server, step_inputs
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Batch, Data, Layout, Plan
from ppbench.federation.secagg import PairedDefense, cohort_evidence, cohorts, others_masks
from ppbench.federation.threats import TARGET
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Model, Slot, Update
from ppbench.nets.net import build

# -- Stein's estimate of a gradient from loss differences: the computations of BAFFLE's clients and server --
# Directions are drawn one after another on the CPU, however many are stacked, so that all parties have the same
# bits. None is stored: memory stays proportional to the model. Losses of examples have the model's precision, their
# mean and differences float64: at sigma = 1e-4 a difference is a ten-thousandth of the loss.

Scheme = Literal["central", "twice"]
STACK, STACK_BYTES, SLICE_EXAMPLES, SMALL_BATCH = 64, 2**20, 8, 2048
"""Most models in a stack, and bytes of their weights; examples per slice; most entries of a small batch.

On images stacks of models save no time on a CPU, and slices of 8 examples keep a client's peak memory at 0.04
(WRN-10-2) to 0.08 (LeNet) of backpropagation's at batches of 128, for 1.25 and 1.5 times the time; whole batches take
0.35 and 0.58.
"""
OTHER_DEVICE_ENTRIES = 2**22
"""Most entries of all models' batches in a stack on another device, which 8 images would leave idle (not measured)."""


def stein_directions(seed: int, entries: int, count: int) -> Iterator[Tensor]:
    """Yield z_1, ..., z_count, each [entries] float32, standard normal; the first ones do not depend on `count`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(entries, generator=generator)


def chunks(seed: int, entries: int, count: int, size: int) -> Iterator[Tensor]:
    """Yield the same directions stacked, [size, entries] float32 at a time; the last stack may be smaller."""
    stream = stein_directions(seed, entries, count)
    while chunk := list(islice(stream, size)):
        yield torch.stack(chunk)


def step_seeds(seed: int, steps: int) -> Tensor:
    """Return the seeds [steps] int64 of a round's local steps, all from its public `seed`, which is the first."""
    later = (Seeds(seed).seed("baffle", step) >> 32 for step in range(1, steps))
    return torch.tensor([seed, *later], dtype=torch.int64)


def mean_loss(plan: Plan, params: Params, batch: Batch, examples: int = 0) -> Tensor:
    """Return the weighted mean loss of a batch (without axis T), a float64 scalar; `examples` at a time, 0 for all."""
    parts = zip(*(part.split(examples or len(batch.x)) for part in (batch.x, batch.y)), strict=True)
    losses = torch.cat([plan.example_loss(plan.net(params, x), y) for x, y in parts]).double()
    weights = batch.w.double()
    return (weights * losses).sum() / weights.sum().clamp(min=1e-12)


def stack_size(chunk: int, batch: Batch, entries: int) -> int:
    """Return the number of perturbed models evaluated at once: `chunk`; if 0, by memory, and 1 for images on a CPU."""
    if chunk:
        return chunk
    on_cpu, fitting = batch.x.device.type == "cpu", min(STACK, STACK_BYTES // (4 * entries))
    if on_cpu and batch.x.numel() > SMALL_BATCH:
        return 1
    return max(1, fitting if on_cpu else min(fitting, OTHER_DEVICE_ENTRIES // batch.x.numel()))


def slice_size(examples: int, batch: Batch) -> int:
    """Return the examples per forward pass: `examples`; if 0, `SLICE_EXAMPLES` for images on a CPU, else all."""
    return examples or (
        SLICE_EXAMPLES if batch.x.device.type == "cpu" and batch.x.numel() > SMALL_BATCH else len(batch.x)
    )


def loss_differences(
    plan: Plan,
    params: Params,
    batch: Batch,
    seed: int,
    count: int,
    sigma: float,
    scheme: Scheme,
    chunk: int = 0,
    examples: int = 0,
) -> Tensor:
    """Return the loss differences [count] float64 of a batch (no axis T) along the seed's directions z_k (Eq. 1 and 2).

    "central": L(W + sigma z_k) - L(W - sigma z_k), two forward passes each. "twice": forward differences L(W + sigma
    z_k) - L(W), twice as many for the same cost. chunk: perturbed models evaluated at once; 1 for a loop. examples: per
    forward pass. 0 chooses by memory, see `stack_size` and `slice_size`.
    """
    build(plan.spec)  # here, because a constructor draws, which vmap forbids
    layout = Layout.of(params)
    flat = layout.pack(params)
    size, slices = stack_size(chunk, batch, len(flat)), slice_size(examples, batch)
    if size > 1:  # under vmap, group normalization takes no channels-last images
        batch = Batch(batch.x.contiguous(), batch.y, batch.w)

    def loss(weights: Tensor) -> Tensor:
        return mean_loss(plan, layout.unpack(weights), batch, slices)

    base = loss(flat) if scheme == "twice" else None
    parts = []
    for stack in chunks(seed, len(flat), count, size):
        step = stack.to(flat.device, flat.dtype).mul_(sigma)
        plus = _losses(loss, flat + step)
        parts.append(plus - (_losses(loss, flat - step) if base is None else base))
    return torch.cat(parts)


def _losses(loss: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    return loss(weights[0])[None] if len(weights) == 1 else vmap(loss)(weights)


def slope(difference: Tensor, sigma: float, scheme: Scheme) -> Tensor:
    """Return s_k = z_k . gradient, up to O(sigma^2) ("central") or O(sigma) ("twice"), from differences [count]."""
    return difference.double() / (2 * sigma if scheme == "central" else sigma)


def stein(seed: int, slopes: Tensor, entries: int) -> Tensor:
    """Return the unbiased estimate (1 / count) sum_k z_k s_k of a gradient [entries], float64 (Eq. 6)."""
    total = torch.zeros(entries, dtype=torch.float64, device=slopes.device)
    for z, s in zip(stein_directions(seed, entries, len(slopes)), slopes.tolist(), strict=True):
        total.add_(z.to(total.device), alpha=s)
    return total / len(slopes)


# -- BAFFLE's messages, the server's state, checks of answers, and masks --
# Masked numbers are fixed point in a ring, where masks cancel exactly: rounding of floats would destroy a difference
# of 1e-4. Every entry has its own mask: a common scalar would reveal every difference of two entries.


@node(name="ppbench.defenses.baffle.messages.Evaluate")
class Evaluate(Model):
    """Server to client (4n + 4 bytes): evaluate the model around `params`. seed: int32 scalar, of the directions."""

    seed: Tensor


@node(name="ppbench.defenses.baffle.messages.Differences")
class Differences:
    """Client to server. value: [K], of forward differences [2K]; float32, or masked int64 or int32."""

    value: Tensor


@node(name="ppbench.defenses.baffle.messages.Own")
class ServerState:
    """The server's own state. seed: int32 scalar, of the round; average: Params or (); steps: int64 scalar."""

    seed: Tensor
    average: Tree
    steps: Tensor


def numbers_of(client: int, upload: Tree, params: Params, count: int | None, ring: torch.dtype | None) -> Tensor:
    """Return the numbers of a client's answer, flat (ProtocolError: wrong kind, length or dtype, or not finite).

    count: of loss differences; None for an update like `params`. ring: dtype of masked numbers, None for floats.
    """
    expected = Update if count is None else Differences
    if not isinstance(upload, expected):
        raise ProtocolError(f"Client {client} answered with {type(upload).__name__}, not {expected.__name__}.")
    layout = Layout.of(params)
    if isinstance(upload, Update) and Layout.of(upload.params) != layout:
        raise ProtocolError(f"Client {client} sent an update whose names or shapes are not the model's.")
    numbers = flat_answer(upload)
    if count is not None and numbers.shape != (count,):
        raise ProtocolError(f"Client {client} sent numbers of shape {tuple(numbers.shape)}; ({count},) is right.")
    dtype = ring or (torch.float32 if count is not None else layout.pack(params).dtype)
    if numbers.dtype != dtype:
        raise ProtocolError(f"Client {client} sent numbers of type {numbers.dtype}; {dtype} is right.")
    if not bool(numbers.isfinite().all()):
        raise ProtocolError(f"Client {client} sent a number that is not finite; all must be.")
    return numbers


def flat_answer(upload: Tree) -> Tensor:
    """Return the numbers of an answer as one vector: differences, or an update's entries in the model's order."""
    return upload.value if isinstance(upload, Differences) else Layout.of(upload.params).pack(upload.params)


def answers_by_slot(view: View) -> dict[Slot, list[Exchange]]:
    """Return the clients' answers in a view by slot, oldest first: colluders' of the target only, a client's none."""
    answers: dict[Slot, list[Exchange]] = defaultdict(list)
    for exchange in view.exchanges() if view.threat.sees_uploads else ():
        is_target = exchange.slot.client == TARGET or not view.threat.colludes
        if is_target and isinstance(exchange.request, Evaluate):
            answers[exchange.slot].append(exchange)
    return dict(answers)


Masks = Literal["none", "ring64", "ring32"]


@dataclass(frozen=True)
class Ring:
    """Fixed-point numbers modulo the range of `dtype`. limit: larger magnitudes are refused."""

    dtype: torch.dtype
    fraction_bits: int
    limit: float


# Weighted means must stay in the ring: below 2^23 and 2. `to_ring` itself refuses from 2^22.
RINGS: Mapping[str, Ring] = {"ring64": Ring(torch.int64, 40, 2.0**22), "ring32": Ring(torch.int32, 30, 1.0)}
ANSWER_MASKS = "answer"  # of the masks' derivation: colluders derive theirs again under the same name


def mask_numbers(ctx: Context, me: secagg.Keys, numbers: Tensor, masks: Masks) -> Tensor:
    """Return N_c / N times `numbers` [k] in fixed point plus this client's mask, int64 or int32 [k] (Overflow)."""
    ring, flat = RINGS[masks], numbers.cpu()
    if not bool((flat.abs() < ring.limit).all()):
        raise Overflow(
            f"Client {ctx.party} has the number {float(flat.abs().max()):.3g} to mask; masks={masks!r} holds finite "
            f"numbers below {ring.limit:g}."
        )
    share = me.share(ctx.party)
    fixed = secagg.to_ring(flat, ring.fraction_bits, share) + secagg.zero_sum(me, ctx, ANSWER_MASKS, len(flat))
    return fixed.to(ring.dtype)  # drops the upper half for 2^32: what is 0 modulo 2^64 is 0 modulo 2^32 too


def unmasked_mean(answers_by_slot: Sequence[Tensor], masks: Masks) -> Tensor:
    """Return the N_c / N-weighted mean [k] float64 of all clients' masked numbers."""
    ring = RINGS[masks]
    return secagg.from_ring(torch.stack(list(answers_by_slot)).sum(0, dtype=ring.dtype), ring.fraction_bits)


def unmasked_answer(view: View, exchange: Exchange, answer: Tensor, masks: Masks) -> Tensor | None:
    """Return one client's unmasked numbers [k] float64, from all others' keys; None if the view lacks some."""
    server, client = view.state_at(exchange), exchange.slot.client
    missing = others_masks(view, exchange, range(view.plan.clients), lambda keys: keys, ANSWER_MASKS, len(answer))
    if missing is None or server is None:
        return None
    ring, counts = RINGS[masks], server.counts
    fixed = (answer.to(torch.int64) + missing).to(ring.dtype)
    return secagg.from_ring(fixed, ring.fraction_bits) / (int(counts[client]) / int(counts.sum()))


BAFFLE_SETTING: Mapping[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": "32", "activation": "hardswish"},
    "loss": "cross_entropy",
    "upload": "gradient",
    "schedule": "parallel",
    "optimizer": "adam",
    "lr": 1e-2,
    "beta2": 0.99,
    "batch_size": 14,
    "rounds": 200,
    "decay_at": (),
    "attack_batch": (1, 4),
}
# Table 1 on MNIST; the paper gives no batch size, and attacks only histograms, which need the other level.
# The average stays "warmed": with the paper's 0.995 from a random start, the server's 20 steps, one per epoch, would
# deliver a model that is nine tenths the start, which is not the one of Table 1.
BAFFLE_PAPER_SETTING: Mapping[str, Any] = {
    **BAFFLE_SETTING,
    "dataset": "mnist",
    "model": "lenet_baffle",
    "model_options": {},
    "clients": 10,
    "partition": "iid",
    "upload": "delta",
    "local_epochs": 1,
    "rounds": 20,
    "batch_size": 64,
    "grid": (100.0, 200.0, 500.0),
    "settings": {"level": "epoch", "scheme": "twice"},
    "attacks": ("standard",),
    "victims": 50,
}


@dataclass(frozen=True)
class Baffle(PairedDefense):
    """Replaces backpropagation by finite differences of the loss along random directions that all parties know.

    "batch" level (Alg. 1): a client sends K loss differences, 4K bytes, from which the server computes Stein's estimate
    of the gradient. "epoch" level (Sec. 3.2): the client steps on its own estimates and uploads the change.

    Attributes:
        k: the paper's K, half the forward passes per step. sigma: standard deviation of a perturbation's entries.
        scheme: "twice": forward differences (W + delta, and W once), twice as many for the same forward passes (Sec.
            3.2): 2K numbers are uploaded, which the paper's 4K bytes do not count; "central": W +- delta (Eq. 2).
        masks: pairwise masks that cancel in the sum (Alg. 1), on fixed-point numbers modulo 2^32 ("ring32": the paper's
            4 bytes per number, 30 fractional bits) or 2^64 ("ring64", 8 bytes); "none": the server reads each client's.
        chunk, examples: perturbed models and examples per forward pass, see `loss_differences`.
        ema: decay of the delivered average of the weights; 0 delivers the last weights.
        average: "warmed": a smaller decay at first (`decay`); "constant": as in the paper, so that the random start
            stays in the average for about 1 / (1 - ema) steps: 4 points of accuracy less on digits (200 steps), 42 on
            MNIST (100 steps).
    """

    k: Annotated[int, whole_number(1, 1_000_000)] = 100
    level: Literal["batch", "epoch"] = "batch"
    scheme: Scheme = "twice"
    sigma: Annotated[float, between(1e-12, 1e3)] = 1e-4
    masks: Masks = "ring32"
    chunk: NonNegativeInt = 0
    examples: NonNegativeInt = 0
    ema: OpenShare = 0.995
    average: Literal["warmed", "constant"] = "warmed"

    name: ClassVar[str] = "baffle"
    version: ClassVar[str] = "2"
    control: ClassVar[str] = "k"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (10.0, 64.0, 300.0),
        "paper": (100.0, 200.0, 500.0, 1000.0, 5000.0),
    }
    paper: ClassVar[str] = (
        "Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning, ECCV 2024 (arXiv 2301.12195)"
    )
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": BAFFLE_SETTING, "paper": BAFFLE_PAPER_SETTING}
    epsilon_reason: ClassVar[str] = "loss differences are neither clipped nor noised; the directions are public"
    mappable: ClassVar[bool] = False  # `compute` redraws the directions instead of storing K x n numbers

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse a plan of the other level."""
        super().check(plan)
        upload = "gradient" if self.level == "batch" else "delta"
        if plan.local.upload != upload:
            raise UsageError(
                f"Defense {self.name!r} at level={self.level!r} needs --upload {upload}, not {plan.local.upload!r}."
            )

    @property
    def sums(self) -> bool:
        """Whether masks hide all but the cohort's sum from the server."""
        return self.masks != "none"

    @property
    def count(self) -> int:
        """The number of directions, and of differences in an answer: K ("central") or 2K ("twice")."""
        return self.k if self.scheme == "central" else 2 * self.k

    def decay(self, step: int) -> float:
        """Return the average's decay at `step` (from 1): ema; if "warmed", less at first."""
        return self.ema if self.average == "constant" else min(self.ema, (1 + step) / (10 + step))

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Start the average at the initial weights."""
        own = ServerState(
            torch.zeros((), dtype=torch.int32), params if self.ema else (), torch.zeros((), dtype=torch.int64)
        )
        return replace(super().init_server(ctx, params), own=own)

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Draw the round's seed and send it with the weights."""
        seed = torch.randint(2**31, (), generator=ctx.generator).to(torch.int32)
        return replace(server, own=replace(server.own, seed=seed)), Evaluate(server.params, seed)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Step on Stein's estimate of the mean gradient ("batch"), or on the clients' mean update ("epoch")."""
        layout = Layout.of(server.params)
        flat_params = layout.pack(server.params)
        count, ring = self.count if self.level == "batch" else None, RINGS[self.masks].dtype if self.sums else None
        numbers = [numbers_of(c, upload, server.params, count, ring) for c, upload in uploads.items()]
        if self.sums:
            secagg.need_everybody(server, uploads)
        mean = self._mean(numbers, self.weights(server, list(uploads)))
        if self.level == "batch":
            slopes = slope(mean, self.sigma, self.scheme)
            mean = stein(int(server.own.seed), slopes, len(flat_params))
        return self.stepped(ctx, server, layout.unpack(mean.to(flat_params.device)))  # sums in a ring are on the CPU

    def _mean(self, numbers: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        if self.masks != "none":
            return unmasked_mean(numbers, self.masks)
        return sum((w * a.double() for w, a in zip(weights, numbers, strict=True)), torch.zeros(()))

    def stepped(self, ctx: Context, server: Server, update: Params) -> Server:
        """Take the optimizer's step, then average the weights."""
        after = super().stepped(ctx, server, update)
        if not self.ema:
            return after
        own: ServerState = after.own
        steps = own.steps + 1
        b = self.decay(int(steps))
        average = {n: torch.lerp(after.params[n], own.average[n], b) for n in after.params}
        return replace(after, own=replace(own, average=average, steps=steps))

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return the averaged weights, or the last ones without averaging."""
        return Model(server.own.average if self.ema else server.params)

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return a job of weights and batches; its noise is the seed of each step's directions."""
        if not isinstance(message, Evaluate):
            return None
        batches = self.batches(ctx, data)
        rate = torch.tensor(ctx.plan.local.opt.rate(ctx.round), dtype=batches.x.dtype, device=batches.x.device)
        return Job(message.params, batches, rate, (), step_seeds(int(message.seed), len(batches.x)))

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return loss differences [count] float64, or start minus end of local steps on estimates, without a graph."""
        with torch.no_grad():
            if self.level == "epoch":
                return super().compute(plan, job)
            batch, _, seed = step_inputs(job, 0)
            return self.differences(plan, job.start, batch, int(seed))

    def differences(self, plan: Plan, params: Params, batch: Batch, seed: int) -> Tensor:
        """Return the loss differences [count] float64 of a batch (without axis T) at `params`."""
        options = (self.count, self.sigma, self.scheme, self.chunk, self.examples)
        return loss_differences(plan, params, batch, seed, *options)

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return Stein's estimate of the batch's gradient; `noise` is the step's seed."""
        layout = Layout.of(params)
        slopes = slope(self.differences(plan, params, batch, int(noise)), self.sigma, self.scheme)
        estimate = stein(int(noise), slopes, len(layout.pack(params)))
        return {n: part.to(params[n].dtype) for n, part in layout.unpack(estimate).items()}

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode differences or an update: float32, or weighted by N_c / N in a ring and masked (Overflow)."""
        if self.level == "batch":
            return Differences(self._encoded(ctx, me, result, torch.float32))
        layout = Layout.of(result)
        flat = layout.pack(result)
        return Update(layout.unpack(self._encoded(ctx, me, flat, flat.dtype)))

    def _encoded(self, ctx: Context, me: Tree, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        if not bool(numbers.isfinite().all()):
            raise Overflow(f"Client {ctx.party} has losses or weights that are not finite.")
        return mask_numbers(ctx, me, numbers, self.masks) if self.sums else numbers.to(dtype)

    def sketch(self, *exchanges: Exchange, view: View | None = None) -> tuple[int, Tensor]:
        """Return the seed and s [count] float64 with s_k = z_k . gradient, up to O(sigma^2) or O(sigma) (`slope`).

        exchanges: one unmasked batch-level answer, or the masked answers of a cohort, or one masked answer with the
        `view` of colluders.
        """
        return int(exchanges[0].request.seed), slope(self._read(exchanges, view), self.sigma, self.scheme)

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence for an attacker that takes an estimate for the gradient: of each client, or masked cohort.

        Colluders unmask one answer. A client gets no evidence at batch level, where the model moves along random
        directions.
        """
        if self.level == "epoch" and not self.sums:
            return super().evidence(view)
        first, shared = [exchanges[0] for exchanges in answers_by_slot(view).values()], Shared(view.plan)
        if self.sums and not view.threat.colludes:
            units = ((unit, view.state_at(unit[0])) for unit in cohorts(first, view.plan.clients))
            return [cohort_evidence(shared, self._estimate(view, u), u, server) for u, server in units if server]
        models = [e.request.params for e in first]
        return [
            Evidence((e.slot,), self._estimate(view, [e]), shared.at(params), params, channel="estimate")
            for e, params in zip(first, models, strict=True)
        ]

    def _estimate(self, view: View, unit: Sequence[Exchange]) -> Params:
        layout = Layout.of(unit[0].request.params)
        if self.level == "batch":
            seed, slopes = self.sketch(*unit, view=view)
            return layout.unpack(stein(seed, slopes, len(layout.pack(unit[0].request.params))))
        return layout.unpack(self._read(unit, view) / as_gradient(view.plan, unit[0].round))

    def _read(self, unit: Sequence[Exchange], view: View | None) -> Tensor:
        bare = None
        if self.sums and view is not None and len(unit) == 1:
            bare = unmasked_answer(view, unit[0], flat_answer(unit[0].answer), self.masks)
        read = self._mean([flat_answer(e.answer) for e in unit], [1.0]) if bare is None else bare
        return read.to(next(iter(unit[0].request.params.values())).device)  # sums in a ring are on the CPU
